//! Values of options: numbers, sizes, switches, and lists with commas between the items.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Why a number or a size is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeError {
    /// Not a number, or one with a wrong suffix.
    Syntax,
    /// Out of range.
    Range,
}

/// Reads `on` or `off`, by QEMU's spellings.
pub fn parse_switch(text: &str) -> Option<bool> {
    match text {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

/// Reads a whole number as strtoll(3) does with base 0: decimal, hexadecimal after `0x`, octal after
/// `0`. Unlike strtoll it takes magnitudes up to 2^64 - 1.
///
/// # Errors
///
/// [`SizeError`] if it is no such number, or out of range.
pub fn parse_integer(text: &str) -> Result<i128, SizeError> {
    let text = text.trim_start_matches(|c: char| c.is_ascii_whitespace() || c == '\x0b');
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let (base, digits) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits),
    };
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(base)) {
        return Err(SizeError::Syntax);
    }
    match u64::from_str_radix(digits, base) {
        Ok(number) => Ok(sign * i128::from(number)),
        Err(_) => Err(SizeError::Range),
    }
}

/// Reads a size in bytes as QEMU does: decimal (also with a fraction, if a suffix above one byte
/// follows) or hexadecimal, then `b`, `k`, `M`, `G`, `T`, `P` or `E` in either case, by powers of
/// 1024. Hexadecimal numbers take no suffix.
///
/// ```
/// use zebu::names::{SizeError, parse_size};
/// assert_eq!(parse_size("1.5M"), Ok(3 << 19));
/// assert_eq!(parse_size("1x"), Err(SizeError::Syntax));
/// ```
///
/// # Errors
///
/// [`SizeError`] if it is not such a size, or out of range.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let text = text.trim_start();
    let (negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let value = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(hex) if hex.is_empty() || !hex.bytes().all(|b| b.is_ascii_hexdigit()) => {
            return Err(SizeError::Syntax);
        }
        Some(hex) => u64::from_str_radix(hex, 16).map_err(|_| SizeError::Range)?,
        None => parse_decimal(digits)?,
    };
    // A zero, too.
    match negative {
        // QEMU sees no number at all where there is a suffix.
        true if digits.contains(|c: char| c.is_ascii_alphabetic()) => Err(SizeError::Syntax),
        true => Err(SizeError::Range),
        false => Ok(value),
    }
}

fn parse_decimal(text: &str) -> Result<u64, SizeError> {
    let (whole, rest) = split_digits(text);
    let (fraction, suffix) = match rest.strip_prefix('.') {
        Some(rest) => split_digits(rest),
        None => ("", rest),
    };
    if whole.is_empty() && fraction.is_empty() {
        return Err(SizeError::Syntax);
    }
    let unit = unit(suffix).ok_or(SizeError::Syntax)?;
    if unit == 1 && fraction.bytes().any(|b| b != b'0') {
        return Err(SizeError::Syntax);
    }
    let whole: u64 = match whole {
        "" => 0,
        whole => whole.parse().map_err(|_| SizeError::Range)?,
    };
    // In floating point, as QEMU has it.
    let fraction: f64 = format!("0.{fraction}0").parse().unwrap_or(0.0);
    let part = (fraction * unit as f64 + 0.5) as u64;
    let whole = whole.checked_mul(unit);
    let value = whole.and_then(|bytes| bytes.checked_add(part));
    value.ok_or(SizeError::Range)
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit());
    text.split_at(end.unwrap_or(text.len()))
}

fn unit(suffix: &str) -> Option<u64> {
    let shift = match suffix {
        "" | "b" | "B" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        "p" | "P" => 50,
        "e" | "E" => 60,
        _ => return None,
    };
    Some(1 << shift)
}

/// The first item of a list as it is written, and what follows its comma. A doubled comma is part
/// of an item.
pub fn first_item(list: &[u8]) -> (&[u8], &[u8]) {
    let mut at = 0;
    while at < list.len() {
        match (list[at], list.get(at + 1)) {
            (b',', Some(b',')) => at += 2,
            (b',', _) => return (&list[..at], &list[at + 1..]),
            _ => at += 1,
        }
    }
    (list, b"")
}

/// The value of an item of a list: a doubled comma is a comma.
pub fn unescape(item: &[u8]) -> OsString {
    let mut value = Vec::with_capacity(item.len());
    let mut bytes = item.iter();
    while let Some(byte) = bytes.next() {
        value.push(*byte);
        if *byte == b',' {
            bytes.next();
        }
    }
    OsString::from_vec(value)
}

/// The values of the items of a list, without empty ones.
pub fn split_list(list: &OsStr) -> Vec<OsString> {
    let mut items = Vec::new();
    let mut rest = list.as_bytes();
    while !rest.is_empty() {
        let (item, after) = first_item(rest);
        if !item.is_empty() {
            items.push(unescape(item));
        }
        rest = after;
    }
    items
}

#[cfg(test)]
mod tests {
    //! Guards against sizes and lists of options that are parsed differently from QEMU: a window or a
    //! cache of the wrong size, a file name with a comma.
    use super::*;

    #[test]
    fn sizes_match_qemu() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("1B", 1),
            ("1k", 1024),
            ("1m", 1 << 20),
            (" 1", 1),
            (" +5", 5),
            ("5.", 5),
            (".5k", 512),
            ("0.1k", 102),
            ("0x200", 512),
            ("1.5M", 3 << 19),
            ("15E", 15 << 60),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in [
            "", ".", ".k", "x", "1x", "1.5", "1e3", "0x", "0x1k", "--1", "1 k",
        ] {
            assert_eq!(parse_size(text), Err(SizeError::Syntax), "{text}");
        }
        for text in [
            "-0",
            "-1",
            "20E",
            "18446744073709551616",
            "99999999999999999999",
            "0x10000000000000000",
        ] {
            assert_eq!(parse_size(text), Err(SizeError::Range), "{text}");
        }
    }

    #[test]
    fn a_doubled_comma_is_a_comma() {
        let split = |text| split_list(OsStr::new(text));
        assert_eq!(split("a=1,b=x,,y,c"), ["a=1", "b=x,y", "c"]);
        assert_eq!(split(",a,,,b,"), ["a,", "b"]);
        assert!(split("").is_empty());
    }
}
