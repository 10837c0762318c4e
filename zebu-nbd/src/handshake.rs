//! The handshake: options, until the client has chosen an export.

use std::io;
use std::sync::Arc;

use zebu::internal::nbd::{
    ContextQuery, Go, Headers, Info, MAGIC, OPTION_MAGIC, OptionHeader, OptionKind, OptionReply,
    OptionReplyKind, ProtocolError, handshake,
};
use zebu::tls::ServerTls;

use crate::export::Export;
use crate::transport::Transport;

/// Bytes of an option's payload that are decoded; a longer one is skipped and refused. Names are at
/// most 4 KiB.
const MAX_OPTION: u32 = 64 << 10;
/// A longer option ends the connection.
const MAX_SKIPPED: u32 = 16 << 20;

/// The result of a handshake.
pub struct Agreed {
    pub export: Arc<Export>,
    pub headers: Headers,
    /// The ids of the metadata contexts that were chosen.
    pub contexts: Vec<u32>,
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum NoAgreement {
    #[error("it ended the handshake")]
    Aborted,
    #[error("{0}")]
    Broken(String),
    #[error("{}", zebu::strerror(.0))]
    Io(#[from] io::Error),
}

impl From<ProtocolError> for NoAgreement {
    fn from(error: ProtocolError) -> Self {
        NoAgreement::Broken(error.to_string())
    }
}

struct Handshake<'a> {
    transport: &'a Transport,
    exports: &'a [Arc<Export>],
    tls: Option<&'a ServerTls>,
    no_zeroes: bool,
    headers: Headers,
    /// The export that contexts were chosen for, and their ids.
    contexts: Option<(String, Vec<u32>)>,
}

/// What follows an option.
enum Next {
    Replies(Vec<OptionReply>),
    Chosen(Arc<Export>),
}

fn refuse(kind: OptionReplyKind, text: &str) -> Next {
    Next::Replies(vec![OptionReply::error(kind, text)])
}

fn invalid(text: &str) -> Next {
    refuse(OptionReplyKind::ErrInvalid, text)
}

/// Does the handshake. With `tls`, nothing of the exports is revealed before TLS is established.
pub async fn negotiate(
    transport: &Transport,
    exports: &[Arc<Export>],
    tls: Option<&ServerTls>,
) -> Result<Agreed, NoAgreement> {
    let mut greeting = [MAGIC.to_be_bytes(), OPTION_MAGIC.to_be_bytes()].concat();
    let offered = handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES;
    greeting.extend(offered.to_be_bytes());
    transport.write_all(&greeting).await?;
    let mut flags = [0; 4];
    transport.read_exact(&mut flags).await?;
    let flags = u32::from_be_bytes(flags);
    if flags & !u32::from(offered) != 0 {
        let text = format!("it sent the unknown flags {flags:#x}");
        return Err(NoAgreement::Broken(text));
    }
    let mut handshake = Handshake {
        transport,
        exports,
        tls,
        no_zeroes: flags & u32::from(handshake::NO_ZEROES) != 0,
        headers: Headers::Simple,
        contexts: None,
    };
    let export = handshake.options().await?;
    let contexts = match handshake.contexts {
        Some((name, contexts)) if name == export.options().name => contexts,
        _ => Vec::new(),
    };
    Ok(Agreed {
        export,
        headers: handshake.headers,
        contexts,
    })
}

impl Handshake<'_> {
    async fn options(&mut self) -> Result<Arc<Export>, NoAgreement> {
        loop {
            let mut header = [0; OptionHeader::SIZE];
            self.transport.read_exact(&mut header).await?;
            let header = OptionHeader::decode(&header)?;
            let kind = header.kind;
            let next = match self.payload(header).await? {
                None => refuse(OptionReplyKind::ErrTooBig, "the option is too long"),
                Some(payload) => self.option(kind, &payload).await?,
            };
            match next {
                Next::Chosen(export) => return Ok(export),
                Next::Replies(replies) => self.send(kind, &replies).await?,
            }
        }
    }

    /// The payload of an option. `None`: it was too long and was skipped.
    async fn payload(&self, header: OptionHeader) -> Result<Option<Vec<u8>>, NoAgreement> {
        if header.length > MAX_SKIPPED {
            let text = format!("it sent an option of {} bytes", header.length);
            return Err(NoAgreement::Broken(text));
        }
        let mut payload = vec![0; header.length.min(MAX_OPTION) as usize];
        let mut left = header.length as usize;
        while left > payload.len() {
            let n = payload.len().min(left - payload.len());
            self.transport.read_exact(&mut payload[..n]).await?;
            left -= n;
        }
        self.transport.read_exact(&mut payload).await?;
        Ok((header.length <= MAX_OPTION).then_some(payload))
    }

    async fn send(&self, kind: OptionKind, replies: &[OptionReply]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for reply in replies {
            reply.encode(kind, &mut bytes);
        }
        self.transport.write_all(&bytes).await
    }

    async fn option(&mut self, kind: OptionKind, payload: &[u8]) -> Result<Next, NoAgreement> {
        if self.tls.is_some() && !self.transport.is_tls() {
            match kind {
                OptionKind::StartTls | OptionKind::Abort => {}
                OptionKind::ExportName => {
                    let text = "it requested an export without TLS";
                    return Err(NoAgreement::Broken(text.into()));
                }
                _ => {
                    let text = "this server requires TLS";
                    return Ok(refuse(OptionReplyKind::ErrTlsRequired, text));
                }
            }
        }
        let empty = payload.is_empty();
        Ok(match kind {
            OptionKind::ExportName => return self.export_name(payload).await,
            OptionKind::Abort => {
                // The client may have closed the connection already.
                let _ = self.send(kind, &[OptionReply::ack()]).await;
                return Err(NoAgreement::Aborted);
            }
            OptionKind::List if empty => self.list(),
            OptionKind::StartTls if empty => return self.start_tls().await,
            OptionKind::StructuredReply if empty => {
                self.headers = self.headers.max(Headers::Structured);
                Next::Replies(vec![OptionReply::ack()])
            }
            OptionKind::ExtendedHeaders if empty => {
                self.headers = Headers::Extended;
                Next::Replies(vec![OptionReply::ack()])
            }
            OptionKind::List
            | OptionKind::StartTls
            | OptionKind::StructuredReply
            | OptionKind::ExtendedHeaders => invalid("this option has no payload"),
            OptionKind::Info | OptionKind::Go => return self.go(kind, payload).await,
            OptionKind::ListMetaContext | OptionKind::SetMetaContext => self.query(kind, payload),
            OptionKind::Other(_) => refuse(OptionReplyKind::ErrUnsup, "an unknown option"),
        })
    }

    fn find(&self, name: &str) -> Option<&Arc<Export>> {
        let mut exports = self.exports.iter();
        exports.find(|export| export.options().name == name)
    }

    fn list(&self) -> Next {
        let one = |export: &Arc<Export>| {
            let options = export.options();
            let description = options.description.as_deref().unwrap_or_default();
            OptionReply::server(&options.name, description)
        };
        let mut replies: Vec<_> = self.exports.iter().map(one).collect();
        replies.push(OptionReply::ack());
        Next::Replies(replies)
    }

    /// `NBD_OPT_EXPORT_NAME`, which cannot be refused with a reply.
    async fn export_name(&self, payload: &[u8]) -> Result<Next, NoAgreement> {
        let found = std::str::from_utf8(payload).ok().and_then(|n| self.find(n));
        let Some(export) = found else {
            let name = String::from_utf8_lossy(payload).into_owned();
            let text = format!("it requested the export {name:?}, which does not exist");
            return Err(NoAgreement::Broken(text));
        };
        let info = self.info(export);
        let mut bytes = info.size.to_be_bytes().to_vec();
        bytes.extend(info.flags.to_be_bytes());
        if !self.no_zeroes {
            bytes.extend([0; 124]);
        }
        self.transport.write_all(&bytes).await?;
        Ok(Next::Chosen(export.clone()))
    }

    fn info(&self, export: &Export) -> zebu::internal::nbd::ExportInfo {
        let structured = self.headers >= Headers::Structured;
        export.info(structured, self.headers == Headers::Extended)
    }

    async fn go(&self, kind: OptionKind, payload: &[u8]) -> Result<Next, NoAgreement> {
        let Ok(go) = Go::decode(payload) else {
            return Ok(invalid("the option is malformed"));
        };
        let Some(export) = self.find(&go.name) else {
            let text = format!("export '{}' not present", go.name);
            return Ok(refuse(OptionReplyKind::ErrUnknown, &text));
        };
        let options = export.options();
        let mut infos = Vec::new();
        if go.wanted.contains(&Info::NAME) {
            infos.push(Info::Name(options.name.clone()));
        }
        if let Some(text) = &options.description
            && go.wanted.contains(&Info::DESCRIPTION)
        {
            infos.push(Info::Description(text.clone()));
        }
        infos.push(export.block_size());
        infos.push(Info::Export(self.info(export)));
        let mut replies: Vec<_> = infos.iter().map(OptionReply::info).collect();
        replies.push(OptionReply::ack());
        if kind == OptionKind::Info {
            return Ok(Next::Replies(replies));
        }
        self.send(kind, &replies).await?;
        Ok(Next::Chosen(export.clone()))
    }

    async fn start_tls(&mut self) -> Result<Next, NoAgreement> {
        let Some(tls) = self.tls else {
            let text = "this server does not support TLS";
            return Ok(refuse(OptionReplyKind::ErrPolicy, text));
        };
        if self.transport.is_tls() {
            return Ok(invalid("TLS is established already"));
        }
        self.send(OptionKind::StartTls, &[OptionReply::ack()])
            .await?;
        self.transport.start_tls(tls)?;
        // The protocol requires that what was negotiated without TLS is forgotten.
        self.headers = Headers::Simple;
        self.contexts = None;
        Ok(Next::Replies(Vec::new()))
    }

    fn query(&mut self, kind: OptionKind, payload: &[u8]) -> Next {
        if self.headers < Headers::Structured {
            return invalid("structured replies must be agreed on first");
        }
        let Ok(query) = ContextQuery::decode(payload) else {
            return invalid("the option is malformed");
        };
        let set = kind == OptionKind::SetMetaContext;
        if set {
            self.contexts = None;
        }
        let Some(export) = self.find(&query.name).cloned() else {
            let text = format!("export '{}' not present", query.name);
            return refuse(OptionReplyKind::ErrUnknown, &text);
        };
        let found = export.find_contexts(&query.queries, !set);
        let mut replies: Vec<_> = found
            .iter()
            .map(|(id, name)| OptionReply::context(if set { *id } else { 0 }, name))
            .collect();
        if set {
            let ids = found.iter().map(|(id, _)| *id).collect();
            self.contexts = Some((query.name, ids));
        }
        replies.push(OptionReply::ack());
        Next::Replies(replies)
    }
}
