//! Guards against a `bench` whose options or output are not qemu-img's: figures
//! taken with both must be figures of the same requests.

mod common;

use common::{Answer, Lab, compare_answers, peer, testing_qemu};

fn lab() -> Lab {
    let lab = Lab::new();
    lab.make("create x.qcow2 4M; random x.qcow2 3 40 wwzuc; raw r.raw 1000448");
    lab
}

/// Takes the figure out of `Run completed in 0.057 seconds.`
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
fn io_uring_where_the_kernel_has_it() {
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
        // Native AIO, which -n means too, needs a cache mode without cache.
        &["-c", "10", "-i", "native", "x.qcow2"],
        &["-c", "10", "-n", "x.qcow2"],
    ] {
        same(&lab, args).failed_with_one_line(1, &args.join(" "));
    }
    // QEMU before 10 takes 0; with a depth of 0 it never ends.
    if testing_qemu() && !peer().is_current() {
        return;
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
