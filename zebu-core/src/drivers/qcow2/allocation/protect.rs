//! The places of the image's own tables, where no data are written, whatever refcounts and mappings
//! claim.
//!
//! The option `overlap-check` chooses the structures against which writes of data are checked.
//! Independently of it, no cluster with a known table is freed or allocated.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::{Error, Result};

/// What L2 tables of the active disk are noted as.
pub(crate) const L2_TABLE: &str = "active L2 table";
/// What the directory of the bitmaps is noted as.
pub(crate) const BITMAP_DIRECTORY: &str = "bitmap directory";

/// The structures, in the order of the bits of [`OverlapChecks`].
const STRUCTURES: [&str; 9] = [
    "qcow2_header",
    "active L1 table",
    L2_TABLE,
    "refcount table",
    "refcount block",
    "snapshot table",
    "inactive L1 table",
    INACTIVE_L2_TABLE,
    BITMAP_DIRECTORY,
];

const INACTIVE_L2_TABLE: &str = "inactive L2 table";

/// The structures of an image that writes of data are checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OverlapChecks(u16);

impl OverlapChecks {
    /// By their names in options, in the order of their bits.
    pub(crate) const NAMES: [&'static str; 9] = [
        "main-header",
        "active-l1",
        "active-l2",
        "refcount-table",
        "refcount-block",
        "snapshot-table",
        "inactive-l1",
        "inactive-l2",
        "bitmap-directory",
    ];
    /// Nothing.
    pub const NONE: OverlapChecks = OverlapChecks(0);
    /// Structures that do not move while the image is open.
    pub const CONSTANT: OverlapChecks = OverlapChecks(0b1_0010_1011);
    /// Structures that are known without reading: the default.
    pub const CACHED: OverlapChecks = OverlapChecks(0b1_0111_1111);
    /// Everything.
    pub const ALL: OverlapChecks = OverlapChecks(0b1_1111_1111);

    /// Whether the structure of this name (`main-header`, `active-l2`, …) is
    /// checked.
    #[must_use]
    pub fn has(self, name: &str) -> bool {
        let bit = Self::NAMES.iter().position(|n| *n == name);
        bit.is_some_and(|bit| self.0 & 1 << bit != 0)
    }

    /// The same with or without the structure of a bit.
    pub(crate) fn with(self, bit: usize, on: bool) -> Self {
        OverlapChecks(self.0 & !(1 << bit) | u16::from(on) << bit)
    }

    /// Whether the L2 tables of snapshots are checked; the snapshots' L1 tables
    /// must be read for that.
    pub(crate) fn has_inactive_l2(self) -> bool {
        self.has_structure(INACTIVE_L2_TABLE)
    }

    fn has_structure(self, what: &str) -> bool {
        let bit = STRUCTURES.iter().position(|s| *s == what);
        bit.is_some_and(|bit| self.0 & 1 << bit != 0)
    }
}

impl Default for OverlapChecks {
    fn default() -> Self {
        Self::CACHED
    }
}

/// The places of an image's tables, by host offset.
#[derive(Debug)]
pub(crate) struct Protected {
    cluster_size: u64,
    checks: OverlapChecks,
    places: RwLock<Places>,
}

#[derive(Debug, Default)]
struct Places {
    /// Header, L1 tables, refcount table and their like.
    fixed: Vec<(Range<u64>, &'static str)>,
    /// L2 tables and refcount blocks, a cluster each.
    tables: BTreeMap<u64, &'static str>,
    /// L2 tables of snapshots, if they are checked.
    inactive: BTreeSet<u64>,
    /// A structure that lies on another one: where, and what is there already.
    flaw: Option<(u64, &'static str)>,
}

impl Places {
    /// The structure that is in a range, if it is not a table.
    fn fixed_at(&self, range: Range<u64>) -> Option<&'static str> {
        self.fixed_in(range).next()
    }

    fn fixed_in(&self, range: Range<u64>) -> impl Iterator<Item = &'static str> {
        let fixed = self.fixed.iter();
        let hits = fixed.filter(move |(r, _)| r.start < range.end && range.start < r.end);
        hits.map(|(_, what)| *what)
    }
}

impl Protected {
    /// Nothing yet.
    pub(crate) fn new(cluster_size: u64, checks: OverlapChecks) -> Self {
        Protected {
            cluster_size,
            checks,
            places: RwLock::default(),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Places> {
        self.places.read().unwrap_or_else(|e| e.into_inner())
    }

    fn write(&self) -> RwLockWriteGuard<'_, Places> {
        self.places.write().unwrap_or_else(|e| e.into_inner())
    }

    /// Sets where a structure of this name is; an earlier place is forgotten.
    pub(crate) fn set(&self, what: &'static str, range: Range<u64>) {
        let mut places = self.write();
        places.fixed.retain(|(_, name)| *name != what);
        places.fixed.push((range, what));
    }

    /// Adds a place of a structure of which there may be several.
    pub(crate) fn add(&self, what: &'static str, range: Range<u64>) {
        self.write().fixed.push((range, what));
    }

    /// The cluster at `offset` is a table from now on.
    pub(crate) fn add_table(&self, offset: u64, what: &'static str) {
        let mut places = self.write();
        let before = places.tables.insert(offset, what);
        let end = offset.saturating_add(self.cluster_size);
        let hit = before.or_else(|| places.fixed_at(offset..end));
        if let Some(other) = hit {
            places.flaw.get_or_insert((offset, other));
        }
    }

    /// Forgets everything but the L2 tables of snapshots.
    pub(crate) fn clear(&self) {
        let mut places = self.write();
        let inactive = std::mem::take(&mut places.inactive);
        *places = Places {
            inactive,
            ..Places::default()
        };
    }

    /// What is checked.
    pub(crate) fn checks(&self) -> OverlapChecks {
        self.checks
    }

    /// Sets where the L2 tables of snapshots are.
    pub(crate) fn set_inactive(&self, tables: BTreeSet<u64>) {
        self.write().inactive = tables;
    }

    /// The error of an image of which one structure lies on another, so that
    /// neither can be written.
    pub(crate) fn flaw(&self) -> Option<Error> {
        let (offset, what) = self.read().flaw?;
        Some(Error::Overlap {
            offset,
            length: self.cluster_size,
            what,
        })
    }

    /// Notes whether structures that were set or added lie on each other.
    pub(crate) fn compare(&self) {
        let mut places = self.write();
        let mut ranges: Vec<_> = places.fixed.clone();
        ranges.retain(|(r, _)| !r.is_empty());
        ranges.sort_by_key(|(r, _)| r.start);
        let mut end = 0;
        let mut last = "";
        for (range, what) in ranges {
            if range.start < end {
                places.flaw.get_or_insert((range.start, last));
            }
            if range.end > end {
                (end, last) = (range.end, what);
            }
        }
    }

    /// The L2 tables of a range are none of the active disk any more.
    pub(crate) fn forget_l2_tables(&self, start: u64, length: u64) {
        let mut places = self.write();
        let range = start..start + length;
        let tables = places.tables.range(range).map(|(at, what)| (*at, *what));
        for (at, what) in tables.collect::<Vec<_>>() {
            if what == L2_TABLE {
                places.tables.remove(&at);
            }
        }
    }

    /// Whether a range may become free. If a structure is there, the refcount is wrong.
    pub(crate) fn may_be_free(&self, range: Range<u64>) -> bool {
        let places = self.read();
        places.fixed_at(range.clone()).is_none() && places.tables.range(range).next().is_none()
    }

    /// Refuses a range that touches a cluster with a table, when the range is
    /// allocated or freed.
    #[inline]
    pub(crate) fn check(&self, offset: u64, length: u64) -> Result<()> {
        self.check_for(offset, length, OverlapChecks::ALL)
    }

    /// Refuses a write of data to a cluster with a structure that is checked.
    #[inline]
    pub(crate) fn check_data(&self, offset: u64, length: u64) -> Result<()> {
        self.check_for(offset, length, self.checks)
    }

    fn check_for(&self, offset: u64, length: u64, checks: OverlapChecks) -> Result<()> {
        let mask = self.cluster_size - 1;
        let start = offset & !mask;
        let end = offset.saturating_add(length).saturating_add(mask) & !mask;
        let places = self.read();
        let mut tables = places.tables.range(start..end).map(|(_, what)| *what);
        let hit = tables
            .find(|what| checks.has_structure(what))
            .or_else(|| {
                let mut fixed = places.fixed_in(start..end);
                fixed.find(|what| checks.has_structure(what))
            })
            .or_else(|| {
                let mut inactive = places.inactive.range(start..end);
                let what = inactive.next().map(|_| INACTIVE_L2_TABLE);
                what.filter(|what| checks.has_structure(what))
            });
        match hit {
            None => Ok(()),
            Some(what) => Err(Error::Overlap {
                offset,
                length,
                what,
            }),
        }
    }

    /// Whether the clusters of a structure that was noted are its own: nothing
    /// else lies there.
    pub(crate) fn is_alone(&self, what: &'static str, range: &Range<u64>) -> bool {
        let places = self.read();
        let end = range.end.checked_next_multiple_of(self.cluster_size);
        let end = end.unwrap_or(u64::MAX);
        let mut hits = places.fixed.iter();
        let others = hits
            .by_ref()
            .filter(|(r, _)| r.start < end && range.start < r.end);
        let mut own = others.map(|(r, name)| *name == what && r == range);
        let alone = own.next() == Some(true) && own.next().is_none();
        alone && places.tables.range(range.start..end).next().is_none()
    }

    /// Whether the cluster at `offset` may be an L2 table: nothing else is known
    /// to be there.
    pub(crate) fn may_be_l2_table(&self, offset: u64) -> bool {
        let places = self.read();
        let end = offset.saturating_add(self.cluster_size);
        let mut fixed = places.fixed.iter();
        !fixed.any(|(r, _)| r.start < end && offset < r.end)
            && places
                .tables
                .get(&offset)
                .is_none_or(|what| *what == L2_TABLE)
    }
}
