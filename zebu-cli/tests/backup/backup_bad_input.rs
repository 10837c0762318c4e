//! `backup` with sources, names and options that must be refused: nothing is lost by them.

use std::fs;

use super::backup::{backup, content, copy_set, refused, restored, zebu_io};
use crate::common::Lab;

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
        fails(
            &["backup", "restore", "--overwrite", "set", "restored"],
            text,
        );
        fails(&["backup", "keep", "set", "1"], text);
    }
    fs::remove_file(lab.path("set/manifest.json")).unwrap();
    fails(&take, "there is no manifest, but other files");
    fs::write(lab.path("set/manifest.json"), &manifest).unwrap();
    // A file of the chain is missing, or was cut off.
    fs::rename(lab.path("set/disk.1.qcow2"), lab.path("kept")).unwrap();
    refused(&lab.zebu(&take), "No such file");
    refused(
        &lab.zebu(&["backup", "restore", "--overwrite", "set", "restored"]),
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
        &[
            "backup",
            "restore",
            "--overwrite",
            "--point",
            "9",
            "set",
            "restored",
        ],
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
