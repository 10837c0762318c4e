//! The requests of a case, and tasks that poll them only when they were woken.

use super::*;

pub const SECTOR: usize = 512;
/// The number of turns that counts as a hang. (With real files there is a watchdog instead.)
pub const TURNS: usize = 50_000;

/// How a request is abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Its future is dropped.
    Drop,
    /// It is not polled until all others have ended.
    Keep,
    /// Its future is leaked (`mem::forget`).
    Forget,
    /// All requests of its queue are dropped, and the queue.
    End,
}

pub const HOWS: [How; 4] = [How::Drop, How::Keep, How::Forget, How::End];

/// A request. Ranges are in sectors.
#[derive(Clone, Debug)]
pub enum What {
    Read(Range<usize>),
    Status(Range<usize>),
    Write(Range<usize>, u8),
    Compressed(Range<usize>, u8),
    Zero(Range<usize>, Zeroing),
    ZeroQuickly(Range<usize>),
    Discard(Range<usize>),
    Flush,
}

impl What {
    /// The range that it changes, and the byte that fills it.
    pub fn change(&self) -> Option<(Range<usize>, u8)> {
        match self {
            What::Write(range, tag) | What::Compressed(range, tag) => Some((range.clone(), *tag)),
            What::Zero(range, _) | What::ZeroQuickly(range) | What::Discard(range) => {
                Some((range.clone(), 0))
            }
            What::Read(_) | What::Status(_) | What::Flush => None,
        }
    }
}

pub fn offset(range: &Range<usize>) -> u64 {
    (range.start * SECTOR) as u64
}

pub fn length(range: &Range<usize>) -> usize {
    range.len() * SECTOR
}

/// The result of a request: the bytes of a read.
pub type Done = zebu::Result<Vec<u8>>;
pub type Running<'a> = Pin<Box<dyn Future<Output = Done> + 'a>>;

pub fn start<'a>(device: &'a Device, queue: &'a Queue, what: &What) -> Running<'a> {
    let what = what.clone();
    Box::pin(async move {
        let tagged = |range: &Range<usize>, tag: u8| {
            let mut buffer = Buffer::new(length(range));
            buffer.fill(tag);
            buffer
        };
        let mut read = Vec::new();
        match what {
            What::Read(range) => {
                let buffer = Buffer::new(length(&range));
                let (buffer, result) = device
                    .read_buffer(queue, offset(&range), buffer, length(&range))
                    .await;
                result?;
                read = buffer[..length(&range)].to_vec();
            }
            What::Status(range) => {
                device
                    .status(queue, offset(&range), length(&range) as u64)
                    .await?;
            }
            What::Write(range, tag) => {
                let (at, count) = (offset(&range), length(&range));
                let buffer = tagged(&range, tag);
                device.write_buffer(queue, at, buffer, count).await.1?;
            }
            What::Compressed(range, tag) => {
                let mut buffer = tagged(&range, tag);
                // SAFETY: the buffer is part of the future and outlives the request.
                let iov = unsafe { buffer.iov() }.slice(0, length(&range));
                device.write_compressed(queue, offset(&range), &iov).await?;
            }
            What::Zero(range, zeroing) => {
                let count = length(&range) as u64;
                device
                    .write_zeroes(queue, offset(&range), count, zeroing)
                    .await?;
            }
            What::ZeroQuickly(range) => {
                let count = length(&range) as u64;
                let result = device
                    .write_zeroes_quickly(queue, offset(&range), count, Zeroing::Unmap)
                    .await;
                match result {
                    Err(zebu::Error::Io(e)) if e.raw_os_error() == Some(95) => {
                        device
                            .write_zeroes(queue, offset(&range), count, Zeroing::Keep)
                            .await?;
                    }
                    other => other?,
                }
            }
            What::Discard(range) => {
                let count = length(&range) as u64;
                device.discard(queue, offset(&range), count).await?;
            }
            What::Flush => device.flush(queue).await?,
        }
        Ok(read)
    })
}

/// A request in flight.
pub struct Task<'a> {
    pub what: What,
    pub running: Option<Running<'a>>,
    pub woken: Arc<Woken>,
    /// Polls until it is abandoned; None: it is not.
    pub left: Option<usize>,
}

impl<'a> Task<'a> {
    pub fn new(device: &'a Device, queue: &'a Queue, what: What) -> Self {
        Task {
            running: Some(start(device, queue, &what)),
            what,
            woken: Arc::new(Woken(AtomicBool::new(true))),
            left: None,
        }
    }

    pub fn all(device: &'a Device, queue: &'a Queue, all: Vec<What>) -> Vec<Self> {
        let new = |what| Task::new(device, queue, what);
        all.into_iter().map(new).collect()
    }

    /// Polls it if it was woken and is not abandoned.
    pub fn poll(&mut self) -> Option<Done> {
        let running = self.running.as_mut()?;
        if self.left == Some(0) || !self.woken.0.swap(false, Ordering::SeqCst) {
            return None;
        }
        self.left = self.left.map(|left| left - 1);
        let waker = Waker::from(self.woken.clone());
        match running.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => None,
            Poll::Ready(done) => {
                self.running = None;
                Some(done)
            }
        }
    }
}

/// One turn of a queue: polls each of these tasks at most once, and enters the engine once.
pub fn turn(queue: &Queue, tasks: &mut [Task<'_>], end: &mut dyn FnMut(&What, Done)) {
    let mut again = false;
    queue.block_on(poll_fn(|context| {
        if again {
            return Poll::Ready(());
        }
        again = true;
        for task in tasks.iter_mut() {
            if let Some(done) = task.poll() {
                end(&task.what, done);
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }));
}
