//! What the tests of all crates share.
//!
//! A test that generates its cases takes their seeds from [`cases()`] (or [`work`], if it counts
//! something else than seeds), and so knows these variables:
//!
//! | variable       | meaning                                                              |
//! |----------------|----------------------------------------------------------------------|
//! | `ZEBU_SEED`    | the first seed; the next ones count up                               |
//! | `ZEBU_CASES`   | how many cases, of what the test counts                              |
//! | `ZEBU_SECONDS` | instead: new cases for this time                                     |
//! | `ZEBU_ONLY`    | only those of this name: a workload, a rule, an engine, a command    |
//! | `ZEBU_ALL`     | also what is left out or ends at the first failure, to save time     |
//! | `ZEBU_PART`    | which of the cases run of which one in a few does                    |
//! | `ZEBU_TRACE`   | print each step                                                      |
//! | `ZEBU_KEEP`    | keep the folder of a failed case, and do not look for a shorter case |
//!
//! A failure prints the seed that repeats it.

mod cases;
mod rng;

pub use cases::{Cases, all, are_usual, cases, is_only, keep, only, part, spread, trace, work};
pub use rng::Rng;
