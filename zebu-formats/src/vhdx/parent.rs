//! The parent locator of a differencing image: where the parent is, and its identity (section
//! 2.6.2.6 of the specification).

use super::fields::{Fields, Guid};
use super::refused;
use crate::Result;
use crate::drivers::open::as_path;

/// The only type of locators that the specification defines.
const VHDX: Guid = Guid::new(0xb04a_efb7_d19e_4a81_b789_25b8_e944_5913);

/// The parent of an image.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parent {
    /// The path of its file, relative to that of the image.
    pub name: String,
    /// The identities that it may have. There are two while a child is merged into it.
    pub ids: Vec<Guid>,
}

impl Parent {
    /// Decodes a parent locator.
    pub(super) fn decode(bytes: &[u8]) -> Result<Parent> {
        let fields = Fields(bytes);
        let kind = fields.guid(0);
        if kind != VHDX {
            return Err(refused(format!("Unknown type {kind} of a VHDX parent")));
        }
        let entries = (0..usize::from(fields.u16(18))).map(|index| 20 + index * 12);
        // Texts that overlap would make decoding take quadratic time.
        let lengths = |at| usize::from(fields.u16(at + 8)) + usize::from(fields.u16(at + 10));
        if entries.clone().map(lengths).sum::<usize>() > bytes.len() {
            return Err(refused("Entries of a VHDX parent overlap"));
        }
        let mut ids = Vec::new();
        let (mut relative, mut volume, mut absolute) = (None, None, None);
        for (index, at) in entries.enumerate() {
            let text = |offset: usize, length: usize| {
                let text = text(bytes, fields.u32(offset), fields.u16(length));
                text.ok_or_else(|| refused(format!("Invalid entry {index} of a VHDX parent")))
            };
            let (key, value) = (text(at, at + 8)?, text(at + 4, at + 10)?);
            match &*key {
                "parent_linkage" | "parent_linkage2" => match Guid::parse(&value) {
                    Some(id) => ids.push(id),
                    None => return Err(refused(format!("Invalid {key} of a VHDX image"))),
                },
                "relative_path" => relative = Some(value),
                "volume_path" => volume = Some(value),
                "absolute_win32_path" => absolute = Some(value),
                _ => {}
            }
        }
        if ids.is_empty() {
            return Err(refused("The identity of the VHDX parent is missing"));
        }
        let name = match (relative, absolute.or(volume)) {
            (Some(relative), _) => relative.replace('\\', "/"),
            (None, Some(absolute)) => absolute,
            (None, None) => return Err(refused("The path of the VHDX parent is missing")),
        };
        Ok(Parent {
            name: as_path(&name),
            ids,
        })
    }
}

/// A text of the locator in UTF-16.
fn text(bytes: &[u8], offset: u32, length: u16) -> Option<String> {
    let (start, length) = (offset as usize, usize::from(length));
    let bytes = bytes.get(start..start.checked_add(length)?)?;
    let (units, rest) = bytes.as_chunks();
    if units.is_empty() || !rest.is_empty() {
        return None;
    }
    let units: Vec<u16> = units.iter().map(|unit| u16::from_le_bytes(*unit)).collect();
    let text = String::from_utf16(&units).ok()?;
    (!text.contains('\0')).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "{83ED0EC3-24c8-49a6-a959-5e4bf1288bfb}";

    fn locator(entries: &[(&str, &str)]) -> Vec<u8> {
        let mut bytes = VHDX.0.to_vec();
        bytes.extend([0, 0, entries.len() as u8, 0]);
        let mut texts = Vec::new();
        let start = 20 + entries.len() * 12;
        for (key, value) in entries {
            let mut lengths = Vec::new();
            for text in [key, value] {
                bytes.extend(((start + texts.len()) as u32).to_le_bytes());
                texts.extend(text.encode_utf16().flat_map(u16::to_le_bytes));
                lengths.extend(((text.encode_utf16().count() * 2) as u16).to_le_bytes());
            }
            bytes.extend(lengths);
        }
        [bytes, texts].concat()
    }

    fn name(path: (&str, &str)) -> String {
        let parent = Parent::decode(&locator(&[("parent_linkage", ID), path])).unwrap();
        assert_eq!(parent.ids, [Guid::parse(ID).unwrap()]);
        parent.name
    }

    #[test]
    fn paths() {
        assert_eq!(name(("relative_path", r"..\a\b.vhdx")), "../a/b.vhdx");
        assert_eq!(name(("relative_path", "json:{}")), "./json:{}");
        assert_eq!(name(("absolute_win32_path", "/a/b:c")), "/a/b:c");
        assert_eq!(name(("volume_path", r"\\?\d:\b")), r"./\\?\d:\b");
        let all = [
            ("volume_path", "/v"),
            ("parent_linkage2", ID),
            ("absolute_win32_path", "/a"),
            ("relative_path", "r"),
            ("more", "text"),
            ("parent_linkage", ID),
        ];
        let parent = Parent::decode(&locator(&all)).unwrap();
        assert_eq!((&*parent.name, parent.ids.len()), ("r", 2));
    }

    #[test]
    fn damaged_locators() {
        let sound = locator(&[("parent_linkage", ID), ("relative_path", "a")]);
        assert!(Parent::decode(&sound).is_ok());
        for length in 0..sound.len() {
            assert!(Parent::decode(&sound[..length]).is_err(), "{length}");
        }
        let mut entries = vec![("parent_linkage", ID), ("relative_path", "a")];
        entries.resize(200, ("key", "value"));
        let mut overlapping = locator(&entries);
        assert!(Parent::decode(&overlapping).is_ok());
        let first = overlapping[20..32].to_vec();
        for at in (44..20 + 200 * 12).step_by(12) {
            overlapping[at..at + 12].copy_from_slice(&first);
        }
        assert!(Parent::decode(&overlapping).is_err());
        for entries in [
            &[("parent_linkage", ID)][..],
            &[("relative_path", "a")],
            &[("parent_linkage", "{}"), ("relative_path", "a")],
            &[("parent_linkage", ID), ("relative_path", "a\0")],
            &[("parent_linkage", ID), ("relative_path", "")],
        ] {
            assert!(Parent::decode(&locator(entries)).is_err(), "{entries:?}");
        }
        for at in 0..sound.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = sound.clone();
                damaged[at] = value;
                let _ = Parent::decode(&damaged);
            }
        }
    }
}
