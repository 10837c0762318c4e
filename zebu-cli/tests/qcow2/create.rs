//! `create`: images must equal qemu-img's, byte for byte, and be writable. A failure must not leave
//! an incomplete image or destroy one that is in use.

use crate::common::{Lab, QCOW2_OPTIONS, beyond_qemu, compare_answers, peer};
use crate::common::{part, rotated};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Instant;

/// Files that an image may name.
fn lab() -> Lab {
    let lab = Lab::new();
    lab.make("raw base.raw 5000000; create base.qcow2 3M; io base.qcow2: write -P 7 1M 1M");
    lab
}

/// Runs `create` with both programs; the image is `x`, its data file `d`. Compares messages, status
/// and which files exist, and keeps QEMU's as `their-x` and `their-d`. Returns whether the image
/// was made.
#[track_caller]
fn both(lab: &Lab, args: &[&str]) -> bool {
    for name in ["x", "d", "their-x", "their-d"] {
        let _ = fs::remove_file(lab.path(name));
    }
    let all: Vec<&str> = ["create"].iter().chain(args).copied().collect();
    let theirs = lab.qemu_img(&all);
    let left = ["x", "d"].map(|name| lab.path(name).exists());
    for name in ["x", "d"] {
        let _ = fs::rename(lab.path(name), lab.path(&format!("their-{name}")));
    }
    let ours = lab.zebu(&all);
    if peer().is_current() {
        compare_answers(&ours, &theirs, &all, "create");
    } else {
        assert_eq!(ours.status, theirs.status, "{args:?}: {ours:#?}");
    }
    assert_eq!(
        ["x", "d"].map(|name| lab.path(name).exists()),
        left,
        "{args:?}: files"
    );
    ours.status == 0
}

/// Fails the test unless both make the same files with the same space on disk.
#[track_caller]
fn same_images(lab: &Lab, args: &[&str]) {
    assert!(both(lab, args), "{args:?} must succeed");
    for name in ["x", "d"]
        .into_iter()
        .filter(|name| lab.path(name).exists())
    {
        let theirs = format!("their-{name}");
        if name == "x" && table_moved(lab) {
            same_places(lab, &format!("{args:?}"));
        } else {
            lab.assert_same_bytes(name, &theirs, &format!("{args:?}"));
        }
        let blocks = |name: &str| fs::metadata(lab.path(name)).expect("stat").blocks();
        // The file system may use some blocks of its own.
        let (ours, theirs) = (blocks(name), blocks(&theirs));
        let fewer = name == "x" && table_moved(lab) && ours < theirs;
        assert!(
            fewer || ours.abs_diff(theirs) <= 64,
            "{args:?}: {name} takes {ours} blocks, QEMU's {theirs}"
        );
    }
}

/// Whether the refcount table of `x` was moved while it grew. Then QEMU leaves old tables in free
/// clusters; zebu makes the table only once.
fn table_moved(lab: &Lab) -> bool {
    let magic =
        lab.path("x").metadata().is_ok_and(|m| m.len() >= 104) && lab.u32_at("x", 0) == 0x5146_49fb;
    magic && lab.u64_at("x", 48) != 1 << lab.u32_at("x", 20)
}

/// Fails the test unless length, header and map are the same.
#[track_caller]
fn same_places(lab: &Lab, what: &str) {
    let start = |name: &str| {
        let bytes = fs::read(lab.path(name)).expect("read");
        (bytes.len(), bytes[..512].to_vec())
    };
    assert!(start("x") == start("their-x"), "{what}: length or header");
    let map = |name| lab.qemu_img(&["map", "--output=json", name]).ok("map").out;
    assert!(map("x") == map("their-x"), "{what}: maps differ");
}

/// Fails the test unless both programs report the same of the image, without errors.
#[track_caller]
fn same_views(lab: &Lab) {
    for command in [&["check"][..], &["info"], &["map", "--output=json"]] {
        let all: Vec<&str> = command.iter().copied().chain(["x"]).collect();
        let ours = lab.zebu(&all).ok("ours");
        let theirs = lab.qemu_img(&all).ok("theirs");
        compare_answers(&ours, &theirs, &all, "a new image");
    }
}

/// Fails the test unless QEMU can write to the image, and both programs read and check it.
#[track_caller]
fn can_be_written(lab: &Lab) {
    let write = [
        "write -P 1 0 70000",
        "write -P 2 900000 100000",
        "discard 0 64k",
    ];
    lab.make(&format!("io x: {}", write.join(" | ")));
    let read = [
        "-r",
        "-c",
        "read -P 2 900000 100000",
        "-c",
        "read -P 1 65536 4464",
        "x",
    ];
    for answer in [lab.qemu_io(&read), lab.zebu_io(&read)] {
        let out = answer.ok("read").out;
        assert!(!out.contains("verification failed"), "{out}");
    }
    lab.qemu_img(&["check", "x"]).ok("check");
    lab.zebu(&["check", "x"]).ok("check");
}

#[test]
fn the_option_matrix() {
    let lab = lab();
    let sizes = [["0", "1000448"], ["1", "2M"]];
    for (i, options) in part(3, QCOW2_OPTIONS).enumerate() {
        for size in part(2, rotated(sizes, i)).flatten() {
            same_images(&lab, &["-f", "qcow2", "-o", options, "x", size]);
            same_views(&lab);
        }
        can_be_written(&lab);
    }
}

#[test]
fn preallocation() {
    let lab = lab();
    let modes = ["off", "metadata", "falloc", "full"];
    for (i, options) in part(3, QCOW2_OPTIONS).enumerate() {
        for mode in part(4, rotated(modes, i)) {
            let options = format!("preallocation={mode},{options}");
            for size in ["0", "999936", "3M"] {
                // QEMU does not allocate a data file of an odd size.
                if size == "999936" && options.contains("data_file") && mode != "metadata" {
                    continue;
                }
                same_images(&lab, &["-f", "qcow2", "-o", &options, "x", size]);
                same_views(&lab);
            }
            can_be_written(&lab);
        }
    }
}

/// Many refcount blocks, and refcount tables that have to grow.
#[test]
fn big_disks() {
    let lab = lab();
    for (options, size) in [
        ("cluster_size=64k", "100T"),
        ("cluster_size=512", "16G"),
        ("cluster_size=512,refcount_bits=64", "16G"),
        ("cluster_size=4k,refcount_bits=64", "1T"),
        ("cluster_size=512,preallocation=metadata", "32M"),
        (
            "cluster_size=512,refcount_bits=64,preallocation=falloc",
            "32M",
        ),
        ("preallocation=metadata", "64G"),
    ] {
        let args = ["-f", "qcow2", "-o", options, "x", size];
        same_images(&lab, &args);
        lab.qemu_img(&["check", "x"]).ok("check");
        lab.zebu(&["check", "x"]).ok("check");
    }
}

#[test]
fn metadata_of_a_terabyte_takes_less_than_a_minute() {
    let lab = lab();
    let start = Instant::now();
    let limits = crate::common::Limits {
        memory: Some(1 << 20),
        ..crate::common::Limits::default()
    };
    let args = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "preallocation=metadata",
        "x",
        "1T",
    ];
    lab.zebu_limited(&args, &limits).ok("create");
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
    lab.qemu_img(&["check", "x"]).ok("check");
}

#[test]
fn backing_files() {
    let lab = lab();
    fs::create_dir(lab.path("sub")).expect("mkdir");
    for args in [
        &["-b", "base.qcow2", "-F", "qcow2", "x"][..],
        &["-b", "base.raw", "-F", "raw", "x"],
        &["-b", "base.qcow2", "-F", "qcow2", "x", "10M"],
        &["-b", "base.qcow2", "-F", "raw", "x"],
        &["-b", "file:base.qcow2", "-F", "qcow2", "x"],
        &["-b", "./base.qcow2", "-F", "qcow2", "-o", "compat=v2", "x"],
        &["-o", "backing_file=base.raw,backing_fmt=raw", "x"],
        &[
            "-o",
            "backing_file=base.raw",
            "-F",
            "raw",
            "-o",
            "size=1M",
            "x",
        ],
        &[
            "-b",
            "base.qcow2",
            "-F",
            "qcow2",
            "-o",
            "extended_l2=on,preallocation=metadata",
            "x",
        ],
        &[
            "-b",
            "base.qcow2",
            "-F",
            "qcow2",
            "-o",
            "cluster_size=512",
            "x",
        ],
    ] {
        let all: Vec<&str> = ["-f", "qcow2"].iter().chain(args).copied().collect();
        same_images(&lab, &all);
        same_views(&lab);
    }
    same_images(
        &lab,
        &["-f", "qcow2", "-u", "-b", "no,,pe", "-F", "raw", "x", "1G"],
    );
    // Relative to the image, not to the working directory.
    let args = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        "../base.raw",
        "-F",
        "raw",
        "sub/x",
    ];
    lab.zebu(&args).ok("relative");
    lab.qemu_img(&["compare", "base.raw", "sub/x"])
        .ok("compare");
}

#[test]
fn raw() {
    let lab = lab();
    for args in [
        &["x", "1000"][..],
        &["-f", "raw", "x", "0"],
        &["-f", "raw", "-o", "preallocation=off", "x", "3M"],
        &["-f", "raw", "-o", "preallocation=falloc", "x", "3000001"],
        &["-f", "raw", "-o", "preallocation=full", "x", "3000001"],
        &["-f", "raw", "-o", "size=1.5k", "x"],
        &["-q", "x", "1M"],
    ] {
        same_images(&lab, args);
    }
}

#[test]
fn help() {
    let lab = lab();
    for args in [
        &["-f", "qcow2", "-o", "help"][..],
        &["-f", "qcow2", "-o", "?", "x", "1M"],
        &["-f", "raw", "-o", "help"],
        &["-f", "raw", "-o", "size=1,help", "x"],
        &["-f", "foo", "-o", "help"],
    ] {
        both(&lab, args);
    }
}

#[test]
fn refusals() {
    let lab = lab();
    for options in [
        "cluster_size=0",
        "cluster_size=100",
        "cluster_size=4M",
        "cluster_size=abc",
        "cluster_size=-1",
        "compat=0.9",
        "preallocation=foo",
        "refcount_bits=3",
        "refcount_bits=0",
        "refcount_bits=abc",
        "refcount_bits=-1",
        "refcount_bits=8,compat=0.10",
        "lazy_refcounts=on,compat=0.10",
        "lazy_refcounts=foo",
        "extended_l2=on,compat=v2",
        "extended_l2=on,cluster_size=8k",
        "compression_type=foo",
        "compression_type=zstd,compat=v2",
        "data_file=d,compat=v2",
        "data_file_raw=on",
        "data_file=/nonexistent/d",
        "foo=bar",
        "nofoo",
        "",
        ",",
        "size=2k",
        "backing_file=",
        "backing_fmt=raw",
        "backing_file=base.raw",
        "help=1",
        "cluster_size=512,size=1T",
        "backing_file=base.raw,backing_fmt=raw,preallocation=metadata",
        "data_file=d,data_file_raw=on,backing_file=base.raw,backing_fmt=raw",
        "compat=8,preallocation=foo,cluster_size=5",
    ] {
        let size: &[&str] = if options.ends_with("1T") {
            &[]
        } else {
            &["4M"]
        };
        let all: Vec<&str> = ["-f", "qcow2", "-o", options, "x"]
            .iter()
            .chain(size)
            .copied()
            .collect();
        assert!(!both(&lab, &all), "{options}");
    }
    let long = "a".repeat(1024);
    for args in [
        &["-f", "qcow2", "x"][..],
        &["-f", "foo", "x", "1M"],
        &["-f", "bochs", "x", "1M"],
        &["-f", "qcow2", "foo:x", "1M"],
        &["-f", "qcow2", "x", "abc"],
        &["-f", "qcow2", "x", "8E"],
        &["-f", "qcow2", "x", "1E"],
        &["-f", "qcow2", "x", "9223372036854775807"],
        &["-f", "qcow2", "x", "9223372036854775296"],
        &["-f", "qcow2", "-b", "x", "-F", "qcow2", "x"],
        &["-f", "qcow2", "-b", "nope", "-F", "raw", "x"],
        &["-f", "qcow2", "-b", "nope", "-F", "raw", "x", "1M"],
        &["-f", "qcow2", "-b", "base.raw", "-F", "qcow2", "x"],
        &["-f", "qcow2", "-b", "base.raw", "-F", "zzz", "x"],
        &["-f", "qcow2", "-b", "base.raw", "x", "1M"],
        &["-f", "qcow2", "-u", "-b", "base.raw", "x", "1M"],
        &["-f", "qcow2", "-u", "-b", "base.raw", "-F", "raw", "x"],
        &[
            "-f", "qcow2", "-u", "-b", "base.raw", "-F", "zzz", "x", "1M",
        ],
        &["-f", "qcow2", "-u", "-b", &long, "-F", "raw", "x", "1M"],
        &[
            "-f",
            "qcow2",
            "-u",
            "-b",
            &long[..400],
            "-F",
            "raw",
            "-o",
            "cluster_size=512",
            "x",
            "1M",
        ],
        &["-f", "qcow2", "/nonexistent/x", "1M"],
        &["-f", "raw", "-b", "base.raw", "x", "1M"],
        &["-f", "raw", "-F", "raw", "x", "1M"],
        &["-f", "raw", "-o", "cluster_size=4k", "x", "1M"],
        &["-f", "raw", "-o", "preallocation=foo", "x", "1M"],
    ] {
        assert!(!both(&lab, args), "{args:?}");
    }
}

/// A mistaken command must not destroy an image that a virtual machine uses.
#[test]
fn an_image_in_use_is_not_overwritten() {
    let lab = lab();
    let before = fs::read(lab.path("base.qcow2")).expect("read");
    for args in [&["base.qcow2"][..], &["-r", "base.qcow2"]] {
        let held = lab.held_by_qemu(args);
        for target in [
            &["-f", "qcow2", "base.qcow2", "1M"][..],
            &["-f", "raw", "base.qcow2", "1M"],
            &["-f", "qcow2", "-o", "data_file=base.qcow2", "x", "1M"],
        ] {
            let all: Vec<&str> = ["create", "-q"].iter().chain(target).copied().collect();
            let (ours, theirs) = (lab.zebu(&all), lab.qemu_img(&all));
            compare_answers(&ours, &theirs, &all, "in use");
            assert_eq!(ours.status, 1);
            assert!(!lab.path("x").exists(), "{target:?}");
        }
        // It may become a backing file.
        let args = [
            "create",
            "-q",
            "-f",
            "qcow2",
            "-b",
            "base.qcow2",
            "-F",
            "qcow2",
            "top",
        ];
        lab.zebu(&args).ok("on top");
        drop(held);
        assert_eq!(fs::read(lab.path("base.qcow2")).expect("read"), before);
    }
}

/// Refused options must not destroy an existing file.
#[test]
fn wrong_options_leave_an_existing_file_unchanged() {
    if beyond_qemu("it removes the file") {
        return;
    }
    let lab = lab();
    let before = fs::read(lab.path("base.qcow2")).expect("read");
    let args = [
        "create",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=5",
        "base.qcow2",
        "1M",
    ];
    lab.zebu(&args).failed_with_one_line(1, "cluster_size=5");
    assert_eq!(fs::read(lab.path("base.qcow2")).expect("read"), before);
    // A valid create replaces all of it.
    lab.zebu(&["create", "-q", "-f", "qcow2", "base.qcow2", "1M"])
        .ok("create");
    lab.qemu_img(&["create", "-q", "-f", "qcow2", "fresh", "1M"])
        .ok("create");
    lab.assert_same_bytes("base.qcow2", "fresh", "replaced");
}
