//! Builds a VHDX image and damages it, both by the numbers of the input, then reads everything.
//! Finds panics, endless loops, large allocations, and results that contradict each other.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zebu_fuzz::hostile_vhdx;

fuzz_target!(|data: &[u8]| zebu_fuzz::with_queue(|queue| {
    hostile_vhdx::exercise(queue, &hostile_vhdx::damaged_by(data));
}));
