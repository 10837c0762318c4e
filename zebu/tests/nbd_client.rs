//! Guards against the client of NBD servers giving a request the data of
//! another one, forgetting one, writing to memory that is not its any more, or
//! standing still: many requests of several threads, on one connection and on
//! several, with a server that answers in any order, in any pieces, and that
//! hangs up now and then.

use std::future::{Future, poll_fn};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use zebu::internal::nbd::{
    ChunkHeader, ChunkKind, Command, ContextQuery, ExportInfo, Extent, Go, Headers, Info,
    OptionHeader, OptionKind, OptionReply, OptionReplyKind, Request, SimpleReply, encode_extents,
    transmission,
};
use zebu::storage::nbd::{Nbd, NbdOptions, NbdServer};
use zebu::storage::{self, CacheMode, EngineKind, Queue, QueueOptions};

const SIZE: usize = 4 << 20;
/// No test may run longer than this.
const PATIENCE: Duration = Duration::from_secs(300);

/// Small random numbers, the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }
}

#[derive(Clone, Copy, Debug)]
struct Manners {
    headers: Headers,
    /// It hangs up after about so many answers.
    hangs_up: Option<usize>,
    many: bool,
}

struct Server {
    bytes: Mutex<Vec<u8>>,
    manners: Manners,
    clients: Mutex<Vec<UnixStream>>,
}

impl Server {
    /// Listens at `socket`. The threads end with the process.
    fn start(socket: &std::path::Path, manners: Manners) -> Arc<Server> {
        let listener = UnixListener::bind(socket).unwrap();
        let server = Arc::new(Server {
            bytes: Mutex::new(vec![0; SIZE]),
            manners,
            clients: Mutex::default(),
        });
        let ours = server.clone();
        thread::spawn(move || {
            for (seed, stream) in listener.incoming().map_while(Result::ok).enumerate() {
                let server = ours.clone();
                let clone = stream.try_clone().unwrap();
                server.clients.lock().unwrap().push(clone);
                // That the client goes away is no concern of it.
                thread::spawn(move || server.serve(stream, Random(seed as u64 * 77 + 5)));
            }
        });
        server
    }

    /// Ends all connections that there are.
    fn hang_up(&self) {
        for client in self.clients.lock().unwrap().drain(..) {
            let _ = client.shutdown(Shutdown::Both);
        }
    }

    fn handshake(&self, stream: &mut UnixStream) -> std::io::Result<Headers> {
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
        stream.read_exact(&mut [0; 4])?;
        let mut headers = Headers::Simple;
        loop {
            let mut header = [0; OptionHeader::SIZE];
            stream.read_exact(&mut header)?;
            let option = OptionHeader::decode(&header).unwrap();
            let mut payload = vec![0; option.length as usize];
            stream.read_exact(&mut payload)?;
            let refused = || vec![OptionReply::error(OptionReplyKind::ErrUnsup, "no")];
            let best = self.manners.headers;
            let replies = match option.kind {
                OptionKind::ExtendedHeaders if best == Headers::Extended => {
                    headers = Headers::Extended;
                    vec![OptionReply::ack()]
                }
                OptionKind::StructuredReply if best >= Headers::Structured => {
                    headers = Headers::Structured;
                    vec![OptionReply::ack()]
                }
                OptionKind::SetMetaContext => {
                    let query = ContextQuery::decode(&payload).unwrap();
                    let context = OptionReply::context(3, &query.queries[0]);
                    vec![context, OptionReply::ack()]
                }
                OptionKind::Go => {
                    assert_eq!(Go::decode(&payload).unwrap().name, "x");
                    let mut flags = transmission::HAS_FLAGS
                        | transmission::SEND_FLUSH
                        | transmission::SEND_FUA
                        | transmission::SEND_WRITE_ZEROES;
                    if self.manners.many {
                        flags |= transmission::CAN_MULTI_CONN;
                    }
                    let size = SIZE as u64;
                    vec![
                        OptionReply::info(&Info::Export(ExportInfo { size, flags })),
                        OptionReply::ack(),
                    ]
                }
                _ => refused(),
            };
            let mut out = Vec::new();
            for reply in &replies {
                reply.encode(option.kind, &mut out);
            }
            stream.write_all(&out)?;
            if option.kind == OptionKind::Go {
                return Ok(headers);
            }
        }
    }

    fn serve(&self, mut stream: UnixStream, mut random: Random) -> std::io::Result<()> {
        let headers = self.handshake(&mut stream)?;
        let (answers, taken) = mpsc::channel::<Vec<u8>>();
        let mut out = stream.try_clone()?;
        let hangs_up = self
            .manners
            .hangs_up
            .map(|about| 1 + random.below(2 * about));
        let mut order = Random(random.below(1 << 20) as u64 + 1);
        thread::spawn(move || {
            let mut count = 0;
            while let Ok(first) = taken.recv() {
                let mut batch = vec![first];
                while batch.len() < 6
                    && let Ok(next) = taken.recv_timeout(Duration::from_micros(100))
                {
                    batch.push(next);
                }
                while !batch.is_empty() {
                    let bytes = batch.swap_remove(order.below(batch.len()));
                    count += 1;
                    let cut = order.below(bytes.len() + 1);
                    let _ = out.write_all(&bytes[..cut]);
                    if Some(count) == hangs_up {
                        let _ = out.shutdown(Shutdown::Both);
                        return;
                    }
                    let _ = out.write_all(&bytes[cut..]);
                }
            }
        });
        loop {
            let mut header = vec![0; Request::size(headers)];
            stream.read_exact(&mut header)?;
            let request = Request::decode(headers, &header).unwrap();
            let mut payload = vec![0; request.payload(headers) as usize];
            stream.read_exact(&mut payload)?;
            if request.command == Command::Disconnect {
                return Ok(());
            }
            let answer = self.answer(headers, &request, &payload, &mut random);
            if answers.send(answer).is_err() {
                return Ok(());
            }
        }
    }

    fn answer(
        &self,
        headers: Headers,
        request: &Request,
        payload: &[u8],
        random: &mut Random,
    ) -> Vec<u8> {
        let range = request.offset as usize..(request.offset + request.length) as usize;
        let mut bytes = self.bytes.lock().unwrap();
        let mut data = Vec::new();
        let mut extents = Vec::new();
        match request.command {
            Command::Read => data = bytes[range].to_vec(),
            Command::Write => bytes[range].copy_from_slice(payload),
            Command::WriteZeroes => bytes[range].fill(0),
            Command::Flush => {}
            Command::BlockStatus => {
                let extent = Extent {
                    length: 1 + random.below(request.length as usize) as u64,
                    flags: 0,
                };
                extents = encode_extents(headers, 3, &[extent]);
            }
            other => panic!("{other:?}"),
        }
        drop(bytes);
        let header = ChunkHeader {
            done: true,
            kind: ChunkKind::None,
            cookie: request.cookie,
            offset: request.offset,
            length: 0,
        };
        match request.command {
            Command::Read if headers != Headers::Simple => pieces(headers, &header, &data, random),
            Command::BlockStatus => {
                let kind = match headers {
                    Headers::Extended => ChunkKind::BlockStatusExtended,
                    _ => ChunkKind::BlockStatus,
                };
                let length = extents.len() as u64;
                let header = ChunkHeader {
                    kind,
                    length,
                    ..header
                };
                [header.encode(headers).bytes(), &extents].concat()
            }
            // With structured replies, either form is right here.
            _ if headers == Headers::Extended
                || (headers != Headers::Simple && random.below(2) == 0) =>
            {
                header.encode(headers).bytes().to_vec()
            }
            _ => {
                let reply = SimpleReply {
                    error: 0,
                    cookie: request.cookie,
                };
                [&reply.encode()[..], &data].concat()
            }
        }
    }
}

/// The answer to a read in chunks of any order.
fn pieces(headers: Headers, header: &ChunkHeader, data: &[u8], random: &mut Random) -> Vec<u8> {
    let mut cuts = vec![0, data.len()];
    for _ in 0..random.below(4) {
        cuts.push(random.below(data.len()));
    }
    cuts.sort_unstable();
    cuts.dedup();
    let mut ranges: Vec<_> = cuts.windows(2).map(|pair| pair[0]..pair[1]).collect();
    let mut out = Vec::new();
    while !ranges.is_empty() {
        let range = ranges.swap_remove(random.below(ranges.len()));
        let header = ChunkHeader {
            done: ranges.is_empty(),
            ..*header
        };
        let (at, length) = (header.offset + range.start as u64, range.len() as u64);
        let bytes = &data[range];
        if bytes.iter().all(|byte| *byte == 0) {
            out.extend(header.hole(headers, at, length).bytes());
        } else {
            out.extend(header.data(headers, at, length).bytes());
            out.extend(bytes);
        }
    }
    out
}

/// Ends the process if it is not dropped in time.
struct Patience(Arc<AtomicBool>);

impl Patience {
    fn new(what: String) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let seen = done.clone();
        thread::spawn(move || {
            let start = std::time::Instant::now();
            while start.elapsed() < PATIENCE {
                thread::sleep(Duration::from_millis(100));
                if seen.load(Ordering::Relaxed) {
                    return;
                }
            }
            eprintln!("it stands still: {what}");
            std::process::abort();
        });
        Patience(done)
    }
}

impl Drop for Patience {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What one task does in a part of the disk that is its own; the last quarter of
/// the part is for what is given up.
async fn work(nbd: Arc<Nbd>, queue: Queue, start: usize, length: usize, steps: usize) {
    let mut random = Random(start as u64 + 1);
    let own = length / 4 * 3;
    let mut expected = storage::read_vec(&*nbd, &queue, start as u64, own)
        .await
        .unwrap();
    for step in 0..steps {
        let from = random.below(own - 1);
        // Small ones, and now and then all of it.
        let most = if random.below(8) == 0 { own } else { 5000 };
        let count = 1 + random.below((own - from).min(most));
        let at = (start + from) as u64;
        match random.below(7) {
            0..=2 => {
                let bytes: Vec<u8> = (0..count).map(|i| (step + i * 7) as u8).collect();
                storage::write_slice(&*nbd, &queue, at, &bytes)
                    .await
                    .unwrap();
                expected[from..from + count].copy_from_slice(&bytes);
            }
            3 => {
                storage::punch_hole(&*nbd, &queue, at, count as u64)
                    .await
                    .unwrap();
                expected[from..from + count].fill(0);
            }
            4 => given_up(&nbd, &queue, start + own, length - own, &mut random).await,
            5 => {
                storage::flush(&*nbd, &queue).await.unwrap();
                let extent = storage::extent(&*nbd, &queue, at).await.unwrap();
                assert!(extent.length >= 1 && !extent.zero && extent.allocated);
            }
            _ => {
                let read = storage::read_vec(&*nbd, &queue, at, count).await.unwrap();
                assert!(
                    read == expected[from..from + count],
                    "at {at}, {count} bytes"
                );
            }
        }
    }
    let read = storage::read_vec(&*nbd, &queue, start as u64, own).await;
    assert!(read.unwrap() == expected, "at the end");
}

/// A read or a write that nobody waits for to the end.
async fn given_up(nbd: &Nbd, queue: &Queue, start: usize, length: usize, random: &mut Random) {
    let polls = random.below(3);
    let bytes = vec![9; length];
    let write = random.below(2) == 0;
    let operation = async {
        match write {
            true => storage::write_slice(nbd, queue, start as u64, &bytes).await,
            false => storage::read_vec(nbd, queue, start as u64, length)
                .await
                .map(drop),
        }
    };
    let mut operation = pin!(operation);
    let mut left = polls;
    poll_fn(|context| {
        if left == 0 || operation.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        left -= 1;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Several threads with several tasks each.
fn run(manners: Manners, connections: usize, threads: usize, engine: EngineKind) {
    const STEPS: usize = 60;
    if engine.start().is_err() {
        println!("skipped: {engine}");
        return;
    }
    let what = format!("{manners:?}, {connections} connections, {threads} threads, {engine}");
    println!("{what}");
    let _patience = Patience::new(what);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let server = Server::start(&socket, manners);
    let mut options = NbdOptions::new(NbdServer::Unix(socket), "x");
    options.write = true;
    options.connections = connections;
    options.reconnect_delay = PATIENCE;
    // What this server has answered is never lost.
    options.cache = CacheMode::Unsafe;
    let nbd = Arc::new(Nbd::open(options).unwrap());
    const TASKS: usize = 8;
    let part = SIZE / threads / TASKS;
    thread::scope(|scope| {
        for thread in 0..threads {
            let nbd = nbd.clone();
            scope.spawn(move || {
                let queue = Queue::new(QueueOptions::default().engine(engine));
                let queue = queue.unwrap();
                queue.block_on(async {
                    let all: Vec<_> = (0..TASKS)
                        .map(|task| {
                            let start = (thread * TASKS + task) * part;
                            queue.spawn(work(nbd.clone(), queue.clone(), start, part, STEPS))
                        })
                        .collect();
                    for one in all {
                        one.await;
                    }
                });
            });
        }
    });
    // What one thread sees is what the server has.
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let all = queue
        .block_on(storage::read_vec(&*nbd, &queue, 0, SIZE))
        .unwrap();
    assert!(all == *server.bytes.lock().unwrap());
    let past = queue.block_on(storage::read_vec(&*nbd, &queue, SIZE as u64 - 1, 100));
    assert!(past.unwrap()[1..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_request_that_is_not_polled_holds_up_no_other() {
    for engine in EngineKind::ALL {
        let manners = Manners {
            headers: Headers::Structured,
            hangs_up: None,
            many: false,
        };
        let Ok(queue) = Queue::new(QueueOptions::default().engine(engine)) else {
            continue;
        };
        let _patience = Patience::new(format!("a request that is not polled, {engine}"));
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let _server = Server::start(&socket, manners);
        let nbd = Nbd::open(NbdOptions::new(NbdServer::Unix(socket), "x")).unwrap();
        let read = |at| storage::read_vec(&nbd, &queue, at, 512);
        let mut kept: Vec<_> = (0..3).map(|nth| Box::pin(read(nth * 512))).collect();
        queue.block_on(async {
            for one in &mut kept {
                poll_fn(|context| {
                    let _ = one.as_mut().poll(context);
                    Poll::Ready(())
                })
                .await;
            }
            for nth in 0..20 {
                read(nth * 4096).await.unwrap();
            }
            for one in kept {
                one.await.unwrap();
            }
        });
    }
}

#[test]
fn every_request_gets_its_own_answer() {
    for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
        for (many, connections, threads) in [(false, 4, 1), (false, 4, 4), (true, 3, 4)] {
            let manners = Manners {
                headers,
                hangs_up: None,
                many,
            };
            for engine in EngineKind::ALL {
                run(manners, connections, threads, engine);
            }
        }
    }
}

#[test]
fn no_answer_is_lost_with_a_connection() {
    for (many, connections, threads) in [(false, 1, 1), (false, 1, 4), (true, 4, 4)] {
        let manners = Manners {
            headers: Headers::Structured,
            hangs_up: Some(150),
            many,
        };
        for engine in EngineKind::ALL {
            run(manners, connections, threads, engine);
        }
    }
}

/// Of two who wait, the one that was woken to receive next goes instead.
#[test]
fn who_is_to_lead_may_go() {
    let _patience = Patience::new("who_is_to_lead_may_go".into());
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let (go, gone) = mpsc::channel();
    let server = thread::spawn(move || {
        let server = Server {
            bytes: Mutex::new(vec![7; SIZE]),
            manners: Manners {
                headers: Headers::Simple,
                hangs_up: None,
                many: false,
            },
            clients: Mutex::default(),
        };
        let (mut stream, _) = listener.accept().unwrap();
        let headers = server.handshake(&mut stream).unwrap();
        let mut answers = Vec::new();
        for _ in 0..3 {
            let mut header = vec![0; Request::size(headers)];
            stream.read_exact(&mut header).unwrap();
            let request = Request::decode(headers, &header).unwrap();
            answers.push(server.answer(headers, &request, &[], &mut Random(1)));
        }
        stream.write_all(&answers[0]).unwrap();
        gone.recv().unwrap();
        stream.write_all(&answers[2]).unwrap();
    });
    let nbd = Nbd::open(NbdOptions::new(NbdServer::Unix(socket), "x")).unwrap();
    let nbd = Arc::new(nbd);
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let read = |at: u64| {
        let (nbd, queue) = (nbd.clone(), queue.clone());
        async move { storage::read_vec(&*nbd, &queue, at, 512).await.unwrap() }
    };
    queue.block_on(async {
        let (mut first, mut second) = (Box::pin(read(0)), Box::pin(read(512)));
        poll_fn(|context| {
            assert!(first.as_mut().poll(context).is_pending());
            assert!(second.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        let third = queue.spawn(read(1024));
        first.await;
        drop(second);
        go.send(()).unwrap();
        assert_eq!(third.await, [7; 512]);
    });
    server.join().unwrap();
}

/// The drop of a write does not block the queue. A server that is still at it afterwards would
/// undo what is written to the same place next, so that is not sent before the answer.
#[test]
fn a_dropped_write_ends_before_the_next_one_begins() {
    let _patience = Patience::new("a_dropped_write".into());
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let (dropped, go) = mpsc::channel();
    let ended: [Arc<AtomicBool>; 2] = Default::default();
    let ends = ended.clone();
    let server = thread::spawn(move || {
        let server = Server {
            bytes: Mutex::new(vec![0; SIZE]),
            manners: Manners {
                headers: Headers::Simple,
                hangs_up: None,
                many: false,
            },
            clients: Mutex::default(),
        };
        let (mut stream, _) = listener.accept().unwrap();
        let headers = server.handshake(&mut stream).unwrap();
        let receive = |stream: &mut UnixStream| {
            let mut header = vec![0; Request::size(headers)];
            stream.read_exact(&mut header).unwrap();
            Request::decode(headers, &header).unwrap()
        };
        let receive_payload = |stream: &mut UnixStream, request: &Request| {
            let mut payload = vec![0; request.payload(headers) as usize];
            stream.read_exact(&mut payload).unwrap();
            payload
        };
        let answer = |stream: &mut UnixStream, request: &Request, payload: &[u8]| {
            let answer = server.answer(headers, request, payload, &mut Random(1));
            stream.write_all(&answer).unwrap();
        };
        // Its payload does not fit into the socket.
        let write = receive(&mut stream);
        go.recv().unwrap();
        let payload = receive_payload(&mut stream, &write);
        assert!(payload.iter().all(|byte| *byte == 5));
        let read = receive(&mut stream);
        assert_eq!(read.command, Command::Read);
        answer(&mut stream, &read, &[]);
        let short = Duration::from_millis(100);
        stream.set_read_timeout(Some(short)).unwrap();
        assert!(stream.read_exact(&mut [0]).is_err());
        stream.set_read_timeout(None).unwrap();
        ends[0].store(true, Ordering::SeqCst);
        answer(&mut stream, &write, &payload);
        for end in [None, Some(&ends[1])] {
            let write = receive(&mut stream);
            let payload = receive_payload(&mut stream, &write);
            if let Some(end) = end {
                thread::sleep(short);
                end.store(true, Ordering::SeqCst);
            }
            answer(&mut stream, &write, &payload);
        }
        server.bytes.lock().unwrap()[..512].to_vec()
    });
    let mut options = NbdOptions::new(NbdServer::Unix(socket), "x");
    options.write = true;
    let nbd = Arc::new(Nbd::open(options).unwrap());
    let queue = Queue::new(QueueOptions::default()).unwrap();
    // Polled once, and dropped.
    let give_up = |bytes: &[u8]| {
        queue.block_on(async {
            let mut write = Box::pin(storage::write_slice(&*nbd, &queue, 0, bytes));
            poll_fn(|context| {
                assert!(write.as_mut().poll(context).is_pending());
                Poll::Ready(())
            })
            .await;
        });
    };
    give_up(&vec![5; SIZE - 4096]);
    assert!(!ended[0].load(Ordering::SeqCst));
    // Its memory is another one's now.
    queue.buffer(SIZE).fill(9);
    dropped.send(()).unwrap();
    let next = {
        let (nbd, queue) = (nbd.clone(), queue.clone());
        async move { storage::write_slice(&*nbd, &queue, 0, &[6; 512]).await }
    };
    let next = queue.spawn(next);
    queue.block_on(async {
        let elsewhere = storage::read_vec(&*nbd, &queue, SIZE as u64 - 4096, 512).await;
        assert_eq!(elsewhere.unwrap(), [0; 512]);
        next.await.unwrap();
    });
    assert!(ended[0].load(Ordering::SeqCst));
    // A queue ends when what was dropped on it has.
    give_up(&[7; 512]);
    drop(queue);
    assert!(ended[1].load(Ordering::SeqCst));
    assert_eq!(server.join().unwrap(), [7; 512]);
}

/// The answer to a request that nobody waits for is not late.
#[test]
fn an_idle_connection_stays() {
    let _patience = Patience::new("an_idle_connection_stays".into());
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let manners = Manners {
        headers: Headers::Structured,
        hangs_up: None,
        many: false,
    };
    let _server = Server::start(&socket, manners);
    let mut options = NbdOptions::new(NbdServer::Unix(socket), "x");
    let limit = Duration::from_secs(1);
    options.request_timeout = limit;
    let nbd = Nbd::open(options).unwrap();
    let queue = Queue::new(QueueOptions::default()).unwrap();
    queue.block_on(async {
        let mut read = Box::pin(storage::read_vec(&nbd, &queue, 0, SIZE));
        poll_fn(|context| {
            assert!(read.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        drop(read);
        // Longer than it may owe an answer.
        thread::sleep(3 * limit);
        let read = storage::read_vec(&nbd, &queue, 0, 512).await;
        assert_eq!(read.unwrap(), [0; 512]);
    });
}

#[test]
fn what_was_not_flushed_is_lost_with_the_server() {
    let _patience = Patience::new("a lost server".into());
    let queue = Queue::new(QueueOptions::default()).unwrap();
    // Flushed or not, with which cache mode; whether all goes on.
    for (flushed, cache, goes_on) in [
        (true, CacheMode::WriteBack, true),
        (false, CacheMode::WriteBack, false),
        (false, CacheMode::WriteThrough, true),
        (false, CacheMode::Unsafe, true),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let server = Server::start(
            &socket,
            Manners {
                headers: Headers::Structured,
                hangs_up: None,
                many: true,
            },
        );
        let mut options = NbdOptions::new(NbdServer::Unix(socket), "x");
        options.write = true;
        options.cache = cache;
        options.reconnect_delay = PATIENCE;
        let nbd = Nbd::open(options).unwrap();
        let what = format!("flushed: {flushed}, {cache:?}");
        queue.block_on(async {
            storage::write_slice(&nbd, &queue, 0, &[7; 512])
                .await
                .unwrap();
            if flushed {
                storage::flush(&nbd, &queue).await.unwrap();
            }
            server.hang_up();
            let read = storage::read_vec(&nbd, &queue, 0, 512).await;
            assert_eq!(read.is_ok(), goes_on, "{what}");
            // As durable as the first were, or never.
            let flush = storage::flush(&nbd, &queue).await;
            assert_eq!(flush.is_ok(), goes_on, "{what}");
            if let Err(e) = flush {
                assert!(e.to_string().contains("not flushed yet"), "{e}");
            }
        });
    }
}
