//! Bytes on their way into a stream, which a thread writes.

use std::io::{self, Write};
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::channel::Channel;
use crate::Error;
use crate::lock;
use crate::storage::Buffer;

/// Bytes that wait to be written at most.
const WAITING: usize = 8 << 20;
/// Zeroes that are written at a time.
const ZEROES: usize = 1 << 20;

/// Where a stream goes.
pub trait StreamSink: Send {
    /// The stream will have so many bytes. Called before the first of them, if that is known then.
    fn expect(&mut self, _length: u64) {}

    /// Takes the next bytes.
    ///
    /// # Errors
    /// If they cannot be written: the stream ends.
    fn send(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// The stream is complete. Not called otherwise.
    ///
    /// # Errors
    /// If it could not be written as a whole.
    fn finish(&mut self) -> io::Result<()>;
}

impl<W: Write + Send> StreamSink for W {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.flush()
    }
}

/// What is to be written.
#[derive(Debug)]
enum Part {
    /// How long the stream will be.
    Length(u64),
    Bytes(Vec<u8>),
    Slice(Slice),
    Zeroes(u64),
}

/// A range of a buffer, which is used again once all its ranges are written.
#[derive(Clone, Debug)]
pub struct Slice {
    buffer: Arc<Buffer>,
    range: Range<usize>,
}

impl Deref for Slice {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }
}

impl Slice {
    /// A range of it.
    pub fn slice(&self, range: Range<usize>) -> Slice {
        let start = self.range.start;
        Slice {
            buffer: self.buffer.clone(),
            range: start + range.start..start + range.end,
        }
    }
}

/// A stream that is written in order.
#[derive(Debug)]
pub struct Pipe {
    channel: Arc<Channel<Part>>,
    /// Why it could not be written.
    failure: Arc<Mutex<Option<io::Error>>>,
    /// Buffers that were written.
    spare: Arc<Mutex<Vec<Buffer>>>,
    thread: Option<JoinHandle<()>>,
    /// Bytes that were sent.
    length: u64,
    /// Bytes of the buffer that was taken last, if nothing of it was sent.
    taken: usize,
}

impl Pipe {
    /// To a sink, which gets large pieces.
    pub fn new(mut sink: Box<dyn StreamSink>) -> io::Result<Pipe> {
        let channel = Arc::new(Channel::new(WAITING));
        let failure: Arc<Mutex<Option<io::Error>>> = Arc::default();
        let spare = Arc::default();
        let thread = {
            let (channel, failure) = (channel.clone(), failure.clone());
            let spare = Arc::clone(&spare);
            std::thread::Builder::new()
                .name("zebu-stream".into())
                .spawn(move || {
                    if let Err(error) = write_all(&mut *sink, &channel, &spare) {
                        *lock(&failure) = Some(error);
                        channel.stop();
                    }
                })?
        };
        Ok(Pipe {
            channel,
            failure,
            spare,
            thread: Some(thread),
            length: 0,
            taken: 0,
        })
    }

    /// Ends it, whatever is left to be written.
    pub fn stopper(&self) -> impl Fn() + Send + Sync + use<> {
        let channel = self.channel.clone();
        move || channel.stop()
    }

    /// Bytes that were sent.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Says how many bytes there will be, before the first one.
    pub fn expect(&self, length: u64) -> io::Result<()> {
        self.send_part(0, Part::Length(length))
    }

    /// Sends bytes. Blocks while too many wait.
    pub fn send(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        self.length += bytes.len() as u64;
        match bytes.len() {
            0 => Ok(()),
            count => self.send_part(count, Part::Bytes(bytes)),
        }
    }

    /// Takes a buffer of which slices are to be sent, in exchange for one of the same length.
    pub fn exchange(&mut self, buffer: &mut Buffer) -> Slice {
        let length = buffer.len();
        let spare = lock(&self.spare).pop().filter(|b| b.len() == length);
        let spare = spare.unwrap_or_else(|| Buffer::new(length));
        self.taken = length;
        Slice {
            buffer: Arc::new(std::mem::replace(buffer, spare)),
            range: 0..length,
        }
    }

    /// Sends a slice of the buffer that was taken last. Blocks while too many bytes wait.
    pub fn send_slice(&mut self, slice: Slice) -> io::Result<()> {
        self.length += slice.len() as u64;
        // However little is sent of a buffer, all of it waits.
        let waiting = std::mem::take(&mut self.taken);
        self.send_part(waiting, Part::Slice(slice))
    }

    /// Sends so many zeroes.
    pub fn send_zeroes(&mut self, count: u64) -> io::Result<()> {
        self.length += count;
        match count {
            0 => Ok(()),
            count => self.send_part(0, Part::Zeroes(count)),
        }
    }

    /// Sends zeroes up to a multiple of `unit`.
    pub fn pad(&mut self, unit: u64) -> io::Result<()> {
        self.send_zeroes(self.length.next_multiple_of(unit) - self.length)
    }

    fn send_part(&self, bytes: usize, part: Part) -> io::Result<()> {
        let sent = self.channel.send(bytes, part);
        sent.map_err(|_| self.take_failure())
    }

    fn take_failure(&self) -> io::Error {
        let mut failure = lock(&self.failure);
        match &mut *failure {
            // Each request that fails has it.
            Some(error) => match error.raw_os_error() {
                Some(errno) => io::Error::from_raw_os_error(errno),
                None => io::Error::new(error.kind(), error.to_string()),
            },
            None => io::Error::from_raw_os_error(libc::ECANCELED),
        }
    }

    /// Waits until all is written.
    pub fn finish(mut self) -> io::Result<u64> {
        self.channel.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let failure = lock(&self.failure).take();
        failure.map_or(Ok(self.length), Err)
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.channel.stop();
    }
}

fn write_all(
    sink: &mut dyn StreamSink,
    channel: &Channel<Part>,
    spare: &Mutex<Vec<Buffer>>,
) -> io::Result<()> {
    let mut zeroes = Vec::new();
    while let Some(part) = channel.receive() {
        match part {
            Part::Length(length) => sink.expect(length),
            Part::Bytes(bytes) => sink.send(&bytes)?,
            Part::Slice(Slice { buffer, range }) => {
                sink.send(&buffer[range])?;
                lock(spare).extend(Arc::into_inner(buffer));
            }
            Part::Zeroes(mut count) => {
                zeroes.resize(ZEROES, 0);
                while count > 0 && !channel.is_stopped() {
                    let now = count.min(ZEROES as u64);
                    sink.send(&zeroes[..now as usize])?;
                    count -= now;
                }
            }
        }
    }
    match channel.is_stopped() {
        // It is not complete; the error is not asked for.
        true => Ok(()),
        false => sink.finish(),
    }
}

/// The error of what is not as it was planned.
pub fn changed() -> Error {
    Error::Refused("The source has changed while it was converted".into())
}
