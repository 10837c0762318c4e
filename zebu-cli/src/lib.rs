//! The program `zebu`, which is also qemu-img, qemu-io and qemu-nbd by name. It is a library so
//! that tests and fuzzers reach qemu-io's command language and the definitions of the commands. This is not
//! a public API.

#![deny(unsafe_code)]

mod arguments;
mod commands;
mod images;
mod output;
mod program;

pub use commands::built as commands;
pub use commands::examples_of;
pub use commands::io::run_on as run_io_language;
pub use program::main;
