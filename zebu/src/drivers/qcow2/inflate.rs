//! Compressed clusters: reading their data and inflating them, here or on the
//! workers, and keeping a few for small reads.

use std::sync::Arc;

use super::Image;
use crate::codec::{self, CodecError, Compression};
use crate::format::{self, CompressedCluster};
use crate::storage::{self, Queue};
use crate::{Error, Result};

impl Image {
    /// How the clusters of this image are compressed.
    pub(crate) fn compression(&self) -> Compression {
        match self.header.compression {
            format::Compression::Zlib => Compression::Zlib,
            format::Compression::Zstd => Compression::Zstd,
        }
    }

    /// The inflated cluster that contains `guest`, kept for the next who wants
    /// a part of it. Those who want it at the same time share the work.
    pub(crate) async fn inflated(
        &self,
        queue: &Queue,
        guest: u64,
        cluster: CompressedCluster,
    ) -> Result<Arc<Vec<u8>>> {
        // By offset and length, as in the descriptor: in a broken image several
        // lengths may begin at one offset, and not all of them inflate.
        let sectors = (cluster.offset.0 % 512 + cluster.length) / 512;
        let key = cluster.offset.0 | (sectors - 1) << self.geometry.compressed_size_shift();
        if let Some(bytes) = self.inflated.get(key) {
            return Ok(bytes);
        }
        self.as_task(queue, async move |image, queue| {
            let load = || image.inflate(queue, guest, cluster);
            image.inflated.get_or_load(key, load).await
        })
        .await
    }

    /// Reads a compressed cluster and inflates it.
    async fn inflate(
        &self,
        queue: &Queue,
        guest: u64,
        cluster: CompressedCluster,
    ) -> Result<Vec<u8>> {
        let (kind, size) = (self.compression(), self.geometry.cluster_size() as usize);
        self.spend_inflating(size as u64)?;
        let (offset, length) = (cluster.offset.0, cluster.length as usize);
        storage::event(&*self.file, storage::Event::ReadCompressed);
        let source = storage::read_vec(&*self.file, queue, offset, length).await?;
        let inflate = move || {
            let mut bytes = vec![0; size];
            codec::decompress(kind, &source, &mut bytes).map(|()| bytes)
        };
        let result = if queue.options().inflate_here {
            inflate()
        } else {
            codec::workers::run(inflate).await
        };
        result.map_err(|e| self.compressed_error(guest, cluster, e))
    }

    /// Counts the work of inflating clusters of so many bytes together.
    pub(crate) fn spend_inflating(&self, bytes: u64) -> Result<()> {
        self.spend(bytes)
    }

    /// The error of a cluster that does not inflate.
    pub(crate) fn compressed_error(
        &self,
        guest: u64,
        cluster: CompressedCluster,
        source: CodecError,
    ) -> Error {
        Error::Compressed {
            guest: guest & !(self.geometry.cluster_size() - 1),
            host: cluster.offset.0,
            source,
        }
    }
}
