//! The two threads of a connection: one writes requests to the program, the other one reads replies,
//! and connects again if a file that is only read loses its connection.

use std::io::{self, BufReader, BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::process::ChildStdout;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, sleep};
use std::time::Duration;

use super::client::{Client, Shared};
use super::connection::{self, Connection, File};
use super::failure::SshError;
use super::options::SshOptions;
use super::packet;
use super::program::Program;

/// Attempts to connect again, without a reply to a request between them.
const ATTEMPTS: u32 = 6;
/// The wait after the first of them, doubled for each further one.
const PAUSE: Duration = Duration::from_millis(100);

/// Starts the threads of a connection.
///
/// # Errors
/// If there are no threads.
pub(super) fn start(options: SshOptions, connection: Connection) -> io::Result<Arc<Client>> {
    let (sender, receiver) = mpsc::channel();
    let shared = Arc::new(Shared::new(options, &connection, sender));
    let client = Arc::new(Client {
        shared: shared.clone(),
    });
    begin_writing(connection.output, receiver)?;
    let reading = Reading {
        shared,
        program: connection.program,
        input: connection.input,
        attempts: 0,
    };
    let thread = thread::Builder::new().name("ssh-read".into());
    thread.spawn(move || reading.run())?;
    Ok(client)
}

fn begin_writing(output: UnixStream, packets: Receiver<Vec<u8>>) -> io::Result<()> {
    let thread = thread::Builder::new().name("ssh-write".into());
    // An error shows in the replies, which end.
    thread.spawn(move || drop(write(output, packets)))?;
    Ok(())
}

/// Writes packets until the file is closed, or the program ends.
fn write(output: UnixStream, packets: Receiver<Vec<u8>>) -> io::Result<()> {
    let mut output = BufWriter::with_capacity(64 << 10, output);
    while let Ok(packet) = packets.recv() {
        output.write_all(&packet)?;
        while let Ok(packet) = packets.try_recv() {
            output.write_all(&packet)?;
        }
        output.flush()?;
    }
    Ok(())
}

/// The thread that reads.
struct Reading {
    shared: Arc<Shared>,
    program: Program,
    input: BufReader<ChildStdout>,
    /// Attempts to connect again since the last reply.
    attempts: u32,
}

impl Reading {
    fn run(mut self) {
        loop {
            let error = self.receive();
            let is_violation = error.kind() == io::ErrorKind::InvalidData;
            drop(self.input);
            let said = self.program.end();
            let what = match said.is_empty() || is_violation {
                true => error.to_string(),
                false => said,
            };
            let error = match is_violation {
                true => self
                    .shared
                    .broken(&format!("the server breaks the protocol: {what}")),
                false => self
                    .shared
                    .broken(&format!("the connection was lost: {what}")),
            };
            if is_violation {
                self.shared.fail(error);
                return;
            }
            if !self.shared.lose(error.clone()) {
                return;
            }
            tracing::debug!("{error}");
            match again(&self.shared, &mut self.attempts, error) {
                Some((program, input)) => (self.program, self.input) = (program, input),
                None => return,
            }
        }
    }

    /// Receives replies until there are no more.
    fn receive(&mut self) -> io::Error {
        loop {
            let (shared, limit) = (&self.shared, self.shared.options.timeout);
            if let Err(e) = connection::wait(&self.input, limit, || shared.oldest()) {
                return e;
            }
            let received = packet::receive_reply(&mut self.input).and_then(|(id, reply)| {
                let violation = |what| io::Error::new(io::ErrorKind::InvalidData, what);
                self.shared.receive(id, reply).map_err(violation)
            });
            match received {
                Ok(()) => self.attempts = 0,
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                    return io::Error::other("it was closed");
                }
                Err(e) => return e,
            }
        }
    }
}

/// Connects again. None: the file was closed, or requests fail from now on.
fn again(
    shared: &Shared,
    attempts: &mut u32,
    mut error: SshError,
) -> Option<(Program, BufReader<ChildStdout>)> {
    while *attempts < ATTEMPTS {
        sleep(PAUSE * 2u32.pow(*attempts));
        *attempts += 1;
        if !shared.is_lost() {
            return None;
        }
        match Connection::open(&shared.options) {
            Ok(connection) if is_same(&connection.file, &shared.file) => {
                return match restore(shared, connection) {
                    Ok(reading) => Some(reading),
                    Err(e) => {
                        shared.fail(shared.broken(&e.to_string()));
                        None
                    }
                };
            }
            Ok(_) => {
                shared.fail(shared.broken(
                    "the file has changed since it was opened, before the connection was lost",
                ));
                return None;
            }
            Err(e) => error = e,
        }
    }
    shared.fail(error);
    None
}

/// Whether the file has the length and the time that it had.
fn is_same(file: &File, before: &File) -> bool {
    (file.length, file.attributes.modified) == (before.length, before.attributes.modified)
}

fn restore(
    shared: &Shared,
    connection: Connection,
) -> io::Result<(Program, BufReader<ChildStdout>)> {
    let (sender, receiver): (Sender<Vec<u8>>, _) = mpsc::channel();
    begin_writing(connection.output, receiver)?;
    shared.restore(connection.file.handle, sender);
    Ok((connection.program, connection.input))
}
