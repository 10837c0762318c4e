//! Compressed writes.

use std::ops::Range;
use std::sync::Arc;

use super::device::Device;
use super::write::Top;
use crate::codec::{self, Compressor};
use crate::drivers::qcow2::Image;
use crate::storage::{Iov, Queue};
use crate::{Error, Result};

/// Clusters that are compressed at once.
const AT_ONCE: usize = 8;

impl Device {
    /// Writes whole clusters compressed. `offset` is at a cluster boundary. `iov` consists of whole
    /// clusters, but for the last one of the disk. Data that do not shrink are written as they are.
    ///
    /// # Errors
    ///
    /// As in QEMU, if a cluster is allocated already. `ENOTSUP` if the image cannot have compressed
    /// clusters. Those of [`Device::write`].
    pub async fn write_compressed(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let length = iov.len() as u64;
        let image = self.packed_top(offset, length)?;
        let size = image.geometry().cluster_size();
        let end = offset + length;
        let whole = end.is_multiple_of(size) || end == self.size();
        if !offset.is_multiple_of(size) || !whole {
            return Err(Error::os(libc::EINVAL));
        }
        let mut at = 0;
        while at < iov.len() {
            let count = (iov.len() - at).min(AT_ONCE * size as usize);
            let part = iov.slice(at, count);
            let result = self.compress(queue, image, offset + at as u64, &part).await;
            self.changed(queue, image, result).await?;
            at += count;
        }
        Ok(())
    }

    /// Stores clusters whose data the caller has compressed with the image's compression type.
    /// `clusters` has the guest offset of each and the range of its data in `data`, less than a
    /// cluster. Guest offsets ascend. Data that follow each other are written together.
    ///
    /// # Errors
    ///
    /// Those of [`Device::write_compressed`].
    pub async fn write_packed(
        &self,
        queue: &Queue,
        clusters: &[(u64, Range<usize>)],
        data: &[u8],
    ) -> Result<()> {
        let image = self.packed_top(0, 0)?;
        let size = image.geometry().cluster_size();
        let mut next = 0;
        for (guest, range) in clusters {
            self.check_range(*guest, 1)?;
            let fits = range.start < range.end
                && range.end <= data.len()
                && (range.len() as u64) < size
                && *guest >= next
                && guest.is_multiple_of(size);
            if !fits {
                return Err(Error::os(libc::EINVAL));
            }
            next = guest + size;
        }
        let result = image.write_packed(queue, clusters, data).await;
        self.changed(queue, image, result).await
    }

    /// The top image, if it can have compressed clusters.
    fn packed_top(&self, offset: u64, length: u64) -> Result<&Image> {
        match self.top_for_writing(offset, length)? {
            Top::Qcow2(image) if !image.geometry().has_data_file() => Ok(image),
            _ => Err(Error::os(libc::ENOTSUP)),
        }
    }

    /// Compresses and stores some clusters.
    async fn compress(&self, queue: &Queue, image: &Image, guest: u64, iov: &Iov) -> Result<()> {
        let size = image.geometry().cluster_size() as usize;
        let kind = image.compression();
        let pack = move |source: &[u8]| {
            let mut packed = vec![0; size - 1];
            let mut compressor = Compressor::new();
            let length = compressor.compress(kind, None, source, &mut packed);
            let length = length.map_err(|e| Error::Refused(e.to_string()))?;
            packed.truncate(length.unwrap_or(0));
            Ok::<_, Error>(length.is_some().then_some(packed))
        };
        let cluster = |nth: usize| {
            // The last one of the disk may be short: zeroes follow.
            let mut source = vec![0; size];
            let count = size.min(iov.len() - nth * size);
            iov.slice(nth * size, count).copy_to(&mut source[..count]);
            source
        };
        let count = iov.len().div_ceil(size);
        let mut packed = Vec::new();
        if queue.options().inflate_inline || count == 1 {
            for nth in 0..count {
                packed.push(pack(&cluster(nth))?);
            }
        } else {
            let running: Vec<_> = (0..count)
                .map(|nth| {
                    let source = Arc::new(cluster(nth));
                    codec::workers::run(move || pack(&source))
                })
                .collect();
            for running in running {
                packed.push(running.await?);
            }
        }
        let mut clusters = Vec::new();
        let mut data = Vec::new();
        for (nth, packed) in packed.into_iter().enumerate() {
            let at = guest + (nth * size) as u64;
            match packed {
                Some(packed) => {
                    clusters.push((at, data.len()..data.len() + packed.len()));
                    data.extend(packed);
                }
                None => {
                    let part = nth * size..iov.len().min((nth + 1) * size);
                    let part = iov.slice(part.start, part.len());
                    self.write_image(queue, image, at, &part).await?;
                }
            }
        }
        image.write_packed(queue, &clusters, &data).await
    }
}
