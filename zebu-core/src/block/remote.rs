//! A device for servers on async runtimes: its futures are `Send`, and threads of the library do
//! the I/O.

use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::thread::JoinHandle;

use futures_channel::{mpsc, oneshot};

use super::{SharedDevice, Status, Zeroing};
use crate::storage::{Buffer, Iov, Queue, QueueOptions};
use crate::{Error, Result};

/// Makes the future of a request, which the queue of a worker drives.
type Work = Box<dyn FnOnce(Queue, SharedDevice) -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// A device that any thread may use, of any runtime.
///
/// A number of threads with a [`Queue`] each execute the requests. Their futures are
/// `Send + 'static` and own their buffers. A future that is dropped does not stop its request.
/// Requests are not limited in number: the caller bounds the memory that they take.
///
/// Other users of the [`SharedDevice`], with queues of their own, may go on beside it: a VMM that
/// serves a guest and resizes the disk, say.
///
/// ```
/// # use std::sync::Arc;
/// use zebu::block::{Device, OpenOptions, Remote, SharedDevice};
/// use zebu::storage::{Memory, Queue, QueueOptions};
///
/// # let storage = Arc::new(Memory::new(vec![7; 1 << 20]));
/// let queue = Queue::new(QueueOptions::default())?;
/// let options = OpenOptions::default().format(Some("raw".parse()?));
/// let device = Device::from_storage(&queue, storage, &options)?;
/// let device = SharedDevice::new(device);
/// let remote = Remote::new(device.clone(), 2, &QueueOptions::default())?;
/// let read = remote.read(4096, 512); // await it on any runtime
/// # let buffer = queue.block_on(read)?;
/// # assert_eq!(buffer.as_ref(), [7; 512]);
/// remote.close()?;
/// # Ok::<(), zebu::Error>(())
/// ```
#[derive(Debug)]
pub struct Remote {
    device: SharedDevice,
    workers: Vec<Worker>,
    next: AtomicUsize,
}

#[derive(Debug)]
struct Worker {
    work: mpsc::UnboundedSender<Work>,
    thread: JoinHandle<()>,
}

/// The result of a request to a [`Remote`].
#[derive(Debug)]
#[must_use = "the request is executed, and its error is lost"]
pub struct RemoteRequest<T>(oneshot::Receiver<Result<T>>);

impl<T> Future for RemoteRequest<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        Pin::new(&mut self.0).poll(context).map(|result| {
            result.unwrap_or_else(|_| {
                let why = "the request has panicked";
                Err(Error::Io(io::Error::other(why)))
            })
        })
    }
}

impl Remote {
    /// Starts `threads` threads, at least one, each with a queue of these options.
    ///
    /// # Errors
    ///
    /// If a thread or a queue cannot be made.
    pub fn new(device: SharedDevice, threads: usize, options: &QueueOptions) -> io::Result<Remote> {
        let mut remote = Remote {
            device,
            workers: Vec::new(),
            next: AtomicUsize::new(0),
        };
        for number in 0..threads.max(1) {
            let (work, requests) = mpsc::unbounded();
            let (started, has_started) = std::sync::mpsc::channel();
            let (device, options) = (remote.device.clone(), options.clone());
            let thread = std::thread::Builder::new()
                .name(format!("zebu-remote-{number}"))
                .spawn(move || match Queue::new(options) {
                    Ok(queue) => {
                        let _ = started.send(Ok(()));
                        execute(&queue, &device, requests);
                    }
                    Err(e) => {
                        let _ = started.send(Err(e));
                    }
                })?;
            let result = has_started.recv().map_err(io::Error::other);
            remote.workers.push(Worker { work, thread });
            result??;
        }
        Ok(remote)
    }

    /// The device, for what needs no I/O ([`SharedDevice::enter`]) and for other users.
    pub fn device(&self) -> &SharedDevice {
        &self.device
    }

    /// Executes the future that `work` makes on one of the threads: for requests that have no
    /// method here.
    ///
    /// ```
    /// # use zebu::{Device, Format, Memory, OpenOptions, Preallocation, Queue, Remote, SharedDevice};
    /// # let queue = Queue::new(Default::default())?;
    /// # let storage = std::sync::Arc::new(Memory::new(vec![0; 1 << 20]));
    /// # let options = OpenOptions::default().format(Some(Format::RAW)).write(true);
    /// # let device = SharedDevice::new(Device::from_storage(&queue, storage, &options)?);
    /// # let remote = Remote::new(device, 1, &Default::default())?;
    /// let resize = remote.run(|queue, device| async move {
    ///     device.resize(&queue, 2 << 20, Preallocation::Off).await
    /// });
    /// # queue.block_on(resize)?;
    /// # Ok::<(), zebu::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Of the request: that of the future, or [`Error::Io`] if it has panicked.
    pub fn run<T, F>(
        &self,
        work: impl FnOnce(Queue, SharedDevice) -> F + Send + 'static,
    ) -> RemoteRequest<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + 'static,
    {
        let (result, request) = oneshot::channel();
        let work: Work = Box::new(move |queue, device| {
            Box::pin(async move {
                // The caller may have dropped its future.
                let _ = result.send(work(queue, device).await);
            })
        });
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        let _ = self.workers[next % self.workers.len()]
            .work
            .unbounded_send(work);
        RemoteRequest(request)
    }

    /// The `length` bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// Of the request, as of all that follow: those of the method of [`Device`](super::Device),
    /// [`Error::Refused`] after [`SharedDevice::close`], and those of [`Remote::run`].
    pub fn read(&self, offset: u64, length: usize) -> RemoteRequest<Buffer> {
        self.run(move |queue, device| async move {
            let device = device.enter().await?;
            // Not before: the length may be anything.
            device.check_range(offset, length as u64)?;
            let buffer = Buffer::try_new(length)?;
            let (buffer, result) = device.read_buffer(&queue, offset, buffer, length).await;
            result.map(|()| buffer)
        })
    }

    /// Writes `bytes` from `offset` on, and gives them back.
    ///
    /// # Errors
    ///
    /// As of [`Remote::read`].
    pub fn write<B>(&self, offset: u64, bytes: B) -> RemoteRequest<B>
    where
        B: AsRef<[u8]> + Send + 'static,
    {
        self.run(move |queue, device| async move {
            let device = device.enter().await?;
            {
                let bytes = bytes.as_ref();
                // SAFETY: the bytes are in this future, which stays where it is, until the write
                // has ended; a write only reads the memory.
                #[allow(unsafe_code)]
                let iov = unsafe { Iov::from_raw(bytes.as_ptr().cast_mut(), bytes.len()) };
                device.write(&queue, offset, &iov).await?;
            }
            Ok(bytes)
        })
    }

    /// [`Device::write_zeroes`](super::Device::write_zeroes).
    ///
    /// # Errors
    ///
    /// As of [`Remote::read`].
    pub fn write_zeroes(&self, offset: u64, length: u64, zeroing: Zeroing) -> RemoteRequest<()> {
        self.run(move |queue, device| async move {
            let device = device.enter().await?;
            device.write_zeroes(&queue, offset, length, zeroing).await
        })
    }

    /// [`Device::discard`](super::Device::discard).
    ///
    /// # Errors
    ///
    /// As of [`Remote::read`].
    pub fn discard(&self, offset: u64, length: u64) -> RemoteRequest<()> {
        self.run(move |queue, device| async move {
            let device = device.enter().await?;
            device.discard(&queue, offset, length).await
        })
    }

    /// [`Device::flush`](super::Device::flush): every write that has ended before this call is
    /// durable.
    ///
    /// # Errors
    ///
    /// As of [`Remote::read`].
    pub fn flush(&self) -> RemoteRequest<()> {
        self.run(move |queue, device| async move { device.enter().await?.flush(&queue).await })
    }

    /// [`Device::status`](super::Device::status).
    ///
    /// # Errors
    ///
    /// As of [`Remote::read`].
    pub fn status(&self, offset: u64, length: u64) -> RemoteRequest<Status> {
        self.run(move |queue, device| async move {
            let device = device.enter().await?;
            device.status(&queue, offset, length).await
        })
    }

    /// Waits for the requests in flight, ends the threads and closes the device for all its users
    /// ([`SharedDevice::close`]). Blocks. Dropping the `Remote` leaves the device open for others.
    ///
    /// # Errors
    ///
    /// Those of [`SharedDevice::close`], or of making a queue. [`Error::Refused`] within a request
    /// of this `Remote`: it would wait for itself.
    pub fn close(self) -> Result<()> {
        if self.is_within() {
            let why = "A request cannot close the Remote that executes it";
            return Err(Error::Refused(why.into()));
        }
        let device = self.device.clone();
        drop(self);
        let queue = Queue::new(QueueOptions::default())?;
        queue.block_on(device.close(&queue))
    }
}

impl Remote {
    /// Whether this is one of its threads.
    fn is_within(&self) -> bool {
        let this = std::thread::current().id();
        self.workers.iter().any(|w| w.thread.thread().id() == this)
    }
}

/// Waits for the requests in flight, and ends the threads. Blocks, but not within a request of this
/// `Remote`, which would wait for itself: then the threads end by themselves.
impl Drop for Remote {
    fn drop(&mut self) {
        for worker in &self.workers {
            worker.work.close_channel();
        }
        if self.is_within() {
            return;
        }
        for worker in self.workers.drain(..) {
            let _ = worker.thread.join();
        }
    }
}

/// Executes requests until the channel is closed and all have ended.
fn execute(queue: &Queue, device: &SharedDevice, mut requests: mpsc::UnboundedReceiver<Work>) {
    let mut serve = || {
        queue.block_on(async {
            while let Ok(work) = requests.recv().await {
                drop(queue.spawn(work(queue.clone(), device.clone())));
            }
            queue.drain().await;
        });
    };
    // A panic ends the request in which it is, which drops the sender of its result.
    while catch_unwind(AssertUnwindSafe(&mut serve)).is_err() {}
}
