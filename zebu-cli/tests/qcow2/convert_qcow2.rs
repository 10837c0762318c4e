//! `convert` to qcow2: the image must have the content of the source, the options asked for and
//! correct refcounts, no copy of backing file data, and the size of QEMU's image. A refused
//! conversion must leave existing files unchanged.

use crate::common::{
    Answer, Lab, Limits, QCOW2_OPTIONS, Rng, assert_same_answer, beyond_qemu, compare_answers,
    peer, testing_qemu,
};
use crate::common::{part, rotated};
use serde_json::Value;
use std::fs;
use std::time::Duration;

/// Every kind of data (in the backing file, plain, compressed, zeroes, holes), and disks that end
/// within a cluster, a sector, a block.
const IMAGES: &str = "raw base.raw 5000000; create -b base.raw -F raw x.qcow2 8M; \
    random x.qcow2 5 40 wwzuc; io x.qcow2: write -c -s text 7M 64k | write -P 0 3M 300k; \
    create -b x.qcow2 -F qcow2 top.qcow2; random top.qcow2 6 15 wwzu; \
    create odd.qcow2 1000448; random odd.qcow2 7 10 w; raw odd.raw 3000001; \
    img convert -c -O qcow2 text packed.qcow2";

fn lab() -> Lab {
    let lab = Lab::new();
    lab.make(IMAGES);
    lab
}

/// What QEMU reports of an image, without what may differ.
#[derive(Debug, PartialEq)]
struct Report {
    info: Value,
    /// Start, length, kind.
    map: Vec<(u64, u64, String)>,
}

fn json(lab: &Lab, args: &[&str]) -> Value {
    let answer = lab.qemu_img(args).ok("QEMU looks at the image");
    serde_json::from_str(&answer.out).expect("JSON")
}

#[track_caller]
fn report(lab: &Lab, name: &str) -> Report {
    let mut info = json(lab, &["info", "--output=json", name]);
    let object = info.as_object_mut().expect("an object");
    object.remove("actual-size");
    object.remove("children");
    let rows = json(lab, &["map", "--output=json", name]);
    let mut map: Vec<(u64, u64, String)> = Vec::new();
    for row in rows.as_array().expect("rows") {
        let number = |key: &str| row[key].as_u64().expect("a number");
        let kind = format!(
            "depth {} zero {} data {}",
            row["depth"], row["zero"], row["data"]
        );
        match map.last_mut() {
            Some(last) if last.2 == kind => last.1 += number("length"),
            _ => map.push((number("start"), number("length"), kind)),
        }
    }
    Report { info, map }
}

/// Converts with both programs to `out`, whose data file is `d`; `prepare` makes the target before.
/// Compares the answers and the file lengths. Leaves zebu's image, and returns the report of QEMU's
/// if it was made.
#[track_caller]
fn both(lab: &Lab, args: &[&str], prepare: &str) -> (Answer, Option<Report>) {
    let clear = || {
        for name in ["out", "d"] {
            let _ = fs::remove_file(lab.path(name));
        }
        lab.make(prepare);
    };
    let mut all = vec!["convert"];
    all.extend(args);
    clear();
    let theirs = lab.qemu_img(&all);
    let made = (theirs.status == 0).then(|| report(lab, "out"));
    let length = |name: &str| fs::metadata(lab.path(name)).map_or(0, |m| m.len());
    let their_length = length("out");
    clear();
    let ours = lab.zebu(&all);
    if peer().is_current() {
        compare_answers(&ours, &theirs, &all, "convert");
    } else {
        assert_eq!(ours.status, theirs.status, "{all:?}: {ours:#?}");
    }
    if ours.status == 0 {
        assert!(
            length("out") <= their_length + their_length / 50 + (2 << 20),
            "{all:?}: {} bytes, QEMU's has {their_length}",
            length("out")
        );
    }
    (ours, made)
}

/// Fails the test unless `out` has no errors and the content of `source`.
#[track_caller]
fn assert_is_copy(lab: &Lab, source: &str, what: &str) {
    lab.qemu_img(&["compare", source, "out"]).ok(what);
    lab.qemu_img(&["check", "out"]).ok(what);
    lab.zebu(&["check", "out"]).ok(what);
}

/// Fails the test unless both programs make the same qcow2 image.
#[track_caller]
fn same(lab: &Lab, options: &[&str], source: &str) {
    let args: Vec<&str> = [&["-O", "qcow2"], options, &[source, "out"]].concat();
    let (ours, theirs) = both(lab, &args, "");
    ours.ok(&args.join(" "));
    let what = args.join(" ");
    assert_is_copy(lab, source, &what);
    let ours = report(lab, "out");
    let theirs = theirs.expect("QEMU's image");
    assert_eq!(ours.info, theirs.info, "{what}");
    if !options.contains(&"-c") {
        for (ours, theirs) in ours.map.iter().zip(&theirs.map) {
            assert_eq!(ours, theirs, "{what}");
        }
        assert_eq!(ours.map.len(), theirs.map.len(), "{what}");
    }
}

#[test]
fn the_option_matrix() {
    let lab = lab();
    let sources = ["top.qcow2", "odd.qcow2", "odd.raw", "packed.qcow2"];
    for (i, options) in part(3, QCOW2_OPTIONS.into_iter().rev()).enumerate() {
        for source in part(4, rotated(sources, i)) {
            same(&lab, &["-o", options], source);
        }
    }
}

#[test]
fn the_option_matrix_compressed() {
    let lab = lab();
    let sources = ["top.qcow2", "odd.raw", "packed.qcow2"];
    for (i, options) in part(3, QCOW2_OPTIONS.into_iter().rev()).enumerate() {
        // Data files have no compressed clusters.
        if options.contains("data_file") {
            continue;
        }
        for source in part(3, rotated(sources, i)) {
            same(&lab, &["-c", "-o", options], source);
        }
        same(&lab, &["-c", "-W", "-m", "16", "-o", options], "x.qcow2");
    }
}

#[test]
fn preallocation() {
    let lab = lab();
    for mode in ["off", "metadata", "falloc", "full"] {
        let others = ["", ",cluster_size=4k", ",extended_l2=on", ",compat=0.10"];
        for (i, options) in others.into_iter().enumerate() {
            let options = format!("preallocation={mode}{options}");
            for source in part(2, rotated(["x.qcow2", "odd.qcow2"], i)) {
                let args = ["-O", "qcow2", "-o", &options, source, "out"];
                let (ours, theirs) = both(&lab, &args, "");
                ours.ok(&options);
                assert_is_copy(&lab, source, &options);
                let theirs = theirs.expect("QEMU's image");
                assert_eq!(report(&lab, "out").info, theirs.info, "{options}");
            }
        }
        if mode != "metadata" {
            let options = format!("preallocation={mode}");
            let args = ["-O", "raw", "-o", &options, "x.qcow2", "out"];
            both(&lab, &args, "").0.ok(&options);
            lab.qemu_img(&["compare", "x.qcow2", "out"]).ok(&options);
        }
    }
}

#[test]
fn options_of_reading_and_writing() {
    let lab = lab();
    let all = [
        &[][..],
        &["-W"],
        &["-m", "1"],
        &["-m", "16"],
        &["-W", "-m", "16"],
        &["-t", "none", "-T", "none"],
        &["-t", "none", "-W"],
        &["-t", "writeback"],
        &["-t", "writethrough"],
        &["-t", "directsync"],
        &["-t", "unsafe"],
        &["-r", "1G"],
        &["-U"],
        &["-q"],
        &["--salvage"],
        &["-S", "512"],
        &["-S", "64k"],
        &["-S", "16M"],
        &["-S", "0"],
    ];
    for (i, options) in all.into_iter().enumerate() {
        for packed in part(2, rotated([&[][..], &["-c"]], i)) {
            same(&lab, &[options, packed].concat(), "x.qcow2");
        }
    }
    for options in [
        &["-t", "none", "-o", "cluster_size=512"][..],
        &["-t", "none", "-c"],
    ] {
        same(&lab, options, "odd.raw");
    }
}

/// Zeroes in the data are not written, with any cluster size of the target, unless with `-S 0`.
#[test]
fn zeroes_in_data() {
    let lab = Lab::new();
    lab.make(
        "create x.qcow2 8M; io x.qcow2: write -P 1 0 8M | write -P 0 1M 64k | write -P 0 2050k 4k \
         | write -P 0 3000k 1M | write -P 0 5M 2060k | write -P 0 8060k 20k",
    );
    let sizes = [
        "cluster_size=512",
        "cluster_size=4k",
        "cluster_size=64k",
        "cluster_size=2M",
    ];
    for (i, options) in sizes.into_iter().enumerate() {
        same(&lab, &["-o", options], "x.qcow2");
        // QEMU detects only aligned runs, so the maps differ.
        for sparse in part(3, rotated(["512", "64k", "1M"], i)) {
            let args = ["-O", "qcow2", "-S", sparse, "-o", options, "x.qcow2", "out"];
            both(&lab, &args, "").0.ok(sparse);
            assert_is_copy(&lab, "x.qcow2", sparse);
        }
    }
    same(&lab, &["-o", "extended_l2=on"], "x.qcow2");
    for options in [&["-S", "0"][..], &["-S", "0", "-c"]] {
        same(&lab, options, "x.qcow2");
        let allocated = lab.qemu_img(&["check", "out"]).ok("check").out;
        assert!(allocated.contains("128/128 = 100.00%"), "{allocated}");
    }
    // Holes too.
    lab.make("create holes.qcow2 4M; io holes.qcow2: write -P 1 1M 64k");
    for options in [&["-S", "0"][..], &["-S", "0", "-c"]] {
        same(&lab, options, "holes.qcow2");
        let allocated = lab.qemu_img(&["check", "out"]).ok("check").out;
        assert!(allocated.contains("64/64 = 100.00%"), "{allocated}");
    }
}

/// Data of the backing file are not copied, and zeroes over them stay.
#[test]
fn on_a_backing_file() {
    let lab = lab();
    lab.make(
        "img convert -O raw base.raw copy.raw; img convert -O qcow2 base.raw base.qcow2; \
         raw short.raw 2000384; create -b short.raw -F raw longer.qcow2 4M; \
         random longer.qcow2 8 20 wwzu",
    );
    let overlays = [
        ("base.raw", "raw", "x.qcow2"),
        ("copy.raw", "raw", "x.qcow2"),
        ("base.qcow2", "qcow2", "x.qcow2"),
        ("x.qcow2", "qcow2", "top.qcow2"),
        ("short.raw", "raw", "longer.qcow2"),
        // The source has no backing file: all of it is copied.
        ("x.qcow2", "qcow2", "base.raw"),
        ("short.raw", "raw", "odd.qcow2"),
    ];
    for (i, (backing, format, source)) in overlays.into_iter().enumerate() {
        let options = [
            &[][..],
            &["-W", "-m", "16"],
            &["-S", "0"],
            &["-c"],
            &["-c", "-o", "cluster_size=256k"],
            &["-o", "cluster_size=4k"],
            &["-o", "extended_l2=on"],
        ];
        for options in part(2, rotated(options, i)) {
            let mut all = options.to_vec();
            all.extend(["-B", backing, "-F", format]);
            same(&lab, &all, source);
        }
        // QEMU writes more zeroes here (parts of a cluster, and zeroes in version 2), so the maps
        // differ.
        for options in ["cluster_size=512k", "compat=0.10"] {
            let options = ["-B", backing, "-F", format, "-o", options];
            let args = [&["-O", "qcow2"], &options[..], &[source, "out"]].concat();
            both(&lab, &args, "").0.ok("larger clusters");
            assert_is_copy(&lab, source, "larger clusters");
        }
    }
    let named = "backing_file=base.raw,backing_fmt=raw";
    same(&lab, &["-o", named], "x.qcow2");
    let options = "extended_l2=on,preallocation=metadata";
    let args = [
        "-O", "qcow2", "-B", "base.raw", "-F", "raw", "-o", options, "x.qcow2", "out",
    ];
    both(&lab, &args, "").0.ok("preallocated");
    assert_is_copy(&lab, "x.qcow2", "preallocated");
}

/// Only data that are not in the backing file are written.
#[test]
fn only_what_differs_is_written() {
    let lab = Lab::new();
    lab.make(
        "create base.qcow2 64M; io base.qcow2: write -s noise 0 8M; \
         create -b base.qcow2 -F qcow2 x.qcow2; io x.qcow2: write -P 7 20M 64k | write -z 1M 64k",
    );
    for options in [&[][..], &["-c"], &["-S", "0"]] {
        let mut all = options.to_vec();
        all.extend(["-B", "base.qcow2", "-F", "qcow2"]);
        same(&lab, &all, "x.qcow2");
        let length = fs::metadata(lab.path("out")).expect("stat").len();
        assert!(length < 1 << 20, "{options:?}: {length} bytes");
    }
}

/// Zeroes and holes must replace old data of the target.
#[test]
fn into_an_existing_image() {
    let lab = lab();
    let dirty = "io out: write -P 77 0 8M";
    let targets = [
        "create out 8M",
        "create -o cluster_size=4k out 8M",
        "create -o cluster_size=2M out 8M",
        "create -o compat=0.10 out 8M",
        "create -o extended_l2=on out 8M",
        "create -o preallocation=metadata out 8M",
        "create -o data_file=d out 8M",
        "create -o data_file=d,data_file_raw=on out 8M",
        "create -b base.raw -F raw out 8M",
        "create -b base.raw -F raw -o compat=0.10 out 8M",
        "img create -q -f raw out 8M",
    ];
    for (i, target) in targets.into_iter().enumerate() {
        let format = match target.starts_with("img") {
            true => "raw",
            false => "qcow2",
        };
        let options: [&[&str]; 4] = [
            &["-n"],
            &["-n", "-W"],
            &["-n", "-S", "0"],
            &["-n", "-t", "none"],
        ];
        for (j, options) in part(2, rotated(options, i)).enumerate() {
            for dirt in part(2, rotated(["", dirty], i + j)) {
                let prepare = match (format, dirt) {
                    ("raw", "") => target.to_string(),
                    ("raw", _) => "img convert -O raw noise out; cut out 8388608".to_string(),
                    _ => format!("{target}; {dirt}"),
                };
                let mut args = vec!["-O", format];
                args.extend(options);
                args.extend(["x.qcow2", "out"]);
                both(&lab, &args, &prepare).0.ok(target);
                lab.qemu_img(&["compare", "-f", "qcow2", "-F", format, "x.qcow2", "out"])
                    .ok(target);
                if format == "qcow2" {
                    assert_is_copy(&lab, "x.qcow2", target);
                }
            }
        }
    }
    // Data past the size of the source stay.
    let larger = "create out 10M; io out: write -P 77 0 10M";
    both(&lab, &["-O", "qcow2", "-n", "x.qcow2", "out"], larger)
        .0
        .ok("larger");
    let read = ["-r", "-c", "read -P 77 8M 2M", "out"];
    let read = lab.qemu_io(&read).ok("read").out;
    assert!(!read.contains("verification failed"), "{read}");
    let (short, _) = both(
        &lab,
        &["-O", "qcow2", "-n", "x.qcow2", "out"],
        "create out 4M",
    );
    short.failed_with_one_line(1, "too small");
    both(&lab, &["-O", "qcow2", "-n", "x.qcow2", "out"], "")
        .0
        .failed_with_one_line(1, "none");
    let raw = "img create -q -f raw out 8M";
    both(&lab, &["-O", "qcow2", "-n", "x.qcow2", "out"], raw)
        .0
        .failed_with_one_line(1, "raw");
}

#[test]
fn existing_targets_with_other_options() {
    let lab = lab();
    let empty = "create out 8M";
    let args = ["-O", "qcow2", "-n", "-c", "x.qcow2", "out"];
    both(&lab, &args, empty).0.ok("-n -c");
    assert_is_copy(&lab, "x.qcow2", "-n -c");
    let args = ["-O", "qcow2", "-n", "--target-is-zero", "x.qcow2", "out"];
    both(&lab, &args, empty).0.ok("--target-is-zero");
    assert_is_copy(&lab, "x.qcow2", "--target-is-zero");
    // Zeroes of the source would be left to the backing file.
    if !testing_qemu() {
        lab.make("create -b base.raw -F raw over.qcow2 1M");
        let args = "convert -n -O qcow2 -B base.raw -F raw --target-is-zero x.qcow2 over.qcow2";
        let args: Vec<&str> = args.split(' ').collect();
        lab.zebu(&args).failed_with_one_line(1, "a contradiction");
    }
    // Zeroes are not written although the target is not zero.
    let not_zero = "create holes.qcow2 1M; io holes.qcow2: write -P 1 0 64k; \
                   create out 1M; io out: write -P 77 0 1M";
    let args = [
        "-O",
        "qcow2",
        "-n",
        "--target-is-zero",
        "holes.qcow2",
        "out",
    ];
    both(&lab, &args, not_zero)
        .0
        .ok("a target that is not zero");
    let read = [
        "-r",
        "-c",
        "read -P 77 64k 960k",
        "-c",
        "read -P 1 0 64k",
        "out",
    ];
    let read = lab.qemu_io(&read).ok("read").out;
    assert!(!read.contains("verification failed"), "{read}");
    // With the backing file that the target has.
    let same_base = "create -b base.raw -F raw out 8M";
    let args = ["-O", "qcow2", "-n", "-B", "base.raw", "x.qcow2", "out"];
    both(&lab, &args, same_base).0.ok("-n -B");
    assert_is_copy(&lab, "x.qcow2", "-n -B");

    for (target, format, prepare) in [
        ("driver=qcow2,file.filename=out", "qcow2", empty),
        (
            "driver=qcow2,file.driver=file,file.filename=out",
            "qcow2",
            empty,
        ),
        (
            "driver=raw,file.filename=out",
            "raw",
            "img create -q -f raw out 8M",
        ),
    ] {
        let args = ["-n", "--target-image-opts", "x.qcow2", target];
        both(&lab, &args, prepare).0.ok(target);
        lab.qemu_img(&["compare", "-f", "qcow2", "-F", format, "x.qcow2", "out"])
            .ok(target);
    }
    for target in [
        "driver=qcow2,file.filename=nothing",
        "driver=qcow9,file.filename=out",
    ] {
        let args = ["-n", "--target-image-opts", "x.qcow2", target];
        both(&lab, &args, empty).0.failed_with_one_line(1, target);
    }
}

#[test]
fn an_output_that_exists_is_replaced() {
    let lab = lab();
    for before in [
        "create out 1G; io out: write -P 77 0 3M",
        "img convert -O raw noise out",
        "create -o preallocation=full out 20M",
    ] {
        let (ours, theirs) = both(&lab, &["-O", "qcow2", "x.qcow2", "out"], before);
        ours.ok(before);
        assert_is_copy(&lab, "x.qcow2", before);
        assert_eq!(
            report(&lab, "out"),
            theirs.expect("QEMU's image"),
            "{before}"
        );
    }
}

#[test]
fn several_sources_are_joined() {
    let lab = lab();
    for sources in [
        &["x.qcow2", "odd.qcow2"][..],
        &["odd.qcow2", "odd.raw", "x.qcow2"],
        &["odd.raw", "odd.raw"],
    ] {
        let mut raw = vec!["convert", "-O", "raw"];
        raw.extend(sources);
        raw.push("joined.raw");
        lab.qemu_img(&raw).ok("joined by QEMU");
        for options in [
            &[][..],
            &["-c"],
            &["-S", "0"],
            &["-W", "-o", "cluster_size=2M"],
        ] {
            let mut args = vec!["-O", "qcow2"];
            args.extend(options);
            args.extend(sources);
            args.push("out");
            both(&lab, &args, "").0.ok("joined");
            assert_is_copy(&lab, "joined.raw", "joined");
        }
    }
}

#[test]
fn snapshots() {
    let lab = Lab::new();
    lab.make(
        "create s.qcow2 4M; random s.qcow2 1 20 wzc; img snapshot -c first s.qcow2; \
         random s.qcow2 2 20 wzu; img snapshot -c 1 s.qcow2; random s.qcow2 3 20 wzd",
    );
    for snapshot in ["first", "2", "snapshot.name=first"] {
        lab.qemu_img(&["convert", "-l", snapshot, "-O", "raw", "s.qcow2", "s.raw"])
            .ok("QEMU");
        for options in [&[][..], &["-c"]] {
            let mut args = vec!["-O", "qcow2", "-l", snapshot];
            args.extend(options);
            args.extend(["s.qcow2", "out"]);
            both(&lab, &args, "").0.ok(snapshot);
            assert_is_copy(&lab, "s.raw", snapshot);
        }
    }
}

#[test]
fn damaged_clusters() {
    let lab = lab();
    let l2 = lab.u64_at("packed.qcow2", lab.u64_at("packed.qcow2", 40)) & 0x00ff_ffff_ffff_fe00;
    let second = lab.u64_at("packed.qcow2", l2 + 8) & ((1 << 54) - 1);
    lab.patch("packed.qcow2", second, &[0xff; 64]);
    let (refused, _) = both(&lab, &["-O", "qcow2", "packed.qcow2", "out"], "");
    refused.failed_with_one_line(1, "a damaged cluster");
    for options in [
        &["--salvage"][..],
        &["--salvage", "-c"],
        &["--salvage", "-q"],
    ] {
        let mut args = vec!["-O", "qcow2"];
        args.extend(options);
        args.extend(["packed.qcow2", "out"]);
        let (salvaged, _) = both(&lab, &args, "");
        let quiet = salvaged.ok("--salvage").err.is_empty();
        assert_eq!(quiet, options.contains(&"-q"));
        lab.qemu_img(&["check", "out"]).ok("check");
        lab.qemu_img(&[
            "convert",
            "--salvage",
            "-q",
            "-O",
            "raw",
            "packed.qcow2",
            "salvaged.raw",
        ])
        .ok("QEMU");
        lab.qemu_img(&["compare", "salvaged.raw", "out"])
            .ok("salvaged");
    }
}

/// Data clusters are in guest order, also with many workers, so that sequential reads of the disk
/// are sequential in the file. A write that waits for metadata may be overtaken.
#[test]
fn clusters_are_in_guest_order() {
    let lab = Lab::new();
    lab.make("raw r.raw 60000256; img convert -S 0 -O qcow2 r.raw x.qcow2");
    for options in [
        &[][..],
        &["-S", "0"],
        &["-S", "0", "-m", "16"],
        &["-S", "0", "-t", "none"],
        &["-S", "0", "-t", "none", "-o", "cluster_size=4k"],
        &["-S", "0", "-t", "none", "-o", "cluster_size=2M"],
        &["-S", "0", "-t", "writethrough"],
    ] {
        let mut args = vec!["-O", "qcow2"];
        args.extend(options);
        args.extend(["x.qcow2", "out"]);
        both(&lab, &args, "").0.ok("in order");
        assert_is_copy(&lab, "x.qcow2", "in order");
        if beyond_qemu("its coroutines may overtake each other") {
            continue;
        }
        let report = json(&lab, &["check", "--output=json", "out"]);
        let number = |key: &str| report[key].as_u64().unwrap_or(0);
        let (fragments, clusters) = (number("fragmented-clusters"), number("allocated-clusters"));
        // One for each L2 table and each refcount block of 2048 entries.
        let metadata = match options.contains(&"cluster_size=4k") {
            true => clusters / 512 + clusters / 2048,
            false => clusters / 1000,
        };
        assert!(
            fragments <= 1 + metadata,
            "{options:?}: {fragments} fragments in {clusters} clusters"
        );
    }
}

#[test]
fn compressed_images_are_small() {
    let lab = Lab::new();
    let text = "the quick brown fox jumps over the lazy dog ";
    let mut all = String::new();
    let mut rng = Rng::new(1);
    for line in 0..300_000 {
        let number = rng.below(1 << 24);
        all += &format!("{line} {} {number}\n", &text[..(number % 40) as usize + 4]);
    }
    fs::write(lab.path("t.raw"), all).expect("write");
    for codec in ["zlib", "zstd"] {
        let codec = format!("compression_type={codec}");
        for options in [&[][..], &["-W", "-m", "16"]] {
            let mut all = vec!["-c", "-o", &codec];
            all.extend(options);
            same(&lab, &all, "t.raw");
        }
    }
    if beyond_qemu("it has no levels") {
        return;
    }
    let length = |level: &str| {
        let args = [
            "convert", "-c", "--level", level, "-O", "qcow2", "t.raw", "out",
        ];
        lab.zebu(&args).ok(level);
        assert_is_copy(&lab, "t.raw", level);
        fs::metadata(lab.path("out")).expect("stat").len()
    };
    assert!(length("9") < length("1"));
    for (level, options) in [("0", ""), ("10", ""), ("23", "compression_type=zstd")] {
        let before = fs::read(lab.path("out")).expect("read");
        let mut args = vec!["convert", "-c", "--level", level, "-O", "qcow2"];
        if !options.is_empty() {
            args.extend(["-o", options]);
        }
        args.extend(["t.raw", "out"]);
        lab.zebu(&args).failed_with_one_line(1, level);
        assert!(
            before == fs::read(lab.path("out")).expect("read"),
            "{level}"
        );
    }
    lab.zebu(&["convert", "--level", "3", "-O", "qcow2", "t.raw", "out"])
        .failed_with_one_line(1, "--level without -c");
}

#[test]
fn progress() {
    let lab = lab();
    for options in [&["-p"][..], &["-p", "-c"], &["-p", "-W"]] {
        let mut args = vec!["convert", "-O", "qcow2"];
        args.extend(options);
        args.extend(["x.qcow2", "out"]);
        let out = lab.zebu(&args).ok("progress").out;
        assert!(out.starts_with("    (0.00/100%)\r"), "{out:?}");
        assert!(out.ends_with("    (100.00/100%)\r\n"), "{out:?}");
    }
}

#[test]
fn refusals() {
    let lab = lab();
    fs::create_dir(lab.path("folder")).expect("mkdir");
    for args in [
        &["-o", "foo=1", "x.qcow2", "out"][..],
        &["-o", "nofoo", "x.qcow2", "out"],
        &["-o", ",", "x.qcow2", "out"],
        &["-o", "", "x.qcow2", "out"],
        &["-o", "cluster_size=100", "x.qcow2", "out"],
        &["-o", "cluster_size=abc", "x.qcow2", "out"],
        &["-o", "cluster_size=-1", "x.qcow2", "out"],
        &["-o", "compat=foo", "x.qcow2", "out"],
        &["-o", "preallocation=foo", "x.qcow2", "out"],
        &["-o", "refcount_bits=3", "x.qcow2", "out"],
        &["-o", "refcount_bits=abc", "x.qcow2", "out"],
        &["-o", "lazy_refcounts=foo", "x.qcow2", "out"],
        &["-o", "lazy_refcounts=on,compat=0.10", "x.qcow2", "out"],
        &["-o", "compression_type=foo", "x.qcow2", "out"],
        &["-o", "compression_type=zstd,compat=v2", "x.qcow2", "out"],
        &["-o", "extended_l2=on,cluster_size=8k", "x.qcow2", "out"],
        &["-o", "data_file_raw=on", "x.qcow2", "out"],
        &["-o", "data_file=missing/d", "x.qcow2", "out"],
        &["-c", "-o", "preallocation=metadata", "x.qcow2", "out"],
        &["-F", "raw", "x.qcow2", "out"],
        &["-B", "base.raw", "x.qcow2", "out"],
        &["-o", "backing_file=base.raw", "x.qcow2", "out"],
        &["-B", "base.raw", "-F", "foo", "x.qcow2", "out"],
        &["-B", "base.raw", "-F", "raw", "x.qcow2", "odd.raw", "out"],
        &["-n", "-o", "cluster_size=4k", "x.qcow2", "out"],
        &["--target-is-zero", "x.qcow2", "out"],
        &["--target-image-opts", "x.qcow2", "out"],
        &["-n", "--target-image-opts", "x.qcow2", "out"],
        &["--skip-broken-bitmaps", "x.qcow2", "out"],
        &["-S", "513", "x.qcow2", "out"],
        &["-m", "17", "x.qcow2", "out"],
        &["-r", "x", "x.qcow2", "out"],
        &["-l", "none", "x.qcow2", "out"],
        &["x.qcow2", "missing/out"],
        &["x.qcow2", "folder"],
        &["x.qcow2", "foo:out"],
        &["nothing", "out"],
        &["x.qcow2", "nothing", "out"],
        &["x.qcow2"],
    ] {
        let all: Vec<&str> = [&["convert", "-O", "qcow2"], args].concat();
        let ours = lab.zebu(&all);
        assert_eq!(ours.status, 1, "{all:?}: {ours:#?}");
        assert!(
            !lab.path("out").exists() || testing_qemu(),
            "{all:?} left an output"
        );
        if peer().is_current() {
            assert_same_answer(&lab, &all, "refused");
        }
        let _ = fs::remove_file(lab.path("out"));
    }
    for args in [
        &["-O", "raw", "-o", "foo=1", "x.qcow2", "out"][..],
        &["-O", "raw", "-o", "cluster_size=4k", "x.qcow2", "out"],
        &["-O", "raw", "-o", "preallocation=foo", "x.qcow2", "out"],
        &[
            "-O",
            "raw",
            "-o",
            "preallocation=metadata",
            "x.qcow2",
            "out",
        ],
        &["-O", "raw", "-F", "raw", "x.qcow2", "out"],
        &["-O", "raw", "-c", "x.qcow2", "out"],
        &["-O", "raw", "--bitmaps", "x.qcow2", "out"],
        &["-O", "bochs", "x.qcow2", "out"],
        &["-O", "foo", "x.qcow2", "out"],
    ] {
        let all: Vec<&str> = [&["convert"], args].concat();
        lab.zebu(&all).failed_with_one_line(1, &all.join(" "));
        if peer().is_current() {
            assert_same_answer(&lab, &all, "refused");
        }
        let _ = fs::remove_file(lab.path("out"));
    }
    for args in [
        &["-O", "qcow2", "-o", "help"][..],
        &["-O", "qcow2", "-o", "help", "x.qcow2", "out"],
        &["-O", "raw", "-o", "help"],
    ] {
        let all: Vec<&str> = [&["convert"], args].concat();
        if peer().is_current() {
            assert_same_answer(&lab, &all, "help").ok("help");
        }
    }
}

#[test]
fn unsupported_features_are_refused_by_name() {
    if beyond_qemu("it supports them") {
        return;
    }
    let lab = lab();
    for (args, name) in [
        (&["-c", "-o", "data_file=d"][..], "data file"),
        (&["--object", "secret,id=a"], "must be provided"),
    ] {
        let all: Vec<&str> = [&["convert", "-O", "qcow2"], args, &["x.qcow2", "out"]].concat();
        let answer = lab.zebu(&all);
        answer.failed_with_one_line(1, name);
        assert!(answer.err.contains(name), "{answer:#?}");
        assert!(!lab.path("out").exists(), "{all:?} left an output");
    }
}

/// A mistaken command must not destroy an image.
#[test]
fn failures_leave_existing_files_unchanged() {
    let lab = lab();
    let images = ["x.qcow2", "top.qcow2", "base.raw"];
    let before = images.map(|name| fs::read(lab.path(name)).expect("read"));
    let unchanged = |what: &str| {
        for (name, before) in images.iter().zip(&before) {
            let now = fs::read(lab.path(name)).expect("read");
            assert!(now == *before, "{what}: {name} was changed");
        }
    };
    for args in [
        // The target is the source or in its backing chain.
        &["x.qcow2", "x.qcow2"][..],
        &["-c", "x.qcow2", "./x.qcow2"],
        &["-n", "x.qcow2", "x.qcow2"],
        &["top.qcow2", "x.qcow2"],
        &["top.qcow2", "base.raw"],
        &["-o", "data_file=base.raw", "top.qcow2", "out"],
        &["odd.raw", "base.raw", "base.raw"],
    ] {
        let all: Vec<&str> = [&["convert", "-O", "qcow2"], args].concat();
        let answer = lab.zebu(&all);
        assert_eq!(answer.status, 1, "{all:?}: {answer:#?}");
        unchanged(&all.join(" "));
        if peer().is_current() {
            assert_same_answer(&lab, &all, "in use");
        }
        let _ = fs::remove_file(lab.path("out"));
    }
    let held = lab.held_by_qemu(&["x.qcow2"]);
    for args in [&["odd.raw", "x.qcow2"][..], &["-n", "odd.raw", "x.qcow2"]] {
        let all: Vec<&str> = [&["convert", "-O", "qcow2"], args].concat();
        let answer = lab.zebu(&all);
        assert_eq!(answer.status, 1, "{all:?}: {answer:#?}");
        unchanged(&all.join(" "));
    }
    drop(held);
    if beyond_qemu("it makes the target before it checks the options") {
        return;
    }
    for args in [
        &["-B", "nothing", "-F", "raw"][..],
        &["-B", "base.raw", "-F", "qcow2"],
        &["-B", "x.qcow2", "-F", "qcow2"],
        &["-o", "cluster_size=5"],
        &["-t", "bogus"],
    ] {
        let all: Vec<&str> = [&["convert", "-O", "qcow2"], args, &["odd.raw", "x.qcow2"]].concat();
        let answer = lab.zebu(&all);
        assert_eq!(answer.status, 1, "{all:?}: {answer:#?}");
        unchanged(&all.join(" "));
    }
}

/// Time and space depend on the data, not on the size of the disk.
#[test]
fn large_disks_with_little_data() {
    let lab = Lab::new();
    lab.make("create x.qcow2 16T; io x.qcow2: write -s noise 9T 64k | write -c -s text 15T 64k");
    for options in [&[][..], &["-c"], &["-o", "cluster_size=2M"]] {
        let mut args = vec!["convert", "-O", "qcow2"];
        args.extend(options);
        args.extend(["x.qcow2", "out"]);
        let limits = Limits {
            time: Duration::from_secs(30),
            memory: Some(1 << 20),
            ..Limits::default()
        };
        lab.zebu_limited(&args, &limits).ok("large");
        assert_is_copy(&lab, "x.qcow2", "large");
        let length = fs::metadata(lab.path("out")).expect("stat").len();
        assert!(length < 64 << 20, "{options:?}: {length} bytes");
    }
}
