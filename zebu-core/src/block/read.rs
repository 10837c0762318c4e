//! Reading a range of a device: it is mapped through the whole chain, then all parts are read
//! together.
//!
//! The parts of a request are sorted by host offset, and neighbours become one vectored read. A
//! fragmented request costs as many operations as it has contiguous runs. Compressed clusters that
//! lie close together are read together too.

use std::collections::VecDeque;
use std::sync::Arc;

use super::device::{Device, Layer};
use super::filtered::{Filters, Rest};
use crate::Result;
use crate::codec;
use crate::drivers::{Below, CompressedData, Context, Extent, Mapping, Stay, StorageId};
use crate::storage::{self, Buffer, Iov, PoolBuffer, Queue, Reading, Reserved, Step};

/// Segments of one vectored operation at most. The kernel's `IOV_MAX` is 1024, and a part may have
/// several.
const MAX_MERGED: usize = 512;
/// Bytes of compressed data that are read together at most, unless one cluster has more.
const MAX_PACKED: u64 = 1 << 20;
/// Compressed clusters no farther apart than this are read together.
const PACKED_GAP: u64 = 4096;
/// Bytes that a worker inflates at once, if clusters are smaller: a buffer takes whole pages.
const INFLATED_AT_ONCE: usize = 64 << 10;

/// Uncompressed bytes somewhere.
#[derive(Clone, Copy)]
struct Part {
    layer: usize,
    storage: StorageId,
    host: u64,
    /// Offset in the request.
    at: usize,
    length: usize,
}

/// A whole compressed cluster.
#[derive(Clone, Copy)]
struct Packed {
    layer: usize,
    storage: StorageId,
    data: CompressedData,
    guest: u64,
    at: usize,
}

/// A piece of a compressed cluster.
struct Piece {
    layer: usize,
    storage: StorageId,
    data: CompressedData,
    /// Where the cluster is mapped.
    guest: u64,
    skip: usize,
    at: usize,
    length: usize,
}

/// The parts of a request that are not zeroes.
#[derive(Default)]
struct Plan {
    parts: Vec<Part>,
    packed: Vec<Packed>,
    pieces: Vec<Piece>,
}

impl Device {
    /// Fills `iov` with the bytes of the disk from `offset` on. After an error the content of the
    /// memory is unspecified.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`](crate::Error::OutOfRange) if the range is not inside the disk.
    /// [`Corrupt`](crate::Error::Corrupt) or [`Compressed`](crate::Error::Compressed) if metadata
    /// or data are damaged. [`Limit`](crate::Error::Limit) of an untrusted image.
    /// [`Io`](crate::Error::Io) of a file.
    pub async fn read(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        self.check_range(offset, iov.len() as u64)?;
        if self.has_filters && !iov.is_empty() {
            return self.filtered().read(queue, offset, iov).await;
        }
        let _stay = self.enter();
        self.chain().read_mapped(queue, offset, iov).await
    }

    /// Enters the epoch of a request. Until the guard is dropped, no cluster that the request finds
    /// mapped is reused.
    pub(super) fn enter(&self) -> Option<Stay<'_>> {
        self.top().image.enter()
    }

    /// The images as they are read.
    #[inline]
    pub(super) fn chain(&self) -> Chain<'_> {
        Chain {
            layers: self.layers(),
            size: self.size(),
        }
    }
}

/// Images that are read as one, the top one first. Its methods take it by value: a reference would
/// make it a part of every future of a read.
#[derive(Clone, Copy)]
pub(super) struct Chain<'a> {
    layers: &'a [Layer],
    /// Size of the disk in bytes. What an image below has behind it is not part of the disk.
    size: u64,
}

impl<'a> Chain<'a> {
    /// These images as one disk. How much of it is shown, the image above them knows.
    pub(super) fn of(layers: &'a [Layer]) -> Option<Self> {
        let size = layers.first()?.size();
        Some(Chain { layers, size })
    }

    /// What the first image lies on.
    pub(super) fn behind(self) -> Option<Rest<'a>> {
        Rest::below(&self.layers[1..])
    }

    /// Size of the disk in bytes.
    pub(super) fn size(self) -> u64 {
        self.size
    }

    /// The layer that maps `offset`, and its extent there, of at most `limit` bytes. An unallocated
    /// extent is mapped by no layer; the layer is then the last one of the search.
    pub(super) async fn resolve(
        self,
        queue: &Queue,
        offset: u64,
        mut limit: u64,
    ) -> Result<(usize, Extent)> {
        let mut depth = 0;
        loop {
            let extent = self.layers[depth]
                .image
                .extent(queue, offset, limit)
                .await?;
            if !matches!(extent.mapping, Mapping::Unallocated { .. }) {
                return Ok((depth, extent));
            }
            // Nothing is mapped past the end of a shorter backing file. A longer one ends
            // with this disk.
            let below = self.layers.get(depth + 1).map_or(0, Layer::size);
            let below = below.min(self.size);
            if below <= offset {
                return Ok((depth, extent));
            }
            limit = extent.length.min(below - offset);
            depth += 1;
        }
    }

    /// The first image.
    pub(super) fn first(self) -> &'a Layer {
        &self.layers[0]
    }

    /// Whether the image of this depth is the last one.
    pub(super) fn is_last(self, depth: usize) -> bool {
        depth + 1 == self.layers.len()
    }

    /// Those above the next image that has filters, and the others, of which only what the disk shows
    /// counts. None: no image below the first one has some.
    pub(super) fn cut_at_filters(self) -> Option<(Chain<'a>, Chain<'a>)> {
        self.cut_at(|filters| !filters.is_empty())
    }

    /// The same at the next image whose filters are such.
    pub(super) fn cut_at(
        self,
        is_such: impl Fn(&Filters) -> bool,
    ) -> Option<(Chain<'a>, Chain<'a>)> {
        let below = self.layers.get(1..)?;
        let at = 1 + below.iter().position(|layer| is_such(&layer.filters))?;
        let sizes = self.layers[1..=at].iter().map(Layer::size);
        let size = sizes.fold(self.size, u64::min);
        let (upper, layers) = self.layers.split_at(at);
        let upper = Chain {
            layers: upper,
            size: self.size,
        };
        Some((upper, Chain { layers, size }))
    }

    /// Reports an event to the files of all images.
    pub(super) fn event(self, event: storage::Event) {
        for layer in self.layers {
            layer.event(event);
        }
    }

    /// [`Device::read`] that may also reach past the end of the disk, where VM state is. The caller
    /// has entered the epoch.
    pub(super) async fn read_mapped(self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let length = iov.len() as u64;
        if length == 0 {
            return Ok(());
        }
        // Most requests lie in one extent, and need no plan.
        let (layer, extent) = self.resolve(queue, offset, length).await?;
        if extent.length == length {
            match extent.mapping {
                Mapping::Data { host } => {
                    let image = &self.layers[layer].image;
                    image.check_data(offset, extent.storage, host.0, length)?;
                    self.reads_from(layer);
                    let storage = &**image.storage(extent.storage);
                    return Ok(storage::read(storage, queue, host.0, iov).await?);
                }
                Mapping::Zero { .. } | Mapping::Unallocated { .. } => {
                    iov.fill(0);
                    return Ok(());
                }
                Mapping::Compressed { .. } => {}
            }
        }
        Box::pin(self.read_by_plan(queue, offset, iov)).await
    }

    /// Reads without a regard to filters.
    pub(super) async fn read_by_plan(self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let plan = self.plan(queue, offset, iov).await?;
        self.carry_out(queue, plan, iov).await
    }

    async fn plan(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<Plan> {
        let mut plan = Plan::default();
        let mut at = 0;
        while at < iov.len() {
            let guest = offset + at as u64;
            let limit = (iov.len() - at) as u64;
            let (layer, extent) = self.resolve(queue, guest, limit).await?;
            let length = extent.length as usize;
            match extent.mapping {
                Mapping::Zero { .. } | Mapping::Unallocated { .. } => iov.slice(at, length).fill(0),
                Mapping::Data { host } => {
                    let image = &self.layers[layer].image;
                    image.check_data(guest, extent.storage, host.0, extent.length)?;
                    plan.parts.push(Part {
                        layer,
                        storage: extent.storage,
                        host: host.0,
                        at,
                        length,
                    });
                }
                Mapping::Compressed { data, skip } => {
                    let (image, storage) = (&self.layers[layer].image, extent.storage);
                    let start = guest - skip;
                    let file = &**image.storage(storage);
                    let data = image.check_compressed(start, file, data)?;
                    if skip == 0 && length == data.inflater.output_len() {
                        plan.packed.push(Packed {
                            layer,
                            storage,
                            data,
                            guest,
                            at,
                        });
                    } else {
                        plan.pieces.push(Piece {
                            layer,
                            storage,
                            data,
                            guest: start,
                            skip: skip as usize,
                            at,
                            length,
                        });
                    }
                }
            }
            at += length;
        }
        plan.parts
            .sort_unstable_by_key(|p| (p.layer, p.storage, p.host));
        plan.packed
            .sort_unstable_by_key(|p| (p.layer, p.storage, p.data.host));
        Ok(plan)
    }

    async fn carry_out(&self, queue: &Queue, plan: Plan, iov: &Iov) -> Result<()> {
        let mut flight = Flight {
            chain: *self,
            queue,
            iov,
            reads: VecDeque::new(),
            failed: Vec::new(),
        };
        for run in runs(&plan.parts) {
            flight.wait_for_slot().await?;
            flight.start_data(run);
        }
        // Before the groups, whose memory must not be held while this waits for some.
        for piece in &plan.pieces {
            let layer = &self.layers[piece.layer];
            let file = layer.storage(piece.storage);
            let inflating = layer.image.inflated(queue, piece.guest, file, piece.data);
            let bytes = inflating.await?;
            iov.slice(piece.at, piece.length)
                .copy_from(&bytes[piece.skip..piece.skip + piece.length]);
        }
        for group in groups(&plan.packed) {
            flight.wait_for_slot().await?;
            flight.start_packed(group).await?;
        }
        while flight.finish_first().await? {}
        for packed in std::mem::take(&mut flight.failed) {
            flight.inflate_alone(&packed).await?;
        }
        Ok(())
    }

    /// Reports a read of a layer's data to blkdebug.
    fn reads_from(self, layer: usize) {
        for above in &self.layers[..layer] {
            above.event(storage::Event::ReadBackingAio);
        }
        self.layers[layer].event(storage::Event::ReadAio);
    }
}

/// A request on `queue` for an image over `below`.
pub(super) fn over<'a>(queue: &'a Queue, below: &'a Option<Rest<'a>>) -> Context<'a> {
    let below = below.as_ref().map(|rest| rest as &dyn Below);
    Context { queue, below }
}

/// Parts that follow each other on the host, as slices of `parts`.
fn runs(parts: &[Part]) -> impl Iterator<Item = &[Part]> {
    let mut rest = parts;
    std::iter::from_fn(move || {
        let first = rest.first()?;
        let mut end = first.host + first.length as u64;
        let count = 1 + rest[1..]
            .iter()
            .take(MAX_MERGED - 1)
            .take_while(|p| {
                let same = p.layer == first.layer && p.storage == first.storage;
                let follows = same && p.host == end;
                end = p.host + p.length as u64;
                follows
            })
            .count();
        let (run, left) = rest.split_at(count);
        rest = left;
        Some(run)
    })
}

/// Compressed clusters that are read together, as slices of `packed`.
fn groups(packed: &[Packed]) -> impl Iterator<Item = &[Packed]> {
    let mut rest = packed;
    std::iter::from_fn(move || {
        let first = rest.first()?;
        let start = first.data.host.0;
        let mut end = first.data.end().0;
        let count = 1 + rest[1..]
            .iter()
            .take_while(|p| {
                let (from, to) = (p.data.host.0, p.data.end().0.max(end));
                let together = (p.layer, p.storage) == (first.layer, first.storage)
                    && from <= end.saturating_add(PACKED_GAP)
                    && to - start <= MAX_PACKED;
                end = to;
                together
            })
            .count();
        let (group, left) = rest.split_at(count);
        rest = left;
        Some(group)
    })
}

/// The operations of one request that are in flight.
struct Flight<'a> {
    chain: Chain<'a>,
    queue: &'a Queue,
    iov: &'a Iov,
    reads: VecDeque<InFlight<'a>>,
    /// Clusters that did not inflate, which the driver may know more about.
    failed: Vec<Packed>,
}

enum InFlight<'a> {
    Data(Reading<'a>),
    Packed {
        // Dropped before the buffer that it reads into.
        reading: Reading<'a>,
        buffer: PoolBuffer,
        /// Host offset of the first byte of the buffer.
        start: u64,
        group: Vec<Packed>,
        memory: Option<Reserved>,
    },
}

impl<'a> Flight<'a> {
    /// Waits until another operation may be started.
    async fn wait_for_slot(&mut self) -> Result<()> {
        while self.reads.len() >= self.queue.options().parts.max(1) {
            self.finish_first().await?;
        }
        Ok(())
    }

    fn start_data(&mut self, run: &[Part]) {
        let first = run[0];
        let iov = match run {
            [part] => self.iov.slice(part.at, part.length),
            _ => self.iov.gather(run.iter().map(|p| (p.at, p.length))),
        };
        self.chain.reads_from(first.layer);
        let storage = self.chain.layers[first.layer].storage(first.storage);
        let reading = storage::begin_read(storage, self.queue, first.host, iov);
        self.reads.push_back(InFlight::Data(reading));
    }

    #[allow(unsafe_code)]
    async fn start_packed(&mut self, group: &[Packed]) -> Result<()> {
        let first = group[0];
        let file = self.chain.layers[first.layer].storage(first.storage);
        let align = file.alignment().offset as u64;
        let start = first.data.host.0 & !(align - 1);
        let end = group.iter().map(|p| p.data.end().0).max();
        let length = (end.unwrap_or(start) - start).next_multiple_of(align) as usize;
        let memory = self.reserve(length + self.inflated_apart(group)).await?;
        let mut buffer = self.queue.buffer(length);
        // SAFETY: `InFlight::Packed` keeps the buffer until the reading has
        // ended or was dropped, and nothing else uses it before.
        let iov = unsafe { buffer.iov() }.slice(0, length);
        storage::event(file, storage::Event::ReadCompressed);
        self.reads.push_back(InFlight::Packed {
            reading: storage::begin_read(file, self.queue, start, iov),
            buffer,
            start,
            group: group.to_vec(),
            memory,
        });
        Ok(())
    }

    /// Bytes that a group inflates to outside of the caller's memory.
    fn inflated_apart(&self, group: &[Packed]) -> usize {
        let sizes = group.iter().map(|p| p.data.inflater.output_len());
        match self.queue.options().inflate_inline {
            // One at a time, if the caller's memory is in segments.
            true => sizes.max().unwrap_or(0),
            false => sizes.sum(),
        }
    }

    /// Reserves memory for a group. It is not waited for while this request holds some of the same
    /// step: the groups in flight are finished first.
    async fn reserve(&mut self, bytes: usize) -> Result<Option<Reserved>> {
        loop {
            if let Ok(reserved) = self.queue.try_reserve(Step::Inflated, bytes) {
                return Ok(reserved);
            }
            if !self.finish_first().await? {
                return Ok(self.queue.reserve(Step::Inflated, bytes).await);
            }
        }
    }

    /// Waits for the oldest operation; false if there is none.
    async fn finish_first(&mut self) -> Result<bool> {
        match self.reads.pop_front() {
            None => return Ok(false),
            Some(InFlight::Data(reading)) => reading.finish().await?,
            Some(InFlight::Packed {
                reading,
                buffer,
                start,
                group,
                memory,
            }) => {
                // `buffer`, a local now, outlives the future awaited here.
                reading.finish().await?;
                self.inflate(buffer, start, &group, memory).await?;
            }
        }
        Ok(true)
    }

    async fn inflate(
        &mut self,
        buffer: PoolBuffer,
        start: u64,
        group: &[Packed],
        memory: Option<Reserved>,
    ) -> Result<()> {
        let image = &self.chain.layers[group[0].layer].image;
        image.spend(group.iter().map(|p| p.data.work()).sum())?;
        let range = |p: &Packed| {
            let from = (p.data.host.0 - start) as usize;
            from..from + p.data.length as usize
        };
        if self.queue.options().inflate_inline || group.len() == 1 && self.reads.is_empty() {
            for p in group {
                let (inflater, size) = (p.data.inflater, p.data.inflater.output_len());
                let out = self.iov.slice(p.at, size);
                let source = &buffer[range(p)];
                let done = out.with_single_mut(|out| inflater.inflate(source, out));
                let result = match done {
                    Some(result) => result,
                    None => {
                        let mut bytes = self.queue.buffer(size);
                        let bytes = &mut bytes[..size];
                        inflater
                            .inflate(source, bytes)
                            .map(|()| out.copy_from(bytes))
                    }
                };
                if result.is_err() {
                    self.failed.push(*p);
                }
            }
            return Ok(());
        }
        // The workers go on if the request is dropped, and so do what they hold.
        let source: Arc<(Buffer, _)> = Arc::new((buffer.into_buffer(), memory));
        let largest = group.iter().map(|p| p.data.inflater.output_len()).max();
        let at_once = (INFLATED_AT_ONCE / largest.unwrap_or(1).max(1)).max(1);
        let running: Vec<_> = group
            .chunks(at_once)
            .map(|part| {
                let source = source.clone();
                let part: Vec<_> = part.iter().map(|p| (range(p), p.data.inflater)).collect();
                let lengths = part.iter().map(|(_, inflater)| inflater.output_len());
                let length = lengths.sum();
                codec::workers::run(move || {
                    let mut bytes = Buffer::new(length);
                    let ends = codec::inflate_each(&source.0, part, &mut bytes);
                    (bytes, ends)
                })
            })
            .collect();
        for (part, running) in group.chunks(at_once).zip(running) {
            let (bytes, ends) = running.await;
            let mut start = 0;
            for (p, end) in part.iter().zip(ends) {
                match end {
                    Some(end) => {
                        self.iov
                            .slice(p.at, end - start)
                            .copy_from(&bytes[start..end]);
                        start = end;
                    }
                    None => self.failed.push(*p),
                }
            }
        }
        Ok(())
    }

    /// Has the driver inflate a cluster, which may know that more than `p.data` belongs to it. The
    /// error is that of the driver.
    async fn inflate_alone(&self, p: &Packed) -> Result<()> {
        let layer = &self.chain.layers[p.layer];
        let file = layer.storage(p.storage);
        let bytes = layer
            .image
            .inflated(self.queue, p.guest, file, p.data)
            .await?;
        let length = p.data.inflater.output_len();
        self.iov.slice(p.at, length).copy_from(&bytes[..length]);
        Ok(())
    }
}
