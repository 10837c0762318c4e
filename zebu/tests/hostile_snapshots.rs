//! Guards against images made to do harm when their snapshots are changed: a
//! panic, a loop without end, or a sound image that is not sound afterwards.
//!
//! `ZEBU_HOSTILE_RUNS` says how many images are generated, `ZEBU_HOSTILE_SEED`
//! with which number to begin.

#[path = "common/hostile_images.rs"]
#[allow(dead_code)]
mod hostile_images;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hostile_images::{Random, build, mutate};
use zebu::block::{Device, LayerImage, OpenOptions};
use zebu::image::SnapshotName;
use zebu::jobs;
use zebu::storage::{
    Alignment, CacheMode, EngineKind, Iov, Memory, OpKind, Queue, QueueOptions, Started, Storage,
    StorageExtent,
};

/// How long one image may take. (A busy machine is slow.)
const TIME: Duration = Duration::from_secs(20);
/// Bytes that an image may grow to.
const MOST: u64 = 64 << 20;

/// Memory that is full when it has so many bytes.
#[derive(Debug)]
struct Small(Memory);

// SAFETY: all is passed on to `Memory`, which keeps no memory.
unsafe impl Storage for Small {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if kind != OpKind::Read && offset.saturating_add(length) > MOST {
            return Started::done(Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        }
        // SAFETY: passed on.
        unsafe { self.0.start(queue, kind, offset, length, memory) }
    }
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        match length > MOST {
            true => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            false => self.0.set_len(length),
        }
    }
    fn allocated(&self) -> io::Result<u64> {
        self.0.allocated()
    }
    fn alignment(&self) -> Alignment {
        self.0.alignment()
    }
    fn extent(&self, offset: u64) -> io::Result<StorageExtent> {
        self.0.extent(offset)
    }
    fn path(&self) -> &Path {
        self.0.path()
    }
    fn cache_mode(&self) -> CacheMode {
        CacheMode::WriteBack
    }
    fn is_device(&self) -> bool {
        false
    }
}

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
    let storage = Arc::new(Small(Memory::new(bytes.to_vec())));
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
    let after = storage.0.to_vec();
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
