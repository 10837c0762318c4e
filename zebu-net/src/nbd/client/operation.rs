//! The requests that the operations of a storage make.
#![allow(unsafe_code)]

use std::future::{Future, poll_fn};
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use super::NbdError;
use super::connections::Client;
use super::link::{Link, Step};
use super::slots::{Memory, Outcome, SlotId};
use super::wire::Socket;
use crate::dropped::DroppedChange;
use crate::nbd::protocol::{Command, Request, command, transmission};
use crate::storage::{Iov, OpKind, Queue, Started, StorageExtent};

/// Bytes at most of a request without payload: a multiple of any block size, and below 4 GiB.
const MOST: u64 = 1 << 30;
/// Bytes at most of a request for all extents of a range.
const MOST_STATUS: u64 = 1 << 31;

/// A request. After its drop, the caller's memory is not used.
struct Waiting {
    client: Arc<Client>,
    link: Arc<Link>,
    queue: Queue,
    range: Range<u64>,
    stage: Stage,
}

enum Stage {
    /// It waits for the end of changes that were dropped.
    Held(Request, Option<Memory>),
    InFlight(SlotId),
    Ended,
}

impl Waiting {
    /// Submits the request, unless that was done.
    fn submit(&mut self) -> Result<(), NbdError> {
        if let Stage::Held(request, memory) = std::mem::replace(&mut self.stage, Stage::Ended) {
            let (id, first) = self.link.submit(self.queue.number(), request, memory)?;
            self.stage = Stage::InFlight(id);
            if first {
                begin_driving(&self.link, &self.queue);
            }
        }
        Ok(())
    }

    async fn outcome(mut self) -> Outcome {
        if matches!(self.stage, Stage::Held(..)) {
            self.client.dropped().wait(&self.range).await;
            self.submit()?;
        }
        let Stage::InFlight(id) = self.stage else {
            unreachable!("it was submitted");
        };
        let outcome = poll_fn(|context| self.link.poll(id, context)).await;
        self.stage = Stage::Ended;
        outcome
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Stage::InFlight(id) = self.stage else {
            return;
        };
        if self.link.abandon(self.queue.number(), id) {
            let end = ChangeEnd {
                link: self.link.clone(),
                queue: self.queue.number(),
                id,
                ended: false,
                _change: self.client.dropped().add(self.range.clone()),
            };
            if self.link.needs_driver(self.queue.number()) {
                begin_driving(&self.link, &self.queue);
            }
            self.queue.detach_unbroken(|_| end.wait());
        }
    }
}

/// A change whose request was dropped, until its end.
struct ChangeEnd {
    link: Arc<Link>,
    queue: u64,
    id: SlotId,
    ended: bool,
    _change: DroppedChange,
}

impl ChangeEnd {
    async fn wait(mut self) {
        // The request was dropped, so no caller needs the outcome.
        let _ = poll_fn(|context| self.link.poll(self.id, context)).await;
        self.ended = true;
    }
}

impl Drop for ChangeEnd {
    fn drop(&mut self) {
        if !self.ended {
            self.link.abandon(self.queue, self.id);
        }
    }
}

/// The task of a queue that sends and receives.
struct Driving {
    link: Arc<Link>,
    queue: Queue,
    /// The link has removed the task.
    ended: bool,
}

impl Drop for Driving {
    fn drop(&mut self) {
        if !self.ended {
            self.link.end_driver(self.queue.number());
        }
    }
}

impl Driving {
    /// Sends and receives until no request of the queue is left.
    async fn run(mut self) {
        let number = self.queue.number();
        while let Some((socket, blocked)) = self.next().await {
            // On this socket; a reconnect makes another one.
            let mut waited = None;
            let mut writable = blocked.then(|| self.queue.writable(&*socket));
            let ends = poll_fn(|context| {
                loop {
                    let mut arrived = false;
                    let readable = waited.get_or_insert_with(|| self.queue.readable(&*socket));
                    if Pin::new(readable).poll(context).is_ready() {
                        // Also after an error, which receiving reports.
                        waited = None;
                        arrived = true;
                    }
                    if let Some(ready) = &mut writable
                        && Pin::new(ready).poll(context).is_ready()
                    {
                        writable = None;
                    }
                    match self.link.drive(number, arrived, context) {
                        Step::End => return Poll::Ready(true),
                        Step::Wait(now, blocked) if Arc::ptr_eq(&now, &socket) => {
                            if !blocked {
                                writable = None;
                            } else if writable.is_none() {
                                writable = Some(self.queue.writable(&*socket));
                                continue;
                            }
                            if waited.is_none() {
                                continue;
                            }
                            return Poll::Pending;
                        }
                        // The socket has changed, or there is none.
                        _ => return Poll::Ready(false),
                    }
                }
            })
            .await;
            if ends {
                break;
            }
        }
        self.ended = true;
    }

    /// The socket to wait for, and whether until it is writable, too; None: the task ends.
    async fn next(&self) -> Option<(Arc<Socket>, bool)> {
        let number = self.queue.number();
        poll_fn(|context| match self.link.drive(number, false, context) {
            Step::End => Poll::Ready(None),
            Step::Rest => Poll::Pending,
            Step::Wait(socket, blocked) => Poll::Ready(Some((socket, blocked))),
        })
        .await
    }
}

/// Begins a task that sends and receives for a queue.
fn begin_driving(link: &Arc<Link>, queue: &Queue) {
    let link = link.clone();
    drop(queue.detach(|queue| {
        let driving = Driving {
            link,
            queue,
            ended: false,
        };
        driving.run()
    }));
}

/// Makes a request.
fn submit(
    client: &Arc<Client>,
    queue: &Queue,
    request: Request,
    memory: Option<Memory>,
) -> Result<Waiting, NbdError> {
    let range = match request.command {
        Command::Flush => 0..u64::MAX,
        _ => request.offset..request.offset + request.length,
    };
    let mut waiting = Waiting {
        client: client.clone(),
        link: client.link(queue.number()).clone(),
        queue: queue.for_itself(),
        range,
        stage: Stage::Held(request, memory),
    };
    if client.dropped().allow(&waiting.range) {
        waiting.submit()?;
    }
    Ok(waiting)
}

fn request(command: Command, flags: u16, offset: u64, length: u64) -> Request {
    Request {
        command,
        flags,
        cookie: 0,
        offset,
        length,
    }
}

/// See [`Storage::start`](crate::storage::Storage::start).
///
/// # Safety
/// The memory is valid until the result was awaited or dropped.
pub(super) unsafe fn start(
    client: &Arc<Client>,
    queue: &Queue,
    kind: OpKind,
    offset: u64,
    length: u64,
    memory: Option<&Iov>,
) -> Started {
    let started = match (kind, memory) {
        // SAFETY: passed on.
        (OpKind::Read, Some(iov)) => unsafe { read(client, queue, offset, iov) },
        (OpKind::Write | OpKind::WriteDurable, Some(iov)) => {
            let durable = kind == OpKind::WriteDurable;
            // SAFETY: as above.
            unsafe { write(client, queue, durable, offset, iov) }
        }
        (OpKind::Flush, _) => flush(client, queue),
        (OpKind::SetLength, _) => Ok(Started::fixed_length(
            client.size(),
            length,
            "Cannot grow NBD nodes",
        )),
        // SAFETY: as above.
        (OpKind::Extent, Some(iov)) => unsafe { extent(client, queue, offset, iov) },
        (OpKind::Allocate, _) => allocate(client, offset, length),
        _ => range(client, queue, kind, offset, length),
    };
    started.unwrap_or_else(|e| Started::done(Err(e)))
}

/// # Safety
/// As [`start`].
unsafe fn read(client: &Arc<Client>, queue: &Queue, offset: u64, iov: &Iov) -> io::Result<Started> {
    let inside = client.size().saturating_sub(offset);
    // The caller continues a longer one.
    let length = (iov.len() as u64).min(inside).min(client.maximum());
    if length == 0 {
        return Ok(Started::done(Ok(0)));
    }
    // SAFETY: `Waiting`, in the future, removes it when the future ends or is dropped.
    let memory = unsafe { Memory::new(&iov.slice(0, length as usize)) };
    let request = request(Command::Read, 0, offset, length);
    let waiting = submit(client, queue, request, Some(memory))?;
    Ok(Started::later(async move {
        waiting.outcome().await?;
        Ok(length as usize)
    }))
}

/// # Safety
/// As [`start`].
unsafe fn write(
    client: &Arc<Client>,
    queue: &Queue,
    durable: bool,
    offset: u64,
    iov: &Iov,
) -> io::Result<Started> {
    check_writable(client)?;
    let inside = client.size().saturating_sub(offset);
    if inside < iov.len() as u64 {
        // A disk has whole sectors; an export may end within one.
        let beyond = iov.len() as u64 - inside;
        let padding = beyond < 512 && iov.slice(inside as usize, beyond as usize).is_zero();
        if !padding {
            return Err(client.error(libc::ENOSPC, "the export ends before that"));
        }
        if inside == 0 {
            return Ok(Started::done(Ok(iov.len())));
        }
    }
    let length = (iov.len() as u64).min(inside).min(client.maximum());
    let told = match length == inside {
        true => iov.len(),
        false => length as usize,
    };
    // SAFETY: as in `read`.
    let memory = unsafe { Memory::new(&iov.slice(0, length as usize)) };
    let fua = durable && client.has(transmission::SEND_FUA);
    let flags = if fua { command::FUA } else { 0 };
    let request = request(Command::Write, flags, offset, length);
    let waiting = submit(client, queue, request, Some(memory))?;
    let (client, queue) = (client.clone(), queue.for_itself());
    Ok(Started::later(async move {
        waiting.outcome().await?;
        if durable && !fua {
            flush(&client, &queue)?.wait().await?;
        }
        Ok(told)
    }))
}

fn check_writable(client: &Client) -> io::Result<()> {
    match client.options().write {
        true => Ok(()),
        false => Err(client.error(libc::EBADF, "the export was not opened for writing")),
    }
}

fn flush(client: &Arc<Client>, queue: &Queue) -> io::Result<Started> {
    // A server without flushes has nothing to make durable.
    if !client.has(transmission::SEND_FLUSH) {
        return Ok(Started::done(Ok(0)));
    }
    let waiting = submit(client, queue, request(Command::Flush, 0, 0, 0), None)?;
    Ok(Started::later(async move {
        waiting.outcome().await?;
        Ok(0)
    }))
}

fn allocate(client: &Client, offset: u64, length: u64) -> io::Result<Started> {
    match offset.checked_add(length) {
        // The server allocates space.
        Some(end) if end <= client.size() => Ok(Started::done(Ok(0))),
        _ => Err(client.error(libc::ENOSPC, "the export ends before that")),
    }
}

/// Zeroes or discards a range.
fn range(
    client: &Arc<Client>,
    queue: &Queue,
    kind: OpKind,
    offset: u64,
    length: u64,
) -> io::Result<Started> {
    let unsupported = || Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    check_writable(client)?;
    let (command, flags) = match kind {
        OpKind::Discard if !client.has(transmission::SEND_TRIM) => {
            return Ok(Started::done(Ok(0)));
        }
        OpKind::Discard => (Command::Trim, 0),
        _ if !client.has(transmission::SEND_WRITE_ZEROES) => return unsupported(),
        OpKind::PunchHole => (Command::WriteZeroes, 0),
        OpKind::ZeroRange => (Command::WriteZeroes, command::NO_HOLE),
        OpKind::ZeroQuickly if client.has(transmission::SEND_FAST_ZERO) => {
            (Command::WriteZeroes, command::NO_HOLE | command::FAST_ZERO)
        }
        _ => return unsupported(),
    };
    let through = client.options().cache.is_write_through();
    let flags = match command {
        Command::WriteZeroes if through && client.has(transmission::SEND_FUA) => {
            flags | command::FUA
        }
        _ => flags,
    };
    let quick = kind == OpKind::ZeroQuickly;
    let end = offset.saturating_add(length).min(client.size());
    let (client, queue) = (client.clone(), queue.for_itself());
    Ok(Started::later(async move {
        let mut at = offset;
        while at < end {
            let count = (end - at).min(MOST);
            let request = request(command, flags, at, count);
            let outcome = submit(&client, &queue, request, None)?.outcome().await;
            match outcome {
                // The error of local file systems.
                Err(e) if e.errno == libc::ENOTSUP && quick => {
                    return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
                }
                // A discard is a hint.
                Err(e) if e.errno == libc::ENOTSUP && kind == OpKind::Discard => {}
                outcome => drop(outcome?),
            }
            at += count;
        }
        Ok(0)
    }))
}

/// Block status of the bytes from `offset` on, which is inside the export; 0 bytes if the server
/// does not have it.
///
/// # Safety
/// As [`start`].
unsafe fn extent(
    client: &Arc<Client>,
    queue: &Queue,
    offset: u64,
    iov: &Iov,
) -> io::Result<Started> {
    if !client.link(queue.number()).has_context() {
        return Ok(Started::done(Ok(0)));
    }
    let (client, queue, iov) = (client.clone(), queue.for_itself(), iov.clone());
    Ok(Started::later(async move {
        let block = client.minimum() - 1;
        let start = offset & !block;
        let length = (client.size() - start).min(MOST);
        let request = request(Command::BlockStatus, command::REQ_ONE, start, length);
        let extents = submit(&client, &queue, request, None)?.outcome().await?;
        let found = extents.first().copied();
        let (flags, said) = found.map_or((0, length), |extent| (extent.flags, extent.length));
        let said = said.min(length).saturating_sub(offset - start);
        let (zero, allocated) = client.meaning(flags);
        let extent = StorageExtent {
            zero,
            allocated,
            length: said.max(1),
        };
        Ok(extent.put(&iov))
    }))
}

/// Passes the extents of the whole export to `each`, in order: their ranges, and their flags in the
/// context of the client. Neighbours may be alike.
pub(super) async fn each_extent(
    client: &Arc<Client>,
    queue: &Queue,
    mut each: impl FnMut(Range<u64>, u64),
) -> io::Result<()> {
    if !client.link(queue.number()).has_context() {
        return Err(client.error(libc::ENOTSUP, "it has no such metadata context"));
    }
    let (size, block) = (client.size(), client.minimum() - 1);
    let mut at = 0;
    while at < size {
        let mut start = at & !block;
        let length = (size - start).min(MOST_STATUS);
        let request = request(Command::BlockStatus, 0, start, length);
        let before = at;
        for extent in submit(client, queue, request, None)?.outcome().await? {
            let end = start.saturating_add(extent.length).min(size);
            if at < end {
                each(at..end, extent.flags);
                at = end;
            }
            start = end;
        }
        if at == before {
            return Err(client.error(libc::EPROTO, "it answers with less than a block"));
        }
    }
    Ok(())
}
