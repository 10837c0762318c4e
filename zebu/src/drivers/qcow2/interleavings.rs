//! Guards against interleavings of a few instructions that no other test hits:
//! a grace period that ends too early, a gate that two pass or that none
//! passes any more, ranges that two hold, an extended entry that is read half
//! old and half new, a commit without an entry that was set before it.
//!
//! A scheduler runs each test thousands of times and chooses at random which thread
//! goes on at each step: `RUSTFLAGS="--cfg shuttle" cargo test --lib
//! interleavings`. A failure prints the schedule that repeats it.

use std::sync::Arc;

use shuttle::future::block_on;
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use shuttle::thread;

use super::dirty::Dirty;
use super::epoch::Epochs;
use super::table::Slice;
use crate::drivers::{Gate, Ranges};
use crate::format::{Geometry, Header, HostOffset, L2Entry};

const RUNS: usize = 20_000;

fn check(test: impl Fn() + Send + Sync + 'static) {
    shuttle::check_random(test, RUNS);
    println!("cases: {RUNS} schedules");
}

/// A cluster is mapped, unmapped, and used again after a grace period: no
/// request that found it mapped is still at work on it then.
#[test]
fn a_grace_period_waits_for_all_from_before() {
    check(|| {
        let epochs = Arc::new(Epochs::default());
        let mapped = Arc::new(AtomicBool::new(true));
        let reused = Arc::new(AtomicBool::new(false));
        let requests: Vec<_> = (0..2)
            .map(|_| {
                let (epochs, mapped, reused) = (epochs.clone(), mapped.clone(), reused.clone());
                thread::spawn(move || {
                    for _ in 0..2 {
                        let _stay = epochs.enter();
                        if mapped.load(Ordering::SeqCst) {
                            // The I/O.
                            assert!(!reused.load(Ordering::SeqCst));
                            thread::yield_now();
                            assert!(!reused.load(Ordering::SeqCst));
                        }
                    }
                })
            })
            .collect();
        mapped.store(false, Ordering::SeqCst);
        for _ in 0..2 {
            while !epochs.elapsed() {
                thread::yield_now();
            }
            epochs.begin();
        }
        while !epochs.elapsed() {
            thread::yield_now();
        }
        reused.store(true, Ordering::SeqCst);
        for request in requests {
            request.join().unwrap();
        }
    });
}

#[test]
fn one_at_a_time_passes_the_gate() {
    check(|| {
        let gate = Arc::new(Gate::default());
        let inside = Arc::new(AtomicU64::new(0));
        let all: Vec<_> = (0..3)
            .map(|_| {
                let (gate, inside) = (gate.clone(), inside.clone());
                thread::spawn(move || {
                    block_on(async {
                        for _ in 0..2 {
                            let _pass = gate.enter().await;
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                            thread::yield_now();
                            inside.fetch_sub(1, Ordering::SeqCst);
                        }
                    });
                })
            })
            .collect();
        // No thread waits for ever: the scheduler fails on a deadlock.
        for one in all {
            one.join().unwrap();
        }
    });
}

#[test]
fn a_range_is_held_by_one() {
    check(|| {
        let ranges = Arc::new(Ranges::default());
        let cells: Arc<Vec<AtomicU64>> = Arc::new((0..4).map(|_| AtomicU64::new(0)).collect());
        let all: Vec<_> = [(0, 2), (1, 4), (3, 4), (0, 4)]
            .into_iter()
            .map(|(from, to)| {
                let (ranges, cells) = (ranges.clone(), cells.clone());
                thread::spawn(move || {
                    block_on(async {
                        let _held = ranges.hold(from..to).await;
                        for cell in &cells[from as usize..to as usize] {
                            assert_eq!(cell.fetch_add(1, Ordering::SeqCst), 0);
                        }
                        thread::yield_now();
                        for cell in &cells[from as usize..to as usize] {
                            cell.fetch_sub(1, Ordering::SeqCst);
                        }
                    });
                })
            })
            .collect();
        for one in all {
            one.join().unwrap();
        }
    });
}

/// Of an extended entry readers see both words of one write, while its
/// neighbour is written too.
#[test]
fn extended_entries_are_whole() {
    check(|| {
        let mut header = Header::new(16, 1 << 20);
        header.set_extended_l2(true);
        let geometry = Geometry::new(&header).unwrap();
        let slice = Arc::new(Slice::decode(&[0; 32]));
        let entry = move |nth: u64| {
            let host = HostOffset(nth << 16);
            L2Entry::subclusters(Some(host), true, nth as u32, 0, &geometry).unwrap()
        };
        let writers: Vec<_> = (0..2)
            .map(|index| {
                let slice = slice.clone();
                thread::spawn(move || {
                    for nth in 1..3 {
                        slice.set(index, entry(nth), &geometry);
                    }
                })
            })
            .collect();
        for index in [0, 1, 0] {
            let found = slice.get(index, &geometry);
            let nth = found.raw_offset().0 >> 16;
            assert_eq!(found.bitmap, nth, "{found:?}");
        }
        for writer in writers {
            writer.join().unwrap();
        }
    });
}

/// Several set entries of one slice, each then commits: the copy has what it
/// set, or a copy before had it.
#[test]
fn a_commit_has_what_was_set_before_it() {
    check(|| {
        let geometry = Geometry::new(&Header::new(16, 1 << 20)).unwrap();
        let slice = Arc::new(Slice::decode(&[0; 16]));
        let dirty = Arc::new(Dirty::default());
        let disk = Arc::new(Mutex::new([0; 16]));
        let writers: Vec<_> = (0..2)
            .map(|index| {
                let (slice, dirty, disk) = (slice.clone(), dirty.clone(), disk.clone());
                thread::spawn(move || {
                    for nth in 1..3 {
                        let host = HostOffset(nth << 16);
                        let entry = L2Entry::data(host, true, &geometry).unwrap();
                        slice.set(index, entry, &geometry);
                        dirty.note_slice(0, &slice);
                        // One commit at a time.
                        let mut disk = disk.lock().unwrap();
                        for (_, slice) in dirty.take().0 {
                            slice.clean();
                            slice.encode(&mut *disk, &geometry);
                        }
                        let found = L2Entry::read(&*disk, index, &geometry).unwrap();
                        assert_eq!(found.raw_offset().0 >> 16, nth);
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.join().unwrap();
        }
    });
}
