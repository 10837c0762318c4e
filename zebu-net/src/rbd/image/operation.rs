//! The calls of each operation of a storage.

use std::io;
use std::sync::Arc;

use super::Shared;
use super::call::Call;
use crate::dropped::range_of;
use crate::storage::{Iov, OpKind, Started};

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`: the zeroes are allocated.
const ALLOCATED: i32 = 1;

/// See [`Storage::start`](crate::storage::Storage::start).
pub(super) fn start(
    shared: &Arc<Shared>,
    kind: OpKind,
    offset: u64,
    length: u64,
    memory: Option<&Iov>,
) -> Started {
    match (kind, memory) {
        (OpKind::Read, Some(iov)) => read(shared, offset, iov),
        (OpKind::Write | OpKind::WriteDurable, Some(iov)) => {
            write(shared, kind == OpKind::WriteDurable, offset, iov)
        }
        (OpKind::Flush, _) => flush(shared),
        (OpKind::SetLength, _) => {
            let image = shared.image.clone();
            // It goes on if its future is dropped.
            let change = shared.dropped.add(range_of(kind, offset, length));
            let job = shared.worker.run(move || {
                let resized = image.resize(length);
                drop(change);
                resized
            });
            let shared = shared.clone();
            Started::later(async move {
                let resized = job.await;
                resized.map_err(|e| shared.error("change the size", e))?;
                Ok(0)
            })
        }
        (OpKind::Extent, Some(iov)) => extent(shared, offset, iov),
        (OpKind::Discard, _) => range(shared, "discard", offset, length, None),
        (OpKind::ZeroRange, _) => range(shared, "write zeroes", offset, length, Some(ALLOCATED)),
        (OpKind::PunchHole | OpKind::ZeroQuickly, _) => {
            range(shared, "write zeroes", offset, length, Some(0))
        }
        _ => Started::done(Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))),
    }
}

/// The bytes from `offset` on that are inside, of `length`.
fn inside(shared: &Shared, offset: u64, length: u64) -> io::Result<u64> {
    let size = shared.image.size();
    let size = size.map_err(|e| shared.error("tell the size", e))?;
    Ok(size.saturating_sub(offset).min(length))
}

fn read(shared: &Arc<Shared>, offset: u64, iov: &Iov) -> Started {
    let length = match inside(shared, offset, iov.len() as u64) {
        Ok(0) => return Started::done(Ok(0)),
        Ok(length) => length as usize,
        Err(e) => return Started::done(Err(e)),
    };
    let call = Call::start(
        &shared.image,
        vec![0; length],
        |open, memory, completion| {
            // SAFETY: the image is open, and the memory the call's own.
            unsafe {
                (open.ceph.rbd.rbd_aio_read)(open.image, offset, length, memory.cast(), completion)
            }
        },
    );
    let (shared, iov) = (shared.clone(), iov.clone());
    Started::later(async move {
        let read = async { call?.await }.await;
        let (count, memory) = read.map_err(|e| shared.error("read", e))?;
        iov.slice(0, count).copy_from(&memory[..count]);
        Ok(count)
    })
}

fn write(shared: &Arc<Shared>, durable: bool, offset: u64, iov: &Iov) -> Started {
    let length = iov.len();
    let is_inside = inside(shared, offset, length as u64);
    let is_inside = is_inside.map(|inside| inside == length as u64);
    let mut bytes = vec![0; length];
    iov.copy_to(&mut bytes);
    let begin = move |shared: &Shared| {
        let call = Call::start(&shared.image, bytes, |open, memory, completion| {
            // SAFETY: the image is open, and the memory the call's own.
            unsafe {
                (open.ceph.rbd.rbd_aio_write)(open.image, offset, length, memory.cast(), completion)
            }
        });
        call.map(|call| call.changes(&shared.dropped, offset..offset + length as u64))
    };
    let own = shared.clone();
    let written = move |shared: Arc<Shared>, result: Result<(usize, Vec<u8>), i32>| async move {
        result.map_err(|e| shared.error("write", e))?;
        if durable {
            flush(&shared).wait().await?;
        }
        Ok(length)
    };
    match is_inside {
        Err(e) => Started::done(Err(e)),
        Ok(true) => {
            let call = begin(shared);
            Started::later(async move {
                let result = async { call?.await }.await;
                written(own, result).await
            })
        }
        Ok(false) => {
            let image = shared.image.clone();
            let grown = shared
                .worker
                .run(move || image.grow(offset + length as u64));
            Started::later(async move {
                let result = async {
                    grown.await?;
                    begin(&own)?.await
                };
                let result = result.await;
                written(own, result).await
            })
        }
    }
}

fn flush(shared: &Arc<Shared>) -> Started {
    let call = Call::start(&shared.image, Vec::new(), |open, _, completion| {
        // SAFETY: the image is open.
        unsafe { (open.ceph.rbd.rbd_aio_flush)(open.image, completion) }
    });
    ended(shared, "flush", call)
}

/// An operation that is one call, without data.
fn ended(shared: &Arc<Shared>, doing: &'static str, call: Result<Call, i32>) -> Started {
    let shared = shared.clone();
    Started::later(async move {
        let ended = async { call?.await }.await;
        ended.map_err(|e| shared.error(doing, e))?;
        Ok(0)
    })
}

/// Discards a range; or zeroes it, with these flags.
fn range(
    shared: &Arc<Shared>,
    doing: &'static str,
    offset: u64,
    length: u64,
    zeroes: Option<i32>,
) -> Started {
    let length = match inside(shared, offset, length) {
        Ok(0) => return Started::done(Ok(0)),
        Ok(length) => length,
        Err(e) => return Started::done(Err(e)),
    };
    let call = Call::start(&shared.image, Vec::new(), |open, _, completion| {
        let rbd = &open.ceph.rbd;
        // SAFETY: the image is open.
        unsafe {
            match zeroes {
                None => (rbd.rbd_aio_discard)(open.image, offset, length, completion),
                Some(flags) => {
                    let length = length as usize;
                    (rbd.rbd_aio_write_zeroes)(open.image, offset, length, completion, flags, 0)
                }
            }
        }
    });
    let call = call.map(|call| call.changes(&shared.dropped, offset..offset + length));
    ended(shared, doing, call)
}

fn extent(shared: &Arc<Shared>, offset: u64, iov: &Iov) -> Started {
    let image = shared.image.clone();
    let found = shared.worker.run(move || image.extent(offset));
    let (shared, iov) = (shared.clone(), iov.clone());
    Started::later(async move {
        match found
            .await
            .map_err(|e| shared.error("tell the block status", e))?
        {
            Some(extent) => Ok(extent.put(&iov)),
            None => Ok(0),
        }
    })
}
