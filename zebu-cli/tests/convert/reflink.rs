//! `convert -C` on file systems with reflinks: the copy must have the same bytes and share blocks.
//!
//! The test needs loop devices, mount namespaces and mkfs programs, and is skipped without them.

use std::fs::{self, File};
use std::path::Path;

use crate::common::{Answer, Lab, Limits, beyond_qemu};

const MIB: u64 = 1 << 20;

/// File systems, and the programs that make them in the file `fs`.
const MAKERS: [(&str, &str, &[&str]); 2] = [
    ("xfs", "mkfs.xfs", &["-q", "-f", "-m", "reflink=1", "fs"]),
    ("btrfs", "mkfs.btrfs", &["-q", "-f", "fs"]),
];

/// Makes a file system; false if the program is missing.
fn make(lab: &Lab, program: &str, args: &[&str]) -> bool {
    let folders = ["/usr/sbin", "/sbin", "/usr/bin"].map(|folder| Path::new(folder).join(program));
    let Some(program) = folders.iter().find(|path| path.exists()) else {
        return false;
    };
    File::create(lab.path("fs"))
        .and_then(|file| file.set_len(512 * MIB))
        .expect("a file");
    lab.run(program, args, b"", &Limits::default()).ok("mkfs");
    true
}

/// Copies `x` in the file system to `out` there; `None` where it cannot be mounted.
fn convert(lab: &Lab, kind: &str, source: &str, args: &[&str]) -> Option<Answer> {
    let script = format!(
        "mount -t {kind} -o loop fs small && echo mounted && cd small && cp ../{source} x && sync \
         && stat -f -c 'free %f %S' . && \"$0\" \"$@\" && sync && stat -f -c 'free %f %S' . \
         && cmp out ../theirs && echo same"
    );
    lab.in_namespace(&script, args, &Limits::default())
}

/// The free bytes before and after.
fn free(answer: &Answer) -> Vec<u64> {
    let lines = answer
        .out
        .lines()
        .filter_map(|line| line.strip_prefix("free "));
    let product = |line: &str| {
        line.split(' ')
            .map(|n| n.parse::<u64>().expect("a number"))
            .product()
    };
    lines.map(product).collect()
}

#[test]
fn convert_shares_blocks_where_the_file_system_can() {
    if beyond_qemu("it need not share blocks") {
        return;
    }
    let mut cases = 0;
    for (kind, program, mkfs) in MAKERS {
        let lab = Lab::new();
        if !make(&lab, program, mkfs) {
            println!("skipped: there is no {program} here");
            continue;
        }
        fs::create_dir(lab.path("small")).expect("a folder");
        lab.make(
            "create base.q 64M; io base.q: write -P 5 0 40M; \
             create -o cluster_size=4k odd.q 64M; io odd.q: write -P 6 0 40M; \
             random odd.q 5 60 wz; img convert -O raw base.q disk.raw",
        );
        // Source, format, options, and whether most blocks must be shared.
        for (source, format, more, shares) in [
            ("base.q", "qcow2", &[][..], true),
            ("base.q", "qcow2", &["-r", "1G"], true),
            ("base.q", "qcow2", &["-m", "1", "-W"], true),
            ("odd.q", "qcow2", &[], false),
            ("disk.raw", "raw", &[], true),
        ] {
            lab.qemu_img(&["convert", "-f", format, "-O", "raw", source, "theirs"])
                .ok("convert");
            let mut args = vec!["convert", "-C", "-f", format, "-O", "raw"];
            args.extend(more);
            args.extend(["x", "out"]);
            let what = format!("{kind}: {args:?} of {source}");
            let Some(answer) = convert(&lab, kind, source, &args) else {
                println!("skipped: no loop devices, mount namespaces or {kind} here");
                return;
            };
            let answer = answer.ok(&what);
            assert!(answer.out.ends_with("same\n"), "{what}: {answer:#?}");
            let free = free(&answer);
            let taken = free[0].saturating_sub(free[1]);
            assert!(!shares || taken < 10 * MIB, "{what}: {taken} bytes taken");
            fs::remove_file(lab.path("theirs")).expect("remove");
            make(&lab, program, mkfs);
            cases += 1;
        }
    }
    println!("cases: {cases} copies");
}
