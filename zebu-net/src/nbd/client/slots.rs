//! The requests in flight on a connection, and their memory.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::task::Waker;

use super::NbdError;
use crate::nbd::protocol::{Command, Extent, Request, command};
use crate::storage::Iov;

/// Pieces of memory that go into one system call at most.
const MOST_PIECES: usize = 64;
/// Ranges at most of a read whose data come out of order.
const MOST_GAPS: usize = 1024;

/// The memory of a request. Unlike an [`Iov`] it may be used by any thread, one at a time.
#[derive(Debug)]
pub(super) struct Memory {
    pieces: Vec<(*mut u8, usize)>,
    /// The memory of `pieces`, if it is not the caller's.
    _own: Vec<u8>,
}

// SAFETY: the pointers are used only under the lock of the link, and removed under it before the
// promise of the `Iov` ends.
unsafe impl Send for Memory {}

impl Memory {
    /// # Safety
    /// It is dropped before the promise of `iov` ends, under the lock under which it is used, if it
    /// is used at all.
    pub(super) unsafe fn new(iov: &Iov) -> Self {
        let mut pieces = Vec::with_capacity(1);
        iov.for_each(|ptr, length| pieces.push((ptr, length)));
        Memory {
            pieces,
            _own: Vec::new(),
        }
    }

    /// A copy of the bytes in memory of its own.
    fn copied(&self) -> Self {
        let mut own: Vec<u8> = Vec::with_capacity(self.pieces.iter().map(|piece| piece.1).sum());
        self.each(0, usize::MAX, |ptr, length| {
            let done = own.len();
            // SAFETY: valid on the promise of the Iov, and copied without a reference, since others
            // may change it; `own` has the capacity for all pieces.
            unsafe {
                std::ptr::copy_nonoverlapping(ptr, own.as_mut_ptr().add(done), length);
                own.set_len(done + length);
            }
        });
        let pieces = vec![(own.as_mut_ptr(), own.len())];
        Memory { pieces, _own: own }
    }

    /// Calls `f` with the pieces of the bytes from `start` on.
    fn each(&self, start: usize, most: usize, mut f: impl FnMut(*mut u8, usize)) {
        let mut skip = start;
        let mut count = 0;
        for &(ptr, length) in &self.pieces {
            if skip >= length {
                skip -= length;
                continue;
            }
            if count == most {
                return;
            }
            // SAFETY: `skip` is inside the piece.
            f(unsafe { ptr.add(skip) }, length - skip);
            skip = 0;
            count += 1;
        }
    }

    /// The bytes from `start` on, no more than `limit`, to be received into:
    /// perhaps not all of them. Appended to `out`; how many they are.
    fn receive_into<'a>(
        &'a mut self,
        start: usize,
        limit: usize,
        out: &mut Vec<IoSliceMut<'a>>,
    ) -> usize {
        let mut total = 0;
        self.each(start, MOST_PIECES, |ptr, length| {
            let length = length.min(limit - total);
            if length > 0 {
                // SAFETY: valid on the promise of the Iov, and nothing else
                // touches it while the slice, which borrows `self`, is there. But for memory that is
                // shared: the slice is no more than an `iovec` for the kernel, or the target of a
                // copy of what TLS has decrypted, and is not read.
                out.push(IoSliceMut::new(unsafe {
                    std::slice::from_raw_parts_mut(ptr, length)
                }));
                total += length;
            }
        });
        total
    }

    /// The bytes from `start` on, to be sent: perhaps not all of them.
    pub(super) fn send_from<'a>(&'a self, start: usize, out: &mut Vec<IoSlice<'a>>) {
        self.each(start, MOST_PIECES, |ptr, length| {
            // SAFETY: as above; reading alone. If it changes meanwhile, other bytes are sent, by the
            // kernel or as the plaintext of a record, which is read once.
            out.push(IoSlice::new(unsafe {
                std::slice::from_raw_parts(ptr, length)
            }));
        });
    }

    /// Copies bytes in at `start`, or zeroes.
    fn fill(&mut self, start: usize, count: usize, bytes: Option<&[u8]>) {
        let mut done = 0;
        self.each(start, usize::MAX, |ptr, length| {
            let length = length.min(count - done);
            // SAFETY: as above; `bytes` is other memory.
            unsafe {
                match bytes {
                    Some(bytes) => {
                        let from = bytes[done..done + length].as_ptr();
                        std::ptr::copy_nonoverlapping(from, ptr, length);
                    }
                    None => std::ptr::write_bytes(ptr, 0, length),
                }
            }
            done += length;
        });
    }
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) request: Request,
    /// The queue that waits for it.
    pub(super) queue: u64,
    /// None before its first poll, and when nothing waits any more.
    pub(super) waker: Option<Waker>,
    /// Of a read or a write, unless it was dropped.
    memory: Option<Memory>,
    /// Bytes of header and payload that are in the socket.
    pub(super) sent: usize,
    /// Nothing waits any more.
    abandoned: bool,
    /// It is a change whose request was dropped ([`Slots::keep`]).
    kept: bool,
    /// The bytes of a read that were received.
    covered: Vec<Range<u64>>,
    /// Error chunks so far.
    pub(super) errors: u32,
    pub(super) error: Option<NbdError>,
    /// Of block status, if its chunk was received.
    pub(super) extents: Vec<Extent>,
    /// Of a flush: the number of changes with a reply before it.
    covers: u64,
    /// After the reply.
    pub(super) outcome: Option<Outcome>,
}

/// The outcome of a request, with the extents of block status, at least one.
pub(super) type Outcome = Result<Vec<Extent>, NbdError>;

impl Slot {
    /// Bytes of payload that are sent.
    pub(super) fn payload(&self) -> usize {
        match self.request.command {
            Command::Write => self.request.length as usize,
            _ => 0,
        }
    }

    /// The payload from `start` on, to be sent.
    pub(super) fn send_from<'a>(&'a self, start: usize, out: &mut Vec<IoSlice<'a>>) {
        if let Some(memory) = &self.memory {
            memory.send_from(start, out);
        }
    }

    /// The memory that bytes of a read are received into; none if it was dropped.
    pub(super) fn receive_into<'a>(
        &'a mut self,
        start: usize,
        limit: usize,
        out: &mut Vec<IoSliceMut<'a>>,
    ) -> usize {
        match &mut self.memory {
            Some(memory) => memory.receive_into(start, limit, out),
            None => 0,
        }
    }

    /// Copies bytes of a read in that were received elsewhere, or (None) zeroes.
    pub(super) fn fill(&mut self, start: usize, count: usize, bytes: Option<&[u8]>) {
        if let Some(memory) = &mut self.memory {
            memory.fill(start, count, bytes);
        }
    }

    /// Marks these bytes of a read, from the start of the request on, as received. False: they are
    /// not inside, or were received before.
    pub(super) fn cover(&mut self, offset: u64, length: u64) -> bool {
        let end = match offset.checked_add(length) {
            Some(end) if end <= self.request.length && length > 0 => end,
            _ => return false,
        };
        // Most data come in order.
        let at = self.covered.partition_point(|range| range.end < offset);
        let (before, after) = (self.covered.get(at), self.covered.get(at + 1));
        let touches = before.is_some_and(|range| range.end == offset);
        let next = if touches { after } else { before };
        if next.is_some_and(|next| next.start < end) {
            return false;
        }
        match touches {
            true => self.covered[at].end = end,
            false => self.covered.insert(at, offset..end),
        }
        let joins = |next: &Range<u64>| next.start == end;
        if self.covered.get(at + 1).is_some_and(joins) {
            self.covered[at].end = self.covered.remove(at + 1).end;
        }
        self.covered.len() <= MOST_GAPS
    }

    /// Whether a read has all its bytes.
    pub(super) fn is_covered(&self) -> bool {
        let all = 0..self.request.length;
        self.request.length == 0 || self.covered == [all]
    }
}

/// All requests in flight. A cookie is a place and how often the place was used.
#[derive(Debug, Default)]
pub(super) struct Slots {
    places: Vec<(u32, Option<Slot>)>,
    free: Vec<u32>,
    /// Requests without a reply.
    pub(super) outstanding: usize,
    /// Changes with a reply that need a flush to be durable.
    changes: u64,
    /// How many of these are durable.
    durable: u64,
}

/// Names a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotId(u64);

impl SlotId {
    fn place(self) -> usize {
        (self.0 & u64::from(u32::MAX)) as usize
    }
}

impl Slots {
    /// Adds a request and sets its cookie.
    pub(super) fn insert(
        &mut self,
        request: Request,
        memory: Option<Memory>,
        queue: u64,
    ) -> SlotId {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            (self.places.len() - 1) as u32
        });
        let (count, slot) = &mut self.places[place as usize];
        *count = count.wrapping_add(1);
        let id = SlotId(u64::from(*count) << 32 | u64::from(place));
        *slot = Some(Slot {
            request: Request {
                cookie: id.0,
                ..request
            },
            queue,
            waker: None,
            memory,
            sent: 0,
            abandoned: false,
            kept: false,
            covered: Vec::new(),
            errors: 0,
            error: None,
            extents: Vec::new(),
            covers: self.changes,
            outcome: None,
        });
        self.outstanding += 1;
        id
    }

    /// The request of a cookie, if it has no reply.
    pub(super) fn by_cookie(&self, cookie: u64) -> Option<SlotId> {
        let id = SlotId(cookie);
        let slot = self.get(id)?;
        slot.outcome.is_none().then_some(id)
    }

    pub(super) fn get(&self, id: SlotId) -> Option<&Slot> {
        let slot = self.places.get(id.place())?.1.as_ref();
        slot.filter(|slot| slot.request.cookie == id.0)
    }

    pub(super) fn get_mut(&mut self, id: SlotId) -> Option<&mut Slot> {
        let slot = self.places.get_mut(id.place())?.1.as_mut();
        slot.filter(|slot| slot.request.cookie == id.0)
    }

    fn remove(&mut self, id: SlotId) {
        if self.places[id.place()].1.take().is_some() {
            self.free.push(id.place() as u32);
        }
    }

    /// The reply is complete; its waker is returned through `woken`.
    pub(super) fn finish(&mut self, id: SlotId, outcome: Outcome, woken: &mut Vec<Waker>) {
        let Some(slot) = self.get_mut(id) else {
            return;
        };
        debug_assert!(slot.outcome.is_none());
        let through = slot.request.flags & command::FUA != 0;
        let done = outcome.is_ok().then_some(slot.request.command);
        let covers = slot.covers;
        slot.outcome = Some(outcome);
        slot.memory = None;
        woken.extend(slot.waker.take());
        let abandoned = slot.abandoned;
        self.outstanding -= 1;
        if abandoned {
            self.remove(id);
        }
        match done {
            Some(Command::Write | Command::WriteZeroes) if !through => self.changes += 1,
            Some(Command::Flush) => self.durable = self.durable.max(covers),
            _ => {}
        }
    }

    /// Whether there are changes with a reply that no flush has made durable. (Trimmed ranges may
    /// have any content.)
    pub(super) fn are_owed(&self) -> bool {
        self.durable < self.changes
    }

    /// Takes the outcome of a request, if it has one, and removes the request.
    pub(super) fn take_outcome(&mut self, id: SlotId) -> Option<Outcome> {
        let outcome = self.get_mut(id)?.outcome.take()?;
        self.remove(id);
        Some(outcome)
    }

    /// Whether it is a change of which something was sent, without a reply.
    pub(super) fn is_changing(&self, id: SlotId) -> bool {
        self.get(id).is_some_and(|slot| {
            let changes = matches!(
                slot.request.command,
                Command::Write | Command::WriteZeroes | Command::Trim
            );
            changes && slot.sent > 0 && slot.outcome.is_none()
        })
    }

    /// Keeps a dropped change of which something was sent: the caller's memory is not used from now
    /// on. `header`: bytes of a request's header.
    pub(super) fn keep(&mut self, id: SlotId, header: usize) {
        if let Some(slot) = self.get_mut(id) {
            let is_sent = slot.sent >= header + slot.payload();
            let memory = slot.memory.take().filter(|_| !is_sent);
            slot.memory = memory.map(|memory| memory.copied());
            slot.waker = None;
            slot.kept = true;
        }
    }

    /// Forgets a dropped request: the caller's memory is not used from now on. A write of which
    /// something was sent must be kept before. True: nothing was sent, so the request is removed.
    pub(super) fn abandon(&mut self, id: SlotId) -> bool {
        let Some(slot) = self.get_mut(id) else {
            return false;
        };
        if slot.outcome.is_some() {
            self.remove(id);
            return false;
        }
        if slot.sent == 0 {
            self.remove(id);
            self.outstanding -= 1;
            return true;
        }
        if !slot.kept {
            slot.memory = None;
        }
        slot.waker = None;
        slot.abandoned = true;
        false
    }

    /// Whether requests of this queue wait for a reply.
    pub(super) fn has_requests_of(&self, queue: u64) -> bool {
        self.iter()
            .any(|(_, s)| s.queue == queue && s.outcome.is_none() && !s.abandoned)
    }

    /// Whether a task waits for a reply.
    pub(super) fn are_awaited(&self) -> bool {
        self.iter()
            .any(|(_, slot)| slot.outcome.is_none() && slot.waker.is_some())
    }

    /// All requests.
    pub(super) fn iter(&self) -> impl Iterator<Item = (SlotId, &Slot)> {
        let slots = self.places.iter().filter_map(|place| place.1.as_ref());
        slots.map(|slot| (SlotId(slot.request.cookie), slot))
    }

    /// After the connection was lost: the requests to be sent again, in any order. Those that were
    /// dropped end with `error`.
    pub(super) fn rewind(&mut self, error: &NbdError, woken: &mut Vec<Waker>) -> Vec<SlotId> {
        let outstanding = self.iter().filter(|(_, slot)| slot.outcome.is_none());
        let all = outstanding.map(|(id, s)| (id, s.abandoned || s.kept));
        let all: Vec<(SlotId, bool)> = all.collect();
        let mut again = Vec::new();
        for (id, dropped) in all {
            if dropped {
                self.finish(id, Err(error.clone()), woken);
            } else if let Some(slot) = self.get_mut(id) {
                slot.sent = 0;
                slot.covered.clear();
                (slot.errors, slot.error) = (0, None);
                slot.extents.clear();
                again.push(id);
            }
        }
        again
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a read that counts as complete although a part of its memory was not filled.
    use super::*;

    fn slot(length: u64) -> (Slots, SlotId) {
        let mut slots = Slots::default();
        let request = Request {
            command: Command::Read,
            flags: 0,
            cookie: 0,
            offset: 0,
            length,
        };
        let id = slots.insert(request, None, 0);
        (slots, id)
    }

    #[test]
    fn a_read_is_covered_when_each_byte_came_once() {
        let (mut slots, id) = slot(100);
        let slot = slots.get_mut(id).unwrap();
        assert!(slot.cover(40, 10) && slot.cover(60, 40) && slot.cover(0, 40));
        assert!(!slot.is_covered());
        for (offset, length) in [(0, 1), (45, 10), (50, 11), (55, 50), (99, 1), (50, 0)] {
            assert!(!slot.cover(offset, length), "{offset}+{length}");
        }
        assert!(!slot.cover(u64::MAX, 2) && !slot.cover(100, 1));
        assert!(slot.cover(50, 10) && slot.is_covered());
        assert!(!slot.cover(50, 10));
    }

    #[test]
    fn every_order_of_pieces_covers() {
        for order in 0..24u32 {
            let (mut slots, id) = slot(40);
            let slot = slots.get_mut(id).unwrap();
            let mut left = vec![0, 10, 20, 30];
            let mut order = order;
            while !left.is_empty() {
                let next = left.remove(order as usize % left.len());
                order /= left.len().max(1) as u32 + 1;
                assert!(!slot.is_covered());
                assert!(slot.cover(next, 10));
                assert!(!slot.cover(next, 10));
            }
            assert!(slot.is_covered());
        }
    }

    #[test]
    fn a_cookie_is_valid_once() {
        let (mut slots, id) = slot(1);
        assert_eq!(slots.by_cookie(id.0), Some(id));
        slots.finish(id, Ok(Vec::new()), &mut Vec::new());
        assert_eq!(slots.by_cookie(id.0), None);
        assert!(slots.take_outcome(id).is_some());
        let request = slot(1).0.get(SlotId(1 << 32)).unwrap().request;
        let next = slots.insert(request, None, 0);
        assert_ne!(next, id);
        assert!(slots.by_cookie(id.0).is_none() && slots.by_cookie(7).is_none());
    }
}
