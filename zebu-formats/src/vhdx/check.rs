//! The check: every block is inside the file and has a place of its own. An image is only written if
//! that holds: else a write to one block might change another.

use super::map::Block;
use super::{MIB, Vhdx};
use crate::Result;
use crate::storage::Queue;

/// Bytes of the table that are read at a time.
const PIECE: u64 = 1 << 20;

/// The findings of a check.
struct Findings<'a> {
    errors: u64,
    say: &'a mut dyn FnMut(String),
    /// The places that are in use, and the entries that use them.
    used: Vec<(u64, u64)>,
}

/// The result of a check.
pub(super) struct Checked {
    /// The number of errors.
    pub errors: u64,
    /// Where the last of what is in the file ends. What is behind belongs to nothing.
    pub end: u64,
}

impl Findings<'_> {
    fn wrong(&mut self, text: String) {
        self.errors += 1;
        (self.say)(format!("ERROR: VHDX BAT entry {text}"));
    }
}

impl Vhdx {
    /// Checks the block allocation table, and passes each error to `say`.
    pub(super) async fn check(
        &self,
        queue: &Queue,
        say: &mut dyn FnMut(String),
    ) -> Result<Checked> {
        let mut findings = Findings {
            errors: 0,
            say,
            used: Vec::new(),
        };
        let geometry = &self.geometry;
        let in_chunk = 1u64 << geometry.chunk_bits();
        let is_bitmap = |entry: u64| entry % (in_chunk + 1) == in_chunk;
        let end = match (self.parent.is_some(), geometry.blocks().checked_sub(1)) {
            (true, Some(last)) => geometry.entry_of_bitmap(last) + 1,
            _ => geometry.entries(),
        };
        // The last block of the chunk that is only partially present.
        let mut partial = None;
        let mut number = 0;
        while number < end {
            let left = self.bat.end - self.bat.start - number * 8;
            let length = ((end - number) * 8).min(PIECE).min(left);
            if length == 0 {
                findings.wrong(format!("{number} is missing"));
                break;
            }
            let at = self.bat.start + number * 8;
            for entry in self.tables.read(queue, at, length).await? {
                match is_bitmap(number) {
                    true => self.check_bitmap(&mut findings, number, entry, partial.take()),
                    false => {
                        if self.check_block(&mut findings, number, entry) {
                            partial = Some(number);
                        }
                    }
                }
                number += 1;
            }
        }
        findings.used.sort_unstable();
        let size = |entry| match is_bitmap(entry) {
            true => MIB,
            false => geometry.block_size(),
        };
        let used = std::mem::take(&mut findings.used);
        for pair in used.windows(2) {
            let [(start, one), (next, other)] = [pair[0], pair[1]];
            if next - start < size(one) {
                findings.wrong(format!("{other} overlaps that of entry {one}"));
            }
        }
        let last = used
            .last()
            .map_or(0, |(host, entry)| host.saturating_add(size(*entry)));
        Ok(Checked {
            errors: findings.errors,
            end: last.max(self.regions.end()),
        })
    }

    /// Checks the entry of a block. Whether the block is only partially present.
    fn check_block(&self, findings: &mut Findings<'_>, number: u64, entry: u64) -> bool {
        let geometry = &self.geometry;
        let block = number - number / ((1 << geometry.chunk_bits()) + 1);
        let start = block << geometry.block_bits;
        if start >= geometry.size {
            // Behind the end of the disk, before the bitmap of the last chunk.
            return false;
        }
        match Block::decode(entry) {
            Err(state) => findings.wrong(format!("{number} has the invalid state {state}")),
            Ok(Block::NotPresent | Block::Zero) => {}
            Ok(Block::Present(host) | Block::PartiallyPresent(host)) => {
                let needed = geometry.block_size().min(geometry.size - start);
                self.check_place(findings, number, host, needed, geometry.block_size());
            }
        }
        let is_partial = matches!(Block::decode(entry), Ok(Block::PartiallyPresent(_)));
        if is_partial && self.parent.is_none() {
            findings.wrong(format!(
                "{number} is partially present, and there is no parent"
            ));
        }
        is_partial && self.parent.is_some()
    }

    /// Checks the entry of a sector bitmap, which this block of its chunk needs.
    fn check_bitmap(
        &self,
        findings: &mut Findings<'_>,
        number: u64,
        entry: u64,
        partial: Option<u64>,
    ) {
        if self.parent.is_none() {
            // It is not used.
            return;
        }
        match (Block::decode_bitmap(entry), partial) {
            (Err(state), _) => findings.wrong(format!("{number} has the invalid state {state}")),
            (Ok(Some(host)), _) => self.check_place(findings, number, host, MIB, MIB),
            (Ok(None), Some(block)) => {
                findings.wrong(format!("{block} needs the sector bitmap of entry {number}"));
            }
            (Ok(None), None) => {}
        }
    }

    /// Checks that the first `needed` bytes at `host` are in the file, and that nothing else is in
    /// these `size` bytes.
    fn check_place(
        &self,
        findings: &mut Findings<'_>,
        number: u64,
        host: u64,
        needed: u64,
        size: u64,
    ) {
        let file_len = self.file_len();
        if host >= file_len {
            findings.wrong(format!(
                "{number} start offset {host} points after end of file ({file_len}). Image has \
                 probably been truncated."
            ));
        } else if self.before_end(host, needed) < needed {
            findings.wrong(format!(
                "{number} end offset {} points after end of file ({file_len}). Image has probably \
                 been truncated.",
                host.saturating_add(size - 1)
            ));
        }
        if self.regions.free_from(host) < size {
            findings.wrong(format!("{number} overlaps metadata at {host}"));
        }
        findings.used.push((host, number));
    }
}
