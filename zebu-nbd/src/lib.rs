//! An NBD server: images of [`zebu`] for NBD clients, over unix sockets, TCP, and TLS.
//!
//! A [`Server`] has exports and listeners. Each connection has a thread and a queue of its own. Its
//! requests are executed concurrently on the queue, and replies are sent in the order in which they
//! are ready. The memory of a connection is bounded. Idle connections take no processor time.
//!
//! Messages are encoded and decoded by [`zebu::internal::nbd`].
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
