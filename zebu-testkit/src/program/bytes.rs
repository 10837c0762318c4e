//! Text that represents any bytes: U+E080 to U+E0FF are the bytes 0x80 to 0xFF. So file names that
//! are not UTF-8 can be written, compared and printed like others.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

/// The bytes that a text represents.
pub fn os(text: &str) -> OsString {
    let mut bytes = Vec::with_capacity(text.len());
    for c in text.chars() {
        match u32::from(c) {
            code @ 0xe080..=0xe0ff => bytes.push(code as u8),
            _ => bytes.extend(c.encode_utf8(&mut [0; 4]).bytes()),
        }
    }
    OsString::from_vec(bytes)
}

/// The text that represents these bytes.
pub fn text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        let stray = chunk.invalid().iter();
        text.extend(stray.filter_map(|byte| char::from_u32(0xe000 + u32::from(*byte))));
    }
    text
}
