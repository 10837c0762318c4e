//! Texts of an appliance in the encodings that they say they have.

use zebu_core::parts::spelling::encoding;

use crate::{Result, refused};

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
    let declared = declared(&bytes).unwrap_or_default();
    if let Some(table) = encoding::table(&encoding::plain(declared.as_bytes())) {
        return Ok(bytes.into_iter().map(table).collect());
    }
    // Whatever it says: one that says UTF-16 was converted by a program that left that in it.
    String::from_utf8(bytes).or_else(|_| match &*declared {
        "" => refused(format!("The {what} is not UTF-8")),
        encoding => refused(format!(
            "The {what} is not UTF-8, and its encoding '{encoding}' is not supported"
        )),
    })
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
