//! What must hold of an image after a power cut.
//!
//! - It opens, and a check finds leaked clusters at worst.
//! - What was flushed reads back. A sector that was changed since reads as it
//!   was, or as one of the changes made it; never as anything else.
//! - A change of the whole image (size, snapshots) has happened or not.
//! - Whoever goes on writing does no harm.
//!
//! One exception: while a snapshot is taken, applied or deleted, flags and
//! refcounts cannot change at one instant. See [`allowed_flags`].

use std::path::Path;
use std::sync::Arc;

use zebu::block::{Device, Format, OpenOptions, Preallocation, Storages};
use zebu::jobs::{self, CheckMessage, RepairMode};
use zebu::qcow2::SnapshotName;
use zebu::storage::{Memory, Queue, Storage};

use crate::common::Rng;
use crate::common::peer::{assert_consistent, assert_content, qemu_img, text};
use crate::disk::Time;
use crate::states::{Left, SECTOR};

/// What a disk and its snapshots hold.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub active: Vec<u8>,
    pub snapshots: Vec<(String, Vec<u8>)>,
}

impl Model {
    /// Whether the snapshots are the same. (Of one that is not as large as the
    /// disk, what both have.)
    fn has_snapshots_of(&self, other: &Model) -> bool {
        let mut pairs = self.snapshots.iter().zip(&other.snapshots);
        self.snapshots.len() == other.snapshots.len()
            && pairs.all(|((name, bytes), (other_name, other))| {
                let both = bytes.len().min(other.len());
                name == other_name && bytes[..both] == other[..both]
            })
    }
}

impl PartialEq for Model {
    fn eq(&self, other: &Model) -> bool {
        self.active == other.active && self.has_snapshots_of(other)
    }
}

/// The name of an external data file.
pub const DATA_FILE: &str = "data.raw";

/// Something that a workload did, and when.
#[derive(Clone, Debug)]
pub struct Event {
    pub began: Time,
    pub ended: Time,
    pub what: Change,
}

#[derive(Clone, Debug)]
pub enum Change {
    /// The bytes from an offset on are these now.
    Write(usize, Vec<u8>),
    /// All that had ended before it began is durable.
    Flush,
    /// Everything is so now, durably: all of it, or nothing yet.
    Becomes(Model),
}

/// What the files of a disk are: the first is the image.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Which one is its external data file.
    pub data: Option<usize>,
    /// What the image may name as its backing file.
    pub backings: Vec<(&'static str, Under)>,
    /// Snapshots are changed: the exception above holds.
    pub has_snapshots: bool,
    /// One of these changes met an error: it holds from then on.
    pub flags_stay: bool,
    /// The image is damaged, and being repaired.
    pub damaged: bool,
    /// The image is made in the log: before this moment it may be none.
    pub made: Time,
    /// What each sector of the backing image may read as.
    pub base: Vec<Vec<u8>>,
}

#[derive(Clone, Debug)]
pub enum Under {
    /// A raw image that nobody writes.
    Raw(Arc<Memory>),
    /// A qcow2 image: this file of the disk.
    Image(usize),
}

pub type Verdict = Result<(), String>;

fn said(what: &str) -> impl FnOnce(zebu::Error) -> String {
    move |e| format!("{what}: {e}")
}

impl Layout {
    /// Opens the image in `files`.
    pub fn open<S: Storage + 'static>(
        &self,
        queue: &Queue,
        files: &[Arc<S>],
        options: &OpenOptions,
    ) -> zebu::Result<Device> {
        let image: Arc<dyn Storage> = files[0].clone();
        let backing = match self.backings.is_empty() || options.snapshot.is_some() {
            true => None,
            false => self.backing(queue, files)?,
        };
        let storages = Storages::new(image)
            .data(self.data.map(|n| files[n].clone() as Arc<dyn Storage>))
            .backing(backing);
        Device::from_storages(queue, storages, options)
    }

    fn backing<S: Storage + 'static>(
        &self,
        queue: &Queue,
        files: &[Arc<S>],
    ) -> zebu::Result<Option<Device>> {
        let inspect = OpenOptions::default()
            .inspect(true)
            .format(Some(Format::QCOW2));
        let device = Device::from_storage(queue, files[0].clone(), &inspect)?;
        let Some(image) = device.top().as_qcow2() else {
            unreachable!("opened as qcow2");
        };
        let Some(name) = image.header().backing_file() else {
            return Ok(None);
        };
        let found = self.backings.iter().find(|(n, _)| n.as_bytes() == name);
        let Some((_, under)) = found else {
            let name = String::from_utf8_lossy(name).into_owned();
            return Err(zebu::Error::Refused(format!("it names {name:?}")));
        };
        under.open(queue, files, false).map(Some)
    }
}

impl Under {
    pub fn open<S: Storage + 'static>(
        &self,
        queue: &Queue,
        files: &[Arc<S>],
        write: bool,
    ) -> zebu::Result<Device> {
        let (storage, format): (Arc<dyn Storage>, _) = match self {
            Under::Raw(memory) => (memory.clone(), Format::RAW),
            Under::Image(n) => (files[*n].clone(), Format::QCOW2),
        };
        let options = OpenOptions::default()
            .format(Some(format))
            .write(write)
            .discard(Some(true));
        Device::from_storage(queue, storage, &options)
    }
}

pub fn content(queue: &Queue, device: &Device) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; device.size() as usize];
    let read = device.read_blocking(queue, 0, &mut bytes);
    read.map_err(said("read")).map(|()| bytes)
}

/// What is expected at a moment.
pub struct Expected<'a> {
    events: &'a [Event],
    /// What was flushed.
    durable: Model,
    /// Writes that may be there, in the order in which they ended.
    later: Vec<(Time, usize, &'a [u8])>,
    /// What everything may have become.
    becomes: Option<&'a Model>,
    moment: Time,
    /// Events before it have begun.
    next: usize,
    /// Changes of everything before it have ended.
    became: usize,
}

impl<'a> Expected<'a> {
    pub fn new(before: Model, events: &'a [Event]) -> Self {
        Expected {
            events,
            durable: before,
            later: Vec::new(),
            becomes: None,
            moment: 0,
            next: 0,
            became: 0,
        }
    }

    /// Goes on to a moment. Events are in the order in which they began.
    pub fn advance(&mut self, moment: Time) {
        self.moment = moment;
        while let Some(event) = self.events.get(self.next).filter(|e| e.began <= moment) {
            if let Change::Write(at, bytes) = &event.what {
                self.later.push((event.ended, *at, bytes));
            }
            self.next += 1;
        }
        self.later.sort_by_key(|(ended, ..)| *ended);
        let begun = &self.events[..self.next];
        self.becomes = None;
        // Nothing else happens while everything changes.
        for (nth, event) in begun.iter().enumerate().skip(self.became) {
            if let Change::Becomes(model) = &event.what {
                if event.ended > moment {
                    self.becomes = Some(model);
                } else {
                    self.durable = model.clone();
                    self.later.retain(|(ended, ..)| *ended > event.ended);
                    self.became = nth + 1;
                }
            }
        }
        let flushes = begun
            .iter()
            .filter(|e| matches!(e.what, Change::Flush) && e.ended <= moment);
        if let Some(until) = flushes.map(|e| e.began).max() {
            self.settle(until);
        }
    }

    /// What had ended before `until` is durable.
    fn settle(&mut self, until: Time) {
        let count = self.later.partition_point(|(ended, ..)| *ended < until);
        for (_, at, bytes) in self.later.drain(..count) {
            self.durable.active[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    fn compare(&self, found: &Model) -> Verdict {
        match self.becomes {
            Some(model) if model == found => Ok(()),
            Some(model) => self.compare_with_durable(found).map_err(|e| {
                let sectors = model.active.chunks(512).zip(found.active.chunks(512));
                let differs = sectors.clone().position(|(a, b)| a != b).map(|n| n * 512);
                let (size, snapshots) = (model.active.len(), model.snapshots.len());
                format!(
                    "{e}; nor is it what it becomes ({size} bytes, {snapshots} snapshots): \
                     first difference at {differs:x?}"
                )
            }),
            None => self.compare_with_durable(found),
        }
    }

    fn compare_with_durable(&self, found: &Model) -> Verdict {
        let base = &self.durable;
        if base.active.len() != found.active.len() {
            let (is, was) = (found.active.len(), base.active.len());
            return Err(format!("the size is {is}, was {was}"));
        }
        if !base.has_snapshots_of(found) {
            let names = |m: &Model| m.snapshots.iter().map(|s| s.0.clone()).collect::<Vec<_>>();
            let (is, was) = (names(found), names(base));
            return Err(format!("snapshots are {is:?}, were {was:?}, or differ"));
        }
        let sectors = base.active.chunks(SECTOR as usize);
        let pairs = sectors.zip(found.active.chunks(SECTOR as usize));
        for (nth, (old, new)) in pairs.enumerate() {
            if old != new {
                self.explain(nth * SECTOR as usize, old, new)?;
            }
        }
        Ok(())
    }

    /// Whether some of the later writes make of the sector at `at` what it is.
    fn explain(&self, at: usize, old: &[u8], new: &[u8]) -> Verdict {
        let end = at + old.len();
        let touches = |w: &&(Time, usize, &[u8])| w.1 < end && w.1 + w.2.len() > at;
        let writes: Vec<_> = self.later.iter().filter(touches).collect();
        let put = |sector: &mut Vec<u8>, (_, start, bytes): &(Time, usize, &[u8])| {
            let (from, to) = ((*start).max(at), (start + bytes.len()).min(end));
            sector[from - at..to - at].copy_from_slice(&bytes[from - start..to - start]);
        };
        let is_whole = |w: &&(Time, usize, &[u8])| w.1 <= at && w.1 + w.2.len() >= end;
        let explained = if writes.iter().all(is_whole) {
            let same = |w: &&(Time, usize, &[u8])| &w.2[at - w.1..end - w.1] == new;
            writes.iter().any(same)
        } else if writes.len() <= 8 {
            (0..1u32 << writes.len()).any(|bits| {
                let mut sector = old.to_vec();
                for (nth, write) in writes.iter().enumerate() {
                    if bits >> nth & 1 == 1 {
                        put(&mut sector, write);
                    }
                }
                sector == new
            })
        } else {
            (0..new.len()).all(|n| {
                let byte = |w: &&&(Time, usize, &[u8])| {
                    (at + n).checked_sub(w.1).and_then(|n| w.2.get(n)) == Some(&new[n])
                };
                new[n] == old[n] || writes.iter().any(|w| byte(&w))
            })
        };
        match explained {
            true => Ok(()),
            false => Err(format!(
                "sector {at:#x} is {:02x?}.., was {:02x?}.. when it was flushed, and {} later \
                 writes do not explain it",
                &new[..8],
                &old[..8],
                writes.len()
            )),
        }
    }
}

/// What was found in an image.
struct Found {
    model: Model,
    /// Copied flags that are not what the refcounts say.
    flags: usize,
}

pub struct Judge<'a> {
    pub queue: &'a Queue,
    pub layout: &'a Layout,
    pub folder: &'a Path,
}

impl Judge<'_> {
    /// Looks at a state; with `more`, also at what becomes of it when it is
    /// written to, and with `qemu`, at what QEMU says of it.
    pub fn judge(
        &self,
        state: &[Arc<Left>],
        expected: &Expected<'_>,
        rng: &mut Rng,
        more: bool,
        qemu: bool,
    ) -> Verdict {
        if expected.moment < self.layout.made && !is_qcow2(&state[0].to_vec()) {
            return Ok(());
        }
        let found = self.look(state, expected.becomes.is_some())?;
        expected.compare(&found.model)?;
        if qemu {
            self.ask_qemu(state, &found);
        }
        if self.layout.damaged {
            return self.repair(state, &found);
        }
        match more {
            true => self.go_on(state, &found, rng),
            false => Ok(()),
        }
    }

    fn look(&self, state: &[Arc<Left>], changing: bool) -> Result<Found, String> {
        let (queue, layout) = (self.queue, self.layout);
        let device = layout
            .open(queue, state, &OpenOptions::default())
            .map_err(said("open"))?;
        let mut flags = 0;
        for layer in device.layers() {
            if let Some(image) = layer.as_qcow2()
                && !layout.damaged
            {
                let allowed = layout.has_snapshots && (changing || layout.flags_stay);
                flags += check(queue, image, allowed)?;
            }
        }
        if let Some((_, Under::Image(_))) = layout.backings.first()
            && device.layers().len() > 1
        {
            self.check_base(state)?;
        }
        let Some(image) = device.top().as_qcow2() else {
            return Err("it is not a qcow2 image".into());
        };
        let mut snapshots = Vec::new();
        for snapshot in image.snapshots() {
            let name = String::from_utf8_lossy(&snapshot.name).into_owned();
            let bytes = self.snapshot(state, &name)?;
            snapshots.push((name, bytes));
        }
        let active = content(queue, &device)?;
        Ok(Found {
            model: Model { active, snapshots },
            flags,
        })
    }

    fn snapshot(&self, state: &[Arc<Left>], name: &str) -> Result<Vec<u8>, String> {
        let options = OpenOptions::default().snapshot(Some(SnapshotName::from(name)));
        let device = self.layout.open(self.queue, state, &options);
        content(self.queue, &device.map_err(said("open a snapshot"))?)
    }

    /// Each sector of the backing image is one that it may be.
    fn check_base(&self, state: &[Arc<Left>]) -> Verdict {
        let (_, under) = &self.layout.backings[0];
        let base = under.open(self.queue, state, false);
        let found = content(self.queue, &base.map_err(said("open the base"))?)?;
        for (nth, sector) in found.chunks(SECTOR as usize).enumerate() {
            let at = nth * SECTOR as usize;
            let same = |may: &Vec<u8>| may.get(at..).is_some_and(|rest| rest.starts_with(sector));
            if !self.layout.base.iter().any(same) {
                return Err(format!("sector {at:#x} of the base is neither old nor new"));
            }
        }
        Ok(())
    }

    /// Writes the whole disk anew; everything else stays.
    fn go_on(&self, state: &[Arc<Left>], found: &Found, rng: &mut Rng) -> Verdict {
        let queue = self.queue;
        let options = OpenOptions::default().write(true).discard(Some(true));
        let device = self.layout.open(queue, state, &options);
        let mut device = device.map_err(said("open for writing"))?;
        let mut active = found.model.active.clone();
        if rng.one_in(3) {
            self.enlarge(&mut device, &mut active, rng)?;
        }
        let new: Vec<u8> = active.iter().map(|byte| byte ^ 0x55).collect();
        let piece = 512 * (1 + rng.below(20)) as usize + 100;
        for (at, bytes) in (0..).step_by(piece).zip(new.chunks(piece)) {
            let write = device.write_blocking(queue, at, bytes);
            write.map_err(said("write after a power cut"))?;
        }
        let closed = queue.block_on(device.close(queue));
        closed.map_err(said("close after a power cut"))?;
        let after = self.look(state, found.flags > 0);
        let after = after.map_err(|e| format!("written to after a power cut: {e}"))?;
        if after.model.active != new {
            return Err("written to after a power cut, it reads as something else".into());
        }
        match after.model.has_snapshots_of(&found.model) {
            true => Ok(()),
            false => Err("a snapshot has changed with the disk".into()),
        }
    }

    /// Makes the disk larger: what is added is zero, whatever was there or is
    /// behind it.
    fn enlarge(&self, device: &mut Device, active: &mut Vec<u8>, rng: &mut Rng) -> Verdict {
        let more = 512 * (1 + rng.below(300)) as usize;
        let size = (active.len() + more) as u64;
        let modes = [Preallocation::Off, Preallocation::Metadata];
        let mode = modes[rng.below(2) as usize];
        let resize = device.resize(self.queue, size, mode);
        match self.queue.block_on(resize) {
            // Version 2, with snapshots.
            Err(zebu::Error::Refused(_)) => return Ok(()),
            other => other.map_err(said("made larger after a power cut"))?,
        }
        active.resize(size as usize, 0);
        match content(self.queue, device)? == *active {
            true => Ok(()),
            false => Err("made larger after a power cut, it shows something else".into()),
        }
    }

    /// Repairs a damaged image; its content stays.
    fn repair(&self, state: &[Arc<Left>], found: &Found) -> Verdict {
        let repaired = self.queue.block_on(jobs::repair(
            self.queue,
            state[0].clone(),
            RepairMode::All,
            &mut |_| {},
            |_| {},
        ));
        repaired.map_err(said("repair again"))?;
        let sound = Judge {
            layout: &Layout {
                damaged: false,
                ..self.layout.clone()
            },
            ..*self
        };
        let after = sound.look(state, false)?;
        match after.model == found.model {
            true => Ok(()),
            false => Err("repaired again, it reads as something else".into()),
        }
    }

    /// QEMU finds leaks at worst, and reads the same.
    fn ask_qemu(&self, state: &[Arc<Left>], found: &Found) {
        let image = self.folder.join("image.qcow2");
        self.save(state, self.folder);
        match (self.layout.damaged, found.flags) {
            (true, _) => {
                let args = ["check", "-q", "-r", "all", "-f", "qcow2", text(&image)];
                qemu_img(&args).ok("qemu-img check -r all");
            }
            (false, 0) => assert_consistent(&image, "after a power cut"),
            (false, _) => {}
        }
        assert_content(&image, "qcow2", &found.model.active, "after a power cut");
    }

    /// Writes the files of a state into a folder.
    fn save(&self, state: &[Arc<Left>], folder: &Path) {
        let write = |name: &str, bytes: Vec<u8>| std::fs::write(folder.join(name), bytes).unwrap();
        write("image.qcow2", state[0].to_vec());
        if let Some(n) = self.layout.data {
            write(DATA_FILE, state[n].to_vec());
        }
        for (name, under) in &self.layout.backings {
            match under {
                Under::Raw(memory) => write(name, memory.to_vec()),
                Under::Image(n) => write(name, state[*n].to_vec()),
            }
        }
    }
}

/// Whether a file starts as a qcow2 image does.
fn is_qcow2(bytes: &[u8]) -> bool {
    bytes.starts_with(b"QFI\xfb")
}

/// Checks an image; how many flags are wrong, of which none may be unless
/// `changing`.
fn check(queue: &Queue, image: &zebu::qcow2::Image, changing: bool) -> Result<usize, String> {
    let mut messages = Vec::new();
    let report = queue.block_on(jobs::check(
        queue,
        image,
        &mut |message| messages.push(message),
        |_| {},
    ));
    let report = report.map_err(said("check"))?;
    let flags = match changing {
        true => allowed_flags(&messages, image.geometry().cluster_size()),
        false => 0,
    };
    if report.corruptions as usize > flags || report.check_errors != 0 {
        let messages: Vec<_> = messages.iter().map(ToString::to_string).collect();
        return Err(format!("check: {report:?}\n{}", messages.join("\n")));
    }
    Ok(flags)
}

/// How many copied flags are wrong without danger: one that is missing where
/// the refcount is 1 (a write copies for nothing), and one that is set where
/// there is one reference, and the refcount is too high (the cluster is leaked
/// by that much; a write in place is right).
fn allowed_flags(messages: &[CheckMessage], cluster_size: u64) -> usize {
    const COPIED: u64 = 1 << 63;
    const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
    let alone = |entry: u64| {
        messages.iter().any(|message| match message {
            CheckMessage::Leaked {
                cluster,
                references,
                ..
            } => *references == 1 && *cluster == (entry & OFFSET) / cluster_size,
            _ => false,
        })
    };
    let is_allowed = |message: &&CheckMessage| match **message {
        CheckMessage::CopiedL2 {
            entry, refcount, ..
        }
        | CheckMessage::CopiedData { entry, refcount } => match entry & COPIED {
            0 => refcount == 1,
            _ => refcount > 1 && alone(entry),
        },
        _ => false,
    };
    messages.iter().filter(is_allowed).count()
}
