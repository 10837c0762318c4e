//! Guards against what `exchanges.rs` guards against, with images in memory: there are no files to make,
//! lock and remove, so that a chain is exchanged many times in a short time.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Waker};

use zebu::block::{Device, Format, OpenOptions, SharedDevice, Storages};
use zebu::jobs::{self, CreateQcow2, NewBacking, NewDataFile, create_qcow2};
use zebu::storage::{Memory, Queue, Storage};
use zebu_testkit::WRITTEN;

use crate::common::{Rng, Watchdog, progress, work};
use crate::ledger::{BLOCK, Ledger, image_of};
use crate::load::{Handle, Load, Thread, settle};
use crate::{BASE, MIDDLE, driven, queue_of};

/// Images of the chain at most.
const DEPTH: usize = 5;
const THREADS: u64 = 4;
/// The name that headers have: nothing is opened by it.
const NAME: &str = "below";

/// An image of the chain.
#[derive(Clone)]
struct Image {
    storage: Arc<Memory>,
    /// Its data file.
    data: Option<Arc<Memory>>,
    format: Format,
    /// Whether it can be written again when what is above is taken away.
    rests: bool,
}

struct Run {
    rng: Rng,
    queue: Queue,
    size: u64,
    device: SharedDevice,
    /// The top one first.
    chain: Vec<Image>,
}

impl Run {
    fn overlay(&mut self, rests: bool) -> Image {
        let extended = self.rng.one_in(3);
        let bits = match extended {
            true => 14 + self.rng.below(3),
            false => 9 + self.rng.below(8),
        };
        let data = (self.rng.one_in(5)).then(|| Arc::new(Memory::new(Vec::new())));
        let version = match extended || data.is_some() {
            true => 3,
            false => 2 + self.rng.below(2) as u32,
        };
        let options = CreateQcow2::default()
            .size(self.size)
            .cluster_bits(bits as u32)
            .extended_l2(extended)
            .version(version)
            .data_file(data.as_ref().map(|_| NewDataFile::new("data")))
            .backing(Some(NewBacking::new(NAME).format(Some("raw".into()))));
        let storage = Arc::new(Memory::new(Vec::new()));
        let of_data = data.as_ref().map(|data| &**data as &dyn Storage);
        let created = create_qcow2(&self.queue, &*storage, of_data, &options, |_| {});
        self.queue.block_on(created).unwrap();
        Image {
            storage,
            data,
            format: Format::QCOW2,
            rests,
        }
    }

    /// A new image of any format, with this content.
    fn written(&mut self, bytes: &[u8], rests: bool) -> Image {
        written(&mut self.rng, &self.queue, bytes, rests)
    }

    /// Opens images over each other, the first one perhaps for writing.
    fn open(&self, images: &[Image], write: bool) -> Device {
        open(&self.queue, images, write)
    }

    fn exchange(&mut self) {
        let depth = self.chain.len();
        let is_qcow2 = self.chain[0].format == Format::QCOW2;
        match self.rng.below(12) {
            0..4 if depth < DEPTH => self.put_on(),
            0..7 if depth > 1 && self.chain[1].rests => self.take_off(),
            7 if depth > 1 && is_qcow2 => self.cut(),
            8 if depth > 1 && depth < DEPTH && is_qcow2 => self.extend(),
            9 if depth > 1 && is_qcow2 => self.merge(),
            10 => self.replace(),
            _ => self.drop_waiting(),
        }
    }

    fn put_on(&mut self) {
        let image = self.overlay(true);
        let overlay = self.open(std::slice::from_ref(&image), true);
        let queue = &self.queue;
        let change = self
            .device
            .change(async |device| device.put_on_top(queue, overlay).await);
        queue.block_on(change).unwrap();
        self.chain[0].rests = true;
        self.chain.insert(0, image);
    }

    fn take_off(&mut self) {
        let queue = &self.queue;
        let change = self.device.change(async |device| {
            device.commit_top(queue).await?;
            device.take_off_top(queue).await
        });
        let top = queue.block_on(change).unwrap();
        queue.block_on(top.close(queue)).unwrap();
        self.chain.remove(0);
    }

    /// Everything is copied to the top image, which needs no other one then.
    fn cut(&mut self) {
        let queue = &self.queue;
        let change = self.device.change(async |device| {
            let mut at = 0;
            while at < device.size() {
                let status = device.status(queue, at, device.size() - at).await?;
                let length = status.length as usize;
                if status.depth > 0 && status.present {
                    let read = device.read_buffer(queue, at, queue.buffer(length), length);
                    let (buffer, read) = read.await;
                    read?;
                    device.write_buffer(queue, at, buffer, length).await.1?;
                }
                at += status.length;
            }
            device.replace_below(queue, None, None, None).await
        });
        drop(queue.block_on(change).unwrap());
        self.chain.truncate(1);
    }

    /// An image is put between the top one and the one below it.
    fn extend(&mut self) {
        let rests = self.rng.one_in(2);
        let between = self.overlay(rests);
        let mut images = vec![between.clone()];
        images.extend_from_slice(&self.chain[1..]);
        let below = self.open(&images, rests);
        self.replace_below(below, "qcow2");
        for image in &mut self.chain[1..] {
            image.rests = false;
        }
        self.chain.insert(1, between);
    }

    /// All that is below the top image becomes one image.
    fn merge(&mut self) {
        let below = self.open(&self.chain[1..], false);
        let mut bytes = vec![0; below.size() as usize];
        below.read_blocking(&self.queue, 0, &mut bytes).unwrap();
        drop(below);
        let rests = self.rng.one_in(2);
        let image = self.written(&bytes, rests);
        let merged = self.open(std::slice::from_ref(&image), rests);
        self.replace_below(merged, image.format.name());
        self.chain.truncate(1);
        self.chain.push(image);
    }

    fn replace_below(&self, below: Device, format: &str) {
        let queue = &self.queue;
        let change = self.device.change(async |device| {
            let name = Some(NAME.as_ref());
            let replaced = device.replace_below(queue, Some(below), name, Some(format));
            replaced.await
        });
        drop(queue.block_on(change).unwrap());
    }

    /// The disk is copied to a new image, which takes its place.
    fn replace(&mut self) {
        let image = self.written(&vec![0; self.size as usize], true);
        let copy = self.open(std::slice::from_ref(&image), true);
        let (queue, size) = (&self.queue, self.size as usize);
        let change = self.device.change(async |device| {
            let (buffer, read) = device.read_buffer(queue, 0, queue.buffer(size), size).await;
            read?;
            copy.write_buffer(queue, 0, buffer, size).await.1?;
            device.replace(queue, copy).await
        });
        let old = queue.block_on(change).unwrap();
        queue.block_on(old.close(queue)).unwrap();
        self.chain = vec![image];
    }

    /// An exchange that is dropped while it waits.
    fn drop_waiting(&mut self) {
        let used = self.queue.block_on(self.device.enter()).unwrap();
        {
            let queue = &self.queue;
            let change = self.device.change(async |device| {
                let replaced = device.replace_below(queue, None, None, None);
                replaced.await.map(drop)
            });
            let mut change = pin!(change);
            let mut context = Context::from_waker(Waker::noop());
            assert!(change.as_mut().poll(&mut context).is_pending());
        }
        drop(used);
    }

    /// Verifies the images as they are when the device is closed.
    fn verify(&self, ledger: &Ledger) {
        let device = self.open(&self.chain, false);
        settle(ledger, &self.queue, &device);
        for layer in device.layers() {
            let Some(image) = layer.as_qcow2() else {
                continue;
            };
            let mut say = |message| println!("{message}");
            let checked = jobs::check(&self.queue, image, &mut say, |_| {});
            let report = self.queue.block_on(checked).unwrap();
            let wrong = report.corruptions + report.leaks + report.check_errors;
            assert_eq!(wrong, 0, "{report:?}");
        }
    }
}

fn written(rng: &mut Rng, queue: &Queue, bytes: &[u8], rests: bool) -> Image {
    let written = rng.pick(WRITTEN);
    let image = Image {
        storage: Arc::new(Memory::new(Vec::new())),
        data: None,
        format: written.format(),
        rests,
    };
    written.make(queue, image.storage.clone(), bytes.len() as u64);
    let device = open(queue, std::slice::from_ref(&image), true);
    device.write_blocking(queue, 0, bytes).unwrap();
    queue.block_on(device.close(queue)).unwrap();
    image
}

fn open(queue: &Queue, images: &[Image], write: bool) -> Device {
    let (first, others) = images.split_first().expect("an image");
    let mut storages = Storages::new(first.storage.clone());
    storages.data = first.data.clone().map(|data| data as Arc<dyn Storage>);
    if !others.is_empty() {
        storages.backing = Some(open(queue, others, false));
    }
    let options = OpenOptions::default()
        .format(Some(first.format))
        .write(write)
        .no_backing(true)
        .discard(Some(true))
        .l2_cache_entry_size(Some(512))
        .l2_cache_size(Some(1024));
    Device::from_storages(queue, storages, &options).unwrap_or_else(|e| panic!("open: {e}"))
}

#[test]
fn chains_are_exchanged_in_memory() {
    let engines = crate::engines();
    let mut requests = 0;
    let mut seeds = work(1000, "exchanges in memory");
    while let Some(seed) = seeds.next() {
        let _watchdog = Watchdog::new(&format!("seed {seed}"));
        let mut rng = Rng::new(seed);
        let blocks = 64 + rng.index(256);
        let sequences: Vec<_> = (0..blocks).map(|n| BASE * (n as u64 / 16 % 2)).collect();
        let queue = Queue::new(queue_of(&mut rng, &engines)).unwrap();
        let image = written(&mut rng, &queue, &image_of(&sequences), true);
        let device = SharedDevice::new(open(&queue, std::slice::from_ref(&image), true));
        let thread = |_| Thread {
            queue: queue_of(&mut rng, &engines),
            driven: rng.pick(&driven::WAYS),
            requests: 2000 + rng.below(2000),
            depth: 1 + rng.index(8),
            rng: Rng::new(rng.next()),
        };
        let threads: Vec<_> = (0..THREADS).map(thread).collect();
        let load = Load {
            device: Handle::Shared(device.clone()),
            ledger: Arc::new(Ledger::new(&sequences)),
            sequence: Arc::new(AtomicU64::new(MIDDLE)),
            cluster: 1 << rng.below(5),
            compresses: rng.one_in(3),
            refuses: false,
            hot: rng.index(blocks),
        };
        let mut run = Run {
            size: (blocks * BLOCK) as u64,
            chain: vec![image],
            rng,
            queue,
            device,
        };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (load, is_over) = (&load, &is_over);
            let running = scope.spawn(move || {
                let requests =
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| load.run(threads)));
                is_over.store(true, Ordering::SeqCst);
                requests.unwrap_or_else(|e| std::panic::resume_unwind(e))
            });
            while !is_over.load(Ordering::SeqCst) {
                run.exchange();
                seeds.add(1);
                progress();
            }
            requests += running.join().unwrap();
        });
        run.queue.block_on(run.device.close(&run.queue)).unwrap();
        run.verify(&load.ledger);
    }
    println!("{requests} verified requests meanwhile");
}
