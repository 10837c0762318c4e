//! Converts an image from a stream and to streams, and compares the content with what reading it
//! gives.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use zebu_fuzz::hostile_changes;

fuzz_target!(|data: &[u8]| zebu_fuzz::with_queue(|queue| {
    hostile_changes::streams(queue, data);
}));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    zebu_fuzz::mutate_image(data, size, max_size, seed)
});
