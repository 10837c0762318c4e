//! What the workers of a conversion do with a range of the disk.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::block::Device;
use crate::drivers::CompressedData;
use crate::drivers::stream::{BLOCK, Channel, Clusters, Content, Piece};
use crate::jobs::convert::{self, ConvertError, Output, Part};
use crate::jobs::rate_limiter::RateLimiter;
use crate::jobs::sequencer::Ticket;
use crate::jobs::workers::{self, Cursor};
use crate::lock;
use crate::offset::HostOffset;
use crate::storage::{Buffer, PoolBuffer, Queue};

/// What the workers share.
pub struct Job {
    pub channel: Arc<Channel<Piece>>,
    pub cursor: Cursor,
    /// The first failure.
    pub failure: Mutex<Option<ConvertError>>,
    pub rate_limiter: RateLimiter,
    /// What is read where the image says nothing.
    pub backing: Option<Device>,
    pub output: Output,
}

impl workers::Job for Job {
    fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    async fn worker(&self, queue: &Queue) {
        let sequencer = &self.output.sequencer;
        while let Some((ticket, piece)) = self.channel.next(|pop| sequencer.take(pop)).await {
            match self.store(queue, piece, ticket).await {
                Ok(stored) => self.cursor.finish(&stored).await,
                Err(error) => {
                    lock(&self.failure).get_or_insert(error);
                    self.cursor.stop();
                    self.channel.stop();
                }
            }
        }
    }
}

impl Job {
    /// Writes a piece to the target. Returns the range that it is.
    async fn store(
        &self,
        queue: &Queue,
        piece: Piece,
        ticket: Ticket<'_>,
    ) -> Result<Range<u64>, ConvertError> {
        let from = |length: u64| piece.guest..piece.guest + length;
        let chunk = match piece.content {
            Content::Zero(length) => {
                let chunk = from(length);
                let zero = convert::Treatment::Zero;
                self.output
                    .put_range(queue, &chunk, zero, Some(ticket))
                    .await?;
                return Ok(chunk);
            }
            Content::Backing(length) => {
                let chunk = from(length);
                self.store_backing(queue, &chunk, ticket).await?;
                return Ok(chunk);
            }
            Content::Data(block, range) => {
                let chunk = from(range.len() as u64);
                self.rate_limiter.wait(range.len() as u64, &self.cursor);
                let mut block = block;
                match Arc::get_mut(&mut block) {
                    Some(block) if range.start == 0 => {
                        self.put(queue, &chunk, block.buffer_mut(), Some(ticket))
                            .await?;
                    }
                    _ => {
                        let mut buffer = self.buffer(queue, range.len());
                        buffer[..range.len()].copy_from_slice(&block[range]);
                        drop(block);
                        self.put(queue, &chunk, &mut buffer, Some(ticket)).await?;
                    }
                }
                chunk
            }
            Content::Compressed(clusters) => {
                let chunk = from(clusters.length);
                self.rate_limiter.wait(clusters.length, &self.cursor);
                self.output.sequencer.yield_to_current().await;
                let mut buffer = self.inflate(queue, piece.guest, clusters)?;
                self.put(queue, &chunk, &mut buffer, Some(ticket)).await?;
                chunk
            }
        };
        Ok(chunk)
    }

    /// Memory for `length` bytes of the disk in whole clusters of the target.
    fn buffer(&self, queue: &Queue, length: usize) -> PoolBuffer {
        let unit = self.output.target.cluster_size() as usize;
        queue.buffer(length.next_multiple_of(unit))
    }

    async fn put(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
        buffer: &mut Buffer,
        ticket: Option<Ticket<'_>>,
    ) -> Result<(), ConvertError> {
        let parts = [Part {
            range: chunk.clone(),
            content: convert::Treatment::Data,
        }];
        self.output.put(queue, chunk, &parts, buffer, ticket).await
    }

    fn inflate(
        &self,
        queue: &Queue,
        guest: u64,
        clusters: Clusters,
    ) -> Result<PoolBuffer, ConvertError> {
        let Clusters {
            inflater,
            places,
            bytes,
            ..
        } = clusters;
        let size = inflater.output_len();
        let mut buffer = self.buffer(queue, places.len() * size);
        for (nth, (range, host)) in places.into_iter().enumerate() {
            let out = &mut buffer[nth * size..(nth + 1) * size];
            let length = range.len() as u32;
            inflater.inflate(&bytes[range], out).map_err(|source| {
                let data = CompressedData {
                    host: HostOffset(host),
                    length,
                    slack: 0,
                    inflater,
                };
                let offset = guest + (nth * size) as u64;
                ConvertError::Read {
                    offset,
                    source: data.error(offset, source),
                }
            })?;
        }
        Ok(buffer)
    }

    /// Copies a range of the backing file.
    async fn store_backing(
        &self,
        queue: &Queue,
        range: &Range<u64>,
        ticket: Ticket<'_>,
    ) -> Result<(), ConvertError> {
        let mut ticket = Some(ticket);
        let mut at = range.start;
        while at < range.end {
            let (zero, end) = self.backing_at(queue, at, range.end).await?;
            let chunk = at..end;
            if zero {
                let zero = convert::Treatment::Zero;
                self.output
                    .put_range(queue, &chunk, zero, ticket.take())
                    .await?;
            } else {
                self.rate_limiter.wait(end - at, &self.cursor);
                let mut buffer = self.read_backing(queue, &chunk).await?;
                self.put(queue, &chunk, &mut buffer, ticket.take()).await?;
            }
            at = end;
        }
        Ok(())
    }

    /// Whether the backing file reads as zeroes from `at` on, and up to where that is so, at most
    /// `end`. Parts end at clusters of the target.
    async fn backing_at(
        &self,
        queue: &Queue,
        at: u64,
        end: u64,
    ) -> Result<(bool, u64), ConvertError> {
        let Some(backing) = self.backing.as_ref().filter(|b| at < b.size()) else {
            return Ok((true, end));
        };
        let unit = self.output.target.cluster_size();
        let status = backing
            .status(queue, at, end.min(backing.size()) - at)
            .await;
        let status = status.map_err(|source| ConvertError::Read { offset: at, source })?;
        let next = at + status.length;
        let known = match next >= backing.size() && status.zero {
            true => end,
            false => next.min(end),
        };
        let zero_end = match known == end {
            true => end,
            false => known / unit * unit,
        };
        match status.zero && zero_end > at {
            true => Ok((true, zero_end)),
            false => {
                let most = (at + unit.max(BLOCK as u64)) / unit * unit;
                let data = known.checked_next_multiple_of(unit).unwrap_or(end);
                Ok((false, data.min(most).min(end)))
            }
        }
    }

    /// Reads a part of the backing file, and zeroes behind its end.
    #[allow(unsafe_code)]
    async fn read_backing(
        &self,
        queue: &Queue,
        range: &Range<u64>,
    ) -> Result<PoolBuffer, ConvertError> {
        let length = (range.end - range.start) as usize;
        let mut buffer = self.buffer(queue, length);
        let Some(backing) = &self.backing else {
            unreachable!("without a backing file all is zero");
        };
        let there = (backing.size().saturating_sub(range.start)).min(length as u64) as usize;
        buffer[there..length].fill(0);
        // SAFETY: the read, awaited here, has ended before the buffer is used again.
        let iov = unsafe { buffer.iov() }.slice(0, there);
        let read = backing.read(queue, range.start, &iov).await;
        read.map_err(|source| ConvertError::Read {
            offset: source.guest_offset().unwrap_or(range.start),
            source,
        })?;
        Ok(buffer)
    }
}
