//! Temporary.
mod bench;
mod io;
use crate::failure::Outcome;
use crate::program::Invocation;
use std::ffi::OsString;
pub fn help(_: &Invocation) -> String {
    String::new()
}
pub fn run(invocation: &Invocation, name: &str, arguments: Vec<OsString>) -> Option<Outcome> {
    match name {
        "io" => Some(io::run(invocation, arguments)),
        "bench" => Some(bench::run(invocation, arguments)),
        _ => None,
    }
}
