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
    let by_bytes: [(&str, usize, &[u8]); 10] = [
        ("qcow", 0, b"QFI\xfb\0\0\0\x01"),
        ("bochs", 0, b"Bochs Virtual HD Image\0"),
        (
            "cloop",
            0,
            b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0",
        ),
        ("luks", 0, b"LUKS\xba\xbe\x00\x01"),
        ("parallels", 0, b"WithoutFreeSpace\x02\0\0\0"),
        ("parallels", 0, b"WithouFreSpacExt\x02\0\0\0"),
        ("qed", 0, b"QED\0"),
        ("vmdk", 0, b"COWD"),
        ("vmdk", 0, b"KDMV"),
        ("vpc", 0, b"conectix"),
    ];
    let found = by_bytes.iter().find(|(_, at, what)| is(*at, what));
    match found {
        Some((name, ..)) => Some(name),
        None => is_vmdk_text(head).then_some("vmdk"),
    }
}

/// Whether it is the text that describes a VMDK of several files: comments and
/// empty lines, then its version.
fn is_vmdk_text(head: &[u8]) -> bool {
    let is_filler = |line: &&[u8]| line.starts_with(b"#") || line.iter().all(|b| *b == b' ');
    // The last piece has no end in what is looked at.
    let mut lines: Vec<&[u8]> = head.split(|b| *b == b'\n').collect();
    lines.pop();
    let mut lines = lines
        .iter()
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    matches!(
        lines.find(|line| !is_filler(line)),
        Some(b"version=1" | b"version=2" | b"version=3")
    )
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
            (0, &b"QFI\xfb\0\0\0\x01"[..], Some("qcow")),
            (0, b"QFI\xfb\0\0\0\0", None),
            (0, b"KDMV\x01", Some("vmdk")),
            (0, b"# Disk DescriptorFile\nversion=1\nCID=0", Some("vmdk")),
            (0, b"# Disk\r\n  \r\n#\r\nversion=3\r\n", Some("vmdk")),
            (0, b"# Disk\nversion=4\n", None),
            (0, b"# Disk\nversion=1", None),
            (0, b"#!/bin/sh\necho\nversion=1\n", None),
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
