//! A vhost-user-blk server: images of [`zebu`] as disks of virtual machines.
//!
//! A [`Server`] has exports, each with a socket that one front end (a virtual
//! machine) at a time connects to. Each virtqueue that the front end starts
//! has a thread and a queue of its own; its requests run side by side on the
//! queue and are answered in the order in which they end. Their data go from
//! the device to guest memory and back without a copy.
//!
//! The messages on the socket are the `vhost` crate's, the rings in memory
//! `virtio-queue`'s.
#![deny(unsafe_code)]

mod chain;
mod channel;
mod config;
mod execute;
mod export;
#[cfg(feature = "front-end")]
pub mod front_end;
mod inflight;
mod memory;
mod request;
mod ring;
mod server;
mod session;
mod worker;

pub use export::{Export, ExportOptions, MAX_QUEUES};
pub use server::Server;
