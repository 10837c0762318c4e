//! The program: does to disk images what people do with qemu-img, under its
//! own name or under those of qemu-img and qemu-io. It is a library so that
//! tests and fuzzing reach qemu-io's command language; it promises nothing to
//! others.

mod commands;
mod create_options;
mod failure;
mod file_limit;
mod file_name;
mod invocation;
mod json;
mod known_options;
mod localtime;
mod new_image;
mod objects;
mod open;
mod options;
mod output;
mod program;
mod progress;
mod same_file;
mod signals;
mod size;
mod untrusted;

pub use commands::io::run_on as run_io_language;
pub use program::main;
