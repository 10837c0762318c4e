//! How a queue is driven: the ways of `docs/embedding.md`, each as an executor of one future.

use std::future::Future;
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zebu::storage::Queue;

/// By whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driven {
    /// `Queue::block_on`.
    BlockOn,
    /// `Queue::turn` when its descriptor is readable.
    Descriptor,
    /// `Queue::turn` in a loop.
    Hand,
}

pub const WAYS: [Driven; 3] = [Driven::BlockOn, Driven::Descriptor, Driven::Hand];

/// After so many milliseconds a queue that reports nothing counts as hanging.
const NEVER: i64 = 60_000;
/// Another thread may wake the future, which the queue does not report.
const LOOK: i64 = 10;

/// Records whether a future was woken.
pub struct Woken(pub AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Whether the queue's descriptor is readable, or becomes so within some milliseconds.
pub fn is_readable(queue: &Queue, within: i64) -> bool {
    let limit = Timespec {
        tv_sec: within / 1000,
        tv_nsec: within % 1000 * 1_000_000,
    };
    let mut fds = [PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)];
    loop {
        match poll(&mut fds, Some(&limit)) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.unwrap() > 0,
        }
    }
}

impl Driven {
    /// Drives the queue once, and waits if it must, at most until a future was woken.
    pub fn step(self, queue: &Queue, woken: &Woken) {
        match self {
            Driven::BlockOn => {
                let mut again = false;
                queue.block_on(std::future::poll_fn(|context| {
                    if again {
                        return Poll::Ready(());
                    }
                    again = true;
                    context.waker().wake_by_ref();
                    Poll::Pending
                }));
            }
            Driven::Descriptor => {
                for _ in 0..NEVER / LOOK {
                    if is_readable(queue, LOOK) {
                        while queue.turn() {}
                        return;
                    }
                    if woken.0.load(Ordering::SeqCst) {
                        return;
                    }
                }
                panic!("{}: nothing is reported", queue.options().engine);
            }
            Driven::Hand => {
                queue.turn();
                std::thread::yield_now();
            }
        }
    }

    /// Waits for `future`, which is polled outside of the queue unless it is `block_on` that waits.
    pub fn run<T>(self, queue: &Queue, future: impl Future<Output = T>) -> T {
        if self == Driven::BlockOn {
            return queue.block_on(future);
        }
        let mut future = pin!(future);
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        let waker = Waker::from(woken.clone());
        while queue.turn() {}
        loop {
            while !woken.0.swap(false, Ordering::SeqCst) {
                self.step(queue, &woken);
            }
            if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return value;
            }
        }
    }
}
