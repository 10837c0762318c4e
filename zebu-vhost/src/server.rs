//! The server: accepts front ends, one at a time for each export.

use std::future::Future;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{Shutdown, shutdown, sockopt::socket_peercred};
use vhost::vhost_user::{BackendReqHandler, Error};
use zebu::storage::{Budget, QueueOptions};

use crate::channel::Channel;
use crate::export::Export;
use crate::session::Session;

/// After a failed accept, mostly for want of descriptors, none is tried for this long.
const PAUSE: Duration = Duration::from_millis(100);

/// A running server of exports, each with a socket.
pub struct Server {
    exports: Vec<Arc<Export>>,
    endpoints: Vec<Arc<Endpoint>>,
    threads: Vec<JoinHandle<()>>,
}

/// The socket of an export, and its connection.
struct Endpoint {
    listener: UnixListener,
    stopping: AtomicBool,
    /// The connection that there is.
    connection: Mutex<Option<UnixStream>>,
}

impl Server {
    /// Starts serving each export at its socket. `options` are those of the queue of each
    /// virtqueue. If they have no budget of memory, all virtqueues share one of
    /// [`Budget::SERVERS`].
    ///
    /// # Errors
    ///
    /// A socket or a thread cannot be created.
    pub fn start(
        exports: Vec<(Arc<Export>, UnixListener)>,
        options: &QueueOptions,
    ) -> io::Result<Self> {
        let mut options = options.clone();
        let memory = &mut options.memory;
        memory.get_or_insert_with(|| Budget::new(Budget::SERVERS));
        let mut server = Server {
            exports: Vec::new(),
            endpoints: Vec::new(),
            threads: Vec::new(),
        };
        for (number, (export, listener)) in exports.into_iter().enumerate() {
            listener.set_nonblocking(false)?;
            let endpoint = Arc::new(Endpoint {
                listener,
                stopping: AtomicBool::new(false),
                connection: Mutex::default(),
            });
            server.endpoints.push(endpoint.clone());
            server.exports.push(export.clone());
            let options = options.clone();
            let thread = std::thread::Builder::new()
                .name(format!("vhost-{number}"))
                .spawn(move || endpoint.serve(&export, &options))?;
            server.threads.push(thread);
        }
        Ok(server)
    }

    /// Serves until `stop` is ready. Then requests in flight are finished, and connections are
    /// closed. Returns the exports, which no connection has any more.
    pub async fn run_until(self, stop: impl Future<Output = ()>) -> Vec<Arc<Export>> {
        stop.await;
        for endpoint in &self.endpoints {
            endpoint.close();
        }
        for thread in self.threads {
            let _ = thread.join();
        }
        self.exports
    }
}

impl Endpoint {
    fn connection(&self) -> std::sync::MutexGuard<'_, Option<UnixStream>> {
        self.connection.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Ends [`Endpoint::serve`].
    fn close(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Ends the wait for the next front end, or for the next message.
        let _ = shutdown(&self.listener, Shutdown::Both);
        if let Some(connection) = &*self.connection() {
            let _ = shutdown(connection, Shutdown::Both);
        }
    }

    fn serve(&self, export: &Arc<Export>, options: &QueueOptions) {
        let stopping = || self.stopping.load(Ordering::SeqCst);
        while !stopping() {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(_) if stopping() => return,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    tracing::warn!(
                        "front ends cannot be accepted for now: {}",
                        zebu::strerror(&e)
                    );
                    std::thread::sleep(PAUSE);
                    continue;
                }
            };
            let name = export.name();
            let process = socket_peercred(&stream).map_or(0, |who| who.pid.as_raw_nonzero().get());
            tracing::info!("export {name:?}: process {process} connected");
            let end = self.session(export, options, stream);
            let end = match stopping() {
                true => "the server is stopping".into(),
                false => end.to_string(),
            };
            tracing::info!("export {name:?}: the connection ended: {end}");
        }
    }

    /// Serves a connection. No request is in flight when it returns.
    fn session(&self, export: &Arc<Export>, options: &QueueOptions, stream: UnixStream) -> Error {
        let clones = (stream.try_clone(), stream.try_clone());
        let (Ok(clone), Ok(looked_at)) = clones else {
            return Error::SocketError(io::Error::other("no more descriptors"));
        };
        *self.connection() = Some(clone);
        let _client = export.statistics().connected();
        let session = Arc::new(Mutex::new(Session::new(export, options)));
        let mut handler = BackendReqHandler::from_stream(stream, session);
        let end = loop {
            if self.stopping.load(Ordering::SeqCst) {
                break Error::Disconnected;
            }
            match Channel::take(&looked_at) {
                Ok(Some(channel)) => export.set_channel(Some(channel)),
                Ok(None) => {
                    if let Err(end) = handler.handle_request() {
                        break end;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => break Error::SocketError(e),
            }
        };
        export.set_channel(None);
        // Stops the rings.
        drop(handler);
        *self.connection() = None;
        end
    }
}
