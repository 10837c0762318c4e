//! Transmission: requests are received and replies are sent.
//!
//! One future reads requests and one writes replies; tasks of the connection's queue execute the
//! requests (`execute.rs`). The reader takes as many requests as one receive returns. The payload
//! of a write is received into the aligned buffer that it is written from, except for what came
//! with the header. The writer sends all replies that are ready by one send.
//!
//! The bounds of `connection.rs` count a request until its reply is in the socket. So a client
//! that does not receive its replies is not read from any more.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::rc::Rc;
use std::task::Poll;
use std::time::Instant;

use zebu::internal::nbd::{Command, MAX_PAYLOAD, ProtocolError, Request, StatusFilter, command};

use crate::connection::{Connection, Job, PATIENCE, Payload, Permit};
use crate::execute::{PIECE, execute};
use crate::input::Input;
use crate::race::{First, race};
use crate::reply::Reply;
use crate::status;

/// Payloads that are too long are skipped up to this; a longer one ends the connection.
const MAX_SKIPPED: u64 = 256 << 20;
/// Parts of replies in one send.
const MAX_SLICES: usize = 512;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum End {
    #[error("the client disconnected")]
    Disconnected,
    #[error("the client closed the connection")]
    Closed,
    #[error("the server is stopping")]
    Stopped,
    #[error("protocol error: {0}")]
    Protocol(String),
    #[error("{}", zebu::strerror(.0))]
    Io(#[from] io::Error),
}

impl From<ProtocolError> for End {
    fn from(error: ProtocolError) -> Self {
        End::Protocol(error.to_string())
    }
}

enum Never {}

/// Serves the client's requests until it disconnects or `stopping` returns true, and then finishes
/// those in flight.
pub async fn serve(connection: Rc<Connection>, stopping: impl Fn() -> bool) -> End {
    // From the page cache, larger batches of requests are faster. From a disk they are slower,
    // since it idles between them.
    if !connection.export.device().is_direct() {
        connection.transport.enlarge_send_buffer();
    }
    let writer = connection.queue().spawn(connection.clone().write());
    let end = match connection.read(&stopping).await {
        Ok(never) => match never {},
        Err(_) if stopping() => End::Stopped,
        Err(end) => end,
    };
    let pool = &connection.pool;
    let idle = pool.wait_for(|pool| pool.requests() == 0);
    if let First::B(_) = race(idle, connection.queue().sleep(PATIENCE)).await {
        connection.given_up.set(true);
        connection.transport.stop();
        pool.wait_for(|pool| pool.requests() == 0).await;
    }
    connection.ending.set(true);
    pool.close().await;
    connection.wake_writer();
    writer.await;
    end
}

impl Connection {
    /// Reads requests and starts them.
    async fn read(self: &Rc<Self>, stopping: &impl Fn() -> bool) -> Result<Never, End> {
        let mut input = Input::new();
        let size = Request::size(self.headers);
        loop {
            while let Some(header) = input.take(size) {
                let request = Request::decode(self.headers, header)?;
                if request.command == Command::Disconnect {
                    return Err(End::Disconnected);
                }
                self.start(request, &mut input).await?;
                if stopping() {
                    return Err(End::Stopped);
                }
            }
            if input.fill(&self.transport, &mut []).await? == 0 {
                return Err(match input.is_empty() {
                    true => End::Closed,
                    false => half_a_request(),
                });
            }
        }
    }

    async fn start(self: &Rc<Self>, request: Request, input: &mut Input) -> Result<(), End> {
        let length = request.payload(self.headers);
        let memory = match request.command {
            Command::Read => request.length.min(MAX_PAYLOAD.into()) as usize,
            Command::Cache => PIECE,
            Command::BlockStatus if request.flags & command::REQ_ONE == 0 => status::MEMORY,
            _ => length.min(MAX_PAYLOAD.into()) as usize,
        };
        let permit = self.permit(memory).await;
        let start = Instant::now();
        let payload = match length {
            0 => None,
            _ if permit.refused => Some(self.skip(length, input).await?),
            _ => Some(self.payload(&request, length, input).await?),
        };
        let job = Job {
            request,
            payload,
            permit,
            start,
        };
        self.pool.start(job, || self.clone().work());
        Ok(())
    }

    /// A task of the pool.
    async fn work(self: Rc<Self>) {
        while let Some(job) = self.pool.next().await {
            execute(&self, job).await;
        }
    }

    async fn payload(
        &self,
        request: &Request,
        length: u64,
        input: &mut Input,
    ) -> Result<Payload, End> {
        let most = match request.command {
            Command::Write => MAX_PAYLOAD.into(),
            Command::BlockStatus => 1 << 10,
            _ => 0,
        };
        if length > most {
            return self.skip(length, input).await;
        }
        let Ok(mut buffer) = self.queue().try_buffer(length as usize) else {
            self.skip(length, input).await?;
            return Ok(Payload::NoMemory);
        };
        let bytes = &mut buffer[..length as usize];
        if !input.read(&self.transport, bytes).await? {
            return Err(half_a_request());
        }
        Ok(match request.command {
            Command::Write => Payload::Data(buffer),
            _ => StatusFilter::decode(bytes).map_or(Payload::Skipped, Payload::Filter),
        })
    }

    async fn skip(&self, length: u64, input: &mut Input) -> Result<Payload, End> {
        if length > MAX_SKIPPED {
            return Err(End::Protocol(format!("a payload of {length} bytes")));
        }
        match input.skip(&self.transport, length).await? {
            true => Ok(Payload::Skipped),
            false => Err(half_a_request()),
        }
    }

    /// Sends replies until no more will follow.
    async fn write(self: Rc<Self>) {
        let mut sending = VecDeque::new();
        loop {
            poll_fn(|context| {
                if !self.outgoing.borrow().is_empty() || self.ending.get() {
                    return Poll::Ready(());
                }
                self.writer.set(Some(context.waker().clone()));
                Poll::Pending
            })
            .await;
            if self.outgoing.borrow().is_empty() {
                return;
            }
            if self.write_ready(&mut sending).await.is_err() {
                // The reader fails likewise.
                self.broken.set(true);
                self.transport.stop();
                sending.clear();
                let dropped = self.outgoing.take();
                drop(dropped);
            }
        }
    }

    /// Sends all replies that are ready, and those that follow meanwhile.
    async fn write_ready(&self, sending: &mut VecDeque<(Reply, Permit)>) -> io::Result<()> {
        // Bytes of the first reply that were sent.
        let mut sent = 0;
        loop {
            sending.append(&mut self.outgoing.borrow_mut());
            if sending.is_empty() {
                return self.transport.flush().await;
            }
            let n = {
                let mut slices = Vec::with_capacity(2 * sending.len().min(MAX_SLICES));
                for (reply, _) in sending.iter() {
                    reply.slices(&mut slices);
                    if slices.len() >= MAX_SLICES {
                        break;
                    }
                }
                let mut slices = &mut slices[..];
                IoSlice::advance_slices(&mut slices, sent);
                let most = slices.len().min(2 * MAX_SLICES);
                self.transport.write(&slices[..most]).await?
            };
            sent += n;
            while let Some((first, _)) = sending.front()
                && sent >= first.length()
            {
                sent -= first.length();
                sending.pop_front();
            }
        }
    }
}

fn half_a_request() -> End {
    End::Protocol("half a request".into())
}
