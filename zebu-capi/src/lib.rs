//! libzebu: the C interface of [`zebu`]. Its documentation is `include/zebu.h`.
//!
//! # What the functions rely on
//! `zebu.h` is the contract of every exported function. Parameters have Rust's types for what it
//! promises: `Option<&T>` is a pointer that is NULL or valid during the call, `Option<Box<T>>` one
//! that is NULL or comes from this library and is given back, [`text::Text`] a string, and so on.
//! The Rust functions cannot be called from Rust, since no module is public.

mod bitmaps;
mod blocking;
mod device;
mod error;
mod fork;
mod info;
mod io;
mod job;
mod list;
mod new_image;
mod open;
mod queue;
mod request;
mod snapshots;
mod text;

/// The header, for the tests.
#[doc(hidden)]
pub const HEADER: &str = include_str!("../include/zebu.h");

/// `sizeof` and `offsetof` of the structures, for the tests: they compare these with what a C
/// compiler makes of the header.
#[doc(hidden)]
pub mod layout;
