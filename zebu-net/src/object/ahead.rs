//! Readahead: which blocks are likely to be read next.

use std::ops::Range;

/// Sequences that are told apart: several threads, tables and data.
const STREAMS: usize = 8;
/// Blocks that a request may begin before or behind the place where its sequence was, since the
/// requests of several threads do not arrive in order.
const SLACK: u64 = 64;

/// The sequences of requests that an object is read by.
#[derive(Debug)]
pub(super) struct Streams {
    streams: Vec<Stream>,
    /// The longest window, in blocks.
    limit: u64,
    /// Counts requests.
    clock: u64,
}

#[derive(Debug)]
struct Stream {
    /// The first block, unless that is far behind.
    begin: u64,
    /// Behind the last block that was read.
    next: u64,
    /// Blocks of `begin..next` that were read.
    read: u64,
    /// Blocks of the last request.
    last: Range<u64>,
    /// Behind the last block that was read ahead.
    ahead: u64,
    /// Blocks to be read ahead.
    window: u64,
    /// When it was used last.
    used: u64,
}

impl Streams {
    /// Windows of at most `limit` blocks; 0: no readahead.
    pub fn new(limit: u64) -> Streams {
        Streams {
            streams: Vec::new(),
            limit,
            clock: 0,
        }
    }

    /// Notes that these blocks are read, and says which ones to read ahead. The window of a
    /// sequence doubles as the sequence goes on.
    pub fn note(&mut self, blocks: &Range<u64>) -> Range<u64> {
        const FIRST: u64 = 4;
        if self.limit == 0 {
            return 0..0;
        }
        self.clock += 1;
        let (clock, limit) = (self.clock, self.limit);
        let near = |stream: &&mut Stream| {
            let reach = stream.window + SLACK;
            blocks.start <= stream.next + reach && blocks.end + SLACK > stream.next
        };
        let Some(stream) = self.streams.iter_mut().find(near) else {
            self.begin(blocks);
            return 0..0;
        };
        stream.used = clock;
        if stream.last == *blocks {
            return 0..0;
        }
        stream.last = blocks.clone();
        stream.begin = stream.begin.min(blocks.start);
        stream.read += blocks.end - blocks.start;
        if blocks.end <= stream.next {
            return 0..0;
        }
        stream.next = blocks.end;
        let mut length = stream.next - stream.begin;
        if length > 4 * SLACK {
            // What was long ago counts no more.
            stream.read = stream.read * 2 * SLACK / length;
            length = 2 * SLACK;
            stream.begin = stream.next - length;
        }
        if stream.read < length / 2 {
            stream.window = 0;
            return 0..0;
        }
        let double = (stream.window * 2).max(blocks.end - blocks.start);
        stream.window = double.max(FIRST).min(limit);
        // In large steps, so that requests are large.
        let end = stream.next + stream.window;
        let start = stream.ahead.max(stream.next);
        if start + stream.window.div_ceil(2) > end {
            return 0..0;
        }
        stream.ahead = end;
        start..end
    }

    /// A new sequence in the place of the one that was not used for longest.
    fn begin(&mut self, blocks: &Range<u64>) {
        if self.streams.len() == STREAMS {
            let oldest = (0..STREAMS).min_by_key(|nth| self.streams[*nth].used);
            self.streams.swap_remove(oldest.unwrap_or(0));
        }
        self.streams.push(Stream {
            begin: blocks.start,
            next: blocks.end,
            read: blocks.end - blocks.start,
            last: blocks.clone(),
            ahead: blocks.end,
            window: 0,
            used: self.clock,
        });
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a readahead that reads what is not needed, or nothing.
    use super::*;

    #[test]
    fn windows_grow_while_blocks_are_read_in_order() {
        let mut streams = Streams::new(64);
        assert_eq!(streams.note(&(0..1)), 0..0);
        assert_eq!(streams.note(&(1..2)), 2..6);
        // The same block again, as small reads do.
        assert_eq!(streams.note(&(1..2)), 0..0);
        let mut end = 6;
        for block in 2..200 {
            let ahead = streams.note(&(block..block + 1));
            if !ahead.is_empty() {
                assert_eq!(ahead.start, end);
                end = ahead.end;
            }
            assert!(end <= block + 1 + 64);
        }
        assert!(end >= 230, "{end}");
    }

    #[test]
    fn reads_at_random_read_nothing_ahead() {
        let mut streams = Streams::new(64);
        for nth in 0..1000u64 {
            let block = nth.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
            assert_eq!(streams.note(&(block..block + 1)), 0..0);
        }
    }

    #[test]
    fn a_table_here_and_there_is_no_sequence() {
        let mut streams = Streams::new(64);
        for nth in 0..100 {
            assert_eq!(streams.note(&(nth * 32..nth * 32 + 1)), 0..0);
        }
    }

    #[test]
    fn threads_that_read_out_of_order_are_one_sequence() {
        let mut streams = Streams::new(128);
        let mut ahead = 0;
        for chunk in (0..100).map(|nth: u64| nth ^ 1) {
            let window = streams.note(&(chunk * 16..chunk * 16 + 16));
            ahead = ahead.max(window.end);
        }
        assert!(ahead > 1600, "{ahead}");
        assert_eq!(streams.streams.len(), 1);
    }
}
