//! A simulator that tests zebu, in the manner of FoundationDB's and TigerBeetle's. Everything runs on
//! one thread in virtual time, on a disk that delays, reorders, tears and loses operations as a real
//! one may. A model has the contents that reads may return. A seed always gives the same scenario. A
//! failing scenario is shrunk to the fewest steps that still fail.
//!
//! Each knows those above it here:
//!
//! - `turns`: whose turn it is of two programs; `panics`: what they panic with;
//! - `disk/`: the files, their names and locks;
//! - `content`: what is written;
//! - `sched`: engine and requests;
//! - `programs`: two programs; `deeds`: what a program does with a name;
//! - `steps/`: the scenario as data, drawn from a seed;
//! - `cell`: the contents that a sector may have; `bitmaps`: what must be dirty;
//! - `model`: the contents that may be read;
//! - `walk`: the places of an image's structures, for damage;
//! - `run/`: executes steps and compares with the model;
//! - `shrink`: the fewest steps that fail.

#![deny(unsafe_code)]

pub mod bitmaps;
pub mod cell;
pub mod content;
pub mod deeds;
pub mod disk;
pub mod model;
mod panics;
pub mod programs;
pub mod run;
pub mod sched;
pub mod shrink;
pub mod steps;
mod turns;
pub mod walk;
