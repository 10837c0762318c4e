//! A device for servers on async runtimes: its futures are `Send`, and threads of the library do
//! the I/O.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::thread::JoinHandle;

use futures_channel::{mpsc, oneshot};

use super::{Device, Status, Zeroing};
use crate::storage::{Buffer, Iov, Queue, QueueOptions};
use crate::{Error, Result};

/// What a thread is asked to do: makes the future that its queue drives.
type Work = Box<dyn FnOnce(Queue, Arc<Device>) -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// A device that any thread may use, of any runtime.
///
/// A number of threads with a [`Queue`] each execute the requests. Their futures are
/// `Send + 'static` and own their buffers. A future that is dropped does not stop its request.
/// Requests are not limited in number: the caller bounds the memory that they take.
///
/// ```
/// # use std::sync::Arc;
/// use zebu::block::{Device, OpenOptions, Remote};
/// use zebu::storage::{Memory, Queue, QueueOptions};
///
/// # let storage = Arc::new(Memory::new(vec![7; 1 << 20]));
/// let queue = Queue::new(QueueOptions::default())?;
/// let options = OpenOptions::default().format(Some("raw".parse()?));
/// let device = Device::from_storage(&queue, storage, &options)?;
/// let remote = Remote::new(Arc::new(device), 2, &QueueOptions::default())?;
/// let read = remote.read(4096, 512); // await it on any runtime
/// # let buffer = queue.block_on(read)?;
/// # assert_eq!(buffer.as_ref(), [7; 512]);
/// remote.close()?;
/// # Ok::<(), zebu::Error>(())
/// ```
#[derive(Debug)]
pub struct Remote {
    device: Arc<Device>,
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
                let why = "the thread that executed the request has panicked";
                Err(Error::Io(io::Error::other(why)))
            })
        })
    }
}

impl Remote {
    /// Starts `threads` threads, at least one, each with a queue of these options. The error is
    /// that of a thread or a queue that could not be made.
    pub fn new(device: Arc<Device>, threads: usize, options: &QueueOptions) -> io::Result<Remote> {
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

    /// The device, for what needs no I/O.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Executes the future that `work` makes on one of the threads: for requests that have no
    /// method here.
    pub fn run<T, F>(
        &self,
        work: impl FnOnce(Queue, Arc<Device>) -> F + Send + 'static,
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
        // A thread that has panicked drops the work, and with it the sender of the result.
        let _ = self.workers[next % self.workers.len()]
            .work
            .unbounded_send(work);
        RemoteRequest(request)
    }

    /// The `length` bytes from `offset` on.
    pub fn read(&self, offset: u64, length: usize) -> RemoteRequest<Buffer> {
        self.run(move |queue, device| async move {
            let buffer = Buffer::new(length);
            let (buffer, result) = device.read_buffer(&queue, offset, buffer, length).await;
            result.map(|()| buffer)
        })
    }

    /// Writes `bytes` from `offset` on, and gives them back.
    pub fn write<B>(&self, offset: u64, bytes: B) -> RemoteRequest<B>
    where
        B: AsRef<[u8]> + Send + 'static,
    {
        self.run(move |queue, device| async move {
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

    /// [`Device::write_zeroes`].
    pub fn write_zeroes(&self, offset: u64, length: u64, zeroing: Zeroing) -> RemoteRequest<()> {
        self.run(move |queue, device| async move {
            device.write_zeroes(&queue, offset, length, zeroing).await
        })
    }

    /// [`Device::discard`].
    pub fn discard(&self, offset: u64, length: u64) -> RemoteRequest<()> {
        self.run(move |queue, device| async move { device.discard(&queue, offset, length).await })
    }

    /// [`Device::flush`]: every write that has ended before this call is durable.
    pub fn flush(&self) -> RemoteRequest<()> {
        self.run(move |queue, device| async move { device.flush(&queue).await })
    }

    /// [`Device::status`].
    pub fn status(&self, offset: u64, length: u64) -> RemoteRequest<Status> {
        self.run(move |queue, device| async move { device.status(&queue, offset, length).await })
    }

    /// Waits for the requests in flight, ends the threads and closes the device
    /// ([`Device::close`]). Blocks. Fails without closing it if there are other references to
    /// the device.
    pub fn close(self) -> Result<()> {
        let device = self.device.clone();
        drop(self);
        let device = Arc::into_inner(device).ok_or_else(|| {
            Error::Refused("The device is still in use, and was not closed".into())
        })?;
        let queue = Queue::new(QueueOptions::default())?;
        queue.block_on(device.close(&queue))
    }
}

/// Waits for the requests in flight, and ends the threads. Blocks.
impl Drop for Remote {
    fn drop(&mut self) {
        for worker in &self.workers {
            worker.work.close_channel();
        }
        for worker in self.workers.drain(..) {
            // Its requests have told of a panic.
            let _ = worker.thread.join();
        }
    }
}

/// Executes requests until the channel is closed and all have ended.
fn execute(queue: &Queue, device: &Arc<Device>, mut requests: mpsc::UnboundedReceiver<Work>) {
    queue.block_on(async {
        while let Ok(work) = requests.recv().await {
            drop(queue.spawn(work(queue.clone(), device.clone())));
        }
        queue.drain().await;
    });
}
