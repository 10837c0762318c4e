//! Runs text as commands of qemu-io's language on an image in memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zebu_testkit::program::io_language::exercise;

fuzz_target!(|text: &str| zebu_fuzz::with_queue(|queue| exercise(queue, text, zebu_cli::run_io_language)));
