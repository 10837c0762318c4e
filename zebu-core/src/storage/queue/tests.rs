//! Guards against a flush that fails because the kernel could not begin it, or succeeds after
//! another has failed, an engine's failure that frees memory which the kernel uses, a file that is
//! closed under an operation that was forgotten, tasks that outlive their queue, and tasks that are
//! never polled again after another has panicked.
#![allow(unsafe_code)]

use super::super::engine::{EngineKind, Interest, Notify, OpKind};
use super::super::{CacheMode, OpenFile, Storage, flush, open_file};
use super::*;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

/// An engine that completes operations with given results, and then fails.
struct Scripted {
    results: Vec<i32>,
    taken: Vec<(Token, Op)>,
    panics: bool,
}

struct NoNotify;
impl Notify for NoNotify {
    fn notify(&self) {}
}

impl Engine for Scripted {
    unsafe fn submit(&mut self, token: Token, op: Op) {
        self.taken.push((token, op));
    }
    fn watch(&mut self, _: Token, _: RawFd, _: Interest) {}
    fn unwatch(&mut self, _: Token) {}
    fn poll(&mut self, _: bool, done: &mut Vec<Completion>) -> io::Result<()> {
        let Some((token, _)) = self.taken.pop() else {
            return Ok(());
        };
        match self.results.pop() {
            Some(result) => done.push((token, result)),
            None if self.panics => panic!("as scripted"),
            None => return Err(io::Error::from_raw_os_error(libc::EBADF)),
        }
        Ok(())
    }
    fn notifier(&self) -> Arc<dyn Notify> {
        Arc::new(NoNotify)
    }
}

/// A queue with each engine that this system has.
pub(in super::super) fn queues() -> impl Iterator<Item = Queue> {
    EngineKind::ALL.into_iter().filter_map(|engine| {
        let queue = Queue::new(QueueOptions::default().engine(engine));
        queue.inspect_err(|_| eprintln!("skipped: {engine}")).ok()
    })
}

fn scripted(results: &[i32], panics: bool) -> Queue {
    let engine = Scripted {
        results: results.to_vec(),
        taken: Vec::new(),
        panics,
    };
    Queue::with_engine(QueueOptions::default(), Box::new(engine))
}

fn file() -> Arc<dyn Storage> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), [1; 4096]).unwrap();
    let how = OpenFile {
        write: true,
        // The engine executes it, also if it is alone.
        cache: CacheMode::WriteThrough,
        ..OpenFile::default()
    };
    open_file(file.path(), how).unwrap()
}

#[test]
fn operations_that_cannot_start_are_retried() {
    let file = file();
    let queue = scripted(&[0, -libc::EAGAIN, -libc::EINTR, -libc::EAGAIN], false);
    queue.block_on(flush(&*file, &queue)).unwrap();
    let queue = scripted(&[4096, -libc::EAGAIN], false);
    let write = super::super::write_slice(&*file, &queue, 0, &[2; 4096]);
    queue.block_on(write).unwrap();
    let queue = scripted(&[-libc::EIO, -libc::EAGAIN], false);
    let error = queue.block_on(flush(&*file, &queue)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
}

#[test]
fn a_failed_flush_of_the_page_cache_is_final() {
    let file = file();
    let queue = scripted(&[0, 0, -libc::EIO, 0], false);
    let flushes = [(); 3].map(|()| queue.block_on(flush(&*file, &queue)).is_ok());
    assert_eq!(flushes, [true, false, false]);
}

#[test]
fn a_failed_engine_ends_the_process() {
    const NAME: &str = "ZEBU_TEST_ENGINE_FAILS";
    if let Ok(how) = std::env::var(NAME) {
        let queue = scripted(&[], how == "panic");
        let _ = queue.block_on(flush(&*file(), &queue));
        return;
    }
    for how in ["panic", "error"] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["a_failed_engine_ends_the_process", "--nocapture"])
            .env(NAME, how)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{text}");
        assert!(text.contains("I/O engine failed"), "{text}");
    }
}

#[test]
fn a_file_is_open_as_long_as_operations_are_in_flight() {
    for queue in queues() {
        let file = file();
        let fd = file.host_file().unwrap().as_fd().as_raw_fd();
        let link = format!("/proc/self/fd/{fd}");
        let name = std::fs::read_link(&link).unwrap();
        // SAFETY: there is no memory.
        let started = unsafe { file.start(&queue, OpKind::Flush, 0, 0, None) };
        std::mem::forget(started);
        drop(file);
        let is_open = || std::fs::read_link(&link).is_ok_and(|now| now == name);
        assert!(is_open());
        while is_open() {
            queue.inner.drive(true);
        }
    }
}

#[test]
fn reads_that_end_at_once_let_other_futures_run() {
    for queue in queues() {
        let named = tempfile::NamedTempFile::new_in(".").unwrap();
        std::fs::write(named.path(), [1; 4096]).unwrap();
        let file = open_file(named.path(), OpenFile::default()).unwrap();
        let order = Rc::new(RefCell::new(Vec::new()));
        let reader = |name: u8| {
            let (file, order, queue) = (file.clone(), order.clone(), queue.clone());
            async move {
                for _ in 0..100 {
                    let bytes = super::super::read_vec(&*file, &queue, 5, 16).await;
                    assert_eq!(bytes.unwrap(), [1; 16]);
                    order.borrow_mut().push(name);
                }
            }
        };
        let handles = [1, 2].map(|name| queue.spawn(reader(name)));
        for handle in handles {
            queue.block_on(handle);
        }
        let order = order.take();
        assert_eq!(order.len(), 200);
        let second = order.iter().position(|name| *name == 2).unwrap();
        assert!(second <= 17, "{second}");
    }
}

#[test]
fn tasks_end_with_their_queue_and_unbroken_sections_before() {
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let (other, alive) = (Rc::new(()), Rc::new(Cell::new(0)));
    let (held, count) = (other.clone(), alive.clone());
    // Its result is dropped at once.
    drop(queue.detach(|queue| async move {
        let _held = held;
        {
            let storage = super::super::Memory::new(Vec::new());
            let _unbroken = queue.unbroken(&storage);
            for _ in 0..3 {
                yield_once().await;
                count.set(count.get() + 1);
            }
        }
        std::future::pending::<()>().await;
    }));
    let begun = queue.begin({
        let held = other.clone();
        |_| async move {
            let _held = held;
            std::future::pending::<()>().await;
        }
    });
    assert_eq!(Rc::strong_count(&other), 3);
    drop(begun);
    assert_eq!(Rc::strong_count(&other), 2);
    assert_eq!(alive.get(), 0);
    drop(queue);
    assert_eq!(alive.get(), 3);
    assert_eq!(Rc::strong_count(&other), 1);
}

/// A clone that is left need not be driven.
#[test]
fn what_a_dropped_request_leaves_ends_at_once_after_the_owner() {
    let owner = Queue::new(QueueOptions::default()).unwrap();
    let clone = owner.clone();
    let left = Rc::new(Cell::new(3));
    let leave = |queue: &Queue| {
        let left = left.clone();
        queue.detach_unbroken(|_| async move {
            for _ in 0..3 {
                yield_once().await;
                left.set(left.get() - 1);
            }
        });
    };
    leave(&clone);
    assert_eq!((left.get(), clone.is_idle()), (3, false));
    drop(owner);
    assert_eq!((left.get(), clone.is_idle()), (0, true));
    let begun = clone.begin(|_| yield_once());
    left.set(3);
    leave(&clone);
    assert_eq!((left.get(), clone.is_idle()), (0, true));
    clone.block_on(begun);
}

/// A spawned request holds all bounce bytes, and is not polled while a section ends.
#[test]
fn an_unbroken_section_waits_for_no_memory() {
    use super::super::budget::{Budget, Step};
    // 0: the drop of the request; 1: that of the queue.
    for case in 0..2 {
        let (told, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let budget = Budget::new(512);
            let options = QueueOptions::default().memory(Some(budget.clone()));
            let queue = Queue::new(options).unwrap();
            let spawned = queue.for_itself();
            queue.spawn(async move {
                let _held = spawned.reserve(Step::Bounce, 512).await;
                std::future::pending::<()>().await;
            });
            while queue.turn() {}
            assert_eq!(budget.held(), 512);
            let written = Rc::new(Cell::new(false));
            let told_written = written.clone();
            let begun = queue.begin(|queue| async move {
                let storage = super::super::Memory::new(Vec::new());
                {
                    let _unbroken = queue.unbroken(&storage);
                    yield_once().await;
                    let _bytes = queue.reserve(Step::Bounce, 512).await;
                    yield_once().await;
                    told_written.set(true);
                }
                // Outside of it, it waits.
                queue.reserve(Step::Bounce, 512).await;
                told_written.set(false);
            });
            match case {
                0 => {
                    drop(begun);
                    assert_eq!(budget.held(), 512);
                    drop(queue);
                }
                _ => drop(queue),
            }
            assert!(written.get());
            assert_eq!((budget.held(), budget.peak()), (0, 1024));
            told.send(()).unwrap();
        });
        let limit = std::time::Duration::from_secs(60);
        let ended = ended.recv_timeout(limit);
        assert!(ended.is_ok(), "{case}: a drop hangs, or it has failed");
    }
}

#[test]
fn a_panic_of_one_task_loses_no_wake_up_of_others() {
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let ended = Rc::new(Cell::new(0));
    let spawn = |times: u32| {
        let ended = ended.clone();
        queue.spawn(async move {
            for _ in 0..times {
                yield_once().await;
            }
            ended.set(ended.get() + 1);
        })
    };
    // All are woken in one round, some before the one that panics and some after it.
    for turns in [false, true] {
        ended.set(0);
        let before = spawn(1);
        let _panics = queue.spawn(async {
            yield_once().await;
            panic!("as scripted");
        });
        let after = [spawn(1), spawn(5)];
        let drive = || match turns {
            true => while queue.turn() {},
            false => queue.block_on(std::future::pending()),
        };
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(drive));
        assert!(caught.is_err());
        match turns {
            true => while queue.turn() {},
            false => queue.block_on(queue.drain()),
        }
        assert_eq!(ended.get(), 3);
        drop((before, after));
        // The slot of the task that panicked is free again.
        let tasks = queue.inner.tasks.borrow();
        assert_eq!(tasks.free_places(), 4);
    }
}

#[test]
fn a_descriptor_that_is_created_late_reports_earlier_events() {
    use rustix::event::{PollFd, PollFlags, poll};
    for queue in queues() {
        let ended = Rc::new(Cell::new(false));
        let (told, timer) = (ended.clone(), queue.for_itself());
        queue.spawn(async move {
            timer
                .sleep(std::time::Duration::from_millis(5))
                .await
                .unwrap();
            told.set(true);
        });
        while queue.turn() {}
        while !ended.get() {
            let limit = rustix::event::Timespec {
                tv_sec: 60,
                tv_nsec: 0,
            };
            let mut polled = [PollFd::new(&queue, PollFlags::IN)];
            let engine = queue.options().engine;
            assert_eq!(poll(&mut polled, Some(&limit)).unwrap(), 1, "{engine}");
            while queue.turn() {}
        }
    }
}
