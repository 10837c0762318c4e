//! VHD (`vpc`).

use std::fs;

use super::images::{Vhd, set_checksum};
use super::{
    REPORTS, Subject, damaged, for_each_field, for_each_seed, is_read_only, virtual_size,
    write_randomly,
};
use crate::common::{Lab, Rng, assert_same_answer, beyond_qemu, cases};

/// Where `qemu-img create` puts the table.
const TABLE: u64 = 1536;

/// Changes bytes of all footers of a file, and their sums.
fn change_footers(lab: &Lab, name: &str, at: usize, bytes: &[u8]) {
    let mut file = fs::read(lab.path(name)).unwrap();
    let end = file.len() - 512;
    for start in [0, end] {
        let footer = &mut file[start..start + 512];
        if footer.starts_with(b"conectix") {
            footer[at..at + bytes.len()].copy_from_slice(bytes);
            set_checksum(footer, 64);
        }
    }
    fs::write(lab.path(name), file).unwrap();
}

/// An image that QEMU made, with random data and exchanged blocks.
fn generate(lab: &Lab, random: &mut Rng) -> bool {
    let size = match random.below(3) {
        0 => 512 * (1 + random.below(5000)),
        _ => 512 * (1 + random.below(20 << 11)),
    };
    let is_fixed = random.one_in(3);
    let kind = if is_fixed { "fixed" } else { "dynamic" };
    let force = if random.one_in(2) { "on" } else { "off" };
    let options = format!("subformat={kind},force_size={force}");
    let size = size.to_string();
    lab.qemu_img(&["create", "-q", "-f", "vpc", "-o", &options, "x.vhd", &size])
        .ok("create");
    let size = virtual_size(lab, "x.vhd", "vpc");
    if size > 0 {
        write_randomly(lab, "x.vhd", "vpc", size, random);
    }
    let blocks = size.div_ceil(2 << 20);
    if !is_fixed && blocks > 0 {
        for _ in 0..random.below(3) {
            let places = [random.below(blocks), random.below(blocks)].map(|n| TABLE + n * 4);
            let entries = places.map(|place| lab.u32_at("x.vhd", place));
            lab.patch("x.vhd", places[0], &entries[1].to_be_bytes());
            lab.patch("x.vhd", places[1], &entries[0].to_be_bytes());
            if random.one_in(2) {
                lab.patch("x.vhd", places[0], &u32::MAX.to_be_bytes());
            }
        }
    }
    is_fixed
}

#[test]
fn images_are_read_as_by_qemu() {
    for_each_seed(|lab, random, what| {
        let is_fixed = generate(lab, random);
        let mut subject = Subject::new(lab, "x.vhd", "vpc");
        subject.given = is_fixed || random.one_in(2);
        subject.same_reports(REPORTS, what);
        subject.same_bytes(what);
        assert_same_answer(lab, &["map", "--output=json", "over.qcow2"], what);
        if random.one_in(4) {
            subject.is_served_as("theirs.raw", what);
        }
    });
}

#[test]
fn the_size_depends_on_the_creator_and_on_options() {
    let lab = Lab::new();
    let create = ["create", "-q", "-f", "vpc", "-o", "force_size=on"];
    for kind in ["subformat=dynamic", "subformat=fixed"] {
        let size = ["-o", kind, "x.vhd", "20000256"];
        lab.qemu_img(&[&create[..], &size].concat()).ok("create");
        let largest: [u8; 4] = [0xff, 0xff, 16, 255];
        for geometry in [None, Some([1, 0, 4, 17]), Some(largest)] {
            if let Some(geometry) = geometry {
                change_footers(&lab, "x.vhd", 56, &geometry);
            }
            for creator in [
                b"vpc ",
                b"qemu",
                b"qem2",
                b"win ",
                b"d2v ",
                b"tap\0",
                b"CTXS",
                b"wa\0\0",
                b"\0\0\0\0",
            ] {
                change_footers(&lab, "x.vhd", 28, creator);
                let what = format!("{kind}, {creator:?}, {geometry:?}");
                let subject = Subject::new(&lab, "x.vhd", "vpc").given();
                subject.same_reports(&[&["info"], &["map", "--output=json"]], &what);
                for by in ["chs", "current_size", "size", ""] {
                    let options = format!("driver=vpc,file.filename=x.vhd,force_size_calc={by}");
                    for command in [&["info"][..], &["map", "--output=json"]] {
                        let args = [command, &["--image-opts", &options]].concat();
                        assert_same_answer(&lab, &args, &what);
                    }
                }
            }
        }
    }
    for name in [
        "json:{\"driver\":\"vpc\",\"force_size_calc\":\"chs\",\"file\":{\"driver\":\"file\",\"filename\":\"x.vhd\"}}",
        "json:{\"driver\":\"raw\",\"force_size_calc\":\"chs\",\"file.filename\":\"x.vhd\"}",
    ] {
        assert_same_answer(&lab, &["info", name], name);
        assert_same_answer(&lab, &["info", "--output=json", name], name);
    }
}

#[test]
fn the_largest_disk() {
    let lab = Lab::new();
    let create = ["create", "-q", "-f", "vpc", "-o", "force_size=on", "x.vhd"];
    lab.qemu_img(&[&create[..], &["2040G"]].concat())
        .ok("create");
    let at = (2040u64 << 30) - 1024;
    lab.qemu_io(&["-f", "vpc", "-c", &format!("write -P 5 {at} 1024"), "x.vhd"])
        .ok("write");
    let subject = Subject::new(&lab, "x.vhd", "vpc");
    subject.same_reports(REPORTS, "2040 GiB");
    let read = lab.zebu_io(&["-r", "-c", &format!("read -P 5 {at} 1024"), "x.vhd"]);
    assert!(read.ok("read").out.contains("read 1024/1024"));
    change_footers(&lab, "x.vhd", 48, &((2040u64 << 30) + 512).to_be_bytes());
    assert_same_answer(&lab, &["info", "x.vhd"], "a sector more");
}

#[test]
fn damaged_images_are_refused_as_by_qemu() {
    // Each number of the footer, of the second header and of the table.
    let fields = [
        (0, 8),
        (8, 4),
        (12, 4),
        (16, 8),
        (28, 4),
        (40, 8),
        (48, 8),
        (56, 2),
        (58, 1),
        (59, 1),
        (60, 4),
        (64, 4),
        (84, 1),
        (512, 8),
        (520, 8),
        (528, 8),
        (536, 4),
        (540, 4),
        (544, 4),
        (548, 4),
        (TABLE, 4),
        (TABLE + 4, 4),
        (TABLE + 8, 4),
    ];
    let lab = Lab::new();
    let create = ["create", "-q", "-f", "vpc", "-o"];
    for kind in ["dynamic", "fixed"] {
        let options = format!("subformat={kind},force_size=on");
        lab.qemu_img(&[&create[..], &[&options, "sound.vhd", "5M"]].concat())
            .ok("create");
        lab.qemu_io(&["-f", "vpc", "-c", "write -P 3 1M 2M", "sound.vhd"])
            .ok("write");
        let length = fs::metadata(lab.path("sound.vhd")).unwrap().len();
        let mut random = Rng::new(7);
        let mut refused = 0;
        for (number, (offset, width)) in for_each_field(&fields, 2) {
            fs::copy(lab.path("sound.vhd"), lab.path("x.vhd")).unwrap();
            let offset = match kind {
                "fixed" if *offset >= 512 => continue,
                "fixed" => length - 512 + offset,
                _ => *offset,
            };
            let old = lab.u64_at("x.vhd", offset) >> (64 - 8 * width);
            let value = damaged(&mut random, old);
            let bytes = &value.to_be_bytes()[8 - width..];
            let what = &format!("{kind}, case {number}: {value:#x} at {offset:#x}");
            // Most with a valid sum.
            if offset % 512 < 64 && offset / 512 != 1 && random.below(5) > 0 {
                change_footers(&lab, "x.vhd", (offset % 512) as usize, bytes);
            } else {
                lab.patch("x.vhd", offset, bytes);
                if kind == "dynamic" && offset < 512 {
                    // One sound footer is enough for zebu.
                    lab.patch("x.vhd", length - 512 + offset, bytes);
                }
            }
            let subject = Subject::new(&lab, "x.vhd", "vpc").given();
            let reports = ["info", "map --output=json", "check"];
            refused += u32::from(subject.same_after_damage(&reports, what));
        }
        assert!(
            refused > 5 || !zebu_testkit::are_usual(),
            "{kind}: {refused}"
        );
    }
}

#[test]
fn truncated_images_are_errors() {
    if beyond_qemu("it reads zeroes") {
        return;
    }
    let lab = Lab::new();
    let create = ["create", "-q", "-f", "vpc", "-o", "subformat=fixed"];
    lab.qemu_img(&[&create[..], &["x.vhd", "4M"]].concat())
        .ok("create");
    let bytes = fs::read(lab.path("x.vhd")).unwrap();
    let footer = bytes.len() - 512;
    let cut = [&bytes[..1 << 20], &bytes[footer..]].concat();
    fs::write(lab.path("x.vhd"), cut).unwrap();
    let answer = lab.zebu(&["convert", "-f", "vpc", "x.vhd", "x.raw"]);
    answer.failed_with_one_line(1, "data are missing");
    assert!(
        answer.err.contains("past the end of the file"),
        "{answer:?}"
    );
    lab.zebu(&["info", "-f", "vpc", "x.vhd"]).ok("info");
    is_read_only(&lab, "x.vhd", "vpc");
}

/// An image whose blocks and sectors are stored or not by chance.
fn vhd(is_differencing: bool, random: &mut Rng) -> Vhd {
    Vhd::random(is_differencing, &mut |n| random.below(n))
}

/// What identifies an image, by the footer at its end.
fn id_of(lab: &Lab, name: &str) -> [u8; 16] {
    let bytes = fs::read(lab.path(name)).unwrap();
    let footer = &bytes[bytes.len() - 512..];
    footer[68..84].try_into().unwrap()
}

fn utf16_le(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

#[test]
fn dynamic_images_with_any_block_size() {
    for_each_seed(|lab, random, what| {
        let image = vhd(false, random);
        fs::write(
            lab.path("x.vhd"),
            image.build(&mut |n| random.below(n)).bytes,
        )
        .unwrap();
        fs::write(lab.path("model.raw"), image.content(None)).unwrap();
        let subject = Subject::new(lab, "x.vhd", "vpc");
        subject.same_reports(REPORTS, what);
        subject.same_bytes(what);
        lab.assert_same_bytes("model.raw", "theirs.raw", what);
    });
}

/// Chains of differencing images are read as the model says. QEMU takes them for dynamic ones.
#[test]
fn differencing_images_are_read_over_their_parents() {
    if beyond_qemu("it ignores the parent") {
        return;
    }
    for_each_seed(|lab, random, what| {
        let base = vhd(false, random);
        let mut content = base.content(None);
        fs::write(
            lab.path("0.vhd"),
            base.build(&mut |n| random.below(n)).bytes,
        )
        .unwrap();
        if random.one_in(3) {
            // A fixed parent is not recognized by its content.
            lab.zebu(&["convert", "0.vhd", "-O", "raw", "0.raw"])
                .ok(what);
            let convert = [
                "convert",
                "-O",
                "vpc",
                "-o",
                "subformat=fixed,force_size=on",
            ];
            let files = ["0.raw", "0.vhd"];
            lab.qemu_img(&[&convert[..], &files].concat()).ok(what);
        }
        let images = 1 + random.below(3);
        for number in 1..=images {
            let mut image = vhd(true, random);
            let parent = format!("{}.vhd", number - 1);
            image.parent_id = id_of(lab, &parent);
            match random.below(4) {
                0 => image.parent = parent,
                1 => {
                    let path = utf16_le(&format!(".\\{parent}"));
                    let wrong = utf16_le("D:\\gone.vhd");
                    image.locators = vec![(*b"W2ku", wrong), (*b"W2ru", path)];
                }
                2 => {
                    let path = utf16_le(&format!("C:\\disks\\{parent}"));
                    image.locators = vec![(*b"W2ku", path)];
                }
                _ => {
                    let url = format!("file://./{parent}");
                    image.locators = vec![(*b"Wi2r", vec![1]), (*b"MacX", url.into_bytes())];
                }
            }
            content = image.content(Some(&content));
            fs::write(
                lab.path(&format!("{number}.vhd")),
                image.build(&mut |n| random.below(n)).bytes,
            )
            .unwrap();
        }
        fs::write(lab.path("model.raw"), &content).unwrap();
        let top = format!("{images}.vhd");
        let subject = Subject::new(lab, &top, "vpc");
        subject.reads_as("model.raw", what);
        if random.one_in(4) {
            subject.is_served_as("model.raw", what);
        }
        let info = lab.zebu(&["info", "--backing-chain", &top]).ok(what);
        let parents = info.out.matches("backing file: ").count() as u64;
        assert_eq!(parents, images, "{what}: {info:?}");
        assert!(info.out.contains("backing file format: vpc"), "{what}");
        // Each sector is mapped to the image that has it.
        let map = lab.zebu(&["map", "--output=json", &top]).ok(what);
        assert!(map.out.starts_with("[{ \"start\": 0,"), "{what}: {map:?}");
        // No name of an untrusted image is opened, but that of the command line is.
        let answer = lab.zebu(&["convert", "--untrusted", &top, "no.raw"]);
        answer.failed_with_one_line(1, what);
        assert!(answer.err.contains("which it may not open"), "{answer:?}");
        let shown = lab.zebu(&["info", "--untrusted", &top]).ok(what);
        assert!(shown.out.contains("would open: backing-file"), "{shown:?}");
        let below = format!("{}.vhd", images - 1);
        let options = format!(
            "driver=vpc,file.filename={top},backing.driver=vpc,backing.file.filename={below}"
        );
        if images == 1 {
            let convert = ["convert", "--untrusted", "--image-opts", &options];
            lab.zebu(&[&convert[..], &["-O", "raw", "ours.raw"]].concat())
                .ok(what);
            lab.assert_same_bytes("ours.raw", "model.raw", what);
        }
    });
}

#[test]
fn damaged_differencing_images_are_read_in_order_or_refused() {
    if beyond_qemu("it ignores the parent") {
        return;
    }
    let lab = Lab::new();
    let create = ["create", "-q", "-f", "vpc", "0.vhd", "8M"];
    lab.qemu_img(&create).ok("create");
    for case in cases(45, "damaged images") {
        let mut random = Rng::new(case);
        let mut image = vhd(true, &mut random);
        image.locators = vec![(*b"W2ru", utf16_le("0.vhd"))];
        let mut bytes = image.build(&mut |n| random.below(n)).bytes;
        // A number of the second header or of the table.
        for _ in 0..1 + random.below(3) {
            let at = match random.below(3) {
                0 => 512 + random.below(1024 / 4) * 4,
                1 => 1088 + random.below(48),
                _ => TABLE + random.below(image.blocks.len() as u64) * 4,
            } as usize;
            let old = u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
            let value = damaged(&mut random, old.into()) as u32;
            bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
        if random.one_in(4) {
            let length = random.below(bytes.len() as u64);
            bytes.truncate(length as usize);
        }
        fs::write(lab.path("x.vhd"), bytes).unwrap();
        for args in [
            &["info", "-f", "vpc", "x.vhd"][..],
            &["map", "-f", "vpc", "x.vhd"],
            &["convert", "-f", "vpc", "x.vhd", "x.raw"],
        ] {
            let answer = lab.zebu(args);
            let what = format!("case {case}: {args:?}");
            match answer.status {
                0 => answer.orderly(&what),
                _ => answer.failed_with_one_line(1, &what),
            }
        }
    }
}

#[test]
fn a_differencing_image_may_not_lead_to_itself() {
    if beyond_qemu("it ignores the parent") {
        return;
    }
    let lab = Lab::new();
    let mut random = Rng::new(5);
    let mut image = vhd(true, &mut random);
    for (parent, said) in [
        ("x.vhd", "infinite loop"),
        ("gone.vhd", "No such file"),
        ("", "Could not open backing file"),
    ] {
        image.parent = parent.into();
        fs::write(
            lab.path("x.vhd"),
            image.build(&mut |n| random.below(n)).bytes,
        )
        .unwrap();
        let answer = lab.zebu(&["convert", "x.vhd", "x.raw"]);
        answer.failed_with_one_line(1, parent);
        assert!(answer.err.contains(said), "{answer:?}");
    }
}

#[test]
fn limits_apply_to_untrusted_images() {
    if beyond_qemu("it has no limits") {
        return;
    }
    let lab = Lab::new();
    let mut random = Rng::new(9);
    let mut image = vhd(false, &mut random);
    // A table of 16 MiB.
    (image.block_size, image.sectors) = (512, 4 << 20);
    image.blocks = vec![None; 4 << 20];
    fs::write(
        lab.path("x.vhd"),
        image.build(&mut |n| random.below(n)).bytes,
    )
    .unwrap();
    lab.zebu(&["info", "x.vhd"]).ok("without limits");
    let answer = lab.zebu(&["info", "--untrusted", "x.vhd"]);
    answer.failed_with_one_line(1, "a table of 16 MiB");
    assert!(answer.err.contains("'table-size'"), "{answer:?}");
}
