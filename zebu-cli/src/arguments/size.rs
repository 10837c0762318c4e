//! Sizes as users write them and as reports show them.

use std::ops::RangeInclusive;

pub use zebu::internal::new_image::parse_file_size as parse;
pub use zebu::names::SizeError;
use zebu::names::parse_integer;

use crate::output::printable;
use crate::program::Failure;

/// The message of qemu-img for a size that is wrong: `what` is "image size",
/// "start offset" and the like.
pub fn parse_option(what: &str, text: &str) -> Result<u64, Failure> {
    parse_within(what, text, 0..=i64::MAX as u64)
}

/// The same for a size that has other bounds.
pub fn parse_within(what: &str, text: &str, bounds: RangeInclusive<u64>) -> Result<u64, Failure> {
    within(what, text, parse(text), bounds)
}

/// The same for a number, which is an integer of C and has no suffix.
pub fn parse_number(what: &str, text: &str, bounds: RangeInclusive<u64>) -> Result<u64, Failure> {
    let number = parse_integer(text);
    let number = number.and_then(|number| number.try_into().map_err(|_| SizeError::Range));
    within(what, text, number, bounds)
}

/// A number as C's strtol reads it: blanks may come first, and nothing behind it. The error is for clap.
pub fn number<T: TryFrom<i128>>(text: &str) -> Result<T, String> {
    let wrong = || {
        format!(
            "'{}' is no number that is possible here",
            printable(text.as_bytes())
        )
    };
    let number = parse_integer(text).map_err(|_| wrong())?;
    number.try_into().map_err(|_| wrong())
}

fn within(
    what: &str,
    text: &str,
    parsed: Result<u64, SizeError>,
    bounds: RangeInclusive<u64>,
) -> Result<u64, Failure> {
    let mut next = String::new();
    let bad = match parsed {
        Ok(number) if bounds.contains(&number) => return Ok(number),
        Err(SizeError::Syntax) => {
            next = how_to_write(text);
            format!(": '{text}'")
        }
        Ok(_) | Err(SizeError::Range) => {
            format!(". Must be between {} and {}.", bounds.start(), bounds.end())
        }
    };
    Err(Failure::new(format!("Invalid {what} specified{bad}")).with_next(next))
}

/// How a size is written that was written in another way: `10GB` as `10G`.
fn how_to_write(text: &str) -> String {
    let text = text.trim();
    let start = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number = start.trim_end();
    let unit = &text[start.len()..];
    let letter = unit.chars().next().filter(|c| "kKmMgGtTpPeE".contains(*c));
    let is_unit = ["", "b", "ib"].contains(&unit.get(1..).unwrap_or("?").to_lowercase().as_str());
    match letter.filter(|_| is_unit && parse(number).is_ok()) {
        Some(letter) => format!(
            "say {number}{}: units are k, M, G, T, P and E, by powers of 1024",
            match letter {
                'k' | 'K' => 'k',
                other => other.to_ascii_uppercase(),
            }
        ),
        None => {
            "a size is a number of bytes, or one with k, M, G, T, P or E by powers of 1024: 10G"
                .into()
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

/// A number of things: `1 piece`, `2 pieces`.
pub fn counted(number: u64, thing: &str) -> String {
    let end = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{end}")
}

/// A part of a whole.
pub fn percent(part: u64, whole: u64) -> String {
    format!("{:.1} %", part as f64 * 100.0 / whole.max(1) as f64)
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
    fn sizes_fit_a_file_offset() {
        assert_eq!(parse("7E"), Ok(7 << 60));
        assert_eq!(parse("8E"), Err(SizeError::Range));
        assert_eq!(parse("1x"), Err(SizeError::Syntax));
    }

    #[test]
    fn units_are_corrected() {
        for (text, said) in [
            ("10GB", "10G"),
            ("5 MiB", "5M"),
            ("1kb", "1k"),
            ("2 T", "2T"),
        ] {
            assert!(
                how_to_write(text).starts_with(&format!("say {said}:")),
                "{text}"
            );
        }
        for text in ["", "GB", "10XB", "abc", "10GBx"] {
            assert!(!how_to_write(text).starts_with("say"), "{text}");
        }
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
