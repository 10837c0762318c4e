//! A queue in an event loop of the caller's, with each engine.
//!
//! Guards against completions and wake-ups that do not make the descriptor readable, and against a
//! descriptor that stays readable.

use std::cell::Cell;
use std::future::Future;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use zebu::storage::{
    EngineKind, OpenFile, Queue, QueueOptions, Storage, flush, open_file, read, write_slice,
};

/// Long enough for a slow machine; a test that waits for so long fails.
const NEVER: Duration = Duration::from_secs(60);

fn queues() -> impl Iterator<Item = Queue> {
    EngineKind::ALL.into_iter().filter_map(|engine| {
        let options = QueueOptions::default().engine(engine);
        match Queue::new(options) {
            Ok(queue) => Some(queue),
            Err(e) => {
                eprintln!("skipped: {e}");
                None
            }
        }
    })
}

/// Whether the queue's descriptor became readable within `time`.
fn becomes_readable(queue: &Queue, time: Duration) -> bool {
    let limit = rustix::event::Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: time.subsec_nanos().into(),
    };
    let mut fds = [PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)];
    let start = std::time::Instant::now();
    // A descriptor that is readable but does not wake `poll` is found when the time is up.
    poll(&mut fds, Some(&limit)).unwrap() > 0 && (time.is_zero() || start.elapsed() < time)
}

/// Drives the queue until `is_done`.
fn drive(queue: &Queue, is_done: impl Fn() -> bool) {
    loop {
        while queue.turn() {}
        if is_done() {
            return;
        }
        let engine = queue.options().engine;
        assert!(becomes_readable(queue, NEVER), "{engine}: nothing happens");
    }
}

/// A file of 64 blocks, each filled with its number, with direct I/O if that is possible.
fn file() -> (tempfile::NamedTempFile, Arc<dyn Storage>) {
    let named = tempfile::NamedTempFile::new().unwrap();
    let content: Vec<u8> = (0..64).flat_map(|n| [n; 4096]).collect();
    std::fs::write(named.path(), content).unwrap();
    let how = |direct| {
        OpenFile::default().write(true).cache(match direct {
            true => zebu::storage::CacheMode::None,
            false => zebu::storage::CacheMode::default(),
        })
    };
    let file = open_file(named.path(), how(true)).or_else(|_| open_file(named.path(), how(false)));
    (named, file.unwrap())
}

/// Spawns `count` reads of one block each. Returns the counter of reads that have ended.
fn spawn_reads(queue: &Queue, file: &Arc<dyn Storage>, count: usize) -> Rc<Cell<usize>> {
    let ended = Rc::new(Cell::new(0));
    for n in 0..count {
        let (queue_, file, ended) = (queue.clone(), file.clone(), ended.clone());
        drop(queue.spawn(async move {
            let block = (n * 7 % 64) as u8;
            let mut buffer = queue_.buffer(4096);
            // SAFETY: the buffer lives until the read has ended.
            let iov = unsafe { buffer.iov() }.slice(0, 4096);
            read(&*file, &queue_, u64::from(block) * 4096, &iov)
                .await
                .unwrap();
            assert!(buffer[..4096].iter().all(|b| *b == block));
            ended.set(ended.get() + 1);
        }));
    }
    ended
}

#[test]
fn operations_complete() {
    for queue in queues() {
        let (_named, file) = file();
        for count in [1, 2, 3, 40, 1, 700] {
            let ended = spawn_reads(&queue, &file, count);
            drive(&queue, || ended.get() == count);
        }
    }
}

#[test]
fn the_descriptor_is_readable_only_if_there_is_work() {
    for queue in queues() {
        let (_named, file) = file();
        let ended = spawn_reads(&queue, &file, 20);
        drive(&queue, || ended.get() == 20);
        // The wake-up of a read that has ended may come late, and is taken by a turn then.
        let settles = (0..1000).any(|_| {
            while queue.turn() {}
            std::thread::sleep(Duration::from_millis(1));
            !becomes_readable(&queue, Duration::ZERO)
        });
        assert!(settles, "there is no work");
        let ended = spawn_reads(&queue, &file, 1);
        // The kernel may forward the wake-up of one eventfd to another one with a delay.
        assert!(becomes_readable(&queue, NEVER), "it was spawned");
        drive(&queue, || ended.get() == 1);
    }
}

#[test]
fn flushes_writes_sleeps_and_descriptors_are_waited_for() {
    for queue in queues() {
        let (_named, file) = file();
        let done = Rc::new(Cell::new(0));
        let (other, ours) = std::os::unix::net::UnixStream::pair().unwrap();
        // Several waits for one descriptor, started before and after the first turn.
        let ours = Rc::new(ours);
        let wait = |times| {
            for _ in 0..times {
                let (queue_, ours, done) = (queue.clone(), ours.clone(), done.clone());
                drop(queue.spawn(async move {
                    queue_.readable(&*ours).await.unwrap();
                    done.set(done.get() + 1);
                }));
            }
        };
        wait(2);
        while queue.turn() {}
        wait(2);
        drive(&queue, || true);
        assert_eq!(done.get(), 0);
        let (queue_, done_) = (queue.clone(), done.clone());
        drop(queue.spawn(async move {
            queue_.sleep(Duration::from_millis(20)).await.unwrap();
            write_slice(&*file, &queue_, 4096, &[9; 4096])
                .await
                .unwrap();
            flush(&*file, &queue_).await.unwrap();
            std::io::Write::write_all(&mut &other, b"x").unwrap();
            done_.set(done_.get() + 1);
        }));
        drive(&queue, || done.get() == 5);
        while queue.turn() {}
        assert!(!becomes_readable(&queue, Duration::ZERO), "no wait is left");
    }
}

#[test]
fn other_threads_wake_the_queue() {
    for queue in queues() {
        let done = Rc::new(Cell::new(0));
        let (mut from_task, from_other): (Vec<_>, Vec<_>) =
            (0..50).map(|_| futures_channel::oneshot::channel()).unzip();
        for receiver in from_other {
            let done = done.clone();
            drop(queue.spawn(async move {
                receiver.await.unwrap();
                done.set(done.get() + 1);
            }));
        }
        while queue.turn() {}
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for (n, sender) in from_task.drain(..).enumerate() {
                    if n % 3 == 0 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    sender.send(()).unwrap();
                }
            });
            drive(&queue, || done.get() == 50);
        });
    }
}

#[test]
fn an_eventfd_can_be_waited_for_repeatedly() {
    for queue in queues() {
        let flags = rustix::event::EventfdFlags::NONBLOCK;
        let kick = Rc::new(rustix::event::eventfd(0, flags).unwrap());
        let kicks = Rc::new(Cell::new(0));
        let (queue_, kick_, kicks_) = (queue.clone(), kick.clone(), kicks.clone());
        let handle = queue.spawn(async move {
            loop {
                queue_.readable(&*kick_).await.unwrap();
                let mut count = [0; 8];
                rustix::io::read(&*kick_, &mut count).unwrap();
                kicks_.set(kicks_.get() + 1);
            }
        });
        for n in 1..30 {
            while queue.turn() {}
            rustix::io::write(&*kick, &1u64.to_ne_bytes()).unwrap();
            drive(&queue, || kicks.get() == n);
        }
        handle.abort();
    }
}

#[test]
fn block_on_and_the_event_loop_may_alternate() {
    for queue in queues() {
        let (_named, file) = file();
        for round in 0..30 {
            let ended = spawn_reads(&queue, &file, 1 + round % 4);
            queue.turn();
            // Reads that are submitted here may complete here or in the event loop below.
            queue.block_on(async {
                let mut buffer = queue.buffer(4096);
                // SAFETY: the buffer lives until the read has ended.
                let iov = unsafe { buffer.iov() }.slice(0, 4096);
                read(&*file, &queue, 8192, &iov).await.unwrap();
            });
            while ended.get() < 1 + round % 4 {
                assert!(becomes_readable(&queue, NEVER));
                while queue.turn() {}
            }
        }
    }
}

#[test]
fn requests_may_be_polled_by_another_executor() {
    struct Flag(AtomicBool);
    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    for queue in queues() {
        let (_named, file) = file();
        while queue.turn() {}
        for block in 0..20u8 {
            let mut buffer = queue.buffer(4096);
            // SAFETY: the buffer lives until the read has ended.
            let iov = unsafe { buffer.iov() }.slice(0, 4096);
            let mut request = Box::pin(read(&*file, &queue, u64::from(block) * 4096, &iov));
            let woken = Arc::new(Flag(AtomicBool::new(false)));
            let waker = woken.clone().into();
            let mut poll = || request.as_mut().poll(&mut Context::from_waker(&waker));
            if block % 5 == 4 {
                // Dropping a read in flight waits in the engine.
                let _ = poll();
                continue;
            }
            while poll().is_pending() {
                while !woken.0.swap(false, Ordering::Relaxed) {
                    assert!(becomes_readable(&queue, NEVER));
                    while queue.turn() {}
                }
            }
            drop(request);
            assert!(buffer[..4096].iter().all(|b| *b == block));
        }
    }
}

/// With io_uring, the kernel puts off by milliseconds the signal of a ring that has polled an eventfd
/// which is written.
#[test]
fn a_wake_up_is_reported_at_once() {
    for queue in queues() {
        if queue.options().engine == EngineKind::Native {
            // It polls the eventfd, too; the delay is short.
            continue;
        }
        let _descriptor = queue.as_fd();
        while queue.turn() {}
        for _ in 0..4 {
            let (wake, woken) = futures_channel::oneshot::channel::<()>();
            let handle = queue.spawn(woken);
            assert!(becomes_readable(&queue, Duration::ZERO), "it was spawned");
            while queue.turn() {}
            std::thread::scope(|scope| scope.spawn(|| wake.send(())).join().unwrap().unwrap());
            assert!(becomes_readable(&queue, Duration::ZERO), "it was woken");
            while queue.turn() {}
            queue.block_on(handle).unwrap();
            while queue.turn() {}
        }
    }
}
