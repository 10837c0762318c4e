//! The connections to one export.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::handshake::{self, Agreed, Facts, NoAgreement};
use super::link::Link;
use super::options::ALLOCATION;
use super::{NbdError, NbdOptions};
use crate::dropped::DroppedChanges;
use crate::nbd::protocol::{STATE_HOLE, STATE_ZERO, transmission};
use crate::{Error, Result};

/// The time for an attempt to connect, without `open_timeout`. Some servers reply late.
const ONE_ATTEMPT: Duration = Duration::from_secs(60);
/// The time for a further connection.
const ONE_MORE: Duration = Duration::from_secs(5);
/// The longest limit, which a clock can represent.
const LONGEST: Duration = Duration::from_secs(u32::MAX as u64);
/// The time for the last attempt.
const LAST: Duration = Duration::from_millis(100);
/// The context that tells in which image of a chain bytes are.
const DEPTH: &str = "qemu:allocation-depth";
/// The wait between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// An export, and the connections to it.
#[derive(Debug)]
pub(super) struct Client {
    options: Arc<NbdOptions>,
    facts: Facts,
    /// The first is made at once, the others after the first request of a queue for them.
    links: Vec<LinkPlace>,
    dropped: Arc<DroppedChanges>,
    server: String,
}

/// A place for a connection.
#[derive(Debug, Default)]
struct LinkPlace {
    link: OnceLock<Arc<Link>>,
    /// Whether its thread was started.
    tried: AtomicBool,
}

impl Client {
    /// Connects to the server.
    pub(super) fn connect(mut options: NbdOptions) -> Result<Client> {
        options.open_timeout = options.open_timeout.min(LONGEST);
        options.reconnect_delay = options.reconnect_delay.min(LONGEST);
        let options = Arc::new(options);
        let agreed = connect(&options)?;
        let facts = agreed.facts;
        if options.write && facts.flags & transmission::READ_ONLY != 0 {
            let text = "request on write denied without write permission: the server says that \
                        the export is read-only";
            return Err(Error::Refused(text.into()));
        }
        let many = facts.flags & transmission::CAN_MULTI_CONN != 0;
        // With several, a flush on a new connection would cover writes on another one whose loss is
        // not known yet.
        let count = match many && !options.keeps_changes() {
            true => options.connections.max(1),
            false => 1,
        };
        let links: Vec<LinkPlace> = (0..count).map(|_| LinkPlace::default()).collect();
        let server = options.server.to_string();
        let link = Link::new(options.clone(), agreed);
        // It was empty.
        let _ = links[0].link.set(link);
        Ok(Client {
            options,
            facts,
            links,
            dropped: Arc::default(),
            server,
        })
    }

    pub(super) fn options(&self) -> &NbdOptions {
        &self.options
    }

    pub(super) fn size(&self) -> u64 {
        self.facts.size
    }

    /// The minimum block size.
    pub(super) fn minimum(&self) -> u64 {
        self.facts.minimum.into()
    }

    /// Bytes of one read or write at most.
    pub(super) fn maximum(&self) -> u64 {
        self.facts.maximum.into()
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.has(transmission::READ_ONLY)
    }

    /// Whether the export has this [`transmission`] flag.
    pub(super) fn has(&self, flag: u16) -> bool {
        self.facts.flags & flag != 0
    }

    /// Whether bytes with these flags of an extent read as zeroes, and whether they are stored, as
    /// QEMU understands the flags of any context.
    pub(super) fn meaning(&self, flags: u64) -> (bool, bool) {
        let flags = match self.options.status_context() {
            // The bytes are in the first image of a chain, or (all alike) in one below.
            DEPTH => flags.min(2),
            _ => flags,
        };
        // Other contexts do not tell what reads as zeroes.
        let is_told = self.options.status_context() == ALLOCATION;
        (is_told && flags & STATE_ZERO != 0, flags & STATE_HOLE == 0)
    }

    /// The changes that were dropped.
    pub(super) fn dropped(&self) -> &Arc<DroppedChanges> {
        &self.dropped
    }

    /// The connection of a queue; the first one until its own is made.
    pub(super) fn link(self: &Arc<Self>, queue: u64) -> &Arc<Link> {
        // Queues that are made together have numbers in a row.
        let nth = (queue % self.links.len() as u64) as usize;
        let place = &self.links[nth];
        place.link.get().unwrap_or_else(|| {
            if !place.tried.swap(true, Ordering::Relaxed) {
                self.begin_another(nth);
            }
            self.links[0].link.get().expect("connected")
        })
    }

    /// Starts a thread that makes another connection. If that fails, the first one is used.
    fn begin_another(self: &Arc<Self>, nth: usize) {
        let (options, client) = (self.options.clone(), Arc::downgrade(self));
        let connect = move || {
            let result = handshake::connect(&options, Instant::now() + ONE_MORE);
            let Some(client) = client.upgrade() else {
                return;
            };
            match result {
                Ok(agreed) if agreed.facts == client.facts => {
                    let link = Link::new(options, agreed);
                    // It was empty.
                    let _ = client.links[nth].link.set(link);
                }
                Ok(_) => {}
                Err(e) => {
                    tracing::debug!("NBD server {}: no further connection: {e}", client.server);
                }
            }
        };
        let thread = std::thread::Builder::new().name("nbd-connect".into());
        if let Err(e) = thread.spawn(connect) {
            tracing::debug!("NBD server {}: no further connection: {e}", self.server);
        }
    }

    /// An error of this client's own.
    pub(super) fn error(&self, errno: i32, what: &str) -> std::io::Error {
        let error = NbdError {
            server: self.server.clone(),
            what: what.into(),
            errno,
        };
        error.into()
    }
}

/// Connects; with `open_timeout` tries again until then.
fn connect(options: &NbdOptions) -> Result<Agreed> {
    let begun = Instant::now();
    let limit = match options.open_timeout.is_zero() {
        true => ONE_ATTEMPT,
        false => options.open_timeout,
    };
    loop {
        // The last attempt begins at the limit.
        let until = (begun + limit).max(Instant::now() + LAST);
        let text = match handshake::connect(options, until) {
            Ok(agreed) => return Ok(agreed),
            Err(NoAgreement::Refused(text)) => return Err(Error::Refused(text)),
            Err(NoAgreement::Unreachable(text)) => text,
        };
        let left = limit.saturating_sub(begun.elapsed());
        if options.open_timeout.is_zero() || left.is_zero() {
            return Err(Error::Refused(text));
        }
        std::thread::sleep(PAUSE.min(left));
    }
}
