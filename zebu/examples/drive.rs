//! Which way of driving requests costs least? Random 4 KiB direct reads of one
//! file, for each engine and candidate, at queue depth 1 and 32:
//!
//! - `callbacks`: a hand-written loop over the engine, the floor;
//! - `futures`: one future a request, polled by the queue that owns the engine;
//! - `blocking`: a thread a request, with `pread(2)`.
//!
//! Usage: `drive FILE [SECONDS]`. Compare with fio on the same file.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use zebu::storage::{
    self, Buffer, CacheMode, EngineKind, File, Op, OpKind, OpenFile, Queue, QueueOptions, Storage,
};

const BLOCK: u64 = 4096;

/// xorshift64*: fast, and good enough to scatter reads.
fn next(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

fn callbacks(file: &File, blocks: u64, depth: usize, kind: EngineKind, time: Duration) -> u64 {
    let mut engine = kind.start().expect("the engine");
    let mut buffers: Vec<Buffer> = (0..depth).map(|_| Buffer::new(BLOCK as usize)).collect();
    let mut seed = 1;
    let mut op = |buffer: &mut Buffer| Op {
        kind: OpKind::Read,
        fd: file.as_raw_fd(),
        offset: next(&mut seed) % blocks * BLOCK,
        length: BLOCK,
        memory: buffer.as_mut_ptr().cast(),
        segments: 1,
        aside: false,
    };
    for (i, buffer) in buffers.iter_mut().enumerate() {
        // SAFETY: buffers and file outlive the engine's operations.
        unsafe { engine.submit(i as u32, op(buffer)) };
    }
    let (start, mut count, mut done) = (Instant::now(), 0, Vec::new());
    let mut in_flight = depth;
    while in_flight > 0 {
        engine.poll(true, &mut done).expect("poll");
        let go_on = start.elapsed() < time;
        for (token, result) in done.drain(..) {
            assert_eq!(result, BLOCK as i32);
            count += 1;
            in_flight -= 1;
            if go_on {
                in_flight += 1;
                // SAFETY: as above.
                unsafe { engine.submit(token, op(&mut buffers[token as usize])) };
            }
        }
    }
    count
}

fn futures(file: Arc<File>, blocks: u64, depth: usize, kind: EngineKind, time: Duration) -> u64 {
    let queue = Queue::new(QueueOptions {
        engine: kind,
        ..Default::default()
    })
    .expect("the engine");
    let start = Instant::now();
    let mut handles = Vec::new();
    for i in 0..depth {
        let (queue2, file) = (queue.clone(), file.clone());
        handles.push(queue.spawn(async move {
            let (mut count, mut seed) = (0, i as u64 + 1);
            let mut buffer = Buffer::new(BLOCK as usize);
            // SAFETY: the buffer lives until the last read has ended.
            let iov = unsafe { buffer.iov() };
            while start.elapsed() < time {
                let offset = next(&mut seed) % blocks * BLOCK;
                storage::read(&*file, &queue2, offset, &iov)
                    .await
                    .expect("read");
                count += 1;
            }
            count
        }));
    }
    queue.block_on(async {
        let mut sum = 0;
        for handle in handles {
            sum += handle.await;
        }
        sum
    })
}

fn blocking(file: &File, blocks: u64, depth: usize, time: Duration) -> u64 {
    let (start, sum) = (Instant::now(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for i in 0..depth {
            let sum = &sum;
            scope.spawn(move || {
                let (mut count, mut seed) = (0, i as u64 + 1);
                let mut buffer = Buffer::new(BLOCK as usize);
                while start.elapsed() < time {
                    let op = Op {
                        kind: OpKind::Read,
                        fd: file.as_raw_fd(),
                        offset: next(&mut seed) % blocks * BLOCK,
                        length: BLOCK,
                        memory: buffer.as_mut_ptr().cast(),
                        segments: 1,
                        aside: false,
                    };
                    // SAFETY: the buffer is this thread's.
                    unsafe { op.perform() }.expect("read");
                    count += 1;
                }
                sum.fetch_add(count, Ordering::Relaxed);
            });
        }
    });
    sum.load(Ordering::Relaxed)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("usage: drive FILE [SECONDS]");
    let seconds = args.next().map_or(3.0, |s| s.parse().expect("seconds"));
    let time = Duration::from_secs_f64(seconds);
    let how = OpenFile {
        cache: CacheMode::None,
        ..Default::default()
    };
    let file = Arc::new(File::open(path, how).expect("open"));
    let blocks = file.len().expect("length") / BLOCK;
    for depth in [1, 32] {
        for kind in EngineKind::ALL {
            let a = callbacks(&file, blocks, depth, kind, time) as f64 / seconds;
            let b = futures(file.clone(), blocks, depth, kind, time) as f64 / seconds;
            println!("depth {depth:2} {kind:9} callbacks {a:8.0}/s   futures {b:8.0}/s");
        }
        let c = blocking(&file, blocks, depth, time) as f64 / seconds;
        println!("depth {depth:2} blocking threads {c:8.0}/s");
    }
}
