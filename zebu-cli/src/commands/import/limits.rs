//! What an import may take: bytes, time, processor time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::verdict::{Cause, Trouble};
use crate::arguments::size;
use crate::program::signals;

/// Bytes that the image in the source may have, after decompression.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Of `--max-download`.
    download: u64,
    /// Of the disk, if the image is one: a raw image.
    disk: Arc<AtomicU64>,
    /// Of the device that is the target.
    target: Arc<AtomicU64>,
}

impl Bounds {
    pub fn new(download: u64) -> Bounds {
        Bounds {
            download,
            disk: Arc::new(AtomicU64::new(u64::MAX)),
            target: Arc::new(AtomicU64::new(u64::MAX)),
        }
    }

    /// The image is a disk of at most so many bytes.
    pub fn is_disk_of(&self, most: u64) {
        self.disk.store(most, Ordering::Relaxed);
    }

    /// The target has so many bytes for it.
    pub fn fits_in(&self, most: u64) {
        self.target.store(most, Ordering::Relaxed);
    }

    /// What so many bytes exceed.
    pub fn exceeded(&self, bytes: u64) -> Option<Trouble> {
        let limit = |what: &str, most: u64, option: &str| {
            let why = format!(
                "The {what} has more than the {} of {option}",
                size::human(most)
            );
            Some(Trouble::new(Cause::Limit, why))
        };
        let disk = self.disk.load(Ordering::Relaxed);
        let target = self.target.load(Ordering::Relaxed);
        if bytes > disk {
            limit("disk", disk, "--max-virtual-size")
        } else if bytes > self.download {
            limit("image in the source", self.download, "--max-download")
        } else if bytes > target {
            let why = format!("The disk has more than the {target} bytes of the target");
            Some(Trouble::new(Cause::Target, why))
        } else {
            None
        }
    }
}

/// When an import is stopped, and whether its target is to be cleared then.
#[derive(Clone, Debug)]
pub struct Watch(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    begun: Instant,
    time: Option<u64>,
    processor: Option<u64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    stopped: Option<Trouble>,
    /// The target may have been changed.
    has_begun: bool,
}

impl Watch {
    /// With limits in seconds.
    pub fn new(time: Option<u64>, processor: Option<u64>) -> Watch {
        Watch(Arc::new(Shared {
            begun: Instant::now(),
            time,
            processor,
            state: Mutex::default(),
        }))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the target is changed, unless all was stopped.
    pub fn begin(&self) -> Result<(), Trouble> {
        let mut state = self.state();
        match &state.stopped {
            Some(trouble) => Err(trouble.clone()),
            None => {
                state.has_begun = true;
                Ok(())
            }
        }
    }

    /// Why all was stopped.
    pub fn stopped(&self) -> Option<Trouble> {
        self.state().stopped.clone()
    }

    /// Stops the import if it is time. Returns why it is to be left as it is: the target was not
    /// changed.
    pub fn look(&self) -> Option<Trouble> {
        let mut state = self.state();
        if state.stopped.is_none() {
            state.stopped = self.over();
        }
        state.stopped.clone().filter(|_| !state.has_begun)
    }

    fn over(&self) -> Option<Trouble> {
        let limit = |seconds: u64, option: &str| {
            let why = format!("It takes more than the {seconds} s of {option}");
            Trouble::new(Cause::Limit, why)
        };
        let is_over = |spent: Duration, most: &Option<u64>| match most {
            Some(seconds) => (spent >= Duration::from_secs(*seconds)).then_some(*seconds),
            None => None,
        };
        if signals::stop_signal().is_some() {
            return Some(Trouble::new(Cause::Interrupted, "Interrupted"));
        }
        if let Some(seconds) = is_over(self.0.begun.elapsed(), &self.0.time) {
            return Some(limit(seconds, "--max-time"));
        }
        let seconds = is_over(processor_time(), &self.0.processor)?;
        Some(limit(seconds, "--max-cpu"))
    }
}

/// The processor time that the process has taken.
#[allow(unsafe_code)]
fn processor_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: it writes to `time` only.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    debug_assert_eq!(failed, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
