//! Guards against rare interleavings: a grace period that ends too early, a gate that admits two
//! requests or none, a range that two requests hold, an extended entry that is read half old and
//! half new, a commit without an entry that was set before it.
//!
//! A scheduler runs each test thousands of times and chooses the thread of each step at random:
//! `cargo test -p zebu-core --features interleavings --lib interleavings`. A failure prints the schedule that
//! repeats it.

use std::sync::Arc;

use shuttle::future::block_on;
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use shuttle::thread;

use super::map::table::Slice;
use super::writer::dirty::Dirty;
use crate::drivers::qcow2::structures::{Geometry, Header, L2Entry};
use crate::drivers::{Epochs, Gate, Ranges};
use crate::offset::HostOffset;

/// Runs a test under 10 000 schedules, or as many as are wanted.
fn check(test: impl Fn() + Send + Sync + 'static) {
    const ROUND: u64 = 1000;
    let test = Arc::new(test);
    let mut rounds = zebu_testkit::work(10 * ROUND, "schedules");
    while rounds.next().is_some() {
        let test = test.clone();
        shuttle::check_random(move || test(), ROUND as usize);
        rounds.add(ROUND);
    }
}

/// A cluster is mapped, unmapped, and reused after a grace period. No request that found it mapped
/// may still be in flight then.
#[test]
fn a_grace_period_waits_for_all_earlier_requests() {
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
fn the_gate_admits_one_at_a_time() {
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
        // The scheduler fails on a deadlock.
        for one in all {
            one.join().unwrap();
        }
    });
}

#[test]
fn a_range_is_held_once() {
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

/// Readers of an extended entry see both words of one write, also while another entry is written.
#[test]
fn extended_entries_are_read_atomically() {
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

/// Several threads set an entry of one slice and then commit. Each commit, or one before it, must
/// have copied the thread's entry.
#[test]
fn a_commit_includes_entries_set_before_it() {
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
