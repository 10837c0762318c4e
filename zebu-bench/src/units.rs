//! Sizes, times and ratios as tables have them.

/// One kibibyte.
pub const KIB: u64 = 1 << 10;
/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;
/// One tebibyte.
pub const TIB: u64 = 1 << 40;

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
