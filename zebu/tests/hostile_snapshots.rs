//! Guards against images made to do harm when their snapshots are changed: a
//! panic, a loop without end, or a sound image that is not sound afterwards.
//!
//! `ZEBU_HOSTILE_RUNS` says how many images are generated, `ZEBU_HOSTILE_SEED`
//! with which number to begin.

mod common;
#[path = "common/hostile_images.rs"]
#[allow(dead_code)]
mod hostile_images;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::faulty::Faulty;
use hostile_images::{Random, build, mutate};
use zebu::block::{Device, LayerImage, OpenOptions};
use zebu::image::SnapshotName;
use zebu::jobs;
use zebu::storage::{EngineKind, Memory, Queue, QueueOptions, Storage};

/// How long one image may take. (A busy machine is slow.)
const TIME: Duration = Duration::from_secs(20);
/// Bytes that an image may grow to.
const MOST: u64 = 64 << 20;

fn open(queue: &Queue, storage: Arc<dyn Storage>) -> Option<Device> {
    let options = OpenOptions {
        write: true,
        discard: Some(true),
        no_backing: true,
        ..OpenOptions::default()
    };
    Device::from_storage(queue, storage, &options).ok()
}

/// Whether a check finds no error.
fn is_sound(queue: &Queue, bytes: &[u8]) -> bool {
    let Some(device) = open(queue, Arc::new(Memory::new(bytes.to_vec()))) else {
        return false;
    };
    let LayerImage::Qcow2(image) = &device.top().image else {
        return false;
    };
    let report = jobs::check(queue, image, &mut |_| {});
    report.is_ok_and(|r| r.corruptions == 0 && r.check_errors == 0)
}

/// Changes the snapshots of an image.
fn exercise(queue: &Queue, random: &mut Random, bytes: &[u8]) {
    let sound = is_sound(queue, bytes);
    let memory = Arc::new(Memory::new(bytes.to_vec()));
    let storage = Faulty::new(memory.clone(), 1);
    storage.limit(MOST);
    let Some(mut device) = open(queue, storage.clone()) else {
        return;
    };
    let LayerImage::Qcow2(image) = &device.top().image else {
        return;
    };
    let ids = image.snapshots().iter().take(3).map(|s| s.id.clone());
    let mut ids: Vec<String> = ids.filter_map(|id| String::from_utf8(id).ok()).collect();
    ids.push("new".into());
    for _ in 0..4 {
        let id = &ids[random.below(ids.len() as u64) as usize];
        let name = SnapshotName::IdOrName(id.clone());
        let _ = match random.below(3) {
            0 => queue.block_on(device.snapshot_create(queue, "new")),
            1 => queue.block_on(device.snapshot_apply(queue, &name)),
            _ => queue.block_on(device.snapshot_delete(queue, &name)),
        };
    }
    let _ = queue.block_on(device.close(queue));
    let after = memory.to_vec();
    assert!(open(queue, Arc::new(Memory::new(after.clone()))).is_some());
    assert!(!sound || is_sound(queue, &after), "it was sound");
}

fn number(variable: &str, default: u64) -> u64 {
    let text = std::env::var(variable).ok();
    text.map_or(default, |text| text.parse().expect(variable))
}

#[test]
fn broken_images() {
    let queue = Queue::new(QueueOptions {
        engine: EngineKind::Threads,
        ..QueueOptions::default()
    })
    .expect("a queue");
    let first = number("ZEBU_HOSTILE_SEED", 1);
    for seed in first..first + number("ZEBU_HOSTILE_RUNS", 400) {
        let start = Instant::now();
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut bytes = build(&mut random, 1 << 18);
        if !random.one_in(4) {
            mutate(&mut random, &mut bytes);
        }
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            exercise(&queue, &mut random, &bytes);
        }));
        assert!(result.is_ok(), "seed {seed}");
        assert!(start.elapsed() < TIME, "seed {seed}: {:?}", start.elapsed());
    }
}
