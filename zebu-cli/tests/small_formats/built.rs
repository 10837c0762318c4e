//! Images that no program here writes: DMG, cloop and Bochs. They are built from the formats'
//! descriptions, and read by QEMU too.

use std::fs;

use super::images::{self, Built};
use super::{Subject, for_each_seed, is_read_only};
use crate::common::{Lab, Limits, Rng, beyond_qemu, cases};

/// QEMU has no map of these formats: to it, all is data.
const REPORTS: &[&[&str]] = &[
    &["info"],
    &["info", "--output=json"],
    &["check"],
    &["snapshot", "-l"],
];

#[test]
fn dmg_images_are_read_as_by_qemu() {
    for_each_seed(|lab, random, what| {
        let as_list = random.one_in(2);
        let image = images::dmg(false, as_list, &mut |n| random.below(n));
        fs::write(lab.path("x.dmg"), &image.bytes).unwrap();
        fs::write(lab.path("model.raw"), &image.content).unwrap();
        // It is recognized by its name.
        let subject = Subject::new(lab, "x.dmg", "dmg");
        subject.same_reports(REPORTS, what);
        subject.same_bytes(what);
        lab.assert_same_bytes("theirs.raw", "model.raw", what);
        if random.one_in(4) {
            subject.is_served_as("model.raw", what);
        }
        is_read_only(lab, "x.dmg", "dmg");
        lab.zebu(&["map", "--output=json", "x.dmg"]).ok(what);
        fs::copy(lab.path("x.dmg"), lab.path("other")).unwrap();
        // QEMU takes it for raw.
        // Without data before its list it begins as a text does.
        let taken_for = match image.bytes.starts_with(b"<?xml") {
            true => "XML",
            false => "DMG",
        };
        lab.zebu(&["info", "other"]).fails_with(taken_for);
        Subject::new(lab, "other", "dmg").given().same_bytes(what);
    });
}

#[test]
fn dmg_chunks_may_be_compressed_by_bzip2() {
    if beyond_qemu("a module that it lacks") {
        return;
    }
    for_each_seed(|lab, random, what| {
        let image = images::dmg(true, false, &mut |n| random.below(n));
        fs::write(lab.path("x.dmg"), &image.bytes).unwrap();
        fs::write(lab.path("model.raw"), &image.content).unwrap();
        let subject = Subject::new(lab, "x.dmg", "dmg");
        subject.reads_as("model.raw", what);
        // LZFSE is not there: the image can be looked at, and its other chunks read.
        let mut bytes = image.bytes.clone();
        let mut changed = false;
        for field in image.fields.iter().filter(|field| field.width == 4) {
            if field.get(&bytes) == 0x8000_0006 {
                field.put(&mut bytes, 0x8000_0007);
                changed = true;
            }
        }
        if changed {
            fs::write(lab.path("x.dmg"), bytes).unwrap();
            lab.zebu(&["info", "x.dmg"]).ok(what);
            let answer = lab.zebu(&["convert", "x.dmg", "x.raw"]);
            answer.failed_with_one_line(1, what);
            assert!(answer.err.contains("ULFO (LZFSE)"), "{answer:?}");
        }
    });
}

/// Damages each of some images at a place. At least `least` of them must be refused.
fn damaged_images(format: &str, seed: u64, least: u32, build: impl Fn(&mut Rng) -> Built) {
    let lab = Lab::new();
    let mut refused = 0;
    let mut seeds = cases(12, "damaged images").from(seed);
    for case in &mut seeds {
        let mut random = Rng::new(case);
        let mut image = build(&mut random);
        let damage = image.damage(&mut |n| random.below(n));
        if random.one_in(8) {
            let length = random.below(image.bytes.len() as u64);
            image.bytes.truncate(length as usize);
        }
        fs::write(lab.path("x"), &image.bytes).unwrap();
        let what = &format!("case {case}: {damage}");
        refused += u32::from(read_damaged(&lab, "x", format, &image.content, what));
    }
    assert!(refused > least || !zebu_testkit::are_usual(), "{refused}");
}

#[test]
fn damaged_dmg_images_are_refused_as_by_qemu() {
    damaged_images("dmg", 17, 3, |random| {
        images::dmg(false, false, &mut |n| random.below(n))
    });
}

/// A damaged image that QEMU does not open must be refused. If both read it, they must read the
/// same; of overlapping chunks QEMU may read others, and zebu those that were there before the damage.
/// Returns whether it could not be read.
fn read_damaged(lab: &Lab, name: &str, format: &str, sound: &[u8], what: &str) -> bool {
    let mut read = Vec::new();
    for args in [
        &["info", "-f", format, name][..],
        &["map", "-f", format, name],
        &["convert", "-f", format, "-O", "raw", name],
    ] {
        let limits = Limits {
            memory: Some(4 << 20),
            ..Limits::default()
        };
        let ours = match args[0] {
            "convert" => lab.zebu_limited(&[args, &["ours.raw"]].concat(), &limits),
            _ => lab.zebu_limited(args, &limits),
        };
        match ours.status {
            0 => ours.orderly(what),
            _ => ours.failed_with_one_line(1, what),
        }
        // A disk may become too large to be copied.
        if args[0] == "info" && ours.out.contains(" PiB") || ours.out.contains(" EiB") {
            return false;
        }
        read.push(ours.status == 0);
    }
    let theirs = lab.qemu_img(&["info", "-f", format, name]);
    assert!(theirs.status == 0 || !read[0], "{what}: {theirs:?}");
    if read[2] {
        let convert = ["convert", "-f", format, "-O", "raw", name, "theirs.raw"];
        // QEMU finds chunks only if they are in order, and reads other bytes if one is too short.
        if lab.qemu_img(&convert).status == 0 {
            if format != "dmg" || fs::read(lab.path("ours.raw")).unwrap() != sound {
                lab.assert_same_bytes("ours.raw", "theirs.raw", what);
            }
        } else {
            assert_eq!(format, "dmg", "{what}");
        }
    }
    !read[2]
}

#[test]
fn cloop_images_are_read_as_by_qemu() {
    for_each_seed(|lab, random, what| {
        let image = images::cloop(&mut |n| random.below(n));
        fs::write(lab.path("x.cloop"), image.bytes).unwrap();
        fs::write(lab.path("model.raw"), image.content).unwrap();
        let subject = Subject::new(lab, "x.cloop", "cloop");
        subject.same_reports(REPORTS, what);
        subject.same_bytes(what);
        lab.assert_same_bytes("theirs.raw", "model.raw", what);
        if random.one_in(4) {
            subject.is_served_as("model.raw", what);
        }
        is_read_only(lab, "x.cloop", "cloop");
    });
}

#[test]
fn damaged_cloop_images_are_refused_as_by_qemu() {
    damaged_images("cloop", 19, 3, |random| {
        images::cloop(&mut |n| random.below(n))
    });
}

#[test]
fn bochs_images_are_read_as_by_qemu() {
    for_each_seed(|lab, random, what| {
        let image = images::bochs(&mut |n| random.below(n));
        fs::write(lab.path("x.img"), image.bytes).unwrap();
        fs::write(lab.path("model.raw"), image.content).unwrap();
        let subject = Subject::new(lab, "x.img", "bochs");
        subject.same_reports(REPORTS, what);
        subject.same_bytes(what);
        lab.assert_same_bytes("theirs.raw", "model.raw", what);
        if random.one_in(4) {
            subject.is_served_as("model.raw", what);
        }
        is_read_only(lab, "x.img", "bochs");
    });
}

#[test]
fn damaged_bochs_images_are_refused_as_by_qemu() {
    damaged_images("bochs", 23, 3, |random| {
        images::bochs(&mut |n| random.below(n))
    });
}

#[test]
fn limits_apply_to_untrusted_images() {
    if beyond_qemu("it has no limits") {
        return;
    }
    let lab = Lab::new();
    let untrusted = |name: &str, format: &str, limits: &str| {
        let option = format!("--untrusted={limits}");
        lab.zebu(&["convert", &option, "-f", format, name, "-O", "raw", "x.raw"])
    };
    let mut random = Rng::new(29);
    let random = &mut |n| random.below(n);
    fs::write(lab.path("x.dmg"), images::dmg(false, true, random).bytes).unwrap();
    fs::write(lab.path("x.cloop"), images::cloop(random).bytes).unwrap();
    fs::write(lab.path("x.img"), images::bochs(random).bytes).unwrap();
    for (name, format) in [("x.dmg", "dmg"), ("x.cloop", "cloop"), ("x.img", "bochs")] {
        untrusted(name, format, "").ok(format);
        for limits in [
            "virtual-size=511",
            "table-size=3",
            "work=600,work-per-byte=0",
        ] {
            let answer = untrusted(name, format, limits);
            answer.failed_with_one_line(1, limits);
            assert!(answer.err.contains("beyond the limit"), "{answer:?}");
        }
    }
    for (name, format) in [("x.dmg", "dmg"), ("x.cloop", "cloop")] {
        let answer = untrusted(name, format, "memory=600");
        answer.failed_with_one_line(1, format);
        assert!(answer.err.contains("'memory'"), "{answer:?}");
    }
}
