//! One object's blocks, and the requests that fetch them.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::blocks::{Arrived, BLOCK, Blocks, Next};
use super::failure::{ObjectError, Trouble};
use super::retry::Attempts;
use super::source::{Body, Opened, Source};
use crate::storage::Iov;

/// How often the bytes of a server without ranges are read from the first on again.
const BACK: u32 = 3;

/// How an object is read.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    /// For errors.
    pub name: String,
    /// Requests in flight at most.
    pub connections: usize,
    /// Bytes that are read ahead at most; None: the default.
    pub readahead: Option<u64>,
    /// How long a server may send nothing.
    pub timeout: Duration,
}

/// An object that is read. Its requests end with it.
#[derive(Debug)]
pub(super) struct Client {
    shared: Arc<Shared>,
    runtime: Handle,
}

/// What the requests share.
#[derive(Debug)]
struct Shared {
    source: Box<dyn Source>,
    reading: Reading,
    length: u64,
    has_ranges: bool,
    blocks: Mutex<Blocks>,
    /// The end of the pause that the server has asked for.
    paused: Mutex<Option<Instant>>,
    /// Wakes `receive_in_order`.
    wanted: Notify,
}

impl Client {
    pub fn new(runtime: Handle, opened: Opened, reading: Reading) -> Client {
        let blocks = Blocks::new(opened.length, reading.connections, reading.readahead);
        let shared = Arc::new(Shared {
            source: opened.source,
            length: opened.length,
            has_ranges: opened.has_ranges,
            blocks: Mutex::new(blocks),
            paused: Mutex::default(),
            wanted: Notify::new(),
            reading,
        });
        let client = Client { shared, runtime };
        let (shared, first) = (client.shared.clone(), opened.first);
        if !opened.has_ranges {
            let reader = InOrder::new(shared, first);
            let task = client.runtime.spawn(reader.receive());
            client.shared.blocks().fetched_by(task.abort_handle());
        } else if opened.length > 0 {
            let mut blocks = client.shared.blocks();
            let number = blocks.fetching(0..1);
            start(
                &client.shared,
                &client.runtime,
                &mut blocks,
                number,
                0..1,
                Some(first),
            );
            drop(blocks);
        }
        client
    }

    pub fn length(&self) -> u64 {
        self.shared.length
    }

    /// Reads into `iov` from `offset` on: fewer bytes at the end of the object. The copies are made
    /// by the thread that polls.
    pub async fn read(self: Arc<Self>, offset: u64, iov: Iov) -> io::Result<usize> {
        let end = self
            .shared
            .length
            .min(offset.saturating_add(iov.len() as u64));
        if offset >= end {
            return Ok(0);
        }
        let reader = Reader {
            number: self.shared.blocks().begin(offset..end),
            client: &self,
        };
        self.dispatch();
        loop {
            let arrived = std::future::poll_fn(|context| {
                self.shared.blocks().poll(reader.number, context.waker())
            });
            let (blocks, is_end) = match arrived.await {
                Arrived::Blocks(blocks, is_end) => (blocks, is_end),
                Arrived::Failed(error) => return Err(error.into()),
            };
            for (nth, data) in blocks {
                let at = nth * BLOCK;
                let (from, to) = (offset.max(at), end.min(at + data.len() as u64));
                iov.slice((from - offset) as usize, (to - from) as usize)
                    .copy_from(&data[(from - at) as usize..(to - at) as usize]);
            }
            if is_end {
                return Ok((end - offset) as usize);
            }
        }
    }

    fn dispatch(&self) {
        match self.shared.has_ranges {
            true => dispatch(&self.shared, &self.runtime),
            false => self.shared.wanted.notify_one(),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.blocks().cancel_all();
    }
}

/// A read, which ends when this is dropped.
struct Reader<'a> {
    number: u64,
    client: &'a Client,
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        let has_cancelled = self.client.shared.blocks().end(self.number);
        if has_cancelled {
            self.client.dispatch();
        }
    }
}

/// Starts the requests that are due.
fn dispatch(shared: &Arc<Shared>, runtime: &Handle) {
    let mut blocks = shared.blocks();
    while let Some((number, range)) = blocks.next_fetch() {
        start(shared, runtime, &mut blocks, number, range, None);
    }
}

/// Starts a request, whose body may be here already.
fn start(
    shared: &Arc<Shared>,
    runtime: &Handle,
    blocks: &mut Blocks,
    number: u64,
    range: Range<u64>,
    body: Option<Box<dyn Body>>,
) {
    let (shared, own) = (shared.clone(), runtime.clone());
    let task = runtime.spawn(async move {
        let result = shared.fetch(range, body).await;
        shared.end_fetch(number, result);
        dispatch(&shared, &own);
    });
    blocks.started(number, task.abort_handle());
}

impl Shared {
    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        crate::lock(&self.blocks)
    }

    /// Fetches blocks. After an attempt that failed it goes on at the byte where that ended.
    async fn fetch(
        &self,
        blocks: Range<u64>,
        mut body: Option<Box<dyn Body>>,
    ) -> Result<(), Trouble> {
        let mut attempts = Attempts::default();
        let end = (blocks.end * BLOCK).min(self.length);
        let mut filling = FillingBlock::new(self, blocks.start);
        while filling.at < end {
            self.wait_for_pause().await;
            let before = filling.nth;
            let result = self.attempt(&mut filling, end, body.take()).await;
            if filling.nth > before {
                attempts.progress();
            }
            if let Err(trouble) = result {
                self.failed(&mut attempts, trouble).await?;
            }
        }
        Ok(())
    }

    async fn attempt(
        &self,
        filling: &mut FillingBlock<'_>,
        end: u64,
        body: Option<Box<dyn Body>>,
    ) -> Result<(), Trouble> {
        let mut body = match body {
            Some(body) => body,
            None => self.in_time(self.source.get(filling.at..end)).await?,
        };
        while let Some(bytes) = self.in_time(body.chunk()).await? {
            filling.add(bytes, end)?;
        }
        match filling.at == end {
            true => Ok(()),
            false => Err(cut_off()),
        }
    }

    /// The end of `work`, or an error if it takes too long.
    async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, Trouble>>,
    ) -> Result<T, Trouble> {
        in_time(self.reading.timeout, work).await
    }

    /// Waits before the next attempt, if there is to be one.
    async fn failed(&self, attempts: &mut Attempts, trouble: Trouble) -> Result<(), Trouble> {
        let text = format!("{trouble:?}");
        let (wait, for_all) = attempts.failed(trouble)?;
        tracing::debug!("{}: {text}, again in {wait:?}", self.reading.name);
        if for_all {
            let until = Instant::now() + wait;
            let mut paused = crate::lock(&self.paused);
            *paused = Some(paused.map_or(until, |other| other.max(until)));
        }
        sleep(wait).await;
        Ok(())
    }

    async fn wait_for_pause(&self) {
        loop {
            let until = *crate::lock(&self.paused);
            match until.filter(|until| *until > Instant::now()) {
                Some(until) => sleep_until(until).await,
                None => return,
            }
        }
    }

    fn end_fetch(&self, number: u64, result: Result<(), Trouble>) {
        let mut woken = Vec::new();
        match result {
            Ok(()) => self.blocks().end_fetch(number, None, &mut woken),
            Err(trouble) => {
                let is_last = matches!(trouble, Trouble::Changed(_));
                let error = trouble.error(&self.reading.name);
                let mut blocks = self.blocks();
                blocks.end_fetch(number, Some(&error), &mut woken);
                if is_last {
                    blocks.fail(&error, &mut woken);
                }
            }
        }
        woken.into_iter().for_each(Waker::wake);
    }
}

/// The end of `work`, or an error if the server sends nothing for this time.
pub(super) async fn in_time<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Trouble>>,
) -> Result<T, Trouble> {
    match timeout(limit, work).await {
        Ok(result) => result,
        Err(_) => {
            let seconds = limit.as_secs_f64();
            Err(Trouble::transient(format!("no answer for {seconds} s")))
        }
    }
}

/// The block that is being filled.
struct FillingBlock<'a> {
    shared: &'a Shared,
    nth: u64,
    bytes: Vec<u8>,
    /// Where the next byte belongs.
    at: u64,
}

impl<'a> FillingBlock<'a> {
    fn new(shared: &'a Shared, nth: u64) -> Self {
        FillingBlock {
            shared,
            nth,
            bytes: Vec::new(),
            at: nth * BLOCK,
        }
    }

    /// Adds bytes, none of which may be behind `end`, and passes on the blocks that are complete.
    fn add(&mut self, mut data: Bytes, end: u64) -> Result<(), Trouble> {
        if data.len() as u64 > end - self.at {
            return Err(Trouble::permanent(
                "the server sends more than was asked for",
            ));
        }
        let mut woken = Vec::new();
        while !data.is_empty() {
            let length = BLOCK.min(self.shared.length - self.nth * BLOCK) as usize;
            if self.bytes.capacity() == 0 {
                self.bytes.reserve_exact(length);
            }
            let part = data.split_to(data.len().min(length - self.bytes.len()));
            self.bytes.extend_from_slice(&part);
            self.at += part.len() as u64;
            if self.bytes.len() == length {
                let bytes = Bytes::from(std::mem::take(&mut self.bytes));
                self.shared.blocks().arrived(self.nth, bytes, &mut woken);
                self.nth += 1;
            }
        }
        woken.into_iter().for_each(Waker::wake);
        Ok(())
    }
}

/// Receives the bytes of an object in their order, from a server without ranges.
struct InOrder {
    shared: Arc<Shared>,
    body: Option<Box<dyn Body>>,
}

impl InOrder {
    fn new(shared: Arc<Shared>, body: Box<dyn Body>) -> Self {
        let body = Some(body);
        InOrder { shared, body }
    }

    /// Receives what is wanted, for as long as the object is open.
    async fn receive(mut self) {
        let shared = self.shared.clone();
        let mut filling = FillingBlock::new(&shared, 0);
        let mut attempts = Attempts::default();
        let mut back = 0;
        loop {
            let next = shared.blocks().next_in_order(filling.nth);
            match next {
                Next::Wait => shared.wanted.notified().await,
                Next::Back if back == BACK => {
                    let what = "the server has no ranges, and the image is not read in order: \
                                download it, or pass it through a pipe to 'zebu convert -'";
                    let error = Trouble::permanent(what).error(&shared.reading.name);
                    self.fail_before(filling.nth, &error);
                }
                Next::Back => {
                    back += 1;
                    self.body = None;
                    filling = FillingBlock::new(&shared, 0);
                }
                Next::Forward => {
                    let before = filling.nth;
                    let result = self.receive_some(&mut filling).await;
                    if filling.nth > before {
                        attempts.progress();
                    }
                    let Err(trouble) = result else {
                        continue;
                    };
                    self.body = None;
                    if let Err(trouble) = shared.failed(&mut attempts, trouble).await {
                        return self.fail(trouble);
                    }
                }
            }
        }
    }

    /// Receives some bytes. A body that was cut off is asked for again, and skipped up to the place.
    async fn receive_some(&mut self, filling: &mut FillingBlock<'_>) -> Result<(), Trouble> {
        let shared = self.shared.clone();
        if self.body.is_none() {
            shared.wait_for_pause().await;
            let mut body = shared.in_time(shared.source.get_all()).await?;
            let mut skip = filling.at;
            while skip > 0 {
                let Some(mut bytes) = shared.in_time(body.chunk()).await? else {
                    return Err(cut_off());
                };
                let part = skip.min(bytes.len() as u64);
                let rest = bytes.split_off(part as usize);
                skip -= part;
                filling.add(rest, shared.length)?;
            }
            self.body = Some(body);
        }
        let Some(body) = &mut self.body else {
            return Ok(());
        };
        match shared.in_time(body.chunk()).await? {
            Some(bytes) => filling.add(bytes, shared.length),
            None => Err(cut_off()),
        }
    }

    fn fail_before(&self, nth: u64, error: &ObjectError) {
        let mut woken = Vec::new();
        self.shared.blocks().fail_before(nth, error, &mut woken);
        woken.into_iter().for_each(Waker::wake);
    }

    fn fail(&self, trouble: Trouble) {
        let error = trouble.error(&self.shared.reading.name);
        let mut woken = Vec::new();
        self.shared.blocks().fail(&error, &mut woken);
        woken.into_iter().for_each(Waker::wake);
    }
}

fn cut_off() -> Trouble {
    Trouble::transient("the connection ended in the middle of the data")
}

#[cfg(test)]
mod tests {
    //! Guards against a read that waits for a request which others have given up.
    use std::future::{pending, poll_fn};
    use std::ops::Range;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Poll;

    use super::super::source::{InMemory, Task};
    use super::*;
    use crate::object::{Object, runtime};
    use crate::storage::{Properties, Queue, QueueOptions, read_vec};

    /// A source that answers once it may.
    #[derive(Debug)]
    struct Gate(Arc<AtomicBool>);

    impl Source for Gate {
        fn get(&self, range: Range<u64>) -> Task<'_, Box<dyn Body>> {
            let may = self.0.load(Ordering::SeqCst);
            Box::pin(async move {
                if !may {
                    pending::<()>().await;
                }
                let bytes = vec![1; (range.end - range.start) as usize];
                Ok(Box::new(InMemory(Some(bytes.into()))) as Box<dyn Body>)
            })
        }

        fn get_all(&self) -> Task<'_, Box<dyn Body>> {
            self.get(0..0)
        }
    }

    #[test]
    fn a_request_begins_in_the_place_of_one_that_is_dropped() {
        let may_answer = Arc::new(AtomicBool::new(false));
        let opened = Opened {
            source: Box::new(Gate(may_answer.clone())),
            length: 8 * BLOCK,
            has_ranges: true,
            cache_identity: Err("a test"),
            modified: None,
            first: Box::new(InMemory(Some(vec![1; BLOCK as usize].into()))),
        };
        let reading = Reading {
            name: "test".into(),
            connections: 1,
            readahead: Some(0),
            timeout: Duration::from_secs(600),
        };
        let client = Client::new(runtime::handle().unwrap(), opened, reading);
        let object = Object {
            client: Arc::new(client),
            opened: None,
            properties: Properties::PLAIN,
            cache_identity: Err("a test"),
        };
        let queue = Queue::new(QueueOptions::default()).unwrap();
        queue.block_on(read_vec(&object, &queue, 0, 10)).unwrap();
        let mut first = Box::pin(read_vec(&object, &queue, 2 * BLOCK, 10));
        let mut second = Box::pin(read_vec(&object, &queue, 6 * BLOCK, 10));
        let begun = queue.block_on(poll_fn(|context| {
            let both = [first.as_mut().poll(context), second.as_mut().poll(context)];
            Poll::Ready(both.iter().all(Poll::is_pending))
        }));
        assert!(begun);
        may_answer.store(true, Ordering::SeqCst);
        drop(first);
        let until = std::time::Instant::now() + Duration::from_secs(10);
        let ended = loop {
            let poll = queue.block_on(poll_fn(|context| {
                Poll::Ready(second.as_mut().poll(context))
            }));
            match poll {
                Poll::Ready(bytes) => break bytes.unwrap(),
                Poll::Pending => assert!(std::time::Instant::now() < until, "it waits"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!(ended, [1; 10]);
    }
}
