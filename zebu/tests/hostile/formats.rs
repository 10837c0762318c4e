//! Opens and reads damaged images of the formats that are only read. Guards against panics, endless
//! loops, memory in proportion to a number in the file, and wrong data of sound images.
//!
//! Images are built, and damaged in a few numbers.

use std::sync::Arc;

use crate::bounds::{alone, generated, queue};
use crate::common::cases;
use crate::hostile_images::{Rng, disk_of};
use crate::small_images::{self, Built, Vhd, set_checksum};
use zebu::block::{Device, Format, OpenOptions, Policy};
use zebu::storage::{Memory, Queue};
use zebu::{Limits, Result};

const FORMATS: [&str; 7] = ["vpc", "qcow", "qed", "parallels", "dmg", "cloop", "bochs"];
/// Most that opening and reading an image may take: a chunk of 64 MiB, packed and inflated, twice.
const MEMORY: usize = 320 << 20;

fn build(format: &str, rng: &mut Rng) -> Built {
    let (is_differencing, as_list) = (rng.one_in(2), rng.one_in(2));
    let random = &mut |n| rng.below(n);
    match format {
        "vpc" => Vhd::random(is_differencing, random).build(random),
        "qcow" => small_images::qcow(random),
        "qed" => small_images::qed(random),
        "parallels" => small_images::parallels(random),
        "dmg" => small_images::dmg(true, as_list, random),
        "cloop" => small_images::cloop(random),
        _ => small_images::bochs(random),
    }
}

fn open(queue: &Queue, format: &str, bytes: &[u8], policy: Policy) -> Result<Device> {
    let format: Format = format.parse().expect("a format");
    let options = OpenOptions::default()
        .format(Some(format))
        .policy(policy)
        .no_backing(true);
    Device::from_storage(queue, Arc::new(Memory::new(bytes.to_vec())), &options)
}

#[test]
fn damaged_images() {
    generated(350, MEMORY, |queue, rng| {
        let format = rng.pick(&FORMATS);
        let mut image = build(format, rng);
        for _ in 0..rng.below(4) {
            image.damage(&mut |n| rng.below(n));
        }
        // Most with a right sum, or nothing behind it is looked at.
        if format == "vpc" && !rng.one_in(4) {
            set_checksum(&mut image.bytes[..512], 64);
        }
        if rng.one_in(6) {
            let length = rng.index(image.bytes.len());
            image.bytes.truncate(length);
        }
        for policy in [Policy::Follow, Policy::Untrusted(Limits::default())] {
            if let Ok(device) = open(queue, format, &image.bytes, policy) {
                disk_of(queue, &device);
                let mut said = 0;
                let mut say = |_| said += 1;
                let _ = queue.block_on(device.top().check(queue, &mut say));
            }
        }
    });
}

#[test]
fn sound_images() {
    let _alone = alone();
    let queue = queue();
    for seed in cases(70, "sound images").from(0) {
        let rng = &mut Rng::new(seed);
        let format = FORMATS[seed as usize % FORMATS.len()];
        let image = build(format, rng);
        let untrusted = Policy::Untrusted(Limits::default());
        let device = open(&queue, format, &image.bytes, untrusted);
        let device = device.unwrap_or_else(|e| panic!("{format}, seed {seed}: {e}"));
        let mut bytes = vec![0; device.size() as usize];
        if ["qcow", "qed", "parallels"].contains(&format) {
            disk_of(&queue, &device);
            continue;
        }
        device.read_blocking(&queue, 0, &mut bytes).expect(format);
        assert!(bytes == image.content, "{format}, seed {seed}");
    }
}
