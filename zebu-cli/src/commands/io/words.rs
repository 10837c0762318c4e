//! Parsing of arguments, and messages about failed requests.

use zebu::Error;

use super::command::{Failure, Outcome};
use super::number::{MAX_REQUEST, parse_pattern};
use super::output::Output;
use crate::arguments::size::{self, SizeError};

/// Offset and total length of a command with any number of lengths.
pub fn segments(args: &[&str]) -> Result<(u64, usize), Failure> {
    let Some((offset, lengths)) = args.split_first().filter(|(_, rest)| !rest.is_empty()) else {
        return Err(Failure::Usage);
    };
    let offset = size(offset)?;
    let mut total = 0;
    for text in lengths {
        let length = size(text)?;
        if length > MAX_REQUEST {
            return Err(Failure::Out(format!(
                "Argument '{text}' exceeds maximum size {MAX_REQUEST}"
            )));
        }
        total += length;
        if total > MAX_REQUEST {
            return Err(Failure::Out(format!(
                "The total number of bytes exceed the maximum size {MAX_REQUEST}"
            )));
        }
    }
    Ok((offset, total as usize))
}

/// Parses a size.
pub fn size(text: &str) -> Result<u64, Failure> {
    size::parse(text).map_err(|error| {
        let what = match error {
            SizeError::Syntax => "non-numeric argument, or extraneous/unrecognized suffix",
            SizeError::Range => "argument too large",
        };
        Failure::Out(format!("Parsing error: {what} -- {text}"))
    })
}

/// Parses a pattern byte.
pub fn pattern(text: &str) -> Result<u8, Failure> {
    parse_pattern(text).ok_or_else(|| Failure::Out(format!("{text} is not a valid pattern byte")))
}

/// Refuses what is not whole sectors.
pub fn check_sectors(offset: u64, count: u64) -> Outcome {
    for (name, value) in [("offset", offset), ("count", count)] {
        if !value.is_multiple_of(512) {
            return Err(Failure::Out(format!(
                "{value} is not a sector-aligned value for '{name}'"
            )));
        }
    }
    Ok(())
}

/// The text of an `errno`.
pub fn strerror(errno: i32) -> String {
    zebu::strerror(&std::io::Error::from_raw_os_error(errno)).to_string()
}

/// `VERB failed: ERROR`.
pub fn failed(verb: &str, errno: i32) -> String {
    format!("{verb} failed: {}", strerror(errno))
}

/// The message of QEMU. Errors of the image are printed on standard error.
pub fn explain(out: &Output, verb: &str, error: &Error) -> String {
    if !matches!(error, Error::Io(_)) {
        out.error(error);
    }
    failed(verb, error.errno())
}
