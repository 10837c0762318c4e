//! Images on other machines for the library `zebu`: web servers, object stores, SSH, Ceph, NBD; TLS; a cache on
//! a local disk.
//!
//! A protocol is a folder and a line: `NAME/mod.rs` has its description, which implements
//! [`Protocol`](zebu_core::parts::protocols::Protocol), and its `static DRIVER` with its names and options, which stands in
//! [`PROTOCOLS`]; a folder in it has the storage of its bytes. Programs use the crate `zebu`, which registers it.
#![deny(unsafe_code)]

// For `options!`.
#[allow(unused_imports, reason = "without features there is none")]
#[macro_use]
extern crate zebu_core;

#[cfg(feature = "cache")]
mod cache;
#[cfg(any(feature = "nbd", feature = "rbd", feature = "ssh"))]
mod dropped;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "nbd")]
mod nbd;
#[cfg(feature = "http")]
mod object;
#[cfg(feature = "rbd")]
mod rbd;
#[cfg(feature = "ssh")]
mod ssh;
#[cfg(feature = "object-store")]
mod store;
pub mod tls;
#[cfg(any(feature = "nbd", feature = "ssh"))]
mod uri;

// What a protocol is made of.
#[allow(unused_imports, reason = "without features there is none")]
use zebu_core::parts::{error, lock, printable, protocols, spelling, storage};
#[allow(unused_imports, reason = "without features there is none")]
use zebu_core::{Error, Result, strerror};

#[cfg(test)]
use zebu_testkit as _;

/// The protocols, for the crate `zebu` to register.
#[doc(hidden)]
pub static PROTOCOLS: &[&protocols::Driver] = &[
    #[cfg(feature = "nbd")]
    &nbd::DRIVER,
    #[cfg(feature = "http")]
    &http::DRIVER,
    #[cfg(feature = "object-store")]
    &store::DRIVER,
    #[cfg(feature = "rbd")]
    &rbd::DRIVER,
    #[cfg(feature = "ssh")]
    &ssh::DRIVER,
];

/// What `zebu::internal` has of it.
#[doc(hidden)]
pub mod internal {
    #[cfg(feature = "nbd")]
    pub use crate::nbd::protocol as nbd;
    pub use crate::tls::session::Session;
}

/// What the module `block` of `zebu` has of it: descriptions of files.
pub mod block {
    #[cfg(feature = "http")]
    pub use crate::http::{HttpCookie, HttpSpec, RemoteOptions};
    #[cfg(feature = "nbd")]
    pub use crate::nbd::{NbdSpec, NbdTls};
    #[cfg(feature = "rbd")]
    pub use crate::rbd::RbdSpec;
    #[cfg(feature = "ssh")]
    pub use crate::ssh::{HashKind, HostKeyCheck, SshSpec};
    #[cfg(feature = "object-store")]
    pub use crate::store::{StoreKind, StoreSpec};
}

/// What the module `storage` of `zebu` has of it.
pub mod storage_of_zebu {
    #[cfg(feature = "cache")]
    pub use crate::cache::{BlockCache, BlockCacheOptions};
    #[cfg(feature = "nbd")]
    pub use crate::nbd::client as nbd;
    #[cfg(feature = "object-store")]
    pub use crate::object::{ObjectState, Upload};
}
