//! `resize` must keep data, add only zeroes (no old data and none of the backing file), leave a
//! consistent image, and shrink only with `--shrink`.

use crate::common::pair::Pair;
use crate::common::{part, rotated};

const IMAGES: [&str; 6] = [
    "cluster_size=64k",
    "cluster_size=512",
    "cluster_size=4k,refcount_bits=64",
    "cluster_size=64k,extended_l2=on",
    "cluster_size=2M",
    "cluster_size=64k,lazy_refcounts=on",
];

fn resize(pair: &Pair, args: &[&str]) {
    let mut all = vec!["resize"];
    all.extend(args);
    pair.succeed(&all);
    pair.assert_alike(&["a.qcow2"], &format!("{args:?}"));
}

#[test]
fn there_and_back() {
    for (i, image) in IMAGES.into_iter().enumerate() {
        let backing = ["", "-b base.qcow2 -F qcow2"];
        for backing in part(2, rotated(backing, i)) {
            let pair = Pair::new(&format!(
                "create base.qcow2 12M; random base.qcow2 1 20 wz; \
                 create -o {image} {backing} a.qcow2 6M; random a.qcow2 2 20 wz"
            ));
            for args in [
                &["a.qcow2", "+3M"][..],
                &["-q", "a.qcow2", "20M"],
                // A multiple of the cluster size: otherwise QEMU shows the data that was cut off when
                // it grows the disk.
                &["--shrink", "a.qcow2", "-4M"],
                &["a.qcow2", "30M"],
                &["--shrink", "a.qcow2", "4M"],
                &["a.qcow2", "4M"],
                &["a.qcow2", "100M"],
            ] {
                resize(&pair, args);
            }
        }
    }
}

#[test]
fn preallocation() {
    for image in IMAGES {
        let pair = Pair::new(&format!(
            "create -o {image} a.qcow2 3M; random a.qcow2 2 20 wz"
        ));
        for (mode, size) in [
            ("metadata", "5M"),
            ("falloc", "7M"),
            ("full", "9M"),
            ("off", "10M"),
        ] {
            let mode = format!("--preallocation={mode}");
            resize(&pair, &[&mode, "a.qcow2", size]);
        }
        pair.ours.make("random a.qcow2 5 30 wz");
        pair.ours.qemu_img(&["check", "a.qcow2"]).ok("check");
    }
}

/// Over a longer and a shorter backing file, and from the middle of a cluster.
#[test]
fn preallocation_over_a_backing_file() {
    for (base, mode) in [
        ("12M", "metadata"),
        ("12M", "falloc"),
        ("1M", "full"),
        ("1M", "metadata"),
    ] {
        for size in ["2M", "96k"] {
            let pair = Pair::new(&format!(
                "create base.qcow2 {base}; io base.qcow2: write -P 255 0 {base}; \
                 create -b base.qcow2 -F qcow2 a.qcow2 {size}"
            ));
            let mode = format!("--preallocation={mode}");
            resize(&pair, &[&mode, "a.qcow2", "5M"]);
            let size = if size == "2M" { "2M 3M" } else { "96k 5024k" };
            let read = format!("read -P 0 {size}");
            for command in [&read[..], "read -P 255 0 96k"] {
                let io = ["io", "-c", command, "a.qcow2"];
                let read = pair.ours.zebu(&io).ok("read");
                assert!(!read.out.contains("verification failed"), "{read:#?}");
            }
            let has_own_clusters = |lab: &crate::common::Lab| {
                let map = lab.qemu_img(&["map", "--output=json", "a.qcow2"]).ok("map");
                let own = map.out.lines().filter(|line| line.contains("\"depth\": 0"));
                own.filter(|line| line.contains("\"offset\"")).count() > 0
            };
            assert!(
                has_own_clusters(&pair.ours) && has_own_clusters(&pair.theirs),
                "{mode}"
            );
        }
    }
}

/// The shrink fails because of a damaged table. Later writes of the session must be kept.
#[test]
fn a_failed_shrink_changes_nothing() {
    let pair = Pair::new(
        "create a.qcow2 2G; io a.qcow2: write -P 5 300M 64k; io a.qcow2: write -P 5 310M 64k; \
         io a.qcow2: write -P 5 600M 64k; io a.qcow2: write -P 5 1100M 64k",
    );
    let lab = &pair.ours;
    let entry = lab.u64_at("a.qcow2", 40) + 2 * 8;
    let damaged = lab.u64_at("a.qcow2", entry) | 1 << 9;
    lab.patch("a.qcow2", entry, &damaged.to_be_bytes());
    let io = |commands: &[&str]| {
        let mut args = vec!["io"];
        args.extend(commands.iter().flat_map(|command| ["-c", command]));
        args.push("a.qcow2");
        lab.zebu(&args)
    };
    let answer = io(&["truncate 256M", "write -P 9 310M 64k", "flush"]);
    assert!(answer.err.contains("L1 entry"), "{answer:#?}");
    let read = io(&[
        "read -P 9 310M 64k",
        "read -P 5 300M 64k",
        "read -P 5 600M 64k",
    ]);
    assert!(!read.out.contains("verification failed"), "{read:#?}");
}

#[test]
fn data_cut_off_do_not_reappear() {
    let pair = Pair::new("create a.qcow2 1M; io a.qcow2: write -P 7 0 1M");
    pair.ours
        .zebu(&["resize", "--shrink", "a.qcow2", "700k"])
        .ok("shrink");
    pair.ours.zebu(&["resize", "a.qcow2", "1M"]).ok("grow");
    let read = [
        "io",
        "-c",
        "read -P 0 700k 324k",
        "-c",
        "read -P 7 0 700k",
        "a.qcow2",
    ];
    pair.ours.zebu(&read).ok("read");
}

#[test]
fn with_snapshots() {
    for image in IMAGES {
        let pair = Pair::new(&format!(
            "create -o {image} a.qcow2 6M; random a.qcow2 2 20 wz; \
             img snapshot -c one a.qcow2; random a.qcow2 3 20 wz"
        ));
        for args in [
            &["a.qcow2", "20M"][..],
            &["--shrink", "a.qcow2", "4M"],
            &["a.qcow2", "8M"],
        ] {
            resize(&pair, args);
            let one = ["convert", "-l", "one", "-O", "raw", "a.qcow2", "one.raw"];
            pair.ours.qemu_img(&one).ok("convert");
            pair.theirs.qemu_img(&one).ok("convert");
            let theirs = pair.theirs.path("one.raw");
            let theirs = theirs.to_str().expect("UTF-8");
            let compared = ["compare", "-f", "raw", "-F", "raw", "one.raw", theirs];
            pair.ours.qemu_img(&compared).ok("the snapshot");
        }
    }
}

#[test]
fn raw() {
    let pair = Pair::new("raw a.raw 1048576");
    for args in [
        &["resize", "-f", "raw", "a.raw", "3M"][..],
        &["resize", "-f", "raw", "--preallocation=full", "a.raw", "4M"],
        &[
            "resize",
            "-f",
            "raw",
            "--preallocation=falloc",
            "a.raw",
            "+1M",
        ],
        &["resize", "-f", "raw", "--shrink", "a.raw", "-2M"],
    ] {
        pair.succeed(args);
        pair.assert_alike(&["a.raw"], &format!("{args:?}"));
    }
    pair.fail(&[
        "resize",
        "-f",
        "raw",
        "--preallocation=metadata",
        "a.raw",
        "9M",
    ]);
}

#[test]
fn refusals() {
    let pair = Pair::new(
        "create a.qcow2 3M; random a.qcow2 2 20 wz; \
         create -o compat=0.10 old.qcow2 1M; img snapshot -c one old.qcow2",
    );
    for args in [
        &["resize", "a.qcow2", "1M"][..],
        &["resize", "a.qcow2", "--", "-1M"],
        &["resize", "--shrink", "a.qcow2", "-10M"],
        &["resize", "--shrink", "a.qcow2", "0"],
        &["resize", "a.qcow2", "+100"],
        &["resize", "a.qcow2"],
        &["resize"],
        &["resize", "a.qcow2", "foo"],
        &["resize", "a.qcow2", "9M", "a.qcow2"],
        &["resize", "--preallocation=bar", "a.qcow2", "9M"],
        &[
            "resize",
            "--preallocation=full",
            "--shrink",
            "a.qcow2",
            "1M",
        ],
        &["resize", "nothing.qcow2", "9M"],
        &["resize", "a.qcow2", "99999T"],
        &["resize", "a.qcow2", "9999999T"],
        &["resize", "old.qcow2", "9M"],
    ] {
        pair.fail(args);
    }
    pair.assert_alike(&["a.qcow2", "old.qcow2"], "after refusals");
}

/// An L1 table of more clusters than a refcount block counts.
#[test]
fn tables_larger_than_a_refcount_block() {
    let pair = Pair::new("create -o cluster_size=512 a.qcow2 100M; random a.qcow2 2 20 wz");
    resize(&pair, &["a.qcow2", "1G"]);
    pair.ours
        .zebu(&["snapshot", "-c", "one", "a.qcow2"])
        .ok("snapshot");
    pair.ours.make("random a.qcow2 5 30 wz");
    pair.ours.qemu_img(&["check", "a.qcow2"]).ok("check");
}

/// A cluster in use with refcount 0 may be allocated again while it is discarded: it must not be freed
/// twice.
#[test]
fn discard_of_a_cluster_with_refcount_0() {
    let pair = Pair::new("create a.qcow2 4M; io a.qcow2: write -P 9 0 64k");
    let image = std::fs::read(pair.ours.path("a.qcow2")).expect("read");
    let word = |at: usize| {
        let bytes = image[at..at + 8].try_into().expect("8 bytes");
        u64::from_be_bytes(bytes) as usize
    };
    let block = word(word(48));
    let table = word(word(40)) & 0xff_ffff_ffff_fe00;
    let cluster = (word(table) & 0xff_ffff_ffff_fe00) >> 16;
    let refcount = (block + 2 * cluster) as u64;
    pair.ours.patch("a.qcow2", refcount, &[0, 0]);
    let commands = [
        "discard 0 64k",
        "flush",
        "write -P 7 1M 64k",
        "flush",
        "flush",
        "read -P 7 1M 64k",
    ];
    let mut all = vec!["io", "-d", "unmap"];
    all.extend(commands.iter().flat_map(|command| ["-c", command]));
    all.push("a.qcow2");
    pair.ours.zebu(&all).ok("io");
    pair.ours.qemu_img(&["check", "a.qcow2"]).ok("check");
}
