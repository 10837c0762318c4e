//! qcow version 1.

use std::fs;

use super::{
    REPORTS, Subject, damaged, for_each_field, for_each_seed, is_read_only, write_randomly,
};
use crate::common::{Lab, Rng, assert_same_answer, beyond_qemu};

/// Where the header has the offset of the L1 table.
const L1: u64 = 40;

/// Exchanges and drops entries of a table at `at`.
fn shuffle(lab: &Lab, name: &str, at: u64, entries: u64, random: &mut Rng) {
    for _ in 0..random.below(4) {
        let places = [random.below(entries), random.below(entries)].map(|n| at + n * 8);
        let values = places.map(|place| lab.u64_at(name, place));
        lab.patch(name, places[0], &values[1].to_be_bytes());
        lab.patch(name, places[1], &values[0].to_be_bytes());
        if random.one_in(2) {
            lab.patch(name, places[0], &[0; 8]);
        }
    }
}

/// Writes compressed clusters of 4 KiB.
fn compress_randomly(lab: &Lab, name: &str, size: u64, random: &mut Rng) {
    let pattern: Vec<u8> = (0..4096u32).map(|n| ((n * n) >> 7) as u8).collect();
    fs::write(lab.path("pattern"), pattern).unwrap();
    let mut script = String::new();
    for _ in 0..random.below(60) {
        let at = random.below(size.div_ceil(4096)) * 4096;
        if at + 4096 > size {
            continue;
        }
        script += &match random.below(3) {
            0 => format!("write -c -s pattern {at} 4k\n"),
            byte => format!("write -c -P {byte} {at} 4k\n"),
        };
    }
    // QEMU does not compress a cluster twice.
    lab.qemu_io_script(&["-f", "qcow", name], &script);
}

/// Makes `x.qcow`: plain, compressed or over a backing file.
fn generate(lab: &Lab, random: &mut Rng) {
    let size = 512 * (1 + random.below(8 << 11));
    let text = size.to_string();
    let kind = random.below(4);
    if kind < 2 {
        let mut create = vec!["create", "-q", "-f", "qcow"];
        if kind == 1 {
            let base = 512 * (1 + random.below(8 << 11));
            let format = *["raw", "qcow2"].get(random.below(2) as usize).unwrap();
            let base = base.to_string();
            lab.qemu_img(&["create", "-q", "-f", format, "base", &base])
                .ok("create");
            write_randomly(lab, "base", format, base.parse().unwrap(), random);
            create.extend(["-b", "base", "-F", format]);
        }
        create.extend(["x.qcow", &text]);
        lab.qemu_img(&create).ok("create");
    } else {
        lab.qemu_img(&["create", "-q", "-f", "qcow", "x.qcow", &text])
            .ok("create");
        compress_randomly(lab, "x.qcow", size, random);
    }
    write_randomly(lab, "x.qcow", "qcow", size, random);
    let bits = lab.u32_at("x.qcow", 32);
    let range = 1 << ((bits >> 24) + (bits >> 16 & 0xff));
    let l1 = lab.u64_at("x.qcow", L1);
    let tables = size.div_ceil(range);
    if random.one_in(3) {
        shuffle(lab, "x.qcow", l1, tables, random);
    }
    let l2 = lab.u64_at("x.qcow", l1 + random.below(tables) * 8);
    if l2 != 0 {
        shuffle(lab, "x.qcow", l2, 64, random);
    }
}

#[test]
fn images_are_read_as_by_qemu() {
    for_each_seed(|lab, random, what| {
        generate(lab, random);
        let mut subject = Subject::new(lab, "x.qcow", "qcow");
        subject.given = random.one_in(2);
        subject.same_reports(REPORTS, what);
        assert_same_answer(lab, &["info", "--backing-chain", "x.qcow"], what);
        subject.same_bytes(what);
        if !lab.path("over.qcow2").exists() {
            return;
        }
        assert_same_answer(lab, &["map", "--output=json", "over.qcow2"], what);
        if random.one_in(4) {
            subject.is_served_as("theirs.raw", what);
        }
    });
}

#[test]
fn other_cluster_sizes() {
    for_each_seed(|lab, random, what| {
        // A header that is built by hand; QEMU writes the rest.
        let cluster_bits = 9 + random.below(8) as u8;
        let l2_bits = 6 + random.below(8) as u8;
        let size = 512 * (1 + random.below(8 << 11)) + random.below(512);
        let mut bytes = vec![0u8; 512];
        bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x01");
        bytes[24..32].copy_from_slice(&size.to_be_bytes());
        (bytes[32], bytes[33]) = (cluster_bits, l2_bits);
        bytes[40..48].copy_from_slice(&48u64.to_be_bytes());
        let tables = size.div_ceil(1 << (cluster_bits + l2_bits)) as usize;
        bytes.resize((48 + tables * 8).next_multiple_of(512), 0);
        fs::write(lab.path("x.qcow"), bytes).unwrap();
        write_randomly(lab, "x.qcow", "qcow", size, random);
        let subject = Subject::new(lab, "x.qcow", "qcow");
        let what = &format!("{what}: {cluster_bits}, {l2_bits}, {size}");
        subject.same_reports(REPORTS, what);
        subject.same_bytes(what);
    });
}

#[test]
fn a_large_disk_with_many_tables() {
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "qcow", "x.qcow", "3T"])
        .ok("create");
    let script = "write -P 1 0 64k\nwrite -P 2 2047G 100k\nwrite -P 3 2999G 1M\n";
    lab.qemu_io_script(&["-f", "qcow", "x.qcow"], script)
        .ok("write");
    let reads = "read -P 1 0 64k\nread -P 2 2047G 100k\nread -P 3 2999G 1M\nread -P 0 1T 64k\n";
    let read = lab.zebu_io_script(&["-r", "x.qcow"], reads).ok("read");
    assert_eq!(read.out.matches("read ").count(), 4, "{read:?}");
    // QEMU looks at each cluster.
    let part = ["-s", "2999G", "-l", "1G", "x.qcow"];
    assert_same_answer(
        &lab,
        &[&["map", "--output=json"], &part[..]].concat(),
        "map",
    );
    let map = lab.zebu(&["map", "x.qcow"]).ok("map");
    assert_eq!(map.out.lines().count(), 4, "{map:?}");
}

#[test]
fn encrypted_images_are_shown_and_not_read() {
    let lab = Lab::new();
    let secret = ["--object", "secret,id=s,data=abc"];
    let create = [
        "create",
        "-q",
        "-f",
        "qcow",
        "-o",
        "encrypt.format=aes,encrypt.key-secret=s",
    ];
    let made = lab.qemu_img(&[&create[..], &secret, &["x.qcow", "1M"]].concat());
    made.ok("create");
    let subject = Subject::new(&lab, "x.qcow", "qcow");
    subject.same_reports(&[&["info"], &["info", "--output=json"]], "encrypted");
    if beyond_qemu("it decrypts") {
        return;
    }
    for args in [
        &["convert", "x.qcow", "x.raw"][..],
        &["map", "x.qcow"],
        &["check", "x.qcow"],
    ] {
        let answer = lab.zebu(args);
        answer.failed_with_one_line(1, "encrypted");
        assert!(answer.err.contains("encrypt.key-secret"), "{answer:?}");
    }
}

#[test]
fn damaged_images_are_refused_as_by_qemu() {
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "qcow", "sound.qcow", "3M"])
        .ok("create");
    let script = "write -c -P 3 1200k 4k\nwrite -c -P 4 1204k 4k\n";
    lab.qemu_io_script(&["-f", "qcow", "sound.qcow"], script)
        .ok("write");
    lab.qemu_io(&["-f", "qcow", "-c", "write -P 4 0 256k", "sound.qcow"])
        .ok("write");
    let l1 = lab.u64_at("sound.qcow", L1);
    let l2 = lab.u64_at("sound.qcow", l1);
    let fields = [
        (0, 4),
        (4, 4),
        (8, 8),
        (16, 4),
        (20, 4),
        (24, 8),
        (32, 1),
        (33, 1),
        (34, 2),
        (36, 4),
        (L1, 8),
        (l1, 8),
        (l1 + 8, 8),
        (l2, 8),
        (l2 + 8, 8),
        // Compressed.
        (l2 + 300 * 8, 8),
        (l2 + 301 * 8, 8),
    ];
    let mut random = Rng::new(11);
    let mut refused = 0;
    for (number, (offset, width)) in for_each_field(&fields, 3) {
        fs::copy(lab.path("sound.qcow"), lab.path("x.qcow")).unwrap();
        let old = lab.u64_at("x.qcow", *offset) >> (64 - 8 * width);
        let value = damaged(&mut random, old);
        lab.patch("x.qcow", *offset, &value.to_be_bytes()[8 - width..]);
        let what = &format!("case {number}: {value:#x} at {offset:#x}");
        if *offset == 36 && value as u32 == 1 {
            continue;
        }
        let subject = Subject::new(&lab, "x.qcow", "qcow").given();
        refused += u32::from(subject.same_after_damage(&["info", "map --output=json"], what));
    }
    assert!(refused > 10 || !zebu_testkit::are_usual(), "{refused}");
}

#[test]
fn truncated_images_are_errors() {
    if beyond_qemu("it reads zeroes") {
        return;
    }
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "qcow", "x.qcow", "4M"])
        .ok("create");
    lab.qemu_io(&["-f", "qcow", "-c", "write -P 9 0 2M", "x.qcow"])
        .ok("write");
    let file = fs::File::options()
        .write(true)
        .open(lab.path("x.qcow"))
        .unwrap();
    let length = file.metadata().unwrap().len();
    for cut in [4096, 1 << 20] {
        file.set_len(length - cut).unwrap();
        let answer = lab.zebu(&["convert", "x.qcow", "x.raw"]);
        answer.failed_with_one_line(1, "a cluster is missing");
        assert!(
            answer.err.contains("past the end of the file"),
            "{answer:?}"
        );
        let at = (2 << 20) - cut;
        assert!(
            answer.err.contains(&format!("(guest offset {at:#x})")),
            "{answer:?}"
        );
    }
    is_read_only(&lab, "x.qcow", "qcow");
    file.set_len(4096).unwrap();
    let answer = lab.zebu(&["map", "x.qcow"]);
    answer.failed_with_one_line(1, "tables are missing");
    assert!(answer.err.contains("L2 table"), "{answer:?}");
    file.set_len(48).unwrap();
    lab.zebu(&["info", "x.qcow"])
        .failed_with_one_line(1, "the L1 table is missing");
}

#[test]
fn limits_apply_to_untrusted_images() {
    if beyond_qemu("it has no limits") {
        return;
    }
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "qcow", "x.qcow", "8T"])
        .ok("create");
    lab.zebu(&["info", "x.qcow"]).ok("without limits");
    let answer = lab.zebu(&["info", "--untrusted", "x.qcow"]);
    answer.failed_with_one_line(1, "an L1 table of 32 MiB");
    assert!(answer.err.contains("'table-size'"), "{answer:?}");
    fs::write(lab.path("base"), vec![1; 1 << 20]).unwrap();
    let create = [
        "create", "-q", "-f", "qcow", "-b", "base", "-F", "raw", "y.qcow",
    ];
    lab.qemu_img(&create).ok("create");
    let answer = lab.zebu(&["convert", "--untrusted", "y.qcow", "y.raw"]);
    answer.failed_with_one_line(1, "a backing file");
    assert!(answer.err.contains("which it may not open"), "{answer:?}");
    // A small file that takes much work: one L2 table for all of the disk.
    let mut bytes = vec![0u8; 48 + (1 << 20) * 8];
    bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x01");
    bytes[24..32].copy_from_slice(&(1u64 << 35).to_be_bytes());
    (bytes[32], bytes[33]) = (9, 6);
    bytes[40..48].copy_from_slice(&48u64.to_be_bytes());
    let end = bytes.len() as u64;
    for entry in bytes[48..].as_chunks_mut::<8>().0 {
        *entry = end.to_be_bytes();
    }
    bytes.extend([0; 512]);
    for (at, entry) in bytes[end as usize..]
        .as_chunks_mut::<8>()
        .0
        .iter_mut()
        .enumerate()
    {
        *entry = (at as u64 % 2 * 512).to_be_bytes();
    }
    fs::write(lab.path("z.qcow"), bytes).unwrap();
    let limit = ["--untrusted=work=1M,work-per-byte=1", "map", "z.qcow"];
    let answer = lab.zebu(&limit);
    answer.failed_with_one_line(1, "much work");
    assert!(answer.err.contains("'work'"), "{answer:?}");
}
