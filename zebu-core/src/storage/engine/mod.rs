//! Engines start operations in the kernel: the trait, and the choice between the three: `uring`, `native` (Linux AIO)
//! and `threads`. `op` is an operation, `workers` are threads for calls that block, `watch` waits for descriptors.
#![allow(unsafe_code)]

mod eventfd;
mod native;
mod op;
mod threads;
mod uring;
mod watch;
mod workers;

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::str::FromStr;
use std::sync::Arc;

use native::Native;
pub use op::{Op, OpKind};
use threads::Threads;
use uring::Uring;

/// Names an operation between submission and completion.
pub type Token = u32;

/// An operation that ended: bytes moved, or a negative `errno`.
pub type Completion = (Token, i32);

/// What a wait for a descriptor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Until a read would not block.
    Readable,
    /// Until a write would not block.
    Writable,
}

impl Interest {
    /// The events of `poll(2)`.
    pub(super) fn events(self) -> libc::c_short {
        match self {
            Interest::Readable => libc::POLLIN,
            Interest::Writable => libc::POLLOUT,
        }
    }
}

/// Starts operations and reports their ends, for one thread.
pub trait Engine {
    /// Takes an operation, which is started by the next [`Engine::poll`] at the latest.
    ///
    /// # Safety
    /// The descriptor stays open, and the memory that `op` names (and the
    /// `iovec` array, if any) stays valid and otherwise untouched, until
    /// `poll` reports `token`.
    unsafe fn submit(&mut self, token: Token, op: Op);

    /// Starts everything that was taken. The default leaves that to the next [`Engine::poll`].
    fn hand_over(&mut self) {}

    /// Begins to wait for a descriptor, at the next [`Engine::poll`] at the latest. The completion
    /// is at least 0 when it is ready, also at its end or after an error.
    fn watch(&mut self, token: Token, fd: RawFd, interest: Interest);

    /// Cancels the wait `token`, which was not reported yet. Its completion is reported soon.
    fn unwatch(&mut self, token: Token);

    /// Starts everything that was taken and appends the operations that have ended to `done`.
    ///
    /// If `wait`, and none has ended, blocks until one does or [`Notify::notify`] is called.
    ///
    /// # Errors
    /// If the engine cannot be used any more. The error of an operation is its completion.
    fn poll(&mut self, wait: bool, done: &mut Vec<Completion>) -> io::Result<()>;

    /// Ends a blocking `poll` from other threads.
    fn notifier(&self) -> Arc<dyn Notify>;

    /// As [`Engine::poll`] without waiting. Afterwards [`Engine::descriptor`] becomes readable
    /// when something ends or [`Notify::notify`] is called. True: not everything could be started
    /// yet, and this must be called again without waiting for the descriptor.
    fn arm(&mut self, done: &mut Vec<Completion>) -> io::Result<bool> {
        self.poll(false, done).map(|()| false)
    }

    /// The descriptor for another event loop, see [`Engine::arm`]. It stays open as long as the
    /// engine exists. If this call makes it, it is readable until the next [`Engine::arm`].
    ///
    /// # Errors
    /// If no descriptor is free.
    fn descriptor(&self) -> io::Result<RawFd> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Ends a blocking [`Engine::poll`] from another thread.
pub trait Notify: Send + Sync {
    /// Makes the `poll` that is blocked now, or else the next one, return.
    fn notify(&self);
}

/// Makes the engines of a simulation.
pub type MakeEngine = Rc<dyn Fn() -> Box<dyn Engine>>;

thread_local! {
    static SIMULATED: RefCell<Option<MakeEngine>> = const { RefCell::new(None) };
}

/// From now on every queue that this thread makes has an engine of `make`, and jobs start no
/// threads: a run depends only on these engines and on the storages. `None` ends that.
pub fn simulate_engines(make: Option<MakeEngine>) {
    SIMULATED.set(make);
}

/// Whether this thread has simulated engines ([`simulate_engines`]).
pub fn is_simulated() -> bool {
    SIMULATED.with_borrow(Option::is_some)
}

/// The engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EngineKind {
    /// A pool of threads that make blocking system calls.
    Threads,
    /// Linux native AIO (`io_submit(2)`); asynchronous only with `O_DIRECT`.
    Native,
    /// io_uring.
    IoUring,
}

impl Default for EngineKind {
    /// [`EngineKind::best`].
    fn default() -> Self {
        EngineKind::best()
    }
}

impl EngineKind {
    /// All of them.
    pub const ALL: [EngineKind; 3] = [Self::Threads, Self::Native, Self::IoUring];

    /// io_uring, or threads without it (old kernels, seccomp filters of container runtimes).
    pub fn best() -> EngineKind {
        if is_simulated() {
            return EngineKind::Threads;
        }
        match Uring::new() {
            Ok(_) => EngineKind::IoUring,
            Err(_) => EngineKind::Threads,
        }
    }

    /// The name that `--aio` takes.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Threads => "threads",
            EngineKind::Native => "native",
            EngineKind::IoUring => "io_uring",
        }
    }

    /// Makes an engine for this thread.
    ///
    /// # Errors
    /// If this system does not have it.
    #[doc(hidden)]
    pub fn start(self) -> io::Result<Box<dyn Engine>> {
        if let Some(make) = SIMULATED.with_borrow(Clone::clone) {
            return Ok(make());
        }
        let engine: io::Result<Box<dyn Engine>> = match self {
            EngineKind::Threads => Threads::new().map(|e| Box::new(e) as _),
            EngineKind::Native => Native::new().map(|e| Box::new(e) as _),
            EngineKind::IoUring => Uring::new().map(|e| Box::new(e) as _),
        };
        engine.map_err(|e| {
            io::Error::new(
                e.kind(),
                format!("The {self} I/O engine is not available on this system: {e}"),
            )
        })
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for EngineKind {
    type Err = crate::Error;
    /// [`EngineKind::name`]; else the error is [`Error::Refused`].
    ///
    /// [`Error::Refused`]: crate::Error::Refused
    fn from_str(name: &str) -> crate::Result<Self> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == name);
        kind.ok_or_else(|| {
            let name = crate::printable(name.as_bytes());
            crate::Error::Refused(format!("Invalid aio option: {name}"))
        })
    }
}

#[cfg(test)]
mod tests {
    //! Guards against operations that are lost or reported twice if there are more than an engine
    //! accepts at once, and against a wait that another thread cannot end.
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    /// Reads `count` numbered blocks of a file, all in flight together, and checks that each read
    /// ends once with its bytes.
    pub(super) fn reads_in_flight(engine: &mut dyn Engine, count: u32) {
        const BLOCK: usize = 64;
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..count)
            .flat_map(|n| [n.to_le_bytes(); BLOCK / 4].concat())
            .collect();
        file.write_all(&content).unwrap();
        let mut memory = vec![0u8; content.len()];
        for (token, block) in (0..count).zip(memory.chunks_mut(BLOCK)) {
            let offset = u64::from(token) * BLOCK as u64;
            let op = Op {
                memory: block.as_mut_ptr().cast(),
                segments: 1,
                ..Op::without_memory(OpKind::Read, file.as_raw_fd(), offset, BLOCK as u64)
            };
            // SAFETY: file and memory live until all have ended, below.
            unsafe { engine.submit(token, op) };
        }
        let mut done = Vec::new();
        while done.len() < count as usize {
            engine.poll(true, &mut done).unwrap();
        }
        engine.poll(false, &mut done).unwrap();
        done.sort_unstable();
        let expected: Vec<_> = (0..count).map(|token| (token, BLOCK as i32)).collect();
        assert_eq!(done, expected);
        assert!(memory == content);
    }

    /// The next operation that ends.
    pub(super) fn waits_for(engine: &mut dyn Engine) -> Completion {
        let mut done = Vec::new();
        while done.is_empty() {
            engine.poll(true, &mut done).unwrap();
        }
        assert_eq!(done.len(), 1);
        done[0]
    }

    #[test]
    fn thousands_in_one_batch() {
        for kind in EngineKind::ALL {
            let Ok(mut engine) = kind.start() else {
                eprintln!("skipped: {kind}");
                continue;
            };
            for count in [1, 2, 300, 5000] {
                reads_in_flight(&mut *engine, count);
            }
        }
    }

    #[test]
    fn a_wait_can_be_ended_before_and_after_it_begins() {
        for kind in EngineKind::ALL {
            let Ok(mut engine) = kind.start() else {
                eprintln!("skipped: {kind}");
                continue;
            };
            let notifier = engine.notifier();
            let mut done = Vec::new();
            for _ in 0..3 {
                notifier.notify();
                engine.poll(true, &mut done).unwrap();
            }
            let finished = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !finished.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(2));
                        notifier.notify();
                    }
                });
                for _ in 0..10 {
                    engine.poll(true, &mut done).unwrap();
                }
                finished.store(true, Ordering::Relaxed);
            });
            assert!(done.is_empty());
        }
    }
}
