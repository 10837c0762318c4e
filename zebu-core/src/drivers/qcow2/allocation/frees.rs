//! References that were dropped, on their way to a lowered refcount.
//!
//! A dropped reference goes through these stages, in order:
//! 1. *dropped*: the mapping in memory does not have it any more;
//! 2. *gone*: nor does the disk (`commit.rs`);
//! 3. *waiting*: for the requests that were in flight then (`epoch.rs`);
//! 4. *ready*: the refcount may be lowered, and a free cluster taken.

use std::collections::VecDeque;
use std::sync::Mutex;

use crate::broken::{Rule, is_broken};
use crate::drivers::Epochs;
use crate::lock;

/// References whose refcounts may be lowered, one after the other. Those that are
/// left when it is dropped are ready again.
pub(crate) struct Ready<'a> {
    frees: &'a Frees,
    list: VecDeque<Freed>,
}

impl Ready<'_> {
    /// The next one, or what is left of it.
    pub(crate) fn first(&self) -> Option<Freed> {
        self.list.front().copied()
    }

    /// Removes so many clusters of the first reference.
    pub(crate) fn pass(&mut self, clusters: u64) {
        if let Some(first) = self.list.front_mut() {
            first.first += clusters;
            first.count -= clusters;
            if first.count == 0 {
                self.list.pop_front();
            }
        }
    }
}

impl Drop for Ready<'_> {
    fn drop(&mut self) {
        lock(&self.frees.stages).ready.extend(self.list.drain(..));
    }
}

/// A reference to clusters side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Freed {
    /// Number of the first cluster.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// Whether the file may give up the space of what becomes free.
    pub punch: bool,
    /// Whether an L1 entry referred to an L2 table by it. Only such references end the protection
    /// of a table: in a damaged image a mapping may refer to one as data.
    pub table: bool,
}

impl Freed {
    /// The same, where the file may give up the space.
    pub(crate) fn punched(self) -> Freed {
        Freed {
            punch: true,
            ..self
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Frees {
    stages: Mutex<Stages>,
}

#[derive(Debug, Default)]
struct Stages {
    dropped: Vec<Freed>,
    gone: Vec<Freed>,
    waiting: Vec<Freed>,
    ready: Vec<Freed>,
    /// Clusters in `dropped`.
    count: u64,
}

impl Frees {
    /// The mapping in memory has dropped these. To be called after that.
    pub(crate) fn push(&self, freed: Freed) {
        if is_broken(Rule::GoneBeforeFree) {
            return self.push_ready(freed);
        }
        let mut stages = lock(&self.stages);
        stages.count += freed.count;
        // Discards come in order; what is side by side is one.
        if let Some(last) = stages.dropped.last_mut()
            && last.first + last.count == freed.first
            && (last.punch, last.table) == (freed.punch, freed.table)
        {
            last.count += freed.count;
            return;
        }
        stages.dropped.push(freed);
    }

    /// Nothing ever pointed to these.
    pub(crate) fn push_ready(&self, freed: Freed) {
        lock(&self.stages).ready.push(freed);
    }

    /// What was dropped until now; [`Frees::gone`] or [`Frees::back`] follows.
    pub(crate) fn take_dropped(&self) -> Vec<Freed> {
        let mut stages = lock(&self.stages);
        stages.count = 0;
        std::mem::take(&mut stages.dropped)
    }

    /// They are gone from the disk.
    pub(crate) fn gone(&self, freed: Vec<Freed>) {
        lock(&self.stages).gone.extend(freed);
    }

    /// They could not be written.
    pub(crate) fn back(&self, freed: Vec<Freed>) {
        let mut stages = lock(&self.stages);
        stages.count += freed.iter().map(|f| f.count).sum::<u64>();
        stages.dropped.extend(freed);
    }

    /// Moves on what can move on; one caller at a time.
    pub(crate) fn advance(&self, epochs: &Epochs) {
        let mut stages = lock(&self.stages);
        loop {
            if !stages.waiting.is_empty() {
                if !epochs.elapsed() {
                    return;
                }
                let waiting = std::mem::take(&mut stages.waiting);
                stages.ready.extend(waiting);
            }
            // The last period may have been of a request with nothing to wait
            // for; a new one begins only after it.
            if stages.gone.is_empty() || !epochs.elapsed() {
                return;
            }
            stages.waiting = std::mem::take(&mut stages.gone);
            epochs.begin();
        }
    }

    /// Takes what is ready; what is not passed ([`Ready::pass`]) stays ready.
    pub(crate) fn take_ready(&self) -> Ready<'_> {
        let mut list = std::mem::take(&mut lock(&self.stages).ready);
        list.sort_unstable_by_key(|f| f.first);
        Ready {
            frees: self,
            list: list.into(),
        }
    }

    /// Clusters that wait for a commit.
    pub(crate) fn dropped(&self) -> u64 {
        lock(&self.stages).count
    }

    /// Whether anything is on its way.
    pub(crate) fn is_empty(&self) -> bool {
        let stages = lock(&self.stages);
        [
            &stages.dropped,
            &stages.gone,
            &stages.waiting,
            &stages.ready,
        ]
        .into_iter()
        .all(Vec::is_empty)
    }
}
