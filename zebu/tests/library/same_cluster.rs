//! Guards against two writes that both allocate the same guest cluster: the data of one would be
//! lost, or a cluster leaked.
//!
//! Many threads write different parts of the same clusters at the same time. Afterwards all parts
//! must be there, and each cluster must be allocated once.

use std::path::Path;
use std::sync::Barrier;

use crate::common::peer::{assert_clean, assert_content, qemu_img, text, write_sparse};
use crate::common::{Rng, Watchdog, counted, engines, progress};
use zebu::block::{Device, OpenOptions};
use zebu::jobs;
use zebu::names::Source;
use zebu::storage::{Buffer, CacheMode, EngineKind, Queue, QueueOptions};

const THREADS: usize = 4;
const CLUSTERS: usize = 24;
const CLUSTER: usize = 64 << 10;
/// The number of parts of each cluster that a thread writes.
const PIECES: usize = 2;
const PIECE: usize = CLUSTER / THREADS / PIECES;

fn queue(engine: EngineKind) -> Queue {
    Queue::new(QueueOptions::default().engine(engine)).unwrap()
}

/// The byte that is written at an offset.
fn byte(at: usize) -> u8 {
    (at / PIECE % 251) as u8 + 1
}

/// Writes all parts of one thread, cluster by cluster. The writes to one cluster are in flight
/// together.
fn write_own(device: &Device, engine: EngineKind, thread: usize, start: &Barrier) {
    let queue = queue(engine);
    let mut rng = Rng::new(thread as u64 + 1);
    for cluster in 0..CLUSTERS {
        let mut pieces: Vec<usize> = (0..PIECES).map(|n| n * THREADS + thread).collect();
        if rng.one_in(2) {
            pieces.reverse();
        }
        let write = |piece: usize| {
            let at = cluster * CLUSTER + piece * PIECE;
            let mut buffer = Buffer::new(PIECE);
            buffer.fill(byte(at));
            device.write_buffer(&queue, at as u64, buffer, PIECE)
        };
        // All threads begin each cluster together.
        start.wait();
        queue.block_on(async {
            for piece in pieces {
                write(piece).await.1.unwrap();
                progress();
            }
        });
    }
}

fn race(folder: &Path, options: &str, backing: bool, engine: EngineKind, cache: CacheMode) {
    let size = CLUSTERS * CLUSTER;
    let path = folder.join("disk.qcow2");
    let base = folder.join("base.raw");
    let mut args = vec!["create", "-q", "-f", "qcow2", "-o", options];
    if backing {
        write_sparse(&base, &vec![0xbb; size]);
        args.extend(["-b", text(&base), "-F", "raw"]);
    }
    let length = size.to_string();
    args.extend([text(&path), &length]);
    qemu_img(&args).ok("create");
    let owner = queue(engine);
    let how = OpenOptions::default().write(true).cache(cache);
    let device = Device::open(&owner, &Source::Name(text(&path).into()), &how).unwrap();
    let start = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (device, start) = (&device, &start);
            scope.spawn(move || write_own(device, engine, thread, start));
        }
    });
    owner.block_on(device.close(&owner)).unwrap();
    let what = format!("{options}, backing {backing}, {engine}, {}", cache.name());
    let expected: Vec<u8> = (0..size).map(byte).collect();
    assert_content(&path, "qcow2", &expected, &what);
    assert_clean(&path, &what);
    let device = Device::open(
        &owner,
        &Source::Name(text(&path).into()),
        &OpenOptions::default(),
    )
    .unwrap();
    let Some(image) = device.top().as_qcow2() else {
        panic!("it is qcow2");
    };
    let report = owner
        .block_on(jobs::check(&owner, image, &mut |_| {}, |_| {}))
        .unwrap();
    assert_eq!(report.allocated_clusters, CLUSTERS as u64, "{what}");
    // Header, refcount table and block, L1 and L2 table, and the data.
    let most = (CLUSTERS + 6) * CLUSTER;
    let length = std::fs::metadata(&path).unwrap().len();
    assert!(length <= most as u64, "{what}: {length} bytes");
}

#[test]
fn many_writes_to_one_unallocated_cluster() {
    let _watchdog = Watchdog::new("same_cluster");
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut writes = 0;
    for engine in engines() {
        for cache in [CacheMode::WriteBack, CacheMode::None] {
            for options in ["compat=1.1", "extended_l2=on", "lazy_refcounts=on"] {
                for backing in [false, true] {
                    race(folder.path(), options, backing, engine, cache);
                    writes += CLUSTERS * THREADS * PIECES;
                }
            }
        }
    }
    counted(writes as u64, "writes to clusters that others allocate");
}
