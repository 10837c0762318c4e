//! Guards against an NBD client that returns the data of another request, loses a request, writes
//! to memory after the request has ended, or hangs: many requests of several threads, on one and
//! on several connections. The server replies in any order and in pieces of any size, and ends
//! connections now and then.

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

use crate::common::{Rng, Watchdog, progress};

const SIZE: usize = 4 << 20;
/// How long the client tries to connect again.
const RECONNECT: Duration = Duration::from_secs(300);

/// How a server behaves.
#[derive(Clone, Copy, Debug)]
struct Behaviour {
    headers: Headers,
    /// It ends a connection after at most twice as many replies.
    hangs_up: Option<usize>,
    /// Whether it announces `MULTI_CONN`.
    multi_conn: bool,
}

impl Behaviour {
    fn new(headers: Headers) -> Behaviour {
        Behaviour {
            headers,
            hangs_up: None,
            multi_conn: false,
        }
    }
}

struct Server {
    bytes: Mutex<Vec<u8>>,
    behaviour: Behaviour,
    clients: Mutex<Vec<Connection>>,
}

/// A connection, to end it.
#[derive(Clone)]
struct Connection {
    stream: Arc<UnixStream>,
    ended: Arc<AtomicBool>,
}

impl Connection {
    fn new(stream: &UnixStream) -> Connection {
        Connection {
            stream: Arc::new(stream.try_clone().unwrap()),
            ended: Arc::default(),
        }
    }
}

impl Server {
    /// An export full of `byte`.
    fn new(behaviour: Behaviour, byte: u8) -> Server {
        Server {
            bytes: Mutex::new(vec![byte; SIZE]),
            behaviour,
            clients: Mutex::default(),
        }
    }

    /// Listens at `socket`. The threads end with the process.
    fn start(socket: &std::path::Path, behaviour: Behaviour) -> Arc<Server> {
        let listener = UnixListener::bind(socket).unwrap();
        let server = Arc::new(Server::new(behaviour, 0));
        let ours = server.clone();
        thread::spawn(move || {
            for (seed, stream) in listener.incoming().map_while(Result::ok).enumerate() {
                let server = ours.clone();
                let connection = Connection::new(&stream);
                server.clients.lock().unwrap().push(connection.clone());
                // An error: the client has closed the connection.
                thread::spawn(move || server.serve(stream, connection, Rng::new(seed as u64)));
            }
        });
        server
    }

    /// Ends all connections.
    fn hang_up(&self) {
        for client in self.clients.lock().unwrap().drain(..) {
            self.end(&client);
        }
    }

    /// Ends a connection. None of its requests is executed after that, since the client repeats them, and
    /// then sends others.
    fn end(&self, connection: &Connection) {
        let bytes = self.bytes.lock().unwrap();
        connection.ended.store(true, Ordering::SeqCst);
        drop(bytes);
        let _ = connection.stream.shutdown(Shutdown::Both);
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
            let best = self.behaviour.headers;
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
                    if self.behaviour.multi_conn {
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

    fn serve(
        self: Arc<Self>,
        mut stream: UnixStream,
        connection: Connection,
        mut rng: Rng,
    ) -> std::io::Result<()> {
        let headers = self.handshake(&mut stream)?;
        let (replies, taken) = mpsc::channel::<Vec<u8>>();
        let mut out = stream.try_clone()?;
        let hangs_up = self
            .behaviour
            .hangs_up
            .map(|about| 1 + rng.index(2 * about));
        let mut order = Rng::new(rng.next());
        let (server, ends) = (self.clone(), connection.clone());
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
                    let bytes = batch.swap_remove(order.index(batch.len()));
                    count += 1;
                    let cut = order.index(bytes.len() + 1);
                    let _ = out.write_all(&bytes[..cut]);
                    if Some(count) == hangs_up {
                        server.end(&ends);
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
            let mut bytes = self.bytes.lock().unwrap();
            if connection.ended.load(Ordering::SeqCst) {
                return Ok(());
            }
            let reply = self.execute(&mut bytes, headers, &request, &payload, &mut rng);
            drop(bytes);
            if replies.send(reply).is_err() {
                return Ok(());
            }
        }
    }

    fn reply(&self, headers: Headers, request: &Request, payload: &[u8], rng: &mut Rng) -> Vec<u8> {
        let mut bytes = self.bytes.lock().unwrap();
        self.execute(&mut bytes, headers, request, payload, rng)
    }

    fn execute(
        &self,
        bytes: &mut [u8],
        headers: Headers,
        request: &Request,
        payload: &[u8],
        rng: &mut Rng,
    ) -> Vec<u8> {
        let range = request.offset as usize..(request.offset + request.length) as usize;
        let mut data = Vec::new();
        let mut extents = Vec::new();
        match request.command {
            Command::Read => data = bytes[range].to_vec(),
            Command::Write => bytes[range].copy_from_slice(payload),
            Command::WriteZeroes => bytes[range].fill(0),
            Command::Flush => {}
            Command::BlockStatus => {
                let extent = Extent {
                    length: 1 + rng.below(request.length),
                    flags: 0,
                };
                extents = encode_extents(headers, 3, &[extent]);
            }
            other => panic!("{other:?}"),
        }
        let header = ChunkHeader {
            done: true,
            kind: ChunkKind::None,
            cookie: request.cookie,
            offset: request.offset,
            length: 0,
        };
        match request.command {
            Command::Read if headers != Headers::Simple => pieces(headers, &header, &data, rng),
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
            _ if headers == Headers::Extended || (headers != Headers::Simple && rng.one_in(2)) => {
                header.encode(headers).bytes().to_vec()
            }
            _ => {
                let simple = SimpleReply {
                    error: 0,
                    cookie: request.cookie,
                };
                [&simple.encode()[..], &data].concat()
            }
        }
    }
}

/// The reply to a read, in chunks of any order.
fn pieces(headers: Headers, header: &ChunkHeader, data: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut cuts = vec![0, data.len()];
    for _ in 0..rng.index(4) {
        cuts.push(rng.index(data.len()));
    }
    cuts.sort_unstable();
    cuts.dedup();
    let mut ranges: Vec<_> = cuts.windows(2).map(|pair| pair[0]..pair[1]).collect();
    let mut out = Vec::new();
    while !ranges.is_empty() {
        let range = ranges.swap_remove(rng.index(ranges.len()));
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

async fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    poll_fn(|context| Poll::Ready(pin!(&mut *future).poll(context))).await
}

/// The requests of one task, in a part of the export that no other task uses. The last quarter of
/// the part is for requests that are dropped.
async fn work(nbd: Arc<Nbd>, queue: Queue, start: usize, length: usize, steps: usize) {
    let mut rng = Rng::new(start as u64);
    let own = length / 4 * 3;
    let mut expected = storage::read_vec(&*nbd, &queue, start as u64, own)
        .await
        .unwrap();
    for step in 0..steps {
        progress();
        let from = rng.index(own - 1);
        // Small ranges, and now and then all of it.
        let most = if rng.one_in(8) { own } else { 5000 };
        let count = 1 + rng.index((own - from).min(most));
        let at = (start + from) as u64;
        match rng.index(7) {
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
            4 => dropped(&nbd, &queue, start + own, length - own, &mut rng).await,
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

/// A read or a write whose future is dropped after at most two polls.
async fn dropped(nbd: &Nbd, queue: &Queue, start: usize, length: usize, rng: &mut Rng) {
    let polls = rng.index(3);
    let bytes = vec![9; length];
    let write = rng.one_in(2);
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
fn run(behaviour: Behaviour, connections: usize, threads: usize, engine: EngineKind) {
    const STEPS: usize = 60;
    if engine.start().is_err() {
        println!("skipped: {engine}");
        return;
    }
    let what = format!("{behaviour:?}, {connections} connections, {threads} threads, {engine}");
    println!("{what}");
    let _watchdog = Watchdog::new(&what);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let server = Server::start(&socket, behaviour);
    let mut options = NbdOptions::new(NbdServer::Unix(socket), "x");
    options.write = true;
    options.connections = connections;
    options.reconnect_delay = RECONNECT;
    // A server that ends a connection does not lose what it has replied to.
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
    // The client reads what the server has.
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let all = queue
        .block_on(storage::read_vec(&*nbd, &queue, 0, SIZE))
        .unwrap();
    assert!(all == *server.bytes.lock().unwrap());
    let past = queue.block_on(storage::read_vec(&*nbd, &queue, SIZE as u64 - 1, 100));
    assert!(past.unwrap()[1..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_request_that_is_not_polled_blocks_no_other() {
    for engine in EngineKind::ALL {
        let behaviour = Behaviour::new(Headers::Structured);
        let Ok(queue) = Queue::new(QueueOptions::default().engine(engine)) else {
            continue;
        };
        let _watchdog = Watchdog::new(&format!("a request that is not polled, {engine}"));
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let _server = Server::start(&socket, behaviour);
        let nbd = Nbd::open(NbdOptions::new(NbdServer::Unix(socket), "x")).unwrap();
        let read = |at| storage::read_vec(&nbd, &queue, at, 512);
        let mut kept: Vec<_> = (0..3).map(|nth| Box::pin(read(nth * 512))).collect();
        queue.block_on(async {
            for one in &mut kept {
                let _ = poll_once(one).await;
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
fn every_request_gets_its_own_reply() {
    for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
        for (multi_conn, connections, threads) in [(false, 4, 1), (false, 4, 4), (true, 3, 4)] {
            let behaviour = Behaviour {
                multi_conn,
                ..Behaviour::new(headers)
            };
            for engine in EngineKind::ALL {
                run(behaviour, connections, threads, engine);
            }
        }
    }
}

#[test]
fn requests_are_repeated_after_a_lost_connection() {
    for (multi_conn, connections, threads) in [(false, 1, 1), (false, 1, 4), (true, 4, 4)] {
        let behaviour = Behaviour {
            hangs_up: Some(150),
            multi_conn,
            ..Behaviour::new(Headers::Structured)
        };
        for engine in EngineKind::ALL {
            run(behaviour, connections, threads, engine);
        }
    }
}

/// One task of a queue receives the replies for all requests. Here a request that waits is dropped
/// after the first reply, and a third one must still get its own.
#[test]
fn a_waiting_request_may_be_dropped() {
    let _watchdog = Watchdog::new("a waiting request is dropped");
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let (go, gone) = mpsc::channel();
    let server = thread::spawn(move || {
        let server = Server::new(Behaviour::new(Headers::Simple), 7);
        let (mut stream, _) = listener.accept().unwrap();
        let headers = server.handshake(&mut stream).unwrap();
        let mut replies = Vec::new();
        for _ in 0..3 {
            let mut header = vec![0; Request::size(headers)];
            stream.read_exact(&mut header).unwrap();
            let request = Request::decode(headers, &header).unwrap();
            replies.push(server.reply(headers, &request, &[], &mut Rng::new(1)));
        }
        stream.write_all(&replies[0]).unwrap();
        gone.recv().unwrap();
        stream.write_all(&replies[2]).unwrap();
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
        assert!(poll_once(&mut first).await.is_pending());
        assert!(poll_once(&mut second).await.is_pending());
        let third = queue.spawn(read(1024));
        first.await;
        drop(second);
        go.send(()).unwrap();
        assert_eq!(third.await, [7; 512]);
    });
    server.join().unwrap();
}

/// The drop of a write does not block the queue. Another write to the same range is sent only after
/// the reply to the dropped one, or the server might execute them in the opposite order.
#[test]
fn a_dropped_write_ends_before_the_next_one_begins() {
    let _watchdog = Watchdog::new("a dropped write");
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let (dropped, go) = mpsc::channel();
    let ended: [Arc<AtomicBool>; 2] = Default::default();
    let ends = ended.clone();
    let server = thread::spawn(move || {
        let server = Server::new(Behaviour::new(Headers::Simple), 0);
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
        let reply = |stream: &mut UnixStream, request: &Request, payload: &[u8]| {
            let reply = server.reply(headers, request, payload, &mut Rng::new(1));
            stream.write_all(&reply).unwrap();
        };
        // The payload does not fit into the socket.
        let write = receive(&mut stream);
        go.recv().unwrap();
        let payload = receive_payload(&mut stream, &write);
        assert!(payload.iter().all(|byte| *byte == 5));
        let read = receive(&mut stream);
        assert_eq!(read.command, Command::Read);
        reply(&mut stream, &read, &[]);
        let short = Duration::from_millis(100);
        stream.set_read_timeout(Some(short)).unwrap();
        assert!(stream.read_exact(&mut [0]).is_err());
        stream.set_read_timeout(None).unwrap();
        ends[0].store(true, Ordering::SeqCst);
        reply(&mut stream, &write, &payload);
        for end in [None, Some(&ends[1])] {
            let write = receive(&mut stream);
            let payload = receive_payload(&mut stream, &write);
            if let Some(end) = end {
                thread::sleep(short);
                end.store(true, Ordering::SeqCst);
            }
            reply(&mut stream, &write, &payload);
        }
        server.bytes.lock().unwrap()[..512].to_vec()
    });
    let mut options = NbdOptions::new(NbdServer::Unix(socket), "x");
    options.write = true;
    let nbd = Arc::new(Nbd::open(options).unwrap());
    let queue = Queue::new(QueueOptions::default()).unwrap();
    // Polled once, and dropped.
    let poll_and_drop = |bytes: &[u8]| {
        queue.block_on(async {
            let mut write = Box::pin(storage::write_slice(&*nbd, &queue, 0, bytes));
            assert!(poll_once(&mut write).await.is_pending());
        });
    };
    poll_and_drop(&vec![5; SIZE - 4096]);
    assert!(!ended[0].load(Ordering::SeqCst));
    // The memory of the dropped write may be used again.
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
    // The drop of a queue waits for the dropped write.
    poll_and_drop(&[7; 512]);
    drop(queue);
    assert!(ended[1].load(Ordering::SeqCst));
    assert_eq!(server.join().unwrap(), [7; 512]);
}

/// A connection whose only request was dropped does not time out.
#[test]
fn an_idle_connection_does_not_time_out() {
    let _watchdog = Watchdog::new("an idle connection");
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let behaviour = Behaviour::new(Headers::Structured);
    let _server = Server::start(&socket, behaviour);
    let mut options = NbdOptions::new(NbdServer::Unix(socket), "x");
    let limit = Duration::from_secs(1);
    options.request_timeout = limit;
    let nbd = Nbd::open(options).unwrap();
    let queue = Queue::new(QueueOptions::default()).unwrap();
    queue.block_on(async {
        // The server may have answered before the first poll looks.
        loop {
            let mut read = Box::pin(storage::read_vec(&nbd, &queue, 0, SIZE));
            if poll_once(&mut read).await.is_pending() {
                break;
            }
        }
        // Longer than the timeout of a request.
        thread::sleep(3 * limit);
        let read = storage::read_vec(&nbd, &queue, 0, 512).await;
        assert_eq!(read.unwrap(), [0; 512]);
    });
}

#[test]
fn a_lost_server_with_unflushed_writes_is_an_error() {
    let _watchdog = Watchdog::new("a lost server");
    let queue = Queue::new(QueueOptions::default()).unwrap();
    // Whether the write was flushed; the cache mode; whether later requests succeed.
    for (flushed, cache, succeeds) in [
        (true, CacheMode::WriteBack, true),
        (false, CacheMode::WriteBack, false),
        (false, CacheMode::WriteThrough, true),
        (false, CacheMode::Unsafe, true),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let server = Server::start(
            &socket,
            Behaviour {
                multi_conn: true,
                ..Behaviour::new(Headers::Structured)
            },
        );
        let mut options = NbdOptions::new(NbdServer::Unix(socket), "x");
        options.write = true;
        options.cache = cache;
        options.reconnect_delay = RECONNECT;
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
            assert_eq!(read.is_ok(), succeeds, "{what}");
            // A flush of the new server would not cover the write.
            let flush = storage::flush(&nbd, &queue).await;
            assert_eq!(flush.is_ok(), succeeds, "{what}");
            if let Err(e) = flush {
                assert!(e.to_string().contains("not flushed yet"), "{e}");
            }
        });
    }
}
