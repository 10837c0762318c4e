//! Replies as they are sent.

use std::io::IoSlice;
use std::ops::Range;

use zebu::internal::nbd::{
    Chunk, ChunkHeader, ChunkKind, ErrorCode, Extent, Headers, Request, SimpleReply,
    encode_error_payload, encode_extents,
};
use zebu::storage::PoolBuffer;

/// Why a request failed.
pub struct Failed {
    pub code: ErrorCode,
    pub message: String,
}

impl Failed {
    pub fn new(code: ErrorCode, message: &str) -> Self {
        Failed {
            code,
            message: message.into(),
        }
    }
}

impl From<zebu::Error> for Failed {
    fn from(error: zebu::Error) -> Self {
        Failed {
            code: ErrorCode::from_errno(error.errno()),
            message: error.to_string(),
        }
    }
}

/// A reply and the buffers that it is sent from.
pub struct Reply {
    /// Most replies have one part.
    first: Part,
    more: Vec<Part>,
    buffer: Option<PoolBuffer>,
    length: usize,
}

struct Part {
    head: Head,
    payload: Payload,
}

enum Head {
    Simple([u8; SimpleReply::SIZE]),
    Chunk(Chunk),
}

enum Payload {
    None,
    /// A range of the buffer.
    Data(Range<usize>),
    Bytes(Vec<u8>),
}

impl Part {
    fn head(&self) -> &[u8] {
        match &self.head {
            Head::Simple(bytes) => bytes,
            Head::Chunk(chunk) => chunk.bytes(),
        }
    }

    fn length(&self) -> usize {
        let payload = match &self.payload {
            Payload::None => 0,
            Payload::Data(range) => range.len(),
            Payload::Bytes(bytes) => bytes.len(),
        };
        self.head().len() + payload
    }
}

/// A piece of a read: its range in the read, and whether it is data or zeroes.
pub struct Piece {
    pub range: Range<usize>,
    pub data: bool,
}

fn header(request: &Request, kind: ChunkKind, done: bool, length: usize) -> ChunkHeader {
    ChunkHeader {
        done,
        kind,
        cookie: request.cookie,
        offset: request.offset,
        length: length as u64,
    }
}

impl Reply {
    fn new(mut parts: Vec<Part>, buffer: Option<PoolBuffer>) -> Self {
        let more = parts.split_off(1);
        let first = parts.pop().expect("a reply has a part");
        Self::with(first, more, buffer)
    }

    fn with(first: Part, more: Vec<Part>, buffer: Option<PoolBuffer>) -> Self {
        Reply {
            length: first.length() + more.iter().map(Part::length).sum::<usize>(),
            first,
            more,
            buffer,
        }
    }

    fn one(head: Head, payload: Payload, buffer: Option<PoolBuffer>) -> Self {
        Self::with(Part { head, payload }, Vec::new(), buffer)
    }

    /// The reply of a request that succeeded.
    pub fn ok(headers: Headers, request: &Request) -> Self {
        let head = match headers {
            Headers::Simple => Head::Simple(simple(request, 0)),
            _ => Head::Chunk(header(request, ChunkKind::None, true, 0).encode(headers)),
        };
        Self::one(head, Payload::None, None)
    }

    /// The reply of a request that failed.
    pub fn error(headers: Headers, request: &Request, failed: &Failed) -> Self {
        let code = failed.code as u32;
        if headers == Headers::Simple {
            let head = Head::Simple(simple(request, code));
            return Self::one(head, Payload::None, None);
        }
        let bytes = encode_error_payload(code, &failed.message, None);
        let header = header(request, ChunkKind::Error, true, bytes.len());
        let head = Head::Chunk(header.encode(headers));
        Self::one(head, Payload::Bytes(bytes), None)
    }

    /// A read, of which all bytes are at the start of the buffer.
    pub fn data(headers: Headers, request: &Request, buffer: PoolBuffer) -> Self {
        let length = request.length as usize;
        let head = match headers {
            Headers::Simple => Head::Simple(simple(request, 0)),
            _ => {
                let header = header(request, ChunkKind::OffsetData, true, 0);
                Head::Chunk(header.data(headers, request.offset, request.length))
            }
        };
        Self::one(head, Payload::Data(0..length), Some(buffer))
    }

    /// A read in at least one piece. The data are in the buffer, at their offset in the read.
    pub fn sparse(
        headers: Headers,
        request: &Request,
        pieces: &[Piece],
        buffer: Option<PoolBuffer>,
    ) -> Self {
        let last = pieces.len() - 1;
        let part = |(n, piece): (usize, &Piece)| {
            let header = header(request, ChunkKind::None, n == last, 0);
            let at = request.offset + piece.range.start as u64;
            let length = piece.range.len() as u64;
            match piece.data {
                true => Part {
                    head: Head::Chunk(header.data(headers, at, length)),
                    payload: Payload::Data(piece.range.clone()),
                },
                false => Part {
                    head: Head::Chunk(header.hole(headers, at, length)),
                    payload: Payload::None,
                },
            }
        };
        Self::new(pieces.iter().enumerate().map(part).collect(), buffer)
    }

    /// The extents of at least one context.
    pub fn status(
        headers: Headers,
        request: &Request,
        contexts: &[u32],
        extents: &[Vec<Extent>],
    ) -> Self {
        let kind = match headers {
            Headers::Extended => ChunkKind::BlockStatusExtended,
            _ => ChunkKind::BlockStatus,
        };
        let last = contexts.len() - 1;
        let both = contexts.iter().zip(extents).enumerate();
        let parts = both.map(|(n, (context, extents))| {
            let bytes = encode_extents(headers, *context, extents);
            let header = header(request, kind, n == last, bytes.len());
            Part {
                head: Head::Chunk(header.encode(headers)),
                payload: Payload::Bytes(bytes),
            }
        });
        Self::new(parts.collect(), None)
    }

    /// Bytes on the wire.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Appends its bytes. No slice is empty.
    pub fn slices<'a>(&'a self, out: &mut Vec<IoSlice<'a>>) {
        for part in std::iter::once(&self.first).chain(&self.more) {
            out.push(IoSlice::new(part.head()));
            match (&part.payload, &self.buffer) {
                (Payload::Data(range), Some(buffer)) => {
                    out.push(IoSlice::new(&buffer[range.clone()]));
                }
                (Payload::Bytes(bytes), _) => out.push(IoSlice::new(bytes)),
                _ => {}
            }
        }
    }
}

fn simple(request: &Request, error: u32) -> [u8; SimpleReply::SIZE] {
    let reply = SimpleReply {
        error,
        cookie: request.cookie,
    };
    reply.encode()
}
