//! The `io_uring` engine: a ring per queue (`io_uring_setup(2)`).
#![allow(unsafe_code)]

use std::cell::OnceCell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::eventfd::EventFd;
use super::op::{Op, OpKind};
use super::watch::{new_epoll, register};
use super::workers::Workers;
use super::{Completion, Engine, Interest, Notify, Token};

/// Submission entries; a larger batch takes several system calls.
const ENTRIES: u32 = 128;
/// Deferred completions that the kernel delivers when it is entered without waiting; it may keep
/// the rest until the next time.
const DELIVERED: usize = 20;
/// How often in a row the submission of waits for descriptors may be deferred.
const PUT_OFF: u32 = 16;
/// Names the poll of the event by which other threads wake this one.
const WAKE: u64 = u64::MAX;
/// Names all cancellations of waits.
const UNWATCH: u64 = u64::MAX - 1;
/// With the token, names a wait for a descriptor.
const WATCH: u64 = 2 << Token::BITS;
/// With the token, names an operation that a thread of the kernel executes (`IOSQE_ASYNC`).
const ASYNC: u64 = 1 << Token::BITS;

/// The engine.
pub struct Uring {
    ring: IoUring,
    wake: Arc<Wake>,
    /// Whether `Wake::completed` is registered (`IORING_REGISTER_EVENTFD`): from the first
    /// [`Engine::arm`] on, since it makes each completion slower.
    registered: bool,
    /// Waits for descriptors that have not ended.
    watches: Vec<Watch>,
    wake_armed: bool,
    /// Whether completions are delivered only when the thread enters the kernel
    /// (`IORING_SETUP_DEFER_TASKRUN`, Linux 6.1).
    deferred: bool,
    in_flight: usize,
    /// Whether operations are queued and not submitted. Waits for descriptors do not count: they
    /// are submitted with the next entry.
    has_queued: bool,
    /// How often in a row waits for descriptors were not submitted.
    put_off: u32,
    /// False after the kernel had no thread for an operation with `force_async`.
    has_threads: bool,
    /// Completions that were reaped to make space for a submission.
    ended_early: Vec<Completion>,
    /// Whether the kernel changes the length of files in the ring (Linux 6.9), once it is known.
    has_ftruncate: OnceCell<bool>,
    /// For what the kernel does not do in the ring.
    workers: Option<Workers>,
}

/// What wakes the thread: from the ring, or from another event loop.
#[derive(Debug)]
struct Wake {
    /// The ring polls it while the thread waits there.
    event: EventFd,
    outside: OnceLock<Outside>,
    /// Whether another event loop waits.
    ///
    /// Then the ring must not be what reports a wake-up: the kernel puts off the signal of a ring's
    /// registered eventfd if it comes from a write to an eventfd.
    is_outside: AtomicBool,
}

/// For another event loop; the ring's descriptor does not report completions that are deferred.
#[derive(Debug)]
struct Outside {
    /// An epoll instance with `completed` and, for the same reason as above, a duplicate of the
    /// descriptor of each wait.
    epoll: OwnedFd,
    /// Readable after a completion or a wake-up.
    completed: EventFd,
}

/// A wait for a descriptor.
struct Watch {
    token: Token,
    fd: RawFd,
    interest: Interest,
    /// What `Outside::epoll` waits for.
    duplicate: Option<OwnedFd>,
}

impl Notify for Wake {
    fn notify(&self) {
        // Pairs with `set_outside`: what is to be noticed is seen there, or the change here.
        fence(Ordering::SeqCst);
        match self.outside.get() {
            Some(outside) if self.is_outside.load(Ordering::SeqCst) => outside.completed.notify(),
            _ => self.event.notify(),
        }
    }
}

impl Wake {
    /// Sets where the thread waits from now on. Returns where it did before.
    fn set_outside(&self, outside: bool) -> bool {
        // Only the thread itself sets it.
        let before = self.is_outside.load(Ordering::Relaxed);
        if before != outside {
            self.is_outside.store(outside, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
        before
    }
}

impl Wake {
    /// Takes a wait that has ended out of `watches`.
    fn unwatched(&self, watches: &mut Vec<Watch>, token: Token) {
        let Some(at) = watches.iter().position(|watch| watch.token == token) else {
            return;
        };
        if let (Some(outside), Some(duplicate)) =
            (self.outside.get(), watches.swap_remove(at).duplicate)
        {
            // Closing alone leaves it registered: the caller's descriptor is of the same file.
            let _ = rustix::event::epoll::delete(&outside.epoll, &duplicate);
        }
    }
}

impl Uring {
    /// A ring, with deferred completions if the kernel has them.
    pub fn new() -> io::Result<Self> {
        let deferred = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_cqsize(ENTRIES * 8)
            .build(ENTRIES);
        let (ring, deferred) = match deferred {
            Ok(ring) => (ring, true),
            Err(_) => (IoUring::new(ENTRIES)?, false),
        };
        // The operations need Linux 5.6.
        if !ring.params().is_feature_submit_stable() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel's io_uring is older than Linux 5.6",
            ));
        }
        Ok(Uring {
            ring,
            wake: Arc::new(Wake {
                event: EventFd::new()?,
                outside: OnceLock::new(),
                is_outside: AtomicBool::new(false),
            }),
            registered: false,
            watches: Vec::new(),
            wake_armed: false,
            deferred,
            in_flight: 0,
            has_queued: false,
            put_off: 0,
            has_threads: true,
            ended_early: Vec::new(),
            has_ftruncate: OnceCell::new(),
            workers: None,
        })
    }

    /// Whether the kernel has an operation for this one.
    fn is_for_ring(&self, kind: OpKind) -> bool {
        match kind {
            OpKind::Extent => false,
            OpKind::SetLength => *self.has_ftruncate.get_or_init(|| {
                let mut probe = Probe::new();
                let known = self.ring.submitter().register_probe(&mut probe);
                known.is_ok() && probe.is_supported(opcode::Ftruncate::CODE)
            }),
            _ => true,
        }
    }

    fn push(&mut self, entry: squeue::Entry) {
        loop {
            // SAFETY: `submit` was promised that the memory stays valid; the
            // wake poll has none.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            // A full queue is submitted to make space. The kernel may take nothing before
            // completions are reaped (EBUSY, EAGAIN).
            if self.enter(0).is_err() {
                let mut early = std::mem::take(&mut self.ended_early);
                self.reap(&mut early);
                self.ended_early = early;
            }
        }
    }

    /// Submits what is queued and waits for `want` completions.
    fn enter(&mut self, want: usize) -> io::Result<usize> {
        self.has_queued = false;
        if want == 0 && self.deferred {
            let queued = self.ring.submission().len() as u32;
            // SAFETY: only flags and counts, no argument memory.
            unsafe {
                self.ring
                    .submitter()
                    .enter::<()>(queued, 0, 1 /* GETEVENTS */, None)
            }
        } else {
            self.ring.submit_and_wait(want)
        }
    }

    /// [`Uring::enter`], without the errors after which it is repeated: a signal, or completions
    /// that must be reaped first.
    fn enter_again(&mut self, want: usize) -> io::Result<()> {
        match self.enter(want) {
            Ok(_) => Ok(()),
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(e),
            },
        }
    }

    /// Queues the poll of the event, unless it is in the ring.
    fn arm_wake(&mut self) {
        if !self.wake_armed {
            let poll = opcode::PollAdd::new(types::Fd(self.wake.event.fd()), libc::POLLIN as u32);
            self.push(poll.build().user_data(WAKE));
            self.wake_armed = true;
        }
    }

    /// Whether nothing is in the ring, or was.
    fn is_idle(&mut self) -> bool {
        self.in_flight == 0
            && !self.wake_armed
            && self.ended_early.is_empty()
            && self.ring.submission().is_empty()
    }

    /// Whether there are completions that are delivered only when the thread enters the kernel.
    fn has_deferred(&mut self) -> bool {
        let submission = self.ring.submission();
        self.deferred && (submission.taskrun() || submission.cq_overflow())
    }

    /// Whether what is queued is submitted now. Waits for descriptors alone are deferred if the
    /// thread does not sleep, which saves a system call.
    fn must_hand_over(&mut self, sleep: bool) -> bool {
        if sleep || self.has_queued || self.put_off >= PUT_OFF {
            self.put_off = 0;
            return !self.ring.submission().is_empty();
        }
        self.put_off += 1;
        false
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.ended_early);
        for entry in self.ring.completion() {
            match entry.user_data() {
                WAKE => {
                    self.wake.event.clear();
                    self.wake_armed = false;
                }
                UNWATCH => {}
                data => {
                    self.in_flight -= 1;
                    if data & WATCH != 0 {
                        self.wake.unwatched(&mut self.watches, data as Token);
                    }
                    let mut result = entry.result();
                    if data & ASYNC != 0 && result == -libc::ECANCELED {
                        // Only waits are cancelled here: the kernel could not make a thread. The
                        // operation is repeated without one, as after a signal.
                        self.has_threads = false;
                        result = -libc::EINTR;
                    }
                    done.push((data as Token, result));
                }
            }
        }
        // After the event was cleared, which they signal when there is something to take.
        if let Some(workers) = &self.workers {
            let before = done.len();
            workers.take_ended(done);
            self.in_flight -= done.len() - before;
        }
    }
}

fn entry_for(op: &Op) -> squeue::Entry {
    let fd = types::Fd(op.fd);
    let length = op.length.min(i32::MAX as u64) as u32;
    let iov = op.memory as *const libc::iovec;
    let durable = if op.kind == OpKind::WriteDurable {
        libc::RWF_DSYNC
    } else {
        0
    };
    match (op.kind, op.segments) {
        (OpKind::Read, 1) => opcode::Read::new(fd, op.memory.cast(), length)
            .offset(op.offset)
            .build(),
        (OpKind::Read, n) => opcode::Readv::new(fd, iov, n).offset(op.offset).build(),
        (OpKind::Write | OpKind::WriteDurable, 1) => {
            opcode::Write::new(fd, op.memory.cast::<u8>().cast_const(), length)
                .offset(op.offset)
                .rw_flags(durable)
                .build()
        }
        (OpKind::Write | OpKind::WriteDurable, n) => opcode::Writev::new(fd, iov, n)
            .offset(op.offset)
            .rw_flags(durable)
            .build(),
        (OpKind::Flush, _) => opcode::Fsync::new(fd)
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
        (OpKind::SetLength, _) => opcode::Ftruncate::new(fd, op.length).build(),
        (kind, _) => opcode::Fallocate::new(fd, op.length)
            .offset(op.offset)
            .mode(kind.fallocate_mode())
            .build(),
    }
}

impl Engine for Uring {
    unsafe fn submit(&mut self, token: Token, op: Op) {
        self.in_flight += 1;
        if !self.is_for_ring(op.kind) {
            let workers = Workers::of(&mut self.workers, &self.wake);
            // SAFETY: passed on.
            return unsafe { workers.submit([(token, op)]) };
        }
        let entry = entry_for(&op);
        self.push(match op.force_async && self.has_threads {
            true => entry
                .flags(squeue::Flags::ASYNC)
                .user_data(ASYNC | u64::from(token)),
            false => entry.user_data(u64::from(token)),
        });
        // After the push, which submits what was queued before if the queue is full.
        self.has_queued = true;
    }

    fn hand_over(&mut self) {
        self.has_queued = false;
        // `poll` meets an error again.
        let _ = self.ring.submit();
    }

    fn watch(&mut self, token: Token, fd: RawFd, interest: Interest) {
        self.in_flight += 1;
        let poll = opcode::PollAdd::new(types::Fd(fd), interest.events() as u32);
        self.push(poll.build().user_data(WATCH | u64::from(token)));
        self.watches.push(Watch {
            token,
            fd,
            interest,
            duplicate: None,
        });
    }

    fn unwatch(&mut self, token: Token) {
        // Not `PollRemove`, which has no effect on a wait that is being woken: that goes on if
        // another thread has taken what woke it.
        let cancel = opcode::AsyncCancel::new(WATCH | u64::from(token));
        self.push(cancel.build().user_data(UNWATCH));
    }

    fn poll(&mut self, wait: bool, done: &mut Vec<Completion>) -> io::Result<()> {
        let before = done.len();
        // A wake-up that was meant for the other event loop is not lost: the caller looks again.
        let wait = wait && !self.wake.set_outside(false);
        // Only another thread ends such a wait, and the event itself wakes this one sooner than a ring that
        // polls it.
        if wait && self.is_idle() {
            self.wake.event.wait()?;
            self.wake.event.clear();
            return Ok(());
        }
        if wait {
            self.arm_wake();
        }
        // Completions that are there are taken without entering the kernel to wait.
        self.reap(done);
        let want = usize::from(wait && done.len() == before && self.wake_armed);
        if self.must_hand_over(want > 0) || want > 0 || self.has_deferred() {
            self.enter_again(want)?;
            self.reap(done);
        }
        Ok(())
    }

    fn notifier(&self) -> Arc<dyn Notify> {
        self.wake.clone()
    }

    fn arm(&mut self, done: &mut Vec<Completion>) -> io::Result<bool> {
        let wake = self.wake.clone();
        let Some(outside) = wake.outside.get() else {
            // Nothing waits for the descriptor yet. When it is made it is readable, and this is
            // called again.
            return self.poll(false, done).map(|()| false);
        };
        wake.set_outside(true);
        if !self.registered {
            let completed = outside.completed.fd();
            self.ring.submitter().register_eventfd(completed)?;
            self.registered = true;
        }
        let mut unregistered = false;
        for watch in &mut self.watches {
            if watch.duplicate.is_none() {
                let duplicate = register(&outside.epoll, watch.fd, watch.interest.events());
                watch.duplicate = duplicate.ok();
                unregistered |= watch.duplicate.is_none();
            }
        }
        // Before completions are reaped: later ones make it readable again.
        outside.completed.clear();
        self.reap(done);
        self.put_off = 0;
        if !self.ring.submission().is_empty() || !self.deferred || self.has_deferred() {
            self.enter_again(0)?;
        }
        let left = !self.ring.submission().is_empty() || self.ring.completion().len() >= DELIVERED;
        self.reap(done);
        Ok(left || unregistered)
    }

    fn descriptor(&self) -> io::Result<RawFd> {
        if let Some(outside) = self.wake.outside.get() {
            return Ok(outside.epoll.as_raw_fd());
        }
        let completed = EventFd::new()?;
        let epoll = new_epoll(&completed)?;
        completed.notify();
        let outside = Outside { epoll, completed };
        Ok(self.wake.outside.get_or_init(|| outside).epoll.as_raw_fd())
    }
}

#[cfg(test)]
mod tests {
    //! Guards against completions that are lost if there are more than fit into the ring.
    use super::super::tests::reads_in_flight;
    use super::*;

    #[test]
    fn both_queues_overflow() {
        let Ok(mut uring) = Uring::new() else {
            eprintln!("skipped: no io_uring");
            return;
        };
        for _ in 0..3 {
            reads_in_flight(&mut uring, ENTRIES * 20);
            assert_eq!(uring.in_flight, 0);
        }
    }

    #[test]
    fn an_operation_without_a_thread_of_the_kernel_is_repeated() {
        let Ok(mut uring) = Uring::new() else {
            eprintln!("skipped: no io_uring");
            return;
        };
        // The kernel cancels it then. Here a wait with such a name is cancelled.
        let never = EventFd::new().unwrap();
        let poll = opcode::PollAdd::new(types::Fd(never.fd()), libc::POLLIN as u32);
        uring.in_flight += 1;
        uring.push(poll.build().user_data(ASYNC | 7));
        uring.push(
            opcode::AsyncCancel::new(ASYNC | 7)
                .build()
                .user_data(UNWATCH),
        );
        let mut done = Vec::new();
        while done.is_empty() {
            uring.poll(true, &mut done).unwrap();
        }
        assert_eq!(done, [(7, -libc::EINTR)]);
        assert!(!uring.has_threads);
    }

    #[test]
    fn a_full_submission_queue_is_submitted() {
        let Ok(mut uring) = Uring::new() else {
            eprintln!("skipped: no io_uring");
            return;
        };
        // As if every submission had failed.
        for token in 0..3 * ENTRIES {
            uring.in_flight += 1;
            uring.push(opcode::Nop::new().build().user_data(u64::from(token)));
        }
        let mut done = Vec::new();
        while done.len() < 3 * ENTRIES as usize {
            uring.poll(true, &mut done).unwrap();
        }
        done.sort_unstable();
        let expected: Vec<_> = (0..3 * ENTRIES).map(|token| (token, 0)).collect();
        assert_eq!(done, expected);
    }
}
