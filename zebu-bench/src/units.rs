//! Sizes, times and ratios: reading them from the command line and writing them in tables.

use crate::error::{Error, Result};

/// One kibibyte.
pub const KIB: u64 = 1 << 10;
/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;
/// One tebibyte.
pub const TIB: u64 = 1 << 40;

/// Reads a size as qemu-img does: a number with an optional suffix k, M, G or T.
pub fn parse_size(text: &str) -> Result<u64> {
    let bad = || Error::new(format!("'{text}' is no size (a number with k, M, G or T)"));
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(bad()),
    };
    let number: u64 = digits.parse().map_err(|_| bad())?;
    number.checked_mul(1 << shift).ok_or_else(bad)
}

/// Writes a size with the largest suffix that leaves it whole: `64K`, `1G`, `1536M`.
pub fn size(bytes: u64) -> String {
    for (unit, suffix) in [(TIB, 'T'), (GIB, 'G'), (MIB, 'M'), (KIB, 'K')] {
        if bytes >= unit && bytes.is_multiple_of(unit) {
            return format!("{}{suffix}", bytes / unit);
        }
    }
    bytes.to_string()
}

/// Writes a figure with three or four significant digits: `12,345`, `12.3`, `0.123`.
pub fn figure(v: f64) -> String {
    match v {
        v if v >= 1000.0 => thousands(v),
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

/// Writes a whole number with commas between thousands.
pub fn thousands(v: f64) -> String {
    let digits = format!("{v:.0}");
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Writes a ratio: `3.21×`.
pub fn ratio(r: f64) -> String {
    if r.is_finite() {
        format!("{r:.2}×")
    } else {
        "—".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_qemu_img_reads_them() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("64k"), Ok(64 * KIB));
        assert_eq!(parse_size("2G"), Ok(2 * GIB));
        assert_eq!(parse_size("8T"), Ok(8 * TIB));
        assert!(parse_size("").is_err());
        assert!(parse_size("G").is_err());
        assert!(parse_size("1X").is_err());
        assert!(parse_size("99999999999T").is_err());
    }

    #[test]
    fn sizes_are_written_with_the_largest_whole_suffix() {
        assert_eq!(size(GIB), "1G");
        assert_eq!(size(GIB + 512 * MIB), "1536M");
        assert_eq!(size(8 * TIB), "8T");
        assert_eq!(size(1000), "1000");
        assert_eq!(size(0), "0");
    }

    #[test]
    fn figures_and_ratios_are_short() {
        assert_eq!(figure(1_234_567.0), "1,234,567");
        assert_eq!(figure(999.4), "999");
        assert_eq!(figure(12.345), "12.3");
        assert_eq!(figure(1.23456), "1.23");
        assert_eq!(figure(0.01234), "0.012");
        assert_eq!(ratio(3.216), "3.22×");
        assert_eq!(ratio(f64::NAN), "—");
    }
}
