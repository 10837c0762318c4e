//! A qcow2 image as a stream.
//!
//! The header says where the L1 table is, that where L2 tables are, and these where data are. A
//! cluster whose use is known goes to the workers when it comes. One whose use is not known yet is
//! held until the last L2 table has come: then all that is mapped is known.
//!
//! A cluster of the stream has one use. If a table that comes later maps it once more, that is an
//! error: it is gone by then.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use crate::codec::{self, Inflater, Stream};
use crate::drivers::qcow2::OpenImage;
use crate::drivers::qcow2::structures::{
    CompressedCluster, Compression, Geometry, Header, L1Entry, L2Entry, RefcountTableEntry,
    SubclusterKind,
};
use crate::drivers::stream::{Block, Fault, Held, Pool, Reader, Reading, Sink, StreamHead};
use crate::drivers::{BackingName, Limits};
use crate::storage::{Memory, Queue};
use crate::{Error, Result};

/// Ranges of the disk that are known and have not come, at most.
const MAX_PENDING: usize = 1 << 20;
/// Refcount blocks that are known at most. Others are held like clusters of unknown use.
const MAX_REFCOUNT_BLOCKS: usize = 1 << 18;
/// Compressed data are counted in sectors.
const SECTOR: u64 = 512;

/// What the first cluster says.
pub struct Qcow2Head {
    header: Header,
    geometry: Geometry,
}

impl Qcow2Head {
    /// Bytes that [`Qcow2Head::read`] needs, by the first bytes of the stream.
    pub fn needed(head: &[u8]) -> Result<usize> {
        Ok(Header::decode_fixed(head)?.cluster_size() as usize)
    }

    /// Reads the header, with the checks of a file.
    pub fn read(queue: &Queue, head: &[u8], limits: Option<&Limits>) -> Result<Self> {
        let file = Arc::new(Memory::new(head.to_vec()));
        let image = queue.block_on(OpenImage::new(queue, file))?;
        if let Some(limits) = limits {
            limits.check_header(image.header(), 0)?;
        }
        image.refuse_encrypted()?;
        let (header, geometry) = (image.header().clone(), *image.geometry());
        Ok(Qcow2Head { header, geometry })
    }
}

impl StreamHead for Qcow2Head {
    fn size(&self) -> u64 {
        self.geometry.virtual_size()
    }

    fn unit(&self) -> u64 {
        self.geometry.subcluster_size()
    }

    fn block_unit(&self) -> u64 {
        self.geometry.cluster_size()
    }

    fn backing(&self) -> Option<BackingName<'_>> {
        Some(BackingName {
            name: self.header.backing_file()?,
            format: self.header.extensions.backing_format(),
        })
    }

    fn data_file(&self) -> Option<&[u8]> {
        let name = self.header.extensions.data_file();
        name.filter(|_| self.header.has_data_file())
    }

    fn needs_file(&self) -> Option<&'static str> {
        let has_data_file = self.header.has_data_file();
        has_data_file.then_some("The image has an external data file")
    }

    fn into_reader(self: Box<Self>, reading: Reading) -> Box<dyn Reader> {
        Box::new(Qcow2Reader::new(*self, reading))
    }
}

/// What is to come at an offset of the stream.
#[derive(Clone, Copy)]
struct Need(u64);

impl Need {
    const COMPRESSED: u64 = 1 << 63;

    /// So many bytes of data.
    fn data(length: u64) -> Self {
        Need(length)
    }

    /// A compressed cluster of at most so many bytes.
    fn compressed(length: u64) -> Self {
        Need(length | Self::COMPRESSED)
    }

    fn is_compressed(self) -> bool {
        self.0 & Self::COMPRESSED != 0
    }

    fn length(self) -> u64 {
        self.0 & !Self::COMPRESSED
    }
}

/// Compressed data of which a part has come.
struct Begun {
    host: u64,
    guest: u64,
    length: u64,
    bytes: Vec<u8>,
}

/// Neighbouring ranges of the disk that are mapped alike.
struct Run {
    kind: Kind,
    guest: u64,
    length: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unmapped,
    Zero,
    /// From this byte of the stream on.
    Data(u64),
}

/// Reads a qcow2 image.
pub struct Qcow2Reader {
    geometry: Geometry,
    size: u64,
    has_backing: bool,
    inflater: Inflater,
    pool: Arc<Pool>,
    /// The range of the L1 table, and of the part of it that maps the disk.
    l1: Range<u64>,
    l1_needed: u64,
    /// The entries that have come; None: all have, and were used.
    l1_bytes: Option<Vec<u8>>,
    /// L2 tables that are to come: their offsets, falling, and indices in the L1 table.
    wanted: Vec<(u64, u32)>,
    /// Data that are to come, by their offset in the stream and on the disk.
    pending: BTreeMap<(u64, u64), Need>,
    begun: Vec<Begun>,
    /// Clusters whose use is not known.
    held: Held,
    refcount_table: Range<u64>,
    refcount_blocks: HashSet<u64>,
}

impl Qcow2Reader {
    /// Of an image with this header.
    pub fn new(head: Qcow2Head, reading: Reading) -> Self {
        let Qcow2Head { header, geometry } = head;
        let Reading {
            has_backing,
            spill,
            pool,
        } = reading;
        let compression = match header.compression {
            Compression::Zlib => codec::Compression::Zlib,
            Compression::Zstd => codec::Compression::Zstd,
        };
        let cluster = geometry.cluster_size();
        let table = |start: u64, length: u64| start..start.saturating_add(length);
        Qcow2Reader {
            size: geometry.virtual_size(),
            has_backing,
            inflater: Inflater {
                stream: Stream::Cluster(compression),
                size: cluster as u32,
            },
            pool,
            l1: table(
                header.l1_offset,
                (u64::from(header.l1_size) * 8).next_multiple_of(cluster),
            ),
            l1_needed: geometry.l1_entries() * 8,
            l1_bytes: Some(Vec::new()),
            wanted: Vec::new(),
            pending: BTreeMap::new(),
            begun: Vec::new(),
            held: Held::new(spill),
            refcount_table: table(
                header.refcount_table_offset,
                u64::from(header.refcount_table_clusters) * cluster,
            ),
            refcount_blocks: HashSet::new(),
            geometry,
        }
    }

    /// Whether all that is mapped is known.
    fn is_complete(&self) -> bool {
        self.l1_bytes.is_none() && self.wanted.is_empty()
    }

    /// Takes what a block has of the L1 table.
    fn take_l1(&mut self, at: u64, block: &[u8], sink: &mut Sink<'_>) -> Result<(), Fault> {
        let needed = self.l1.start..self.l1.start + self.l1_needed;
        let Some(bytes) = &mut self.l1_bytes else {
            return Ok(());
        };
        bytes.extend(&block[inside(&needed, at, block.len())]);
        if (bytes.len() as u64) < self.l1_needed {
            return Ok(());
        }
        let bytes = std::mem::take(bytes);
        self.l1_bytes = None;
        self.use_l1(at, &bytes, sink)
    }

    /// Finds the L2 tables. Those before `at` have come and are held.
    fn use_l1(&mut self, at: u64, bytes: &[u8], sink: &mut Sink<'_>) -> Result<(), Fault> {
        let coverage = self.geometry.l2_coverage();
        let mut unmapped = 0..0;
        for (index, entry) in (0u32..).zip(bytes.chunks_exact(8)) {
            let guest = u64::from(index) * coverage;
            let entry = L1Entry::from_be_bytes(entry.try_into().unwrap_or_default());
            let table = entry.without_reserved().l2_table(&self.geometry);
            let table = table.map_err(|e| Error::Corrupt {
                guest,
                what: e.at("L1 entry", index.into()).to_string(),
            })?;
            match table {
                Some(table) => self.wanted.push((table.0, index)),
                None => {
                    if unmapped.end != guest {
                        self.unmapped(unmapped, sink)?;
                        unmapped = guest..guest;
                    }
                    unmapped.end = guest.saturating_add(coverage);
                }
            }
        }
        self.unmapped(unmapped, sink)?;
        self.wanted.sort_unstable_by(|a, b| b.cmp(a));
        let cluster = self.geometry.cluster_size() as usize;
        while let Some((offset, index)) = self.wanted.pop_if(|(offset, _)| *offset < at) {
            let mut table = vec![0; cluster];
            let there = self.held.read(offset, &mut table)?;
            if there < cluster {
                return Err(gone(u64::from(index) * coverage, offset).into());
            }
            self.use_l2(at, &table, index, sink)?;
        }
        Ok(())
    }

    fn unmapped(&self, range: Range<u64>, sink: &mut Sink<'_>) -> Result<(), Fault> {
        let end = range.end.min(self.size);
        let length = end.saturating_sub(range.start);
        match (length, self.has_backing) {
            (0, _) => {}
            (_, true) => sink.backing(range.start, length)?,
            (_, false) => sink.zero(range.start, length)?,
        }
        Ok(())
    }

    /// Finds data by an L2 table. What is before `at` of the stream is held.
    fn use_l2(
        &mut self,
        at: u64,
        table: &[u8],
        l1_index: u32,
        sink: &mut Sink<'_>,
    ) -> Result<(), Fault> {
        let geometry = self.geometry;
        let (cluster, bits) = (geometry.cluster_size(), geometry.subcluster_bits());
        let base = u64::from(l1_index) * geometry.l2_coverage();
        let mut run: Option<Run> = None;
        for index in 0..geometry.l2_entries() {
            let guest = base + index as u64 * cluster;
            if guest >= self.size {
                break;
            }
            let corrupt = |what| Error::Corrupt { guest, what };
            let entry = L2Entry::read(table, index, &geometry).unwrap_or_default();
            let entry = entry.without_reserved(&geometry);
            let mut subcluster = 0;
            while subcluster < geometry.subclusters_per_cluster() {
                let found = entry.subcluster_run(subcluster, &geometry);
                let (kind, count) = found.map_err(|e| corrupt(e.to_string()))?;
                let guest = guest + (u64::from(subcluster) << bits);
                let length = (u64::from(count) << bits).min(self.size.saturating_sub(guest));
                subcluster += count;
                let kind = match kind {
                    SubclusterKind::Unallocated { .. } => Kind::Unmapped,
                    SubclusterKind::Zero { .. } => Kind::Zero,
                    SubclusterKind::Data { host } => Kind::Data(host.0),
                    SubclusterKind::Compressed(data) => {
                        self.need_compressed(at, data, guest, sink)?;
                        continue;
                    }
                    SubclusterKind::Invalid => {
                        return Err(corrupt("Invalid cluster entry found".into()).into());
                    }
                };
                match &mut run {
                    Some(run) if run.is_continued_by(kind, guest) => run.length += length,
                    _ => {
                        let new = Run {
                            kind,
                            guest,
                            length,
                        };
                        if let Some(run) = run.replace(new) {
                            self.need(at, &run, sink)?;
                        }
                    }
                }
            }
        }
        match run {
            Some(run) => self.need(at, &run, sink),
            None => Ok(()),
        }
    }

    /// A range of the disk is known.
    fn need(&mut self, at: u64, run: &Run, sink: &mut Sink<'_>) -> Result<(), Fault> {
        let Run {
            kind,
            guest,
            length,
        } = *run;
        match kind {
            Kind::Unmapped => self.unmapped(guest..guest + length, sink),
            Kind::Zero => Ok(sink.zero(guest, length)?),
            Kind::Data(host) => {
                let here = at.saturating_sub(host).min(length);
                self.data_from_held(host, guest, here, sink)?;
                match length - here {
                    0 => Ok(()),
                    rest => self.wait_for(host + here, guest + here, Need::data(rest)),
                }
            }
        }
    }

    fn data_from_held(
        &mut self,
        host: u64,
        guest: u64,
        length: u64,
        sink: &mut Sink<'_>,
    ) -> Result<(), Fault> {
        let mut done = 0;
        while done < length {
            let (host, guest) = (host + done, guest + done);
            let wanted = (length - done).min(self.pool.block_len() as u64);
            let held = &self.held;
            let mut failure = None;
            let block = self.pool.block(|out| {
                let read = held.read(host, &mut out[..wanted as usize]);
                Ok(read.unwrap_or_else(|e| {
                    failure = Some(e);
                    0
                }))
            })?;
            if let Some(failure) = failure {
                return Err(failure.into());
            }
            if (block.len() as u64) < wanted {
                let there = block.len() as u64;
                return Err(gone(guest + there, host + there).into());
            }
            sink.block(guest, block)?;
            self.held.release(host..host + wanted)?;
            done += wanted;
        }
        Ok(())
    }

    /// A compressed cluster is known.
    fn need_compressed(
        &mut self,
        at: u64,
        data: CompressedCluster,
        guest: u64,
        sink: &mut Sink<'_>,
    ) -> Result<(), Fault> {
        let (host, length) = (data.offset.0, data.length);
        if host >= at {
            return self.wait_for(host, guest, Need::compressed(length));
        }
        let here = (at - host).min(length);
        let mut bytes = vec![0; here as usize];
        let there = self.held.read(host, &mut bytes)?;
        bytes.truncate(there);
        let begun = Begun {
            host,
            guest,
            length,
            bytes,
        };
        // Others may have got its last sector, of which it uses a part.
        let missing = length - there as u64;
        if here < length && there as u64 == here {
            self.begun.push(begun);
            Ok(())
        } else if here == length && there > 0 && missing < SECTOR {
            self.inflate(&begun, sink)
        } else {
            Err(gone(guest, host).into())
        }
    }

    /// Hands over a compressed cluster.
    fn inflate(&self, begun: &Begun, sink: &mut Sink<'_>) -> Result<(), Fault> {
        let Begun {
            host, guest, bytes, ..
        } = begun;
        let length = self.geometry.cluster_size().min(self.size - guest);
        Ok(sink.compressed(*guest, length, self.inflater, *host, bytes)?)
    }

    fn wait_for(&mut self, host: u64, guest: u64, need: Need) -> Result<(), Fault> {
        if self.pending.len() >= MAX_PENDING {
            return Err(Error::Refused(format!(
                "The image has more than {MAX_PENDING} scattered ranges after the tables that map \
                 them: convert it from a file"
            ))
            .into());
        }
        self.pending.insert((host, guest), need);
        Ok(())
    }

    /// Takes what a block has of the refcount structures, which are of no use here.
    fn take_refcounts(&mut self, at: u64, block: &[u8]) -> Result<(), Fault> {
        let part = inside(&self.refcount_table, at, block.len());
        let cluster = self.geometry.cluster_size();
        for entry in block[part].chunks_exact(8) {
            let entry = RefcountTableEntry::from_be_bytes(entry.try_into().unwrap_or_default());
            if let Ok(Some(block)) = entry.without_reserved().block(&self.geometry)
                && self.refcount_blocks.len() < MAX_REFCOUNT_BLOCKS
                && self.refcount_blocks.insert(block.0)
                && block.0 < at
            {
                self.held.release(block.0..block.0 + cluster)?;
            }
        }
        Ok(())
    }

    /// Takes the tables of a block. Returns the ranges of the block that are metadata.
    fn take_tables(
        &mut self,
        at: u64,
        block: &[u8],
        sink: &mut Sink<'_>,
    ) -> Result<Vec<Range<u64>>, Fault> {
        let cluster = self.geometry.cluster_size();
        let mut known = vec![0..cluster, self.l1.clone(), self.refcount_table.clone()];
        self.take_refcounts(at, block)?;
        self.take_l1(at, block, sink)?;
        let end = at + block.len() as u64;
        while let Some((offset, index)) = self.wanted.pop_if(|(offset, _)| *offset < end) {
            let start = (offset - at) as usize;
            let Some(table) = block.get(start..start + cluster as usize) else {
                // The rest would be taken for unallocated.
                self.wanted.push((offset, index));
                break;
            };
            self.use_l2(at, table, index, sink)?;
            known.push(offset..offset + cluster);
        }
        Ok(known)
    }

    /// Hands over the data of a block. Adds what was used of it to `known`. Returns the block,
    /// unless all of it was used.
    fn take_data(
        &mut self,
        at: u64,
        block: Block,
        known: &mut Vec<Range<u64>>,
        sink: &mut Sink<'_>,
    ) -> Result<Option<Arc<Block>>, Fault> {
        let end = at + block.len() as u64;
        let mut compressed: Vec<Range<u64>> = Vec::new();
        for mut begun in std::mem::take(&mut self.begun) {
            let missing = begun.length - begun.bytes.len() as u64;
            let here = missing.min(block.len() as u64);
            begun.bytes.extend(&block[..here as usize]);
            compressed.push(at..begun.host + begun.length);
            match here == missing {
                true => self.inflate(&begun, sink)?,
                false => self.begun.push(begun),
            }
        }
        let mut data: Vec<(u64, Range<usize>)> = Vec::new();
        while let Some(first) = self.pending.first_entry() {
            let (host, guest) = *first.key();
            if host >= end {
                break;
            }
            let need = first.remove();
            let start = (host - at) as usize;
            let here = need.length().min(end - host);
            let part = start..start + here as usize;
            if need.is_compressed() {
                compressed.push(host..host + need.length());
                let begun = Begun {
                    host,
                    guest,
                    length: need.length(),
                    bytes: block[part].to_vec(),
                };
                match here == need.length() {
                    true => self.inflate(&begun, sink)?,
                    false => self.begin(begun)?,
                }
                continue;
            }
            known.push(host..host + here);
            if here < need.length() {
                let rest = Need::data(need.length() - here);
                self.pending.insert((end, guest + here), rest);
            }
            match data.last_mut() {
                Some((at, last)) if last.end == start && *at + last.len() as u64 == guest => {
                    last.end = part.end;
                }
                _ => data.push((guest, part)),
            }
        }
        self.know_compressed(compressed, known);
        let block = Arc::new(block);
        if let [(guest, range)] = &data[..]
            && range.len() == block.len()
        {
            // The worker has the block for itself.
            sink.data(*guest, block, range.clone())?;
            return Ok(None);
        }
        for (guest, range) in data {
            sink.data(guest, block.clone(), range)?;
        }
        Ok(Some(block))
    }

    fn begin(&mut self, begun: Begun) -> Result<(), Fault> {
        // Of a sound image one begins in a block and ends in the next one.
        const MOST: usize = 16;
        if self.begun.len() >= MOST {
            return Err(gone(begun.guest, begun.host).into());
        }
        self.begun.push(begun);
        Ok(())
    }

    /// Adds ranges of compressed data, which end with the last sector that they touch. What is
    /// behind their end in that sector may belong to another cluster, unless one follows that is
    /// known.
    fn know_compressed(&self, mut compressed: Vec<Range<u64>>, known: &mut Vec<Range<u64>>) {
        compressed.sort_unstable_by_key(|range| range.start);
        let mut starts = compressed.iter().map(|range| range.start).skip(1);
        let later = self.pending.first_key_value();
        let later = later.filter(|(_, need)| need.is_compressed());
        let later = later.map(|((host, _), _)| *host);
        for range in &compressed {
            let last = (range.end - 1) / SECTOR * SECTOR;
            let next = starts.next().or(later);
            let end = match next.is_some_and(|next| next > last && next <= range.end) {
                true => range.end,
                false => last,
            };
            known.push(range.start..end.max(range.start));
        }
    }

    /// Holds what is not known of a block.
    fn hold(&mut self, at: u64, block: &[u8], mut known: Vec<Range<u64>>) -> Result<(), Fault> {
        let end = at + block.len() as u64;
        known.sort_unstable_by_key(|range| range.start);
        known.push(end..end);
        let mut from = at;
        for range in known {
            if range.end <= from {
                from = from.max(range.end);
                continue;
            }
            let to = range.start.min(end);
            if from < to {
                self.hold_unless_refcounts(at, block, from..to)?;
            }
            from = from.max(range.end.min(end));
        }
        Ok(())
    }

    fn hold_unless_refcounts(
        &mut self,
        at: u64,
        block: &[u8],
        range: Range<u64>,
    ) -> Result<(), Fault> {
        let cluster = self.geometry.cluster_size();
        let mut from = range.start;
        let mut next = range.start;
        while next < range.end {
            let start = next / cluster * cluster;
            let end = (start + cluster).min(range.end);
            if self.refcount_blocks.contains(&start) {
                if from < next {
                    let part = (from - at) as usize..(next - at) as usize;
                    self.held.hold(from, &block[part])?;
                }
                from = end;
            }
            next = end;
        }
        if from < range.end {
            let part = (from - at) as usize..(range.end - at) as usize;
            self.held.hold(from, &block[part])?;
        }
        Ok(())
    }
}

impl Reader for Qcow2Reader {
    fn block(&mut self, at: u64, block: Block, sink: &mut Sink<'_>) -> Result<(), Fault> {
        let mut known = Vec::new();
        if !self.is_complete() {
            known = self.take_tables(at, &block, sink)?;
            if self.is_complete() {
                self.held.clear();
            }
        }
        match self.take_data(at, block, &mut known, sink)? {
            Some(block) if !self.is_complete() => self.hold(at, &block, known),
            _ => Ok(()),
        }
    }

    fn end(&mut self, length: u64, sink: &mut Sink<'_>) -> Result<u64, Fault> {
        if self.l1_bytes.is_some() {
            let offset = self.l1.start;
            return Err(Error::Refused(format!(
                "The stream ends at byte {length}, before the end of the L1 table at {offset:#x}"
            ))
            .into());
        }
        if let Some((offset, index)) = self.wanted.last() {
            return Err(Error::Corrupt {
                guest: u64::from(*index) * self.geometry.l2_coverage(),
                what: format!(
                    "L2 table offset {offset:#x} is past the end of the stream (L1 index: \
                     {index:#x})"
                ),
            }
            .into());
        }
        for begun in std::mem::take(&mut self.begun) {
            // Their length is a bound: if they are not whole, they do not inflate.
            match !begun.bytes.is_empty() {
                true => self.inflate(&begun, sink)?,
                false => return Err(past_end(begun.guest, begun.host).into()),
            }
        }
        match self.pending.first_key_value() {
            Some(((host, guest), _)) => Err(past_end(*guest, *host).into()),
            None => Ok(self.size),
        }
    }
}

impl Run {
    fn is_continued_by(&self, kind: Kind, guest: u64) -> bool {
        if self.guest + self.length != guest {
            return false;
        }
        match (self.kind, kind) {
            (Kind::Data(host), Kind::Data(next)) => host + self.length == next,
            (a, b) => a == b,
        }
    }
}

/// The part of a block of `length` bytes at `at` that is inside of `range`.
fn inside(range: &Range<u64>, at: u64, length: usize) -> Range<usize> {
    let end = at + length as u64;
    let from = range.start.clamp(at, end);
    let to = range.end.clamp(from, end);
    (from - at) as usize..(to - at) as usize
}

fn past_end(guest: u64, host: u64) -> Error {
    Error::Corrupt {
        guest,
        what: format!("Data offset {host:#x} is past the end of the stream"),
    }
}

/// The error of a second use of a cluster.
fn gone(guest: u64, host: u64) -> Error {
    Error::OutOfOrder(format!(
        "Host offset {host:#x} of the stream has two uses, one of them at guest offset {guest:#x}: the \
         image can only be converted from a file"
    ))
}
