//! An export of an NBD server as a storage.
//!
//! A connection (`link.rs`) is a socket that never blocks, with the requests in flight, behind one
//! lock. Each queue with requests has a task that sends and receives for all. Threads only connect
//! and look for servers that do not reply.
//!
//! | file | subject |
//! |---|---|
//! | `options.rs` | server, export, limits of time |
//! | `wire.rs` | the bytes of a connection |
//! | `handshake.rs` | the negotiation of a connection |
//! | `slots.rs` | requests in flight, and their memory |
//! | `session.rs` | sending requests, receiving replies |
//! | `link.rs` | waiting for replies, lost connections |
//! | `link/reconnect.rs` `link/watchdog.rs` | threads that reconnect and look for time-outs |
//! | `connections.rs` | the connections to one export |
//! | `operation.rs` | the requests of each operation |

mod connections;
mod failure;
mod handshake;
mod link;
mod operation;
mod options;
mod session;
mod slots;
mod wire;

use std::io;
use std::pin::Pin;
use std::sync::Arc;

use crate::storage::{
    Alignment, Blocks, Export, Iov, OpKind, Properties, Queue, Started, Storage, connect,
};
use connections::Client;
pub use failure::NbdError;
pub(crate) use options::uri;
pub use options::{NbdOptions, NbdServer};

/// An open export, of fixed size.
#[derive(Debug)]
pub struct Nbd {
    client: Arc<Client>,
    /// The path is the export's name in QEMU's spelling.
    properties: Properties,
    blocks: Blocks,
}

impl Nbd {
    /// Connects. Blocks, for the time that the options allow.
    ///
    /// # Errors
    /// [`Error::Refused`](crate::Error::Refused) if there is no connection, or the server refuses
    /// the export.
    pub fn open(options: NbdOptions) -> crate::Result<Nbd> {
        let (path, cache) = (options.name.clone(), options.cache);
        let client = Client::connect(options)?;
        Ok(Nbd {
            blocks: Blocks::new(client.minimum()),
            properties: Properties::PLAIN
                .path(path)
                .cache(cache)
                .alignment(Alignment {
                    memory: 1,
                    offset: client.minimum() as usize,
                })
                .is_device(true)
                .is_remote(true),
            client: Arc::new(client),
        })
    }

    /// As [`Nbd::open`] without blocking: another thread connects.
    ///
    /// # Errors
    /// Those of [`Nbd::open`], and of starting a thread.
    pub async fn open_async(options: NbdOptions) -> crate::Result<Nbd> {
        connect::on_thread("nbd-connect", || Nbd::open(options)).await
    }

    /// The options that it was opened with.
    pub(crate) fn options(&self) -> &NbdOptions {
        self.client.options()
    }

    /// Passes the extents of the whole export to `each`, in order: their ranges in bytes, and their
    /// flags in the context that the export was opened with ([`NbdOptions::context`]). Neighbours
    /// may be alike.
    ///
    /// # Errors
    /// Those of the server, and of a violation of the protocol.
    pub async fn each_extent(
        &self,
        queue: &Queue,
        each: impl FnMut(std::ops::Range<u64>, u64),
    ) -> io::Result<()> {
        operation::each_extent(&self.client, queue, each).await
    }

    /// Whether the server says that the export cannot be written.
    pub fn is_read_only(&self) -> bool {
        self.client.is_read_only()
    }
}

/// The flag of a dirty extent.
const STATE_DIRTY: u64 = 1;

impl Export for Nbd {
    fn dirty<'a>(
        &'a self,
        queue: &'a Queue,
        context: &'a str,
        each: &'a mut dyn FnMut(std::ops::Range<u64>),
    ) -> Pin<Box<dyn Future<Output = crate::Result<()>> + 'a>> {
        Box::pin(async move {
            let own;
            let nbd = match self.options().context.as_deref() == Some(context) {
                true => self,
                false => {
                    let options = NbdOptions {
                        context: Some(context.into()),
                        write: false,
                        ..self.options().clone()
                    };
                    own = Nbd::open_async(options).await?;
                    &own
                }
            };
            let dirty = |range, flags| {
                if flags & STATE_DIRTY != 0 {
                    each(range);
                }
            };
            Ok(nbd.each_extent(queue, dirty).await?)
        })
    }
}

// SAFETY: a link uses the memory of a request only under its lock and while the request is
// registered there, which ends when the future is dropped (`operation.rs`).
#[allow(unsafe_code)]
unsafe impl Storage for Nbd {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        // SAFETY: passed on.
        unsafe { operation::start(&self.client, queue, kind, offset, length, memory) }
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.client.size())
    }

    fn export(&self) -> Option<&dyn Export> {
        Some(self)
    }

    fn blocks(&self) -> Option<&Blocks> {
        (self.client.minimum() > 1).then_some(&self.blocks)
    }
}
