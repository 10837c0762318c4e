//! `throttle`: requests wait, so that all nodes of a group keep to its limits.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::limits::ThrottleGroup;
use super::{Content, Filter, FilterDriver, Over};
use crate::Result;
use crate::drivers::{Changing, Clear};
use crate::storage::{Iov, Queue, connect};

pub(super) const DRIVER: FilterDriver = FilterDriver {
    name: "throttle",
    shown: &["throttle-group"],
    open: |open| {
        let id = open.options.take_text("throttle-group");
        let id = id.ok_or("Please specify a throttle group")?;
        let group = open.groups.get(&id);
        let group = group.ok_or_else(|| format!("Throttle group '{id}' does not exist"))?;
        Ok(Arc::new(Throttle(group.clone())))
    },
};

#[derive(Debug)]
struct Throttle(ThrottleGroup);

impl Throttle {
    /// Waits until a request may begin.
    async fn pass(&self, queue: &Queue, is_write: bool, bytes: u64) -> Result<()> {
        let (wait, taken) = self.0.take(is_write, bytes);
        if wait > Duration::ZERO && queue.sleep(wait).await.is_err() {
            // No descriptor is free.
            let sleep = move || {
                std::thread::sleep(wait);
                Ok(())
            };
            connect::on_thread("throttle", sleep).await?;
        }
        taken.keep();
        Ok(())
    }
}

impl Filter for Throttle {
    fn content(&self) -> Content<'_> {
        Content::Kept
    }

    fn read<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move {
            self.pass(over.queue, false, iov.len() as u64).await?;
            over.below.read(over.queue, offset, iov).await
        })
    }

    fn write<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move {
            self.pass(over.queue, true, iov.len() as u64).await?;
            over.below.write(over.queue, offset, iov).await
        })
    }

    fn write_compressed<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move {
            self.pass(over.queue, true, iov.len() as u64).await?;
            let below = over.below;
            below.write_compressed(over.queue, offset, iov).await
        })
    }

    fn write_packed<'a>(
        &'a self,
        over: Over<'a>,
        clusters: &'a [(u64, Range<usize>)],
        data: &'a [u8],
    ) -> Changing<'a> {
        Box::pin(async move {
            // Their length when they are unpacked is not known here to be whole.
            let size = over.below.cluster_size().unwrap_or(1);
            let bytes = clusters.len() as u64 * size;
            self.pass(over.queue, true, bytes).await?;
            let below = over.below;
            below.write_packed(over.queue, clusters, data).await
        })
    }

    fn clear<'a>(&'a self, over: Over<'a>, range: Range<u64>, how: Clear) -> Changing<'a> {
        Box::pin(async move {
            self.pass(over.queue, true, range.end - range.start).await?;
            over.below.clear(over.queue, range, how).await
        })
    }
}
