//! `commit`: data and zeroes of the top image must be in the base before the top image is emptied,
//! with intermediate images of any size. A base that another program uses is refused.

use std::fs;

use crate::common::pair::{Pair, assert_content};
use crate::common::{Lab, beyond_qemu};
use crate::common::{part, rotated};

const OPTIONS: [&str; 8] = [
    "cluster_size=64k",
    "cluster_size=512",
    "cluster_size=2M",
    "compat=0.10,cluster_size=4k",
    "extended_l2=on",
    "compression_type=zstd,cluster_size=16k",
    "lazy_refcounts=on,refcount_bits=32",
    "data_file=DATA",
];

/// A chain of two images with data in both.
fn chain(base: &str, base_size: &str, top: &str, top_size: &str, seed: usize) -> String {
    let (base, top) = (
        base.replace("DATA", "base.data"),
        top.replace("DATA", "top.data"),
    );
    // Data files have no compressed clusters.
    let kinds = |options: &str| match options.contains("data_file") {
        true => "wzud",
        false => "wzucd",
    };
    format!(
        "create -o {base} base.qcow2 {base_size}; random base.qcow2 {seed} 25 {}; \
         create -o {top} -b base.qcow2 -F qcow2 top.qcow2 {top_size}; \
         random top.qcow2 {} 30 {}",
        kinds(&base),
        seed + 1,
        kinds(&top),
    )
}

#[test]
fn the_option_matrix() {
    let sizes = [("5M", "5M"), ("3000320", "5M"), ("6M", "4000256")];
    for (i, base) in OPTIONS.iter().enumerate() {
        // Each with the same options and with others.
        for step in part(2, rotated([0, 3], i)) {
            let top = OPTIONS[(i + step) % OPTIONS.len()];
            for (base_size, top_size) in part(3, rotated(sizes, i + step)) {
                let recipe = chain(base, base_size, top, top_size, 10 * i + step);
                let pair = Pair::new(&recipe);
                let before = ["convert", "-O", "raw", "top.qcow2", "before.raw"];
                pair.ours.qemu_img(&before).ok("convert");
                pair.succeed(&["commit", "top.qcow2"]);
                pair.assert_alike(&["base.qcow2", "top.qcow2"], &recipe);
                assert_content(&pair.ours, "top.qcow2", "before.raw", &recipe);
            }
        }
    }
}

#[test]
fn raw_bases() {
    for (size, top) in [("3000001", "3000320"), ("3000001", "5M"), ("5000000", "1M")] {
        let pair = Pair::new(&format!(
            "raw base.raw {size}; create -b base.raw -F raw top.qcow2 {top}; \
             random top.qcow2 5 30 wzuc"
        ));
        pair.succeed(&["commit", "top.qcow2"]);
        pair.assert_alike(&["base.raw", "top.qcow2"], "raw");
    }
}

/// Where the base grows, it must not show data of its own backing file.
#[test]
fn an_enlarged_base_hides_its_backing_file() {
    let pair = Pair::new(
        "create lowest.qcow2 8M; io lowest.qcow2: write -P 9 0 8M; \
         create -b lowest.qcow2 -F qcow2 base.qcow2 2M; \
         create -b base.qcow2 -F qcow2 top.qcow2 6M; io top.qcow2: write -P 1 3M 64k",
    );
    pair.succeed(&["commit", "top.qcow2"]);
    pair.assert_alike(&["base.qcow2", "top.qcow2", "lowest.qcow2"], "larger");
}

const THREE: &str = "create base.qcow2 5M; random base.qcow2 1 20 wz; \
     create -b base.qcow2 -F qcow2 mid.qcow2 4M; random mid.qcow2 2 20 wzc; \
     create -b mid.qcow2 -F qcow2 top.qcow2 6M; random top.qcow2 3 20 wzu";

#[test]
fn chains_of_three() {
    let all = ["base.qcow2", "mid.qcow2", "top.qcow2"];
    for args in [
        &["commit", "top.qcow2"][..],
        &["commit", "mid.qcow2"],
        &["commit", "-d", "top.qcow2"],
        &["commit", "-b", "mid.qcow2", "top.qcow2"],
        &["commit", "-b", "base.qcow2", "top.qcow2"],
        &["commit", "-b", "./base.qcow2", "-q", "top.qcow2"],
        &[
            "commit",
            "--image-opts",
            "driver=qcow2,file.filename=top.qcow2",
        ],
        &[
            "commit",
            "-f",
            "qcow2",
            "-t",
            "none",
            "-r",
            "1G",
            "top.qcow2",
        ],
    ] {
        let pair = Pair::new(THREE);
        let before = ["convert", "-O", "raw", "top.qcow2", "before.raw"];
        pair.ours.qemu_img(&before).ok("convert");
        pair.succeed(args);
        pair.assert_alike(&all, &format!("{args:?}"));
        if args.contains(&"top.qcow2") {
            assert_content(&pair.ours, "top.qcow2", "before.raw", &format!("{args:?}"));
        }
    }
}

/// Past the end of a short intermediate image the disk is zero, whatever the base has there.
#[test]
fn commit_past_a_short_intermediate_image() {
    let pair = Pair::new(
        "create base.qcow2 5M; io base.qcow2: write -P 1 0 5M; \
         create -b base.qcow2 -F qcow2 mid.qcow2 2M; \
         create -b mid.qcow2 -F qcow2 top.qcow2 4M; io top.qcow2: write -P 3 3M 64k",
    );
    pair.succeed(&["commit", "-b", "base.qcow2", "top.qcow2"]);
    pair.assert_alike(&["base.qcow2", "mid.qcow2", "top.qcow2"], "short middle");
}

/// Those of the image that is committed change with its backing file if they may.
#[test]
fn snapshots_are_kept() {
    if beyond_qemu("it has no --change-snapshots") {
        return;
    }
    for options in ["cluster_size=64k", "extended_l2=on", "compat=0.10"] {
        let pair = Pair::new(&format!(
            "{}; img snapshot -c one top.qcow2; random top.qcow2 8 10 wzc; \
             img snapshot -c two base.qcow2",
            chain(options, "4M", options, "4M", 5)
        ));
        let ours = ["commit", "--change-snapshots", "top.qcow2"];
        pair.ours.zebu(&ours).ok("commit");
        pair.theirs.qemu_img(&["commit", "top.qcow2"]).ok("commit");
        pair.assert_alike(&["base.qcow2", "top.qcow2"], "snapshots");
        for lab in [&pair.ours, &pair.theirs] {
            let args = ["convert", "-l", "one", "-O", "raw", "top.qcow2", "one.raw"];
            lab.qemu_img(&args).ok("snapshot");
            let args = ["convert", "-l", "two", "-O", "raw", "base.qcow2", "two.raw"];
            lab.qemu_img(&args).ok("snapshot");
        }
        pair.assert_alike(&["one.raw", "two.raw"], "snapshots");
    }
}

#[test]
fn backing_file_names_are_relative_to_the_image() {
    let pair = Pair::new(THREE);
    for lab in [&pair.ours, &pair.theirs] {
        fs::create_dir(lab.path("sub")).expect("mkdir");
        for name in ["base.qcow2", "mid.qcow2", "top.qcow2"] {
            fs::copy(lab.path(name), lab.path(&format!("sub/{name}"))).expect("copy");
        }
    }
    pair.fail(&["commit", "-b", "sub/base.qcow2", "sub/top.qcow2"]);
    pair.fail(&["commit", "-b", "file:base.qcow2", "sub/top.qcow2"]);
    pair.succeed(&["commit", "-b", "base.qcow2", "sub/top.qcow2"]);
    pair.assert_alike(&["base.qcow2", "sub/base.qcow2", "sub/top.qcow2"], "sub");
}

#[test]
fn refusals() {
    let pair = Pair::new(&format!("{THREE}; raw a.raw 100000"));
    for args in [
        &["commit"][..],
        &["commit", "a", "b"],
        &["commit", "none"],
        &["commit", "base.qcow2"],
        &["commit", "-f", "raw", "a.raw"],
        &["commit", "-f", "raw", "top.qcow2"],
        &["commit", "-r", "x", "top.qcow2"],
        &["commit", "-t", "foo", "top.qcow2"],
        &["commit", "-b", "none", "top.qcow2"],
        &["commit", "-b", "top.qcow2", "top.qcow2"],
    ] {
        pair.fail(args);
    }
    let all = ["base.qcow2", "mid.qcow2", "top.qcow2"];
    pair.assert_alike(&all, "refused");
    for name in ["base.qcow2", "mid.qcow2"] {
        for lab in [&pair.ours, &pair.theirs] {
            fs::rename(lab.path(name), lab.path("away")).expect("rename");
        }
        pair.fail(&["commit", "top.qcow2"]);
        for lab in [&pair.ours, &pair.theirs] {
            fs::rename(lab.path("away"), lab.path(name)).expect("rename");
        }
    }
}

#[test]
fn images_in_use() {
    for (holder, args) in [
        (&["mid.qcow2"][..], &["commit", "top.qcow2"][..]),
        (&["-r", "mid.qcow2"], &["commit", "top.qcow2"]),
        (&["-r", "mid.qcow2"], &["commit", "mid.qcow2"]),
        (
            &["-r", "base.qcow2"],
            &["commit", "-b", "base.qcow2", "top.qcow2"],
        ),
        (&["top.qcow2"], &["commit", "top.qcow2"]),
        (&["-r", "top.qcow2"], &["commit", "top.qcow2"]),
    ] {
        let pair = Pair::new(THREE);
        let held = [&pair.ours, &pair.theirs].map(|lab| lab.held_by_qemu(holder));
        pair.fail(args);
        drop(held);
        pair.assert_alike(&["base.qcow2", "mid.qcow2", "top.qcow2"], "in use");
    }
}

#[test]
fn unreadable_data_stop_a_commit_before_it_empties_the_image() {
    if beyond_qemu("its message does not say what is wrong") {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "create base.qcow2 1M; create -b base.qcow2 -F qcow2 top.qcow2; \
         io top.qcow2: write -P 1 0 64k | write -c -s text 128k 64k",
    );
    let map = lab
        .qemu_img(&["map", "--output=json", "top.qcow2"])
        .ok("map");
    let before = fs::read(lab.path("top.qcow2")).expect("read");
    // The compressed data are at the end of the file.
    lab.patch(
        "top.qcow2",
        before.len() as u64 / 512 * 512 - 512,
        &[0xff; 512],
    );
    let damaged = lab.qemu_img(&["convert", "-O", "raw", "top.qcow2", "x.raw"]);
    assert_eq!(damaged.status, 1, "the data must be damaged: {map:#?}");
    let before = fs::read(lab.path("top.qcow2")).expect("read");
    lab.zebu(&["commit", "top.qcow2"])
        .failed_with_one_line(1, "damaged");
    assert!(before == fs::read(lab.path("top.qcow2")).expect("read"));
    lab.qemu_img(&["check", "base.qcow2"]).ok("check");
}

#[test]
fn progress() {
    let pair = Pair::new(THREE);
    let answer = pair.ours.zebu(&["commit", "-p", "top.qcow2"]).ok("commit");
    assert!(answer.out.starts_with("    (0.00/100%)\r"), "{answer:#?}");
    let end = "    (100.00/100%)\r\nImage committed.\n";
    assert!(answer.out.ends_with(end), "{answer:#?}");
}

/// The emptied image has no data clusters, and its file is truncated.
#[test]
fn commit_frees_the_space_of_the_top_image() {
    let pair = Pair::new(
        "create base.qcow2 64M; create -b base.qcow2 -F qcow2 top.qcow2; \
         io top.qcow2: write -P 1 1M 20M",
    );
    pair.succeed(&["commit", "top.qcow2"]);
    pair.assert_alike(&["base.qcow2", "top.qcow2"], "emptied");
    let length = |lab: &Lab| fs::metadata(lab.path("top.qcow2")).expect("stat").len();
    let (ours, theirs) = (length(&pair.ours), length(&pair.theirs));
    assert!(ours <= theirs + (64 << 10), "{ours} bytes, QEMU's {theirs}");
    // It can be written to again.
    for lab in [&pair.ours, &pair.theirs] {
        lab.make("io top.qcow2: write -P 2 0 3M");
    }
    pair.assert_alike(&["top.qcow2"], "written again");
}
