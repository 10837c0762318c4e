//! What can go wrong, in one line each.

use std::fmt;
use std::io;

use crate::format::FormatError;

/// The result of anything that touches an image.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed. `Display` gives one line without a final full
/// stop, in QEMU's words where QEMU has words for it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The storage failed.
    #[error("{}", strerror(.0))]
    Io(#[from] io::Error),
    /// The image's metadata are wrong.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The mapping of one guest offset is wrong: where, and what.
    #[error("Image is corrupt: {what} (guest offset {guest:#x})")]
    Corrupt {
        /// Guest offset in bytes.
        guest: u64,
        /// What is wrong with it.
        what: String,
    },
    /// A compressed cluster does not inflate.
    #[error("Compressed cluster at guest offset {guest:#x} (host offset {host:#x}): {source}")]
    Compressed {
        /// Guest offset of the cluster in bytes.
        guest: u64,
        /// Host offset of the compressed data in bytes.
        host: u64,
        /// What the decompressor said.
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
    /// A write that would have hit the image's own tables: they are wrong.
    #[error("Preventing invalid write of {length} bytes at {offset:#x} on {what}")]
    Overlap {
        /// Host offset in bytes.
        offset: u64,
        /// Bytes.
        length: u64,
        /// What is there.
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
    /// A cluster has as many references as the image's refcounts can count.
    #[error("The cluster at {offset:#x} cannot be referred to once more: refcounts are too narrow")]
    RefcountOverflow {
        /// Host offset in bytes.
        offset: u64,
    },
    /// The image was not closed by its last writer, and its refcounts must be
    /// repaired before it is written again: [`jobs::open`](crate::jobs::open) does
    /// that.
    #[error("qcow2: Image is dirty; its refcounts must be repaired before it can be written")]
    Dirty,
    /// Another process uses the image.
    #[error("Failed to get {lock} lock\nIs another process using the image [{path}]?")]
    Locked {
        /// Which lock, as QEMU words it: `"write"`, `shared "write"`, ...
        lock: String,
        /// The image.
        path: String,
    },
    /// An untrusted image goes beyond one of its
    /// [`Limits`](crate::drivers::Limits). (Work that is spent while reading is
    /// an [`Error::Io`]; [`Error::limit`] finds both.)
    #[error(transparent)]
    Limit(#[from] LimitExceeded),
    /// What was asked for does not exist here, or the caller's policy forbids
    /// it.
    #[error("{0}")]
    Refused(String),
    /// A failure, and what was being done.
    #[error("{context}: {source}")]
    While {
        /// What was being done.
        context: String,
        /// Why it failed.
        source: Box<Error>,
    },
}

/// What kind of failure an [`Error`] is, whatever was being done: [`Error::kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A file is not there.
    NotFound,
    /// It is not permitted: a write to a device that was opened for reading, or what the
    /// permissions of a file or of its file system forbid.
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
    /// The image or the storage needs something, or was asked for something, that does not
    /// exist here.
    Unsupported,
    /// What was asked for does not make sense, or the caller's [`Policy`](crate::Policy) forbids it.
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
    /// What of the image it is.
    pub what: &'static str,
    /// How much there is, or at least.
    pub value: u64,
    /// How much there may be.
    pub limit: u64,
}

impl Error {
    /// The same error with what was being done before it: `context: error`.
    pub fn during(self, context: impl Into<String>) -> Self {
        Error::While {
            context: context.into(),
            source: Box::new(self),
        }
    }

    /// The guest offset in bytes that could not be read, if that is known more
    /// exactly than by the request.
    pub fn guest_offset(&self) -> Option<u64> {
        match self {
            Error::Corrupt { guest, .. } | Error::Compressed { guest, .. } => Some(*guest),
            Error::While { source, .. } => source.guest_offset(),
            _ => None,
        }
    }

    /// What kind of failure it is, to decide what to do about it.
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
            Error::Refused(_) => ErrorKind::Refused,
            Error::While { source, .. } => source.kind(),
        }
    }

    /// The bound on untrusted images that was met, whatever was being done.
    pub fn limit(&self) -> Option<&LimitExceeded> {
        match self {
            Error::Limit(limit) => Some(limit),
            Error::Io(error) => error.get_ref()?.downcast_ref(),
            Error::While { source, .. } => source.limit(),
            _ => None,
        }
    }

    /// Whether a change that meets it marks the image as corrupt: writing on
    /// could destroy data.
    pub(crate) fn shows_corruption(&self) -> bool {
        matches!(
            self,
            Error::Overlap { .. } | Error::RefcountBlockUnaligned { .. }
        )
    }

    /// Whether it is [`Error::Dirty`], whatever was being done.
    pub fn is_dirty(&self) -> bool {
        match self {
            Error::Dirty => true,
            Error::While { source, .. } => source.is_dirty(),
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
            Error::Refused(_) | Error::Dirty => libc::ENOTSUP,
            Error::While { source, .. } => source.errno(),
        }
    }
}

/// The error inside an [`io::Error`] that is none of the operating system, with
/// the `errno` nearest to it.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
#[cfg_attr(not(feature = "nbd"), allow(dead_code))]
pub(crate) struct WithErrno {
    pub errno: i32,
    pub source: Box<dyn std::error::Error + Send + Sync>,
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
        // What was to be stored, not what was found.
        FormatError::OffsetUnstorable { .. }
        | FormatError::CompressedLength { .. }
        | FormatError::RefcountOverflow { .. }
        | FormatError::TooLong { .. }
        | FormatError::HeaderDoesNotFit { .. } => ErrorKind::Refused,
        FormatError::At { source, .. } => format_kind(source),
        _ => ErrorKind::Corrupt,
    }
}

fn io_errno(error: &io::Error) -> i32 {
    let inner = error.get_ref().and_then(|e| e.downcast_ref::<WithErrno>());
    let errno = inner.map(|inner| inner.errno);
    errno.or(error.raw_os_error()).unwrap_or(libc::EIO)
}

/// A number as C prints it with `%#x`: no prefix before a 0.
pub(crate) fn c_hex(number: u64) -> String {
    match number {
        0 => "0".into(),
        n => format!("{n:#x}"),
    }
}

/// The text of an operating-system error without Rust's "(os error N)".
pub fn strerror(error: &io::Error) -> impl fmt::Display {
    let text = error.to_string();
    match error.raw_os_error() {
        Some(_) => text
            .split(" (os error")
            .next()
            .unwrap_or_default()
            .to_string(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a kind that is lost behind what was being done.
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
