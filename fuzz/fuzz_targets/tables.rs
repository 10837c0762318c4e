//! Gives a sound image a snapshot table or a bitmap directory, reads, checks and
//! repairs it, and changes its snapshots.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zebu_fuzz::hostile_changes;

fuzz_target!(|data: &[u8]| zebu_fuzz::with_queue(|queue| hostile_changes::table(queue, data)));
