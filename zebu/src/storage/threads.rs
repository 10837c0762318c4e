//! The `threads` engine: a pool of threads that make blocking system calls.
//!
//! The thread that polls works too: before it would block it takes operations
//! that no worker has begun and does them itself, so a queue with one request
//! in flight costs exactly one system call and wakes nobody.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::engine::{Completion, Engine, Notify, Token};
use super::op::Op;

/// Workers at most, as in QEMU's pool.
const MAX_WORKERS: usize = 64;
/// A worker without work for this long ends.
const IDLE: Duration = Duration::from_secs(10);

/// The engine. Workers are started when there is work for them.
pub struct Threads {
    shared: Arc<Shared>,
    /// Taken since the last poll.
    batch: Vec<(Token, Op)>,
}

struct Shared {
    state: Mutex<State>,
    /// Signalled for each operation put into `waiting`.
    work: Condvar,
    /// Signalled when something was put into `done`, and by `notify`.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(Token, Op)>,
    done: Vec<Completion>,
    workers: usize,
    idle: usize,
    notified: bool,
    poller_sleeps: bool,
    closing: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while holding the lock.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Notify for Shared {
    fn notify(&self) {
        self.lock().notified = true;
        self.ended.notify_one();
    }
}

/// Performs `op`; the result as completions carry it.
///
/// # Safety
/// As [`Op::perform`].
unsafe fn perform(op: &Op) -> i32 {
    // SAFETY: passed on.
    match unsafe { op.perform() } {
        Ok(n) => i32::try_from(n).unwrap_or(i32::MAX),
        Err(e) => -e.raw_os_error().unwrap_or(libc::EIO),
    }
}

impl Threads {
    /// An engine with no workers yet. Never fails.
    pub fn new() -> io::Result<Self> {
        Ok(Threads {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                work: Condvar::new(),
                ended: Condvar::new(),
            }),
            batch: Vec::new(),
        })
    }

    /// Makes sure that `count` waiting operations will be looked at by workers.
    fn call_workers(&self, state: &mut State, count: usize) {
        for _ in 0..count.min(state.idle) {
            self.shared.work.notify_one();
        }
        let new = count
            .saturating_sub(state.idle)
            .min(MAX_WORKERS - state.workers);
        for _ in 0..new {
            let shared = self.shared.clone();
            let spawned = std::thread::Builder::new()
                .name("zebu-io".into())
                .stack_size(64 << 10)
                .spawn(move || work(&shared));
            // Without a new worker the others, or the poller, do the work.
            if spawned.is_ok() {
                state.workers += 1;
            }
        }
    }
}

fn work(shared: &Shared) {
    let mut state = shared.lock();
    loop {
        if let Some((token, op)) = state.waiting.pop_front() {
            drop(state);
            // SAFETY: `Engine::submit` was promised that the memory and the
            // descriptor are valid until the completion is reported.
            let result = unsafe { perform(&op) };
            state = shared.lock();
            state.done.push((token, result));
            if state.poller_sleeps {
                shared.ended.notify_one();
            }
        } else if state.closing {
            break;
        } else {
            state.idle += 1;
            let (guard, timeout) = shared
                .work
                .wait_timeout(state, IDLE)
                .unwrap_or_else(|e| e.into_inner());
            state = guard;
            state.idle -= 1;
            if timeout.timed_out() && state.waiting.is_empty() {
                break;
            }
        }
    }
    state.workers -= 1;
}

impl Engine for Threads {
    unsafe fn submit(&mut self, token: Token, op: Op) {
        self.batch.push((token, op));
    }

    fn poll(&mut self, wait: bool, done: &mut Vec<Completion>) -> io::Result<()> {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        let new = self.batch.len();
        state.waiting.extend(self.batch.drain(..));
        let keep_one = wait && state.done.is_empty() && !state.notified;
        self.call_workers(&mut state, new.saturating_sub(keep_one as usize));
        loop {
            if !state.done.is_empty() || state.notified || !wait {
                state.notified = false;
                done.append(&mut state.done);
                return Ok(());
            }
            if let Some((token, op)) = state.waiting.pop_front() {
                drop(state);
                // SAFETY: as in `work`.
                let result = unsafe { perform(&op) };
                done.push((token, result));
                state = shared.lock();
                done.append(&mut state.done);
                // If a worker took ours first, one of the rest has nobody to
                // begin it while this thread is away.
                let left = state.waiting.len();
                self.call_workers(&mut state, left);
                return Ok(());
            }
            state.poller_sleeps = true;
            state = shared.ended.wait(state).unwrap_or_else(|e| e.into_inner());
            state.poller_sleeps = false;
        }
    }

    fn notifier(&self) -> Arc<dyn Notify> {
        self.shared.clone()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
    }
}
