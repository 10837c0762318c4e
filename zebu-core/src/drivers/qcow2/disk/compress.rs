//! Compressed writes.

use std::sync::Arc;

use super::Disk;
use crate::codec::{self, Compressor};
use crate::storage::Iov;
use crate::{Error, Result};

/// Clusters that are compressed at once.
const AT_ONCE: usize = 8;

impl Disk<'_> {
    /// Writes whole clusters compressed.
    pub(crate) async fn write_compressed(&self, offset: u64, iov: &Iov) -> Result<()> {
        let (image, queue) = (self.image, self.queue);
        let size = image.geometry().cluster_size();
        let end = offset + iov.len() as u64;
        let whole = end.is_multiple_of(size) || end == self.size;
        if !offset.is_multiple_of(size) || !whole {
            return Err(Error::os(libc::EINVAL));
        }
        let mut at = 0;
        while at < iov.len() {
            let count = (iov.len() - at).min(AT_ONCE * size as usize);
            let part = iov.slice(at, count);
            let result = self.compress(offset + at as u64, &part).await;
            image.changed(queue, result).await?;
            at += count;
        }
        Ok(())
    }

    /// Compresses and stores some clusters.
    async fn compress(&self, guest: u64, iov: &Iov) -> Result<()> {
        let (image, queue) = (self.image, self.queue);
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
                    self.write(at, &part).await?;
                }
            }
        }
        image.write_packed(queue, &clusters, &data).await
    }
}
