//! Sending requests and receiving replies without waiting. Everything that a server sends is
//! checked here.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::task::Waker;

use super::NbdError;
use super::handshake::{Agreed, why};
use super::slots::{SlotId, Slots};
use super::wire::{Socket, Wire};
use crate::nbd::protocol::{
    ChunkHeader, ChunkKind, Command, ErrorCode, Headers, Request, SimpleReply, command,
    decode_error_payload, decode_extents,
};

/// Bytes of the buffer for headers and short replies.
const INPUT: usize = 64 << 10;
/// Bytes of it that are used while replies are long, so that data are received into the memory of
/// the request.
const SMALL_INPUT: usize = 512;
/// Bytes of a long reply at least.
const LONG: usize = 16 << 10;
/// Bytes of a chunk's payload, other than data, at most.
const MAX_SMALL: u64 = 16 << 10;
/// Bytes of the extents of a request for more than one, at most.
const MAX_STATUS: u64 = 32 << 20;
/// Requests that are sent with one system call at most.
const BATCH: usize = 32;
/// Pieces of memory in one system call; the kernel takes 1024.
const MOST_PIECES: usize = 512;
/// Error chunks in a reply at most.
const MAX_ERRORS: u32 = 64;

/// Why a session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// The connection was lost. A new one may work.
    Lost(String),
    /// The server violates the protocol.
    Violation(String),
}

fn violation<T>(what: impl Into<String>) -> Result<T, Over> {
    Err(Over::Violation(what.into()))
}

impl From<crate::nbd::protocol::ProtocolError> for Over {
    fn from(error: crate::nbd::protocol::ProtocolError) -> Self {
        Over::Violation(error.to_string())
    }
}

/// A connection after its handshake.
#[derive(Debug)]
pub(super) struct Session {
    wire: Wire,
    headers: Headers,
    context: Option<u32>,
    /// For errors.
    server: Arc<str>,
    input: Input,
    /// The data that are received next; None: a header is.
    data: Option<Data>,
    /// Reused: headers of requests.
    scratch: Vec<u8>,
    /// Whether the last reply was long.
    long: bool,
}

/// Bytes that were received and not processed.
#[derive(Debug)]
struct Input {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Input {
    fn available(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Makes the buffer so long at least.
    fn enlarge(&mut self, wanted: usize) {
        if self.bytes.len() < wanted {
            let mut bytes = vec![0; wanted];
            let available = self.available();
            bytes[..available.len()].copy_from_slice(available);
            (self.start, self.end) = (0, available.len());
            self.bytes = bytes.into();
        }
    }

    /// Space for up to `wanted` bytes in all.
    fn space(&mut self, wanted: usize) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let to = wanted.clamp(self.end + 1, self.bytes.len());
        &mut self.bytes[self.end..to]
    }
}

/// Data of a read that are being received.
#[derive(Clone, Copy, Debug)]
struct Data {
    slot: SlotId,
    /// Where they go, from the start of the request on.
    at: usize,
    left: usize,
    /// The reply ends with them.
    done: bool,
}

/// There is nothing more to receive now.
struct Dry;

impl Session {
    pub(super) fn new(agreed: Agreed, server: Arc<str>) -> Self {
        Session {
            wire: agreed.wire,
            headers: agreed.headers,
            context: agreed.context,
            server,
            input: Input {
                bytes: vec![0; INPUT].into(),
                start: 0,
                end: 0,
            },
            data: None,
            scratch: Vec::new(),
            long: false,
        }
    }

    pub(super) fn socket(&self) -> &Arc<Socket> {
        self.wire.socket()
    }

    /// The socket became readable.
    pub(super) fn arrived(&mut self) {
        self.wire.arrived();
    }

    /// Bytes of a request's header.
    pub(super) fn header(&self) -> usize {
        Request::size(self.headers)
    }

    /// Sends a disconnect request, if there is space for it.
    pub(super) fn close(&mut self) {
        let mut bytes = Vec::new();
        let request = Request {
            command: Command::Disconnect,
            flags: 0,
            cookie: 0,
            offset: 0,
            length: 0,
        };
        request.encode(self.headers, &mut bytes);
        let _ = self.wire.try_send(&[IoSlice::new(&bytes)]);
        self.wire.close();
    }

    /// Sends without waiting. Whether something is left.
    pub(super) fn send(
        &mut self,
        slots: &mut Slots,
        output: &mut VecDeque<SlotId>,
    ) -> Result<bool, Over> {
        let header = self.header();
        output.retain(|id| slots.get(*id).is_some());
        while !output.is_empty() {
            self.scratch.clear();
            for id in output.iter().take(BATCH) {
                if let Some(slot) = slots.get(*id) {
                    slot.request.encode(self.headers, &mut self.scratch);
                }
            }
            let mut bytes = Vec::new();
            for (id, head) in output.iter().zip(self.scratch.chunks(header)) {
                let Some(slot) = slots.get(*id) else {
                    continue;
                };
                if slot.sent < header {
                    bytes.push(IoSlice::new(&head[slot.sent..]));
                }
                let first = slot.sent.saturating_sub(header);
                if first < slot.payload() {
                    let before: usize = bytes.iter().map(|b| b.len()).sum();
                    slot.send_from(first, &mut bytes);
                    let after: usize = bytes.iter().map(|b| b.len()).sum();
                    if after - before < slot.payload() - first {
                        // Not all of its payload: nothing may follow.
                        break;
                    }
                }
                if bytes.len() >= MOST_PIECES {
                    break;
                }
            }
            let mut sent = match self.wire.try_send(&bytes) {
                Ok(sent) => sent,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(e) => return Err(Over::Lost(why(&e))),
            };
            while let Some(id) = output.front().copied()
                && let Some(slot) = slots.get_mut(id)
            {
                let whole = header + slot.payload();
                let count = sent.min(whole - slot.sent);
                slot.sent += count;
                sent -= count;
                if slot.sent < whole {
                    break;
                }
                output.pop_front();
            }
        }
        match self.wire.try_flush() {
            Ok(all) => Ok(!all),
            Err(e) => Err(Over::Lost(why(&e))),
        }
    }

    /// Receives without waiting. Wakers of requests with a reply are returned through `woken`.
    pub(super) fn receive(
        &mut self,
        slots: &mut Slots,
        woken: &mut Vec<Waker>,
    ) -> Result<(), Over> {
        loop {
            let dry = match self.data {
                Some(_) => self.receive_data(slots, woken)?,
                None => self.receive_header(slots, woken)?,
            };
            if let Some(Dry) = dry {
                return Ok(());
            }
        }
    }

    fn window(&self) -> usize {
        match self.long {
            true => SMALL_INPUT,
            false => INPUT,
        }
    }

    /// Receives until `wanted` bytes are there.
    fn fill(&mut self, wanted: usize) -> Result<Option<Dry>, Over> {
        self.input.enlarge(wanted);
        let window = self.window().max(wanted);
        while self.input.available().len() < wanted {
            let space = self.input.space(window);
            match self.wire.try_recv(&mut [IoSliceMut::new(space)]) {
                Ok(0) => return Err(Over::Lost("it closed the connection".into())),
                Ok(count) => self.input.end += count,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Some(Dry)),
                Err(e) => return Err(Over::Lost(why(&e))),
            }
        }
        Ok(None)
    }

    fn receive_data(
        &mut self,
        slots: &mut Slots,
        woken: &mut Vec<Waker>,
    ) -> Result<Option<Dry>, Over> {
        let Some(mut data) = self.data else {
            return Ok(None);
        };
        let count = self.input.available().len().min(data.left);
        if count > 0 {
            if let Some(slot) = slots.get_mut(data.slot) {
                slot.fill(data.at, count, Some(&self.input.available()[..count]));
            }
            self.input.consume(count);
            data.at += count;
            data.left -= count;
        }
        while data.left > 0 {
            self.data = Some(data);
            let window = self.window();
            let mut buffers = Vec::new();
            let direct = match slots.get_mut(data.slot) {
                Some(slot) => slot.receive_into(data.at, data.left, &mut buffers),
                None => 0,
            };
            // What follows, and data of dropped requests, are received here.
            let all = direct == data.left;
            let rest = self.input.space(window);
            let limit = if all { rest.len() } else { data.left };
            if all || direct == 0 {
                let limit = limit.min(rest.len());
                buffers.push(IoSliceMut::new(&mut rest[..limit]));
            }
            let received = match self.wire.try_recv(&mut buffers) {
                Ok(0) => return Err(Over::Lost("it closed the connection".into())),
                Ok(received) => received,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Some(Dry)),
                Err(e) => return Err(Over::Lost(why(&e))),
            };
            let count = match direct {
                // Dropped.
                0 => received,
                _ => received.min(direct),
            };
            self.input.end += received - count;
            data.at += count;
            data.left -= count;
        }
        self.data = None;
        if data.done {
            self.end(slots, data.slot, woken)?;
        }
        Ok(None)
    }

    /// The request of a reply.
    fn find(&self, slots: &Slots, cookie: u64) -> Result<SlotId, Over> {
        let Some(id) = slots.by_cookie(cookie) else {
            return violation(format!(
                "an answer to request {cookie:#x}, which nobody made"
            ));
        };
        let whole = |slot: &super::slots::Slot| slot.sent == self.header() + slot.payload();
        match slots.get(id).is_some_and(whole) {
            true => Ok(id),
            false => violation("an answer before the request"),
        }
    }

    fn receive_header(
        &mut self,
        slots: &mut Slots,
        woken: &mut Vec<Waker>,
    ) -> Result<Option<Dry>, Over> {
        if let Some(dry) = self.fill(4)? {
            return Ok(Some(dry));
        }
        let start = self.input.available();
        let simple = SimpleReply::begins([start[0], start[1], start[2], start[3]]);
        match self.headers {
            Headers::Simple => self.simple(slots, woken),
            Headers::Structured if simple => self.simple(slots, woken),
            _ => self.chunk(slots, woken),
        }
    }

    fn simple(&mut self, slots: &mut Slots, woken: &mut Vec<Waker>) -> Result<Option<Dry>, Over> {
        if let Some(dry) = self.fill(SimpleReply::SIZE)? {
            return Ok(Some(dry));
        }
        let bytes = &self.input.available()[..SimpleReply::SIZE];
        let reply = SimpleReply::decode(bytes.try_into().expect("as long as that"))?;
        self.input.consume(SimpleReply::SIZE);
        let id = self.find(slots, reply.cookie)?;
        let server = self.server.clone();
        let Some(slot) = slots.get_mut(id) else {
            return Ok(None);
        };
        if reply.error != 0 {
            slot.error = Some(NbdError::answer(&server, reply.error, ""));
            self.end(slots, id, woken)?;
            return Ok(None);
        }
        match slot.request.command {
            Command::Read | Command::BlockStatus if self.headers != Headers::Simple => {
                return violation("an answer without structure, with data due");
            }
            Command::Read => {
                let left = slot.request.length as usize;
                slot.cover(0, left as u64);
                self.begin_data(id, 0, left, true);
            }
            _ => self.end(slots, id, woken)?,
        }
        Ok(None)
    }

    fn begin_data(&mut self, slot: SlotId, at: usize, left: usize, done: bool) {
        self.long = left >= LONG;
        self.data = Some(Data {
            slot,
            at,
            left,
            done,
        });
    }

    fn chunk(&mut self, slots: &mut Slots, woken: &mut Vec<Waker>) -> Result<Option<Dry>, Over> {
        let size = ChunkHeader::size(self.headers);
        if let Some(dry) = self.fill(size)? {
            return Ok(Some(dry));
        }
        let header = ChunkHeader::decode(self.headers, self.input.available())?;
        let id = self.find(slots, header.cookie)?;
        // The part of the payload that is processed here.
        let small = match header.kind {
            ChunkKind::OffsetData if header.length > 8 => 8,
            ChunkKind::OffsetData => return violation("data of no length"),
            _ if header.length > longest(slots, id) => {
                let (kind, length) = (header.kind, header.length);
                return violation(format!("a chunk {kind:?} of {length} bytes"));
            }
            _ => header.length as usize,
        };
        if let Some(dry) = self.fill(size + small)? {
            return Ok(Some(dry));
        }
        let payload = self.input.available()[size..size + small].to_vec();
        self.input.consume(size + small);
        self.take_chunk(slots, id, &header, &payload)?;
        if header.done && self.data.is_none() {
            self.end(slots, id, woken)?;
        }
        Ok(None)
    }

    /// Processes a chunk, without the data that follow.
    fn take_chunk(
        &mut self,
        slots: &mut Slots,
        id: SlotId,
        header: &ChunkHeader,
        payload: &[u8],
    ) -> Result<(), Over> {
        let server = self.server.clone();
        let Some(slot) = slots.get_mut(id) else {
            return Ok(());
        };
        let asks = slot.request.command;
        let first = |payload: &[u8]| {
            let offset = payload.first_chunk().copied().map(u64::from_be_bytes);
            offset.and_then(|offset| offset.checked_sub(slot.request.offset))
        };
        match header.kind {
            ChunkKind::None if header.done && payload.is_empty() => {}
            ChunkKind::OffsetData if asks == Command::Read => {
                let length = header.length - 8;
                match first(payload).filter(|at| slot.cover(*at, length)) {
                    Some(at) => self.begin_data(id, at as usize, length as usize, header.done),
                    None => return violation("data that were not asked for, or twice"),
                }
            }
            ChunkKind::OffsetHole if asks == Command::Read && payload.len() == 12 => {
                let length = payload.last_chunk().copied().map(u32::from_be_bytes);
                let length = u64::from(length.unwrap_or(0));
                match first(payload).filter(|at| slot.cover(*at, length)) {
                    Some(at) => slot.fill(at as usize, length as usize, None),
                    None => return violation("a hole that was not asked for, or twice"),
                }
            }
            ChunkKind::BlockStatus | ChunkKind::BlockStatusExtended
                if asks == Command::BlockStatus =>
            {
                let extended = header.kind == ChunkKind::BlockStatusExtended;
                if extended != (self.headers == Headers::Extended) {
                    return violation("block status in the other form");
                }
                let (context, extents) = decode_extents(self.headers, payload)?;
                if Some(context) != self.context || !slot.extents.is_empty() {
                    return violation("block status that was not asked for");
                }
                slot.extents = extents;
            }
            kind if kind.is_error() => {
                slot.errors += 1;
                if slot.errors > MAX_ERRORS {
                    return violation("an answer of errors without end");
                }
                let (number, words) = match kind {
                    ChunkKind::Error | ChunkKind::ErrorOffset => {
                        let (number, words, _) = decode_error_payload(payload)?;
                        (number, words)
                    }
                    _ => {
                        let number = payload.first_chunk().copied().map(u32::from_be_bytes);
                        (number.unwrap_or(0), String::new())
                    }
                };
                if number == 0 {
                    return violation("an error that is none");
                }
                // The first one is reported.
                slot.error
                    .get_or_insert_with(|| NbdError::answer(&server, number, &words));
            }
            kind => return violation(format!("a chunk {kind:?} in an answer to {asks:?}")),
        }
        Ok(())
    }

    /// Ends a request after its reply.
    fn end(&self, slots: &mut Slots, id: SlotId, woken: &mut Vec<Waker>) -> Result<(), Over> {
        let Some(slot) = slots.get_mut(id) else {
            return Ok(());
        };
        let outcome = match (slot.error.take(), slot.request.command) {
            (Some(error), _) => Err(error),
            (None, Command::Read) if !slot.is_covered() => {
                return violation("an answer to a read without all of its data");
            }
            (None, Command::BlockStatus) if slot.extents.is_empty() => {
                return violation("block status without any");
            }
            (None, _) => Ok(std::mem::take(&mut slot.extents)),
        };
        if let Err(error) = &outcome
            && error.errno == ErrorCode::Shutdown.errno()
        {
            // Every request would fail with it from now on.
            return Err(Over::Lost("it is about to end".into()));
        }
        slots.finish(id, outcome, woken);
        Ok(())
    }
}

/// Bytes of the payload of a chunk, other than data, in the reply to a request at most.
fn longest(slots: &Slots, id: SlotId) -> u64 {
    match slots.get(id).map(|slot| slot.request) {
        Some(request)
            if request.command == Command::BlockStatus && request.flags & command::REQ_ONE == 0 =>
        {
            MAX_STATUS
        }
        _ => MAX_SMALL,
    }
}
