//! One thread with many requests in flight. No request overlaps one that changes its range, so each
//! has exactly one right result.

use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use zebu::Result;
use zebu::block::{Device, Format, OpenOptions, Preallocation};
use zebu::jobs;
use zebu::names::Source;
use zebu::qcow2::SnapshotName;
use zebu::storage::{EngineKind, Handle, OpenFile, Queue, open_file};

use crate::bitmaps::Bitmaps;
use crate::common::peer;
use crate::common::{Rng, encryption, progress, repair_all};
use crate::disk::{Disk, assert_same};
use crate::exchanges::{put_on, take_off};
use crate::interop::used_by_qemu;
use crate::setup::{Opening, Setup};
use crate::step::{Kind, Shape, Step, perform};
use crate::trace;

/// An image in use, and its expected content.
struct Run<'a> {
    rng: Rng,
    setup: Setup,
    folder: &'a Path,
    engines: &'a [EngineKind],
    disk: Disk,
    /// The content of the backing file.
    backing: Vec<u8>,
    snapshots: Vec<Snapshot>,
    bitmaps: Bitmaps,
    shape: Shape,
    /// How the image is open.
    opening: Opening,
    queue: Queue,
    device: Rc<Device>,
    flight: Vec<Flying>,
    depth: usize,
    /// The overlay that is on top for a while.
    overlay: Option<PathBuf>,
}

/// An internal snapshot: name and content.
type Snapshot = (String, Vec<u8>);

/// A request in flight.
struct Flying {
    step: Rc<Step>,
    handle: Handle<Result<Vec<u8>>>,
    /// The number of changes that were complete when it began, for a flush.
    changes: usize,
}

/// Makes a random image and uses it. Returns the number of requests.
pub fn run(seed: u64, folder: &Path, engines: &[EngineKind]) -> usize {
    let mut rng = Rng::new(seed);
    let setup = Setup::random(&mut rng);
    run_on(setup, rng, folder, engines)
}

/// The same with an image of this kind.
pub fn run_on(setup: Setup, mut rng: Rng, folder: &Path, engines: &[EngineKind]) -> usize {
    trace(|| format!("{setup:?}"));
    let (mut disk, backing) = make(&setup, folder, &mut rng);
    let shape = Shape::random(&mut rng, setup.size(), setup.cluster());
    let opening = Opening::random(&mut rng, &setup, engines);
    trace(|| format!("{opening:?}"));
    note_copies(&opening, &mut disk);
    let queue = Queue::new(opening.queue.clone()).unwrap();
    let device = Rc::new(opening.open(&queue, &setup, folder, true));
    let mut run = Run {
        depth: 1 + rng.below(24) as usize,
        rng,
        setup,
        folder,
        engines,
        disk,
        backing,
        snapshots: Vec::new(),
        bitmaps: Bitmaps::default(),
        shape,
        opening,
        queue,
        device,
        flight: Vec::new(),
        overlay: None,
    };
    let mut steps = 0;
    if run.rng.one_in(2) {
        run.change_bitmaps();
    }
    for _ in 0..1 + run.rng.below(4) {
        for _ in 0..10 + run.rng.below(90) {
            run.step();
            steps += 1;
        }
        if run.rng.one_in(3) {
            run.change_whole();
            for _ in 0..run.rng.below(40) {
                run.step();
                steps += 1;
            }
        }
        run = run.reopen();
    }
    run.end();
    steps
}

/// Makes the image. Returns its content and that of the backing file.
fn make(setup: &Setup, folder: &Path, rng: &mut Rng) -> (Disk, Vec<u8>) {
    let size = setup.size() as usize;
    let mut bytes = vec![0; size];
    let mut backing = Vec::new();
    if let Some((length, _)) = setup.backing {
        backing.resize(length as usize, 0);
        for chunk in backing.chunks_mut(4096 << rng.below(6)) {
            if !rng.one_in(3) {
                rng.fill(chunk);
            }
        }
        setup.make_backing(folder, &backing);
        let common = backing.len().min(size);
        bytes[..common].copy_from_slice(&backing[..common]);
    }
    setup.make(folder);
    let mut disk = Disk::new(bytes, setup.cluster());
    disk.may_be_allocated.fill(setup.is_preallocated());
    for used in setup.use_before(folder, rng) {
        let range = disk.cluster(used.cluster as usize);
        disk.put(range.start, &vec![used.byte; range.len()]);
        disk.may_be_allocated[used.cluster as usize] = true;
    }
    disk.flush(disk.changes());
    (disk, backing)
}

/// Each read may allocate clusters if it copies.
fn note_copies(opening: &Opening, disk: &mut Disk) {
    if opening.filters.copies_on_read() {
        disk.set_allocated(&(0..disk.bytes.len()));
    }
}

impl Run<'_> {
    fn step(&mut self) {
        let step = Rc::new(self.shape.step(&mut self.rng));
        // Requests that conflict with it must end first. The order does not depend on time, so that
        // a seed always gives the same requests.
        while let Some(n) = self.flight.iter().position(|f| f.step.conflicts(&step)) {
            self.finish(n);
        }
        if self.flight.len() >= self.depth {
            let n = self.rng.index(self.flight.len());
            self.finish(n);
        }
        trace(|| step.line());
        let future = perform(self.device.clone(), self.queue.clone(), step.clone());
        self.flight.push(Flying {
            handle: self.queue.spawn(future),
            changes: self.disk.changes(),
            step,
        });
    }

    /// Waits for a request and verifies its result.
    fn finish(&mut self, n: usize) {
        let Flying {
            step,
            handle,
            changes,
        } = self.flight.remove(n);
        let result = self.queue.block_on(handle);
        progress();
        let line = step.line();
        match (&step.kind, result) {
            (Kind::Read, Ok(found)) => {
                let expected = &self.disk.bytes[step.range.clone()];
                assert_same(&found, expected, step.range.start, &line);
            }
            (Kind::Write(bytes), Ok(_)) => {
                self.disk.put(step.range.start, bytes);
                self.disk.set_allocated(&step.range);
            }
            (Kind::Compressed(bytes), result) => self.compressed(&step, bytes, result),
            (Kind::Write(bytes), Err(_)) if self.opening.filters.compresses() => {
                self.refused(&step, bytes);
            }
            (Kind::Zero(_), Err(_)) if self.opening.filters.compresses() => {
                self.refused(&step, &vec![0; step.range.len()]);
            }
            (Kind::Zero(_), Ok(_)) => {
                let zeroes = vec![0; step.range.len()];
                self.disk.put(step.range.start, &zeroes);
                self.disk.set_allocated(&step.range);
            }
            (Kind::Discard, Ok(_)) => self.discarded(&step),
            (Kind::Flush, Ok(_)) => self.disk.flush(changes),
            (_, Err(e)) => panic!("{line}: {e}"),
        }
    }

    fn read(&self, range: std::ops::Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; range.len()];
        (self.device)
            .read_blocking(&self.queue, range.start as u64, &mut bytes)
            .unwrap_or_else(|e| panic!("read {range:x?}: {e}"));
        bytes
    }

    /// A compressed write may fail where a cluster is allocated. Each cluster then has the old or
    /// the new data.
    fn compressed(&mut self, step: &Step, bytes: &[u8], result: Result<Vec<u8>>) {
        let clusters = self.disk.clusters(&step.range);
        let Err(e) = result else {
            self.disk.put(step.range.start, bytes);
            self.disk.set_allocated(&step.range);
            return;
        };
        let may_fail =
            !self.setup.compresses() || clusters.clone().any(|n| self.disk.may_be_allocated[n]);
        // What was issued later may have allocated them before.
        let may_fail = may_fail || self.opening.filters.compresses();
        assert!(may_fail, "{}: {e}", step.line());
        self.refused(step, bytes);
    }

    /// A write was refused. Of each cluster, all or nothing of its part was written.
    fn refused(&mut self, step: &Step, bytes: &[u8]) {
        let line = format!("{}, refused", step.line());
        for n in self.disk.clusters(&step.range) {
            let cluster = self.disk.cluster(n);
            let start = cluster.start.max(step.range.start);
            let range = start..cluster.end.min(step.range.end);
            let found = self.read(range.clone());
            let new = &bytes[start - step.range.start..][..range.len()];
            if found == new {
                self.disk.put(start, new);
            } else {
                assert_same(&found, &self.disk.bytes[range], start, &line);
            }
        }
        self.disk.set_allocated(&step.range);
    }

    /// After a discard, whole clusters read as zeroes, and the rest of the range is unchanged.
    fn discarded(&mut self, step: &Step) {
        let found = self.read(step.range.clone());
        let mut expected = self.disk.bytes[step.range.clone()].to_vec();
        for n in self.disk.clusters(&step.range) {
            let cluster = self.disk.cluster(n);
            let (from, to) = (
                cluster.start.max(step.range.start),
                cluster.end.min(step.range.end),
            );
            let here = from - step.range.start..to - step.range.start;
            let whole = from == cluster.start && to == cluster.end;
            let zero = found[here.clone()].iter().all(|b| *b == 0);
            // The file system decides about images of other formats. The last cluster may be treated as
            // whole.
            let open = self.setup.format != Format::QCOW2 || cluster.end == self.disk.bytes.len();
            let ignores = match self.overlay {
                Some(_) => self.setup.options.version == 2,
                None => self.setup.ignores_discards(),
            };
            let freed = self.opening.discard && !ignores;
            if freed && (zero && open || whole && !open) {
                expected[here].fill(0);
            }
        }
        let line = step.line();
        assert_same(&found, &expected, step.range.start, &line);
        self.disk.put(step.range.start, &expected);
    }

    fn finish_all(&mut self) {
        while !self.flight.is_empty() {
            self.finish(0);
        }
    }

    /// Changes the whole image.
    fn change_whole(&mut self) {
        if self.overlay.is_some() {
            return self.take_off();
        }
        match self.rng.below(4) {
            3 => self.put_on(),
            0 => self.change_bitmaps(),
            1 if self.setup.format == Format::QCOW2 => {
                self.finish_all();
                (0..1 + self.rng.below(4)).for_each(|_| self.change_snapshots());
            }
            _ => {
                self.finish_all();
                self.change_size();
            }
        }
    }

    /// An overlay is the top image from now on. The image has all that was written then.
    fn put_on(&mut self) {
        self.finish_all();
        trace(|| "put on an overlay".into());
        let size = self.disk.bytes.len() as u64;
        let path = self.setup.make_overlay(self.folder, "overlay", size);
        let overlay = self.opening.open_alone(&self.queue, &path);
        let device = Rc::get_mut(&mut self.device).expect("nothing is in flight");
        let put = self.queue.block_on(put_on(&self.queue, device, overlay));
        put.unwrap_or_else(|e| panic!("put on an overlay: {e}"));
        self.disk.flush(self.disk.changes());
        self.overlay = Some(path);
    }

    fn take_off(&mut self) {
        self.finish_all();
        let Some(path) = self.overlay.take() else {
            return;
        };
        trace(|| "take the overlay off".into());
        let device = Rc::get_mut(&mut self.device).expect("nothing is in flight");
        let taken = self.queue.block_on(take_off(&self.queue, device));
        taken.unwrap_or_else(|e| panic!("take the overlay off: {e}"));
        fs::remove_file(path).unwrap();
        self.disk.set_allocated(&(0..self.disk.bytes.len()));
        let found = self.read(0..self.disk.bytes.len());
        assert_same(&found, &self.disk.bytes, 0, "after an overlay");
    }

    /// Adds or changes bitmaps.
    fn change_bitmaps(&mut self) {
        self.finish_all();
        let device = Rc::get_mut(&mut self.device).expect("nothing is in flight");
        for _ in 0..1 + self.rng.below(3) {
            let content = &self.disk.bytes;
            (self.bitmaps).change(&self.setup, &self.queue, device, &mut self.rng, content);
        }
    }

    /// Creates, applies or deletes a snapshot.
    fn change_snapshots(&mut self) {
        let device = Rc::get_mut(&mut self.device).expect("nothing is in flight");
        let (queue, count) = (&self.queue, self.snapshots.len() as u64);
        let kind = self.rng.below(5);
        if count == 0 || kind < 2 {
            let name = format!("s{}", self.rng.next());
            trace(|| format!("snapshot {name}"));
            let result = queue.block_on(device.snapshot_create(queue, &name));
            // Refcounts of few bits may overflow.
            let may_fail = self.setup.has_data_file() || self.setup.options.refcount_order < 4;
            match result {
                Ok(()) => self.snapshots.push((name, self.disk.bytes.clone())),
                Err(_) if may_fail => return,
                Err(e) => panic!("snapshot {name}: {e}"),
            }
            self.disk.flush(self.disk.changes());
            return;
        }
        let place = self.rng.below(count) as usize;
        let (name, bytes) = self.snapshots[place].clone();
        let named = SnapshotName::from(name.as_str());
        if kind < 4 {
            trace(|| format!("snapshot apply {name}"));
            match queue.block_on(device.snapshot_apply(queue, &named)) {
                Ok(()) => {}
                Err(_) if self.setup.options.refcount_order < 4 => return,
                Err(e) => panic!("snapshot apply {name}: {e}"),
            }
            self.disk.resize(bytes.len());
            self.shape.size = bytes.len();
            self.setup.options.size = bytes.len() as u64;
            self.disk.replace(bytes);
            self.bitmaps.resize(self.disk.bytes.len());
            self.disk.set_allocated(&(0..self.disk.bytes.len()));
        } else {
            trace(|| format!("snapshot delete {name}"));
            let result = queue.block_on(device.snapshot_delete(queue, &named));
            result.unwrap_or_else(|e| panic!("snapshot delete {name}: {e}"));
            self.snapshots.remove(place);
            self.disk.flush(self.disk.changes());
        }
        let found = self.read(0..self.disk.bytes.len());
        assert_same(&found, &self.disk.bytes, 0, "after a change of snapshots");
    }

    /// Resizes the image, or empties it.
    fn change_size(&mut self) {
        let device = Rc::get_mut(&mut self.device).expect("nothing is in flight");
        let (old, cluster) = (self.disk.bytes.len(), self.setup.cluster() as usize);
        let empties = self.setup.format == Format::QCOW2 && !self.setup.data_file_is_raw();
        if self.rng.one_in(5) && empties {
            trace(|| "make empty".into());
            let result = self.queue.block_on(device.make_empty(&self.queue));
            result.unwrap_or_else(|e| panic!("make empty: {e}"));
            let mut bytes = self.backing.clone();
            bytes.resize(old, 0);
            self.disk.replace(bytes);
            return;
        }
        let size = match self.rng.below(4) {
            0 => old + 512 * self.rng.below(8) as usize,
            1 => 512 * (1 + self.rng.below(old as u64 / 512) as usize),
            _ => old + 512 * self.rng.index(20 * cluster / 512),
        };
        let preallocation = match self.rng.below(8) {
            0 if size > old => Preallocation::Metadata,
            1 if size > old => Preallocation::Falloc,
            2 if size > old => Preallocation::Full,
            _ => Preallocation::Off,
        };
        let line = format!("resize {old:#x} to {size:#x}, {preallocation:?}");
        trace(|| line.clone());
        let future = device.resize(&self.queue, size as u64, preallocation);
        // In version 2, a snapshot has no size of its own.
        let old_snapshots = self.setup.options.version == 2 && !self.snapshots.is_empty();
        let is_raw = self.setup.format == Format::RAW;
        let is_fixed = self.setup.other.is_some_and(|other| !other.is_resized);
        let may_fail =
            old_snapshots || is_fixed || is_raw && preallocation == Preallocation::Metadata;
        match self.queue.block_on(future) {
            Ok(()) => {
                self.disk.resize(size);
                self.bitmaps.resize(size);
                self.shape.size = size;
                self.setup.options.size = size as u64;
            }
            Err(_) if may_fail => {}
            Err(e) => panic!("{line}: {e}"),
        }
        assert_eq!(self.device.size(), self.disk.bytes.len() as u64);
        let found = self.read(0..self.disk.bytes.len());
        assert_same(&found, &self.disk.bytes, 0, &line);
    }

    /// Closes or drops the device, verifies the image, and opens it again with other options.
    fn reopen(mut self) -> Self {
        self.finish_all();
        self.take_off();
        // Without a close, a raw data file may have writes that its image does not know of, as in
        // QEMU.
        let closes = self.setup.data_file_is_raw() || !self.rng.one_in(4);
        let flushes = closes || self.rng.one_in(2);
        trace(|| format!("reopen, closes {closes}, flushes {flushes}"));
        if flushes {
            let result = self.queue.block_on(self.device.flush(&self.queue));
            result.unwrap_or_else(|e| panic!("flush: {e}"));
            self.disk.flush(self.disk.changes());
        }
        let device = Rc::try_unwrap(self.device).expect("nothing is in flight");
        match closes {
            true => {
                let result = self.queue.block_on(device.close(&self.queue));
                result.unwrap_or_else(|e| panic!("close: {e}"));
            }
            false => drop(device),
        }
        // QEMU's repair of an image with bitmaps drops its snapshots.
        let by_qemu = self.bitmaps.is_empty() || self.snapshots.is_empty();
        match closes {
            true => {}
            false if by_qemu => repair(&self.setup, self.folder),
            false => {
                let queue = Queue::new(Default::default()).unwrap();
                let how = OpenFile::default().write(true);
                let file = open_file(self.setup.image(self.folder), how).unwrap();
                repair_all(&queue, file).unwrap();
            }
        }
        verify(&self.setup, self.folder, &mut self.disk, closes);
        let content = &self.disk.bytes;
        (self.bitmaps).verify_file(&self.setup, self.folder, content, closes);
        if self.setup.format != Format::RAW && self.rng.one_in(2) {
            used_by_qemu(&self.setup, self.folder, &mut self.disk, &mut self.rng);
            verify(&self.setup, self.folder, &mut self.disk, true);
            let content = &self.disk.bytes;
            (self.bitmaps).verify_file(&self.setup, self.folder, content, true);
        }
        let which = self.rng.next() as usize;
        verify_snapshots(&self.setup, self.folder, &self.snapshots, which);
        self.opening = Opening::random(&mut self.rng, &self.setup, self.engines);
        trace(|| format!("{:?}", self.opening));
        note_copies(&self.opening, &mut self.disk);
        self.queue = Queue::new(self.opening.queue.clone()).unwrap();
        let device = (self.opening).open(&self.queue, &self.setup, self.folder, true);
        self.device = Rc::new(device);
        self
    }

    /// Drops the device, which must leave the image consistent.
    fn end(mut self) {
        self.take_off();
        let device = Rc::try_unwrap(self.device).expect("nothing is in flight");
        self.queue.block_on(device.close(&self.queue)).unwrap();
        verify(&self.setup, self.folder, &mut self.disk, true);
        let content = &self.disk.bytes;
        (self.bitmaps).verify_file(&self.setup, self.folder, content, true);
    }
}

/// QEMU and zebu check and read the closed image.
fn verify(setup: &Setup, folder: &Path, disk: &mut Disk, closed: bool) {
    let image = setup.image(folder);
    if !closed {
        let queue = Queue::new(Default::default()).unwrap();
        let device = Opening::plain().open(&queue, setup, folder, false);
        let mut found = vec![0; disk.bytes.len()];
        device.read_blocking(&queue, 0, &mut found).unwrap();
        let result = disk.recover(found);
        result.unwrap_or_else(|e| panic!("after the device was dropped: {e}"));
    }
    if setup.format == Format::QCOW2 {
        peer::assert_clean(&image, "after a close");
        check(setup, folder);
    }
    if let Some(other) = setup.other {
        peer::assert_sound(&image, &other, false, "after a close");
    }
    peer::assert_content(&image, setup.format.name(), &disk.bytes, "after a close");
    if setup.data_file_is_raw() {
        let data = std::fs::read(folder.join("data.raw")).unwrap();
        let data = &data[..disk.bytes.len().min(data.len())];
        assert_same(data, &disk.bytes, 0, "the data file as a raw image");
    }
}

/// Has QEMU repair leaks, and the refcounts of an image with lazy refcounts, and carry out a log.
fn repair(setup: &Setup, folder: &Path) {
    let image = setup.image(folder);
    if setup.format == Format::QCOW2 && setup.options.lazy_refcounts {
        let args = ["check", "-r", "all", "-f", "qcow2", peer::text(&image)];
        peer::qemu_img(&args).ok("qemu-img check -r all");
    } else if setup.format == Format::QCOW2 {
        peer::assert_consistent(&image, "without a close");
    } else if let Some(other) = &setup.other {
        peer::carry_out_log(&image, other);
    }
}

/// Verifies the content of all snapshots. QEMU reads one of them.
fn verify_snapshots(setup: &Setup, folder: &Path, snapshots: &[Snapshot], which: usize) {
    let queue = Queue::new(Default::default()).unwrap();
    let image = setup.image(folder);
    let one = which % snapshots.len().max(1);
    for (nth, (name, bytes)) in snapshots.iter().enumerate() {
        let options = OpenOptions::default().objects(encryption::objects());
        let options = options.snapshot(Some(SnapshotName::from(name.as_str())));
        let source = Source::Name(peer::text(&image).into());
        let device = Device::open(&queue, &source, &options);
        let device = device.unwrap_or_else(|e| panic!("open {name}: {e}"));
        assert_eq!(device.size(), bytes.len() as u64, "{name}");
        let mut found = vec![0; bytes.len()];
        let result = device.read_blocking(&queue, 0, &mut found);
        result.unwrap_or_else(|e| panic!("read {name}: {e}"));
        assert_same(&found, bytes, 0, name);
        if nth == one {
            let raw = folder.join("snapshot.raw");
            let args = ["convert", "-f", "qcow2", "-O", "raw", "-l", name];
            let names = [peer::text(&image), peer::text(&raw)];
            peer::qemu_img(&[&args[..], &names].concat()).ok("a snapshot in QEMU");
            let found = std::fs::read(raw).unwrap();
            // It has the size of the active disk there.
            let common = bytes.len().min(found.len());
            let (found, expected) = (&found[..common], &bytes[..common]);
            assert_same(found, expected, 0, "a snapshot in QEMU");
        }
    }
}

/// zebu's check must find nothing.
fn check(setup: &Setup, folder: &Path) {
    let queue = Queue::new(Default::default()).unwrap();
    let device = Opening::plain().open(&queue, setup, folder, false);
    let Some(image) = device.top().as_qcow2() else {
        panic!("the image is qcow2");
    };
    let mut messages = Vec::new();
    let report = queue.block_on(jobs::check(
        &queue,
        image,
        &mut |message| messages.push(message),
        |_| {},
    ));
    let report = report.unwrap_or_else(|e| panic!("check: {e}"));
    assert!(
        report.corruptions + report.leaks + report.check_errors == 0,
        "{report:?}\n{messages:?}"
    );
}
