//! Data that the kernel copies from file to file (`copy_file_range(2)`). On file systems with
//! reflinks both files share the blocks.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;

use super::Job;
use super::Target;
use super::content::{Part, Treatment};
use crate::storage::Queue;

impl Job {
    /// Copies those of `parts` that the kernel can copy, and removes them. The others are
    /// read and written; after the first refusal by the kernel, all of them.
    pub(super) async fn offload(&self, queue: &Queue, parts: &mut Vec<Part>) {
        let Target::Raw(target) = &self.output.target else {
            return;
        };
        let Some(target) = target.host_file().map(AsFd::as_fd) else {
            return;
        };
        let mut left = Vec::new();
        for part in parts.drain(..) {
            let wanted = part.content == Treatment::Data && self.offload.load(Ordering::Relaxed);
            match wanted && self.copy_range(queue, &part.range, target).await {
                true => {}
                false => left.push(part),
            }
        }
        *parts = left;
    }

    /// Copies a range; false if it has to be read and written.
    async fn copy_range(&self, queue: &Queue, range: &Range<u64>, to: BorrowedFd<'_>) -> bool {
        for piece in self.pieces(range.clone()) {
            let device = &self.sources[piece.source];
            // They see each read.
            if device.has_filters() {
                return false;
            }
            let (mut at, length) = (0, piece.range.end - piece.range.start);
            while at < length {
                let Ok(status) = device.status(queue, piece.offset + at, length - at).await else {
                    return false;
                };
                let layer = &device.layers()[status.depth.min(device.layers().len() - 1)];
                let from = layer.storage(status.storage).host_file().map(AsFd::as_fd);
                let (Some(from), Some(host), true) = (from, status.host, status.data) else {
                    return false;
                };
                let length = status.length.min(length - at);
                if let Err(e) = copy_all(from, host, to, piece.range.start + at, length) {
                    // The last sector of a raw source may reach past the end of its file.
                    if e.kind() != io::ErrorKind::UnexpectedEof {
                        self.offload.store(false, Ordering::Relaxed);
                    }
                    return false;
                }
                at += length;
            }
        }
        // The rate of a range that is read and written is limited where it is read.
        self.rate_limiter
            .wait(range.end - range.start, self.progress.cursor());
        true
    }
}

/// Has the kernel copy `length` bytes. Blocks.
#[allow(unsafe_code)]
fn copy_all(
    from: BorrowedFd<'_>,
    offset: u64,
    to: BorrowedFd<'_>,
    at: u64,
    mut length: u64,
) -> io::Result<()> {
    let (mut offset, mut at) = (offset as libc::off64_t, at as libc::off64_t);
    while length > 0 {
        let (from, to, most) = (from.as_raw_fd(), to.as_raw_fd(), length as usize);
        // SAFETY: the descriptors are open, and the offsets live through the call.
        let copied = unsafe { libc::copy_file_range(from, &mut offset, to, &mut at, most, 0) };
        match copied {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            ..0 => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
            copied => length -= copied as u64,
        }
    }
    Ok(())
}
