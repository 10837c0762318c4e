//! Images of formats that are written in place, besides raw and qcow2: every command that writes to an
//! existing image does so to these. After each step zebu and QEMU read the same and find no errors.
//! (That both write to one image in turn is in `sessions/written.rs`.)

use std::fs;

use zebu_testkit::Written;

use crate::common::{Lab, Rng, beyond_qemu};

const MIB: u64 = 1 << 20;

/// Both programs find no errors, and read these bytes.
#[track_caller]
fn verify(lab: &Lab, written: &Written, image: &str, expected: &[u8], what: &str) {
    lab.sync_files();
    if written.is_checked {
        lab.qemu_img(&["check", "-q", "-f", written.name, image])
            .ok(what);
        lab.zebu(&["check", "-q", "-f", written.name, image])
            .ok(what);
    }
    fs::write(lab.path("expected.raw"), expected).unwrap();
    let compare = ["compare", "-q", "-f", written.name, "-F", "raw"];
    let args = [&compare[..], &[image, "expected.raw"]].concat();
    lab.qemu_img(&args).ok(what);
    lab.zebu(&args).ok(what);
}

#[test]
fn every_command_writes_to_them() {
    if beyond_qemu("it has other commands") {
        return;
    }
    for written in Written::others() {
        let lab = Lab::new();
        let mut random = Rng::new(11);
        let size = 5 * MIB as usize + 1024;
        let mut source = vec![0; size];
        for chunk in source.chunks_mut(100_000) {
            match random.below(3) {
                0 => {}
                1 => chunk.fill(random.below(256) as u8),
                _ => chunk.iter_mut().for_each(|b| *b = random.below(256) as u8),
            }
        }
        fs::write(lab.path("source.raw"), &source).unwrap();
        let new = |name: &str| {
            let mut create = written.create();
            let length = size.to_string();
            create.extend([name, &length]);
            lab.zebu(&create).ok("create");
        };
        let format = written.name;
        let what = |command: &str| format!("{written:?}, {command}");

        // An image that has content is the target, also with several workers and in any order.
        for more in [&[][..], &["-W", "-m", "4"], &["-S", "0"]] {
            new("x");
            lab.zebu_io(&["-f", format, "-c", "write -P 3 1M 2M", "x"])
                .ok("write");
            let convert = ["convert", "-n", "-f", "raw", "-O", format];
            let args = [&convert[..], more, &["source.raw", "x"]].concat();
            lab.zebu(&args).ok(&what("convert -n"));
            verify(&lab, &written, "x", &source, &what("convert -n"));
        }

        // An overlay is committed.
        new("base");
        lab.zebu_io(&["-f", format, "-c", "write -P 3 1M 2M", "base"])
            .ok("write");
        lab.zebu(&[
            "create", "-q", "-f", "qcow2", "-b", "base", "-F", format, "top",
        ])
        .ok("overlay");
        let script = "write -P 5 1500k 100k\nwrite -z 2M 64k\nwrite -P 6 5M 1024\n";
        lab.zebu_io_script(&["-f", "qcow2", "top"], script)
            .ok("write");
        let mut expected = vec![0; size];
        expected[MIB as usize..3 * MIB as usize].fill(3);
        expected[1500 << 10..1600 << 10].fill(5);
        expected[2 << 20..(2 << 20) + (64 << 10)].fill(0);
        expected[5 << 20..].fill(6);
        lab.zebu(&["commit", "-q", "-f", "qcow2", "top"])
            .ok(&what("commit"));
        verify(&lab, &written, "base", &expected, &what("commit"));

        // A benchmark of writes.
        let bench = [
            "bench", "-f", format, "-w", "-c", "40", "-d", "8", "-s", "65536",
        ];
        let args = [&bench[..], &["--pattern", "77", "-S", "131072", "base"]].concat();
        lab.zebu(&args).ok(&what("bench -w"));
        for at in (0..40).map(|n| n * 131_072) {
            expected[at..at + 65_536].fill(77);
        }
        verify(&lab, &written, "base", &expected, &what("bench -w"));
    }
}
