//! The run of the program, which all commands share.
//!
//! `context` is how it was called, which every command gets; `failure` how one ends badly, with `next_step`
//! and `closest` for what to do then. `signals`, `descriptors` and `file_limit` are what the process has of
//! the system.

pub mod ask;
pub mod closest;
pub mod context;
pub mod descriptors;
pub mod failure;
pub mod file_limit;
pub mod next_step;
pub mod process;
pub mod signals;
pub mod trace;

pub use context::{Context, unrecognized, version};
pub use failure::{Failure, Outcome};
