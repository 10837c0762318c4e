//! The disk of a virtual machine in the event loop of its monitor: three virtqueues, one thread,
//! one epoll, no thread of zebu's.
//!
//! [`DiskQueue`] has the shape that cloud-hypervisor gives asynchronous disks (`AsyncIo`): submit
//! with a cookie, wait for a descriptor, take the next completion. Here the "guest" writes a
//! pattern through each virtqueue, reads it back, and flushes.
//!
//! Usage: `vmm IMAGE`. The content of the image is lost.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;

use rustix::event::epoll;
use zebu::{Device, EngineKind, Error, Iov, OpenOptions, Queue, QueueOptions, Result, Source};

/// The disk as one virtqueue uses it. It stays on its thread.
struct DiskQueue {
    device: Arc<Device>,
    queue: Queue,
    /// Cookies and results of the requests that have ended.
    completed: Rc<RefCell<VecDeque<(u64, i32)>>>,
}

impl DiskQueue {
    fn new(device: Arc<Device>) -> Result<DiskQueue> {
        let options = QueueOptions::default()
            // The engine that starts no threads.
            .engine(EngineKind::IoUring)
            // Compressed clusters are inflated by this thread, not by workers.
            .inflate_inline(true);
        let queue = Queue::new(options)?;
        // From the first turn on, the descriptor is readable when a request is spawned.
        while queue.turn() {}
        Ok(DiskQueue {
            device,
            queue,
            completed: Rc::default(),
        })
    }

    /// Readable when [`DiskQueue::next_completed`] has something to do.
    fn notifier(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }

    /// Starts a request. Its result is the number of bytes, or an `errno` below zero.
    fn submit(&self, cookie: u64, request: impl Future<Output = Result<usize>> + 'static) {
        let completed = self.completed.clone();
        // Dropping the handle leaves the request running.
        drop(self.queue.spawn(async move {
            let result = match request.await {
                Ok(length) => length as i32,
                Err(e) => -e.errno(),
            };
            completed.borrow_mut().push_back((cookie, result));
        }));
    }

    /// # Safety
    /// The memory stays valid and unused by others until the request has completed.
    unsafe fn read_vectored(&self, offset: u64, iovecs: &[libc::iovec], cookie: u64) {
        // SAFETY: on the caller's promise.
        let iov = unsafe { Iov::from_iovecs(iovecs) };
        let (device, queue) = (self.device.clone(), self.queue.clone());
        self.submit(cookie, async move {
            device.read(&queue, offset, &iov).await?;
            Ok(iov.len())
        });
    }

    /// # Safety
    /// As [`DiskQueue::read_vectored`].
    unsafe fn write_vectored(&self, offset: u64, iovecs: &[libc::iovec], cookie: u64) {
        // SAFETY: on the caller's promise.
        let iov = unsafe { Iov::from_iovecs(iovecs) };
        let (device, queue) = (self.device.clone(), self.queue.clone());
        self.submit(cookie, async move {
            device.write(&queue, offset, &iov).await?;
            Ok(iov.len())
        });
    }

    fn fsync(&self, cookie: u64) {
        let (device, queue) = (self.device.clone(), self.queue.clone());
        self.submit(cookie, async move {
            device.flush(&queue).await?;
            Ok(0)
        });
    }

    /// The next request that has ended. Never blocks.
    fn next_completed(&self) -> Option<(u64, i32)> {
        loop {
            // Drives the queue until the descriptor becomes readable for the next event. So no
            // completion is lost.
            let more = self.queue.turn();
            let completed = self.completed.borrow_mut().pop_front();
            if completed.is_some() || !more {
                return completed;
            }
        }
    }
}

const VIRTQUEUES: usize = 3;
const BLOCK: usize = 64 << 10;

/// One virtqueue of the guest: its memory, and what it does next.
struct Guest {
    disk: DiskQueue,
    memory: Vec<u8>,
    /// Its part of the disk.
    start: u64,
    blocks: usize,
    /// Requests in flight of the current step: write, flush or read.
    in_flight: usize,
    step: usize,
}

impl Guest {
    fn byte_of(&self, block: usize) -> u8 {
        (self.start as usize / BLOCK + block) as u8 | 1
    }

    /// Submits all requests of the step. Each block has two segments, as a guest's may have.
    fn begin(&mut self) {
        if self.step == 1 {
            self.in_flight = 1;
            return self.disk.fsync(0);
        }
        self.in_flight = self.blocks;
        for block in 0..self.blocks {
            let byte = self.byte_of(block);
            let memory = &mut self.memory[block * BLOCK..][..BLOCK];
            memory.fill(if self.step == 0 { byte } else { 0 });
            let (first, second) = memory.split_at_mut(512);
            let iovecs = [first, second].map(|part| libc::iovec {
                iov_base: part.as_mut_ptr().cast(),
                iov_len: part.len(),
            });
            let (offset, cookie) = (self.start + (block * BLOCK) as u64, block as u64);
            // SAFETY: the memory belongs to the guest, which lives until the end of the loop and
            // uses it after the completion.
            unsafe {
                match self.step {
                    0 => self.disk.write_vectored(offset, &iovecs, cookie),
                    _ => self.disk.read_vectored(offset, &iovecs, cookie),
                }
            }
        }
    }

    /// Takes the completions; whether the guest has finished.
    fn notified(&mut self) -> Result<bool> {
        while let Some((cookie, result)) = self.disk.next_completed() {
            if result < 0 {
                return Err(std::io::Error::from_raw_os_error(-result).into());
            }
            if self.step == 2 {
                let block = cookie as usize;
                let memory = &self.memory[block * BLOCK..][..BLOCK];
                assert!(memory.iter().all(|b| *b == self.byte_of(block)));
            }
            self.in_flight -= 1;
            if self.in_flight == 0 {
                self.step += 1;
                if self.step == 3 {
                    return Ok(true);
                }
                self.begin();
            }
        }
        Ok(false)
    }
}

/// The threads of this process, without those that the kernel has for io_uring.
fn threads() -> std::io::Result<usize> {
    let mut count = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let name = std::fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
        count += usize::from(!name.starts_with("iou-"));
    }
    Ok(count)
}

fn run(path: &str) -> Result<()> {
    let options = OpenOptions::default().write(true);
    let main_queue = Queue::new(QueueOptions::default())?;
    let device = Arc::new(Device::open(
        &main_queue,
        &Source::Name(path.into()),
        &options,
    )?);
    let part = device.size() / VIRTQUEUES as u64 / BLOCK as u64;
    let blocks = part.min(64) as usize;

    let events = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(std::io::Error::from)?;
    let mut guests = Vec::new();
    for number in 0..VIRTQUEUES {
        let mut guest = Guest {
            disk: DiskQueue::new(device.clone())?,
            memory: vec![0; blocks * BLOCK],
            start: number as u64 * part * BLOCK as u64,
            blocks,
            in_flight: 0,
            step: 0,
        };
        let data = epoll::EventData::new_u64(number as u64);
        epoll::add(&events, guest.disk.notifier(), data, epoll::EventFlags::IN)
            .map_err(std::io::Error::from)?;
        guest.begin();
        guests.push(guest);
    }

    let mut running = if blocks > 0 { VIRTQUEUES } else { 0 };
    while running > 0 {
        let mut ready = Vec::with_capacity(VIRTQUEUES);
        match epoll::wait(&events, rustix::buffer::spare_capacity(&mut ready), None) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result.map_err(std::io::Error::from)?,
        };
        for event in ready {
            if guests[event.data.u64() as usize].notified()? {
                running -= 1;
            }
        }
    }
    let threads = threads()?;

    // Closing takes the only reference to the device.
    drop(guests);
    let device = Arc::into_inner(device).expect("the guests are gone");
    main_queue.block_on(device.close(&main_queue))?;
    println!("{VIRTQUEUES} virtqueues, {blocks} blocks each, {threads} thread(s)");
    Ok(())
}

fn main() {
    let path = std::env::args().nth(1).expect("usage: vmm IMAGE");
    if let Err(e) = run(&path) {
        let e: Error = e;
        eprintln!("vmm: {path}: {e}");
        std::process::exit(1);
    }
}
