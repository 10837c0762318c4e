//! The formats that are written in place: making images of them, and threads that use one without a chain.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use zebu::block::{Device, OpenOptions};
use zebu::names::Source;
use zebu::storage::{CacheMode, Queue};
use zebu_testkit::{WRITTEN, Written};

use crate::common::peer::{assert_content, assert_sound, text};
use crate::common::{Rng, Watchdog, progress, work};
use crate::ledger::{BLOCK, Ledger, image_of};
use crate::load::{Handle, Load, Thread, settle};
use crate::{BASE, driven, engines, new_file, queue_of};

fn open(queue: &Queue, path: &Path, written: &Written, cache: CacheMode) -> Device {
    let options = OpenOptions::default()
        .format(Some(written.format()))
        .write(true)
        .cache(cache)
        .discard(Some(true));
    let source = Source::Name(text(path).into());
    Device::open(queue, &source, &options).unwrap_or_else(|e| panic!("open {written:?}: {e}"))
}

/// Makes an image of a format with this content.
pub fn make(folder: &Path, name: &str, written: &Written, content: &[u8]) {
    let queue = Queue::new(Default::default()).unwrap();
    let path = folder.join(name);
    written.make(&queue, new_file(&path), content.len() as u64);
    let device = open(&queue, &path, written, CacheMode::Unsafe);
    for (nth, piece) in content.chunks(64 << 10).enumerate() {
        if piece.iter().any(|byte| *byte != 0) {
            let at = (nth as u64) << 16;
            device.write_blocking(&queue, at, piece).unwrap();
        }
    }
    queue.block_on(device.close(&queue)).unwrap();
}

/// Threads use an image. Returns the number of their requests.
fn run(seed: u64, written: &Written, folder: &Path) -> u64 {
    let mut rng = Rng::new(seed);
    let engines = engines();
    let blocks = 256 + rng.index(8192);
    let mut content: Vec<_> = (0..blocks).map(|n| BASE * (n as u64 / 700 % 2)).collect();
    make(folder, "image", written, &image_of(&content));
    let path = folder.join("image");
    let sequence = Arc::new(AtomicU64::new(BASE + 1));
    let mut requests = 0;
    for _ in 0..2 {
        let queue = Queue::new(queue_of(&mut rng, &engines)).unwrap();
        let cache = rng.pick(&[CacheMode::Unsafe, CacheMode::WriteBack, CacheMode::None]);
        let device = Arc::new(open(&queue, &path, written, cache));
        let load = Load {
            device: Handle::Plain(device.clone()),
            ledger: Arc::new(Ledger::new(&content)),
            sequence: sequence.clone(),
            cluster: (written.block as usize / BLOCK).max(8),
            compresses: false,
            refuses: false,
            hot: rng.index(blocks),
        };
        let thread = |_| Thread {
            queue: queue_of(&mut rng, &engines),
            driven: rng.pick(&driven::WAYS),
            requests: 50 + rng.below(100),
            depth: 1 + rng.index(8),
            rng: Rng::new(rng.next()),
        };
        requests += load.run((0..4).map(thread).collect());
        content = settle(&load.ledger, &queue, &device);
        drop(load);
        let device = Arc::into_inner(device).expect("all threads have ended");
        queue.block_on(device.close(&queue)).unwrap();
        assert_sound(&path, written, false, "after a close");
        let bytes = image_of(&content);
        assert_content(&path, written.name, &bytes, "after a close");
        progress();
    }
    requests
}

#[test]
fn images_of_each_format() {
    let mut seeds = work(4_000, "verified requests on images of each format");
    while let Some(seed) = seeds.next() {
        for written in WRITTEN {
            let _watchdog = Watchdog::new(&format!("seed {seed}, {written:?}"));
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            seeds.add(run(seed, written, folder.path()));
        }
    }
}
