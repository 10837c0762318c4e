//! The options of a queue.

use std::time::Duration;

use super::super::Budget;
use super::super::engine::EngineKind;

options! {
    /// Options of a queue.
    #[derive(Clone, Debug)]
    pub struct QueueOptions {
        /// The engine.
        pub engine: EngineKind,
        /// Parts of one request in flight at once, at least 1.
        pub parts: usize,
        /// Whether this thread inflates compressed clusters instead of the library's workers: for
        /// as many queues as cores.
        pub inflate_inline: bool,
        /// Whether this thread executes all writes to the page cache, reads of what is there, and
        /// searches for holes, instead of the engine. For jobs with a queue on each core: the bytes
        /// stay in the processor's cache.
        pub inline_buffered: bool,
        /// With io_uring, a thread of the kernel executes one of so many large reads through the
        /// page cache, so that two threads copy; 0: none. As fio's option of that name. For threads
        /// that do nothing else with the bytes.
        pub force_async: u32,
        /// Operations that are submitted to the kernel together at most, at least 1; as QEMU's
        /// option `aio-max-batch`. All are submitted at the end of a turn of the queue's loop.
        /// Operations that continue each other count as one.
        pub aio_max_batch: u32,
        /// How long a server's thread polls at most before it sleeps; zero: it does not.
        pub poll: Duration,
        /// What requests may take for copies of clusters, inflated data and bounce buffers, shared
        /// with other queues; they wait when it is used up. None: as much as they need. With it,
        /// every request must be polled until it ends or be dropped: one that is kept or forgotten
        /// may hold memory that others wait for.
        pub memory: Option<Budget>,
        /// Bytes of idle buffers that are kept for the next requests at most.
        pub keep: usize,
    }
}

impl QueueOptions {
    /// The default of [`QueueOptions::poll`] in servers: longer than a wake-up takes, and shorter
    /// than a request of a fast disk.
    pub const SERVERS_POLL: Duration = Duration::from_micros(40);
}

impl Default for QueueOptions {
    fn default() -> Self {
        QueueOptions {
            engine: EngineKind::best(),
            parts: 8,
            inflate_inline: false,
            inline_buffered: false,
            force_async: 0,
            aio_max_batch: 2,
            poll: Duration::ZERO,
            memory: None,
            keep: 8 << 20,
        }
    }
}
