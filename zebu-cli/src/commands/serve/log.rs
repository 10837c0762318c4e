//! Messages of a server on standard error.

use std::io::{self, Write};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::time::{Duration, Instant};

use crate::output::printed;

/// Messages that wait to be written at most. More are lost.
const WAITING: usize = 1000;
/// How long [`Log::finish`] waits.
const PATIENCE: Duration = Duration::from_secs(1);

/// A thread that writes messages to standard error, which may be a pipe that nobody reads: requests do not
/// wait for it, and errors of writing are ignored. Dropping it waits as [`Log::finish`] does.
pub struct Log(SyncSender<Message>);

enum Message {
    Text(Vec<u8>),
    /// All before it is written.
    End(SyncSender<()>),
}

impl Log {
    /// Logs the libraries' messages; if `verbose`, new connections and why they end, too.
    pub fn start(verbose: bool) -> io::Result<Log> {
        let level = match verbose {
            true => tracing::Level::DEBUG,
            false => tracing::Level::WARN,
        };
        let (sender, messages) = mpsc::sync_channel(WAITING);
        std::thread::Builder::new()
            .name("log".into())
            .spawn(move || write_all(&messages))?;
        let log = Log(sender.clone());
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_target(false)
            .with_ansi(false)
            .with_writer(move || Line(sender.clone()));
        // There is no other subscriber.
        let _ = subscriber.try_init();
        Ok(log)
    }

    /// Writes `text`.
    pub fn say(&self, text: &str) {
        let text = printed::lines(text).into_bytes();
        let _ = self.0.try_send(Message::Text(text));
    }

    /// Waits until all is written, a second at most.
    pub fn finish(&self) {
        let end = Instant::now() + PATIENCE;
        let (sender, written) = mpsc::sync_channel(1);
        let mut message = Message::End(sender);
        while let Err(TrySendError::Full(unsent)) = self.0.try_send(message) {
            if Instant::now() >= end {
                return;
            }
            message = unsent;
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = written.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.finish();
    }
}

fn write_all(messages: &Receiver<Message>) {
    for message in messages {
        match message {
            Message::Text(text) => drop(io::stderr().write_all(&text)),
            Message::End(written) => drop(written.send(())),
        }
    }
}

/// The message on one line, whatever names are in it.
fn one_line(bytes: &[u8]) -> Vec<u8> {
    let text = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let mut line = printed::printable(text).into_bytes();
    line.push(b'\n');
    line
}

/// Passes on what the subscriber writes, a message a call.
struct Line(SyncSender<Message>);

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.0.try_send(Message::Text(one_line(bytes)));
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
