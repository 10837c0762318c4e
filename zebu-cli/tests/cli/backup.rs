//! `backup`: each point is the disk as it was, whatever wrote to the disk, and whenever a backup was
//! killed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::rng::Rng;
use crate::common::server::Server;
use crate::common::{Answer, Lab, Limits};

/// The content of an image, as QEMU reads it.
pub(super) fn content(lab: &Lab, image: &str) -> Vec<u8> {
    lab.qemu_img(&["convert", "-O", "raw", image, "content"])
        .ok("qemu-img convert");
    fs::read(lab.path("content")).expect("content")
}

/// Restores a point and returns the content.
pub(super) fn restored(lab: &Lab, point: u64) -> Vec<u8> {
    let point = point.to_string();
    lab.zebu(&["backup", "restore", "--point", &point, "set", "restored"])
        .ok("restore");
    fs::read(lab.path("restored")).expect("restored")
}

/// The numbers of the points in the manifest.
pub(super) fn points(lab: &Lab) -> Vec<u64> {
    let answer = lab
        .zebu(&["backup", "list", "--output=json", "set"])
        .ok("list");
    let list: serde_json::Value = serde_json::from_str(&answer.out).expect("JSON");
    let numbers = list.as_array().expect("a list").iter();
    numbers
        .map(|point| point["number"].as_u64().expect("a number"))
        .collect()
}

/// The bitmap of the last point, by the manifest.
fn bitmap(lab: &Lab) -> Option<String> {
    let answer = lab
        .zebu(&["backup", "list", "--output=json", "set"])
        .ok("list");
    let list: serde_json::Value = serde_json::from_str(&answer.out).expect("JSON");
    let last = list.as_array().expect("a list").last().expect("a point");
    last["disks"]["disk"]["bitmap"].as_str().map(str::to_owned)
}

/// Fails unless a command failed with this text in its message.
fn refused(answer: &Answer, text: &str) {
    assert_eq!(answer.status, 1, "{answer:?}");
    assert!(answer.err.contains(text), "{text}: {answer:?}");
}

pub(super) fn backup(lab: &Lab, more: &[&str]) {
    let mut args = vec!["backup", "disk.qcow2", "--to", "set"];
    args.extend(more);
    lab.zebu(&args).ok("backup");
}

pub(super) fn zebu_io(lab: &Lab, commands: &[&str]) {
    let mut args = vec!["io", "-d", "unmap"];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push("disk.qcow2");
    lab.zebu(&args).ok("zebu io");
}

fn qemu_io(lab: &Lab, commands: &[&str]) {
    let mut args = vec!["-d", "unmap"];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push("disk.qcow2");
    lab.qemu_io(&args).ok("qemu-io");
}

/// Both programs find no error in an image.
fn assert_clean(lab: &Lab, image: &str) {
    lab.zebu(&["check", "-q", image]).ok("zebu check");
    lab.qemu_img(&["check", "-q", image]).ok("qemu-img check");
}

#[test]
fn points_are_the_disk_as_it_was() {
    for options in [
        "cluster_size=64k",
        "cluster_size=4k",
        "extended_l2=on,cluster_size=128k",
        "data_file=disk.data,data_file_raw=on",
        "compat=0.10",
    ] {
        let lab = Lab::new();
        lab.qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            options,
            "disk.qcow2",
            "32M",
        ])
        .ok(options);
        let mut saved = BTreeMap::new();
        zebu_io(&lab, &["write -P 1 0 3M", "write -P 2 9M 100k"]);
        backup(&lab, &[]);
        saved.insert(1, content(&lab, "disk.qcow2"));
        qemu_io(
            &lab,
            &["write -P 3 1M 8k", "write -z 2M 512k", "discard 9M 64k"],
        );
        zebu_io(
            &lab,
            &["write -P 4 20M 4k", "write -z 4k 1k", "discard 2560k 64k"],
        );
        backup(&lab, &["--verify"]);
        saved.insert(2, content(&lab, "disk.qcow2"));
        if !options.starts_with("data_file") {
            lab.zebu(&["snapshot", "-c", "s", "disk.qcow2"])
                .ok("snapshot");
            zebu_io(&lab, &["write -P 5 0 1M"]);
            lab.zebu(&["snapshot", "-a", "s", "disk.qcow2"])
                .ok("snapshot -a");
            lab.zebu(&["snapshot", "-d", "s", "disk.qcow2"])
                .ok("snapshot -d");
        }
        lab.zebu(&["resize", "-q", "disk.qcow2", "40M"])
            .ok("resize");
        zebu_io(&lab, &["write -P 6 39M 1M"]);
        backup(&lab, &["-c"]);
        saved.insert(3, content(&lab, "disk.qcow2"));
        lab.zebu(&["resize", "-q", "--shrink", "disk.qcow2", "24M"])
            .ok("shrink");
        qemu_io(&lab, &["write -P 7 100k 3k"]);
        backup(&lab, &["-c=zlib"]);
        saved.insert(4, content(&lab, "disk.qcow2"));
        assert_clean(&lab, "disk.qcow2");
        for (point, content) in &saved {
            assert!(
                restored(&lab, *point) == *content,
                "{options}: point {point}"
            );
            assert_clean(&lab, &format!("set/disk.{point}.qcow2"));
        }
        lab.zebu(&["backup", "verify", "--content", "set"])
            .ok("verify");
        // An increment has little more than what has changed.
        let length = |n: u64| {
            fs::metadata(lab.path(&format!("set/disk.{n}.qcow2")))
                .unwrap()
                .len()
        };
        assert!(length(2) < 3 << 20, "{options}: {}", length(2));
        lab.zebu(&["backup", "keep", "set", "2"]).ok("keep");
        assert_eq!(points(&lab), [3, 4]);
        for point in [3, 4] {
            assert!(
                restored(&lab, point) == saved[&point],
                "{options}: kept point {point}"
            );
        }
        assert_eq!(
            fs::read_dir(lab.path("set")).unwrap().count(),
            4,
            "{options}"
        );
        lab.zebu(&["backup", "verify", "--content", "set"])
            .ok("verify");
    }
}

#[test]
fn disks_without_bitmaps_are_compared() {
    let lab = Lab::new();
    lab.make("raw disk 20000000");
    fs::copy(lab.path("disk"), lab.path("disk.qcow2")).unwrap();
    let args = ["backup", "-f", "raw", "disk.qcow2", "--to", "set"];
    lab.zebu(&args).ok("full");
    let first = fs::read(lab.path("disk.qcow2")).unwrap();
    let mut second = first.clone();
    second[5_000_000] ^= 1;
    fs::write(lab.path("disk.qcow2"), &second).unwrap();
    lab.zebu(&args).ok("increment");
    let whole = |mut bytes: Vec<u8>| {
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    };
    assert!(restored(&lab, 1) == whole(first));
    assert!(restored(&lab, 2) == whole(second));
    let increment = fs::metadata(lab.path("set/disk.2.qcow2")).unwrap().len();
    assert!(increment < 1 << 20, "{increment}");
}

#[test]
fn an_export_is_backed_up_by_its_bitmap() {
    let lab = Lab::new();
    lab.make(
        "create disk.qcow2 16M; io disk.qcow2: write -P 1 1M 4M; img bitmap --add disk.qcow2 b",
    );
    let take = |serve: &[&str], more: &[&str]| {
        let mut options = vec!["-t", "-r", "-f", "qcow2"];
        options.extend(serve);
        options.push("disk.qcow2");
        let mut server = Server::start(&lab, &options);
        let uri = server.uri("");
        let mut args = vec!["backup", "-f", "raw", &uri, "--name", "disk", "--to", "set"];
        args.extend(more);
        let answer = lab.zebu(&args);
        server.stop();
        answer
    };
    take(&[], &[]).ok("full");
    let first = content(&lab, "disk.qcow2");
    qemu_io(&lab, &["write -P 2 3M 64k", "write -z 2M 64k"]);
    zebu_io(&lab, &["write -P 3 9M 4k"]);
    lab.qemu_img(&["bitmap", "--disable", "disk.qcow2", "b"])
        .ok("disable");
    take(&["-B", "b"], &["-B", "b"]).ok("increment");
    assert!(restored(&lab, 1) == first);
    assert!(restored(&lab, 2) == content(&lab, "disk.qcow2"));
    let increment = fs::metadata(lab.path("set/disk.2.qcow2")).unwrap().len();
    assert!(increment < 1 << 20, "{increment}");
    refused(&take(&["-B", "b"], &["-B", "other"]), "not found");
    take(&[], &["--verify"]).ok("compared");
    assert!(restored(&lab, 3) == content(&lab, "disk.qcow2"));
}

#[test]
fn a_bitmap_that_is_missing_or_inconsistent_is_not_trusted() {
    let lab = Lab::new();
    lab.make("create disk.qcow2 16M");
    backup(&lab, &[]);
    let bitmap = bitmap(&lab).expect("a bitmap");
    // Removed and made again, it lacks what was written before.
    zebu_io(&lab, &["write -P 1 1M 64k"]);
    lab.qemu_img(&["bitmap", "--remove", "disk.qcow2", &bitmap])
        .ok("remove");
    zebu_io(&lab, &["write -P 2 3M 64k"]);
    backup(&lab, &[]);
    assert!(restored(&lab, 2) == content(&lab, "disk.qcow2"));
    // A writer that was killed.
    let mut held = lab.held_by_qemu(&["disk.qcow2"]);
    held.command("write -P 3 5M 64k");
    held.command("flush");
    drop(held);
    backup(&lab, &[]);
    assert!(restored(&lab, 3) == content(&lab, "disk.qcow2"));
    // One that does not record.
    let bitmap = self::bitmap(&lab).expect("a bitmap");
    lab.zebu(&["bitmap", "--disable", "disk.qcow2", &bitmap])
        .ok("disable");
    zebu_io(&lab, &["write -P 4 7M 64k"]);
    backup(&lab, &[]);
    assert!(restored(&lab, 4) == content(&lab, "disk.qcow2"));
    assert_clean(&lab, "disk.qcow2");
}

#[test]
fn images_that_cannot_have_a_bitmap_are_backed_up() {
    let lab = Lab::new();
    lab.make("create disk.qcow2 16M; img bitmap --add disk.qcow2 b; io disk.qcow2: write 0 64k");
    // The directory of bitmaps has one entry, not four.
    let bytes = fs::read(lab.path("disk.qcow2")).unwrap();
    let kind = 0x2385_2875u32.to_be_bytes();
    let at = bytes.windows(4).position(|word| word == kind);
    lab.patch("disk.qcow2", at.expect("an extension") as u64 + 11, &[4]);
    backup(&lab, &[]);
    assert_eq!(bitmap(&lab), None);
    // The first write drops the directory, so the next backup adds a bitmap.
    zebu_io(&lab, &["write -P 1 1M 64k"]);
    backup(&lab, &[]);
    assert!(bitmap(&lab).is_some());
    assert!(restored(&lab, 2) == content(&lab, "disk.qcow2"));
    lab.make("create empty.qcow2 0");
    for _ in 0..2 {
        lab.zebu(&["backup", "empty.qcow2", "--to", "other"])
            .ok("an empty disk");
    }
}

#[test]
fn disks_whose_names_were_exchanged_are_compared() {
    let lab = Lab::new();
    lab.make(
        "create x.qcow2 4M; create y.qcow2 4M; io x.qcow2: write -P 1 0 1M; \
         io y.qcow2: write -P 2 0 2M",
    );
    for [one, two] in [["x", "y"], ["y", "x"]] {
        let files = [one, two].map(|disk| format!("{disk}.qcow2"));
        let names = ["--name", "one", "--name", "two", "--to", "set"];
        let args = ["backup", &*files[0], &*files[1]].into_iter().chain(names);
        lab.zebu(&args.collect::<Vec<_>>()).ok("backup");
        for (name, file) in ["one", "two"].iter().zip(&files) {
            lab.zebu(&["backup", "restore", "--disk", name, "set", "restored"])
                .ok("restore");
            assert!(fs::read(lab.path("restored")).unwrap() == content(&lab, file));
        }
    }
}

/// A backup that has added its bitmap and fails: there is no second disk.
fn fail_with_bitmap(lab: &Lab, set: &str) {
    let args = ["backup", "disk.qcow2", "nothing.qcow2", "--to", set];
    refused(&lab.zebu(&args), "No such file");
}

/// The next increment is taken from the bitmap of the last point only, whatever else has backed up
/// the image since: copies of the set, and backups that did not end.
#[test]
fn a_bitmap_of_another_point_of_the_same_number_is_not_trusted() {
    let lab = Lab::new();
    lab.make("create disk.qcow2 16M");
    backup(&lab, &[]);
    // Of two copies of the set each takes a second point.
    copy_set(&lab.path("set"), &lab.path("other"));
    let mut random = Rng::new(24);
    for step in 0..12u64 {
        let (at, pattern) = (random.below(255) << 16, step + 1);
        zebu_io(&lab, &[&format!("write -P {pattern} {at} 64k")]);
        let set = ["set", "other"][random.below(2) as usize];
        if random.below(4) == 0 {
            fail_with_bitmap(&lab, set);
            continue;
        }
        lab.zebu(&["backup", "disk.qcow2", "--to", set])
            .ok("backup");
        lab.zebu(&["backup", "restore", set, "restored"])
            .ok("restore");
        let restored = fs::read(lab.path("restored")).unwrap();
        assert!(restored == content(&lab, "disk.qcow2"), "step {step}");
    }
}

/// A backup fails, and the next one is taken of another image under the same name. It has the number
/// of the failed one, whose bitmap the first image still has.
#[test]
fn a_bitmap_of_a_failed_backup_is_not_trusted() {
    let lab = Lab::new();
    lab.make("create disk.qcow2 16M");
    backup(&lab, &[]);
    zebu_io(&lab, &["write -P 1 1M 64k"]);
    fs::copy(lab.path("disk.qcow2"), lab.path("y.qcow2")).unwrap();
    zebu_io(&lab, &["write -P 2 2M 64k"]);
    fail_with_bitmap(&lab, "set");
    let take = |image: &str| lab.zebu(&["backup", image, "--name", "disk", "--to", "set"]);
    take("y.qcow2").ok("another image");
    take("disk.qcow2").ok("the first image");
    assert!(restored(&lab, 3) == content(&lab, "disk.qcow2"));
}

#[test]
fn no_program_writes_to_a_disk_that_is_backed_up() {
    let lab = Lab::new();
    lab.make("raw a.raw 8388608; create b.qcow2 8M; create -b a.raw -F raw c.qcow2 8M");
    let args = ["backup", "-f", "raw", "a.raw", "--to", "raw"];
    let held = lab.held_by_qemu(&["-f", "raw", "a.raw"]);
    refused(&lab.zebu(&args), "lock");
    drop(held);
    lab.zebu(&args).ok("a raw image");
    // Several disks are one point: the last one is locked before the first is read.
    let slow = ["-r", "2M", "c.qcow2", "b.qcow2", "--to", "set"];
    let mut child = lab.start_zebu(&[&["backup"], &slow[..]].concat());
    crate::common::server::wait_until("a copy", || lab.path("set/c.1.qcow2.part").exists());
    refused(&lab.zebu_io(&["-c", "write 0 4k", "b.qcow2"]), "lock");
    assert!(child.wait().expect("wait").success());
    lab.zebu_io(&["-c", "write 0 4k", "b.qcow2"]).ok("write");
}

#[test]
fn a_merge_without_its_base_is_not_finished() {
    let lab = Lab::new();
    lab.make("create disk.qcow2 8M; io disk.qcow2: write -P 1 0 1M");
    backup(&lab, &[]);
    zebu_io(&lab, &["write -P 2 2M 1M"]);
    backup(&lab, &[]);
    let path = lab.path("set/manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    manifest["points"].as_array_mut().unwrap().remove(0);
    manifest["merging"] = serde_json::json!([
        { "disk": "disk", "base": "disk.1.qcow2", "top": "disk.2.qcow2" }
    ]);
    fs::write(&path, manifest.to_string()).unwrap();
    let base = lab.path("set/disk.1.qcow2");
    fs::rename(&base, lab.path("kept")).unwrap();
    refused(
        &lab.zebu(&["backup", "keep", "set", "1"]),
        "has the backing file",
    );
    fs::rename(lab.path("kept"), &base).unwrap();
    lab.zebu(&["backup", "keep", "set", "1"]).ok("keep");
    assert!(restored(&lab, 2) == content(&lab, "disk.qcow2"));
}

#[test]
fn points_are_kept_for_each_disk() {
    let lab = Lab::new();
    lab.make("create a.qcow2 8M; create b.qcow2 8M; create c.qcow2 8M");
    let take = |more: &[&str]| {
        let args = [&["backup", "--to", "set"], more].concat();
        lab.zebu(&args).ok("backup");
    };
    take(&["b.qcow2"]);
    for _ in 0..3 {
        lab.zebu_io(&["-c", "write -P 1 1M 64k", "a.qcow2"])
            .ok("write");
        take(&["a.qcow2", "c.qcow2", "--keep", "2"]);
    }
    take(&["b.qcow2"]);
    // Only the disks that are backed up lose points.
    take(&["a.qcow2", "--keep", "1"]);
    let has = |disk: &str| {
        let list = lab.zebu(&["backup", "list", "set"]).ok("list").out;
        let of = |line: &&str| line.split_whitespace().nth(3) == Some(disk);
        list.lines().filter(of).count()
    };
    assert_eq!(["a", "b", "c"].map(has), [1, 2, 2]);
    lab.zebu(&["backup", "keep", "set", "1"]).ok("keep");
    assert_eq!(["a", "b", "c"].map(has), [1, 1, 1]);
    for (disk, point) in [("a", "6"), ("b", "5"), ("c", "4")] {
        let of = ["--disk", disk, "--point", point, "set", "restored"];
        lab.zebu(&[&["backup", "restore"], &of[..]].concat())
            .ok("restore");
        let image = format!("{disk}.qcow2");
        assert!(fs::read(lab.path("restored")).unwrap() == content(&lab, &image));
    }
    lab.zebu(&["backup", "verify", "set"]).ok("verify");
}

#[test]
fn a_disk_that_was_made_larger_is_backed_up() {
    let lab = Lab::new();
    lab.make("create base.qcow2 16M; io base.qcow2: write -P 1 0 16M");
    lab.make("create -b base.qcow2 -F qcow2 disk.qcow2 4M; io disk.qcow2: write -P 2 1M 64k");
    for (program, size) in [
        ("qemu", "9M"),
        ("zebu", "11M"),
        ("qemu", "15M"),
        ("zebu", "6M"),
    ] {
        backup(&lab, &[]);
        let args = [
            "resize",
            "-q",
            "-f",
            "qcow2",
            "--shrink",
            "disk.qcow2",
            size,
        ];
        match program {
            "zebu" => lab.zebu(&args).ok(size),
            _ => lab.qemu_img(&args).ok(size),
        };
        backup(&lab, &[]);
        let last = *points(&lab).last().expect("a point");
        assert!(
            restored(&lab, last) == content(&lab, "disk.qcow2"),
            "{size}"
        );
    }
}

#[test]
fn sources_that_are_only_read_are_compared() {
    let lab = Lab::new();
    lab.make("create disk.qcow2 8M");
    let options = "driver=qcow2,read-only=on,file.filename=disk.qcow2";
    for pattern in ["1", "2"] {
        let take = [
            "backup",
            "--name",
            "disk",
            "--to",
            "set",
            "--image-opts",
            options,
        ];
        lab.zebu(&take).ok("backup");
        assert_eq!(bitmap(&lab), None);
        let last = *points(&lab).last().expect("a point");
        assert!(restored(&lab, last) == content(&lab, "disk.qcow2"));
        zebu_io(&lab, &[&format!("write -P {pattern} 1M 64k")]);
    }
    let shared = ["backup", "-U", "disk.qcow2", "--to", "set"];
    refused(&lab.zebu(&shared), "--force-share");
    refused(&lab.zebu(&["backup", "keep", "set"]), "Expecting <N>");
    let help = lab.zebu(&["help", "backup"]).ok("help").out;
    assert!(help.contains("--keep"), "{help}");
}

/// The files of a set are neither backed up, which would add bitmaps to them, nor overwritten, by
/// whatever name.
#[test]
fn files_of_a_set_are_neither_sources_nor_targets() {
    let lab = Lab::new();
    lab.make("create disk.qcow2 8M");
    backup(&lab, &[]);
    backup(&lab, &[]);
    copy_set(&lab.path("set"), &lab.path("old"));
    let own = lab.path("set/disk.2.qcow2");
    std::os::unix::fs::symlink(&own, lab.path("link")).unwrap();
    fs::hard_link(&own, lab.path("same")).unwrap();
    let json = json_name("set/disk.2.qcow2");
    let images = ["set/disk.2.qcow2", "./set/../link", "file:link", &json];
    for set in ["set", "other"] {
        for image in images {
            let args = ["backup", image, "--name", "x", "--to", set];
            refused(&lab.zebu(&args), "in the directory of the backups");
        }
    }
    let args = ["backup", "same", "--name", "x", "--to", "set"];
    refused(&lab.zebu(&args), "in the directory of the backups");
    for target in images.into_iter().chain([
        "same",
        "set/manifest.json",
        "set/lock",
        "set/new",
        "set/disk.3.qcow2",
    ]) {
        for more in [&[][..], &["-n"], &["-O", "qcow2"]] {
            let args = [&["backup", "restore"], more, &["set", target]].concat();
            refused(&lab.zebu(&args), "in the directory of the backups");
        }
    }
    for entry in fs::read_dir(lab.path("old")).unwrap() {
        let name = entry.expect("an entry").file_name();
        let bytes = |set: &str| fs::read(lab.path(set).join(&name)).expect("a file");
        assert!(bytes("set") == bytes("old"), "{name:?}");
    }
}

fn json_name(file: &str) -> String {
    format!(
        "json:{{\"driver\":\"qcow2\",\"file\":{{\"driver\":\"file\",\"filename\":\"{file}\"}}}}"
    )
}

/// Damages a set that has four points of a disk in some way: what was done, and whether it can be
/// seen without reading all of a file.
fn damage(lab: &Lab, random: &mut Rng) -> (String, bool) {
    let path = lab.path("set/manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (one, two) = (random.below(4) as usize, random.below(4) as usize);
    let file = |nth: usize| format!("set/disk.{}.qcow2", nth + 1);
    let (this, other) = (file(one), file(two));
    let length = fs::metadata(lab.path(&this)).unwrap().len();
    let points = manifest["points"].as_array_mut().expect("points");
    let entry = &mut points[one]["disks"]["disk"];
    let what = match random.below(12) {
        0 => {
            fs::remove_file(lab.path(&this)).unwrap();
            format!("{this} removed")
        }
        1 => {
            let left = random.below(length);
            let file = fs::File::options().write(true).open(lab.path(&this));
            file.unwrap().set_len(left).unwrap();
            format!("{this} cut to {left}")
        }
        2 => {
            let mut bytes = fs::read(lab.path(&this)).unwrap();
            let at = random.below(length) as usize;
            bytes[at] ^= 1 << random.below(8);
            fs::write(lab.path(&this), bytes).unwrap();
            return (format!("{this} has another bit at {at}"), false);
        }
        3 if one != two => {
            fs::copy(lab.path(&other), lab.path(&this)).unwrap();
            format!("{this} is a copy of {other}")
        }
        4 | 5 => {
            let evil = lab.path("evil.qcow2").display().to_string();
            let name = format!("disk.{}.qcow2", two + 1);
            let backing = random.pick(&[&evil[..], &name[..], ""]);
            let format: &[&str] = if backing.is_empty() {
                &[]
            } else {
                &["-F", "qcow2"]
            };
            let args = ["rebase", "-u", "-f", "qcow2", "-b", backing, &this];
            lab.qemu_img(&[&args[..], format].concat()).ok("rebase");
            // It may be what it was, but for the length of the file.
            entry["length"] = fs::metadata(lab.path(&this)).unwrap().len().into();
            format!("{this} has the backing file '{backing}'")
        }
        6 => {
            points.remove(one);
            format!("no point {}", one + 1)
        }
        7 => {
            let kind = random.pick(&["full", "increment"]);
            entry["kind"] = kind.into();
            format!("point {} is {kind}", one + 1)
        }
        8 => {
            let key = random.pick(&["size", "length", "changed"]);
            entry[key] = (random.below(64) << 16).into();
            format!("{key} of point {}: {}", one + 1, entry[key])
        }
        9 => {
            entry["sha256"] = "0".repeat(64).into();
            format!("hash of point {}", one + 1)
        }
        10 => {
            let base = one.saturating_sub(1);
            points.drain(..one);
            manifest["merging"] = serde_json::json!([
                { "disk": "disk", "base": &file(base)[4..], "top": &this[4..] }
            ]);
            format!("merging {} into {}", one + 1, base + 1)
        }
        _ => {
            for key in ["sha256", "length", "size"] {
                let value = points[two]["disks"]["disk"][key].clone();
                points[one]["disks"]["disk"][key] = value;
            }
            format!("point {} has the hash of point {}", one + 1, two + 1)
        }
    };
    fs::write(&path, manifest.to_string()).unwrap();
    (what, true)
}

/// Whatever happened to a set, no command takes a wrong content for right, and a command that fails
/// leaves what is good. A full backup begins anew.
#[test]
fn a_damaged_set_loses_nothing_more() {
    let lab = Lab::new();
    let mut saved = BTreeMap::new();
    lab.make("create disk.qcow2 8M; create evil.qcow2 8M; io evil.qcow2: write -P 66 0 8M");
    for point in 1..5 {
        zebu_io(
            &lab,
            &[&format!("write -P {point} {point}M 2M"), "write -z 0 64k"],
        );
        backup(&lab, &[]);
        saved.insert(point, content(&lab, "disk.qcow2"));
    }
    let start = Lab::new();
    copy_state(&lab.path(""), &start.path(""));
    // None: refused. Else, whether it has the content.
    let restore = |point: u64| {
        let number = point.to_string();
        let args = ["backup", "restore", "--point", &number, "set", "restored"];
        let answer = lab.zebu(&args);
        assert!(answer.status <= 1, "{answer:?}");
        (answer.status == 0).then(|| fs::read(lab.path("restored")).unwrap() == saved[&point])
    };
    let good = || {
        let all = saved.keys().copied();
        all.filter(|point| restore(*point) == Some(true))
            .collect::<Vec<_>>()
    };
    let cases = crate::common::env_number("ZEBU_DAMAGED_SETS").unwrap_or(8);
    for seed in 0..cases {
        copy_state(&start.path(""), &lab.path(""));
        let (what, is_seen) = damage(&lab, &mut Rng::new(seed));
        let what = format!("seed {seed}: {what}");
        let check = |after: &str| {
            let verified = lab.zebu(&["backup", "verify", "set"]);
            for point in saved.keys() {
                let restored = restore(*point);
                assert!(
                    restored != Some(false) || !is_seen && verified.status == 2,
                    "{what}: {after}: point {point} has another content, verify: {verified:?}"
                );
            }
            if verified.status == 0 {
                for point in points(&lab) {
                    let is_good = point > 4 || restore(point) == Some(true);
                    assert!(is_good, "{what}: {after}: point {point} is not verified");
                }
            }
        };
        check("before");
        let before = good();
        let list = lab.zebu(&["backup", "list", "set"]);
        let kept = lab.zebu(&["backup", "keep", "set", "2"]);
        assert!(kept.status <= 1, "{what}: {kept:?}");
        check("kept");
        let after = good();
        let is_wanted = |point: &u64| {
            let last = points(&lab);
            kept.status == 1 || last.iter().rev().take(2).any(|other| other == point)
        };
        for point in before.iter().filter(|point| is_wanted(point)) {
            assert!(after.contains(point), "{what}: {kept:?}: {point} is lost");
        }
        let taken = lab.zebu(&["backup", "disk.qcow2", "--to", "set"]);
        assert!(taken.status <= 1, "{what}: {taken:?}");
        check("taken");
        if taken.status == 0 {
            let last = *points(&lab).last().expect("a point");
            let is_right = restored(&lab, last) == saved[&4];
            assert!(is_right || !is_seen, "{what}: an increment");
        }
        for point in &after {
            assert!(restore(*point) == Some(true), "{what}: {taken:?}: {point}");
        }
        if list.status == 1 {
            continue;
        }
        backup(&lab, &["--full"]);
        let last = *points(&lab).last().expect("a point");
        assert!(restored(&lab, last) == saved[&4], "{what}: a full backup");
        lab.zebu(&["backup", "keep", "set", "1"]).ok(&what);
        assert_eq!(points(&lab), [last], "{what}");
        let verified = lab.zebu(&["backup", "verify", "set"]);
        let is_left_over = |line: &str| line.contains("is not in the manifest");
        assert!(
            verified.err.lines().all(is_left_over),
            "{what}: {verified:?}"
        );
    }
    println!("cases: {cases} damaged sets");
}

#[test]
fn several_disks_are_one_point() {
    let lab = Lab::new();
    lab.make("create a.qcow2 8M");
    lab.make("create b.qcow2 4M");
    let take = ["backup", "a.qcow2", "b.qcow2", "--to", "set"];
    lab.zebu(&take).ok("full");
    lab.zebu(&["io", "-c", "write -P 1 1M 64k", "a.qcow2"])
        .ok("a");
    lab.zebu(&["io", "-c", "write -P 2 2M 64k", "b.qcow2"])
        .ok("b");
    lab.zebu(&take).ok("increment");
    assert_eq!(points(&lab), [1, 2]);
    for disk in ["a", "b"] {
        lab.zebu(&["backup", "restore", "--disk", disk, "set", "restored"])
            .ok("restore");
        let image = format!("{disk}.qcow2");
        assert!(fs::read(lab.path("restored")).unwrap() == content(&lab, &image));
    }
    refused(
        &lab.zebu(&["backup", "restore", "set", "restored"]),
        "several disks",
    );
}

#[test]
fn wrong_input_loses_nothing() {
    let lab = Lab::new();
    lab.make("create disk.qcow2 8M");
    backup(&lab, &[]);
    zebu_io(&lab, &["write -P 1 1M 64k"]);
    backup(&lab, &[]);
    zebu_io(&lab, &["write -P 2 2M 64k"]);
    let manifest = fs::read_to_string(lab.path("set/manifest.json")).unwrap();
    let take = ["backup", "disk.qcow2", "--to", "set"];
    let fails = |args: &[&str], text: &str| {
        refused(&lab.zebu(args), text);
        assert!(lab.path("set/disk.1.qcow2").exists() && lab.path("set/disk.2.qcow2").exists());
    };
    let edits: [(&str, &str, &str); 6] = [
        ("\"version\": 2", "\"version\": 1", "version 1"),
        ("\"number\": 2", "\"number\": 1", "not in order"),
        ("disk.1.qcow2", "../disk.qcow2", "wrong file name"),
        (
            "\"kind\": \"full\"",
            "\"kind\": \"increment\"",
            "lacks the full backup",
        ),
        ("\"points\"", "\"point\"", "not valid"),
        ("{", "", "not valid"),
    ];
    for (from, to, text) in edits {
        fs::write(
            lab.path("set/manifest.json"),
            manifest.replacen(from, to, 1),
        )
        .unwrap();
        fails(&take, text);
        fails(&["backup", "restore", "set", "restored"], text);
        fails(&["backup", "keep", "set", "1"], text);
    }
    fs::remove_file(lab.path("set/manifest.json")).unwrap();
    fails(&take, "there is no manifest, but other files");
    fs::write(lab.path("set/manifest.json"), &manifest).unwrap();
    // A file of the chain is missing, or was cut off.
    fs::rename(lab.path("set/disk.1.qcow2"), lab.path("kept")).unwrap();
    refused(&lab.zebu(&take), "No such file");
    refused(
        &lab.zebu(&["backup", "restore", "set", "restored"]),
        "No such file",
    );
    let bytes = fs::read(lab.path("kept")).unwrap();
    fs::write(lab.path("set/disk.1.qcow2"), &bytes[..bytes.len() - 1]).unwrap();
    fails(&take, "bytes, not");
    fs::write(lab.path("set/disk.1.qcow2"), &bytes).unwrap();
    fails(&["backup", "nothing.qcow2", "--to", "set"], "No such file");
    fails(
        &["backup", "disk.qcow2", "disk.qcow2", "--to", "set"],
        "two disks",
    );
    fails(&["backup", "disk.qcow2"], "Expecting the directory");
    fails(
        &["backup", "--name", "../x", "disk.qcow2", "--to", "set"],
        "cannot be the name",
    );
    fails(
        &["backup", "restore", "--point", "9", "set", "restored"],
        "there is no point 9",
    );
    fails(
        &["backup", "restore", "--disk", "x", "set", "restored"],
        "no disk 'x'",
    );
    fails(&["backup", "keep", "set", "0"], "at least one point");
    // No point follows the largest number.
    let largest = format!("set/other.{}.qcow2", u64::MAX);
    fs::write(lab.path(&largest), "").unwrap();
    fails(&take, "no point can follow point 18446744073709551615");
    fs::remove_file(lab.path(&largest)).unwrap();
    // An image that another program writes.
    let held = lab.held_by_qemu(&["disk.qcow2"]);
    let answer = lab.zebu(&take);
    assert_eq!(answer.status, 1);
    assert!(answer.err.contains("lock"), "{}", answer.err);
    drop(held);
    // Damage is found.
    let mut damaged = bytes.clone();
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    fs::write(lab.path("set/disk.1.qcow2"), &damaged).unwrap();
    let answer = lab.zebu(&["backup", "verify", "set"]);
    assert_eq!(answer.status, 2, "{answer:?}");
    assert!(answer.err.contains("SHA-256 differs"), "{}", answer.err);
    fs::write(lab.path("set/disk.1.qcow2"), &bytes).unwrap();
    lab.zebu(&take).ok("after all that");
    assert!(restored(&lab, 3) == content(&lab, "disk.qcow2"));
}

/// A library that kills the program at the n-th call of the C library that changes files or enters
/// io_uring, and says at the end how many there were.
const KILLER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;
static void count(void) {
    const char *limit = getenv("KILL_AT");
    if (limit && atomic_fetch_add(&calls, 1) + 1 == atol(limit))
        kill(getpid(), SIGKILL);
}
__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("KILL_COUNT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "%ld", atomic_load(&calls));
        fclose(file);
    }
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
int rename(const char *a, const char *b) { count(); return REAL(rename)(a, b); }
int unlink(const char *a) { count(); return REAL(unlink)(a); }
int fsync(int fd) { count(); return REAL(fsync)(fd); }
int fdatasync(int fd) { count(); return REAL(fdatasync)(fd); }
ssize_t write(int fd, const void *b, size_t n) { count(); return REAL(write)(fd, b, n); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { count(); return REAL(pwrite64)(fd, b, n, o); }
int ftruncate64(int fd, off64_t n) { count(); return REAL(ftruncate64)(fd, n); }
long syscall(long n, ...) {
    long a[6];
    va_list list;
    va_start(list, n);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    count();
    return REAL(syscall)(n, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"#;

fn build_killer(lab: &Lab) -> PathBuf {
    let (source, library) = (lab.path("killer.c"), lab.path("killer.so"));
    fs::write(&source, KILLER).unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-w", "-o"])
        .args([&library, &source])
        .arg("-ldl")
        .status();
    assert!(status.expect("cc").success());
    library
}

/// Copies the disk and the set of one place to another.
pub(super) fn copy_state(from: &Path, to: &Path) {
    fs::copy(from.join("disk.qcow2"), to.join("disk.qcow2")).unwrap();
    copy_set(&from.join("set"), &to.join("set"));
}

/// Makes a directory a copy of another one.
fn copy_set(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name();
        fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}

/// A backup that is killed at any call leaves all points, and the next one is right.
#[test]
fn a_backup_may_be_killed_at_any_call() {
    let lab = Lab::new();
    let killer = build_killer(&lab);
    let mut saved = BTreeMap::new();
    lab.make("create disk.qcow2 8M");
    zebu_io(&lab, &["write -P 1 0 300k"]);
    backup(&lab, &[]);
    saved.insert(1, content(&lab, "disk.qcow2"));
    zebu_io(&lab, &["write -P 2 200k 300k"]);
    backup(&lab, &[]);
    saved.insert(2, content(&lab, "disk.qcow2"));
    zebu_io(&lab, &["write -P 3 400k 300k", "write -z 0 64k"]);
    saved.insert(3, content(&lab, "disk.qcow2"));
    let start = Lab::new();
    copy_state(&lab.path(""), &start.path(""));
    // With LD_PRELOAD only for zebu itself.
    let run = |at: u64| {
        let script = format!(
            "KILL_AT={at} KILL_COUNT={} LD_PRELOAD={} exec \"$0\" \"$@\"",
            lab.path("count").display(),
            killer.display()
        );
        let zebu = env!("CARGO_BIN_EXE_zebu");
        let mut args = vec!["-c", &*script, zebu];
        args.extend(["backup", "disk.qcow2", "--to", "set", "--keep", "2"]);
        lab.run(Path::new("/bin/sh"), &args, b"", &Limits::default())
    };
    assert_eq!(run(u64::MAX >> 1).status, 0);
    let count = fs::read_to_string(lab.path("count")).expect("a count");
    let calls: u64 = count.parse().expect("a number");
    assert!(calls > 50, "{calls}");
    let kills = crate::common::env_number("ZEBU_KILLS")
        .unwrap_or(20)
        .min(calls);
    for nth in 0..kills {
        let at = 1 + nth * calls / kills;
        copy_state(&start.path(""), &lab.path(""));
        run(at);
        for point in points(&lab) {
            assert!(
                restored(&lab, point) == saved[&point],
                "call {at}: point {point}"
            );
        }
        // More is written, then the next backup is taken.
        zebu_io(&lab, &["write -P 4 3M 100k", "write -P 5 400k 4k"]);
        assert_clean_but_leaks(&lab, at);
        backup(&lab, &[]);
        let points = points(&lab);
        let last = *points.last().expect("a point");
        assert!(
            restored(&lab, last) == content(&lab, "disk.qcow2"),
            "call {at}"
        );
        for point in points
            .iter()
            .filter(|point| saved.contains_key(point) && **point != last)
        {
            assert!(
                restored(&lab, *point) == saved[point],
                "call {at}: point {point} later"
            );
        }
        // Nothing is left over.
        lab.zebu(&["backup", "verify", "set"])
            .ok(&format!("call {at}"));
        for entry in fs::read_dir(lab.path("set")).unwrap() {
            let name = entry.expect("an entry").file_name();
            assert!(!name.to_string_lossy().ends_with(".part"), "call {at}");
        }
    }
    println!("cases: {kills} kills");
}

fn assert_clean_but_leaks(lab: &Lab, at: u64) {
    let check = lab.qemu_img(&["check", "-q", "disk.qcow2"]);
    assert!(matches!(check.status, 0 | 3), "call {at}: {check:?}");
}
