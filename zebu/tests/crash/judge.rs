//! The conditions that an image must meet after a power cut.
//!
//! - It opens, and a check finds at most leaked clusters.
//! - Flushed data read back. A sector that was written since the flush reads as before, or as one of
//!   the writes left it.
//! - A change of the whole image (size, snapshots) is atomic.
//! - Its bitmaps are right, or marked as in use: see [`bitmaps`].
//! - Further writes do not damage anything.
//!
//! One exception: while a snapshot is created, applied or deleted, copied flags and refcounts do not
//! change at the same instant. See [`allowed_flags`].

use std::path::Path;
use std::sync::Arc;

use zebu::block::{Device, Format, OpenOptions, Preallocation, Storages};
use zebu::jobs;
use zebu::qcow2::SnapshotName;
use zebu::storage::{Memory, Queue, Storage};

use crate::allowed_flags::allowed_flags;
use crate::bitmaps;
use crate::common::peer::{
    assert_consistent, assert_content, assert_part, assert_sound, qemu_img, text,
};
use crate::common::{Rng, encryption, repair_all};
use crate::dirty::Bitmap;
use crate::disk::Time;
use crate::spread::Spread;
use crate::states::{Left, SECTOR};
use zebu_testkit::Written;

/// The content of a disk and of its snapshots, and its bitmaps.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub active: Vec<u8>,
    pub snapshots: Vec<(String, Vec<u8>)>,
    pub bitmaps: Vec<Bitmap>,
}

impl Model {
    /// A disk with this content.
    pub fn of(active: Vec<u8>) -> Self {
        Model {
            active,
            ..Model::default()
        }
    }

    /// The disk gets this content, perhaps of another size.
    pub fn set_active(&mut self, active: Vec<u8>) {
        self.active = active;
        let size = self.active.len();
        self.bitmaps
            .iter_mut()
            .for_each(|bitmap| bitmap.resize(size));
    }

    /// The disk gets another size. What it gains is zero.
    pub fn resize(&mut self, size: usize) {
        let mut active = std::mem::take(&mut self.active);
        active.resize(size, 0);
        self.set_active(active);
    }

    /// Whether the snapshots are the same. Of contents of different length, the common part is
    /// compared.
    fn has_snapshots_of(&self, other: &Model) -> bool {
        let mut pairs = self.snapshots.iter().zip(&other.snapshots);
        self.snapshots.len() == other.snapshots.len()
            && pairs.all(|((name, bytes), (other_name, other))| {
                let both = bytes.len().min(other.len());
                name == other_name && bytes[..both] == other[..both]
            })
    }
}

/// Of the contents alone: bitmaps are compared with what was found.
impl PartialEq for Model {
    fn eq(&self, other: &Model) -> bool {
        self.active == other.active && self.has_snapshots_of(other)
    }
}

/// The name of an external data file.
pub const DATA_FILE: &str = "data.raw";

/// A request or change of a workload, and its time.
#[derive(Clone, Debug)]
pub struct Event {
    pub began: Time,
    pub ended: Time,
    pub what: Change,
}

#[derive(Clone, Debug)]
pub enum Change {
    /// A write of these bytes at an offset.
    Write(usize, Vec<u8>),
    /// All changes that had ended before it began are durable.
    Flush,
    /// Bitmaps are stored, until the next change begins.
    Store,
    /// An atomic change of the whole image to this content, which is durable.
    Becomes(Model),
}

/// The purpose of the files of a disk. The first is the image.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// The image, if it is not qcow2.
    pub written: Option<Written>,
    /// The parts of the disk that are used, if it is larger than memory.
    pub spread: Option<Spread>,
    /// The identity of the image's content and this content, before the first event.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// The external data file.
    pub data: Option<usize>,
    /// The backing files that the image may name.
    pub backings: Vec<(&'static str, Under)>,
    /// Snapshots are changed, so the exception above applies.
    pub has_snapshots: bool,
    /// A change of snapshots failed, so the exception applies from then on.
    pub flags_stay: bool,
    /// The image is damaged, and being repaired.
    pub damaged: bool,
    /// The workload creates the image; before this time it need not be one.
    pub made: Time,
    /// When the new image is filled, and with what: until then it does not open.
    pub filled: Option<(std::ops::Range<Time>, Vec<u8>)>,
    /// The contents that the backing image may have, sector by sector.
    pub base: Vec<Vec<u8>>,
}

#[derive(Clone, Debug)]
pub enum Under {
    /// A raw image that is not written.
    Raw(Arc<Memory>),
    /// A qcow2 image: this file of the disk.
    Image(usize),
}

pub type Verdict = Result<(), String>;

pub fn said(what: &str) -> impl FnOnce(zebu::Error) -> String {
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
        let format = self.written.map(|written| written.format());
        let options = options.clone().objects(encryption::objects());
        Device::from_storages(queue, storages, &options.format(format))
    }

    /// The parts of the disk that are used, where the content has so many bytes.
    pub fn spread(&self, bytes: usize) -> Spread {
        self.spread.unwrap_or_else(|| Spread::whole(bytes))
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

/// The expected content at a moment.
pub struct Expected<'a> {
    events: &'a [Event],
    /// The flushed content.
    durable: Model,
    /// Writes that need not be durable, in the order in which they ended.
    later: Vec<(Time, usize, &'a [u8])>,
    /// The content after a change of the whole image that is in flight.
    becomes: Option<&'a Model>,
    moment: Time,
    /// The index of the first event that has not begun.
    next: usize,
    /// All changes of the whole image before this index have ended.
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

    /// Advances to a moment. Events are in the order in which they began.
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
        // There are no other requests during a change of the whole image.
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
            self.set_durable(until);
        }
    }

    /// Fails unless the bitmaps are right for the content that was found.
    fn compare_bitmaps(&self, found: &Found) -> Verdict {
        let models: Vec<&Model> = self.becomes.into_iter().chain([&self.durable]).collect();
        let begun = self.events[..self.next].iter().rev();
        let changes = begun.take_while(|e| !matches!(e.what, Change::Store));
        let unchanged = changes.clone().all(|e| matches!(e.what, Change::Flush));
        let last = self.events[..self.next]
            .len()
            .checked_sub(changes.count() + 1);
        let is_stored = last.is_some_and(|last| self.events[last].ended <= self.moment);
        let content = &found.model.active;
        bitmaps::compare(&found.bitmaps, content, &models, unchanged && is_stored)
    }

    /// Writes that had ended before `until` are durable.
    fn set_durable(&mut self, until: Time) {
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

    /// Whether a subset of the later writes explains the content of the sector at `at`.
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

/// The content of an image after a power cut.
struct Found {
    model: Model,
    /// The number of copied flags that do not match the refcounts.
    flags: u64,
    bitmaps: Vec<bitmaps::Found>,
}

pub struct Judge<'a> {
    pub queue: &'a Queue,
    pub layout: &'a Layout,
    pub folder: &'a Path,
}

impl Judge<'_> {
    /// Verifies a state. With `more`, it is then written and verified again; with `qemu`, QEMU
    /// checks and reads it.
    pub fn judge(
        &self,
        state: &[Arc<Left>],
        expected: &Expected<'_>,
        rng: &mut Rng,
        more: bool,
        qemu: bool,
    ) -> Verdict {
        let filled = self.layout.filled.as_ref();
        let filled = filled.filter(|(times, _)| times.contains(&expected.moment));
        let may_be_none = expected.moment < self.layout.made || filled.is_some();
        if may_be_none && !is_finished(&state[0].to_vec()) {
            return Ok(());
        }
        let found = self.look(state, expected.becomes.is_some(), true)?;
        if let Some((_, content)) = filled
            && found.model.active != *content
        {
            return Err("it has not all of the data, and opens".into());
        }
        expected.compare(&found.model)?;
        expected.compare_bitmaps(&found)?;
        if qemu {
            self.ask_qemu(state, &found);
        }
        if self.layout.damaged {
            return self.repair(state, &found);
        }
        match more {
            true => self.go_on(state, found, rng),
            false => Ok(()),
        }
    }

    /// Opens, checks and reads a state. What the last writer has closed was not `interrupted`.
    fn look(
        &self,
        state: &[Arc<Left>],
        changing: bool,
        interrupted: bool,
    ) -> Result<Found, String> {
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
        if let Some(written) = &layout.written {
            written.check(queue, device.top(), interrupted)?;
            let active = match &layout.spread {
                Some(spread) => spread.read(queue, &device)?,
                None => content(queue, &device)?,
            };
            if let Some((id, before)) = &layout.identity
                && device.top().content_id() == Some(&id[..])
                && interrupted
                && active != *before
            {
                return Err("the content has changed, and its identity has not".into());
            }
            return Ok(Found {
                model: Model::of(active),
                flags: 0,
                bitmaps: Vec::new(),
            });
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
        let mut model = Model::of(active);
        model.snapshots = snapshots;
        Ok(Found {
            model,
            flags,
            bitmaps: bitmaps::look(queue, &device)?,
        })
    }

    fn snapshot(&self, state: &[Arc<Left>], name: &str) -> Result<Vec<u8>, String> {
        let options = OpenOptions::default().snapshot(Some(SnapshotName::from(name)));
        let device = self.layout.open(self.queue, state, &options);
        content(self.queue, &device.map_err(said("open a snapshot"))?)
    }

    /// Verifies each sector of the backing image.
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

    /// Overwrites the whole disk, which must change nothing else but bitmaps. Sometimes one of
    /// these is removed.
    fn go_on(&self, state: &[Arc<Left>], mut found: Found, rng: &mut Rng) -> Verdict {
        let queue = self.queue;
        let options = OpenOptions::default()
            .write(true)
            .discard(Some(true))
            .store_bitmaps(rng.one_in(2));
        let device = self.layout.open(queue, state, &options);
        let mut device = device.map_err(said("open for writing"))?;
        let mut active = found.model.active.clone();
        if rng.one_in(3) {
            self.enlarge(&mut device, &mut active, rng)?;
        }
        let new: Vec<u8> = active.iter().map(|byte| byte ^ 0x55).collect();
        let piece = 512 * (1 + rng.below(20)) as usize + 100;
        let spread = self.layout.spread(new.len());
        for at in (0..new.len()).step_by(piece) {
            for part in spread.parts(at..(at + piece).min(new.len())) {
                let place = spread.place(part.start);
                let write = device.write_blocking(queue, place, &new[part]);
                write.map_err(said("write after a power cut"))?;
            }
        }
        if !found.bitmaps.is_empty() && rng.one_in(3) {
            let removed = found.bitmaps.remove(rng.index(found.bitmaps.len()));
            let remove = device.bitmap_remove(queue, &removed.info.name);
            let removed = queue.block_on(remove);
            removed.map_err(said("remove a bitmap after a power cut"))?;
        }
        let closed = queue.block_on(device.close(queue));
        closed.map_err(said("close after a power cut"))?;
        let after = self.look(state, found.flags > 0, false);
        let after = after.map_err(|e| format!("written to after a power cut: {e}"))?;
        if after.model.active != new {
            return Err("written to after a power cut, it reads as something else".into());
        }
        let bitmaps = bitmaps::compare_overwritten(&found.bitmaps, &after.bitmaps);
        bitmaps.map_err(|e| format!("written to after a power cut: {e}"))?;
        match after.model.has_snapshots_of(&found.model) {
            true => Ok(()),
            false => Err("a snapshot has changed with the disk".into()),
        }
    }

    /// Enlarges the disk. The added part must be zero.
    fn enlarge(&self, device: &mut Device, active: &mut Vec<u8>, rng: &mut Rng) -> Verdict {
        let more = 512 * (1 + rng.below(300)) as usize;
        let size = (active.len() + more) as u64;
        let modes = [Preallocation::Off, Preallocation::Metadata];
        let mode = rng.pick(&modes);
        let resize = device.resize(self.queue, size, mode);
        match self.queue.block_on(resize) {
            // An image of version 2 with snapshots, or of most other formats, cannot be resized.
            Err(zebu::Error::Refused(_)) => return Ok(()),
            other => other.map_err(said("enlarged after a power cut"))?,
        }
        active.resize(size as usize, 0);
        match content(self.queue, device)? == *active {
            true => Ok(()),
            false => Err("enlarged after a power cut, it reads as something else".into()),
        }
    }

    /// Repairs a damaged image, which must not change its content.
    fn repair(&self, state: &[Arc<Left>], found: &Found) -> Verdict {
        let repaired = repair_all(self.queue, state[0].clone());
        repaired.map_err(said("repair again"))?;
        let sound = Judge {
            layout: &Layout {
                damaged: false,
                ..self.layout.clone()
            },
            ..*self
        };
        let after = sound.look(state, false, true)?;
        match after.model == found.model {
            true => Ok(()),
            false => Err("repaired again, it reads as something else".into()),
        }
    }

    /// QEMU must find at most leaks and read the same data.
    fn ask_qemu(&self, state: &[Arc<Left>], found: &Found) {
        if let Some(written) = &self.layout.written {
            let image = self.folder.join("image");
            std::fs::write(&image, state[0].to_vec()).unwrap();
            assert_sound(&image, written, true, "after a power cut");
            let (active, what) = (&found.model.active, "after a power cut");
            match self.layout.spread {
                Some(spread) if spread.count > 1 => {
                    for part in spread.parts(0..active.len()) {
                        let place = spread.place(part.start);
                        assert_part(&image, written.name, (place, &active[part]), what);
                    }
                }
                _ => assert_content(&image, written.name, active, what),
            }
            return;
        }
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
        let in_use = found.bitmaps.iter().filter(|b| b.bits.is_none()).count();
        let info = qemu_img(&["info", "--output=json", text(&image)]).ok("qemu-img info");
        let listed = info.out.matches("\"in-use\"").count();
        assert_eq!(listed, in_use, "inconsistent bitmaps: {info}");
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

/// Whether it is a qcow2 image that does not say that it is not finished.
fn is_finished(bytes: &[u8]) -> bool {
    bytes.starts_with(b"QFI\xfb") && bytes.get(4..8) != Some(&[0xff; 4])
}

/// Checks an image. Returns the number of wrong flags, which is 0 unless `changing`.
fn check(queue: &Queue, image: &zebu::qcow2::Image, changing: bool) -> Result<u64, String> {
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
    if report.corruptions > flags || report.check_errors != 0 {
        let messages: Vec<_> = messages.iter().map(ToString::to_string).collect();
        return Err(format!("check: {report:?}\n{}", messages.join("\n")));
    }
    Ok(flags)
}
