//! What the tasks of one connection share: its requests in flight and its replies.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use zebu::internal::nbd::{Headers, Request, StatusFilter};
use zebu::internal::{self, RequestPool};
use zebu::storage::{Budget, PoolBuffer, Queue, Reserved};

use crate::budget::MAX_BYTES;
use crate::export::Export;
use crate::handshake::Agreed;
use crate::race::{First, race};
use crate::reply::Reply;
use crate::transport::Transport;

/// Requests of one connection at a time.
const MAX_REQUESTS: usize = 128;
/// How long a client that has disconnected, or whose server stops, may take to receive its
/// replies. Also how long a request that is larger than the connection's share waits for memory.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A connection whose client has chosen an export.
pub struct Connection {
    pub transport: Rc<Transport>,
    pub export: Arc<Export>,
    pub headers: Headers,
    pub contexts: Vec<u32>,
    pub pool: RequestPool<Job>,
    /// Replies that are to be sent, with what their requests hold until then.
    pub outgoing: RefCell<VecDeque<(Reply, Permit)>>,
    /// The task that sends them, while it waits for one.
    pub writer: Cell<Option<Waker>>,
    /// Nothing can be sent any more.
    pub broken: Cell<bool>,
    /// No replies will follow.
    pub ending: Cell<bool>,
    /// Replies are not waited for any more.
    pub given_up: Cell<bool>,
    /// Bytes of its share.
    share: usize,
    budget: Budget,
}

/// A request's memory. It is kept until the reply is in the socket.
pub struct Permit {
    _in_flight: internal::Permit,
    _reserved: Option<Reserved>,
    /// There is no memory for the request: it fails.
    pub refused: bool,
}

/// A request that is about to be executed.
pub struct Job {
    pub request: Request,
    /// The bytes to write, or the contexts of a block status request.
    pub payload: Option<Payload>,
    pub permit: Permit,
    pub start: Instant,
}

/// The payload of a request.
pub enum Payload {
    Data(PoolBuffer),
    Filter(StatusFilter),
    /// It was too long or malformed, and was skipped.
    Skipped,
    /// It was skipped, since there is no memory for it.
    NoMemory,
}

impl Connection {
    /// `share` and `budget` bound the memory of its requests.
    pub fn new(transport: Rc<Transport>, agreed: Agreed, share: usize, budget: Budget) -> Rc<Self> {
        Rc::new(Connection {
            pool: RequestPool::new(transport.queue()),
            transport,
            export: agreed.export,
            headers: agreed.headers,
            contexts: agreed.contexts,
            outgoing: RefCell::default(),
            writer: Cell::new(None),
            broken: Cell::new(false),
            ending: Cell::new(false),
            given_up: Cell::new(false),
            share,
            budget,
        })
    }

    pub fn queue(&self) -> &Queue {
        self.transport.queue()
    }

    /// Whether requests may be left half done, since their replies are not wanted.
    pub fn is_given_up(&self) -> bool {
        self.given_up.get() || self.broken.get()
    }

    /// Waits until a request with a buffer of `bytes` is within the bounds.
    pub async fn permit(&self, bytes: usize) -> Permit {
        let bytes = match bytes {
            0 => 0,
            bytes => Queue::pooled(bytes),
        };
        let has_capacity = |pool: &RequestPool<Job>| {
            let requests = pool.requests();
            requests == 0 || requests < MAX_REQUESTS && pool.bytes() + bytes <= MAX_BYTES
        };
        self.pool.wait_for(has_capacity).await;
        let (reserved, refused) = match self.is_in_share(bytes) {
            true => (None, false),
            false => match self.budget.try_reserve(bytes) {
                Some(reserved) => (Some(reserved), false),
                None => self.wait_for_memory(bytes).await,
            },
        };
        Permit {
            _in_flight: self.pool.permit(if refused { 0 } else { bytes }),
            _reserved: reserved,
            refused,
        }
    }

    fn is_in_share(&self, bytes: usize) -> bool {
        self.pool.bytes() + bytes <= self.share
    }

    /// Waits until earlier requests have ended, or reserves `bytes`. True: neither happened in
    /// time, which is limited for a request larger than the share.
    async fn wait_for_memory(&self, bytes: usize) -> (Option<Reserved>, bool) {
        let patience = async {
            match bytes <= self.share {
                true => std::future::pending().await,
                false => drop(self.queue().sleep(PATIENCE).await),
            }
        };
        let reserved = self.budget.reserve(bytes);
        let in_share = self.pool.wait_for(|_| self.is_in_share(bytes));
        match race(race(reserved, in_share), patience).await {
            First::A(First::A(reserved)) => (Some(reserved), false),
            First::A(First::B(())) => (None, false),
            First::B(()) => (None, true),
        }
    }

    /// Sends `reply` after those before it.
    pub fn send(&self, reply: Reply, permit: Permit) {
        if self.broken.get() {
            return;
        }
        self.outgoing.borrow_mut().push_back((reply, permit));
        self.wake_writer();
    }

    pub fn wake_writer(&self) {
        if let Some(waker) = self.writer.take() {
            waker.wake();
        }
    }
}
