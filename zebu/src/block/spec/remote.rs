//! How objects on other machines are read.
#![cfg(feature = "http")]

use std::time::Duration;

/// How an object is read. None: not given, the default holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteOptions {
    /// `readahead`: bytes that are read ahead at most.
    pub readahead: Option<u64>,
    /// `timeout`: how long connecting may take, and how long a server may send nothing.
    pub timeout: Option<Duration>,
    /// `connections`, an option of zebu's own: requests in flight at most.
    pub connections: Option<usize>,
}
