//! `backup` by bitmaps: an increment is taken from the bitmap of the last point, and of no other.

use std::fs;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use super::backup::{
    assert_clean, backup, bitmap, content, copy_set, qemu_io, refused, restored, zebu_io,
};
use crate::common::Lab;
use crate::common::rng::Rng;
use crate::common::server::Server;

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
            lab.zebu(&[
                "backup",
                "restore",
                "--overwrite",
                "--disk",
                name,
                "set",
                "restored",
            ])
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
        lab.zebu(&["backup", "restore", "--overwrite", set, "restored"])
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

/// A program that writes to the data file by its own name tells no bitmap of it.
#[test]
fn what_is_written_past_the_image_is_compared() {
    let lab = Lab::new();
    fs::write(lab.path("y.raw"), vec![7; 1 << 20]).unwrap();
    let data = "data_file=d,data_file_raw=on";
    lab.zebu(&[
        "convert", "-f", "raw", "-O", "qcow2", "-o", data, "y.raw", "x.q",
    ])
    .ok("convert");
    let backup = || lab.zebu(&["backup", "-f", "qcow2", "x.q", "--to", "set"]);
    backup().ok("full");
    // The image is closed last.
    lab.zebu(&["io", "-c", "write -q -P 9 64k 64k", "x.q"])
        .ok("write");
    assert!(!backup().err.contains("compared"));
    let closed = fs::metadata(lab.path("x.q")).unwrap().modified().unwrap();
    let file = fs::File::options().write(true).open(lab.path("d")).unwrap();
    file.write_all_at(&[5; 4096], 512 << 10).unwrap();
    file.set_modified(closed + Duration::from_secs(1)).unwrap();
    let answer = backup();
    assert!(answer.err.contains("compared"), "{answer:?}");
    lab.zebu(&["backup", "restore", "set", "out"]).ok("restore");
    assert!(fs::read(lab.path("out")).unwrap() == fs::read(lab.path("d")).unwrap());
}
