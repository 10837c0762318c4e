//! A virtqueue that runs: takes requests off its ring, and answers them.
//!
//! One future takes requests, and tasks of the thread's queue execute them.
//! The order keeps the number of system calls small:
//!
//! - as long as requests are found, the guest is not asked to say so (event
//!   index); only when there are none, nothing else to do, and neither has
//!   changed for a while (`Polling`), is it asked again, and the ring looked at
//!   once more: a request that came before the guest could know is seen then,
//!   and one that came later kicks;
//! - requests that are found together are started together, since their tasks
//!   run before the ring is looked at again: a few, so that the guest has
//!   answers to the first ones, and makes new ones, while the rest is done; but
//!   all that follow each other on the disk, which become one of the device's;
//! - requests that end together are signalled to the guest by one event: tasks
//!   run before the future that signals.
//!
//! Bounds: as many requests at a time as the ring has descriptors, and no new
//! one while [`MAX_BYTES`] of data are in flight.

use std::cell::{Cell, RefCell};
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
use crate::export::{Export, WRONG, kind};
use crate::inflight::QueueInflight;
use crate::memory::Guest;
use crate::request::{MAX_BYTES, Request, Span};

/// Requests that are started together, unless they follow each other on the disk.
/// Measured from the page cache, 32 in flight, thousand reads a second: 325 with 1,
/// 355 with 2 or 4, 300 with 8, 260 with all that there are. On the device there is no difference.
const AT_ONCE: usize = 4;

/// What a ring begins with.
pub struct Start {
    pub guest: Arc<Guest>,
    /// With valid addresses in `guest`.
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
    /// Reused by each request.
    chain: RefCell<Chain>,
    pool: RequestPool<Taken>,
    /// The future that looks for requests, or waits for the last to end.
    waker: RefCell<Option<Waker>>,
    /// There are completions that were not signalled to the guest.
    answered: Cell<bool>,
    /// Nothing is taken any more: the guest has made no sense.
    broken: Cell<bool>,
    polling: Polling,
}

/// A request off the ring.
struct Taken {
    head: u16,
    request: Request,
    begun: Instant,
    permit: Permit,
}

/// Why a ring is of no use.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("{0}")]
    Ring(#[from] virtio_queue::Error),
    #[error("it offers descriptor {0}, which it does not have")]
    Head(u16),
    #[error("its kicks cannot be received: {}", zebu::strerror(.0))]
    Kick(io::Error),
}

impl Ring {
    /// Takes up what was in flight when the server was killed, if anything.
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
        let ring = Rc::new(ring);
        // In case the last server died before it could signal the guest.
        ring.call();
        if !again.is_empty() {
            tracing::info!("{} requests are done again", again.len());
        }
        for head in again {
            ring.begin(head);
        }
        ring
    }

    /// Serves the ring until `interrupt` is ready. Requests may be in flight
    /// then.
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
            if let Err(broken) = self.look(context, &mut kick) {
                self.give_up(&broken);
                kick = None;
            }
            Poll::Pending
        })
        .await
    }

    /// Waits for the requests in flight; nothing is done here afterwards. The
    /// index of the next request.
    pub async fn drain(&self) -> u16 {
        poll_fn(|context| {
            self.set_waker(context);
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

    /// Takes what requests there are, or begins to wait for some.
    fn look<'a>(
        self: &'a Rc<Self>,
        context: &mut Context<'_>,
        kick: &mut Option<zebu::storage::Ready<'a>>,
    ) -> Result<(), Broken> {
        if self.broken.get() {
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
        // What was taken is started first. Or there was nothing, but may be
        // soon; meanwhile the guest need not say so, or is not heard.
        if taken > 0 || self.polling.looks_again() {
            context.waker().wake_by_ref();
            return Ok(());
        }
        if !self.has_capacity() {
            // The end of a request will wake us.
            return Ok(());
        }
        let guest = &*self.start.guest;
        // This asks for kicks and, behind a full fence, looks once more. The
        // guest offers a request and then, behind its fence, looks whether a
        // kick is wanted: one of the two sees the other, so no request waits
        // unnoticed while we sleep.
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

    /// Forgets the kicks so far.
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

    /// Takes some requests, if there are any, and capacity. Returns how many.
    fn take(self: &Rc<Self>) -> Result<usize, Broken> {
        let guest = &*self.start.guest;
        let size = self.virtqueue.borrow().size();
        self.virtqueue.borrow_mut().disable_notification(guest)?;
        let mut taken = 0;
        let mut last = None::<Span>;
        let mut goes_on = false;
        while self.has_capacity() && (taken < AT_ONCE || goes_on) {
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
            goes_on = (last.zip(span)).is_some_and(|(last, span)| span.goes_on(last));
            last = span;
            taken += 1;
        }
        Ok(taken)
    }

    /// Starts the request whose first descriptor is `head`. What it reads or writes.
    fn begin(self: &Rc<Self>, head: u16) -> Option<Span> {
        let begun = Instant::now();
        let request = match self.read(head) {
            Ok(request) => request,
            Err(malformed) => {
                tracing::debug!("export {:?}: {malformed}", self.export.name());
                self.statistics(WRONG, 0, begun, true);
                // There is no address for a status.
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
            let status = execute(&self.queue, &self.export, &request.work, through).await;
            let (kind, bytes) = (kind(&request.work), request.bytes);
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
        // The ring, and so `guest`, lives as long as the request's task.
        chain.read(guest, table, virtqueue.size(), head)?;
        Request::decode(guest, &chain)
    }

    fn statistics(&self, kind: usize, bytes: usize, begun: Instant, failed: bool) {
        let statistics = self.export.statistics();
        statistics.add(kind, bytes as u64, begun.elapsed(), failed);
    }

    /// Answers a request.
    fn end(&self, head: u16, request: &Request, status: Status, permit: Permit) {
        // The address was checked, and memory does not go away.
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

    /// Signals the completions that were not signalled yet, if the guest wants it.
    fn signal(&self) {
        if self.answered.replace(false) && self.is_wanted() {
            self.call();
        }
    }

    fn call(&self) {
        if let Some(mut call) = self.start.call.as_ref() {
            // If it cannot be written to, it is readable already.
            let _ = call.write(&1u64.to_ne_bytes());
        }
    }

    fn is_wanted(&self) -> bool {
        let guest = &*self.start.guest;
        let mut virtqueue = self.virtqueue.borrow_mut();
        if virtqueue.event_idx_enabled() {
            return virtqueue.needs_notification(guest).unwrap_or(true);
        }
        // VIRTQ_AVAIL_F_NO_INTERRUPT, which is not looked at there.
        std::sync::atomic::fence(Ordering::SeqCst);
        let flags = guest.load(GuestAddress(virtqueue.avail_ring()), Ordering::Relaxed);
        flags.map_or(true, |flags: u16| u16::from_le(flags) & 1 == 0)
    }

    /// The guest, or the front end, has made no sense: what is in flight is
    /// answered, but nothing is taken any more until the ring is started anew.
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
