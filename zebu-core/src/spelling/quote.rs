//! Names as strings of JSON, as QEMU writes them.

/// A name in Unicode, as QEMU writes it into JSON: U+FFFD for each invalid sequence, whose length
/// follows from its first byte (up to six bytes) or from the next character.
fn json_text(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    let mut rest = name;
    while let [first, after @ ..] = rest {
        let announced = match first.leading_ones() {
            more @ 2..=6 => more as usize - 1,
            _ => 0,
        };
        let continued = after.iter().take(announced);
        let length = 1 + continued.take_while(|b| **b & 0xc0 == 0x80).count();
        let (sequence, after) = rest.split_at(length);
        match std::str::from_utf8(sequence) {
            Ok(c) if !c.contains(is_noncharacter) => text.push_str(c),
            // The zero byte of "modified UTF-8".
            _ if sequence == [0xc0, 0x80] => text.push('\0'),
            _ => text.push(char::REPLACEMENT_CHARACTER),
        }
        rest = after;
    }
    text
}

/// Whether it is a noncharacter of Unicode, which QEMU takes for invalid.
fn is_noncharacter(c: char) -> bool {
    let code = u32::from(c);
    (0xfdd0..=0xfdef).contains(&code) || code & 0xfffe == 0xfffe
}

/// A string as QEMU writes it into JSON, in quotes: ASCII, with `\uXXXX` for the rest.
pub fn json_string(text: &[u8]) -> String {
    let text = json_text(text);
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{c}' => quoted.push_str("\\f"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            ' '..='~' => quoted.push(c),
            c => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    quoted.push_str(&format!("\\u{unit:04X}"));
                }
            }
        }
    }
    quoted.push('"');
    quoted
}
