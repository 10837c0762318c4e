//! A running virtqueue: requests are taken from its ring, executed, and completed.
//!
//! One future takes requests, and tasks of the thread's queue execute them. The number of system
//! calls and notifications is kept small:
//!
//! - While requests are found, the guest is asked not to kick (event index). Kicks are asked for
//!   again when there were no requests for a while (`Polling`). Then the ring is looked at once
//!   more, so that no request is missed.
//! - A few requests are taken at a time, so that the guest has completions, and adds requests,
//!   while others are executed. Requests that are contiguous on the disk are taken together, and
//!   become one operation of the device.
//! - Requests that complete in the same round are signalled by one event: tasks run before the
//!   future that signals.
//!
//! At most as many requests are in flight as the ring has descriptors. No request is taken while
//! [`MAX_BYTES`] of data are in flight.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::future::{Future, poll_fn};
use std::io::{self, Read, Write};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use virtio_queue::{Queue as Virtqueue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};
use zebu::internal::{Permit, Polling, RequestPool};
use zebu::storage::Queue;

use crate::chain::{Chain, Malformed};
use crate::execute::{Status, execute};
use crate::export::{Export, INVALID, kind};
use crate::inflight::QueueInflight;
use crate::memory::Guest;
use crate::request::{MAX_BYTES, Request, Span};

/// Requests that are taken at a time, if they are not contiguous on the disk.
const AT_ONCE: usize = 4;

/// What a ring is made from.
pub struct Start {
    pub guest: Arc<Guest>,
    /// Its addresses are valid in `guest`.
    pub virtqueue: Virtqueue,
    /// Readable when the guest has requests.
    pub kick: File,
    /// Signals completions to the guest.
    pub call: Option<File>,
    /// Signals to the front end that the ring is broken.
    pub error: Option<File>,
    pub inflight: Option<QueueInflight>,
    /// Whether writes are durable only after a flush.
    pub write_back: Arc<AtomicBool>,
}

/// A running virtqueue.
pub struct Ring {
    queue: Queue,
    export: Arc<Export>,
    start: Start,
    virtqueue: RefCell<Virtqueue>,
    inflight: RefCell<Option<QueueInflight>>,
    /// Requests of the last server that were not begun again yet, which come before all others.
    again: RefCell<VecDeque<u16>>,
    /// Reused by each request.
    chain: RefCell<Chain>,
    pool: RequestPool<Taken>,
    /// The future that takes requests, or that waits until all have ended.
    waker: RefCell<Option<Waker>>,
    /// Completions were not signalled to the guest yet.
    answered: Cell<bool>,
    /// No more requests are taken, since the ring is invalid.
    broken: Cell<bool>,
    polling: Polling,
}

/// A request that was taken from the ring.
struct Taken {
    head: u16,
    request: Request,
    begun: Instant,
    permit: Permit,
}

/// Why a ring is invalid.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("{0}")]
    Ring(#[from] virtio_queue::Error),
    #[error("it has no descriptor {0}")]
    Head(u16),
    #[error("its kicks cannot be received: {}", zebu::strerror(.0))]
    Kick(io::Error),
}

impl Ring {
    /// A ring that starts with the requests that were in flight when the last server was killed.
    pub fn new(queue: &Queue, export: &Arc<Export>, mut start: Start) -> Rc<Self> {
        let virtqueue = std::mem::replace(
            &mut start.virtqueue,
            Virtqueue::new(1).expect("a power of two"),
        );
        let mut inflight = start.inflight.take();
        let mut ring = Ring {
            queue: queue.clone(),
            export: export.clone(),
            start,
            virtqueue: RefCell::new(virtqueue),
            inflight: RefCell::new(None),
            again: RefCell::default(),
            chain: RefCell::default(),
            pool: RequestPool::new(queue),
            waker: RefCell::new(None),
            answered: Cell::new(false),
            broken: Cell::new(false),
            polling: Polling::new(queue.options().poll),
        };
        let mut again = Vec::new();
        if let Some(inflight) = &mut inflight {
            let virtqueue = ring.virtqueue.get_mut();
            let used = virtqueue.next_used();
            again = inflight.recover(used);
            virtqueue.set_next_avail(used.wrapping_add(again.len() as u16));
        }
        ring.inflight = RefCell::new(inflight);
        // The last server may have been killed before it could signal the guest.
        ring.call();
        if !again.is_empty() {
            tracing::info!(
                "{} requests of the last server are executed again",
                again.len()
            );
        }
        ring.again = RefCell::new(again.into());
        Rc::new(ring)
    }

    /// Serves the ring until `interrupt` is ready. Requests may be in flight then.
    pub async fn serve<T>(
        self: &Rc<Self>,
        mut interrupt: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> T {
        let mut kick = None;
        poll_fn(|context| {
            self.set_waker(context);
            if let Poll::Ready(interrupted) = interrupt(context) {
                return Poll::Ready(interrupted);
            }
            self.signal();
            if let Err(broken) = self.poll_requests(context, &mut kick) {
                self.give_up(&broken);
                kick = None;
            }
            Poll::Pending
        })
        .await
    }

    /// Waits for the requests in flight. Returns the index of the next request.
    pub async fn drain(self: &Rc<Self>) -> u16 {
        poll_fn(|context| {
            self.set_waker(context);
            // They count as taken, so they are finished, too.
            self.begin_again();
            self.signal();
            match self.pool.requests() {
                0 => Poll::Ready(()),
                _ => Poll::Pending,
            }
        })
        .await;
        self.pool.close().await;
        self.virtqueue.borrow().next_avail()
    }

    fn set_waker(&self, context: &Context<'_>) {
        let mut waker = self.waker.borrow_mut();
        match &mut *waker {
            Some(waker) => waker.clone_from(context.waker()),
            None => *waker = Some(context.waker().clone()),
        }
    }

    /// Takes requests, or waits for a kick.
    fn poll_requests<'a>(
        self: &'a Rc<Self>,
        context: &mut Context<'_>,
        kick: &mut Option<zebu::storage::Ready<'a>>,
    ) -> Result<(), Broken> {
        let again = self.begin_again();
        if again > 0 {
            context.waker().wake_by_ref();
        }
        if self.broken.get() || !self.again.borrow().is_empty() {
            // A request that ends wakes this future.
            return Ok(());
        }
        if let Some(wait) = kick
            && let Poll::Ready(ready) = Pin::new(wait).poll(context)
        {
            *kick = None;
            ready.map_err(Broken::Kick)?;
            self.clear_kick()?;
        }
        let taken = self.take()?;
        if taken > 0 {
            self.polling.found();
        }
        // After a round with requests, their tasks run first. While polling, no kick is needed.
        if taken > 0 || self.polling.polls_again() {
            context.waker().wake_by_ref();
            return Ok(());
        }
        if !self.has_capacity() {
            // A request that ends wakes this future.
            return Ok(());
        }
        let guest = &*self.start.guest;
        // This asks for kicks and, behind a full fence, looks at the ring again. The guest adds a
        // request and then, behind its fence, looks whether a kick is wanted. One side sees the
        // other, so no request is missed.
        if self.virtqueue.borrow_mut().enable_notification(guest)? {
            context.waker().wake_by_ref();
            return Ok(());
        }
        if kick.is_none() {
            let mut wait = self.queue.readable(&self.start.kick);
            match Pin::new(&mut wait).poll(context) {
                Poll::Ready(ready) => {
                    ready.map_err(Broken::Kick)?;
                    context.waker().wake_by_ref();
                    self.clear_kick()?;
                }
                Poll::Pending => *kick = Some(wait),
            }
        }
        Ok(())
    }

    /// Resets the event of kicks.
    fn clear_kick(&self) -> Result<(), Broken> {
        match (&self.start.kick).read(&mut [0; 8]) {
            Ok(0) => Err(Broken::Kick(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(e) => Err(Broken::Kick(e)),
        }
    }

    fn has_capacity(&self) -> bool {
        let size = usize::from(self.virtqueue.borrow().size());
        self.pool.requests() < size && self.pool.bytes() < MAX_BYTES
    }

    /// Begins requests of the last server, as long as there is capacity. Returns their number.
    fn begin_again(self: &Rc<Self>) -> usize {
        let mut begun = 0;
        while self.has_capacity() {
            let Some(head) = self.again.borrow_mut().pop_front() else {
                break;
            };
            self.begin(head);
            begun += 1;
        }
        begun
    }

    /// Takes some requests, as long as there is capacity. Returns their number.
    fn take(self: &Rc<Self>) -> Result<usize, Broken> {
        let guest = &*self.start.guest;
        let size = self.virtqueue.borrow().size();
        self.virtqueue.borrow_mut().disable_notification(guest)?;
        let mut taken = 0;
        let mut last = None::<Span>;
        let mut contiguous = false;
        while self.has_capacity() && (taken < AT_ONCE || contiguous) {
            let next = {
                let mut virtqueue = self.virtqueue.borrow_mut();
                let next = virtqueue.iter(guest)?.next();
                next.map(|chain| chain.head_index())
            };
            let Some(head) = next else {
                break;
            };
            if head >= size {
                return Err(Broken::Head(head));
            }
            if let Some(inflight) = &mut *self.inflight.borrow_mut() {
                inflight.take(head);
            }
            let span = self.begin(head);
            contiguous = (last.zip(span)).is_some_and(|(last, span)| span.continues(last));
            last = span;
            taken += 1;
        }
        Ok(taken)
    }

    /// Starts the request whose first descriptor is `head`. Returns the range that it reads or
    /// writes.
    fn begin(self: &Rc<Self>, head: u16) -> Option<Span> {
        let begun = Instant::now();
        let request = match self.read(head) {
            Ok(request) => request,
            Err(malformed) => {
                tracing::debug!("export {:?}: {malformed}", self.export.name());
                self.statistics(INVALID, 0, begun, true);
                // There is no valid address for a status.
                self.answer(head, 0);
                return None;
            }
        };
        let span = request.span();
        let taken = Taken {
            head,
            permit: self.pool.permit(request.bytes),
            request,
            begun,
        };
        self.pool.start(taken, || self.clone().work());
        span
    }

    /// A task of the pool.
    async fn work(self: Rc<Self>) {
        while let Some(taken) = self.pool.next().await {
            let request = &taken.request;
            let through = !self.start.write_back.load(Ordering::Relaxed);
            let (kind, bytes) = (kind(&request.work), request.bytes);
            let in_flight = self.export.statistics().begin(kind);
            let status = execute(&self.queue, &self.export, &request.work, through).await;
            drop(in_flight);
            self.end(taken.head, request, status, taken.permit);
            self.statistics(kind, bytes, taken.begun, status != Status::Ok);
        }
    }

    fn wake(&self) {
        if let Some(waker) = &*self.waker.borrow() {
            waker.wake_by_ref();
        }
    }

    fn read(&self, head: u16) -> Result<Request, Malformed> {
        let guest = &*self.start.guest;
        let mut chain = self.chain.borrow_mut();
        let virtqueue = self.virtqueue.borrow();
        let table = GuestAddress(virtqueue.desc_table());
        // The ring, and so `guest`, outlives the request's task.
        chain.read(guest, table, virtqueue.size(), head)?;
        Request::decode(guest, &chain)
    }

    fn statistics(&self, kind: usize, bytes: usize, begun: Instant, failed: bool) {
        let statistics = self.export.statistics();
        statistics.add(kind, bytes as u64, begun.elapsed(), failed);
    }

    /// Completes a request.
    fn end(&self, head: u16, request: &Request, status: Status, permit: Permit) {
        // The address was checked, and stays mapped.
        let guest = &*self.start.guest;
        let stored = guest.write_obj(status as u8, request.status);
        debug_assert!(stored.is_ok());
        let written = match status {
            Status::Ok => request.written,
            _ => 1,
        };
        drop(permit);
        self.answer(head, written);
    }

    fn answer(&self, head: u16, written: u32) {
        let mut virtqueue = self.virtqueue.borrow_mut();
        let inflight = self.inflight.borrow();
        if let Some(inflight) = &*inflight {
            inflight.answer(head);
        }
        if let Err(e) = virtqueue.add_used(&*self.start.guest, head, written) {
            self.give_up(&e.into());
        }
        if let Some(inflight) = &*inflight {
            inflight.answered(head, virtqueue.next_used());
        }
        self.answered.set(true);
        self.polling.found();
        self.wake();
    }

    /// Signals completions to the guest, if there are any and it wants that.
    fn signal(&self) {
        if self.answered.replace(false) && self.is_wanted() {
            self.call();
        }
    }

    fn call(&self) {
        if let Some(mut call) = self.start.call.as_ref() {
            // A write fails only if the event is signalled already.
            let _ = call.write(&1u64.to_ne_bytes());
        }
    }

    fn is_wanted(&self) -> bool {
        let guest = &*self.start.guest;
        let mut virtqueue = self.virtqueue.borrow_mut();
        if virtqueue.event_idx_enabled() {
            return virtqueue.needs_notification(guest).unwrap_or(true);
        }
        // VIRTQ_AVAIL_F_NO_INTERRUPT, which `virtio-queue` does not read.
        std::sync::atomic::fence(Ordering::SeqCst);
        let flags = guest.load(GuestAddress(virtqueue.avail_ring()), Ordering::Relaxed);
        flags.map_or(true, |flags: u16| u16::from_le(flags) & 1 == 0)
    }

    /// Takes no more requests until the ring is started again. Those in flight complete.
    fn give_up(&self, why: &Broken) {
        if self.broken.replace(true) {
            return;
        }
        tracing::warn!(
            "export {:?}: a virtqueue is broken: {why}",
            self.export.name()
        );
        if let Some(mut error) = self.start.error.as_ref() {
            let _ = error.write(&1u64.to_ne_bytes());
        }
    }
}
