//! Replies of the transmission phase.

use super::{Headers, ProtocolError, Reader, text};

/// A simple reply; the data of a read follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleReply {
    /// 0, or the number of an [`ErrorCode`](super::ErrorCode).
    pub error: u32,
    /// That of the request.
    pub cookie: u64,
}

const SIMPLE_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_MAGIC: u32 = 0x6e8a_278c;

impl SimpleReply {
    /// Bytes on the wire.
    pub const SIZE: usize = 16;

    /// The encoded reply.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut out = [0; Self::SIZE];
        out[..4].copy_from_slice(&SIMPLE_MAGIC.to_be_bytes());
        out[4..8].copy_from_slice(&self.error.to_be_bytes());
        out[8..].copy_from_slice(&self.cookie.to_be_bytes());
        out
    }

    /// Decodes a reply.
    ///
    /// # Errors
    /// If the magic number is wrong.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new(bytes, "an answer");
        match reader.u32()? {
            SIMPLE_MAGIC => Ok(SimpleReply {
                error: reader.u32()?,
                cookie: reader.u64()?,
            }),
            found => Err(ProtocolError::Magic {
                what: "an answer",
                found: found.into(),
            }),
        }
    }

    /// Whether a simple reply begins with these bytes: with structured replies, requests other than
    /// reads may have one.
    pub fn begins(bytes: [u8; 4]) -> bool {
        bytes == SIMPLE_MAGIC.to_be_bytes()
    }
}

/// The content of a chunk of a structured reply: `NBD_REPLY_TYPE_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkKind {
    /// Nothing.
    None,
    /// An offset, and data.
    OffsetData,
    /// An offset, and a number of zeroes.
    OffsetHole,
    /// Extents of one context, in 32 bits.
    BlockStatus,
    /// The same in 64 bits.
    BlockStatusExtended,
    /// An error, and a text.
    Error,
    /// The same and an offset.
    ErrorOffset,
    /// An unknown one; an error if the highest bit is set.
    Other(u16),
}

wire_numbers! { ChunkKind: u16,
    0 = None,
    1 = OffsetData,
    2 = OffsetHole,
    5 = BlockStatus,
    6 = BlockStatusExtended,
    0x8001 = Error,
    0x8002 = ErrorOffset,
}

impl ChunkKind {
    /// Whether it is an error.
    pub fn is_error(self) -> bool {
        self.to_wire() & 0x8000 != 0
    }
}

/// The header of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Whether it is the last one of the reply.
    pub done: bool,
    /// Its content.
    pub kind: ChunkKind,
    /// That of the request.
    pub cookie: u64,
    /// That of the request; on the wire with extended headers alone.
    pub offset: u64,
    /// Bytes of payload that follow.
    pub length: u64,
}

/// The bytes of a chunk's header, and of the fixed part of its payload.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    bytes: [u8; Chunk::MOST],
    length: usize,
}

impl Chunk {
    const MOST: usize = 44;

    fn new(header: &ChunkHeader, headers: Headers) -> Self {
        let mut chunk = Chunk {
            bytes: [0; Self::MOST],
            length: 0,
        };
        let extended = headers == Headers::Extended;
        let magic = match extended {
            true => EXTENDED_MAGIC,
            false => STRUCTURED_MAGIC,
        };
        chunk.put(&magic.to_be_bytes());
        chunk.put(&u16::from(header.done).to_be_bytes());
        chunk.put(&header.kind.to_wire().to_be_bytes());
        chunk.put(&header.cookie.to_be_bytes());
        match extended {
            true => {
                chunk.put(&header.offset.to_be_bytes());
                chunk.put(&header.length.to_be_bytes());
            }
            false => chunk.put(&(header.length as u32).to_be_bytes()),
        }
        chunk
    }

    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.length..][..bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
    }

    /// The encoded bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl ChunkHeader {
    /// Bytes on the wire.
    pub fn size(headers: Headers) -> usize {
        match headers {
            Headers::Extended => 32,
            _ => 20,
        }
    }

    /// Decodes the first [`ChunkHeader::size`] bytes.
    ///
    /// # Errors
    /// If they are no header of a chunk, or not so many.
    pub fn decode(headers: Headers, bytes: &[u8]) -> Result<Self, ProtocolError> {
        let extended = headers == Headers::Extended;
        let mut reader = Reader::new(bytes, "a chunk of an answer");
        let magic = reader.u32()?;
        let right = match extended {
            true => EXTENDED_MAGIC,
            false => STRUCTURED_MAGIC,
        };
        if magic != right {
            return Err(ProtocolError::Magic {
                what: "a chunk of an answer",
                found: magic.into(),
            });
        }
        Ok(ChunkHeader {
            done: reader.u16()? & 1 != 0,
            kind: ChunkKind::from_wire(reader.u16()?),
            cookie: reader.u64()?,
            offset: if extended { reader.u64()? } else { 0 },
            length: match extended {
                true => reader.u64()?,
                false => reader.u32()?.into(),
            },
        })
    }

    /// The encoded header; `length` bytes of payload follow.
    pub fn encode(&self, headers: Headers) -> Chunk {
        Chunk::new(self, headers)
    }

    /// A chunk like `self` with `length` bytes of data from `at` on, which follow.
    pub fn data(&self, headers: Headers, at: u64, length: u64) -> Chunk {
        let header = ChunkHeader {
            kind: ChunkKind::OffsetData,
            length: length + 8,
            ..*self
        };
        let mut chunk = Chunk::new(&header, headers);
        chunk.put(&at.to_be_bytes());
        chunk
    }

    /// A chunk like `self` with `length` (below 4 GiB) zeroes from `at` on.
    pub fn hole(&self, headers: Headers, at: u64, length: u64) -> Chunk {
        let header = ChunkHeader {
            kind: ChunkKind::OffsetHole,
            length: 12,
            ..*self
        };
        let mut chunk = Chunk::new(&header, headers);
        chunk.put(&at.to_be_bytes());
        chunk.put(&(length as u32).to_be_bytes());
        chunk
    }
}

/// A range of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes.
    pub length: u64,
    /// The context's flags.
    pub flags: u64,
}

/// The payload of [`ChunkKind::BlockStatus`] or, with extended headers,
/// [`ChunkKind::BlockStatusExtended`]. Without these, lengths and flags are
/// below 4 Gi.
pub fn encode_extents(headers: Headers, context: u32, extents: &[Extent]) -> Vec<u8> {
    let mut out = Vec::with_capacity(8 + extents.len() * 16);
    out.extend(context.to_be_bytes());
    if headers == Headers::Extended {
        out.extend((extents.len() as u32).to_be_bytes());
    }
    for extent in extents {
        match headers {
            Headers::Extended => {
                out.extend(extent.length.to_be_bytes());
                out.extend(extent.flags.to_be_bytes());
            }
            _ => {
                out.extend((extent.length as u32).to_be_bytes());
                out.extend((extent.flags as u32).to_be_bytes());
            }
        }
    }
    out
}

/// Decodes the payload of [`encode_extents`]: the context, and at least one extent. None is empty.
///
/// # Errors
/// If the payload is something else.
pub fn decode_extents(
    headers: Headers,
    payload: &[u8],
) -> Result<(u32, Vec<Extent>), ProtocolError> {
    let mut reader = Reader::new(payload, "block status");
    let context = reader.u32()?;
    let extended = headers == Headers::Extended;
    let count = if extended { Some(reader.u32()?) } else { None };
    let mut extents = Vec::new();
    while !reader.bytes.is_empty() {
        let extent = match extended {
            true => Extent {
                length: reader.u64()?,
                flags: reader.u64()?,
            },
            false => Extent {
                length: reader.u32()?.into(),
                flags: reader.u32()?.into(),
            },
        };
        if extent.length == 0 {
            return Err(ProtocolError::Value("an empty extent"));
        }
        extents.push(extent);
    }
    if extents.is_empty() || count.is_some_and(|count| count as usize != extents.len()) {
        return Err(ProtocolError::Length("block status"));
    }
    Ok((context, extents))
}

/// The payload of [`ChunkKind::Error`], or with an offset of
/// [`ChunkKind::ErrorOffset`].
pub fn encode_error_payload(error: u32, message: &str, offset: Option<u64>) -> Vec<u8> {
    let mut end = message.len().min(super::MAX_STRING);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    let mut out = error.to_be_bytes().to_vec();
    out.extend((end as u16).to_be_bytes());
    out.extend(&message.as_bytes()[..end]);
    out.extend(offset.into_iter().flat_map(u64::to_be_bytes));
    out
}

/// Decodes the payload of [`encode_error_payload`]: number, text, and offset if there is one.
///
/// # Errors
/// If the payload is something else.
pub fn decode_error_payload(payload: &[u8]) -> Result<(u32, String, Option<u64>), ProtocolError> {
    let mut reader = Reader::new(payload, "an error");
    let error = reader.u32()?;
    let length = reader.u16()?;
    let message = text(reader.take(length.into())?, "the text of an error")?;
    let offset = match reader.bytes.len() {
        0 => None,
        _ => Some(reader.u64()?),
    };
    reader.end()?;
    Ok((error, message, offset))
}
