//! A vhost-user-blk server: images of [`zebu`] as disks of virtual machines.
//!
//! A [`Server`] has exports, each with a socket that one front end (a virtual machine) at a time
//! connects to. Each virtqueue has a thread and a queue of its own. Its requests are executed
//! concurrently and complete in any order. Data move between the device and guest memory without a
//! copy.
//!
//! The `vhost` crate has the messages on the socket, `virtio-queue` the rings in memory.
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
