//! The descriptor of a VMDK: a text that names the extents of the disk and the parent image.
//!
//! A value is what follows its name and `=` on a line of its own, whatever blanks there are, and the
//! text ends at the first zero byte. Where there is no such line the first occurrence of the name counts,
//! as in QEMU. An invalid line of an extent is an error: QEMU skips it, so that the extents after it
//! begin too early on the disk.

use super::encoding::Encoding;
use crate::printable;
use crate::{Error, Result};

/// The type of an image whose grains are zlib streams.
pub const STREAM_TYPE: &str = "streamOptimized";
/// Bytes of the longest type of an image.
const MAX_TYPE: usize = 127;
/// Bytes of the longest name of a parent, as in QEMU.
const MAX_PARENT: usize = 1023;
/// Bytes of the longest name of an extent's file, as in QEMU.
const MAX_NAME: usize = 511;
/// Bytes of the longest word in a line of an extent.
const MAX_WORD: usize = 10;
/// Bytes of the longest name of an encoding.
const MAX_ENCODING: usize = 63;

/// What begins a text in UTF-8 that says so.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// The names of values that a descriptor has before its extents.
const NAMES: [&[u8]; 8] = [
    b"version",
    b"encoding",
    b"CID",
    b"parentCID",
    b"isNativeSnapshot",
    b"createType",
    b"parentFileNameHint",
    b"changeTrackPath",
];
/// The first comment of most descriptors.
const TITLE: &[u8] = b"# Disk DescriptorFile";

/// The types of images that consist of extents in other files.
const TYPES: [&str; 6] = [
    "monolithicFlat",
    "vmfs",
    "vmfsSparse",
    "seSparse",
    "twoGbMaxExtentSparse",
    "twoGbMaxExtentFlat",
];

/// The identity of an image and of its parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The content ID, which changes when the image is first written after it was opened.
    pub cid: u32,
    /// The content ID of the parent.
    pub parent_cid: u32,
    /// The name of the parent, if there is one.
    pub parent: Option<Vec<u8>>,
}

/// One line of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line<'a> {
    /// What the extent is.
    pub kind: Kind,
    /// Its size in sectors, at least 1.
    pub sectors: u64,
    /// The name of its file; empty if it has none.
    pub name: &'a [u8],
}

/// What an extent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The bytes as they are (`FLAT`, `VMFS`).
    Flat {
        /// The first sector in the file.
        sector: u64,
        /// The name of the type.
        name: &'static str,
    },
    /// A file with a header of `KDMV` or `COWD` (`SPARSE`, `VMFSSPARSE`).
    Sparse {
        /// The name of the type.
        name: &'static str,
    },
    /// A seSparse file (`SESPARSE`).
    SeSparse,
    /// Zeroes, without a file (`ZERO`).
    Zero,
}

impl Kind {
    /// The name of the type in the descriptor.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Flat { name, .. } | Kind::Sparse { name } => name,
            Kind::SeSparse => "SESPARSE",
            Kind::Zero => "ZERO",
        }
    }
}

fn invalid() -> Error {
    Error::Refused("invalid VMDK image descriptor".into())
}

/// What precedes the first zero byte, without a byte order mark.
pub fn text(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|b| *b == 0);
    let text = &bytes[..end.unwrap_or(bytes.len())];
    text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text)
}

/// Lines, whatever ends them.
fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| b"\r\n".contains(b))
}

/// The value after this name and `=`, if the line has them.
fn value<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (found, rest) = line.trim_ascii_start().split_at_checked(name.len())?;
    let rest = rest.trim_ascii_start().strip_prefix(b"=")?;
    found.eq_ignore_ascii_case(name).then(|| rest.trim_ascii())
}

/// Whether this begins a descriptor, in any spelling: comments, blank lines, extents and values with the
/// names of a descriptor's, in any order. Comments without an end are one, too: what follows them may be.
pub fn is_one(head: &[u8]) -> bool {
    let text = text(head);
    let is_title = |line: &[u8]| {
        let start = line.trim_ascii_start().get(..TITLE.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(TITLE))
    };
    let (mut is_told, mut has_comments, mut is_filler) = (false, false, true);
    // The last line may not be complete.
    let is_cut = text.len() + BYTE_ORDER_MARK.len() >= head.len();
    let count = lines(text).count() - usize::from(is_cut);
    for line in lines(text).take(count) {
        let named = NAMES.iter().find(|name| value(line, name).is_some());
        match line.trim_ascii() {
            [] => {}
            [b'#', ..] => {
                is_told |= is_title(line);
                has_comments = true;
            }
            [b'd', b'd', b'b', b'.', rest @ ..] if rest.contains(&b'=') => is_told = true,
            _ if named.is_some() => {
                is_told |=
                    [&b"version"[..], b"CID", b"createType"].contains(named.unwrap_or(&&b""[..]));
            }
            line => {
                is_told |= !matches!(extent(line), Ok(None));
                is_filler = false;
                break;
            }
        }
    }
    let rest = lines(text)
        .nth(count)
        .unwrap_or_default()
        .trim_ascii_start();
    let has_comments = has_comments || rest.starts_with(b"#");
    is_told || is_cut && is_filler && has_comments
}

/// What follows the first occurrence of `name`.
fn after<'a>(text: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let at = text.windows(name.len()).position(|found| found == name)?;
    text.get(at + name.len()..)
}

/// The value of a name, without quotation marks; None: there is no such name. An error if a text in
/// quotation marks has no end, or the value has more than `most` bytes.
fn quoted<'a>(text: &'a [u8], name: &[u8], most: usize) -> Result<Option<&'a [u8]>> {
    let found = match lines(text).find_map(|line| value(line, name)) {
        Some(value) => match value.strip_prefix(b"\"") {
            Some(rest) => &rest[..rest.iter().position(|b| *b == b'"').ok_or_else(invalid)?],
            None => value,
        },
        None => {
            let Some(rest) = after(text, name) else {
                return Ok(None);
            };
            // The two characters before the text, `=` and a quotation mark, are not checked.
            let rest = rest.get(2..).unwrap_or_default();
            &rest[..rest.iter().position(|b| *b == b'"').ok_or_else(invalid)?]
        }
    };
    match found.len() <= most {
        true => Ok(Some(found)),
        false => Err(invalid()),
    }
}

/// How names are written in the descriptor.
pub fn encoding(text: &[u8]) -> Result<Encoding> {
    // Only as a line: elsewhere it is part of a name.
    let line = lines(text).find(|line| value(line, b"encoding").is_some());
    let name = line.map(|line| quoted(line, b"encoding", MAX_ENCODING));
    Ok(Encoding::named(
        name.transpose()?.flatten().unwrap_or_default(),
    ))
}

/// The type of an image whose extents are in other files.
pub fn create_type(text: &[u8]) -> Result<&'static str> {
    let found = quoted(text, b"createType", MAX_TYPE)?.ok_or_else(invalid)?;
    let mut types = TYPES.iter();
    match types.find(|name| name.as_bytes().eq_ignore_ascii_case(found)) {
        Some(name) => Ok(name),
        None => Err(Error::Refused(format!(
            "Unsupported image type '{}'",
            printable(found)
        ))),
    }
}

/// Refuses a version that is not known.
pub fn check_version(text: &[u8]) -> Result<()> {
    match lines(text).find_map(|line| value(line, b"version")) {
        None | Some(b"1" | b"2" | b"3" | b"\"1\"" | b"\"2\"" | b"\"3\"") => Ok(()),
        Some(other) => Err(Error::Refused(format!(
            "Unsupported VMDK version {}",
            printable(other)
        ))),
    }
}

impl Identity {
    /// The identity in a descriptor.
    pub fn decode(text: &[u8]) -> Result<Self> {
        let cid = |name: &'static str| {
            let name_bytes = name.as_bytes();
            let line = lines(text).find_map(|line| value(line, name_bytes));
            let number = match line {
                Some(value) => hexadecimal(value.strip_prefix(b"\"").unwrap_or(value)),
                // The character after the name, `=`, is not checked.
                None => after(text, name_bytes).and_then(|rest| hexadecimal(rest.get(1..)?)),
            };
            number.ok_or_else(|| Error::Refused(format!("The descriptor has no valid {name}")))
        };
        let parent = quoted(text, b"parentFileNameHint", MAX_PARENT)?;
        let parent = parent.filter(|name| !name.is_empty());
        let parent = parent
            .map(|name| encoding(text)?.parent(name))
            .transpose()?;
        Ok(Identity {
            cid: cid("CID")?,
            parent_cid: cid("parentCID")?,
            parent,
        })
    }
}

/// The number at the start of `text`, as `%x` of scanf(3) reads it into 32 bits.
fn hexadecimal(text: &[u8]) -> Option<u32> {
    let mut scan = Scanner(text);
    scan.skip_blanks();
    let is_negative = scan.sign();
    let digits = match scan.0 {
        [b'0', b'x' | b'X', rest @ ..] => rest,
        digits => digits,
    };
    let digits = digits
        .iter()
        .map_while(|digit| char::from(*digit).to_digit(16));
    let value = digits.fold(None, |value: Option<u64>, digit| {
        let shifted = value.unwrap_or(0).saturating_mul(16);
        Some(shifted.saturating_add(u64::from(digit)))
    })?;
    let value = value as u32;
    Some(if is_negative {
        value.wrapping_neg()
    } else {
        value
    })
}

/// The extents in a descriptor, in the order of the disk.
pub fn extents(text: &[u8]) -> impl Iterator<Item = Result<Line<'_>>> {
    lines(text).filter_map(|line| extent(line).transpose())
}

/// The types of extents that are known.
const KINDS: [&[u8]; 6] = [
    b"ZERO",
    b"FLAT",
    b"VMFS",
    b"SPARSE",
    b"VMFSSPARSE",
    b"SESPARSE",
];

/// The extent of a line; None: the line is about something else, or the extent is empty.
fn extent(line: &[u8]) -> Result<Option<Line<'_>>> {
    let refused = |what: &str| {
        let line = printable(line.trim_ascii_end());
        Err(Error::Refused(format!("{what} extent line: {line}")))
    };
    let mut scan = Scanner(line);
    let access = scan.word().map(<[u8]>::to_ascii_uppercase);
    let is_known = match access.as_deref() {
        Some(b"RW" | b"RDONLY") => true,
        Some(b"NOACCESS") => return refused("Unsupported"),
        Some([b'#', ..]) | None => return Ok(None),
        Some(_) => false,
    };
    let sectors = scan.decimal().and_then(|n| u64::try_from(n).ok());
    let kind = scan.word().map(<[u8]>::to_ascii_uppercase);
    let (Some(sectors), Some(kind)) = (sectors, kind.as_deref()) else {
        return match is_known {
            true => refused("Invalid"),
            false => Ok(None),
        };
    };
    if !is_known {
        return match KINDS.contains(&kind) {
            // Without it, what follows would begin too early on the disk.
            true => refused("Unsupported"),
            false => Ok(None),
        };
    }
    let name = scan.quoted();
    let offset = match name {
        Some((_, true)) => scan.decimal(),
        _ => None,
    };
    let name = name.map(|(name, _)| name);
    let first = offset.map(u64::try_from);
    let kind = match (kind, name, first) {
        (b"ZERO", None, _) => Kind::Zero,
        (b"FLAT", Some(_), Some(Ok(sector))) => Kind::Flat {
            sector,
            name: "FLAT",
        },
        (b"VMFS", Some(_), None) => Kind::Flat {
            sector: 0,
            name: "VMFS",
        },
        (b"SPARSE", Some(_), None) => Kind::Sparse { name: "SPARSE" },
        (b"VMFSSPARSE", Some(_), None) => Kind::Sparse { name: "VMFSSPARSE" },
        (b"SESPARSE", Some(_), None) => Kind::SeSparse,
        _ if KINDS.contains(&kind) => return refused("Invalid"),
        _ => return refused("Unsupported"),
    };
    let line = Line {
        kind,
        sectors,
        name: name.unwrap_or_default(),
    };
    Ok((sectors > 0).then_some(line))
}

/// What is left of a line, read as scanf(3) reads it.
struct Scanner<'a>(&'a [u8]);

impl<'a> Scanner<'a> {
    fn skip_blanks(&mut self) {
        let is_blank = |b: &&u8| b.is_ascii_whitespace() || **b == 0x0b;
        let blanks = self.0.iter().take_while(is_blank).count();
        self.0 = &self.0[blanks..];
    }

    /// The next `count` bytes.
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    /// A word, or the start of a longer one.
    fn word(&mut self) -> Option<&'a [u8]> {
        self.skip_blanks();
        let letters = self.0.iter().take_while(|b| !b.is_ascii_whitespace());
        match letters.take(MAX_WORD).count() {
            0 => None,
            count => Some(self.take(count)),
        }
    }

    /// Passes over a sign; whether it is a minus.
    fn sign(&mut self) -> bool {
        let is_negative = self.0.first() == Some(&b'-');
        if matches!(self.0, [b'-' | b'+', ..]) {
            self.take(1);
        }
        is_negative
    }

    /// A number, at most as large as fits.
    fn decimal(&mut self) -> Option<i64> {
        self.skip_blanks();
        let is_negative = self.sign();
        let count = self.0.iter().take_while(|b| b.is_ascii_digit()).count();
        let digits = self.take(count);
        let value = digits.iter().fold(0i64, |value, digit| {
            let shifted = value.saturating_mul(10);
            shifted.saturating_add(i64::from(digit - b'0'))
        });
        (count > 0).then_some(if is_negative { -value } else { value })
    }

    /// A text after a quotation mark, and whether another one ends it.
    fn quoted(&mut self) -> Option<(&'a [u8], bool)> {
        self.skip_blanks();
        let rest = self.0.strip_prefix(b"\"")?;
        let end = rest.iter().take(MAX_NAME);
        let count = end.take_while(|b| !b"\r\"".contains(b)).count();
        let (name, rest) = rest.split_at(count);
        self.0 = rest.strip_prefix(b"\"").unwrap_or(rest);
        (count > 0).then_some((name, rest.first() == Some(&b'"')))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against numbers that are read other than by scanf(3), and extents that are skipped.
    use super::*;

    #[test]
    fn content_ids_are_read_as_by_scanf() {
        let cid = |text: &str| hexadecimal(text.as_bytes());
        assert_eq!(cid("fffffffe\n"), Some(0xffff_fffe));
        assert_eq!(cid(" \t\n0x1Fg"), Some(0x1f));
        assert_eq!(cid("-1"), Some(u32::MAX));
        assert_eq!(cid("+a"), Some(10));
        assert_eq!(cid("1234567890"), Some(0x3456_7890));
        assert_eq!(cid("ffffffffffffffffffff"), Some(u32::MAX));
        for text in ["", "g", "-", "\"1\""] {
            assert_eq!(cid(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_first_name_counts() {
        let text = b"CID=1\nparentCID=2\nCID=3\nparentFileNameHint=\"a b\"";
        let identity = Identity::decode(text).unwrap();
        assert_eq!((identity.cid, identity.parent_cid), (1, 2));
        assert_eq!(identity.parent.as_deref(), Some(&b"a b"[..]));
        let none = Identity::decode(b"parentCID=7 parentFileNameHint=\"\"").unwrap();
        assert_eq!((none.cid, none.parent_cid), (7, 7));
        assert_eq!(none.parent, None);
        for bad in [
            &b"CID=1"[..],
            b"CID=1 parentCID=x",
            b"CID=1 parentCID=2 parentFileNameHint=\"a",
            b"CID=1 parentCID=2 parentFileNameHint",
            b"CID",
            b"",
        ] {
            Identity::decode(bad).unwrap_err();
        }
        let long = format!(
            "CID=1 parentCID=2 parentFileNameHint=\"{}\"",
            "a".repeat(1024)
        );
        Identity::decode(long.as_bytes()).unwrap_err();
        assert_eq!(create_type(b"createType=\"vmfs\"").unwrap(), "vmfs");
        for bad in ["", "createType=", "createType=\"vmfs", "createType=\"x\""] {
            create_type(bad.as_bytes()).unwrap_err();
        }
    }

    #[test]
    fn extent_lines() {
        let one = |line: &'static str| extent(line.as_bytes());
        let flat = one("RW 63 FLAT \"a b.vmdk\" 128\r").unwrap().unwrap();
        assert_eq!((flat.sectors, flat.name), (63, &b"a b.vmdk"[..]));
        let kind = Kind::Flat {
            sector: 128,
            name: "FLAT",
        };
        assert_eq!(flat.kind, kind);
        let kind = |line| one(line).unwrap().map(|line| line.kind.name());
        assert_eq!(kind("  RDONLY\t1 SPARSE \"x\""), Some("SPARSE"));
        assert_eq!(kind("RW 1 VMFSSPARSE \"x"), Some("VMFSSPARSE"));
        assert_eq!(kind("RW 1 SESPARSE \"x\""), Some("SESPARSE"));
        assert_eq!(kind("RW 1 VMFS \"x\""), Some("VMFS"));
        assert_eq!(kind("RW 1 ZERO"), Some("ZERO"));
        assert_eq!(kind("rw 1 zero"), Some("ZERO"));
        for other in [
            "",
            "# RW 1 FLAT",
            "#RW 1 ZERO",
            "RWX 1 x",
            "# RW",
            "ddb.x = \"1\"",
            "RW 0 ZERO",
        ] {
            assert_eq!(kind(other), None, "{other}");
        }
        for bad in [
            "RW",
            "RW x",
            "RW 1",
            "RW -1 ZERO",
            "RW 1 FLAT",
            "RW 1 FLAT \"x\"",
            "RW 1 FLAT \"x\" -1",
            "RW 1 FLAT \"\" 0",
            "RW 1 FLAT x 0",
            "RW 1 VMFS \"x\" 0",
            "RW 1 SPARSE \"x\" 0",
            "RW 1 SPARSE",
            "RW 1 VMFSRDM \"x\"",
            "RW 1 ZERO \"x\"",
            "NOACCESS 1 FLAT \"x\" 0",
            "RWX 1 FLAT \"x\" 0",
        ] {
            one(bad).unwrap_err();
        }
        let huge = one("RW 99999999999999999999 ZERO").unwrap().unwrap();
        assert_eq!(huge.sectors, i64::MAX as u64);
    }
}
