//! The negotiation of a connection. It blocks until a deadline at most, and accepts a limited
//! number of replies of limited length.

use std::io;
use std::time::Instant;

use super::NbdOptions;
use super::wire::{Socket, Wire};
use crate::error::one_line;
use crate::nbd::protocol::{
    ContextQuery, ExportInfo, Go, Headers, Info, MAGIC, MAX_PAYLOAD, OPTION_MAGIC, OptionKind,
    OptionReplyHeader, OptionReplyKind, ProtocolError, encode_option, handshake, transmission,
};

/// Bytes of a reply's payload at most: a name or a text, and some numbers.
const MAX_ANSWER: u32 = 16 << 10;
/// Replies to one option at most.
const MAX_ANSWERS: usize = 1000;
/// The second eight bytes of a server of before 2011.
const OLD_STYLE: u64 = 0x0000_4202_8186_1253;

/// The properties of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// Bytes.
    pub(super) size: u64,
    /// [`transmission`] flags.
    pub(super) flags: u16,
    /// The unit of requests in bytes.
    pub(super) minimum: u32,
    /// Bytes of a read or write at most.
    pub(super) maximum: u32,
}

/// A connection that is ready for requests.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) wire: Wire,
    pub(super) headers: Headers,
    /// The number of the context, if the server has it.
    pub(super) context: Option<u32>,
    pub(super) facts: Facts,
}

/// Why the negotiation failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoAgreement {
    /// There is no connection, or it ended. Trying again may help.
    #[error("{0}")]
    Unreachable(String),
    /// The server refuses it, or does not speak NBD.
    #[error("{0}")]
    Refused(String),
}

impl From<ProtocolError> for NoAgreement {
    fn from(error: ProtocolError) -> Self {
        NoAgreement::Refused(format!("The server does not speak NBD: {error}"))
    }
}

fn refused<T>(what: impl Into<String>) -> Result<T, NoAgreement> {
    Err(NoAgreement::Refused(what.into()))
}

/// Connects to the export. Ends by `deadline`.
pub(super) fn connect(options: &NbdOptions, deadline: Instant) -> Result<Agreed, NoAgreement> {
    let server = &options.server;
    let socket = Socket::connect(server, deadline).map_err(|e| {
        let text = format!("Failed to connect to '{server}': {}", why(&e));
        NoAgreement::Unreachable(text)
    })?;
    Handshake {
        wire: Wire::new(socket),
        options,
        deadline,
    }
    .agree()
}

/// The message for an error of a connection.
pub(super) fn why(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::TimedOut => "it did not answer in time".into(),
        io::ErrorKind::UnexpectedEof => "it closed the connection".into(),
        io::ErrorKind::InvalidData => format!("TLS: {error}"),
        _ => crate::strerror(error).to_string(),
    }
}

struct Handshake<'a> {
    wire: Wire,
    options: &'a NbdOptions,
    deadline: Instant,
}

/// A reply to an option.
struct Answer {
    kind: OptionReplyKind,
    payload: Vec<u8>,
}

impl Answer {
    /// The server's message.
    fn words(&self) -> String {
        let text = String::from_utf8_lossy(&self.payload);
        match text.is_empty() {
            true => format!("{:?}", self.kind),
            false => one_line(&text),
        }
    }
}

impl Handshake<'_> {
    fn agree(mut self) -> Result<Agreed, NoAgreement> {
        let Some(flags) = self.greeting()? else {
            return self.old_style();
        };
        let no_zeroes = flags & handshake::NO_ZEROES != 0;
        if flags & handshake::FIXED_NEWSTYLE == 0 {
            return self.old_way(Headers::Simple, no_zeroes);
        }
        self.start_tls()?;
        let headers = self.headers()?;
        let context = match headers {
            Headers::Simple => None,
            _ => self.context()?,
        };
        match self.go()? {
            None => self.old_way(headers, no_zeroes),
            Some((info, block)) => self.finish(headers, context, info, block),
        }
    }

    fn lost(&self, error: &io::Error) -> NoAgreement {
        let text = format!("NBD server {}: {}", self.options.server, why(error));
        match error.kind() {
            // Another attempt has the same certificates.
            io::ErrorKind::InvalidData => NoAgreement::Refused(text),
            _ => NoAgreement::Unreachable(text),
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<(), NoAgreement> {
        let result = self.wire.read_exact(buffer, self.deadline);
        result.map_err(|e| self.lost(&e))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), NoAgreement> {
        let result = self.wire.write_all(bytes, self.deadline);
        result.map_err(|e| self.lost(&e))
    }

    /// The server's flags; None if it is one of before 2011, which has none.
    fn greeting(&mut self) -> Result<Option<u16>, NoAgreement> {
        let mut magic = [0; 8];
        self.read(&mut magic)?;
        if u64::from_be_bytes(magic) != MAGIC {
            let found = u64::from_be_bytes(magic);
            return refused(format!(
                "The server does not speak NBD: it begins with {found:#018x}"
            ));
        }
        self.read(&mut magic)?;
        match u64::from_be_bytes(magic) {
            OPTION_MAGIC => {}
            OLD_STYLE => return Ok(None),
            found => {
                return refused(format!(
                    "The server does not speak NBD: it goes on with {found:#018x}"
                ));
            }
        }
        let mut flags = [0; 2];
        self.read(&mut flags)?;
        let flags = u16::from_be_bytes(flags);
        let ours = flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        self.write(&u32::from(ours).to_be_bytes())?;
        Ok(Some(ours))
    }

    /// A server of before 2011 has one export, without a name, and sends its size.
    fn old_style(mut self) -> Result<Agreed, NoAgreement> {
        if self.options.tls.is_some() {
            return refused("Server does not support STARTTLS");
        }
        if !self.options.export.is_empty() {
            return refused("Server does not support non-empty export names");
        }
        let mut answer = [0; 12];
        self.read(&mut answer)?;
        self.read(&mut [0; 124])?;
        let (size, flags) = answer.split_at(8);
        let flags = u32::from_be_bytes(flags.try_into().expect("four bytes"));
        let Ok(flags) = u16::try_from(flags) else {
            return refused(format!("Unexpected export flags {flags:#x}"));
        };
        let info = ExportInfo {
            size: u64::from_be_bytes(size.try_into().expect("eight bytes")),
            flags,
        };
        self.finish(Headers::Simple, None, info, None)
    }

    /// Sends an option, and receives the replies up to the last one, which is an acknowledgement or
    /// an error.
    fn ask(
        &mut self,
        option: OptionKind,
        payload: &[u8],
        mut each: impl FnMut(&Answer) -> Result<(), NoAgreement>,
    ) -> Result<Answer, NoAgreement> {
        self.write(&encode_option(option, payload))?;
        for _ in 0..MAX_ANSWERS {
            let mut header = [0; OptionReplyHeader::SIZE];
            self.read(&mut header)?;
            let header = OptionReplyHeader::decode(&header)?;
            if header.option != option {
                let text = format!("The server answers {:?}, not {option:?}", header.option);
                return refused(text);
            }
            if header.length > MAX_ANSWER {
                let text = format!("The server answers with {} bytes", header.length);
                return refused(text);
            }
            let mut payload = vec![0; header.length as usize];
            self.read(&mut payload)?;
            let answer = Answer {
                kind: header.kind,
                payload,
            };
            if answer.kind == OptionReplyKind::Ack || answer.kind.is_error() {
                return Ok(answer);
            }
            each(&answer)?;
        }
        refused(format!("The server answers {option:?} without end"))
    }

    fn start_tls(&mut self) -> Result<(), NoAgreement> {
        let Some(tls) = &self.options.tls else {
            return Ok(());
        };
        let answer = self.ask(OptionKind::StartTls, &[], |_| Ok(()))?;
        if answer.kind != OptionReplyKind::Ack {
            let text = format!("The server refuses TLS: {}", answer.words());
            return refused(text);
        }
        let result = self.wire.start_tls(tls, self.deadline);
        result.map_err(|e| self.lost(&e))
    }

    fn headers(&mut self) -> Result<Headers, NoAgreement> {
        for (option, headers) in [
            (OptionKind::ExtendedHeaders, Headers::Extended),
            (OptionKind::StructuredReply, Headers::Structured),
        ] {
            let answer = self.ask(option, &[], |_| Ok(()))?;
            match answer.kind {
                OptionReplyKind::Ack => return Ok(headers),
                OptionReplyKind::ErrTlsRequired => {
                    return refused(format!("The server wants TLS: {}", answer.words()));
                }
                _ => {}
            }
        }
        Ok(Headers::Simple)
    }

    fn context(&mut self) -> Result<Option<u32>, NoAgreement> {
        let query = ContextQuery {
            name: self.options.export.clone(),
            queries: vec![self.options.status_context().into()],
        };
        let (mut found, wanted) = (None, self.options.status_context());
        let last = self.ask(OptionKind::SetMetaContext, &query.encode(), |answer| {
            if answer.kind == OptionReplyKind::MetaContext {
                let (id, name) = ContextQuery::decode_context(&answer.payload)?;
                if name == wanted {
                    found = Some(id);
                }
            }
            Ok(())
        })?;
        // An export that does not exist is reported by the next option.
        Ok(found.filter(|_| last.kind == OptionReplyKind::Ack))
    }

    /// Chooses the export; None if the server does not have this option.
    #[allow(clippy::type_complexity)]
    fn go(&mut self) -> Result<Option<(ExportInfo, Option<(u32, u32)>)>, NoAgreement> {
        let go = Go {
            name: self.options.export.clone(),
            wanted: vec![Info::BLOCK_SIZE],
        };
        let (mut info, mut block) = (None, None);
        let last = self.ask(OptionKind::Go, &go.encode(), |answer| {
            if answer.kind == OptionReplyKind::Info {
                match Info::decode(&answer.payload)? {
                    Info::Export(export) => info = Some(export),
                    Info::BlockSize {
                        minimum, maximum, ..
                    } => block = Some((minimum, maximum)),
                    _ => {}
                }
            }
            Ok(())
        })?;
        match (last.kind, info) {
            (OptionReplyKind::Ack, Some(info)) => Ok(Some((info, block))),
            (OptionReplyKind::Ack, None) => refused("The server does not tell the export's size"),
            (OptionReplyKind::ErrUnsup, _) => Ok(None),
            (OptionReplyKind::ErrUnknown, _) => refused(format!(
                "Requested export not available: the server reported: {}",
                last.words()
            )),
            (OptionReplyKind::ErrTlsRequired, _) => {
                refused(format!("The server wants TLS: {}", last.words()))
            }
            _ => refused(format!("The server refuses the export: {}", last.words())),
        }
    }

    /// Chooses the export by `EXPORT_NAME`, which has no error replies.
    fn old_way(mut self, headers: Headers, no_zeroes: bool) -> Result<Agreed, NoAgreement> {
        if self.options.tls.is_some() && !self.wire.is_tls() {
            return refused("The server has no TLS");
        }
        let name = self.options.export.as_bytes().to_vec();
        self.write(&encode_option(OptionKind::ExportName, &name))?;
        let mut answer = [0; 10];
        self.read(&mut answer).map_err(|e| match e {
            NoAgreement::Unreachable(text) => {
                let name = &self.options.export;
                NoAgreement::Refused(format!("{text}, asked for the export '{name}'"))
            }
            other => other,
        })?;
        if !no_zeroes {
            self.read(&mut [0; 124])?;
        }
        let (size, flags) = answer.split_at(8);
        let info = ExportInfo {
            size: u64::from_be_bytes(size.try_into().expect("eight bytes")),
            flags: u16::from_be_bytes(flags.try_into().expect("two bytes")),
        };
        self.finish(headers, None, info, None)
    }

    fn finish(
        self,
        headers: Headers,
        context: Option<u32>,
        info: ExportInfo,
        block: Option<(u32, u32)>,
    ) -> Result<Agreed, NoAgreement> {
        if let (Some(name), None) = (&self.options.context, context) {
            return refused(format!("Requested x-dirty-bitmap '{name}' not found"));
        }
        // Without block sizes of the server, those that QEMU assumes.
        let whole = info.size.is_multiple_of(512) && context.is_none();
        let (minimum, maximum) = block.unwrap_or((if whole { 512 } else { 1 }, MAX_PAYLOAD));
        if info.size > i64::MAX as u64 {
            return refused(format!("The export is too large: {} bytes", info.size));
        }
        if !info.size.is_multiple_of(minimum.into()) {
            return refused(format!(
                "The export's size, {} bytes, is no multiple of its minimum block size {minimum}",
                info.size
            ));
        }
        let maximum = maximum.min(MAX_PAYLOAD) & !(minimum - 1);
        Ok(Agreed {
            wire: self.wire,
            headers,
            context,
            facts: Facts {
                size: info.size,
                flags: match info.flags & transmission::HAS_FLAGS {
                    0 => 0,
                    _ => info.flags,
                },
                minimum,
                maximum,
            },
        })
    }
}
