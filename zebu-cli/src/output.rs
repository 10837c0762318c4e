//! Standard output.

use std::io::{self, Write};

use crate::failure::Outcome;

/// Writes a line about what was done. An error changes neither the result nor the
/// exit status.
pub fn say(text: &(impl AsRef<[u8]> + ?Sized)) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_ref()).and_then(|()| out.flush());
}

/// Writes the report that is the command's result. If it cannot be written the
/// command fails, except if the reader has closed the pipe.
pub fn report(text: &(impl AsRef<[u8]> + ?Sized)) -> Outcome {
    let mut out = io::stdout().lock();
    out.write_all(text.as_ref())?;
    out.flush()?;
    Ok(0)
}
