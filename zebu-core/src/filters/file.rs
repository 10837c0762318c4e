//! A filter over a file.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::code::write_zeroes;
use super::{Filter, Over};
use crate::drivers::{Below, BoxFuture, Changing, Clear, Gate, Pass};
use crate::storage::{
    self, Alignment, Blkdebug, Blocks, FileStamp, Iov, OpKind, Properties, Queue, Started, Storage,
};
use crate::{Error, Result};

/// A file with a filter over it.
#[derive(Debug)]
pub struct FilteredFile {
    filter: Arc<dyn Filter>,
    file: File,
    properties: Properties,
    /// One request at a time makes a file longer whose filter changes bytes.
    growth: Arc<Gate>,
    /// What is left out of a new part of the file reads as zeroes.
    fills_gaps: bool,
    /// Of a filter with a unit.
    blocks: Option<Blocks>,
}

impl FilteredFile {
    /// `filter` over `file`.
    pub fn new(filter: Arc<dyn Filter>, file: Arc<dyn Storage>) -> Self {
        Self::of(filter, file, true)
    }

    /// The same for an image that knows which parts of its file have data: nothing is written that was not
    /// asked for, and what is left out of a new part of the file is not defined.
    pub fn with_gaps(filter: Arc<dyn Filter>, file: Arc<dyn Storage>) -> Self {
        Self::of(filter, file, false)
    }

    fn of(filter: Arc<dyn Filter>, file: Arc<dyn Storage>, fills_gaps: bool) -> Self {
        FilteredFile {
            fills_gaps,
            properties: Properties {
                // The file below has its own, which are kept there.
                alignment: Alignment {
                    offset: filter.content().unit(),
                    ..Alignment::NONE
                },
                // Requests may wait for those of other queues.
                is_stacked: true,
                is_coded: file.properties().is_coded || !filter.content().is_kept(),
                ..file.properties().clone()
            },
            blocks: match filter.content().unit() {
                1 => None,
                unit => Some(Blocks::new(unit as u64)),
            },
            filter,
            file: File(file),
            growth: Arc::default(),
        }
    }
}

/// What a filter over a file lies on.
#[derive(Clone, Debug)]
struct File(Arc<dyn Storage>);

impl Below for File {
    fn size(&self) -> u64 {
        self.0.len().unwrap_or(0)
    }

    fn read<'a>(&'a self, queue: &'a Queue, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move { Ok(storage::read(&*self.0, queue, offset, iov).await?) })
    }

    fn is_zero<'a>(&'a self, queue: &'a Queue, range: Range<u64>) -> BoxFuture<'a, Result<bool>> {
        Box::pin(async move {
            let mut at = range.start;
            while at < range.end {
                match storage::extent(&*self.0, queue, at).await? {
                    found if found.length == 0 => break,
                    found if found.zero => at += found.length,
                    _ => return Ok(false),
                }
            }
            Ok(true)
        })
    }

    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move { Ok(storage::write(&*self.0, queue, offset, iov).await?) })
    }

    fn clear<'a>(&'a self, queue: &'a Queue, range: Range<u64>, how: Clear) -> Changing<'a> {
        Box::pin(async move {
            let (file, at, length) = (&*self.0, range.start, range.end - range.start);
            match how {
                Clear::Zero => storage::zero_range(file, queue, at, length).await?,
                Clear::Unmap => storage::punch_hole(file, queue, at, length).await?,
                Clear::Quickly => storage::zero_quickly(file, queue, at, length).await?,
                Clear::Discard => storage::discard(file, queue, at, length).await?,
            }
            Ok(())
        })
    }

    fn flush<'a>(&'a self, queue: &'a Queue) -> Changing<'a> {
        Box::pin(async move { Ok(storage::flush(&*self.0, queue).await?) })
    }

    fn set_len<'a>(&'a self, queue: &'a Queue, length: u64) -> Changing<'a> {
        Box::pin(async move { Ok(storage::set_len(&*self.0, queue, length).await?) })
    }

    fn allocate<'a>(&'a self, queue: &'a Queue, range: Range<u64>) -> Changing<'a> {
        let (at, length) = (range.start, range.end - range.start);
        Box::pin(async move { Ok(storage::allocate(&*self.0, queue, at, length).await?) })
    }
}

/// Before a request that may make the file longer: what it leaves out of the new part must read as zeroes
/// above, for which nothing below serves if bytes are changed. The guard is kept until the request has ended.
async fn grow<'a>(
    filter: &dyn Filter,
    over: Over<'_>,
    growth: &'a Gate,
    kind: OpKind,
    range: &Range<u64>,
) -> Result<Option<Pass<'a>>> {
    let content = filter.content();
    let zeroed = match kind {
        OpKind::Write | OpKind::WriteDurable => range.start,
        OpKind::SetLength | OpKind::Allocate => range.end,
        _ => return Ok(None),
    };
    let length = || filter.length(over.below.size());
    if content.is_kept() || range.end <= length() {
        return Ok(None);
    }
    let pass = growth.enter().await;
    let unit = content.unit() as u64;
    let [start, end] = [length(), zeroed].map(|at| at.next_multiple_of(unit));
    write_zeroes(filter, over, start..end).await?;
    Ok(Some(pass))
}

async fn perform(
    filter: &dyn Filter,
    file: &File,
    growth: Option<&Gate>,
    queue: &Queue,
    kind: OpKind,
    range: Range<u64>,
    iov: Option<Iov>,
) -> Result<usize> {
    let over = Over { queue, below: file };
    let offset = range.start;
    let _pass = match growth {
        Some(growth) => grow(filter, over, growth, kind, &range).await?,
        None => None,
    };
    match (kind, iov) {
        (OpKind::Extent, Some(iov)) => {
            let mut found = storage::extent(&*file.0, queue, offset).await?;
            if !filter.content().is_kept() {
                found.zero = false;
                found.allocated = true;
            }
            return Ok(found.put(&iov));
        }
        (OpKind::Read, Some(iov)) => {
            let length = filter.length(file.0.len()?).saturating_sub(offset);
            let iov = iov.slice(0, (iov.len() as u64).min(length) as usize);
            if !iov.is_empty() {
                filter.read(over, offset, &iov).await?;
            }
            return Ok(iov.len());
        }
        (_, Some(iov)) => {
            if !iov.is_empty() {
                filter.write(over, offset, &iov).await?;
            }
            if kind == OpKind::WriteDurable {
                filter.flush(over).await?;
            }
            return Ok(iov.len());
        }
        (OpKind::Flush, None) => filter.flush(over).await?,
        (OpKind::SetLength, None) => filter.set_len(over, range.end).await?,
        (_, None) if range.is_empty() => {}
        (OpKind::Allocate, None) => filter.allocate(over, range).await?,
        (OpKind::PunchHole, None) => filter.clear(over, range, Clear::Unmap).await?,
        (OpKind::Discard, None) => match filter.clear(over, range, Clear::Discard).await {
            // What it reads as is not defined then.
            Err(e) if e.errno() == libc::EOPNOTSUPP && file.0.is_remote() => {}
            done => done?,
        },
        (OpKind::ZeroQuickly, None) => filter.clear(over, range, Clear::Quickly).await?,
        (_, None) => filter.clear(over, range, Clear::Zero).await?,
    }
    Ok(0)
}

fn io_error(error: Error) -> io::Error {
    match error {
        Error::Io(error) => error,
        error => io::Error::other(error),
    }
}

// SAFETY: the future holds what it uses, and the memory is used by requests of it, each of which is
// awaited, or dropped with it.
#[allow(unsafe_code)]
unsafe impl Storage for FilteredFile {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        let (filter, file) = (self.filter.clone(), self.file.clone());
        let growth = self.growth.clone();
        let (queue, iov) = (queue.for_image_below(), memory.cloned());
        let range = offset..offset.saturating_add(length);
        let is_longer = self.fills_gaps && range.end > filter.length(file.size());
        let growth = self.fills_gaps.then_some(growth);
        let work = async move |queue: Queue| {
            let done = perform(&*filter, &file, growth.as_deref(), &queue, kind, range, iov);
            done.await.map_err(io_error)
        };
        match kind {
            OpKind::SetLength if self.fills_gaps => {}
            OpKind::Write | OpKind::WriteDurable | OpKind::Allocate if is_longer => {}
            _ => return Started::later(async move { work(queue).await }),
        }
        // Others wait for it: a task goes on if its request is not polled any more.
        Started::later(async move { queue.begin(work).await })
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn blocks(&self) -> Option<&Blocks> {
        self.blocks.as_ref()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.filter.length(self.file.0.len()?))
    }

    fn allocated(&self) -> io::Result<u64> {
        self.file.0.allocated()
    }

    fn stamp(&self) -> Option<io::Result<FileStamp>> {
        self.file.0.stamp()
    }

    fn set_modified(&self, seconds: u32) -> io::Result<()> {
        self.file.0.set_modified(seconds)
    }

    fn below(&self) -> Option<&dyn Storage> {
        Some(&*self.file.0)
    }

    fn blkdebug(&self) -> Option<&Blkdebug> {
        self.file.0.blkdebug()
    }

    fn end<'a>(&'a self, queue: &'a Queue) -> BoxFuture<'a, io::Result<()>> {
        let below = &self.file;
        let closing = self.filter.close(Over { queue, below });
        Box::pin(async move { closing.await.map_err(io_error) })
    }
}
