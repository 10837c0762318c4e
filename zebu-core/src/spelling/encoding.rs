//! Encodings of one byte for each character, which descriptors of other programs are written in.

/// A byte's character.
pub type Table = fn(u8) -> char;

/// The characters of windows-1252 from 0x80 to 0x9f; of the bytes that it lacks, the controls that
/// ISO 8859-1 has there.
const WINDOWS_1252: [char; 32] = [
    '\u{20ac}', '\u{81}', '\u{201a}', '\u{192}', '\u{201e}', '\u{2026}', '\u{2020}', '\u{2021}',
    '\u{2c6}', '\u{2030}', '\u{160}', '\u{2039}', '\u{152}', '\u{8d}', '\u{17d}', '\u{8f}',
    '\u{90}', '\u{2018}', '\u{2019}', '\u{201c}', '\u{201d}', '\u{2022}', '\u{2013}', '\u{2014}',
    '\u{2dc}', '\u{2122}', '\u{161}', '\u{203a}', '\u{153}', '\u{9d}', '\u{17e}', '\u{178}',
];

/// An encoding's name without what spellings differ in: case and punctuation.
pub fn plain(name: &[u8]) -> Vec<u8> {
    let plain = name.iter().filter(|byte| byte.is_ascii_alphanumeric());
    plain.map(u8::to_ascii_lowercase).collect()
}

/// The encoding of this [`plain`] name, if it is one of these.
pub fn table(plain: &[u8]) -> Option<Table> {
    Some(match plain {
        b"windows1252" | b"cp1252" => |byte| {
            let special = WINDOWS_1252.get(usize::from(byte.wrapping_sub(0x80)));
            special.copied().unwrap_or(char::from(byte))
        },
        b"iso88591" | b"latin1" => char::from,
        b"iso885915" | b"latin9" => |byte| match byte {
            0xa4 => '\u{20ac}',
            0xa6 => '\u{160}',
            0xa8 => '\u{161}',
            0xb4 => '\u{17d}',
            0xb8 => '\u{17e}',
            0xbc => '\u{152}',
            0xbd => '\u{153}',
            0xbe => '\u{178}',
            _ => char::from(byte),
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters() {
        let decode = |name: &str, bytes: &[u8]| {
            let table = table(&plain(name.as_bytes()))?;
            Some(bytes.iter().map(|byte| table(*byte)).collect::<String>())
        };
        for (name, bytes, text) in [
            (
                "windows-1252",
                &b"a\x80\x81\xe4"[..],
                "a\u{20ac}\u{81}\u{e4}",
            ),
            ("CP_1252", b"\x9f\xa0", "\u{178}\u{a0}"),
            ("ISO-8859-1", b"\x80\xff", "\u{80}\u{ff}"),
            ("iso_8859-15", b"\xa4\xa5", "\u{20ac}\u{a5}"),
        ] {
            assert_eq!(decode(name, bytes).as_deref(), Some(text), "{name}");
        }
        assert_eq!(decode("GBK", b"a"), None);
    }
}
