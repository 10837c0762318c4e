//! The contents that each sector may have.
//!
//! Every change of a sector is a version: when it began and ended, and whether it succeeded. A
//! successful change replaces those that had ended before it began. One that failed or was dropped
//! may or may not have taken effect, and replaces nothing. A crash may bring back what was replaced
//! since the last flush.

use std::ops::Range;

use crate::bitmaps::Bitmap;
use crate::content::{self, Tag, UNKNOWN, ZERO};

/// A reading of the model's clock. Each begin and each end has its own.
pub type Time = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    tag: Tag,
    began: Time,
    /// `Time::MAX` while it is in flight.
    ended: Time,
    /// It succeeded.
    done: bool,
    /// It was replaced: only a crash brings it back.
    gone: bool,
}

/// The contents that a sector may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    versions: Vec<Version>,
    /// It may have any content because of damage.
    pub wild: bool,
    /// It was written, so that its content is in the image itself and not in the base.
    pub explicit: bool,
    /// The file was truncated before it.
    pub cut: bool,
}

impl Cell {
    /// A sector with this content, which is durable.
    pub fn new(tag: Tag) -> Self {
        Cell {
            versions: vec![Version {
                tag,
                began: 0,
                ended: 0,
                done: true,
                gone: false,
            }],
            wild: false,
            explicit: false,
            cut: false,
        }
    }

    /// What a read may return.
    pub fn now(&self) -> impl Iterator<Item = Tag> + '_ {
        self.versions.iter().filter(|v| !v.gone).map(|v| v.tag)
    }

    /// What it may have, also after a crash.
    pub fn all(&self) -> impl Iterator<Item = Tag> + '_ {
        self.versions.iter().map(|v| v.tag)
    }

    /// Whether a read may return this.
    pub fn may_be(&self, tag: Tag) -> bool {
        self.wild || self.now().any(|now| now == tag)
    }

    /// Adds a content that it may have.
    pub fn add(&mut self, tag: Tag, at: Time) {
        if !self.now().any(|now| now == tag) {
            self.versions.push(Version {
                tag,
                began: at,
                ended: at,
                done: false,
                gone: false,
            });
        }
    }

    /// It may have what another one has.
    pub fn add_all(&mut self, other: &Cell, at: Time) {
        other.now().for_each(|tag| self.add(tag, at));
        self.wild |= other.wild;
    }

    /// It was read while no change was in flight: it has this content and no other.
    fn pin(&mut self, tag: Tag) {
        let is_changing = self.versions.iter().any(|v| v.ended == Time::MAX);
        if self.wild || is_changing || tag == UNREADABLE {
            return;
        }
        for version in &mut self.versions {
            version.gone |= version.tag != tag;
        }
    }

    /// The same, and the content is durable.
    fn fix(&mut self, tag: Tag) {
        if !self.wild && tag != UNREADABLE {
            self.versions = Cell::new(tag).versions;
        }
    }

    fn end(&mut self, tag: Tag, began: Time, ended: Time, done: bool) {
        let of = |v: &&mut Version| v.tag == tag && v.began == began;
        if let Some(version) = self.versions.iter_mut().find(of) {
            version.ended = ended;
            version.done = done;
        }
        if done {
            for version in &mut self.versions {
                version.gone |= version.ended < began;
            }
        }
    }

    /// Changes that had ended before `until` are durable.
    fn flush(&mut self, until: Time) {
        if self.versions.len() < 2 {
            return;
        }
        let durable = |v: &&Version| v.done && v.ended < until;
        let latest = self.versions.iter().filter(durable).map(|v| v.began).max();
        if let Some(latest) = latest {
            self.versions.retain(|v| v.ended >= latest);
        }
    }

    /// Drops replaced versions: no crash brings them back.
    pub fn drop_replaced(&mut self) {
        self.versions.retain(|v| !v.gone);
    }

    /// Changes that were in flight or not durable may or may not have taken effect.
    fn crash(&mut self) {
        // The sector may again be that of the base.
        self.explicit &= self.versions.len() == 1;
        for version in &mut self.versions {
            version.gone = false;
            version.done = false;
            version.ended = version.ended.min(Time::MAX - 1);
        }
    }
}

/// An internal snapshot.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Its name.
    pub name: String,
    /// Its content.
    pub cells: Vec<Cell>,
    /// Its VM state: bytes of one value, and how many. None: it is not known.
    pub vm_state: Option<(u8, usize)>,
}

/// A read in flight.
#[derive(Debug)]
pub struct Reading {
    id: u64,
    range: Range<usize>,
    /// The contents that each sector may have had at some moment.
    may_be: Vec<Vec<Tag>>,
}

/// The contents that the disk may have.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// Its sectors.
    pub cells: Vec<Cell>,
    /// Its snapshots, the oldest first.
    pub snapshots: Vec<Snapshot>,
    /// Its dirty bitmaps, in the order of the image.
    pub bitmaps: Vec<Bitmap>,
    /// The VM state that a snapshot taken now has.
    pub vm_state: Option<(u8, usize)>,
}

impl Model {
    /// The number of sectors.
    pub fn sectors(&self) -> usize {
        self.cells.len()
    }

    /// A change begins.
    pub fn begin(&mut self, range: Range<usize>, tag: Tag, now: Time) {
        for cell in &mut self.cells[range] {
            cell.versions.push(Version {
                tag,
                began: now,
                ended: Time::MAX,
                done: false,
                gone: false,
            });
        }
    }

    /// A change that began at `began` has ended.
    pub fn end(&mut self, range: Range<usize>, tag: Tag, began: Time, now: Time, done: bool) {
        for cell in &mut self.cells[range] {
            cell.end(tag, began, now, done);
            // (A discard that was in flight may take effect later.)
            cell.explicit |= done && cell.now().count() == 1;
        }
    }

    /// Changes that had ended before `until` are durable.
    pub fn flushed(&mut self, until: Time) {
        self.cells.iter_mut().for_each(|cell| cell.flush(until));
    }

    /// The same for a part of the disk.
    pub fn flushed_range(&mut self, range: Range<usize>, until: Time) {
        self.cells[range]
            .iter_mut()
            .for_each(|cell| cell.flush(until));
    }

    /// Everything is durable, and no change is in flight.
    pub fn all_durable(&mut self) {
        self.flushed(Time::MAX);
    }

    /// The bitmaps follow the size of the disk.
    pub fn resize_bitmaps(&mut self) {
        let sectors = self.sectors();
        let bitmaps = self.bitmaps.iter_mut();
        bitmaps.for_each(|bitmap| bitmap.resize(sectors));
    }

    /// The content was `before`, and has changed without a write.
    pub fn replaced(&mut self, before: &[Cell]) {
        let bitmaps = self.bitmaps.iter_mut();
        bitmaps.for_each(|bitmap| bitmap.replaced(before, &self.cells));
    }

    /// The machine stopped, or the device was dropped without being closed.
    pub fn crashed(&mut self) {
        self.vm_state = None;
        self.cells.iter_mut().for_each(Cell::crash);
    }

    /// Describes the first sector with a content that it may not have.
    pub fn check(&self, found: &[Tag]) -> Result<(), String> {
        if found.len() != self.cells.len() {
            let (is, was) = (found.len(), self.cells.len());
            return Err(format!("the disk has {is:#x} sectors instead of {was:#x}"));
        }
        check_cells(&self.cells, found)
    }

    /// Everything was read while no change was in flight: the disk has this content, also after a
    /// crash if it is `durable`.
    pub fn pin(&mut self, found: &[Tag], durable: bool) {
        for (cell, tag) in self.cells.iter_mut().zip(found) {
            match durable {
                true => cell.fix(*tag),
                false => cell.pin(*tag),
            }
        }
    }
}

/// Describes the first sector with a content that it may not have.
pub fn check_cells(cells: &[Cell], found: &[Tag]) -> Result<(), String> {
    let wrong = |(cell, tag): (&Cell, &Tag)| *tag != UNREADABLE && !cell.may_be(*tag);
    let Some(sector) = cells.iter().zip(found).position(wrong) else {
        return Ok(());
    };
    let count = cells
        .iter()
        .zip(found)
        .filter(|p| wrong((p.0, p.1)))
        .count();
    let may: Vec<_> = cells[sector].now().map(content::name).collect();
    Err(format!(
        "sector {sector:#x} is {} instead of {} ({count} sectors are wrong)",
        content::name(found[sector]),
        may.join(" or ")
    ))
}

/// A sector of a damaged image that could not be read.
pub const UNREADABLE: Tag = UNKNOWN - 1;

/// The reads in flight.
#[derive(Debug, Default)]
pub struct Readings {
    all: Vec<Reading>,
    next: u64,
}

impl Readings {
    /// A read begins. Returns its number.
    pub fn begin(&mut self, model: &Model, range: Range<usize>) -> u64 {
        self.next += 1;
        let cells = &model.cells[range.clone()];
        self.all.push(Reading {
            id: self.next,
            range,
            may_be: cells.iter().map(|cell| cell.now().collect()).collect(),
        });
        self.next
    }

    /// A change has begun, which the reads in flight may see.
    pub fn see(&mut self, range: Range<usize>, tag: Tag) {
        for reading in &mut self.all {
            let from = range.start.max(reading.range.start);
            let to = range.end.min(reading.range.end);
            for sector in from..to {
                reading.may_be[sector - reading.range.start].push(tag);
            }
        }
    }

    /// A read has ended. Returns the contents that each sector may have had.
    pub fn end(&mut self, id: u64) -> Option<Vec<Vec<Tag>>> {
        let place = self.all.iter().position(|reading| reading.id == id)?;
        Some(self.all.swap_remove(place).may_be)
    }
}

/// The content of a new disk.
pub fn zeroes(sectors: usize) -> Vec<Cell> {
    vec![Cell::new(ZERO); sectors]
}
