//! Signals as events on a queue.

use std::io;
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;
use zebu::storage::Queue;

/// Handles SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 from now on.
///
/// The handlers write to a socket that the queue polls. It is not a signalfd, which the kernel's
/// asynchronous I/O polls for the signals of another thread.
pub struct Signals(SignalDelivery<UnixStream, SignalOnly>);

impl Signals {
    pub fn new() -> io::Result<Self> {
        let (receiver, sender) = UnixStream::pair()?;
        let signals = [SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2];
        SignalDelivery::with_pipe(receiver, sender, SignalOnly, signals).map(Self)
    }

    /// Answers signals until one ends the process, or waiting for them fails: SIGUSR1 prints the statistics, and SIGUSR2 asks
    /// for the sizes of images, which may have grown.
    pub async fn until_end(
        mut self,
        queue: &Queue,
        print_statistics: impl Fn(),
        ask_sizes: impl Fn(),
    ) {
        while queue.readable(self.0.get_read()).await.is_ok() {
            for signal in self.0.pending() {
                match signal {
                    SIGUSR1 => print_statistics(),
                    SIGUSR2 => ask_sizes(),
                    _ => return,
                }
            }
        }
    }
}
