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
use crate::spread::Spread;

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
    let size = written.block * (1 + rng.below(6)) + 512 * rng.below(written.block / 512);
    image_of(queue, rng, written, Spread::whole(size as usize))
}

/// Such an image, of a disk of which these windows are used.
fn image_of<'a>(queue: &'a Queue, rng: &mut Dice, written: Written, spread: Spread) -> Use<'a> {
    // The unit of what requests draw, so that several requests have one block.
    let unit = (written.block / 16) as usize;
    let size = spread.window * spread.count;
    let file = Arc::new(Memory::default());
    written.make(queue, file.clone(), spread.size);
    let mut active = vec![0; size];
    let options = OpenOptions::default()
        .format(Some(written.format()))
        .write(true);
    let device = Device::from_storage(queue, file.clone(), &options).unwrap();
    let mut write = |rng: &mut Dice| {
        let at = rng.index(size / 512) * 512;
        let length = (512 * (1 + rng.index(100))).min(size - at);
        for part in spread.parts(at..at + length) {
            let bytes = noise(rng, part.len());
            let place = spread.place(part.start);
            device.write_blocking(queue, place, &bytes).unwrap();
            active[part].copy_from_slice(&bytes);
        }
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
        spread: Some(spread),
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

/// Blocks are allocated all over a large disk, so that a commit has many sectors of the table: more than
/// an entry of the log of a VHDX has.
pub fn tables(queue: &Queue, rng: &mut Dice) -> History {
    // What a sector of the table leads to: of a VHDX 4096 bytes with 512 entries, of a VDI 512 with 128.
    let (name, entries) = rng.pick(&[("vhdx", 512), ("vdi", 128)]);
    let written = Written::dynamic(name);
    let per_sector = entries * written.block;
    // Two windows that share a sector, or none.
    let stride = rng.pick(&[per_sector * 3 / 4, per_sector]);
    let count = 20 + rng.below(8);
    let spread = Spread {
        size: stride * (count + 1) + 512 * rng.below(9),
        first: 4096 * rng.below(stride / 4096),
        stride,
        window: 4096,
        count: count as usize,
    };
    let mut used = image_of(queue, rng, written, spread);
    let device = used.history.open(queue, &writable(rng));
    let (window, size) = (spread.window, used.active.len());
    for _ in 0..2 {
        // Some windows are left for the next time.
        for at in (0..size).step_by(window) {
            if !rng.one_in(6) {
                let start = at + 512 * rng.index(window / 512);
                used.request(&device, rng, Kind::Write, start..start + 512);
            }
        }
        for _ in 0..rng.below(4) {
            let kind = rng.pick(&KINDS);
            let start = 512 * rng.index(size / 512);
            let end = (start / window + 1) * window;
            used.request(&device, rng, kind, start..end);
        }
        used.request(&device, rng, Kind::Flush, 0..0);
    }
    used.close(device)
}
