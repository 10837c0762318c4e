//! Numbers and GUIDs of the structures in the file, all little-endian.

use std::fmt;

use crate::Result;
use crate::drivers::random_uuid;
use crate::table::array;

/// The bytes of a structure. What is past their end reads as zero.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a>(pub &'a [u8]);

impl Fields<'_> {
    pub(super) fn u16(self, at: usize) -> u16 {
        u16::from_le_bytes(array(self.0, at))
    }

    pub(super) fn u32(self, at: usize) -> u32 {
        u32::from_le_bytes(array(self.0, at))
    }

    pub(super) fn u64(self, at: usize) -> u64 {
        u64::from_le_bytes(array(self.0, at))
    }

    pub(super) fn guid(self, at: usize) -> Guid {
        Guid(array(self.0, at))
    }
}

/// Sets a field of a structure.
pub(super) fn put(structure: &mut [u8], at: usize, field: &[u8]) {
    structure[at..at + field.len()].copy_from_slice(field);
}

/// A GUID, as it is in the file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Guid(pub [u8; 16]);

impl Guid {
    /// No GUID.
    pub(super) const NONE: Guid = Guid([0; 16]);

    /// The GUID whose text has these digits. The first three of its numbers are little-endian in
    /// the file.
    pub(super) const fn new(digits: u128) -> Guid {
        let d = digits.to_be_bytes();
        Guid([
            d[3], d[2], d[1], d[0], d[5], d[4], d[7], d[6], d[8], d[9], d[10], d[11], d[12], d[13],
            d[14], d[15],
        ])
    }

    /// A random GUID.
    pub(super) fn random() -> Result<Guid> {
        Ok(Guid::new(u128::from_be_bytes(random_uuid()?)))
    }

    /// The GUID of a text, perhaps in braces.
    pub(super) fn parse(text: &str) -> Option<Guid> {
        let text = text.strip_prefix('{').unwrap_or(text);
        let text = text.strip_suffix('}').unwrap_or(text);
        let parts: Vec<&str> = text.split('-').collect();
        let lengths = parts.iter().map(|part| part.len());
        let digits = parts.concat();
        let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !lengths.eq([8, 4, 4, 4, 12]) || !is_hex {
            return None;
        }
        u128::from_str_radix(&digits, 16).ok().map(Guid::new)
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = Fields(&self.0);
        let (a, b, c) = (fields.u32(0), fields.u16(4), fields.u16(6));
        let rest = u64::from_be_bytes(array(&self.0, 8));
        let (d, e) = (rest >> 48, rest & 0xffff_ffff_ffff);
        write!(f, "{a:08x}-{b:04x}-{c:04x}-{d:04x}-{e:012x}")
    }
}

impl fmt::Debug for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_as_text_and_in_the_file() {
        let guid = Guid::new(0x2dc2_7766_f623_4200_9d64_115e_9bfd_4a08);
        let text = "2dc27766-f623-4200-9d64-115e9bfd4a08";
        assert_eq!(
            guid.0[..8],
            [0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0x00, 0x42]
        );
        assert_eq!(
            guid.0[8..],
            [0x9d, 0x64, 0x11, 0x5e, 0x9b, 0xfd, 0x4a, 0x08]
        );
        assert_eq!(guid.to_string(), text);
        assert_eq!(
            Guid::parse(&format!("{{{}}}", text.to_uppercase())),
            Some(guid)
        );
        for wrong in ["", "{}", "2dc27766f62342009d64115e9bfd4a08", &text[1..]] {
            assert_eq!(Guid::parse(wrong), None, "{wrong}");
        }
        assert_eq!(Guid::parse("+dc27766-f623-4200-9d64-115e9bfd4a08"), None);
    }
}
