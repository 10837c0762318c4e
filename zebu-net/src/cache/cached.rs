//! A storage whose blocks are kept in a cache.
//!
//! A block that several requests read is loaded once, by a task that ends with the first of them:
//! from its file, else from the storage below, and then it is stored. Blocks beside each other that
//! have no file are one read of the storage below. If a request is dropped, another one that waits
//! loads its blocks, since the queue of the first one need not be driven any more.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use futures_channel::oneshot;

use super::block::Key;
use super::{BLOCK, BlockCache};
use crate::error::WithErrno;
use crate::storage::{Begun, Check, Iov, OpKind, Queue, Started, Storage, read_vec};

/// Blocks that a request waits for at once.
const AT_ONCE: u64 = 16;
/// Blocks that are kept in memory, of those that requests want only parts of.
const RECENT: usize = 32;

/// A storage with a cache over it.
#[derive(Debug)]
pub(super) struct Cached(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    cache: BlockCache,
    key: Key,
    below: Arc<dyn Storage>,
    length: u64,
    check: Option<Arc<dyn Check>>,
    state: Mutex<State>,
}

type Block = Arc<[u8]>;
type Loaded = Result<Block, LoadError>;

#[derive(Debug, Default)]
struct State {
    /// The requests that wait for each block that is being loaded.
    loading: HashMap<u64, Vec<oneshot::Sender<Loaded>>>,
    /// Blocks in memory, those that were used last at the end.
    recent: VecDeque<(u64, Block)>,
}

/// An error of a load, for all requests that waited for it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
struct LoadError(Arc<io::Error>);

impl From<LoadError> for io::Error {
    fn from(error: LoadError) -> Self {
        let (kind, errno) = (error.0.kind(), crate::error::io_errno(&error.0));
        let source = Box::new(error);
        io::Error::new(kind, WithErrno { errno, source })
    }
}

impl Cached {
    pub fn new(
        cache: BlockCache,
        below: Arc<dyn Storage>,
        key: Key,
        check: Option<Arc<dyn Check>>,
    ) -> io::Result<Cached> {
        Ok(Cached(Arc::new(Shared {
            cache,
            key,
            length: below.len()?,
            below,
            check,
            state: Mutex::default(),
        })))
    }
}

/// How a request gets a block.
enum Part {
    Here(Block),
    Later(oneshot::Receiver<Loaded>),
}

impl Part {
    /// The block. None: the request that loaded it was dropped.
    async fn wait(self) -> Option<Loaded> {
        match self {
            Part::Here(data) => Some(Ok(data)),
            Part::Later(loaded) => loaded.await.ok(),
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        crate::lock(&self.state)
    }

    /// Bytes of blocks.
    fn bytes(&self, blocks: Range<u64>) -> Range<u64> {
        blocks.start * BLOCK..(blocks.end * BLOCK).min(self.length)
    }

    async fn read(self: Arc<Self>, queue: Queue, offset: u64, iov: Iov) -> io::Result<usize> {
        let end = self.length.min(offset.saturating_add(iov.len() as u64));
        let mut at = offset;
        while at < end {
            let next = end.min((at / BLOCK + AT_ONCE) * BLOCK);
            let memory = iov.slice((at - offset) as usize, (next - at) as usize);
            self.read_some(&queue, at..next, &memory).await?;
            at = next;
        }
        Ok(end.saturating_sub(offset) as usize)
    }

    /// Reads a range of few blocks.
    async fn read_some(
        self: &Arc<Self>,
        queue: &Queue,
        range: Range<u64>,
        iov: &Iov,
    ) -> io::Result<()> {
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let (parts, _loading) = self.begin(queue, blocks);
        for (nth, part) in parts {
            let block = self.bytes(nth..nth + 1);
            let (from, to) = (range.start.max(block.start), range.end.min(block.end));
            let memory = iov.slice((from - range.start) as usize, (to - from) as usize);
            let data = match part.wait().await {
                Some(loaded) => loaded?,
                None => self.load(queue, nth).await?,
            };
            memory.copy_from(&data[(from - block.start) as usize..(to - block.start) as usize]);
            if to - from < block.end - block.start {
                self.state().keep(nth, data);
            }
        }
        Ok(())
    }

    /// A block that another request has given up.
    async fn load(self: &Arc<Self>, queue: &Queue, nth: u64) -> Loaded {
        loop {
            let (mut parts, _loading) = self.begin(queue, nth..nth + 1);
            if let Some((_, part)) = parts.pop()
                && let Some(loaded) = part.wait().await
            {
                return loaded;
            }
        }
    }

    /// Finds blocks in memory, and begins to load those that no other request loads; that ends
    /// with the second result.
    fn begin(
        self: &Arc<Self>,
        queue: &Queue,
        blocks: Range<u64>,
    ) -> (Vec<(u64, Part)>, Option<Begun<()>>) {
        let mut parts = Vec::new();
        let mut missing = Vec::new();
        let mut state = self.state();
        for nth in blocks {
            let part = match state.recent.iter().find(|recent| recent.0 == nth) {
                Some((_, data)) => Part::Here(data.clone()),
                None => {
                    let (sender, receiver) = oneshot::channel();
                    let waiting = state.loading.entry(nth).or_default();
                    if waiting.is_empty() {
                        missing.push(nth);
                    }
                    waiting.push(sender);
                    Part::Later(receiver)
                }
            };
            parts.push((nth, part));
        }
        drop(state);
        if missing.is_empty() {
            return (parts, None);
        }
        let loading = Loading {
            shared: self.clone(),
            blocks: missing,
        };
        (parts, Some(queue.begin(|queue| loading.load(queue))))
    }

    /// Reads blocks of the storage below.
    async fn fetch(&self, queue: &Queue, blocks: Range<u64>) -> io::Result<Vec<u8>> {
        let range = self.bytes(blocks);
        let length = (range.end - range.start) as usize;
        let bytes = read_vec(&*self.below, queue, range.start, length).await?;
        if let Some(check) = &self.check {
            check.check().await?;
        }
        Ok(bytes)
    }
}

impl State {
    /// Keeps a block in memory.
    fn keep(&mut self, nth: u64, data: Block) {
        self.recent.retain(|recent| recent.0 != nth);
        self.recent.push_back((nth, data));
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }
}

/// Blocks that are being loaded. If this is dropped, a request that waits for them does it.
struct Loading {
    shared: Arc<Shared>,
    blocks: Vec<u64>,
}

impl Loading {
    /// Loads the blocks from their files, or else from the storage below.
    async fn load(mut self, queue: Queue) {
        let shared = self.shared.clone();
        let reads: Vec<_> = self
            .blocks
            .iter()
            .map(|nth| shared.read_file(*nth))
            .collect();
        let mut missing = Vec::new();
        for (nth, read) in self.blocks.clone().into_iter().zip(reads) {
            match read.await {
                Some(data) => self.end(nth, Ok(data.into())),
                None => missing.push(nth),
            }
        }
        let mut fetches = Vec::new();
        for run in missing.chunk_by(|nth, next| nth + 1 == *next) {
            self.blocks.retain(|nth| !run.contains(nth));
            let loading = Loading {
                shared: shared.clone(),
                blocks: run.to_vec(),
            };
            fetches.push(queue.begin(|queue| loading.fetch(queue)));
        }
        for fetch in fetches {
            fetch.await;
        }
    }

    /// Loads the blocks, which are beside each other, from the storage below.
    async fn fetch(mut self, queue: Queue) {
        let (Some(first), Some(last)) = (self.blocks.first(), self.blocks.last()) else {
            return;
        };
        let shared = self.shared.clone();
        let blocks = *first..last + 1;
        let bytes = match shared.fetch(&queue, blocks.clone()).await {
            Ok(bytes) => bytes,
            Err(error) => {
                let error = LoadError(Arc::new(error));
                return blocks.for_each(|nth| self.end(nth, Err(error.clone())));
            }
        };
        let stores: Vec<_> = (blocks.zip(bytes.chunks(BLOCK as usize)))
            .map(|(nth, data)| {
                let data = Block::from(data);
                let store = shared.cache.store(&shared.key, nth, data.clone());
                (nth, data, store)
            })
            .collect();
        // A request waits until its blocks are stored: so they are when a program ends.
        for (nth, data, store) in stores {
            store.await;
            self.end(nth, Ok(data));
        }
    }

    /// Passes a block on to the requests that wait for it.
    fn end(&mut self, nth: u64, loaded: Loaded) {
        self.blocks.retain(|other| *other != nth);
        let waiting = self.shared.state().loading.remove(&nth);
        for sender in waiting.into_iter().flatten() {
            // An error: the request was dropped.
            let _ = sender.send(loaded.clone());
        }
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        let dropped: Vec<_> = (self.blocks.iter())
            .map(|nth| state.loading.remove(nth))
            .collect();
        drop(state);
        // Without the lock: this wakes requests.
        drop(dropped);
    }
}

impl Shared {
    /// The data of a block's file; the read begins at once.
    fn read_file(&self, nth: u64) -> impl Future<Output = Option<Vec<u8>>> + use<> {
        let bytes = self.bytes(nth..nth + 1);
        let length = (bytes.end - bytes.start) as usize;
        self.cache.read(&self.key, nth, length)
    }
}

// SAFETY: the memory of a read is used only while its future is polled; all else is passed on to a
// storage that keeps the promises.
#[allow(unsafe_code)]
unsafe impl Storage for Cached {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        match (kind, memory) {
            (OpKind::Read, Some(iov)) => {
                let read = self.0.clone().read(queue.for_itself(), offset, iov.clone());
                Started::later(read)
            }
            (OpKind::Extent | OpKind::Flush | OpKind::SetLength, _) => {
                // SAFETY: as the caller promised; `self` keeps the storage.
                unsafe { self.0.below.start(queue, kind, offset, length, memory) }
            }
            _ => Started::done(Err(io::Error::from_raw_os_error(libc::EROFS))),
        }
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&*self.0.below)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.length)
    }
}
