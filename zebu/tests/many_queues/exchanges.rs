//! Guards against blocks that are lost, misplaced or invented when the chain of a device is exchanged
//! while threads use it: images are put on top and taken away, the chain below is cut, extended and
//! merged, the whole is replaced. Now and then an exchange is refused, or dropped while it waits; then the
//! chain stays what it was. At random times the locks of all files are looked at.

use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Waker};

use zebu::block::{ChangeHook, Device, Format, OpenOptions, SharedDevice};
use zebu::jobs::{self, CreateQcow2, NewBacking, NewDataFile};
use zebu::names::Source;
use zebu::storage::{CacheMode, EngineKind, Queue};
use zebu_testkit::WRITTEN;

use crate::common::peer::{assert_content, text};
use crate::common::{Rng, Watchdog, progress, work};
use crate::hooked::{Backup, COPIED, Mirror};
use crate::ledger::{BLOCK, Ledger, image_of};
use crate::load::{Handle, Load, Thread};
use crate::{BASE, MIDDLE, create, driven, formats, queue_of};

/// Threads that use the device.
const THREADS: u64 = 4;
/// Images of the chain at most.
const DEPTH: usize = 6;

/// Kinds of exchanges.
const KINDS: usize = 10;

/// An image of the chain.
#[derive(Clone, Debug)]
struct Layer {
    name: String,
    format: &'static str,
    /// Whether it can be written again when what is above is taken away.
    rests: bool,
    /// Its data file.
    data: Option<String>,
}

struct Run {
    rng: Rng,
    folder: PathBuf,
    queue: Queue,
    cache: CacheMode,
    size: usize,
    device: SharedDevice,
    /// The top one first.
    chain: Vec<Layer>,
    names: u64,
    done: [u64; KINDS],
}

/// What may be done to the chain.
#[derive(Clone, Copy, Debug)]
enum Exchange {
    PutOn,
    TakeOff,
    Cut,
    Extend,
    Merge,
    Replace,
    Refused,
    Dropped,
    Backup,
    Mirror,
}

impl Run {
    fn new(seed: u64, folder: &Path, engines: &[EngineKind], is_disk: bool) -> (Run, Vec<u64>) {
        let mut rng = Rng::new(seed);
        let blocks = 256 + rng.index(2048);
        let sequences: Vec<_> = (0..blocks).map(|n| BASE * (n as u64 / 16 % 2)).collect();
        let written = rng.pick(WRITTEN);
        formats::make(folder, "0", &written, &image_of(&sequences));
        let queue = Queue::new(queue_of(&mut rng, engines)).unwrap();
        let cache = match rng.below(3) {
            0 if is_disk => CacheMode::None,
            1 => CacheMode::Unsafe,
            _ => CacheMode::WriteBack,
        };
        let mut chain = vec![Layer {
            name: "0".into(),
            format: written.name,
            rests: rng.one_in(2),
            data: None,
        }];
        let device = match chain[0].rests {
            true => open(&queue, folder, &chain[0], cache, true),
            false => {
                let (top, base) = (overlay_of(&mut rng, folder, blocks, "1", &chain[0]), 1);
                chain.insert(0, top);
                assert_eq!(chain.len(), base + 1);
                open_chain(&queue, folder, &chain[0], cache, true)
            }
        };
        let run = Run {
            rng,
            folder: folder.to_path_buf(),
            queue,
            cache,
            size: blocks * BLOCK,
            device: SharedDevice::new(device),
            chain,
            names: 2,
            done: [0; KINDS],
        };
        (run, sequences)
    }

    fn new_name(&mut self) -> String {
        self.names += 1;
        self.names.to_string()
    }

    /// A new image over one of the chain.
    fn overlay(&mut self, below: usize) -> Layer {
        let name = self.new_name();
        let below = self.chain[below].clone();
        overlay_of(
            &mut self.rng,
            &self.folder,
            self.size / BLOCK,
            &name,
            &below,
        )
    }

    /// Removes files that are not in the chain any more: they are locked by nobody.
    fn remove(&self, layers: &[Layer]) {
        for layer in layers {
            let unused = open(&self.queue, &self.folder, layer, self.cache, true);
            drop(unused);
            for name in [&layer.name].into_iter().chain(&layer.data) {
                fs::remove_file(self.folder.join(name)).unwrap();
            }
        }
    }

    fn close(&self, device: Device) {
        self.queue.block_on(device.close(&self.queue)).unwrap();
    }

    fn exchange(&mut self) -> bool {
        let exchange = self.rng.pick(&[
            Exchange::PutOn,
            Exchange::PutOn,
            Exchange::PutOn,
            Exchange::TakeOff,
            Exchange::TakeOff,
            Exchange::Cut,
            Exchange::Extend,
            Exchange::Merge,
            Exchange::Replace,
            Exchange::Refused,
            Exchange::Dropped,
            Exchange::Backup,
            Exchange::Mirror,
        ]);
        let is_qcow2 = self.chain[0].format == "qcow2";
        let depth = self.chain.len();
        match exchange {
            Exchange::PutOn if depth < DEPTH => self.put_on(),
            Exchange::TakeOff if depth > 1 && self.chain[1].rests => self.take_off(),
            Exchange::Cut if depth > 1 && is_qcow2 => self.cut(),
            Exchange::Extend if depth > 1 && depth < DEPTH && is_qcow2 => self.extend(),
            Exchange::Merge if depth > 1 && is_qcow2 => self.merge(),
            Exchange::Replace => self.replace(),
            Exchange::Refused => self.refused(),
            Exchange::Dropped => self.dropped(),
            Exchange::Backup => self.backup(),
            Exchange::Mirror => self.mirror(),
            _ => return false,
        }
        self.done[exchange as usize] += 1;
        if self.rng.one_in(4) {
            self.check_locks();
        }
        true
    }

    fn put_on(&mut self) {
        let layer = self.overlay(0);
        let overlay = open(&self.queue, &self.folder, &layer, self.cache, true);
        let queue = &self.queue;
        let change = self
            .device
            .change(async |device| device.put_on_top(queue, overlay).await);
        queue.block_on(change).unwrap();
        self.chain[0].rests = true;
        self.chain.insert(0, layer);
    }

    fn take_off(&mut self) {
        let queue = &self.queue;
        let change = self.device.change(async |device| {
            device.commit_top(queue).await?;
            device.take_off_top(queue).await
        });
        let top = queue.block_on(change).unwrap();
        self.close(top);
        let gone = self.chain.remove(0);
        self.remove(&[gone]);
    }

    /// Everything is copied to the top image, which needs no other one then.
    fn cut(&mut self) {
        let queue = &self.queue;
        let change = self.device.change(async |device| {
            let mut at = 0;
            while at < device.size() {
                let rest = (device.size() - at).min(1 << 20);
                let status = device.status(queue, at, rest).await?;
                let length = status.length as usize;
                if status.depth > 0 && status.present {
                    let buffer = queue.buffer(length);
                    let (buffer, read) = device.read_buffer(queue, at, buffer, length).await;
                    read?;
                    device.write_buffer(queue, at, buffer, length).await.1?;
                }
                at += status.length;
            }
            device.replace_below(queue, None, None, None).await
        });
        let old = queue.block_on(change).unwrap().unwrap();
        self.close(old);
        let gone = self.chain.split_off(1);
        self.remove(&gone);
    }

    /// An image is put between the top one and the one below it.
    fn extend(&mut self) {
        let mut layer = self.overlay(1);
        layer.rests = self.rng.one_in(2);
        let between = open_chain(&self.queue, &self.folder, &layer, self.cache, layer.rests);
        self.replace_below(between, &layer);
        for below in &mut self.chain[1..] {
            below.rests = false;
        }
        self.chain.insert(1, layer);
    }

    /// All that is below the top image becomes one image.
    fn merge(&mut self) {
        let below = open_chain(
            &self.queue,
            &self.folder,
            &self.chain[1].clone(),
            self.cache,
            false,
        );
        let mut bytes = vec![0; below.size() as usize];
        below.read_blocking(&self.queue, 0, &mut bytes).unwrap();
        drop(below);
        let rests = self.rng.one_in(2);
        let written = self.rng.pick(WRITTEN);
        let layer = Layer {
            name: self.new_name(),
            format: written.name,
            rests,
            data: None,
        };
        formats::make(&self.folder, &layer.name, &written, &bytes);
        let merged = open(&self.queue, &self.folder, &layer, self.cache, rests);
        self.replace_below(merged, &layer);
        let gone = self.chain.split_off(1);
        self.remove(&gone);
        self.chain.push(layer);
    }

    fn replace_below(&self, below: Device, layer: &Layer) {
        let (queue, name) = (&self.queue, self.folder.join(&layer.name));
        let (name, format) = (Some(name.as_os_str()), Some(layer.format));
        let change = self.device.change(async |device| {
            let replaced = device.replace_below(queue, Some(below), name, format);
            replaced.await
        });
        let old = queue.block_on(change).unwrap().unwrap();
        self.close(old);
    }

    /// A copy of this instant is made while threads write and the chain is exchanged.
    fn backup(&mut self) {
        let backup = Arc::new(Backup::new(self.size as u64));
        let hook: Arc<dyn ChangeHook> = backup.clone();
        let (queue, size) = (self.queue.clone(), self.size);
        let change = self.device.change(async |device| {
            let buffer = queue.buffer(size);
            let (buffer, read) = device.read_buffer(&queue, 0, buffer, size).await;
            read?;
            device.add_hook(hook.clone());
            Ok(buffer[..size].to_vec())
        });
        let now = queue.block_on(change).unwrap();
        for block in 0..(size as u64).div_ceil(COPIED) {
            queue.block_on(async {
                let device = self.device.enter().await.unwrap();
                backup.copy(&device, &queue, block).await.unwrap();
            });
            if self.rng.one_in(100) {
                self.put_or_take();
            }
        }
        let change = self
            .device
            .change(async |device| Ok(device.remove_hook(&hook)));
        assert!(queue.block_on(change).unwrap());
        assert!(backup.bytes() == now, "the copy is of another instant");
    }

    fn put_or_take(&mut self) {
        match self.chain.get(1) {
            Some(below) if below.rests => self.take_off(),
            _ if self.chain.len() < DEPTH => self.put_on(),
            _ => {}
        }
    }

    /// The disk is copied to a new image while threads write and the chain is exchanged. It takes the
    /// place of the disk when all is copied.
    fn mirror(&mut self) {
        let layer = self.target();
        let copy = open(&self.queue, &self.folder, &layer, self.cache, true);
        let mirror = Arc::new(Mirror::new(self.size as u64));
        let hook: Arc<dyn ChangeHook> = mirror.clone();
        let queue = self.queue.clone();
        let change = self.device.change(async |device| {
            device.add_hook(hook.clone());
            Ok(())
        });
        queue.block_on(change).unwrap();
        for _ in 0..2 * mirror.dirty() {
            queue.block_on(async {
                let device = self.device.enter().await.unwrap();
                mirror.copy(&device, &queue, &copy).await.unwrap();
            });
            if self.rng.one_in(200) {
                self.put_or_take();
            }
        }
        let change = self.device.change(async |device| {
            while mirror.dirty() > 0 {
                mirror.copy(device, &queue, &copy).await?;
            }
            assert!(device.remove_hook(&hook));
            device.replace(&queue, copy).await
        });
        let old = queue.block_on(change).unwrap();
        self.close(old);
        let gone = std::mem::replace(&mut self.chain, vec![layer]);
        self.remove(&gone);
    }

    /// An empty image to which the disk is copied.
    fn target(&mut self) -> Layer {
        let name = self.new_name();
        let written = self.rng.pick(WRITTEN);
        if written.name == "qcow2" {
            return new_image(&mut self.rng, &self.folder, self.size / BLOCK, &name, None);
        }
        formats::make(&self.folder, &name, &written, &vec![0; self.size]);
        Layer {
            name,
            format: written.name,
            rests: false,
            data: None,
        }
    }

    /// The disk is copied to a new image, which takes its place.
    fn replace(&mut self) {
        let layer = self.target();
        let copy = open(&self.queue, &self.folder, &layer, self.cache, true);
        let (queue, size) = (&self.queue, self.size);
        let change = self.device.change(async |device| {
            let buffer = queue.buffer(size);
            let (buffer, read) = device.read_buffer(queue, 0, buffer, size).await;
            read?;
            copy.write_buffer(queue, 0, buffer, size).await.1?;
            device.replace(queue, copy).await
        });
        let old = queue.block_on(change).unwrap();
        self.close(old);
        let gone = std::mem::replace(&mut self.chain, vec![layer]);
        self.remove(&gone);
    }

    /// Exchanges that cannot be made: nothing changes.
    fn refused(&mut self) {
        let queue = &self.queue;
        let name = self.names + 1;
        self.names = name;
        let name = name.to_string();
        let below = self.chain[0].clone();
        let blocks = self.size / BLOCK + 8;
        let larger = overlay_of(&mut self.rng, &self.folder, blocks, &name, &below);
        let overlay = open(queue, &self.folder, &larger, self.cache, true);
        let change = self
            .device
            .change(async |device| device.put_on_top(queue, overlay).await);
        queue.block_on(change).unwrap_err();
        self.remove(&[larger]);
        let Some(below) = self.chain.get(1) else {
            return;
        };
        if below.format != "qcow2" {
            return;
        }
        // A reader of the image below forbids writing to it.
        let reader = open_chain(queue, &self.folder, below, self.cache, false);
        let change = self
            .device
            .change(async |device| device.take_off_top(queue).await.map(drop));
        queue.block_on(change).unwrap_err();
        drop(reader);
    }

    /// An exchange that is dropped while it waits.
    fn dropped(&mut self) {
        let used = self.queue.block_on(self.device.enter()).unwrap();
        {
            let queue = &self.queue;
            let change = self.device.change(async |device| {
                device
                    .replace_below(queue, None, None, None)
                    .await
                    .map(drop)
            });
            let mut change = pin!(change);
            let mut context = Context::from_waker(Waker::noop());
            for _ in 0..1 + self.rng.below(3) {
                assert!(change.as_mut().poll(&mut context).is_pending());
            }
        }
        drop(used);
    }

    /// The file of the top image is locked for its writer, those below for readers.
    fn check_locks(&mut self) {
        for (depth, layer) in self
            .chain
            .iter()
            .enumerate()
            .filter(|(_, l)| l.format == "qcow2")
        {
            let options = |write| {
                OpenOptions::default()
                    .format(Some(Format::QCOW2))
                    .no_backing(true)
                    .write(write)
            };
            let source = Source::Name(text(&self.folder.join(&layer.name)).into());
            let writer = Device::open(&self.queue, &source, &options(true));
            assert!(writer.is_err(), "{depth}: {:?}", self.chain);
            let reader = Device::open(&self.queue, &source, &options(false));
            assert_eq!(reader.is_ok(), depth > 0, "{depth}: {:?}", self.chain);
        }
    }

    /// Closes the device, and verifies the image as its headers name it.
    fn verify(&self, ledger: &Ledger) {
        let device = open_chain(&self.queue, &self.folder, &self.chain[0], self.cache, false);
        assert_eq!(device.layers().len(), self.chain.len(), "{:?}", self.chain);
        let mut bytes = vec![0; self.size];
        device.read_blocking(&self.queue, 0, &mut bytes).unwrap();
        let now = ledger.settle(&bytes).unwrap_or_else(|e| panic!("{e}"));
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
        let top = self.folder.join(&self.chain[0].name);
        assert_content(
            &top,
            self.chain[0].format,
            &image_of(&now),
            "after exchanges",
        );
    }
}

fn new_image(
    rng: &mut Rng,
    folder: &Path,
    blocks: usize,
    name: &str,
    backing: Option<NewBacking>,
) -> Layer {
    let extended = rng.one_in(3);
    let bits = match extended {
        true => 14 + rng.below(3) as u32,
        false => 9 + rng.below(8) as u32,
    };
    let data = rng.one_in(5).then(|| format!("{name}.data"));
    let is_raw = backing.is_none() && rng.one_in(2);
    let options = CreateQcow2::default()
        .size((blocks * BLOCK) as u64)
        .cluster_bits(bits)
        .extended_l2(extended)
        .version(if extended || data.is_some() {
            3
        } else {
            2 + rng.below(2) as u32
        })
        .data_file(data.as_ref().map(|data| NewDataFile::new(data).raw(is_raw)))
        .backing(backing);
    create(folder, name, &options);
    Layer {
        name: name.into(),
        format: "qcow2",
        rests: false,
        data,
    }
}

fn overlay_of(rng: &mut Rng, folder: &Path, blocks: usize, name: &str, below: &Layer) -> Layer {
    let path = folder.join(&below.name);
    let backing = NewBacking::new(text(&path)).format(Some(below.format.into()));
    new_image(rng, folder, blocks, name, Some(backing))
}

fn options(layer: &Layer, cache: CacheMode, write: bool) -> OpenOptions {
    OpenOptions::default()
        .format(Some(layer.format.parse().unwrap()))
        .write(write)
        .cache(cache)
        .discard(Some(true))
        .l2_cache_entry_size(Some(512))
        .l2_cache_size(Some(1024))
}

/// One image alone.
fn open(queue: &Queue, folder: &Path, layer: &Layer, cache: CacheMode, write: bool) -> Device {
    let options = options(layer, cache, write).no_backing(true);
    let source = Source::Name(text(&folder.join(&layer.name)).into());
    Device::open(queue, &source, &options).unwrap_or_else(|e| panic!("open {layer:?}: {e}"))
}

/// An image with its backing chain, as the headers name it.
fn open_chain(
    queue: &Queue,
    folder: &Path,
    layer: &Layer,
    cache: CacheMode,
    write: bool,
) -> Device {
    let options = options(layer, cache, write);
    let source = Source::Name(text(&folder.join(&layer.name)).into());
    Device::open(queue, &source, &options).unwrap_or_else(|e| panic!("open {layer:?}: {e}"))
}

fn threads_of(rng: &mut Rng, engines: &[EngineKind]) -> Vec<Thread> {
    let thread = |_| Thread {
        queue: queue_of(rng, engines),
        driven: rng.pick(&driven::WAYS),
        requests: 100 + rng.below(300),
        depth: 1 + rng.index(8),
        rng: Rng::new(rng.next()),
    };
    (0..THREADS).map(thread).collect()
}

/// Exchanges chains of one disk after another, until there were enough exchanges.
fn exchange(least: u64) {
    let engines = crate::engines();
    let (mut requests, mut kinds) = (0, [0; KINDS]);
    let mut seeds = work(least, "exchanges");
    while let Some(seed) = seeds.next() {
        let _watchdog = Watchdog::new(&format!("seed {seed}"));
        let alone = engines.get(seed as usize % (engines.len() + 1));
        let used = alone.map_or(&engines[..], std::slice::from_ref);
        let is_disk = seed % 4 == 0 || !Path::new("/dev/shm").is_dir();
        let place = match is_disk {
            true => Path::new(env!("CARGO_TARGET_TMPDIR")),
            false => Path::new("/dev/shm"),
        };
        let folder = tempfile::tempdir_in(place).unwrap();
        let (mut run, sequences) = Run::new(seed, folder.path(), used, is_disk);
        let load = Load {
            device: Handle::Shared(run.device.clone()),
            ledger: Arc::new(Ledger::new(&sequences)),
            sequence: Arc::new(AtomicU64::new(MIDDLE)),
            cluster: 1 << run.rng.below(5),
            compresses: run.rng.one_in(3),
            refuses: false,
            hot: run.rng.index(sequences.len()),
        };
        let threads = threads_of(&mut run.rng, used);
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
                seeds.add(u64::from(run.exchange()));
                progress();
            }
            requests += running.join().unwrap();
        });
        for (all, these) in kinds.iter_mut().zip(run.done) {
            *all += these;
        }
        run.queue.block_on(run.device.close(&run.queue)).unwrap();
        run.verify(&load.ledger);
    }
    println!("by kind: {kinds:?}, {requests} verified requests meanwhile");
}

#[test]
fn chains_are_exchanged_under_load() {
    exchange(200);
}
