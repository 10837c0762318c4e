//! Texts of an appliance in the encodings that they say they have.

use crate::{Result, refused};

/// The characters of windows-1252 from 0x80 to 0x9f.
const WINDOWS_1252: &str = "\u{20ac}\u{81}\u{201a}\u{192}\u{201e}\u{2026}\u{2020}\u{2021}\u{2c6}\u{2030}\
    \u{160}\u{2039}\u{152}\u{8d}\u{17d}\u{8f}\u{90}\u{2018}\u{2019}\u{201c}\u{201d}\u{2022}\u{2013}\
    \u{2014}\u{2dc}\u{2122}\u{161}\u{203a}\u{153}\u{9d}\u{17e}\u{178}";
/// The bytes of ISO 8859-15 that differ from ISO 8859-1, and what they mean.
const LATIN_9: [(u8, char); 8] = [
    (0xa4, '\u{20ac}'),
    (0xa6, '\u{160}'),
    (0xa8, '\u{161}'),
    (0xb4, '\u{17d}'),
    (0xb8, '\u{17e}'),
    (0xbc, '\u{152}'),
    (0xbd, '\u{153}'),
    (0xbe, '\u{178}'),
];

/// The text of a descriptor or a manifest (`what`): by its byte order mark, by zeroes of UTF-16, by its XML
/// declaration, else in UTF-8.
pub(crate) fn decode(bytes: Vec<u8>, what: &str) -> Result<String> {
    let big = u16::from_be_bytes;
    let little = u16::from_le_bytes;
    match &*bytes {
        [0xfe, 0xff, rest @ ..] => return utf16(rest, big, what),
        [0xff, 0xfe, rest @ ..] => return utf16(rest, little, what),
        [0, first, ..] if *first != 0 => return utf16(&bytes, big, what),
        [first, 0, ..] if *first != 0 => return utf16(&bytes, little, what),
        _ => {}
    }
    let encoding = declared(&bytes).unwrap_or_default();
    let plain: String = encoding
        .chars()
        .filter(|c| c.is_ascii_alphanumeric())
        .collect();
    let table: fn(u8) -> char = match &*plain.to_ascii_lowercase() {
        "iso88591" | "latin1" => char::from,
        "iso885915" | "latin9" => |byte| {
            let found = LATIN_9.iter().find(|(from, _)| *from == byte);
            found.map_or(char::from(byte), |(_, to)| *to)
        },
        "windows1252" | "cp1252" => |byte| {
            let special = usize::from(byte).checked_sub(0x80);
            let special = special.and_then(|nth| WINDOWS_1252.chars().nth(nth));
            special.unwrap_or(char::from(byte))
        },
        // Whatever it says: one that says UTF-16 was converted by a program that left that in it.
        _ => {
            let text = String::from_utf8(bytes);
            return text.or_else(|_| match &*encoding {
                "" => refused(format!("The {what} is not UTF-8")),
                encoding => refused(format!(
                    "The {what} is not UTF-8, and its encoding '{encoding}' is not supported"
                )),
            });
        }
    };
    Ok(bytes.into_iter().map(table).collect())
}

fn utf16(bytes: &[u8], number: fn([u8; 2]) -> u16, what: &str) -> Result<String> {
    let (units, rest) = bytes.as_chunks();
    let units: Vec<u16> = units.iter().map(|unit| number(*unit)).collect();
    match String::from_utf16(&units) {
        Ok(text) if rest.is_empty() => Ok(text),
        _ => refused(format!("The {what} is not valid UTF-16")),
    }
}

/// The encoding in the XML declaration that a text begins with.
fn declared(bytes: &[u8]) -> Option<String> {
    let rest = bytes.trim_ascii_start().strip_prefix(b"<?xml")?;
    let end = rest.iter().take(256).position(|byte| *byte == b'>')?;
    let text = str::from_utf8(&rest[..end]).ok()?;
    let value = text
        .split_once("encoding")?
        .1
        .trim_start()
        .strip_prefix('=')?;
    let value = value.trim_start();
    let quote = value.chars().next().filter(|c| ['"', '\''].contains(c))?;
    Some(value[1..].split_once(quote)?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings() {
        let xml = |encoding: &str| format!("<?xml version='1.0' encoding = \"{encoding}\"?><a>");
        let with = |encoding: &str, bytes: &[u8]| {
            let text = [xml(encoding).as_bytes(), bytes].concat();
            let decoded = decode(text, "descriptor").ok()?;
            Some(decoded.strip_prefix(&xml(encoding)).unwrap().to_owned())
        };
        assert_eq!(
            with("UTF-8", "\u{e4}".as_bytes()).as_deref(),
            Some("\u{e4}")
        );
        assert_eq!(with("UTF-16", b"x").as_deref(), Some("x"));
        assert_eq!(
            with("ISO-8859-1", b"\xe4\x80").as_deref(),
            Some("\u{e4}\u{80}")
        );
        assert_eq!(with("iso-8859-15", b"\xa4").as_deref(), Some("\u{20ac}"));
        assert_eq!(
            with("windows-1252", b"\xe4\x80").as_deref(),
            Some("\u{e4}\u{20ac}")
        );
        assert_eq!(with("UTF-8", b"\xe4"), None);
        assert_eq!(with("GBK", b"\xe4"), None);
        let text = "<a>\u{1f600}";
        let units: Vec<u16> = text.encode_utf16().collect();
        let big: Vec<u8> = units.iter().flat_map(|unit| unit.to_be_bytes()).collect();
        let little: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        for bytes in [
            big.clone(),
            little.clone(),
            [&[0xfe, 0xff][..], &big].concat(),
            [&[0xff, 0xfe][..], &little].concat(),
        ] {
            assert_eq!(decode(bytes, "descriptor").unwrap(), text);
        }
        decode(vec![0xff, 0xfe, 0], "descriptor").unwrap_err();
        decode(vec![0xff, 0xfe, 0, 0xd8], "descriptor").unwrap_err();
    }
}
