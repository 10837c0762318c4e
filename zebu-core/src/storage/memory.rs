//! A storage in memory, for tests and for images that are not files.

use std::io;
use std::sync::RwLock;

use super::{Iov, OpKind, Queue, Started, Storage};

/// Bytes in memory. Each operation ends when it is started.
///
/// ```
/// use std::sync::Arc;
/// use zebu::{Device, Format, Memory, OpenOptions, Queue, QueueOptions};
///
/// let queue = Queue::new(QueueOptions::default())?;
/// let options = OpenOptions::default().format(Some(Format::RAW));
/// let memory = Arc::new(Memory::new(vec![7; 1024]));
/// let device = Device::from_storage(&queue, memory, &options)?;
/// let mut bytes = [0; 4];
/// device.read_blocking(&queue, 512, &mut bytes)?;
/// assert_eq!(bytes, [7; 4]);
/// # Ok::<(), zebu::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Memory {
    bytes: RwLock<Vec<u8>>,
}

impl Memory {
    /// Memory with this content.
    pub fn new(bytes: Vec<u8>) -> Self {
        Memory {
            bytes: RwLock::new(bytes),
        }
    }

    /// A copy of the content.
    pub fn to_vec(&self) -> Vec<u8> {
        self.read().clone()
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Vec<u8>> {
        self.bytes.read().unwrap_or_else(|e| e.into_inner())
    }

    fn change(&self) -> std::sync::RwLockWriteGuard<'_, Vec<u8>> {
        self.bytes.write().unwrap_or_else(|e| e.into_inner())
    }

    fn read_at(&self, offset: u64, iov: &Iov) -> usize {
        let bytes = self.read();
        let from = offset.min(bytes.len() as u64) as usize;
        let count = iov.len().min(bytes.len() - from);
        iov.copy_from(&bytes[from..from + count]);
        count
    }

    fn write_at(&self, offset: u64, iov: &Iov) -> io::Result<usize> {
        let mut bytes = self.change();
        let end = end_of(offset, iov.len() as u64)?;
        lengthen(&mut bytes, end)?;
        iov.copy_to(&mut bytes[offset as usize..end]);
        Ok(iov.len())
    }

    fn zero(&self, offset: u64, length: u64) -> io::Result<usize> {
        let mut bytes = self.change();
        let end = end_of(offset, length)?.min(bytes.len());
        if let Some(range) = bytes.get_mut(offset as usize..end) {
            range.fill(0);
        }
        Ok(0)
    }

    fn allocate(&self, offset: u64, length: u64) -> io::Result<usize> {
        let end = end_of(offset, length)?;
        let mut bytes = self.change();
        lengthen(&mut bytes, end)?;
        Ok(0)
    }

    fn set_len(&self, length: u64) -> io::Result<usize> {
        let length = end_of(length, 0)?;
        let mut bytes = self.change();
        lengthen(&mut bytes, length)?;
        bytes.truncate(length);
        Ok(0)
    }
}

/// `offset + length`, if memory can be so long.
fn end_of(offset: u64, length: u64) -> io::Result<usize> {
    offset
        .checked_add(length)
        .filter(|end| *end <= isize::MAX as u64)
        .map(|end| end as usize)
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EFBIG))
}

/// Makes `bytes` at least `length` long, if there is memory for that.
fn lengthen(bytes: &mut Vec<u8>, length: usize) -> io::Result<()> {
    if let Some(more) = length.checked_sub(bytes.len()) {
        bytes.try_reserve(more)?;
        bytes.resize(length, 0);
    }
    Ok(())
}

// SAFETY: each operation has ended when it was started.
#[allow(unsafe_code)]
unsafe impl Storage for Memory {
    unsafe fn start(
        &self,
        _queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        Started::done(match (kind, memory) {
            (OpKind::Read, Some(iov)) => Ok(self.read_at(offset, iov)),
            (OpKind::Write | OpKind::WriteDurable, Some(iov)) => self.write_at(offset, iov),
            (OpKind::ZeroRange | OpKind::ZeroQuickly | OpKind::PunchHole | OpKind::Discard, _) => {
                self.zero(offset, length)
            }
            (OpKind::Allocate, _) => self.allocate(offset, length),
            (OpKind::SetLength, _) => self.set_len(length),
            _ => Ok(0),
        })
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.read().len() as u64)
    }

    fn allocated(&self) -> io::Result<u64> {
        self.len()
    }
}
