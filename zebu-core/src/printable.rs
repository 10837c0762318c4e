//! Names and other texts of unknown origin, for people: on one line, and without effect on a
//! terminal.

/// The text, with escapes for characters that would end the line, drive a terminal, or change the
/// order in which others are shown. What is not UTF-8 is replaced.
pub fn printable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_active(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// The same for reports of bytes: what is not UTF-8 stays as it is.
pub fn printable_bytes(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    for chunk in text.utf8_chunks() {
        out.extend(printable(chunk.valid().as_bytes()).into_bytes());
        out.extend(chunk.invalid());
    }
    out
}

/// What the further lines of QEMU's messages begin with. Any other line break is one of a name.
const FURTHER_LINES: [&str; 12] = [
    "Is another process using the image [",
    "Could not open backing image.",
    "Detected format of ",
    "This option is only supported for image creation",
    "Optional suffix k, M, G, T, P or E means",
    "and exabytes, respectively.",
    "Try the 'qcow2' driver instead.",
    "Try --skip-broken-bitmaps, or use",
    "Use qemu-img amend to increase the",
    "You can force-remove ",
    "You can use 'qemu-img rebase' instead.",
    "Try block-dirty-bitmap-remove to delete",
];

/// A message, which may have names in it that were not escaped: one line, or several where QEMU has several.
pub fn printable_message(text: &str) -> String {
    let mut shown = String::new();
    for (nth, line) in text.split('\n').enumerate() {
        if nth > 0 {
            let is_further = FURTHER_LINES.iter().any(|start| line.starts_with(start));
            shown += if is_further { "\n" } else { "\\n" };
        }
        shown += &printable(line.as_bytes());
    }
    shown
}

fn is_active(c: char) -> bool {
    // Separators and marks of direction, too.
    c.is_control()
        || matches!(
            c,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
        )
        || matches!(c, '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_printable_is_escaped() {
        for (text, shown) in [
            ("disk.qcow2", "disk.qcow2"),
            ("a b\\c é 盘", "a b\\c é 盘"),
            ("\x1b[2J", "\\u{1b}[2J"),
            ("a\nb\r\t\0\x7f", "a\\nb\\r\\t\\u{0}\\u{7f}"),
            ("\u{9b}2J\u{202e}", "\\u{9b}2J\\u{202e}"),
        ] {
            assert_eq!(printable(text.as_bytes()), shown);
            assert_eq!(printable_bytes(text.as_bytes()), shown.as_bytes());
        }
        assert_eq!(printable(b"a\xff\n"), "a\u{fffd}\\n");
        assert_eq!(printable_bytes(b"a\xff\n"), b"a\xff\\n");
    }

    #[test]
    fn messages_have_the_lines_that_they_have_in_qemu() {
        for (text, shown) in [
            ("a\nb\tc", "a\\nb\\tc"),
            (
                "a\nb\nIs another process using the image [c\nd]?",
                "a\\nb\nIs another process using the image [c\\nd]?",
            ),
            (
                "a\nOptional suffix k, M, G, T, P or E means x\nand exabytes, respectively.",
                "a\nOptional suffix k, M, G, T, P or E means x\nand exabytes, respectively.",
            ),
            ("a\nDetected format of raw.", "a\nDetected format of raw."),
            ("a\n", "a\\n"),
        ] {
            assert_eq!(printable_message(text), shown);
        }
    }
}
