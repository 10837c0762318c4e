//! `--pid-file`: a file with the number of a server's process.
//!
//! What is there is replaced only if it is such a file, or empty: a wrong name costs no data.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use zebu::block::Device;

use crate::images::same_file;
use crate::output::Shown;
use crate::program::{Context, Failure};

/// Bytes of such a file at most.
const MOST: usize = 32;

/// The file with the process's number, which goes with the process.
pub struct PidFile(Option<PathBuf>);

impl PidFile {
    /// Writes it, if one is wanted. `devices` are those that are served.
    ///
    /// # Errors
    ///
    /// It is a file that the server reads, or one with other content; or it cannot be written.
    pub fn write<'a>(
        context: &Context,
        path: Option<&OsStr>,
        devices: impl Iterator<Item = &'a Device>,
    ) -> Result<Self, Failure> {
        let Some(path) = path else {
            return Ok(PidFile(None));
        };
        let refused = |why: &str| {
            let text = format!("Cannot write pid file {}: {why}", path.shown());
            Failure::new(text)
        };
        let path = Path::new(path);
        if let Some(why) = same_file::refused_beside(context, devices, path) {
            return Err(refused(why));
        }
        let written = replace(path).map_err(|e| refused(&zebu::strerror(&e).to_string()))?;
        match written {
            Written::New(path) => Ok(PidFile(path)),
            Written::Other(why) => Err(refused(why)),
        }
    }
}

/// What came of writing it.
enum Written {
    /// It is there, at this name if it is to be removed.
    New(Option<PathBuf>),
    /// Something else is, and why that stays.
    Other(&'static str),
}

fn replace(path: &Path) -> io::Result<Written> {
    let line = format!("{}\n", std::process::id());
    if let Ok(file) = fs::metadata(path)
        && !file.is_file()
    {
        let kind = file.file_type();
        if !kind.is_fifo() && !kind.is_char_device() {
            return Ok(Written::Other("it is not a regular file"));
        }
        // A pipe takes the number, and stays.
        fs::write(path, line)?;
        return Ok(Written::New(None));
    }
    let mut how = File::options();
    // Nothing is lost before the content was looked at; nor does what has become a pipe meanwhile
    // stop the server.
    how.read(true).write(true).create(true).truncate(false);
    let mut file = how.custom_flags(libc::O_NONBLOCK).open(path)?;
    let mut old = Vec::new();
    (&file).take(MOST as u64 + 1).read_to_end(&mut old)?;
    if !file.metadata()?.is_file() || !is_number(&old) {
        let why =
            "it is there, and has not the number of a process: remove it, or name another one";
        return Ok(Written::Other(why));
    }
    file.rewind()?;
    file.write_all(line.as_bytes())?;
    file.set_len(line.len() as u64)?;
    // A link stays where it is. A server that runs in the background is elsewhere at the end.
    Ok(Written::New(Some(fs::canonicalize(path)?)))
}

/// Whether a file has the number of a process, as any server writes it, or nothing.
fn is_number(content: &[u8]) -> bool {
    content.len() <= MOST && content.trim_ascii().iter().all(u8::is_ascii_digit)
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let Some(path) = &self.0 else { return };
        // Another server may have replaced it meanwhile.
        let own = format!("{}\n", std::process::id());
        let is_as_long = |file: fs::Metadata| file.is_file() && file.len() == own.len() as u64;
        if fs::symlink_metadata(path).is_ok_and(is_as_long)
            && fs::read(path).is_ok_and(|now| now == own.as_bytes())
        {
            // Gone already is as good.
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a file that is lost because it was named by mistake.
    use super::*;

    #[test]
    fn only_numbers_are_replaced() {
        for own in [&b""[..], b"1", b"4711\n", b" 42 \n"] {
            assert!(is_number(own));
        }
        let zeroes = [0; 512];
        let others: [&[u8]; 4] = [b"QFI\xfb", &zeroes, b"12 13\n", &[b'1'; MOST + 1]];
        assert!(!others.into_iter().any(is_number));
    }
}
