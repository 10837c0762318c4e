//! `-L`: what another server has, as qemu-nbd prints it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use zebu::internal::addresses;
use zebu::internal::nbd::{
    ContextQuery, DEFAULT_PORT, Go, Info, MAGIC, OPTION_MAGIC, OptionKind, OptionReplyHeader,
    OptionReplyKind, ProtocolError, decode_list_item, encode_option, handshake,
};

use super::arguments::Arguments;
use crate::output::{self, Shown, printed};
use crate::program::{Context, Failure, Outcome};

/// How long a server may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of an answer at most, and answers to one option.
const MAX_REPLY: u32 = 64 << 10;
const MAX_REPLIES: usize = 10_000;

const FLAGS: [(u16, &str); 12] = [
    (1, "readonly"),
    (2, "flush"),
    (3, "fua"),
    (4, "rotational"),
    (5, "trim"),
    (6, "zeroes"),
    (7, "df"),
    (8, "multi"),
    (9, "resize"),
    (10, "cache"),
    (11, "fast-zero"),
    (12, "block-status-payload"),
];

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// Connects to a server and prints its exports.
pub fn run(context: &Context, arguments: &Arguments) -> Outcome {
    if !arguments.files.is_empty() {
        return Err(Failure::new("List mode is incompatible with a file name").with_hint());
    }
    let files = [&arguments.tls_certificates, &arguments.tls_psk];
    if arguments.tls_creds.is_some() || files.iter().any(|option| option.is_some()) {
        let text = "--list: lists over TLS are not part of this version";
        return Err(Failure::new(text));
    }
    let (name, stream) = connect(arguments)?;
    let asked = Client(stream)
        .greet()
        .and_then(|mut client| client.describe(context));
    let text = asked
        .map_err(|e| Failure::new(format!("Failed to list '{name}': {}", zebu::strerror(&e))))?;
    output::report(&text)
}

fn connect(arguments: &Arguments) -> Result<(String, Box<dyn Stream>), Failure> {
    let limit = Some(PATIENCE);
    let (name, stream) = match &arguments.socket {
        Some(path) => {
            let connected = UnixStream::connect(path).and_then(|stream| {
                stream.set_read_timeout(limit)?;
                Ok(Box::new(stream) as _)
            });
            (path.shown().to_string(), connected)
        }
        None => {
            let host = arguments.bind.as_deref().unwrap_or("0.0.0.0");
            let port = arguments.port()?.unwrap_or(DEFAULT_PORT);
            let connected = addresses(host, port).and_then(|all| TcpStream::connect(&*all));
            let connected = connected.and_then(|stream| {
                stream.set_read_timeout(limit)?;
                Ok(Box::new(stream) as _)
            });
            (format!("{host}:{port}"), connected)
        }
    };
    let stream = stream.map_err(|e| {
        Failure::new(format!(
            "Failed to connect to '{name}': {}",
            zebu::strerror(&e)
        ))
    })?;
    Ok((name, stream))
}

struct Client(Box<dyn Stream>);

fn strange(error: ProtocolError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Client {
    fn greet(mut self) -> io::Result<Self> {
        let mut greeting = [0; 18];
        self.0.read_exact(&mut greeting)?;
        let magic = [MAGIC.to_be_bytes(), OPTION_MAGIC.to_be_bytes()].concat();
        let flags = u16::from_be_bytes([greeting[16], greeting[17]]);
        if greeting[..16] != magic[..] || flags & handshake::FIXED_NEWSTYLE == 0 {
            return Err(io::Error::other("it does not speak fixed newstyle NBD"));
        }
        let flags = u32::from(flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES));
        self.0.write_all(&flags.to_be_bytes())?;
        Ok(self)
    }

    /// The payloads of all answers to an option; the first error ends them, and is reported by
    /// its kind.
    fn ask(
        &mut self,
        kind: OptionKind,
        payload: &[u8],
    ) -> io::Result<Result<Vec<Vec<u8>>, OptionReplyKind>> {
        self.0.write_all(&encode_option(kind, payload))?;
        let mut all = Vec::new();
        while all.len() < MAX_REPLIES {
            let mut header = [0; OptionReplyHeader::SIZE];
            self.0.read_exact(&mut header)?;
            let header = OptionReplyHeader::decode(&header).map_err(strange)?;
            if header.option != kind || header.length > MAX_REPLY {
                return Err(io::Error::other("it answers something else"));
            }
            let mut payload = vec![0; header.length as usize];
            self.0.read_exact(&mut payload)?;
            match header.kind {
                OptionReplyKind::Ack => return Ok(Ok(all)),
                kind if kind.is_error() => return Ok(Err(kind)),
                _ => all.push(payload),
            }
        }
        Err(io::Error::other("it answers without end"))
    }

    fn describe(&mut self, context: &Context) -> io::Result<String> {
        let extended = self.ask(OptionKind::ExtendedHeaders, &[])?.is_ok();
        let structured = extended || self.ask(OptionKind::StructuredReply, &[])?.is_ok();
        let listed = self.ask(OptionKind::List, &[])?;
        let listed =
            listed.map_err(|kind| io::Error::other(format!("it does not list: {kind:?}")))?;
        let mut text = format!("exports available: {}\n", listed.len());
        for payload in listed {
            let (name, description) = decode_list_item(&payload).map_err(strange)?;
            text += &format!(" export: '{}'\n", printed::text(context, &name));
            if !description.is_empty() {
                text += &format!("  description: {}\n", printed::text(context, &description));
            }
            text += &self.details(context, &name, extended, structured)?;
        }
        // It may close the connection without an answer.
        let _ = self.ask(OptionKind::Abort, &[]);
        Ok(text)
    }

    fn details(
        &mut self,
        context: &Context,
        name: &str,
        extended: bool,
        structured: bool,
    ) -> io::Result<String> {
        let go = Go {
            name: name.into(),
            wanted: vec![Info::BLOCK_SIZE],
        };
        let mut text = String::new();
        for payload in self
            .ask(OptionKind::Info, &go.encode())?
            .unwrap_or_default()
        {
            match Info::decode(&payload).map_err(strange)? {
                Info::Export(info) => {
                    let named = FLAGS.iter().filter(|flag| info.flags & 1 << flag.0 != 0);
                    let names: String = named.map(|flag| format!("{} ", flag.1)).collect();
                    let (size, flags) = (info.size, info.flags);
                    let line = format!("  size:  {size}\n  flags: {flags:#x} ( {names})\n");
                    text.insert_str(0, &line);
                }
                Info::BlockSize {
                    minimum,
                    preferred,
                    maximum,
                } => {
                    text += &format!(
                        "  min block: {minimum}\n  opt block: {preferred}\n  max block: {maximum}\n"
                    );
                }
                _ => {}
            }
        }
        let bits = if extended { "64-bit" } else { "32-bit" };
        text += &format!("  transaction size: {bits}\n");
        if structured {
            let query = ContextQuery {
                name: name.into(),
                queries: Vec::new(),
            };
            let found = self.ask(OptionKind::ListMetaContext, &query.encode())?;
            let found = found.unwrap_or_default();
            text += &format!("  available meta contexts: {}\n", found.len());
            for payload in found {
                let (_, name) = ContextQuery::decode_context(&payload).map_err(strange)?;
                text += &format!("   {}\n", printed::text(context, &name));
            }
        }
        Ok(text)
    }
}
