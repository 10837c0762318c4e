//! `bench` must have the options and the output of qemu-img, and issue the same requests, so that
//! results of both programs can be compared.

use crate::common::{Answer, Lab, compare_answers, peer, testing_qemu};

fn lab() -> Lab {
    let lab = Lab::new();
    lab.make("create x.qcow2 4M; random x.qcow2 3 40 wwzuc; raw r.raw 1000448");
    lab
}

/// Replaces the time in `Run completed in 0.057 seconds.`
fn timeless(answer: Answer) -> Answer {
    let out = answer
        .out
        .lines()
        .map(|line| match line.strip_prefix("Run completed in ") {
            Some(rest) => {
                let figure = rest.strip_suffix(" seconds.").expect("seconds");
                let seconds: f64 = figure.parse().expect("a number");
                assert!(seconds >= 0.0 && figure.split('.').nth(1).is_some_and(|d| d.len() == 3));
                "Run completed in … seconds.\n".to_string()
            }
            None => format!("{line}\n"),
        })
        .collect();
    Answer { out, ..answer }
}

#[track_caller]
fn same(lab: &Lab, args: &[&str]) -> Answer {
    let mut all = vec!["bench"];
    all.extend(args);
    let ours = timeless(lab.zebu(&all));
    compare_answers(&ours, &timeless(lab.qemu_img(&all)), &all, "bench");
    ours
}

#[test]
fn reads() {
    let lab = lab();
    for args in [
        &["x.qcow2"][..],
        &["-c", "100", "x.qcow2"],
        &["-c", "100", "-d", "1", "x.qcow2"],
        &["-c", "100", "-d", "200", "x.qcow2"],
        &["-c", "100", "-f", "qcow2", "-s", "64k", "x.qcow2"],
        &[
            "-c", "100", "-s", "512", "-S", "70000", "-o", "1M", "x.qcow2",
        ],
        &["-c", "100", "-s", "3", "-S", "7", "-o", "11", "x.qcow2"],
        &["-c", "100", "-n", "-t", "none", "x.qcow2"],
        &["-c", "100", "-t", "none", "x.qcow2"],
        &["-c", "100", "-t", "none", "-i", "threads", "x.qcow2"],
        &["-c", "100", "-t", "none", "-i", "native", "x.qcow2"],
        &["-c", "100", "-i", "native", "-t", "directsync", "x.qcow2"],
        &["-c", "100", "-q", "x.qcow2"],
        &["-c", "100", "-U", "x.qcow2"],
        &["-c", "100", "--no-drain", "x.qcow2"],
        &["-c", "100", "-f", "raw", "r.raw"],
        &[
            "-c",
            "100",
            "--image-opts",
            "driver=qcow2,file.filename=x.qcow2",
        ],
    ] {
        same(&lab, args).ok(&args.join(" "));
    }
}

#[test]
fn writes() {
    let lab = lab();
    for args in [
        &["-w", "x.qcow2"][..],
        &["-w", "-c", "100", "x.qcow2"],
        &["-w", "-c", "100", "-d", "1", "x.qcow2"],
        &["-w", "-c", "100", "-d", "200", "--pattern", "7", "x.qcow2"],
        &[
            "-w", "-c", "100", "-s", "3", "-S", "7", "-o", "11", "x.qcow2",
        ],
        &[
            "-w", "-c", "60", "-s", "512", "-S", "70000", "-o", "1M", "x.qcow2",
        ],
        &["-w", "-c", "100", "-n", "-t", "none", "x.qcow2"],
        &["-w", "-c", "20", "-t", "directsync", "x.qcow2"],
        &["-w", "-c", "20", "-t", "writethrough", "x.qcow2"],
        &["-w", "-c", "100", "-t", "unsafe", "x.qcow2"],
        &["-w", "-c", "100", "-q", "-f", "raw", "r.raw"],
        &["-w", "-c", "100", "--flush-interval=64", "x.qcow2"],
        &[
            "-w",
            "-c",
            "99",
            "-d",
            "3",
            "--flush-interval=10",
            "x.qcow2",
        ],
        &[
            "-w",
            "-c",
            "99",
            "-d",
            "10",
            "--flush-interval=10",
            "--no-drain",
            "x.qcow2",
        ],
        &["-w", "-c", "5", "--flush-interval=64", "x.qcow2"],
        &["-w", "-c", "100", "--flush-interval=0", "x.qcow2"],
        &["-w", "-c", "10", "--no-drain", "x.qcow2"],
        &["-w", "-c", "10", "--pattern", "010", "x.qcow2"],
        &["-w", "-c", "10", "--pattern", "0xff", "x.qcow2"],
    ] {
        same(&lab, args).ok(&args.join(" "));
    }
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
}

/// Writes must have the requested offsets, lengths and pattern.
#[test]
fn offsets_and_patterns_of_writes() {
    for (args, reads) in [
        (
            "-c 100 --pattern 7 -o 64k",
            &["read -P 0 0 64k", "read -P 7 64k 400k", "read -P 0 464k 1M"][..],
        ),
        (
            "-c 8 -s 100 -S 1000 --pattern 9 --flush-interval 2 -d 2",
            &[
                "read -P 9 3000 100",
                "read -P 0 3100 900",
                "read -P 9 7000 100",
            ],
        ),
        (
            "-c 1024 -d 3 --threads 3 --pattern 5 --flush-interval 50",
            &["read -P 5 0 4M"],
        ),
        (
            "-c 99999 -d 32 --random --threads 2 --pattern 6 -t none",
            &["read -P 6 0 4M"],
        ),
        (
            "-c 1024 --pattern 3 --flush-interval 64 --no-drain",
            &["read -P 3 0 4M"],
        ),
    ] {
        let lab = Lab::new();
        lab.make("create x.qcow2 4M");
        if testing_qemu() && args.contains("--threads") {
            continue;
        }
        let mut all = vec!["bench", "-w"];
        all.extend(args.split(' '));
        all.push("x.qcow2");
        lab.zebu(&all).ok(args);
        for read in reads {
            lab.qemu_io(&["-r", "-c", read, "x.qcow2"]).ok(args);
        }
        let check = lab.qemu_img(&["check", "x.qcow2"]).ok(args);
        assert!(check.out.contains("No errors"), "{check:#?}");
    }
}

#[test]
fn io_uring() {
    let lab = lab();
    let args = [
        "bench", "-c", "100", "-i", "io_uring", "-t", "none", "x.qcow2",
    ];
    if lab.qemu_img(&args).status != 0 {
        println!("skipped: QEMU cannot use io_uring here");
        return;
    }
    same(&lab, &args[1..]).ok("io_uring");
}

#[test]
fn mistakes() {
    let lab = lab();
    for args in [
        &["-i", "bogus", "x.qcow2"][..],
        &["-t", "bogus", "x.qcow2"],
        &["-f", "bogus", "x.qcow2"],
        &["--flush-interval=3", "x.qcow2"],
        &["nothing"],
        &["-w", "nothing"],
        &["-w", "-t", "bogus", "x.qcow2"],
        &["-w", "-U", "x.qcow2"],
        &["-w", "-c", "10", "-o", "20M", "x.qcow2"],
        &["-w", "-c", "3", "-o", "4093k", "x.qcow2"],
        &["-w", "--flush-interval=10", "x.qcow2"],
        &["-w", "--flush-interval=10", "--no-drain", "x.qcow2"],
        &["-w", "--flush-interval=10", "-f", "bogus", "x.qcow2"],
        // Native AIO (also -n) needs a cache mode with direct I/O.
        &["-c", "10", "-i", "native", "x.qcow2"],
        &["-c", "10", "-n", "x.qcow2"],
    ] {
        same(&lab, args).failed_with_one_line(1, &args.join(" "));
    }
    // QEMU before 10 accepts 0; with a depth of 0 it does not end.
    if testing_qemu() && !peer().is_current() {
        return;
    }
    if peer().is_current() {
        for args in [
            &["-w", "--flush-interval=-1", "x.qcow2"][..],
            &["-w", "--flush-interval=x", "x.qcow2"],
            &["-w", "--pattern", "256", "x.qcow2"],
            &["-w", "--pattern", "-1", "x.qcow2"],
            &["-w", "--pattern", "x", "x.qcow2"],
            &["-w", "--pattern", "0x", "x.qcow2"],
            &["-w", "--pattern", "1k", "x.qcow2"],
            &["--pattern", "256", "x.qcow2"],
        ] {
            same(&lab, args).failed_with_one_line(1, &args.join(" "));
        }
    }
    for (args, words) in [
        (["-c", "0", "x.qcow2"], "Invalid request count specified"),
        (["-c", "x", "x.qcow2"], "Invalid request count specified"),
        (["-d", "0", "x.qcow2"], "Invalid queue depth specified"),
        (["-d", "x", "x.qcow2"], "Invalid queue depth specified"),
    ] {
        let answer = lab.zebu(&["bench", args[0], args[1], args[2]]);
        answer.failed_with_one_line(1, &args.join(" "));
        assert!(answer.err.contains(words), "{answer:?}");
    }
}
