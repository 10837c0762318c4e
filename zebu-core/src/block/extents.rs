//! The disk as a stream of extents.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;

use super::{Device, Status};
use crate::Result;
use crate::storage::Queue;

/// An extent, and the first part of the one behind it, if that was looked up.
type Found = Result<((u64, Status), Option<Status>)>;

/// The extents of a range of a disk in ascending order ([`Device::extents`]): the offset of each,
/// and what it is made of.
///
/// Neighbours that are alike are one extent. An error ends the stream.
pub struct Extents<'a> {
    device: &'a Device,
    queue: &'a Queue,
    /// What was not returned yet.
    range: Range<u64>,
    /// The status at the start of the range, if it is known.
    first: Option<Status>,
    search: Option<Pin<Box<dyn Future<Output = Found> + 'a>>>,
}

impl Device {
    /// What `range` of the disk is made of, as a stream.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use zebu::{Device, Format, Memory, OpenOptions, Queue};
    /// # let queue = Queue::new(Default::default())?;
    /// # let options = OpenOptions::default().format(Some(Format::RAW));
    /// # let storage = Arc::new(Memory::new(vec![7; 1 << 20]));
    /// # let device = Device::from_storage(&queue, storage, &options)?;
    /// # queue.block_on(async {
    /// let mut extents = device.extents(&queue, 0..device.size());
    /// while let Some(extent) = extents.next().await {
    ///     let (offset, status) = extent?;
    ///     println!("{} bytes at {offset}: data: {}", status.length, status.data);
    /// }
    /// # Ok::<(), zebu::Error>(()) })?;
    /// # Ok::<(), zebu::Error>(())
    /// ```
    pub fn extents<'a>(&'a self, queue: &'a Queue, range: Range<u64>) -> Extents<'a> {
        Extents {
            device: self,
            queue,
            range,
            first: None,
            search: None,
        }
    }
}

impl Extents<'_> {
    /// The next extent, for callers without the adapters of a futures library. None at the end
    /// of the range and after an error.
    pub async fn next(&mut self) -> Option<Result<(u64, Status)>> {
        std::future::poll_fn(|context| Pin::new(&mut *self).poll_next(context)).await
    }
}

impl Stream for Extents<'_> {
    type Item = Result<(u64, Status)>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.search.is_none() && self.range.is_empty() {
            return Poll::Ready(None);
        }
        let (device, queue) = (self.device, self.queue);
        let (range, first) = (self.range.clone(), self.first);
        let search = self
            .search
            .get_or_insert_with(|| Box::pin(search(device, queue, range, first)));
        let found = ready!(search.as_mut().poll(context));
        self.search = None;
        match found {
            Ok(((offset, status), next)) => {
                self.range.start = offset + status.length;
                self.first = next;
                Poll::Ready(Some(Ok((offset, status))))
            }
            Err(e) => {
                self.range.start = self.range.end;
                Poll::Ready(Some(Err(e)))
            }
        }
    }
}

impl std::fmt::Debug for Extents<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Extents")
            .field("range", &self.range)
            .finish_non_exhaustive()
    }
}

/// Looks for the end of the extent at the start of `range`, which has at least a byte.
async fn search(device: &Device, queue: &Queue, range: Range<u64>, first: Option<Status>) -> Found {
    let mut extent = match first {
        Some(first) => first,
        None => {
            let length = range.end - range.start;
            device.status(queue, range.start, length).await?
        }
    };
    loop {
        let end = range.start + extent.length;
        if end == range.end {
            return Ok(((range.start, extent), None));
        }
        match device.status(queue, end, range.end - end).await {
            Ok(next) if extent.continues_with(&next) => extent.length += next.length,
            Ok(next) => return Ok(((range.start, extent), Some(next))),
            // What was found is returned first. The next search meets the error again.
            Err(_) => return Ok(((range.start, extent), None)),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against extents that overlap, leave gaps, or are cut in two.
    use std::sync::Arc;

    use super::*;
    use crate::jobs::{CreateQcow2, create_qcow2};
    use crate::storage::{Memory, QueueOptions};
    use crate::{ErrorKind, OpenOptions};

    const CLUSTER: u64 = 64 << 10;

    fn device(queue: &Queue) -> Device {
        let storage = Arc::new(Memory::new(Vec::new()));
        let create = CreateQcow2 {
            size: 64 * CLUSTER,
            ..CreateQcow2::default()
        };
        queue
            .block_on(create_qcow2(queue, &*storage, None, &create, |_| {}))
            .unwrap();
        let options = OpenOptions {
            write: true,
            ..OpenOptions::default()
        };
        Device::from_storage(queue, storage, &options).unwrap()
    }

    async fn all(device: &Device, queue: &Queue, range: Range<u64>) -> Vec<(u64, u64, bool)> {
        let mut extents = device.extents(queue, range);
        let mut all = Vec::new();
        while let Some(extent) = extents.next().await {
            let (offset, status) = extent.unwrap();
            all.push((offset, status.length, status.data));
        }
        all
    }

    #[test]
    fn equal_neighbours_are_joined() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let device = device(&queue);
        for cluster in [3, 4, 5, 40] {
            let bytes = vec![1; CLUSTER as usize];
            device
                .write_blocking(&queue, cluster * CLUSTER, &bytes)
                .unwrap();
        }
        let found = queue.block_on(all(&device, &queue, 0..device.size()));
        let expected = [
            (0, 3, false),
            (3, 3, true),
            (6, 34, false),
            (40, 1, true),
            (41, 23, false),
        ];
        let expected = expected.map(|(at, n, data)| (at * CLUSTER, n * CLUSTER, data));
        assert_eq!(found, expected);
        let part = queue.block_on(all(&device, &queue, 4 * CLUSTER + 512..6 * CLUSTER + 1));
        let length = 2 * CLUSTER - 512;
        assert_eq!(
            part,
            [(4 * CLUSTER + 512, length, true), (6 * CLUSTER, 1, false)]
        );
        assert!(queue.block_on(all(&device, &queue, 7..7)).is_empty());
    }

    #[test]
    fn an_error_ends_the_stream() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let device = device(&queue);
        let end = device.size() + 1;
        queue.block_on(async {
            let mut extents = device.extents(&queue, 0..end);
            let error = extents.next().await.unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfRange);
            assert!(extents.next().await.is_none());
        });
    }
}
