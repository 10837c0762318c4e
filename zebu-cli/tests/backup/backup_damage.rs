//! `backup` with a damaged set: no wrong content is taken for right, and what is good stays.

use std::collections::BTreeMap;
use std::fs;

use super::backup::{backup, content, copy_state, points, refused, restored, zebu_io};
use crate::common::Lab;
use crate::common::rng::Rng;

#[test]
fn a_merge_without_its_base_is_not_finished() {
    let lab = Lab::new();
    lab.make("create disk.qcow2 8M; io disk.qcow2: write -P 1 0 1M");
    backup(&lab, &[]);
    zebu_io(&lab, &["write -P 2 2M 1M"]);
    backup(&lab, &[]);
    let path = lab.path("set/manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    manifest["points"].as_array_mut().unwrap().remove(0);
    manifest["merging"] = serde_json::json!([
        { "disk": "disk", "base": "disk.1.qcow2", "top": "disk.2.qcow2" }
    ]);
    fs::write(&path, manifest.to_string()).unwrap();
    let base = lab.path("set/disk.1.qcow2");
    fs::rename(&base, lab.path("kept")).unwrap();
    refused(
        &lab.zebu(&["backup", "keep", "set", "1"]),
        "has the backing file",
    );
    fs::rename(lab.path("kept"), &base).unwrap();
    lab.zebu(&["backup", "keep", "set", "1"]).ok("keep");
    assert!(restored(&lab, 2) == content(&lab, "disk.qcow2"));
}

/// Damages a set that has four points of a disk in some way: what was done, and whether it can be
/// seen without reading all of a file.
fn damage(lab: &Lab, random: &mut Rng) -> (String, bool) {
    let path = lab.path("set/manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (one, two) = (random.below(4) as usize, random.below(4) as usize);
    let file = |nth: usize| format!("set/disk.{}.qcow2", nth + 1);
    let (this, other) = (file(one), file(two));
    let length = fs::metadata(lab.path(&this)).unwrap().len();
    let points = manifest["points"].as_array_mut().expect("points");
    let entry = &mut points[one]["disks"]["disk"];
    let what = match random.below(12) {
        0 => {
            fs::remove_file(lab.path(&this)).unwrap();
            format!("{this} removed")
        }
        1 => {
            let left = random.below(length);
            let file = fs::File::options().write(true).open(lab.path(&this));
            file.unwrap().set_len(left).unwrap();
            format!("{this} cut to {left}")
        }
        2 => {
            let mut bytes = fs::read(lab.path(&this)).unwrap();
            let at = random.below(length) as usize;
            bytes[at] ^= 1 << random.below(8);
            fs::write(lab.path(&this), bytes).unwrap();
            return (format!("{this} has another bit at {at}"), false);
        }
        3 if one != two => {
            fs::copy(lab.path(&other), lab.path(&this)).unwrap();
            format!("{this} is a copy of {other}")
        }
        4 | 5 => {
            let evil = lab.path("evil.qcow2").display().to_string();
            let name = format!("disk.{}.qcow2", two + 1);
            let backing = random.pick(&[&evil[..], &name[..], ""]);
            let format: &[&str] = if backing.is_empty() {
                &[]
            } else {
                &["-F", "qcow2"]
            };
            let args = ["rebase", "-u", "-f", "qcow2", "-b", backing, &this];
            lab.qemu_img(&[&args[..], format].concat()).ok("rebase");
            // It may be what it was, but for the length of the file.
            entry["length"] = fs::metadata(lab.path(&this)).unwrap().len().into();
            format!("{this} has the backing file '{backing}'")
        }
        6 => {
            points.remove(one);
            format!("no point {}", one + 1)
        }
        7 => {
            let kind = random.pick(&["full", "increment"]);
            entry["kind"] = kind.into();
            format!("point {} is {kind}", one + 1)
        }
        8 => {
            let key = random.pick(&["size", "length", "changed"]);
            entry[key] = (random.below(64) << 16).into();
            format!("{key} of point {}: {}", one + 1, entry[key])
        }
        9 => {
            entry["sha256"] = "0".repeat(64).into();
            format!("hash of point {}", one + 1)
        }
        10 => {
            let base = one.saturating_sub(1);
            points.drain(..one);
            manifest["merging"] = serde_json::json!([
                { "disk": "disk", "base": &file(base)[4..], "top": &this[4..] }
            ]);
            format!("merging {} into {}", one + 1, base + 1)
        }
        _ => {
            for key in ["sha256", "length", "size"] {
                let value = points[two]["disks"]["disk"][key].clone();
                points[one]["disks"]["disk"][key] = value;
            }
            format!("point {} has the hash of point {}", one + 1, two + 1)
        }
    };
    fs::write(&path, manifest.to_string()).unwrap();
    (what, true)
}

/// Whatever happened to a set, no command takes a wrong content for right, and a command that fails
/// leaves what is good. A full backup begins anew.
#[test]
fn a_damaged_set_loses_nothing_more() {
    let lab = Lab::new();
    let mut saved = BTreeMap::new();
    lab.make("create disk.qcow2 8M; create evil.qcow2 8M; io evil.qcow2: write -P 66 0 8M");
    for point in 1..5 {
        zebu_io(
            &lab,
            &[&format!("write -P {point} {point}M 2M"), "write -z 0 64k"],
        );
        backup(&lab, &[]);
        saved.insert(point, content(&lab, "disk.qcow2"));
    }
    let start = Lab::new();
    copy_state(&lab.path(""), &start.path(""));
    // None: refused. Else, whether it has the content.
    let restore = |point: u64| {
        let number = point.to_string();
        let args = [
            "backup",
            "restore",
            "--overwrite",
            "--point",
            &number,
            "set",
            "restored",
        ];
        let answer = lab.zebu(&args);
        assert!(answer.status <= 1, "{answer:?}");
        (answer.status == 0).then(|| fs::read(lab.path("restored")).unwrap() == saved[&point])
    };
    let good = || {
        let all = saved.keys().copied();
        all.filter(|point| restore(*point) == Some(true))
            .collect::<Vec<_>>()
    };
    for seed in zebu_testkit::cases(8, "damaged sets").from(0) {
        copy_state(&start.path(""), &lab.path(""));
        let (what, is_seen) = damage(&lab, &mut Rng::new(seed));
        let what = format!("seed {seed}: {what}");
        let check = |after: &str| {
            let verified = lab.zebu(&["backup", "verify", "set"]);
            for point in saved.keys() {
                let restored = restore(*point);
                assert!(
                    restored != Some(false) || !is_seen && verified.status == 2,
                    "{what}: {after}: point {point} has another content, verify: {verified:?}"
                );
            }
            if verified.status == 0 {
                for point in points(&lab) {
                    let is_good = point > 4 || restore(point) == Some(true);
                    assert!(is_good, "{what}: {after}: point {point} is not verified");
                }
            }
        };
        check("before");
        let before = good();
        let list = lab.zebu(&["backup", "list", "set"]);
        let kept = lab.zebu(&["backup", "keep", "set", "2"]);
        assert!(kept.status <= 1, "{what}: {kept:?}");
        check("kept");
        let after = good();
        let is_wanted = |point: &u64| {
            let last = points(&lab);
            kept.status == 1 || last.iter().rev().take(2).any(|other| other == point)
        };
        for point in before.iter().filter(|point| is_wanted(point)) {
            assert!(after.contains(point), "{what}: {kept:?}: {point} is lost");
        }
        let taken = lab.zebu(&["backup", "disk.qcow2", "--to", "set"]);
        assert!(taken.status <= 1, "{what}: {taken:?}");
        check("taken");
        if taken.status == 0 {
            let last = *points(&lab).last().expect("a point");
            let is_right = restored(&lab, last) == saved[&4];
            assert!(is_right || !is_seen, "{what}: an increment");
        }
        for point in &after {
            assert!(restore(*point) == Some(true), "{what}: {taken:?}: {point}");
        }
        if list.status == 1 {
            continue;
        }
        backup(&lab, &["--full"]);
        let last = *points(&lab).last().expect("a point");
        assert!(restored(&lab, last) == saved[&4], "{what}: a full backup");
        lab.zebu(&["backup", "keep", "set", "1"]).ok(&what);
        assert_eq!(points(&lab), [last], "{what}");
        let verified = lab.zebu(&["backup", "verify", "set"]);
        let is_left_over = |line: &str| line.contains("is not in the manifest");
        assert!(
            verified.err.lines().all(is_left_over),
            "{what}: {verified:?}"
        );
    }
}
