//! Jobs on sparse disks. Guards against work that grows with the length of a hole: each worker looks at
//! a hole at most a few times, also while others are at chunks within it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use zebu::Format;
use zebu::block::{Device, OpenOptions};
use zebu::jobs::{
    CompareOptions, Comparison, ConvertOptions, Target, compare, convert, differences,
};
use zebu::storage::{
    EngineKind, Iov, Memory, OpKind, Queue, QueueOptions, Started, Storage, StorageExtent,
};

/// Bytes of the disks.
const SIZE: u64 = 16 << 40;
/// Bytes of a hole: workers that begin later find more.
const HOLE: u64 = 64 << 30;
/// Questions for extents that are few. After so many there are errors.
const FEW: u64 = 40 * (SIZE / HOLE);

/// A file of holes, and how often it was asked for extents.
#[derive(Debug)]
struct Hole {
    nothing: Memory,
    asked: AtomicU64,
}

// SAFETY: an extent is written at once, all else is passed on to `Memory`.
unsafe impl Storage for Hole {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        match (kind, memory) {
            (OpKind::Extent, Some(iov)) => {
                let asked = self.asked.fetch_add(1, Ordering::Relaxed);
                // Other workers take chunks meanwhile.
                std::thread::sleep(Duration::from_micros(100));
                let hole = StorageExtent::hole(HOLE - offset % HOLE);
                let answer = (asked < FEW).then(|| hole.put(iov));
                Started::done(answer.ok_or(io::ErrorKind::QuotaExceeded.into()))
            }
            // SAFETY: as the caller promised.
            _ => unsafe { self.nothing.start(queue, kind, offset, length, memory) },
        }
    }
    fn len(&self) -> io::Result<u64> {
        Ok(SIZE)
    }
}

/// A disk without data, and its file.
fn hole() -> (Device, Arc<Hole>) {
    let hole = Arc::new(Hole {
        nothing: Memory::new(Vec::new()),
        asked: AtomicU64::new(0),
    });
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let options = OpenOptions::default().format(Some(Format::RAW));
    let device = Device::from_storage(&queue, hole.clone(), &options).unwrap();
    (device, hole)
}

#[test]
fn holes_are_skipped_by_all_workers() {
    for _ in 0..3 {
        let same = compare([hole().0, hole().0], &CompareOptions::default(), |_| {});
        assert!(matches!(same, Ok(Comparison::Identical)), "{same:?}");

        let disks = [hole().0, hole().0];
        let bits = differences(disks, 1 << 20, EngineKind::default(), |_| {}).unwrap();
        assert!(bits.ranges().next().is_none());

        for workers in [1, 2, 8] {
            let ((source, _), (_, target)) = (hole(), hole());
            let options = ConvertOptions::default()
                .workers(Some(workers))
                .zero_from(Some(0));
            convert(vec![source], Target::Raw(target), &options, |_| {}).unwrap();
        }
    }
}
