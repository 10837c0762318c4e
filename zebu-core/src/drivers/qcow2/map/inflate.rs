//! Compressed clusters: their descriptors, and a cache of inflated ones for small reads.

use std::sync::Arc;

use crate::Result;
use crate::codec::{Compression, Inflater, Stream};
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::structures::{self, CompressedCluster, Header};
use crate::drivers::{CompressedData, inflate};
use crate::storage::Queue;

fn compression(header: &Header) -> Compression {
    match header.compression {
        structures::Compression::Zlib => Compression::Zlib,
        structures::Compression::Zstd => Compression::Zstd,
    }
}

/// What inflates the clusters of an image with this header.
pub(crate) fn inflater(header: &Header) -> Inflater {
    Inflater {
        stream: Stream::Cluster(compression(header)),
        size: 1 << header.cluster_bits,
    }
}

impl Image {
    /// How the clusters of this image are compressed.
    pub(crate) fn compression(&self) -> Compression {
        compression(&self.header)
    }

    /// The data of a descriptor, which has a bound of their length: in sectors, and some programs
    /// write more of them than there are data, also beyond the end of the file.
    pub(in crate::drivers::qcow2) fn compressed_data(
        &self,
        cluster: CompressedCluster,
    ) -> CompressedData {
        CompressedData {
            host: cluster.offset,
            // Two clusters of 2 MiB at most.
            length: cluster.length as u32,
            slack: cluster.length as u32,
            inflater: inflater(&self.header),
        }
    }

    /// The inflated cluster that contains `guest`, through the cache. Concurrent requests share the
    /// work. The caller has entered the epoch.
    pub(crate) async fn inflated(
        &self,
        queue: &Queue,
        guest: u64,
        data: CompressedData,
    ) -> Result<Arc<Vec<u8>>> {
        // By offset and length, as in the descriptor: in a broken image several
        // lengths may begin at one offset, and not all of them inflate.
        let sectors = (data.host.0 % 512 + u64::from(data.length)).div_ceil(512);
        let key = data.host.0 | (sectors - 1) << self.geometry.compressed_size_shift();
        if let Some(bytes) = self.inflated.get(key) {
            return Ok(bytes);
        }
        self.as_task(queue, async move |image, queue| {
            let load = async || {
                image.spend(data.work())?;
                inflate(queue, &*image.file, guest, data).await
            };
            image.inflated.get_or_load(key, load).await
        })
        .await
    }
}
