//! A file on an SSH server as a storage.
//!
//! The program `ssh` makes the connection, by the user's own configuration, agent, keys and known
//! hosts; the bytes that pass through its pipes are those of the SSH File Transfer Protocol,
//! version 3 (draft-ietf-secsh-filexfer-02), which servers call `sftp`.
//!
//! A server has to execute requests for one file as if one came after the other (section 4.1 of the
//! draft). OpenSSH does, and others execute reads and writes side by side (pkg/sftp of Go). So what
//! overlaps a change whose request was dropped waits for its reply here.
//!
//! A thread writes to the program and another one reads from it. The tasks of queues wait for
//! replies and copy from them.
//!
//! | file | subject |
//! |---|---|
//! | `options.rs` | server, file, check of the host key |
//! | `program.rs` | the program `ssh` |
//! | `packet.rs` | the bytes of requests and replies |
//! | `connection.rs` | opening: one request after the other |
//! | `client.rs` | requests in flight |
//! | `threads.rs` | writing, reading, lost connections |
//! | `operation.rs` | the requests of each operation |
//! | `version.rs` | whether a file is as it was |

mod client;
mod connection;
mod failure;
mod operation;
mod options;
mod packet;
mod program;
#[cfg(test)]
mod tests;
mod threads;
mod version;

use std::io;
use std::pin::Pin;
use std::sync::Arc;

use crate::dropped::range_of;
use crate::storage::{
    CacheIdentity, Check, FileStamp, Iov, OpKind, Properties, Queue, Started, Storage,
};
use crate::{Error, Result};
use client::Client;
use connection::Connection;
pub use options::{HashKind, HostKeyCheck};
pub(crate) use options::{SshOptions, SshServer};

/// An open file.
#[derive(Debug)]
pub struct Ssh {
    client: Arc<Client>,
    properties: Properties,
    was_created: bool,
}

impl Ssh {
    /// Connects and opens the file. Blocks.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no connection, or the server refuses the file.
    pub(crate) fn open(options: SshOptions) -> Result<Ssh> {
        let connection = Connection::open(&options);
        let connection = connection.map_err(|e| Error::Refused(e.what))?;
        Ssh::over(options, connection)
    }

    fn over(options: SshOptions, connection: Connection) -> Result<Ssh> {
        let was_created = connection.file.was_created;
        let properties = Properties::PLAIN
            .path(options.name.clone())
            .cache(options.cache)
            .is_remote(true);
        Ok(Ssh {
            client: threads::start(options, connection)?,
            properties,
            was_created,
        })
    }

    /// Which bytes it has.
    pub(crate) fn cache_identity(&self) -> CacheIdentity {
        self.client.cache_identity()
    }

    /// Whether it was not there before it was opened.
    pub(crate) fn was_created(&self) -> bool {
        self.was_created
    }

    /// Removes the file from its folder. Blocks.
    ///
    /// # Errors
    /// Those of the server.
    pub(crate) fn remove(&self) -> io::Result<()> {
        operation::remove(&self.client)
    }
}

impl Check for Ssh {
    fn check(&self) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send + '_>> {
        Box::pin(self.client.check())
    }
}

// SAFETY: the memory of an operation is used only while it is started and while its future is
// polled.
#[allow(unsafe_code)]
unsafe impl Storage for Ssh {
    unsafe fn start(
        &self,
        _queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        let (client, range) = (self.client.clone(), range_of(kind, offset, length));
        self.client
            .shared
            .dropped
            .start(range, memory, move |memory| {
                operation::start(&client, kind, offset, length, memory)
            })
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.client.length())
    }

    fn stamp(&self) -> Option<io::Result<FileStamp>> {
        Some(operation::stamp(&self.client))
    }

    fn set_modified(&self, seconds: u32) -> io::Result<()> {
        operation::set_modified(&self.client, seconds)
    }
}
