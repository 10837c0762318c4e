//! Guards against a format that is guessed wrongly or goes on to do harm: an
//! image of another program copied as if it were a disk; a guest that turns its
//! raw disk into an image which names a file of the host, for the next one who
//! opens it without saying that it is raw.

mod common;

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use common::server::{Raw, Server};
use common::{Lab, beyond_qemu};
use zebu::internal::nbd::{Command, Headers, Request, command};

/// What a guest writes to have `/etc/passwd` for a backing file: a header of
/// version 2 in sector 0.
fn header() -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x02");
    header[15] = 80;
    header[19] = 11;
    header[23] = 16;
    header[80..91].copy_from_slice(b"/etc/passwd");
    header
}

#[test]
fn images_of_other_programs_are_no_disks() {
    if beyond_qemu("it reads them") {
        return;
    }
    let lab = Lab::new();
    for (name, more) in [
        ("qcow", &[][..]),
        ("qed", &[]),
        ("vhdx", &[]),
        ("vpc", &[]),
        ("parallels", &[]),
        ("vmdk", &[]),
        ("vmdk", &["-o", "subformat=monolithicFlat"]),
        (
            "luks",
            &[
                "--object",
                "secret,id=s,data=abc",
                "-o",
                "key-secret=s,iter-time=10",
            ],
        ),
    ] {
        let image = format!("x.{name}");
        let mut create = vec!["create", "-q", "-f", name];
        create.extend(more);
        create.extend([&image, "1M"]);
        let made = lab.qemu_img(&create);
        if made.err.contains("Unknown file format") {
            continue;
        }
        made.ok(name);
        let said = format!("Driver '{name}' is not supported");
        for args in [
            &["info", &image][..],
            &["map", &image],
            &["convert", &image, "y.raw"],
            &["compare", &image, &image],
            &["dd", &format!("if={image}"), "of=y.raw"],
        ] {
            let answer = lab.zebu(args);
            answer.failed_with_one_line(if args[0] == "compare" { 2 } else { 1 }, name);
            assert!(answer.err.contains(&said), "{args:?}: {answer:?}");
        }
        assert!(!lab.path("y.raw").exists());
        lab.zebu(&["convert", "-f", "raw", &image, "y.raw"])
            .ok(name);
        let bytes = fs::read(lab.path(&image)).unwrap();
        let copy = fs::read(lab.path("y.raw")).unwrap();
        assert!(copy[..bytes.len()] == bytes, "{name}");
        fs::remove_file(lab.path("y.raw")).unwrap();
    }
}

/// Whether each of these commands of `io` works is the same in both programs,
/// with the format guessed and with it given, and so is what they leave.
#[test]
fn a_guessed_disk_stays_one() {
    let lab = Lab::new();
    fs::write(lab.path("header"), header()).unwrap();
    let mut low = header();
    low[..4].fill(7);
    fs::write(lab.path("low"), low).unwrap();
    let commands = [
        "write -s header 0 512",
        "write -s header 0 64k",
        "write -s header 512 512",
        "write -s low 0 512",
        "write -P 0x51 0 1",
        "write -P 0x46 1 1",
        "write -P 0x49 2 1",
        "write -P 0xfb 3 1",
        "write -P 0x20 3 1",
        "write -z 0 512",
        "write -s header 0 512",
    ];
    for how in ["-n", "-f raw"] {
        let mut left = Vec::new();
        for program in ["zebu", "QEMU"] {
            fs::write(lab.path("x"), vec![0; 1 << 20]).unwrap();
            let mut works = Vec::new();
            for command in commands {
                let mut args: Vec<&str> = how.split(' ').filter(|a| *a != "-n").collect();
                args.extend(["-c", command, "x"]);
                let answer = match program {
                    "zebu" => lab.zebu_io(&args),
                    _ => lab.qemu_io(&args),
                };
                let said = answer.out.clone() + &answer.err;
                assert!(said.contains("wrote ") || said.contains("failed"), "{said}");
                let refused = said.contains("Operation not permitted");
                assert_eq!(
                    answer.err.contains("probing guessed raw"),
                    how == "-n",
                    "{answer:?}"
                );
                works.push((command, !refused));
            }
            left.push((works, fs::read(lab.path("x")).unwrap()));
        }
        assert_eq!(left[0].0, left[1].0, "{how}");
        assert!(left[0].1 == left[1].1, "{how}");
        assert_eq!(left[0].0.iter().all(|(_, works)| *works), how == "-f raw");
    }
}

/// Pieces that make a header together, from many clients at once.
#[test]
fn nobody_gets_a_header_by_pieces() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    let header = header();
    for round in 0..4 {
        fs::write(lab.path("x"), vec![0; 1 << 20]).unwrap();
        let mut server = Server::start(&lab, &["-t", "-e", "4", "--discard=unmap", "x"]);
        let refused = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for n in 0..4 {
                let (server, header, refused) = (&server, &header, &refused);
                scope.spawn(move || {
                    let mut raw = Raw::with_export(server, "", Headers::Simple);
                    for turn in 0..50 {
                        // Each has two of the eight bytes that it takes.
                        let at = (n + turn) % 4 * 2;
                        let mut request = Request {
                            command: Command::Write,
                            flags: 0,
                            cookie: turn,
                            offset: at,
                            length: 2,
                        };
                        let bytes = &header[at as usize..][..2];
                        let error = raw.ask(&request, bytes).error;
                        assert!([0, 1].contains(&error), "EPERM or nothing: {error}");
                        refused.fetch_add(u64::from(error), Ordering::Relaxed);
                        request.command = Command::WriteZeroes;
                        request.flags = command::NO_HOLE * (turn as u16 % 2);
                        if turn % 3 == 0 {
                            assert_eq!(raw.ask(&request, &[]).error, 0);
                        }
                    }
                });
            }
        });
        server.stop();
        let left = fs::read(lab.path("x")).unwrap();
        assert!(left[..8] != header[..8], "round {round}");
        assert!(refused.into_inner() > 0, "round {round}: never tried");
        let info = lab.qemu_img(&["info", "x"]).ok("info");
        assert!(info.out.contains("file format: raw"), "{info:?}");
    }
}

/// A part of a file, named without a driver, is where it is.
#[test]
fn a_guessed_part_is_written_in_its_place() {
    let lab = Lab::new();
    for offset in [512, 1 << 20, 4096 + 512] {
        let mut left = Vec::new();
        for program in ["zebu", "QEMU"] {
            fs::write(lab.path("x"), vec![9; 2 << 20]).unwrap();
            let options = format!("file.filename=x,offset={offset}");
            let args = [
                "-c",
                "write -P 1 0 4k",
                "-c",
                "write -z 512 512",
                "-c",
                "write -P 2 1k 700k",
                "--image-opts",
                &options,
            ];
            let answer = match program {
                "zebu" => lab.zebu_io(&args),
                _ => lab.qemu_io(&args),
            };
            answer.ok(&options);
            left.push(fs::read(lab.path("x")).unwrap());
        }
        assert!(left[0] == left[1], "{offset}");
        assert!(left[0][..offset] == vec![9; offset], "{offset}");
        assert!(left[0][offset..][..512] == [1; 512], "{offset}");
    }
}

/// What a guest wrote to an overlay does not get to the base by a commit.
#[test]
fn a_guessed_base_stays_a_disk() {
    let lab = Lab::new();
    fs::write(lab.path("header"), header()).unwrap();
    fs::write(lab.path("base"), vec![0; 1 << 20]).unwrap();
    lab.qemu_img(&[
        "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "top",
    ])
    .ok("create");
    // As older programs made it: the format of the base is not said.
    let mut top = fs::read(lab.path("top")).unwrap();
    let said = top.windows(4).position(|w| w == [0xe2, 0x79, 0x2a, 0xca]);
    top[said.expect("a backing format")..][..4].copy_from_slice(b"none");
    fs::write(lab.path("top"), top).unwrap();
    lab.qemu_io(&["-f", "qcow2", "-c", "write -s header 0 512", "top"])
        .ok("write");
    let ours = lab.zebu(&["commit", "top"]);
    let theirs = lab.qemu_img(&["commit", "top"]);
    assert_eq!((ours.status, theirs.status), (1, 1), "{ours:?} {theirs:?}");
    assert!(ours.err.contains("Operation not permitted"), "{ours:?}");
    assert!(fs::read(lab.path("base")).unwrap() == vec![0; 1 << 20]);
}
