//! How a job over a range of bytes uses all cores: each thread has a queue,
//! and on it several *lanes*. A lane takes the next chunk of the range and
//! works on it while the other lanes of its thread have I/O in flight, so that
//! I/O and computing overlap, in nearly sequential order.

use std::future::Future;
use std::io;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::Duration;

use crate::storage::{EngineKind, Queue, QueueOptions, is_simulated, yield_once};

/// How often progress is reported.
const TICK: Duration = Duration::from_millis(100);

/// How far the lanes of a job have come.
#[derive(Debug)]
pub(super) struct Cursor {
    total: u64,
    /// First byte that no lane has taken.
    next: AtomicU64,
    /// Bytes done, or known to need nothing.
    done: AtomicU64,
    stopped: AtomicBool,
}

impl Cursor {
    /// At the start of `total` bytes.
    pub(super) fn new(total: u64) -> Self {
        Cursor {
            total,
            next: AtomicU64::new(0),
            done: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
        }
    }

    /// All bytes.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Bytes done.
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed).min(self.total)
    }

    /// The next chunk that nobody has taken; `end_of` says where the chunk
    /// that starts at a byte ends.
    pub(super) fn take(&self, end_of: impl Fn(u64) -> u64) -> Option<Range<u64>> {
        let mut at = self.next.load(Ordering::Relaxed);
        loop {
            if at >= self.total || self.stopped.load(Ordering::Relaxed) {
                return None;
            }
            let end = end_of(at);
            match self
                .next
                .compare_exchange_weak(at, end, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return Some(at..end),
                Err(now) => at = now,
            }
        }
    }

    /// A taken chunk is done, and the other lanes of the thread have their turn: where
    /// everything lies in the page cache a lane waits for nothing, and what the others
    /// have in flight would be left lying.
    pub(super) async fn finish(&self, chunk: &Range<u64>) {
        self.add(chunk.start, chunk.end);
        yield_once().await;
    }

    fn add(&self, from: u64, to: u64) {
        self.done.fetch_add(to - from, Ordering::Relaxed);
    }

    /// Passes over `from..to`, which needs nothing, if nobody has taken any of
    /// it.
    pub(super) fn leap(&self, from: u64, to: u64) {
        let leapt = to > from
            && self
                .next
                .compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if leapt {
            self.add(from, to);
        }
    }

    /// Lets no lane take another chunk.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

/// The answer of a progress callback: whether the job continues. `()` continues.
pub trait GoOn {
    /// Breaks to stop the job.
    fn go_on(self) -> ControlFlow<()>;
}

impl GoOn for () {
    fn go_on(self) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

impl GoOn for ControlFlow<()> {
    fn go_on(self) -> ControlFlow<()> {
        self
    }
}

/// A job that lanes do.
pub(super) trait Job: Send + Sync + 'static {
    /// How far it has come.
    fn cursor(&self) -> &Cursor;

    /// Takes chunks until there are none, and keeps the job's own account of
    /// what failed.
    fn lane(&self, queue: &Queue) -> impl Future<Output = ()>;
}

/// Queues for threads that have a core to themselves.
pub(super) fn queue(engine: EngineKind) -> io::Result<Queue> {
    Queue::new(QueueOptions {
        engine,
        inflate_here: true,
        inline_buffered: true,
        ..QueueOptions::default()
    })
}

/// Lanes that keep all cores busy.
fn default_lanes(cores: usize) -> usize {
    (4 * cores).min(16)
}

/// Runs `job` with `lanes` lanes (None: as many as keep the cores busy), and
/// calls `tick` on this thread now and then until all have ended. If `tick` breaks
/// before all is done, no lane takes another chunk, and the error is `ECANCELED`.
pub(super) fn run<J: Job>(
    job: &Arc<J>,
    engine: EngineKind,
    lanes: Option<usize>,
    mut tick: impl FnMut() -> ControlFlow<()>,
) -> io::Result<()> {
    let cores = match is_simulated() {
        true => 1,
        false => std::thread::available_parallelism().map_or(1, |n| n.get()),
    };
    let lanes = lanes.unwrap_or(default_lanes(cores)).max(1);
    let threads = cores.min(lanes);
    let mut cancelled = false;
    let mut tick = || {
        if tick().is_break() {
            job.cursor().stop();
            cancelled = true;
        }
    };
    if is_simulated() {
        tick();
        run_thread(job, engine, lanes)?;
        tick();
        return ended(job, cancelled);
    }
    let running = Running {
        threads: AtomicUsize::new(threads),
        caller: std::thread::current(),
    };
    tick();
    std::thread::scope(|scope| {
        let spawned: Vec<_> = (0..threads)
            .map(|i| {
                // The lanes are dealt out as evenly as it goes.
                let lanes = lanes / threads + usize::from(i < lanes % threads);
                let running = &running;
                scope.spawn(move || {
                    let _end = End(running);
                    let result = run_thread(job, engine, lanes);
                    if result.is_err() {
                        job.cursor().stop();
                    }
                    result
                })
            })
            .collect();
        while running.threads.load(Ordering::Acquire) > 0 {
            std::thread::park_timeout(TICK);
            tick();
        }
        // What came after the last look.
        tick();
        let results = spawned.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        results.collect::<io::Result<()>>()
    })?;
    ended(job, cancelled)
}

/// The result of a job after its threads have ended.
fn ended<J: Job>(job: &Arc<J>, cancelled: bool) -> io::Result<()> {
    match cancelled && job.cursor().done() < job.cursor().total() {
        true => Err(io::Error::from_raw_os_error(libc::ECANCELED)),
        false => Ok(()),
    }
}

/// The threads of a job that have not ended, and who waits for them.
struct Running {
    threads: AtomicUsize,
    caller: Thread,
}

/// A thread's end, also by a panic, when dropped. (`is_finished` turns true
/// only after that, when nobody would wake the caller any more.)
struct End<'a>(&'a Running);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.threads.fetch_sub(1, Ordering::Release);
        self.0.caller.unpark();
    }
}

fn run_thread<J: Job>(job: &Arc<J>, engine: EngineKind, lanes: usize) -> io::Result<()> {
    let queue = queue(engine)?;
    let running: Vec<_> = (0..lanes)
        .map(|_| {
            let (job, queue2) = (job.clone(), queue.clone());
            queue.spawn(async move { job.lane(&queue2).await })
        })
        .collect();
    queue.block_on(async {
        for lane in running {
            lane.await;
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Guards against a job that has ended and is not noticed: the caller would
    //! sleep on, or not be told of the last chunks.
    use super::*;
    use std::time::Instant;

    struct Nothing(Cursor);

    impl Job for Nothing {
        fn cursor(&self) -> &Cursor {
            &self.0
        }
        async fn lane(&self, _: &Queue) {
            while let Some(chunk) = self.0.take(|at| at + 1) {
                self.0.finish(&chunk).await;
            }
        }
    }

    #[test]
    fn short_jobs_end_at_once_and_are_told_of() {
        let start = Instant::now();
        for _ in 0..100 {
            let job = Arc::new(Nothing(Cursor::new(5)));
            let mut told = 0;
            run(&job, EngineKind::Threads, None, || {
                told = job.cursor().done();
                ControlFlow::Continue(())
            })
            .unwrap();
            assert_eq!(told, 5);
        }
        assert!(start.elapsed() < 20 * TICK, "{:?}", start.elapsed());
    }

    #[test]
    fn a_job_that_is_told_to_stop_says_so_unless_all_is_done() {
        let run = |total| {
            let job = Arc::new(Nothing(Cursor::new(total)));
            run(&job, EngineKind::Threads, None, || ControlFlow::Break(()))
        };
        let stopped = run(u64::MAX).unwrap_err();
        assert_eq!(stopped.raw_os_error(), Some(libc::ECANCELED));
        run(0).unwrap();
    }

    #[test]
    fn leaps_count_once_and_skip_nothing_that_is_taken() {
        let cursor = Cursor::new(10);
        let first = cursor.take(|at| at + 2).unwrap();
        assert_eq!(first, 0..2);
        cursor.leap(2, 5);
        assert_eq!(cursor.take(|at| at + 2), Some(5..7));
        // Too late: somebody is there already.
        cursor.leap(2, 9);
        cursor.leap(5, 9);
        // Backwards, or nowhere.
        cursor.leap(7, 7);
        cursor.leap(7, 6);
        assert_eq!(cursor.take(|at| at + 3), Some(7..10));
        assert_eq!(cursor.take(|at| at + 1), None);
        for chunk in [0..2, 5..7, 7..10] {
            cursor.add(chunk.start, chunk.end);
        }
        assert_eq!(cursor.done(), 10);
    }
}
