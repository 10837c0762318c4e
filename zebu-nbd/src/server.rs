//! The server: accepts clients, and serves each in a thread.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use zebu::storage::{Budget, Queue, QueueOptions};
use zebu::tls::ServerTls;

use crate::budget;
use crate::connection::{Connection, PATIENCE};
use crate::export::Export;
use crate::handshake::{NoAgreement, negotiate};
use crate::listen::Listener;
use crate::race::{First, race};
use crate::transmission;
use crate::transport::{Stream, Transport};

/// After a failed accept, mostly for want of descriptors, none is tried for this long.
const PAUSE: Duration = Duration::from_millis(100);

/// Options of a [`Server`].
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Clients at a time; more wait in the listen queue.
    pub clients: usize,
    /// Whether the server goes on after the last client that chose an export has disconnected.
    pub persistent: bool,
    /// How long a client may take to choose an export.
    pub handshake_limit: Option<Duration>,
    /// Certificates or keys. Clients without TLS are then refused.
    pub tls: Option<ServerTls>,
    /// Options of each connection's queue.
    pub queue: QueueOptions,
}

/// A server that does not run yet.
pub struct Server {
    shared: Arc<Shared>,
    options: ServerOptions,
}

/// Shared by the server and its connections.
struct Shared {
    exports: Vec<Arc<Export>>,
    budget: Budget,
    stopping: AtomicBool,
    /// Whether a client has chosen an export.
    chosen: AtomicBool,
    /// Readable when the server stops: then `stopper` is shut down.
    stop: UnixStream,
    stopper: UnixStream,
    /// The numbers of connections that have ended.
    ended: Mutex<Vec<u64>>,
    /// Receives a byte for each of these.
    ended_event: UnixStream,
}

impl Server {
    /// A server of `exports`, whose names must differ. If the options of the queues have no budget
    /// of memory, all connections share one of [`Budget::SERVERS`].
    ///
    /// # Errors
    ///
    /// The process has no descriptors left.
    pub fn new(exports: Vec<Arc<Export>>, mut options: ServerOptions) -> io::Result<Self> {
        let (stop, stopper) = UnixStream::pair()?;
        let memory = &mut options.queue.memory;
        memory.get_or_insert_with(|| Budget::new(Budget::SERVERS));
        let keep = &mut options.queue.keep;
        *keep = (*keep).min(budget::share(options.clients));
        // Replaced in `run`.
        let (_, ended_event) = UnixStream::pair()?;
        Ok(Server {
            shared: Arc::new(Shared {
                exports,
                budget: budget::reserve(),
                stopping: AtomicBool::new(false),
                chosen: AtomicBool::new(false),
                stop,
                stopper,
                ended: Mutex::default(),
                ended_event,
            }),
            options,
        })
    }

    /// Accepts clients on `queue` until `stop` is ready. A server that is not persistent also ends
    /// when its last client has disconnected.
    ///
    /// Then it accepts no more, finishes requests in flight and ends all connections. Returns the
    /// exports, which no connection has any more.
    ///
    /// # Errors
    ///
    /// The listeners, or the descriptors of the server itself, cannot be waited for.
    pub async fn run(
        mut self,
        queue: &Queue,
        listeners: Vec<Listener>,
        stop: impl Future<Output = ()>,
    ) -> io::Result<Vec<Arc<Export>>> {
        let (event, sender) = UnixStream::pair()?;
        event.set_nonblocking(true)?;
        // After the server has stopped nothing is read. While it runs, a full socket is readable.
        sender.set_nonblocking(true)?;
        let shared = Arc::get_mut(&mut self.shared).expect("not shared before it runs");
        shared.ended_event = sender;
        let mut clients = Clients {
            server: &self,
            event,
            threads: HashMap::new(),
            next: 0,
        };
        let result = {
            let serving = pin!(clients.serve(queue, &listeners));
            match race(serving, stop).await {
                First::A(result) => result,
                First::B(()) => Ok(()),
            }
        };
        drop(listeners);
        self.shared.stopping.store(true, Ordering::SeqCst);
        let _ = self.shared.stopper.shutdown(Shutdown::Both);
        for (_, thread) in clients.threads.drain() {
            let _ = thread.join();
        }
        drop(clients);
        result?;
        let shared = Arc::into_inner(self.shared).expect("all threads have ended");
        Ok(shared.exports)
    }
}

/// The connections.
struct Clients<'a> {
    server: &'a Server,
    /// Readable when connections have ended.
    event: UnixStream,
    threads: HashMap<u64, JoinHandle<()>>,
    next: u64,
}

impl Clients<'_> {
    async fn serve(&mut self, queue: &Queue, listeners: &[Listener]) -> io::Result<()> {
        loop {
            let full = self.threads.len() >= self.server.options.clients;
            if full {
                queue.readable(&self.event).await?;
            } else {
                let client = any_readable(queue, listeners);
                race(client, queue.readable(&self.event)).await;
            }
            self.join_ended();
            let (options, shared) = (&self.server.options, &self.server.shared);
            let served = shared.chosen.load(Ordering::SeqCst);
            if served && !options.persistent && self.threads.is_empty() {
                return Ok(());
            }
            for listener in listeners {
                if let Err(e) = self.accept(listener) {
                    tracing::warn!("clients cannot be accepted for now: {}", zebu::strerror(&e));
                    // The timer takes a descriptor, too.
                    if queue.sleep(PAUSE).await.is_err() {
                        std::thread::sleep(PAUSE);
                    }
                }
            }
        }
    }

    /// Accepts the clients that wait at `listener`, up to the limit.
    fn accept(&mut self, listener: &Listener) -> io::Result<()> {
        while self.threads.len() < self.server.options.clients {
            match listener.accept() {
                Ok((stream, client)) => self.start(stream, client)?,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // The client has gone already.
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn start(&mut self, stream: Stream, client: String) -> io::Result<()> {
        let number = self.next;
        self.next += 1;
        let shared = self.server.shared.clone();
        let options = self.server.options.clone();
        let thread = std::thread::Builder::new()
            .name(format!("nbd-{number}"))
            .spawn(move || {
                // Dropped also in a panic: the server counts its threads.
                let _ended = Ended(&shared, number);
                connection(&shared, &options, stream, number, &client);
            })?;
        self.threads.insert(number, thread);
        Ok(())
    }

    /// Joins the threads of connections that have ended.
    fn join_ended(&mut self) {
        let mut bytes = [0; 64];
        while matches!((&self.event).read(&mut bytes), Ok(n) if n > 0) {}
        let shared = &self.server.shared;
        let ended = std::mem::take(&mut *shared.ended.lock().unwrap_or_else(|e| e.into_inner()));
        for number in ended {
            if let Some(thread) = self.threads.remove(&number) {
                let _ = thread.join();
            }
        }
    }
}

/// Notifies the server that a connection has ended.
struct Ended<'a>(&'a Shared, u64);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let mut ended = self.0.ended.lock().unwrap_or_else(|e| e.into_inner());
        ended.push(self.1);
        drop(ended);
        let _ = (&self.0.ended_event).write(&[0]);
    }
}

/// Waits until a client waits at one of `listeners`. With none, waits for ever.
async fn any_readable(queue: &Queue, listeners: &[Listener]) {
    let mut waits: Vec<_> = listeners.iter().map(|l| queue.readable(l)).collect();
    poll_fn(|context| {
        let mut any = waits.iter_mut().map(|wait| pin!(wait).poll(context));
        match any.any(|poll| poll.is_ready()) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await
}

/// The thread of a connection.
fn connection(shared: &Shared, options: &ServerOptions, stream: Stream, number: u64, client: &str) {
    tracing::info!("connection {number}: {client} connected");
    let queue = match Queue::new(options.queue.clone()) {
        Ok(queue) => queue,
        Err(e) => {
            tracing::error!("connection {number}: {}", zebu::strerror(&e));
            return;
        }
    };
    let transport = Rc::new(Transport::new(stream, queue.clone()));
    let serving = serve(shared, options, transport.clone(), number);
    let end = queue.block_on(transport.until_stopped(&shared.stop, PATIENCE, serving));
    transport.close();
    tracing::info!("connection {number}: ended: {end}");
}

async fn serve(
    shared: &Shared,
    options: &ServerOptions,
    transport: Rc<Transport>,
    number: u64,
) -> String {
    let queue = transport.queue().clone();
    let limit = async {
        match options.handshake_limit {
            Some(limit) => drop(queue.sleep(limit).await),
            None => std::future::pending().await,
        }
    };
    let negotiating = negotiate(&transport, &shared.exports, options.tls.as_ref());
    let agreed = match race(negotiating, limit).await {
        First::A(Ok(agreed)) => agreed,
        First::A(Err(NoAgreement::Io(e))) if e.kind() == io::ErrorKind::UnexpectedEof => {
            return "the client disconnected during the handshake".into();
        }
        First::A(Err(e)) => return format!("the handshake failed: {e}"),
        First::B(()) => return "the handshake took too long".into(),
    };
    tracing::info!(
        "connection {number}: export {:?}, {:?} headers",
        agreed.export.options().name,
        agreed.headers
    );
    shared.chosen.store(true, Ordering::SeqCst);
    let export = agreed.export.clone();
    let _client = export.statistics().connected();
    let (share, reserve) = (budget::share(options.clients), shared.budget.clone());
    let connection = Connection::new(transport, agreed, share, reserve);
    let stopping = || shared.stopping.load(Ordering::SeqCst);
    let end = transmission::serve(connection, stopping).await;
    end.to_string()
}
