//! The contents that the disk, its snapshots and its bitmaps may have, by sector (`cell`).

use std::ops::Range;

use crate::bitmaps::Bitmap;
use crate::cell::{Cell, Time, UNREADABLE};
use crate::content::{self, Tag, ZERO};

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
            cell.begin(tag, now);
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
