//! What files begin and end with that are no raw disks, though no driver recognizes them.
//!
//! These are facts of the formats, each from its own specification; the length
//! that is looked at first is QEMU's, so that both find the same.

use std::ops::Range;

/// So many bytes from the start of a file determine its format.
pub const PROBED_BYTES: usize = 512;

/// The name of the format without a driver that a file has which begins with
/// `head` (its first [`PROBED_BYTES`], zeroes beyond its end). The names are those
/// that `-f` takes in qemu-img, which knows it, too.
pub fn foreign_format(head: &[u8]) -> Option<&'static str> {
    head.starts_with(b"LUKS\xba\xbe\x00\x01").then_some("luks")
}

/// What a file is that qemu-img takes for a raw disk, by its signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// As "a tar archive".
    pub what: &'static str,
    /// How its content is reached; empty if there is no such way here.
    pub next: &'static str,
}

impl Foreign {
    /// Whether it is a tar archive, which may begin with the signature of an image: the name of its
    /// first member.
    pub fn is_archive(&self) -> bool {
        *self == ARCHIVE
    }
}

const ARCHIVE: Foreign = Foreign {
    what: "a tar archive",
    next: "'zebu convert FILE.ova --disk N' takes a disk out of an appliance",
};
const COMPRESSED: &str = "'zebu import' decompresses it";
const PROGRAM: &str = "decompress it first";

/// Signatures at the start of files that are no images of disks, or of formats without a driver:
/// where, and what is there, what it is, and how its content is reached.
const SIGNATURES: &[(usize, &[u8], &str, &str)] = &[
    // Any version: the first one is also QEMU's.
    (
        0,
        b"LUKS\xba\xbe",
        "a LUKS volume",
        "decrypt it with 'cryptsetup open --readonly'",
    ),
    (0, b"SKUL\xba\xbe", "the second header of a LUKS volume", ""),
    (0, b"\x1f\x8b\x08", "compressed by gzip", COMPRESSED),
    (0, b"\xfd7zXZ\0", "compressed by xz", COMPRESSED),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd", COMPRESSED),
    (0, b"\x04\x22\x4d\x18", "compressed by lz4", PROGRAM),
    (0, b"LZIP\x01", "compressed by lzip", PROGRAM),
    (0, b"\x89LZO\0\r\n\x1a\n", "compressed by lzop", PROGRAM),
    (0, b"\x02\x21\x4c\x18", "compressed by lz4", PROGRAM),
    (0, b"\x1f\x9d\x90", "compressed by compress", PROGRAM),
    (0, b"xar!", "a xar archive", "extract it first"),
    (
        0,
        b"VMA\0",
        "a backup of Proxmox (VMA)",
        "'vma extract' takes the disks out of it",
    ),
    (
        0,
        b"version https://git-lfs",
        "a pointer of Git LFS",
        "fetch what it means with 'git lfs pull'",
    ),
    (
        0,
        b"WLPWM\0\0\0",
        "a WIM archive",
        "apply it to a disk with 'wimlib-imagex'",
    ),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", "extract it first"),
    (0, b"PK\x03\x04", "a zip archive", "extract it first"),
    (0, b"PK\x05\x06", "a zip archive", "extract it first"),
    (0, b"PK\x07\x08", "a zip archive", "extract it first"),
    (0, b"Rar!\x1a\x07", "a rar archive", "extract it first"),
    (0, b"MSCF\0\0\0\0", "a cabinet archive", "extract it first"),
    (
        0,
        b"MSWIM\0\0\0",
        "a WIM archive",
        "apply it to a disk with 'wimlib-imagex'",
    ),
    (
        0,
        b"EVF\x09\r\n\xff\0",
        "an EWF (E01) image",
        "'ewfexport' makes a raw disk of it",
    ),
    (
        0,
        b"LVF\x09\r\n\xff\0",
        "an EWF (L01) image",
        "'ewfexport' makes a raw disk of it",
    ),
    (
        0,
        b"EVF2\r\n\x81\0",
        "an EWF (Ex01) image",
        "'ewfexport' makes a raw disk of it",
    ),
    (
        0,
        b"LEF2\r\n\x81\0",
        "an EWF (Lx01) image",
        "'ewfexport' makes a raw disk of it",
    ),
    (
        0,
        b"AFF10\r\n\0",
        "an AFF image",
        "'affconvert' makes a raw disk of it",
    ),
    (0, b"encrcdsa", "an encrypted DMG", "decrypt it first"),
    (
        0,
        b"sprs",
        "a sparse image of macOS",
        "'hdiutil convert' makes a DMG of it",
    ),
    (
        0,
        b"\x3a\xff\x26\xed",
        "a sparse image of Android",
        "'simg2img' makes a raw disk of it",
    ),
    (
        0,
        b"partclone-image",
        "an image of partclone",
        "'partclone.restore' writes it to a disk",
    ),
    (
        0,
        b"PaRtImAgE-VoLuMe",
        "an image of Partimage",
        "restore it first",
    ),
    (
        0,
        b"\0ntfsclone-image",
        "an image of ntfsclone",
        "'ntfsclone --restore-image' writes it to a disk",
    ),
    (
        0,
        b"rbd image v1\n",
        "an export of a Ceph image",
        "'rbd import' takes it",
    ),
    (
        0,
        b"rbd diff v",
        "a difference of Ceph images",
        "'rbd import-diff' takes it",
    ),
    (
        0,
        b"rbd image v2\n",
        "an export of a Ceph image",
        "'rbd import' takes it",
    ),
    (
        0,
        b"MComprHD",
        "a CHD image",
        "'chdman' makes a raw disk of it",
    ),
    (0, b"QEVM", "the state of a virtual machine", ""),
    (0, b"QFI\xfb", "a qcow image of an unknown version", ""),
    (
        0,
        b"\xbe\xba\xfe\xca\0\0\0\0",
        "a seSparse extent of a VMDK",
        "name its descriptor instead",
    ),
    (
        0,
        b"#!/bin/sh\n#V",
        "a cloop image of a version that is not supported",
        "",
    ),
    (
        0,
        b"<<< ",
        "a VDI image with a damaged signature",
        "format 'vdi' says what is wrong",
    ),
];

/// What a file is that begins with `head`, as for [`foreign_format`], if it has a signature of
/// something else than a disk.
pub fn foreign(head: &[u8]) -> Option<Foreign> {
    if is_tar(head) {
        return Some(ARCHIVE);
    }
    let is = |at: usize, what: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(what));
    let mut known = SIGNATURES.iter();
    let found = known.find(|(at, what, ..)| is(*at, what));
    let found = found.map(|(_, _, what, next)| Foreign { what, next });
    let found = found.or_else(|| {
        let bzip2 = [b"1AY&SY", b"\x17rE8P\x90"];
        let (what, next) = match () {
            () if is(0, b"BZh") && bzip2.iter().any(|start| is(4, *start)) => {
                ("compressed by bzip2", COMPRESSED)
            }
            // The size of the disk is not known, as xz and 7-Zip write it.
            () if is(1, b"\x2a\x4d\x18") && head[0] & 0xf0 == 0x50 => {
                ("compressed by zstd", COMPRESSED)
            }
            () if is(0, b"\x5d\0\0") && is(5, &[0xff; 8]) => ("compressed by lzma", PROGRAM),
            () => return None,
        };
        Some(Foreign { what, next })
    });
    found.or_else(|| foreign_text(head))
}

/// What a text is that describes a virtual machine or is a page of a web server. In UTF-8 or UTF-16.
fn foreign_text(head: &[u8]) -> Option<Foreign> {
    let narrow: Vec<u8> = match head {
        [0xff, 0xfe, rest @ ..] => rest.iter().step_by(2).copied().collect(),
        [0xfe, 0xff, rest @ ..] => rest.iter().skip(1).step_by(2).copied().collect(),
        [0xef, 0xbb, 0xbf, rest @ ..] => rest.to_vec(),
        // UTF-16 without a mark of its order.
        [b'<' | b'#', 0, ..] => head.iter().step_by(2).copied().collect(),
        [0, b'<' | b'#', ..] => head.iter().skip(1).step_by(2).copied().collect(),
        _ => head.to_vec(),
    };
    let text = narrow.trim_ascii_start().to_ascii_lowercase();
    let starts = |what: &[u8]| text.starts_with(what);
    let has = |what: &[u8]| text.windows(what.len()).any(|found| found == what);
    let foreign = |what, next| Some(Foreign { what, next });
    match () {
        () if starts(b"<?xml") || starts(b"<envelope") || starts(b"<ovf:envelope") => {
            match has(b"envelope") {
                true => foreign(
                    "the descriptor of an appliance (OVF)",
                    "'zebu convert FILE.ovf --disk N' takes a disk out of it",
                ),
                false => foreign("a text in XML", "name the disk that it describes"),
            }
        }
        () if starts(b"<!doctype html") || starts(b"<html") => {
            foreign("a page of a web server", "")
        }
        () if has(b"# disk descriptorfile") => foreign(
            "the descriptor of a VMDK in an unusual form",
            "format 'vmdk' reads it if it is in UTF-8",
        ),
        () if starts(b"#!/usr/bin/vmware") || has(b"config.version = \"") => foreign(
            "the configuration of a virtual machine (VMX)",
            "name the disk that it describes",
        ),
        () => None,
    }
}

/// Bytes at the end of a file that may have a footer or a trailer.
pub const TAIL_BYTES: usize = 1024;
/// Bytes of a footer or a trailer.
const FOOTER: usize = 512;

/// What the last [`TAIL_BYTES`] of a file are, in whole sectors: one that ends within a sector is
/// filled up with zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// The footer of a fixed VHD.
    FixedVhd,
    /// The footer of a VHD of another kind.
    Vhd,
    /// The footer of a VHD that is damaged, or not at the end.
    DamagedVhd,
    /// The trailer of a DMG.
    Dmg,
}

impl Tail {
    /// By these bytes, or those of a shorter file.
    pub fn of(tail: &[u8]) -> Option<Tail> {
        const VHD_CHECKSUM: Range<usize> = 64..68;
        fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
            let bytes = bytes.get(at..at + 4)?;
            Some(bytes.iter().fold(0, |n, b| n << 8 | u32::from(*b)))
        }
        let footer = &tail[tail.len().checked_sub(FOOTER)?..];
        let sum = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>();
        let checksum = u32_at(footer, VHD_CHECKSUM.start)?;
        let is_vhd = footer.starts_with(b"conectix")
            && checksum == !(sum(footer) - sum(&footer[VHD_CHECKSUM]));
        match u32_at(footer, 60).filter(|_| is_vhd) {
            Some(2) => return Some(Tail::FixedVhd),
            Some(3 | 4) => return Some(Tail::Vhd),
            _ => {}
        }
        if tail
            .chunks(FOOTER)
            .any(|sector| sector.starts_with(b"conectix"))
        {
            return Some(Tail::DamagedVhd);
        }
        // It need not end with a sector. The second number is its version, the third its length.
        let mut starts = tail.windows(12).take(tail.len() - FOOTER + 1);
        let is_dmg = |start: &[u8]| {
            start.starts_with(b"koly") && [Some(FOOTER as u32), Some(0)].contains(&u32_at(start, 8))
        };
        starts.any(is_dmg).then_some(Tail::Dmg)
    }

    /// As for a file that begins with a signature.
    pub fn foreign(self) -> Foreign {
        let (what, next) = match self {
            Tail::FixedVhd => ("a fixed VHD by its end", "format 'vpc' reads it"),
            Tail::Vhd => ("a VHD with a damaged start", "format 'vpc' reads it"),
            Tail::DamagedVhd => ("a VHD with a damaged footer by its end", ""),
            Tail::Dmg => ("a DMG by its end", "format 'dmg' reads it"),
        };
        Foreign { what, next }
    }
}

/// Where else a file may have a signature whose start is damaged.
pub const INNER: &[u64] = &[
    0x4000, 0x8000, 0x1_0000, 0x2_0000, 0x3_0000, 0x4_0000, 0x8_0000, 0x10_0000, 0x20_0000,
    0x40_0000,
];

/// What a file is by the sectors at [`INNER`], each with its offset.
pub fn foreign_inside(sectors: &[(u64, Vec<u8>)]) -> Option<Foreign> {
    let is = |at: u64, what: &[u8]| {
        let mut sectors = sectors.iter();
        sectors.any(|(offset, sector)| *offset == at && sector.starts_with(what))
    };
    let is_luks = |(at, sector): &(u64, Vec<u8>)| {
        // It has its own offset.
        sector.starts_with(b"SKUL\xba\xbe\0\x02") && sector.get(256..264) == Some(&at.to_be_bytes())
    };
    if sectors.iter().any(is_luks) {
        return Some(Foreign {
            what: "a LUKS volume with a damaged first header",
            next: "'cryptsetup repair' mends it",
        });
    }
    let has_header = is(0x1_0000, b"head") || is(0x2_0000, b"head");
    let has_regions = is(0x3_0000, b"regi") || is(0x4_0000, b"regi");
    (has_header && has_regions).then_some(Foreign {
        what: "a VHDX image with a damaged signature",
        next: "format 'vhdx' says what is wrong",
    })
}

/// Whether a file that begins with `head` (as for [`foreign_format`]) is a tar archive, as appliances
/// (OVA) are: it has the magic of POSIX, or the checksum of a header, which older archives have, too.
fn is_tar(head: &[u8]) -> bool {
    /// Where the magic and the checksum are.
    const MAGIC: Range<usize> = 257..262;
    const CHECKSUM: Range<usize> = 148..156;
    let Some(head) = head.get(..PROBED_BYTES) else {
        return false;
    };
    let digits = str::from_utf8(&head[CHECKSUM]).unwrap_or_default();
    let checksum = u32::from_str_radix(digits.trim_matches([' ', '\0']), 8);
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>();
    // The checksum itself counts as spaces.
    let spaces = CHECKSUM.len() as u32 * u32::from(b' ');
    let found = sum(head) - sum(&head[CHECKSUM]) + spaces;
    &head[MAGIC] == b"ustar" || checksum == Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(at: usize, start: &[u8]) -> Option<&'static str> {
        let mut head = [0; PROBED_BYTES];
        head[at..at + start.len()].copy_from_slice(start);
        foreign_format(&head)
    }

    #[test]
    fn formats_are_distinguished_from_disks() {
        for (at, start, name) in [
            (0, &b"QED\0"[..], None),
            (0, b"KDMV\x01", None),
            (0, b"LUKS\xba\xbe\0\x01", Some("luks")),
            // QEMU knows version 1.
            (0, b"LUKS\xba\xbe\0\x02", None),
            (0, b"", None),
        ] {
            assert_eq!(found(at, start), name, "{start:?}");
        }
        assert_eq!(foreign_format(b""), None);
        assert_eq!(foreign_format(b"QFI\xfb\0\0"), None);
    }

    #[test]
    fn archives_are_distinguished_from_disks() {
        let mut head = [0; PROBED_BYTES];
        assert!(!is_tar(&head));
        assert!(!is_tar(b"ustar"));
        // Of seventh edition Unix, with both forms of the checksum.
        head[..5].copy_from_slice(b"a.ovf");
        for checksum in [b"0001332\0", b"001332\0 "] {
            head[148..156].copy_from_slice(checksum);
            assert!(is_tar(&head), "{checksum:?}");
        }
        head[511] = 1;
        assert!(!is_tar(&head));
        head[257..262].copy_from_slice(b"ustar");
        assert!(is_tar(&head));
    }
}
