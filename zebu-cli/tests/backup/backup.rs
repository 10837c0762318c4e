//! `backup`: each point is the disk as it was, whatever wrote to the disk.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::{Answer, Lab};

/// The content of an image, as QEMU reads it.
pub(super) fn content(lab: &Lab, image: &str) -> Vec<u8> {
    lab.qemu_img(&["convert", "-O", "raw", image, "content"])
        .ok("qemu-img convert");
    fs::read(lab.path("content")).expect("content")
}

/// Restores a point and returns the content.
pub(super) fn restored(lab: &Lab, point: u64) -> Vec<u8> {
    let point = point.to_string();
    lab.zebu(&[
        "backup",
        "restore",
        "--overwrite",
        "--point",
        &point,
        "set",
        "restored",
    ])
    .ok("restore");
    fs::read(lab.path("restored")).expect("restored")
}

/// The numbers of the points in the manifest; none if there is no set.
pub(super) fn points(lab: &Lab) -> Vec<u64> {
    points_in(lab, "set")
}

/// The same of another set.
pub(super) fn points_in(lab: &Lab, set: &str) -> Vec<u64> {
    if !lab.path(set).join("manifest.json").exists() {
        return Vec::new();
    }
    let answer = lab
        .zebu(&["backup", "list", "--output=json", set])
        .ok("list");
    let list: serde_json::Value = serde_json::from_str(&answer.out).expect("JSON");
    let numbers = list.as_array().expect("a list").iter();
    numbers
        .map(|point| point["number"].as_u64().expect("a number"))
        .collect()
}

/// Fails unless a command failed with this text in its message.
pub(super) fn refused(answer: &Answer, text: &str) {
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

pub(super) fn qemu_io(lab: &Lab, commands: &[&str]) {
    let mut args = vec!["-d", "unmap"];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push("disk.qcow2");
    lab.qemu_io(&args).ok("qemu-io");
}

/// Both programs find no error in an image.
pub(super) fn assert_clean(lab: &Lab, image: &str) {
    lab.zebu(&["check", "-q", image]).ok("zebu check");
    lab.qemu_img(&["check", "-q", image]).ok("qemu-img check");
}

/// The bitmap of the last point, by the manifest.
pub(super) fn bitmap(lab: &Lab) -> Option<String> {
    let answer = lab
        .zebu(&["backup", "list", "--output=json", "set"])
        .ok("list");
    let list: serde_json::Value = serde_json::from_str(&answer.out).expect("JSON");
    let last = list.as_array().expect("a list").last().expect("a point");
    last["disks"]["disk"]["bitmap"].as_str().map(str::to_owned)
}

/// Copies the disk and the set of one place to another.
pub(super) fn copy_state(from: &Path, to: &Path) {
    fs::copy(from.join("disk.qcow2"), to.join("disk.qcow2")).unwrap();
    copy_set(&from.join("set"), &to.join("set"));
}

/// Makes a directory a copy of another one.
pub(super) fn copy_set(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name();
        fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
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

/// A disk shows something else without a write: its bitmap must not say that nothing has changed.
#[test]
fn other_files_behind_a_disk_are_changes() {
    for (disk, change) in [
        ("-b b1 -F raw", "rebase -u -b b2 -F raw"),
        ("-b b1 -F raw", "rebase -u -b"),
        ("-b b3 -F qcow2", "rebase -u -b b3 -F raw"),
        ("-o data_file=b1", "amend -o data_file=b2"),
    ] {
        let lab = Lab::new();
        lab.make(&format!(
            "raw b1 1048576; raw b2 2097152; create b3 1M; create {disk} disk.qcow2 1M"
        ));
        backup(&lab, &[]);
        let mut args: Vec<&str> = change.split(' ').collect();
        if args.last() == Some(&"-b") {
            args.push("");
        }
        lab.zebu(&[&args[..], &["disk.qcow2"]].concat()).ok(change);
        backup(&lab, &[]);
        assert!(restored(&lab, 2) == content(&lab, "disk.qcow2"), "{change}");
    }
}

/// A program that changes a backing file can set its time of change back.
#[test]
fn a_time_that_was_set_back_hides_no_change() {
    let lab = Lab::new();
    lab.make("raw b1 1048576; raw b2 2097152; create -b b1 -F raw disk.qcow2 1M");
    backup(&lab, &[]);
    let time = fs::metadata(lab.path("b1")).unwrap().modified().unwrap();
    let other = fs::read(lab.path("b2")).unwrap();
    fs::write(lab.path("b1"), &other[1 << 20..]).unwrap();
    let base = fs::File::options().write(true).open(lab.path("b1"));
    base.unwrap().set_modified(time).unwrap();
    backup(&lab, &[]);
    assert!(restored(&lab, 2) == content(&lab, "disk.qcow2"));
}

/// Nothing tells that another program has cleared a bitmap. Once a backup was found to be wrong, the
/// next one is right.
#[test]
fn a_backup_that_differs_is_not_continued() {
    let lab = Lab::new();
    lab.make("create disk.qcow2 1M");
    backup(&lab, &[]);
    lab.zebu_io(&["-c", "write -P 1 0 64k", "disk.qcow2"])
        .ok("write");
    let info = lab
        .zebu(&["info", "--output=json", "disk.qcow2"])
        .ok("info");
    let info: serde_json::Value = serde_json::from_str(&info.out).unwrap();
    let name = info["format-specific"]["data"]["bitmaps"][0]["name"].as_str();
    lab.zebu(&["bitmap", "--clear", "disk.qcow2", name.unwrap()])
        .ok("clear");
    let wrong = lab.zebu(&["backup", "--verify", "disk.qcow2", "--to", "set"]);
    assert_eq!(wrong.status, 1, "{wrong:#?}");
    assert!(wrong.err.contains("differs from the disk"), "{wrong:#?}");
    assert_eq!(points(&lab), [1]);
    backup(&lab, &[]);
    assert!(restored(&lab, 2) == content(&lab, "disk.qcow2"));
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
    assert!(restored(&lab, 1) == first);
    assert!(restored(&lab, 2) == second);
    let increment = fs::metadata(lab.path("set/disk.2.qcow2")).unwrap().len();
    assert!(increment < 1 << 20, "{increment}");
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
        lab.zebu(&[&["backup", "restore", "--overwrite"], &of[..]].concat())
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
        lab.zebu(&[
            "backup",
            "restore",
            "--overwrite",
            "--disk",
            disk,
            "set",
            "restored",
        ])
        .ok("restore");
        let image = format!("{disk}.qcow2");
        assert!(fs::read(lab.path("restored")).unwrap() == content(&lab, &image));
    }
    refused(
        &lab.zebu(&["backup", "restore", "--overwrite", "set", "restored"]),
        "several disks",
    );
}
