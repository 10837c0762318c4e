//! The NBD protocol as pure values, without I/O, for servers and clients.
//!
//! The specification is `doc/proto.md` of <https://github.com/NetworkBlockDevice/nbd>. Numbers are
//! big-endian. A decoder gets a fixed header, or a payload whose length was in one. It checks
//! everything, and takes memory in proportion to the bytes that it gets.

/// The numbers on the wire of an enumeration; `Other` is any unknown one.
macro_rules! wire_numbers {
    ($kind:ident: $number:ty, $($value:literal = $variant:ident,)*) => {
        impl $kind {
            pub(super) fn from_wire(number: $number) -> Self {
                match number {
                    $($value => Self::$variant,)*
                    other => Self::Other(other),
                }
            }

            fn to_wire(self) -> $number {
                match self {
                    $(Self::$variant => $value,)*
                    Self::Other(number) => number,
                }
            }
        }
    };
}

mod option;
mod reply;
mod request;

pub use option::{
    ContextQuery, ExportInfo, Go, Info, OptionHeader, OptionKind, OptionReply, OptionReplyHeader,
    OptionReplyKind, decode_list_item, encode_option,
};
pub use reply::{
    Chunk, ChunkHeader, ChunkKind, Extent, SimpleReply, decode_error_payload, decode_extents,
    encode_error_payload, encode_extents,
};
pub use request::{Command, Request, StatusFilter};

use std::fmt;

/// `NBDMAGIC`, the first eight bytes of a server.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, the next eight, and the first of each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The default port.
pub const DEFAULT_PORT: u16 = 10809;
/// Bytes of a name or a description at most.
pub const MAX_STRING: usize = 4096;
/// Bytes of a read or write that every server accepts.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// Flags of the server's greeting.
pub mod handshake {
    /// Fixed newstyle: unknown options get an error reply.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No 124 bytes of zeroes after the reply to `EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 2;
}

/// Flags of an export: `NBD_FLAG_*`.
pub mod transmission {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1;
    /// It cannot be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// [`Command::Flush`](super::Command::Flush)
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// [`command::FUA`](super::command::FUA)
    pub const SEND_FUA: u16 = 1 << 3;
    /// It is a rotational disk.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// [`Command::Trim`](super::Command::Trim)
    pub const SEND_TRIM: u16 = 1 << 5;
    /// [`Command::WriteZeroes`](super::Command::WriteZeroes)
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// [`command::DF`](super::command::DF)
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// [`Command::Resize`](super::Command::Resize)
    pub const SEND_RESIZE: u16 = 1 << 9;
    /// [`Command::Cache`](super::Command::Cache)
    pub const SEND_CACHE: u16 = 1 << 10;
    /// [`command::FAST_ZERO`](super::command::FAST_ZERO)
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// A block status request may select contexts.
    pub const BLOCK_STAT_PAYLOAD: u16 = 1 << 12;
}

/// Flags of a request: `NBD_CMD_FLAG_*`.
pub mod command {
    /// Durable before the reply.
    pub const FUA: u16 = 1;
    /// Zeroes that stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The reply in one chunk.
    pub const DF: u16 = 1 << 2;
    /// One extent is enough.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeroes only if that is faster than writing them.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of the payload.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Flags of `base:allocation`: a range that is not allocated.
pub const STATE_HOLE: u64 = 1;
/// Flags of `base:allocation`: a range that reads as zeroes.
pub const STATE_ZERO: u64 = 2;

/// Error numbers on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ErrorCode {
    /// Not permitted.
    Perm = 1,
    /// Input or output failed.
    Io = 5,
    /// Out of memory.
    NoMem = 12,
    /// Invalid request.
    Inval = 22,
    /// No space left.
    NoSpc = 28,
    /// Too large for one reply.
    Overflow = 75,
    /// Not supported.
    NotSup = 95,
    /// The server shuts down.
    Shutdown = 108,
}

impl ErrorCode {
    /// The code for an `errno`.
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::EPERM | libc::EROFS | libc::EACCES => Self::Perm,
            libc::ENOMEM => Self::NoMem,
            libc::EINVAL => Self::Inval,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Self::NoSpc,
            libc::EOVERFLOW => Self::Overflow,
            libc::ENOTSUP => Self::NotSup,
            libc::ESHUTDOWN => Self::Shutdown,
            _ => Self::Io,
        }
    }

    /// The code of this number; an unknown one is an invalid request, as specified.
    pub fn from_wire(number: u32) -> Self {
        match number {
            1 => Self::Perm,
            5 => Self::Io,
            12 => Self::NoMem,
            28 => Self::NoSpc,
            75 => Self::Overflow,
            95 => Self::NotSup,
            108 => Self::Shutdown,
            _ => Self::Inval,
        }
    }

    /// The `errno` for it.
    pub fn errno(self) -> i32 {
        self as i32
    }
}

/// The form of requests and replies on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Headers {
    /// A simple reply for each request.
    #[default]
    Simple,
    /// Structured replies.
    Structured,
    /// Extended headers: 64-bit lengths.
    Extended,
}

/// An error in bytes that were received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProtocolError {
    /// A magic number is wrong.
    Magic {
        /// What has the number.
        what: &'static str,
        /// The number received.
        found: u64,
    },
    /// A payload has a wrong length.
    Length(&'static str),
    /// A string is longer than [`MAX_STRING`] or not UTF-8.
    Name(&'static str),
    /// A value is not allowed.
    Value(&'static str),
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic { what, found } => write!(f, "{what} begins with {found:#x}"),
            Self::Length(what) => write!(f, "the length of {what} is wrong"),
            Self::Name(what) => write!(f, "{what} is too long or not UTF-8"),
            Self::Value(what) => write!(f, "{what} cannot be"),
        }
    }
}

impl std::error::Error for ProtocolError {}

/// Reads the values of a payload in order.
struct Reader<'a> {
    bytes: &'a [u8],
    /// For errors.
    what: &'static str,
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Reader { bytes, what }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], ProtocolError> {
        let (head, tail) = self
            .bytes
            .split_at_checked(length)
            .ok_or(ProtocolError::Length(self.what))?;
        self.bytes = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ProtocolError> {
        let bytes = self.take(N)?;
        Ok(bytes.try_into().expect("as long as asked"))
    }

    fn u16(&mut self) -> Result<u16, ProtocolError> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, ProtocolError> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, ProtocolError> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string after its length.
    fn string(&mut self) -> Result<String, ProtocolError> {
        let length = self.u32()? as usize;
        let bytes = self.take(length)?;
        text(bytes, self.what)
    }

    /// The rest.
    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }

    fn end(self) -> Result<(), ProtocolError> {
        match self.bytes.is_empty() {
            true => Ok(()),
            false => Err(ProtocolError::Length(self.what)),
        }
    }
}

fn text(bytes: &[u8], what: &'static str) -> Result<String, ProtocolError> {
    match std::str::from_utf8(bytes) {
        Ok(text) if bytes.len() <= MAX_STRING => Ok(text.to_string()),
        _ => Err(ProtocolError::Name(what)),
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u32).to_be_bytes());
    out.extend(text.as_bytes());
}

#[cfg(test)]
mod tests;
