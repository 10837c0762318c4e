//! The shares of a server's connections in the memory for requests, and the reserve that all of
//! them use besides.

use zebu::storage::Budget;

/// Bytes of the buffers of one connection. One request is taken whatever it needs.
pub const MAX_BYTES: usize = 64 << 20;
/// Bytes of all shares together, and of the reserve.
const TOTAL: usize = 1 << 30;

/// The share of one of `clients` connections, in bytes: 1 MiB to [`MAX_BYTES`].
pub fn share(clients: usize) -> usize {
    (TOTAL / clients.max(1)).clamp(1 << 20, MAX_BYTES)
}

/// The reserve.
pub fn reserve() -> Budget {
    Budget::new(TOTAL)
}
