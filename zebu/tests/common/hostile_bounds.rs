//! Bounds on what one hostile image may cost, and the runs over generated ones:
//! shared by the `hostile*.rs` tests. Memory is counted by the allocator, so a
//! test binary that includes this counts all that it allocates.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use zebu::storage::{EngineKind, Queue, QueueOptions};

use crate::hostile_images::Random;

/// Processor time that a case may take.
const TIME: Duration = Duration::from_secs(2);
/// Bytes of memory that looking at an image may take.
const MEMORY: usize = 64 << 20;

/// Counts what is allocated.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grown(by: usize) {
    let now = NOW.fetch_add(by, Ordering::Relaxed) + by;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: as the caller promised.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time: memory is counted for all threads together.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

/// What the process has used so far. Not the time of the clock: that a busy
/// machine is slow says nothing of the library.
fn processor_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the clock exists, and the time is written to.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(failed, 0, "no clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs a case within the bounds.
#[track_caller]
pub fn case<T>(name: &str, run: impl FnOnce() -> T) -> T {
    println!("cases: 1 image: {name}");
    case_within(name, MEMORY, run)
}

/// The same with `memory` bytes.
#[track_caller]
pub fn case_within<T>(name: &str, memory: usize, run: impl FnOnce() -> T) -> T {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let start = processor_time();
    let result = run();
    let (time, peak) = (
        processor_time() - start,
        PEAK.load(Ordering::Relaxed) - before,
    );
    assert!(time < TIME, "{name} took {time:?}");
    assert!(peak < memory, "{name} took {peak} bytes of memory");
    result
}

/// A queue for storages in memory.
pub fn queue() -> Queue {
    let options = QueueOptions::default()
        .engine(EngineKind::Threads)
        .inflate_inline(true);
    Queue::new(options).expect("a queue")
}

/// A number from the environment.
pub fn from_env(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value.map_or(default, |v| v.parse().expect("a number"))
}

/// Runs `ZEBU_HOSTILE_RUNS` (or `runs`) cases, each within the bounds, with a
/// number of its own, from `ZEBU_HOSTILE_SEED` on. A failure tells the number.
pub fn generated(runs: u64, memory: usize, run: impl Fn(&Queue, &mut Random)) {
    let _alone = alone();
    let queue = queue();
    let first = from_env("ZEBU_HOSTILE_SEED", 0);
    let runs = from_env("ZEBU_HOSTILE_RUNS", runs);
    for seed in first..first + runs {
        // A panic does not say which case it was.
        let told = Told(seed);
        let name = format!("seed {seed}");
        case_within(&name, memory, || run(&queue, &mut Random(seed)));
        std::mem::forget(told);
    }
    println!("cases: {runs} generated");
}

/// Tells the seed while a panic unwinds.
struct Told(u64);

impl Drop for Told {
    fn drop(&mut self) {
        eprintln!("with ZEBU_HOSTILE_SEED={} ZEBU_HOSTILE_RUNS=1", self.0);
    }
}
