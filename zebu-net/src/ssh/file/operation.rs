//! The requests of each operation of a storage.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use super::client::{Answer, Client, Request, Shared, Waiting};
use super::packet::Packet;
use crate::storage::{FileStamp, Iov, OpKind, Started};

/// Requests of one operation in flight at most: their data are copied.
const AT_ONCE: usize = 16;

/// See [`Storage::start`](crate::storage::Storage::start).
pub(super) fn start(
    client: &Arc<Client>,
    kind: OpKind,
    offset: u64,
    length: u64,
    memory: Option<&Iov>,
) -> Started {
    match (kind, memory) {
        (OpKind::Read, Some(iov)) => read(client, offset, iov),
        (OpKind::Write | OpKind::WriteDurable, Some(iov)) => {
            write(client, kind == OpKind::WriteDurable, offset, iov)
        }
        (OpKind::SetLength, _) => {
            let make = |handle: &[u8]| Packet::set_length(handle, length);
            plain(client, Request::SetLength(length), make)
        }
        (OpKind::Flush, _) => flush(client),
        // The protocol does not tell holes.
        (OpKind::Extent, _) => Started::done(Ok(0)),
        // A hint.
        (OpKind::Discard, _) => Started::done(Ok(0)),
        _ => Started::done(Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))),
    }
}

/// A piece of an operation: where it begins in the memory, its bytes, and its request.
type Piece = (usize, usize, Waiting);

fn read(client: &Arc<Client>, offset: u64, iov: &Iov) -> Started {
    let mut reading = Pieces::new(client, offset, iov, client.shared.limits.read);
    reading.begin(Shared::read);
    Started::later(async move {
        while let Some((at, length, waiting)) = reading.pieces.pop_front() {
            match waiting.outcome().await? {
                Answer::Data(data) if !data.bytes().is_empty() => {
                    let count = data.bytes().len();
                    reading.iov.slice(at, count).copy_from(data.bytes());
                    if count < length {
                        reading.begin_piece(at + count, length - count, Shared::read);
                        reading.pieces.rotate_right(1);
                    }
                }
                // The requests behind it are given up.
                _ => return Ok(at),
            }
            reading.begin(Shared::read);
        }
        Ok(reading.iov.len())
    })
}

fn write(client: &Arc<Client>, durable: bool, offset: u64, iov: &Iov) -> Started {
    let mut writing = Pieces::new(client, offset, iov, client.shared.limits.write);
    writing.begin(Shared::write);
    Started::later(async move {
        while let Some((_, _, waiting)) = writing.pieces.pop_front() {
            waiting.outcome().await?;
            writing.begin(Shared::write);
        }
        if durable {
            flush(&writing.client).wait().await?;
        }
        Ok(writing.iov.len())
    })
}

fn flush(client: &Arc<Client>) -> Started {
    match client.shared.has_fsync() {
        true => plain(client, Request::Flush, Packet::flush),
        // Then the file was opened to be read, or without flushes.
        false => Started::done(Ok(0)),
    }
}

/// A request that is an operation.
fn plain(client: &Arc<Client>, request: Request, packet: impl FnOnce(&[u8]) -> Packet) -> Started {
    let client = client.clone();
    let waiting = client.shared.submit(request, packet);
    Started::later(async move {
        waiting.outcome().await?;
        // The connection is there until its end.
        drop(client);
        Ok(0)
    })
}

impl Shared {
    fn read(self: &Arc<Self>, offset: u64, iov: &Iov) -> Waiting {
        let request = Request::Read(offset, iov.len() as u32);
        self.submit(request, |handle| {
            Packet::read(handle, offset, iov.len() as u32)
        })
    }

    fn write(self: &Arc<Self>, offset: u64, iov: &Iov) -> Waiting {
        let request = Request::Write(offset + iov.len() as u64, iov.len() as u32);
        self.submit(request, |handle| {
            Packet::write(handle, offset, iov.len(), |bytes| iov.copy_to(bytes))
        })
    }
}

/// The requests of a read or a write.
struct Pieces {
    client: Arc<Client>,
    offset: u64,
    iov: Iov,
    /// Bytes of a request at most.
    most: usize,
    /// Where the next one begins.
    next: usize,
    pieces: VecDeque<Piece>,
}

impl Pieces {
    fn new(client: &Arc<Client>, offset: u64, iov: &Iov, most: u64) -> Pieces {
        Pieces {
            client: client.clone(),
            offset,
            iov: iov.clone(),
            most: most as usize,
            next: 0,
            pieces: VecDeque::new(),
        }
    }

    /// Begins requests, as many as may be in flight.
    fn begin(&mut self, submit: impl Fn(&Arc<Shared>, u64, &Iov) -> Waiting) {
        while self.next < self.iov.len() && self.pieces.len() < AT_ONCE {
            let length = self.most.min(self.iov.len() - self.next);
            self.begin_piece(self.next, length, &submit);
            self.next += length;
        }
    }

    fn begin_piece(
        &mut self,
        at: usize,
        length: usize,
        submit: impl Fn(&Arc<Shared>, u64, &Iov) -> Waiting,
    ) {
        let iov = self.iov.slice(at, length);
        let waiting = submit(&self.client.shared, self.offset + at as u64, &iov);
        self.pieces.push_back((at, length, waiting));
    }
}

/// Removes the file from its folder. Blocks.
pub(super) fn remove(client: &Client) -> io::Result<()> {
    let shared = &client.shared;
    let path = &shared.options.path;
    let waiting = shared.submit(Request::Remove, |_| Packet::remove(path));
    waited_for(&waiting).map(drop)
}

/// The size and the time of change of the file. Blocks.
pub(super) fn stamp(client: &Client) -> io::Result<FileStamp> {
    let waiting = client.shared.submit(Request::Stat, Packet::stat);
    let found = match waited_for(&waiting)? {
        Answer::Attributes(found) => found,
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    match (found.size, found.modified) {
        (Some(size), Some(seconds)) => Ok(FileStamp {
            file: None,
            size,
            seconds,
            nanoseconds: 0,
            inode: None,
        }),
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// Sets the times of the file. Blocks.
pub(super) fn set_modified(client: &Client, seconds: u32) -> io::Result<()> {
    let make = |handle: &[u8]| Packet::set_times(handle, seconds);
    let waiting = client.shared.submit(Request::SetTimes, make);
    waited_for(&waiting).map(drop)
}

/// The end of a request, for which the thread waits.
fn waited_for(waiting: &Waiting) -> io::Result<Answer> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match waiting.poll(&Context::from_waker(&waker)) {
            Poll::Ready(outcome) => return outcome.map_err(Into::into),
            Poll::Pending => thread::park(),
        }
    }
}

/// Wakes a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
