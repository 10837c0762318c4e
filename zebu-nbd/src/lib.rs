//! An NBD server: images of [`zebu`] for NBD clients, over
//! unix sockets, TCP, and TLS.
//!
//! A [`Server`] has exports and listeners. Each connection has a thread and a
//! queue of its own; its requests run side by side on the queue, and answers
//! go out in the order in which they are ready. What a connection takes is
//! bounded (see `transmission.rs`), whatever its client does, and idle
//! connections cost no processor time.
//!
//! The bytes on the wire are [`zebu::internal::nbd`]'s.
#![deny(unsafe_code)]

mod budget;
mod connection;
mod execute;
mod export;
mod handshake;
mod input;
mod listen;
mod race;
mod reply;
mod server;
mod status;
mod transmission;
mod transport;

pub use export::{Export, ExportOptions};
pub use listen::Listener;
pub use server::{Server, ServerOptions};
pub use transport::Stream;
