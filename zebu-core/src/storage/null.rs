//! A storage without content: QEMU's `null-co` and `null-aio`.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::{Iov, OpKind, Properties, Queue, Started, Storage, StorageExtent};

/// Reads as zeroes and ignores writes. Each operation takes a fixed time.
#[derive(Debug)]
pub struct Null {
    properties: Properties,
    size: u64,
    latency: Duration,
    known_zero: bool,
}

impl Null {
    /// A storage of `size` bytes whose operations take `latency`. Its extents are zero with
    /// `known_zero`, else data.
    pub fn new(name: impl Into<PathBuf>, size: u64, latency: Duration, known_zero: bool) -> Self {
        Null {
            properties: Properties {
                path: name.into(),
                is_device: true,
                ..Properties::PLAIN
            },
            size,
            latency,
            known_zero,
        }
    }
}

// SAFETY: the memory is used before `start` returns, if at all.
#[allow(unsafe_code)]
unsafe impl Storage for Null {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        let count = match (kind, memory) {
            (OpKind::SetLength, _) => {
                return Started::fixed_length(self.size, length, "Cannot grow null nodes");
            }
            (OpKind::Extent, Some(iov)) => {
                let length = self.size.saturating_sub(offset);
                let extent = match self.known_zero {
                    true => StorageExtent::hole(length),
                    false => StorageExtent::data(length),
                };
                return Started::done(Ok(extent.put(iov)));
            }
            // The memory may hold data of another request.
            (OpKind::Read, Some(iov)) => {
                let inside = self.size.saturating_sub(offset).min(iov.len() as u64) as usize;
                iov.slice(0, inside).fill(0);
                inside
            }
            (_, Some(iov)) => iov.len(),
            (_, None) => 0,
        };
        if self.latency.is_zero() {
            return Started::done(Ok(count));
        }
        let (queue, latency) = (queue.for_itself(), self.latency);
        Started::later(async move {
            queue.sleep(latency).await?;
            Ok(count)
        })
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.size)
    }

    fn allocated(&self) -> io::Result<u64> {
        Ok(0)
    }
}
