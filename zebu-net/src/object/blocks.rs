//! The blocks of an object: which ones are here, which are being fetched, which readers wait for them.
//! Plain state without I/O.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::task::{Poll, Waker};

use bytes::Bytes;

use super::ahead::Streams;
use super::failure::ObjectError;

/// Bytes of a block: the least that is fetched.
pub(super) const BLOCK: u64 = 64 << 10;
/// Blocks that are kept, with those that are being fetched.
const KEPT: usize = (56 << 20) / BLOCK as usize;
/// Blocks in all requests that are in flight.
const IN_FLIGHT: usize = (40 << 20) / BLOCK as usize;
/// Blocks of one request at most.
const REQUEST: u64 = (2 << 20) / BLOCK;
/// Blocks between two runs that are fetched as well, since that costs less than a second request.
const GAP: u64 = 2;
/// The longest readahead, in blocks.
const AHEAD: u64 = (32 << 20) / BLOCK;
/// A reader is woken for so many blocks, or the last.
const BATCH: usize = 16;

/// The blocks of one object.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Of the object, in blocks.
    count: u64,
    /// Requests in flight at most.
    connections: usize,
    blocks: HashMap<u64, Block>,
    /// The blocks that are here, in the order in which they are dropped: first those that were
    /// read completely, then by the time of their last use.
    order: BTreeMap<(bool, u64), u64>,
    clock: u64,
    /// Blocks to fetch that a reader waits for, in the order of the reads; some are not wanted any
    /// more.
    demanded: VecDeque<u64>,
    /// Blocks to fetch ahead.
    ahead: VecDeque<u64>,
    streams: Streams,
    fetches: HashMap<u64, Fetch>,
    /// Blocks in `fetches`.
    in_flight: usize,
    readers: HashMap<u64, Reader>,
    /// A task that fetches blocks in order.
    in_order: Option<tokio::task::AbortHandle>,
    /// The last number of a fetch or a reader.
    last: u64,
    /// Why nothing can be read any more.
    failed: Option<ObjectError>,
}

#[derive(Debug)]
struct Block {
    state: State,
    /// The readers that wait for it.
    waiting: Vec<u64>,
    /// It is fetched although none does.
    is_ahead: bool,
    /// How many of its bytes were read.
    used: u64,
}

#[derive(Debug)]
enum State {
    Wanted,
    Fetching(u64),
    /// Here, at this place in the order.
    Here(Bytes, (bool, u64)),
}

/// A request in flight.
#[derive(Debug)]
struct Fetch {
    /// The blocks that have not arrived.
    rest: Range<u64>,
    abort: Option<tokio::task::AbortHandle>,
}

/// A read.
#[derive(Debug)]
struct Reader {
    /// The blocks that it waits for are some of these.
    blocks: Range<u64>,
    waiting: usize,
    arrived: Vec<(u64, Bytes)>,
    error: Option<ObjectError>,
    waker: Option<Waker>,
}

/// The end of a read, or a part of it.
pub(super) enum Arrived {
    /// Some blocks, and whether they are the last ones.
    Blocks(Vec<(u64, Bytes)>, bool),
    Failed(ObjectError),
}

impl Blocks {
    /// Those of an object of `length` bytes. `readahead` is the longest one in bytes, if it is
    /// given.
    pub fn new(length: u64, connections: usize, readahead: Option<u64>) -> Blocks {
        let limit = readahead.map_or(AHEAD, |bytes| bytes.div_ceil(BLOCK).min(AHEAD));
        Blocks {
            count: length.div_ceil(BLOCK),
            connections,
            blocks: HashMap::new(),
            order: BTreeMap::new(),
            clock: 0,
            demanded: VecDeque::new(),
            ahead: VecDeque::new(),
            streams: Streams::new(limit),
            fetches: HashMap::new(),
            in_flight: 0,
            readers: HashMap::new(),
            in_order: None,
            last: 0,
            failed: None,
        }
    }

    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Begins a read of bytes `range`, inside the object and not empty. The number of the reader.
    pub fn begin(&mut self, range: Range<u64>) -> u64 {
        let number = self.number();
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let mut reader = Reader {
            blocks: blocks.clone(),
            waiting: 0,
            arrived: Vec::new(),
            error: self.failed.clone(),
            waker: None,
        };
        if reader.error.is_none() {
            for nth in blocks.clone() {
                let inside = (range.end.min((nth + 1) * BLOCK)) - range.start.max(nth * BLOCK);
                self.demand(nth, inside, number, &mut reader);
            }
            let ahead = self.streams.note(&blocks);
            for nth in ahead.start..ahead.end.min(self.count) {
                self.want_ahead(nth);
            }
        }
        self.readers.insert(number, reader);
        number
    }

    /// Gives a block to a reader, now or later.
    fn demand(&mut self, nth: u64, bytes: u64, number: u64, reader: &mut Reader) {
        let block = self.blocks.entry(nth).or_insert_with(|| {
            self.demanded.push_back(nth);
            Block::wanted(false)
        });
        block.used += bytes;
        match &block.state {
            State::Here(data, _) => {
                reader.arrived.push((nth, data.clone()));
                self.touch(nth);
            }
            State::Wanted => {
                if block.is_ahead && block.waiting.is_empty() {
                    self.demanded.push_back(nth);
                }
                block.waiting.push(number);
                reader.waiting += 1;
            }
            State::Fetching(_) => {
                block.waiting.push(number);
                reader.waiting += 1;
            }
        }
    }

    fn want_ahead(&mut self, nth: u64) {
        self.blocks.entry(nth).or_insert_with(|| {
            self.ahead.push_back(nth);
            Block::wanted(true)
        });
    }

    /// Moves a block that is here to the end of the order.
    fn touch(&mut self, nth: u64) {
        self.clock += 1;
        if let Some(block) = self.blocks.get_mut(&nth)
            && let State::Here(data, place) = &mut block.state
        {
            self.order.remove(place);
            // One that was read completely is not read again, as a rule.
            *place = (block.used < data.len() as u64, self.clock);
            self.order.insert(*place, nth);
        }
    }

    /// What has arrived for a reader.
    pub fn poll(&mut self, number: u64, waker: &Waker) -> Poll<Arrived> {
        let Some(reader) = self.readers.get_mut(&number) else {
            return Poll::Pending;
        };
        if let Some(error) = reader.error.take() {
            return Poll::Ready(Arrived::Failed(error));
        }
        if reader.waiting == 0 || reader.arrived.len() >= BATCH {
            let arrived = std::mem::take(&mut reader.arrived);
            return Poll::Ready(Arrived::Blocks(arrived, reader.waiting == 0));
        }
        if !reader
            .waker
            .as_ref()
            .is_some_and(|old| old.will_wake(waker))
        {
            reader.waker = Some(waker.clone());
        }
        Poll::Pending
    }

    /// Ends a read. What only it has waited for is not fetched any more. Whether other requests may
    /// begin instead: one that is cancelled starts none.
    pub fn end(&mut self, number: u64) -> bool {
        let Some(reader) = self.readers.remove(&number) else {
            return false;
        };
        if reader.waiting == 0 {
            return false;
        }
        let mut fetches = Vec::new();
        for nth in reader.blocks {
            let Some(block) = self.blocks.get_mut(&nth) else {
                continue;
            };
            block.waiting.retain(|other| *other != number);
            if block.waiting.is_empty() && !block.is_ahead {
                match block.state {
                    State::Wanted => drop(self.blocks.remove(&nth)),
                    State::Fetching(fetch) if !fetches.contains(&fetch) => fetches.push(fetch),
                    _ => {}
                }
            }
        }
        let in_flight = self.fetches.len();
        for number in fetches {
            self.cancel_unless_needed(number);
        }
        self.fetches.len() < in_flight
    }

    fn cancel_unless_needed(&mut self, number: u64) {
        let Some(fetch) = self.fetches.get(&number) else {
            return;
        };
        let is_needed = |nth: u64| {
            let block = self.blocks.get(&nth);
            block.is_some_and(|block| block.is_ahead || !block.waiting.is_empty())
        };
        if fetch.rest.clone().any(is_needed) {
            return;
        }
        if let Some(abort) = &fetch.abort {
            abort.abort();
        }
        // No reader waits for it.
        self.end_fetch(number, None, &mut Vec::new());
    }

    /// The next request: its number and its blocks. The caller starts it.
    pub fn next_fetch(&mut self) -> Option<(u64, Range<u64>)> {
        if self.fetches.len() >= self.connections || self.in_flight >= IN_FLIGHT {
            return None;
        }
        let first = self.next_wanted()?;
        let (mut start, mut end) = (first, first + 1);
        while end - start < REQUEST && start > 0 && self.is_wanted(start - 1) {
            start -= 1;
        }
        while end - start < REQUEST {
            let most = REQUEST.min(end - start + GAP + 1) - (end - start);
            let gap = (0..most).find(|gap| self.blocks.contains_key(&(end + gap)));
            match gap {
                Some(gap) if self.is_wanted(end + gap) => end += gap + 1,
                _ => break,
            }
        }
        Some((self.fetching(start..end), start..end))
    }

    /// Notes that these blocks are being fetched. The number of the request.
    pub fn fetching(&mut self, range: Range<u64>) -> u64 {
        let number = self.number();
        for nth in range.clone() {
            let block = self
                .blocks
                .entry(nth)
                .or_insert_with(|| Block::wanted(false));
            block.state = State::Fetching(number);
        }
        self.in_flight += (range.end - range.start) as usize;
        let fetch = Fetch {
            rest: range,
            abort: None,
        };
        self.fetches.insert(number, fetch);
        number
    }

    fn next_wanted(&mut self) -> Option<u64> {
        for list in [&mut self.demanded, &mut self.ahead] {
            while let Some(nth) = list.pop_front() {
                let block = self.blocks.get(&nth);
                if block.is_some_and(|block| matches!(block.state, State::Wanted)) {
                    return Some(nth);
                }
            }
        }
        None
    }

    fn is_wanted(&self, nth: u64) -> bool {
        let block = self.blocks.get(&nth);
        block.is_some_and(|block| matches!(block.state, State::Wanted))
    }

    /// Notes how a request is cancelled.
    pub fn started(&mut self, number: u64, abort: tokio::task::AbortHandle) {
        match self.fetches.get_mut(&number) {
            Some(fetch) => fetch.abort = Some(abort),
            None => abort.abort(),
        }
    }

    /// A block has arrived, with all of its bytes. `woken`: the readers to wake.
    pub fn arrived(&mut self, nth: u64, data: Bytes, woken: &mut Vec<Waker>) {
        if self.failed.is_some() {
            return;
        }
        let block = self
            .blocks
            .entry(nth)
            .or_insert_with(|| Block::wanted(true));
        if let State::Fetching(number) = block.state
            && let Some(fetch) = self.fetches.get_mut(&number)
        {
            if fetch.rest.start != nth {
                // It comes from a request that was cancelled at this moment.
                return;
            }
            fetch.rest.start = nth + 1;
            self.in_flight -= 1;
        }
        if matches!(block.state, State::Here(..)) {
            return;
        }
        self.clock += 1;
        let place = (block.used < data.len() as u64, self.clock);
        for number in std::mem::take(&mut block.waiting) {
            if let Some(reader) = self.readers.get_mut(&number) {
                reader.arrived.push((nth, data.clone()));
                reader.waiting -= 1;
                if reader.waiting == 0 || reader.arrived.len() >= BATCH {
                    woken.extend(reader.waker.take());
                }
            }
        }
        block.is_ahead = false;
        block.state = State::Here(data, place);
        self.order.insert(place, nth);
        while self.order.len() + self.in_flight > KEPT
            && let Some((_, nth)) = self.order.pop_first()
        {
            self.blocks.remove(&nth);
        }
    }

    /// A request has ended. With an error, readers that wait for the rest fail.
    pub fn end_fetch(&mut self, number: u64, error: Option<&ObjectError>, woken: &mut Vec<Waker>) {
        let Some(fetch) = self.fetches.remove(&number) else {
            return;
        };
        self.in_flight -= (fetch.rest.end - fetch.rest.start) as usize;
        for nth in fetch.rest {
            if let Some(block) = self.blocks.remove(&nth) {
                self.fail_readers(block.waiting, error, woken);
            }
        }
    }

    fn fail_readers(
        &mut self,
        numbers: Vec<u64>,
        error: Option<&ObjectError>,
        woken: &mut Vec<Waker>,
    ) {
        for number in numbers {
            if let Some(reader) = self.readers.get_mut(&number) {
                reader.error = error.cloned();
                woken.extend(reader.waker.take());
            }
        }
    }

    /// Nothing can be read any more.
    pub fn fail(&mut self, error: &ObjectError, woken: &mut Vec<Waker>) {
        self.failed = Some(error.clone());
        self.cancel_all();
        self.blocks.clear();
        self.order.clear();
        let readers = self.readers.keys().copied().collect();
        self.fail_readers(readers, Some(error), woken);
    }

    /// Cancels all requests. No others begin.
    pub fn cancel_all(&mut self) {
        self.connections = 0;
        if let Some(task) = &self.in_order {
            task.abort();
        }
        for fetch in self.fetches.values() {
            if let Some(abort) = &fetch.abort {
                abort.abort();
            }
        }
        self.fetches.clear();
        self.in_flight = 0;
    }
}

/// For servers without ranges, whose bytes come in order.
impl Blocks {
    /// Notes the task that fetches them.
    pub fn fetched_by(&mut self, task: tokio::task::AbortHandle) {
        self.in_order = Some(task);
    }

    /// The next thing to do after all blocks before `at` have been received.
    pub fn next_in_order(&mut self, at: u64) -> Next {
        let blocks = &self.blocks;
        let is_wanted = |nth: &u64| {
            let block = blocks.get(nth);
            block.is_some_and(|block| matches!(block.state, State::Wanted))
        };
        self.demanded.retain(is_wanted);
        self.ahead.retain(|nth| *nth >= at && is_wanted(nth));
        match self.demanded.iter().min() {
            Some(first) if *first < at => Next::Back,
            None if self.ahead.is_empty() => Next::Wait,
            _ => Next::Forward,
        }
    }

    /// Fails the readers of blocks before `at`.
    pub fn fail_before(&mut self, at: u64, error: &ObjectError, woken: &mut Vec<Waker>) {
        let wanted: Vec<u64> = self.demanded.iter().copied().collect();
        for nth in wanted.into_iter().filter(|nth| *nth < at) {
            if self.is_wanted(nth)
                && let Some(block) = self.blocks.remove(&nth)
            {
                self.fail_readers(block.waiting, Some(error), woken);
            }
        }
    }
}

/// See [`Blocks::next_in_order`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Wait until something is wanted.
    Wait,
    /// Receive the next block.
    Forward,
    /// Begin again at the first block.
    Back,
}

impl Block {
    fn wanted(is_ahead: bool) -> Block {
        Block {
            state: State::Wanted,
            waiting: Vec::new(),
            is_ahead,
            used: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a read that waits for ever, or gets another block's bytes.
    use super::super::failure::Trouble;
    use super::*;

    /// A read of a test: what it waits for, and what it has.
    struct Read {
        number: u64,
        blocks: Range<u64>,
        got: Vec<u64>,
    }

    impl Read {
        /// Whether it has ended.
        fn poll(&mut self, blocks: &mut Blocks) -> bool {
            match blocks.poll(self.number, Waker::noop()) {
                Poll::Pending => false,
                Poll::Ready(Arrived::Failed(_)) => true,
                Poll::Ready(Arrived::Blocks(arrived, is_end)) => {
                    for (nth, data) in arrived {
                        assert_eq!(data[..], nth.to_le_bytes());
                        assert!(self.blocks.contains(&nth) && !self.got.contains(&nth));
                        self.got.push(nth);
                    }
                    let all = self.got.len() as u64 == self.blocks.end - self.blocks.start;
                    assert_eq!(is_end, all);
                    all
                }
            }
        }
    }

    fn random(state: &mut u64, below: u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state >> 11) % below
    }

    /// Starts requests, as the client does after a read has begun and after a request has ended.
    fn dispatch(blocks: &mut Blocks, fetches: &mut Vec<(u64, Range<u64>)>) {
        fetches.extend(std::iter::from_fn(|| blocks.next_fetch()));
    }

    /// Ends a request. One that was cancelled starts no others.
    fn end_fetch(
        blocks: &mut Blocks,
        fetches: &mut Vec<(u64, Range<u64>)>,
        nth: usize,
        error: Option<&ObjectError>,
    ) {
        let (number, _) = fetches.swap_remove(nth);
        let is_cancelled = !blocks.fetches.contains_key(&number);
        blocks.end_fetch(number, error, &mut Vec::new());
        if !is_cancelled {
            dispatch(blocks, fetches);
        }
    }

    #[test]
    fn every_reader_gets_its_blocks() {
        const COUNT: u64 = 2000;
        let error = Trouble::permanent("it is broken").error("x");
        for seed in 1..200u64 {
            let state = &mut seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let connections = 1 + seed as usize % 4;
            let mut blocks = Blocks::new(COUNT * BLOCK - 1000, connections, None);
            let mut reads: Vec<Read> = Vec::new();
            let mut fetches: Vec<(u64, Range<u64>)> = Vec::new();
            let mut place = 0;
            for _ in 0..1000 {
                match random(state, 8) {
                    0 | 1 => {
                        if random(state, 3) == 0 {
                            place = random(state, COUNT);
                        }
                        let end = (place + 1 + random(state, 40)).min(COUNT);
                        let range = place * BLOCK..(end * BLOCK - 1000);
                        reads.push(Read {
                            number: blocks.begin(range),
                            blocks: place..end,
                            got: Vec::new(),
                        });
                        place = end % COUNT;
                        dispatch(&mut blocks, &mut fetches);
                    }
                    2 | 3 if !reads.is_empty() => {
                        let nth = random(state, reads.len() as u64) as usize;
                        if blocks.end(reads.swap_remove(nth).number) {
                            dispatch(&mut blocks, &mut fetches);
                        }
                    }
                    _ if fetches.is_empty() => {}
                    4 if random(state, 8) == 0 => {
                        end_fetch(&mut blocks, &mut fetches, 0, Some(&error));
                    }
                    _ => {
                        let nth = random(state, fetches.len() as u64) as usize;
                        let rest = &mut fetches[nth].1;
                        for _ in 0..1 + random(state, 16) {
                            if let Some(block) = rest.next() {
                                let data = Bytes::copy_from_slice(&block.to_le_bytes());
                                blocks.arrived(block, data, &mut Vec::new());
                            }
                        }
                        if rest.is_empty() {
                            end_fetch(&mut blocks, &mut fetches, nth, None);
                        }
                    }
                }
                reads.retain_mut(|read| {
                    let ended = read.poll(&mut blocks);
                    if ended {
                        blocks.end(read.number);
                    }
                    !ended
                });
                assert!(blocks.order.len() + blocks.in_flight <= KEPT + IN_FLIGHT);
            }
            while let Some((_, rest)) = fetches.last_mut() {
                for block in rest {
                    let data = Bytes::copy_from_slice(&block.to_le_bytes());
                    blocks.arrived(block, data, &mut Vec::new());
                }
                let last = fetches.len() - 1;
                end_fetch(&mut blocks, &mut fetches, last, None);
            }
            for read in &mut reads {
                let has_ended = (0..COUNT).any(|_| read.poll(&mut blocks));
                assert!(has_ended, "seed {seed}: a read of {:?} waits", read.blocks);
                blocks.end(read.number);
            }
            assert_eq!((blocks.in_flight, blocks.readers.len()), (0, 0));
        }
    }

    #[test]
    fn neighbours_are_one_request() {
        let mut blocks = Blocks::new(100 * BLOCK, 4, Some(0));
        blocks.begin(0..10);
        blocks.begin(BLOCK..BLOCK + 10);
        // Across a gap.
        blocks.begin(4 * BLOCK..5 * BLOCK);
        blocks.begin(9 * BLOCK..10 * BLOCK);
        assert_eq!(blocks.next_fetch().unwrap().1, 0..5);
        assert_eq!(blocks.next_fetch().unwrap().1, 9..10);
        assert!(blocks.next_fetch().is_none());
        let mut blocks = Blocks::new(100 * BLOCK, 2, Some(0));
        blocks.begin(0..100 * BLOCK);
        assert_eq!(blocks.next_fetch().unwrap().1, 0..REQUEST);
        assert_eq!(blocks.next_fetch().unwrap().1, REQUEST..2 * REQUEST);
        assert!(blocks.next_fetch().is_none());
    }

    #[test]
    fn what_was_read_is_dropped_before_tables() {
        let mut blocks = Blocks::new(4000 * BLOCK, 16, Some(0));
        let mut read = |range| {
            let number = blocks.begin(range);
            while let Some((fetch, range)) = blocks.next_fetch() {
                for block in range {
                    blocks.arrived(block, vec![0; BLOCK as usize].into(), &mut Vec::new());
                }
                blocks.end_fetch(fetch, None, &mut Vec::new());
            }
            blocks.end(number);
        };
        read(3000 * BLOCK..3000 * BLOCK + 4096);
        for nth in 0..2000 {
            read(nth * BLOCK..(nth + 1) * BLOCK);
        }
        assert!(matches!(blocks.blocks[&3000].state, State::Here(..)));
        assert_eq!((blocks.order.len(), blocks.blocks.len()), (KEPT, KEPT));
    }
}
