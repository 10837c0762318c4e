//! Descriptors of VMDK, and the names in them.

use std::fs;

use super::{Container, content, for_each_spelling};
use crate::common::{Lab, Rng};

/// A descriptor of these extents, as bytes. Says how it is spelt.
fn descriptor(random: &mut Rng, extents: &[Vec<u8>], encoding: &str) -> (Vec<u8>, String) {
    let end: &[u8] = [&b"\n"[..], b"\r\n", b"\r"][random.below(3) as usize];
    let blank = |random: &mut Rng| {
        *random
            .pick(&[&["", ""][..], &[" ", " "], &["", "  "], &["\t", " "]])
            .first()
            .unwrap()
    };
    let quote = |random: &mut Rng, value: &str| match random.one_in(4) {
        true => value.to_owned(),
        false => format!("\"{value}\""),
    };
    let mut values = vec![
        ("version", random.pick(&["1", "2", "3"]).to_owned()),
        ("CID", "1234abcd".into()),
        ("parentCID", "ffffffff".into()),
        ("createType", quote(random, "monolithicFlat")),
    ];
    if !encoding.is_empty() {
        values.push(("encoding", quote(random, encoding)));
    }
    if random.one_in(2) {
        values.push(("isNativeSnapshot", "\"no\"".into()));
    }
    // Any order.
    for at in (1..values.len()).rev() {
        values.swap(at, random.below(at as u64 + 1) as usize);
    }
    let mut lines: Vec<Vec<u8>> = Vec::new();
    if random.one_in(3) {
        lines.push(b"".to_vec());
    }
    let title = [
        "# Disk DescriptorFile",
        "#DISK DESCRIPTORFILE",
        "# made by hand",
    ];
    if !random.one_in(4) {
        lines.push(random.pick(&title).as_bytes().to_vec());
    }
    // More than what is looked at to guess a format.
    if random.one_in(4) {
        let words = ["made by hand", "a licence of this disk", ""];
        for _ in 0..random.below(30) {
            lines.push(format!("# {}", random.pick(&words).repeat(4)).into_bytes());
        }
    }
    let data = b"ddb.adapterType = \"ide\"".to_vec();
    let are_first = random.one_in(4);
    if are_first {
        lines.extend_from_slice(extents);
        lines.insert(random.below(lines.len() as u64 + 1) as usize, data.clone());
    }
    for (key, value) in values {
        let key = match random.one_in(6) {
            true => key.to_uppercase(),
            false => key.to_owned(),
        };
        let (before, after) = (blank(random), blank(random));
        let mut line = format!("{before}{key}{after}={before}{value}{after}");
        if random.one_in(3) {
            line = line.trim().to_owned();
        }
        lines.push(line.into_bytes());
        match random.below(6) {
            0 => lines.push(b"".to_vec()),
            1 => lines.push(b"  ".to_vec()),
            2 => lines.push(b"# createType=\"vmfs\", CID=0".to_vec()),
            _ => {}
        }
    }
    if !are_first {
        lines.push(b"# Extent description".to_vec());
        lines.extend_from_slice(extents);
        lines.push(data);
    }
    let mut text = lines.join(end);
    text.extend(end);
    let has_mark = random.one_in(3);
    if has_mark {
        text.splice(0..0, *b"\xef\xbb\xbf");
    }
    let spelt = format!("{:?}", String::from_utf8_lossy(&text));
    (text, spelt)
}

/// A name of an extent's file: here, and in the descriptor in this encoding.
fn file_name(random: &mut Rng, nth: usize) -> (String, Vec<u8>, &'static str) {
    let plain = format!("f{nth}.vmdk");
    match random.below(6) {
        0 => (
            format!("gr\u{fc}n{nth}.vmdk"),
            format!("gr\u{fc}n{nth}.vmdk").into(),
            "UTF-8",
        ),
        1 => {
            let bytes = [b"gr\xfcn\x80", format!("{nth}.vmdk").as_bytes()].concat();
            (
                format!("gr\u{fc}n\u{20ac}{nth}.vmdk"),
                bytes,
                "windows-1252",
            )
        }
        2 => (plain.clone(), format!("C:\\vm\\{plain}").into(), ""),
        3 => (plain.clone(), format!(".\\{plain}").into(), "GBK"),
        _ => (
            plain.clone(),
            plain.into(),
            ["", "UTF-8", "Shift_JIS"][random.below(3) as usize],
        ),
    }
}

#[test]
fn descriptors() {
    for_each_spelling("VMDK descriptors", |lab, random| {
        let count = 1 + random.below(3) as usize;
        let mut disk = Vec::new();
        let mut extents = Vec::new();
        let (_, _, mut encoding) = file_name(random, 0);
        for nth in 0..count {
            // All names have one encoding.
            let (here, named, of) = file_name(random, nth);
            let (here, named) = match nth == 0 || of == encoding {
                true => {
                    encoding = of;
                    (here, named)
                }
                false => (format!("p{nth}.vmdk"), format!("p{nth}.vmdk").into_bytes()),
            };
            let sectors = 1 + random.below(64);
            let bytes = content(random, sectors);
            fs::write(lab.path(&here), &bytes).unwrap();
            disk.extend(bytes);
            let words = match random.one_in(4) {
                true => format!("rw {sectors} flat"),
                false => format!("{}RW\t{sectors}  FLAT", random.pick(&["", " "])),
            };
            extents.push([words.as_bytes(), b" \"", &named, b"\" 0"].concat());
        }
        if random.one_in(3) {
            extents.push(b"RW 8 ZERO".to_vec());
            disk.resize(disk.len() + 4096, 0);
        }
        let (text, spelt) = descriptor(random, &extents, encoding);
        fs::write(lab.path("x.vmdk"), text).unwrap();
        Container {
            lab,
            name: "x.vmdk",
            disk: &disk,
            refused_as: &["VMDK"],
            has_files: true,
            spelt: &spelt,
        }
        .judge();
        spelt
    });
}

/// Puts another name into the descriptor of a sparse image over a parent.
fn rename_parent(lab: &Lab, hint: &[u8]) {
    const DESCRIPTOR: std::ops::Range<usize> = 512..512 + 20 * 512;
    let mut bytes = fs::read(lab.path("child.vmdk")).unwrap();
    let text = &bytes[DESCRIPTOR];
    let name = b"parentFileNameHint=\"base.vmdk";
    let at = text.windows(name.len()).position(|found| found == name);
    let at = at.expect("the name of the parent");
    let mut new = text[..at + name.len() - 9].to_vec();
    new.extend(hint);
    new.extend(&text[at + name.len()..]);
    new.resize(DESCRIPTOR.len(), 0);
    bytes[DESCRIPTOR].copy_from_slice(&new);
    fs::write(lab.path("child.vmdk"), bytes).unwrap();
}

#[test]
fn names_of_parents() {
    for_each_spelling("names of VMDK parents", |lab, random| {
        let disk = content(random, 128);
        fs::write(lab.path("a.raw"), &disk).unwrap();
        lab.zebu(&["convert", "-f", "raw", "-O", "vmdk", "a.raw", "base.vmdk"])
            .ok("the parent");
        fs::create_dir(lab.path("sub")).unwrap();
        fs::copy(lab.path("base.vmdk"), lab.path("sub/base.vmdk")).unwrap();
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
        lab.zebu(&[&create[..], &["child.vmdk"]].concat())
            .ok("the child");
        let hint = *random
            .pick(&[
                &["base.vmdk"][..],
                &["sub/base.vmdk"],
                &["C:\\vm\\base.vmdk"],
                &["c:\\base.vmdk"],
                &["sub\\base.vmdk"],
                &[".\\base.vmdk"],
                &["\\\\server\\share\\vm\\base.vmdk"],
                &["D:base.vmdk"],
            ])
            .first()
            .unwrap();
        rename_parent(lab, hint.as_bytes());
        let _ = fs::remove_file(lab.path("out"));
        lab.zebu(&["convert", "-O", "raw", "child.vmdk", "out"])
            .ok(hint);
        assert!(fs::read(lab.path("out")).unwrap() == disk, "{hint}");
        let strict = lab.zebu(&["--untrusted", "convert", "-O", "raw", "child.vmdk", "out"]);
        strict.fails_with("which it may not open");
        hint.to_owned()
    });
}

/// Names in an encoding without a table are refused by its name, unless a file is called by the bytes.
#[test]
fn unknown_encodings_are_refused() {
    let lab = Lab::new();
    let text = |name: &[u8]| {
        let head = "# Disk DescriptorFile\nversion=1\nencoding=\"GBK\"\nCID=1\nparentCID=ffffffff\n\
                    createType=\"monolithicFlat\"\nRW 1 FLAT \"";
        [head.as_bytes(), name, b"\" 0\n"].concat()
    };
    fs::write(lab.path("x.vmdk"), text(b"\xb4\xc5.vmdk")).unwrap();
    let convert = ["convert", "-O", "raw", "x.vmdk", "out"];
    lab.zebu(&convert).fails_with("'GBK'");
    let own = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"\xb4\xc5.vmdk");
    fs::write(lab.path("").join(own), [7; 512]).unwrap();
    lab.zebu(&convert).ok("by its bytes");
    assert!(fs::read(lab.path("out")).unwrap() == [7; 512]);
    // An extent whose access is not known would be missing in the disk.
    let other = b"version=1\nCID=1\nparentCID=1\ncreateType=\"vmfs\"\nRX 1 VMFS \"a\"\nRW 1 ZERO\n";
    fs::write(lab.path("x.vmdk"), other).unwrap();
    lab.zebu(&convert).fails_with("Unsupported extent line");
    let other = b"version=4\nCID=1\nparentCID=1\ncreateType=\"vmfs\"\nRW 1 ZERO\n";
    fs::write(lab.path("x.vmdk"), other).unwrap();
    lab.zebu(&convert).fails_with("version 4");
}

/// An extent that is given in place of its descriptor says so.
#[test]
fn extents_are_no_images() {
    let lab = Lab::new();
    fs::write(lab.path("a.raw"), content(&mut Rng::new(1), 128)).unwrap();
    let convert = [
        "convert",
        "-f",
        "raw",
        "-O",
        "vmdk",
        "-o",
        "subformat=twoGbMaxExtentSparse",
    ];
    lab.zebu(&[&convert[..], &["a.raw", "x.vmdk"]].concat())
        .ok("an image");
    for args in [
        &["convert", "-O", "raw", "x-s001.vmdk", "out"][..],
        &["info", "x-s001.vmdk"],
    ] {
        lab.zebu(args).fails_with("an extent of a VMDK");
    }
    let import = lab.zebu(&["import", "x-s001.vmdk", "out"]);
    assert_eq!(import.status, 2, "{import:?}");
}
