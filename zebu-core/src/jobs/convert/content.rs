//! What a chunk of the target is made of.

use std::ops::Range;

use super::{ConvertError, Job};
use crate::Error;
use crate::block::Status;
use crate::storage::Queue;

/// What is to be done with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::jobs) enum Treatment {
    /// It is copied.
    Data,
    /// The source reads as zeroes.
    Zero,
    /// It comes from the backing file; the target leaves it to its backing file too.
    Backing,
}

/// A range of the target of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::jobs) struct Part {
    pub range: Range<u64>,
    pub content: Treatment,
}

/// A range of one source, and where it starts there.
pub(super) struct Piece {
    pub source: usize,
    pub offset: u64,
    /// In the target.
    pub range: Range<u64>,
}

impl Piece {
    /// The error of a read of it.
    pub(super) fn read_error(&self, source: Error) -> ConvertError {
        // A request has several extents; the error may say which one failed.
        let length = self.range.end - self.range.start;
        let guest = source
            .guest_offset()
            .unwrap_or(0)
            .clamp(self.offset, self.offset + length - 1);
        ConvertError::Read {
            offset: self.range.start + (guest - self.offset),
            source,
        }
    }
}

impl Job {
    /// The pieces of the sources that `range` of the target comes from.
    pub(super) fn pieces(&self, range: Range<u64>) -> Vec<Piece> {
        let (mut pieces, mut base) = (Vec::new(), 0);
        for (source, device) in self.sources.iter().enumerate() {
            let end = base + device.size();
            let (from, to) = (range.start.max(base), range.end.min(end));
            if from < to {
                pieces.push(Piece {
                    source,
                    offset: from - base,
                    range: from..to,
                });
            }
            base = end;
        }
        pieces
    }

    /// The parts of a chunk; adjacent parts of one kind are joined, and cut at multiples of the
    /// target's unit.
    pub(super) async fn parts(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
    ) -> Result<Vec<Part>, ConvertError> {
        let mut parts: Vec<Part> = Vec::new();
        for piece in self.pieces(chunk.clone()) {
            let device = &self.sources[piece.source];
            let mut at = piece.range.start;
            while at < piece.range.end {
                let offset = piece.offset + (at - piece.range.start);
                // A range that needs nothing may continue far beyond the chunk.
                let limit = match at == chunk.start {
                    true => device.size() - offset,
                    false => piece.range.end - at,
                };
                let clean = self.clean_until(at, at + limit);
                let limit = match clean {
                    Some((false, end)) => end - at,
                    _ => limit,
                };
                let (mut length, content) = match clean {
                    Some((true, end)) => (end - at, Treatment::Backing),
                    _ => match device.status(queue, offset, limit).await {
                        Ok(status) => (status.length, self.content(at, &status)),
                        // The read finds out which sectors fail.
                        Err(_) if self.output.options.salvage => (limit, Treatment::Data),
                        Err(e) => return Err(piece.read_error(e)),
                    },
                };
                if let Some(from) = self.output.options.zero_from.filter(|from| *from > at) {
                    length = length.min(from - at);
                }
                if self.output.is_left(at, content) {
                    let end = (at + length) / self.chunk * self.chunk;
                    self.progress.cursor().skip(chunk.end, end);
                }
                let end = (at + length).min(piece.range.end);
                join(&mut parts, at..end, content);
                at = end;
            }
        }
        let unit = match self.output.options.compress {
            Some(_) => self.output.target.cluster_size(),
            None => self.output.target.zero_unit(),
        };
        Ok(fit(
            parts,
            chunk,
            unit,
            self.output.options.compress.is_some(),
        ))
    }

    /// Whether the target leaves `at` to its backing file since it is not dirty, and the end of the
    /// range that is alike, at most `limit`. None: it does not matter what is dirty.
    fn clean_until(&self, at: u64, limit: u64) -> Option<(bool, u64)> {
        let only = self.only.as_ref()?;
        let end = limit.min(only.size());
        if at >= end {
            return Some((false, limit));
        }
        let (dirty, end) = only.run(at, end);
        Some((!dirty, end))
    }

    fn content(&self, at: u64, status: &Status) -> Treatment {
        let above_backing = self.output.options.above_backing;
        let past_backing = self.output.options.zero_from.is_some_and(|from| at >= from);
        match status.zero {
            _ if above_backing && status.depth > 0 => Treatment::Backing,
            true if above_backing && past_backing => Treatment::Backing,
            // The whole image is to be allocated, with data.
            true if self.output.options.sparse == 0 && self.output.target.has_order() => {
                Treatment::Data
            }
            true => Treatment::Zero,
            false => Treatment::Data,
        }
    }
}

/// Adds a range behind the others.
fn join(parts: &mut Vec<Part>, range: Range<u64>, content: Treatment) {
    match parts.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.content == content => last.range.end = range.end,
        _ => parts.push(Part { range, content }),
    }
}

/// Extends data to whole units at the cost of adjacent zeroes, since a unit written in part would
/// be filled up later. With `whole`, also at the cost of ranges left to the backing file, so that
/// all units are whole.
fn fit(parts: Vec<Part>, chunk: &Range<u64>, unit: u64, whole: bool) -> Vec<Part> {
    let mut fitted = Vec::new();
    for Part { range, content } in parts {
        let shrinks = content == Treatment::Zero || whole && content == Treatment::Backing;
        if !shrinks {
            join(&mut fitted, range, content);
            continue;
        }
        let start = range.start.next_multiple_of(unit).min(range.end);
        let end = match range.end == chunk.end {
            true => range.end,
            false => (range.end / unit * unit).max(start),
        };
        join(&mut fitted, range.start..start, Treatment::Data);
        join(&mut fitted, start..end, content);
        join(&mut fitted, end..range.end, Treatment::Data);
    }
    fitted
}

#[cfg(test)]
mod tests {
    //! Guards against parts that overlap or leave gaps, and against partly compressed clusters.
    use super::Treatment::{Backing, Data, Zero};
    use super::*;

    fn parts(list: &[(u64, Treatment)]) -> Vec<Part> {
        let mut at = 0;
        let mut parts = Vec::new();
        for (end, content) in list {
            parts.push(Part {
                range: at..*end,
                content: *content,
            });
            at = *end;
        }
        parts
    }

    fn fitted(list: &[(u64, Treatment)], whole: bool) -> Vec<Part> {
        let end = list.last().expect("parts").0;
        fit(parts(list), &(0..end), 10, whole)
    }

    #[test]
    fn data_grow_to_whole_units() {
        assert_eq!(
            fitted(&[(13, Zero), (14, Data), (50, Zero), (55, Data)], false),
            parts(&[(10, Zero), (20, Data), (50, Zero), (55, Data)])
        );
        // A hole that is too small to be kept.
        assert_eq!(
            fitted(&[(3, Data), (9, Zero), (12, Data), (29, Zero)], false),
            parts(&[(20, Data), (29, Zero)])
        );
        assert_eq!(fitted(&[(7, Zero)], true), parts(&[(7, Zero)]));
    }

    #[test]
    fn unallocated_parts_are_kept_unless_units_must_be_whole() {
        let list = [(13, Backing), (26, Data), (37, Backing), (50, Zero)];
        let kept = [
            (13, Backing),
            (26, Data),
            (37, Backing),
            (40, Data),
            (50, Zero),
        ];
        assert_eq!(fitted(&list, false), parts(&kept));
        let whole = [(10, Backing), (40, Data), (50, Zero)];
        assert_eq!(fitted(&list, true), parts(&whole));
    }
}
