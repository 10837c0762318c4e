//! Threads that make blocking system calls.
//!
//! A worker without work yields its processor a few times before it sleeps, so that the thread
//! that waits for its last operation submits the next one meanwhile. That saves most `futex(2)`
//! calls.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::op::Op;
use super::{Completion, Notify, Token};
use crate::lock;

/// Workers at most, as in QEMU's pool.
const MAX_WORKERS: usize = 64;
/// A worker without work for this long ends.
const IDLE: Duration = match cfg!(test) {
    true => Duration::from_millis(20),
    false => Duration::from_secs(10),
};
/// How often a worker without work yields before it sleeps: with many requests in flight the next
/// one comes meanwhile, which saves the wake-up.
const YIELDS: u32 = 32;

/// The workers of an engine. They are started when there is work for them, and end with this.
pub struct Workers(Arc<Shared>);

struct Shared {
    work: Mutex<Work>,
    /// Signalled for each operation put into `waiting`.
    arrived: Condvar,
    /// Operations that have ended and that the engine has not taken.
    ended: Mutex<Vec<Completion>>,
    /// Called when `ended` was empty before.
    wake: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct Work {
    waiting: VecDeque<(Token, Op)>,
    workers: usize,
    /// Workers that sleep, or were woken and have not run yet.
    idle: usize,
    /// Workers that yield: they check `waiting` again before they sleep.
    yielding: usize,
    closing: bool,
}

impl Workers {
    /// `wake` is called when [`Workers::take_ended`] would take the first operation.
    pub(super) fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Workers(Arc::new(Shared {
            work: Mutex::default(),
            arrived: Condvar::new(),
            ended: Mutex::default(),
            wake: Box::new(wake),
        }))
    }

    /// The workers in `place`, which are made if there are none: they signal `event`.
    pub(super) fn of<'a, N: Notify + 'static>(
        place: &'a mut Option<Self>,
        event: &Arc<N>,
    ) -> &'a Self {
        place.get_or_insert_with(|| {
            let event = event.clone();
            Workers::new(move || event.notify())
        })
    }

    /// Takes the operations that have ended.
    pub(super) fn take_ended(&self, done: &mut Vec<Completion>) {
        done.append(&mut lock(&self.0.ended));
    }

    /// Whether operations have ended.
    pub(super) fn have_ended(&self) -> bool {
        !lock(&self.0.ended).is_empty()
    }

    /// Gives operations to the workers.
    ///
    /// # Safety
    /// As [`Engine::submit`](super::Engine::submit).
    pub(super) unsafe fn submit(&self, ops: impl IntoIterator<Item = (Token, Op)>) {
        let mut work = lock(&self.0.work);
        let before = work.waiting.len();
        work.waiting.extend(ops);
        let count = work.waiting.len() - before;
        // A thread that yields needs no wake-up.
        let needed = work.waiting.len().saturating_sub(work.yielding);
        let new = needed.saturating_sub(work.idle);
        let new = new.min(MAX_WORKERS - work.workers);
        for _ in 0..new {
            let shared = self.0.clone();
            let spawned = std::thread::Builder::new()
                .name("zebu-io".into())
                .stack_size(64 << 10)
                .spawn(move || run(&shared));
            // Without a new worker the others execute them.
            if spawned.is_ok() {
                work.workers += 1;
            }
        }
        let alone = work.workers == 0;
        let wake = count.min(needed).min(work.idle);
        // Unlocked first: the woken threads lock it.
        drop(work);
        for _ in 0..wake {
            self.0.arrived.notify_one();
        }
        while alone && let Some((token, op)) = { lock(&self.0.work).waiting.pop_front() } {
            // SAFETY: as in `run`.
            self.0.end(token, unsafe { op.complete() });
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        lock(&self.0.work).closing = true;
        self.0.arrived.notify_all();
    }
}

impl Shared {
    fn end(&self, token: Token, result: i32) {
        let first = {
            let mut ended = lock(&self.ended);
            ended.push((token, result));
            ended.len() == 1
        };
        if first {
            (self.wake)();
        }
    }
}

/// A worker.
fn run(shared: &Shared) {
    let mut work = lock(&shared.work);
    let mut yields = 0;
    loop {
        if let Some((token, op)) = work.waiting.pop_front() {
            drop(work);
            // SAFETY: `Workers::submit` was promised that the memory and the
            // descriptor are valid until the completion is reported.
            shared.end(token, unsafe { op.complete() });
            yields = 0;
            work = lock(&shared.work);
        } else if work.closing {
            break;
        } else if yields < YIELDS {
            yields += 1;
            work.yielding += 1;
            drop(work);
            std::thread::yield_now();
            work = lock(&shared.work);
            work.yielding -= 1;
        } else {
            work.idle += 1;
            let (guard, timeout) = shared
                .arrived
                .wait_timeout(work, IDLE)
                .unwrap_or_else(|e| e.into_inner());
            work = guard;
            work.idle -= 1;
            if timeout.timed_out() && work.waiting.is_empty() {
                break;
            }
        }
    }
    work.workers -= 1;
}

#[cfg(test)]
mod tests {
    //! Guards against threads that are started needlessly or never end, and against operations that
    //! wait for a worker that has just ended.
    use super::super::Engine;
    use super::super::tests::reads_in_flight;
    use super::super::threads::Threads;
    use super::*;
    use std::time::Instant;

    fn count(workers: &Shared) -> usize {
        lock(&workers.work).workers
    }

    #[test]
    fn there_are_as_many_workers_as_operations() {
        let mut threads = Threads::new().unwrap();
        for reads in [1, 2, 1000, 1] {
            reads_in_flight(&mut threads, reads);
            assert!((1..=MAX_WORKERS).contains(&count(&threads.workers().0)));
        }
    }

    #[test]
    fn idle_workers_end_and_are_started_again() {
        let mut threads = Threads::new().unwrap();
        // Near the time when they end, so that some batches come while workers are ending.
        for round in 0..40u32 {
            reads_in_flight(&mut threads, 2 + round % 3);
            std::thread::sleep(IDLE + Duration::from_micros(u64::from(round) * 50) - IDLE / 20);
        }
        let start = Instant::now();
        while count(&threads.workers().0) > 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "they never end");
            std::thread::sleep(IDLE);
        }
        reads_in_flight(&mut threads, 100);
        // They also end with the engine.
        let shared = Arc::downgrade(&threads.workers().0);
        drop(threads);
        while shared.upgrade().is_some() {
            assert!(start.elapsed() < Duration::from_secs(60), "they never end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Each engine executes operations that the kernel's interface lacks by workers, concurrently with
    /// others.
    #[test]
    fn calls_that_block_are_done_by_workers() {
        for kind in super::super::EngineKind::ALL {
            let Ok(mut engine) = kind.start() else {
                eprintln!("skipped: {kind}");
                continue;
            };
            calls(&mut *engine);
        }
    }

    fn calls(engine: &mut dyn Engine) {
        use super::super::{OpKind, tests::waits_for};
        use crate::storage::StorageExtent;
        use std::os::fd::AsRawFd;

        let file = tempfile::tempfile_in(".").unwrap();
        let fd = file.as_raw_fd();
        let mut answer = [0; StorageExtent::SIZE];
        let extent = Op {
            memory: answer.as_mut_ptr().cast(),
            segments: 1,
            ..Op::without_memory(OpKind::Extent, fd, 4096, StorageExtent::SIZE as u64)
        };
        let set_length = Op::without_memory(OpKind::SetLength, fd, 0, 1 << 20);
        for (op, result) in [(set_length, 0), (extent, StorageExtent::SIZE as i32)] {
            // SAFETY: the file and the memory live until the operation has ended.
            unsafe { engine.submit(7, op) };
            assert_eq!(waits_for(engine), (7, result));
        }
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
        let hole = StorageExtent::hole((1 << 20) - 4096);
        assert_eq!(StorageExtent::decode(answer), hole);
    }
}
