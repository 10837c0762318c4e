//! A simulator that tests zebu, in the manner of FoundationDB's and TigerBeetle's: everything runs
//! on one thread in virtual time, on a disk that fails, delays, reorders, tears and loses what it
//! may, and a model says what may be read. A seed makes a scenario, and always the same one. One
//! that fails is shrunk to the fewest steps that still fail.
//!
//! - `steps`: what is done, as data, drawn from a seed;
//! - `disk`: the files;
//! - `sched`: engine and requests;
//! - `model`, `content`: what may be read;
//! - `walk`: what an image has where, for damage;
//! - `run/`: carries steps out and judges;
//! - `shrink`: the fewest steps that fail.

pub mod content;
pub mod disk;
pub mod model;
pub mod rng;
pub mod run;
pub mod sched;
pub mod shrink;
pub mod steps;
pub mod walk;
