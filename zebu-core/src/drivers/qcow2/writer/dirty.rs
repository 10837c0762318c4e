//! The tables that have changed since they were last copied for a commit.

use std::sync::Arc;

use crate::drivers::qcow2::map::table::Slice;
use crate::drivers::sync::{Mutex, MutexGuard};

/// Changed slices, by number, and L1 entries, by index.
pub(crate) type Changed = (Vec<(u64, Arc<Slice>)>, Vec<u64>);

/// What the next commit copies. Setting an entry and listing it is one step for
/// commits: a request that sees an entry may rely on it that a commit that begins from
/// then on has it.
#[derive(Debug, Default)]
pub(crate) struct Dirty(Mutex<Lists>);

#[derive(Debug, Default)]
struct Lists {
    /// Each marked as dirty, so each is here once.
    slices: Vec<(u64, Arc<Slice>)>,
    /// May repeat.
    l1: Vec<u64>,
}

impl Dirty {
    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Notes a slice of which an entry was set just now.
    pub(crate) fn note_slice(&self, number: u64, slice: &Arc<Slice>) {
        // A request that finds it marked continues without the lock: so the mark is set, and
        // taken back, together with its place on the list.
        if slice.is_dirty() {
            return;
        }
        let mut lists = self.lists();
        if slice.set_dirty() {
            lists.slices.push((number, slice.clone()));
        }
    }

    /// Sets an L1 entry and notes it: a request that sees the entry may use the table
    /// and flush.
    pub(crate) fn note_l1(&self, index: u64, set: impl FnOnce()) {
        let mut lists = self.lists();
        set();
        lists.l1.push(index);
    }

    pub(crate) fn slices(&self) -> usize {
        self.lists().slices.len()
    }

    /// Takes the lists. The slices are marked until they are copied, by
    /// [`Slice::clean`]: what is set before that is in the copy.
    pub(crate) fn take(&self) -> Changed {
        let mut lists = self.lists();
        (
            std::mem::take(&mut lists.slices),
            std::mem::take(&mut lists.l1),
        )
    }

    /// Puts back what was taken, and copied, and is not written.
    pub(crate) fn put_back(&self, (slices, mut l1): Changed) {
        let mut lists = self.lists();
        lists.l1.append(&mut l1);
        for (number, slice) in slices {
            if slice.set_dirty() {
                lists.slices.push((number, slice));
            }
        }
    }
}
