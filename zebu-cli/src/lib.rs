//! The program `zebu`, which is also qemu-img, qemu-io and qemu-nbd by name. It is a library so
//! that tests and fuzzers reach qemu-io's command language and the definitions of the commands. This is not
//! a public API.
//!
//! Folders are layers; each knows those below it:
//!
//! | where | what |
//! |---|---|
//! | `run.rs` | finds the command and runs it |
//! | `commands/` | a file or folder for each command |
//! | `images/` | sources and targets as commands name them |
//! | `arguments/` | options that many commands have |
//! | `output/` | standard output, progress, how things are shown |
//! | `program/` | how the program was called, failures, the process |

#![deny(unsafe_code)]

mod arguments;
mod commands;
mod images;
mod output;
mod program;
mod run;

pub use commands::built as commands;
pub use commands::examples_of;
pub use commands::io::run_on as run_io_language;
pub use run::main;
