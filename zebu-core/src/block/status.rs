//! What a range of the device is made of.

use super::device::Device;
use super::filtered::Found;
use crate::drivers::{Holes, Mapping, StorageId};
use crate::storage::{self, Queue};
use crate::{Error, Result};

/// A range of the disk that is stored alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Length in bytes, at least 1.
    pub length: u64,
    /// It reads as zeroes.
    pub zero: bool,
    /// Its bytes are stored somewhere: a cluster or file range of their own. An NBD server may say
    /// of a range that it is not stored, and not say what it reads as: that is neither data nor
    /// zero, and must be read.
    pub data: bool,
    /// A layer of the chain maps it, or a filter changes what it reads as. If false, no layer does, and it reads as zeroes.
    pub present: bool,
    /// It is stored compressed.
    pub compressed: bool,
    /// The layer that maps it: 0 is the top.
    pub depth: usize,
    /// The storage of that layer to which `host` belongs; [`StorageId::FILE`] without it.
    pub storage: StorageId,
    /// Where it starts in that storage, in bytes, if it is stored there as it is: not compressed, nor changed by a
    /// filter.
    pub host: Option<u64>,
}

impl Status {
    /// A range of `length` bytes that no layer maps.
    pub const fn unallocated(length: u64) -> Status {
        Status {
            length,
            zero: false,
            data: false,
            present: false,
            compressed: false,
            depth: 0,
            storage: StorageId::FILE,
            host: None,
        }
    }

    /// A range of `length` bytes that must be read, about which no more is known.
    pub(crate) const fn data(length: u64) -> Status {
        Status {
            data: true,
            present: true,
            ..Status::unallocated(length)
        }
    }

    /// Whether both are one extent if `next` begins where this ends: alike, and neighbours in
    /// their storage.
    pub fn continues_with(&self, next: &Status) -> bool {
        let joined = Status {
            length: next.length,
            host: self.host.map(|host| host.saturating_add(self.length)),
            ..*self
        };
        joined == *next
    }
}

impl Device {
    /// The status at `offset`, as far as it stays the same within `length` bytes and is found
    /// without undue work: at least one byte. The next range may have the same status; see
    /// [`Device::extents`].
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] if the range is empty or not inside the disk. Those of
    /// [`Device::read`].
    pub async fn status(&self, queue: &Queue, offset: u64, length: u64) -> Result<Status> {
        self.check_range(offset, length)?;
        if length == 0 {
            return Err(Error::OutOfRange {
                offset,
                length,
                size: self.size(),
            });
        }
        let _stay = self.enter();
        let found = self.filtered().find(queue, offset, length).await?;
        self.status_of(queue, found).await
    }

    async fn status_of(&self, queue: &Queue, found: Found) -> Result<Status> {
        let (depth, extent) = match found {
            Found::Mapped(depth, extent) => (depth, extent),
            Found::Changed(depth, length) => {
                return Ok(Status {
                    depth,
                    ..Status::data(length)
                });
            }
        };
        let mut status = Status {
            present: true,
            depth,
            storage: extent.storage,
            ..Status::unallocated(extent.length)
        };
        match extent.mapping {
            Mapping::Unallocated { host } => {
                status.zero = true;
                status.present = false;
                status.host = host.map(|h| h.0);
            }
            Mapping::Zero { host } => {
                status.zero = true;
                status.host = host.map(|h| h.0);
            }
            Mapping::Data { host } => {
                status.data = true;
                status.host = Some(host.0);
            }
            Mapping::Compressed { .. } => {
                status.data = true;
                status.compressed = true;
            }
        }
        self.look_at_file(queue, depth, &mut status).await?;
        let storage = self.layers()[depth].storage(status.storage);
        status.host = status.host.filter(|_| !storage.properties().is_coded);
        if status.host.is_none() {
            status.storage = StorageId::FILE;
        }
        Ok(status)
    }

    /// What `offset` is mapped to, in which layer and which of its storages; as
    /// [`Device::status`], without a look at the file.
    #[doc(hidden)]
    pub async fn mapping(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
    ) -> Result<(usize, StorageId, Mapping)> {
        self.check_range(offset, length)?;
        let _stay = self.enter();
        let (depth, extent) = self.chain().resolve(queue, offset, length).await?;
        Ok((depth, extent.storage, extent.mapping))
    }

    /// Refines data by the holes of the file, where the driver gives these a meaning.
    async fn look_at_file(&self, queue: &Queue, depth: usize, status: &mut Status) -> Result<()> {
        let Some(host) = status.host.filter(|_| status.data) else {
            return Ok(());
        };
        let layer = &self.layers()[depth];
        let holes = match layer.image.cached_holes(status.storage) {
            Some(holes) => holes,
            None => layer.image.load_holes(queue, status.storage).await?,
        };
        if holes == Holes::Ignored {
            return Ok(());
        }
        // Data past the end of the storage are no hole: reading them fails.
        let before_end = layer
            .image
            .data_before_end(status.storage, host, status.length);
        match before_end? {
            0 => return Ok(()),
            length => status.length = length,
        }
        let storage = layer.storage(status.storage);
        if let Some(length) = layer.known_data.covers(status.storage, host) {
            status.length = status.length.min(length);
            return Ok(());
        }
        let found = storage::extent(storage, queue, host).await?;
        if !found.zero && found.allocated {
            layer.known_data.set(status.storage, host, found.length);
        }
        if found.length == 0 {
            // Past the end of the file: reads as zeroes.
            status.zero = true;
        } else {
            status.length = status.length.min(found.length);
            status.zero = found.zero;
        }
        // QEMU: a hole in a raw image is no data; a preallocated cluster is
        // data that happens to be zero.
        status.data = holes != Holes::Unallocated || found.allocated;
        if !status.data {
            status.host = status.host.filter(|_| status.zero);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_that_are_adjacent_in_the_file_are_joined() {
        let data = |length, host: Option<u64>| Status {
            compressed: host.is_none(),
            host,
            ..Status::data(length)
        };
        let first = data(512, Some(1024));
        assert!(first.continues_with(&data(9, Some(1536))));
        assert!(!first.continues_with(&data(9, Some(1537))));
        assert!(data(512, None).continues_with(&data(9, None)));
        assert!(!first.continues_with(&data(9, None)));
    }
}
