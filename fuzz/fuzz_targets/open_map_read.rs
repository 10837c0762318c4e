//! Opens an image from memory and asks for everything: status over the disk,
//! reads that must agree, VM state, snapshots, check, measure. Finds panics,
//! loops, large allocations, and answers that contradict each other.
//!
//! The mutator knows where the numbers of an image are, and now and then
//! starts from a new, sound one.
#![no_main]

#[path = "../../zebu/tests/common/hostile_images.rs"]
mod hostile_images;

use hostile_images::{Random, build, exercise, mutate, mutate_once};
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use zebu::storage::{EngineKind, Queue, QueueOptions};

thread_local! {
    // One for the whole process: memory completes at once.
    static QUEUE: Queue = Queue::new(QueueOptions {
        engine: EngineKind::Threads,
        inflate_here: true,
        ..QueueOptions::default()
    })
    .expect("a queue");
}

fuzz_target!(|data: &[u8]| QUEUE.with(|queue| exercise(queue, data)));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let mut random = Random(u64::from(seed));
    if random.one_in(5) {
        return fuzzer_mutate(data, size, max_size);
    }
    let mut image = if size < 512 || random.one_in(20) {
        build(&mut random, max_size)
    } else {
        data[..size].to_vec()
    };
    if random.one_in(3) {
        mutate(&mut random, &mut image);
    } else {
        mutate_once(&mut random, &mut image);
    }
    let length = image.len().min(max_size);
    data[..length].copy_from_slice(&image[..length]);
    length
});
