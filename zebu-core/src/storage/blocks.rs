//! Range locks for direct I/O: a read-modify-write of blocks excludes other writes to them, which
//! it would undo.
//!
//! `fallocate(2)` and `ftruncate(2)` zero a part of a page through the page cache. A direct write
//! then fails to invalidate that page, and the next flush ends with `EIO`. So these operations get
//! whole pages only.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::task::{Poll, Waker};

/// The writes in flight to one storage.
#[derive(Debug)]
pub struct Blocks {
    state: Mutex<State>,
    page: u64,
}

#[derive(Debug, Default)]
struct State {
    /// Of writes of whole blocks: these may overlap.
    plain: Vec<Range<u64>>,
    /// Of read-modify-writes: nothing may overlap these.
    careful: Vec<Range<u64>>,
    waiting: Vec<Waker>,
}

/// A write in flight.
#[derive(Debug)]
pub struct Written<'a> {
    blocks: &'a Blocks,
    range: Range<u64>,
    careful: bool,
}

impl Blocks {
    /// `page` (a power of two) is the unit that the file system zeroes in new space when
    /// a write bypasses the page cache.
    pub fn new(page: u64) -> Self {
        Blocks {
            state: Mutex::default(),
            page,
        }
    }

    /// Bytes of a page.
    #[doc(hidden)]
    pub fn page(&self) -> u64 {
        self.page
    }

    fn state(&self) -> MutexGuard<'_, State> {
        crate::lock(&self.state)
    }

    /// Begins a write of whole blocks, unless that must wait.
    pub(crate) fn try_plain(&self, range: Range<u64>) -> Option<Written<'_>> {
        self.state().begin(&range, false).then(|| Written {
            blocks: self,
            range,
            careful: false,
        })
    }

    /// Begins a write of whole blocks, when nothing excludes it.
    pub(crate) async fn plain(&self, range: Range<u64>) -> Written<'_> {
        self.begin(range, false).await
    }

    /// Begins a read-modify-write, when nothing excludes it.
    #[doc(hidden)]
    pub async fn careful(&self, range: Range<u64>) -> Written<'_> {
        self.begin(range, true).await
    }

    async fn begin(&self, range: Range<u64>, careful: bool) -> Written<'_> {
        poll_fn(|context| {
            let mut state = self.state();
            if state.begin(&range, careful) {
                return Poll::Ready(());
            }
            if !state.waiting.iter().any(|w| w.will_wake(context.waker())) {
                state.waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
        Written {
            blocks: self,
            range,
            careful,
        }
    }
}

impl State {
    /// Locks the range, unless something excludes that.
    fn begin(&mut self, range: &Range<u64>, careful: bool) -> bool {
        let hit = |list: &[Range<u64>]| list.iter().any(|r| overlap(r, range));
        if hit(&self.careful) || (careful && hit(&self.plain)) {
            return false;
        }
        match careful {
            true => self.careful.push(range.clone()),
            false => self.plain.push(range.clone()),
        }
        true
    }
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        let woken = {
            let mut state = self.blocks.state();
            let list = match self.careful {
                true => &mut state.careful,
                false => &mut state.plain,
            };
            let place = list.iter().position(|r| *r == self.range);
            list.swap_remove(place.expect("in flight until dropped"));
            std::mem::take(&mut state.waiting)
        };
        woken.into_iter().for_each(Waker::wake);
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
