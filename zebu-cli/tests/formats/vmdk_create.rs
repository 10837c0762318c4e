//! New VMDKs: files, names and descriptors must be those of qemu-img. What is the same for other new
//! images is in `new_formats.rs`.
//!

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

use crate::common::vmdk::{GRAIN, SUBFORMATS, assert_same_content, assert_same_reports, content};
use crate::common::{Lab, Limits, Rng, assert_same_answer, beyond_qemu, cases, part};

/// The descriptor of an image with its CID and name replaced, since these differ in each image.
fn descriptor_of(lab: &Lab, image: &str, name: &str) -> String {
    let bytes = fs::read(lab.path(image)).unwrap();
    let text = match bytes.starts_with(b"KDMV") {
        true => &bytes[512..21 * 512],
        false => &bytes[..],
    };
    let text = text.split(|byte| *byte == 0).next().unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap();
    let lines = text.lines().map(|line| match line.starts_with("CID=") {
        true => "CID=...".into(),
        false => line.replace(name, "NAME"),
    });
    lines.map(|line| line + "\n").collect()
}

#[test]
fn new_images_are_those_of_qemu() {
    for seed in cases(4, "conversions").from(0) {
        let lab = Lab::new();
        let mut random = Rng::new(seed + 300);
        let subformat = SUBFORMATS[(seed % 5) as usize];
        let is_large = seed % 15 >= 10 && subformat.starts_with("twoGb");
        let size = match random.below(4) {
            _ if is_large => (4 << 30) + 512 * random.below(5000),
            0 => 512 * (1 + random.below(100)),
            1 => GRAIN * (1 + random.below(100)),
            _ => 512 * (1 + random.below(16000)),
        };
        let mut options = format!("subformat={subformat}");
        options += match random.below(4) {
            0 => ",adapter_type=lsilogic",
            1 => ",adapter_type=buslogic,compat6=on",
            2 => ",hwversion=7",
            _ => ",toolsversion=9,adapter_type=legacyESX",
        };
        if !subformat.ends_with("Flat") && random.below(2) == 0 {
            options += ",zeroed_grain=on";
        }
        match is_large {
            false => fs::write(lab.path("src.raw"), content(&mut random, size)).unwrap(),
            true => {
                let file = File::create(lab.path("src.raw")).unwrap();
                file.set_len(size).unwrap();
                for at in [0, (2 << 30) - 70_000, size - 100_000] {
                    let bytes = content(&mut random, 100_000);
                    file.write_all_at(&bytes, at).unwrap();
                }
            }
        }
        let what = &format!("seed {seed}: {options}, {size} bytes");
        let convert = |to| ["convert", "-O", "vmdk", "-o", &options, "src.raw", to];
        lab.zebu(&convert("ours.vmdk")).ok(what);
        lab.qemu_img(&convert("theirs.vmdk")).ok(what);
        lab.qemu_img(&["compare", "ours.vmdk", "src.raw"]).ok(what);
        lab.qemu_img(&["check", "ours.vmdk"]).ok(what);
        let ours = descriptor_of(&lab, "ours.vmdk", "ours");
        assert_eq!(ours, descriptor_of(&lab, "theirs.vmdk", "theirs"), "{what}");
        lab.sync_files();
        assert_same_reports(&lab, "ours.vmdk", what);
        let mut others = 0;
        for entry in fs::read_dir(lab.path("")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if let Some(rest) = name.strip_prefix("ours-") {
                lab.assert_same_bytes(&name, &format!("theirs-{rest}"), what);
                others += 1;
            }
        }
        let expected = match subformat {
            "monolithicSparse" | "streamOptimized" => 0,
            "monolithicFlat" => 1,
            _ => size.div_ceil(2 << 30),
        };
        assert_eq!(others, expected, "{what}");
        if subformat == "streamOptimized" {
            let length = |name: &str| fs::metadata(lab.path(name)).unwrap().len();
            let (ours, theirs) = (length("ours.vmdk"), length("theirs.vmdk"));
            assert!(ours <= theirs + theirs / 20, "{what}: {ours}, {theirs}");
        }
    }
}

/// Only the finished descriptor makes files an image.
#[test]
fn flat_images_that_are_not_finished_do_not_open() {
    if beyond_qemu("it leaves an image that opens") {
        return;
    }
    let lab = Lab::new();
    lab.make("create src.qcow2 16M; io src.qcow2: write -s noise 0 16M");
    for subformat in [
        "monolithicFlat",
        "twoGbMaxExtentFlat",
        "twoGbMaxExtentSparse",
    ] {
        let options = format!("subformat={subformat}");
        // Rate-limited, so that it does not end before.
        let args = [
            "convert",
            "-r",
            "2M",
            "-O",
            "vmdk",
            "-o",
            &options,
            "src.qcow2",
            "x.vmdk",
        ];
        let mut child = lab.start_zebu(&args);
        let extent = match subformat {
            "monolithicFlat" => "x-flat.vmdk",
            "twoGbMaxExtentFlat" => "x-f001.vmdk",
            _ => "x-s001.vmdk",
        };
        let is_there = || fs::metadata(lab.path(extent)).is_ok_and(|m| m.blocks() > 2048);
        let start = Instant::now();
        while !is_there() {
            assert!(
                start.elapsed() < crate::common::TIME_LIMIT,
                "nothing is written"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(child.try_wait().unwrap().is_none(), "it has ended");
        child.kill().unwrap();
        child.wait().unwrap();
        let info = ["info", "x.vmdk"];
        let answer = assert_same_answer(&lab, &info, subformat);
        assert!(
            answer.err.contains("Unsupported image type 'unfinished"),
            "{answer:?}"
        );
    }
}

/// The files in a folder: name, length, and the start without the CID.
fn files_in(lab: &Lab, folder: &str) -> Vec<(String, u64, Vec<u8>)> {
    let mut files = Vec::new();
    for entry in fs::read_dir(lab.path(folder)).unwrap() {
        let entry = entry.unwrap();
        let (name, length) = (entry.file_name(), entry.metadata().unwrap().len());
        if entry.path().is_dir() {
            continue;
        }
        let mut bytes = vec![0; length.min(3000) as usize];
        let file = File::open(entry.path()).unwrap();
        file.read_exact_at(&mut bytes, 0).unwrap();
        let mut cut = 0;
        if let Some(at) = bytes.windows(5).position(|w| w == b"\nCID=") {
            // QEMU leaves out leading zeroes.
            let digits = bytes[at + 5..].iter().position(|b| *b == b'\n').unwrap();
            bytes.drain(at + 5..at + 5 + digits);
            bytes.truncate(2000);
            cut = 8 - digits as u64;
        }
        // A file of its own is shorter for them.
        let is_inside = bytes.starts_with(b"KDMV");
        let length = if is_inside { length } else { length + cut };
        files.push((name.into_string().unwrap(), length, bytes));
    }
    files.sort();
    files
}

#[test]
fn files_are_named_as_by_qemu() {
    let lab = Lab::new();
    for name in ["disk", "a b.c.vmdk", "d.x/disk", ".vmdk", "x.", "öl.vmdk"] {
        for subformat in SUBFORMATS {
            for folder in ["ours", "theirs"] {
                let _ = fs::remove_dir_all(lab.path(folder));
                fs::create_dir_all(lab.path(folder).join("d.x")).unwrap();
            }
            let options = format!("subformat={subformat}");
            for size in ["0", "3M", "5G"] {
                let (ours, theirs) = (format!("ours/{name}"), format!("theirs/{name}"));
                let create = |image| ["create", "-q", "-f", "vmdk", "-o", &options, image, size];
                lab.zebu(&create(&ours)).ok(name);
                lab.qemu_img(&create(&theirs)).ok(name);
                let is_below = name.contains('/');
                for below in ["", "/d.x"].iter().take(1 + usize::from(is_below)) {
                    let ours = files_in(&lab, &format!("ours{below}"));
                    let theirs = files_in(&lab, &format!("theirs{below}"));
                    let names = |files: &[(String, u64, Vec<u8>)]| -> Vec<(String, u64)> {
                        files.iter().map(|file| (file.0.clone(), file.1)).collect()
                    };
                    assert_eq!(names(&ours), names(&theirs), "{name}, {options}, {size}");
                    assert!(ours == theirs, "{name}, {options}, {size}");
                }
            }
        }
    }
}

#[test]
fn what_a_descriptor_cannot_have_is_refused() {
    if beyond_qemu("it makes images with wrong descriptors") {
        return;
    }
    let lab = Lab::new();
    lab.make("raw src 100000");
    for (args, says) in [
        (&["x\"y.vmdk", "1M"][..], "quotation marks"),
        (&["-o", "hwversion=\"", "x.vmdk", "1M"], "quotation marks"),
        (
            &["-o", "toolsversion=\n", "x.vmdk", "1M"],
            "quotation marks",
        ),
        (&["x.vmdk", "65T"], "too large"),
        (
            &["-o", "subformat=streamOptimized", "x.vmdk", "65T"],
            "too large",
        ),
        (
            &["-o", "subformat=twoGbMaxExtentFlat", "x.vmdk", "65T"],
            "too large",
        ),
        (
            &[
                "-o",
                "subformat=monolithicFlat",
                "x.vmdk",
                "9223372036854775296",
            ],
            "too large",
        ),
    ] {
        let answer = lab.zebu(&[&["create", "-q", "-f", "vmdk"], args].concat());
        answer.failed_with_one_line(1, says);
        assert!(answer.err.contains(says), "{args:?}: {answer:?}");
        let is_image = |name: &str| name.contains(".vmdk");
        let left = files_in(&lab, "").into_iter();
        assert!(
            !left.map(|file| file.0).any(|name| is_image(&name)),
            "{args:?}"
        );
    }
    // The largest disk.
    for subformat in part(2, ["monolithicSparse", "streamOptimized"]) {
        let options = format!("subformat={subformat}");
        let create = [
            "create", "-q", "-f", "vmdk", "-o", &options, "x.vmdk", "64T",
        ];
        lab.zebu(&create).ok(subformat);
        assert_same_answer(&lab, &["info", "x.vmdk"], subformat);
        let read = "read -P 0 70368744111104 64k";
        lab.zebu(&["io", "-r", "-c", read, "x.vmdk"]).ok(subformat);
    }
}

/// What files held before is gone.
#[test]
fn existing_images_are_replaced() {
    let lab = Lab::new();
    let mut random = Rng::new(31);
    for subformat in SUBFORMATS {
        let options = format!("subformat={subformat}");
        for size in [3 << 20, 1 << 20, 1 << 20, 2 << 20] {
            fs::write(lab.path("src.raw"), content(&mut random, size)).unwrap();
            let args = ["convert", "-O", "vmdk", "-o", &options, "src.raw", "x.vmdk"];
            lab.zebu(&args).ok(subformat);
            lab.qemu_img(&["compare", "x.vmdk", "src.raw"])
                .ok(subformat);
        }
    }
}

#[test]
fn new_images_over_a_parent_are_those_of_qemu() {
    let lab = Lab::new();
    let mut random = Rng::new(32);
    fs::write(lab.path("src.raw"), content(&mut random, 3 << 20)).unwrap();
    lab.make("create base.qcow2 1M");
    lab.zebu(&["convert", "-O", "vmdk", "src.raw", "base.vmdk"])
        .ok("the parent");
    for subformat in [
        "monolithicSparse",
        "twoGbMaxExtentSparse",
        "streamOptimized",
    ] {
        let options = format!("subformat={subformat}");
        for size in [&[][..], &["5M"]] {
            let create = |image| {
                let args = [
                    "create",
                    "-q",
                    "-f",
                    "vmdk",
                    "-o",
                    &options,
                    "-b",
                    "base.vmdk",
                ];
                [&args, &["-F", "vmdk", image][..], size].concat()
            };
            lab.zebu(&create("ours.vmdk")).ok(subformat);
            lab.qemu_img(&create("theirs.vmdk")).ok(subformat);
            let ours = descriptor_of(&lab, "ours.vmdk", "ours");
            assert_eq!(ours, descriptor_of(&lab, "theirs.vmdk", "theirs"));
            let write = ["-f", "vmdk", "-c", "write -P 7 64k 128k", "ours.vmdk"];
            lab.qemu_io(&write).ok(subformat);
            lab.sync_files();
            assert_same_reports(&lab, "ours.vmdk", subformat);
            assert_same_content(&lab, "ours.vmdk", subformat);
        }
    }
    for args in [
        "create -f vmdk -b base.vmdk x.vmdk",
        "create -f vmdk -b base.vmdk -F qcow2 x.vmdk",
        "create -f vmdk -b base.qcow2 -F qcow2 x.vmdk",
        "create -f vmdk -o subformat=monolithicFlat -b base.vmdk -F vmdk x.vmdk",
        "create -f vmdk -o backing_file=base.vmdk x.vmdk 1M",
        "create -f vmdk -b missing.vmdk -F vmdk x.vmdk",
        "create -f vmdk -b x.vmdk -F vmdk x.vmdk",
    ] {
        let words: Vec<&str> = args.split(' ').collect();
        assert_same_answer(&lab, &words, args);
    }
    if beyond_qemu("it opens the parent, and converts") {
        return;
    }
    for (args, says) in [
        (
            "create -u -f vmdk -b base.vmdk -F vmdk x.vmdk 1M",
            "is not known",
        ),
        (
            "convert -O vmdk -B base.vmdk -F vmdk src.raw x.vmdk",
            "Only a qcow2 image",
        ),
    ] {
        let words: Vec<&str> = args.split(' ').collect();
        let answer = lab.zebu(&words);
        assert!(
            answer.status == 1 && answer.err.contains(says),
            "{args}: {answer:?}"
        );
    }
}

#[test]
fn split_images_on_a_full_file_system_do_not_open() {
    if beyond_qemu("it leaves an image that opens") {
        return;
    }
    let lab = Lab::new();
    lab.make("create src.qcow2 8M; io src.qcow2: write -s noise 0 8M");
    fs::create_dir(lab.path("small")).unwrap();
    let script = "mount -t tmpfs -o size=1m none small && \"$0\" \"$@\"; \
                  status=$?; cp --sparse=always small/* .; exit $status";
    for subformat in ["monolithicFlat", "twoGbMaxExtentSparse"] {
        let options = format!("subformat={subformat}");
        let args = [
            "convert",
            "-O",
            "vmdk",
            "-o",
            &options,
            "src.qcow2",
            "small/x.vmdk",
        ];
        let Some(answer) = lab.in_namespace(script, &args, &Limits::default()) else {
            println!("skipped: no mount namespaces here");
            return;
        };
        answer.failed_with_one_line(1, subformat);
        assert!(answer.err.contains("No space left on device"), "{answer:?}");
        let answer = assert_same_answer(&lab, &["info", "x.vmdk"], subformat);
        assert!(answer.err.contains("unfinished"), "{answer:?}");
    }
}

#[test]
fn extents_that_a_parent_reads_are_kept() {
    if beyond_qemu("it overwrites them") {
        return;
    }
    let lab = Lab::new();
    fs::write(lab.path("src.raw"), vec![7; 1 << 20]).unwrap();
    let options = "subformat=twoGbMaxExtentSparse";
    let convert = ["convert", "-O", "vmdk"];
    lab.zebu(&[&convert[..], &["-o", options, "src.raw", "p.vmdk"]].concat())
        .ok("a parent of two files");
    fs::rename(lab.path("p.vmdk"), lab.path("two.vmdk")).unwrap();
    lab.zebu(&[&convert[..], &["src.raw", "o-s001.vmdk"]].concat())
        .ok("a parent of one file");
    for (parent, new, more) in [
        ("two.vmdk", "p.vmdk", &[][..]),
        ("o-s001.vmdk", "o.vmdk", &[]),
        ("o-s001.vmdk", "o.vmdk", &["-u"]),
    ] {
        let create = [
            "create", "-f", "vmdk", "-F", "vmdk", "-b", parent, "-o", options,
        ];
        lab.zebu(&[&create[..], more, &[new, "1M"]].concat())
            .failed_with_one_line(1, "reads this file");
        lab.zebu(&["compare", "src.raw", parent]).ok(parent);
    }
}

#[test]
fn an_image_may_have_more_extents_than_the_soft_limit_of_open_files() {
    let lab = Lab::new();
    lab.make("create src.qcow2 200G; io src.qcow2: write -P 5 150G 64k");
    let script = "ulimit -Sn 64 && exec \"$0\" convert \"$@\"";
    for subformat in ["twoGbMaxExtentSparse", "twoGbMaxExtentFlat"] {
        let options = format!("subformat={subformat}");
        let program = crate::common::program();
        let program = program.to_str().unwrap();
        let to = ["-O", "vmdk", "-o", &options, "src.qcow2", "x.vmdk"];
        let shell = |args: &[&str]| {
            let all = [&["-c", script, program], args].concat();
            lab.run("/bin/sh".as_ref(), &all, b"", &Limits::default())
        };
        shell(&to).ok(subformat);
        shell(&["-O", "qcow2", "x.vmdk", "back.qcow2"]).ok(subformat);
        lab.zebu(&["compare", "src.qcow2", "back.qcow2"])
            .ok(subformat);
    }
}
