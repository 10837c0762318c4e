//! An image in a Ceph cluster (RBD) as a storage.
//!
//! Ceph's own library, librbd, is loaded when the first image is opened. Its asynchronous calls end
//! on threads of the library, which wake the tasks that wait. Calls that block are made by a thread
//! of each image.
//!
//! librbd promises no order of calls in flight, so what overlaps a change whose request was dropped
//! waits for its end here.
//!
//! | file | subject |
//! |---|---|
//! | `library.rs` | the functions of the library |
//! | `open.rs` | connecting, opening, creating, removing |
//! | `call.rs` | asynchronous calls |
//! | `worker.rs` | calls that block |
//! | `operation.rs` | the calls of each operation |
#![allow(unsafe_code)]

mod call;
mod library;
mod open;
mod operation;
#[cfg(test)]
mod tests;
mod worker;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::dropped::{DroppedChanges, range_of};
use crate::error::{one_line, with_errno};
use crate::storage::{CacheMode, Iov, OpKind, Properties, Queue, Secret, Started, Storage};
use crate::{Error, Result};
use open::Image;
use worker::Worker;

/// Which image of which cluster, and how it is reached.
#[derive(Clone, Debug)]
pub(crate) struct RbdOptions {
    pub pool: String,
    pub namespace: String,
    pub image: String,
    /// It is only read then.
    pub snapshot: Option<String>,
    /// The file of the cluster's configuration; None: Ceph's default ones, if they exist.
    pub conf: Option<PathBuf>,
    /// None: `admin`.
    pub user: Option<String>,
    /// The user's key, in base64.
    pub key: Option<Secret>,
    /// Options of the configuration.
    pub set: Vec<(String, String)>,
    /// The name that is shown.
    pub name: PathBuf,
    pub write: bool,
    /// Create it, empty. It must not exist.
    pub create: bool,
    pub cache: CacheMode,
}

/// An open image.
#[derive(Debug)]
pub struct Rbd {
    shared: Arc<Shared>,
    properties: Properties,
}

/// What operations use.
#[derive(Debug)]
struct Shared {
    image: Arc<Image>,
    worker: Worker,
    dropped: Arc<DroppedChanges>,
    name: String,
}

impl Rbd {
    /// Connects and opens the image. Blocks, as long as the cluster's configuration lets it.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no library, no cluster or no image.
    pub(crate) fn open(options: RbdOptions) -> Result<Rbd> {
        let image = Arc::new(Image::open(&options)?);
        let shared = Shared {
            worker: Worker::start()?,
            image,
            dropped: Arc::default(),
            name: options.name.display().to_string(),
        };
        Ok(Rbd {
            shared: Arc::new(shared),
            properties: Properties::PLAIN
                .path(options.name)
                .cache(options.cache)
                .is_remote(true),
        })
    }

    /// Which bytes it has.
    pub(crate) fn cache_identity(&self) -> &crate::storage::CacheIdentity {
        self.shared.image.cache_identity()
    }

    /// Closes and removes the image. Blocks.
    ///
    /// # Errors
    /// Those of the cluster.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let result = self.shared.image.remove();
        result.map_err(|errno| self.shared.error("remove the image", errno))
    }
}

impl Shared {
    /// The error of a call that returned `-errno`.
    fn error(&self, doing: &str, errno: i32) -> io::Error {
        let text = io::Error::from_raw_os_error(errno);
        let text = format!("Ceph failed to {doing}: {}", crate::strerror(&text));
        let source = RbdError {
            name: self.name.clone(),
            what: one_line(&text),
        };
        with_errno(errno, source)
    }
}

/// The error of an image in Ceph.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{name}: {what}")]
struct RbdError {
    name: String,
    what: String,
}

/// What could not be done when an image was opened.
fn refused(what: &str, errno: i32) -> Error {
    let error = io::Error::from_raw_os_error(errno);
    Error::Refused(format!("{what}: {}", crate::strerror(&error)))
}

// SAFETY: the memory of an operation is used only while it is started and while its future is
// polled.
unsafe impl Storage for Rbd {
    unsafe fn start(
        &self,
        _queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        let (shared, range) = (self.shared.clone(), range_of(kind, offset, length));
        self.shared.dropped.start(range, memory, move |memory| {
            operation::start(&shared, kind, offset, length, memory)
        })
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn len(&self) -> io::Result<u64> {
        let size = self.shared.image.size();
        size.map_err(|errno| self.shared.error("tell the size", errno))
    }
}
