//! Dirty bitmaps of the top image: which parts of the disk were written since a point in time.

use std::ops::Range;
use std::sync::Arc;

use super::device::Device;
use crate::drivers::qcow2::structures::{MAX_BITMAP_GRANULARITY_BITS, MIN_BITMAP_GRANULARITY_BITS};
use crate::drivers::{BitmapChange, BitmapInfo, Bits};
use crate::storage::Queue;
use crate::{Error, Result};

/// Which parts of a disk are dirty, in units of the granularity.
///
/// The result of [`Device::live_bitmap`] follows a bitmap until [`DirtyBits::set`] or
/// [`DirtyBits::merge`], which change a copy. So do its clones.
#[derive(Clone, Debug)]
pub struct DirtyBits(Arc<Bits>);

impl DirtyBits {
    /// Nothing is dirty of a disk of `size` bytes. `granularity`: bytes to a bit.
    ///
    /// # Panics
    ///
    /// If the granularity is not a power of two of at least 512.
    #[must_use]
    pub fn new(size: u64, granularity: u64) -> Self {
        assert!(
            granularity.is_power_of_two() && granularity >= 512,
            "a granularity of {granularity} bytes"
        );
        DirtyBits(Arc::new(Bits::new(
            size,
            granularity.trailing_zeros() as u8,
        )))
    }

    /// Size of the disk in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.size()
    }

    /// Bytes of the disk to a bit.
    #[must_use]
    pub fn granularity(&self) -> u64 {
        1 << self.0.granularity_bits()
    }

    /// Bytes of the disk that are dirty. The part of the last bit that is past the end counts, too.
    #[must_use]
    pub fn dirty_bytes(&self) -> u64 {
        self.0.count().saturating_mul(self.granularity())
    }

    /// Whether the byte at `offset` is dirty, and the end of the range from there on that is alike,
    /// in bytes: at most `limit`, which is at most the size of the disk.
    ///
    /// # Panics
    ///
    /// If `offset` is not before `limit`, or `limit` is past the end of the disk.
    #[must_use]
    pub fn run(&self, offset: u64, limit: u64) -> (bool, u64) {
        assert!(
            offset < limit && limit <= self.size(),
            "{offset} to {limit}"
        );
        let shift = self.0.granularity_bits();
        let first = offset >> shift;
        let bits = ((limit - 1) >> shift) + 1 - first;
        let (dirty, count) = self.0.run(first, bits);
        let end = (first + count).saturating_mul(1 << shift);
        (dirty, end.min(limit))
    }

    /// The dirty ranges of the disk in bytes, in order, as long as they can be.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < self.size() {
                let start = at;
                let (dirty, end) = self.run(at, self.size());
                at = end;
                if dirty {
                    return Some(start..end);
                }
            }
            None
        })
    }

    /// Makes a range of the disk dirty, in bytes. What is past its end is ignored.
    pub fn set(&mut self, range: Range<u64>) {
        Arc::make_mut(&mut self.0).set(range);
    }

    /// Makes dirty what is dirty in `other`, of any size and granularity.
    pub fn merge(&mut self, other: &DirtyBits) {
        Arc::make_mut(&mut self.0).merge(&other.0);
    }
}

impl Device {
    /// The bitmaps that the top image stores. None if its format has no bitmaps, or if a program
    /// that does not know them has written to the image since.
    ///
    /// # Errors
    ///
    /// If the list of bitmaps is damaged or cannot be read.
    pub async fn bitmaps(&self, queue: &Queue) -> Result<Vec<BitmapInfo>> {
        self.top().image.bitmaps(queue).await
    }

    /// What is dirty in a bitmap. The result does not change with the bitmap. Of a bitmap that is
    /// enabled, requests in flight may be missing.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such bitmap, if it is inconsistent, or if the device is a
    /// snapshot of the image: bitmaps tell what changed in the active disk. [`Error::Format`] if it
    /// is damaged. [`Error::Io`] if it cannot be read.
    pub async fn bitmap(&self, queue: &Queue, name: impl AsRef<[u8]>) -> Result<DirtyBits> {
        let bits = self.top().image.bitmap(queue, name.as_ref()).await?;
        // If it is shared, changes set bits of it.
        let bits = Arc::try_unwrap(bits).unwrap_or_else(|bits| (*bits).clone());
        Ok(DirtyBits(Arc::new(bits)))
    }

    /// What is dirty in a bitmap, now and later: changes that it records show in the result before
    /// their requests end. Nothing is copied. A change of the whole bitmap by `&mut Device` (a
    /// resize, a clear) does not show.
    ///
    /// The bitmap is that of the first image of the chain that has one of this name, as in QEMU's
    /// exports. Its disk may have another size than the device.
    ///
    /// # Errors
    ///
    /// Those of [`Device::bitmap`], and those of [`Device::bitmaps`] for the images of the chain.
    pub async fn live_bitmap(&self, queue: &Queue, name: impl AsRef<[u8]>) -> Result<DirtyBits> {
        let name = name.as_ref();
        for layer in self.layers() {
            let list = layer.image.bitmaps(queue).await?;
            if list.iter().any(|bitmap| bitmap.name == name) {
                return layer.image.bitmap(queue, name).await.map(DirtyBits);
            }
        }
        let name = crate::printable(name);
        Err(Error::Refused(format!("Bitmap '{name}' is not found")))
    }

    /// Adds a bitmap to the top image, without anything dirty. `granularity`: bytes to a bit, a
    /// power of two from 512 to 2 GiB; None: the cluster size, from 4 to 64 KiB. If it is `enabled`,
    /// every change of the disk from now on is recorded. Durable on return.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is a bitmap of this name, or if the image or the format cannot
    /// have such a bitmap. Those of [`Device::write`].
    pub async fn bitmap_add(
        &mut self,
        queue: &Queue,
        name: impl AsRef<[u8]>,
        granularity: Option<u64>,
        enabled: bool,
    ) -> Result<()> {
        let cluster = self.top().cluster_size();
        let default = cluster.map_or(64 << 10, |size| size.clamp(4 << 10, 64 << 10));
        let granularity_bits = check_new(name.as_ref(), granularity.unwrap_or(default))?;
        let change = BitmapChange::Add {
            granularity_bits,
            enabled,
        };
        self.change_bitmap(queue, name.as_ref(), change).await
    }

    /// Removes a bitmap of the top image, also a damaged one. Durable on return. Its space is freed
    /// unless the disk or a snapshot refers to it, too: for that all L2 tables are read.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such bitmap. Those of [`Device::write`].
    pub async fn bitmap_remove(&mut self, queue: &Queue, name: impl AsRef<[u8]>) -> Result<()> {
        let change = BitmapChange::Remove;
        self.change_bitmap(queue, name.as_ref(), change).await
    }

    /// Clears a bitmap: nothing is dirty in it. Durable on return.
    ///
    /// # Errors
    ///
    /// Those of [`Device::bitmap`] and of [`Device::write`].
    pub async fn bitmap_clear(&mut self, queue: &Queue, name: impl AsRef<[u8]>) -> Result<()> {
        let change = BitmapChange::Clear;
        self.change_bitmap(queue, name.as_ref(), change).await
    }

    /// Enables or disables a bitmap: whether it records changes from now on. Durable on return.
    ///
    /// # Errors
    ///
    /// Those of [`Device::bitmap`] and of [`Device::write`].
    pub async fn bitmap_enable(
        &mut self,
        queue: &Queue,
        name: impl AsRef<[u8]>,
        enabled: bool,
    ) -> Result<()> {
        let change = BitmapChange::Enable(enabled);
        self.change_bitmap(queue, name.as_ref(), change).await
    }

    /// Makes dirty in a bitmap what is dirty in `other`, of any size and granularity. Durable on
    /// return.
    ///
    /// # Errors
    ///
    /// Those of [`Device::bitmap`] and of [`Device::write`].
    pub async fn bitmap_merge(
        &mut self,
        queue: &Queue,
        name: impl AsRef<[u8]>,
        other: &DirtyBits,
    ) -> Result<()> {
        let change = BitmapChange::Merge(&other.0);
        self.change_bitmap(queue, name.as_ref(), change).await
    }

    async fn change_bitmap(
        &mut self,
        queue: &Queue,
        name: &[u8],
        change: BitmapChange<'_>,
    ) -> Result<()> {
        self.top_for_writing(0, 0)?;
        self.top_mut().0.change_bitmap(queue, name, change).await
    }
}

/// The granularity of a new bitmap as a power of two.
fn check_new(name: &[u8], granularity: u64) -> Result<u8> {
    if name.is_empty() {
        return Err(Error::Refused("Bitmap name cannot be empty".into()));
    }
    let allowed = 1 << MIN_BITMAP_GRANULARITY_BITS..=1 << MAX_BITMAP_GRANULARITY_BITS;
    if !granularity.is_power_of_two() || !allowed.contains(&granularity) {
        return Err(Error::Refused(
            "Granularity must be power of 2 and at least 512".into(),
        ));
    }
    Ok(granularity.trailing_zeros() as u8)
}

#[cfg(test)]
mod tests {
    //! Guards against a live bitmap that lacks what was written, and one through which the bitmap
    //! itself is changed.
    use super::*;
    use crate::OpenOptions;
    use crate::drivers::qcow2::structures::EXTENSION_BITMAPS;
    use crate::jobs::{CreateQcow2, create_qcow2};
    use crate::storage::{self, Memory, QueueOptions};

    const CLUSTER: u64 = 64 << 10;

    fn ranges(bits: &DirtyBits) -> Vec<Range<u64>> {
        bits.ranges().collect()
    }

    #[test]
    fn a_live_bitmap_follows_writes() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let create = CreateQcow2 {
            size: 64 * CLUSTER,
            ..CreateQcow2::default()
        };
        let storage = Arc::new(Memory::new(Vec::new()));
        let options = OpenOptions::default().write(true);
        let created = create_qcow2(&queue, &*storage, None, &create, |_| {});
        queue.block_on(created).unwrap();
        let open = || Device::from_storage(&queue, storage.clone(), &options).unwrap();
        let mut device = open();
        queue.block_on(async {
            for (name, enabled) in [("on", true), ("off", false)] {
                let added = device.bitmap_add(&queue, name, None, enabled);
                added.await.unwrap();
            }
            device.close(&queue).await.unwrap();
        });
        let seven = 7 * CLUSTER..8 * CLUSTER;
        let mut device = open();
        queue.block_on(async {
            // Before the first change, and after it.
            let live = device.live_bitmap(&queue, "on").await.unwrap();
            let off = device.live_bitmap(&queue, "off").await.unwrap();
            let write = async |device: &Device, nth: u64| {
                let bytes = queue.buffer(512);
                let written = device.write_buffer(&queue, nth * CLUSTER, bytes, 512);
                written.await.1.unwrap();
            };
            let first = device.bitmap(&queue, "on").await.unwrap();
            write(&device, 3).await;
            let mut second = device.live_bitmap(&queue, "on").await.unwrap();
            let copy = device.bitmap(&queue, "on").await.unwrap();
            let three = 3 * CLUSTER..4 * CLUSTER;
            for bits in [&live, &second, &copy] {
                assert_eq!(ranges(bits), std::slice::from_ref(&three));
            }
            second.set(0..1);
            write(&device, 5).await;
            let five = 5 * CLUSTER..6 * CLUSTER;
            assert_eq!(ranges(&live), [three.clone(), five]);
            assert_eq!(ranges(&second), [0..CLUSTER, three.clone()]);
            assert_eq!(ranges(&copy), [three]);
            assert!(ranges(&first).is_empty() && ranges(&off).is_empty());
            // It keeps what it has when the bitmap is replaced.
            device.bitmap_clear(&queue, "on").await.unwrap();
            assert_eq!(ranges(&live).len(), 2);
            write(&device, 7).await;
            let now = device.live_bitmap(&queue, "on").await.unwrap();
            assert_eq!(ranges(&now), std::slice::from_ref(&seven));
            let none = device.live_bitmap(&queue, "none").await;
            assert_eq!(none.unwrap_err().to_string(), "Bitmap 'none' is not found");
            device.close(&queue).await.unwrap();
        });
        let device = open();
        let stored = queue.block_on(device.bitmap(&queue, "on")).unwrap();
        assert_eq!(ranges(&stored), [seven]);
    }

    #[test]
    fn a_bitmap_that_cannot_record_is_not_live() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let create = CreateQcow2::default().size(64 * CLUSTER);
        let storage = Arc::new(Memory::new(Vec::new()));
        let options = OpenOptions::default().write(true);
        let created = create_qcow2(&queue, &*storage, None, &create, |_| {});
        queue.block_on(created).unwrap();
        let mut device = Device::from_storage(&queue, storage.clone(), &options).unwrap();
        queue.block_on(async {
            device.bitmap_add(&queue, "b", None, true).await.unwrap();
            let bytes = queue.buffer(512);
            device.write_buffer(&queue, 0, bytes, 512).await.1.unwrap();
            device.close(&queue).await.unwrap();
        });
        // The bits are in the L1 table, by the bitmap's table.
        let bytes = storage.to_vec();
        let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
        let extension = EXTENSION_BITMAPS.to_be_bytes();
        let at = bytes.windows(4).position(|word| word == extension).unwrap();
        let (table, l1) = (word(word(at + 24) as usize), word(40).to_be_bytes());
        let written = storage::write_slice(&*storage, &queue, table, &l1);
        queue.block_on(written).unwrap();
        let device = Device::from_storage(&queue, storage, &options).unwrap();
        let live = queue.block_on(device.live_bitmap(&queue, "b"));
        let text = "Bitmap 'b' is inconsistent and cannot be used";
        assert_eq!(live.unwrap_err().to_string(), text);
    }
}
