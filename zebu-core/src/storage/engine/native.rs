//! The `native` engine: Linux AIO (`io_submit(2)`, `io_getevents(2)`).
//!
//! Completions are read from the ring that the kernel maps into the process, so that only waiting
//! is a system call. Workers execute what this interface does not have (`fallocate(2)`,
//! `ftruncate(2)`, `lseek(2)`).
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::eventfd::EventFd;
use super::op::{Op, OpKind};
use super::workers::Workers;
use super::{Completion, Engine, Interest, Notify, Token};

/// Operations in the kernel; the rest is in the backlog.
const DEPTH: usize = 256;
/// Waits for descriptors in the kernel.
const WATCHES: usize = 64;
/// All that is in the kernel: those and the poll of the event.
const MAX_IN_KERNEL: usize = DEPTH + WATCHES + 1;
/// Operations in one `io_submit` at most.
const BATCH: usize = 64;
/// Names the poll of the event descriptor.
const WAKE: u64 = u64::MAX;
/// With the token, names an operation whose end makes `completed` readable.
const SIGNALS: u64 = 1 << Token::BITS;
const IOCB_FLAG_RESFD: u32 = 1;

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_CMD_FDSYNC: u16 = 3;
const IOCB_CMD_POLL: u16 = 5;
const IOCB_CMD_PREADV: u16 = 7;
const IOCB_CMD_PWRITEV: u16 = 8;

/// `struct iocb` of `linux/aio_abi.h` on little-endian machines.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

impl Iocb {
    /// The same, and its end makes `event` readable (`IOCB_FLAG_RESFD`).
    fn signalling(mut self, event: &EventFd) -> Iocb {
        self.flags |= IOCB_FLAG_RESFD;
        self.resfd = event.fd() as u32;
        self
    }

    /// Whether it waits for a descriptor of the caller's.
    fn is_watch(&self) -> bool {
        self.opcode == IOCB_CMD_POLL && self.data != WAKE
    }
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event {
    data: u64,
    obj: u64,
    res: i64,
    res2: i64,
}

/// `struct aio_ring`, the head of the mapped ring of events.
#[repr(C)]
struct RingHead {
    id: u32,
    count: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compat: u32,
    incompat: u32,
    header_length: u32,
}

const RING_MAGIC: u32 = 0xa10a_10a1;

/// The engine.
pub struct Native {
    context: libc::c_ulong,
    event: Arc<EventFd>,
    /// For another event loop. Waits for descriptors always make it readable, operations from the
    /// first [`Engine::arm`] on, since it makes each slower.
    completed: EventFd,
    /// Operations in the kernel that do not make it readable. None: `arm` was not called.
    silent: Option<usize>,
    wake_armed: bool,
    /// Taken and not in the kernel.
    backlog: VecDeque<Iocb>,
    in_kernel: usize,
    /// Refused by the kernel, or cancelled.
    ended_early: Vec<Completion>,
    /// For operations that the interface does not have.
    workers: Option<Workers>,
    /// Waits for descriptors. `io_cancel(2)` names one by its address, so each has a fixed one.
    watches: HashMap<Token, Box<Iocb>>,
}

impl Native {
    /// Sets an AIO context up (`io_setup(2)`; the limit on all of them is
    /// `/proc/sys/fs/aio-max-nr`).
    pub fn new() -> io::Result<Self> {
        if cfg!(target_endian = "big") {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let (event, completed) = (Arc::new(EventFd::new()?), EventFd::new()?);
        let mut context: libc::c_ulong = 0;
        // SAFETY: `context` is valid for the kernel to write.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, MAX_IN_KERNEL, &mut context) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Native {
            context,
            event,
            completed,
            silent: None,
            wake_armed: false,
            backlog: VecDeque::new(),
            in_kernel: 0,
            ended_early: Vec::new(),
            workers: None,
            watches: HashMap::new(),
        })
    }

    fn arm_wake(&mut self) {
        if !self.wake_armed {
            self.wake_armed = true;
            let poll = Iocb {
                data: WAKE,
                opcode: IOCB_CMD_POLL,
                fd: self.event.fd() as u32,
                buf: libc::POLLIN as u64,
                ..Iocb::default()
            };
            self.backlog.push_front(poll.signalling(&self.completed));
        }
    }

    /// Submits the backlog as far as there is space. An operation that the kernel refuses ends with
    /// that error.
    fn submit_backlog(&mut self) {
        while !self.backlog.is_empty() && self.in_kernel < MAX_IN_KERNEL {
            let mut pointers = [std::ptr::null::<Iocb>(); BATCH];
            let space = MAX_IN_KERNEL - self.in_kernel;
            let count = space.min(self.backlog.len()).min(BATCH);
            for (pointer, iocb) in pointers.iter_mut().zip(&self.backlog).take(count) {
                *pointer = match self.watches.get(&(iocb.data as Token)) {
                    Some(watch) if iocb.is_watch() => &raw const **watch,
                    _ => iocb,
                };
            }
            // SAFETY: the pointers name iocbs that live through the call (the
            // kernel copies them), whose memory is valid by the promise made
            // to `submit`.
            let result = unsafe {
                libc::syscall(libc::SYS_io_submit, self.context, count, pointers.as_ptr())
            };
            if result > 0 {
                self.backlog.drain(..result as usize);
                self.in_kernel += result as usize;
                continue;
            }
            let errno = io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO);
            // The next completion makes space, if one is certain to come.
            let first_is_wake = self.backlog[0].data == WAKE;
            let here = self.backlog.iter().filter(|iocb| iocb.is_watch()).count();
            let watched = self.watches.len() - here;
            let wakes = usize::from(self.wake_armed && !first_is_wake) + watched;
            if errno == libc::EAGAIN && self.in_kernel > wakes {
                return;
            }
            match self.backlog.pop_front() {
                // It is armed again before the next wait. This call must not wait: nothing could
                // wake it.
                Some(iocb) if iocb.data == WAKE => self.wake_armed = false,
                Some(iocb) => {
                    if iocb.is_watch() {
                        self.watches.remove(&(iocb.data as Token));
                    }
                    self.ended_early.push((iocb.data as Token, -errno));
                }
                None => {}
            }
        }
    }

    /// Takes completions from the mapped ring. False if the ring has an unknown layout, so that
    /// `io_getevents` must be called.
    fn reap_mapped(&mut self, done: &mut Vec<Completion>) -> bool {
        // SAFETY: the context's value is the address of the mapped ring, which
        // stays mapped until io_destroy.
        let ring = unsafe { &*(self.context as *const RingHead) };
        if ring.magic != RING_MAGIC || ring.incompat != 0 || ring.count == 0 {
            return false;
        }
        let mut head = ring.head.load(Ordering::Relaxed);
        // Acquire: the events before the tail are written.
        let tail = ring.tail.load(Ordering::Acquire);
        if head == tail {
            return true;
        }
        let events = self.context as usize + ring.header_length as usize;
        while head != tail {
            // SAFETY: head < count, and the kernel wrote this event.
            let event = unsafe { *(events as *const Event).add(head as usize) };
            self.ended(event, done);
            head = (head + 1) % ring.count;
        }
        // Release: the events are read before the kernel may overwrite them.
        ring.head.store(head, Ordering::Release);
        true
    }

    fn ended(&mut self, event: Event, done: &mut Vec<Completion>) {
        self.in_kernel -= 1;
        if event.data == WAKE {
            self.event.clear();
            self.wake_armed = false;
        } else {
            let token = event.data as Token;
            let was_watch = !self.watches.is_empty() && self.watches.remove(&token).is_some();
            if event.data & SIGNALS == 0
                && !was_watch
                && let Some(silent) = &mut self.silent
            {
                *silent -= 1;
            }
            done.push((token, event.res as i32));
        }
    }

    /// `io_getevents` for at least `min` events.
    fn get_events(&mut self, min: usize, done: &mut Vec<Completion>) -> io::Result<()> {
        let mut events = [Event::default(); 64];
        // SAFETY: `events` is valid for the kernel to write; no time-out.
        let result = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                min,
                events.len(),
                events.as_mut_ptr(),
                std::ptr::null::<libc::timespec>(),
            )
        };
        if result < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::Interrupted => Ok(()),
                _ => Err(error),
            };
        }
        for event in &events[..result as usize] {
            self.ended(*event, done);
        }
        Ok(())
    }
}

fn iocb_for(token: Token, op: &Op) -> Option<Iocb> {
    let single = op.segments == 1;
    let opcode = match op.kind {
        OpKind::Read if single => IOCB_CMD_PREAD,
        OpKind::Read => IOCB_CMD_PREADV,
        OpKind::Write | OpKind::WriteDurable if single => IOCB_CMD_PWRITE,
        OpKind::Write | OpKind::WriteDurable => IOCB_CMD_PWRITEV,
        OpKind::Flush => IOCB_CMD_FDSYNC,
        _ => return None,
    };
    Some(Iocb {
        data: u64::from(token),
        rw_flags: if op.kind == OpKind::WriteDurable {
            libc::RWF_DSYNC
        } else {
            0
        },
        opcode,
        fd: op.fd as u32,
        buf: op.memory as u64,
        nbytes: match op.kind {
            OpKind::Flush => 0,
            _ if single => op.length,
            _ => u64::from(op.segments),
        },
        offset: if op.kind == OpKind::Flush {
            0
        } else {
            op.offset as i64
        },
        ..Iocb::default()
    })
}

impl Engine for Native {
    unsafe fn submit(&mut self, token: Token, op: Op) {
        match iocb_for(token, &op) {
            Some(mut iocb) => {
                if self.silent.is_some() {
                    iocb.data |= SIGNALS;
                    iocb = iocb.signalling(&self.completed);
                }
                self.backlog.push_back(iocb);
            }
            None => {
                let workers = Workers::of(&mut self.workers, &self.event);
                // SAFETY: passed on.
                unsafe { workers.submit([(token, op)]) };
            }
        }
    }

    fn hand_over(&mut self) {
        self.submit_backlog();
    }

    fn watch(&mut self, token: Token, fd: RawFd, interest: Interest) {
        if self.watches.len() == WATCHES {
            self.ended_early.push((token, -libc::ENOSPC));
            return;
        }
        let iocb = Iocb {
            data: u64::from(token),
            opcode: IOCB_CMD_POLL,
            fd: fd as u32,
            buf: interest.events() as u64,
            ..Iocb::default()
        }
        .signalling(&self.completed);
        self.watches.insert(token, Box::new(iocb));
        self.backlog.push_back(iocb);
    }

    fn unwatch(&mut self, token: Token) {
        let waiting = |iocb: &Iocb| iocb.is_watch() && iocb.data == u64::from(token);
        if let Some(at) = self.backlog.iter().position(waiting) {
            self.backlog.remove(at);
            self.watches.remove(&token);
            self.ended_early.push((token, -libc::ECANCELED));
        } else if let Some(watch) = self.watches.get(&token) {
            let mut event = Event::default();
            // SAFETY: the iocb is the one that was submitted, at the same
            // place. The end comes with the other events (EINPROGRESS), or
            // has come already (EINVAL).
            unsafe {
                libc::syscall(
                    libc::SYS_io_cancel,
                    self.context,
                    &raw const **watch,
                    &raw mut event,
                )
            };
        }
    }

    fn poll(&mut self, wait: bool, done: &mut Vec<Completion>) -> io::Result<()> {
        let before = done.len();
        loop {
            if wait {
                self.arm_wake();
            }
            self.submit_backlog();
            done.append(&mut self.ended_early);
            if !self.reap_mapped(done) && self.in_kernel > 0 {
                self.get_events(0, done)?;
            }
            // After the event was cleared, which they signal when there is something to take.
            if let Some(workers) = &self.workers {
                workers.take_ended(done);
            }
            let woken = wait && !self.wake_armed;
            if !wait || woken || done.len() > before {
                return Ok(());
            }
            self.get_events(1, done)?;
            if !self.wake_armed || done.len() > before {
                // Completions have made space for the backlog.
                self.submit_backlog();
                return Ok(());
            }
        }
    }

    fn notifier(&self) -> Arc<dyn Notify> {
        self.event.clone()
    }

    fn arm(&mut self, done: &mut Vec<Completion>) -> io::Result<bool> {
        if self.silent.is_none() {
            let not_operations = self.watches.len() + usize::from(self.wake_armed);
            let waiting = self.backlog.iter();
            let waiting = waiting.filter(|iocb| iocb.is_watch() || iocb.data == WAKE);
            self.silent = Some(self.in_kernel + waiting.count() - not_operations);
            for iocb in &mut self.backlog {
                if !iocb.is_watch() && iocb.data != WAKE {
                    iocb.data |= SIGNALS;
                    *iocb = iocb.signalling(&self.completed);
                }
            }
        }
        // Before completions are taken: later ones make it readable again.
        self.completed.clear();
        self.poll(false, done)?;
        self.arm_wake();
        self.submit_backlog();
        done.append(&mut self.ended_early);
        // What is left in the backlog for lack of space is submitted at the next completion.
        Ok(self.silent > Some(0) || !self.wake_armed)
    }

    fn descriptor(&self) -> io::Result<RawFd> {
        Ok(self.completed.fd())
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        // SAFETY: the context is ours. The kernel waits for what is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    //! Guards against operations that are lost in the backlog.
    use super::super::tests::reads_in_flight;
    use super::*;

    #[test]
    fn a_backlog_is_submitted_later() {
        let Ok(mut native) = Native::new() else {
            eprintln!("skipped: no Linux AIO");
            return;
        };
        // Nothing is reaped meanwhile, so most are in the backlog.
        reads_in_flight(&mut native, 4 * DEPTH as u32);
        assert!(native.backlog.is_empty());
        assert_eq!(native.in_kernel, usize::from(native.wake_armed));
    }

    #[test]
    fn a_refused_operation_ends_alone() {
        let Ok(mut native) = Native::new() else {
            eprintln!("skipped: no Linux AIO");
            return;
        };
        let op = |kind| Op::without_memory(kind, -1, 0, 0);
        let mut done = Vec::new();
        for token in 0..10 {
            let kind = [OpKind::Flush, OpKind::Read, OpKind::PunchHole];
            // SAFETY: there is no memory, and no file.
            unsafe { native.submit(token, op(kind[token as usize % 3])) };
        }
        while done.len() < 10 {
            native.poll(true, &mut done).unwrap();
        }
        done.sort_unstable();
        let expected: Vec<_> = (0..10).map(|token| (token, -libc::EBADF)).collect();
        assert_eq!(done, expected);
    }
}
