//! Standard output.

use std::io::{self, Write};

use crate::failure::Outcome;

/// The exit status when the reader of our output has gone: that of a process
/// which SIGPIPE ended, as qemu-img's would be.
pub const CLOSED_PIPE: u8 = 128 + 13;

/// Writes a text to standard output.
pub fn print(text: &str) -> Outcome {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(0)
}
