//! QED.

use std::fs;

use super::{
    REPORTS, Subject, damaged, for_each_field, for_each_seed, is_read_only, write_randomly,
};
use crate::common::{Lab, Rng, assert_same_answer, beyond_qemu};

/// Where the header has the features, and the offset of the L1 table.
const FEATURES: u64 = 16;
const L1: u64 = 40;

fn u64_le(lab: &Lab, name: &str, at: u64) -> u64 {
    lab.u64_at(name, at).swap_bytes()
}

/// Exchanges entries of a table at `at`, and makes some unallocated or zero.
fn shuffle(lab: &Lab, name: &str, at: u64, entries: u64, random: &mut Rng) {
    for _ in 0..random.below(4) {
        let places = [random.below(entries), random.below(entries)].map(|n| at + n * 8);
        let values = places.map(|place| lab.u64_at(name, place));
        lab.patch(name, places[0], &values[1].to_be_bytes());
        lab.patch(name, places[1], &values[0].to_be_bytes());
        if random.one_in(2) {
            lab.patch(name, places[0], &random.below(2).to_le_bytes());
        }
    }
}

/// Makes `x.qed` of any geometry, perhaps over a backing file.
fn generate(lab: &Lab, random: &mut Rng) {
    let size = 512 * (1 + random.below(8 << 11));
    let text = size.to_string();
    let cluster_size = 4096 << random.below(6);
    let tables = 2 << random.below(4);
    let options = format!("cluster_size={cluster_size},table_size={tables}");
    let mut create = vec!["create", "-q", "-f", "qed", "-o", &options];
    let base = (512 * (1 + random.below(8 << 11))).to_string();
    if random.one_in(2) {
        let format = if random.one_in(2) { "raw" } else { "qcow2" };
        lab.qemu_img(&["create", "-q", "-f", format, "base", &base])
            .ok("create");
        write_randomly(lab, "base", format, base.parse().unwrap(), random);
        create.extend(["-b", "base", "-F", format]);
    }
    create.extend(["x.qed", &text]);
    lab.qemu_img(&create).ok("create");
    write_randomly(lab, "x.qed", "qed", size, random);
    let zeroes = random.below(size / 512) * 512;
    let script = format!("write -z {zeroes} {}\n", (size - zeroes).min(1 << 20));
    lab.qemu_io_script(&["-f", "qed", "x.qed"], &script)
        .ok("zeroes");
    let l2 = u64_le(lab, "x.qed", u64_le(lab, "x.qed", L1));
    if l2 != 0 && random.one_in(2) {
        shuffle(lab, "x.qed", l2, 64, random);
    }
    if random.one_in(4) {
        let features = u64_le(lab, "x.qed", FEATURES) | 2;
        lab.patch("x.qed", FEATURES, &features.to_le_bytes());
    }
}

#[test]
fn images_are_read_as_by_qemu() {
    for_each_seed(|lab, random, what| {
        generate(lab, random);
        let mut subject = Subject::new(lab, "x.qed", "qed");
        subject.given = random.one_in(2);
        // QEMU clears the mark of an image that was not closed before it looks at it.
        let is_dirty = u64_le(lab, "x.qed", FEATURES) & 2 != 0;
        let info = lab.zebu(&["info", "x.qed"]).ok(what);
        assert_eq!(
            info.out.contains("cleanly shut down: no"),
            is_dirty,
            "{what}"
        );
        let reports = REPORTS.iter().copied();
        let reports: Vec<_> = reports.filter(|r| !is_dirty || r[0] != "info").collect();
        subject.same_reports(&reports, what);
        if !is_dirty {
            assert_same_answer(lab, &["info", "--backing-chain", "x.qed"], what);
        }
        subject.same_bytes(what);
        assert_same_answer(lab, &["map", "--output=json", "over.qcow2"], what);
        if random.one_in(4) {
            subject.is_served_as("theirs.raw", what);
        }
    });
}

#[test]
fn a_large_disk_with_many_tables() {
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "qed", "x.qed", "60T"])
        .ok("create");
    let script = "write -P 1 0 64k\nwrite -P 2 2047G 100k\nwrite -P 3 59999G 1M\n";
    lab.qemu_io_script(&["-f", "qed", "x.qed"], script)
        .ok("write");
    let subject = Subject::new(&lab, "x.qed", "qed");
    subject.same_reports(REPORTS, "60 TiB");
    let reads = "read -P 1 0 64k\nread -P 2 2047G 100k\nread -P 3 59999G 1M\nread -P 0 1T 64k\n";
    let read = lab.zebu_io_script(&["-r", "x.qed"], reads).ok("read");
    assert_eq!(read.out.matches("read ").count(), 4, "{read:?}");
}

/// Tables of one cluster are valid. QEMU makes such images, and does not open them.
#[test]
fn tables_of_one_cluster() {
    if beyond_qemu("it refuses them") {
        return;
    }
    let lab = Lab::new();
    let create = [
        "create",
        "-q",
        "-f",
        "qed",
        "-o",
        "table_size=2",
        "x.qed",
        "1M",
    ];
    lab.qemu_img(&create).ok("create");
    lab.patch("x.qed", 8, &1u32.to_le_bytes());
    lab.zebu(&["convert", "x.qed", "x.raw"]).ok("convert");
    lab.zebu(&["map", "x.qed"]).ok("map");
}

/// A file of many small clusters has no leaks. QEMU counts some.
#[test]
fn a_check_counts_clusters() {
    if beyond_qemu("it counts leaks that are none") {
        return;
    }
    let lab = Lab::new();
    // Header, L1 table, eight L2 tables of two clusters, data.
    let mut bytes = vec![0u8; 4096];
    bytes[..4].copy_from_slice(b"QED\0");
    for (at, number) in [(4, 4096u32), (8, 2), (12, 1)] {
        bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
    }
    bytes[40..48].copy_from_slice(&4096u64.to_le_bytes());
    bytes[48..56].copy_from_slice(&(32u64 << 20).to_le_bytes());
    let mut l1 = vec![0; 8192];
    for table in 0..8 {
        let at = 3 * 4096 + table as u64 * 8192;
        l1[table * 8..table * 8 + 8].copy_from_slice(&at.to_le_bytes());
    }
    bytes.extend(l1);
    bytes.extend((0..8192).flat_map(|n| ((19 + n) * 4096u64).to_le_bytes()));
    bytes.resize(bytes.len() + (32 << 20), 1);
    fs::write(lab.path("x.qed"), bytes).unwrap();
    let answer = lab.zebu(&["check", "x.qed"]).ok("check");
    assert!(answer.out.starts_with("No errors"), "{answer:?}");
    // A cluster more.
    let file = fs::File::options()
        .write(true)
        .open(lab.path("x.qed"))
        .unwrap();
    file.set_len(file.metadata().unwrap().len() + 4096).unwrap();
    let answer = lab.zebu(&["check", "x.qed"]);
    assert!(
        answer.status == 3 && answer.out.contains("1 leaked"),
        "{answer:?}"
    );
}

#[test]
fn damaged_images_are_refused_as_by_qemu() {
    let lab = Lab::new();
    fs::write(lab.path("base"), vec![5; 1 << 20]).unwrap();
    let create = ["create", "-q", "-f", "qed", "-b", "base", "-F", "raw"];
    lab.qemu_img(&[&create[..], &["sound.qed", "3M"]].concat())
        .ok("create");
    let script = "write -P 4 0 256k\nwrite -P 5 1M 700k\nwrite -z 2M 256k\n";
    lab.qemu_io_script(&["-f", "qed", "sound.qed"], script)
        .ok("write");
    let l1 = u64_le(&lab, "sound.qed", L1);
    let l2 = u64_le(&lab, "sound.qed", l1);
    let fields = [
        (0, 4),
        (4, 4),
        (8, 4),
        (12, 4),
        (FEATURES, 8),
        (24, 8),
        (32, 8),
        (L1, 8),
        (48, 8),
        (56, 4),
        (60, 4),
        (l1, 8),
        (l1 + 8, 8),
        (l2, 8),
        (l2 + 8, 8),
        (l2 + 18 * 8, 8),
    ];
    let mut random = Rng::new(11);
    let mut refused = 0;
    for (number, (offset, width)) in for_each_field(&fields, 3) {
        fs::copy(lab.path("sound.qed"), lab.path("x.qed")).unwrap();
        let old = u64_le(&lab, "x.qed", *offset);
        let value = damaged(&mut random, old);
        lab.patch("x.qed", *offset, &value.to_le_bytes()[..*width]);
        let what = &format!("case {number}: {value:#x} at {offset:#x}");
        if *offset == 8 && value as u32 == 1 {
            continue;
        }
        let subject = Subject::new(&lab, "x.qed", "qed").given();
        let reports = ["info", "map --output=json", "check", "check --output=json"];
        refused += u32::from(subject.same_after_damage(&reports, what));
    }
    assert!(refused > 10 || !zebu_testkit::are_usual(), "{refused}");
}

/// Tables with random entries, some of them used twice.
#[test]
fn checks_find_what_qemu_finds() {
    for_each_seed(|lab, random, what| {
        let options = "cluster_size=4k,table_size=2";
        let create = ["create", "-q", "-f", "qed", "-o", options, "x.qed", "8M"];
        lab.qemu_img(&create).ok("create");
        write_randomly(lab, "x.qed", "qed", 8 << 20, random);
        let l1 = u64_le(lab, "x.qed", L1);
        let clusters = fs::metadata(lab.path("x.qed")).unwrap().len() / 4096;
        for _ in 0..1 + random.below(20) {
            let table = match u64_le(lab, "x.qed", l1 + random.below(2) * 8) {
                l2 if l2 != 0 && random.below(10) > 0 => l2,
                _ => l1,
            };
            let entry = random.below(clusters + 2) * 4096 + u64::from(random.one_in(9)) * 512;
            let at = table + random.below(16) * 8;
            lab.patch("x.qed", at, &entry.to_le_bytes());
        }
        let subject = Subject::new(lab, "x.qed", "qed");
        let reports = ["check", "check --output=json", "map --output=json"];
        subject.same_after_damage(&reports, what);
    });
}

#[test]
fn truncated_images_are_errors() {
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "qed", "x.qed", "4M"])
        .ok("create");
    lab.qemu_io(&["-f", "qed", "-c", "write -P 9 0 2M", "x.qed"])
        .ok("write");
    let file = fs::File::options()
        .write(true)
        .open(lab.path("x.qed"))
        .unwrap();
    let length = file.metadata().unwrap().len();
    for cut in [512, 64 << 10, 1 << 20, length - 64] {
        file.set_len(length - cut).unwrap();
        let answer = lab.zebu(&["convert", "x.qed", "x.raw"]);
        answer.failed_with_one_line(1, "a cluster is missing");
        let subject = Subject::new(&lab, "x.qed", "qed").given();
        subject.same_after_damage(&["info", "check"], "truncated");
    }
    is_read_only(&lab, "x.qed", "qed");
    if !beyond_qemu("it repairs") {
        let answer = lab.zebu(&["check", "-f", "qed", "-r", "all", "x.qed"]);
        answer.failed_with_one_line(1, "a repair");
    }
}

#[test]
fn limits_apply_to_untrusted_images() {
    if beyond_qemu("it has no limits") {
        return;
    }
    let lab = Lab::new();
    let options = "cluster_size=4M,table_size=4";
    let create = ["create", "-q", "-f", "qed", "-o", options, "x.qed", "0"];
    lab.qemu_img(&create).ok("create");
    let answer = lab.zebu(&["info", "--untrusted", "x.qed"]);
    answer.failed_with_one_line(1, "an L1 table of 16 MiB");
    assert!(answer.err.contains("'table-size'"), "{answer:?}");
    fs::write(lab.path("base"), vec![1; 1 << 20]).unwrap();
    let create = [
        "create", "-q", "-f", "qed", "-b", "base", "-F", "raw", "y.qed",
    ];
    lab.qemu_img(&create).ok("create");
    let answer = lab.zebu(&["convert", "--untrusted", "y.qed", "y.raw"]);
    answer.failed_with_one_line(1, "a backing file");
    assert!(answer.err.contains("which it may not open"), "{answer:?}");
    lab.zebu(&["check", "--untrusted", "y.qed"]).ok("check");
    let limit = ["check", "--untrusted=memory=7", "y.qed"];
    let answer = lab.zebu(&limit);
    answer.failed_with_one_line(1, "a check takes memory");
    assert!(answer.err.contains("'memory'"), "{answer:?}");
}
