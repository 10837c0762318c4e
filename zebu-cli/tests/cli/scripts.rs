//! What scripts that were written for QEMU rely on, and what people see who type a command wrong.

use std::os::unix::fs::symlink;
use std::path::PathBuf;

use crate::common::pair::Pair;
use crate::common::{Answer, Lab, Limits, Loop, beyond_qemu, peer, program};

/// The program under one of QEMU's names, in the folder of the test.
fn called(lab: &Lab, name: &str) -> PathBuf {
    let path = lab.path(name);
    if !path.exists() {
        symlink(program().canonicalize().expect("the program"), &path).expect("symlink");
    }
    path
}

fn run(lab: &Lab, name: &str, args: &[&str]) -> Answer {
    lab.run(&called(lab, name), args, b"", &Limits::default())
}

/// Deployments say which kind of file it is where others say the format.
#[test]
fn kinds_of_files_are_formats() {
    let pair = Pair::new("create a.q 1M; io a.q: write -P 1 64k 64k; raw disk.raw 1048576");
    for args in [
        &["info", "-f", "file", "disk.raw"][..],
        &["convert", "-O", "file", "a.q", "b.raw"],
        &["convert", "-n", "-O", "file", "a.q", "disk.raw"],
        &["convert", "-f", "file", "-O", "qcow2", "disk.raw", "c.q"],
        &["create", "-f", "file", "d.raw", "1M"],
        &["compare", "-f", "file", "-F", "file", "b.raw", "disk.raw"],
        &["dd", "-f", "file", "-O", "file", "if=disk.raw", "of=e.raw"],
        &[
            "create", "-q", "-f", "qcow2", "-b", "disk.raw", "-F", "file", "over.q",
        ],
        &["map", "--output=json", "over.q"],
        &["info", "--backing-chain", "over.q"],
        &["rebase", "-u", "-b", "b.raw", "-F", "file", "over.q"],
        &[
            "bench",
            "-f",
            "file",
            "-c",
            "1",
            "--object",
            "tls-creds-psk,id=x,dir=.",
            "nothing",
        ],
    ] {
        match args[0] {
            "bench" => drop(pair.ours.zebu(args)),
            _ => drop(pair.succeed(args)),
        }
    }
    for args in [
        &["info", "-f", "host_device", "disk.raw"][..],
        &["convert", "-O", "host_device", "a.q", "missing"],
        &["convert", "-O", "host_device", "a.q", "disk.raw"],
        &["convert", "-n", "-O", "host_device", "a.q", "disk.raw"],
        &["create", "-f", "host_device", "missing", "1M"],
        &["measure", "-O", "file", "a.q"],
        &[
            "info",
            "-f",
            "file",
            r#"json:{"driver":"raw","file":{"driver":"file","filename":"a.q"}}"#,
        ],
        &["rebase", "-F", "host_device", "-b", "disk.raw", "c.q"],
    ] {
        pair.fail(args);
    }
    assert!(!pair.ours.path("missing").exists());
}

#[test]
fn devices_are_written_by_the_name_of_their_kind() {
    let lab = Lab::new();
    lab.make("create a.q 1M; io a.q: write -P 1 64k 64k; raw disk.raw 1048576");
    let Some(device) = Loop::on(&lab.path("disk.raw")) else {
        println!("skipped: no loop device");
        return;
    };
    let name = &*device.0;
    for args in [
        &["convert", "-O", "host_device", "a.q", name][..],
        &["compare", "-F", "host_device", "a.q", name],
        &["convert", "-n", "-O", "host_device", "a.q", name],
        &["convert", "-f", "host_device", "-O", "qcow2", name, "b.q"],
        &["compare", "a.q", "b.q"],
        &["info", "-f", "host_device", name],
    ] {
        lab.zebu(args).ok(&format!("{args:?}"));
    }
}

#[test]
fn versions_begin_with_that_of_qemu() {
    let lab = Lab::new();
    for name in ["qemu-img", "qemu-io"] {
        let out = run(&lab, name, &["--version"]).ok(name).out;
        assert!(
            out.starts_with(&format!("{name} version 11.1.3 (zebu ")),
            "{out}"
        );
    }
    let out = run(&lab, "qemu-nbd", &["--version"]).ok("qemu-nbd").out;
    let first = out.lines().next().unwrap_or_default();
    assert!(first.contains("qemu-nbd 11.1.3 (zebu "), "{out}");
    let help = run(&lab, "qemu-img", &["--help"]).ok("help").out;
    for heading in ["Supported image formats:\n\n  ", "\nSupported formats: "] {
        let list = help
            .split(heading)
            .nth(1)
            .unwrap_or_else(|| panic!("{heading}: {help}"));
        assert!(
            list.contains(" qcow2 ") && list.contains(" host_device "),
            "{help}"
        );
    }
}

/// Distributions and wrappers add something to QEMU's names.
#[test]
fn names_of_qemu_with_an_addition() {
    let lab = Lab::new();
    lab.make("create a.q 1M");
    for (name, begins) in [
        ("qemu-img-10", "qemu-img version 11.1.3 (zebu "),
        ("qemu-img.real", "qemu-img version 11.1.3 (zebu "),
        ("qemu-io-11.1", "qemu-io version 11.1.3 (zebu "),
        ("qemu-imgs", "qemu-imgs version 0."),
        ("zebu-2", "zebu-2 version 0."),
    ] {
        let out = run(&lab, name, &["--version"]).ok(name).out;
        assert!(out.starts_with(begins), "{name}: {out}");
    }
    let out = run(&lab, "qemu-nbd.distrib", &["--version"])
        .ok("qemu-nbd")
        .out;
    assert!(out.contains("qemu-nbd.distrib 11.1.3 (zebu "), "{out}");
    let out = run(&lab, "qemu-io-10", &["-c", "read 0 512", "a.q"])
        .ok("qemu-io")
        .out;
    assert!(out.contains("read 512/512"), "{out}");
}

/// The status of wrong arguments is that of images that differ only under QEMU's name.
#[test]
fn compare_with_wrong_arguments() {
    let lab = Lab::new();
    lab.make("create a.q 1M");
    for args in [
        &["compare", "a.q"][..],
        &["compare", "--no-such-option", "a.q", "a.q"],
    ] {
        assert_eq!(
            run(&lab, "qemu-img", args).status,
            lab.qemu_img(args).status,
            "{args:?}"
        );
        assert_eq!(lab.zebu(args).status, 2, "{args:?}");
    }
    for args in [
        &["compare", "a.q", "gone"][..],
        &["compare", "-T", "x", "a.q", "a.q"],
    ] {
        assert_eq!(run(&lab, "qemu-img", args).status, 2, "{args:?}");
        assert_eq!(lab.qemu_img(args).status, 2, "{args:?}");
    }
}

#[test]
fn messages_say_what_to_do_next() {
    let lab = Lab::new();
    lab.make("raw r 1048576; create a.q 1M");
    for (line, next) in [
        ("resize -f raw r 10MB", "hint: a size is"),
        (
            "create -f qcow2 -o cluster_size=64KB x 1M",
            "hint: a size is",
        ),
        (
            "rebase -b r a.q",
            "hint: say the format of the backing file with -F",
        ),
        ("convert -f raw -O qcow3 r x", "hint: did you mean 'qcow2'?"),
        ("info -f vmkd r", "hint: did you mean 'vmdk'?"),
        (
            "create -f qcow2 -o clster_size=64k x 1M",
            "hint: did you mean 'cluster_size'?",
        ),
    ] {
        let args: Vec<&str> = line.split(' ').collect();
        let answer = lab.zebu(&args);
        assert!(
            answer.status == 1 && answer.err.contains(next),
            "{line}: {answer:#?}"
        );
        let theirs = run(&lab, "qemu-img", &args);
        assert!(
            theirs.status == 1 && !theirs.err.contains("hint:"),
            "{line}: {theirs:#?}"
        );
    }
}

#[test]
fn trace_events_are_taken() {
    let lab = Lab::new();
    lab.make("create a.q 1M");
    let plain = run(&lab, "qemu-img", &["info", "a.q"]).ok("info");
    for args in [
        &["-T", "qcow2*", "info", "a.q"][..],
        &["-Tqcow2*", "info", "a.q"],
        &["--trace=enable=qcow2*,file=log", "info", "a.q"],
    ] {
        assert_eq!(run(&lab, "qemu-img", args), plain, "{args:?}");
    }
    let named = run(&lab, "qemu-img", &["--trace", "x", "info", "a.q"]);
    assert_eq!(
        named.err,
        "qemu-img: warning: trace event 'x' does not exist\n"
    );
    assert_eq!((named.status, named.out), (0, plain.out));
}

#[test]
fn numbers_may_have_blanks_before_them() {
    let lab = Lab::new();
    for (option, value, is_taken) in [
        ("-e", " 2", true),
        ("-e", "\t0x2", true),
        ("-e", "2 ", false),
        ("--handshake-limit", " 5", true),
        ("-p", " 3333", true),
        ("-e", "", false),
    ] {
        // It fails for another reason then.
        let answer = run(&lab, "qemu-nbd", &[option, value, "missing"]);
        let is_refused = answer.err.contains("nvalid");
        assert_eq!(is_refused, !is_taken, "{option} {value:?}: {answer:?}");
    }
}

#[test]
fn all_bitmaps_are_removed() {
    let lab = Lab::new();
    lab.make("create a.q 1M");
    for name in ["a", "b", "c"] {
        lab.zebu(&["bitmap", "--add", "a.q", name]).ok("add");
    }
    lab.zebu(&["bitmap", "--remove-all", "a.q", "a"])
        .fails_with("Expecting filename");
    lab.zebu(&["bitmap", "--remove-all", "--add", "a.q", "a"])
        .ok("one is new");
    lab.zebu(&["bitmap", "--remove-all", "a.q"]).ok("all");
    lab.zebu(&["bitmap", "--remove-all", "a.q"]).ok("none");
    let info = lab.zebu(&["info", "a.q"]).ok("info").out;
    assert!(!info.contains("bitmaps"), "{info}");
    lab.zebu(&["check", "a.q"]).ok("check");
}

#[test]
fn a_data_file_is_kept() {
    let lab = Lab::new();
    lab.make("raw d.raw 1048576");
    let before = std::fs::read(lab.path("d.raw")).unwrap();
    let create = |options: &str, size: &str| {
        lab.zebu(&["create", "-q", "-f", "qcow2", "-o", options, "a.q", size])
    };
    let kept = || assert!(std::fs::read(lab.path("d.raw")).unwrap() == before);
    for options in [
        "data_file=d.raw,keep_data_file=on",
        "keep_data_file=on",
        "data_file=missing,data_file_raw=on,keep_data_file=on",
        "data_file=d.raw,data_file_raw=on,keep_data_file=on,preallocation=full",
        "data_file=d.raw,data_file_raw=on,keep_data_file=on,cluster_size=5",
    ] {
        assert_eq!(create(options, "1M").status, 1, "{options}");
        kept();
    }
    assert!(!lab.path("missing").exists());
    for options in [
        "data_file=d.raw,data_file_raw=on,keep_data_file=on",
        "data_file=d.raw,keep_data_file=on,preallocation=metadata",
    ] {
        create(options, "1M").ok(options);
        kept();
        lab.zebu(&["compare", "-f", "qcow2", "-F", "raw", "a.q", "d.raw"])
            .ok(options);
    }
    create("data_file=d.raw,data_file_raw=on,keep_data_file=on", "2M").ok("longer");
    let after = std::fs::read(lab.path("d.raw")).unwrap();
    assert!(
        after.len() == 2 << 20
            && after[..1 << 20] == before
            && after[1 << 20..].iter().all(|b| *b == 0)
    );
    // A conversion writes all of it.
    lab.make("create empty.q 2M");
    let options = "data_file=d.raw,data_file_raw=on,keep_data_file=on";
    lab.zebu(&["convert", "-O", "qcow2", "-o", options, "empty.q", "b.q"])
        .ok("convert");
    lab.zebu(&["compare", "empty.q", "b.q"]).ok("zeroes");
}

#[test]
fn limits_are_those_of_qemu() {
    if !peer().is_newest() {
        println!("skipped: QEMU has no --limits before 11.1");
        return;
    }
    let pair = Pair::new("create a.q 1M; create -o extended_l2=on e.q 1M; raw disk.raw 4096");
    for name in ["a.q", "e.q", "disk.raw"] {
        for cache in ["none", "writeback"] {
            pair.succeed(&["info", "--limits", "-t", cache, name]);
            pair.succeed(&["info", "--limits", "--output=json", "--cache", cache, name]);
        }
    }
}

#[test]
fn discards_are_made_without_waiting() {
    let lab = Lab::new();
    lab.make("create a.q 1M; io a.q: write -P 1 0 1M");
    let commands = [
        "-c",
        "aio_discard -q 0 64k",
        "-c",
        "aio_discard 64k 64k",
        "-c",
        "aio_flush",
    ];
    let args = [
        &commands[..],
        &["-c", "read -P 0 0 128k", "-c", "aio_discard 0 1T", "a.q"],
    ]
    .concat();
    let out = run(&lab, "qemu-io", &args).out;
    assert_eq!(
        out.matches("65536/65536 bytes at offset 65536").count(),
        1,
        "{out}"
    );
    assert!(!out.contains("verification failed"), "{out}");
    assert!(
        out.contains("aio_discard failed: Input/output error"),
        "{out}"
    );
}

#[test]
fn what_to_do_next_is_said() {
    if beyond_qemu("hints") {
        return;
    }
    let lab = Lab::new();
    lab.make("create a.q 1M");
    for (args, hint) in [
        (&["conver", "a", "b"][..], "did you mean 'convert'?"),
        (
            &["convert", "--optoins", "x", "a", "b"],
            "did you mean '--options'?",
        ),
        (
            &["info", "--outptu=json", "a.q"],
            "did you mean '--output'?",
        ),
        (&["--versoin"], "did you mean '--version'?"),
        (&["create", "-f", "qcow2", "b", "10GB"], "say 10G: "),
        (&["create", "-f", "qcow2", "b", "ten"], "a size is "),
        (
            &["create", "-f", "qcow2", "-b", "a.q", "b"],
            "say the format of the backing file: -F qcow2",
        ),
        (
            &["convert", "-O", "qcow2", "-B", "a.q", "a.q", "b"],
            "say the format of the backing file with -F",
        ),
        (&["convert", "a.q", "a.q"], "give the target another name"),
    ] {
        let answer = lab.zebu(args);
        assert_eq!(answer.status, 1, "{args:?}: {answer:?}");
        assert!(
            answer.err.contains(&format!("\nhint: {hint}")),
            "{args:?}: {answer:?}"
        );
        // Scripts see what QEMU prints.
        let answer = run(&lab, "qemu-img", args);
        assert!(!answer.err.contains("hint: "), "{args:?}: {answer:?}");
    }
    assert!(!lab.path("b").exists());
    let answer = lab.zebu(&[]);
    assert_eq!(answer.status, 1);
    assert!(answer.err.contains("zebu help"), "{answer:?}");
}

#[test]
fn lines_of_the_help_fit() {
    if beyond_qemu("help") {
        return;
    }
    let lab = Lab::new();
    for command in zebu_cli::commands() {
        let help = lab.zebu(&["help", command.get_name()]).ok("help").out;
        let text = help.split("\nExamples:\n").next().unwrap_or_default();
        for line in text.lines() {
            assert!(
                line.chars().count() <= 100,
                "{}: {line}",
                command.get_name()
            );
        }
    }
}

/// Holes are passed over in no time, so they are no progress.
#[test]
fn progress_counts_data() {
    if beyond_qemu("progress by data") {
        return;
    }
    let lab = Lab::new();
    let file = std::fs::File::create(lab.path("disk.raw")).unwrap();
    file.set_len(4 << 30).unwrap();
    // At both ends.
    let data = vec![7; 32 << 20];
    std::os::unix::fs::FileExt::write_all_at(&file, &data, 0).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &data, (4 << 30) - (32 << 20)).unwrap();
    let answer = lab
        .zebu(&[
            "convert", "-p", "-r", "16M", "-O", "qcow2", "disk.raw", "a.q",
        ])
        .ok("convert");
    let steps = answer.out.split(['\r', '\n']).filter_map(|step| {
        step.trim()
            .strip_prefix('(')?
            .split('/')
            .next()?
            .parse::<f64>()
            .ok()
    });
    let steps: Vec<f64> = steps.collect();
    assert!(steps.is_sorted(), "{steps:?}");
    assert!(
        steps
            .iter()
            .filter(|step| **step > 5.0 && **step < 45.0)
            .count()
            > 0,
        "{steps:?}"
    );
    assert!(
        steps
            .iter()
            .filter(|step| **step > 55.0 && **step < 95.0)
            .count()
            > 0,
        "{steps:?}"
    );
    assert_eq!(steps.last(), Some(&100.0));
}
