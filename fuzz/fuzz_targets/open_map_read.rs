//! Opens an image from memory and reads everything: status, data, VM state, snapshots, check,
//! measure. Finds panics, endless loops, large allocations, and results that contradict each other.
//!
//! The mutator changes fields of the metadata, and now and then starts from a new, sound image. So do
//! those of the other targets.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use zebu_fuzz::hostile_images;

fuzz_target!(|data: &[u8]| zebu_fuzz::with_queue(|queue| hostile_images::exercise(queue, data)));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    zebu_fuzz::mutate_image(data, size, max_size, seed)
});
