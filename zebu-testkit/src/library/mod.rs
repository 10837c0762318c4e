//! What many tests need: storages of each kind, reproducible random numbers, vectored memory, a
//! watchdog, and QEMU as a peer.

pub mod allowed_flags;
pub mod dirty;
pub mod disk;
pub mod driven;
pub mod encryption;
pub mod faulty;
pub mod hostile_changes;
pub mod hostile_images;
pub mod hostile_vhdx;
pub mod hostile_vmdk;
pub mod ledger;
pub mod load;
pub mod peer;
pub mod small_images;
pub mod vhdx_image;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use zebu::jobs::{self, CheckReport, RepairMode};
use zebu::storage::{
    Buffer, CacheMode, EngineKind, Iov, Memory, OpenFile, Queue, QueueOptions, Storage, open_file,
};

pub use crate::{Cases, Rng, cases, work};

/// Counts requests, states or cases that have ended.
static PROGRESS: AtomicU64 = AtomicU64::new(0);

/// Tells the [`Watchdog`] that a request, state or case has ended.
pub fn progress() {
    PROGRESS.fetch_add(1, Ordering::Relaxed);
}

/// Repairs all of an image.
pub fn repair_all(queue: &Queue, file: Arc<dyn Storage>) -> zebu::Result<CheckReport> {
    queue.block_on(jobs::repair(
        queue,
        file,
        RepairMode::All,
        &mut |_| {},
        |_| {},
    ))
}

/// Prints how many cases a test had; `scripts/reliability.sh` adds these up.
pub fn counted(count: u64, what: &str) {
    println!("\ncases: {count} {what}");
}

/// Aborts the process if there is no [`progress`] for [`LOOKS`] looks, so that a hang is not taken
/// for a slow test. It counts looks instead of time, since a busy machine may stop the process.
pub struct Watchdog(Option<(mpsc::Sender<()>, JoinHandle<()>)>);

/// The time between two looks, and the number of looks without progress that is a hang.
const LOOK: Duration = Duration::from_secs(1);
const LOOKS: u32 = 120;

impl Watchdog {
    pub fn new(what: &str) -> Self {
        progress();
        let (sender, receiver) = mpsc::channel::<()>();
        let what = what.to_string();
        let thread = std::thread::spawn(move || {
            let (mut seen, mut looks) = (0, 0);
            while receiver.recv_timeout(LOOK) == Err(mpsc::RecvTimeoutError::Timeout) {
                let now = PROGRESS.load(Ordering::Relaxed);
                looks = if now == seen { looks + 1 } else { 0 };
                seen = now;
                if looks == LOOKS {
                    // Not captured by the test harness, as the output of `eprintln` is.
                    let _ = writeln!(std::io::stderr(), "watchdog: {what} hangs");
                    std::process::abort();
                }
            }
        });
        Watchdog(Some((sender, thread)))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.0.take() {
            drop(sender);
            let _ = thread.join();
        }
    }
}

/// The vectored memory of a request.
pub struct Pieces {
    /// Keeps the memory.
    buffer: Buffer,
    /// Start in the buffer, and length.
    pieces: Vec<(usize, usize)>,
}

impl Pieces {
    /// One piece of `length` bytes, at a page boundary.
    pub fn one(length: usize) -> Self {
        Pieces {
            buffer: Buffer::new(length),
            pieces: vec![(0, length)],
        }
    }

    /// `count` pieces of `length` bytes each, page-aligned if `length` is.
    pub fn equal(count: usize, length: usize) -> Self {
        Pieces {
            buffer: Buffer::new(count * length),
            // Backwards in memory, so that no two of them follow each other.
            pieces: (0..count).rev().map(|n| (n * length, length)).collect(),
        }
    }

    /// `length` bytes in pieces of random size, some of them empty. Their sizes and addresses are
    /// multiples of `align`.
    pub fn random(rng: &mut Rng, length: usize, align: usize) -> Self {
        let mut pieces = Vec::new();
        let (mut at, mut left) = (0, length);
        let most = 1 + rng.index((length / align).max(1));
        while left > 0 {
            if rng.one_in(5) {
                pieces.push((at, 0));
            }
            at += align * rng.below(3) as usize;
            let n = (align * (1 + rng.index(most))).min(left);
            pieces.push((at, n));
            at += n;
            left -= n;
        }
        if rng.one_in(3) {
            pieces.push((at, 0));
        }
        Pieces {
            buffer: Buffer::new(at),
            pieces,
        }
    }

    pub fn put(&mut self, bytes: &[u8]) {
        let mut done = 0;
        for &(at, length) in &self.pieces {
            self.buffer[at..at + length].copy_from_slice(&bytes[done..done + length]);
            done += length;
        }
    }

    pub fn get(&self) -> Vec<u8> {
        let pieces = self.pieces.iter();
        pieces
            .flat_map(|&(at, length)| &self.buffer[at..at + length])
            .copied()
            .collect()
    }

    /// The pieces as an `Iov`. `before` and `after` are around them in the vector that it is a
    /// slice of, and must not change.
    ///
    /// # Safety
    /// As [`Iov::from_raw`]: `self` must live until the request that uses the result has ended.
    pub unsafe fn iov(&mut self, before: &mut [u8], after: &mut [u8]) -> Iov {
        let base = self.buffer.as_mut_ptr();
        let mut segments = vec![(before.as_mut_ptr(), before.len())];
        for &(at, length) in &self.pieces {
            // SAFETY: inside the buffer.
            segments.push((unsafe { base.add(at) }, length));
        }
        segments.push((after.as_mut_ptr(), after.len()));
        let length = self.pieces.iter().map(|p| p.1).sum();
        // SAFETY: the caller promises that the memory lives long enough.
        unsafe { Iov::from_segments(&segments) }.slice(before.len(), length)
    }
}

/// Where a test keeps its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Disk,
    Tmpfs,
    Loop,
    Memory,
}

/// The places that this machine has. One that is missing is reported once.
pub struct Places {
    disk: tempfile::TempDir,
    tmpfs: Option<tempfile::TempDir>,
    device: Option<LoopDevice>,
}

/// A loop device. It is detached already, so the kernel removes it when the descriptor is closed,
/// also if the test is killed.
struct LoopDevice {
    path: PathBuf,
    _open: fs::File,
}

impl LoopDevice {
    fn new(backing: &Path) -> Result<Self, String> {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(backing)
            .output()
            .map_err(|e| e.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_string());
        }
        let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        let open = fs::File::open(&path);
        let _ = Command::new("losetup").arg("--detach").arg(&path).status();
        let _open = open.map_err(|e| e.to_string())?;
        Ok(LoopDevice { path, _open })
    }
}

/// Bytes of the loop device.
pub const DEVICE_BYTES: u64 = 2 << 20;

impl Places {
    pub fn new() -> Self {
        let disk = tempfile::tempdir_in(crate::temporary()).unwrap();
        let tmpfs = match tempfile::tempdir_in("/dev/shm") {
            Ok(folder) => Some(folder),
            Err(e) => {
                eprintln!("skipped: no tmpfs: {e}");
                None
            }
        };
        let backing = disk.path().join("device");
        fs::write(&backing, vec![0; DEVICE_BYTES as usize]).unwrap();
        let device = match LoopDevice::new(&backing) {
            Ok(device) => Some(device),
            Err(e) => {
                eprintln!("skipped: no loop device: {e}");
                None
            }
        };
        Places {
            disk,
            tmpfs,
            device,
        }
    }

    /// The path of a file, which need not exist, or of the device.
    pub fn path(&self, place: Place, name: &str) -> Option<PathBuf> {
        match place {
            Place::Disk => Some(self.disk.path().join(name)),
            Place::Tmpfs => Some(self.tmpfs.as_ref()?.path().join(name)),
            Place::Loop => Some(self.device.as_ref()?.path.clone()),
            Place::Memory => None,
        }
    }

    /// Opens an empty file, or the device with its old content.
    pub fn open(&self, place: Place, cache: CacheMode) -> Option<Arc<dyn Storage>> {
        if place == Place::Memory {
            return Some(Arc::new(Memory::default()));
        }
        let path = self.path(place, "file")?;
        if place != Place::Loop {
            let _ = fs::remove_file(&path);
        }
        let how = OpenFile::default()
            .write(true)
            .create(place != Place::Loop)
            .cache(cache);
        match open_file(path, how) {
            Ok(file) => Some(file),
            Err(e) if cache.is_direct() && e.raw_os_error().is_none() => {
                eprintln!("skipped: {place:?} with {}: {e}", cache.name());
                None
            }
            Err(e) => panic!("{place:?} with {}: {e}", cache.name()),
        }
    }
}

/// One combination of engine, place and cache mode.
pub struct Setup {
    pub queue: Queue,
    pub storage: Arc<dyn Storage>,
    pub place: Place,
    pub cache: CacheMode,
    pub seed: u64,
}

/// The engines that this machine supports.
pub fn engines() -> Vec<EngineKind> {
    let mut engines = EngineKind::ALL.to_vec();
    engines.retain(|engine| match engine.start() {
        Ok(_) => true,
        Err(e) => {
            eprintln!("skipped: {e}");
            false
        }
    });
    engines
}

pub fn queue(engine: EngineKind, inline_buffered: bool) -> Queue {
    Queue::new(
        QueueOptions::default()
            .engine(engine)
            .inline_buffered(inline_buffered)
            .force_async(2),
    )
    .unwrap()
}

/// Prints its text if the test panics: how to reproduce the failure.
pub struct PrintOnPanic(pub String);

impl Drop for PrintOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with {}", self.0);
        }
    }
}

/// Runs `test` with each engine, place and cache mode.
pub fn each(test: impl Fn(&Setup)) {
    let places = Places::new();
    let mut seed = 0;
    for engine in engines() {
        for place in [Place::Disk, Place::Tmpfs, Place::Loop, Place::Memory] {
            for cache in CacheMode::ALL {
                seed += 1;
                if place == Place::Memory && cache != CacheMode::WriteBack {
                    continue;
                }
                let name = format!("{engine}, {place:?}, {}, seed {seed}", cache.name());
                let _note = PrintOnPanic(name.clone());
                let _watchdog = Watchdog::new(&name);
                let Some(storage) = places.open(place, cache) else {
                    continue;
                };
                test(&Setup {
                    queue: queue(engine, seed % 3 == 0),
                    storage,
                    place,
                    cache,
                    seed,
                });
            }
        }
    }
}
