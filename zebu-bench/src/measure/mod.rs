//! Measurement: runs of programs, alternated, and the figures taken from them.

pub mod alternate;
pub mod cache;
pub mod child;
pub mod meter;
pub mod series;
pub mod served;
pub mod stats;
pub mod syscalls;

pub use alternate::{Cell, Contender, alternate};
pub use series::Series;
