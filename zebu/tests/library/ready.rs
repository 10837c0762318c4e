//! Waiting for descriptors. Guards against a wait that never ends or ends too early, that starves
//! operations or is starved by them, or that consumes events after it was dropped, and against an
//! idle queue that does not sleep.

use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::future::{Future, poll_fn};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::common::{Pieces, PrintOnPanic, Rng, Watchdog, engines, queue};
use zebu::storage::{self, CacheMode, EngineKind, OpenFile, Queue, Storage};

fn pair() -> (UnixStream, UnixStream) {
    let (a, b) = UnixStream::pair().unwrap();
    a.set_nonblocking(true).unwrap();
    b.set_nonblocking(true).unwrap();
    (a, b)
}

/// Runs `test` with each engine.
fn each_engine(test: impl Fn(&Queue, EngineKind)) {
    for engine in engines() {
        let name = engine.to_string();
        let _note = PrintOnPanic(name.clone());
        let _watchdog = Watchdog::new(&name);
        test(&queue(engine, false), engine);
    }
}

/// A file with `bytes`, read with the queue's engine.
fn file(folder: &tempfile::TempDir, bytes: &[u8]) -> Arc<dyn Storage> {
    let path = folder.path().join("file");
    fs::write(&path, bytes).unwrap();
    let how = OpenFile::default().write(true).cache(CacheMode::WriteBack);
    storage::open_file(path, how).unwrap()
}

async fn read_block(file: &dyn Storage, queue: &Queue, offset: u64) -> Vec<u8> {
    let mut pieces = Pieces::one(512);
    // SAFETY: the pieces live until the read has ended.
    let iov = unsafe { pieces.iov(&mut [], &mut []) };
    storage::read(file, queue, offset, &iov).await.unwrap();
    pieces.get()
}

/// Whether `fd` is readable now or within a moment.
fn ready_soon(queue: &Queue, fd: &impl AsFd) -> bool {
    queue.block_on(async {
        let mut ready = pin!(queue.readable(fd));
        let mut pause = pin!(queue.sleep(Duration::from_millis(20)));
        poll_fn(|context| match ready.as_mut().poll(context) {
            Poll::Ready(result) => {
                result.unwrap();
                Poll::Ready(true)
            }
            Poll::Pending => pause.as_mut().poll(context).map(|_| false),
        })
        .await
    })
}

#[test]
fn a_wait_ends_when_the_descriptor_is_ready_and_not_before() {
    each_engine(|queue, _| {
        let (mut ours, mut theirs) = pair();
        assert!(!ready_soon(queue, &ours));
        theirs.write_all(b"x").unwrap();
        // It stays readable until it is read.
        assert!(ready_soon(queue, &ours));
        assert!(ready_soon(queue, &ours));
        ours.read_exact(&mut [0]).unwrap();
        assert!(!ready_soon(queue, &ours));
        // From another thread, later.
        let late = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            theirs.write_all(b"y").unwrap();
            theirs
        });
        queue.block_on(queue.readable(&ours)).unwrap();
        ours.read_exact(&mut [0]).unwrap();
        // The end of the stream makes it readable.
        let late = std::thread::spawn(move || drop(late.join().unwrap()));
        queue.block_on(queue.readable(&ours)).unwrap();
        assert_eq!(ours.read(&mut [0]).unwrap(), 0);
        late.join().unwrap();
    });
}

#[test]
fn a_full_socket_is_writable_after_it_was_read_from() {
    each_engine(|queue, _| {
        let (mut ours, mut theirs) = pair();
        queue.block_on(queue.writable(&ours)).unwrap();
        let mut sent = 0;
        while let Ok(n) = ours.write(&[7; 4096]) {
            sent += n;
        }
        let reader = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            theirs.set_nonblocking(false).unwrap();
            let mut bytes = vec![0; sent];
            theirs.read_exact(&mut bytes).unwrap();
            theirs
        });
        queue.block_on(queue.writable(&ours)).unwrap();
        assert!(ours.write(&[7]).is_ok());
        reader.join().unwrap();
    });
}

#[test]
fn dropped_waits_consume_nothing() {
    each_engine(|queue, _| {
        let (mut ours, mut theirs) = pair();
        let mut context = Context::from_waker(Waker::noop());
        for round in 0..200 {
            let before = queue.readable(&ours);
            let mut asked = queue.readable(&ours);
            assert!(pin!(&mut asked).poll(&mut context).is_pending());
            if round % 2 == 0 {
                // Now the waits are in the kernel.
                queue.block_on(queue.sleep(Duration::ZERO)).unwrap();
            }
            if round % 3 == 0 {
                theirs.write_all(b"x").unwrap();
            }
            if round % 4 == 0 {
                queue.block_on(queue.sleep(Duration::ZERO)).unwrap();
            }
            drop(asked);
            drop(before);
            if round % 3 == 0 {
                queue.block_on(queue.readable(&ours)).unwrap();
                ours.read_exact(&mut [0]).unwrap();
            }
        }
        assert!(!ready_soon(queue, &ours));
    });
}

#[test]
fn a_wait_ends_with_its_descriptor() {
    // The number of a descriptor is reused at once: a wait that was not cancelled would end by an
    // event of the new one.
    each_engine(|queue, _| {
        for _ in 0..100 {
            let (ours, _theirs) = pair();
            let mut wait = Box::pin(queue.readable(&ours));
            let mut context = Context::from_waker(Waker::noop());
            assert!(wait.as_mut().poll(&mut context).is_pending());
            queue.block_on(queue.sleep(Duration::ZERO)).unwrap();
            drop(wait);
        }
        let (ours, _theirs) = pair();
        assert!(!ready_soon(queue, &ours));
    });
}

#[test]
fn many_echoes_beside_reads_of_a_file() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut bytes = vec![0; 64 * 512];
    Rng::new(1).fill(&mut bytes);
    let file = file(&folder, &bytes);
    each_engine(|queue, engine| {
        let (mut ends, mut clients) = (Vec::new(), Vec::new());
        for n in 0..8u8 {
            let (ours, mut theirs) = pair();
            let bytes = bytes.clone();
            ends.push(ours);
            clients.push(std::thread::spawn(move || {
                theirs.set_nonblocking(false).unwrap();
                // Each byte requests a block, whose first byte is the reply.
                for i in 0..200u8 {
                    let ask = i.wrapping_mul(n + 1) % 64;
                    theirs.write_all(&[ask]).unwrap();
                    let mut answer = [0; 512];
                    theirs.read_exact(&mut answer).unwrap();
                    assert!(answer == bytes[usize::from(ask) * 512..][..512]);
                }
            }));
        }
        let served = Rc::new(Cell::new(0));
        let handles: Vec<_> = ends
            .into_iter()
            .map(|mut socket| {
                let (queue, file, served) = (queue.clone(), file.clone(), served.clone());
                let inner = queue.clone();
                queue.spawn(async move {
                    loop {
                        inner.readable(&socket).await.unwrap();
                        let mut ask = [0];
                        match socket.read(&mut ask) {
                            Ok(0) => break,
                            Ok(_) => {}
                            Err(e) => panic!("ready, but {e}"),
                        }
                        // A task that is spawned while others run.
                        let (queue, file) = (inner.clone(), file.clone());
                        let read = inner.spawn(async move {
                            read_block(&*file, &queue, u64::from(ask[0]) * 512).await
                        });
                        socket.write_all(&read.await).unwrap();
                        served.set(served.get() + 1);
                    }
                })
            })
            .collect();
        queue.block_on(async {
            for handle in handles {
                handle.await;
            }
        });
        assert_eq!(served.get(), 8 * 200, "{engine}");
        clients.into_iter().for_each(|c| c.join().unwrap());
    });
}

#[test]
fn a_busy_queue_polls_descriptors() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = file(&folder, &[1; 4096]);
    each_engine(|queue, _| {
        for reads in [true, false] {
            let (ours, mut theirs) = pair();
            let seen = Rc::new(Cell::new(false));
            let (inner, flag) = (queue.clone(), seen.clone());
            let _handle = queue.spawn(async move {
                inner.readable(&ours).await.unwrap();
                flag.set(true);
            });
            theirs.write_all(b"x").unwrap();
            // One operation after another, or a future that is always ready to run.
            queue.block_on(async {
                while !seen.get() {
                    if reads {
                        read_block(&*file, queue, 0).await;
                    } else {
                        let mut again = false;
                        poll_fn(|context| {
                            context.waker().wake_by_ref();
                            match std::mem::replace(&mut again, true) {
                                true => Poll::Ready(()),
                                false => Poll::Pending,
                            }
                        })
                        .await;
                    }
                }
            });
        }
    });
}

#[test]
fn other_threads_wake_a_queue_that_waits_for_descriptors() {
    each_engine(|queue, _| {
        let (ours, _theirs) = pair();
        let inner = queue.clone();
        let wait = queue.spawn(async move {
            let _ = inner.readable(&ours).await;
            unreachable!("nothing is written");
        });
        for _ in 0..200 {
            let mut started = false;
            queue.block_on(poll_fn(|context| {
                if std::mem::replace(&mut started, true) {
                    return Poll::Ready(());
                }
                let waker = context.waker().clone();
                std::thread::spawn(move || waker.wake());
                Poll::Pending
            }));
        }
        drop::<zebu::storage::Handle<()>>(wait);
        // The waiting task holds the queue, which lives until the process ends.
    });
}

#[test]
fn more_waits_than_an_engine_takes() {
    each_engine(|queue, engine| {
        let pairs: Vec<_> = (0..300).map(|_| pair()).collect();
        let ended = Rc::new(RefCell::new(Vec::new()));
        let mut handles = Vec::new();
        for (n, (ours, _)) in pairs.iter().enumerate() {
            let (inner, ended) = (queue.clone(), ended.clone());
            let ours = ours.try_clone().unwrap();
            handles.push(queue.spawn(async move {
                let result = inner.readable(&ours).await;
                ended.borrow_mut().push((n, result));
            }));
        }
        queue.block_on(queue.sleep(Duration::from_millis(5))).ok();
        for (_, theirs) in &pairs {
            (&*theirs).write_all(b"x").unwrap();
        }
        queue.block_on(async {
            for handle in handles {
                handle.await;
            }
        });
        let mut ended = ended.borrow_mut();
        ended.sort_by_key(|(n, _)| *n);
        assert!(ended.iter().map(|(n, _)| *n).eq(0..300));
        let refused = ended.iter().filter_map(|(_, result)| result.as_ref().err());
        let refused: Vec<_> = refused.map(|e| e.kind()).collect();
        match engine {
            EngineKind::Native => assert_eq!(refused, vec![ErrorKind::StorageFull; 300 - 64]),
            _ => assert!(refused.is_empty(), "{refused:?}"),
        }
    });
}

#[test]
fn an_idle_queue_sleeps() {
    each_engine(|queue, engine| {
        let (ours, _theirs) = pair();
        let used = processor_time();
        let start = Instant::now();
        queue.block_on(async {
            let mut wait = pin!(queue.readable(&ours));
            let mut pause = pin!(queue.sleep(Duration::from_millis(300)));
            poll_fn(|context| {
                assert!(wait.as_mut().poll(context).is_pending());
                pause.as_mut().poll(context)
            })
            .await
            .unwrap();
        });
        assert!(start.elapsed() >= Duration::from_millis(300));
        // A busy wait would use all of the thread's time.
        let used = processor_time() - used;
        assert!(used < Duration::from_millis(150), "{engine}: {used:?}");
    });
}

/// The processor time of this thread.
fn processor_time() -> Duration {
    let mut stat = String::new();
    let mut file = File::open("/proc/thread-self/schedstat").unwrap();
    file.read_to_string(&mut stat).unwrap();
    let nanoseconds = stat.split(' ').next().unwrap().parse().unwrap();
    Duration::from_nanos(nanoseconds)
}
