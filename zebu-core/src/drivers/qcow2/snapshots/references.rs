//! What an L1 table refers to, in an order that is always the same.

use super::super::Image;
use super::super::allocation::frees::Freed;
use super::super::map::table::L1Table;
use crate::drivers::qcow2::structures::{ClusterKind, L2Entry};
use crate::storage::{Ahead, Queue};
use crate::{Error, Result};

/// One L2 table.
pub(super) struct Table<'a> {
    /// Its place in the L1 table.
    pub index: u64,
    /// Where it is in the file.
    pub host: u64,
    /// Its content.
    pub bytes: &'a [u8],
}

/// L2 tables one after another, several being read at once.
pub(super) struct Tables<'a> {
    /// Place in the L1 table and in the file of those still to come.
    places: Box<dyn Iterator<Item = (u64, u64)> + 'a>,
    ahead: Ahead<Box<dyn Iterator<Item = u64> + 'a>>,
}

impl Tables<'_> {
    /// The next one.
    pub(super) async fn next(&mut self) -> Result<Option<Table<'_>>> {
        let Some(bytes) = self.ahead.next().await? else {
            return Ok(None);
        };
        let place = self.places.next();
        Ok(place.map(|(index, host)| Table { index, host, bytes }))
    }
}

/// References one after another: those of each L2 table, then the one to it.
pub(super) struct References<'a> {
    image: &'a Image,
    tables: Tables<'a>,
    of_table: std::vec::IntoIter<Freed>,
    punch: bool,
}

impl References<'_> {
    /// The next one.
    pub(super) async fn next(&mut self) -> Result<Option<Freed>> {
        loop {
            if let Some(reference) = self.of_table.next() {
                return Ok(Some(reference));
            }
            let Some(table) = self.tables.next().await? else {
                return Ok(None);
            };
            let all = self.image.references_in(&table, self.punch)?;
            self.of_table = all.into_iter();
        }
    }
}

impl Image {
    /// Refuses an L1 table with an entry that refers to no L2 table or to another structure. Also
    /// one in which two entries refer to the same table, if one of them has the copied flag or is
    /// from `alone` on.
    pub(in crate::drivers::qcow2) fn check_l1(&self, l1: &L1Table, alone: u64) -> Result<()> {
        let protected = &self.writer()?.protected;
        let wrong = |index: u64, what: String| Error::Corrupt {
            guest: index.saturating_mul(self.geometry.l2_coverage()),
            what,
        };
        let mut tables = Vec::new();
        for index in 0..l1.len() as u64 {
            let entry = l1.get(index).without_reserved();
            let table = entry.l2_table(&self.geometry);
            let Some(table) = table.map_err(|e| wrong(index, e.to_string()))? else {
                continue;
            };
            if self.is_past_end(table.0)? {
                let what = format!("L2 table offset {:#x} is past the end of the file", table.0);
                return Err(wrong(index, what));
            }
            if !protected.may_be_l2_table(table.0) {
                let what = format!("L2 table offset {:#x} is in another table", table.0);
                return Err(wrong(index, what));
            }
            tables.push((table.0, index));
        }
        tables.sort_unstable();
        let shall_be_alone = |index| index >= alone || l1.get(index).copied();
        let mut pairs = tables.windows(2);
        match pairs.find(|pair| {
            pair[0].0 == pair[1].0 && pair.iter().any(|(_, index)| shall_be_alone(*index))
        }) {
            None => Ok(()),
            Some(pair) => {
                let what = format!("L2 table offset {:#x} occurs twice", pair[0].0);
                Err(wrong(pair[1].1, what))
            }
        }
    }

    /// Place in an L1 table and in the file of its L2 tables.
    pub(super) fn table_places(l1: &L1Table) -> impl Iterator<Item = (u64, u64)> + Clone {
        let places = (0..l1.len() as u64).map(|index| (index, l1.get(index).raw_offset().0));
        places.filter(|(_, host)| *host != 0)
    }

    /// Reads the L2 tables at these places, which were checked.
    pub(super) fn tables<'a>(
        &'a self,
        queue: &Queue,
        places: impl Iterator<Item = (u64, u64)> + Clone + 'a,
    ) -> Tables<'a> {
        let size = self.geometry.cluster_size() as usize;
        let hosts: Box<dyn Iterator<Item = u64> + 'a> =
            Box::new(places.clone().map(|(_, host)| host));
        Tables {
            places: Box::new(places),
            ahead: Ahead::new(queue, &self.file, hosts, size),
        }
    }

    /// Everything that an L1 table refers to, which [`Image::check_l1`] has
    /// passed; `punch` is what they shall have.
    pub(super) fn references<'a>(
        &'a self,
        queue: &Queue,
        l1: &'a L1Table,
        punch: bool,
    ) -> References<'a> {
        References {
            image: self,
            tables: self.tables(queue, Self::table_places(l1)),
            of_table: Vec::new().into_iter(),
            punch,
        }
    }

    /// What one L2 table refers to, and the table itself last. Clusters side by
    /// side are together.
    fn references_in(&self, table: &Table<'_>, punch: bool) -> Result<Vec<Freed>> {
        let mut all: Vec<Freed> = Vec::new();
        for index in 0..self.geometry.l2_entries() {
            let entry = L2Entry::read(table.bytes, index, &self.geometry).unwrap_or_default();
            let entry = entry.without_reserved(&self.geometry);
            let guest = self.geometry.guest_offset(table.index, index);
            // (Of an unallocated cluster too: the entry must make sense.)
            if self.kind(entry, guest.map_or(u64::MAX, |g| g.0))? == ClusterKind::Unallocated {
                continue;
            }
            let Some(reference) = self.referred(entry, punch) else {
                continue;
            };
            match all.last_mut() {
                Some(last) if last.first + last.count == reference.first => {
                    last.count += reference.count;
                }
                _ => all.push(reference),
            }
        }
        all.push(self.reference(table.host, self.geometry.cluster_size(), punch));
        Ok(all)
    }
}
