//! Requests of the transmission phase.

use super::{Headers, ProtocolError, Reader, command};

/// The command of a request: `NBD_CMD_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Reads bytes.
    Read,
    /// Writes the payload.
    Write,
    /// Ends the connection.
    Disconnect,
    /// Makes all changes with a reply durable.
    Flush,
    /// The content of a range is not needed any more.
    Trim,
    /// Prefetches a range.
    Cache,
    /// Zeroes a range.
    WriteZeroes,
    /// Returns the extents of a range.
    BlockStatus,
    /// Changes the size.
    Resize,
    /// An unknown one.
    Other(u16),
}

wire_numbers! { Command: u16,
    0 = Read,
    1 = Write,
    2 = Disconnect,
    3 = Flush,
    4 = Trim,
    5 = Cache,
    6 = WriteZeroes,
    7 = BlockStatus,
    8 = Resize,
}

/// A request, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// [`command`] flags.
    pub flags: u16,
    /// Repeated in the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

const MAGIC: u32 = 0x2560_9513;
const EXTENDED_MAGIC: u32 = 0x21e4_1c71;

impl Request {
    /// Bytes on the wire.
    pub fn size(headers: Headers) -> usize {
        match headers {
            Headers::Extended => 32,
            _ => 28,
        }
    }

    /// Decodes the first [`Request::size`] bytes.
    ///
    /// # Errors
    /// If they are no request, or not so many.
    pub fn decode(headers: Headers, bytes: &[u8]) -> Result<Self, ProtocolError> {
        let extended = headers == Headers::Extended;
        let mut reader = Reader::new(bytes, "a request");
        let magic = reader.u32()?;
        if magic != if extended { EXTENDED_MAGIC } else { MAGIC } {
            return Err(ProtocolError::Magic {
                what: "a request",
                found: magic.into(),
            });
        }
        Ok(Request {
            flags: reader.u16()?,
            command: Command::from_wire(reader.u16()?),
            cookie: reader.u64()?,
            offset: reader.u64()?,
            length: match extended {
                true => reader.u64()?,
                false => reader.u32()?.into(),
            },
        })
    }

    /// Appends the encoded request. Without extended headers the length is below 4 GiB.
    pub fn encode(&self, headers: Headers, out: &mut Vec<u8>) {
        let extended = headers == Headers::Extended;
        let magic = if extended { EXTENDED_MAGIC } else { MAGIC };
        out.extend(magic.to_be_bytes());
        out.extend(self.flags.to_be_bytes());
        out.extend(self.command.to_wire().to_be_bytes());
        out.extend(self.cookie.to_be_bytes());
        out.extend(self.offset.to_be_bytes());
        match extended {
            true => out.extend(self.length.to_be_bytes()),
            false => out.extend((self.length as u32).to_be_bytes()),
        }
    }

    /// Bytes of payload that follow: of a write, and with [`command::PAYLOAD_LEN`] in extended
    /// headers.
    pub fn payload(&self, headers: Headers) -> u64 {
        let says = headers == Headers::Extended && self.flags & command::PAYLOAD_LEN != 0;
        match self.command {
            Command::Write => self.length,
            _ if says => self.length,
            _ => 0,
        }
    }
}

/// The payload of a block status request, which selects contexts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusFilter {
    /// Bytes of the range.
    pub length: u64,
    /// Numbers of contexts.
    pub contexts: Vec<u32>,
}

impl StatusFilter {
    /// Decodes a payload.
    ///
    /// # Errors
    /// If its length is wrong.
    pub fn decode(payload: &[u8]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new(payload, "the contexts of a block status request");
        let length = reader.u64()?;
        let mut contexts = Vec::new();
        while !reader.bytes.is_empty() {
            contexts.push(reader.u32()?);
        }
        Ok(StatusFilter { length, contexts })
    }

    /// The encoded payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.length.to_be_bytes().to_vec();
        out.extend(self.contexts.iter().flat_map(|id| id.to_be_bytes()));
        out
    }
}
