//! Guards against snapshots that are only safe as long as the machine runs: an
//! order of writes in which a stop at the wrong instant leaves an image that
//! does not open, refcounts too low, a cluster that two write to as if it were
//! theirs alone, or data gone.
//!
//! A storage records what is written and when it is made durable. After each
//! operation the test builds what the disk may hold if the machine had stopped
//! before the end: everything that was durable, and some of what was not. Each
//! of these images must open, hold the old or the new state, and keep every
//! snapshot as it is while the whole disk is written anew.

mod common;

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use common::{Rng, Watchdog};
use zebu::block::{Device, LayerImage, OpenOptions, Preallocation, Zeroing};
use zebu::image::SnapshotName;
use zebu::jobs::{self, CheckMessage, CreateQcow2};
use zebu::storage::{
    Alignment, CacheMode, Iov, Memory, OpKind, Queue, QueueOptions, Started, Storage, StorageExtent,
};

/// What happened to the storage.
#[derive(Clone, Debug)]
enum Event {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    Length(u64),
    Flush,
}

/// Memory that notes what happens to it.
#[derive(Debug)]
struct Recorder {
    memory: Memory,
    events: Mutex<Vec<Event>>,
}

impl Recorder {
    fn note(&self, event: Event) {
        self.events.lock().unwrap().push(event);
    }
}

// SAFETY: all is passed on to `Memory`, which keeps no memory.
unsafe impl Storage for Recorder {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        match (kind, memory) {
            (OpKind::Write | OpKind::WriteDurable, Some(iov)) => {
                let mut bytes = vec![0; iov.len()];
                iov.copy_to(&mut bytes);
                self.note(Event::Write(offset, bytes));
            }
            (OpKind::ZeroRange | OpKind::PunchHole, _) => self.note(Event::Zero(offset, length)),
            (OpKind::Flush, _) => self.note(Event::Flush),
            _ => {}
        }
        // SAFETY: passed on.
        unsafe { self.memory.start(queue, kind, offset, length, memory) }
    }
    fn len(&self) -> io::Result<u64> {
        self.memory.len()
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.note(Event::Length(length));
        self.memory.set_len(length)
    }
    fn allocated(&self) -> io::Result<u64> {
        self.memory.allocated()
    }
    fn alignment(&self) -> Alignment {
        self.memory.alignment()
    }
    fn extent(&self, offset: u64) -> io::Result<StorageExtent> {
        self.memory.extent(offset)
    }
    fn path(&self) -> &Path {
        self.memory.path()
    }
    fn cache_mode(&self) -> CacheMode {
        CacheMode::WriteBack
    }
    fn is_device(&self) -> bool {
        false
    }
}

fn carry_out(bytes: &mut Vec<u8>, event: &Event) {
    let mut reach = |end: u64| {
        let end = end as usize;
        bytes.resize(bytes.len().max(end), 0);
    };
    match event {
        Event::Write(offset, data) => {
            reach(offset + data.len() as u64);
            bytes[*offset as usize..][..data.len()].copy_from_slice(data);
        }
        Event::Zero(offset, length) => {
            let end = (offset + length).min(bytes.len() as u64);
            bytes[*offset as usize..end as usize].fill(0);
        }
        Event::Length(length) => bytes.resize(*length as usize, 0),
        Event::Flush => {}
    }
}

/// What the disk and its snapshots should hold.
#[derive(Clone, Debug, PartialEq)]
struct Model {
    active: Vec<u8>,
    snapshots: Vec<(String, Vec<u8>)>,
}

fn device(queue: &Queue, storage: Arc<dyn Storage>, snapshot: Option<&str>) -> Device {
    let options = OpenOptions {
        write: snapshot.is_none(),
        discard: Some(true),
        snapshot: snapshot.map(SnapshotName::from),
        ..OpenOptions::default()
    };
    Device::from_storage(queue, storage, &options).expect("opens")
}

fn content(queue: &Queue, device: &Device) -> Vec<u8> {
    let mut bytes = vec![0; device.size() as usize];
    device.read_blocking(queue, 0, &mut bytes).expect("reads");
    bytes
}

fn names(device: &Device) -> Vec<String> {
    let LayerImage::Qcow2(image) = &device.top().image else {
        panic!("not qcow2");
    };
    let names = image.snapshots().iter().map(|s| s.name.clone());
    names.map(|n| String::from_utf8(n).unwrap()).collect()
}

/// Fails if a snapshot does not hold what it should. (Of one that is not as
/// large as the disk, what both have.)
fn check_snapshots(queue: &Queue, bytes: &[u8], snapshots: &[(String, Vec<u8>)]) {
    for (name, expected) in snapshots {
        let storage = Arc::new(Memory::new(bytes.to_vec()));
        let found = content(queue, &device(queue, storage, Some(name)));
        let both = found.len().min(expected.len());
        assert!(found[..both] == expected[..both], "snapshot {name}");
    }
}

/// Checks an image: leaks always pass, and copied flags unless `clean`.
fn check(queue: &Queue, bytes: &[u8], clean: bool) {
    let device = device(queue, Arc::new(Memory::new(bytes.to_vec())), None);
    let LayerImage::Qcow2(image) = &device.top().image else {
        panic!("not qcow2");
    };
    let mut bad = Vec::new();
    jobs::check(queue, image, &mut |message| match message {
        CheckMessage::Leaked { .. } if !clean => {}
        CheckMessage::CopiedL2 { .. } | CheckMessage::CopiedData { .. } if !clean => {}
        other => bad.push(other.to_string()),
    })
    .expect("can be checked");
    assert!(bad.is_empty(), "{bad:#?}");
}

/// What must hold after the machine stopped and left `bytes`.
fn check_stopped(queue: &Queue, bytes: &[u8], before: &Model, after: &Model) {
    check(queue, bytes, false);
    let storage = Arc::new(Memory::new(bytes.to_vec()));
    let device = device(queue, storage.clone(), None);
    let found = names(&device);
    let names_of =
        |model: &Model| -> Vec<String> { model.snapshots.iter().map(|s| s.0.clone()).collect() };
    let snapshots = [before, after]
        .into_iter()
        .find(|model| names_of(model) == found)
        .unwrap_or_else(|| panic!("snapshots {found:?}"));
    let active = content(queue, &device);
    assert!(
        active == before.active || active == after.active,
        "the disk is neither as before nor as after"
    );
    check_snapshots(queue, bytes, &snapshots.snapshots);
    // Whoever writes now must not write what a snapshot has.
    let new: Vec<u8> = active.iter().map(|byte| byte ^ 0x55).collect();
    for (at, piece) in (0..).step_by(3000).zip(new.chunks(3000)) {
        device.write_blocking(queue, at, piece).expect("writes");
    }
    queue.block_on(device.close(queue)).expect("closes");
    let bytes = storage.to_vec();
    check(queue, &bytes, false);
    check_snapshots(queue, &bytes, &snapshots.snapshots);
}

/// Whether the event of this number has reached the disk.
type Pick = Box<dyn Fn(usize, &mut Rng) -> bool>;

/// Builds what the disk may hold at each instant of `events`, and checks it.
fn check_all_stops(
    queue: &Queue,
    rng: &mut Rng,
    base: &[u8],
    events: &[Event],
    models: (&Model, &Model),
) -> usize {
    let mut durable = base.to_vec();
    let mut states = 0;
    for part in events.split_inclusive(|event| matches!(event, Event::Flush)) {
        // Nothing, all, a part in order, any part.
        let cut = rng.below(part.len() as u64 + 1) as usize;
        let picks: [Pick; 5] = [
            Box::new(|_, _| false),
            Box::new(|_, _| true),
            Box::new(move |nth, _| nth < cut),
            Box::new(|_, rng| rng.one_in(2)),
            Box::new(|_, rng| rng.one_in(2)),
        ];
        for pick in picks {
            let mut bytes = durable.clone();
            for (nth, event) in part.iter().enumerate() {
                if pick(nth, rng) {
                    carry_out(&mut bytes, event);
                }
            }
            check_stopped(queue, &bytes, models.0, models.1);
            states += 1;
        }
        for event in part {
            carry_out(&mut durable, event);
        }
    }
    check_stopped(queue, &durable, models.1, models.1);
    states + 1
}

/// A device under test, what it should hold, and how it got there.
struct Run {
    queue: Queue,
    rng: Rng,
    storage: Arc<Recorder>,
    device: Device,
    model: Model,
    version: u32,
    cluster: u64,
    taken: u32,
    states: usize,
}

impl Run {
    fn new(options: &CreateQcow2, seed: u64) -> Self {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let storage = Arc::new(Recorder {
            memory: Memory::default(),
            events: Mutex::default(),
        });
        jobs::create_qcow2(&queue, &*storage, None, options).unwrap();
        Run {
            device: device(&queue, storage.clone(), None),
            queue,
            rng: Rng::new(seed),
            storage,
            model: Model {
                active: vec![0; options.size as usize],
                snapshots: Vec::new(),
            },
            version: options.version,
            cluster: 1 << options.cluster_bits,
            taken: 0,
            states: 0,
        }
    }

    /// Writes, zeroes, discards, compresses.
    fn change(&mut self) {
        let size = self.model.active.len() as u64;
        for _ in 0..1 + self.rng.below(5) {
            let at = self.rng.below(size);
            let length = 1 + self.rng.below((size - at).min(6 * self.cluster));
            let range = at as usize..(at + length) as usize;
            match self.rng.below(6) {
                0 => {
                    let zeroing = [Zeroing::Keep, Zeroing::Unmap][self.rng.below(2) as usize];
                    let zeroes = self.device.write_zeroes(&self.queue, at, length, zeroing);
                    self.queue.block_on(zeroes).unwrap();
                    self.model.active[range].fill(0);
                }
                1 => self.compress(at & !(self.cluster - 1)),
                _ => {
                    let place = &mut self.model.active[range];
                    self.rng.fill(place);
                    self.device.write_blocking(&self.queue, at, place).unwrap();
                }
            }
        }
    }

    fn compress(&mut self, at: u64) {
        let length = self.cluster.min(self.model.active.len() as u64 - at) as usize;
        let mut bytes = vec![self.rng.below(256) as u8; length];
        bytes[0] = 7;
        // SAFETY: the bytes live until the write, waited for here, has ended.
        let iov = unsafe { Iov::from_raw(bytes.as_mut_ptr(), length) };
        let write = self.device.write_compressed(&self.queue, at, &iov);
        // What is allocated cannot be compressed.
        if self.queue.block_on(write).is_ok() {
            self.model.active[at as usize..][..length].copy_from_slice(&bytes);
        }
    }

    fn resize(&mut self) {
        let blocks = 16 + self.rng.below(300);
        let resize = self
            .device
            .resize(&self.queue, blocks * 512, Preallocation::Off);
        match self.queue.block_on(resize) {
            Ok(()) => self.model.active.resize(blocks as usize * 512, 0),
            Err(e) => assert!(self.version < 3 && !self.model.snapshots.is_empty(), "{e}"),
        }
    }

    /// One change of the snapshots, and every stop on its way.
    fn snapshot(&mut self) {
        self.queue.block_on(self.device.flush(&self.queue)).unwrap();
        let before = self.model.clone();
        let base = self.storage.memory.to_vec();
        self.storage.events.lock().unwrap().clear();
        let count = before.snapshots.len() as u64;
        let pick = self.rng.below(count.max(1)) as usize;
        let name = |index: usize| SnapshotName::from(before.snapshots[index].0.as_str());
        let (queue, device) = (&self.queue, &mut self.device);
        let result = match self.rng.below(4) {
            0 if count > 0 => {
                self.model.snapshots.remove(pick);
                queue.block_on(device.snapshot_delete(queue, &name(pick)))
            }
            1 if count > 0 => {
                self.model.active = before.snapshots[pick].1.clone();
                queue.block_on(device.snapshot_apply(queue, &name(pick)))
            }
            _ => {
                self.taken += 1;
                let name = format!("s{}", self.taken);
                let active = self.model.active.clone();
                self.model.snapshots.push((name.clone(), active));
                queue.block_on(device.snapshot_create(queue, &name))
            }
        };
        if let Err(error) = result {
            assert!(
                matches!(error, zebu::Error::RefcountOverflow { .. }),
                "{error}"
            );
            self.model = before.clone();
        }
        assert_eq!(self.device.size(), self.model.active.len() as u64);
        assert!(content(&self.queue, &self.device) == self.model.active);
        let events = self.storage.events.lock().unwrap().clone();
        assert!(matches!(events.last(), None | Some(Event::Flush)));
        check(&self.queue, &self.storage.memory.to_vec(), true);
        let models = (&before, &self.model);
        self.states += check_all_stops(&self.queue, &mut self.rng, &base, &events, models);
    }
}

#[test]
fn a_stop_at_any_instant() {
    let _watchdog = Watchdog::new("snapshots");
    let options = |version, cluster_bits, refcount_order, extended_l2| CreateQcow2 {
        size: 100 << 10,
        version,
        cluster_bits,
        refcount_order,
        extended_l2,
        ..CreateQcow2::default()
    };
    let kinds = [
        options(3, 9, 4, false),
        options(2, 9, 4, false),
        options(3, 10, 1, false),
        options(3, 12, 6, false),
        options(3, 14, 3, true),
    ];
    for (kind, options) in kinds.iter().enumerate() {
        for seed in 0..3 {
            let mut run = Run::new(options, 100 * kind as u64 + seed);
            for _ in 0..6 {
                run.change();
                if run.rng.one_in(3) {
                    run.resize();
                }
                run.snapshot();
            }
            let Run { device, queue, .. } = run;
            queue.block_on(device.close(&queue)).unwrap();
            check(&queue, &run.storage.memory.to_vec(), true);
            assert!(run.states > 50, "{} states", run.states);
        }
    }
}
