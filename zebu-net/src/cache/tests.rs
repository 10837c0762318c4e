//! Guards against blocks that are not those of the storage: damaged, torn, of another object; and
//! against folders that grow, or that others write to.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use tempfile::TempDir;

use super::*;
use crate::storage::{Iov, OpKind, Queue, Started, Storage};
use crate::storage::{Memory, QueueOptions, extent, read_vec, write_slice};

/// A storage that counts what is read of it, and may fail.
#[derive(Debug)]
struct Far {
    memory: Memory,
    reads: AtomicU64,
    bytes: AtomicU64,
    fails: AtomicBool,
    is_changed: AtomicBool,
}

impl Far {
    fn new(length: usize) -> Arc<Far> {
        let byte = |at: usize| (at ^ (at >> 8) ^ (at >> 16)) as u8;
        Arc::new(Far {
            memory: Memory::new((0..length).map(byte).collect()),
            reads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            fails: AtomicBool::new(false),
            is_changed: AtomicBool::new(false),
        })
    }

    fn reads(&self) -> u64 {
        self.reads.load(Ordering::SeqCst)
    }
}

// SAFETY: all is passed on to a storage that keeps the promises.
#[allow(unsafe_code)]
unsafe impl Storage for Far {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if kind == OpKind::Read {
            self.reads.fetch_add(1, Ordering::SeqCst);
            self.bytes.fetch_add(length, Ordering::SeqCst);
            if self.fails.load(Ordering::SeqCst) {
                return Started::done(Err(io::Error::from_raw_os_error(libc::ENETDOWN)));
            }
        }
        // SAFETY: as the caller promised.
        unsafe { self.memory.start(queue, kind, offset, length, memory) }
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&self.memory)
    }
}

impl Check for Far {
    fn check(&self) -> std::pin::Pin<Box<dyn Future<Output = io::Result<()>> + Send + '_>> {
        let changed = self.is_changed.load(Ordering::SeqCst);
        Box::pin(async move {
            match changed {
                true => Err(io::Error::from_raw_os_error(libc::ESTALE)),
                false => Ok(()),
            }
        })
    }
}

fn open(folder: &Path, size: u64) -> BlockCache {
    BlockCache::open(folder, &BlockCacheOptions::default().size(size)).unwrap()
}

fn queue() -> Queue {
    Queue::new(QueueOptions::default()).unwrap()
}

#[track_caller]
fn read(queue: &Queue, storage: &dyn Storage, far: &Far, range: std::ops::Range<u64>) {
    let length = (range.end - range.start) as usize;
    let found = queue.block_on(read_vec(storage, queue, range.start, length));
    let expected = queue.block_on(read_vec(&far.memory, queue, range.start, length));
    assert!(found.unwrap() == expected.unwrap(), "{range:?}");
}

/// The files of blocks, and of what is being written.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(_) if entry.file_name() != "usage" => files.push(entry.path()),
                _ => {}
            }
        }
    }
    files.sort();
    files
}

/// The folder of the cache's own files.
fn own(folder: &Path) -> PathBuf {
    folder.join(directory::OWN)
}

fn size(folder: &Path) -> u64 {
    let sizes = files(folder).into_iter().flat_map(fs::metadata);
    sizes.map(|is| is.len()).sum()
}

#[test]
fn what_was_read_is_read_here() {
    let folder = TempDir::new().unwrap();
    let queue = queue();
    let length = 10 * BLOCK + 1000;
    let far = Far::new(length as usize);
    let cache = open(folder.path(), 1 << 30);
    let cached = cache.over(far.clone(), &["a"]).unwrap();
    read(&queue, &*cached, &far, 5000..5010);
    assert_eq!((far.reads(), files(folder.path()).len()), (1, 1));
    // From memory, and the rest as one read.
    read(&queue, &*cached, &far, 0..4 * BLOCK);
    assert_eq!(far.reads(), 2);
    read(&queue, &*cached, &far, 0..length + 5000);
    assert_eq!(far.bytes.load(Ordering::SeqCst), length);
    assert_eq!(files(folder.path()).len(), 11);
    // Another process, and another image.
    let cache = open(folder.path(), 1 << 30);
    let cached = cache.over(far.clone(), &["a"]).unwrap();
    let before = far.reads();
    read(&queue, &*cached, &far, 0..length);
    read(&queue, &*cached, &far, length - 1..length);
    read(&queue, &*cached, &far, length..length);
    assert_eq!(far.reads(), before);
    let other = Far::new(1000);
    let cached = cache.over(other.clone(), &["b"]).unwrap();
    read(&queue, &*cached, &other, 0..1000);
    assert_eq!(other.reads(), 1);
    // It is only read, and has what else the storage has.
    let written = queue.block_on(write_slice(&*cached, &queue, 0, b"x"));
    assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EROFS));
    let found = queue.block_on(extent(&*cached, &queue, 10)).unwrap();
    assert_eq!(found.length, 990);
}

#[test]
fn several_requests_are_one_read() {
    let folder = TempDir::new().unwrap();
    let queue = queue();
    let far = Far::new(4 * BLOCK as usize);
    let cached = open(folder.path(), 1 << 30)
        .over(far.clone(), &["a"])
        .unwrap();
    let tasks: Vec<_> = (0..20)
        .map(|nth| {
            let (cached, own) = (cached.clone(), queue.for_itself());
            queue.spawn(async move { read_vec(&*cached, &own, nth * 100, 100).await.unwrap() })
        })
        .collect();
    // One that is dropped takes nothing away from the others, and asks for nothing.
    let dropped = read_vec(&*cached, &queue, 3 * BLOCK, 10);
    queue.block_on(async {
        let mut dropped = std::pin::pin!(dropped);
        std::future::poll_fn(|context| {
            let _ = dropped.as_mut().poll(context);
            std::task::Poll::Ready(())
        })
        .await;
    });
    for task in tasks {
        assert_eq!(queue.block_on(task).len(), 100);
    }
    assert_eq!(far.reads(), 1);
    read(&queue, &*cached, &far, 0..4 * BLOCK);
}

#[test]
fn errors_are_those_of_the_storage_and_are_not_kept() {
    let folder = TempDir::new().unwrap();
    let queue = queue();
    let far = Far::new(3 * BLOCK as usize);
    let cache = open(folder.path(), 1 << 30);
    let cached = cache
        .over_checked(far.clone(), &["a"], Some(far.clone()))
        .unwrap();
    let error = || {
        let read = read_vec(&*cached, &queue, 10, BLOCK as usize);
        crate::error::io_errno(&queue.block_on(read).unwrap_err())
    };
    far.fails.store(true, Ordering::SeqCst);
    assert_eq!(error(), libc::ENETDOWN);
    far.fails.store(false, Ordering::SeqCst);
    far.is_changed.store(true, Ordering::SeqCst);
    assert_eq!(error(), libc::ESTALE);
    assert_eq!(files(folder.path()), [] as [PathBuf; 0]);
    far.is_changed.store(false, Ordering::SeqCst);
    read(&queue, &*cached, &far, 0..3 * BLOCK);
}

/// The queue that loads a block ends before it has it: the request of another one does it itself.
#[test]
fn a_queue_that_ends_takes_nothing_along() {
    let folder = TempDir::new().unwrap();
    let far = Far::new(3 * BLOCK as usize);
    let cached = open(folder.path(), 1 << 30)
        .over(far.clone(), &["a"])
        .unwrap();
    for nth in 0..3 {
        let first = queue();
        let reading = first.spawn({
            let (cached, queue) = (cached.clone(), first.for_itself());
            async move { read_vec(&*cached, &queue, nth * BLOCK, 10).await }
        });
        first.block_on(crate::storage::yield_once());
        let other = {
            let (cached, far) = (cached.clone(), far.clone());
            std::thread::spawn(move || {
                read(&queue(), &*cached, &far, nth * BLOCK..(nth + 1) * BLOCK);
            })
        };
        drop((reading, first));
        other.join().unwrap();
    }
}

/// A request is dropped before it has its block, and its queue is kept and not driven any more.
#[test]
fn a_dropped_request_keeps_no_other_waiting() {
    let folder = TempDir::new().unwrap();
    let far = Far::new(3 * BLOCK as usize);
    let cached = open(folder.path(), 1 << 30)
        .over(far.clone(), &["a"])
        .unwrap();
    let first = queue();
    let mut dropped = Box::pin(read_vec(&*cached, &first, 0, 10));
    let polled = std::future::poll_fn(|context| {
        std::task::Poll::Ready(dropped.as_mut().poll(context).is_pending())
    });
    assert!(first.block_on(polled));
    drop(dropped);
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        read(&queue(), &*cached, &far, 0..3 * BLOCK);
        done.send(()).unwrap();
    });
    is_done.recv_timeout(Duration::from_secs(10)).unwrap();
}

#[test]
fn damaged_files_are_fetched_again() {
    let folder = TempDir::new().unwrap();
    let queue = queue();
    let length = BLOCK as usize + 3000;
    let far = Far::new(length);
    let fresh = || {
        let cache = open(folder.path(), 1 << 30);
        cache.over(far.clone(), &["a"]).unwrap()
    };
    read(&queue, &*fresh(), &far, 0..length as u64);
    let last = files(folder.path()).pop().unwrap();
    let whole = fs::read(&last).unwrap();
    let first = fs::read(&files(folder.path())[0]).unwrap();
    let mut damaged: Vec<Vec<u8>> = vec![
        Vec::new(),
        vec![0; whole.len()],
        whole[..whole.len() - 1].to_vec(),
        [&*whole, b"x"].concat(),
        // Another block of the same object.
        first,
    ];
    for at in (0..whole.len()).filter(|at| *at < 100 || at % 97 == 0) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        damaged.push(bytes);
    }
    for bytes in damaged {
        fs::write(&last, bytes).unwrap();
        let before = far.reads();
        read(&queue, &*fresh(), &far, BLOCK..length as u64);
        assert_eq!(far.reads(), before + 1);
        assert!(fs::read(&last).unwrap() == whole);
    }
    // A file of another object under the name of this one.
    let other = Far::new(length);
    let cache = open(folder.path(), 1 << 30);
    let cached = cache.over(other.clone(), &["b"]).unwrap();
    read(&queue, &*cached, &other, BLOCK..length as u64);
    let of_other = files(folder.path()).into_iter();
    let mut of_other = of_other.filter(|file| file.parent() != last.parent());
    fs::copy(of_other.next().unwrap(), &last).unwrap();
    let before = far.reads();
    read(&queue, &*fresh(), &far, BLOCK..length as u64);
    assert_eq!(far.reads(), before + 1);
    // A link leads nowhere.
    let elsewhere = folder.path().join("elsewhere");
    fs::rename(&last, &elsewhere).unwrap();
    symlink(&elsewhere, &last).unwrap();
    read(&queue, &*fresh(), &far, BLOCK..length as u64);
    assert_eq!(far.reads(), before + 2);
}

#[test]
fn what_was_not_used_for_longest_goes_first() {
    let folder = TempDir::new().unwrap();
    let queue = queue();
    let far = Far::new(30 * BLOCK as usize);
    let limit = 10 * (BLOCK + 64);
    let cached = open(folder.path(), limit)
        .over(far.clone(), &["a"])
        .unwrap();
    for nth in 0..10 {
        read(&queue, &*cached, &far, nth * BLOCK..(nth + 1) * BLOCK);
        assert!(size(folder.path()) <= limit);
    }
    // The first ones are the oldest, but the very first is read now.
    for (nth, file) in files(folder.path()).iter().enumerate() {
        let time = SystemTime::now() - Duration::from_secs(1000 - nth as u64);
        fs::File::open(file).unwrap().set_modified(time).unwrap();
    }
    read(&queue, &*cached, &far, 0..BLOCK);
    read(&queue, &*cached, &far, 20 * BLOCK..21 * BLOCK);
    let left = files(folder.path());
    let left: Vec<u64> = (left.iter())
        .map(|file| block::number(file.file_name().unwrap().to_str().unwrap()).unwrap())
        .collect();
    assert_eq!(left, [0, 4, 5, 6, 7, 8, 9, 20]);
}

/// Several caches of one folder, as several processes have, with bounds that are a few blocks.
#[test]
fn the_bound_holds_for_all_together() {
    let folder = TempDir::new().unwrap();
    let far = Far::new(64 * BLOCK as usize);
    let limit = 6 << 20;
    let most = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let users: Vec<_> = (0..4u64)
            .map(|user| {
                let (far, folder) = (&far, folder.path());
                scope.spawn(move || {
                    let queue = queue();
                    let words = [["a", "b"][user as usize % 2]];
                    let cached = open(folder, limit).over(far.clone(), &words).unwrap();
                    let mut state = user + 1;
                    for _ in 0..60 {
                        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                        let start = (state >> 33) % (62 * BLOCK);
                        read(&queue, &*cached, far, start..start + 2 * BLOCK);
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                most.fetch_max(size(folder.path()), Ordering::SeqCst);
            }
        });
        let ended: Vec<_> = users.into_iter().map(|user| user.join()).collect();
        done.store(true, Ordering::SeqCst);
        ended.into_iter().for_each(|user| user.unwrap());
    });
    // A file that gets its name while it is looked for may be seen twice.
    let most = most.into_inner();
    assert!(most <= limit + (4 << 20), "{most}");
    assert!(size(folder.path()) <= limit);
    assert!(most > limit / 2, "{most}");
}

#[test]
fn what_was_left_behind_is_removed() {
    let folder = TempDir::new().unwrap();
    let queue = queue();
    let far = Far::new(30 * BLOCK as usize);
    let limit = 10 * (BLOCK + 64);
    fs::create_dir(own(folder.path())).unwrap();
    // Of a process that was killed; and a sum that is nonsense, or is not there.
    let left = own(folder.path()).join("new-1-0");
    for usage in [Some(&b""[..]), Some(b"nonsense"), Some(&[0xff; 48]), None] {
        fs::write(&left, vec![0; 5 << 20]).unwrap();
        let file = own(folder.path()).join("usage");
        match usage {
            Some(bytes) => fs::write(file, bytes).unwrap(),
            None => fs::remove_file(file).unwrap(),
        }
        let cached = open(folder.path(), limit)
            .over(far.clone(), &["a"])
            .unwrap();
        read(&queue, &*cached, &far, 0..30 * BLOCK);
        assert!(!left.exists());
        assert!(size(folder.path()) <= limit);
    }
}

#[test]
fn reads_go_on_without_the_folder() {
    let folder = TempDir::new().unwrap();
    let queue = queue();
    let far = Far::new(8 * BLOCK as usize);
    static WARNED: AtomicU64 = AtomicU64::new(0);
    fn warn(_: &str) {
        WARNED.fetch_add(1, Ordering::SeqCst);
    }
    let options = BlockCacheOptions::default().warn(Some(warn));
    let cache = BlockCache::open(folder.path(), &options).unwrap();
    let cached = cache.over(far.clone(), &["a"]).unwrap();
    read(&queue, &*cached, &far, 0..BLOCK);
    fs::remove_dir_all(folder.path()).unwrap();
    read(&queue, &*cached, &far, 0..8 * BLOCK);
    read(&queue, &*cached, &far, 0..8 * BLOCK);
    assert_eq!(WARNED.load(Ordering::SeqCst), 1);
}

#[test]
fn folders_that_are_not_safe_are_refused() {
    let parent = TempDir::new().unwrap();
    let default = BlockCacheOptions::default();
    let refused = |path: &Path, options: &BlockCacheOptions| {
        BlockCache::open(path, options).unwrap_err().to_string()
    };
    let folder = parent.path().join("a/b");
    BlockCache::open(&folder, &default).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder), 0o700);
    assert_eq!(mode(&own(&folder)), 0o700);
    assert_eq!(mode(&own(&folder).join("usage")), 0o600);
    for path in [folder.clone(), own(&folder)] {
        for bits in [0o770, 0o707, 0o777] {
            fs::set_permissions(&path, fs::Permissions::from_mode(bits)).unwrap();
            let why = refused(&folder, &default);
            assert!(why.contains("others may write to it"), "{why}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    BlockCache::open(&folder, &default).unwrap();
    let file = parent.path().join("file");
    fs::write(&file, "").unwrap();
    refused(&file, &default);
    let small = BlockCacheOptions::default().size(1000);
    assert!(refused(&folder, &small).contains("at least"));
    let other = Path::new("/proc/self/task");
    if directory::own_user() != 0 {
        assert!(refused(Path::new("/usr"), &default).contains("must belong"));
    } else {
        refused(other, &default);
    }
    // Neither the file with the sum nor the cache's own folder is that of a link.
    let usage = own(&folder).join("usage");
    fs::remove_file(&usage).unwrap();
    symlink(&file, usage).unwrap();
    refused(&folder, &default);
    fs::rename(own(&folder), folder.join("moved")).unwrap();
    symlink(folder.join("moved"), own(&folder)).unwrap();
    refused(&folder, &default);
}
