//! The program: does to disk images what people do with qemu-img, under its
//! own name or under those of qemu-img and qemu-io.

mod commands;
mod create_options;
mod failure;
mod file_name;
mod json;
mod known_options;
mod localtime;
mod new_image;
mod open;
mod options;
mod output;
mod program;
mod progress;
mod size;

use std::process::ExitCode;

fn main() -> ExitCode {
    program::main(std::env::args_os().collect())
}
