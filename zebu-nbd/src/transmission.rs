//! The second part of a connection: requests and answers.
//!
//! One future reads requests, one writes answers; between them tasks of the
//! connection's queue do requests, as many as were ever in flight at once. They
//! stay for the next request, since to make a future and move it to its place
//! costs more than much of what is done here. The reader takes as many
//! requests as one receive gives; the payload of a write goes into the aligned
//! buffer that it is written from, with one copy of what came along with the
//! header. The writer sends all answers that are ready with one send.
//!
//! Bounds: [`MAX_REQUESTS`] and [`MAX_BYTES`] of buffers at a time, counted
//! until the answer is in the socket. A client that takes no answers is not
//! read from any more. What is more than a connection has for itself comes out
//! of what all connections share (`budget.rs`), or waits for requests before it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSlice, IoSliceMut};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use zebu::internal::nbd::{Command, Headers, MAX_PAYLOAD, ProtocolError, Request, StatusFilter};
use zebu::storage::{PoolBuffer, Queue};

use crate::budget::Budget;
use crate::export::Export;
use crate::handshake::Agreed;
use crate::race::{First, race};
use crate::reply::{Failed, Reply};
use crate::transport::Transport;

/// Requests of one connection at a time.
pub const MAX_REQUESTS: usize = 128;
/// Bytes of their buffers. One request is taken whatever it needs.
pub const MAX_BYTES: usize = 64 << 20;
/// Bytes received at a time besides payloads.
const INPUT: usize = 64 << 10;
/// Payloads that are too long are passed over up to this; a longer one ends
/// the connection.
const MAX_PASSED_OVER: u64 = 256 << 20;
/// Parts of answers in one send.
const MAX_SLICES: usize = 512;
/// How long a client that has disconnected, or was asked to, may take to
/// receive what it asked for.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum End {
    #[error("the client disconnected")]
    Disconnected,
    #[error("the client closed the connection")]
    Closed,
    #[error("the server is ending")]
    Stopped,
    #[error("the client sent {0}")]
    Protocol(String),
    #[error("{}", zebu::strerror(.0))]
    Io(#[from] io::Error),
}

impl From<ProtocolError> for End {
    fn from(error: ProtocolError) -> Self {
        End::Protocol(format!("what makes no sense: {error}"))
    }
}

/// What the tasks of one connection share.
pub(crate) struct Connection {
    pub transport: Rc<Transport>,
    pub export: Arc<Export>,
    pub headers: Headers,
    pub contexts: Vec<u32>,
    /// Requests that no task has yet.
    jobs: RefCell<VecDeque<Job>>,
    /// Tasks that have no request.
    idle: RefCell<Vec<Waker>>,
    tasks: Cell<usize>,
    /// Answers that are ready.
    outgoing: RefCell<VecDeque<Reply>>,
    writer: Cell<Option<Waker>>,
    /// The tasks that wait for requests to end.
    waiting: Cell<Option<Waker>>,
    requests: Cell<usize>,
    bytes: Cell<usize>,
    /// Nothing can be sent any more.
    broken: Cell<bool>,
    /// No more requests will come.
    ending: Cell<bool>,
    /// Replies are not waited for any more.
    given_up: Cell<bool>,
    /// Bytes that it has for itself, and what all have together.
    own_bytes: usize,
    budget: Arc<Budget>,
}

/// A request's share of what a connection may take. It goes with its answer.
pub(crate) struct Permit {
    connection: Rc<Connection>,
    bytes: usize,
    /// How many of them are from the budget.
    shared: usize,
    /// There is no memory for the request: it fails.
    pub refused: bool,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let connection = &self.connection;
        connection.requests.set(connection.requests.get() - 1);
        connection.bytes.set(connection.bytes.get() - self.bytes);
        connection.budget.give(self.shared);
        connection.wake_waiting();
    }
}

/// A request that is about to run.
pub(crate) struct Job {
    pub request: Request,
    /// The bytes to write, or the contexts of a block status request.
    pub payload: Option<Payload>,
    pub permit: Permit,
    pub start: Instant,
}

/// What came with a request.
pub(crate) enum Payload {
    Data(PoolBuffer),
    Filter(StatusFilter),
    /// It could not be taken, and was passed over.
    PassedOver,
}

/// Answers the client's requests until it goes, or `stopping` says so, and
/// then those that are in flight.
pub async fn serve(
    transport: Rc<Transport>,
    agreed: Agreed,
    (own_bytes, budget): (usize, Arc<Budget>),
    stopping: impl Fn() -> bool,
) -> End {
    let connection = Rc::new(Connection {
        transport,
        export: agreed.export,
        headers: agreed.headers,
        contexts: agreed.contexts,
        jobs: RefCell::default(),
        idle: RefCell::default(),
        tasks: Cell::new(0),
        outgoing: RefCell::default(),
        writer: Cell::new(None),
        waiting: Cell::new(None),
        requests: Cell::new(0),
        bytes: Cell::new(0),
        broken: Cell::new(false),
        ending: Cell::new(false),
        given_up: Cell::new(false),
        own_bytes,
        budget,
    });
    // Where the disk is what clients wait for, requests come in larger heaps then, and it idles
    // between them: 1 MiB from the page cache is a quarter faster, from a disk a twentieth slower.
    if !connection.export.device().is_direct() {
        connection.transport.widen();
    }
    let queue = connection.queue().clone();
    let writer = queue.spawn(connection.clone().write());
    let end = match connection.read(&stopping).await {
        Ok(never) => match never {},
        Err(_) if stopping() => End::Stopped,
        Err(end) => end,
    };
    let patience = queue.sleep(PATIENCE);
    if let First::B(_) = race(connection.wait_for(Connection::is_idle), patience).await {
        connection.given_up.set(true);
        connection.transport.stop();
        connection.wait_for(Connection::is_idle).await;
    }
    connection.ending.set(true);
    connection.end_tasks().await;
    connection.wake_writer();
    writer.await;
    end
}

enum Never {}

impl Connection {
    pub fn queue(&self) -> &Queue {
        self.transport.queue()
    }

    /// Whether requests may be left half done, since their replies are not wanted.
    pub fn is_given_up(&self) -> bool {
        self.given_up.get() || self.broken.get()
    }

    fn is_idle(&self) -> bool {
        self.requests.get() == 0
    }

    fn has_capacity(&self, bytes: usize) -> bool {
        self.is_idle()
            || self.requests.get() < MAX_REQUESTS && self.bytes.get() + bytes <= MAX_BYTES
    }

    fn wake_waiting(&self) {
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }

    /// Waits until `condition` holds, which ends of requests and of tasks make
    /// true. One waits at a time.
    async fn wait_for(&self, condition: impl Fn(&Self) -> bool) {
        poll_fn(|context| {
            if condition(self) {
                return Poll::Ready(());
            }
            self.waiting.set(Some(context.waker().clone()));
            Poll::Pending
        })
        .await
    }

    /// Waits until the budget allows a request with a buffer of `bytes`.
    async fn permit(self: &Rc<Self>, bytes: usize) -> Permit {
        self.wait_for(|connection| connection.has_capacity(bytes))
            .await;
        let shared = match self.has_own(bytes) {
            true => Some(0),
            false if self.budget.take(bytes) => Some(bytes),
            false => self.wait_for_memory(bytes).await,
        };
        let refused = shared.is_none();
        let bytes = if refused { 0 } else { bytes };
        let shared = shared.unwrap_or(0);
        self.requests.set(self.requests.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
        Permit {
            connection: self.clone(),
            bytes,
            shared,
            refused,
        }
    }

    /// Whether `bytes` are part of what the connection has for itself.
    fn has_own(&self, bytes: usize) -> bool {
        self.bytes.get() + bytes <= self.own_bytes
    }

    /// Waits until requests before it have ended, or takes `bytes` from the
    /// budget; how many are from there. What is more than the connection ever
    /// has for itself is not waited for for ever: None.
    async fn wait_for_memory(&self, bytes: usize) -> Option<usize> {
        let patience = async {
            match bytes <= self.own_bytes {
                true => std::future::pending().await,
                false => drop(self.queue().sleep(PATIENCE).await),
            }
        };
        let shared = self.budget.take_later(bytes);
        let own = self.wait_for(|connection| connection.has_own(bytes));
        match race(race(shared, own), patience).await {
            First::A(First::A(())) => Some(bytes),
            First::A(First::B(())) => Some(0),
            First::B(()) => None,
        }
    }

    /// Reads requests and starts them.
    async fn read(self: &Rc<Self>, stopping: &impl Fn() -> bool) -> Result<Never, End> {
        let mut input = Input::new();
        let size = Request::size(self.headers);
        loop {
            while let Some(header) = input.take(size) {
                let request = Request::decode(self.headers, header)?;
                if request.command == Command::Disconnect {
                    return Err(End::Disconnected);
                }
                self.start(request, &mut input).await?;
                if stopping() {
                    return Err(End::Stopped);
                }
            }
            if input.fill(&self.transport, &mut []).await? == 0 {
                return Err(match input.is_empty() {
                    true => End::Closed,
                    false => End::Protocol("half a request".into()),
                });
            }
        }
    }

    async fn start(self: &Rc<Self>, request: Request, input: &mut Input) -> Result<(), End> {
        let length = request.payload(self.headers);
        let memory = match request.command {
            Command::Read => request.length.min(MAX_PAYLOAD.into()) as usize,
            Command::Cache => crate::execute::PIECE,
            _ => length.min(MAX_PAYLOAD.into()) as usize,
        };
        let permit = self.permit(memory).await;
        let start = Instant::now();
        let payload = match length {
            0 => None,
            _ if permit.refused => Some(self.pass_over(length, input).await?),
            _ => Some(self.payload(&request, length, input).await?),
        };
        let job = Job {
            request,
            payload,
            permit,
            start,
        };
        self.begin(job);
        Ok(())
    }

    /// Gives a request to a task.
    fn begin(self: &Rc<Self>, job: Job) {
        self.jobs.borrow_mut().push_back(job);
        let idle = self.idle.borrow_mut().pop();
        match idle {
            Some(waker) => waker.wake(),
            None => {
                self.tasks.set(self.tasks.get() + 1);
                // It ends by itself; `end_tasks` waits for it.
                drop(self.queue().spawn(self.clone().work()));
            }
        }
    }

    /// A task: does requests until no more will come.
    async fn work(self: Rc<Self>) {
        while let Some(job) = poll_fn(|context| self.next(context)).await {
            crate::execute::run(&self, job).await;
        }
        self.tasks.set(self.tasks.get() - 1);
        self.wake_waiting();
    }

    /// The next request for a task.
    fn next(&self, context: &Context<'_>) -> Poll<Option<Job>> {
        let mut idle = self.idle.borrow_mut();
        if let Some(job) = self.jobs.borrow_mut().pop_front() {
            // It may have been woken for something else while it was idle.
            idle.retain(|waker| !waker.will_wake(context.waker()));
            return Poll::Ready(Some(job));
        }
        if self.ending.get() {
            return Poll::Ready(None);
        }
        if !idle.iter().any(|waker| waker.will_wake(context.waker())) {
            idle.push(context.waker().clone());
        }
        Poll::Pending
    }

    /// Ends the tasks, which have no requests any more.
    async fn end_tasks(&self) {
        let idle = self.idle.take();
        idle.into_iter().for_each(Waker::wake);
        self.wait_for(|connection| connection.tasks.get() == 0)
            .await;
    }

    async fn payload(
        &self,
        request: &Request,
        length: u64,
        input: &mut Input,
    ) -> Result<Payload, End> {
        let filter = request.command == Command::BlockStatus;
        let most = match (request.command, filter) {
            (Command::Write, _) => MAX_PAYLOAD.into(),
            (_, true) => 1 << 10,
            _ => 0,
        };
        if length > most {
            return self.pass_over(length, input).await;
        }
        let mut buffer = self.queue().buffer(length as usize);
        let bytes = &mut buffer[..length as usize];
        input.read(&self.transport, bytes).await?;
        Ok(match filter {
            true => StatusFilter::decode(bytes).map_or(Payload::PassedOver, Payload::Filter),
            false => Payload::Data(buffer),
        })
    }

    async fn pass_over(&self, length: u64, input: &mut Input) -> Result<Payload, End> {
        if length > MAX_PASSED_OVER {
            return Err(End::Protocol(format!("a payload of {length} bytes")));
        }
        input.pass_over(&self.transport, length).await?;
        Ok(Payload::PassedOver)
    }

    /// Sends `reply` when its turn comes.
    pub fn send(&self, reply: Reply) {
        if self.broken.get() {
            return;
        }
        self.outgoing.borrow_mut().push_back(reply);
        self.wake_writer();
    }

    fn wake_writer(&self) {
        if let Some(waker) = self.writer.take() {
            waker.wake();
        }
    }

    /// Sends answers until no more will come.
    async fn write(self: Rc<Self>) {
        let mut sending = VecDeque::new();
        loop {
            poll_fn(|context| {
                if !self.outgoing.borrow().is_empty() || self.ending.get() {
                    return Poll::Ready(());
                }
                self.writer.set(Some(context.waker().clone()));
                Poll::Pending
            })
            .await;
            if self.outgoing.borrow().is_empty() {
                return;
            }
            if self.write_ready(&mut sending).await.is_err() {
                // The reader finds out the same.
                self.broken.set(true);
                self.transport.stop();
                sending.clear();
                let dropped = self.outgoing.take();
                drop(dropped);
            }
        }
    }

    /// Sends all that is there, and what comes meanwhile.
    async fn write_ready(&self, sending: &mut VecDeque<Reply>) -> io::Result<()> {
        // Bytes of the first reply that were sent.
        let mut sent = 0;
        loop {
            sending.append(&mut self.outgoing.borrow_mut());
            if sending.is_empty() {
                return self.transport.flush().await;
            }
            let n = {
                let mut slices = Vec::with_capacity(2 * sending.len().min(MAX_SLICES));
                for reply in sending.iter() {
                    reply.slices(&mut slices);
                    if slices.len() >= MAX_SLICES {
                        break;
                    }
                }
                let mut slices = &mut slices[..];
                IoSlice::advance_slices(&mut slices, sent);
                let most = slices.len().min(2 * MAX_SLICES);
                self.transport.write(&slices[..most]).await?
            };
            sent += n;
            while let Some(first) = sending.front()
                && sent >= first.length()
            {
                sent -= first.length();
                sending.pop_front();
            }
        }
    }

    /// The answer that a request failed.
    pub fn fail(&self, request: &Request, failed: &Failed, permit: Permit) {
        self.send(Reply::error(self.headers, request, failed, permit));
    }
}

/// Bytes received and not looked at yet.
struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Input {
    fn new() -> Self {
        Input {
            buffer: vec![0; INPUT].into(),
            start: 0,
            end: 0,
        }
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The next `length` bytes, if they are here.
    fn take(&mut self, length: usize) -> Option<&[u8]> {
        let bytes = self.buffer[self.start..self.end].get(..length)?;
        self.start += length;
        Some(bytes)
    }

    /// Receives into `first`, and what is more than that into the buffer, of
    /// which less than a header is full. Bytes received; 0 at the end.
    async fn fill(&mut self, transport: &Transport, first: &mut [u8]) -> io::Result<usize> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let wanted = first.len();
        let (_, room) = self.buffer.split_at_mut(self.end);
        let n = match wanted {
            0 => transport.read(&mut [IoSliceMut::new(room)]).await?,
            _ => {
                let mut parts = [IoSliceMut::new(first), IoSliceMut::new(room)];
                transport.read(&mut parts).await?
            }
        };
        self.end += n.saturating_sub(wanted);
        Ok(n)
    }

    /// Fills `bytes` with what comes next.
    async fn read(&mut self, transport: &Transport, bytes: &mut [u8]) -> Result<(), End> {
        let here = bytes.len().min(self.end - self.start);
        bytes[..here].copy_from_slice(&self.buffer[self.start..][..here]);
        self.start += here;
        let mut done = here;
        while done < bytes.len() {
            match self.fill(transport, &mut bytes[done..]).await? {
                0 => return Err(End::Protocol("half a request".into())),
                n => done += n,
            }
        }
        Ok(())
    }

    async fn pass_over(&mut self, transport: &Transport, mut length: u64) -> Result<(), End> {
        loop {
            let here = length.min((self.end - self.start) as u64);
            self.start += here as usize;
            length -= here;
            if length == 0 {
                return Ok(());
            }
            if self.fill(transport, &mut []).await? == 0 {
                return Err(End::Protocol("half a request".into()));
            }
        }
    }
}
