//! Standard output.

use std::io::{self, Write};

use crate::failure::Outcome;

/// Writes a line about what was done. That it cannot be written changes nothing
/// of what was done, nor of the exit status.
pub fn say(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Writes a report: what the command was run for. If it cannot be written the
/// command has failed, unless the reader has closed its end and wants no more.
pub fn report(text: &str) -> Outcome {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(0)
}
