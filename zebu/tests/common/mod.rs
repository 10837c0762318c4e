//! What the tests of the storage room need: places to put bytes in, random
//! numbers that can be had again, memory in pieces, and a watchdog.

// Each test crate uses a part of this module.
#![allow(dead_code)]

pub mod faulty;
pub mod peer;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use zebu::storage::{
    Buffer, CacheMode, EngineKind, Iov, Memory, OpenFile, Queue, QueueOptions, Storage, open_file,
};

/// xorshift64*
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 16) % n
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let n = self.next().to_le_bytes();
            chunk.copy_from_slice(&n[..chunk.len()]);
        }
    }
}

/// Counts what has ended: requests, states, cases.
static PROGRESS: AtomicU64 = AtomicU64::new(0);

/// Something has ended: the test goes on.
pub fn progress() {
    PROGRESS.fetch_add(1, Ordering::Relaxed);
}

/// Says how many cases a test had; `scripts/reliability.sh` adds these up.
pub fn cases(count: u64, what: &str) {
    println!("cases: {count} {what}");
}

/// Ends the whole process if nothing in it makes [`progress`] while this is
/// there: a hang must not look like a slow test. Counted are looks, not what
/// the clock says, so that a process that is not let run is not ended for it.
pub struct Watchdog(Option<(mpsc::Sender<()>, JoinHandle<()>)>);

/// Seconds between two looks, and how many without progress are a hang.
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
                    eprintln!("watchdog: {what} hangs");
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

/// Memory in pieces: what a request reads into or writes from.
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

    /// `length` bytes in pieces of any size, multiples of `align` at multiples
    /// of `align`, with empty ones among them.
    pub fn random(rng: &mut Rng, length: usize, align: usize) -> Self {
        let mut pieces = Vec::new();
        let (mut at, mut left) = (0, length);
        let most = 1 + rng.below((length / align).max(1) as u64) as usize;
        while left > 0 {
            if rng.one_in(5) {
                pieces.push((at, 0));
            }
            at += align * rng.below(3) as usize;
            let n = (align * (1 + rng.below(most as u64) as usize)).min(left);
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

    /// As an `Iov`, with `before` and `after` bytes around it that no request
    /// may touch, sliced away.
    ///
    /// # Safety
    /// As [`Iov::from_raw`]: this lives until what uses the result has ended.
    pub unsafe fn iov(&mut self, before: &mut [u8], after: &mut [u8]) -> Iov {
        let base = self.buffer.as_mut_ptr();
        let mut segments = vec![(before.as_mut_ptr(), before.len())];
        for &(at, length) in &self.pieces {
            // SAFETY: inside the buffer.
            segments.push((unsafe { base.add(at) }, length));
        }
        segments.push((after.as_mut_ptr(), after.len()));
        let length = self.pieces.iter().map(|p| p.1).sum();
        // SAFETY: passed on to the caller.
        unsafe { Iov::from_segments(&segments) }.slice(before.len(), length)
    }
}

/// Where the bytes of a test are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Disk,
    Tmpfs,
    Loop,
    Memory,
}

/// The places that there are on this machine, each said once if it is missing.
pub struct Places {
    disk: tempfile::TempDir,
    tmpfs: Option<tempfile::TempDir>,
    device: Option<LoopDevice>,
}

/// A loop device. It was told to go when nobody has it open any more, so the
/// descriptor keeps it, and nothing stays however the test ends.
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
        let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
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

    /// The path of a file that is not there yet, or of the device.
    pub fn path(&self, place: Place, name: &str) -> Option<PathBuf> {
        match place {
            Place::Disk => Some(self.disk.path().join(name)),
            Place::Tmpfs => Some(self.tmpfs.as_ref()?.path().join(name)),
            Place::Loop => Some(self.device.as_ref()?.path.clone()),
            Place::Memory => None,
        }
    }

    /// An empty file, or the device with whatever is on it.
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

/// One combination of what the suite runs with.
pub struct Setup {
    pub queue: Queue,
    pub storage: Arc<dyn Storage>,
    pub place: Place,
    pub cache: CacheMode,
    pub seed: u64,
}

/// The engines that there are on this machine.
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

/// Says which setup failed, and with which seed.
pub struct Sayer(pub String);

impl Drop for Sayer {
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
                let _sayer = Sayer(name.clone());
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
