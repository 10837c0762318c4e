//! Probed formats. A guest must not be able to write an image header to a disk that was probed as raw: the next program that probes
//! the disk would open a file of the host.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::server::{Raw, Server};
use crate::common::{Lab, beyond_qemu};
use zebu::internal::nbd::{Command, Headers, Request, command};

/// A header of version 2 for sector 0 that names `/etc/passwd` as backing file.
fn header() -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x02");
    header[15] = 80;
    header[19] = 11;
    header[23] = 16;
    header[80..91].copy_from_slice(b"/etc/passwd");
    header
}

/// Both programs refuse the same writes to a probed raw disk, none if the format is given, and
/// leave the same data.
#[test]
fn guessed_raw_disks_refuse_image_headers() {
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

/// Several clients write parts of a header at the same time.
#[test]
fn concurrent_writes_cannot_assemble_a_header() {
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
                    for request in 0..50 {
                        // Each request writes two of the eight bytes.
                        let at = (n + request) % 4 * 2;
                        let mut message = Request {
                            command: Command::Write,
                            flags: 0,
                            cookie: request,
                            offset: at,
                            length: 2,
                        };
                        let bytes = &header[at as usize..][..2];
                        let error = raw.ask(&message, bytes).error;
                        assert!([0, 1].contains(&error), "EPERM or success: {error}");
                        refused.fetch_add(u64::from(error), Ordering::Relaxed);
                        message.command = Command::WriteZeroes;
                        message.flags = command::NO_HOLE * (request as u16 % 2);
                        if request % 3 == 0 {
                            assert_eq!(raw.ask(&message, &[]).error, 0);
                        }
                    }
                });
            }
        });
        server.stop();
        let left = fs::read(lab.path("x")).unwrap();
        assert!(left[..8] != header[..8], "round {round}");
        assert!(
            refused.into_inner() > 0,
            "round {round}: no write was refused"
        );
        let info = lab.qemu_img(&["info", "x"]).ok("info");
        assert!(info.out.contains("file format: raw"), "{info:?}");
    }
}

/// Writes to a part of a file go to its offset, with the driver probed.
#[test]
fn guessed_raw_disks_with_an_offset() {
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

/// A header that a guest wrote to an overlay is not committed to a probed raw base.
#[test]
fn commit_refuses_a_header_for_a_guessed_raw_base() {
    let lab = Lab::new();
    fs::write(lab.path("header"), header()).unwrap();
    fs::write(lab.path("base"), vec![0; 1 << 20]).unwrap();
    lab.qemu_img(&[
        "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "top",
    ])
    .ok("create");
    // Removes the format of the base, which older programs did not store.
    let mut top = fs::read(lab.path("top")).unwrap();
    let said = top.windows(4).position(|w| w == [0xe2, 0x79, 0x2a, 0xca]);
    top[said.expect("the backing format")..][..4].copy_from_slice(b"none");
    fs::write(lab.path("top"), top).unwrap();
    lab.qemu_io(&["-f", "qcow2", "-c", "write -s header 0 512", "top"])
        .ok("write");
    let ours = lab.zebu(&["commit", "top"]);
    let theirs = lab.qemu_img(&["commit", "top"]);
    assert_eq!((ours.status, theirs.status), (1, 1), "{ours:?} {theirs:?}");
    assert!(ours.err.contains("Operation not permitted"), "{ours:?}");
    assert!(fs::read(lab.path("base")).unwrap() == vec![0; 1 << 20]);
}
