//! Filters over images and over files, compared with QEMU: what passes through them, what they change,
//! and what is refused.

use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use crate::common::pair::Pair;
use crate::common::{Lab, compare_answers, peer};

const IMAGES: &str = "create x.qcow2 4M; io x.qcow2: write -P 1 0 256k | write -c -P 5 2M 64k; \
    create -b x.qcow2 -F qcow2 top.qcow2; create new.qcow2 4M; raw r.raw 1000448";
const GROUP: [&str; 2] = ["--object", "throttle-group,id=g,x-iops-total=1000"];
const THROTTLE: &str = "driver=throttle,throttle-group=g,";

/// The options of an image below a filter.
fn below(filter: &str, format: &str, file: &str) -> String {
    let file = format!("file.file.driver=file,file.file.filename={file}");
    format!("{filter}file.driver={format},{file}")
}

/// Both say the same of one folder.
#[track_caller]
fn same_answer(lab: &Lab, args: &[&str]) {
    lab.sync_files();
    let (ours, theirs) = (lab.zebu(args), lab.qemu_img(args));
    compare_answers(&ours, &theirs, args, "the same folder");
}

#[test]
fn names_are_shown_and_refused_alike() {
    let pair = Pair::new(IMAGES);
    for name in [
        r#"json:{"driver":"throttle","throttle-group":"g","file.filename":"r.raw"}"#,
        r#"json:{"driver":"throttle","throttle-group":"h","file.filename":"r.raw"}"#,
        r#"json:{"driver":"throttle","file.filename":"r.raw"}"#,
        r#"json:{"driver":"throttle","throttle-group":"g","file":"r.raw"}"#,
        r#"json:{"driver":"compress"}"#,
        r#"json:{"driver":"compress","file.filename":"r.raw"}"#,
        r#"json:{"driver":"compress","file.driver":"raw","file.file.filename":"r.raw"}"#,
        r#"json:{"driver":"compress","x":1,"file.driver":"qcow2","file.file.filename":"x.qcow2"}"#,
        r#"json:{"driver":"copy-on-read","file.driver":"qcow2","file.file.filename":"x.qcow2"}"#,
        r#"json:{"driver":"preallocate","prealloc-align":100,"file.filename":"r.raw"}"#,
        r#"json:{"driver":"preallocate","prealloc-align":512,"file.filename":"r.raw"}"#,
        r#"json:{"driver":"raw","file.driver":"preallocate","file.file.filename":"r.raw"}"#,
    ] {
        for format in ["--output=human", "--output=json"] {
            pair.both(&["info", GROUP[0], GROUP[1], format, name]);
        }
    }
    // A raw image shows what is specific to its file in the same way in all versions.
    let shown = below(THROTTLE, "raw", "r.raw");
    pair.succeed(&["info", GROUP[0], GROUP[1], "--image-opts", &shown]);
    for limits in [
        "x-iops-total=1,x-iops-read=2",
        "x-foo=1",
        "x-iops-total=-1",
        "x-iops-total-max=1",
        "x-iops-total=5,x-iops-total-max=1",
        "x-iops-total=a",
        "limits.foo=1",
        "x-iops-size=4096",
        "x-iops-total=10,x-iops-total-max=20,x-iops-total-max-length=0",
        "x-bps-total=9999999999999999",
    ] {
        let object = format!("throttle-group,id=g,{limits}");
        let args = ["info", "--object", &object, "--image-opts", &shown];
        pair.both(&args);
    }
}

#[test]
fn requests_pass_or_are_changed_as_in_qemu() {
    for (script, filter, file) in [
        (
            "read -P 1 0 64k\nread 3M 64k\nmap\nwrite -P 7 100k 3k\nread -P 7 100k 3k\nread 2000k 200k\n\
             write -z 2M 4k\ndiscard 64k 64k\nread 0 4M\nmap\nlength\n",
            "driver=copy-on-read,",
            "top.qcow2",
        ),
        (
            "write -P 3 0 128k\nwrite -P 4 200k 10k\nread -P 4 200k 10k\nread -P 0 196608 8192\n\
             write -P 5 1000k 500k\nwrite -P 6 0 64k\nwrite -z 0 64k\nwrite -P 9 1k 1k\nmap\n\
             discard 1M 64k\nread -P 9 1k 1k\n",
            "driver=compress,",
            "new.qcow2",
        ),
        (
            "write -P 3 0 128k\nread -P 3 0 128k\nwrite -z 0 64k\nwrite -c -P 6 1M 64k\nflush\n\
             discard 64k 64k\nmap\naio_write -P 2 2M 64k\naio_read 3M 64k\naio_flush\nlength\n",
            THROTTLE,
            "new.qcow2",
        ),
    ] {
        let pair = Pair::new(IMAGES);
        let options = below(filter, "qcow2", file);
        pair.same_io(&[GROUP[0], GROUP[1], "--image-opts", &options], script);
        pair.assert_same_disk(file, "qcow2");
        pair.succeed(&["check", "-q", file]);
        let args = |command| [command, GROUP[0], GROUP[1], "--image-opts", &options];
        if !filter.contains("copy-on-read") {
            pair.both(&args("map"));
            let plain = ["driver=qcow2,file.filename=new.qcow2"];
            pair.succeed(&[&args("compare")[..], &plain].concat());
        }
    }
}

/// Zeroes of a part of a cluster are a write of that cluster: it becomes compressed, or is refused where it
/// is allocated. What is refused keeps nothing else of a request from being written.
#[test]
fn compress_writes_clusters_of_which_a_part_is_zeroed() {
    for is_over_throttle in [false, true] {
        let options = match is_over_throttle {
            false => below("driver=compress,", "qcow2", "top.qcow2"),
            true => {
                "driver=compress,file.driver=throttle,file.throttle-group=g,file.file.driver=qcow2,\
                 file.file.file.driver=file,file.file.file.filename=top.qcow2"
                    .into()
            }
        };
        let pair = Pair::new(IMAGES);
        let plain = "write -P 1 256k 64k\nwrite -P 2 512k 64k\nwrite -z 768k 64k\n";
        pair.same_io(&["top.qcow2"], plain);
        pair.same_io(&["top.qcow2"], "write -c -P 4 448k 192k\nmap\n");
        let script = "write -z 1k 4k\nmap\nwrite -z 260k 4k\nwrite -z 250k 20k\nwrite -z 300k 128k\n\
             write -z 500k 200k\nwrite -z -u 2000k 100k\nwrite -z 770k 4k\nwrite -P 7 200k 400k\nmap\n\
             write -P 8 1000k 40k\nwrite -P 9 1020k 4k\nwrite -P 3 448k 192k\nwrite -P 4 3M 500k\n\
             write -P 5 2944k 512k\ndiscard 3100k 300k\ndiscard 1k 100k\nmap\nread -v 0 8k\n";
        pair.same_io(&[GROUP[0], GROUP[1], "--image-opts", &options], script);
        pair.assert_same_disk("top.qcow2", "qcow2");
    }
}

/// A filter over a backing file hides nothing of the chain; `filtered_chains.rs` has others.
#[test]
fn a_filter_is_over_a_backing_file_as_in_qemu() {
    let pair = Pair::new(
        "create base.q 1M; io base.q: write -P 1 0 256k; create -b base.q -F qcow2 mid.q; \
         io mid.q: write -P 2 64k 64k",
    );
    let below = r#"json:{"driver":"throttle","throttle-group":"g",
        "file":{"driver":"qcow2","file":{"driver":"file","filename":"mid.q"}}}"#;
    let below = below.replace(['\n', ' '], "");
    let run = |args: &[&str]| pair.succeed(&[&args[..1], &GROUP, &args[1..]].concat());
    run(&[
        "create", "-f", "qcow2", "-b", &below, "-F", "throttle", "top.q",
    ]);
    run(&[
        "create",
        "-f",
        "qcow2",
        "-b",
        "base.q",
        "-F",
        "preallocate",
        "short.q",
    ]);
    for (file, size) in [("top.q", "512k 64k"), ("short.q", "64k 4k")] {
        let script = format!("write -P 3 {size}\nread -v 63k 2k\nread -P 3 {size}\n");
        pair.same_io(&[GROUP[0], GROUP[1], file], &script);
        for output in ["--output=human", "--output=json"] {
            same_answer(&pair.ours, &["map", GROUP[0], GROUP[1], output, file]);
        }
        if peer().is_current() {
            for format in ["human", "json"] {
                let output = format!("--output={format}");
                let args = ["info", GROUP[0], GROUP[1], "--backing-chain", &output, file];
                same_answer(&pair.ours, &args);
            }
        }
    }
    run(&["commit", "-b", &below, "top.q"]);
    run(&["commit", "-b", "base.q", "top.q"]);
    pair.fail(&["commit", GROUP[0], GROUP[1], "-b", "mid.q", "top.q"]);
    for (file, size) in [("mid.q", "512k 64k"), ("base.q", "512k 64k")] {
        pair.same_io(&["-r", file], &format!("read -P 3 {size}\n"));
    }
}

/// Commands that need the image find it below its filters.
#[test]
fn commands_find_the_image_below_its_filters() {
    let lab = Lab::new();
    lab.make("create x.qcow2 4M");
    let options = below(THROTTLE, "qcow2", "x.qcow2");
    let run = |args: &[&str], rest: &[&str]| {
        let args = [args, &GROUP, &["--image-opts", &options], rest].concat();
        let answer = lab.zebu(&args);
        assert_eq!(answer.status, 0, "{args:?}: {answer:#?}");
        answer
    };
    run(&["snapshot", "-c", "one"], &[]);
    assert!(run(&["snapshot", "-l"], &[]).out.contains("one"));
    run(&["bitmap", "--add"], &["b"]);
    run(&["check"], &[]);
    run(&["resize"], &["8M"]);
    run(&["amend", "-o", "lazy_refcounts=on"], &[]);
    run(&["bench", "-w", "-c", "10"], &[]);
    let shown = run(&["info"], &[]).out;
    assert!(shown.contains("file format: throttle"), "{shown}");
    assert!(shown.contains("virtual size: 8 MiB"), "{shown}");
}

/// All nodes of a group keep to its limits together.
#[test]
fn a_group_is_throttled() {
    let lab = Lab::new();
    lab.make("raw r.raw 1048576");
    let group = ["--object", "throttle-group,id=g,limits.iops-total=20"];
    let options = below(THROTTLE, "raw", "r.raw");
    let began = Instant::now();
    let script = "read 0 4k\n".repeat(12);
    let answer = lab.zebu_io_script(&[group[0], group[1], "--image-opts", &options], &script);
    assert_eq!(answer.status, 0, "{answer:#?}");
    // Two pass at once, and ten wait for a twentieth of a second each.
    assert!(
        began.elapsed() >= Duration::from_millis(450),
        "{:?}",
        began.elapsed()
    );
}

/// A file that is written behind its end is longer while it is open, and not afterwards.
#[test]
fn a_file_is_preallocated_while_it_is_open() {
    let lab = Lab::new();
    lab.make("create x.qcow2 16M");
    let options = "driver=qcow2,file.driver=preallocate,file.prealloc-size=8M,\
                   file.file.driver=file,file.file.filename=x.qcow2";
    let mut child = lab.start_zebu(&["io", "--image-opts", options]);
    let mut input = child.stdin.take().expect("it is piped");
    input.write_all(b"write -P 1 0 64k\nflush\n").unwrap();
    let length = || fs::metadata(lab.path("x.qcow2")).unwrap().len();
    let began = Instant::now();
    while length() < 8 << 20 {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", length());
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(input);
    assert!(child.wait().unwrap().success());
    assert!(length() < 1 << 20, "{}", length());
    lab.qemu_img(&["check", "-q", "x.qcow2"]).ok("check");
    lab.qemu_io(&["-c", "read -P 1 0 64k", "x.qcow2"])
        .ok("read");
}

/// A write of a part of a cluster reads the rest slowly; what clears it meanwhile is not undone.
#[test]
fn compress_undoes_no_zeroes_beside_a_write() {
    let lab = Lab::new();
    fs::write(lab.path("c7.raw"), vec![7; 1 << 20]).unwrap();
    lab.zebu(&["create", "-q", "-f", "qcow2", "c.q", "1M"])
        .ok("create");
    let image = "driver=compress,file.driver=qcow2,file.file.filename=c.q,file.backing.driver=raw,\
                 file.backing.file.driver=throttle,file.backing.file.throttle-group=g,\
                 file.backing.file.file.filename=c7.raw";
    let mut args = vec![
        "io",
        "--object",
        "throttle-group,id=g,limits.bps-read=65536",
    ];
    args.extend(["--image-opts", image]);
    for command in [
        // The bucket is empty after it.
        "read -q 512k 64k",
        "aio_write -P 1 0 4k",
        "write -q -z 0 1M",
        "aio_flush",
        "flush",
        "read -q -P 0 4k 60k",
    ] {
        args.extend(["-c", command]);
    }
    let answer = lab.zebu(&args).ok("io");
    assert!(!answer.out.contains("failed"), "{answer:?}");
}

/// What is above a filter that changes bytes is not what is below it: not for a read, nor for what is said
/// without one. The filter is one of debug builds.
#[cfg(debug_assertions)]
#[test]
fn what_changes_bytes_hides_what_is_known_below() {
    let lab = Lab::new();
    lab.make("create x.qcow2 4M; raw r.raw 4194304");
    fs::write(lab.path("ones.raw"), vec![1; 4 << 20]).unwrap();
    let over = "driver=xor,key=23,file.driver=qcow2,file.file.filename=x.qcow2";
    let run = |args: &[&str]| lab.zebu(args).ok(&args.join(" "));
    // Key and number of the sector.
    let io = "read -P 23 3M 512\nread -P 22 3146240 512\nwrite -P 65 0 64k\nread -P 65 0 64k\n\
              write -z 1M 64k\nread -P 0 1M 64k\nwrite -c -P 9 2M 64k\nread -P 9 2M 64k\n\
              discard 0 64k\nread -P 65 0 64k\n";
    let answer = lab.zebu_io_script(&["--image-opts", over], io);
    assert!(
        answer.status == 0 && !answer.out.contains("failed"),
        "{answer:?}"
    );
    let map = run(&["map", "--output=json", "--image-opts", over]).out;
    assert!(
        !map.contains(r#""zero": true"#) && !map.contains("offset"),
        "{map}"
    );
    run(&["convert", "--image-opts", over, "-O", "raw", "out.raw"]);
    run(&[
        "compare",
        "--image-opts",
        over,
        "driver=raw,file.filename=out.raw",
    ]);
    assert!(fs::read(lab.path("out.raw")).unwrap()[3 << 20..].starts_with(&[23; 512]));
    run(&["convert", "-n", "r.raw", "--target-image-opts", over]);
    run(&[
        "compare",
        "--image-opts",
        over,
        "driver=raw,file.filename=r.raw",
    ]);
    // What is compressed is what the filter makes of it.
    run(&["create", "-q", "-f", "qcow2", "c.qcow2", "4M"]);
    let over = "driver=xor,key=23,file.driver=qcow2,file.file.filename=c.qcow2";
    let target = ["--target-image-opts", over];
    run(&[&["convert", "-c", "-n", "ones.raw"][..], &target].concat());
    let ones = "driver=raw,file.filename=ones.raw";
    run(&["compare", "--image-opts", over, ones]);
    let map = run(&["map", "--output=json", "c.qcow2"]).out;
    assert!(!map.contains(r#""compressed": false"#), "{map}");

    // As a backing file: the overlay copies what the filter makes of it.
    run(&["create", "-q", "-f", "qcow2", "b.qcow2", "1M"]);
    let below = r#"json:{"driver":"xor","key":23,"file":{"driver":"qcow2","file":{"driver":"file","filename":"b.qcow2"}}}"#;
    run(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        below,
        "-F",
        "xor",
        "top.qcow2",
    ]);
    let io = "write -P 5 0 1k\nread -P 21 1k 512\nwrite -z 8k 512\nread -P 6 8704 512\n";
    let answer = lab.zebu_io_script(&["top.qcow2"], io);
    assert!(
        answer.status == 0 && !answer.out.contains("failed"),
        "{answer:?}"
    );
    let same = || {
        run(&[
            "compare",
            "-f",
            "qcow2",
            "top.qcow2",
            "-F",
            "raw",
            "before.raw",
        ]);
    };
    run(&[
        "convert",
        "-f",
        "qcow2",
        "top.qcow2",
        "-O",
        "raw",
        "before.raw",
    ]);
    run(&["commit", "-q", "-f", "qcow2", "top.qcow2"]);
    same();
    let rebase = ["rebase", "-b", "b.qcow2", "-F", "qcow2"];
    run(&[&rebase[..], &["-f", "qcow2", "top.qcow2"]].concat());
    same();
}

/// A file with a filter that changes bytes grows by zeroes as they are above. It has no place for what is read.
#[cfg(debug_assertions)]
#[test]
fn a_file_whose_bytes_are_changed_is_an_image() {
    let lab = Lab::new();
    for format in ["qcow2", "raw", "vdi", "vhdx"] {
        let file = format!("{format}.bin");
        lab.zebu(&["create", "-q", "-f", format, &file, "4M"])
            .ok("create");
        let mut bytes = fs::read(lab.path(&file)).unwrap();
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte ^= 23 ^ (at >> 9) as u8;
        }
        fs::write(lab.path(&file), bytes).unwrap();
        let over = format!("driver={format},file.driver=xor,file.key=23,file.file.filename={file}");
        let io = "write -P 65 4k 4k\nread -P 0 0 4k\nread -P 0 8k 56k\nwrite -P 66 1M 200k\n\
                  write -z 1M 64k\ndiscard 1100k 64k\nread -P 0 1M 64k\nread -P 66 1088k 12k\n\
                  read -P 65 4k 4k\nread -P 0 2M 2M\n";
        let answer = lab.zebu_io_script(&["--image-opts", &over], io);
        assert!(
            answer.status == 0 && !answer.out.contains("failed"),
            "{format}: {answer:?}"
        );
        // Other bytes stand in the file.
        let map = lab.zebu(&["map", "--output=json", "--image-opts", &over]);
        let map = map.ok("map").out;
        assert!(
            map.contains("\"data\": true") && !map.contains("offset"),
            "{map}"
        );
        let human = lab.zebu(&["map", "--image-opts", &over]);
        human.fails_with("external, encrypted or compressed clusters");
        if format != "raw" {
            lab.zebu(&["check", "--image-opts", &over]).ok("check");
        }
    }
}

/// As in QEMU: what a filter over an image refuses of compressed data, a conversion through it does.
#[test]
fn conversions_are_compressed_where_filters_pass_that() {
    for filter in [
        "driver=compress,",
        "driver=preallocate,",
        THROTTLE,
        "driver=copy-on-read,",
    ] {
        let pair = Pair::new(IMAGES);
        let target = below(filter, "qcow2", "new.qcow2");
        let args = [
            "convert",
            GROUP[0],
            GROUP[1],
            "-c",
            "-n",
            "x.qcow2",
            "--target-image-opts",
        ];
        pair.both(&[&args[..], &[&target]].concat());
    }
}
