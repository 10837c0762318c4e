//! Jobs that are interrupted or fail: an incomplete target must be named, and must not open as an
//! image. SIGUSR1 prints the progress and stops nothing; a full or closed standard output stops no
//! job; `-U` excludes writing; a source is refused as target, and one that changes is an error.

use std::fs::{self, File};
use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use crate::common::stopping::{STOPS, start, start_with};
use crate::common::{Lab, beyond_qemu, part, peer, program, testing_qemu};

fn signal(child: &Child, number: i32) {
    // SAFETY: the child was not waited for, so the id is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, number) }, 0);
}

/// Waits until a job has begun to write to a file.
fn wait_for(lab: &Lab, name: &str, at_least: u64) {
    use std::os::unix::fs::MetadataExt;
    for _ in 0..6000 {
        let blocks = fs::metadata(lab.path(name)).map_or(0, |m| m.blocks());
        if blocks * 512 >= at_least {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("nothing was written to {name}");
}

fn text(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn interrupted_convert_marks_the_target_incomplete() {
    if beyond_qemu("it leaves an image that opens without errors") {
        return;
    }
    for (number, status) in STOPS {
        let lab = Lab::new();
        lab.make("create x.qcow2 64M; io x.qcow2: write -P 7 0 64M");
        for format in ["qcow2", "raw"] {
            // Rate-limited, so that it does not end before the signal.
            let args = [
                "convert", "-r", "1M", "-m", "1", "-O", format, "x.qcow2", "new",
            ];
            let child = start(&lab, &args);
            wait_for(&lab, "new", 65536);
            signal(&child, number);
            let output = child.wait_with_output().expect("wait");
            let (_, err) = text(&output);
            assert_eq!(output.status.code(), Some(status), "{err}");
            assert_eq!(err, "zebu: Interrupted; 'new' is incomplete\n");
            if format == "qcow2" {
                let check = lab.zebu(&["check", "new"]);
                check.failed_with_one_line(1, "an incomplete image");
                assert!(check.err.contains("Image is incomplete"), "{check:#?}");
                let theirs = lab.qemu_img(&["info", "new"]);
                assert_eq!(theirs.status, 1, "{theirs:#?}");
                assert!(
                    theirs.err.contains("Unsupported qcow2 version"),
                    "{theirs:#?}"
                );
            }
            fs::remove_file(lab.path("new")).expect("remove");
        }
    }
}

/// As nohup starts programs.
#[test]
fn a_signal_that_is_ignored_stops_no_job() {
    let lab = Lab::new();
    lab.make("create x.qcow2 2M; io x.qcow2: write -P 7 0 2M; img convert x.qcow2 x.raw");
    let args = [
        "convert", "-r", "1M", "-f", "raw", "-O", "raw", "x.raw", "new",
    ];
    let child = start_with(&lab, &args, libc::SIG_IGN);
    wait_for(&lab, "new", 4096);
    signal(&child, libc::SIGHUP);
    let output = child.wait_with_output().expect("wait");
    assert_eq!(output.status.code(), Some(0), "{:?}", text(&output));
    lab.assert_same_bytes("x.raw", "new", "ignored");
}

/// What was read of a source that changes is no disk.
#[test]
fn a_source_that_changes_is_an_error() {
    if beyond_qemu("it does not look") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 4M; io x.qcow2: write -P 7 0 4M; img convert x.qcow2 x.raw");
    for file in ["x.raw", "x.qcow2"] {
        for shared in [false, true] {
            let format = &file[2..];
            let mut args = vec![
                "convert", "-r", "2M", "-m", "1", "-f", format, "-O", "qcow2",
            ];
            args.extend(shared.then_some("-U"));
            args.extend([file, "new"]);
            let child = start(&lab, &args);
            wait_for(&lab, "new", 65536);
            let past = std::time::SystemTime::UNIX_EPOCH;
            let source = File::options().write(true).open(lab.path(file));
            source
                .and_then(|source| source.set_modified(past))
                .expect("the time");
            let output = child.wait_with_output().expect("wait");
            let (_, err) = text(&output);
            let check = lab.zebu(&["check", "-q", "new"]).status;
            if shared {
                assert_eq!((output.status.code(), check), (Some(0), 0), "{err}");
            } else {
                assert_eq!((output.status.code(), check), (Some(1), 1), "{err}");
                let said =
                    format!("zebu: '{file}' was changed while it was read; 'new' is incomplete\n");
                assert_eq!(err, said);
            }
            fs::remove_file(lab.path("new")).expect("remove");
            lab.shell(&format!("touch {file}")).ok("touch");
        }
    }
}

/// Programs set the time of change of a file as they like: `cp -p`, `rsync -t`, `touch -r`.
#[test]
fn a_source_that_changes_is_an_error_whatever_its_time_says() {
    if beyond_qemu("it does not look") {
        return;
    }
    let content = "touch -r x.raw t; dd if=/dev/zero of=x.raw bs=64k seek=48 count=1 \
                   conv=notrunc status=none; touch -r t x.raw";
    let changes = [
        (content, false),
        ("ln x.raw y.raw", true),
        ("mv x.raw y.raw", true),
        ("rm x.raw", true),
        ("cp x.raw z.raw; mv z.raw x.raw", true),
        ("chmod 600 x.raw", true),
    ];
    for (change, is_whole) in changes {
        let lab = Lab::new();
        lab.make("create x.qcow2 4M; io x.qcow2: write -P 7 0 4M; img convert x.qcow2 x.raw");
        let args = [
            "convert", "-r", "2M", "-m", "1", "-f", "raw", "-O", "qcow2", "x.raw", "new",
        ];
        let child = start(&lab, &args);
        wait_for(&lab, "new", 65536);
        lab.shell(change).ok("the change");
        let output = child.wait_with_output().expect("wait");
        let (_, err) = text(&output);
        let said = "zebu: 'x.raw' was changed while it was read; 'new' is incomplete\n";
        let expected = match is_whole {
            true => (Some(0), ""),
            false => (Some(1), said),
        };
        assert_eq!((output.status.code(), &*err), expected, "{change}");
    }
}

/// Changes that can be interrupted at any time end at once, with a message.
#[test]
fn interrupted_changes_report_the_state() {
    if beyond_qemu("it prints nothing") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 1M; io x.qcow2: write -P 7 0 1M");
    for (number, status) in part(2, STOPS) {
        for options in [
            "-f raw -o preallocation=full",
            "-f qcow2 -o preallocation=full",
        ] {
            let args = format!("create -q {options} new 8G");
            let args: Vec<&str> = args.split(' ').collect();
            let child = start(&lab, &args);
            wait_for(&lab, "new", 1 << 20);
            signal(&child, number);
            let output = child.wait_with_output().expect("wait");
            let (_, err) = text(&output);
            assert_eq!(output.status.code(), Some(status), "{err}");
            assert_eq!(err, "zebu: Interrupted; 'new' is incomplete\n");
            fs::remove_file(lab.path("new")).expect("remove");
        }
        let args = ["resize", "--preallocation=full", "x.qcow2", "+8G"];
        let child = start(&lab, &args);
        wait_for(&lab, "x.qcow2", 3 << 20);
        signal(&child, number);
        let output = child.wait_with_output().expect("wait");
        let (_, err) = text(&output);
        assert_eq!(output.status.code(), Some(status), "{err}");
        let said = "zebu: Interrupted; the image is whole, and the change may not have happened\n";
        assert_eq!(err, said);
        // Only leaks are allowed.
        let check = lab.zebu(&["check", "-q", "x.qcow2"]);
        assert!(matches!(check.status, 0 | 3), "{check:#?}");
        lab.zebu(&["check", "-q", "-r", "leaks", "x.qcow2"])
            .ok("repair");
        let size = lab.u64_at("x.qcow2", 24);
        assert_eq!(size, 1 << 20, "the size was changed");
        let read = ["io", "-r", "-c", "read -P 7 0 1M", "x.qcow2"];
        lab.zebu(&read).ok("old data");
        compact(&lab, "x.qcow2");
    }
}

/// Copies the image, to remove the space that the interrupted change has allocated.
fn compact(lab: &Lab, name: &str) {
    let out = lab.qemu_img(&["convert", "-O", "qcow2", name, "again"]);
    out.ok("convert");
    fs::rename(lab.path("again"), lab.path(name)).expect("rename");
}

#[test]
fn a_read_error_marks_the_target_incomplete() {
    if beyond_qemu("it leaves an image that opens without errors") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 8M; io x.qcow2: write -P 7 0 8M");
    let l2 = lab.u64_at("x.qcow2", lab.u64_at("x.qcow2", 40)) & 0x00ff_ffff_ffff_fe00;
    lab.patch(
        "x.qcow2",
        l2 + 8 * 100,
        &(1u64 << 63 | 0x50200).to_be_bytes(),
    );
    for args in [
        &["convert", "-O", "qcow2", "x.qcow2", "new"][..],
        &[
            "convert",
            "-O",
            "qcow2",
            "-o",
            "compat=0.10",
            "x.qcow2",
            "new",
        ],
        &[
            "convert", "-O", "qcow2", "-t", "none", "-c", "x.qcow2", "new",
        ],
        &["dd", "-O", "qcow2", "if=x.qcow2", "of=new"],
    ] {
        let answer = lab.zebu(args);
        answer.failed_with_one_line(1, &args.join(" "));
        assert!(answer.err.ends_with("'new' is incomplete\n"), "{answer:#?}");
        for answer in [lab.zebu(&["check", "new"]), lab.qemu_img(&["check", "new"])] {
            assert_eq!(answer.status, 1, "{args:?}: {answer:#?}");
        }
        // The next conversion to the same target succeeds.
        lab.zebu(&["convert", "-O", "qcow2", "--salvage", "x.qcow2", "new"])
            .ok("the same name again");
        lab.qemu_img(&["check", "new"]).ok("a complete image");
        fs::remove_file(lab.path("new")).expect("remove");
    }
}

#[test]
fn sigusr1_prints_the_progress() {
    let lab = Lab::new();
    lab.make("raw big.raw 67108864; img convert -f raw -O raw -S 0 big.raw full.raw");
    let args = [
        "convert", "-r", "16M", "-f", "raw", "-O", "raw", "-S", "0", "full.raw", "new",
    ];
    let mut child = start(&lab, &args);
    wait_for(&lab, "new", 4096);
    signal(&child, libc::SIGUSR1);
    let mut err = child.stderr.take().expect("piped");
    let mut line = vec![0; "    (0.00/100%)".len()];
    err.read_exact(&mut line).expect("an answer");
    let line = String::from_utf8_lossy(&line).into_owned();
    assert!(line.starts_with("    (") && line.contains('.'), "{line:?}");
    assert_eq!(child.wait().expect("wait").code(), Some(0));
}

#[test]
fn jobs_succeed_with_closed_or_full_standard_output() {
    let lab = Lab::new();
    lab.make("create x.qcow2 4M; io x.qcow2: write -P 7 0 1M; create -b x.qcow2 -F qcow2 o.qcow2");
    let run = |args: &[&str], out: Stdio| {
        let mut command = Command::new(program());
        command.args(args).current_dir(lab.path("")).stdout(out);
        let output = command.stderr(Stdio::piped()).output().expect("run");
        let (_, err) = text(&output);
        assert!(!err.contains("panicked"), "{args:?}: {err}");
        (output.status.code(), err)
    };
    let full = || {
        File::options()
            .write(true)
            .open("/dev/full")
            .expect("/dev/full")
    };
    let closed = || {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        writer
    };
    let jobs: [&[&str]; 13] = [
        &["create", "-f", "qcow2", "new", "1M"],
        &["convert", "-p", "-O", "raw", "x.qcow2", "new"],
        &["compare", "-p", "x.qcow2", "o.qcow2"],
        &["resize", "x.qcow2", "+1M"],
        &["rebase", "-p", "-b", "x.qcow2", "-F", "qcow2", "o.qcow2"],
        &["commit", "-p", "o.qcow2"],
        &["check", "-q", "x.qcow2"],
        &["io", "-c", "read 0 64k", "-c", "write 0 64k", "x.qcow2"],
        &["io", "-c", "read -v 0 1M", "-c", "map", "x.qcow2"],
        &["bench", "-c", "10", "x.qcow2"],
        &["dd", "if=x.qcow2", "of=new"],
        &["snapshot", "-c", "one", "x.qcow2"],
        &["amend", "-p", "-o", "lazy_refcounts=on", "x.qcow2"],
    ];
    let reports: [&[&str]; 6] = [
        &["info", "x.qcow2"],
        &["info", "--output=json", "x.qcow2"],
        &["map", "x.qcow2"],
        &["check", "--output=json", "x.qcow2"],
        &["measure", "-O", "qcow2", "x.qcow2"],
        &["--help"],
    ];
    for args in jobs.iter().chain(&reports) {
        assert_eq!(run(args, closed().into()).0, Some(0), "{args:?}, closed");
    }
    for args in jobs {
        assert_eq!(run(args, full().into()).0, Some(0), "{args:?}, full");
    }
    // A command that fails still fails.
    let read = ["io", "-c", "read 100M 64k", "-c", "read 0 64k", "x.qcow2"];
    for out in [closed().into(), full().into()] {
        assert_eq!(run(&read, out).0, Some(1));
    }
    if testing_qemu() {
        return;
    }
    for args in reports {
        let (status, err) = run(args, full().into());
        assert_eq!(status, Some(1), "{args:?}, full: {err}");
        assert!(err.contains("No space left on device"), "{args:?}: {err}");
        let answer = lab.shell(&format!("\"$0\" {} >&-", args.join(" ")));
        answer.fails_with("standard output: Bad file descriptor");
    }
}

#[test]
fn force_share_excludes_writing() {
    let lab = Lab::new();
    lab.make(
        "create base.qcow2 4M; io base.qcow2: write -P 7 0 1M; \
         create -b base.qcow2 -F qcow2 x.qcow2; io x.qcow2: write -P 8 0 64k",
    );
    let before = fs::read(lab.path("x.qcow2")).expect("read");
    let held = lab.held_by_qemu(&["x.qcow2"]);
    let mut commands = vec![
        vec!["resize", "-U", "x.qcow2", "8M"],
        vec!["check", "-U", "-r", "all", "x.qcow2"],
        vec!["check", "-U", "-r", "leaks", "x.qcow2"],
        vec!["commit", "-U", "x.qcow2"],
        vec!["rebase", "-U", "-b", "", "x.qcow2"],
        vec!["rebase", "-U", "-u", "-b", "", "x.qcow2"],
        vec!["amend", "-U", "-o", "lazy_refcounts=on", "x.qcow2"],
        vec!["snapshot", "-U", "-c", "s", "x.qcow2"],
        vec!["bench", "-U", "-w", "-c", "1", "x.qcow2"],
        vec![
            "convert",
            "-U",
            "-n",
            "-O",
            "qcow2",
            "base.qcow2",
            "x.qcow2",
        ],
    ];
    let shared = "driver=qcow2,force-share=on,file.filename=x.qcow2";
    for args in [
        &["resize"][..],
        &["amend", "-o", "lazy_refcounts=on"],
        &["snapshot", "-c", "s"],
    ] {
        let mut args = args.to_vec();
        args.extend(["--image-opts", shared]);
        if args[0] == "resize" {
            args.push("8M");
        }
        commands.push(args);
    }
    for args in commands {
        let answers = [lab.zebu(&args), lab.qemu_img(&args)];
        for answer in &answers {
            assert_eq!(answer.status, 1, "{args:?}: {answer:#?}");
        }
        if peer().is_current() {
            let [ours, theirs] = answers.map(|a| {
                let line = a.err.lines().next().unwrap_or_default().to_string();
                line.split_once(": ").map(|(_, rest)| rest.to_string())
            });
            assert_eq!(ours, theirs, "{args:?}");
        }
        let now = fs::read(lab.path("x.qcow2")).expect("read");
        assert!(before == now, "{args:?} has written");
    }
    drop(held);
}

#[test]
fn sources_are_refused_as_targets() {
    if beyond_qemu("it destroys the source") {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "raw s.raw 1000000; create base.qcow2 4M; io base.qcow2: write -P 7 0 1M; \
         create -b base.qcow2 -F qcow2 over.qcow2; io over.qcow2: write -P 8 0 64k",
    );
    std::os::unix::fs::symlink("s.raw", lab.path("link")).expect("symlink");
    fs::hard_link(lab.path("s.raw"), lab.path("hard")).expect("link");
    std::os::unix::fs::symlink("base.qcow2", lab.path("base.link")).expect("symlink");
    let names = ["s.raw", "base.qcow2", "over.qcow2"];
    let content = || names.map(|name| fs::read(lab.path(name)).expect("read"));
    let before = content();
    let json = r#"json:{"driver":"raw","file":{"driver":"file","filename":"link"}}"#;
    let opts = "driver=raw,file.filename=hard";
    let nested = "json:{'driver':'raw','file':{'driver':'qcow2','file.filename':'over.qcow2'}}";
    for target in ["s.raw", "./s.raw", "link", "hard", "file:s.raw"] {
        for new in [&[][..], &["-n"]] {
            let mut args = vec!["convert", "-U", "-f", "raw", "-O", "raw"];
            args.extend(new);
            args.extend(["s.raw", target]);
            lab.zebu(&args).failed_with_one_line(1, target);
        }
    }
    for args in [
        &[
            "convert", "-U", "-f", "raw", "-n", "-O", "raw", "s.raw", json,
        ][..],
        &[
            "convert",
            "-U",
            "-f",
            "raw",
            "-n",
            "--target-image-opts",
            "s.raw",
            opts,
        ],
        &["convert", "-U", "-O", "qcow2", "over.qcow2", "base.qcow2"],
        &["convert", "-U", "-O", "raw", "over.qcow2", "base.link"],
        &[
            "convert",
            "-U",
            "-f",
            "raw",
            "-O",
            "qcow2",
            "-o",
            "data_file=hard",
            "s.raw",
            "new",
        ],
        &[
            "convert",
            "-U",
            "-O",
            "qcow2",
            "-B",
            "over.qcow2",
            "-F",
            "qcow2",
            "over.qcow2",
            "base.link",
        ],
        &[
            "create",
            "-f",
            "qcow2",
            "-b",
            "over.qcow2",
            "-F",
            "qcow2",
            "base.link",
        ],
        &["dd", "-U", "-f", "raw", "if=s.raw", "of=hard"],
        // `base.qcow2` is the backing file of the file of the source.
        &[
            "create",
            "-f",
            "qcow2",
            "-b",
            nested,
            "-F",
            "raw",
            "base.qcow2",
        ],
        &["convert", "-U", "-O", "qcow2", nested, "base.qcow2"],
    ] {
        let answer = lab.zebu(args);
        assert_eq!(answer.status, 1, "{args:?}: {answer:#?}");
    }
    assert!(before == content(), "a source was changed");
    assert!(!lab.path("new").exists());
}

/// Without its name what was written is lost, and another program's file has it.
#[test]
fn a_target_that_loses_its_name_is_an_error() {
    if testing_qemu() {
        return;
    }
    let lab = Lab::new();
    fs::write(lab.path("source"), vec![7; 8 << 20]).unwrap();
    for (format, replaced) in [
        ("raw", false),
        ("raw", true),
        ("qcow2", true),
        ("vmdk", false),
    ] {
        let args = [
            "convert", "-f", "raw", "-O", format, "-r", "4M", "source", "target",
        ];
        let child = start(&lab, &args);
        wait_for(&lab, "target", 1);
        match replaced {
            true => {
                fs::write(lab.path("other"), "another's").unwrap();
                fs::rename(lab.path("other"), lab.path("target")).unwrap();
            }
            false => fs::remove_file(lab.path("target")).unwrap(),
        }
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{format}: {text}");
        assert!(text.contains("'target' was removed or replaced"), "{text}");
        let left = fs::read(lab.path("target")).ok();
        assert_eq!(left.is_some(), replaced, "{format}");
        assert!(left.is_none_or(|left| left == b"another's"), "{format}");
        let _ = fs::remove_file(lab.path("target"));
    }
}
