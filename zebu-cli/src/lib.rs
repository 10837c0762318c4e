//! The program `zebu`, which is also qemu-img, qemu-io and qemu-nbd by name. It is a library so
//! that tests and fuzzers reach qemu-io's command language and the definitions of the commands. This is not
//! a public API.

#![deny(unsafe_code)]

mod appliance;
mod arguments;
mod block_cache;
mod closest;
mod colours;
mod commands;
mod create_options;
mod descriptors;
mod failure;
mod file_limit;
mod file_name;
mod invocation;
mod json;
mod known_options;
mod localtime;
mod metrics_address;
mod named;
mod new_image;
mod next_step;
mod objects;
mod open;
mod options;
mod output;
mod printed;
mod program;
mod progress;
mod same_file;
mod signals;
mod size;
mod streams;
mod survey;
mod trace;
mod untrusted;
mod work;
mod wrapped;

pub use commands::built as commands;
pub use commands::examples_of;
pub use commands::io::run_on as run_io_language;
pub use program::main;
