//! Bounds on the time and memory that one hostile image may cost, and runs over generated
//! images, and an allocator that counts memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use zebu::storage::{EngineKind, Queue, QueueOptions};

use crate::common::cases;
use crate::hostile_images::Rng;

/// Processor time that a case may take: twice as much as it needs alone, where processors share a core.
const TIME: Duration = Duration::from_secs(4);
/// Bytes of memory that opening and reading an image may take.
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

/// The processor time of the process, which does not depend on how busy the machine is.
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

/// Runs a case. Fails the test if it takes more than [`TIME`] or [`MEMORY`].
#[track_caller]
pub fn case<T>(name: &str, run: impl FnOnce() -> T) -> T {
    println!("cases: 1 image: {name}");
    case_within(name, MEMORY, run)
}

/// The same with at most `memory` bytes.
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

/// Runs generated cases within the bounds, each with its own seed. Other tests may run between them.
pub fn generated(runs: u64, memory: usize, run: impl Fn(&Queue, &mut Rng)) {
    let queue = queue();
    for seed in cases(runs, "generated").from(0) {
        let _alone = alone();
        let name = format!("seed {seed}");
        case_within(&name, memory, || run(&queue, &mut Rng::new(seed)));
    }
}
