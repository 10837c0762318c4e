//! What requests and tasks share of an image that is written.
//!
//! The first change of a session waits until the header says, durably, that the content is another one
//! than before. Then blocks that the image has are written in place. An allocating write takes a place
//! behind the end of the file, writes there, and then sets the entry in memory (`write.rs`). Entries
//! reach the disk with the next flush (`commit.rs`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::MIB;
use super::commit::Log;
use super::fields::Guid;
use super::header::{self, Header};
use super::tables::{PIECE, Piece};
use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::drivers::{BoxFuture, Commits, Committed, Ranges};
use crate::lock;
use crate::storage::{self, Queue, Storage};
use crate::{Places, Tail};

/// Sectors of tables that changed at most until they are written back: 1 MiB.
const MOST_DIRTY: usize = 256;

/// An image's state for writing.
#[derive(Debug)]
pub(super) struct Writer {
    pub file: Arc<dyn Storage>,
    pub tail: Arc<Tail>,
    pub places: Places,
    pub(super) commits: Commits,
    /// The blocks whose entry a request is going to change.
    pub blocks: Ranges,
    /// Sectors of the file with entries that changed, by their number, with the pieces that have them.
    /// These stay in memory so.
    pub(super) dirty: Mutex<BTreeMap<u64, Arc<Piece>>>,
    pub(super) log: Log,
    /// The current header.
    header: Mutex<Header>,
    /// The identity that the content gets when it changes.
    content: Mutex<Guid>,
    /// Whether the header has that.
    has_begun: AtomicBool,
    /// What the next commit is to do: begin the session, or end it.
    begins: AtomicBool,
    ends: AtomicBool,
}

impl Writer {
    /// The state of an image whose log is empty. The last block in the file ends at `end`.
    pub(super) fn new(
        file: Arc<dyn Storage>,
        header: Header,
        content: Guid,
        block_size: u64,
        end: u64,
    ) -> Result<Arc<Self>> {
        let tail = Tail::new(file.clone())?;
        let start = end.next_multiple_of(MIB);
        Ok(Arc::new(Writer {
            file,
            places: Places::new(tail.clone(), start, block_size, u64::MAX, []),
            tail,
            commits: Commits::default(),
            blocks: Ranges::default(),
            dirty: Mutex::default(),
            log: Log::new(header.log.clone()),
            header: Mutex::new(header),
            content: Mutex::new(content),
            has_begun: AtomicBool::new(false),
            begins: AtomicBool::new(false),
            ends: AtomicBool::new(false),
        }))
    }

    /// Whether changes need not wait for the header.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Acquire)
    }

    /// What each change begins with. It waits for commits, so the caller holds nothing.
    pub(super) async fn begin(self: &Arc<Self>, queue: &Queue) -> Result<()> {
        self.commits.check()?;
        if !self.has_begun() {
            self.begins.store(true, Ordering::Release);
            return Commits::flush(self, queue).await;
        }
        let is_pressed = lock(&self.dirty).len() > MOST_DIRTY;
        match is_pressed {
            true => Commits::flush(self, queue).await,
            false => Ok(()),
        }
    }

    /// Ends the session: the log is empty, and the file ends with its last block. No request is in
    /// flight.
    pub(super) async fn end(self: &Arc<Self>, queue: &Queue) -> Result<()> {
        {
            let _ends = Ends::new(&self.ends);
            Commits::flush(self, queue).await?;
        }
        self.tail.cut(queue, self.places.shrink()).await
    }

    /// Another session may begin, whose content gets this identity. The one before has ended.
    pub(super) fn renew(&self, content: Guid) {
        *lock(&self.content) = content;
    }

    /// Sets an entry, at `offset` in the file, of a block that the caller holds. Its data are written.
    pub(super) fn set_entry(&self, piece: &Arc<Piece>, offset: u64, entry: u64) {
        // Under the lock: a commit either copies the new entry or finds its sector later.
        let mut dirty = lock(&self.dirty);
        piece[(offset % PIECE / 8) as usize].store(entry, Ordering::Release);
        dirty.insert(offset / super::log::SECTOR, piece.clone());
    }

    /// Replaces the header, durably. If it is dropped midway it is unknown which one is valid: the next
    /// one goes to the same place.
    pub(super) async fn replace_header(
        &self,
        queue: &Queue,
        change: impl FnOnce(&mut Header),
    ) -> Result<()> {
        let mut new = lock(&self.header).next()?;
        change(&mut new);
        let offset = header::OFFSETS[new.place];
        storage::write_slice(&*self.file, queue, offset, &new.encode()).await?;
        self.flush_file(queue).await?;
        *lock(&self.header) = new;
        Ok(())
    }

    pub(super) async fn flush_file(&self, queue: &Queue) -> Result<()> {
        self.commits.flush_file(queue, &*self.file).await
    }

    /// Says in the header that the content changes, before it does.
    async fn begin_session(&self, queue: &Queue) -> Result<()> {
        let (file_write, content) = (Guid::random()?, *lock(&self.content));
        let change = |header: &mut Header| {
            header.file_write = file_write;
            header.data_write = content;
        };
        if !is_broken(Rule::IdentityBeforeContent) {
            self.replace_header(queue, change).await?;
        }
        self.begins.store(false, Ordering::Release);
        self.has_begun.store(true, Ordering::Release);
        Ok(())
    }

    /// Says in the header that the log is empty, after everything is where it belongs.
    async fn end_session(&self, queue: &Queue) -> Result<()> {
        self.has_begun.store(false, Ordering::Release);
        if lock(&self.header).log_id.is_none() {
            return Ok(());
        }
        self.flush_file(queue).await?;
        // Before the header is written: if this is dropped midway, that may say so already.
        self.log.end();
        self.replace_header(queue, |header| header.log_id = None)
            .await
    }
}

/// Commits end the session until it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl<'a> Ends<'a> {
    fn new(ends: &'a AtomicBool) -> Self {
        ends.store(true, Ordering::Release);
        Ends(ends)
    }
}

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Committed for Writer {
    fn commits(&self) -> &Commits {
        &self.commits
    }

    fn commit<'a>(&'a self, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            if self.begins.load(Ordering::Acquire) && !self.has_begun() {
                self.begin_session(queue).await?;
            }
            self.commit_entries(queue).await?;
            match self.ends.load(Ordering::Acquire) {
                true => self.end_session(queue).await,
                false => Ok(()),
            }
        })
    }
}
