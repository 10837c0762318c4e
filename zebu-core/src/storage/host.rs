//! Addresses of hosts.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};

/// The addresses of a host, with this port. `localhost` is this machine, whatever the resolver knows
/// (RFC 6761, section 6.3): a container may have no `/etc/hosts`. Blocks.
///
/// # Errors
/// Those of the resolver.
pub fn addresses(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    match host.eq_ignore_ascii_case(LOCALHOST) {
        true => Ok(localhost(port).into()),
        false => Ok((host, port).to_socket_addrs()?.collect()),
    }
}

/// The name of this machine.
pub const LOCALHOST: &str = "localhost";

/// Its addresses.
pub fn localhost(port: u16) -> [SocketAddr; 2] {
    [
        (Ipv4Addr::LOCALHOST, port).into(),
        (Ipv6Addr::LOCALHOST, port).into(),
    ]
}
