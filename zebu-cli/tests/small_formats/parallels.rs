//! Parallels.

use std::fs;

use super::{
    REPORTS, Subject, damaged, for_each_field, for_each_seed, is_read_only, virtual_size,
    write_randomly,
};
use crate::common::{Lab, Rng, assert_same_answer, beyond_qemu};

/// Where the table is.
const TABLE: u64 = 64;

fn u32_le(lab: &Lab, at: u64) -> u32 {
    lab.u32_at("x.hds", at).swap_bytes()
}

/// Makes an image of the old kind, whose table counts sectors.
fn make_old(lab: &Lab) {
    lab.patch("x.hds", 0, b"WithoutFreeSpace");
    let (tracks, entries) = (u32_le(lab, 28), u64::from(u32_le(lab, 32)));
    for index in 0..entries {
        let sector = u32_le(lab, TABLE + index * 4) * tracks;
        lab.patch("x.hds", TABLE + index * 4, &sector.to_le_bytes());
    }
}

/// Makes `x.hds`, of either kind. Returns the sectors of a cluster.
fn generate(lab: &Lab, random: &mut Rng) -> u32 {
    let size = 512 * (1 + random.below(12 << 11));
    let text = size.to_string();
    let cluster_size = 4096u32 << random.below(9);
    let options = format!("cluster_size={cluster_size}");
    let create = ["create", "-q", "-f", "parallels", "-o", &options];
    lab.qemu_img(&[&create[..], &["x.hds", &text]].concat())
        .ok("create");
    write_randomly(lab, "x.hds", "parallels", size, random);
    let tracks = cluster_size / 512;
    let entries = u64::from(u32_le(lab, 32));
    if random.one_in(2) {
        make_old(lab);
    }
    for _ in 0..random.below(3) {
        let places = [random.below(entries), random.below(entries)].map(|n| TABLE + n * 4);
        let values = places.map(|place| lab.u32_at("x.hds", place));
        lab.patch("x.hds", places[0], &values[1].to_be_bytes());
        lab.patch("x.hds", places[1], &values[0].to_be_bytes());
        if random.one_in(2) {
            lab.patch("x.hds", places[0], &[0; 4]);
        }
    }
    if random.one_in(4) {
        lab.patch("x.hds", 44, &0x746f_6e59u32.to_le_bytes());
    }
    tracks
}

#[test]
fn images_are_read_as_by_qemu() {
    for_each_seed(|lab, random, what| {
        generate(lab, random);
        let mut subject = Subject::new(lab, "x.hds", "parallels");
        subject.given = random.one_in(2);
        subject.same_reports(REPORTS, what);
        subject.same_bytes(what);
        assert_same_answer(lab, &["map", "--output=json", "over.qcow2"], what);
        if random.one_in(4) {
            subject.is_served_as("theirs.raw", what);
        }
        // Options may give it a backing file.
        let size = virtual_size(lab, "x.hds", "parallels");
        fs::write(lab.path("base"), vec![7; size as usize / 2]).unwrap();
        let options = "driver=parallels,file.filename=x.hds,prealloc-size=1M,prealloc-mode=falloc,\
                       backing.driver=raw,backing.file.filename=base";
        let map = ["map", "--output=json", "--image-opts", options];
        assert_same_answer(lab, &map, what);
        let convert = ["convert", "--image-opts", options, "-O", "raw"];
        lab.qemu_img(&[&convert[..], &["theirs.raw"]].concat())
            .ok(what);
        lab.zebu(&[&convert[..], &["ours.raw"]].concat()).ok(what);
        lab.assert_same_bytes("ours.raw", "theirs.raw", what);
    });
}

#[test]
fn options_are_checked() {
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "parallels", "x.hds", "1M"])
        .ok("create");
    for option in [
        "prealloc-mode=x",
        "prealloc-size=-1",
        "prealloc-mode=truncate",
        "offset=1",
    ] {
        let options = format!("driver=parallels,file.filename=x.hds,{option}");
        let args = ["info", "--image-opts", &options];
        let (ours, theirs) = (lab.zebu(&args), lab.qemu_img(&args));
        assert_eq!(ours.status, theirs.status, "{option}: {ours:?}");
    }
}

/// Whether the check can be compared. QEMU aborts if an entry is not in the image, may find nothing
/// wrong with one before the data, and fails if the last entry is a duplicate.
fn can_be_compared(lab: &Lab) -> bool {
    let check = ["check", "-f", "parallels", "x.hds"];
    let ours = lab.zebu(&check);
    ours.orderly("a check");
    let theirs = lab.qemu_img(&check);
    let is_result = theirs.status != 134 && !theirs.err.contains("Check failed");
    is_result && !ours.err.contains("before the data")
}

#[test]
fn damaged_images_are_refused_as_by_qemu() {
    let lab = Lab::new();
    let create = ["create", "-q", "-f", "parallels", "-o", "cluster_size=64k"];
    lab.qemu_img(&[&create[..], &["sound.hds", "3M"]].concat())
        .ok("create");
    let script = "write -P 4 0 256k\nwrite -P 5 1M 700k\n";
    lab.qemu_io_script(&["-f", "parallels", "sound.hds"], script)
        .ok("write");
    let fields = [
        (0, 8),
        (8, 8),
        (16, 4),
        (20, 4),
        (24, 4),
        (28, 4),
        (32, 4),
        (36, 8),
        (44, 4),
        (48, 4),
        (52, 4),
        (TABLE, 4),
        (TABLE + 4, 4),
        (TABLE + 8, 4),
        (TABLE + 17 * 4, 4),
    ];
    let mut random = Rng::new(11);
    let mut refused = 0;
    for (number, (offset, width)) in for_each_field(&fields, 3) {
        fs::copy(lab.path("sound.hds"), lab.path("x.hds")).unwrap();
        if number % 3 == 0 {
            make_old(&lab);
        }
        let old = lab.u64_at("x.hds", *offset).swap_bytes();
        let value = damaged(&mut random, old & (u64::MAX >> (64 - 8 * width)));
        lab.patch("x.hds", *offset, &value.to_le_bytes()[..*width]);
        let what = &format!("case {number}: {value:#x} at {offset:#x}");
        let subject = Subject::new(&lab, "x.hds", "parallels").given();
        let mut reports = vec!["info"];
        // QEMU counts sectors in 32 bits.
        let info = lab.zebu(&["info", "-f", "parallels", "x.hds"]);
        if info.status == 0 && virtual_size(&lab, "x.hds", "parallels") < 1 << 40 {
            reports.push("map --output=json");
        }
        // The size of a cluster is rounded strangely by QEMU, if it is no power of two.
        if *offset != 28 && can_be_compared(&lab) {
            reports.extend(["check", "check --output=json"]);
        }
        refused += u32::from(subject.same_after_damage(&reports, what));
    }
    assert!(refused > 10 || !zebu_testkit::are_usual(), "{refused}");
}

#[test]
fn checks_find_what_qemu_finds() {
    for_each_seed(|lab, random, what| {
        let tracks = generate(lab, random);
        let clusters = fs::metadata(lab.path("x.hds")).unwrap().len() / 512 / u64::from(tracks);
        let unit = match lab.u32_at("x.hds", 4) == u32::from_be_bytes(*b"outF") {
            true => tracks,
            false => 1,
        };
        let entries = u64::from(u32_le(lab, 32));
        for _ in 0..1 + random.below(5) {
            let entry = (1 + random.below(clusters)) as u32 * unit;
            let at = TABLE + random.below(entries) * 4;
            lab.patch("x.hds", at, &entry.to_le_bytes());
        }
        let subject = Subject::new(lab, "x.hds", "parallels");
        let mut reports = vec!["map --output=json"];
        if can_be_compared(lab) {
            reports.extend(["check", "check --output=json"]);
        }
        subject.same_after_damage(&reports, what);
    });
}

#[test]
fn truncated_images_are_errors() {
    if beyond_qemu("it reads zeroes, and repairs") {
        return;
    }
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "parallels", "x.hds", "4M"])
        .ok("create");
    lab.qemu_io(&["-f", "parallels", "-c", "write -P 9 0 3M", "x.hds"])
        .ok("write");
    let file = fs::File::options()
        .write(true)
        .open(lab.path("x.hds"))
        .unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(length - (1 << 20)).unwrap();
    let answer = lab.zebu(&["convert", "x.hds", "x.raw"]);
    answer.failed_with_one_line(1, "a cluster is missing");
    assert!(answer.err.contains("(guest offset 0x200000)"), "{answer:?}");
    let answer = lab.zebu(&["check", "-r", "all", "x.hds"]);
    answer.failed_with_one_line(1, "a repair");
    is_read_only(&lab, "x.hds", "parallels");
    file.set_len(70).unwrap();
    let answer = lab.zebu(&["info", "x.hds"]);
    answer.failed_with_one_line(1, "the table is missing");
}

#[test]
fn limits_apply_to_untrusted_images() {
    if beyond_qemu("it has no limits") {
        return;
    }
    let lab = Lab::new();
    let create = ["create", "-q", "-f", "parallels", "-o", "cluster_size=64k"];
    lab.qemu_img(&[&create[..], &["x.hds", "1T"]].concat())
        .ok("create");
    lab.zebu(&["info", "x.hds"]).ok("without limits");
    let answer = lab.zebu(&["info", "--untrusted", "x.hds"]);
    answer.failed_with_one_line(1, "a table of 64 MiB");
    assert!(answer.err.contains("'table-size'"), "{answer:?}");
}
