//! Damaged VHDX images, and all that reads one, for the test `vhdx.rs` and, by path, for a fuzz
//! target.
use std::sync::Arc;

use zebu::block::{Device, OpenOptions, Policy};
use zebu::storage::{Memory, Queue};

use super::hostile_images;
use super::vhdx_image::{Random, build, damage};

/// A damaged image, perhaps a differencing one.
pub fn damaged(random: Random<'_>) -> Vec<u8> {
    let parent = (random(2) == 0).then(|| build(random, None, 1));
    let built = build(random, parent.as_ref(), 2);
    let mut file = built.file.clone();
    for _ in 0..1 + random(3) {
        let resealed = random(4) != 0;
        damage(random, &built, &mut file, resealed);
    }
    if random(8) == 0 {
        file.truncate(random(file.len() as u64) as usize);
    }
    file
}

/// The image of a fuzzer's input, whose bytes are the random numbers.
pub fn damaged_by(input: &[u8]) -> Vec<u8> {
    let mut words = input.chunks(2);
    let mut count = 0u64;
    damaged(&mut |n| {
        let word = words.next().unwrap_or_default();
        count += 1;
        let word = word
            .iter()
            .fold(0, |word, byte| word << 8 | u64::from(*byte));
        // Large numbers need more bits than a word has.
        match n {
            0..=0x1_0000 => word % n,
            _ => {
                word.wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    .rotate_left(count as u32)
                    % n
            }
        }
    })
}

/// Opens an image, reads all of it, and checks it.
pub fn exercise(queue: &Queue, file: &[u8]) {
    hostile_images::exercise(queue, file);
    let policy = Policy::Untrusted(Default::default());
    let options = OpenOptions::default().no_backing(true).policy(policy);
    let storage = Arc::new(Memory::new(file.to_vec()));
    if let Ok(device) = Device::from_storage(queue, storage, &options) {
        let mut count = 0;
        let mut say = |_| count += 1;
        // A file without its signature is raw.
        if let Ok(Some(errors)) = queue.block_on(device.top().check(queue, &mut say)) {
            assert_eq!(errors.corruptions, count);
        }
    }
}
