//! Numbers as qemu-io parses them, and sizes as it prints them. [`crate::arguments::size`] parses sizes.

use zebu::names::parse_integer;

/// The largest number of bytes of one request: QEMU's limit, a multiple of 512
/// below 2^31.
pub const MAX_REQUEST: u64 = 0x7fff_fe00;

/// A byte to compare or fill with.
pub fn parse_pattern(text: &str) -> Option<u8> {
    parse_integer(text).ok()?.try_into().ok()
}

/// A size with the largest unit that leaves at least 1: `64 KiB`, `1.500 MiB`,
/// `512 bytes`.
pub fn human_size(bytes: f64) -> String {
    const UNITS: [&str; 6] = ["EiB", "PiB", "TiB", "GiB", "MiB", "KiB"];
    for (i, unit) in UNITS.iter().enumerate() {
        let one = (1u64 << (10 * (UNITS.len() - i))) as f64;
        if bytes >= one {
            let text = format!("{:.3}", bytes / one);
            return format!("{} {unit}", text.strip_suffix(".000").unwrap_or(&text));
        }
    }
    match bytes.fract() == 0.0 {
        true => format!("{bytes:.0} bytes"),
        false => format!("{bytes:.6} bytes"),
    }
}

#[cfg(test)]
mod tests {
    //! Guards against numbers with another meaning than in qemu-io 10.
    use super::*;
    use crate::arguments::size::{SizeError, parse as parse_size};

    #[test]
    fn sizes() {
        for (text, value) in [
            ("0", 0),
            ("1b", 1),
            ("1B", 1),
            ("4k", 4096),
            ("1.5k", 1536),
            ("0.3k", 307),
            ("1.9999999999k", 2048),
            ("0.0001k", 0),
            ("0.00000000000000000001E", 0),
            (".5k", 512),
            ("1.k", 1024),
            ("1.0", 1),
            ("010", 10),
            ("+1", 1),
            ("+0x1", 1),
            ("\t5", 5),
            ("0x10", 16),
            ("0X1b", 27),
            ("1.5E", 3 << 59),
            ("9223372036854775807", i64::MAX as u64),
            ("0x7fffffffffffffff", i64::MAX as u64),
        ] {
            assert_eq!(parse_size(text), Ok(value), "{text}");
        }
    }

    #[test]
    fn no_sizes() {
        for text in [
            "", "x", "1x", "1KB", "1e3", "0x", "0x1k", "\"0\"", "1.5", "1.5b", "0.5", "k", ".k",
            ".", "inf", "nan", "0b1", "1kk", "00x1", "++1", "5\t", "-", "1..5k", "1é",
        ] {
            assert_eq!(parse_size(text), Err(SizeError::Syntax), "{text}");
        }
        for text in [
            "-1",
            "8E",
            "20E",
            "9223372036854775808",
            "18446744073709551616",
            "0xfffffffffffffffff",
            "0xffffffffffffffffffffffffffffffffffff",
        ] {
            assert_eq!(parse_size(text), Err(SizeError::Range), "{text}");
        }
    }

    #[test]
    fn patterns() {
        for (text, value) in [
            ("0", 0),
            ("255", 255),
            ("0xab", 0xab),
            ("010", 8),
            ("+8", 8),
        ] {
            assert_eq!(parse_pattern(text), Some(value), "{text}");
        }
        for text in ["256", "-1", "zz", "0x", "4k", "8x", "08", "0b1", "", "-"] {
            assert_eq!(parse_pattern(text), None, "{text}");
        }
    }

    #[test]
    fn human_sizes() {
        for (bytes, text) in [
            (0.0, "0 bytes"),
            (1023.0, "1023 bytes"),
            (665.975006, "665.975006 bytes"),
            (1024.0, "1 KiB"),
            (1025.0, "1.001 KiB"),
            (1048575.0, "1023.999 KiB"),
            (1048577.0, "1 MiB"),
            (1073741823.0, "1024 MiB"),
            (1e12, "931.323 GiB"),
            (i64::MAX as f64, "8 EiB"),
        ] {
            assert_eq!(human_size(bytes), text);
        }
    }
}
