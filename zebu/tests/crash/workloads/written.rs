//! Requests to images of the other formats that are written in place.

use std::ops::Range;
use std::sync::Arc;

use zebu::block::{Device, OpenOptions, Zeroing};
use zebu::storage::{Memory, Queue};
use zebu_testkit::Written;

use super::many::{batches_on, threads_on};
use super::requests::{Kind, Mix, Use, begin_on};
use super::{Dice, History, noise, writable};
use crate::judge::Layout;

/// The requests of one queue.
const KINDS: [Kind; 9] = [
    Kind::Write,
    Kind::Write,
    Kind::Write,
    Kind::Write,
    Kind::Zero(Zeroing::Keep),
    Kind::Zero(Zeroing::Unmap),
    Kind::Discard,
    Kind::Flush,
    Kind::Flush,
];

/// Where a VHDX has its table of blocks: behind the log.
const VHDX_TABLES: Range<usize> = 2 << 20..3 << 20;

/// An image of a few blocks, some of which have data. Often its last writer was killed: the file is
/// longer than what is in use, and behind that are bytes that must not show; or a part of its changes is
/// only in the log.
fn image<'a>(queue: &'a Queue, rng: &mut Dice) -> Use<'a> {
    let written = Written::other(rng);
    // The unit of what requests draw, so that several requests have one block.
    let unit = (written.block / 16) as usize;
    let size = (written.block * (1 + rng.below(6)) + 512 * rng.below(written.block / 512)) as usize;
    let file = Arc::new(Memory::default());
    written.make(queue, file.clone(), size as u64);
    let mut active = vec![0; size];
    let options = OpenOptions::default()
        .format(Some(written.format()))
        .write(true);
    let device = Device::from_storage(queue, file.clone(), &options).unwrap();
    let mut write = |rng: &mut Dice| {
        let at = rng.index(size / 512) * 512;
        let length = (512 * (1 + rng.index(100))).min(size - at);
        let bytes = noise(rng, length);
        device.write_blocking(queue, at as u64, &bytes).unwrap();
        active[at..at + length].copy_from_slice(&bytes);
    };
    for _ in 0..rng.below(3) {
        write(rng);
    }
    let is_killed = rng.one_in(3);
    let mut before = Vec::new();
    if is_killed {
        queue.block_on(device.flush(queue)).unwrap();
        before = file.to_vec();
        write(rng);
        queue.block_on(device.flush(queue)).unwrap();
    }
    let identity = device.top().content_id().map(<[u8]>::to_vec);
    if !is_killed {
        queue.block_on(device.close(queue)).unwrap();
    }
    let mut bytes = file.to_vec();
    if is_killed && written.has_log && rng.one_in(2) {
        bytes[VHDX_TABLES].copy_from_slice(&before[VHDX_TABLES]);
    }
    if rng.one_in(2) {
        let length = bytes.len() + rng.index(6 * written.block as usize) / 512 * 512;
        bytes.resize(length, 0xee);
    }
    let layout = Layout {
        written: Some(written),
        identity: identity.map(|id| (id, active.clone())),
        ..Layout::default()
    };
    begin_on(queue, rng, (vec![bytes], active), unit, layout, false)
}

pub fn sequential(queue: &Queue, rng: &mut Dice) -> History {
    let mut used = image(queue, rng);
    let mix = Mix {
        kinds: &KINDS,
        steps: 24,
        most: 3 * used.cluster,
        hot: 96,
    };
    let device = used.history.open(queue, &writable(rng));
    for _ in 0..mix.steps {
        used.step(&device, rng, &mix);
    }
    used.close(device)
}

pub fn in_flight(queue: &Queue, rng: &mut Dice) -> History {
    let mut used = image(queue, rng);
    // A batch is within one or two blocks.
    used.cluster = 4096;
    batches_on(queue, rng, used)
}

pub fn queues(queue: &Queue, rng: &mut Dice) -> History {
    let used = image(queue, rng);
    threads_on(queue, rng, used)
}
