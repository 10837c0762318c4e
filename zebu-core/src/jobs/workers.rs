//! How a job over a range of bytes uses all cores. Each thread has a queue with several workers. A
//! worker takes the next chunk of the range and processes it while the other workers of its thread
//! have I/O in flight. So I/O and computing overlap, in nearly sequential order.

use std::future::{Future, pending, poll_fn};
use std::io;
use std::ops::{ControlFlow, Range};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;
use std::thread::Thread;
use std::time::Duration;

use futures_channel::oneshot;

use crate::progress::{Progress, cancelled_error};
use crate::storage::{EngineKind, Queue, QueueOptions, is_simulated, yield_once};

/// How often progress is reported.
const TICK: Duration = Duration::from_millis(100);
/// How long the workers of a job that is cancelled may go on with their chunks. Then their futures
/// are dropped: a server that does not answer could make them wait without end.
const GRACE: Duration = Duration::from_secs(2);

/// The progress of a job's workers.
#[derive(Debug)]
pub(super) struct Cursor {
    total: u64,
    /// First byte that no worker has taken.
    next: AtomicU64,
    /// Bytes done, or known to need no work.
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

    /// Bytes done, of all.
    pub(super) fn progress(&self) -> Progress {
        Progress {
            done: self.done.load(Ordering::Relaxed).min(self.total),
            total: self.total,
        }
    }

    /// The next chunk that is not taken; `end_of` returns the end of the chunk that starts at a
    /// byte.
    pub(super) fn take(&self, end_of: impl Fn(u64) -> u64) -> Option<Range<u64>> {
        let mut at = self.next.load(Ordering::Relaxed);
        loop {
            if at >= self.total || self.is_stopped() {
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

    /// Marks a taken chunk as done, and yields to the other workers of the thread. Where everything
    /// is in the page cache a worker never waits, and would delay the completions of the others.
    pub(super) async fn finish(&self, chunk: &Range<u64>) {
        self.add(chunk.start, chunk.end);
        yield_once().await;
    }

    fn add(&self, from: u64, to: u64) {
        self.done.fetch_add(to - from, Ordering::Relaxed);
    }

    /// `from..to` needs no work: skips the part of it that is not taken yet. Does nothing while
    /// something before `from` is not taken.
    pub(super) fn skip(&self, from: u64, to: u64) {
        let skipped = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                (from..to).contains(&next).then_some(to)
            });
        if let Ok(next) = skipped {
            self.add(next, to);
        }
    }

    /// Makes workers take no more chunks.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Whether [`Cursor::stop`] was called.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// A job that workers do.
pub(super) trait Job: Send + Sync + 'static {
    /// How much is done.
    fn cursor(&self) -> &Cursor;

    /// Takes chunks until there are none. The job keeps its own record of failures.
    fn worker(&self, queue: &Queue) -> impl Future<Output = ()>;
}

/// Queues for threads that have a core to themselves.
pub(super) fn queue(engine: EngineKind) -> io::Result<Queue> {
    Queue::new(QueueOptions {
        engine,
        inflate_inline: true,
        inline_buffered: true,
        ..QueueOptions::default()
    })
}

/// The most workers of a job: each has its memory, and more keep no machine busier.
pub const MAX_WORKERS: usize = 256;

/// Refuses more than [`MAX_WORKERS`].
pub(super) fn check(workers: Option<usize>) -> io::Result<()> {
    match workers {
        Some(workers) if workers > MAX_WORKERS => {
            let why = format!("a job has at most {MAX_WORKERS} workers, not {workers}");
            Err(io::Error::new(io::ErrorKind::InvalidInput, why))
        }
        _ => Ok(()),
    }
}

/// The number of workers that keeps all cores busy.
fn default_workers(cores: usize) -> usize {
    (4 * cores).min(16)
}

/// Runs `job` with `workers` workers (None: as many as keep the cores busy), and calls `tick` on
/// this thread at intervals until all have ended. If `tick` breaks before all is done, no worker
/// takes another chunk, those that go on for too long are dropped, and the error is `ECANCELED`.
pub(super) fn run<J: Job>(
    job: &Arc<J>,
    engine: EngineKind,
    workers: Option<usize>,
    mut tick: impl FnMut() -> ControlFlow<()>,
) -> io::Result<()> {
    let cores = match is_simulated() {
        true => 1,
        false => std::thread::available_parallelism().map_or(1, |n| n.get()),
    };
    let workers = workers.unwrap_or(default_workers(cores)).max(1);
    check(Some(workers))?;
    let threads = cores.min(workers);
    let mut cancelled = false;
    let (mut senders, receivers): (Vec<_>, Vec<_>) =
        (0..threads).map(|_| oneshot::channel()).unzip();
    let mut tick = || {
        if tick().is_break() {
            job.cursor().stop();
            cancelled = true;
            for thread in senders.drain(..) {
                // An error: it has ended.
                let _ = thread.send(());
            }
        }
    };
    if is_simulated() {
        tick();
        run_thread(job, engine, workers, oneshot::channel().1)?;
        tick();
        return ended(job, cancelled);
    }
    let running = Running {
        threads: AtomicUsize::new(threads),
        caller: std::thread::current(),
    };
    tick();
    std::thread::scope(|scope| {
        let spawned: Vec<_> = (receivers.into_iter().enumerate())
            .map(|(i, is_cancelled)| {
                // Workers are distributed evenly.
                let workers = workers / threads + usize::from(i < workers % threads);
                let running = &running;
                scope.spawn(move || {
                    let _end = End(running);
                    let result = run_thread(job, engine, workers, is_cancelled);
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
        // For completions since the last call.
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
    match cancelled && !job.cursor().progress().is_complete() {
        true => Err(cancelled_error()),
        false => Ok(()),
    }
}

/// The threads of a job that are still running, and the thread that waits for them.
struct Running {
    threads: AtomicUsize,
    caller: Thread,
}

/// Counts the end of a thread when dropped, also after a panic. (`is_finished` becomes true only
/// later, when nothing would wake the caller.)
struct End<'a>(&'a Running);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.threads.fetch_sub(1, Ordering::Release);
        self.0.caller.unpark();
    }
}

fn run_thread<J: Job>(
    job: &Arc<J>,
    engine: EngineKind,
    workers: usize,
    is_cancelled: oneshot::Receiver<()>,
) -> io::Result<()> {
    let queue = queue(engine)?;
    let mut running: Vec<_> = (0..workers)
        .map(|_| {
            let (job, queue2) = (job.clone(), queue.clone());
            queue.spawn(async move { job.worker(&queue2).await })
        })
        .collect();
    let too_late = async {
        match is_cancelled.await {
            Ok(()) => queue.sleep(GRACE).await,
            Err(_) => pending().await,
        }
    };
    queue.block_on(async {
        let mut too_late = pin!(too_late);
        poll_fn(|context| {
            running.retain_mut(|worker| Pin::new(worker).poll(context).is_pending());
            match running.is_empty() {
                true => Poll::Ready(Ok(())),
                false => too_late.as_mut().poll(context),
            }
        })
        .await
    })?;
    for worker in running {
        worker.abort();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Guards against a job whose end or last chunks are not reported.
    use super::*;
    use std::time::Instant;

    struct Nothing(Cursor);

    impl Job for Nothing {
        fn cursor(&self) -> &Cursor {
            &self.0
        }
        async fn worker(&self, _: &Queue) {
            while let Some(chunk) = self.0.take(|at| at + 1) {
                self.0.finish(&chunk).await;
            }
        }
    }

    #[test]
    fn short_jobs_end_at_once_and_report_the_last_progress() {
        let start = Instant::now();
        for _ in 0..100 {
            let job = Arc::new(Nothing(Cursor::new(5)));
            let mut reported = 0;
            run(&job, EngineKind::Threads, None, || {
                reported = job.cursor().progress().done;
                ControlFlow::Continue(())
            })
            .unwrap();
            assert_eq!(reported, 5);
        }
        assert!(start.elapsed() < 20 * TICK, "{:?}", start.elapsed());
    }

    #[test]
    fn a_stopped_job_is_an_error_unless_all_is_done() {
        let run = |total| {
            let job = Arc::new(Nothing(Cursor::new(total)));
            run(&job, EngineKind::Threads, None, || ControlFlow::Break(()))
        };
        let stopped = run(u64::MAX).unwrap_err();
        assert_eq!(stopped.raw_os_error(), Some(libc::ECANCELED));
        run(0).unwrap();
    }

    #[test]
    fn a_job_that_waits_for_ever_can_be_cancelled() {
        struct Stuck(Cursor);
        impl Job for Stuck {
            fn cursor(&self) -> &Cursor {
                &self.0
            }
            async fn worker(&self, _: &Queue) {
                pending().await
            }
        }
        let job = Arc::new(Stuck(Cursor::new(1)));
        let begun = Instant::now();
        let result = run(&job, EngineKind::Threads, None, || ControlFlow::Break(()));
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ECANCELED));
        assert!(begun.elapsed() < 5 * GRACE, "{:?}", begun.elapsed());
        assert_eq!(Arc::strong_count(&job), 1);
    }

    #[test]
    fn skipped_ranges_are_counted_once_and_exclude_claimed_ones() {
        let cursor = Cursor::new(10);
        let first = cursor.take(|at| at + 2).unwrap();
        assert_eq!(first, 0..2);
        cursor.skip(2, 5);
        assert_eq!(cursor.take(|at| at + 2), Some(5..7));
        // These bytes are claimed already.
        cursor.skip(2, 7);
        // Something before these is not claimed.
        cursor.skip(8, 9);
        // Backwards, or empty.
        cursor.skip(7, 7);
        cursor.skip(7, 6);
        assert_eq!(cursor.take(|at| at + 1), Some(7..8));
        // A part of these is claimed.
        cursor.skip(5, 9);
        assert_eq!(cursor.take(|at| at + 1), Some(9..10));
        assert_eq!(cursor.take(|at| at + 1), None);
        for chunk in [0..2, 5..7, 7..8, 9..10] {
            cursor.add(chunk.start, chunk.end);
        }
        assert_eq!(cursor.progress().done, 10);
    }
}
