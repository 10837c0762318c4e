//! How operations reach the kernel: the trait that the three engines
//! implement, and the choice between them.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;

use super::native::Native;
use super::op::Op;
use super::threads::Threads;
use super::uring::Uring;

/// Names an operation between submission and completion.
pub type Token = u32;

/// An operation that ended: bytes moved, or a negative `errno`.
pub type Completion = (Token, i32);

/// Starts operations and reports their ends, for one thread.
pub trait Engine {
    /// Takes an operation. It may be started at once or at the next
    /// [`Engine::poll`].
    ///
    /// # Safety
    /// The descriptor stays open, and the memory that `op` names (and the
    /// `iovec` array, if any) stays valid and otherwise untouched, until
    /// `poll` reports `token`.
    unsafe fn submit(&mut self, token: Token, op: Op);

    /// Starts everything taken so far and appends what has ended to `done`.
    ///
    /// If `wait`, and nothing has ended yet, blocks until something does or
    /// until [`Notify::notify`] is called. Only an engine that cannot work any
    /// more returns an error; an operation's own error is in its completion.
    fn poll(&mut self, wait: bool, done: &mut Vec<Completion>) -> io::Result<()>;

    /// What other threads use to end a blocking `poll`.
    fn notifier(&self) -> Arc<dyn Notify>;
}

/// Ends a blocking [`Engine::poll`] from another thread.
pub trait Notify: Send + Sync {
    /// Makes the `poll` that is blocked now, or else the next one, return.
    fn notify(&self);
}

/// The three ways to do I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum EngineKind {
    /// A pool of threads that make blocking system calls.
    Threads,
    /// Linux native AIO (`io_submit(2)`); asynchronous only with `O_DIRECT`.
    Native,
    /// io_uring.
    #[default]
    IoUring,
}

impl EngineKind {
    /// All of them.
    pub const ALL: [EngineKind; 3] = [Self::Threads, Self::Native, Self::IoUring];

    /// The best that this kernel offers: io_uring, or threads where it is not
    /// there (old kernels, or a seccomp filter as container runtimes set).
    pub fn best() -> EngineKind {
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

    /// Sets the engine up. The error says which engine is missing.
    pub fn start(self) -> io::Result<Box<dyn Engine>> {
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
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| format!("Invalid aio option: {name}"))
    }
}
