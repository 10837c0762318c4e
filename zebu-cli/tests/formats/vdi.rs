//! VDI images: images that QEMU made, with reordered blocks, must be read and reported as by QEMU, and
//! damaged ones must be refused as by QEMU.
//!

use std::fs;

use crate::common::{Lab, Rng, assert_same_answer, beyond_qemu, cases, compare_answers};

const BLOCK: u64 = 1 << 20;
/// Where `qemu-img create` puts the block map.
const MAP: u64 = 512;

/// An image of a random size with random data.
fn generate(lab: &Lab, random: &mut Rng) -> u64 {
    let size = match random.below(4) {
        0 => 512 * (1 + random.below(100)),
        1 => BLOCK * (1 + random.below(8)),
        _ => 512 * (1 + random.below(8 * BLOCK / 512)),
    };
    let is_static = random.below(3) == 0;
    let kind = if is_static { "static=on" } else { "static=off" };
    let create = ["create", "-q", "-f", "vdi", "-o", kind, "x.vdi"];
    lab.qemu_img(&[&create[..], &[&size.to_string()]].concat())
        .ok("create");
    let mut script = String::new();
    for number in 0..random.below(8) {
        let at = random.below(size / 512) * 512;
        let length = (512 * (1 + random.below(400))).min(size - at);
        script += &format!("write -P {} {at} {length}\n", number + 1);
    }
    lab.qemu_io_script(&["-f", "vdi", "x.vdi"], &script)
        .ok("write");
    let blocks = size.div_ceil(BLOCK);
    for _ in 0..random.below(3) {
        // Exchanges blocks, and discards some.
        let places = [random.below(blocks), random.below(blocks)].map(|n| MAP + n * 4);
        let entries = places.map(|place| lab.u32_le(place));
        lab.patch("x.vdi", places[0], &entries[1].to_le_bytes());
        lab.patch("x.vdi", places[1], &entries[0].to_le_bytes());
        if random.below(2) == 0 {
            lab.patch("x.vdi", places[0], &0xffff_fffeu32.to_le_bytes());
        }
    }
    size
}

/// What these tests do in a lab.
pub trait VdiLab {
    fn u32_le(&self, offset: u64) -> u32;
}

impl VdiLab for Lab {
    fn u32_le(&self, offset: u64) -> u32 {
        self.u32_at("x.vdi", offset).swap_bytes()
    }
}

#[test]
fn images_are_read_as_by_qemu() {
    for seed in cases(4, "images") {
        let lab = Lab::new();
        let mut random = Rng::new(seed);
        let size = generate(&lab, &mut random);
        lab.sync_files();
        let what = &format!("seed {seed}, {size} bytes");
        for args in [
            &["info", "x.vdi"][..],
            &["info", "--output=json", "x.vdi"],
            &["map", "x.vdi"],
            &["map", "--output=json", "x.vdi"],
            &[
                "map",
                "--output=json",
                "-s",
                "1000448",
                "-l",
                "600k",
                "x.vdi",
            ],
            &["check", "x.vdi"],
            &["check", "--output=json", "x.vdi"],
            &["snapshot", "-l", "x.vdi"],
            &["measure", "-O", "qcow2", "x.vdi"],
            &["compare", "x.vdi", "x.vdi"],
        ] {
            assert_same_answer(&lab, args, what);
        }
        lab.qemu_img(&["convert", "x.vdi", "-O", "raw", "theirs.raw"])
            .ok(what);
        lab.zebu(&["convert", "x.vdi", "-O", "raw", "ours.raw"])
            .ok(what);
        lab.assert_same_bytes("ours.raw", "theirs.raw", what);
        lab.zebu(&["convert", "-c", "x.vdi", "-O", "qcow2", "ours.qcow2"])
            .ok(what);
        assert_same_answer(&lab, &["compare", "x.vdi", "theirs.raw"], what);
        lab.qemu_img(&["compare", "ours.qcow2", "theirs.raw"])
            .ok(what);
        // As a backing file, and a read of a part of it.
        let over = ["create", "-q", "-f", "qcow2", "-b", "x.vdi", "-F", "vdi"];
        lab.zebu(&[&over[..], &["over.qcow2"]].concat()).ok(what);
        assert_same_answer(&lab, &["map", "--output=json", "over.qcow2"], what);
        let at = (size / 3).to_string();
        let read = [format!("read -v {at} 600")];
        let args = ["-c", &read[0], "over.qcow2"];
        let (ours, theirs) = (lab.zebu_io(&args), lab.qemu_io(&args));
        let bytes = |text: &str| {
            let lines = text.lines().filter(|line| line.contains(":  "));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(bytes(&ours.out), bytes(&theirs.out), "{what}");
    }
}

#[test]
fn damaged_headers_are_refused_as_by_qemu() {
    // Each number of the header.
    let fields = [
        (0x40, 4),
        (0x44, 4),
        (0x4c, 4),
        (0x154, 4),
        (0x158, 4),
        (0x168, 4),
        (0x170, 8),
        (0x178, 4),
        (0x180, 4),
        (0x184, 4),
        (0x188, 16),
        (0x1a8, 16),
        (0x1b8, 16),
        (MAP, 4),
        (MAP + 4, 4),
    ];
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "vdi", "sound.vdi", "5M"])
        .ok("create");
    lab.qemu_io(&["-c", "write 1M 3M", "-f", "vdi", "sound.vdi"])
        .ok("write");
    let mut random = Rng::new(7);
    let mut refused = 0;
    for (number, (offset, width)) in fields.iter().cycle().take(fields.len() * 4).enumerate() {
        fs::copy(lab.path("sound.vdi"), lab.path("x.vdi")).unwrap();
        let value = match random.below(5) {
            0 => 0,
            1 => u64::MAX,
            2 => 1,
            3 => u64::from(lab.u32_le(*offset)) + random.below(3) * 512,
            _ => random.below(1 << 40),
        };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&value.to_le_bytes());
        lab.patch("x.vdi", *offset, &bytes[..*width]);
        lab.sync_files();
        let what = &format!("case {number}: {value:#x} at {offset:#x}");
        let ours = lab.zebu(&["info", "-f", "vdi", "x.vdi"]);
        if ours.err.contains("past the end of the file") {
            // QEMU reads a block map past the end of the file as zeroes.
            ours.failed_with_one_line(1, what);
            refused += 1;
            continue;
        }
        for args in [
            &["info", "-f", "vdi", "x.vdi"][..],
            &["info", "x.vdi"],
            &["map", "-f", "vdi", "--output=json", "x.vdi"],
            &["check", "-f", "vdi", "x.vdi"],
        ] {
            let (ours, theirs) = (lab.zebu(args), lab.qemu_img(args));
            refused += u32::from(ours.status != 0);
            // QEMU takes it for a raw disk then.
            if *offset == 0x40 && ours.err.contains("damaged signature") {
                ours.failed_with_one_line(1, what);
                continue;
            }
            // QEMU has no bound.
            if ours.err.contains("more like this one") {
                assert_eq!(ours.status, theirs.status, "{what}");
                continue;
            }
            compare_answers(&ours, &theirs, args, what);
        }
        let ours = lab.zebu(&["convert", "-f", "vdi", "x.vdi", "ours.raw"]);
        if ours.status == 0 {
            lab.qemu_img(&["convert", "-f", "vdi", "x.vdi", "theirs.raw"])
                .ok(what);
            lab.assert_same_bytes("ours.raw", "theirs.raw", what);
        } else {
            ours.failed_with_one_line(1, what);
        }
    }
    assert!(refused > 20, "{refused}");
}

/// Blocks past the end of the file must not read as zeroes.
#[test]
fn truncated_data_are_errors() {
    if beyond_qemu("it reads zeroes") {
        return;
    }
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "vdi", "x.vdi", "4M"])
        .ok("create");
    lab.qemu_io(&["-c", "write -P 9 0 4M", "-f", "vdi", "x.vdi"])
        .ok("write");
    let file = fs::File::options()
        .write(true)
        .open(lab.path("x.vdi"))
        .unwrap();
    file.set_len(1024 + 3 * BLOCK).unwrap();
    let answer = lab.zebu(&["convert", "x.vdi", "x.raw"]);
    answer.failed_with_one_line(1, "a block is missing");
    assert!(
        answer.err.contains("past the end of the file"),
        "{answer:?}"
    );
    assert!(answer.err.contains("(guest offset 0x300000)"), "{answer:?}");
    // So is a part of a block.
    file.set_len(1024 + 3 * BLOCK + 700).unwrap();
    let answer = lab.zebu(&["convert", "x.vdi", "x.raw"]);
    answer.failed_with_one_line(1, "a part of a block is missing");
    assert!(answer.err.contains("(guest offset 0x300200)"), "{answer:?}");
    file.set_len(512).unwrap();
    let answer = lab.zebu(&["info", "x.vdi"]);
    answer.failed_with_one_line(1, "the map is missing");
}

#[test]
fn limits_apply_to_untrusted_images() {
    if beyond_qemu("it has no limits") {
        return;
    }
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "vdi", "x.vdi", "8T"])
        .ok("create");
    lab.zebu(&["info", "x.vdi"]).ok("without limits");
    let answer = lab.zebu(&["info", "--untrusted", "x.vdi"]);
    answer.failed_with_one_line(1, "a map of 32 MiB");
    assert!(answer.err.contains("'table-size'"), "{answer:?}");
    lab.qemu_img(&["create", "-q", "-f", "vdi", "y.vdi", "64M"])
        .ok("create");
    lab.zebu(&["convert", "--untrusted", "y.vdi", "y.raw"])
        .ok("a small one");
}

#[test]
fn what_the_format_cannot_do_is_refused_as_by_qemu() {
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "vdi", "x.vdi", "4M"])
        .ok("create");
    for args in [
        &["resize", "x.vdi", "8M"][..],
        &["resize", "--shrink", "x.vdi", "1M"],
        &["check", "-r", "all", "x.vdi"],
    ] {
        assert_same_answer(&lab, args, "of a VDI");
    }
    let snapshot = lab.zebu(&["snapshot", "-c", "a", "x.vdi"]);
    snapshot.failed_with_one_line(1, "a snapshot");
}

/// What a write could destroy more of than its range.
#[test]
fn damaged_images_are_not_written() {
    if beyond_qemu("it writes to them") {
        return;
    }
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "vdi", "sound.vdi", "4M"])
        .ok("create");
    lab.qemu_io(&["-c", "write -P 9 0 3M", "-f", "vdi", "sound.vdi"])
        .ok("write");
    for (offset, value, why) in [
        (MAP, 1u32, "block 1 is at 1, as another one is"),
        (
            MAP + 4,
            7,
            "block 1 is at 7, which is more than the disk has",
        ),
        (MAP + 8, 3, "block 2 is at 3, past the end of the file"),
        (0x158, 0, "overlap"),
    ] {
        fs::copy(lab.path("sound.vdi"), lab.path("x.vdi")).unwrap();
        lab.patch("x.vdi", offset, &value.to_le_bytes());
        let before = fs::read(lab.path("x.vdi")).unwrap();
        let answer = lab.zebu_io(&["-f", "vdi", "-c", "write 0 512", "x.vdi"]);
        assert_ne!(answer.status, 0, "{why}");
        assert!(answer.err.contains(why), "{why}: {answer:?}");
        assert!(fs::read(lab.path("x.vdi")).unwrap() == before, "{why}");
    }
}

/// A power cut may leave a count of blocks that is too high, or, by QEMU, places that nothing leads to.
#[test]
fn places_that_were_lost_are_taken_again() {
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "vdi", "x.vdi", "6M"])
        .ok("create");
    lab.qemu_io(&["-c", "write -P 9 0 3M", "-f", "vdi", "x.vdi"])
        .ok("write");
    // Nothing leads to the second of three places.
    lab.patch("x.vdi", MAP + 4, &u32::MAX.to_le_bytes());
    assert_same_answer(&lab, &["check", "x.vdi"], "after a power cut");
    let script = "write -P 7 4M 64k\nread -P 7 4M 64k\nread -P 0 4160k 960k\nread -P 0 1M 1M\n";
    lab.zebu_io_script(&["-f", "vdi", "x.vdi"], script)
        .ok("write");
    lab.qemu_img(&["check", "x.vdi"]).ok("check");
    assert_same_answer(&lab, &["map", "--output=json", "x.vdi"], "written to");
    assert_eq!(
        fs::metadata(lab.path("x.vdi")).unwrap().len(),
        1024 + 3 * BLOCK
    );
    lab.qemu_io_script(
        &["-f", "vdi", "x.vdi"],
        "read -P 7 4M 64k\nread -P 9 0 1M\nread -P 9 2M 1M\nread -P 0 4160k 960k\n",
    )
    .ok("read");
}
