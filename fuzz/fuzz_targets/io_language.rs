//! Runs text as commands of qemu-io's language on an image in memory.
#![no_main]

#[path = "../../zebu-cli/tests/common/io_language.rs"]
mod io_language;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| zebu_fuzz::with_queue(|queue| io_language::exercise(queue, text)));
