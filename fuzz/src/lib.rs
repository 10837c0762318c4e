//! Shared by the targets. Most of their code is in the files of the tests, so that CI runs it with a
//! stable compiler.

pub use zebu_testkit::library::{hostile_changes, hostile_images, hostile_vhdx, hostile_vmdk, vhdx_image};

use hostile_images::{Rng, build, mutate, mutate_once};
use libfuzzer_sys::fuzzer_mutate;
use zebu::storage::{EngineKind, Queue, QueueOptions};

thread_local! {
    // One for the whole process: memory completes at once.
    static QUEUE: Queue = Queue::new(
        QueueOptions::default().engine(EngineKind::Threads).inflate_inline(true),
    )
    .expect("a queue");
}

/// Runs `run` with the queue.
pub fn with_queue(run: impl FnOnce(&Queue)) {
    QUEUE.with(run);
}

/// Damages a VMDK, or now and then a new one.
pub fn mutate_vmdk(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    let mut rng = Rng::new(u64::from(seed));
    if rng.one_in(5) {
        return fuzzer_mutate(data, size, max_size);
    }
    let mut image = match size < 512 || rng.one_in(20) {
        true => hostile_vmdk::build(&mut rng, max_size / 2),
        false => data[..size].to_vec(),
    };
    hostile_vmdk::mutate_once(&mut rng, &mut image);
    let length = image.len().min(max_size);
    data[..length].copy_from_slice(&image[..length]);
    length
}

/// Damages the metadata of an image, or now and then of a new one.
pub fn mutate_image(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    let mut rng = Rng::new(u64::from(seed));
    if rng.one_in(5) {
        return fuzzer_mutate(data, size, max_size);
    }
    let mut image = if size < 512 || rng.one_in(20) {
        build(&mut rng, max_size)
    } else {
        data[..size].to_vec()
    };
    if rng.one_in(3) {
        mutate(&mut rng, &mut image);
    } else {
        mutate_once(&mut rng, &mut image);
    }
    let length = image.len().min(max_size);
    data[..length].copy_from_slice(&image[..length]);
    length
}
