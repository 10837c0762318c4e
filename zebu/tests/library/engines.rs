//! All engines, cache modes and kinds of storage, compared with a vector. Guards against misplaced
//! bytes, a wrong length of a file, lost errors, requests that never end, memory that is used after
//! it was freed, and engines that differ.

use std::fs;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::pin::{Pin, pin};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::common::{DEVICE_BYTES, Pieces, Place, Places, Rng, Setup, each, engines, queue};
use zebu::block::{Device, Format, OpenOptions, Zeroing};
use zebu::storage::{
    self, Buffer, CacheMode, EngineKind, OpenFile, Queue, Storage, StorageExtent, open_file,
};

/// The bytes around a request's memory, which it must not change.
const GUARD: u8 = 0xa5;

fn set_len(storage: &dyn Storage, queue: &Queue, length: u64) {
    let result = queue.block_on(storage::set_len(storage, queue, length));
    result.expect("another length");
}

fn extent(storage: &dyn Storage, queue: &Queue, offset: u64) -> StorageExtent {
    let extent = queue.block_on(storage::extent(storage, queue, offset));
    extent.expect("an extent")
}

async fn read(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    pieces: &mut Pieces,
) -> io::Result<()> {
    let (mut before, mut after) = (vec![GUARD; 512], vec![GUARD; 512]);
    // SAFETY: all three live in this future until the read has ended, also if it is dropped.
    let iov = unsafe { pieces.iov(&mut before, &mut after) };
    let result = storage::read(storage, queue, offset, &iov).await;
    assert!(before.iter().chain(&after).all(|byte| *byte == GUARD));
    result
}

async fn write(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    pieces: &mut Pieces,
) -> io::Result<()> {
    let (mut before, mut after) = (vec![GUARD; 512], vec![GUARD; 512]);
    // SAFETY: as in `read`.
    let iov = unsafe { pieces.iov(&mut before, &mut after) };
    storage::write(storage, queue, offset, &iov).await
}

/// The expected content.
struct Model {
    bytes: Vec<u8>,
    fixed: bool,
}

impl Model {
    /// Reads like a file: zeroes past the end.
    fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        let from = (offset as usize).min(self.bytes.len());
        let to = (from + length).min(self.bytes.len());
        let mut bytes = self.bytes[from..to].to_vec();
        bytes.resize(length, 0);
        bytes
    }

    fn lengthen(&mut self, end: u64) {
        if end as usize > self.bytes.len() {
            assert!(!self.fixed);
            self.bytes.resize(end as usize, 0);
        }
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.lengthen(offset + bytes.len() as u64);
        self.bytes[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn zero(&mut self, offset: u64, length: u64) {
        let end = ((offset + length) as usize).min(self.bytes.len());
        if let Some(range) = self.bytes.get_mut(offset as usize..end) {
            range.fill(0);
        }
    }
}

/// Holes that the storage reports must be zeroes.
fn check_extents(setup: &Setup, model: &Model) {
    let end = setup.storage.len().unwrap();
    let mut at = 0;
    while at < end {
        let extent = extent(&*setup.storage, &setup.queue, at);
        assert!(extent.length > 0 && extent.length <= end - at);
        if extent.zero {
            let hole = model.read(at, extent.length as usize);
            assert!(hole.iter().all(|byte| *byte == 0), "data in a hole at {at}");
        }
        at += extent.length;
    }
    for past in [end, end + 12345] {
        assert_eq!(extent(&*setup.storage, &setup.queue, past).length, 0);
    }
}

#[test]
fn random_operations_match_a_vector() {
    each(|setup| {
        let Setup { queue, storage, .. } = setup;
        let storage = &**storage;
        let fixed = storage.is_device();
        let mut rng = Rng::new(setup.seed);
        let mut model = Model {
            bytes: Vec::new(),
            fixed,
        };
        if fixed {
            // The old content of the device is overwritten.
            model.bytes = vec![0; DEVICE_BYTES as usize];
            rng.fill(&mut model.bytes);
            let mut pieces = Pieces::one(model.bytes.len());
            pieces.put(&model.bytes);
            queue
                .block_on(write(storage, queue, 0, &mut pieces))
                .unwrap();
        }
        let block = storage.alignment().offset.max(512) as u64;
        let steps = if setup.cache.is_write_through() {
            50
        } else {
            150
        };
        for step in 0..steps {
            // Mostly near the data; half of the ranges are aligned.
            let aligned = rng.one_in(2);
            let unit = if aligned { block } else { 1 };
            let (space, longest) = match fixed {
                true => (DEVICE_BYTES, DEVICE_BYTES / 4),
                false => (model.bytes.len() as u64 + 100_000, 200_000),
            };
            let offset = rng.below(space) / unit * unit;
            let longest = match rng.below(3) {
                0 => 600,
                1 => 9000,
                _ => longest,
            };
            let mut length = (rng.below(longest) / unit + 1) * unit;
            if fixed {
                length = length.min(DEVICE_BYTES - offset);
            }
            let piece_align = match rng.below(2) {
                0 => block as usize,
                _ => 1 + rng.below(64) as usize,
            };
            let mut pieces = match rng.below(3) {
                0 => Pieces::one(length as usize),
                _ => Pieces::random(&mut rng, length as usize, piece_align),
            };
            let what = rng.below(20);
            let context = format!("step {step}: {what} at {offset}+{length}");
            queue.block_on(async {
                match what {
                    0..8 => {
                        let mut bytes = vec![0; length as usize];
                        rng.fill(&mut bytes);
                        pieces.put(&bytes);
                        let result = write(storage, queue, offset, &mut pieces).await;
                        result.expect(&context);
                        assert_eq!(pieces.get(), bytes, "{context}");
                        model.write(offset, &bytes);
                    }
                    8..14 => {
                        let result = read(storage, queue, offset, &mut pieces).await;
                        result.expect(&context);
                        let expected = model.read(offset, length as usize);
                        assert!(pieces.get() == expected, "{context}");
                    }
                    14 => {
                        let result = storage::zero_range(storage, queue, offset, length).await;
                        result.expect(&context);
                        model.zero(offset, length);
                    }
                    15 => {
                        let result = storage::punch_hole(storage, queue, offset, length).await;
                        result.expect(&context);
                        model.zero(offset, length);
                    }
                    16 => {
                        let result = storage::write_zeroes(storage, queue, offset, length).await;
                        result.expect(&context);
                        model.lengthen(offset + length);
                        model.zero(offset, length);
                    }
                    17 if !fixed => {
                        let result = storage::allocate(storage, queue, offset, length).await;
                        result.expect(&context);
                        model.lengthen(offset + length);
                    }
                    18 if !fixed => {
                        let result = storage::set_len(storage, queue, offset).await;
                        result.expect(&context);
                        model.bytes.resize(offset as usize, 0);
                    }
                    _ => storage::flush(storage, queue).await.expect(&context),
                }
            });
            assert_eq!(
                storage.len().unwrap(),
                model.bytes.len() as u64,
                "{context}"
            );
        }
        check_extents(setup, &model);
        let mut all = Pieces::one(model.bytes.len());
        queue.block_on(read(storage, queue, 0, &mut all)).unwrap();
        assert!(all.get() == model.bytes);
        // Read once more through the file system.
        if setup.place != Place::Memory {
            assert!(fs::read(storage.path()).unwrap() == model.bytes);
        }
    });
}

#[test]
fn more_segments_than_the_kernel_takes_at_once() {
    each(|setup| {
        let (queue, storage) = (&setup.queue, &*setup.storage);
        let block = storage.alignment().offset.max(1);
        let piece = if block == 4096 { block } else { 512 };
        let count = (DEVICE_BYTES as usize / piece).min(2500);
        let mut bytes = vec![0; count * piece];
        Rng::new(setup.seed).fill(&mut bytes);
        let mut pieces = Pieces::equal(count, piece);
        pieces.put(&bytes);
        queue.block_on(async {
            write(storage, queue, 0, &mut pieces).await.unwrap();
            let mut back = Pieces::equal(count, piece);
            read(storage, queue, 0, &mut back).await.unwrap();
            assert!(back.get() == bytes);
            // Single bytes, mostly.
            let mut back = Pieces::equal(3000, 1);
            read(storage, queue, 77, &mut back).await.unwrap();
            assert!(back.get() == bytes[77..3077]);
            back.put(&bytes[..3000]);
            write(storage, queue, 5000, &mut back).await.unwrap();
            let back = storage::read_vec(storage, queue, 5000, 3000).await.unwrap();
            assert!(back == bytes[..3000]);
        });
    });
}

#[test]
fn a_large_operation_on_scattered_memory() {
    const PIECE: usize = 64 << 10;
    each(|setup| {
        let (queue, storage) = (&setup.queue, &*setup.storage);
        let count = match storage.is_device() {
            true => DEVICE_BYTES as usize / PIECE,
            false => 41,
        };
        let length = count * PIECE;
        let mut bytes = vec![0; length];
        Rng::new(setup.seed).fill(&mut bytes);
        let mut pieces = Pieces::equal(count, PIECE);
        pieces.put(&bytes);
        queue.block_on(async {
            write(storage, queue, 0, &mut pieces).await.unwrap();
            let mut back = Pieces::equal(count, PIECE);
            read(storage, queue, 0, &mut back).await.unwrap();
            assert!(back.get() == bytes);
            // Several in flight.
            let reads: Vec<_> = (0..5)
                .map(|_| {
                    let (storage, own) = (setup.storage.clone(), queue.clone());
                    queue.spawn(async move { storage::read_vec(&*storage, &own, 0, length).await })
                })
                .collect();
            for all in reads {
                assert!(all.await.unwrap() == bytes);
            }
        });
        if storage.is_device() {
            return;
        }
        let half = (length / 2).next_multiple_of(PIECE);
        for end in [PIECE, half - 512, half, half + 512, length - 512] {
            set_len(storage, queue, end as u64);
            for _ in 0..3 {
                let mut back = Pieces::equal(count, PIECE);
                back.put(&vec![GUARD; length]);
                queue.block_on(read(storage, queue, 0, &mut back)).unwrap();
                let back = back.get();
                assert!(back[..end] == bytes[..end], "the end at {end}");
                assert!(back[end..].iter().all(|byte| *byte == 0), "{end}");
            }
            queue
                .block_on(write(storage, queue, 0, &mut pieces))
                .unwrap();
        }
    });
}

#[test]
fn empty_operations_do_nothing() {
    each(|setup| {
        let (queue, storage) = (&setup.queue, &*setup.storage);
        let before = storage.len().unwrap();
        queue.block_on(async {
            for offset in [0, 1, 4096, 1 << 40] {
                for mut pieces in [Pieces::one(0), Pieces::equal(0, 1), Pieces::equal(3, 0)] {
                    read(storage, queue, offset, &mut pieces).await.unwrap();
                    write(storage, queue, offset, &mut pieces).await.unwrap();
                }
                storage::zero_range(storage, queue, offset, 0)
                    .await
                    .unwrap();
                storage::punch_hole(storage, queue, offset, 0)
                    .await
                    .unwrap();
                storage::allocate(storage, queue, offset, 0).await.unwrap();
                storage::write_zeroes(storage, queue, offset, 0)
                    .await
                    .unwrap();
            }
            storage::flush(storage, queue).await.unwrap();
        });
        assert_eq!(storage.len().unwrap(), before);
    });
}

#[test]
fn a_punched_hole_is_reported() {
    each(|setup| {
        let (queue, storage) = (&setup.queue, &*setup.storage);
        if !matches!(setup.place, Place::Disk | Place::Tmpfs) {
            return;
        }
        let mut pieces = Pieces::one(1 << 20);
        pieces.put(&vec![7; 1 << 20]);
        queue.block_on(async {
            write(storage, queue, 0, &mut pieces).await.unwrap();
            storage::punch_hole(storage, queue, 256 << 10, 512 << 10)
                .await
                .unwrap();
        });
        let full = storage.allocated().unwrap();
        assert!(full < 1 << 20, "{full} bytes are still allocated");
        assert!(!extent(storage, queue, 0).zero);
        let hole = extent(storage, queue, 300 << 10);
        assert!(hole.zero);
        assert_eq!(hole.length, 468 << 10);
        assert!(!extent(storage, queue, 768 << 10).zero);
    });
}

#[test]
fn many_requests_in_flight_are_independent() {
    const REQUESTS: u64 = 96;
    const SPACE: u64 = DEVICE_BYTES / REQUESTS / 4096 * 4096;
    each(|setup| {
        let queue = &setup.queue;
        let seed = setup.seed;
        set_len(&*setup.storage, queue, DEVICE_BYTES);
        let rounds = if setup.cache.is_write_through() { 2 } else { 4 };
        let handles: Vec<_> = (0..REQUESTS)
            .map(|n| {
                let (storage, queue2) = (setup.storage.clone(), queue.clone());
                queue.spawn(async move {
                    let mut rng = Rng::new(seed * 1000 + n);
                    let (storage, queue) = (&*storage, &queue2);
                    // Whole blocks of any alignment, since other threads write adjacent blocks.
                    let mut expected = vec![0; SPACE as usize];
                    let mut pieces = Pieces::equal(SPACE as usize / 4096, 4096);
                    for _ in 0..rounds {
                        rng.fill(&mut expected);
                        pieces.put(&expected);
                        write(storage, queue, n * SPACE, &mut pieces).await.unwrap();
                        let from = rng.below(SPACE);
                        let length = 1 + rng.below(SPACE - from) as usize;
                        let mut part = Pieces::random(&mut rng, length, 100);
                        read(storage, queue, n * SPACE + from, &mut part)
                            .await
                            .unwrap();
                        assert!(part.get() == expected[from as usize..][..length]);
                    }
                    expected
                })
            })
            .collect();
        queue.block_on(async {
            for (n, handle) in handles.into_iter().enumerate() {
                let expected = handle.await;
                let at = n as u64 * SPACE;
                let back = storage::read_vec(&*setup.storage, queue, at, SPACE as usize).await;
                assert!(back.unwrap() == expected);
            }
        });
    });
}

/// Polls once.
fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn a_dropped_request_has_ended() {
    each(|setup| {
        let (queue, storage) = (&setup.queue, &*setup.storage);
        // Direct I/O may split it into two operations.
        const LENGTH: usize = 1 << 20;
        let mut rng = Rng::new(setup.seed);
        let mut expected = vec![0; LENGTH];
        // A task that is always ready, which must not delay the wait.
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let busy = queue.spawn(poll_fn(move |context| {
            context.waker().wake_by_ref();
            match stopped.load(Ordering::Relaxed) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        }));
        for _ in 0..2 {
            rng.fill(&mut expected);
            let mut pieces = Pieces::equal(LENGTH / 4096, 4096);
            pieces.put(&expected);
            // A dropped write is complete: all of its operations have ended.
            let ready = poll_once(pin!(write(storage, queue, 0, &mut pieces)));
            assert!(!matches!(ready, Poll::Ready(Err(_))));
            pieces.put(&vec![1; LENGTH]);
            let back = queue.block_on(storage::read_vec(storage, queue, 0, LENGTH));
            assert!(back.unwrap() == expected);
            // The memory does not change after a read was dropped.
            {
                let mut reads: Vec<_> =
                    (0..8).map(|_| Pieces::equal(LENGTH / 4096, 4096)).collect();
                {
                    let reads = reads.iter_mut();
                    let mut futures: Vec<_> = reads
                        .map(|pieces| Box::pin(read(storage, queue, 0, pieces)))
                        .collect();
                    for future in &mut futures {
                        let _ = poll_once(future.as_mut());
                    }
                }
                for pieces in &mut reads {
                    pieces.put(&vec![2; LENGTH]);
                }
                std::thread::sleep(Duration::from_millis(1));
                for pieces in &reads {
                    assert!(pieces.get().iter().all(|byte| *byte == 2));
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        queue.block_on(busy);
    });
}

fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

#[test]
fn a_file_open_for_reading_is_not_written() {
    let places = Places::new();
    let path = places.path(Place::Disk, "file").unwrap();
    fs::write(&path, [3; 10_000]).unwrap();
    for engine in engines() {
        for cache in CacheMode::ALL {
            for inline_buffered in [false, true] {
                let how = OpenFile::default().cache(cache);
                let file = open_file(&path, how).unwrap();
                let queue = queue(engine, inline_buffered);
                for (offset, length) in [(0, 4096), (4096, 4096), (100, 10), (0, 3)] {
                    let mut pieces = Pieces::one(length);
                    let result = queue.block_on(write(&*file, &queue, offset, &mut pieces));
                    assert_eq!(errno(result), Some(libc::EBADF));
                    let result = queue.block_on(storage::zero_range(&*file, &queue, 0, 4096));
                    assert_eq!(errno(result), Some(libc::EBADF));
                }
            }
        }
    }
    assert_eq!(fs::read(&path).unwrap(), [3; 10_000]);
}

/// A tmpfs of 1 MiB, if one can be mounted. It is unmounted lazily at once and lives as long as the
/// descriptor of its folder, also if the test is killed.
fn small_disk() -> Option<fs::File> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let done = |command: &mut Command| {
        let output = command.arg(folder.path()).output();
        output.is_ok_and(|output| output.status.success())
    };
    let mounted = done(Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "none"]));
    let disk = fs::File::open(folder.path()).unwrap();
    if mounted {
        assert!(done(Command::new("umount").arg("--lazy")));
    }
    mounted.then_some(disk)
}

#[test]
fn a_full_file_system_is_an_error() {
    let Some(disk) = small_disk() else {
        eprintln!("skipped: cannot mount a small tmpfs");
        return;
    };
    let path = format!("/proc/self/fd/{}/file", disk.as_raw_fd());
    for engine in engines() {
        for cache in [
            CacheMode::WriteBack,
            CacheMode::None,
            CacheMode::WriteThrough,
        ] {
            let _ = fs::remove_file(&path);
            let how = OpenFile::default().write(true).create(true).cache(cache);
            let Ok(file) = open_file(&path, how) else {
                eprintln!("skipped: {} on tmpfs", cache.name());
                continue;
            };
            let queue = queue(engine, false);
            let mut pieces = Pieces::equal(100, 4096);
            let mut results = (0..8).map(|n| {
                let offset = n * 100 * 4096;
                queue.block_on(write(&*file, &queue, offset, &mut pieces))
            });
            let error = results.find_map(Result::err).expect("no error");
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
            let result = queue.block_on(storage::allocate(&*file, &queue, 0, 8 << 20));
            assert_eq!(errno(result), Some(libc::ENOSPC));
        }
    }
}

#[test]
fn offsets_that_are_too_large_are_errors() {
    const MAX: u64 = i64::MAX as u64;
    each(|setup| {
        let (queue, storage) = (&setup.queue, &*setup.storage);
        let mut pieces = Pieces::equal(2, 4096);
        queue.block_on(async {
            // Past the largest length of a file.
            for offset in [MAX - 8191, MAX - 1, MAX, MAX + 1, u64::MAX - 4095, u64::MAX] {
                pieces.put(&[4; 8192]);
                read(storage, queue, offset, &mut pieces).await.unwrap();
                assert_eq!(pieces.get(), [0; 8192], "{offset}");
                let result = write(storage, queue, offset, &mut pieces).await;
                assert_eq!(errno(result), Some(libc::EFBIG), "{offset}");
                for result in [
                    storage::zero_range(storage, queue, offset, 8192).await,
                    storage::punch_hole(storage, queue, offset, 8192).await,
                    storage::allocate(storage, queue, offset, 8192).await,
                    storage::write_zeroes(storage, queue, offset, 8192).await,
                ] {
                    assert_eq!(errno(result), Some(libc::EFBIG), "{offset}");
                }
            }
            assert_eq!(
                errno(storage::zero_range(storage, queue, 1, u64::MAX).await),
                Some(libc::EFBIG)
            );
            // Just below it: some file systems allow that.
            let far = (MAX & !((1 << 20) - 1)) - 8192;
            pieces.put(&[4; 8192]);
            read(storage, queue, far, &mut pieces).await.unwrap();
            assert_eq!(pieces.get(), [0; 8192]);
            if setup.place != Place::Tmpfs {
                assert!(write(storage, queue, far, &mut pieces).await.is_err());
                assert!(storage::allocate(storage, queue, far, 4096).await.is_err());
                assert!(storage::set_len(storage, queue, far).await.is_err());
            }
            assert!(storage::set_len(storage, queue, u64::MAX).await.is_err());
            storage::extent(storage, queue, u64::MAX).await.unwrap();
        });
    });
}

/// A read by the queue's thread of a range that is partly in the page cache, and of the end of the
/// file: the other bytes must come from the disk, or be zero.
#[test]
fn a_partly_cached_range_is_read_in_full() {
    const LENGTH: usize = (1 << 20) + 100;
    const PIECE: usize = 64 << 10;
    let places = Places::new();
    let path = places.path(Place::Disk, "file").unwrap();
    let mut content = vec![0; LENGTH];
    Rng::new(1).fill(&mut content);
    fs::write(&path, &content).unwrap();
    let file = fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    content.resize(2 * LENGTH, 0);
    for engine in engines() {
        let storage = open_file(&path, OpenFile::default()).unwrap();
        let queue = queue(engine, true);
        let ranges = [(0, LENGTH), (5, LENGTH), (LENGTH - 9, 4096), (LENGTH, 10)];
        for cached in [vec![], vec![0], vec![3, 4, 9], vec![16], (0..17).collect()] {
            for (offset, length) in ranges {
                for advice in [libc::POSIX_FADV_DONTNEED, libc::POSIX_FADV_RANDOM] {
                    // SAFETY: a system call without pointers.
                    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, advice) };
                }
                for piece in &cached {
                    let start = piece * PIECE;
                    let mut bytes = vec![0; PIECE.min(LENGTH - start)];
                    file.read_exact_at(&mut bytes, start as u64).unwrap();
                }
                let mut buffer = Buffer::new(length);
                buffer.fill(GUARD);
                // SAFETY: the buffer lives until the read has ended.
                let iov = unsafe { buffer.iov() };
                let read = storage::read(&*storage, &queue, offset as u64, &iov);
                queue.block_on(read).unwrap();
                assert!(
                    buffer[..] == content[offset..offset + length],
                    "{engine}: {cached:?}, {offset}"
                );
            }
        }
    }
}

#[test]
fn two_queues_share_a_file() {
    each(|setup| {
        const BLOCKS: u64 = 64;
        let storage = &setup.storage;
        set_len(&**storage, &setup.queue, BLOCKS * 4096);
        let (engine, seed) = (setup.queue.options().engine, setup.seed);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                scope.spawn(move || {
                    let queue = queue(engine, false);
                    let storage = &**storage;
                    let mut rng = Rng::new(seed + thread);
                    let mut expected = [0u8; BLOCKS as usize];
                    queue.block_on(async {
                        let mut pieces = Pieces::one(4096);
                        for round in 0..100u32 {
                            // The threads use alternate blocks.
                            let block = rng.below(BLOCKS / 2) * 2 + thread;
                            let value = round as u8 + 1;
                            let known = expected[block as usize];
                            if known == 0 || rng.one_in(4) {
                                pieces.put(&[value; 4096]);
                                expected[block as usize] = value;
                                let at = block * 4096;
                                write(storage, &queue, at, &mut pieces).await.unwrap();
                            } else {
                                let at = block * 4096;
                                read(storage, &queue, at, &mut pieces).await.unwrap();
                                assert_eq!(pieces.get(), [known; 4096]);
                            }
                        }
                    });
                });
            }
        });
    });
}

#[test]
fn padding_of_one_write_does_not_cut_off_another() {
    fn ready<T>(poll: Poll<T>) -> Option<T> {
        match poll {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }
    let places = Places::new();
    let path = places.path(Place::Disk, "file").unwrap();
    for engine in engines() {
        let _ = fs::remove_file(&path);
        let how = OpenFile::default()
            .write(true)
            .create(true)
            .cache(CacheMode::None);
        let Ok(file) = open_file(&path, how) else {
            eprintln!("skipped: no O_DIRECT");
            return;
        };
        let queue = queue(engine, false);
        // The first write is held after it has read the length of the file.
        let mut near = Pieces::one(100);
        near.put(&[1; 100]);
        let mut far = Pieces::one(100);
        far.put(&[2; 100]);
        {
            let mut first = pin!(write(&*file, &queue, 0, &mut near));
            let _ = poll_once(first.as_mut());
            let mut second = pin!(write(&*file, &queue, 1 << 20, &mut far));
            // The second write waits for the first one, so both are polled.
            let (mut one, mut two) = (None, None);
            queue.block_on(std::future::poll_fn(|context| {
                if one.is_none() {
                    one = ready(second.as_mut().poll(context));
                }
                if two.is_none() {
                    two = ready(first.as_mut().poll(context));
                }
                match one.is_some() && two.is_some() {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            }));
            one.unwrap().unwrap();
            two.unwrap().unwrap();
        }
        assert_eq!(file.len().unwrap(), (1 << 20) + 100);
        let mut buffer = Buffer::new(100);
        let bytes = queue.block_on(storage::read_vec(&*file, &queue, 1 << 20, 100));
        buffer.copy_from_slice(&bytes.unwrap());
        assert_eq!(buffer[..], [2; 100]);
    }
}

/// The kernel emulates zeroing of a device by writes, which is not quick.
#[test]
fn quick_zeroes_are_refused_by_devices() {
    let places = Places::new();
    for place in [Place::Disk, Place::Loop] {
        for cache in [CacheMode::WriteBack, CacheMode::None] {
            let Some(storage) = places.open(place, cache) else {
                continue;
            };
            let queue = queue(EngineKind::Threads, false);
            if place == Place::Disk {
                set_len(&*storage, &queue, 1 << 20);
            }
            let options = OpenOptions::default().format(Some(Format::RAW)).write(true);
            let device = Device::from_storage(&queue, storage, &options).unwrap();
            let quickly = device.write_zeroes_quickly(&queue, 0, 1 << 16, Zeroing::Keep);
            let refused = match queue.block_on(quickly) {
                Ok(()) => false,
                Err(zebu::Error::Io(e)) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => true,
                Err(e) => panic!("{place:?}: {e}"),
            };
            assert!(refused || place == Place::Disk, "{place:?}");
        }
    }
}
