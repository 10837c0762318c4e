//! External data files. Missing data of a truncated data file are errors, not zeroes; every data
//! file of QEMU is accepted; a file that the chain uses for something else is refused.

use std::fs::{self, File};

use crate::common::pair::Pair;
use crate::common::{Lab, beyond_qemu, part, testing_qemu};

fn cut(lab: &Lab, name: &str, length: u64) {
    let file = File::options().write(true).open(lab.path(name));
    file.and_then(|f| f.set_len(length)).expect("cut");
}

fn length(lab: &Lab, name: &str) -> u64 {
    fs::metadata(lab.path(name)).expect("metadata").len()
}

/// Changes that QEMU makes to an image, in this order.
const STEPS: &[&[&str]] = &[
    &[],
    &["io", "-c", "write -P 1 SIZE-512 512"],
    &["io", "-c", "write -P 2 1000 10000"],
    &[
        "io",
        "-d",
        "unmap",
        "-c",
        "write -z -u 0 64k",
        "-c",
        "discard 0 8k",
    ],
    &["resize", "-q", "x.q", "+300k"],
    &["io", "-c", "write -z SIZE-70000 70000"],
    &["resize", "-q", "--preallocation=metadata", "x.q", "+300k"],
    &["resize", "-q", "--shrink", "x.q", "-400k"],
    &["resize", "-q", "x.q", "+2M"],
    &["io", "-c", "write -P 3 SIZE-512 512"],
];

#[test]
fn data_files_made_by_qemu_are_accepted() {
    let mut cases = 0;
    for options in [
        "",
        ",data_file_raw=on",
        ",data_file_raw=on,extended_l2=on",
        ",extended_l2=on,preallocation=metadata",
        ",preallocation=falloc",
        ",data_file_raw=on,preallocation=full",
        ",cluster_size=2M,preallocation=metadata",
        ",cluster_size=512",
    ] {
        for size in part(2, ["1M", "1000k", "500000"]) {
            let lab = Lab::new();
            lab.make(&format!("create -o data_file=d{options} x.q {size}"));
            for step in STEPS {
                let what = format!("{options} {size}: {step:?}");
                match step {
                    [] => {}
                    ["io", args @ ..] => {
                        // The size in the header.
                        let size = lab.u64_at("x.q", 24);
                        let place = |arg: &&str| {
                            let (before, after) = arg.split_once("SIZE-")?;
                            let (less, after) = after.split_once(' ')?;
                            let at = size - less.parse::<u64>().expect("a number");
                            Some(format!("{before}{at} {after}"))
                        };
                        let args: Vec<String> = (args.iter())
                            .map(|arg| place(arg).unwrap_or_else(|| arg.to_string()))
                            .chain(["x.q".to_string()])
                            .collect();
                        let args: Vec<&str> = args.iter().map(String::as_str).collect();
                        lab.qemu_io(&args).ok(&what);
                    }
                    args => drop(lab.qemu_img(args).ok(&what)),
                }
                lab.qemu_img(&["convert", "-O", "raw", "x.q", "theirs"])
                    .ok(&what);
                lab.zebu(&["compare", "x.q", "theirs"]).ok(&what);
                lab.zebu(&["check", "x.q"]).ok(&what);
                lab.zebu(&["io", "-c", "write -P 9 4k 512", "x.q"])
                    .ok(&what);
                cases += 1;
            }
        }
    }
    println!("cases: {cases} states of images of QEMU");
}

/// Regression: what a larger size added was not mapped. After a crash before the mapping was durable
/// the image read zeroes where the data file has data.
#[test]
fn what_growth_adds_of_a_raw_data_file_is_mapped() {
    let cluster_sizes = ["", ",cluster_size=4k", ",cluster_size=2M"];
    for options in part(3, cluster_sizes) {
        let pair = Pair::new(&format!(
            "create -o data_file=d,data_file_raw=on{options} x.q 1000k; create top.q 3M"
        ));
        let same = |what: &str| {
            for lab in [&pair.ours, &pair.theirs] {
                let map = lab.qemu_img(&["map", "--output=json", "x.q"]).ok(what);
                let map: serde_json::Value = serde_json::from_str(&map.out).expect("JSON");
                let mut runs = map.as_array().expect("a list").iter();
                assert!(runs.all(|run| run["present"] == true), "{what}: {map}");
            }
            pair.assert_alike(&["x.q"], what);
            let size = pair.ours.u64_at("x.q", 24);
            // QEMU's file ends with a cluster.
            let lengths = size..=length(&pair.theirs, "d");
            assert!(lengths.contains(&length(&pair.ours, "d")), "{what}");
        };
        pair.succeed(&["resize", "-q", "x.q", "1024512"]);
        same("resize by a sector");
        pair.succeed(&["resize", "-q", "x.q", "+0"]);
        same("resize by nothing");
        for mode in ["metadata", "falloc", "full"] {
            let option = format!("--preallocation={mode}");
            pair.succeed(&["resize", "-q", &option, "x.q", "+50k"]);
            same(mode);
        }
        pair.succeed(&["resize", "-q", "x.q", "1300k"]);
        same("resize");
        pair.same_io(&["x.q"], "truncate 2M");
        same("truncate");
        pair.succeed(&["amend", "-o", "size=2500k", "x.q"]);
        same("amend");
        pair.succeed(&["rebase", "-q", "-u", "-b", "x.q", "-F", "qcow2", "top.q"]);
        pair.succeed(&["commit", "-q", "top.q"]);
        same("commit");
        let script = [
            "-t",
            "writeback",
            "-c",
            "write -P 7 2800k 64k",
            "-c",
            "abort",
        ];
        pair.ours.zebu_io(&[&script[..], &["x.q"]].concat());
        let compare = ["compare", "-f", "raw", "-F", "qcow2", "d", "x.q"];
        pair.ours.qemu_img(&compare).ok("after a crash");
    }
}

#[test]
fn truncated_data_files_are_errors() {
    if beyond_qemu("it reads zeroes") {
        return;
    }
    const WHY: &str = "past the end of the external data file";
    for options in [
        "",
        ",data_file_raw=on",
        ",preallocation=metadata,extended_l2=on",
    ] {
        let lab = Lab::new();
        lab.make(&format!(
            "create -o data_file=d{options} x.q 1M; io x.q: write -P 7 0 1M"
        ));
        cut(&lab, "d", 300 << 10);
        let fails = |args: &[&str]| {
            let answer = lab.zebu(args);
            let is_error = answer.status != 0 && answer.status != 101;
            assert!(is_error, "{options}: {args:?}: {answer:#?}");
            let both = format!("{}{}", answer.out, answer.err);
            assert!(both.contains(WHY), "{options}: {args:?}: {answer:#?}");
        };
        fails(&["convert", "-O", "raw", "x.q", "out"]);
        fails(&["convert", "-C", "-O", "raw", "x.q", "out"]);
        fails(&["compare", "x.q", "x.q"]);
        fails(&["dd", "if=x.q", "of=out"]);
        fails(&["io", "-r", "-c", "read 320k 64k", "x.q"]);
        fails(&["io", "-r", "-c", "read 300k 512", "x.q"]);
        lab.zebu(&["io", "-r", "-c", "read 0 300k", "x.q"])
            .ok(options);
        for repair in [&[][..], &["-r", "leaks"], &["-r", "all"]] {
            let mut args = vec!["check"];
            args.extend(repair);
            args.push("x.q");
            let answer = lab.zebu(&args);
            assert_eq!(answer.status, 2, "{options}: {answer:#?}");
            assert_eq!(answer.err.matches(WHY).count(), 12, "{answer:#?}");
            assert!(answer.out.contains("12 errors were found"), "{answer:#?}");
        }
        // A write past its end would turn the missing data into zeroes.
        for command in ["write 1020k 4k", "write 0 4k"] {
            fails(&["io", "-c", command, "x.q"]);
        }
        fails(&["resize", "x.q", "2M"]);
        assert_eq!(length(&lab, "d"), 300 << 10, "{options}");
        lab.zebu(&["convert", "--salvage", "-O", "raw", "x.q", "out"])
            .ok("--salvage");
    }
}

#[test]
fn truncated_data_files_stop_commit_and_rebase() {
    if beyond_qemu("it writes zeroes") {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "create base.q 1M; io base.q: write -P 5 0 1M; \
         create -o data_file=d -b base.q -F qcow2 over.q; io over.q: write -P 7 0 1M",
    );
    cut(&lab, "d", 64 << 10);
    let base = fs::read(lab.path("base.q")).expect("read");
    for args in [
        &["commit", "over.q"][..],
        &["commit", "-d", "over.q"],
        &["rebase", "-b", "", "over.q"],
    ] {
        let answer = lab.zebu(args);
        answer.failed_with_one_line(1, &args.join(" "));
        assert!(fs::read(lab.path("base.q")).expect("read") == base);
    }
    // The same with missing data in the base.
    lab.make("create -o data_file=bd cut.q 1M; io cut.q: write -P 5 0 1M");
    lab.make("create -b cut.q -F qcow2 top.q; io top.q: write -P 6 900k 4k");
    cut(&lab, "bd", 64 << 10);
    for args in [
        &["commit", "top.q"][..],
        &["convert", "-O", "raw", "top.q", "out"],
        &["rebase", "-b", "", "top.q"],
    ] {
        assert_eq!(lab.zebu(args).status, 1, "{args:?}");
    }
    assert_eq!(length(&lab, "bd"), 64 << 10);
}

#[test]
fn files_of_the_chain_are_refused_as_data_file() {
    if testing_qemu() {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "raw raw.raw 1048576; create -o data_file=bd base.q 1M; io base.q: write -P 5 0 1M; \
         create -o data_file=od -b base.q -F qcow2 over.q; io over.q: write -P 7 0 64k; \
         create -b raw.raw -F raw plain.q; create other.q 1M; io other.q: write -P 8 0 1M",
    );
    fs::hard_link(lab.path("bd"), lab.path("hard")).expect("link");
    std::os::unix::fs::symlink("base.q", lab.path("link")).expect("link");
    let names = [
        "raw.raw", "base.q", "bd", "over.q", "od", "plain.q", "other.q",
    ];
    let content = || names.map(|name| fs::read(lab.path(name)).expect("read"));
    let before = content();
    let mut cases = 0;
    let mut refused = |args: &str| {
        let args: Vec<&str> = args.split(' ').collect();
        let answer = lab.zebu(&args);
        assert_eq!(answer.status, 1, "{args:?}: {answer:#?}");
        answer.orderly(&args.join(" "));
        assert!(before == content(), "{args:?} changed a file: {answer:#?}");
        assert!(!lab.path("new").exists(), "{args:?}");
        cases += 1;
    };
    for data in ["bd", "hard", "./bd", "base.q", "link"] {
        refused(&format!(
            "create -f qcow2 -b base.q -F qcow2 -o data_file={data} new"
        ));
        refused(&format!(
            "create -f qcow2 -b over.q -F qcow2 -o data_file={data} new 2M"
        ));
        refused(&format!(
            "convert -O qcow2 -B base.q -F qcow2 -o data_file={data} other.q new"
        ));
        refused(&format!("amend -o data_file={data} over.q"));
    }
    for mode in ["", " -u"] {
        refused(&format!(
            "create{mode} -f qcow2 -b raw.raw -F raw -o data_file=raw.raw new 1M"
        ));
        refused(&format!("rebase{mode} -b od -F raw over.q"));
        refused(&format!("rebase{mode} -b ./od -F raw over.q"));
    }
    refused("create -f qcow2 -o data_file=other.q other.q 1M");
    refused("create -u -f qcow2 -b base.q -F qcow2 link 1M");
    refused("amend -o data_file=over.q over.q");
    // An image over the data file counts as well.
    lab.make("img create -q -f qcow2 -u -b od -F raw second.q 1M");
    refused("rebase -u -b second.q -F qcow2 over.q");
    // Without a loop it succeeds.
    lab.zebu(&["amend", "-o", "data_file=./od", "over.q"])
        .ok("its own, by another name");
    lab.zebu(&["rebase", "-u", "-b", "raw.raw", "-F", "raw", "over.q"])
        .ok("another base");
    println!("cases: {cases} requests");
}

/// The data file of a new image is no other image's: not that of its backing file, which may have its own.
#[test]
fn a_new_image_and_its_backing_file_have_data_files_of_their_own() {
    let lab = Lab::new();
    let run = |line: &str| {
        let args: Vec<_> = line.split(' ').map(|word| word.replace('~', " ")).collect();
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        lab.zebu(&args).ok(line);
    };
    run("create -q -f qcow2 -o data_file=bd base.q 1M");
    run("io -c write~-q~-P~7~64k~128k base.q");
    run("create -q -f qcow2 plain.q 1M");
    run("io -c write~-q~-P~8~0~192k plain.q");
    for (base, below) in [("base.q", 7), ("plain.q", 8)] {
        run(&format!("create -q -f qcow2 -b {base} -F qcow2 over.q"));
        run("io -c write~-q~-P~9~128k~8k over.q");
        run(&format!(
            "convert -O qcow2 -B {base} -F qcow2 -o data_file=nd over.q new.q"
        ));
        run("compare over.q new.q");
        // The rest of the cluster is the base's.
        run("io -c write~-q~-P~5~66k~512 new.q");
        run(&format!("io -c read~-q~-P~{below}~64k~2k new.q"));
        for name in ["over.q", "new.q", "nd"] {
            std::fs::remove_file(lab.path(name)).unwrap();
        }
    }
}

/// Two images over one that has a data file are written side by side.
#[test]
fn the_data_file_of_a_backing_file_is_only_read() {
    let lab = Lab::new();
    lab.make(
        "create -o data_file=d.raw base.qcow2 1M; create -b base.qcow2 -F qcow2 a.qcow2; \
         create -b base.qcow2 -F qcow2 b.qcow2",
    );
    let _held = lab.held_by_zebu(&["a.qcow2"]);
    let write = ["-c", "write 0 64k", "b.qcow2"];
    lab.qemu_io(&write).ok("by QEMU");
    lab.zebu_io(&write).ok("by zebu");
}
