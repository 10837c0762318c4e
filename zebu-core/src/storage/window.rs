//! A part of a storage as a storage: a raw image with an offset and a size.

use std::io;
use std::sync::Arc;

use super::{
    Alignment, Blocks, Iov, OpKind, Properties, Queue, Started, Storage, discard, punch_hole, read,
    write, zero_range,
};

/// The bytes of a storage from an offset on.
#[derive(Debug)]
pub struct Window {
    storage: Arc<dyn Storage>,
    offset: u64,
    /// None: to the end of the storage.
    size: Option<u64>,
    properties: Properties,
    /// Whether operations that are aligned here are aligned in the storage.
    is_aligned: bool,
}

impl Window {
    /// The part of `storage` from byte `offset` on, of `size` bytes. None: to its end, and it grows
    /// with it. The caller has checked that it is inside.
    pub fn new(storage: Arc<dyn Storage>, offset: u64, size: Option<u64>) -> Self {
        let page = storage.blocks().map_or(1, Blocks::page);
        let unit = page.max(storage.alignment().offset as u64);
        let is_aligned = offset.is_multiple_of(unit) && size.unwrap_or(0).is_multiple_of(unit);
        let mut properties = storage.properties().clone();
        // Of fixed size, and its old content not zero: as a device.
        properties.is_device |= size.is_some();
        if !is_aligned {
            properties.alignment = Alignment::NONE;
        }
        Window {
            storage,
            offset,
            size,
            properties,
            is_aligned,
        }
    }

    /// How many of `length` bytes from `offset` on are inside.
    fn inside(&self, offset: u64, length: u64) -> u64 {
        match self.size {
            None => length,
            Some(size) => size.saturating_sub(offset).min(length),
        }
    }
}

// SAFETY: all is passed on to a storage that keeps the promises. The future owns that storage and
// awaits the operations on the memory.
#[allow(unsafe_code)]
unsafe impl Storage for Window {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if kind == OpKind::SetLength {
            return match self.size {
                Some(size) => {
                    Started::fixed_length(size, length, "Cannot resize fixed-size raw disks")
                }
                None => match self.offset.checked_add(length) {
                    // SAFETY: there is no memory.
                    Some(end) => unsafe { self.storage.start(queue, kind, 0, end, None) },
                    None => Started::done(Err(io::Error::from_raw_os_error(libc::EFBIG))),
                },
            };
        }
        if kind == OpKind::Extent {
            // SAFETY: passed on; `self` keeps the storage.
            return unsafe {
                self.storage
                    .start(queue, kind, self.offset + offset, length, memory)
            };
        }
        let inside = self.inside(offset, length);
        let (mut length, mut iov) = (length, memory.cloned());
        if inside < length {
            match kind {
                OpKind::Write | OpKind::WriteDurable | OpKind::Allocate => {
                    return Started::done(Err(io::Error::from_raw_os_error(libc::ENOSPC)));
                }
                _ if inside == 0 => return Started::done(Ok(0)),
                _ => {
                    length = inside;
                    iov = iov.map(|iov| iov.slice(0, inside as usize));
                }
            }
        }
        let at = match kind {
            OpKind::Flush => 0,
            _ => self.offset + offset,
        };
        if self.is_aligned || matches!(kind, OpKind::Flush | OpKind::Allocate) {
            // SAFETY: passed on; `self` keeps the storage.
            return unsafe { self.storage.start(queue, kind, at, length, iov.as_ref()) };
        }
        let (storage, queue) = (self.storage.clone(), queue.for_itself());
        Started::later(async move {
            let storage = &*storage;
            match (kind, iov) {
                (OpKind::Read, Some(iov)) => {
                    let end = storage.len()?.saturating_sub(at).min(length) as usize;
                    read(storage, &queue, at, &iov.slice(0, end)).await?;
                    Ok(end)
                }
                (_, Some(iov)) => {
                    write(storage, &queue, at, &iov).await?;
                    Ok(iov.len())
                }
                (OpKind::Discard, None) => discard(storage, &queue, at, length).await.map(|()| 0),
                (OpKind::PunchHole, None) => {
                    punch_hole(storage, &queue, at, length).await.map(|()| 0)
                }
                (OpKind::ZeroQuickly, None) => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
                (_, None) => zero_range(storage, &queue, at, length).await.map(|()| 0),
            }
        })
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn len(&self) -> io::Result<u64> {
        match self.size {
            Some(size) => Ok(size),
            None => Ok(self.storage.len()?.saturating_sub(self.offset)),
        }
    }

    fn blocks(&self) -> Option<&Blocks> {
        match self.is_aligned {
            true => self.storage.blocks(),
            false => None,
        }
    }

    fn below(&self) -> Option<&dyn Storage> {
        Some(&*self.storage)
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&*self.storage)
    }

    fn export(&self) -> Option<&dyn super::Export> {
        None
    }
}

#[cfg(test)]
mod tests {
    //! Guards against bytes outside of the window that are read or written.
    use super::*;
    use crate::storage::{
        Blkdebug, BlkdebugLimits, Memory, QueueOptions, read_vec, set_len, write_slice,
    };

    #[test]
    fn bytes_outside_of_the_window_are_not_accessed() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let memory = Arc::new(Memory::new(vec![7; 4096]));
        let window = Window::new(memory.clone(), 1000, Some(512));
        queue.block_on(async {
            assert_eq!(
                read_vec(&window, &queue, 510, 4).await.unwrap(),
                [7, 7, 0, 0]
            );
            let past = write_slice(&window, &queue, 510, &[1; 4]).await;
            assert_eq!(past.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
            write_slice(&window, &queue, 0, &[1; 512]).await.unwrap();
            zero_range(&window, &queue, 500, 100).await.unwrap();
        });
        let mut expected = vec![7; 4096];
        expected[1000..1500].fill(1);
        expected[1500..1512].fill(0);
        assert!(memory.to_vec() == expected);
        assert!(queue.block_on(set_len(&window, &queue, 513)).is_err());
        let open = Window::new(memory.clone(), 1000, None);
        queue.block_on(set_len(&open, &queue, 10)).unwrap();
        assert_eq!(memory.to_vec().len(), 1010);
    }

    #[test]
    fn it_may_end_inside_a_block() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let memory = Arc::new(Memory::new(vec![7; 8192]));
        let limits = BlkdebugLimits {
            align: 4096,
            ..BlkdebugLimits::default()
        };
        let blocks = Arc::new(Blkdebug::new(memory.clone(), Vec::new(), limits).unwrap());
        let window = Window::new(blocks, 0, Some(4608));
        let last = queue.block_on(async {
            write_slice(&window, &queue, 4096, &[1; 512]).await?;
            read_vec(&window, &queue, 4096, 1024).await
        });
        assert_eq!(last.unwrap(), [[1; 512], [0; 512]].concat());
        assert!(memory.to_vec() == [vec![7; 4096], vec![1; 512], vec![7; 3584]].concat());
    }
}
