//! Changes of the whole image: snapshots, resizes and jobs.

use std::sync::Arc;

use zebu::block::{Device, Format, OpenOptions, Preallocation};
use zebu::internal::Mapping;
use zebu::internal::structures::Header;
use zebu::jobs::{
    self, AmendOptions, CommitOptions, CompressOptions, ConvertOptions, CreateQcow2, NewBacking,
    NewDataFile, RebaseOptions, Target, begin_image, create_qcow2,
};
use zebu::qcow2::SnapshotName;
use zebu::storage::{EngineKind, Memory, Queue};

use super::requests::{Kind, Mix, Use, begin, begin_with};
use super::{Dice, History, noise, options, raw, writable};
use crate::common::repair_all;
use crate::judge::{Change, DATA_FILE, Layout, Model, Under, content};

const ENGINE: EngineKind = EngineKind::Threads;

/// The requests between changes of the whole image.
const MIX: &[Kind] = &[
    Kind::Write,
    Kind::Write,
    Kind::Write,
    Kind::Compress,
    Kind::Discard,
    Kind::Flush,
];

fn mix(cluster: usize, steps: usize) -> Mix {
    Mix {
        kinds: MIX,
        steps,
        most: 4 * cluster,
        hot: 40,
    }
}

/// An image in memory with random content. Returns its bytes and the content.
pub(super) fn used_image(
    queue: &Queue,
    rng: &mut Dice,
    options: &CreateQcow2,
    layout: Layout,
) -> Filled {
    filled(queue, rng, options, layout, |used, device, rng| {
        let mix = mix(used.cluster, 0);
        for _ in 0..8 + rng.below(20) {
            used.step(device, rng, &mix);
        }
    })
}

/// An image that was filled without a fault.
pub(super) fn filled(
    queue: &Queue,
    rng: &mut Dice,
    options: &CreateQcow2,
    layout: Layout,
    fill: impl FnOnce(&mut Use<'_>, &Device, &mut Dice),
) -> Filled {
    let mut active = vec![0; options.size as usize];
    if let Some((_, Under::Raw(base))) = layout.backings.first() {
        let base = base.to_vec();
        let both = base.len().min(active.len());
        active[..both].copy_from_slice(&base[..both]);
    }
    let fault = rng.fault.take();
    let mut used = begin_with(queue, rng, options, layout, active, false);
    rng.fault = fault;
    let device = used.history.open(queue, &writable(rng));
    fill(&mut used, &device, rng);
    let active = used.active.clone();
    let history = used.close(device);
    (history.files[0].to_vec(), active)
}

/// The bytes of an image, and the content of its disk.
pub(super) type Filled = (Vec<u8>, Vec<u8>);

pub fn snapshots(queue: &Queue, rng: &mut Dice) -> History {
    let mut options = options(rng, 400).size((64 + rng.below(80)) << 10);
    if rng.one_in(4) {
        options.version = 3;
        options.cluster_bits = 14;
        options.extended_l2 = true;
    }
    let layout = Layout {
        has_snapshots: true,
        ..Layout::default()
    };
    let zeroes = vec![0; options.size as usize];
    let mut used = begin(queue, rng, &options, layout, zeroes);
    let mut device = used.history.open(queue, &writable(rng));
    let mut model = used.history.before.clone();
    let mix = mix(used.cluster, 0);
    for _ in 0..4 + rng.below(3) {
        for _ in 0..1 + rng.below(6) {
            used.step(&device, rng, &mix);
        }
        if rng.one_in(3) && !resize_once(&mut used, &mut device, rng, &mut model) {
            return used.abandon(device);
        }
        if !snapshots_once(&mut used, &mut device, rng, &mut model) {
            return used.abandon(device);
        }
    }
    used.close(device)
}

/// Changes the snapshots, and retries after a failure, sometimes after other requests. Returns
/// whether the session can continue.
pub(super) fn snapshots_once(
    used: &mut Use<'_>,
    device: &mut Device,
    rng: &mut Dice,
    model: &mut Model,
) -> bool {
    let mix = mix(used.cluster, 0);
    let count = model.snapshots.len() as u64;
    let pick = rng.below(count.max(1)) as usize;
    let what = match rng.below(4) {
        0 if count > 0 => OfSnapshots::Delete(pick),
        1 if count > 0 => OfSnapshots::Apply(pick),
        _ => OfSnapshots::Create(format!("s{}", used.history.events.len())),
    };
    for _ in 0..2 {
        match change_snapshots(used, device, &what, model) {
            Outcome::Done => return true,
            Outcome::Final => return false,
            Outcome::Failed => {}
        }
        for _ in 0..rng.below(6) {
            used.step(device, rng, &mix);
        }
    }
    true
}

/// A change of the snapshots, which are given by their index.
enum OfSnapshots {
    Create(String),
    Apply(usize),
    Delete(usize),
}

/// The result of a change of the whole image.
enum Outcome {
    /// It succeeded, or is not possible for this image.
    Done,
    /// It failed, and the image is as before.
    Failed,
    /// It failed, and every later write fails.
    Final,
}

/// Changes the snapshots.
fn change_snapshots(
    used: &mut Use<'_>,
    device: &mut Device,
    what: &OfSnapshots,
    model: &mut Model,
) -> Outcome {
    let queue = used.queue;
    model.active.clone_from(&used.active);
    let before = model.clone();
    let name = |index: &usize| SnapshotName::from(before.snapshots[*index].0.as_str());
    let failed_before = used.history.disk.failed();
    let began = used.history.disk.now();
    let result = match what {
        OfSnapshots::Delete(pick) => {
            model.snapshots.remove(*pick);
            queue.block_on(device.snapshot_delete(queue, &name(pick)))
        }
        OfSnapshots::Apply(pick) => {
            model.set_active(before.snapshots[*pick].1.clone());
            queue.block_on(device.snapshot_apply(queue, &name(pick)))
        }
        OfSnapshots::Create(name) => {
            model.snapshots.push((name.clone(), model.active.clone()));
            queue.block_on(device.snapshot_create(queue, name))
        }
    };
    if let Err(error) = result {
        let disk = &used.history.disk;
        if disk.failed() && (!failed_before || disk.is_final()) {
            let goes_on = used.go_on(device, began, &before, model);
            *model = before;
            return match goes_on {
                true => Outcome::Failed,
                false => Outcome::Final,
            };
        }
        // Refcounts of few bits overflow, and in version 2 the size of a snapshot is unknown.
        let known = matches!(
            error,
            zebu::Error::RefcountOverflow { .. } | zebu::Error::Refused(_)
        );
        assert!(known, "{error}");
        *model = before;
    }
    used.active.clone_from(&model.active);
    used.history.note(began, Change::Becomes(model.clone()));
    Outcome::Done
}

/// Resizes the disk, if that is possible, and retries after a failure. Returns whether the session
/// can continue.
pub(super) fn resize_once(
    used: &mut Use<'_>,
    device: &mut Device,
    rng: &mut Dice,
    model: &mut Model,
) -> bool {
    let old = used.active.len();
    let new = 512 * (16 + rng.below(2 * old as u64 / 512) as usize);
    let preallocation = match new > old && rng.one_in(2) {
        true => {
            let modes = [
                Preallocation::Metadata,
                Preallocation::Falloc,
                Preallocation::Full,
            ];
            rng.pick(&modes)
        }
        false => Preallocation::Off,
    };
    let mix = mix(used.cluster, 0);
    for _ in 0..2 {
        let began = used.history.disk.now();
        let failed_before = used.history.disk.failed();
        let resize = device.resize(used.queue, new as u64, preallocation);
        let result = used.queue.block_on(resize);
        model.active.clone_from(&used.active);
        let before = model.clone();
        model.resize(new);
        let Err(e) = result else {
            used.active.resize(new, 0);
            if preallocation != Preallocation::Off {
                assert_allocated(used.queue, device, old as u64);
            }
            used.history.note(began, Change::Becomes(model.clone()));
            return true;
        };
        let disk = &used.history.disk;
        if !disk.failed() || failed_before && !disk.is_final() {
            // Version 2, with snapshots.
            assert!(!model.snapshots.is_empty(), "{e}");
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

/// Fails unless each cluster from `start` to the end of the disk is allocated.
fn assert_allocated(queue: &Queue, device: &Device, start: u64) {
    let Some(image) = device.top().as_qcow2() else {
        return;
    };
    let (mut at, end) = (start, device.size());
    while at < end {
        let extent = queue.block_on(image.extent(queue, at, end - at));
        // The operation that fails may be one of these reads.
        let extent = extent.or_else(|_| queue.block_on(image.extent(queue, at, end - at)));
        let extent = extent.unwrap();
        let is_empty = matches!(
            extent.mapping,
            Mapping::Unallocated { host: None } | Mapping::Zero { host: None }
        );
        assert!(!is_empty, "not preallocated at {at:#x}: {extent:?}");
        at += extent.length;
    }
}

pub fn resize(queue: &Queue, rng: &mut Dice) -> History {
    let mut options = options(rng, 150);
    let mut layout = Layout::default();
    let mut active = vec![0; options.size as usize];
    if options.version == 3 && rng.one_in(3) {
        options.cluster_bits = 14;
        options.extended_l2 = true;
    }
    match rng.below(4) {
        0 | 1 => {
            // Longer or shorter than the disk. Its bytes behind the end must never be read.
            let length = rng.pick(&[300 << 10, active.len() / 2 + 100]);
            let base = noise(rng, length);
            let both = length.min(active.len());
            active[..both].copy_from_slice(&base[..both]);
            layout.backings.push(raw("base.raw", &base));
            options.backing = Some(backing("base.raw", "raw"));
        }
        2 if options.version == 3 => {
            layout.data = Some(1);
            options.data_file = Some(NewDataFile::new(DATA_FILE).raw(rng.one_in(2)));
        }
        _ => {}
    }
    let mut used = begin(queue, rng, &options, layout, active);
    let mut device = used.history.open(queue, &writable(rng));
    let mut model = used.history.before.clone();
    let mix = mix(used.cluster, 0);
    for _ in 0..5 {
        for _ in 0..rng.below(8) {
            used.step(&device, rng, &mix);
        }
        if !resize_once(&mut used, &mut device, rng, &mut model) {
            return used.abandon(device);
        }
    }
    used.close(device)
}

fn backing(name: &str, format: &str) -> NewBacking {
    NewBacking::new(name).format(Some(format.into()))
}

pub fn commit(queue: &Queue, rng: &mut Dice) -> History {
    let mut below = options(rng, 100);
    below.backing = None;
    let (base, base_active) = used_image(queue, rng, &below, Layout::default());
    let above = options(rng, 100).backing(Some(backing("base.qcow2", "qcow2")));
    // It is written over a raw image with the content of the base.
    let stand_in = Layout {
        backings: vec![raw("base.qcow2", &base_active)],
        ..Layout::default()
    };
    let (top, active) = used_image(queue, rng, &above, stand_in);
    let mut old = base_active.clone();
    old.resize(old.len().max(active.len()), 0);
    let mut new = active.clone();
    new.extend(&old[active.len()..]);
    let layout = Layout {
        backings: vec![("base.qcow2", Under::Image(1))],
        base: vec![old, new],
        ..Layout::default()
    };
    let before = Model::of(active);
    let history = History::new(rng, layout, vec![top, base], before);
    let alone = writable(rng).no_backing(true);
    let options = CommitOptions::default()
        .empty(!rng.one_in(4))
        .engine(ENGINE);
    let commit = || {
        let top = || Device::from_storage(queue, history.files[0].clone(), &alone);
        let base = || Under::Image(1).open(queue, &history.files, true);
        // One operation fails, so a second attempt succeeds.
        let top = top().or_else(|_| top()).unwrap();
        let base = base().or_else(|_| base()).unwrap();
        jobs::commit(queue, top, base, &options, |_| {})
    };
    if let Err(e) = commit() {
        history.allow(&e);
        commit().unwrap_or_else(|e| panic!("retried: {e}"));
    }
    let base = Under::Image(1).open(queue, &history.files, false);
    let base = base.or_else(|_| Under::Image(1).open(queue, &history.files, false));
    let mut found = content(queue, &base.unwrap());
    if found.is_err() {
        let base = Under::Image(1).open(queue, &history.files, false);
        found = content(queue, &base.unwrap());
    }
    assert!(found.unwrap() == history.layout.base[1], "not committed");
    history
}

/// Names of backing files before and after: short ones, and such that the
/// header is longer than a sector.
const NAMES: [[&str; 2]; 4] = [
    ["old.raw", "new.raw"],
    ["old.raw", LONG],
    [LONG, "new.raw"],
    [LONG, ALSO_LONG],
];
const LONG: &str = "a-name-as-long-as-those-of-images-in-a-store-with-a-hash-\
    0123456789abcdef0123456789abcdef-0123456789abcdef0123456789abcdef-\
    0123456789abcdef0123456789abcdef-0123456789abcdef0123456789abcdef.raw";
const ALSO_LONG: &str = "another-name-that-is-as-long-as-the-first-one-with-a-hash-\
    fedcba9876543210fedcba9876543210-fedcba9876543210fedcba9876543210-\
    fedcba9876543210fedcba9876543210-fedcba9876543210fedcba9876543210.raw";

pub fn rebase(queue: &Queue, rng: &mut Dice) -> History {
    let mut options = options(rng, 100);
    if rng.one_in(3) {
        options.version = 3;
        options.cluster_bits = 14;
        options.extended_l2 = true;
    }
    // The long names do not fit into clusters of 512 bytes.
    let kinds = if options.cluster_bits == 9 { 1 } else { 4 };
    let [old_name, new_name] = NAMES[rng.below(kinds) as usize];
    options.backing = Some(backing(old_name, "raw"));
    let size = options.size as usize;
    let old = noise(rng, size);
    let mut new = old.clone();
    for chunk in new.chunks_mut(4096) {
        if rng.one_in(3) {
            rng.fill(chunk);
        }
    }
    new.truncate(rng.pick(&[size, size / 1024 * 512]));
    let layout = Layout {
        backings: vec![raw(old_name, &old)],
        ..Layout::default()
    };
    let (image, active) = used_image(queue, rng, &options, layout.clone());
    let mut layout = layout;
    layout.backings.push(raw(new_name, &new));
    let before = Model::of(active);
    let history = History::new(rng, layout, vec![image], before);
    let how = writable(rng);
    let under = history.layout.backings[1].1.clone();
    let name = (!rng.one_in(4)).then(|| backing(new_name, "raw"));
    let options = RebaseOptions::default()
        .compress(rng.one_in(4))
        .engine(ENGINE);
    let rebase = || {
        let overlay = history.open(queue, &how);
        let new = name
            .as_ref()
            .map(|_| under.open(queue, &history.files, false).unwrap());
        jobs::rebase(queue, overlay, new, name.as_ref(), &options, |_| {})
    };
    if let Err(e) = rebase() {
        history.allow(&e);
        rebase().unwrap_or_else(|e| panic!("retried: {e}"));
    }
    history
}

pub fn amend(queue: &Queue, rng: &mut Dice) -> History {
    let options = options(rng, 100);
    let (image, active) = used_image(queue, rng, &options, Layout::default());
    let before = Model::of(active);
    let mut history = History::new(rng, Layout::default(), vec![image], before);
    let mut model = history.before.clone();
    for _ in 0..4 {
        let device = history.open(queue, &writable(rng));
        let sectors = 16 + rng.below(model.active.len() as u64 / 512);
        let options = AmendOptions::default()
            .version(rng.one_in(2).then(|| 2 + rng.below(2) as u32))
            .refcount_order(rng.one_in(2).then(|| rng.below(7) as u32))
            .lazy_refcounts(rng.one_in(3).then(|| rng.one_in(2)))
            .size(rng.one_in(3).then_some(sectors * 512));
        let began = history.disk.now();
        let failed_before = history.disk.failed();
        let mut result = jobs::amend(queue, device, &options, |_| {});
        let (old, new) = (model.active.len(), (sectors * 512) as usize);
        let failed = history.disk.failed() && !failed_before;
        if failed && result.is_err() {
            // A part may have been done; retried, all of it is done.
            let device = history.open(queue, &writable(rng));
            let size = device.size() as usize;
            assert!(size == old || options.size.is_some() && size == new);
            result = jobs::amend(queue, device, &options, |_| {});
            let refused = matches!(result, Err(zebu::Error::Refused(_)));
            assert!(result.is_ok() || refused, "retried: {result:?}");
        }
        if let Err(e) = result {
            // Not every image can get every option.
            let device = history.open(queue, &OpenOptions::default());
            assert_eq!(device.size() as usize, old, "refused half way: {e}");
            continue;
        }
        if options.size.is_some() {
            model.resize(new);
        }
        history.note(began, Change::Becomes(model.clone()));
    }
    history
}

/// A repair of an image some of whose refcounts are too high and others too low.
pub fn repair(queue: &Queue, rng: &mut Dice) -> History {
    let options = options(rng, 100).version(3).refcount_order(4);
    let (mut image, active) = used_image(queue, rng, &options, Layout::default());
    damage(rng, &mut image, 1 << options.cluster_bits);
    let layout = Layout {
        damaged: true,
        ..Layout::default()
    };
    let before = Model::of(active);
    let history = History::new(rng, layout, vec![image], before);
    let file = history.files[0].clone();
    if let Err(e) = repair_all(queue, file.clone()) {
        history.allow(&e);
        repair_all(queue, file).unwrap();
    }
    history
}

/// Changes refcounts, of 16 bits, at random; sometimes a block is lost.
fn damage(rng: &mut Dice, image: &mut [u8], cluster: usize) {
    let word = |image: &[u8], at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap());
    let header = Header::decode(&image[..cluster]).unwrap();
    let table = header.refcount_table_offset as usize;
    for entry in 0..cluster / 8 {
        let block = word(image, table + 8 * entry) as usize;
        if block == 0 {
            continue;
        }
        if rng.one_in(8) {
            image[table + 8 * entry..][..8].fill(0);
            continue;
        }
        let count = (image.len() / cluster).min(cluster / 2);
        for _ in 0..1 + rng.below(10) {
            let n = rng.index(count);
            image[block + 2 * n + 1] = rng.below(3) as u8;
        }
    }
    // Dirty: refcounts may be wrong.
    image[79] |= 1;
}

pub fn convert(queue: &Queue, rng: &mut Dice) -> History {
    converted(queue, rng, false)
}

pub fn convert_compressed(queue: &Queue, rng: &mut Dice) -> History {
    converted(queue, rng, true)
}

/// A conversion to a new image.
fn converted(queue: &Queue, rng: &mut Dice, compress: bool) -> History {
    let mut options = options(rng, 150);
    options.size = options.size.next_multiple_of(512);
    let size = options.size as usize;
    let content = noise(rng, size);
    let before = Model::of(vec![0; size]);
    let mut history = History::new(rng, Layout::default(), vec![Vec::new()], before);
    // One that says that it is not finished until it is filled, or one that is there.
    let new_image = rng.one_in(2);
    let file = history.files[0].clone();
    let made = match new_image {
        true => begin_image(queue, &*options.plan().unwrap(), vec![file]).map(Some),
        false => {
            let create = create_qcow2(queue, &*file, None, &options, |_| {});
            queue.block_on(create).map(|()| None)
        }
    };
    let target = match made {
        Ok(target) => target,
        Err(e) => {
            history.allow(&e);
            history.layout.made = u64::MAX;
            return history;
        }
    };
    history.layout.made = history.disk.now();
    let source = OpenOptions::default().format(Some(Format::RAW));
    let source = Device::from_storage(queue, Arc::new(Memory::new(content.clone())), &source);
    let target = target.unwrap_or_else(|| Target::Image(history.open(queue, &writable(rng))));
    let began = history.disk.now();
    let convert = ConvertOptions::default()
        .workers(Some(1 + rng.below(4) as usize))
        .zero_from(Some(0))
        .compress(compress.then(CompressOptions::default))
        .any_order(rng.one_in(2))
        .engine(ENGINE);
    let written = Change::Write(0, content.clone());
    if new_image {
        history.layout.filled = Some((began..u64::MAX, content));
    }
    if let Err(e) = jobs::convert(vec![source.unwrap()], target, &convert, |_| {}) {
        history.allow(&e);
        history.note_failure(began, written);
        return history;
    }
    history.note(began, written);
    let began = history.disk.now();
    history.note(began, Change::Flush);
    if let Some((times, _)) = &mut history.layout.filled {
        times.end = began;
    }
    history
}
