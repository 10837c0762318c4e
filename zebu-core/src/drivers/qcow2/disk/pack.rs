//! Writing compressed clusters, whose data are packed: one follows another
//! without regard to clusters, and a cluster counts each that has data in it.

use std::ops::Range;

use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::Writer;
use crate::drivers::qcow2::structures::{ClusterKind, L2Entry};
use crate::offset::HostOffset;
use crate::storage::{self, Queue};
use crate::{Error, Result};

/// Space that was allocated for compressed data. What is not mapped is freed on drop.
struct Packed<'a> {
    image: &'a Image,
    writer: &'a Writer,
    /// Host offset and length.
    places: Vec<(u64, u64)>,
    /// So many are mapped.
    mapped: usize,
}

impl Drop for Packed<'_> {
    fn drop(&mut self) {
        for (offset, length) in &self.places[self.mapped..] {
            let freed = self.image.reference(*offset, *length, false);
            self.writer.frees.push_ready(freed);
        }
    }
}

impl Image {
    /// Refuses compressed clusters where there can be none.
    pub(in crate::drivers::qcow2) fn refuse_packed(&self) -> Result<()> {
        match self.has_own_data {
            true => Err(Error::os(libc::ENOTSUP)),
            false => Ok(()),
        }
    }

    /// Refuses clusters that are not whole, do not ascend, or whose data are not shorter.
    pub(in crate::drivers::qcow2) fn check_packed(
        &self,
        clusters: &[(u64, Range<usize>)],
        data: &[u8],
    ) -> Result<()> {
        let size = self.geometry.cluster_size();
        let mut next = 0;
        for (guest, range) in clusters {
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
        Ok(())
    }

    /// Writes and maps clusters whose compressed data lie in `data`; see
    /// [`Device::write_packed`](crate::block::Device::write_packed).
    pub(crate) async fn write_packed(
        &self,
        queue: &Queue,
        clusters: &[(u64, Range<usize>)],
        data: &[u8],
    ) -> Result<()> {
        let (Some(first), Some(last)) = (clusters.first(), clusters.last()) else {
            return Ok(());
        };
        let writer = self.writer()?;
        let size = self.geometry.cluster_size();
        let length = last.0 + size - first.0;
        let announced = self.announce(queue, first.0..first.0 + length).await?;
        let _change = announced.change(queue, first.0, length).await?;
        let all = clusters.len();
        let mut free = Vec::new();
        for cluster in clusters {
            let slice = self.own_slice(queue, cluster.0).await?;
            match self.kind(self.entry(&slice, cluster.0), cluster.0)? {
                ClusterKind::Unallocated | ClusterKind::Zero { host: None } => {
                    free.push(cluster.clone());
                }
                // Of an image with extended L2 entries this includes zeroes
                // that have a host cluster.
                _ => {}
            }
        }
        let clusters = &free[..];
        let lengths = clusters.iter().map(|(_, range)| range.len() as u64);
        let mut packed = Packed {
            image: self,
            writer,
            places: Vec::new(),
            mapped: 0,
        };
        self.allocate_places(queue, lengths.collect(), &mut packed.places)
            .await?;
        let mut nth = 0;
        while nth < clusters.len() {
            let run = contiguous(&clusters[nth..], &packed.places[nth..]);
            let bytes = clusters[nth].1.start..clusters[nth + run - 1].1.end;
            let host = packed.places[nth].0;
            storage::event(&*self.file, storage::Event::WriteCompressed);
            storage::write_slice(&*self.file, queue, host, &data[bytes]).await?;
            nth += run;
        }
        for ((guest, _), (host, length)) in clusters.iter().zip(packed.places.clone()) {
            let slice = self.own_slice(queue, *guest).await?;
            let entry = L2Entry::compressed(HostOffset(host), length, &self.geometry)?;
            self.set_entry(&slice, *guest, entry, false)?;
            packed.mapped += 1;
        }
        match clusters.len() == all {
            true => Ok(()),
            false => Err(Error::os(libc::EIO)),
        }
    }

    /// Allocates space for compressed data of these lengths, one behind the other
    /// where that is possible.
    async fn allocate_places(
        &self,
        queue: &Queue,
        lengths: Vec<u64>,
        places: &mut Vec<(u64, u64)>,
    ) -> Result<()> {
        let writer = self.writer()?;
        loop {
            let rest = &lengths[places.len()..];
            let missing = writer
                .refcounts
                .take_bytes(rest, places, &writer.protected)?;
            match missing {
                Some(missing) => self.load_missing(queue, missing).await?,
                None => break,
            }
        }
        let end = places.iter().map(|(offset, length)| offset + length).max();
        let size = self.geometry.cluster_size();
        self.lengthen(queue, end.unwrap_or(0).next_multiple_of(size))
            .await
    }
}

/// How many of the first clusters have data that follow each other both in
/// memory and in the file.
fn contiguous(clusters: &[(u64, Range<usize>)], places: &[(u64, u64)]) -> usize {
    let pairs = clusters.windows(2).zip(places.windows(2));
    1 + pairs
        .take_while(|(c, r)| c[0].1.end == c[1].1.start && r[0].0 + r[0].1 == r[1].0)
        .count()
}
