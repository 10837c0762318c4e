//! Images with bitmaps, which are changed, stored, and resized with the disk.

use std::sync::Arc;

use zebu::block::{Device, DirtyBits, OpenOptions};
use zebu::jobs::{CreateQcow2, NewBacking};
use zebu::storage::{Memory, Queue};

use super::jobs::{resize_once, snapshots_once};
use super::requests::{Kind, Mix, Use, begin_with};
use super::{Dice, History, noise, options, raw, writable};
use crate::common::Rng;
use crate::dirty::Bitmap;
use crate::judge::{Change, Layout, Model};

const MIX: &[Kind] = &[
    Kind::Write,
    Kind::Write,
    Kind::Write,
    Kind::Compress,
    Kind::Discard,
    Kind::Zero(zebu::block::Zeroing::Unmap),
];

/// Bytes of the disk to a bit.
const GRANULARITIES: [u64; 5] = [512, 512, 1024, 8192, 1 << 20];

/// A bitmap that the image does not have. Some names make the directory longer than a cluster.
fn new_bitmap(rng: &mut Rng, model: &Model, enabled: bool) -> Bitmap {
    let mut name = format!("b{}", rng.next());
    if rng.one_in(2) {
        name += &"-".repeat(rng.index(400));
    }
    let granularity = rng.pick(&GRANULARITIES);
    Bitmap::new(name, granularity, enabled, &model.active)
}

/// Adds an enabled and a disabled bitmap to an image in memory. Returns its files.
pub(super) fn with_bitmaps(
    queue: &Queue,
    rng: &mut Rng,
    layout: &Layout,
    contents: Vec<Vec<u8>>,
    model: &mut Model,
) -> Vec<Vec<u8>> {
    let files = contents.into_iter().map(Memory::new).map(Arc::new);
    let files: Vec<Arc<Memory>> = files.collect();
    let options = OpenOptions::default().write(true);
    let mut device = layout.open(queue, &files, &options).unwrap();
    for enabled in [true, false] {
        let new = new_bitmap(rng, model, enabled);
        let add = device.bitmap_add(queue, &new.name, Some(new.granularity), enabled);
        queue.block_on(add).unwrap();
        model.bitmaps.push(new);
    }
    queue.block_on(device.close(queue)).unwrap();
    files.iter().map(|file| file.to_vec()).collect()
}

/// A change of one bitmap.
enum Action {
    Add(Bitmap),
    Remove(usize),
    Clear(usize),
    Enable(usize, bool),
    Merge(usize, DirtyBits),
}

fn draw(rng: &mut Rng, model: &Model) -> Action {
    let count = model.bitmaps.len();
    if count == 0 || count < 4 && rng.one_in(5) {
        let enabled = rng.one_in(2);
        return Action::Add(new_bitmap(rng, model, enabled));
    }
    let nth = rng.index(count);
    match rng.below(5) {
        0 => Action::Remove(nth),
        1 => Action::Clear(nth),
        2 => {
            let size = model.active.len() as u64;
            let mut other = DirtyBits::new(size + 512 * rng.below(9), rng.pick(&GRANULARITIES));
            for _ in 0..rng.below(4) {
                let at = rng.below(size);
                other.set(at..at + rng.below(64 << 10));
            }
            Action::Merge(nth, other)
        }
        _ => Action::Enable(nth, rng.one_in(2)),
    }
}

/// Applies a change to the device and to the model.
fn apply(
    queue: &Queue,
    device: &mut Device,
    model: &mut Model,
    action: &Action,
) -> zebu::Result<()> {
    let content = &model.active;
    let nth = match action {
        Action::Add(new) => {
            model.bitmaps.push(Bitmap::new(
                new.name.clone(),
                new.granularity,
                new.enabled,
                content,
            ));
            let add = device.bitmap_add(queue, &new.name, Some(new.granularity), new.enabled);
            return queue.block_on(add);
        }
        Action::Remove(nth) => {
            let old = model.bitmaps.remove(*nth);
            return queue.block_on(device.bitmap_remove(queue, &old.name));
        }
        Action::Clear(nth) | Action::Enable(nth, _) | Action::Merge(nth, _) => *nth,
    };
    let bitmap = &mut model.bitmaps[nth];
    let name = bitmap.name.clone();
    match action {
        Action::Add(_) | Action::Remove(_) => Ok(()),
        Action::Clear(_) => {
            bitmap.clear(content);
            queue.block_on(device.bitmap_clear(queue, &name))
        }
        Action::Enable(_, enabled) => {
            bitmap.enable(*enabled, content);
            queue.block_on(device.bitmap_enable(queue, &name, *enabled))
        }
        Action::Merge(_, other) => {
            bitmap.merge(other);
            queue.block_on(device.bitmap_merge(queue, &name, other))
        }
    }
}

/// Changes a bitmap, and retries after a failure. Returns whether the session can continue.
fn change(used: &mut Use<'_>, device: &mut Device, rng: &mut Dice, model: &mut Model) -> bool {
    let action = draw(rng, model);
    let mix = mix(used.cluster);
    for _ in 0..2 {
        model.active.clone_from(&used.active);
        let before = model.clone();
        let began = used.history.disk.now();
        let failed_before = used.history.disk.failed();
        let Err(e) = apply(used.queue, device, model, &action) else {
            used.history.note(began, Change::Becomes(model.clone()));
            used.note_store(began);
            return true;
        };
        let disk = &used.history.disk;
        if !disk.failed() || failed_before && !disk.is_final() {
            // A failure may have left it in use.
            let is_lost = disk.failed() && matches!(e, zebu::Error::Refused(_));
            assert!(is_lost, "{e}");
            *model = before;
            return true;
        }
        if !used.go_on(device, began, &before, model) {
            return false;
        }
        *model = before;
        for _ in 0..rng.below(4) {
            used.step(device, rng, &mix);
        }
    }
    true
}

fn mix(cluster: usize) -> Mix {
    Mix {
        kinds: MIX,
        steps: 0,
        most: 4 * cluster,
        hot: 40,
    }
}

/// Half of the disks are near the size at which a bitmap gets another cluster.
fn image(rng: &mut Rng) -> (CreateQcow2, Layout, Vec<u8>) {
    let mut options = options(rng, 150).version(3);
    if rng.one_in(2) {
        let near = (2 << 20) - (32 << 10) + 512 * rng.below(128);
        options = options.cluster_bits(9).refcount_order(4).size(near);
    }
    let mut active = vec![0; options.size as usize];
    let mut layout = Layout {
        has_snapshots: true,
        ..Layout::default()
    };
    if rng.one_in(4) {
        active = noise(rng, active.len());
        layout.backings.push(raw("base.raw", &active));
        options.backing = Some(NewBacking::new("base.raw").format(Some("raw".into())));
    }
    (options, layout, active)
}

pub fn bitmaps(queue: &Queue, rng: &mut Dice) -> History {
    let (options, layout, active) = image(rng);
    let mut used = begin_with(queue, rng, &options, layout, active, true);
    let mut model = used.history.before.clone();
    let mix = mix(used.cluster);
    let mut how = writable(rng);
    let mut device = used.history.open(queue, &how);
    for _ in 0..10 + rng.below(6) {
        let goes_on = match rng.below(16) {
            0..6 => {
                for _ in 0..1 + rng.below(3) {
                    used.step(&device, rng, &mix);
                }
                true
            }
            6 | 7 => {
                let began = used.history.disk.now();
                used.request(&device, rng, Kind::Flush, 0..0);
                if how.store_bitmaps {
                    used.note_store(began);
                }
                true
            }
            8..12 => change(&mut used, &mut device, rng, &mut model),
            12 | 13 => resize_once(&mut used, &mut device, rng, &mut model),
            // (A snapshot is read without the backing file.)
            14 if used.history.layout.backings.is_empty() => {
                snapshots_once(&mut used, &mut device, rng, &mut model)
            }
            _ => {
                if !used.close_device(device) {
                    return used.history;
                }
                how = writable(rng);
                device = used.history.open(queue, &how);
                true
            }
        };
        if !goes_on {
            return used.abandon(device);
        }
    }
    used.close(device)
}
