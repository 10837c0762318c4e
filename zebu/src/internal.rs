//! Doors for the other crates of this workspace, for the tests and for the fuzzers. Nothing here
//! is part of the API: it changes without notice, also in patch releases.

pub use zebu_core::internal::*;
pub use zebu_net::internal::*;
