//! VMDK images: images that QEMU made, and those that it can only read, must be read and reported as
//! by QEMU. Damaged ones must be refused as by QEMU, or because data are missing.
//!

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use crate::common::vmdk::{
    Damage, GRAIN, SUBFORMATS, assert_same_content, assert_same_reports, content, descriptor, esx,
    se_sparse, stream,
};
use crate::common::{Answer, Lab, Rng, assert_same_answer, beyond_qemu, cases, compare_answers};

/// Writes at random offsets of an image.
fn scribble(lab: &Lab, random: &mut Rng, image: &str, size: u64) {
    let mut script = String::new();
    for number in 0..random.below(10) {
        let at = random.below(size / 512) * 512;
        let length = (512 * (1 + random.below(400))).min(size - at);
        script += &match random.below(4) {
            0 => format!(
                "write -z {} {}\n",
                at / GRAIN * GRAIN,
                GRAIN * (1 + random.below(3))
            ),
            _ => format!("write -P {} {at} {length}\n", number + 1),
        };
    }
    lab.qemu_io_script(&["-f", "vmdk", image], &script)
        .orderly("write");
}

/// Makes `x.vmdk` of any subformat. What it is, and its size.
fn generate(lab: &Lab, random: &mut Rng, nth: u64) -> (String, u64) {
    let subformat = SUBFORMATS[(nth % SUBFORMATS.len() as u64) as usize];
    let is_large = nth % 15 >= 10 && subformat.starts_with("twoGb");
    let size = match random.below(4) {
        _ if is_large => (2 << 30) + 512 * random.below(5000),
        0 => 512 * (1 + random.below(100)),
        1 => GRAIN * (1 + random.below(100)),
        _ => 512 * (1 + random.below(16000)),
    };
    let mut options = format!("subformat={subformat}");
    match random.below(4) {
        0 => options += ",adapter_type=lsilogic",
        1 => options += ",adapter_type=buslogic,compat6=on",
        2 => options += ",hwversion=7",
        _ => options += ",toolsversion=9",
    }
    if !subformat.ends_with("Flat") && random.below(2) == 0 {
        options += ",zeroed_grain=on";
    }
    if is_large {
        let size = size.to_string();
        let create = [
            "create", "-q", "-f", "vmdk", "-o", &options, "x.vmdk", &size,
        ];
        lab.qemu_img(&create).ok("create");
        // Across the end of the first extent.
        let script = "write -P 7 2147418112 128k\nwrite -P 9 0 1k\n";
        lab.qemu_io_script(&["-f", "vmdk", "x.vmdk"], script)
            .ok("write");
    } else {
        fs::write(lab.path("src.raw"), content(random, size)).unwrap();
        let convert = ["convert", "-O", "vmdk", "-o", &options, "src.raw", "x.vmdk"];
        lab.qemu_img(&convert).ok("convert");
    }
    if subformat != "streamOptimized" {
        scribble(lab, random, "x.vmdk", size);
    }
    (format!("{options}, {size} bytes"), size)
}

/// What a read prints of its bytes.
fn dumped(answer: &Answer) -> Vec<String> {
    let lines = answer.out.lines().filter(|line| line.contains(":  "));
    lines.map(str::to_owned).collect()
}

/// Small reads of an image, and of an overlay over it, must be the same.
fn assert_same_small_reads(lab: &Lab, random: &mut Rng, image: &str, size: u64, what: &str) {
    let over = ["create", "-q", "-f", "qcow2", "-b", image, "-F", "vmdk"];
    lab.zebu(&[&over[..], &["over.qcow2"]].concat()).ok(what);
    assert_same_answer(lab, &["map", "--output=json", "over.qcow2"], what);
    let mut args = Vec::new();
    for _ in 0..6 {
        let at = random.below(size);
        let length = (1 + random.below(2000)).min(size - at);
        args.push(format!("read -v {at} {length}"));
    }
    let args: Vec<&str> = args.iter().flat_map(|read| ["-c", read]).collect();
    for image in [image, "over.qcow2"] {
        let args = [&args[..], &["-r", image]].concat();
        let (ours, theirs) = (lab.zebu_io(&args), lab.qemu_io(&args));
        assert_eq!(dumped(&ours), dumped(&theirs), "{what}");
    }
    fs::remove_file(lab.path("over.qcow2")).unwrap();
}

#[test]
fn images_are_read_as_by_qemu() {
    for seed in cases(4, "images").from(0) {
        let lab = Lab::new();
        let mut random = Rng::new(seed + 1);
        let (what, size) = generate(&lab, &mut random, seed);
        let what = &format!("seed {seed}: {what}");
        lab.sync_files();
        assert_same_reports(&lab, "x.vmdk", what);
        assert_same_content(&lab, "x.vmdk", what);
        assert_same_small_reads(&lab, &mut random, "x.vmdk", size, what);
        lab.zebu(&["convert", "-c", "x.vmdk", "-O", "qcow2", "ours.qcow2"])
            .ok(what);
        lab.qemu_img(&["compare", "ours.qcow2", "theirs.raw"])
            .ok(what);
        // From another folder: extents are found beside the descriptor.
        fs::create_dir(lab.path("sub")).unwrap();
        for entry in fs::read_dir(lab.path("")).unwrap() {
            let name = entry.unwrap().file_name();
            let name = name.to_str().unwrap();
            if name.ends_with(".vmdk") {
                fs::rename(lab.path(name), lab.path(&format!("sub/{name}"))).unwrap();
            }
        }
        for args in [
            &["info", "sub/x.vmdk"][..],
            &["map", "--output=json", "sub/x.vmdk"],
            &["map", "./sub/x.vmdk"],
            &[
                "info",
                "--image-opts",
                "driver=vmdk,file.driver=file,file.filename=sub/x.vmdk",
            ],
            &[
                "info",
                "json:{\"driver\":\"vmdk\",\"file.filename\":\"sub/x.vmdk\"}",
            ],
        ] {
            assert_same_answer(&lab, args, what);
        }
        let name = lab.path("sub/x.vmdk");
        let name = name.to_str().unwrap();
        assert_same_answer(&lab, &["info", "--output=json", name], what);
    }
}

#[test]
fn chains_are_read_as_by_qemu() {
    for seed in cases(1, "chains").from(0) {
        let lab = Lab::new();
        let mut random = Rng::new(seed + 1);
        let (base, size) = generate(&lab, &mut random, 5 * seed + seed % 5);
        let what = &format!("seed {seed}: over {base}");
        fs::create_dir(lab.path("sub")).unwrap();
        let zeroed = ["zeroed_grain=on", "zeroed_grain=off"][random.below(2) as usize];
        for (name, below) in [("sub/mid.vmdk", "../x.vmdk"), ("top.vmdk", "sub/mid.vmdk")] {
            let create = [
                "create", "-q", "-f", "vmdk", "-o", zeroed, "-b", below, "-F", "vmdk",
            ];
            lab.qemu_img(&[&create[..], &[name]].concat()).ok(what);
            scribble(&lab, &mut random, name, size);
        }
        lab.sync_files();
        for args in [
            &["info", "--backing-chain", "top.vmdk"][..],
            &["info", "--backing-chain", "--output=json", "top.vmdk"],
        ] {
            assert_same_answer(&lab, args, what);
        }
        assert_same_reports(&lab, "top.vmdk", what);
        assert_same_content(&lab, "top.vmdk", what);
        assert_same_small_reads(&lab, &mut random, "top.vmdk", size, what);
    }
}

#[test]
fn a_parent_that_was_written_since_is_refused() {
    let lab = Lab::new();
    lab.qemu_img(&["create", "-q", "-f", "vmdk", "base.vmdk", "1M"])
        .ok("create");
    let create = [
        "create",
        "-q",
        "-f",
        "vmdk",
        "-b",
        "base.vmdk",
        "-F",
        "vmdk",
    ];
    lab.qemu_img(&[&create[..], &["top.vmdk"]].concat())
        .ok("create");
    lab.zebu(&["convert", "-O", "raw", "top.vmdk", "x.raw"])
        .ok("unchanged");
    lab.qemu_io(&["-c", "write 0 1k", "-f", "vmdk", "base.vmdk"])
        .ok("write");
    let convert = ["convert", "-O", "raw", "top.vmdk", "x.raw"];
    assert_eq!(lab.qemu_img(&convert).status, 1);
    lab.zebu(&convert).failed_with_one_line(1, "another CID");
    for args in [
        &["info", "--backing-chain", "top.vmdk"][..],
        &["check", "top.vmdk"],
    ] {
        assert_same_answer(&lab, args, "what needs no data");
    }
    lab.make("img convert -O raw base.vmdk base.raw");
    let options = "driver=vmdk,file.filename=top.vmdk,backing.driver=raw,\
                   backing.file.filename=base.raw";
    let convert = ["convert", "--image-opts", options, "-O", "raw", "x.raw"];
    assert_eq!(lab.qemu_img(&convert).status, 1);
    lab.zebu(&convert).failed_with_one_line(1, "no VMDK");
}

/// Makes every grain shorter when it is compressed: without markers, a stream is no longer than that.
fn make_compressible(disk: &mut [u8]) {
    disk.iter_mut().for_each(|byte| *byte &= 0x0f);
}

/// An image of one or more extents that qemu-img cannot make. What it is.
fn build(lab: &Lab, random: &mut Rng) -> (String, u64) {
    let mut lines = String::new();
    let mut all = Vec::new();
    let count = 1 + random.below(3);
    let one_kind = random.below(7);
    let mut what = String::new();
    for nth in 0..count {
        let kind = match random.below(2) {
            0 => one_kind,
            _ => random.below(7),
        };
        // QEMU reads past the end of an extent that ends within a grain: only the last one does.
        let unit = if nth + 1 == count { 1 } else { 6400 };
        let sectors = (1 + random.below(5000)).next_multiple_of(unit);
        let mut disk = content(random, sectors * 512);
        let name = format!("part{nth}.vmdk");
        let (line, bytes) = match kind {
            0 | 1 => {
                let grain = [1, 8, 16, 100, 128][random.below(5) as usize];
                what += &format!("ESX with grains of {grain}; ");
                (format!("VMFSSPARSE \"{name}\""), esx(&disk, grain))
            }
            2 | 3 => {
                what += "seSparse; ";
                let grains = se_sparse(&disk, random);
                (format!("SESPARSE \"{name}\""), grains)
            }
            4 => {
                let grain = [8, 32, 128][random.below(3) as usize];
                let markers = random.below(3) > 0;
                what += &format!("stream of {grain}, markers {markers}; ");
                if !markers {
                    make_compressible(&mut disk);
                }
                // QEMU looks for the footer in the descriptor's file.
                let bytes = stream(&disk, grain, markers, false, "");
                (format!("SPARSE \"{name}\""), bytes)
            }
            5 => {
                what += "VMFS; ";
                (format!("VMFS \"{name}\""), disk.clone())
            }
            _ => {
                let offset = random.below(100);
                what += &format!("flat from {offset}; ");
                let before = vec![0xee; offset as usize * 512];
                let bytes = [before, disk.clone()].concat();
                (format!("FLAT \"{name}\" {offset}"), bytes)
            }
        };
        lines += &format!("RW {sectors} {line}\n");
        fs::write(lab.path(&name), bytes).unwrap();
        all.extend(disk);
    }
    let types = ["vmfs", "vmfsSparse", "seSparse", "twoGbMaxExtentSparse"];
    let text = descriptor(random.pick(&types), &lines, random.next() as u32);
    fs::write(lab.path("x.vmdk"), text).unwrap();
    fs::write(lab.path("src.raw"), &all).unwrap();
    (what, all.len() as u64)
}

#[test]
fn files_of_esx_and_mixed_extents_are_read_as_by_qemu() {
    for seed in cases(4, "files of ESX and mixed extents").from(0) {
        let lab = Lab::new();
        let mut random = Rng::new(seed + 100);
        let (what, size) = build(&lab, &mut random);
        let what = &format!("seed {seed}: {what}");
        lab.sync_files();
        assert_same_reports(&lab, "x.vmdk", what);
        assert_same_content(&lab, "x.vmdk", what);
        lab.assert_same_bytes("ours.raw", "src.raw", what);
        assert_same_small_reads(&lab, &mut random, "x.vmdk", size, what);
    }
}

#[test]
fn streams_are_read_as_by_qemu() {
    for seed in cases(4, "streams").from(0) {
        let lab = Lab::new();
        let mut random = Rng::new(seed + 200);
        let size = 512 * (1 + random.below(12000));
        let mut disk = content(&mut random, size);
        let grain = [8, 16, 128, 128, 256][random.below(5) as usize];
        let (markers, footer) = (random.below(4) > 0, random.below(3) > 0);
        if !markers {
            make_compressible(&mut disk);
        }
        let text = descriptor("streamOptimized", "", random.next() as u32);
        let bytes = stream(&disk, grain, markers, footer, &text);
        let what = &format!(
            "seed {seed}: {size} bytes in grains of {grain}, markers {markers}, footer {footer}"
        );
        fs::write(lab.path("x.vmdk"), bytes).unwrap();
        fs::write(lab.path("src.raw"), disk).unwrap();
        lab.sync_files();
        assert_same_reports(&lab, "x.vmdk", what);
        assert_same_content(&lab, "x.vmdk", what);
        lab.assert_same_bytes("ours.raw", "src.raw", what);
        assert_same_small_reads(&lab, &mut random, "x.vmdk", size, what);
    }
}

/// What zebu says where it refuses more than QEMU.
const STRICTER: [&str; 9] = [
    "past the end of the file",
    "extent line",
    "lists no extents",
    "File too large",
    "L1 size too big",
    "Invalid granularity",
    "Unsupported VMDK version",
    "Unsupported VMDK compression",
    "Image is corrupt",
];

/// Compares what both programs make of `x.vmdk`, which may be damaged. `sound` is its content before
/// that. Whether zebu refused it.
fn judge(lab: &Lab, sound: &[u8], what: &str) -> bool {
    lab.sync_files();
    let info = ["info", "-f", "vmdk", "--output=json", "x.vmdk"];
    let (ours, theirs) = (lab.zebu(&info), lab.qemu_img(&info));
    ours.orderly(what);
    let is_stricter = |answer: &Answer| STRICTER.iter().any(|words| answer.err.contains(words));
    let crashed = |answer: &Answer| answer.status >= 124;
    match (ours.status, theirs.status) {
        _ if crashed(&theirs) => assert_eq!(ours.status, 1, "{what}: {ours:#?}"),
        // QEMU has no words of its own for this.
        (1, 1) if theirs.err.contains("Invalid argument") => {}
        (1, 1) if theirs.err.contains("Input/output error") => {}
        (1, 1) if is_stricter(&ours) => {}
        // The redundant directory is not needed.
        (0, 1) if theirs.err.contains("l1 backup table") => return false,
        // Blanks may be around an equals sign.
        (0, 1) if theirs.err.contains("Unsupported image type ' '") => return false,
        (1, 0) => assert!(is_stricter(&ours), "{what}: {ours:#?}"),
        _ => compare_answers(&ours, &theirs, &info, what),
    }
    if ours.status != 0 {
        ours.failed_with_one_line(1, what);
        for args in [
            &["map", "-f", "vmdk", "x.vmdk"][..],
            &["check", "-f", "vmdk", "x.vmdk"],
        ] {
            lab.zebu(args).failed_with_one_line(1, what);
        }
        return true;
    }
    let said: serde_json::Value = serde_json::from_str(&ours.out).unwrap();
    if said["virtual-size"].as_u64().unwrap() > 1 << 30 {
        return false;
    }
    let check = ["check", "-f", "vmdk", "x.vmdk"];
    let (ours, theirs) = (lab.zebu(&check), lab.qemu_img(&check));
    ours.orderly(what);
    match (ours.status, theirs.status) {
        _ if crashed(&theirs) => {}
        // A table past the end of the file, which QEMU reads as zeroes.
        (1, 0) if ours.err.contains("cluster_offset") => {}
        // Offsets beyond 64 bits are small in QEMU, and may be inside the file.
        (1, 0) => assert!(ours.err.contains("after EOF"), "{what}: {ours:#?}"),
        (1, 1) if ours.err.contains("after EOF") && theirs.err.contains("after EOF") => {}
        _ => compare_answers(&ours, &theirs, &check, what),
    }
    let convert = |to| ["convert", "-f", "vmdk", "-O", "raw", "x.vmdk", to];
    let ours = lab.zebu(&convert("ours.raw"));
    let theirs = lab.qemu_img(&convert("theirs.raw"));
    ours.orderly(what);
    match (ours.status, theirs.status) {
        (0, 0) => lab.assert_same_bytes("ours.raw", "theirs.raw", what),
        // The marker of a compressed grain is wrong, and its stream is right.
        (0, _) => assert!(
            fs::read(lab.path("ours.raw")).unwrap() == sound,
            "{what}: {theirs:#?}"
        ),
        (_, 0) => assert!(is_stricter(&ours), "{what}: {ours:#?}"),
        _ => ours.failed_with_one_line(1, what),
    }
    let is_refused = ours.status != 0;
    // QEMU shows what it reads as zeroes.
    if ours.err.contains("past the end of the file") {
        return true;
    }
    let map = ["map", "-f", "vmdk", "--output=json", "x.vmdk"];
    let (ours, theirs) = (lab.zebu(&map), lab.qemu_img(&map));
    ours.orderly(what);
    match (ours.status, theirs.status) {
        _ if crashed(&theirs) => {}
        (0, 0) => compare_answers(&ours, &theirs, &map, what),
        (1, 0) => assert!(is_stricter(&ours), "{what}: {ours:#?}"),
        (ours_status, _) => assert_eq!(ours_status, 1, "{what}: {ours:#?}\n{theirs:#?}"),
    }
    is_refused
}

/// Damages files of an image in many places, one at a time.
fn damage(lab: &Lab, files: &[(&str, Vec<Damage>)], sound: &[u8]) {
    let mut refused = 0;
    let mut seeds = cases(15, "damaged images").from(0);
    for number in &mut seeds {
        let random = &mut Rng::new(number);
        let (file, places) = &files[random.below(files.len() as u64) as usize];
        let bytes = fs::read(lab.path(file)).unwrap();
        // Each place of the first file at least once, if there are so many cases.
        let place = match places.get(number as usize) {
            Some(place) => place,
            None => &places[random.below(places.len() as u64) as usize],
        };
        let mut damaged = bytes.clone();
        let (value, at) = place.apply(random, &mut damaged);
        fs::write(lab.path(file), damaged).unwrap();
        let what = format!("case {number}: {value:#x} at {at:#x} of {file}");
        refused += u64::from(judge(lab, sound, &what));
        fs::write(lab.path(file), bytes).unwrap();
    }
    let count = seeds.done();
    println!("{refused} refused");
    assert!(
        refused > count / 20 || !zebu_testkit::are_usual(),
        "{refused} of {count}"
    );
}

#[test]
fn damaged_sparse_files_are_refused_as_by_qemu() {
    let lab = Lab::new();
    let mut random = Rng::new(3);
    let sound = content(&mut random, 70 * GRAIN + 512);
    fs::write(lab.path("src.raw"), &sound).unwrap();
    lab.make("img convert -O vmdk -o zeroed_grain=on src.raw x.vmdk");
    damage(&lab, &[("x.vmdk", Damage::of_hosted(21))], &sound);
}

#[test]
fn damaged_streams_are_refused_as_by_qemu() {
    let lab = Lab::new();
    let mut random = Rng::new(4);
    let sound = content(&mut random, 20 * GRAIN + 512);
    let text = descriptor("streamOptimized", "", 5);
    for footer in [false, true] {
        let bytes = stream(&sound, 128, true, footer, &text);
        let mut places = Damage::of_hosted(0);
        let length = bytes.len() as u64;
        // The footer and its markers, and the markers and the data of grains.
        places.extend((0..3).flat_map(|sector| {
            let at = length - (3 - sector) * 512;
            [
                Damage::new(at, 8),
                Damage::new(at + 8, 4),
                Damage::new(at + 12, 4),
            ]
        }));
        let header = length - 1024;
        places.extend([4, 8, 12, 20, 44, 56, 64].map(|at| Damage::new(header + at, 4)));
        places.extend((0..20).map(|_| Damage::new(random.below(length), 1)));
        let grain = 128 * 512;
        places.extend([Damage::new(grain, 8), Damage::new(grain + 8, 4)]);
        fs::write(lab.path("x.vmdk"), bytes).unwrap();
        damage(&lab, &[("x.vmdk", places)], &sound);
    }
}

#[test]
fn damaged_files_of_esx_are_refused_as_by_qemu() {
    for is_se_sparse in [false, true] {
        let lab = Lab::new();
        let mut random = Rng::new(5);
        let sound = content(&mut random, 2000 * 512);
        let (kind, bytes, places) = match is_se_sparse {
            false => ("VMFSSPARSE", esx(&sound, 8), Damage::of_esx()),
            true => {
                let bytes = se_sparse(&sound, &mut random);
                ("SESPARSE", bytes, Damage::of_se_sparse())
            }
        };
        fs::write(lab.path("a.vmdk"), bytes).unwrap();
        let lines = format!("RW 2000 {kind} \"a.vmdk\"\n");
        fs::write(lab.path("x.vmdk"), descriptor("vmfsSparse", &lines, 1)).unwrap();
        damage(&lab, &[("a.vmdk", places)], &sound);
    }
}

/// A descriptor with one or two places changed, and whether QEMU may take an extent twice: scanf(3)
/// passes over empty lines.
fn changed_text(random: &mut Rng, text: &str) -> (Vec<u8>, bool) {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for _ in 0..1 + random.below(2) {
        if lines.is_empty() {
            break;
        }
        let nth = random.below(lines.len() as u64) as usize;
        let line = lines[nth].clone();
        match random.below(9) {
            0 => drop(lines.remove(nth)),
            1 => lines.insert(nth, line),
            2 => {
                let number = match random.below(4) {
                    0 => "-1".to_owned(),
                    1 => "99999999999999999999".to_owned(),
                    2 => "0".to_owned(),
                    _ => random.below(5000).to_string(),
                };
                let words = line.split(' ').map(|word| match word.parse::<i64>() {
                    Ok(_) => number.clone(),
                    Err(_) => word.to_owned(),
                });
                lines[nth] = words.collect::<Vec<_>>().join(" ");
            }
            3 => {
                let kinds = ["FLAT", "SPARSE", "VMFS", "VMFSSPARSE", "SESPARSE", "OTHER"];
                let kind = random.pick(&kinds);
                lines[nth] = line.replace("FLAT", kind).replace("SPARSE", kind);
            }
            4 => lines[nth] = line.replace('=', " = "),
            5 => lines[nth] += "\r",
            6 if !line.is_empty() => {
                let at = random.below(line.len() as u64) as usize;
                lines[nth].remove(at);
            }
            7 => lines.truncate(nth),
            _ => {
                let at = random.below(line.len() as u64 + 1) as usize;
                let added = ["\"", " ", "x", "0", "\0", "/", "=", "\t"];
                lines[nth].insert_str(at, random.pick(&added));
            }
        }
    }
    let is_blank = |line: &String| line.trim().is_empty();
    let doubled = lines
        .windows(2)
        .any(|pair| is_blank(&pair[0]) && pair[1].trim_start().starts_with("RW"));
    let mut bytes = lines.join("\n").into_bytes();
    if random.below(4) > 0 {
        bytes.push(b'\n');
    }
    (bytes, doubled)
}

#[test]
fn damaged_descriptors_are_refused_as_by_qemu() {
    let lab = Lab::new();
    let mut random = Rng::new(6);
    // Whole grains: QEMU reads past the end of an extent that ends within one.
    let sound = content(&mut random, 3072 * 512);
    let parts: Vec<&[u8]> = sound.chunks(1024 * 512).collect();
    fs::write(lab.path("a.vmdk"), parts[0]).unwrap();
    fs::write(lab.path("b.vmdk"), esx(parts[1], 8)).unwrap();
    let bytes = stream(parts[2], 128, true, false, "");
    fs::write(lab.path("c.vmdk"), bytes).unwrap();
    let lines = "RW 1024 FLAT \"a.vmdk\" 0\nRW 1024 SPARSE \"b.vmdk\"\nRW 1024 SPARSE \"c.vmdk\"\n";
    let text = descriptor("monolithicFlat", lines, 1);
    let mut refused = 0;
    let mut seeds = cases(15, "damaged descriptors");
    for number in &mut seeds {
        let (bytes, doubled) = changed_text(&mut Rng::new(number), &text);
        fs::write(lab.path("x.vmdk"), &bytes).unwrap();
        let what = format!("case {number}: {}", String::from_utf8_lossy(&bytes));
        // QEMU reads no CID that has a blank behind it.
        let spaced = [" =", "\t="].map(|sign| format!("CID{sign}").into_bytes());
        let is_spaced = |sign: &Vec<u8>| bytes.windows(sign.len()).any(|window| window == sign);
        if doubled || spaced.iter().any(is_spaced) {
            lab.zebu(&["info", "-f", "vmdk", "x.vmdk"]).orderly(&what);
            continue;
        }
        refused += u64::from(judge(&lab, &sound, &what));
    }
    let count = seeds.done();
    println!("{refused} refused");
    let is_part = refused > count / 10 && refused < count;
    assert!(is_part || !zebu_testkit::are_usual(), "{refused}");
}

/// QEMU passes over lines that it does not understand, and takes an extent after an empty line twice.
#[test]
fn no_extent_is_passed_over_or_taken_twice() {
    if beyond_qemu("it does so") {
        return;
    }
    let lab = Lab::new();
    let mut random = Rng::new(8);
    let disk = content(&mut random, 600 * 512);
    fs::write(lab.path("a.img"), &disk[..200 * 512]).unwrap();
    fs::write(lab.path("b.img"), &disk[400 * 512..]).unwrap();
    let mut whole = disk.clone();
    whole[200 * 512..400 * 512].fill(0);
    fs::write(lab.path("whole.raw"), &whole).unwrap();
    let lines = "\nRW 200 FLAT \"a.img\" 0\n\nRW 200 ZERO\n\nRDONLY 200 FLAT \"b.img\" 0\n";
    fs::write(
        lab.path("x.vmdk"),
        descriptor("twoGbMaxExtentFlat", lines, 1),
    )
    .unwrap();
    lab.zebu(&["convert", "x.vmdk", "x.raw"]).ok("convert");
    lab.assert_same_bytes("x.raw", "whole.raw", "an extent of zeroes");
    let map = lab.zebu(&["map", "--output=json", "x.vmdk"]).ok("map");
    let zero = "{ \"start\": 102400, \"length\": 102400, \"depth\": 0, \"present\": true, \
                \"zero\": true, \"data\": false, \"compressed\": false}";
    assert!(map.out.contains(zero), "{map:?}");
    for line in [
        "NOACCESS 200 FLAT \"a.img\" 0",
        "RW 200 VMFSRDM \"a.img\"",
        "RW 200",
    ] {
        let lines = format!("RW 200 FLAT \"a.img\" 0\n{line}\n");
        fs::write(lab.path("y.vmdk"), descriptor("monolithicFlat", &lines, 1)).unwrap();
        let answer = lab.zebu(&["info", "y.vmdk"]);
        answer.failed_with_one_line(1, line);
        assert!(answer.err.contains(line), "{answer:?}");
    }
}

/// A damaged entry must not harm grains that are sound: the data of one may be thought to begin within
/// those of another.
#[test]
fn overlapping_grains_are_inflated() {
    let lab = Lab::new();
    let mut random = Rng::new(9);
    let disk: Vec<u8> = (0..20 * GRAIN).map(|_| random.next() as u8).collect();
    let text = descriptor("streamOptimized", "", 5);
    let bytes = stream(&disk, 128, true, false, &text);
    fs::write(lab.path("x.vmdk"), &bytes).unwrap();
    let u32_at = |at: u64| {
        let at = at as usize;
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    };
    let table = u64::from(u32_at(u64::from(u32_at(56)) * 512)) * 512;
    // Grain 7 seems to begin within grain 3.
    let within = u32_at(table + 3 * 4) + 2;
    lab.patch("x.vmdk", table + 7 * 4, &within.to_le_bytes());
    for grain in (0..20).filter(|grain| *grain != 7) {
        let at = grain * GRAIN;
        let read = format!("read -v {at} 700");
        let args = ["-c", &read, "-r", "x.vmdk"];
        let (ours, theirs) = (lab.zebu_io(&args), lab.qemu_io(&args));
        assert_eq!(dumped(&ours), dumped(&theirs), "grain {grain}");
        assert!(dumped(&ours).len() > 40, "grain {grain}: {ours:?}");
    }
    if beyond_qemu("--salvage") {
        return;
    }
    lab.zebu(&["convert", "--salvage", "x.vmdk", "x.raw"])
        .orderly("salvage");
    let salvaged = fs::read(lab.path("x.raw")).unwrap();
    let lost = (7 * GRAIN) as usize..(8 * GRAIN) as usize;
    assert!(salvaged[..lost.start] == disk[..lost.start]);
    assert!(salvaged[lost.end..] == disk[lost.end..]);
}

/// Data and tables past the end of a file must not read as zeroes.
#[test]
fn truncated_files_are_errors() {
    if beyond_qemu("it reads zeroes") {
        return;
    }
    let lab = Lab::new();
    let bytes: Vec<u8> = (0..8 * GRAIN).map(|at| (at / 512) as u8 | 1).collect();
    fs::write(lab.path("src.raw"), bytes).unwrap();
    let cut = |name: &str, length: u64| {
        let file = File::options().write(true).open(lab.path(name)).unwrap();
        file.set_len(length).unwrap();
    };
    let refused = |at: &str, what: &str| {
        let answer = lab.zebu(&["convert", "x.vmdk", "x.raw"]);
        answer.failed_with_one_line(1, what);
        let words = ["past the end of the file", at];
        let found = words.iter().all(|words| answer.err.contains(words));
        assert!(found, "{what}: {answer:?}");
    };
    for subformat in SUBFORMATS {
        let options = format!("subformat={subformat}");
        let make = ["convert", "-O", "vmdk", "-o", &options, "src.raw", "x.vmdk"];
        lab.qemu_img(&make).ok("convert");
        let file = match subformat {
            "monolithicFlat" => "x-flat.vmdk",
            "twoGbMaxExtentFlat" => "x-f001.vmdk",
            "twoGbMaxExtentSparse" => "x-s001.vmdk",
            _ => "x.vmdk",
        };
        let length = fs::metadata(lab.path(file)).unwrap().len();
        match subformat {
            "monolithicFlat" | "twoGbMaxExtentFlat" => {
                cut(file, length - 700);
                // Whole sectors are there.
                refused("(guest offset 0x7fc00)", subformat);
            }
            "streamOptimized" => {
                let mut table = [0; 4];
                let source = File::open(lab.path(file)).unwrap();
                source.read_exact_at(&mut table, 27 * 512 + 7 * 4).unwrap();
                cut(file, u64::from(u32::from_le_bytes(table)) * 512);
                refused("Compressed data", subformat);
            }
            _ => {
                cut(file, length - 700);
                refused("(guest offset 0x7fd44)", subformat);
                cut(file, length - GRAIN);
                refused("(guest offset 0x70000)", subformat);
            }
        }
        let map = lab.zebu(&["map", "--output=json", "x.vmdk"]);
        map.ok("map shows where data should be");
    }
    // A grain table, and the grain directory.
    lab.make("img convert -O vmdk src.raw x.vmdk");
    lab.patch("x.vmdk", 26 * 512, &0x1000_0000u32.to_le_bytes());
    refused("(guest offset 0x0)", "the table is missing");
    lab.patch("x.vmdk", 56, &0x1000_0000u64.to_le_bytes());
    let answer = lab.zebu(&["info", "x.vmdk"]);
    answer.failed_with_one_line(1, "the directory is missing");
}

#[test]
fn untrusted_images_open_no_extents_and_no_parent() {
    if beyond_qemu("it has no strict mode") {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "img create -q -f vmdk -o subformat=monolithicFlat flat.vmdk 3M; \
         img create -q -f vmdk base.vmdk 3M; \
         img create -q -f vmdk -b base.vmdk -F vmdk top.vmdk",
    );
    for file in ["flat-flat.vmdk", "base.vmdk"] {
        fs::remove_file(lab.path(file)).unwrap();
    }
    for (image, role, name) in [
        ("flat.vmdk", "extent", "flat-flat.vmdk"),
        ("top.vmdk", "backing-file", "base.vmdk"),
    ] {
        let info = ["info", "--untrusted", "--output=json", image];
        let info: serde_json::Value = serde_json::from_str(&lab.zebu(&info).ok(image).out).unwrap();
        let opened = &info["untrusted"]["would-open"][0];
        assert_eq!(opened["as"], role, "{info:#}");
        assert_eq!(opened["path"], name, "{info:#}");
        assert_eq!(info["virtual-size"], 3 << 20, "{info:#}");
        let text = lab.zebu(&["info", "--untrusted", image]).ok(image);
        assert!(text.out.contains(name), "{text:?}");
        for args in [
            &["map", "--untrusted", image][..],
            &["convert", "--untrusted", image, "x.raw"],
            &["compare", "--untrusted", image, image],
        ] {
            let answer = lab.zebu(args);
            assert!(answer.err.contains("may not open"), "{answer:?}");
        }
    }
    lab.zebu(&["check", "--untrusted", "flat.vmdk"])
        .failed_with_one_line(1, "its extents are not open");
    lab.zebu(&["check", "--untrusted", "top.vmdk"]).ok("check");
}

#[test]
fn limits_apply_to_untrusted_images() {
    if beyond_qemu("it has no limits") {
        return;
    }
    let lab = Lab::new();
    lab.make("img create -q -f vmdk x.vmdk 1T; img create -q -f vmdk y.vmdk 64M");
    lab.zebu(&["info", "--untrusted", "x.vmdk"]).ok("info");
    lab.zebu(&["convert", "--untrusted", "y.vmdk", "y.raw"])
        .ok("a small one");
    for (limit, name) in [
        ("table-size=1000", "'table-size'"),
        ("memory=100000", "'memory'"),
        ("virtual-size=1000000", "'virtual-size'"),
    ] {
        let answer = lab.zebu(&["info", &format!("--untrusted={limit}"), "x.vmdk"]);
        answer.failed_with_one_line(1, limit);
        assert!(answer.err.contains(name), "{answer:?}");
    }
    let args = ["map", "--untrusted=work=5000,work-per-byte=0", "x.vmdk"];
    let answer = lab.zebu(&args);
    assert!(answer.err.contains("'work'"), "{answer:?}");
}

#[test]
fn images_are_read_only() {
    if beyond_qemu("it writes them") {
        return;
    }
    let lab = Lab::new();
    lab.make("img create -q -f vmdk x.vmdk 4M; img create -q -f vmdk y.vmdk 4M");
    for args in [
        &["resize", "x.vmdk", "8M"][..],
        &["snapshot", "-c", "a", "x.vmdk"],
        &["convert", "-n", "y.vmdk", "-O", "vmdk", "x.vmdk"],
    ] {
        lab.zebu(args).failed_with_one_line(1, &args.join(" "));
    }
    let args = ["check", "-r", "all", "x.vmdk"];
    assert_same_answer(&lab, &args, "a repair");
    // A target that an extent is in.
    lab.make("img create -q -f vmdk -o subformat=monolithicFlat f.vmdk 4M");
    let answer = lab.zebu(&["convert", "-U", "f.vmdk", "-O", "raw", "f-flat.vmdk"]);
    answer.failed_with_one_line(1, "the target is a source");
    assert!(
        answer.err.contains("The input is read from this file"),
        "{answer:?}"
    );
}

/// Extents are locked as by QEMU.
#[test]
fn extents_in_use_are_refused() {
    let lab = Lab::new();
    lab.make(
        "img create -q -f vmdk -o subformat=monolithicFlat flat.vmdk 1M; \
         img create -q -f vmdk -o subformat=twoGbMaxExtentSparse split.vmdk 1M",
    );
    for (image, file) in [
        ("flat.vmdk", "flat-flat.vmdk"),
        ("split.vmdk", "split-s001.vmdk"),
    ] {
        let held = lab.held_by_qemu(&["-f", "raw", file]);
        for args in [&["map", image][..], &["info", image], &["map", "-U", image]] {
            assert_same_answer(&lab, args, "the extent is written as a raw image");
        }
        drop(held);
        let held = lab.held_by_zebu(&["-r", "-f", "vmdk", image]);
        let write = ["-f", "raw", "-c", "quit", file];
        let by_zebu = lab.qemu_io(&write);
        drop(held);
        let held = lab.held_by_qemu(&["-r", "-f", "vmdk", image]);
        let by_qemu = lab.qemu_io(&write);
        drop(held);
        assert_eq!(by_zebu, by_qemu, "{file}");
    }
}
