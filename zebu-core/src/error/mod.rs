//! The errors of the library. `format` is what decoders of qcow2 find in an image.

mod format;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::printable::{printable, printable_message};

pub use format::FormatError;

/// A result with an [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed. `Display` is one line without a final full stop, QEMU's message where
/// QEMU has one; that of [`Error::Locked`] has two lines, also with a context, as few other messages have in
/// QEMU. What names would do to a terminal, or to the lines, is escaped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The storage failed.
    #[error("{}", strerror(.0))]
    Io(#[from] io::Error),
    /// The image's metadata are wrong.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The mapping of a guest offset is wrong.
    #[error("Image is corrupt: {} (guest offset {guest:#x})", printable(.what.as_bytes()))]
    Corrupt {
        /// Guest offset in bytes.
        guest: u64,
        /// What is wrong with it.
        what: String,
    },
    /// A compressed cluster does not inflate.
    #[error("Compressed cluster at guest offset {guest:#x} (host offset {host:#x}): {}", printable(.source.to_string().as_bytes()))]
    Compressed {
        /// Guest offset of the cluster in bytes.
        guest: u64,
        /// Host offset of the compressed data in bytes.
        host: u64,
        /// The decompressor's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A request outside the device.
    #[error("Request of {length} bytes at offset {offset} is outside the device of {size} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Size of the device in bytes.
        size: u64,
    },
    /// A write would have overwritten the image's metadata, which are therefore wrong.
    #[error("Preventing invalid write of {length} bytes at {offset:#x} on {what}")]
    Overlap {
        /// Host offset in bytes.
        offset: u64,
        /// Bytes.
        length: u64,
        /// The metadata there.
        what: &'static str,
    },
    /// An entry of the refcount table has an offset that is not aligned to clusters.
    #[error("Refblock offset {offset:#x} unaligned (reftable index: {})", c_hex(*.index))]
    RefcountBlockUnaligned {
        /// The offset in bytes.
        offset: u64,
        /// Index of the entry.
        index: u64,
    },
    /// A cluster has as many references as its refcount can count.
    #[error("The cluster at {offset:#x} cannot be referred to once more: refcounts are too narrow")]
    RefcountOverflow {
        /// Host offset in bytes.
        offset: u64,
    },
    /// The image was not closed by its last writer, and its refcounts must be
    /// repaired before it is written again, as [`jobs::open`](crate::jobs::open) does.
    #[error("qcow2: Image is dirty; its refcounts must be repaired before it can be written")]
    Dirty,
    /// Another process uses the image. Two lines: the second one asks which.
    #[error("Failed to get {lock} lock\nIs another process using the image [{}]?", printable(.path.as_bytes()))]
    Locked {
        /// The lock, with QEMU's name: `"write"`, `shared "write"`, ...
        lock: String,
        /// The image.
        path: String,
    },
    /// An untrusted image goes beyond one of its
    /// [`Limits`](crate::drivers::Limits). (If reading exceeds the limit of work, that is an
    /// [`Error::Io`]; [`Error::limit`] finds both.)
    #[error(transparent)]
    Limit(#[from] LimitExceeded),
    /// The request is not supported, makes no sense, or the caller's policy forbids it.
    #[error("{}", printable_message(.0))]
    Refused(String),
    /// A file, an export of a server or an object could not be opened.
    #[error("Could not open '{}': {source}", printable(.file.display().to_string().as_bytes()))]
    Open {
        /// Its name, as the user or an image has it.
        file: PathBuf,
        /// Why not.
        source: Box<Error>,
    },
    /// An image in a stream that can only be read where parts of it are read in any order: its tables
    /// come too late.
    #[error("{}", printable_message(.0))]
    OutOfOrder(String),
    /// A failure with its context.
    #[error("{}: {source}", printable(.context.as_bytes()))]
    While {
        /// The context.
        context: String,
        /// Why it failed.
        source: Box<Error>,
    },
}

/// The kind of an [`enum@Error`], without its context: [`Error::kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A file does not exist.
    NotFound,
    /// A write to a device that was opened for reading, or what the permissions of a file or its
    /// file system forbid.
    NotPermitted,
    /// Another process uses the image.
    Locked,
    /// The image is damaged: its metadata are wrong, or compressed data do not inflate.
    Corrupt,
    /// The image was not closed by its last writer: [`Error::Dirty`].
    Dirty,
    /// The request is not inside the device.
    OutOfRange,
    /// There is no space left on the storage, or the file may not become that long.
    NoSpace,
    /// The image needs, or the request is, something that is not supported.
    Unsupported,
    /// The request makes no sense, or the caller's [`Policy`](crate::Policy) forbids it.
    Refused,
    /// An untrusted image goes beyond one of its [`Limits`](crate::Limits).
    Limit,
    /// The storage failed in another way.
    Io,
}

/// A bound of [`Limits`](crate::drivers::Limits) that an untrusted image goes
/// beyond.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {value}, beyond the limit '{name}' of untrusted images ({limit})")]
#[non_exhaustive]
pub struct LimitExceeded {
    /// The name of the bound, as the program writes it: `virtual-size`.
    pub name: &'static str,
    /// What is limited.
    pub what: &'static str,
    /// The value in the image, or a lower bound of it.
    pub value: u64,
    /// The largest value that is allowed.
    pub limit: u64,
}

impl Error {
    /// The error of the operating system with this number.
    #[doc(hidden)]
    pub fn os(errno: i32) -> Self {
        Error::Io(io::Error::from_raw_os_error(errno))
    }

    /// The image is encrypted. The words are QEMU's for an image without its key, of any method.
    #[doc(hidden)]
    pub fn encrypted() -> Error {
        Error::Refused(
            "Parameter 'encrypt.key-secret' is required for cipher: decryption is not supported"
                .into(),
        )
    }

    /// There is no bitmap of this name.
    pub(crate) fn bitmap_not_found(name: &[u8]) -> Error {
        Error::Refused(format!("Dirty bitmap '{}' not found", printable(name)))
    }

    /// A bitmap was not stored by its last writer.
    pub(crate) fn bitmap_inconsistent(name: &[u8]) -> Error {
        Error::Refused(format!(
            "Bitmap '{}' is inconsistent and cannot be used",
            printable(name)
        ))
    }

    /// The error with a context: `context: error`.
    pub fn during(self, context: impl Into<String>) -> Self {
        Error::While {
            context: context.into(),
            source: Box::new(self),
        }
    }

    /// The guest offset in bytes that could not be read, if the error names one.
    pub fn guest_offset(&self) -> Option<u64> {
        match self {
            Error::Corrupt { guest, .. } | Error::Compressed { guest, .. } => Some(*guest),
            Error::Open { source, .. } | Error::While { source, .. } => source.guest_offset(),
            _ => None,
        }
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            _ if self.limit().is_some() => ErrorKind::Limit,
            Error::Limit(_) => ErrorKind::Limit,
            Error::Io(e) => io_kind(e),
            Error::Format(e) => format_kind(e),
            Error::Corrupt { .. }
            | Error::Compressed { .. }
            | Error::Overlap { .. }
            | Error::RefcountBlockUnaligned { .. } => ErrorKind::Corrupt,
            Error::OutOfRange { .. } => ErrorKind::OutOfRange,
            Error::RefcountOverflow { .. } => ErrorKind::Unsupported,
            Error::Dirty => ErrorKind::Dirty,
            Error::Locked { .. } => ErrorKind::Locked,
            Error::Refused(_) | Error::OutOfOrder(_) => ErrorKind::Refused,
            Error::Open { source, .. } | Error::While { source, .. } => source.kind(),
        }
    }

    /// The limit of untrusted images that was exceeded, also behind a context.
    pub fn limit(&self) -> Option<&LimitExceeded> {
        match self {
            Error::Limit(limit) => Some(limit),
            Error::Io(error) => error.get_ref()?.downcast_ref(),
            Error::Open { source, .. } | Error::While { source, .. } => source.limit(),
            _ => None,
        }
    }

    /// The name of the file, export or object that could not be opened, if that is what failed: of a
    /// backing file, if it is that.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Error::Open { file, source } => source.file().or(Some(file)),
            Error::While { source, .. } => source.file(),
            _ => None,
        }
    }

    /// Whether it shows that the image is corrupt, so that more writes could destroy data.
    pub(crate) fn shows_corruption(&self) -> bool {
        matches!(
            self,
            Error::Overlap { .. } | Error::RefcountBlockUnaligned { .. }
        )
    }

    /// Whether it is [`Error::OutOfOrder`], also behind a context.
    pub fn is_out_of_order(&self) -> bool {
        match self {
            Error::OutOfOrder(_) => true,
            Error::Open { source, .. } | Error::While { source, .. } => source.is_out_of_order(),
            _ => false,
        }
    }

    /// Whether it is [`Error::Dirty`], also behind a context.
    pub fn is_dirty(&self) -> bool {
        match self {
            Error::Dirty => true,
            Error::Open { source, .. } | Error::While { source, .. } => source.is_dirty(),
            _ => false,
        }
    }

    /// The nearest `errno`, for guests and clients.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Io(e) => io_errno(e),
            Error::OutOfRange { .. } | Error::Format(_) | Error::RefcountOverflow { .. } => {
                libc::EINVAL
            }
            Error::Corrupt { .. }
            | Error::Compressed { .. }
            | Error::Overlap { .. }
            | Error::RefcountBlockUnaligned { .. } => libc::EIO,
            Error::Locked { .. } => libc::EAGAIN,
            Error::Limit(_) => libc::EFBIG,
            Error::Refused(_) | Error::OutOfOrder(_) | Error::Dirty => libc::ENOTSUP,
            Error::Open { source, .. } | Error::While { source, .. } => source.errno(),
        }
    }
}

impl From<Error> for io::Error {
    /// The storage's own error as it is; others keep the [`enum@Error`] as their source
    /// ([`io::Error::get_ref`]), with the kind of [`Error::errno`].
    fn from(error: Error) -> io::Error {
        match error {
            Error::Io(error) => error,
            error => {
                let errno = error.errno();
                let source = Box::new(error);
                let kind = io::Error::from_raw_os_error(errno).kind();
                io::Error::new(kind, WithErrno { errno, source })
            }
        }
    }
}

/// The source of an [`io::Error`] that is not the operating system's, with the nearest `errno`.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct WithErrno {
    /// The number of the system.
    pub errno: i32,
    /// The message.
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// `source` as an error with the kind and the number of `errno`.
pub fn with_errno(errno: i32, source: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    let source = Box::new(source);
    io::Error::new(
        io::Error::from_raw_os_error(errno).kind(),
        WithErrno { errno, source },
    )
}

fn io_kind(error: &io::Error) -> ErrorKind {
    match io_errno(error) {
        libc::ENOENT | libc::ENXIO => ErrorKind::NotFound,
        libc::EPERM | libc::EACCES | libc::EROFS | libc::EBADF => ErrorKind::NotPermitted,
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => ErrorKind::NoSpace,
        libc::EOPNOTSUPP | libc::ENOSYS => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    }
}

fn format_kind(error: &FormatError) -> ErrorKind {
    match error {
        FormatError::UnsupportedVersion(_)
        | FormatError::UnsupportedClusterSize(_)
        | FormatError::UnsupportedSubclusterSize(_)
        | FormatError::UnknownCompression(_)
        | FormatError::UnsupportedFeatures(_) => ErrorKind::Unsupported,
        // Errors of encoding, not of decoding.
        FormatError::OffsetUnstorable { .. }
        | FormatError::CompressedLength { .. }
        | FormatError::RefcountOverflow { .. }
        | FormatError::TooLong { .. }
        | FormatError::HeaderDoesNotFit { .. } => ErrorKind::Refused,
        FormatError::At { source, .. } => format_kind(source),
        _ => ErrorKind::Corrupt,
    }
}

/// The number of the system for an error: `EIO` if it has none.
pub fn io_errno(error: &io::Error) -> i32 {
    let inner = error.get_ref().and_then(|e| e.downcast_ref::<WithErrno>());
    let errno = inner.map(|inner| inner.errno);
    errno.or(error.raw_os_error()).unwrap_or(libc::EIO)
}

/// A number as C prints it with `%#x`: no prefix before a 0.
pub fn c_hex(number: u64) -> String {
    match number {
        0 => "0".into(),
        n => format!("{n:#x}"),
    }
}

/// A server's text as one line of limited length.
pub fn one_line(text: &str) -> String {
    const MOST: usize = 500;
    let cut = text.char_indices().nth(MOST).map(|(at, _)| at);
    let mut line = printable(&text.as_bytes()[..cut.unwrap_or(text.len())]);
    if cut.is_some() {
        line.push('…');
    }
    line
}

/// The text of an operating-system error without Rust's "(os error N)", that of another error on one line.
pub fn strerror(error: &io::Error) -> impl fmt::Display {
    let text = error.to_string();
    match error.raw_os_error() {
        Some(_) => text
            .split(" (os error")
            .next()
            .unwrap_or_default()
            .to_string(),
        None => printable_message(&text),
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an error whose kind is lost when context is added.
    use super::*;

    #[test]
    fn the_kind_is_that_of_the_source() {
        let io = |errno| Error::from(io::Error::from_raw_os_error(errno));
        let limit = LimitExceeded {
            name: "work",
            what: "the work of a read",
            value: 2,
            limit: 1,
        };
        let format = |e: FormatError| Error::from(e);
        let cases = [
            (io(libc::ENOENT), ErrorKind::NotFound),
            (io(libc::EPERM), ErrorKind::NotPermitted),
            (io(libc::ENOSPC), ErrorKind::NoSpace),
            (io(libc::EIO), ErrorKind::Io),
            (io::Error::other(limit).into(), ErrorKind::Limit),
            (Error::Limit(limit), ErrorKind::Limit),
            (format(FormatError::NotQcow2), ErrorKind::Corrupt),
            (
                format(FormatError::UnsupportedVersion(9)),
                ErrorKind::Unsupported,
            ),
            (Error::Dirty, ErrorKind::Dirty),
            (Error::Refused("no".into()), ErrorKind::Refused),
        ];
        for (error, kind) in cases {
            assert_eq!(error.kind(), kind, "{error}");
            assert_eq!(error.during("a").during("b").kind(), kind);
        }
    }
}
