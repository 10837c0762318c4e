//! A simulator that tests zebu, in the manner of FoundationDB's and TigerBeetle's: everything runs
//! on one thread in virtual time, on a disk that fails, delays, reorders, tears and loses what it
//! may, and a model of what may be read. A seed always makes the same scenario. A failing one is
//! shrunk to the fewest steps that still fail.
//!
//! - `steps`: the scenario as data, drawn from a seed;
//! - `disk`: the files;
//! - `sched`: engine and requests;
//! - `model`, `content`: the contents that may be read;
//! - `walk`: the places of an image's structures, for damage;
//! - `run/`: executes steps and compares with the model;
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
