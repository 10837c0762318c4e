//! Compressing the clusters of a chunk.

use std::cell::RefCell;
use std::ops::Range;

use super::content::{Part, Treatment};
use super::output::{Operations, Output, write_to_stream};
use super::{CompressOptions, ConvertError, Packing, Target};
use crate::Error;
use crate::codec::{CodecError, Compressor, zlib_bound};
use crate::jobs::join_set::JoinSet;
use crate::jobs::zero;
use crate::storage::{Buffer, Iov, PoolBuffer, Queue};

/// What a chunk is stored as.
pub(super) struct Packed {
    /// Compressed clusters: where each starts on the disk, and where it is in
    /// `data`.
    clusters: Vec<(u64, Range<usize>)>,
    data: PoolBuffer,
    /// Clusters that do not shrink: written as they are.
    plain: Vec<Range<u64>>,
    /// Clusters that are to read as zeroes.
    zero: Vec<Range<u64>>,
}

impl Packing {
    /// The most bytes that are stored of a cluster of `size` bytes that is compressed.
    fn bound(self, size: usize) -> usize {
        match self {
            Packing::Shorter(_) => size - 1,
            Packing::Zlib => zlib_bound(size),
            Packing::Below => 0,
        }
    }

    /// Compresses a cluster, with the compressor that this thread keeps, into `dst` of
    /// [`Packing::bound`] bytes. None: it is stored as it is.
    fn compress(
        self,
        level: Option<i32>,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<Option<usize>, CodecError> {
        thread_local! {
            static KEPT: RefCell<Compressor> = RefCell::new(Compressor::new());
        }
        KEPT.with_borrow_mut(|kept| match self {
            Packing::Shorter(kind) => kept.compress(kind, level, src, dst),
            Packing::Zlib => kept.compress_to_zlib(level, src, dst).map(Some),
            Packing::Below => Ok(None),
        })
    }
}

impl Output {
    /// Compresses the data of a chunk, which are in `buffer`.
    pub(super) fn pack(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
        parts: &[Part],
        buffer: &mut Buffer,
        options: CompressOptions,
    ) -> Result<Packed, ConvertError> {
        let packing = self.target.packing().ok_or(ConvertError::NotCompressible)?;
        let size = self.target.cluster_size();
        let clusters = (chunk.end - chunk.start).div_ceil(size) as usize;
        let mut packed = Packed {
            clusters: Vec::new(),
            data: queue.buffer(clusters * packing.bound(size as usize)),
            plain: Vec::new(),
            zero: Vec::new(),
        };
        for Part { range, content } in parts {
            if *content != Treatment::Data {
                if !self.is_left(range.start, *content) {
                    packed.zero.push(range.clone());
                }
                continue;
            }
            for offset in range.clone().step_by(size as usize) {
                let cluster = offset..(offset + size).min(range.end);
                let at = (offset - chunk.start) as usize;
                let end = (cluster.end - chunk.start) as usize;
                let bytes = &mut buffer[at..at + size as usize];
                // A cluster is whole, also where the disk ends.
                bytes[end - at..].fill(0);
                if self.options.sparse > 0 && zero::is_zero(bytes) {
                    if !self.is_zero_already(offset) {
                        packed.zero.push(cluster);
                    }
                    continue;
                }
                let stored = packed.add(packing, options.level, &cluster, bytes);
                stored.map_err(|source| ConvertError::Write { offset, source })?;
            }
        }
        Ok(packed)
    }

    /// Writes a cluster that is not compressed here.
    async fn write_plain(&self, queue: &Queue, offset: u64, iov: Iov) -> Result<(), ConvertError> {
        let Some((device, Packing::Below)) = self.target.device().zip(self.target.packing()) else {
            return self.write_data(queue, offset, iov).await;
        };
        let written = device.write_compressed(queue, offset, &iov).await;
        written.map_err(|source| ConvertError::Write { offset, source })
    }

    /// What is to be written of a packed chunk.
    #[allow(unsafe_code)]
    pub(super) fn write_packed<'a>(
        &'a self,
        queue: &'a Queue,
        chunk: &Range<u64>,
        packed: &'a Packed,
        buffer: &'a mut Buffer,
    ) -> Operations<'a> {
        let mut operations = JoinSet::new();
        if let Some((offset, _)) = packed.clusters.first() {
            operations.push(async move {
                let (clusters, data) = (&packed.clusters, &packed.data);
                let written = self.target.write_packed(queue, clusters, data).await;
                written.map_err(|source| ConvertError::Write {
                    offset: *offset,
                    source,
                })
            });
        }
        if let Target::Stream(stream) = &self.target {
            if !packed.plain.is_empty() {
                let ranges = packed.plain.clone();
                operations.push(write_to_stream(stream, chunk.start, ranges, buffer));
            }
            return operations;
        }
        // SAFETY: the operations borrow `buffer`, which nothing writes to until they have ended.
        let iov = unsafe { buffer.iov() };
        for cluster in &packed.plain {
            let at = (cluster.start - chunk.start) as usize;
            let iov = iov.slice(at, (cluster.end - cluster.start) as usize);
            operations.push(self.write_plain(queue, cluster.start, iov));
        }
        for range in &packed.zero {
            operations.push(self.write_zeroes(queue, range.start, range.end - range.start));
        }
        operations
    }
}

impl Packed {
    /// Adds a cluster of the disk whose bytes are `bytes`.
    fn add(
        &mut self,
        packing: Packing,
        level: Option<i32>,
        cluster: &Range<u64>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let start = self.clusters.last().map_or(0, |(_, range)| range.end);
        let space = &mut self.data[start..start + packing.bound(bytes.len())];
        let length = packing.compress(level, bytes, space);
        match length.map_err(|e| Error::Refused(e.to_string()))? {
            Some(length) => self.clusters.push((cluster.start, start..start + length)),
            None => match self.plain.last_mut() {
                Some(last) if last.end == cluster.start => last.end = cluster.end,
                _ => self.plain.push(cluster.clone()),
            },
        }
        Ok(())
    }
}
