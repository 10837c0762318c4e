//! Names that are streams: `-`, and pipes and sockets by name.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

use rustix::fs::OFlags;
use zebu::names::protocol;

use crate::arguments::file_name::after_file;
use crate::program::descriptors::was_closed;

/// Standard input or output.
pub const STANDARD: &str = "-";

/// What a source is.
pub enum Input {
    /// It is read once, in order.
    Stream(File),
    /// A file of this name.
    File(OsString),
}

/// What the name of a source means.
///
/// # Errors
/// If it cannot be opened.
pub fn input(name: &OsStr) -> io::Result<Input> {
    let file = match descriptor(name, 0) {
        Some(number) => duplicate(number)?,
        None if is_stream(name) => File::open(path(name))?,
        None => return Ok(Input::File(name.to_owned())),
    };
    let kind = file.metadata()?.file_type();
    // What precedes the position of standard input is not part of it. A name leads to the whole file.
    let is_file = kind.is_file() && (name != STANDARD || (&file).stream_position()? == 0);
    match kind.is_block_device() || is_file {
        true => Ok(Input::File(real_name(name, 0))),
        false => Ok(Input::Stream(file)),
    }
}

/// The stream that is written, if the name of a target is one.
///
/// # Errors
/// If it cannot be opened.
pub fn output(name: &OsStr) -> io::Result<Option<File>> {
    match descriptor(name, 1) {
        Some(number) => {
            let file = duplicate(number)?;
            let is_file = file.metadata()?.file_type().is_file();
            // Standard output may be at the end of a file that others write to as well.
            Ok((number == 1 || !is_file).then_some(file))
        }
        None if is_stream(name) => OpenOptions::new().write(true).open(path(name)).map(Some),
        None => Ok(None),
    }
}

/// Whether a name is that of an open file that has content. To make it empty, as a new image does,
/// takes a name of the file itself.
pub fn is_open_file(name: &OsStr) -> bool {
    let number = descriptor(name, 1).filter(|_| name != STANDARD);
    let metadata = number.and_then(|_| fs::metadata(path(name)).ok());
    metadata.is_some_and(|metadata| metadata.is_file() && metadata.len() > 0)
}

/// Whether it is a file of which old content would stay behind what is written: one with bytes behind
/// its position, that is not written at its end.
///
/// # Errors
/// Those of fstat(2), lseek(2) and fcntl(2).
pub fn has_content_behind(mut file: &File) -> io::Result<bool> {
    let metadata = file.metadata()?;
    if !metadata.is_file() || rustix::fs::fcntl_getfl(file)?.contains(OFlags::APPEND) {
        return Ok(false);
    }
    Ok(file.stream_position()? < metadata.len())
}

/// The open descriptor that a name means; `-` is `standard`.
fn descriptor(name: &OsStr, standard: RawFd) -> Option<RawFd> {
    if name == STANDARD {
        return Some(standard);
    }
    match path(name).to_str()? {
        "/dev/stdin" => Some(0),
        "/dev/stdout" => Some(1),
        "/dev/stderr" => Some(2),
        path => {
            let folders = ["/dev/fd/", "/proc/self/fd/", "/proc/thread-self/fd/"];
            let number = folders
                .iter()
                .find_map(|folder| path.strip_prefix(folder))?;
            number.parse().ok().filter(|number| *number >= 0)
        }
    }
}

fn path(name: &OsStr) -> &OsStr {
    after_file(name).unwrap_or(name)
}

/// Whether a name is that of a pipe or a socket.
fn is_stream(name: &OsStr) -> bool {
    if after_file(name).is_none() && protocol(name).is_some() {
        return false;
    }
    let kind = fs::metadata(path(name)).map(|metadata| metadata.file_type());
    kind.is_ok_and(|kind| kind.is_fifo() || kind.is_socket())
}

/// The name of the open file behind a name, if it still has one.
fn real_name(name: &OsStr, standard: RawFd) -> OsString {
    let Some(number) = descriptor(name, standard) else {
        return name.to_owned();
    };
    let link = format!("/proc/self/fd/{number}");
    let same = |path: &fs::Metadata, file: &fs::Metadata| {
        (path.dev(), path.ino()) == (file.dev(), file.ino())
    };
    match (fs::read_link(&link), fs::metadata(&link)) {
        (Ok(path), Ok(file)) if fs::metadata(&path).is_ok_and(|p| same(&p, &file)) => path.into(),
        _ => link.into(),
    }
}

/// Another descriptor of an open file.
#[allow(unsafe_code)]
fn duplicate(number: RawFd) -> io::Result<File> {
    if was_closed(number) {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: fcntl(2) checks the descriptor, which nothing here closes.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, as just checked.
    let open = unsafe { BorrowedFd::borrow_raw(number) };
    open.try_clone_to_owned().map(File::from)
}

/// Makes what was written to a regular file or a block device durable, and the name of the file: what
/// cannot be stored is an error now. Whatever else it is has nothing to store.
///
/// # Errors
/// Those of fsync(2).
pub fn make_durable(file: &File) -> io::Result<()> {
    let kind = file.metadata()?.file_type();
    if kind.is_file() || kind.is_block_device() {
        file.sync_all()?;
    }
    match kind.is_file() {
        true => zebu::internal::sync_name(&name_of(file)),
        false => Ok(()),
    }
}

/// Enlarges the buffer of a pipe to the size that the kernel grants unprivileged processes by
/// default. Errors are ignored: only the speed depends on it.
pub fn widen(pipe: &File) {
    const BYTES: usize = 1 << 20;
    let _ = rustix::pipe::fcntl_setpipe_size(pipe, BYTES);
}

/// A name of an open file.
pub fn name_of(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}
