//! Threads that use one device at once, each with its queue and several requests in flight. Their
//! ranges overlap and are adjacent. The [`Ledger`] verifies what they read.

use std::collections::VecDeque;
use std::ops::Deref;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use zebu::Error;
use zebu::block::{Device, InUse, SharedDevice, Zeroing};
use zebu::storage::{Buffer, Queue, QueueOptions};

use super::driven::Driven;
use super::ledger::{BLOCK, Ledger, Sequence, stamped};
use super::{Rng, progress};

/// What the threads have in common.
#[derive(Clone)]
pub struct Load {
    pub device: Handle,
    pub ledger: Arc<Ledger>,
    /// The number of the next write.
    pub sequence: Arc<AtomicU64>,
    /// Blocks of a cluster.
    pub cluster: usize,
    /// Whether some writes are compressed.
    pub compresses: bool,
    /// Whether a write may be refused where clusters are allocated, as the filter `compress` does.
    pub refuses: bool,
    /// The block near which half of the requests begin.
    pub hot: usize,
}

/// How the threads use the device.
#[derive(Clone)]
// Each test crate uses some of them.
#[allow(dead_code)]
pub enum Handle {
    Plain(Arc<Device>),
    /// It is changed as a whole meanwhile.
    Shared(SharedDevice),
}

/// The device, for one request.
enum Entered<'a> {
    Plain(&'a Device),
    Shared(InUse),
}

impl Handle {
    async fn enter(&self) -> Entered<'_> {
        match self {
            Handle::Plain(device) => Entered::Plain(device),
            Handle::Shared(device) => Entered::Shared(device.enter().await.expect("it is open")),
        }
    }
}

impl Deref for Entered<'_> {
    type Target = Device;

    fn deref(&self) -> &Device {
        match self {
            Entered::Plain(device) => device,
            Entered::Shared(device) => device,
        }
    }
}

/// One of the threads.
pub struct Thread {
    pub queue: QueueOptions,
    pub driven: Driven,
    pub rng: Rng,
    pub requests: u64,
    /// Requests in flight.
    pub depth: usize,
}

#[derive(Clone, Copy, Debug)]
enum Request {
    Read,
    Write,
    Compressed,
    Zero(Zeroing),
    Discard,
    Flush,
}

impl Load {
    /// Runs the threads and returns how many requests they made. Fails the test if a request
    /// failed or a read found other data than it may.
    pub fn run(&self, threads: Vec<Thread>) -> u64 {
        let requests = threads.iter().map(|t| t.requests).sum();
        let (count, failures) = (threads.len(), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for (number, thread) in threads.into_iter().enumerate() {
                let failures = &failures;
                scope.spawn(move || self.run_thread(thread, number, count, failures));
            }
        });
        let failures = failures.into_inner().unwrap();
        assert!(failures.is_empty(), "{}", failures.join("\n"));
        requests
    }

    fn run_thread(
        &self,
        mut thread: Thread,
        number: usize,
        threads: usize,
        failures: &Mutex<Vec<String>>,
    ) {
        let queue = Queue::new(thread.queue.clone()).unwrap();
        let mut flight = VecDeque::new();
        for _ in 0..thread.requests {
            if flight.len() >= thread.depth
                && let Some(handle) = flight.pop_front()
            {
                let failure = thread.driven.run(&queue, handle);
                failures.lock().unwrap().extend(failure);
            }
            let (request, blocks) = self.draw(&mut thread.rng, number, threads);
            let (load, in_task) = (self.clone(), queue.clone());
            // A failure is no panic: requests of other threads may wait for one of this queue.
            flight.push_back(queue.spawn(async move {
                let result = load.perform(&in_task, request, blocks.clone()).await;
                progress();
                let failure = result.err()?;
                Some(format!(
                    "thread {number}: {request:?} {blocks:?}: {failure}"
                ))
            }));
        }
        for handle in flight {
            let failure = thread.driven.run(&queue, handle);
            failures.lock().unwrap().extend(failure);
        }
    }

    fn draw(&self, rng: &mut Rng, number: usize, threads: usize) -> (Request, Range<usize>) {
        let (blocks, cluster) = (self.ledger.blocks(), self.cluster);
        let request = match rng.below(32) {
            0..10 => Request::Read,
            10..13 => Request::Zero(rng.pick(&[Zeroing::Keep, Zeroing::Unmap])),
            13..16 => Request::Discard,
            16 => Request::Flush,
            17..21 if self.compresses => Request::Compressed,
            _ => Request::Write,
        };
        let most = rng.pick(&[8, cluster, 2 * cluster]).min(1024);
        let mut length = 1 + rng.index(most);
        let mut start = match rng.below(4) {
            // The ranges of all threads overlap here.
            0 | 1 => (self.hot + rng.index(3 * cluster)) % blocks,
            // A range of this thread alone, adjacent to those of others.
            2 => {
                length = 1 + cluster / 4;
                let nth = rng.index(1 + blocks / length / threads);
                (nth * threads + number) * length % blocks
            }
            _ => rng.index(blocks),
        };
        if matches!(request, Request::Compressed) || rng.one_in(3) {
            start = start / cluster * cluster;
            length = length.next_multiple_of(cluster);
        }
        (request, start..(start + length).min(blocks))
    }

    /// Executes a request and verifies it.
    async fn perform(
        &self,
        queue: &Queue,
        request: Request,
        blocks: Range<usize>,
    ) -> Result<(), String> {
        let ledger = &*self.ledger;
        let (offset, length) = ((blocks.start * BLOCK) as u64, blocks.len() * BLOCK);
        let mut buffer = Buffer::new(length);
        let began = ledger.begin();
        let entered = self.device.enter().await;
        let device = &*entered;
        match request {
            Request::Write | Request::Compressed => {
                let sequence = self.sequence.fetch_add(1, Ordering::SeqCst);
                buffer.copy_from_slice(&stamped(sequence, blocks.clone()));
                ledger.writes(blocks.clone(), began, sequence);
            }
            Request::Zero(_) | Request::Discard => ledger.writes(blocks.clone(), began, 0),
            Request::Read | Request::Flush => {}
        }
        let result = match request {
            Request::Read => {
                let (read, result) = device.read_buffer(queue, offset, buffer, length).await;
                buffer = read;
                result
            }
            Request::Write => {
                let (written, result) = device.write_buffer(queue, offset, buffer, length).await;
                buffer = written;
                result
            }
            Request::Compressed => {
                // SAFETY: the buffer lives until the write has ended.
                let iov = unsafe { buffer.iov() };
                device.write_compressed(queue, offset, &iov).await
            }
            Request::Zero(how) => device.write_zeroes(queue, offset, length as u64, how).await,
            Request::Discard => device.discard(queue, offset, length as u64).await,
            Request::Flush => device.flush(queue).await,
        };
        let verdict = match (request, result) {
            // Clusters that are allocated already are refused, others may be written.
            (Request::Compressed, Err(Error::Io(_))) | (Request::Discard, Ok(())) => {
                ledger.wrote(blocks, began, false);
                Ok(())
            }
            (Request::Write | Request::Zero(_), Err(Error::Io(_))) if self.refuses => {
                ledger.wrote(blocks, began, false);
                Ok(())
            }
            (_, Err(e)) => Err(e.to_string()),
            (Request::Read, Ok(())) => ledger.judge(blocks, began, &buffer),
            (Request::Flush, Ok(())) => Ok(()),
            (_, Ok(())) => {
                ledger.wrote(blocks, began, true);
                Ok(())
            }
        };
        ledger.end(began);
        verdict
    }
}

/// Reads the device while no request is in flight, and returns the write that each block is of.
pub fn settle(ledger: &Ledger, queue: &Queue, device: &Device) -> Vec<Sequence> {
    let mut bytes = vec![0; ledger.blocks() * BLOCK];
    let read = device.read_blocking(queue, 0, &mut bytes);
    read.unwrap_or_else(|e| panic!("read: {e}"));
    let sequences = ledger.settle(&bytes);
    sequences.unwrap_or_else(|wrong| panic!("{wrong}"))
}
