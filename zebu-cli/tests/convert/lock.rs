//! Image locks. A writer must exclude all other programs, QEMU from zebu and zebu from QEMU; readers
//! must not exclude each other.

use std::io::Read as _;
use std::os::unix::net::UnixStream;

use crate::common::{Answer, Lab, assert_same_answer};

const IN_USE: &str = "Failed to get shared \"write\" lock";

fn image() -> Lab {
    let lab = Lab::new();
    lab.make(
        "create x.qcow2 4M; io x.qcow2: write -P 7 0 200k; \
         create -b x.qcow2 -F qcow2 overlay.qcow2; raw r.raw 1000000",
    );
    lab.sync_files();
    lab
}

/// Fails the test unless the answer is the error of a lock.
#[track_caller]
fn in_use(answer: &Answer, status: i32, message: &str, file: &str) {
    let lines = answer.err.lines();
    let lines: Vec<&str> = lines.filter(|line| !line.starts_with("hint: ")).collect();
    assert!(
        answer.status == status
            && lines.len() == 2
            && lines[0].ends_with(message)
            && lines[1] == format!("Is another process using the image [{file}]?"),
        "{message:?} about {file} and status {status} expected: {answer:#?}"
    );
}

#[test]
fn an_image_that_qemu_writes_is_refused_unless_shared() {
    let lab = image();
    let held = lab.held_by_qemu(&["x.qcow2"]);
    let message = format!("Could not open 'x.qcow2': {IN_USE}");
    for (status, args) in [
        (1, &["info", "x.qcow2"][..]),
        (1, &["map", "x.qcow2"]),
        (1, &["check", "x.qcow2"]),
        (1, &["measure", "-O", "raw", "x.qcow2"]),
        (1, &["bench", "-c", "1", "x.qcow2"]),
        (1, &["convert", "-O", "raw", "x.qcow2", "out.raw"]),
        (2, &["compare", "x.qcow2", "r.raw"]),
        (2, &["compare", "r.raw", "x.qcow2"]),
    ] {
        in_use(&lab.zebu(args), status, &message, "x.qcow2");
    }
    assert!(!lab.path("out.raw").exists());

    for args in [
        &["info", "-U", "x.qcow2"][..],
        &["info", "--force-share", "x.qcow2"],
        &["map", "-U", "--output=json", "x.qcow2"],
        &["check", "-U", "x.qcow2"],
        &["measure", "-U", "-O", "raw", "x.qcow2"],
        &["compare", "-U", "x.qcow2", "r.raw"],
    ] {
        assert_same_answer(&lab, args, "-U");
    }
    lab.zebu(&["convert", "-U", "-O", "raw", "x.qcow2", "out.raw"])
        .ok("-U");
    lab.zebu(&["bench", "-U", "-c", "1", "x.qcow2"]).ok("-U");
    drop(held);
    lab.zebu(&["convert", "-O", "raw", "x.qcow2", "later.raw"])
        .ok("afterwards");
    lab.assert_same_bytes("out.raw", "later.raw", "-U");
}

#[test]
fn a_backing_file_that_qemu_writes_is_refused_unless_shared() {
    let lab = image();
    let _held = lab.held_by_qemu(&["x.qcow2"]);
    let backing = format!("Could not open 'overlay.qcow2': Could not open backing file: {IN_USE}");
    in_use(&lab.zebu(&["map", "overlay.qcow2"]), 1, &backing, "x.qcow2");
    in_use(
        &lab.zebu(&["convert", "-O", "raw", "overlay.qcow2", "out.raw"]),
        1,
        &backing,
        "x.qcow2",
    );
    // Without --backing-chain info does not open backing files.
    assert_same_answer(&lab, &["info", "overlay.qcow2"], "backing file in use");
    in_use(
        &lab.zebu(&["info", "--backing-chain", "overlay.qcow2"]),
        1,
        &format!("Could not open 'x.qcow2': {IN_USE}"),
        "x.qcow2",
    );
    assert_same_answer(&lab, &["map", "-U", "overlay.qcow2"], "-U");
    assert_same_answer(
        &lab,
        &["info", "-U", "--backing-chain", "overlay.qcow2"],
        "-U",
    );
}

#[test]
fn convert_refuses_a_raw_source_that_qemu_writes() {
    let lab = image();
    let _held = lab.held_by_qemu(&["-f", "raw", "r.raw"]);
    // Raw images are opened with all access shared, except by convert: its source must not change.
    for args in [
        &["info", "-f", "raw", "r.raw"][..],
        &["map", "-f", "raw", "r.raw"],
        &["compare", "-F", "raw", "x.qcow2", "r.raw"],
    ] {
        assert_same_answer(&lab, args, "a raw image that is written");
    }
    let convert = ["convert", "-f", "raw", "-O", "raw", "r.raw", "out.raw"];
    in_use(
        &lab.zebu(&convert),
        1,
        &format!("Could not open 'r.raw': {IN_USE}"),
        "r.raw",
    );
}

#[test]
fn readers_share() {
    let lab = image();
    let _qemu = lab.held_by_qemu(&["-r", "x.qcow2"]);
    let mut zebu = lab.held_by_zebu(&["-r", "x.qcow2"]);
    assert_same_answer(&lab, &["info", "x.qcow2"], "two readers");
    assert!(zebu.command("read -P 7 0 4k").contains("read 4096/4096"));
    lab.qemu_img(&["check", "x.qcow2"]).ok("readers share");
    lab.qemu_io(&["-r", "-c", "read 0 4k", "x.qcow2"])
        .ok("readers share");
}

#[test]
fn an_image_that_zebu_reads_refuses_a_writer() {
    let lab = image();
    for args in [&["-r", "x.qcow2"][..], &["-r", "overlay.qcow2"]] {
        let held = lab.held_by_zebu(args);
        let refused = lab.qemu_io(&["-c", "write 0 4k", "x.qcow2"]);
        assert!(
            refused.status == 1 && refused.err.contains("Failed to get \"write\" lock"),
            "{refused:#?}"
        );
        drop(held);
        lab.qemu_io(&["-c", "write -P 7 0 4k", "x.qcow2"])
            .ok("the lock is gone");
    }
}

#[test]
fn an_image_that_zebu_opened_for_writing_refuses_readers() {
    let lab = image();
    // Without -r qemu-io opens for writing, also if no command writes.
    let _held = lab.held_by_zebu(&["x.qcow2"]);
    in_use(
        &lab.qemu_img(&["info", "x.qcow2"]),
        1,
        &format!("Could not open 'x.qcow2': {IN_USE}"),
        "x.qcow2",
    );
    lab.qemu_img(&["info", "-U", "x.qcow2"]).ok("-U");
    in_use(
        &lab.zebu(&["info", "x.qcow2"]),
        1,
        &format!("Could not open 'x.qcow2': {IN_USE}"),
        "x.qcow2",
    );
    let refused = lab.zebu_io(&["-c", "read 0 4k", "x.qcow2"]);
    in_use(
        &refused,
        1,
        "can't open device x.qcow2: Failed to get \"write\" lock",
        "x.qcow2",
    );
}

#[test]
fn force_share_needs_read_only() {
    let lab = image();
    let answer = lab.zebu_io(&["-U", "-c", "length", "x.qcow2"]);
    answer.failed_with_one_line(1, "-U for writing");
    assert!(
        answer
            .err
            .contains("force-share=on can only be used with read-only images"),
        "{answer:#?}"
    );
    let _held = lab.held_by_qemu(&["x.qcow2"]);
    lab.zebu_io(&["-r", "-U", "-c", "read -P 7 0 4k", "x.qcow2"])
        .ok("-r -U");
}

/// QEMU lets two programs that resize a raw disk both read the size before one of them changes it.
#[test]
fn no_growth_of_a_raw_disk_is_lost_beside_another() {
    let lab = image();
    let size = || {
        std::fs::metadata(lab.path("r.raw"))
            .expect("metadata")
            .len()
    };
    // Sizes are whole sectors.
    let before = size().next_multiple_of(512);
    let mut grown = 0;
    for _ in 0..10 {
        let start = || lab.start_zebu(&["resize", "-q", "-f", "raw", "r.raw", "+64K"]);
        let programs = [start(), start(), start()];
        let ended = programs.map(|mut program| program.wait().expect("wait"));
        grown += ended.iter().filter(|status| status.success()).count() as u64;
    }
    assert_eq!(size(), before + grown * 65536, "{grown}");
}

#[test]
fn convert_refuses_its_source_as_target() {
    let lab = image();
    in_use(
        &lab.zebu(&["convert", "-O", "raw", "x.qcow2", "x.qcow2"]),
        1,
        "x.qcow2: error while converting raw: Failed to get \"write\" lock",
        "x.qcow2",
    );
    lab.qemu_img(&["check", "x.qcow2"]).ok("untouched");
}

/// A server that is killed when it is dropped.
struct Served(std::process::Child);

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts qemu-nbd or `zebu nbd`. `None` if there is no qemu-nbd.
fn serve(lab: &Lab, by_zebu: bool, args: &[&str]) -> Option<Served> {
    let _ = std::fs::remove_file(lab.path("s.sock"));
    let socket = lab.path("s.sock").display().to_string();
    let args = [&["-t", "-k", &socket], args].concat();
    let server = match by_zebu {
        true => lab.start_zebu(&[&["nbd"], &args[..]].concat()),
        false => std::process::Command::new(crate::common::peer().io.with_file_name("qemu-nbd"))
            .args(args)
            .current_dir(lab.path("."))
            .spawn()
            .ok()?,
    };
    let served = Served(server);
    // The greeting shows that the image is open; the socket exists before.
    let mut greeting = [0; 8];
    while UnixStream::connect(&socket)
        .and_then(|mut stream| stream.read_exact(&mut greeting))
        .is_err()
    {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(&greeting, b"NBDMAGIC");
    Some(served)
}

/// Pairs of a program that has a file open and a command on that file, each of zebu or QEMU. All
/// four combinations must give the same status and the same reason.
#[test]
fn locks_are_those_of_qemu() {
    let holders: &[(&str, &str, &[&str])] = &[
        ("x.raw", "io", &["i.qcow2"]),
        ("x.raw", "io", &["-r", "i.qcow2"]),
        ("x.raw", "io", &["-f", "raw", "x.raw"]),
        ("x.raw", "io", &["-r", "-f", "raw", "x.raw"]),
        ("x.raw", "io", &["above.qcow2"]),
        ("x.raw", "nbd", &["-f", "raw", "x.raw"]),
        ("x.raw", "nbd", &["-r", "-f", "raw", "x.raw"]),
        ("x.raw", "nbd", &["-s", "-f", "raw", "x.raw"]),
        ("x.raw", "nbd", &["-f", "qcow2", "i.qcow2"]),
        ("y.qcow2", "io", &["y.qcow2"]),
        ("y.qcow2", "nbd", &["-r", "-f", "qcow2", "y.qcow2"]),
    ];
    let commands = [
        "create -q -f raw FILE 1M",
        "create -q -f raw -o preallocation=full FILE 1M",
        "create -q -f qcow2 -o data_file=FILE new.qcow2 1M",
        "resize -q -f raw --shrink FILE 1M",
        "resize -q -f raw FILE +1M",
        "convert -O raw a.raw FILE",
        "convert -n -O raw a.raw FILE",
        "dd -O raw if=a.raw of=FILE",
        "bench -w -c 1 -f raw FILE",
        "info -f raw FILE",
    ];
    let lab = Lab::new();
    lab.make("raw a.raw 1048576");
    for make in [
        "create -q -f qcow2 -o data_file=x.raw i.qcow2 4M",
        "create -q -f qcow2 -b x.raw -F raw above.qcow2",
        "create -q -f qcow2 y.qcow2 4M",
    ] {
        let args: Vec<&str> = make.split(' ').collect();
        lab.qemu_img(&args).ok(make);
    }
    let (mut pairs, mut refused) = (0, 0);
    for (name, kind, args) in holders {
        let content = std::fs::read(lab.path(name)).expect("read");
        let mut answers = Vec::new();
        for held_by_zebu in [false, true] {
            let mut io = None;
            let mut nbd = None;
            match (*kind, held_by_zebu) {
                ("io", false) => io = Some(lab.held_by_qemu(args)),
                ("io", true) => io = Some(lab.held_by_zebu(args)),
                _ => {
                    nbd = serve(&lab, held_by_zebu, args);
                    if nbd.is_none() {
                        continue;
                    }
                }
            }
            for command in commands {
                let text = command.replace("FILE", name);
                let words: Vec<&str> = text.split(' ').collect();
                for by_zebu in [false, true] {
                    std::fs::write(lab.path(name), &content).expect("write");
                    let answer = match by_zebu {
                        true => lab.zebu(&words),
                        false => lab.qemu_img(&words),
                    };
                    let first = answer.err.lines().next().unwrap_or_default();
                    let why = first.rsplit(": ").next().unwrap_or_default().to_string();
                    if by_zebu && answer.status != 0 {
                        let left = std::fs::read(lab.path(name)).expect("read");
                        assert!(left == content, "{kind} {args:?}, {text}: changed");
                    }
                    answers.push((command, (answer.status, why), (held_by_zebu, by_zebu)));
                }
            }
            drop((io, nbd));
            std::fs::write(lab.path(name), &content).expect("write");
        }
        for command in commands {
            let mut of = answers.iter().filter(|answer| answer.0 == command);
            let Some((_, expected, _)) = of.next() else {
                continue;
            };
            for (_, answer, by_zebu) in of {
                assert_eq!(
                    answer, expected,
                    "{kind} {args:?}, {command}; (holder, command) of zebu: {by_zebu:?}"
                );
                pairs += 1;
                refused += usize::from(answer.0 != 0);
            }
        }
    }
    println!("cases: {pairs} pairs, {refused} refused");
    assert!(refused > 20);
}
