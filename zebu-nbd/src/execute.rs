//! One request: checked, executed, replied to.

use std::future::Future;

use zebu::block::Zeroing;
use zebu::internal::nbd::{Command, ErrorCode, Extent, Headers, MAX_PAYLOAD, Request, command};
use zebu::storage::PoolBuffer;

use crate::connection::{Connection, Job, Payload};
use crate::reply::{Failed, Piece, Reply};
use crate::status;

/// Bytes that a cache request reads at a time.
pub const PIECE: usize = 1 << 20;
/// Bytes that are discarded or zeroed at a time. Between two steps the request ends if the client
/// has disconnected.
const STEP: u64 = 1 << 30;
/// Chunks of one read at most; the rest is sent as data.
const MAX_PIECES: usize = 256;
/// A shorter hole is sent as data.
const SHORTEST_HOLE: usize = 4096;

/// Executes a request and sends its reply.
pub async fn execute(connection: &Connection, job: Job) {
    let Job {
        request,
        payload,
        permit,
        start,
    } = job;
    let kind = crate::export::kind(request.command);
    let in_flight = kind.map(|kind| connection.export.statistics().begin(kind));
    let result = match check(connection, &request, payload.as_ref(), permit.refused) {
        Ok(()) => dispatch(connection, &request, payload).await,
        Err(failed) => Err(failed),
    };
    drop(in_flight);
    if let Some(kind) = kind {
        let statistics = connection.export.statistics();
        statistics.add(kind, request.length, start.elapsed(), result.is_err());
    }
    let headers = connection.headers;
    let reply = match result {
        Ok(outcome) => outcome.reply(headers, &request),
        Err(failed) => {
            tracing::debug!(command = ?request.command, error = failed.message, "a request failed");
            Reply::error(headers, &request, &failed)
        }
    };
    connection.send(reply, permit);
}

/// The result of a request that did not fail.
enum Outcome {
    Done,
    /// A read, at the start of the buffer.
    Data(PoolBuffer),
    /// A read in pieces. The buffer is present if any of them is data.
    Sparse(Vec<Piece>, Option<PoolBuffer>),
    /// The contexts, and the extents of each.
    Status(Vec<u32>, Vec<Vec<Extent>>),
}

impl Outcome {
    fn reply(self, headers: Headers, request: &Request) -> Reply {
        match self {
            Outcome::Done => Reply::ok(headers, request),
            Outcome::Data(buffer) => Reply::data(headers, request, buffer),
            Outcome::Sparse(pieces, buffer) => Reply::sparse(headers, request, &pieces, buffer),
            Outcome::Status(contexts, extents) => {
                Reply::status(headers, request, &contexts, &extents)
            }
        }
    }
}

fn invalid<T>(message: &str) -> Result<T, Failed> {
    Err(Failed::new(ErrorCode::Inval, message))
}

/// The flags that a command may have. FUA is allowed with all, as in QEMU.
fn allowed_flags(headers: Headers, command: Command) -> u16 {
    use zebu::internal::nbd::command::*;
    let payload = match headers {
        Headers::Extended => PAYLOAD_LEN,
        _ => 0,
    };
    let own = match command {
        Command::Read if headers >= Headers::Structured => DF,
        Command::Write => payload,
        Command::WriteZeroes => NO_HOLE | FAST_ZERO,
        Command::BlockStatus => REQ_ONE | payload,
        _ => 0,
    };
    FUA | own
}

fn check(
    connection: &Connection,
    request: &Request,
    payload: Option<&Payload>,
    refused: bool,
) -> Result<(), Failed> {
    let writes = matches!(
        request.command,
        Command::Write | Command::Trim | Command::WriteZeroes
    );
    if request.flags & !allowed_flags(connection.headers, request.command) != 0 {
        return invalid("flags that this command does not have");
    }
    if writes && !connection.export.device().is_writable() {
        return Err(Failed::new(ErrorCode::Perm, "the export is read-only"));
    }
    if refused || matches!(payload, Some(Payload::NoMemory)) {
        let text = "no memory is free for a request of this size";
        return Err(Failed::new(ErrorCode::NoMem, text));
    }
    if matches!(payload, Some(Payload::Skipped)) {
        return invalid("the payload is too long or malformed");
    }
    let limited = matches!(request.command, Command::Read | Command::Write);
    if limited && request.length > MAX_PAYLOAD.into() {
        return invalid("the request is too long");
    }
    if request.command == Command::Flush {
        return Ok(());
    }
    let length = match payload {
        Some(Payload::Filter(filter)) => filter.length,
        _ => request.length,
    };
    let end = request.offset.checked_add(length);
    if end.is_none_or(|end| end > connection.export.size()) {
        let code = match request.command {
            Command::Write | Command::WriteZeroes => ErrorCode::NoSpc,
            _ => ErrorCode::Inval,
        };
        return Err(Failed::new(code, "the request is past the end"));
    }
    Ok(())
}

async fn dispatch(
    connection: &Connection,
    request: &Request,
    payload: Option<Payload>,
) -> Result<Outcome, Failed> {
    let (queue, export) = (connection.queue(), &connection.export);
    // The offset of a flush has no meaning and may have any value.
    let offset = export.options().offset.wrapping_add(request.offset);
    // The futures of rare requests are boxed: each task has this future, also those that only read
    // and write.
    match (request.command, payload) {
        (Command::Read, _) => return read(connection, request, offset).await,
        (Command::Write, Some(Payload::Data(buffer))) => {
            let length = request.length as usize;
            let device = export.device();
            device.write_buffer(queue, offset, buffer, length).await.1?;
        }
        (Command::BlockStatus, payload) => {
            return Box::pin(block_status(connection, request, payload)).await;
        }
        _ => Box::pin(change(connection, request, offset)).await?,
    }
    let writes = matches!(
        request.command,
        Command::Write | Command::Trim | Command::WriteZeroes
    );
    if request.flags & command::FUA != 0 && writes {
        Box::pin(export.device().flush(queue)).await?;
    }
    Ok(Outcome::Done)
}

/// Executes a request whose reply has no payload.
async fn change(connection: &Connection, request: &Request, offset: u64) -> Result<(), Failed> {
    let (queue, device) = (connection.queue(), connection.export.device());
    let length = request.length;
    match request.command {
        // A write of no bytes.
        Command::Write => Ok(()),
        Command::Flush => Ok(device.flush(queue).await?),
        Command::Trim => {
            let discard = |at, length| device.discard(queue, at, length);
            in_steps(connection, offset, length, discard).await
        }
        Command::WriteZeroes => {
            let zeroing = match request.flags & command::NO_HOLE {
                0 => Zeroing::Unmap,
                _ => Zeroing::Keep,
            };
            if request.flags & command::FAST_ZERO != 0 {
                let zeroed = device.write_zeroes_quickly(queue, offset, length, zeroing);
                return zeroed.await.map_err(not_fast);
            }
            let zero = |at, length| device.write_zeroes(queue, at, length, zeroing);
            in_steps(connection, offset, length, zero).await
        }
        Command::Cache => cache(connection, offset, length).await,
        _ => invalid("an unknown command"),
    }
}

/// Calls `one` for the range in steps of [`STEP`]. Fails when replies are not wanted any more.
async fn in_steps<F: Future<Output = zebu::Result<()>>>(
    connection: &Connection,
    offset: u64,
    length: u64,
    one: impl Fn(u64, u64) -> F,
) -> Result<(), Failed> {
    let (mut at, end) = (offset, offset + length);
    while at < end {
        if connection.is_given_up() {
            return Err(Failed::new(ErrorCode::Shutdown, "the connection has ended"));
        }
        let next = (at / STEP * STEP + STEP).min(end);
        one(at, next - at).await?;
        at = next;
    }
    Ok(())
}

fn not_fast(error: zebu::Error) -> Failed {
    match error.errno() {
        libc::EOPNOTSUPP => Failed::new(ErrorCode::NotSup, "zeroes would be written as data"),
        _ => error.into(),
    }
}

/// Reads a range, which fills the caches below.
async fn cache(connection: &Connection, offset: u64, length: u64) -> Result<(), Failed> {
    let (queue, device) = (connection.queue(), connection.export.device());
    let mut buffer = queue.buffer(PIECE);
    let mut at = 0;
    while at < length {
        if connection.is_given_up() {
            return Err(Failed::new(ErrorCode::Shutdown, "the connection has ended"));
        }
        let n = (length - at).min(PIECE as u64);
        let (back, result) = device
            .read_buffer(queue, offset + at, buffer, n as usize)
            .await;
        result?;
        buffer = back;
        at += n;
    }
    Ok(())
}

async fn read(connection: &Connection, request: &Request, offset: u64) -> Result<Outcome, Failed> {
    let (queue, headers) = (connection.queue(), connection.headers);
    let length = request.length as usize;
    if length == 0 {
        return Ok(Outcome::Done);
    }
    let pieces = match headers {
        Headers::Simple => Vec::new(),
        _ => pieces(connection, offset, length).await?,
    };
    let one = request.flags & command::DF != 0;
    let (sparse, zero) = match pieces.as_slice() {
        [piece] => (!piece.data, !piece.data),
        pieces => (!pieces.is_empty() && !one, false),
    };
    if zero {
        return Ok(Outcome::Sparse(pieces, None));
    }
    let buffer: PoolBuffer = queue.try_buffer(length).map_err(zebu::Error::from)?;
    let device = connection.export.device();
    let (buffer, result) = device.read_buffer(queue, offset, buffer, length).await;
    result?;
    Ok(match sparse {
        true => Outcome::Sparse(pieces, Some(buffer)),
        false => Outcome::Data(buffer),
    })
}

/// The pieces of a range: known zeroes, and data.
async fn pieces(connection: &Connection, offset: u64, length: usize) -> Result<Vec<Piece>, Failed> {
    let (queue, device) = (connection.queue(), connection.export.device());
    let mut pieces: Vec<Piece> = Vec::new();
    let mut at = 0;
    while at < length {
        let left = (length - at) as u64;
        let full = pieces.len() >= MAX_PIECES;
        let (n, zero) = match full {
            true => (length - at, false),
            false => {
                let status = device.status(queue, offset + at as u64, left).await?;
                (status.length as usize, status.zero)
            }
        };
        let data = !zero || n < SHORTEST_HOLE.min(length);
        match pieces.last_mut() {
            Some(last) if last.data == data => last.range.end += n,
            _ => pieces.push(Piece {
                range: at..at + n,
                data,
            }),
        }
        at += n;
    }
    Ok(pieces)
}

async fn block_status(
    connection: &Connection,
    request: &Request,
    payload: Option<Payload>,
) -> Result<Outcome, Failed> {
    let (length, contexts) = match payload {
        Some(Payload::Filter(filter)) => {
            let mut contexts = filter.contexts;
            contexts.sort_unstable();
            if contexts.windows(2).any(|pair| pair[0] == pair[1])
                || contexts.iter().any(|id| !connection.contexts.contains(id))
            {
                return invalid("metadata contexts that were not chosen");
            }
            (filter.length, contexts)
        }
        _ => (request.length, connection.contexts.clone()),
    };
    if length == 0 || contexts.is_empty() {
        return invalid("no bytes, or no metadata contexts were chosen");
    }
    let headers = connection.headers;
    let extents = status::extents(
        &connection.export,
        connection.queue(),
        headers,
        &contexts,
        (request.offset, length),
        request.flags & command::REQ_ONE != 0,
    )
    .await?;
    Ok(Outcome::Status(contexts, extents))
}

#[cfg(test)]
mod tests {
    //! Guards against futures that cost more to create than the request, and take much memory for
    //! each request in flight.
    use super::*;
    use zebu::block::Device;
    use zebu::storage::Queue;

    fn size<F>(_: impl FnOnce() -> F) -> usize {
        size_of::<F>()
    }

    fn none<T>() -> T {
        unreachable!("only its type is asked for")
    }

    #[test]
    fn futures_are_small() {
        let bytes = size(|| execute(none::<&Connection>(), none()));
        assert!(bytes < 4096, "{bytes} bytes");
        let bytes = size(|| none::<&Device>().write(none::<&Queue>(), 0, none()));
        assert!(bytes < 3072, "{bytes} bytes");
    }
}
