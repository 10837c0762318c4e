//! A device that is resized, snapshotted and closed while many threads use it
//! ([`zebu::block::SharedDevice`]).
//!
//! Guards against a change of the whole device that runs at the same time as requests or starves,
//! against waiters that are not woken, and against a device that is lost with a dropped future.

use std::future::Future;
use std::io::{IoSlice, IoSliceMut};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use zebu::ErrorKind;
use zebu::block::{Device, OpenOptions, Preallocation, SharedDevice};
use zebu::jobs::{CreateQcow2, check, create_qcow2};
use zebu::qcow2::SnapshotName;
use zebu::storage::{Buffer, Memory, Queue, QueueOptions};

const SIZE: u64 = 8 << 20;
const THREADS: u64 = 4;
const ROUNDS: u64 = 60;
const BLOCK: u64 = 40_000;

fn queue() -> Queue {
    Queue::new(QueueOptions::default()).unwrap()
}

fn make(queue: &Queue) -> Arc<Memory> {
    let storage = Arc::new(Memory::new(Vec::new()));
    let options = CreateQcow2::default().size(SIZE);
    queue
        .block_on(create_qcow2(queue, &*storage, None, &options, |_| {}))
        .unwrap();
    storage
}

fn open(queue: &Queue, storage: &Arc<Memory>) -> Device {
    let options = OpenOptions::default().write(true);
    Device::from_storage(queue, storage.clone(), &options).unwrap()
}

/// Fills the blocks of a thread. No change of the device may come between the two writes.
async fn round(shared: &SharedDevice, queue: &Queue, thread: u64, round: u64) {
    let device = shared.enter().await.unwrap();
    let size = device.size();
    for block in 0..2 {
        let mut buffer = Buffer::new(BLOCK as usize);
        buffer.fill(round as u8);
        let at = (thread * 2 + block) * BLOCK;
        let (_, result) = device.write_buffer(queue, at, buffer, BLOCK as usize).await;
        result.unwrap();
    }
    // No resize came between.
    assert_eq!(device.size(), size);
}

/// The byte that fills a block.
fn block(device: &Device, queue: &Queue, number: u64) -> u8 {
    let mut bytes = vec![0; BLOCK as usize];
    device
        .read_blocking(queue, number * BLOCK, &mut bytes)
        .unwrap();
    assert!(bytes.iter().all(|b| *b == bytes[0]), "block {number}");
    bytes[0]
}

#[test]
fn changes_of_the_whole_device_beside_many_threads() {
    let main = queue();
    let storage = make(&main);
    let shared = SharedDevice::new(open(&main, &storage));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let shared = shared.clone();
            scope.spawn(move || {
                let queue = queue();
                for n in 1..=ROUNDS {
                    queue.block_on(round(&shared, &queue, thread, n));
                }
            });
        }
        main.block_on(async {
            for n in 0..10u64 {
                let name = format!("s{n}");
                shared.snapshot_create(&main, &name).await.unwrap();
                let size = SIZE << (n % 2);
                let resized = shared.resize(&main, size, Preallocation::Off).await;
                resized.unwrap();
                assert_eq!(shared.enter().await.unwrap().size(), size);
                if n % 3 == 0 {
                    let name = SnapshotName::from(name.as_str());
                    shared.snapshot_delete(&main, &name).await.unwrap();
                }
            }
        });
    });
    main.block_on(shared.close(&main)).unwrap();
    assert_eq!(
        main.block_on(shared.enter()).unwrap_err().kind(),
        ErrorKind::Refused
    );
    assert!(main.block_on(shared.close(&main)).is_err());

    let device = open(&main, &storage);
    for number in 0..THREADS * 2 {
        assert_eq!(block(&device, &main, number), ROUNDS as u8);
    }
    main.block_on(device.close(&main)).unwrap();
    // Each snapshot is of a moment at which no thread was between its two writes.
    for n in [1, 2, 4, 5, 7, 8] {
        let options =
            OpenOptions::default().snapshot(Some(SnapshotName::from(format!("s{n}").as_str())));
        let device = Device::from_storage(&main, storage.clone(), &options).unwrap();
        for thread in 0..THREADS {
            let pair = [0, 1].map(|b| block(&device, &main, thread * 2 + b));
            assert_eq!(pair[0], pair[1]);
        }
    }
    let options = OpenOptions::default().check(true);
    let device = Device::from_storage(&main, storage, &options).unwrap();
    let image = device.top().as_qcow2().unwrap();
    let report = main
        .block_on(check(
            &main,
            image,
            &mut |message| panic!("{message:?}"),
            |_| {},
        ))
        .unwrap();
    assert_eq!((report.corruptions, report.leaks), (0, 0));
}

#[test]
fn a_change_that_waits_and_is_dropped_lets_others_enter() {
    let queue = queue();
    let storage = make(&queue);
    let shared = SharedDevice::new(open(&queue, &storage));
    let used = queue.block_on(shared.enter()).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    {
        let mut resize = pin!(shared.resize(&queue, 2 * SIZE, Preallocation::Off));
        assert!(resize.as_mut().poll(&mut context).is_pending());
        // The waiting change has priority over later requests.
        assert!(pin!(shared.enter()).poll(&mut context).is_pending());
    }
    assert!(matches!(
        pin!(shared.enter()).poll(&mut context),
        Poll::Ready(Ok(_))
    ));
    drop(used);
    queue
        .block_on(shared.resize(&queue, 2 * SIZE, Preallocation::Off))
        .unwrap();
    queue.block_on(shared.close(&queue)).unwrap();
}

#[test]
fn borrowed_memory_is_read_and_written_in_pieces() {
    let queue = queue();
    let device = open(&queue, &make(&queue));
    let (a, b) = ([1; 700], [2; 5000]);
    let slices = [IoSlice::new(&a), IoSlice::new(&[]), IoSlice::new(&b)];
    device
        .write_vectored_blocking(&queue, 300, &slices)
        .unwrap();
    let (mut c, mut d) = ([0; 1000], [0; 4700]);
    let mut slices = [IoSliceMut::new(&mut c), IoSliceMut::new(&mut d)];
    device
        .read_vectored_blocking(&queue, 300, &mut slices)
        .unwrap();
    assert_eq!([&c[..], &d[..]].concat(), [&a[..], &b[..]].concat());
    assert!(
        device
            .read_vectored_blocking(&queue, SIZE, &mut slices_of(&mut c))
            .is_err()
    );
}

fn slices_of(bytes: &mut [u8]) -> [IoSliceMut<'_>; 1] {
    [IoSliceMut::new(bytes)]
}
