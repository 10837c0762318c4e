//! Writes, repairs and copies hostile images and changes their snapshots. Guards against panics,
//! endless loops, guests' data in tables, sound images that are damaged, and a repair that reports
//! more than it has done.

use crate::hostile_changes;
use crate::hostile_images;
use std::sync::Arc;

use crate::bounds::generated;
use crate::hostile_images::{Rng, build, mutate};
use zebu::block::{Device, OpenOptions};
use zebu::storage::Memory;

/// An image may grow to 64 MiB in memory, and is copied.
const MEMORY: usize = 384 << 20;

/// A damaged image, or now and then a sound one.
fn image(rng: &mut Rng) -> Vec<u8> {
    let sound = rng.one_in(4);
    let mut bytes = build(rng, 256 << 10);
    if !sound {
        mutate(rng, &mut bytes);
    }
    bytes
}

/// The generator's sound images are sound, or the promises for sound images would not be tested.
#[test]
fn sound_images_are_sound() {
    generated(150, MEMORY, |queue, rng| {
        let bytes = hostile_images::build_sound(rng, 256 << 10);
        assert!(hostile_changes::is_sound(queue, &bytes));
    });
}

#[test]
fn written() {
    generated(200, MEMORY, |queue, rng| {
        hostile_changes::write(queue, &image(rng));
    });
}

#[test]
fn repaired() {
    generated(200, MEMORY, |queue, rng| {
        hostile_changes::repair(queue, &image(rng));
    });
}

#[test]
fn snapshots_changed() {
    generated(200, MEMORY, |queue, rng| {
        hostile_changes::snapshots(queue, &image(rng));
    });
}

/// Snapshot tables and bitmap directories with up to three bytes changed.
#[test]
fn tables() {
    generated(500, MEMORY, |queue, rng| {
        let mut data = hostile_images::table(rng);
        let changes = rng.below(4);
        if changes == 0 {
            let memory = Arc::new(Memory::new(hostile_images::with_table(&data)));
            let opened = Device::from_storage(queue, memory, &OpenOptions::default());
            opened.expect("a sound table");
        }
        for _ in 0..changes {
            let at = rng.index(data.len().min(200));
            data[at] = rng.next() as u8;
        }
        hostile_changes::table(queue, &data);
    });
}

#[test]
fn copied() {
    generated(100, MEMORY, |queue, rng| {
        hostile_changes::copies(queue, &image(rng));
    });
}

/// Pieces of names and of options, joined at random.
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
    generated(2000, MEMORY, |_, rng| {
        let pieces = (0..1 + rng.below(12)).map(|_| {
            let piece = rng.below(PIECES.len() as u64);
            PIECES[piece as usize]
        });
        hostile_changes::name(&pieces.collect::<String>());
    });
}

#[test]
fn streams() {
    generated(100, MEMORY, |queue, rng| {
        hostile_changes::streams(queue, &image(rng));
    });
}

#[test]
fn streams_of_sound_images() {
    let read = std::sync::atomic::AtomicU32::new(0);
    generated(50, MEMORY, |queue, rng| {
        let bytes = hostile_images::build_sound(rng, 256 << 10);
        let was_read = hostile_changes::streams(queue, &bytes);
        read.fetch_add(was_read.into(), std::sync::atomic::Ordering::Relaxed);
    });
    assert!(read.into_inner() > 0, "no stream was read");
}
