//! VHD, VDI and DMG whose copies, offsets and names differ, and files of other formats.

use std::fs;

use super::images::{self, set_checksum};
use super::{Container, content, for_each_spelling};
use crate::common::{Lab, Rng};

/// A lab with a disk as `a.raw`, and this image of it.
fn made(lab: &Lab, random: &mut Rng, format: &str, options: &str, name: &str) -> Vec<u8> {
    let sectors = 512 + 64 * random.below(64);
    let disk = content(random, sectors);
    fs::write(lab.path("a.raw"), &disk).unwrap();
    let convert = [
        "convert", "-f", "raw", "-O", format, "-o", options, "a.raw", name,
    ];
    lab.zebu(&convert).ok("an image");
    disk
}

#[test]
fn copies_of_vhd_footers() {
    for_each_spelling("VHD", |lab, random| {
        let kind = ["fixed", "dynamic"][random.below(2) as usize];
        let name = ["x.vhd", "x.VHD", "x.img"][random.below(3) as usize];
        let options = format!("subformat={kind},force_size=on");
        let disk = made(lab, random, "vpc", &options, name);
        let mut bytes = fs::read(lab.path(name)).unwrap();
        let end = bytes.len() - 512;
        // One of the two copies, or its sum, or its cookie.
        let damaged =
            ["none", "start", "end"][random.below(if kind == "fixed" { 1 } else { 3 }) as usize];
        let at = [0, 8, 50, 64, 100][random.below(5) as usize];
        match damaged {
            "start" => bytes[at] ^= 0xff,
            "end" => bytes[end + at] ^= 0xff,
            _ => {}
        }
        fs::write(lab.path(name), bytes).unwrap();
        let spelt = format!("{kind} {name} damaged {damaged} at {at}");
        let container = Container {
            lab,
            name,
            disk: &disk,
            refused_as: &["VHD"],
            has_files: false,
            spelt: &spelt,
        };
        container.judge_streams();
        // Its name tells what a fixed one is, and the start what another is.
        let is_told = match kind {
            "fixed" => name != "x.img",
            _ => damaged != "start",
        };
        let refused_as = if is_told {
            &[][..]
        } else {
            container.refused_as
        };
        Container {
            refused_as,
            ..container
        }
        .judge_by_name();
        let given = ["convert", "-f", "vpc", "-O", "raw", name, "given"];
        lab.zebu(&given).ok(&spelt);
        assert!(fs::read(lab.path("given")).unwrap() == disk, "{spelt}");
        spelt
    });
}

#[test]
fn extra_bytes_of_vdi_blocks() {
    for_each_spelling("VDI", |lab, random| {
        const DATA: usize = 0x158;
        let disk = made(lab, random, "vdi", "static=off", "x.vdi");
        let bytes = fs::read(lab.path("x.vdi")).unwrap();
        let extra = 512 * random.below(5) as usize;
        let data = u32::from_le_bytes(bytes[DATA..DATA + 4].try_into().unwrap()) as usize;
        let mut new = bytes[..data].to_vec();
        new[0x17c..0x180].copy_from_slice(&(extra as u32).to_le_bytes());
        for block in bytes[data..].chunks(1 << 20) {
            new.resize(new.len() + extra, 0xee);
            new.extend(block);
        }
        fs::write(lab.path("x.vdi"), new).unwrap();
        let spelt = format!("{extra} extra bytes");
        Container {
            lab,
            name: "x.vdi",
            disk: &disk,
            refused_as: &[],
            has_files: false,
            spelt: &spelt,
        }
        .judge();
        spelt
    });
}

/// A file that is called so is nothing else, however its ending is written.
#[test]
fn what_is_called_dmg_is_one() {
    let lab = Lab::new();
    for name in ["x.dmg", "x.DMG", "x.Dmg"] {
        fs::write(lab.path(name), content(&mut Rng::new(1), 64)).unwrap();
        for args in [
            &["convert", "-O", "raw", name, "out"][..],
            &["info", name],
            &["--untrusted", "info", name],
        ] {
            let answer = lab.zebu(args);
            answer.failed_with_one_line(1, name);
        }
        let answer = lab.zebu(&["import", name, "out"]);
        assert_eq!(answer.status, 2, "{name}: {answer:?}");
    }
}

#[test]
fn names_of_dmg() {
    for_each_spelling("DMG", |lab, random| {
        let image = images::dmg(false, random.one_in(2), &mut |n| random.below(n));
        let name = ["x.dmg", "x.DMG", "x.Dmg", "x.img", "x"][random.below(5) as usize];
        fs::write(lab.path(name), &image.bytes).unwrap();
        Container {
            lab,
            name,
            disk: &image.content,
            // Without data before its list it begins as a text does.
            refused_as: match image.bytes.starts_with(b"<?xml") {
                true => &["DMG", "XML"],
                false => &["DMG"],
            },
            has_files: false,
            spelt: name,
        }
        .judge();
        name.to_owned()
    });
}

/// What files of other formats begin with, at which offset, and a word of the message.
const OTHERS: &[(usize, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe\0\x01", "luks"),
    (0, b"LUKS\xba\xbe\0\x02", "LUKS"),
    (0, b"LUKS\xba\xbe\0\x03", "LUKS"),
    (0, b"LUKS\xba\xbe\xff\xff", "LUKS"),
    (0, b"SKUL\xba\xbe\0\x02", "LUKS"),
    (0, b"\x1f\x8b\x08\0", "gzip"),
    (0, b"\xfd7zXZ\0", "xz"),
    (0, b"\x28\xb5\x2f\xfd", "zstd"),
    (0, b"BZh91AY&SY", "bzip2"),
    (0, b"\x04\x22\x4d\x18", "lz4"),
    (0, b"\x02\x21\x4c\x18", "lz4"),
    (0, b"\x50\x2a\x4d\x18\x04\0\0\0", "zstd"),
    (0, b"\x5f\x2a\x4d\x18\x04\0\0\0", "zstd"),
    (0, b"\x1f\x9d\x90", "compress"),
    (0, b"LZIP\x01", "lzip"),
    (0, b"\x89LZO\0\r\n\x1a\n", "lzop"),
    (0, b"\x5d\0\0\x80\0\xff\xff\xff\xff\xff\xff\xff\xff", "lzma"),
    (0, b"xar!", "xar"),
    (0, b"VMA\0", "VMA"),
    (
        0,
        b"version https://git-lfs.github.com/spec/v1\n",
        "Git LFS",
    ),
    (0, b"WLPWM\0\0\0", "WIM"),
    (
        0,
        b"# made by a program\n# Disk DescriptorFile\nkind=1\n",
        "VMDK",
    ),
    (0, b"7z\xbc\xaf\x27\x1c", "7z"),
    (0, b"PK\x03\x04", "zip"),
    (0, b"Rar!\x1a\x07", "rar"),
    (0, b"MSWIM\0\0\0", "WIM"),
    (0, b"EVF\x09\r\n\xff\0", "EWF"),
    (0, b"AFF10\r\n\0", "AFF"),
    (0, b"\x3a\xff\x26\xed", "Android"),
    (0, b"rbd image v1\n", "Ceph"),
    (0, b"QFI\xfb\0\0\0\0", "qcow"),
    (0, b"\xbe\xba\xfe\xca\0\0\0\0", "seSparse"),
    (0, b"<?xml version=\"1.0\"?><VirtualBox>", "XML"),
    (
        0,
        b"\xef\xbb\xbf<?xml version=\"1.0\"?><ovf:Envelope>",
        "OVF",
    ),
    (0, b"\xff\xfe<\0?\0x\0m\0l\0 \0", "XML"),
    (0, b"<!DOCTYPE html>", "web server"),
    (0, b"<<< Oracle VM VirtualBox Disk Image >>>\n", "VDI"),
    (0, b".encoding = \"UTF-8\"\nconfig.version = \"8\"\n", "VMX"),
    (
        0,
        b"\xff\xfe#\0 \0D\0i\0s\0k\0 \0D\0e\0s\0c\0r\0i\0p\0t\0o\0r\0F\0i\0l\0e\0",
        "VMDK",
    ),
    (257, b"ustar", "tar archive"),
];

/// Where a file has what tells its format though its start is damaged.
enum Rest {
    /// The second header of LUKS2, which has its own offset.
    SecondHeader(u64),
    /// The headers and the region tables of a VHDX.
    Vhdx,
    /// A footer of a VHD of this kind, with a sum that is right or not, and so many bytes behind it.
    Footer(u32, bool, usize),
    /// The trailer of a DMG, with so many bytes behind it.
    Trailer(usize),
}

/// Puts it into a disk, and returns a word of the message.
fn put(rest: &Rest, bytes: &mut Vec<u8>) -> &'static str {
    match rest {
        Rest::SecondHeader(at) => {
            let header = &mut bytes[*at as usize..];
            header[..8].copy_from_slice(b"SKUL\xba\xbe\0\x02");
            header[256..264].copy_from_slice(&at.to_be_bytes());
            "LUKS"
        }
        Rest::Vhdx => {
            for (at, what) in [
                (0x1_0000, b"head"),
                (0x2_0000, b"head"),
                (0x3_0000, b"regi"),
                (0x4_0000, b"regi"),
            ] {
                bytes[at..at + 4].copy_from_slice(what);
            }
            "VHDX"
        }
        Rest::Footer(kind, is_right, behind) => {
            let mut footer = vec![0; 512];
            footer[..8].copy_from_slice(b"conectix");
            footer[60..64].copy_from_slice(&kind.to_be_bytes());
            set_checksum(&mut footer, 64);
            footer[100] = u8::from(!is_right);
            bytes.extend(footer);
            bytes.resize(bytes.len() + behind, 0);
            "VHD"
        }
        Rest::Trailer(behind) => {
            let mut trailer = vec![0; 512];
            trailer[..12].copy_from_slice(b"koly\0\0\0\x04\0\0\x02\0");
            bytes.extend(trailer);
            bytes.resize(bytes.len() + behind, 0);
            "DMG"
        }
    }
}

#[test]
fn containers_with_a_damaged_start_are_no_raw_disks() {
    for_each_spelling("damaged starts", |lab, random| {
        let rest = match random.below(5) {
            0 => Rest::SecondHeader(0x4000 << random.below(9)),
            1 => Rest::Vhdx,
            2 => Rest::Footer(2 + random.below(3) as u32, true, 0),
            3 => Rest::Footer(
                2 + random.below(3) as u32,
                false,
                [0, 511, 512][random.below(3) as usize],
            ),
            _ => Rest::Trailer(random.below(512) as usize),
        };
        let sectors = 8300 + random.below(1000);
        let mut bytes = vec![0; sectors as usize * 512];
        // Nothing that another format begins with.
        let start = content(random, 1);
        bytes[..512].copy_from_slice(&start);
        bytes[510..512].fill(0);
        let word = put(&rest, &mut bytes);
        fs::write(lab.path("x"), &bytes).unwrap();
        let spelt = match rest {
            Rest::SecondHeader(at) => format!("LUKS2 with its second header at {at}"),
            Rest::Vhdx => "VHDX".to_owned(),
            Rest::Footer(kind, is_right, behind) => {
                format!("VHD of kind {kind}, right: {is_right}, and {behind} bytes")
            }
            Rest::Trailer(behind) => format!("DMG and {behind} bytes"),
        };
        Container {
            lab,
            name: "x",
            disk: b"",
            refused_as: &[word],
            has_files: false,
            spelt: &spelt,
        }
        .judge();
        // A disk with partitions may have had such a volume inside before; its end is its own.
        if matches!(rest, Rest::SecondHeader(_) | Rest::Vhdx) {
            bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
            fs::write(lab.path("x"), &bytes).unwrap();
            Container {
                lab,
                name: "x",
                disk: &bytes,
                refused_as: &[],
                has_files: false,
                spelt: &spelt,
            }
            .judge_streams();
        }
        spelt
    });
}

#[test]
fn other_formats_are_no_raw_disks() {
    for_each_spelling("other formats", |lab, random| {
        let (at, start, word) = OTHERS[random.below(OTHERS.len() as u64) as usize];
        let sectors = 16 + random.below(64);
        let mut bytes = content(random, sectors);
        // As zeroes, or as data follow.
        if random.one_in(2) {
            bytes[..512].fill(0);
        }
        bytes[at..at + start.len()].copy_from_slice(start);
        let name = ["x", "x.img", "x.raw", "x.qcow2"][random.below(4) as usize];
        fs::write(lab.path(name), &bytes).unwrap();
        let spelt = format!("{:?} in {name}", String::from_utf8_lossy(start));
        Container {
            lab,
            name,
            disk: b"",
            // What import decompresses is damaged.
            refused_as: &[word, "ecompress", "gzip", "stream", "corrupt", "frame"],
            has_files: false,
            spelt: &spelt,
        }
        .judge();
        // Nothing is said where the format is given.
        let given = lab
            .zebu(&["convert", "-f", "raw", "-O", "raw", name, "given"])
            .ok(&spelt);
        assert!(given.err.is_empty(), "{spelt}: {given:?}");
        assert!(fs::read(lab.path("given")).unwrap() == bytes, "{spelt}");
        spelt
    });
}

/// Under QEMU's name it is what QEMU takes it for, with a warning.
#[test]
fn qemu_takes_them_for_raw_disks() {
    let lab = Lab::new();
    for (at, start, word) in OTHERS.iter().skip(1).copied() {
        let mut bytes = vec![0; 4096];
        bytes[at..at + start.len()].copy_from_slice(start);
        fs::write(lab.path("x"), &bytes).unwrap();
        let convert = ["convert", "-O", "raw", "x", "out"];
        let _ = fs::remove_file(lab.path("qemu-img"));
        let ours = lab.zebu_called("qemu-img", &convert).ok(word);
        assert!(ours.err.starts_with("WARNING: 'x' is "), "{word}: {ours:?}");
        assert!(ours.err.contains(word), "{word}: {ours:?}");
        assert!(fs::read(lab.path("out")).unwrap() == bytes, "{word}");
        lab.qemu_img(&convert).ok(word);
        assert!(fs::read(lab.path("out")).unwrap() == bytes, "{word}");
        let _ = fs::remove_file(lab.path("qemu-img"));
        let strict = lab.zebu_called(
            "qemu-img",
            &["--untrusted", "convert", "-O", "raw", "x", "out"],
        );
        strict.fails_with(word);
    }
}

/// Disks that are more than that: the first bytes decide, and what is inside a disk is a part of it.
#[test]
fn polyglots() {
    let lab = Lab::new();
    let mut random = Rng::new(3);
    let disk = content(&mut random, 80);
    let boot = |bytes: &mut Vec<u8>| bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    let mut hybrid = disk.clone();
    boot(&mut hybrid);
    hybrid[32769..32774].copy_from_slice(b"CD001");
    let mut iso = disk.clone();
    iso[..32768].fill(0);
    iso[32769..32774].copy_from_slice(b"CD001");
    let mut gpt = disk.clone();
    boot(&mut gpt);
    gpt[512..520].copy_from_slice(b"EFI PART");
    // Left over from before the disk was partitioned.
    let mut was_luks = disk.clone();
    boot(&mut was_luks);
    was_luks[0x4000..0x4008].copy_from_slice(b"SKUL\xba\xbe\0\x02");
    was_luks[0x4100..0x4108].copy_from_slice(&0x4000u64.to_be_bytes());
    for (what, bytes) in [
        ("hybrid", &hybrid),
        ("iso", &iso),
        ("gpt", &gpt),
        ("was LUKS", &was_luks),
    ] {
        fs::write(lab.path("x"), bytes).unwrap();
        for args in [
            &["convert", "-O", "raw", "x", "out"][..],
            &["--untrusted", "convert", "-O", "raw", "x", "out"],
            &["import", "x", "out"],
        ] {
            lab.zebu(args).ok(what);
            assert!(&fs::read(lab.path("out")).unwrap() == bytes, "{what}");
        }
    }
    // A second header of LUKS without the first, and a VHDX without its signature.
    let mut luks = disk.clone();
    luks[0x4000..0x4008].copy_from_slice(b"SKUL\xba\xbe\0\x02");
    luks[0x4100..0x4108].copy_from_slice(&0x4000u64.to_be_bytes());
    fs::write(lab.path("x"), luks).unwrap();
    lab.zebu(&["convert", "-O", "raw", "x", "out"])
        .fails_with("LUKS");
    fs::write(lab.path("a.raw"), &disk).unwrap();
    lab.zebu(&["convert", "-f", "raw", "-O", "vhdx", "a.raw", "x.vhdx"])
        .ok("VHDX");
    lab.patch("x.vhdx", 0, b"damaged!");
    lab.zebu(&["convert", "-O", "raw", "x.vhdx", "out"])
        .fails_with("VHDX");
    // An archive whose first member is called like an image begins.
    let mut tar = vec![0; 1024];
    tar[..9].copy_from_slice(b"COWD.vmdk");
    tar[257..262].copy_from_slice(b"ustar");
    fs::write(lab.path("x"), tar).unwrap();
    lab.zebu(&["convert", "-O", "raw", "x", "out"])
        .fails_with("tar archive");
    // A raw disk with the footer of a VHD behind it is no dynamic VHD, and has another size.
    let mut footer = vec![0; 512];
    footer[..8].copy_from_slice(b"conectix");
    footer[60..64].copy_from_slice(&2u32.to_be_bytes());
    set_checksum(&mut footer, 64);
    fs::write(lab.path("x"), [&disk[..], &footer].concat()).unwrap();
    lab.zebu(&["convert", "-O", "raw", "x", "out"])
        .fails_with("VHD");
}
