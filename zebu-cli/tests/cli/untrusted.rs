//! Strict mode (`--untrusted`). No command, under any name of the program, may open a file because
//! an image names it; names must be plain paths; limits must hold and be named in errors.
//!
//! inotify(7) reports which files were opened. Each watch is first tested without strict mode.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::{Answer, Lab, beyond_qemu};
use serde_json::Value;

/// Reports whether a file was opened.
struct Watch(File);

impl Watch {
    fn of(path: &Path) -> Watch {
        let path = CString::new(path.as_os_str().as_bytes()).expect("a path");
        // SAFETY: plain system calls; the path lives, and the descriptor is new.
        unsafe {
            let fd = libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC);
            assert!(fd >= 0, "inotify_init1");
            let watch = Watch(File::from_raw_fd(fd));
            let added = libc::inotify_add_watch(fd, path.as_ptr(), libc::IN_OPEN);
            assert!(added >= 0, "inotify_add_watch");
            watch
        }
    }

    /// Whether it was opened since the last call.
    fn was_opened(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 4096]), Ok(n) if n > 0)
    }
}

/// Images that name `canary.raw` in different ways.
const IMAGES: [&str; 6] = ["backed", "json", "nested", "data", "debug", "window"];

/// Images whose backing file is named by a driver.
const DRIVERS: [(&str, &str); 3] = [
    (
        "debug",
        r#"json:{"driver":"raw","file":{"driver":"blkdebug","inject-error":[{"event":"read_aio"}],"image":{"driver":"file","filename":"canary.raw"}}}"#,
    ),
    (
        "window",
        r#"json:{"driver":"raw","offset":512,"size":65536,"file":{"driver":"file","filename":"canary.raw"}}"#,
    ),
    (
        "null",
        r#"json:{"driver":"null-co","size":65536,"read-zeroes":true}"#,
    ),
];

/// An empty folder; `None` if QEMU is tested, which has no strict mode.
fn empty_lab() -> Option<Lab> {
    (!beyond_qemu("strict mode")).then(Lab::new)
}

/// A folder with these images, and with `plain.qcow2` and `plain.raw`, which name no file.
fn lab() -> Option<Lab> {
    let lab = empty_lab()?;
    lab.make(
        "raw canary.raw 1048576; raw plain.raw 1048576; create plain.qcow2 1M; \
         create -b canary.raw -F raw backed 1M; \
         create -b plain.qcow2 -F qcow2 json 1M; \
         create -b plain.qcow2 -F qcow2 nested 1M; \
         create -o data_file=data-of.raw data 1M",
    );
    let backing = r#"json:{"driver":"raw","file":{"driver":"file","filename":"canary.raw"}}"#;
    for (name, backing, format) in [("json", backing, "raw"), ("nested", "backed", "qcow2")] {
        let args = ["rebase", "-u", "-b", backing, "-F", format, name];
        lab.qemu_img(&args).ok("rebase");
    }
    for (name, backing) in DRIVERS {
        lab.make(&format!("create -b plain.raw -F raw {name} 1M"));
        let args = ["rebase", "-u", "-b", backing, "-F", "raw", name];
        lab.qemu_img(&args).ok("rebase");
    }
    fs::remove_file(lab.path("data-of.raw")).expect("remove");
    fs::hard_link(lab.path("canary.raw"), lab.path("data-of.raw")).expect("link");
    lab.sync_files();
    Some(lab)
}

/// Commands on an image called IMAGE, and whether they need its data.
const COMMANDS: &[(&str, bool)] = &[
    ("info IMAGE", false),
    ("check IMAGE", false),
    ("check -f qcow2 -r all IMAGE", false),
    ("map IMAGE", true),
    ("map -f qcow2 IMAGE", true),
    ("measure -O raw IMAGE", true),
    ("compare IMAGE plain.raw", true),
    ("compare plain.raw IMAGE", true),
    ("convert -O raw IMAGE out", true),
    ("convert -n -f raw -O qcow2 plain.raw IMAGE", true),
    ("dd if=IMAGE of=out", true),
    ("bench -c 1 IMAGE", true),
    ("bench -f qcow2 -w -c 1 IMAGE", true),
    ("io -r -c quit IMAGE", true),
    ("io -f qcow2 -c quit IMAGE", true),
    ("io -f qcow2 -s -c quit IMAGE", true),
    ("snapshot -l IMAGE", true),
    ("resize -f qcow2 IMAGE 2M", true),
    ("amend -f qcow2 -o lazy_refcounts=on IMAGE", true),
    ("commit -f qcow2 IMAGE", true),
    ("rebase -f qcow2 -F raw -b plain.raw IMAGE", true),
    ("create -f qcow2 -b IMAGE -F qcow2 out", true),
    ("convert -O qcow2 -B IMAGE -F qcow2 plain.raw out", true),
];

fn run(lab: &Lab, before: &[&str], command: &str, image: &str) -> Answer {
    let command = command.replace("IMAGE", image);
    let mut args = before.to_vec();
    args.extend(command.split(' '));
    lab.zebu(&args)
}

/// Fails the test unless the command was refused if it needs the data, and succeeded otherwise.
#[track_caller]
fn assert_refused(answer: &Answer, needs_data: bool, command: &str) {
    assert_eq!(answer.status != 0, needs_data, "{command}: {answer:#?}");
    let words = ["may not open", "Could not open"];
    let is_named = words.iter().any(|w| answer.err.contains(w));
    assert!(!needs_data || is_named, "{command}: {answer:#?}");
}

#[test]
fn files_named_by_images_are_not_opened() {
    let Some(lab) = lab() else { return };
    let mut watch = Watch::of(&lab.path("canary.raw"));
    for image in IMAGES {
        run(&lab, &[], "map IMAGE", image).ok("without strict mode");
        assert!(watch.was_opened(), "{image}: the watch does not work");
        let before = fs::read(lab.path(image)).expect("read");
        for (command, needs_data) in COMMANDS {
            let answer = run(&lab, &["--untrusted"], command, image);
            assert!(!watch.was_opened(), "{command} of {image}: {answer:#?}");
            assert_refused(&answer, *needs_data, command);
            let after = fs::read(lab.path(image)).expect("read");
            assert!(before == after, "{command} changed {image}");
            let _ = fs::remove_file(lab.path("out"));
        }
    }
    println!(
        "cases: {} commands on images",
        IMAGES.len() * COMMANDS.len()
    );
}

/// The driver opens no file, and is refused all the same.
#[test]
fn drivers_named_by_images_are_refused() {
    let Some(lab) = lab() else { return };
    for (command, needs_data) in COMMANDS {
        let answer = run(&lab, &["--untrusted"], command, "null");
        assert_refused(&answer, *needs_data, command);
        let _ = fs::remove_file(lab.path("out"));
    }
}

/// The option is accepted before the command and among its options, and under the other names of
/// the program.
#[test]
fn positions_of_the_option() {
    let Some(lab) = lab() else { return };
    let mut watch = Watch::of(&lab.path("canary.raw"));
    let refused = |answer: Answer| {
        assert_eq!(answer.status, 1, "{answer:#?}");
        assert!(answer.err.contains("may not open"), "{answer:#?}");
    };
    refused(lab.zebu(&["--untrusted", "map", "backed"]));
    refused(lab.zebu(&["map", "--untrusted", "backed"]));
    refused(lab.zebu(&["map", "backed", "--untrusted=chain=3"]));
    refused(lab.zebu(&["--untrusted=chain=3", "map", "backed"]));
    refused(lab.zebu(&["io", "--untrusted", "-r", "-c", "quit", "backed"]));
    refused(lab.zebu(&["io", "--untrusted", "-c", "open -r backed"]));
    refused(lab.zebu_called("qemu-img", &["map", "--untrusted", "backed"]));
    refused(lab.zebu_called("qemu-io", &["--untrusted=chain=2", "-r", "backed"]));
    assert!(!watch.was_opened());
    for (value, words) in [
        ("--untrusted=nothing=1", "There is no limit 'nothing'"),
        ("--untrusted=chain=x", "'x' is no value for 'chain'"),
        ("--untrusted=chain", "'' is no value for 'chain'"),
    ] {
        let answer = lab.zebu(&["info", value, "plain.qcow2"]);
        assert!(
            answer.status == 1 && answer.err.contains(words),
            "{answer:#?}"
        );
    }
    assert!(lab.zebu(&["map", "--help"]).out.contains("--untrusted"));
}

#[test]
fn names_must_be_paths() {
    let Some(lab) = lab() else { return };
    let mut watch = Watch::of(&lab.path("canary.raw"));
    for name in [
        r#"json:{"driver":"raw","file.filename":"canary.raw"}"#,
        "file:canary.raw",
        "host_device:canary.raw",
        "nbd:localhost:10809",
        "http://localhost/x",
    ] {
        for command in [
            &["info", name][..],
            &["convert", "-O", "raw", name, "out"],
            &["compare", "plain.raw", name],
            &["io", "-r", "-c", "quit", name],
            &["create", "-f", "qcow2", "-b", name, "-F", "raw", "out"],
            &[
                "rebase",
                "-f",
                "qcow2",
                "-F",
                "raw",
                "-b",
                name,
                "plain.qcow2",
            ],
        ] {
            let mut args = vec!["--untrusted"];
            args.extend(command);
            let answer = lab.zebu(&args);
            assert!(answer.status != 0, "{command:?}: {answer:#?}");
            assert!(
                answer.err.contains("must be a path"),
                "{command:?}: {answer:#?}"
            );
        }
    }
    assert!(!watch.was_opened());
    lab.zebu(&["--untrusted", "info", "./plain.raw"])
        .ok("a path");
}

/// Files that the user names are opened, and are untrusted as well.
#[test]
fn files_named_by_the_user_are_opened() {
    let Some(lab) = lab() else { return };
    let mut watch = Watch::of(&lab.path("canary.raw"));
    let over = |base: &str| format!("driver=qcow2,file.filename=backed,{base}");
    let raw = over("backing.driver=raw,backing.file.filename=canary.raw");
    for args in [
        &["map", "--untrusted", "--image-opts", &raw][..],
        &[
            "create",
            "--untrusted",
            "-q",
            "-f",
            "qcow2",
            "-b",
            "canary.raw",
            "-F",
            "raw",
            "new",
        ],
        &[
            "convert",
            "--untrusted",
            "-f",
            "raw",
            "-O",
            "qcow2",
            "-B",
            "canary.raw",
            "-F",
            "raw",
            "plain.raw",
            "new",
        ],
        &[
            "rebase",
            "--untrusted",
            "-f",
            "qcow2",
            "-b",
            "canary.raw",
            "-F",
            "raw",
            "plain.qcow2",
        ],
        &[
            "io",
            "--untrusted",
            "-f",
            "raw",
            "-s",
            "-c",
            "write 0 512",
            "canary.raw",
        ],
        &[
            "io",
            "--untrusted",
            "-s",
            "-f",
            "raw",
            "-c",
            "reopen",
            "canary.raw",
        ],
    ] {
        lab.zebu(args).ok("named by the user");
        assert!(watch.was_opened(), "{args:?}");
    }
    let nested = over("backing.driver=qcow2,backing.file.filename=json");
    let answer = lab.zebu(&["map", "--untrusted", "--image-opts", &nested]);
    assert!(answer.err.contains("may not open"), "{answer:#?}");
    let answer = lab.zebu(&["map", "--untrusted=chain=1", "--image-opts", &raw]);
    let words = "The chain's length is 2, beyond the limit 'chain' of untrusted images (1)";
    assert!(answer.err.contains(words), "{answer:#?}");
    assert!(!watch.was_opened());
}

#[test]
fn info_lists_what_would_be_opened() {
    let Some(lab) = lab() else { return };
    let info = |args: &[&str]| -> Value {
        let mut all = vec!["info", "--untrusted", "--output=json"];
        all.extend(args);
        let answer = lab.zebu(&all).ok("info");
        let all: Value = serde_json::from_str(&answer.out).expect("JSON");
        all["untrusted"].clone()
    };
    let json = r#"json:{"driver":"raw","file":{"driver":"file","filename":"canary.raw"}}"#;
    for (image, role, name, format, path) in [
        ("backed", "backing-file", "canary.raw", "raw", "canary.raw"),
        ("json", "backing-file", json, "raw", "canary.raw"),
        ("nested", "backing-file", "backed", "qcow2", "backed"),
        ("data", "data-file", "data-of.raw", "raw", "data-of.raw"),
    ] {
        let said = info(&[image]);
        assert_eq!(said["format-guessed"], true);
        let expected = serde_json::json!(
            [{"as": role, "name": name, "format": format, "path": path}]);
        assert_eq!(said["would-open"], expected, "{image}");
    }
    // As raw it names nothing.
    assert_eq!(
        info(&["-f", "raw", "backed"])["would-open"],
        serde_json::json!([])
    );
    assert_eq!(info(&["-f", "raw", "backed"])["format-guessed"], false);
    for (name, path) in [
        ("nbd://host/x", serde_json::json!("nbd://host:10809/x")),
        ("ssh://host/x", serde_json::json!("ssh://host/x")),
    ] {
        lab.qemu_img(&["rebase", "-u", "-b", name, "-F", "raw", "backed"])
            .ok("rebase");
        let said = info(&["backed"]);
        assert_eq!(said["would-open"][0]["name"], name);
        assert_eq!(said["would-open"][0]["path"], path);
    }
    let text = lab.zebu(&["info", "--untrusted", "json"]).ok("info").out;
    assert!(text.contains("format guessed: yes"), "{text}");
    let line = format!("would open: backing-file '{json}' (format: raw; path: canary.raw)");
    assert!(text.contains(&line), "{text}");
    let plain = lab.zebu(&["info", "plain.qcow2"]).ok("info").out;
    assert!(!plain.contains("would open"), "{plain}");
    let chain = lab.zebu(&["info", "--untrusted", "--backing-chain", "json"]);
    assert!(chain.err.contains("may not open"), "{chain:#?}");
}

/// A guest may write a header to a raw disk, which must not decide how the disk is written to.
#[test]
fn writing_needs_a_given_format() {
    let Some(lab) = lab() else { return };
    for args in [
        &["resize", "plain.qcow2", "2M"][..],
        &["check", "-r", "all", "plain.qcow2"],
        &["io", "-c", "write 0 512", "plain.raw"],
        &["snapshot", "-c", "s", "plain.qcow2"],
    ] {
        let mut all = vec!["--untrusted"];
        all.extend(args);
        let answer = lab.zebu(&all);
        let words = "The format of an untrusted image that is written must be given";
        assert!(
            answer.status != 0 && answer.err.contains(words),
            "{answer:#?}"
        );
    }
    lab.zebu(&["--untrusted", "resize", "-f", "qcow2", "plain.qcow2", "2M"])
        .ok("given");
}

#[test]
fn errors_name_the_limit() {
    let Some(lab) = empty_lab() else { return };
    lab.make("create x.qcow2 64M; io x.qcow2: write 0 1M; raw r.raw 1048576");
    for name in ["a", "b"] {
        lab.qemu_img(&["snapshot", "-c", name, "x.qcow2"])
            .ok("snapshot");
        lab.qemu_img(&["bitmap", "--add", "x.qcow2", name])
            .ok("bitmap");
    }
    for (limit, words) in [
        (
            "virtual-size=32M",
            "The virtual size is 67108864, beyond the limit 'virtual-size'",
        ),
        (
            "table-size=4k",
            "The refcount table's length is 65536, beyond the limit 'table-size'",
        ),
        (
            "snapshots=1",
            "The number of snapshots is 2, beyond the limit 'snapshots'",
        ),
        (
            "bitmaps=1",
            "The number of bitmaps is 2, beyond the limit 'bitmaps'",
        ),
        ("memory=16", "The need for memory is"),
        (
            "work=4k,work-per-byte=0",
            "beyond the limit 'work' of untrusted images (4096)",
        ),
    ] {
        let option = format!("--untrusted={limit}");
        for command in [
            &["info", &option, "x.qcow2"][..],
            &["check", &option, "x.qcow2"],
        ] {
            let answer = lab.zebu(command);
            assert!(
                answer.status == 1 && answer.err.contains(words),
                "{limit}: {answer:#?}"
            );
        }
    }
    for args in [
        &["info", "--untrusted", "x.qcow2"][..],
        &["check", "--untrusted", "x.qcow2"],
        &[
            "convert",
            "--untrusted",
            "-c",
            "-O",
            "qcow2",
            "x.qcow2",
            "y.qcow2",
        ],
        &["compare", "--untrusted", "x.qcow2", "y.qcow2"],
    ] {
        lab.zebu(args).ok("within the limits");
    }
    let answer = lab.zebu(&["info", "--untrusted=virtual-size=1k", "r.raw"]);
    assert!(answer.err.contains("'virtual-size'"), "{answer:#?}");
    println!("cases: 12 limits exceeded");
    lab.make("create huge.qcow2 1P");
    let answer = lab.zebu(&["--untrusted", "info", "huge.qcow2"]);
    assert!(answer.err.contains("(70368744177664)"), "{answer:#?}");
}

/// The tables of a file of some hundred KiB map one cluster 100 million times, as 8 TiB of data.
#[test]
fn the_work_limit_stops_jobs_on_a_small_file_with_terabytes_of_data() {
    let Some(lab) = empty_lab() else { return };
    lab.make("create x.qcow2 8T; io x.qcow2: write 0 64k");
    lab.sync_files();
    let l1 = lab.u64_at("x.qcow2", 40);
    let l1_entry = lab.u64_at("x.qcow2", l1);
    let l2 = l1_entry & 0x00ff_ffff_ffff_fe00;
    let l2_entry = lab.u64_at("x.qcow2", l2);
    let file = File::options()
        .write(true)
        .open(lab.path("x.qcow2"))
        .expect("open");
    let fill = |at: u64, entry: u64, count: usize| {
        let entries: Vec<u8> = entry
            .to_be_bytes()
            .into_iter()
            .cycle()
            .take(8 * count)
            .collect();
        file.write_all_at(&entries, at).expect("write");
    };
    fill(l1, l1_entry, 16384);
    fill(l2, l2_entry, 8192);
    for args in [
        &["map", "x.qcow2"][..],
        &["measure", "-O", "qcow2", "x.qcow2"],
        &["compare", "x.qcow2", "x.qcow2"],
        &["convert", "-O", "qcow2", "x.qcow2", "out"],
        &[
            "convert",
            "--salvage",
            "-q",
            "-O",
            "qcow2",
            "x.qcow2",
            "out",
        ],
        &["dd", "-O", "qcow2", "if=x.qcow2", "of=out", "bs=1M"],
    ] {
        let mut all = vec!["--untrusted=work=32M"];
        all.extend(args);
        let answer = lab.zebu(&all);
        assert!(answer.status != 0, "{args:?} succeeded");
        assert!(
            answer.err.contains("beyond the limit 'work'"),
            "{args:?}: {}",
            answer.err
        );
    }
}
