//! Objects on web servers and in object stores. Images in them are only read; a new object is
//! written to a store in order.
//!
//! An object is read by blocks ([`blocks`]). Requests for them run on a thread of their own
//! (`runtime.rs`); the tasks of queues wait for blocks and copy from them.
//!
//! | file | subject |
//! |---|---|
//! | `blocks.rs` | the blocks that are here, are fetched, are waited for |
//! | `ahead.rs` | readahead |
//! | `client.rs` | fetching blocks; the order of a server without ranges |
//! | `retry.rs` `failure.rs` | attempts that fail |
//! | `source.rs` | what objects are read from |
//! | `http/` | web servers |
//! | `store.rs` | object stores |
//! | `upload.rs` | objects that are written to a store |

mod ahead;
mod blocks;
mod client;
mod failure;
mod http;
mod retry;
mod runtime;
mod source;
#[cfg(feature = "object-store")]
mod store;
#[cfg(feature = "object-store")]
mod upload;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::storage::{CacheIdentity, FileStamp, Iov, OpKind, Properties, Queue, Started, Storage};
use crate::{Error, Result};
use client::{Client, Reading, in_time};
use failure::Trouble;
pub(crate) use http::{Access, HttpOptions, Login};
use retry::Attempts;
use source::Opened;
#[cfg(feature = "object-store")]
pub use store::StoreKind;
#[cfg(feature = "object-store")]
pub(crate) use store::StoreOptions;
#[cfg(feature = "object-store")]
pub use upload::{ObjectState, Upload};

/// Gives TLS its cryptography, unless the program has chosen one for the process.
fn provide_cryptography() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // An error means that another thread was first.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

/// How an object is read. None: not given, the default holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteOptions {
    /// `readahead`: bytes that are read ahead at most; None: 32 MiB.
    pub readahead: Option<u64>,
    /// `timeout`: how long connecting may take, and how long a server may send nothing; None: 30 s.
    pub timeout: Option<Duration>,
    /// `connections`, an option of zebu's own: requests in flight at most; None: 20.
    pub connections: Option<usize>,
}

/// The time without a byte after which a request has failed.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Requests in flight.
const CONNECTIONS: usize = 20;

impl RemoteOptions {
    fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(TIMEOUT)
    }
}

/// Where an object is.
#[derive(Clone, Debug)]
pub(crate) enum ObjectPlace {
    Http(Box<HttpOptions>),
    #[cfg(feature = "object-store")]
    Store(StoreOptions),
}

/// An open object.
#[derive(Debug)]
pub struct Object {
    client: Arc<Client>,
    /// How it was opened; None: it is in memory.
    opened: Option<(ObjectPlace, Duration)>,
    properties: Properties,
    cache_identity: CacheIdentity,
}

impl Object {
    /// Opens an object, which takes at least one request. Messages have its `name`. Blocks.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is none, or the server does not let it be read.
    pub(crate) fn open(
        place: ObjectPlace,
        name: PathBuf,
        options: RemoteOptions,
    ) -> Result<Object> {
        let runtime = runtime::handle()?;
        ended(&runtime, open(runtime.clone(), place, name, options))?
    }

    /// Which bytes it has.
    pub(crate) fn cache_identity(&self) -> &CacheIdentity {
        &self.cache_identity
    }
}

/// The result of a future of the runtime's thread. Blocks.
fn ended<T: Send + 'static>(
    runtime: &tokio::runtime::Handle,
    future: impl Future<Output = T> + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    runtime.spawn(async move { sender.send(future.await) });
    let gone = |_| io::Error::other("the thread of requests has panicked");
    receiver.recv().map_err(gone)
}

/// Opens the object at a place, once.
async fn attempt(place: &ObjectPlace, timeout: Duration) -> Result<Opened, Trouble> {
    match place {
        ObjectPlace::Http(http) => http::open(http, timeout).await,
        #[cfg(feature = "object-store")]
        ObjectPlace::Store(store) => store::open(store, timeout).await,
    }
}

async fn open(
    runtime: tokio::runtime::Handle,
    place: ObjectPlace,
    name: PathBuf,
    options: RemoteOptions,
) -> Result<Object> {
    let timeout = options.timeout();
    let mut attempts = Attempts::default();
    let opened: Opened = loop {
        match in_time(timeout, attempt(&place, timeout)).await {
            Ok(opened) => break opened,
            Err(trouble) => match attempts.failed(trouble) {
                Ok((wait, _)) => tokio::time::sleep(wait).await,
                Err(trouble) => {
                    let error = trouble.error("");
                    return Err(Error::Refused(error.what().into()));
                }
            },
        }
    };
    let cache_identity = opened.cache_identity.clone();
    let reading = Reading {
        name: name.display().to_string(),
        connections: options.connections.unwrap_or(CONNECTIONS),
        readahead: options.readahead,
        timeout,
    };
    Ok(Object {
        client: Arc::new(Client::new(runtime, opened, reading)),
        opened: Some((place, timeout)),
        properties: Properties::PLAIN.path(name).is_device(true).is_remote(true),
        cache_identity,
    })
}

// SAFETY: the memory of a read is used only while its future is polled.
#[allow(unsafe_code)]
unsafe impl Storage for Object {
    unsafe fn start(
        &self,
        _queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        match (kind, memory) {
            (OpKind::Read, Some(iov)) => {
                Started::later(self.client.clone().read(offset, iov.clone()))
            }
            (OpKind::Flush | OpKind::Extent, _) => Started::done(Ok(0)),
            (OpKind::SetLength, _) => {
                let error = "Image is read-only";
                Started::fixed_length(self.client.length(), length, error)
            }
            _ => Started::done(Err(io::Error::from_raw_os_error(libc::EROFS))),
        }
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.client.length())
    }

    /// By opening it once more, over a new connection.
    fn stamp_by_request(&self) -> Option<io::Result<FileStamp>> {
        let (place, timeout) = self.opened.clone()?;
        let again = async move { in_time(timeout, attempt(&place, timeout)).await };
        let again = runtime::handle().and_then(|runtime| ended(&runtime, again));
        let opened = match again {
            Ok(Ok(opened)) => opened,
            Ok(Err(trouble)) => return Some(Err(io::Error::other(trouble.error("").to_string()))),
            Err(error) => return Some(Err(error)),
        };
        Some(Ok(FileStamp {
            file: None,
            size: opened.length,
            seconds: opened.modified?,
            nanoseconds: 0,
            inode: None,
        }))
    }
}
