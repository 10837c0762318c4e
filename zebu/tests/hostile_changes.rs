//! Guards against images made to do harm when they are written, repaired or
//! copied, or when their snapshots are changed: a panic, a loop without end, a
//! guest's data in the image's own tables, a sound image that is not sound
//! afterwards, a repair that says more than it did.
//!
//! `ZEBU_HOSTILE_RUNS` says how many images are generated, `ZEBU_HOSTILE_SEED`
//! with which number to begin.

#[path = "common/hostile_bounds.rs"]
mod hostile_bounds;
#[path = "common/hostile_changes.rs"]
mod hostile_changes;
#[path = "common/hostile_images.rs"]
#[allow(dead_code)]
mod hostile_images;

use std::sync::Arc;

use hostile_bounds::generated;
use hostile_images::{Random, build, mutate};
use zebu::block::{Device, OpenOptions};
use zebu::storage::Memory;

/// An image may grow to 64 MiB in memory, and is copied.
const MEMORY: usize = 384 << 20;

/// An image that somebody broke, or now and then a sound one.
fn image(random: &mut Random) -> Vec<u8> {
    let sound = random.one_in(4);
    let mut bytes = build(random, 256 << 10);
    if !sound {
        mutate(random, &mut bytes);
    }
    bytes
}

/// What is promised of sound images would not be tested if there were none.
#[test]
fn sound_images_are_sound() {
    generated(300, MEMORY, |queue, random| {
        let bytes = hostile_images::build_sound(random, 256 << 10);
        assert!(hostile_changes::is_sound(queue, &bytes));
    });
}

#[test]
fn written() {
    generated(400, MEMORY, |queue, random| {
        hostile_changes::write(queue, &image(random));
    });
}

#[test]
fn repaired() {
    generated(400, MEMORY, |queue, random| {
        hostile_changes::repair(queue, &image(random));
    });
}

#[test]
fn snapshots_changed() {
    generated(400, MEMORY, |queue, random| {
        hostile_changes::snapshots(queue, &image(random));
    });
}

/// Snapshot tables and bitmap directories, a byte or two of them changed.
#[test]
fn tables() {
    generated(1000, MEMORY, |queue, random| {
        let mut data = hostile_images::table(random);
        let changes = random.below(4);
        if changes == 0 {
            let memory = Arc::new(Memory::new(hostile_images::with_table(&data)));
            let opened = Device::from_storage(queue, memory, &OpenOptions::default());
            opened.expect("a sound table");
        }
        for _ in 0..changes {
            let at = random.below(data.len().min(200) as u64) as usize;
            data[at] = random.next() as u8;
        }
        hostile_changes::table(queue, &data);
    });
}

#[test]
fn copied() {
    generated(100, MEMORY, |queue, random| {
        hostile_changes::copies(queue, &image(random));
    });
}

/// Pieces of names and of options, put together at random.
#[test]
fn names() {
    const PIECES: &[&str] = &[
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "=",
        ".",
        "\"",
        "'",
        "\\u0000",
        "driver",
        "file",
        "filename",
        "backing",
        "data-file",
        "qcow2",
        "raw",
        "host_device",
        "json:",
        "nbd:",
        "../",
        "/",
        "null",
        "true",
        "1e999",
        "-1",
        "offset",
        "size",
        "cache.direct",
        "on",
        "{\"driver\":",
        "\"file\":{",
        "\"filename\":\"x\"}",
        "\u{fffd}",
        "\t",
    ];
    generated(4000, MEMORY, |_, random| {
        let pieces = (0..1 + random.below(12)).map(|_| {
            let piece = random.below(PIECES.len() as u64);
            PIECES[piece as usize]
        });
        hostile_changes::name(&pieces.collect::<String>());
    });
}
