//! OVF descriptors, as far as disks go.

use std::borrow::Cow;
use std::collections::HashMap;

use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};

use crate::{Error, Result, printable, refused};

/// Disks and files at most.
const MAX_ENTRIES: usize = 10_000;
/// Bytes of a file's name at most, as of a path. Each disk of a file has a copy of it.
const MAX_NAME: usize = 4096;

/// The parts of a descriptor that are used.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// The name of the virtual system.
    pub name: Option<String>,
    /// In the order of the descriptor.
    pub disks: Vec<DiskEntry>,
}

/// A disk.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DiskEntry {
    pub id: String,
    /// The name of its file; None: the disk is empty, or `missing`.
    pub file: Option<String>,
    /// Why it has no file, though it is not empty.
    pub missing: Option<String>,
    /// Why the file cannot be read as it is.
    pub packed: Option<&'static str>,
    /// Its size in bytes, if that is a number.
    pub capacity: Option<u64>,
    /// The image format that its URI means.
    pub format: Option<&'static str>,
}

/// A file that disks refer to.
struct FileEntry {
    href: String,
    packed: Option<&'static str>,
}

impl Descriptor {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut reader = Reader::from_str(text.trim_start_matches('\u{feff}'));
        let mut found = Descriptor::default();
        let mut files = HashMap::new();
        let (mut is_envelope, mut is_in_system, mut depth) = (false, false, 0);
        loop {
            let event = reader.read_event().map_err(invalid)?;
            let (tag, is_empty) = match &event {
                Event::Start(tag) => {
                    depth += 1;
                    (tag, false)
                }
                Event::Empty(tag) => (tag, true),
                Event::End(_) => {
                    depth -= 1;
                    continue;
                }
                Event::Eof if depth > 0 => return refused("The descriptor is truncated"),
                Event::Eof => break,
                _ => continue,
            };
            let local = tag.local_name();
            let local = local.into_inner();
            if !is_envelope {
                is_envelope = local == "Envelope";
                match is_envelope {
                    true => continue,
                    false => return refused("The descriptor is no OVF envelope"),
                }
            }
            if files.len().max(found.disks.len()) >= MAX_ENTRIES {
                return refused(format!("The descriptor has more than {MAX_ENTRIES} disks"));
            }
            match local {
                "File" => {
                    if let Some((id, file)) = file(tag)? {
                        files.insert(id, file);
                    }
                }
                "Disk" => found.disks.extend(disk(tag, &files)?),
                "VirtualSystem" => is_in_system = true,
                "Name" if is_in_system && !is_empty && found.name.is_none() => {
                    let text = reader.read_text(tag.name()).map_err(invalid)?;
                    depth -= 1;
                    let name = quick_xml::escape::unescape(&text).map_err(invalid)?;
                    found.name = Some(name.trim().to_owned());
                }
                _ => {}
            }
        }
        match is_envelope {
            true => Ok(found),
            false => refused("The descriptor is no OVF envelope"),
        }
    }
}

fn invalid(error: impl std::fmt::Display) -> Error {
    Error::Refused(printable(&format!("The descriptor is invalid: {error}")))
}

/// The values of these attributes, whatever their prefix.
fn attributes<'a, const N: usize>(
    tag: &'a BytesStart<'_>,
    names: [&str; N],
) -> Result<[Option<Cow<'a, str>>; N]> {
    let mut values = [const { None }; N];
    let mut attributes = tag.attributes();
    // A check for twins would take quadratic time.
    for attribute in attributes.with_checks(false) {
        let attribute = attribute.map_err(invalid)?;
        let local = attribute.key.local_name().into_inner();
        if let Some(nth) = names.iter().position(|name| *name == local) {
            let value = attribute.normalized_value(XmlVersion::Implicit1_0);
            values[nth] = Some(value.map_err(invalid)?);
        }
    }
    Ok(values)
}

/// The id of a file, and the file. None: the element is another one.
fn file(tag: &BytesStart<'_>) -> Result<Option<(String, FileEntry)>> {
    let names = ["id", "href", "compression", "chunkSize"];
    let [id, href, compression, chunk] = attributes(tag, names)?;
    let (Some(id), Some(href)) = (id, href) else {
        return Ok(None);
    };
    let packed = match (compression.as_deref(), chunk) {
        (_, Some(_)) => Some(
            "its file is split into chunks (ovf:chunkSize), which must be joined, in the order of their \
             numbers, to a file of the whole name first",
        ),
        (None | Some("" | "identity"), None) => None,
        (Some(_), None) => Some("it is compressed as a whole"),
    };
    if href.len() > MAX_NAME {
        return refused(format!(
            "The name of a file is longer than {MAX_NAME} bytes"
        ));
    }
    let href = href.into_owned();
    Ok(Some((id.into_owned(), FileEntry { href, packed })))
}

/// The disk of an element; None: the element is another one.
fn disk(tag: &BytesStart<'_>, files: &HashMap<String, FileEntry>) -> Result<Option<DiskEntry>> {
    let names = [
        "diskId",
        "fileRef",
        "capacity",
        "capacityAllocationUnits",
        "format",
        "parentRef",
    ];
    let [id, file, capacity, units, format, parent] = attributes(tag, names)?;
    let Some(id) = id else {
        return Ok(None);
    };
    let reference = file.as_deref().filter(|file| !file.is_empty());
    let file = reference.and_then(|reference| files.get(reference));
    let missing = reference.filter(|_| file.is_none());
    let missing = missing.map(|name| printable(&format!("The descriptor has no file '{name}'")));
    let unit = units.map_or(Some(1), |units| bytes_of(&units));
    let capacity = capacity.and_then(|text| text.trim().parse::<u64>().ok());
    Ok(Some(DiskEntry {
        file: file.map(|file| file.href.clone()),
        missing,
        packed: match parent {
            Some(_) => Some("it is stored as a difference to another one"),
            None => file.and_then(|file| file.packed),
        },
        capacity: capacity
            .zip(unit)
            .and_then(|(count, unit)| count.checked_mul(unit)),
        format: format.and_then(|uri| format_of(&uri)),
        id: id.into_owned(),
    }))
}

/// The bytes of a unit: `byte`, `byte * 2^30`, or a name of OVF 0.9.
fn bytes_of(units: &str) -> Option<u64> {
    let units: String = units.split_whitespace().collect();
    match &*units.to_ascii_lowercase() {
        "" | "byte" | "bytes" => return Some(1),
        "kilobytes" => return Some(1 << 10),
        "megabytes" => return Some(1 << 20),
        "gigabytes" => return Some(1 << 30),
        _ => {}
    }
    let (base, exponent) = units.strip_prefix("byte*")?.split_once('^')?;
    let base: u64 = base.parse().ok()?;
    base.checked_pow(exponent.parse().ok()?)
}

/// The name of the image format that a URI means.
fn format_of(uri: &str) -> Option<&'static str> {
    const FORMATS: [(&str, &str); 6] = [
        ("vmdk", "vmdk"),
        ("vhdx", "vhdx"),
        ("vhd", "vpc"),
        ("qcow2", "qcow2"),
        ("vdi", "vdi"),
        ("raw", "raw"),
    ];
    let uri = uri.to_ascii_lowercase();
    let found = FORMATS.iter().find(|(word, _)| uri.contains(word));
    found.map(|(_, format)| *format)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn envelope(body: &str) -> String {
        format!(
            "\u{feff}<?xml version='1.0'?>\n<!-- a comment -->\n<ovf:Envelope xmlns:ovf=\"x\">\
             {body}</ovf:Envelope>"
        )
    }

    #[test]
    fn disks_and_their_files() {
        let text = envelope(
            "<References><File ovf:id='f1' ovf:href='a&amp;b.vmdk' ovf:size='1'/>\
             <ovf:File ovf:href='c.vmdk' ovf:id='f2' ovf:compression='gzip'></ovf:File></References>\
             <Section xsi:type='ovf:DiskSection_Type'>\
             <Disk ovf:diskId='d1' ovf:fileRef='f1' ovf:capacity='20' \
             ovf:capacityAllocationUnits='byte * 2^30' \
             ovf:format='http://www.vmware.com/interfaces/specifications/vmdk.html#sparse'/>\
             <Disk ovf:diskId='d2' ovf:capacity='7'/>\
             <Disk ovf:diskId='d3' ovf:fileRef='f2' ovf:capacity='${x}' ovf:format='y'/></Section>",
        );
        let found = Descriptor::parse(&text).unwrap();
        let first = DiskEntry {
            id: "d1".into(),
            file: Some("a&b.vmdk".into()),
            missing: None,
            packed: None,
            capacity: Some(20 << 30),
            format: Some("vmdk"),
        };
        assert_eq!(found.disks[0], first);
        assert_eq!(
            (&found.disks[1].file, found.disks[1].capacity),
            (&None, Some(7))
        );
        let third = &found.disks[2];
        assert!(third.packed.is_some() && third.capacity.is_none() && third.format.is_none());
    }

    #[test]
    fn names() {
        let name = |body: &str| Descriptor::parse(&envelope(body)).unwrap().name;
        let text =
            "<Name>a</Name><VirtualSystem><Name> b &lt;c </Name><Name>d</Name></VirtualSystem>";
        assert_eq!(name(text).as_deref(), Some("b <c"));
        assert_eq!(name("<VirtualSystem/>"), None);
    }

    #[test]
    fn units() {
        for (text, bytes) in [
            ("byte", Some(1)),
            ("byte * 2^20", Some(1 << 20)),
            ("byte*10^9", Some(1_000_000_000)),
            ("GigaBytes", Some(1 << 30)),
            ("byte * 2^64", None),
            ("bit", None),
        ] {
            assert_eq!(bytes_of(text), bytes, "{text}");
        }
    }

    #[test]
    fn what_is_no_descriptor() {
        for bad in [
            "",
            "x",
            "<a/>",
            "<Envelope><a></b></Envelope>",
            "<Envelope><a></a>",
            "<Envelope><File id='&x;' href='y'/></Envelope>",
            "<!DOCTYPE a [<!ENTITY b 'c'>]><Envelope><File id='&b;' href='y'/></Envelope>",
        ] {
            Descriptor::parse(bad).unwrap_err();
        }
    }

    #[test]
    fn a_file_has_a_name_of_4096_bytes_at_most() {
        let text =
            |length: usize| envelope(&format!("<File id='a' href='{}'/>", "x".repeat(length)));
        Descriptor::parse(&text(4096)).unwrap();
        Descriptor::parse(&text(4097)).unwrap_err();
    }

    #[test]
    fn messages_have_no_control_characters() {
        let text = envelope("<Disk diskId='a' fileRef='&#27;[2J&#10;'/>");
        let disks = Descriptor::parse(&text).unwrap().disks;
        let message = disks[0].missing.as_deref().unwrap();
        assert!(message.contains(r"'\u{1b}[2J\n'"), "{message}");
    }

    proptest! {
        #[test]
        fn nothing_panics(parts in prop::collection::vec(0usize..12, 0..40)) {
            const PARTS: [&str; 12] = [
                "<Envelope>", "</Envelope>", "<File id='a' href='b'/>", "<Disk diskId='c' fileRef='a'/>",
                "<VirtualSystem>", "<Name>", "</Name>", "&lt;", "<", "'", "<![CDATA[", "]]>",
            ];
            let text: String = parts.iter().map(|part| PARTS[*part]).collect();
            let _ = Descriptor::parse(&text);
        }
    }
}
