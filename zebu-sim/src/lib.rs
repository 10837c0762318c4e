//! A simulator that tests zebu, in the manner of FoundationDB's and TigerBeetle's. Everything runs on
//! one thread in virtual time, on a disk that delays, reorders, tears and loses operations as a real
//! one may. A model has the contents that reads may return. A seed always gives the same scenario. A
//! failing scenario is shrunk to the fewest steps that still fail.
//!
//! - `steps`: the scenario as data, drawn from a seed;
//! - `disk`: the files;
//! - `names`: their names and locks;
//! - `sched`: engine and requests;
//! - `programs`: the turns of two programs;
//! - `deeds`: what a program does with a name;
//! - `model`, `content`: the contents that may be read;
//! - `bitmaps`: what must be dirty;
//! - `walk`: the places of an image's structures, for damage;
//! - `run/`: executes steps and compares with the model;
//! - `shrink`: the fewest steps that fail.

#![deny(unsafe_code)]

pub mod bitmaps;
pub mod content;
pub mod deeds;
pub mod disk;
pub mod model;
pub mod names;
pub mod programs;
pub mod run;
pub mod sched;
pub mod shrink;
pub mod steps;
pub mod walk;
