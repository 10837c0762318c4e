//! The requests in flight of one open file, and their ends. Plain state: the threads move the bytes.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::connection::{Connection, File, Limits};
use super::failure::SshError;
use super::options::SshOptions;
use super::packet::{Attributes, Data, Packet, Reply, Status};
use crate::dropped::{DroppedChange, DroppedChanges};

/// Requests in flight at most, as OpenSSH's own program has.
const MOST: usize = 64;
/// Bytes in flight at most.
const MOST_BYTES: u64 = 8 << 20;

/// An open file. Its connection ends with it.
#[derive(Debug)]
pub(super) struct Client {
    pub shared: Arc<Shared>,
}

/// What the requests and the threads share.
#[derive(Debug)]
pub(super) struct Shared {
    pub options: SshOptions,
    /// The file as it was opened.
    pub file: File,
    pub limits: Limits,
    pub dropped: Arc<DroppedChanges>,
    has_fsync: bool,
    length: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    requests: HashMap<u32, Slot>,
    /// Requests that are not sent, in order.
    waiting: VecDeque<u32>,
    /// Requests that are sent, and their bytes.
    in_flight: usize,
    bytes: u64,
    last: u32,
}

#[derive(Debug)]
enum Phase {
    /// Packets go to the thread that writes.
    Up(Sender<Vec<u8>>, Vec<u8>),
    /// Reads wait for another connection.
    Lost,
    /// Requests fail.
    Broken(SshError),
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Request {
    Read(u64, u32),
    /// Up to this end; so many bytes.
    Write(u64, u32),
    SetLength(u64),
    Flush,
    Remove,
    /// What the server says of the file.
    Stat,
    SetTimes,
}

impl Request {
    /// The bytes that count as in flight.
    fn bytes(self) -> u64 {
        match self {
            Request::Read(_, length) | Request::Write(_, length) => length.into(),
            Request::SetLength(_)
            | Request::Flush
            | Request::Remove
            | Request::Stat
            | Request::SetTimes => 0,
        }
    }

    /// The bytes that it changes.
    fn change(self) -> Option<Range<u64>> {
        match self {
            Request::Write(end, length) => Some(end - u64::from(length)..end),
            Request::SetLength(length) => Some(length..u64::MAX),
            Request::Read(..)
            | Request::Stat
            | Request::SetTimes
            | Request::Flush
            | Request::Remove => None,
        }
    }

    /// What could not be done, for errors.
    fn doing(self) -> &'static str {
        match self {
            Request::Read(..) => "read",
            Request::Write(..) => "write",
            Request::SetLength(_) => "change the length",
            Request::Flush => "flush",
            Request::Remove => "remove the file",
            Request::Stat => "read file attributes",
            Request::SetTimes => "change the times",
        }
    }
}

/// The end of a request.
pub(super) enum Answer {
    Done,
    Data(Data),
    Attributes(Attributes),
    /// A read behind the end of the file.
    End,
}

type Outcome = Result<Answer, SshError>;

#[derive(Debug)]
struct Slot {
    request: Request,
    /// None: it is made when it is sent, or it is sent.
    packet: Option<Packet>,
    /// When it was sent.
    sent: Option<Instant>,
    /// Its future was dropped.
    is_abandoned: bool,
    /// Of a change whose future was dropped. It is dropped without the lock, since it wakes tasks.
    change: Option<DroppedChange>,
    outcome: Option<Outcome>,
    waker: Option<Waker>,
}

impl Slot {
    fn is_in_flight(&self) -> bool {
        self.sent.is_some() && self.outcome.is_none()
    }
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Answer")
    }
}

impl Client {
    pub fn length(&self) -> u64 {
        self.shared.length.load(Ordering::Acquire)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The thread that writes ends, and with it the input of the program.
        let error = self.shared.broken("the file was closed");
        self.shared.fail(error);
    }
}

impl Shared {
    pub fn new(options: SshOptions, connection: &Connection, output: Sender<Vec<u8>>) -> Shared {
        let file = connection.file.clone();
        Shared {
            options,
            limits: connection.limits,
            dropped: Arc::default(),
            has_fsync: connection.extensions.fsync,
            length: AtomicU64::new(file.length),
            state: Mutex::new(State {
                phase: Phase::Up(output, file.handle.clone()),
                requests: HashMap::new(),
                waiting: VecDeque::new(),
                in_flight: 0,
                bytes: 0,
                last: 0,
            }),
            file,
        }
    }

    pub fn has_fsync(&self) -> bool {
        self.has_fsync
    }

    fn state(&self) -> MutexGuard<'_, State> {
        crate::lock(&self.state)
    }

    pub fn broken(&self, what: &str) -> SshError {
        SshError::broken(&self.options.server.to_string(), what)
    }

    /// The error of a file that is not as it was opened.
    pub fn changed(&self) -> SshError {
        let error = self.broken("the file has changed since it was opened");
        error.with_errno(libc::ESTALE)
    }

    /// The error of a request that the server did not carry out.
    pub fn status(&self, doing: &str, status: &Status) -> SshError {
        SshError::status(&self.options.server.to_string(), doing, status)
    }

    /// Makes a request. `packet` makes its packet, unless it only reads. The request is sent at once
    /// if that many may be in flight.
    pub fn submit(
        self: &Arc<Self>,
        request: Request,
        packet: impl FnOnce(&[u8]) -> Packet,
    ) -> Waiting {
        // The copy of the data is made without the lock.
        let packet = match request {
            Request::Read(..) | Request::Stat => None,
            _ => Some(packet(&self.file.handle)),
        };
        let mut state = self.state();
        let mut id = state.last.wrapping_add(1);
        while state.requests.contains_key(&id) {
            id = id.wrapping_add(1);
        }
        state.last = id;
        let outcome = match &state.phase {
            Phase::Broken(error) => Some(Err(error.clone())),
            _ => None,
        };
        let ended = outcome.is_some();
        let slot = Slot {
            request,
            packet,
            sent: None,
            is_abandoned: false,
            change: None,
            outcome,
            waker: None,
        };
        state.requests.insert(id, slot);
        if !ended {
            state.waiting.push_back(id);
            state.send();
        }
        Waiting {
            shared: self.clone(),
            id,
        }
    }

    /// Takes a reply. An error is a violation of the protocol.
    pub fn receive(&self, id: u32, reply: Reply) -> Result<(), &'static str> {
        let (waker, _abandoned) = {
            let mut state = self.state();
            let slot = state
                .requests
                .get_mut(&id)
                .filter(|slot| slot.sent.is_some());
            let slot = slot.filter(|slot| slot.outcome.is_none());
            let slot = slot.ok_or("it answers a request that there is not")?;
            let request = slot.request;
            let outcome = self.outcome(request, reply)?;
            let ended = match slot.is_abandoned {
                true => (None, state.requests.remove(&id)),
                false => {
                    slot.outcome = Some(outcome);
                    (slot.waker.take(), None)
                }
            };
            state.in_flight -= 1;
            state.bytes -= request.bytes();
            state.send();
            ended
        };
        waker.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// What a reply means for a request.
    fn outcome(&self, request: Request, reply: Reply) -> Result<Outcome, &'static str> {
        match (request, reply) {
            (Request::Read(_, length), Reply::Data(data)) => {
                match data.bytes().len() <= length as usize {
                    true => Ok(Ok(Answer::Data(data))),
                    false => Err("it sends more than was asked for"),
                }
            }
            (Request::Read(..), Reply::Status(status)) if status.code == Status::EOF => {
                Ok(Ok(Answer::End))
            }
            (Request::Read(..) | Request::Stat, Reply::Status(status))
                if status.code == Status::OK =>
            {
                Err("it answers a read without data")
            }
            (Request::Stat, Reply::Attributes(attributes)) => {
                Ok(Ok(Answer::Attributes(attributes)))
            }
            (request, Reply::Status(status)) => {
                let is_done = status.code == Status::OK;
                match request {
                    // A part may be written although it failed, and does not read as zeroes.
                    Request::Write(end, _) => {
                        self.length.fetch_max(end, Ordering::AcqRel);
                    }
                    Request::SetLength(length) if is_done => {
                        self.length.store(length, Ordering::Release);
                    }
                    _ => {}
                }
                if is_done {
                    return Ok(Ok(Answer::Done));
                }
                let doing = format!("the server failed to {}", request.doing());
                Ok(Err(self.status(&doing, &status)))
            }
            _ => Err("it answers with the reply to another request"),
        }
    }

    /// The connection was lost. True: another one is needed, for a file that is only read.
    pub fn lose(&self, error: SshError) -> bool {
        {
            let mut state = self.state();
            if matches!(state.phase, Phase::Broken(_)) {
                return false;
            }
            if !self.options.write {
                state.phase = Phase::Lost;
                state.rewind();
                return true;
            }
        }
        // What was written and not flushed may be lost with the server.
        self.fail(error);
        false
    }

    /// When the oldest request was sent that has no reply.
    pub fn oldest(&self) -> Option<Instant> {
        let state = self.state();
        let slots = state.requests.values().filter(|slot| slot.is_in_flight());
        slots.filter_map(|slot| slot.sent).min()
    }

    /// Whether another connection is still needed.
    pub fn is_lost(&self) -> bool {
        matches!(self.state().phase, Phase::Lost)
    }

    /// Goes on with another connection.
    pub fn restore(&self, handle: Vec<u8>, output: Sender<Vec<u8>>) {
        let mut state = self.state();
        if let Phase::Lost = state.phase {
            state.phase = Phase::Up(output, handle);
            state.send();
        }
    }

    /// All requests fail from now on.
    pub fn fail(&self, error: SshError) {
        let mut woken = Vec::new();
        let _abandoned: Vec<_> = {
            let mut state = self.state();
            let state = &mut *state;
            let abandoned = state.requests.extract_if(|_, slot| slot.is_abandoned);
            let abandoned = abandoned.collect();
            for slot in state.requests.values_mut() {
                if slot.outcome.is_none() {
                    slot.outcome = Some(Err(error.clone()));
                    woken.extend(slot.waker.take());
                }
            }
            state.waiting.clear();
            (state.in_flight, state.bytes) = (0, 0);
            state.phase = Phase::Broken(error);
            abandoned
        };
        woken.into_iter().for_each(Waker::wake);
    }
}

impl State {
    /// Sends what waits, as long as it may be in flight.
    fn send(&mut self) {
        let Phase::Up(output, handle) = &self.phase else {
            return;
        };
        while self.in_flight < MOST
            && let Some(id) = self.waiting.front()
        {
            let Some(slot) = self.requests.get_mut(id) else {
                self.waiting.pop_front();
                continue;
            };
            let bytes = slot.request.bytes();
            if self.bytes > 0 && self.bytes + bytes > MOST_BYTES {
                break;
            }
            let packet = match (slot.packet.take(), slot.request) {
                (Some(packet), _) => packet,
                (None, Request::Read(offset, length)) => Packet::read(handle, offset, length),
                (None, Request::Stat) => Packet::stat(handle),
                (None, _) => unreachable!("only what reads is sent again"),
            };
            slot.sent = Some(Instant::now());
            self.in_flight += 1;
            self.bytes += bytes;
            // If the thread has ended, the other one notices that the connection is lost.
            let _ = output.send(packet.finish(*id));
            self.waiting.pop_front();
        }
    }

    /// Makes requests wait again that are sent and have no reply.
    fn rewind(&mut self) {
        self.requests.retain(|_, slot| !slot.is_abandoned);
        let requests = self.requests.iter_mut();
        let mut again: Vec<u32> = requests
            .filter(|(_, slot)| slot.is_in_flight())
            .map(|(id, slot)| {
                slot.sent = None;
                *id
            })
            .collect();
        again.sort_unstable();
        again
            .into_iter()
            .rev()
            .for_each(|id| self.waiting.push_front(id));
        (self.in_flight, self.bytes) = (0, 0);
    }
}

/// A request. Its drop gives it up; what was sent of it takes effect.
pub(super) struct Waiting {
    shared: Arc<Shared>,
    id: u32,
}

impl Waiting {
    /// The outcome, once.
    pub fn poll(&self, context: &Context<'_>) -> Poll<Outcome> {
        let mut state = self.shared.state();
        let Some(slot) = state.requests.get_mut(&self.id) else {
            return Poll::Ready(Err(self.shared.broken("the request has ended")));
        };
        match slot.outcome.take() {
            Some(outcome) => {
                state.requests.remove(&self.id);
                Poll::Ready(outcome)
            }
            None => {
                slot.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    pub async fn outcome(self) -> Outcome {
        std::future::poll_fn(|context| self.poll(context)).await
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        match state.requests.get_mut(&self.id) {
            Some(slot) if slot.is_in_flight() => {
                slot.is_abandoned = true;
                slot.waker = None;
                let change = slot.request.change();
                slot.change = change.map(|range| self.shared.dropped.add(range));
            }
            // It is removed from the list of those that wait when its turn comes.
            _ => drop(state.requests.remove(&self.id)),
        }
    }
}
