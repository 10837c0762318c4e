//! A raw image as a stream.

use crate::Error;
use crate::drivers::signature::{INNER, PROBED_BYTES, TAIL_BYTES};
use crate::drivers::stream::{Block, Fault, Reader, Sink};
use crate::drivers::{check_inner, check_tail, is_partitioned};

/// Reads a raw image, whose size is known when it has ended.
pub struct RawReader {
    /// Bytes that the target has at most.
    most: u64,
    size: u64,
    /// If the format was guessed by the start of the stream.
    seen: Option<Seen>,
}

/// What tells that a stream is no raw disk, though its start does not.
#[derive(Default)]
struct Seen {
    /// The last [`TAIL_BYTES`].
    tail: Vec<u8>,
    /// The sectors at [`INNER`].
    inside: Vec<(u64, Vec<u8>)>,
    is_partitioned: bool,
}

impl Seen {
    fn look(&mut self, at: u64, block: &[u8]) {
        self.tail
            .extend(&block[block.len().saturating_sub(TAIL_BYTES)..]);
        self.tail
            .drain(..self.tail.len().saturating_sub(TAIL_BYTES));
        self.is_partitioned |= at == 0 && is_partitioned(block);
        for inner in INNER {
            let start = inner.checked_sub(at).map(|start| start as usize);
            let sector = start.and_then(|start| block.get(start..start + PROBED_BYTES));
            self.inside
                .extend(sector.map(|sector| (*inner, sector.to_vec())));
        }
    }

    fn check(&self) -> crate::Result<()> {
        check_tail(&self.tail)?;
        match self.is_partitioned {
            true => Ok(()),
            false => check_inner(&self.inside),
        }
    }
}

impl RawReader {
    /// For a target of `most` bytes at most.
    pub fn new(most: u64, is_guessed: bool) -> Self {
        RawReader {
            most,
            size: 0,
            seen: is_guessed.then(Seen::default),
        }
    }
}

impl Reader for RawReader {
    fn block(&mut self, at: u64, mut block: Block, sink: &mut Sink<'_>) -> Result<(), Fault> {
        // As of a file, the disk has whole sectors.
        block.pad(512);
        self.size = at + block.len() as u64;
        if self.size > self.most {
            let most = self.most;
            let why =
                format!("The stream is longer than the {most} bytes that the target can have");
            return Err(Error::Refused(why).into());
        }
        if let Some(seen) = &mut self.seen {
            seen.look(at, &block);
        }
        Ok(sink.block(at, block)?)
    }

    fn end(&mut self, _length: u64, _sink: &mut Sink<'_>) -> Result<u64, Fault> {
        if let Some(seen) = &self.seen {
            seen.check()?;
        }
        Ok(self.size)
    }
}
