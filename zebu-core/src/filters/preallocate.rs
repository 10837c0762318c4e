//! `preallocate`: a file that is written behind its end grows by large steps. What is not used in the
//! end is cut off when it is closed.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::{Content, Filter, FilterDriver, Over};
use crate::drivers::{Changing, Gate};
use crate::storage::Iov;

pub(super) const DRIVER: FilterDriver = FilterDriver {
    name: "preallocate",
    shown: &[],
    open: |open| {
        let align = open.options.take_size("prealloc-align")?.unwrap_or(1 << 20);
        let step = open.options.take_size("prealloc-size")?.unwrap_or(128 << 20);
        if !align.is_multiple_of(512) {
            let name = "prealloc-align parameter of preallocate filter";
            return Err(format!("{name} is not aligned to 512"));
        }
        Ok(Arc::new(Preallocate {
            align: align.max(512),
            step,
            write: open.write,
            end: OnceLock::new(),
            growth: Gate::default(),
        }))
    },
};

#[derive(Debug)]
struct Preallocate {
    align: u64,
    /// How much more is allocated than is needed.
    step: u64,
    write: bool,
    /// The length of the file as it is seen from above, as soon as that may differ from the one below.
    end: OnceLock<AtomicU64>,
    /// One request allocates at a time, and the length is set by one.
    growth: Gate,
}

impl Preallocate {
    fn end(&self, over: Over<'_>) -> &AtomicU64 {
        self.end.get_or_init(|| over.below.size().into())
    }

    /// Allocates up to behind `end`, if the file ends before. It is a hint: if it fails, what needs the
    /// space will tell.
    async fn grow(&self, over: Over<'_>, end: u64) {
        let _pass = self.growth.enter().await;
        let length = over.below.size();
        if end > length {
            let to = end.saturating_add(self.step).checked_next_multiple_of(self.align);
            let to = to.filter(|to| i64::try_from(*to).is_ok()).unwrap_or(end);
            let range = length..to;
            drop(over.below.allocate(over.queue, range).await);
        }
    }

    /// Before a request that may reach to `end`. The end is raised before anything is written, so that
    /// what a dropped request has written is not cut off below what it was written for.
    async fn reach(&self, over: Over<'_>, end: u64) {
        let own = self.end(over);
        if end > own.load(Ordering::SeqCst) {
            self.grow(over, end).await;
            own.fetch_max(end, Ordering::SeqCst);
        }
    }
}

impl Filter for Preallocate {
    fn content(&self) -> Content<'_> {
        Content::Kept
    }

    fn passes_compressed(&self) -> bool {
        false
    }

    fn length(&self, below: u64) -> u64 {
        self.end.get().map_or(below, |end| end.load(Ordering::SeqCst))
    }

    fn write<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move {
            self.reach(over, offset + iov.len() as u64).await;
            over.below.write(over.queue, offset, iov).await
        })
    }

    fn allocate<'a>(&'a self, over: Over<'a>, range: Range<u64>) -> Changing<'a> {
        Box::pin(async move {
            self.reach(over, range.end).await;
            over.below.allocate(over.queue, range).await
        })
    }

    fn set_len<'a>(&'a self, over: Over<'a>, length: u64) -> Changing<'a> {
        Box::pin(async move {
            let end = self.end(over);
            let old = end.load(Ordering::SeqCst);
            if length > old {
                self.grow(over, length).await;
            }
            let _pass = self.growth.enter().await;
            if length < old {
                end.store(length, Ordering::SeqCst);
                return over.below.set_len(over.queue, length).await;
            }
            if over.below.size() < length {
                over.below.set_len(over.queue, length).await?;
            }
            end.fetch_max(length, Ordering::SeqCst);
            Ok(())
        })
    }

    fn close<'a>(&'a self, over: Over<'a>) -> Changing<'a> {
        Box::pin(async move {
            let Some(end) = self.end.get() else {
                return Ok(());
            };
            let end = end.load(Ordering::SeqCst);
            match self.write && over.below.size() > end {
                true => over.below.set_len(over.queue, end).await,
                false => Ok(()),
            }
        })
    }
}
