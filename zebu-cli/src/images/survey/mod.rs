//! A survey of a disk: what it is made of, in total and by cells of equal size, and how it lies in
//! its file. Its memory and time are bounded, also for the largest disks.

mod bytes;
mod file_map;
mod refcounts;

use std::ops::Range;

use zebu::Result;
use zebu::block::{Device, Status, StorageId};
use zebu::internal::Mapping;
use zebu::jobs;
use zebu::storage::Queue;

pub use bytes::{Bytes, LAYERS};
pub use file_map::{COLUMNS, FileMap, ROWS};
use refcounts::Refcounts;

/// Ranges that are looked up in a cell at most. What is left of it is taken to be like these.
const MOST_LOOKUPS: u32 = 4096;
/// Clusters of a file in which leaks are looked for at most.
const MOST_CHECKED: u64 = 1 << 26;

/// What a disk is made of.
pub struct Survey {
    /// The bytes of the disk that were looked at.
    pub range: Range<u64>,
    /// Bytes of a cell; the last one may have less.
    pub cell_size: u64,
    /// The cells, in order.
    pub cells: Vec<Bytes>,
    /// All cells together.
    pub total: Bytes,
    /// Bytes that compressed data take, about.
    pub compressed_to: u64,
    /// Pieces of data that are in a row where they are stored.
    pub extents: u64,
    /// How many of them are in the top image, and lie before the one before.
    pub backward: u64,
    /// Whether some bytes were not looked at, but taken to be like their neighbours.
    pub is_sampled: bool,
    /// Where the disk's data lie in the file of the top image, if that is known.
    pub file: Option<FileMap>,
    /// How the clusters of a qcow2 file are used.
    pub clusters: Option<Clusters>,
}

/// How the clusters of a qcow2 file are used, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clusters {
    /// Refcount 0.
    pub free: u64,
    /// Others.
    pub used: u64,
}

/// Leaks and errors of a qcow2 image.
pub struct Check {
    /// Bytes that are used by nothing, and marked as used.
    pub leaked: u64,
    /// Errors.
    pub corruptions: u64,
}

impl Survey {
    /// Looks at `range` of the disk, in at most `most` cells.
    ///
    /// # Errors
    ///
    /// The metadata cannot be read.
    pub fn of(queue: &Queue, device: &Device, range: Range<u64>, most: u64) -> Result<Self> {
        queue.block_on(Walk::new(queue, device, range, most)?.run())
    }
}

/// Looks for leaks and errors; None if the image has no such check, or too much would be read.
///
/// # Errors
///
/// The check fails.
pub fn check(queue: &Queue, device: &Device) -> Result<Option<Check>> {
    let Some(image) = device.top().as_qcow2() else {
        return Ok(None);
    };
    if image.geometry().clusters_for(image.file().len()?) > MOST_CHECKED {
        return Ok(None);
    }
    let report = queue.block_on(jobs::check(queue, image, &mut |_| {}, |_| {}))?;
    Ok(Some(Check {
        leaked: report.leaks * image.cluster_size(),
        corruptions: report.corruptions,
    }))
}

/// A survey that is made.
struct Walk<'a> {
    queue: &'a Queue,
    device: &'a Device,
    survey: Survey,
    refcounts: Option<Refcounts>,
    /// The storage of the top image whose map is drawn.
    storage: StorageId,
    last: Option<Piece>,
    /// Where the last piece of the top image began.
    last_of_top: u64,
}

/// Where a piece of data is stored.
#[derive(Clone, Copy)]
struct Piece {
    depth: usize,
    storage: StorageId,
    compressed: bool,
    host: Range64,
    /// The end may be so much too high.
    slack: u64,
}

/// A range that is copied.
#[derive(Clone, Copy)]
struct Range64 {
    start: u64,
    end: u64,
}

impl<'a> Walk<'a> {
    fn new(queue: &'a Queue, device: &'a Device, range: Range<u64>, most: u64) -> Result<Self> {
        let unit = device
            .top()
            .cluster_size()
            .unwrap_or(4096)
            .clamp(4096, 1 << 21);
        let length = range.end - range.start;
        let cell_size = length.div_ceil(most).max(1).next_multiple_of(unit);
        let cells = length.div_ceil(cell_size) as usize;
        let image = device.top().as_qcow2();
        let has_data_file = image.is_some_and(|image| image.geometry().has_data_file());
        let storage = StorageId(u32::from(has_data_file));
        let refcounts = match image {
            Some(image) => Some(queue.block_on(Refcounts::load(queue, image))?),
            None => None,
        };
        let file_len = device.top().storage(storage).len()?;
        let file = (file_len > 0).then(|| FileMap::new(file_len, range.clone()));
        Ok(Walk {
            queue,
            device,
            survey: Survey {
                range,
                cell_size,
                cells: vec![Bytes::default(); cells],
                total: Bytes::default(),
                compressed_to: 0,
                extents: 0,
                backward: 0,
                is_sampled: false,
                file,
                clusters: None,
            },
            refcounts,
            storage,
            last: None,
            last_of_top: 0,
        })
    }

    async fn run(mut self) -> Result<Survey> {
        for cell in 0..self.survey.cells.len() {
            let start = self.survey.range.start + cell as u64 * self.survey.cell_size;
            let end = (start + self.survey.cell_size).min(self.survey.range.end);
            let bytes = self.cell(start..end).await?;
            self.survey.total.add(&bytes);
            self.survey.cells[cell] = bytes;
        }
        if let Some(refcounts) = &mut self.refcounts {
            // Refcounts are of the file with the metadata.
            let map = self.survey.file.as_mut();
            let map = map.filter(|_| self.storage == StorageId::FILE);
            self.survey.clusters = Some(refcounts.count(map).await?);
        }
        Ok(self.survey)
    }

    async fn cell(&mut self, range: Range<u64>) -> Result<Bytes> {
        let mut bytes = Bytes::default();
        let mut at = range.start;
        let mut lookups = 0;
        while at < range.end {
            if lookups == MOST_LOOKUPS {
                self.survey.is_sampled = true;
                self.last = None;
                bytes.scale(range.end - range.start, at - range.start);
                break;
            }
            lookups += 1;
            let left = range.end - at;
            let status = self.device.status(self.queue, at, left).await?;
            let length = status.length.clamp(1, left);
            bytes.count(&status, length);
            if status.data && !status.zero {
                bytes.shared += self.data(at, length, &status).await?;
            } else {
                self.last = None;
            }
            at += length;
        }
        Ok(bytes)
    }

    /// Notes data at `guest`. Returns how many bytes a snapshot holds, too.
    async fn data(&mut self, guest: u64, length: u64, status: &Status) -> Result<u64> {
        let Some(piece) = self.piece(guest, length, status).await? else {
            self.survey.extents += 1;
            self.last = None;
            return Ok(0);
        };
        let mut new = piece.host;
        match self.last.replace(piece) {
            Some(last) if last.is_continued_by(&piece) => {
                // The length of compressed data is known up to a sector.
                if piece.compressed {
                    let overlap = last.host.end.saturating_sub(piece.host.start);
                    new.start = piece.host.start + overlap.min(piece.host.end - piece.host.start);
                }
            }
            _ => {
                self.survey.extents += 1;
                let is_backward = piece.depth == 0 && piece.host.start < self.last_of_top;
                self.survey.backward += u64::from(is_backward);
            }
        }
        if piece.depth == 0 {
            self.last_of_top = piece.host.start;
        }
        if piece.compressed {
            self.survey.compressed_to += new.end - new.start;
        }
        if piece.depth > 0 {
            return Ok(0);
        }
        if piece.storage == self.storage
            && let Some(file) = &mut self.survey.file
        {
            file.add(new.start..new.end, guest, length);
        }
        match &mut self.refcounts {
            Some(refcounts) if piece.storage == StorageId::FILE => {
                let host = piece.host.start..piece.host.end;
                let shared = refcounts.shared(host).await?;
                Ok(match piece.compressed {
                    true if shared > 0 => length,
                    true => 0,
                    false => shared,
                })
            }
            _ => Ok(0),
        }
    }

    /// Where data are stored, if that is known.
    async fn piece(&self, guest: u64, length: u64, status: &Status) -> Result<Option<Piece>> {
        let plain = Piece {
            depth: status.depth,
            storage: status.storage,
            compressed: false,
            host: Range64 { start: 0, end: 0 },
            slack: 0,
        };
        if let Some(host) = status.host {
            let host = Range64 {
                start: host,
                end: host.saturating_add(length),
            };
            return Ok(Some(Piece { host, ..plain }));
        }
        if !status.compressed {
            return Ok(None);
        }
        let (_, storage, mapping) = self.device.mapping(self.queue, guest, length).await?;
        Ok(match mapping {
            Mapping::Compressed { data, .. } => Some(Piece {
                storage,
                compressed: true,
                host: Range64 {
                    start: data.host.0,
                    end: data.end().0,
                },
                slack: data.slack.into(),
                ..plain
            }),
            _ => None,
        })
    }
}

impl Piece {
    /// Whether `next` lies behind it.
    fn is_continued_by(&self, next: &Piece) -> bool {
        let ends = self.host.end.saturating_sub(self.slack)..=self.host.end;
        (self.depth, self.storage, self.compressed) == (next.depth, next.storage, next.compressed)
            && (ends.contains(&next.host.start)
                // Another part of the same cluster.
                || self.compressed && self.host.start == next.host.start)
    }
}
