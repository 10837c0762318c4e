//! How the requests of one queue are treated.

use std::time::Duration;

use super::super::engine::EngineKind;

options! {
    /// How requests of one queue are treated.
    #[derive(Clone, Debug)]
    pub struct QueueOptions {
        /// The engine.
        pub engine: EngineKind,
        /// Parts of one request in flight at once, at least 1.
        pub parts: usize,
        /// Whether compressed clusters are inflated on this thread instead of on
        /// the library's workers. Right when there are as many queues as cores.
        pub inflate_inline: bool,
        /// Whether this thread executes all writes to the page cache, and reads of what lies
        /// there, itself instead of the engine. Right for jobs that have a queue on each core:
        /// the bytes stay in the processor's cache.
        pub inline_buffered: bool,
        /// With io_uring, every so many large reads through the page cache are executed by a thread
        /// of the kernel, which copies beside this one; 0: none. As fio's option of that name. Right
        /// where this thread does nothing else with the bytes.
        pub force_async: u32,
        /// How many operations are handed to the kernel together at most, as QEMU's option
        /// `aio-max-batch`; at least 1. What is started in one turn of the queue's loop is handed
        /// over at its end at the latest. Operations that continue each other count as one.
        pub aio_max_batch: u32,
        /// How long a server's thread polls for more to do before it sleeps, at most
        /// (`Polling`); zero: not at all.
        pub poll: Duration,
    }
}

impl QueueOptions {
    /// [`QueueOptions::poll`] as servers have it by default: longer than it
    /// takes to be woken, and shorter than a fast disk takes for a request.
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
        }
    }
}
