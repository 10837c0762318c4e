//! Measurement: runs of programs, in turn, and what each took.

pub mod alternate;
pub mod cache;
pub mod child;
pub mod meter;
pub mod served;
pub mod stats;

pub use alternate::{Case, Program, Series};
