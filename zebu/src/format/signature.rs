//! What files of formats begin with that have no driver.
//!
//! These are facts of the formats, each from its own specification; the length
//! that is looked at is QEMU's, so that both find the same.

use std::ops::Range;

/// So many bytes from the start of a file determine its format.
pub const PROBED_BYTES: usize = 512;

/// The name of the format without a driver that a file has which begins with
/// `head` (its first [`PROBED_BYTES`], zeroes beyond its end). The names are those
/// that `-f` takes in qemu-img.
pub fn foreign_format(head: &[u8]) -> Option<&'static str> {
    let is = |at: usize, what: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(what));
    is(0, b"LUKS\xba\xbe\x00\x01").then_some("luks")
}

/// Whether a file that begins with `head` (as for [`foreign_format`]) is a tar archive, as appliances
/// (OVA) are: it has the magic of POSIX, or the checksum of a header, which older archives have, too.
pub fn is_tar(head: &[u8]) -> bool {
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
