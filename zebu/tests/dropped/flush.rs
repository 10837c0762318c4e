//! A dropped flush that fails.

use super::*;

/// Memory whose flushes take a turn and fail.
#[derive(Debug)]
struct FailingFlushes(Memory, AtomicBool);

// SAFETY: all is passed on to a storage that keeps the promise.
unsafe impl Storage for FailingFlushes {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if kind == OpKind::Flush && self.1.load(Ordering::SeqCst) {
            let mut waited = false;
            return Started::later(poll_fn(move |context| {
                if std::mem::replace(&mut waited, true) {
                    return Poll::Ready(Err(std::io::Error::from_raw_os_error(5)));
                }
                context.waker().wake_by_ref();
                Poll::Pending
            }));
        }
        // SAFETY: passed on.
        unsafe { self.0.start(queue, kind, offset, length, memory) }
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&self.0)
    }
}

/// The kernel reports a failed flush once. If the request was dropped, the next flush must return
/// the error.
#[test]
fn the_error_of_a_dropped_flush_is_not_lost() {
    let _watchdog = Watchdog::new("a dropped flush that fails");
    let mut seeds = cases(59, "dropped flushes that failed");
    while let Some(seed) = seeds.next() {
        let origin = Origin::new(seed);
        for ends in [false, true] {
            let _note = PrintOnPanic(format!("seed {seed}, the queue ends: {ends}"));
            let queues = [Delayed.queue(), Delayed.queue()];
            let storage = FailingFlushes(Memory::new(origin.bytes.clone()), false.into());
            let storage = Arc::new(storage);
            let device = origin.open(&queues[0], storage.clone()).unwrap();
            let write = What::Write(0..1, 5);
            drive(&Delayed, &[&queues[0]], start(&device, &queues[0], &write)).unwrap();
            storage.1.store(true, Ordering::SeqCst);
            let mut flush = Task::new(&device, &queues[0], What::Flush);
            assert!(flush.poll().is_none(), "it takes a turn");
            drop(flush);
            storage.1.store(false, Ordering::SeqCst);
            let [first, second] = queues;
            let result = match ends {
                true => {
                    drop(first);
                    drive(&Delayed, &[&second], device.flush(&second))
                }
                false => drive(&Delayed, &[&first, &second], device.flush(&second)),
            };
            assert!(result.is_err(), "the error was lost");
            seeds.add(1);
        }
    }
}
