//! Reports for people: `map --picture`, `info --human`, colours, and the progress of `check`.

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::terminal::terminal;
use crate::common::{Lab, beyond_qemu, program};

/// An image with everything: a backing file, compressed data, zeroes, a snapshot.
fn made() -> Lab {
    let lab = Lab::new();
    lab.zebu(&["create", "-f", "raw", "base.raw", "4M"])
        .ok("create");
    lab.zebu_io(&["-f", "raw", "-c", "write -P 1 0 1M", "base.raw"])
        .ok("base");
    lab.make("create -b base.raw -F raw top.qcow2");
    let commands = [
        "write -P 2 1M 512k",
        "write -c -P 3 2M 64k",
        "write -z 3M 64k",
    ];
    let mut args = vec![];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push("top.qcow2");
    lab.zebu_io(&args).ok("top");
    lab.zebu(&["snapshot", "-c", "one", "top.qcow2"])
        .ok("snapshot");
    lab.zebu_io(&["-c", "write -P 4 1M 64k", "top.qcow2"])
        .ok("after");
    lab
}

#[test]
fn a_picture_shows_everything() {
    if beyond_qemu("pictures") {
        return;
    }
    let lab = made();
    lab.zebu(&["map", "--picture", "a.svg", "top.qcow2"])
        .ok("svg");
    let svg = fs::read_to_string(lab.path("a.svg")).unwrap();
    assert!(
        svg.starts_with("<svg ") && svg.ends_with("</svg>\n"),
        "{svg}"
    );
    for text in [
        "top.qcow2: qcow2, 4 MiB",
        "data in top.qcow2",
        "compressed in top.qcow2",
        "data in base.raw",
        "recorded as zero",
        "held by a snapshot, too",
        "Snapshots: 1, holding 512 KiB of the disk's data, too",
        "leaked: 0 B",
    ] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    lab.zebu(&["map", "--picture", "a.PNG", "top.qcow2"])
        .ok("png");
    let png = fs::read(lab.path("a.PNG")).unwrap();
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.ends_with(&[0xae, 0x42, 0x60, 0x82]));
    // A part of the disk, nothing of it, and a disk of no bytes.
    lab.make("create nothing.qcow2 0");
    for args in [
        &["-s1M", "-l1M", "top.qcow2"][..],
        &["-s9G", "top.qcow2"],
        &["nothing.qcow2"],
    ] {
        let mut all = vec!["map", "--picture", "b.svg"];
        all.extend(args);
        lab.zebu(&all).ok("a part");
    }
    lab.make("create one.qcow2 1M; io one.qcow2: write 0 64k");
    lab.zebu(&["map", "--picture", "b.svg", "one.qcow2"])
        .ok("one piece");
    let svg = fs::read_to_string(lab.path("b.svg")).unwrap();
    assert!(svg.contains("Data in 1 piece, "), "{svg}");
}

#[test]
fn a_picture_that_fails_leaves_the_old_one() {
    if beyond_qemu("pictures") {
        return;
    }
    let lab = made();
    let names = || {
        let entries = fs::read_dir(lab.path("")).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    fs::write(lab.path("a.svg"), "old").unwrap();
    fs::set_permissions(lab.path("a.svg"), Permissions::from_mode(0o640)).unwrap();
    symlink("a.svg", lab.path("link.svg")).unwrap();
    let before = names();
    for name in ["a.svg", "link.svg"] {
        let script = format!("ulimit -f 1; exec \"$0\" map --picture {name} top.qcow2");
        let answer = lab.shell(&script);
        answer.failed_with_one_line(1, name);
        let text = format!("zebu: Could not write '{name}': File too large\n");
        assert_eq!(answer.err, text);
        assert_eq!(fs::read(lab.path("a.svg")).unwrap(), b"old");
        assert_eq!(names(), before);
    }
    lab.zebu(&["map", "--picture", "link.svg", "top.qcow2"])
        .ok("through a link");
    assert!(lab.path("link.svg").is_symlink());
    let new = fs::read(lab.path("a.svg")).unwrap();
    assert!(new.starts_with(b"<svg"));
    let mode = fs::metadata(lab.path("a.svg")).unwrap().permissions();
    assert_eq!(mode.mode() & 0o777, 0o640);
    assert_eq!(names(), before);
    // What is no file is written.
    let script =
        "mkfifo pipe.svg; cat pipe.svg > got & \"$0\" map --picture pipe.svg top.qcow2 && wait";
    lab.shell(script).ok("a pipe");
    assert_eq!(fs::read(lab.path("got")).unwrap(), new);
    symlink("/dev/full", lab.path("full.svg")).unwrap();
    lab.zebu(&["map", "--picture", "full.svg", "top.qcow2"])
        .fails_with("No space left");
}

#[test]
fn a_picture_replaces_no_image() {
    if beyond_qemu("pictures") {
        return;
    }
    let lab = made();
    for (link, name) in [("a.svg", "top.qcow2"), ("b.png", "base.raw")] {
        symlink(name, lab.path(link)).unwrap();
        let before = fs::read(lab.path(name)).unwrap();
        let answer = lab.zebu(&["map", "--picture", link, "top.qcow2"]);
        answer.failed_with_one_line(1, name);
        assert!(fs::read(lab.path(name)).unwrap() == before);
    }
    for args in [
        &["map", "--picture", "a.jpg", "top.qcow2"][..],
        &["map", "--picture", "c.svg", "--output=json", "top.qcow2"],
        &["info", "--human", "--output=json", "top.qcow2"],
    ] {
        lab.zebu(args).failed_with_one_line(1, args[2]);
    }
    // The message has the name that was given, not that of a temporary file.
    let answer = lab.zebu(&["map", "--picture", "no/such.svg", "top.qcow2"]);
    answer.failed_with_one_line(1, "no/such.svg");
    let text = "zebu: Could not write 'no/such.svg': No such file or directory\n";
    assert_eq!(answer.err, text);
}

#[test]
fn pictures_of_huge_and_strange_images_are_small() {
    if beyond_qemu("pictures") {
        return;
    }
    let lab = Lab::new();
    // Names are no part of the drawing.
    let name = "<b>&\x1b[2J\"'.qcow2";
    lab.zebu(&["create", "-f", "qcow2", name, "64T"])
        .ok("create");
    lab.zebu_io(&["-c", "write 63T 1M", "-c", "write 5T 64k", name])
        .ok("write");
    let start = Instant::now();
    lab.zebu(&["map", "--picture", "a.svg", name]).ok("map");
    lab.zebu(&["info", "--human", name]).ok("info");
    assert!(start.elapsed() < Duration::from_secs(20));
    let svg = fs::read_to_string(lab.path("a.svg")).unwrap();
    assert!(svg.len() < 100_000 && !svg.contains('\x1b'), "{svg}");
    assert!(svg.contains("&lt;b&gt;&amp;\\u{1b}[2J"), "{svg}");
    // Checkers: the most shapes that there can be.
    lab.make("create checkers.qcow2 240M");
    let script: String = (0..1920)
        .map(|n| format!("write -q {}k 64k\n", n * 128))
        .collect();
    lab.zebu_io_script(&["checkers.qcow2"], &script).ok("write");
    lab.zebu(&["map", "--picture", "b.svg", "checkers.qcow2"])
        .ok("map");
    let length = fs::metadata(lab.path("b.svg")).unwrap().len();
    assert!((10_000..1_000_000).contains(&length), "{length}");
}

#[test]
fn a_summary() {
    if beyond_qemu("summaries") {
        return;
    }
    let lab = made();
    let text = lab.zebu(&["info", "--human", "top.qcow2"]).ok("info").out;
    for part in [
        "top.qcow2: qcow2 disk of 4 MiB, clusters of 64 KiB, version 3, zlib\n",
        " 1.56 MiB of 4 MiB (39.1 %)\n",
        "compressed 64 KiB of it",
        "snapshots  1, holding 512 KiB of the disk's data, too\n",
        "chain      top.qcow2 (qcow2, 576 KiB of the disk)\n",
        "`- base.raw (raw, 1 MiB of the disk)\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(
        !text.contains("warning") && !text.contains('\x1b'),
        "{text}"
    );
    // Marked as corrupt.
    lab.patch("top.qcow2", 79, &[2]);
    let text = lab.zebu(&["info", "--human", "top.qcow2"]).ok("info").out;
    assert!(
        text.contains("warning    it is marked as corrupt"),
        "{text}"
    );
}

#[test]
fn without_a_terminal_check_shows_no_progress() {
    if beyond_qemu("progress of checks") {
        return;
    }
    let lab = made();
    let plain = lab.zebu(&["check", "top.qcow2"]).ok("check");
    let shown = lab.zebu(&["check", "-p", "top.qcow2"]).ok("check -p");
    assert_eq!((plain.out, plain.err), (shown.out, shown.err));
}

#[test]
fn no_quiet_command_shows_progress() {
    if beyond_qemu("progress on standard error") {
        return;
    }
    let lab = made();
    fs::copy(lab.path("top.qcow2"), lab.path("other.qcow2")).unwrap();
    for line in [
        "check -p -q top.qcow2",
        "check -p -q -r all top.qcow2",
        "compare -p -q other.qcow2 top.qcow2",
        "convert -p -q -O raw top.qcow2 out",
        "amend -p -q -o lazy_refcounts=on top.qcow2",
        "rebase -p -q -b base.raw -F raw other.qcow2",
        "backup -p -q top.qcow2 --to set",
        "commit -p -q --change-snapshots other.qcow2",
    ] {
        let (mut ours, theirs) = terminal();
        let handle = || Stdio::from(theirs.try_clone().unwrap());
        let status = Command::new(program())
            .args(line.split(' '))
            .current_dir(lab.path(""))
            .env("TERM", "xterm")
            .stdout(handle())
            .stderr(handle())
            .status();
        assert!(status.unwrap().success(), "{line}");
        drop(theirs);
        let mut shown = Vec::new();
        // The end of a pseudoterminal is an error.
        let _ = ours.read_to_end(&mut shown);
        let shown = String::from_utf8_lossy(&shown);
        assert_eq!(shown, "", "{line}");
    }
}
