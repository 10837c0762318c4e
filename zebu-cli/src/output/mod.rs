//! Standard output, and how things are shown.
//!
//! `printed` is for names and texts of unknown origin, `wrapped` for help; `progress` is the line of a job on a
//! terminal, which has `colours`, and `work` what there is to do.

pub mod colours;
pub mod json;
pub mod localtime;
pub mod printed;
pub mod progress;
mod work;
pub mod wrapped;

use std::io::{self, StdoutLock, Write};

pub use printed::{Shown, printable};
pub use progress::Progress;

use crate::program::{Outcome, descriptors};

/// Standard output, for a report.
///
/// # Errors
/// If it was closed when the program was started.
pub fn stdout() -> io::Result<StdoutLock<'static>> {
    match descriptors::was_closed(1) {
        true => Err(io::Error::from_raw_os_error(libc::EBADF)),
        false => Ok(io::stdout().lock()),
    }
}

/// Writes a line about what was done. An error changes neither the result nor the
/// exit status.
pub fn say(text: &(impl AsRef<[u8]> + ?Sized)) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_ref()).and_then(|()| out.flush());
}

/// Writes the report that is the command's result. If it cannot be written the
/// command fails, except if the reader has closed the pipe.
pub fn report(text: &(impl AsRef<[u8]> + ?Sized)) -> Outcome {
    try_report(text)?;
    Ok(0)
}

/// Writes a report of which the reader must have all.
///
/// # Errors
/// Those of standard output.
pub fn try_report(text: &(impl AsRef<[u8]> + ?Sized)) -> io::Result<()> {
    let mut out = stdout()?;
    out.write_all(text.as_ref())?;
    out.flush()
}
