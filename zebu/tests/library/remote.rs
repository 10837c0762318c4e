//! A device shared with other runtimes ([`zebu::block::Remote`]).
//!
//! Guards against requests that are lost when their future is dropped or the device is closed, a
//! panic that ends other threads' requests, and futures that are not `Send`.

use std::sync::Arc;

use zebu::block::{Device, OpenOptions, Preallocation, Remote, SharedDevice, Zeroing};
use zebu::jobs::{CreateQcow2, create_qcow2};
use zebu::storage::{Memory, Queue, QueueOptions};

const PART: u64 = 1 << 20;

fn make(queue: &Queue, size: u64) -> Arc<Memory> {
    let storage = Arc::new(Memory::new(Vec::new()));
    queue
        .block_on(create_qcow2(
            queue,
            &*storage,
            None,
            &CreateQcow2::default().size(size),
            |_| {},
        ))
        .unwrap();
    storage
}

fn open(storage: &Arc<Memory>, queue: &Queue) -> Device {
    let options = OpenOptions::default().write(true).discard(Some(true));
    Device::from_storage(queue, storage.clone(), &options).unwrap()
}

fn assert_send<T: Send + 'static>(value: T) -> T {
    value
}

#[test]
fn requests_of_many_threads_are_executed() {
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let storage = make(&queue, 16 * PART);
    let device = SharedDevice::new(open(&storage, &queue));
    let remote = Remote::new(device, 3, &QueueOptions::default()).unwrap();
    std::thread::scope(|scope| {
        for part in 0..8u64 {
            let remote = &remote;
            scope.spawn(move || {
                // Any executor will do; each thread has its own.
                let queue = Queue::new(QueueOptions::default()).unwrap();
                queue.block_on(async {
                    let at = part * PART;
                    for n in 0..20 {
                        let bytes = vec![(part * 20 + n) as u8; 40_000];
                        let write = assert_send(remote.write(at + n * 45_000, bytes));
                        match n % 4 {
                            // The write is executed although its future is dropped.
                            3 => drop(write),
                            _ => drop(write.await.unwrap()),
                        }
                    }
                    remote.flush().await.unwrap();
                    let zeroes = remote.write_zeroes(at, 20_000, Zeroing::Keep);
                    assert_send(zeroes).await.unwrap();
                });
            });
        }
    });
    remote.close().unwrap();
    let device = SharedDevice::new(open(&storage, &queue));
    let remote = Remote::new(device.clone(), 1, &QueueOptions::default()).unwrap();
    for part in 0..8u64 {
        let at = part * PART;
        let bytes = queue.block_on(remote.read(at, PART as usize)).unwrap();
        for n in 0..20 {
            let from = if n == 0 { 20_000 } else { 0 };
            let written = &bytes[n * 45_000..][..40_000];
            assert!(
                written[from..]
                    .iter()
                    .all(|b| *b == (part * 20 + n as u64) as u8)
            );
            assert!(written[..from].iter().all(|b| *b == 0));
        }
        assert!(queue.block_on(remote.status(at, PART)).unwrap().length > 0);
    }
    let late = remote.read(16 * PART, 1);
    assert!(matches!(
        queue.block_on(late),
        Err(zebu::Error::OutOfRange { .. })
    ));
    // It is closed for all users.
    remote.close().unwrap();
    assert!(matches!(
        queue.block_on(device.enter()),
        Err(zebu::Error::Refused(_))
    ));
}

#[test]
fn another_user_resizes_the_device_between_requests() {
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let storage = make(&queue, PART);
    let device = SharedDevice::new(open(&storage, &queue));
    let remote = Remote::new(device.clone(), 2, &QueueOptions::default()).unwrap();
    queue.block_on(async {
        for parts in 2..10 {
            let writes: Vec<_> = (0..16)
                .map(|n| remote.write((parts - 2) * PART + n * 512, vec![parts as u8; 512]))
                .collect();
            let resize = device.resize(&queue, parts * PART, Preallocation::Off);
            resize.await.unwrap();
            for write in writes {
                write.await.unwrap();
            }
            assert_eq!(device.enter().await.unwrap().size(), parts * PART);
        }
        let bytes = remote.read(5 * PART, 16 * 512).await.unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
    });
    drop(remote);
    queue.block_on(device.close(&queue)).unwrap();
}

#[test]
fn a_panic_is_the_error_of_its_requests() {
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let storage = make(&queue, PART);
    let remote = Remote::new(
        SharedDevice::new(open(&storage, &queue)),
        2,
        &QueueOptions::default(),
    )
    .unwrap();
    for _ in 0..3 {
        let panics = remote.run::<(), _>(|_, _| async { panic!("on purpose") });
        let later = remote.read(0, 512);
        // Before the future of the request exists.
        let early = remote.run::<(), std::future::Ready<_>>(|_, _| panic!("on purpose"));
        assert!(queue.block_on(panics).is_err());
        assert!(queue.block_on(early).is_err());
        queue.block_on(later).unwrap();
    }
    for _ in 0..4 {
        queue.block_on(remote.read(0, 512)).unwrap();
    }
    remote.close().unwrap();
}

#[test]
fn a_length_beyond_the_disk_takes_no_memory() {
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let storage = make(&queue, PART);
    let device = SharedDevice::new(open(&storage, &queue));
    let remote = Remote::new(device, 1, &QueueOptions::default()).unwrap();
    for (offset, length) in [(0, 1 << 40), (0, usize::MAX), (u64::MAX, 512), (PART, 1)] {
        let read = queue.block_on(remote.read(offset, length));
        assert!(matches!(read, Err(zebu::Error::OutOfRange { .. })));
    }
}

/// The last `Arc` may be that of a request, which must not wait for its own end.
#[test]
fn a_request_may_own_the_remote_that_executes_it() {
    for closes in [false, true] {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let storage = make(&queue, PART);
        let device = SharedDevice::new(open(&storage, &queue));
        let remote = Arc::new(Remote::new(device.clone(), 2, &QueueOptions::default()).unwrap());
        let (go, may_go) = futures_channel::oneshot::channel::<()>();
        let owned = remote.clone();
        let request = remote.run(move |queue, device| async move {
            let _ = may_go.await;
            device.enter().await?.flush(&queue).await?;
            let owned = Arc::into_inner(owned).expect("the last one");
            match closes {
                true => owned.close(),
                false => {
                    drop(owned);
                    Ok(())
                }
            }
        });
        drop(remote);
        go.send(()).unwrap();
        assert_eq!(queue.block_on(request).is_err(), closes);
        queue.block_on(device.close(&queue)).unwrap();
    }
}

#[test]
fn spawned_futures_are_aborted_and_drained() {
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let ended = std::rc::Rc::new(std::cell::Cell::new(0));
    let count = |queue_: Queue, ended: std::rc::Rc<std::cell::Cell<i32>>| async move {
        queue_
            .sleep(std::time::Duration::from_millis(5))
            .await
            .unwrap();
        ended.set(ended.get() + 1);
    };
    for _ in 0..10 {
        drop(queue.spawn(count(queue.clone(), ended.clone())));
    }
    let never = queue.spawn(std::future::pending::<()>());
    let aborted = queue.spawn(count(queue.clone(), ended.clone()));
    queue
        .block_on(queue.sleep(std::time::Duration::ZERO))
        .unwrap();
    aborted.abort();
    never.abort();
    queue.block_on(queue.drain());
    assert_eq!(ended.get(), 10);
    queue.block_on(queue.drain());
}
