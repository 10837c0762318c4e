//! Standard input, read by a thread, so that requests in flight proceed while the session waits for
//! a command.

use std::ffi::{OsStr, OsString};
use std::future::poll_fn;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread;

/// Bytes of one read.
const CHUNK: usize = 64 << 10;
/// Longer lines are cut, to bound the memory. They are not commands.
const MAX_LINE: usize = 256 << 10;

/// The waker for when something has arrived.
type Waiting = Arc<Mutex<Option<Waker>>>;

/// The lines of standard input.
pub struct Input {
    chunks: Receiver<Vec<u8>>,
    waiting: Waiting,
    /// Taken from the channel, lines before `start` handed out.
    buffer: Vec<u8>,
    start: usize,
    ended: bool,
}

impl Input {
    /// Starts the thread. The error is that there can be none.
    pub fn start() -> io::Result<Input> {
        let (sender, chunks) = sync_channel(2);
        let waiting = Waiting::default();
        let theirs = waiting.clone();
        thread::Builder::new().name("stdin".into()).spawn(move || {
            feed(sender, &theirs);
            // The closed channel marks the end.
            wake(&theirs);
        })?;
        Ok(Input {
            chunks,
            waiting,
            buffer: Vec::new(),
            start: 0,
            ended: false,
        })
    }

    /// Whether [`Input::take_line`] returns without waiting.
    pub fn is_ready(&self) -> bool {
        let rest = &self.buffer[self.start..];
        self.ended || rest.contains(&b'\n') || rest.len() > MAX_LINE
    }

    /// The next line, without its end; `None` at the end of the input. Does not wait: see
    /// [`Input::is_ready`].
    pub fn take_line(&mut self) -> Option<OsString> {
        let rest = &self.buffer[self.start..];
        let (length, skip) = match rest.iter().position(|b| *b == b'\n') {
            Some(at) => (at, at + 1),
            None if rest.is_empty() => return None,
            None => (rest.len(), rest.len()),
        };
        let line = OsStr::from_bytes(&rest[..length]).to_owned();
        self.start += skip;
        Some(line)
    }

    /// Waits on this thread until the next line is there.
    pub fn wait(&mut self) {
        while !self.is_ready() {
            match self.chunks.recv() {
                Ok(chunk) => self.append(&chunk),
                Err(_) => self.ended = true,
            }
        }
    }

    /// Waits for the next line while the queue that drives this future drives other requests, too.
    pub async fn wait_beside(&mut self) {
        while !self.is_ready() {
            let (chunks, waiting) = (&self.chunks, &self.waiting);
            let next = poll_fn(|context| {
                // In this order a chunk that comes in between wakes us.
                *lock(waiting) = Some(context.waker().clone());
                match chunks.try_recv() {
                    Ok(chunk) => Poll::Ready(Some(chunk)),
                    Err(TryRecvError::Disconnected) => Poll::Ready(None),
                    Err(TryRecvError::Empty) => Poll::Pending,
                }
            });
            match next.await {
                Some(chunk) => self.append(&chunk),
                None => self.ended = true,
            }
        }
    }

    fn append(&mut self, chunk: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(chunk);
    }
}

/// Forwards the input until its end, or until the receiver was dropped.
fn feed(sender: SyncSender<Vec<u8>>, waiting: &Waiting) {
    let mut stdin = io::stdin().lock();
    loop {
        let chunk = read_chunk(&mut stdin);
        if chunk.is_empty() || sender.send(chunk).is_err() {
            return;
        }
        wake(waiting);
    }
}

/// The next bytes; empty at the end and after an error.
fn read_chunk(stdin: &mut impl Read) -> Vec<u8> {
    let mut chunk = vec![0; CHUNK];
    loop {
        match stdin.read(&mut chunk) {
            Ok(count) => {
                chunk.truncate(count);
                return chunk;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Vec::new(),
        }
    }
}

fn lock(waiting: &Waiting) -> std::sync::MutexGuard<'_, Option<Waker>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wake(waiting: &Waiting) {
    let waker = lock(waiting).take();
    if let Some(waker) = waker {
        waker.wake();
    }
}
