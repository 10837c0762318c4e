//! `rebase` must keep the content of the image: with data in only one of the backing files, past the
//! end of either, with zeroes in version 2, and with different cluster sizes. A loop is refused.

use std::fs;

use crate::common::pair::{Pair, assert_content};
use crate::common::{Lab, beyond_qemu, peer};
use crate::common::{part, rotated};

const OPTIONS: [&str; 7] = [
    "cluster_size=64k",
    "cluster_size=512",
    "cluster_size=2M",
    "compat=0.10",
    "extended_l2=on",
    "compression_type=zstd,cluster_size=16k",
    "data_file=DATA",
];

/// `old` below `top`, and `new` and `odd.raw` beside them.
fn images(options: &str, old: &str, top: &str, new: &str, seed: u32) -> String {
    let option = |name: &str| options.replace("DATA", &format!("{name}.data"));
    let kinds = match options.contains("data_file") {
        true => "wzu",
        false => "wzuc",
    };
    // Small clusters below large ones, and the other way round.
    format!(
        "create -o cluster_size=4k old.qcow2 {old}; random old.qcow2 {seed} 25 wzc; \
         create -o {} -b old.qcow2 -F qcow2 top.qcow2 {top}; random top.qcow2 {} 20 {kinds}; \
         img convert -O qcow2 -o cluster_size=512 old.qcow2 new.qcow2; \
         img resize -q --shrink new.qcow2 {new}; random new.qcow2 {} 10 wzc; raw odd.raw 1000001",
        option("top"),
        seed + 1,
        seed + 2,
    )
}

#[track_caller]
fn rebase(pair: &Pair, args: &[&str], what: &str) {
    let before = ["convert", "-O", "raw", "top.qcow2", "before.raw"];
    pair.ours.qemu_img(&before).ok("convert");
    let mut all = vec!["rebase"];
    all.extend(args);
    all.push("top.qcow2");
    pair.succeed(&all);
    let what = format!("{what}: {all:?}");
    pair.assert_alike(&["top.qcow2"], &what);
    assert_content(&pair.ours, "top.qcow2", "before.raw", &what);
}

const TARGETS: [&[&str]; 4] = [
    &["-b", "new.qcow2", "-F", "qcow2"],
    &["-b", "odd.raw", "-F", "raw"],
    &["-b", ""],
    &["-b", "old.qcow2", "-F", "qcow2"],
];

#[test]
fn the_option_matrix() {
    for (i, options) in (0..).zip(OPTIONS) {
        for target in part(2, rotated(TARGETS, i as usize)) {
            let recipe = images(options, "3M", "3M", "3M", 7 * i);
            rebase(&Pair::new(&recipe), target, &recipe);
        }
    }
}

#[test]
fn sizes_that_differ() {
    let mut cases = Vec::new();
    for options in ["cluster_size=64k", "compat=0.10,cluster_size=4k"] {
        for old in ["1000448", "4M"] {
            for top in ["700416", "2000384", "5M"] {
                for new in ["900096", "6M"] {
                    cases.push((options, old, top, new));
                }
            }
        }
    }
    for (options, old, top, new) in part(5, cases) {
        let recipe = images(options, old, top, new, 3);
        let pair = Pair::new(&recipe);
        for target in TARGETS {
            rebase(&pair, target, &recipe);
        }
    }
}

/// Changes between all backing files, one after the other.
#[test]
fn there_and_back() {
    for options in part(3, OPTIONS) {
        let recipe = images(options, "2M", "2500096", "3M", 50);
        let pair = Pair::new(&recipe);
        for target in [1, 0, 2, 3, 1, 2, 0, 3] {
            rebase(&pair, TARGETS[target], &recipe);
        }
    }
}

/// In version 2 without a backing file QEMU writes zeroes by deallocating clusters, which then show
/// the new backing file.
#[test]
fn zeroes_hide_the_new_backing_file() {
    for options in ["compat=0.10", "compat=1.1", "extended_l2=on"] {
        if options == "compat=0.10" && beyond_qemu("it shows the new backing file") {
            continue;
        }
        let lab = Lab::new();
        lab.make(&format!(
            "create full.qcow2 2M; io full.qcow2: write -P 5 0 2M; \
             create -o {options} top.qcow2 2M; \
             io top.qcow2: write -P 1 64k 64k | write -z 256k 64k | discard 512k 128k; \
             img convert -O raw top.qcow2 before.raw"
        ));
        lab.zebu(&["rebase", "-b", "full.qcow2", "-F", "qcow2", "top.qcow2"])
            .ok(options);
        lab.qemu_img(&["check", "top.qcow2"]).ok(options);
        assert_content(&lab, "top.qcow2", "before.raw", options);
    }
}

#[test]
fn compressed() {
    if !peer().is_current() {
        // It has no option -c.
        return;
    }
    for options in [
        "cluster_size=64k",
        "compression_type=zstd",
        "cluster_size=4k,compat=0.10",
    ] {
        // QEMU fails with smaller clusters in the backing file, and with subclusters.
        let cluster = if options.contains("4k") { "4k" } else { "64k" };
        let pair = Pair::new(&format!(
            "create -o cluster_size={cluster} old.qcow2 3M; random old.qcow2 1 25 wzc; \
             create -o {options} -b old.qcow2 -F qcow2 top.qcow2 3000320; \
             random top.qcow2 2 15 wzu; \
             create -o cluster_size={cluster} new.qcow2 2M; random new.qcow2 3 25 wz"
        ));
        for target in [0, 3, 2] {
            let mut args = vec!["-c"];
            args.extend(TARGETS[target]);
            rebase(&pair, &args, options);
        }
        assert_has_compressed(&pair.ours, "top.qcow2");
    }
}

/// A cluster of which a subcluster has to be written is compressed as a whole, unless the image has a part of it.
#[test]
fn compressed_with_subclusters() {
    if !peer().is_current() {
        // It has no option -c.
        return;
    }
    const OPTIONS: &str = "-o cluster_size=256k,extended_l2=on";
    let pair = Pair::new(&format!(
        "create {OPTIONS} base.q 1000k; io base.q: write -P 17 256k 256k; \
         create {OPTIONS} -b base.q -F qcow2 mid.q; \
         io mid.q: write -P 34 248k 8k | write -P 51 512k 8k | write -P 68 992k 8k; \
         create {OPTIONS} -b mid.q -F qcow2 top.qcow2; \
         create {OPTIONS} -b mid.q -F qcow2 part.q; io part.q: write -P 9 0 8k | write -P 9 640k 8k"
    ));
    let args = ["-q", "-c", "-b", "base.q", "-F", "qcow2"];
    rebase(&pair, &args, "subclusters");
    let kinds = |lab: &Lab| {
        let map = lab
            .qemu_img(&["map", "--output=json", "top.qcow2"])
            .ok("map");
        let lines = map.out.lines();
        let kinds = lines.map(|line| line.split(", \"offset\"").next().map(String::from));
        kinds.collect::<Vec<_>>()
    };
    assert_eq!(kinds(&pair.ours), kinds(&pair.theirs));
    assert_has_compressed(&pair.ours, "top.qcow2");
    let ours = &pair.ours;
    ours.make("img convert -O raw part.q part.raw");
    ours.zebu(&[&["rebase"], &args[..], &["part.q"]].concat())
        .ok("rebase");
    assert_content(
        ours,
        "part.q",
        "part.raw",
        "an image with parts of clusters",
    );
    assert_has_compressed(ours, "part.q");
    // Its clusters have their places already, so they are written as they are.
    ours.make(&format!(
        "create {OPTIONS},preallocation=metadata placed.q 1000k; \
         img rebase -u -b mid.q -F qcow2 placed.q; img convert -O raw placed.q placed.raw"
    ));
    ours.zebu(&[&["rebase"], &args[..], &["placed.q"]].concat())
        .ok("rebase");
    assert_content(
        ours,
        "placed.q",
        "placed.raw",
        "an image with preallocated metadata",
    );
}

/// QEMU 7.2 does not report compressed clusters; then nothing is checked.
fn assert_has_compressed(lab: &Lab, image: &str) {
    let map = lab.qemu_img(&["map", "--output=json", image]).ok("map");
    if map.out.contains("\"compressed\"") {
        assert!(map.out.contains("\"compressed\": true"), "{map:#?}");
    }
}

#[test]
fn compressed_above_small_clusters() {
    if beyond_qemu("it fails an assertion") {
        return;
    }
    for options in ["cluster_size=64k", "extended_l2=on", "cluster_size=256k"] {
        let pair = Pair::new(&images(options, "3M", "3000320", "3M", 9));
        let lab = &pair.ours;
        lab.make(&format!(
            "io old.qcow2: write -P 3 1M 1M; \
             create -o {options} -b old.qcow2 -F qcow2 empty.qcow2 3000320; \
             img convert -O raw empty.qcow2 empty.raw"
        ));
        lab.zebu(&["rebase", "-c", "-b", "", "empty.qcow2"])
            .ok(options);
        lab.qemu_img(&["check", "empty.qcow2"]).ok(options);
        assert_content(lab, "empty.qcow2", "empty.raw", options);
        assert_has_compressed(lab, "empty.qcow2");
        let before = ["convert", "-O", "raw", "top.qcow2", "before.raw"];
        lab.qemu_img(&before).ok("convert");
        for target in [0, 1, 3, 2] {
            let mut args = vec!["rebase", "-c"];
            args.extend(TARGETS[target]);
            args.push("top.qcow2");
            lab.zebu(&args).ok(options);
            lab.qemu_img(&["check", "top.qcow2"]).ok(options);
            assert_content(lab, "top.qcow2", "before.raw", options);
        }
    }
}

#[test]
fn rebase_removes_the_middle_of_a_chain() {
    let pair = Pair::new(
        "create base.qcow2 5M; random base.qcow2 1 20 wz; \
         create -b base.qcow2 -F qcow2 mid.qcow2 4M; random mid.qcow2 2 20 wzc; \
         create -b mid.qcow2 -F qcow2 top.qcow2 6M; random top.qcow2 3 20 wzu",
    );
    rebase(&pair, &["-b", "base.qcow2", "-F", "qcow2"], "onto the base");
    rebase(
        &pair,
        &["-b", "mid.qcow2", "-F", "qcow2", "-p", "-q"],
        "back",
    );
}

#[test]
fn the_same_image_over_another_backing_file() {
    let pair = Pair::new(
        "raw base.raw 1000000; raw other.raw 1000000; \
         create -b base.raw -F raw mid.qcow2 1M; random mid.qcow2 1 5 wz; \
         create -b mid.qcow2 -F qcow2 top.qcow2 1M; random top.qcow2 2 5 wz; \
         img rebase -u -F qcow2 -b json:{\"driver\":\"qcow2\",\"file.driver\":\"file\",\
         \"file.filename\":\"mid.qcow2\",\"backing.driver\":\"raw\",\
         \"backing.file.driver\":\"file\",\"backing.file.filename\":\"other.raw\"} top.qcow2",
    );
    let args = ["-b", "mid.qcow2", "-F", "qcow2"];
    rebase(&pair, &args, "its own backing file");
}

#[test]
fn snapshots_are_kept() {
    if beyond_qemu("it has no --change-snapshots") {
        return;
    }
    let recipe = images("cluster_size=64k", "2M", "2M", "2M", 4);
    let pair = Pair::new(&format!(
        "{recipe}; img snapshot -c one top.qcow2; random top.qcow2 6 10 wz"
    ));
    let before = ["convert", "-O", "raw", "top.qcow2", "before.raw"];
    pair.ours.qemu_img(&before).ok("convert");
    for target in [0, 2] {
        let theirs = [&["rebase"], TARGETS[target], &["top.qcow2"]].concat();
        let mut ours = theirs.clone();
        ours.insert(1, "--change-snapshots");
        pair.ours.zebu(&ours).ok("rebase");
        pair.theirs.qemu_img(&theirs).ok("rebase");
        pair.assert_alike(&["top.qcow2"], "snapshots");
        assert_content(&pair.ours, "top.qcow2", "before.raw", "snapshots");
    }
    // Unallocated clusters of a snapshot show the new backing file.
    for lab in [&pair.ours, &pair.theirs] {
        let args = ["convert", "-l", "one", "-O", "raw", "top.qcow2", "one.raw"];
        lab.qemu_img(&args).ok("snapshot");
    }
    pair.assert_alike(&["one.raw"], "snapshots");
}

#[test]
fn unsafe_rebase_changes_only_the_name() {
    let pair = Pair::new(&images("cluster_size=64k", "2M", "2M", "2M", 4));
    for args in [
        &["-u", "-b", "new.qcow2", "-F", "qcow2"][..],
        &["-u", "-b", "old.qcow2", "-F", "qcow2", "-t", "none"],
        &["-u", "-b", "none", "-F", "qcow2"],
        &["-u", "-b", "disk.vmdk", "-F", "vmdk"],
        &["-u", "-b", "", "-F", "raw"],
        &["-u"],
        &["-u", "-b", "old.qcow2", "-F", "qcow2"],
    ] {
        let mut all = vec!["rebase"];
        all.extend(args);
        all.push("top.qcow2");
        pair.succeed(&all);
        let info = ["info", "--output=json", "top.qcow2"];
        let infos = [&pair.ours, &pair.theirs].map(|lab| {
            let text = lab.qemu_img(&info).ok("info").out;
            let all: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            ["backing-filename", "backing-filename-format"].map(|key| all[key].clone())
        });
        assert_eq!(infos[0], infos[1], "{all:?}");
    }
    pair.assert_alike(&["top.qcow2"], "only the name");
    let long = "x".repeat(1024);
    pair.fail(&["rebase", "-u", "-b", &long, "-F", "qcow2", "top.qcow2"]);
    pair.make("create -o cluster_size=512 small.qcow2 1M");
    let long = "x".repeat(1023);
    pair.fail(&["rebase", "-u", "-b", &long, "-F", "qcow2", "small.qcow2"]);
    pair.assert_alike(&["top.qcow2", "small.qcow2"], "names that are too long");
}

#[test]
fn backing_file_names_are_relative_to_the_image() {
    let pair = Pair::new(&images("cluster_size=64k", "2M", "2M", "2M", 4));
    for lab in [&pair.ours, &pair.theirs] {
        fs::create_dir(lab.path("sub")).expect("mkdir");
        fs::copy(lab.path("top.qcow2"), lab.path("sub/top.qcow2")).expect("copy");
    }
    let u = [
        "rebase",
        "-u",
        "-b",
        "../old.qcow2",
        "-F",
        "qcow2",
        "sub/top.qcow2",
    ];
    pair.succeed(&u);
    pair.fail(&["rebase", "-b", "new.qcow2", "-F", "qcow2", "sub/top.qcow2"]);
    pair.succeed(&[
        "rebase",
        "-b",
        "../new.qcow2",
        "-F",
        "qcow2",
        "sub/top.qcow2",
    ]);
    pair.assert_alike(&["sub/top.qcow2"], "sub");
}

#[test]
fn refusals() {
    let pair = Pair::new(&format!(
        "{}; create -o data_file=d,data_file_raw=on raw.qcow2 1M",
        images("cluster_size=64k", "2M", "2M", "2M", 4)
    ));
    for args in [
        &["rebase"][..],
        &["rebase", "a", "b"],
        &["rebase", "top.qcow2"],
        &["rebase", "-b", "old.qcow2", "none"],
        &["rebase", "-b", "none", "top.qcow2"],
        &["rebase", "-b", "none", "-F", "qcow2", "top.qcow2"],
        &["rebase", "-b", "new.qcow2", "top.qcow2"],
        &["rebase", "-u", "-b", "new.qcow2", "top.qcow2"],
        &["rebase", "-b", "new.qcow2", "-F", "nofmt", "top.qcow2"],
        &[
            "rebase",
            "-u",
            "-b",
            "new.qcow2",
            "-F",
            "nofmt",
            "top.qcow2",
        ],
        &["rebase", "-b", "odd.raw", "-F", "qcow2", "top.qcow2"],
        &["rebase", "-t", "foo", "-b", "", "top.qcow2"],
        &["rebase", "-T", "foo", "-b", "", "top.qcow2"],
        &[
            "rebase",
            "-f",
            "raw",
            "-b",
            "new.qcow2",
            "-F",
            "qcow2",
            "odd.raw",
        ],
        &["rebase", "-b", "new.qcow2", "-F", "qcow2", "raw.qcow2"],
        &[
            "rebase",
            "-u",
            "-b",
            "new.qcow2",
            "-F",
            "qcow2",
            "raw.qcow2",
        ],
    ] {
        pair.fail(args);
    }
    pair.assert_alike(&["top.qcow2"], "refused");
    let held = [&pair.ours, &pair.theirs].map(|lab| lab.held_by_qemu(&["new.qcow2"]));
    pair.fail(&["rebase", "-b", "new.qcow2", "-F", "qcow2", "top.qcow2"]);
    drop(held);
    let held = [&pair.ours, &pair.theirs].map(|lab| lab.held_by_qemu(&["-r", "top.qcow2"]));
    pair.fail(&["rebase", "-b", "", "top.qcow2"]);
    pair.fail(&["rebase", "-u", "-b", "", "top.qcow2"]);
    drop(held);
    pair.assert_alike(&["top.qcow2"], "in use");
    pair.make("img rebase -u -b none -F qcow2 top.qcow2");
    pair.fail(&["rebase", "-b", "new.qcow2", "-F", "qcow2", "top.qcow2"]);
}

#[test]
fn rebase_refuses_loops() {
    if beyond_qemu("it makes loops with -u, and fails with an error of locks without it") {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "create base.qcow2 1M; create -b base.qcow2 -F qcow2 mid.qcow2; \
         create -b mid.qcow2 -F qcow2 top.qcow2; io base.qcow2: write -P 3 0 1M",
    );
    fs::hard_link(lab.path("top.qcow2"), lab.path("other-name")).expect("link");
    let before = ["base.qcow2", "mid.qcow2", "top.qcow2"].map(|n| fs::read(lab.path(n)).unwrap());
    for (backing, image) in [
        ("top.qcow2", "top.qcow2"),
        ("other-name", "top.qcow2"),
        ("top.qcow2", "mid.qcow2"),
        ("top.qcow2", "base.qcow2"),
        ("mid.qcow2", "base.qcow2"),
    ] {
        for mode in [&[][..], &["-u"]] {
            let mut args = vec!["rebase"];
            args.extend(mode);
            args.extend(["-b", backing, "-F", "qcow2", image]);
            let answer = lab.zebu(&args);
            answer.failed_with_one_line(1, "a loop");
            assert!(answer.err.contains("infinite loop"), "{answer:#?}");
        }
    }
    let after = ["base.qcow2", "mid.qcow2", "top.qcow2"].map(|n| fs::read(lab.path(n)).unwrap());
    assert!(before == after, "a file was changed");
}
