//! The program.

use std::process::ExitCode;

fn main() -> ExitCode {
    zebu_cli::main(std::env::args_os().collect())
}
