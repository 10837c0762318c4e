//! Options: the negotiation before the first request.

use super::{OPTION_MAGIC, ProtocolError, Reader, put_string, text};

/// An option: `NBD_OPT_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionKind {
    /// Choose an export; there is no error reply.
    ExportName,
    /// End the connection.
    Abort,
    /// List the exports.
    List,
    /// Begin TLS.
    StartTls,
    /// Describe an export.
    Info,
    /// Describe an export and choose it.
    Go,
    /// Structured replies.
    StructuredReply,
    /// List metadata contexts.
    ListMetaContext,
    /// Choose metadata contexts.
    SetMetaContext,
    /// 64-bit lengths.
    ExtendedHeaders,
    /// An unknown one.
    Other(u32),
}

wire_numbers! { OptionKind: u32,
    1 = ExportName,
    2 = Abort,
    3 = List,
    5 = StartTls,
    6 = Info,
    7 = Go,
    8 = StructuredReply,
    9 = ListMetaContext,
    10 = SetMetaContext,
    11 = ExtendedHeaders,
}

/// The header of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// The option.
    pub kind: OptionKind,
    /// Bytes of payload that follow; not limited.
    pub length: u32,
}

impl OptionHeader {
    /// Bytes on the wire.
    pub const SIZE: usize = 16;

    /// Decodes one.
    ///
    /// # Errors
    /// If the bytes are something else.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new(bytes, "an option");
        match reader.u64()? {
            OPTION_MAGIC => Ok(OptionHeader {
                kind: OptionKind::from_wire(reader.u32()?),
                length: reader.u32()?,
            }),
            found => Err(ProtocolError::Magic {
                what: "an option",
                found,
            }),
        }
    }
}

/// An option with its payload, as a client sends it.
pub fn encode_option(kind: OptionKind, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(OptionHeader::SIZE + payload.len());
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(kind.to_wire().to_be_bytes());
    out.extend((payload.len() as u32).to_be_bytes());
    out.extend(payload);
    out
}

/// The kind of a reply to an option: `NBD_REP_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionReplyKind {
    /// Success, or the end of a list.
    Ack,
    /// An export.
    Server,
    /// A piece of information about an export.
    Info,
    /// A metadata context.
    MetaContext,
    /// The option is not known.
    ErrUnsup,
    /// Refused by the server's policy.
    ErrPolicy,
    /// Invalid option.
    ErrInvalid,
    /// Not supported by the server's platform.
    ErrPlatform,
    /// TLS must begin first.
    ErrTlsRequired,
    /// No such export.
    ErrUnknown,
    /// The server shuts down.
    ErrShutdown,
    /// The client must support block sizes.
    ErrBlockSizeRequired,
    /// The option or its reply is too large.
    ErrTooBig,
    /// Extended headers are needed.
    ErrExtHeaderRequired,
    /// An unknown one; an error if the highest bit is set.
    Other(u32),
}

wire_numbers! { OptionReplyKind: u32,
    1 = Ack,
    2 = Server,
    3 = Info,
    4 = MetaContext,
    0x8000_0001 = ErrUnsup,
    0x8000_0002 = ErrPolicy,
    0x8000_0003 = ErrInvalid,
    0x8000_0004 = ErrPlatform,
    0x8000_0005 = ErrTlsRequired,
    0x8000_0006 = ErrUnknown,
    0x8000_0007 = ErrShutdown,
    0x8000_0008 = ErrBlockSizeRequired,
    0x8000_0009 = ErrTooBig,
    0x8000_000a = ErrExtHeaderRequired,
}

impl OptionReplyKind {
    /// Whether it is an error.
    pub fn is_error(self) -> bool {
        self.to_wire() & 1 << 31 != 0
    }
}

const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// The header of a reply to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that it is for.
    pub option: OptionKind,
    /// Its kind.
    pub kind: OptionReplyKind,
    /// Bytes of payload that follow.
    pub length: u32,
}

impl OptionReplyHeader {
    /// Bytes on the wire.
    pub const SIZE: usize = 20;

    /// Decodes one.
    ///
    /// # Errors
    /// If the bytes are something else.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new(bytes, "the answer to an option");
        match reader.u64()? {
            REPLY_MAGIC => Ok(OptionReplyHeader {
                option: OptionKind::from_wire(reader.u32()?),
                kind: OptionReplyKind::from_wire(reader.u32()?),
                length: reader.u32()?,
            }),
            found => Err(ProtocolError::Magic {
                what: "the answer to an option",
                found,
            }),
        }
    }
}

/// A reply to an option, with its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionReply {
    /// Its kind.
    pub kind: OptionReplyKind,
    /// The message of an error.
    pub payload: Vec<u8>,
}

impl OptionReply {
    /// Success.
    pub fn ack() -> Self {
        OptionReply {
            kind: OptionReplyKind::Ack,
            payload: Vec::new(),
        }
    }

    /// An error with a message.
    pub fn error(kind: OptionReplyKind, text: &str) -> Self {
        OptionReply {
            kind,
            payload: text.as_bytes().into(),
        }
    }

    /// An export of the list.
    pub fn server(name: &str, description: &str) -> Self {
        let mut payload = Vec::new();
        put_string(&mut payload, name);
        payload.extend(description.as_bytes());
        OptionReply {
            kind: OptionReplyKind::Server,
            payload,
        }
    }

    /// A metadata context.
    pub fn context(id: u32, name: &str) -> Self {
        let mut payload = id.to_be_bytes().to_vec();
        payload.extend(name.as_bytes());
        OptionReply {
            kind: OptionReplyKind::MetaContext,
            payload,
        }
    }

    /// A piece of information.
    pub fn info(info: &Info) -> Self {
        OptionReply {
            kind: OptionReplyKind::Info,
            payload: info.encode(),
        }
    }

    /// Encodes it.
    pub fn encode(&self, option: OptionKind, out: &mut Vec<u8>) {
        out.extend(REPLY_MAGIC.to_be_bytes());
        out.extend(option.to_wire().to_be_bytes());
        out.extend(self.kind.to_wire().to_be_bytes());
        out.extend((self.payload.len() as u32).to_be_bytes());
        out.extend(&self.payload);
    }
}

/// Name and description of an export, from the payload of
/// [`OptionReplyKind::Server`].
pub fn decode_list_item(payload: &[u8]) -> Result<(String, String), ProtocolError> {
    let mut reader = Reader::new(payload, "the name of an export");
    let name = reader.string()?;
    Ok((name, text(reader.rest(), "the description of an export")?))
}

/// Size and flags of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Bytes.
    pub size: u64,
    /// [`transmission`](super::transmission) flags.
    pub flags: u16,
}

/// A piece of information about an export: `NBD_INFO_*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Info {
    /// Its size and flags.
    Export(ExportInfo),
    /// Its full name.
    Name(String),
    /// Its description.
    Description(String),
    /// Block sizes in bytes.
    BlockSize {
        /// The unit of requests.
        minimum: u32,
        /// The unit of fast requests.
        preferred: u32,
        /// Reads and writes at most.
        maximum: u32,
    },
    /// An unknown one.
    Other(u16),
}

impl Info {
    /// The number of [`Info::BlockSize`].
    pub const BLOCK_SIZE: u16 = 3;
    /// The number of [`Info::Name`].
    pub const NAME: u16 = 1;
    /// The number of [`Info::Description`].
    pub const DESCRIPTION: u16 = 2;

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let kind: u16 = match self {
            Info::Export(_) => 0,
            Info::Name(_) => Self::NAME,
            Info::Description(_) => Self::DESCRIPTION,
            Info::BlockSize { .. } => Self::BLOCK_SIZE,
            Info::Other(kind) => *kind,
        };
        out.extend(kind.to_be_bytes());
        match self {
            Info::Export(info) => {
                out.extend(info.size.to_be_bytes());
                out.extend(info.flags.to_be_bytes());
            }
            Info::Name(text) | Info::Description(text) => out.extend(text.as_bytes()),
            Info::BlockSize {
                minimum,
                preferred,
                maximum,
            } => {
                for number in [minimum, preferred, maximum] {
                    out.extend(number.to_be_bytes());
                }
            }
            Info::Other(_) => {}
        }
        out
    }

    /// Decodes the payload of [`OptionReplyKind::Info`].
    pub fn decode(payload: &[u8]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new(payload, "information about an export");
        let info = match reader.u16()? {
            0 => Info::Export(ExportInfo {
                size: reader.u64()?,
                flags: reader.u16()?,
            }),
            Self::NAME => Info::Name(text(reader.rest(), "the name of an export")?),
            Self::DESCRIPTION => {
                Info::Description(text(reader.rest(), "the description of an export")?)
            }
            Self::BLOCK_SIZE => {
                let (minimum, preferred, maximum) = (reader.u32()?, reader.u32()?, reader.u32()?);
                let sensible = minimum.is_power_of_two()
                    && preferred.is_power_of_two()
                    && minimum <= preferred.min(64 << 10)
                    && (maximum == u32::MAX || maximum % minimum == 0)
                    && maximum >= preferred.min(1 << 20);
                if !sensible {
                    return Err(ProtocolError::Value("these block sizes"));
                }
                Info::BlockSize {
                    minimum,
                    preferred,
                    maximum,
                }
            }
            other => {
                reader.rest();
                Info::Other(other)
            }
        };
        reader.end()?;
        Ok(info)
    }
}

/// The payload of [`OptionKind::Info`] and [`OptionKind::Go`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Go {
    /// The export; empty: the default one.
    pub name: String,
    /// Numbers of the information that the client requests.
    pub wanted: Vec<u16>,
}

impl Go {
    /// Decodes one.
    ///
    /// # Errors
    /// If the bytes are something else.
    pub fn decode(payload: &[u8]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new(payload, "an export's name and questions");
        let name = reader.string()?;
        let count = reader.u16()?;
        let wanted = reader.take(usize::from(count) * 2)?;
        reader.end()?;
        let number = |pair: &[u8]| u16::from_be_bytes([pair[0], pair[1]]);
        Ok(Go {
            name,
            wanted: wanted.chunks_exact(2).map(number).collect(),
        })
    }

    /// Encodes it.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_string(&mut out, &self.name);
        out.extend((self.wanted.len() as u16).to_be_bytes());
        out.extend(self.wanted.iter().flat_map(|wanted| wanted.to_be_bytes()));
        out
    }
}

/// The payload of [`OptionKind::ListMetaContext`] and
/// [`OptionKind::SetMetaContext`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextQuery {
    /// The export.
    pub name: String,
    /// Names of contexts, or beginnings of them (`base:`).
    pub queries: Vec<String>,
}

impl ContextQuery {
    /// Decodes one.
    ///
    /// # Errors
    /// If the bytes are something else.
    pub fn decode(payload: &[u8]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new(payload, "a query for metadata contexts");
        let name = reader.string()?;
        let count = reader.u32()?;
        let mut queries = Vec::new();
        for _ in 0..count {
            // Each takes at least four bytes of the payload, so their number is limited.
            queries.push(reader.string()?);
        }
        reader.end()?;
        Ok(ContextQuery { name, queries })
    }

    /// Encodes it.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_string(&mut out, &self.name);
        out.extend((self.queries.len() as u32).to_be_bytes());
        for query in &self.queries {
            put_string(&mut out, query);
        }
        out
    }

    /// A context that the server chose: its number and name, from the payload
    /// of [`OptionReplyKind::MetaContext`].
    pub fn decode_context(payload: &[u8]) -> Result<(u32, String), ProtocolError> {
        let mut reader = Reader::new(payload, "a metadata context");
        let id = reader.u32()?;
        let name = text(reader.rest(), "the name of a metadata context")?;
        Ok((id, name))
    }
}
