//! Signals as events on a queue.
#![allow(unsafe_code)]

use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;

use zebu::storage::Queue;

/// The action of a signal.
enum Event {
    /// Print the statistics.
    Statistics,
    /// Ask for the sizes of images, which may have grown.
    Grown,
    /// End.
    End,
}

/// Handles SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 from now on.
///
/// A thread waits for them and forwards them through a socket. A signalfd does not wake a thread
/// that waits by the kernel's asynchronous I/O, which polls the signals of another thread.
pub struct Signals(UnixStream);

impl Signals {
    /// Called before there are other threads.
    pub fn new() -> io::Result<Self> {
        let (signals, sender) = UnixStream::pair()?;
        signals.set_nonblocking(true)?;
        let set = block()?;
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                // The receiver is gone: the process is about to end.
                while (&sender).write_all(&[wait(&set)]).is_ok() {}
            })?;
        Ok(Signals(signals))
    }

    /// Answers signals until one ends the process.
    pub async fn until_end(
        &self,
        queue: &Queue,
        print_statistics: impl Fn(),
        ask_sizes: impl Fn(),
    ) {
        loop {
            match self.next(queue).await {
                Ok(Event::Statistics) => print_statistics(),
                Ok(Event::Grown) => ask_sizes(),
                Ok(Event::End) | Err(_) => return,
            }
        }
    }

    /// The next one.
    async fn next(&self, queue: &Queue) -> io::Result<Event> {
        let mut number = [0];
        loop {
            queue.readable(&self.0).await?;
            match (&self.0).read(&mut number) {
                Ok(_) => break,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        Ok(match i32::from(number[0]) {
            libc::SIGUSR1 => Event::Statistics,
            libc::SIGUSR2 => Event::Grown,
            _ => Event::End,
        })
    }
}

/// From now on the signals wait to be taken, in this thread and those that it
/// starts.
fn block() -> io::Result<libc::sigset_t> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is initialised by the first call, and valid in all.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        let end = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
        for signal in end.into_iter().chain([libc::SIGUSR1, libc::SIGUSR2]) {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        let set = set.assume_init();
        match libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) {
            0 => Ok(set),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Waits for one of the signals; its number.
fn wait(set: &libc::sigset_t) -> u8 {
    let mut number = 0;
    // SAFETY: both are valid. It fails only for a set that makes no sense.
    while unsafe { libc::sigwait(set, &mut number) } != 0 {}
    number as u8
}
