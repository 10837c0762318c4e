//! Sizes as users write them and as reports show them.

use std::ops::RangeInclusive;

/// Why a size is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeError {
    /// Not a number with at most one suffix.
    Syntax,
    /// Below zero or above 2^63 - 1.
    Range,
}

/// Reads a size in bytes: decimal (also with a fraction, if a suffix above
/// one byte follows) or hexadecimal, then `b`, `k`, `M`, `G`, `T`, `P` or `E`
/// in either case, by powers of 1024.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let text = text.trim_start();
    let (negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let value = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(hex) => parse_hex(hex)?,
        None => parse_decimal(digits)?,
    };
    match u64::try_from(value) {
        Ok(value) if value <= i64::MAX as u64 && (!negative || value == 0) => Ok(value),
        _ => Err(SizeError::Range),
    }
}

/// Hexadecimal numbers take no fraction and no suffix.
fn parse_hex(text: &str) -> Result<u128, SizeError> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(SizeError::Syntax);
    }
    u64::from_str_radix(text, 16)
        .map(u128::from)
        .map_err(|_| SizeError::Range)
}

fn parse_decimal(text: &str) -> Result<u128, SizeError> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (whole, rest) = text.split_at(end);
    let (fraction, suffix) = split_fraction(rest);
    if whole.is_empty() && fraction.is_none_or(str::is_empty) {
        return Err(SizeError::Syntax);
    }
    let unit = unit(suffix).ok_or(SizeError::Syntax)?;
    let whole: u128 = if whole.is_empty() {
        0
    } else {
        u128::from(whole.parse::<u64>().map_err(|_| SizeError::Range)?)
    };
    let mut value = whole * u128::from(unit);
    if let Some(fraction) = fraction {
        if unit == 1 && fraction.bytes().any(|b| b != b'0') {
            return Err(SizeError::Syntax);
        }
        value += fraction_of(fraction, unit);
    }
    Ok(value)
}

fn split_fraction(text: &str) -> (Option<&str>, &str) {
    match text.strip_prefix('.') {
        Some(rest) => {
            let end = rest
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(rest.len());
            (Some(&rest[..end]), &rest[end..])
        }
        None => (None, text),
    }
}

/// `0.digits` of `unit`, rounded to the nearest byte.
fn fraction_of(digits: &str, unit: u64) -> u128 {
    // Eighteen digits are finer than a byte in an exbibyte.
    let digits = &digits[..digits.len().min(18)];
    let Ok(value) = digits.parse::<u128>() else {
        return 0;
    };
    let scale = 10u128.pow(digits.len() as u32);
    (value * u128::from(unit) + scale / 2) / scale
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

/// The message of qemu-img for a size that is wrong: `what` is "image size",
/// "start offset" and the like.
pub fn parse_option(what: &str, text: &str) -> Result<u64, String> {
    parse_within(what, text, 0..=i64::MAX as u64)
}

/// The same for a number that has other bounds.
pub fn parse_within(what: &str, text: &str, bounds: RangeInclusive<u64>) -> Result<u64, String> {
    match parse(text) {
        Ok(number) if bounds.contains(&number) => Ok(number),
        Err(SizeError::Syntax) => Err(format!("Invalid {what} specified: '{text}'.")),
        Ok(_) | Err(SizeError::Range) => {
            let (least, most) = bounds.into_inner();
            Err(format!(
                "Invalid {what} specified. Must be between {least} and {most}."
            ))
        }
    }
}

/// A size with three significant digits and a binary unit, as QEMU's reports
/// have it: `1.5 GiB`.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    // The unit under which the number stays below 1000 after rounding.
    let mut unit = 0;
    let mut value = bytes as f64;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}B", three_digits(value), UNITS[unit])
}

/// C's `%0.3g` for numbers of 0 and from about 0.9 to 9999.
fn three_digits(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let text = format!("{value:.2e}");
    let exponent: i32 = text
        .split('e')
        .nth(1)
        .and_then(|e| e.parse().ok())
        .unwrap_or(0);
    if exponent >= 3 {
        // As %g has it: 1e+03.
        let mantissa = text.split('e').next().unwrap_or("1");
        return format!("{}e+{exponent:02}", trim_zeroes(mantissa));
    }
    let decimals = (2 - exponent).max(0) as usize;
    trim_zeroes(&format!("{value:.decimals$}")).to_string()
}

fn trim_zeroes(text: &str) -> &str {
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_suffixes() {
        assert_eq!(parse("0"), Ok(0));
        assert_eq!(parse("512"), Ok(512));
        assert_eq!(parse("1k"), Ok(1024));
        assert_eq!(parse("1.5G"), Ok(3 << 29));
        assert_eq!(parse("0x10"), Ok(16));
        assert_eq!(parse("0x1k"), Err(SizeError::Syntax));
        assert_eq!(parse(".5k"), Ok(512));
        assert_eq!(parse("5."), Ok(5));
        assert_eq!(parse(" +5"), Ok(5));
        assert_eq!(parse("7E"), Ok(7 << 60));
        assert_eq!(parse("8E"), Err(SizeError::Range));
        assert_eq!(parse("-1"), Err(SizeError::Range));
        assert_eq!(parse("1x"), Err(SizeError::Syntax));
        assert_eq!(parse(""), Err(SizeError::Syntax));
        assert_eq!(parse("1.5"), Err(SizeError::Syntax));
        assert_eq!(parse("99999999999999999999"), Err(SizeError::Range));
    }

    #[test]
    fn reports_have_three_digits() {
        assert_eq!(human(0), "0 B");
        assert_eq!(human(512), "512 B");
        assert_eq!(human(999), "999 B");
        assert_eq!(human(1000), "0.977 KiB");
        assert_eq!(human(1 << 20), "1 MiB");
        assert_eq!(human(331_776), "324 KiB");
        assert_eq!(human(3_000_000), "2.86 MiB");
        assert_eq!(human(10 << 30), "10 GiB");
        assert_eq!(human(1000 << 20), "0.977 GiB");
        assert_eq!(human(1_023_488), "1e+03 KiB");
    }
}
