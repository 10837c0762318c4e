//! Which parts of the disk lie where in a file.

use std::ops::Range;

/// Columns of the map: ranges of the file.
pub const COLUMNS: usize = 480;
/// Rows of the map: ranges of the disk.
pub const ROWS: usize = 80;

/// A map of a file.
pub struct FileMap {
    /// Bytes of the file.
    pub length: u64,
    /// The bytes of the disk that the rows stand for.
    disk: Range<u64>,
    /// Bytes in each column that are data of the disk.
    pub active: Vec<u64>,
    /// The same that are in use, if that is known.
    pub used: Vec<u64>,
    /// Whether a part of a row's range of the disk is in a column's range of the file.
    points: Vec<bool>,
}

impl FileMap {
    pub(super) fn new(length: u64, disk: Range<u64>) -> Self {
        FileMap {
            length,
            disk,
            active: vec![0; COLUMNS],
            used: Vec::new(),
            points: vec![false; COLUMNS * ROWS],
        }
    }

    /// Bytes of a column.
    pub fn column_size(&self) -> u64 {
        self.length.div_ceil(COLUMNS as u64).max(1)
    }

    /// Whether data of the disk's range `row` lie in the file's range `column`.
    pub fn has_point(&self, column: usize, row: usize) -> bool {
        self.points[row * COLUMNS + column]
    }

    /// Notes that `guest` of the disk and what follows is at `host`.
    pub(super) fn add(&mut self, host: Range<u64>, guest: u64, length: u64) {
        let row_size = (self.disk.end - self.disk.start)
            .div_ceil(ROWS as u64)
            .max(1);
        let (size, start, stored) = (self.column_size(), self.disk.start, host.end - host.start);
        // Compressed data are shorter than what they are of.
        let at = |offset: u64| {
            let part = u128::from(offset) * u128::from(length) / u128::from(stored.max(1));
            let row = (guest - start + part as u64) / row_size;
            (row as usize).min(ROWS - 1)
        };
        let (points, active) = (&mut self.points, &mut self.active);
        each_column(size, host.clone(), |column, part| {
            active[column] += part.end - part.start;
            let rows = at(part.start - host.start)..=at(part.end - 1 - host.start);
            for row in rows {
                points[row * COLUMNS + column] = true;
            }
        });
    }

    /// Notes that bytes of the file are in use.
    pub(super) fn use_bytes(&mut self, range: Range<u64>) {
        self.used.resize(COLUMNS, 0);
        let (size, used) = (self.column_size(), &mut self.used);
        each_column(size, range, |column, part| {
            used[column] += part.end - part.start
        });
    }
}

/// Calls `each` with the parts of a range that lie in one column. What is past the end of the file
/// is left out.
fn each_column(size: u64, range: Range<u64>, mut each: impl FnMut(usize, Range<u64>)) {
    let end = range.end.min(size * COLUMNS as u64);
    let mut at = range.start;
    while at < end {
        let column = at / size;
        let next = ((column + 1) * size).min(end);
        each(column as usize, at..next);
        at = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_in_order_is_a_diagonal() {
        let size = 1 << 30;
        let mut map = FileMap::new(size, 0..size);
        map.add(0..size, 0, size);
        assert_eq!(map.active.iter().sum::<u64>(), size);
        assert!(map.has_point(0, 0) && map.has_point(COLUMNS - 1, ROWS - 1));
        assert!(!map.has_point(0, ROWS - 1) && !map.has_point(COLUMNS - 1, 0));
        // Past the end.
        map.add(2 * size..3 * size, 0, size);
        assert_eq!(map.active.iter().sum::<u64>(), size);
    }
}
