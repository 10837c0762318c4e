//! What files of formats begin with that have no driver.
//!
//! These are facts of the formats, each from its own specification; the length
//! that is looked at is QEMU's, so that both find the same.

/// So many bytes from the start of a file determine its format.
pub const PROBED_BYTES: usize = 512;

/// The name of the format without a driver that a file has which begins with
/// `head` (its first [`PROBED_BYTES`], zeroes beyond its end). The names are those
/// that `-f` takes in qemu-img.
pub fn foreign_format(head: &[u8]) -> Option<&'static str> {
    let is = |at: usize, what: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(what));
    is(0, b"LUKS\xba\xbe\x00\x01").then_some("luks")
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
}
