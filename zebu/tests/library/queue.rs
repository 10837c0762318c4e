//! Guards against a lost wake-up between queues or from another thread, which would hang a request;
//! a waker that outlives its task and wakes another one or uses freed memory; and a queue that is
//! driven from one of its own tasks; and a queue that blocks others when it is not driven any more,
//! or is not freed when it is dropped.

use std::fs;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::common::{Rng, Watchdog, engines, queue};
use zebu::storage::{self, CacheMode, Memory, OpenFile, Storage, open_file};
use zebu::{Device, EngineKind, OpenOptions, Queue, QueueOptions, SharedDevice, Source};

/// A counter that one task waits for and another one raises, on any thread.
#[derive(Default)]
struct Signal(Mutex<(u64, Option<Waker>)>);

impl Signal {
    fn raise(&self, round: u64) {
        let waker = {
            let mut state = self.0.lock().unwrap();
            state.0 = round;
            state.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    async fn wait(&self, round: u64) {
        poll_fn(|context| {
            let mut state = self.0.lock().unwrap();
            if state.0 >= round {
                return Poll::Ready(());
            }
            state.1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

#[test]
fn no_wake_up_between_two_queues_is_lost() {
    const ROUNDS: u64 = 4000;
    for engine in engines() {
        let _watchdog = Watchdog::new(&format!("ping and pong with {engine}"));
        let (ping, pong) = (Arc::new(Signal::default()), Arc::new(Signal::default()));
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        fs::write(file.path(), vec![9; 1 << 16]).unwrap();
        let direct = open_file(file.path(), OpenFile::default().cache(CacheMode::None));
        let file = direct.or_else(|_| open_file(file.path(), OpenFile::default()));
        let file = file.unwrap();
        // In a quarter of the rounds there is also I/O in flight.
        let play = async |queue: &Queue, mine: &Signal, theirs: &Signal, first: bool| {
            let mut rng = Rng::new(u64::from(first) + 5);
            for round in 1..=ROUNDS {
                for _ in 0..rng.below(200) {
                    std::hint::spin_loop();
                }
                if first {
                    mine.raise(round);
                }
                if rng.one_in(4) {
                    let at = rng.below(15) * 4096;
                    let mut reading = pin!(storage::read_vec(&*file, queue, at, 4096));
                    // The read is submitted by its first poll. It may end there, from the page cache.
                    let first = reading
                        .as_mut()
                        .poll(&mut Context::from_waker(Waker::noop()));
                    theirs.wait(round).await;
                    let bytes = match first {
                        Poll::Ready(bytes) => bytes,
                        Poll::Pending => reading.await,
                    };
                    assert_eq!(bytes.unwrap(), [9; 4096]);
                } else {
                    theirs.wait(round).await;
                }
                if !first {
                    mine.raise(round);
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let queue = queue(engine, false);
                queue.block_on(play(&queue, &pong, &ping, false));
            });
            let queue = queue(engine, false);
            queue.block_on(play(&queue, &ping, &pong, true));
        });
    }
}

#[test]
fn no_wake_up_from_a_plain_thread_is_lost() {
    const ROUNDS: u64 = 4000;
    const TASKS: usize = 4;
    for engine in engines() {
        let _watchdog = Watchdog::new(&format!("wake-ups with {engine}"));
        let signals: Arc<[Signal; TASKS]> = Arc::default();
        let seen: Arc<[AtomicU64; TASKS]> = Arc::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut rng = Rng::new(11);
                for round in 1..=ROUNDS {
                    for signal in signals.iter() {
                        // The task is woken several times, close to its polls.
                        signal.raise(round);
                        for _ in 0..rng.below(50) {
                            std::hint::spin_loop();
                        }
                    }
                    while seen.iter().any(|n| n.load(Ordering::Acquire) < round) {
                        std::thread::yield_now();
                    }
                }
            });
            let queue = queue(engine, false);
            let handles: Vec<_> = (0..TASKS)
                .map(|n| {
                    let (signals, seen) = (signals.clone(), seen.clone());
                    queue.spawn(async move {
                        for round in 1..=ROUNDS {
                            signals[n].wait(round).await;
                            seen[n].store(round, Ordering::Release);
                        }
                    })
                })
                .collect();
            queue.block_on(async {
                for handle in handles {
                    handle.await;
                }
            });
        });
    }
}

#[test]
fn a_queue_is_dropped_with_idle_workers_and_late_wakers() {
    for engine in engines() {
        let _watchdog = Watchdog::new(&format!("end of a queue with {engine}"));
        let memory = Arc::new(Memory::new(vec![1; 4096]));
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        fs::write(file.path(), vec![9; 1 << 16]).unwrap();
        let file: Arc<dyn Storage> = open_file(file.path(), OpenFile::default()).unwrap();
        for _ in 0..10 {
            let queue = queue(engine, false);
            let late: Arc<Mutex<Vec<Waker>>> = Arc::default();
            let handles: Vec<_> = (0..32u64)
                .map(|n| {
                    let (file, queue2, late) = (file.clone(), queue.clone(), late.clone());
                    queue.spawn(async move {
                        poll_fn(|context| {
                            late.lock().unwrap().push(context.waker().clone());
                            Poll::Ready(())
                        })
                        .await;
                        let bytes = storage::read_vec(&*file, &queue2, n * 1024, 1024).await;
                        assert_eq!(bytes.unwrap(), [9; 1024]);
                    })
                })
                .collect();
            queue.block_on(async {
                for handle in handles {
                    handle.await;
                }
            });
            // Wakers of tasks that have ended, whose slots other tasks use now.
            let wakers = std::mem::take(&mut *late.lock().unwrap());
            let (storage, queue2) = (memory.clone(), queue.clone());
            let next = queue.spawn(async move {
                for _ in 0..10 {
                    let bytes = storage::read_vec(&*storage, &queue2, 0, 4096).await;
                    assert_eq!(bytes.unwrap(), [1; 4096]);
                }
            });
            std::thread::scope(|scope| {
                let waker = scope.spawn(|| wakers.iter().for_each(Waker::wake_by_ref));
                queue.block_on(next);
                waker.join().unwrap();
            });
            drop(queue);
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

#[test]
fn nested_block_on_panics_and_the_queue_stays_usable() {
    for engine in engines() {
        let queue = queue(engine, false);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            queue.block_on(async { queue.block_on(async {}) });
        }));
        assert!(result.is_err());
        let memory = Memory::new(vec![5; 10]);
        let bytes = queue.block_on(storage::read_vec(&memory, &queue, 0, 10));
        assert_eq!(bytes.unwrap(), [5; 10]);
    }
}

/// A spawned request owns a clone of the queue, and a share of the device with its file and locks.
#[test]
fn a_queue_that_is_dropped_ends_its_spawned_requests() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.qcow2");
    {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let device = Device::create(&queue, &path, 1 << 20).unwrap();
        queue.block_on(device.close(&queue)).unwrap();
    }
    let source = Source::Name(path.clone().into());
    for engine in EngineKind::ALL {
        for turns in 0..3 {
            let Ok(queue) = Queue::new(QueueOptions::default().engine(engine)) else {
                eprintln!("skipped: {engine}");
                break;
            };
            // The second one finds the lock of the first, if that was not dropped.
            let options = OpenOptions::default().write(true);
            let device = Arc::new(Device::open(&queue, &source, &options).unwrap());
            let weak = Arc::downgrade(&device);
            let (device_, queue_) = (device.clone(), queue.clone());
            let mut handle = queue.spawn(async move {
                let buffer = device_.read_buffer(&queue_, 0, vec![0; 4096], 4096).await;
                std::future::pending::<()>().await;
                buffer.1
            });
            for _ in 0..turns {
                queue.turn();
            }
            drop(device);
            drop(queue);
            assert!(
                weak.upgrade().is_none(),
                "{engine}: the device is still there"
            );
            let joined = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let mut context = Context::from_waker(Waker::noop());
                let _ = Pin::new(&mut handle).poll(&mut context);
            }));
            assert!(joined.is_err(), "{engine}: there is a result");
        }
    }
}

/// Requests of clones have waited for its tasks.
#[test]
fn a_queue_that_is_dropped_hangs_no_request_of_its_clones() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let watcher = Queue::new(QueueOptions::default()).unwrap();
    for engine in engines() {
        let _watchdog = Watchdog::new(&format!("clones of a dropped queue with {engine}"));
        let path = folder.path().join(format!("{engine}.qcow2"));
        let device = Device::create(&watcher, &path, 64 << 20).unwrap();
        let mut cancelled = 0;
        for polls in 1..8 {
            let owner = queue(engine, false);
            let clone = owner.clone();
            let flushed = clone.block_on(async {
                let write = device.write_buffer(&clone, polls << 20, vec![1; 4096], 4096);
                write.await.1.unwrap();
                let mut flush = Box::pin(device.flush(&clone));
                let mut left = polls;
                let ended = poll_fn(|context| {
                    if let Poll::Ready(result) = flush.as_mut().poll(context) {
                        return Poll::Ready(Some(result));
                    }
                    left -= 1;
                    match left {
                        0 => Poll::Ready(None),
                        _ => Poll::Pending,
                    }
                });
                match ended.await {
                    Some(result) => Err(result),
                    None => Ok(flush),
                }
            });
            let spawned = owner.spawn(std::future::pending::<()>());
            drop(owner);
            match flushed {
                Ok(flush) => match clone.block_on(flush) {
                    Ok(()) => {}
                    Err(zebu::Error::Io(e)) if e.raw_os_error() == Some(libc::ECANCELED) => {
                        cancelled += 1;
                    }
                    Err(e) => panic!("{engine}: {e}"),
                },
                Err(result) => result.unwrap(),
            }
            let joined = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                clone.block_on(spawned);
            }));
            assert!(joined.is_err(), "{engine}: there is a result");
            // The clone serves new requests, and holds up no other queue.
            clone.block_on(device.flush(&clone)).unwrap();
            watcher.block_on(device.flush(&watcher)).unwrap();
        }
        assert!(cancelled > 0, "{engine}: no flush waited for a task");
        watcher.block_on(device.close(&watcher)).unwrap();
    }
}

/// Nobody drives the queue of the dropped flush any more.
#[test]
fn a_dropped_flush_blocks_no_other_queue() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let queue = Queue::new(QueueOptions::default()).unwrap();
    for polls in 1..12 {
        let path = folder.path().join(format!("{polls}.qcow2"));
        let device = Device::create(&queue, &path, 64 << 20).unwrap();
        let device = SharedDevice::new(device);
        let idle = Queue::new(QueueOptions::default()).unwrap();
        idle.block_on(async {
            let device = device.enter().await.unwrap();
            let write = device.write_buffer(&idle, 1 << 20, vec![1; 4096], 4096);
            write.await.1.unwrap();
            let mut flush = pin!(device.flush(&idle));
            let mut left = polls;
            poll_fn(|context| {
                let ready = left == 0 || flush.as_mut().poll(context).is_ready();
                left -= 1;
                match ready {
                    true => Poll::Ready(()),
                    false if left == 0 => Poll::Ready(()),
                    false => Poll::Pending,
                }
            })
            .await;
        });
        assert!(idle.is_idle());
        let change = device.snapshot_create(&queue, "s");
        let limit = queue.sleep(Duration::from_secs(60));
        let (mut change, mut limit) = (pin!(change), pin!(limit));
        queue
            .block_on(poll_fn(|context| {
                assert!(
                    limit.as_mut().poll(context).is_pending(),
                    "{polls}: it hangs"
                );
                change.as_mut().poll(context)
            }))
            .unwrap();
        queue.block_on(device.close(&queue)).unwrap();
    }
}
