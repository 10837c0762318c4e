//! Resolves text as a file name, as what follows `json:`, and as options.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zebu_fuzz::hostile_changes;

fuzz_target!(|text: &str| hostile_changes::name(text));
