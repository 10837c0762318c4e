//! Many threads, each with its queue and several requests in flight, whose ranges overlap, while the chain of
//! the device is exchanged.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use zebu::block::{Format, SharedDevice};
use zebu::storage::{EngineKind, Queue};

use crate::bitmaps::Bitmaps;
use crate::common::{Rng, peer, progress};
use crate::disk::assert_same;
use crate::driven::WAYS;
use crate::exchanges::Exchanges;
use crate::ledger::{BLOCK, Ledger, Sequence, image_of, stamped};
use crate::load::{Handle, Load, Thread, settle};
use crate::setup::{Opening, Setup, queue_options};
use crate::trace;

/// The number of the write that the backing file is of.
const BACKING: Sequence = 1;

pub fn run(seed: u64, folder: &Path, engines: &[EngineKind]) -> usize {
    let mut rng = Rng::new(seed);
    let setup = setup(&mut rng);
    trace(|| format!("{setup:?}"));
    let mut content = make(&setup, folder);
    let sequence = Arc::new(AtomicU64::new(BACKING + 1));
    let mut requests = 0;
    let mut bitmaps = Bitmaps::default();
    for _ in 0..1 + rng.below(3) {
        let opening = Opening::random(&mut rng, &setup, engines);
        trace(|| format!("{opening:?}"));
        let queue = Queue::new(opening.queue.clone()).unwrap();
        let mut device = opening.open(&queue, &setup, folder, true);
        for _ in 0..rng.below(3) {
            let bytes = image_of(&content);
            bitmaps.change(&setup, &queue, &mut device, &mut rng, &bytes);
        }
        let device = SharedDevice::new(device);
        let own = Rng::new(rng.next());
        let exchanged = !rng.one_in(3);
        let mut exchanges = Exchanges::new(&setup, folder, &opening, &queue, device.clone(), own);
        for _ in 0..1 + rng.below(4) {
            let load = Load {
                device: Handle::Shared(device.clone()),
                ledger: Arc::new(Ledger::new(&content)),
                sequence: sequence.clone(),
                cluster: setup.cluster() as usize / BLOCK,
                compresses: setup.compresses(),
                refuses: opening.filters.compresses(),
                hot: rng.index(content.len()),
            };
            let count = 2 + rng.below(3);
            let thread = |_| Thread {
                queue: queue_options(&mut rng, engines),
                driven: rng.pick(&WAYS),
                requests: 5 + rng.below(60),
                depth: 1 + rng.index(8),
                rng: Rng::new(rng.next()),
            };
            let threads = (0..count).map(thread).collect();
            requests += match exchanged {
                true => run_exchanging(&load, threads, &mut exchanges),
                false => load.run(threads),
            };
            let entered = queue.block_on(device.enter()).expect("it is open");
            content = settle(&load.ledger, &queue, &entered);
        }
        exchanges.end();
        let result = queue.block_on(device.close(&queue));
        result.unwrap_or_else(|e| panic!("close: {e}"));
        let image = setup.image(folder);
        if setup.format == Format::QCOW2 {
            peer::assert_clean(&image, "after a close");
        }
        if let Some(other) = setup.other {
            peer::assert_sound(&image, &other, false, "after a close");
        }
        let bytes = image_of(&content);
        peer::assert_content(&image, setup.format.name(), &bytes, "after a close");
        bitmaps.verify_file(&setup, folder, &bytes, true);
        if setup.data_file_is_raw() {
            let data = std::fs::read(folder.join("data.raw")).unwrap();
            let data = &data[..bytes.len().min(data.len())];
            assert_same(data, &bytes, 0, "the data file as a raw image");
        }
    }
    requests as usize
}

/// Runs the threads, and exchanges the chain until they have ended. Returns the number of requests.
fn run_exchanging(load: &Load, threads: Vec<Thread>, exchanges: &mut Exchanges) -> u64 {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let is_over = &is_over;
        let running = scope.spawn(move || {
            let run = std::panic::AssertUnwindSafe(|| load.run(threads));
            let requests = std::panic::catch_unwind(run);
            is_over.store(true, Ordering::SeqCst);
            requests.unwrap_or_else(|e| std::panic::resume_unwind(e))
        });
        while !is_over.load(Ordering::SeqCst) {
            exchanges.exchange();
            progress();
        }
        running.join().unwrap()
    })
}

/// A small image, so that the ranges of threads overlap.
fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::random(rng);
    let clusters = 2 + rng.below(30);
    let size = (clusters << setup.options.cluster_bits).min(4 << 20);
    setup.options.size = size.min(setup.options.size);
    setup.used_before = false;
    setup
}

/// Makes the image, and returns the write that each block is of.
fn make(setup: &Setup, folder: &Path) -> Vec<Sequence> {
    let mut content = vec![0; setup.size() as usize / BLOCK];
    if let Some((length, _)) = setup.backing {
        let blocks = length as usize / BLOCK;
        setup.make_backing(folder, &stamped(BACKING, 0..blocks));
        let end = blocks.min(content.len());
        content[..end].fill(BACKING);
    }
    setup.make(folder);
    content
}
