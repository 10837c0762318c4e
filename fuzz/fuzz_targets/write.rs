//! Writes, zeroes, discards and flushes, then checks. A guest's data must never be written to tables,
//! and a sound image must stay sound and read back.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use zebu_fuzz::hostile_changes;

fuzz_target!(|data: &[u8]| zebu_fuzz::with_queue(|queue| hostile_changes::write(queue, data)));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    zebu_fuzz::mutate_image(data, size, max_size, seed)
});
