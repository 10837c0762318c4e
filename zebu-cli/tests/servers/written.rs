//! Images of the formats that are written in place, besides raw and qcow2, as disks of both servers:
//! what clients have flushed is there, and QEMU finds no errors.

use std::fs;

use crate::common::server::Server;
use crate::common::vhost::*;
use crate::common::{Lab, beyond_qemu};
use zebu_testkit::Written;
use zebu_vhost::front_end::Setup;

const MIB: usize = 1 << 20;

fn new_image(lab: &Lab, written: &Written) {
    let mut create = written.create();
    create.extend(["x", "6M"]);
    lab.zebu(&create).ok("create");
}

#[track_caller]
fn verify(lab: &Lab, written: &Written, expected: &[u8]) {
    if written.is_checked {
        lab.qemu_img(&["check", "-f", written.name, "x"])
            .ok("check");
    }
    let args = ["convert", "-f", written.name, "-O", "raw", "x", "content"];
    lab.qemu_img(&args).ok("convert");
    assert!(
        fs::read(lab.path("content")).unwrap() == expected,
        "{written:?}"
    );
}

#[test]
fn nbd_serves_images_of_other_formats() {
    if beyond_qemu("an NBD server") {
        return;
    }
    for written in Written::others() {
        let lab = Lab::new();
        new_image(&lab, &written);
        let args = [
            "-t",
            "-e",
            "0",
            "--discard=unmap",
            "-f",
            written.name,
            "-x",
            "x",
            "x",
        ];
        let mut server = Server::start(&lab, &args);
        let script = "aio_write -P 5 100 1000\naio_write -P 6 1536k 1M\naio_write -P 7 5M 1M\naio_flush\n\
                      write -z 1600k 65536\nwrite -zu 1700k 128k\nwrite -P 8 1750k 4k\nflush\n\
                      read -P 5 100 1000\nread -P 0 1600k 64k\nread -P 8 1750k 4k\ndiscard 5M 512k\nwrite -P 9 5M 512k\n";
        let uri = server.uri("x");
        let answer = lab.qemu_io_script(&["-f", "raw", "-d", "unmap", &uri], script);
        assert!(!answer.ok("requests").out.contains("failed"), "{written:?}");
        server.stop();
        let mut expected = vec![0; 6 * MIB];
        expected[100..1100].fill(5);
        expected[1536 << 10..2560 << 10].fill(6);
        expected[5 * MIB..5 * MIB + MIB / 2].fill(9);
        expected[5 * MIB + MIB / 2..].fill(7);
        expected[1600 << 10..1664 << 10].fill(0);
        expected[1700 << 10..1828 << 10].fill(0);
        expected[1750 << 10..1754 << 10].fill(8);
        verify(&lab, &written, &expected);
    }
}

#[test]
fn vhost_user_blk_serves_images_of_other_formats() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    for written in Written::others() {
        let lab = Lab::new();
        new_image(&lab, &written);
        let mut server = serve(&lab, &["--discard=unmap", "-f", written.name, "x"]);
        let mut disk = Disk::new(
            &lab,
            Setup {
                bytes: MIB as u64,
                ..Setup::default()
            },
        );
        let noise: Vec<u8> = (0..MIB).map(|n| (n * 7 + n / 251) as u8).collect();
        let mut expected = vec![0; 6 * MIB];
        for (sector, length) in [(0, MIB), (1, 512), (5000, 4096 + 512), (12_287, 512)] {
            assert_eq!(disk.give(WRITE, sector, &noise[..length]), OK);
            let at = sector as usize * 512;
            expected[at..at + length].copy_from_slice(&noise[..length]);
        }
        let zeroes = [range(8, 8, 0), range(256, 512, 1)].concat();
        assert_eq!(disk.give(WRITE_ZEROES, 0, &zeroes), OK);
        expected[8 * 512..16 * 512].fill(0);
        expected[256 * 512..768 * 512].fill(0);
        assert_eq!(disk.give(FLUSH, 0, &[]), OK);
        assert!(disk.take(READ, 0, MIB).unwrap() == expected[..MIB]);
        // What was flushed is there, whatever ends the server.
        server.signal("KILL");
        server.wait();
        if let Some(repair) = written.repair() {
            lab.qemu_img(&[&repair[..], &["x"]].concat()).ok("repair");
        }
        verify(&lab, &written, &expected);
    }
}
