//! `bench`: how fast an image answers, as `qemu-img bench` measures it.
//!
//! The data path is the library's alone: each request in flight is a future
//! with a buffer of its own that is reused for the next one. Nothing is
//! allocated, locked or printed a request.

use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::rc::Rc;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use zebu::block::{Device, NATIVE_NEEDS_DIRECT, OpenOptions, Source};
use zebu::storage::{Buffer, CacheMode, EngineKind, Queue, QueueOptions};

use crate::failure::{Failure, Outcome};
use crate::program::{self, Invocation};
use crate::size::{self, SizeError};

/// The largest count, depth and size that qemu-img takes.
const MAX: u64 = i32::MAX as u64;
/// The most memory that the buffers of all requests may take, in bytes.
const MAX_BUFFERS: u64 = 8 << 30;
/// Offsets of `--random` are the same in every run.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// Measures how fast an image is read.
#[derive(Debug, Parser)]
#[command(about = "Runs a simple benchmark on an image")]
struct Arguments {
    /// Number of requests
    #[arg(
        short = 'c',
        long = "count",
        value_name = "COUNT",
        allow_hyphen_values = true
    )]
    count: Option<String>,
    /// Number of requests in flight
    #[arg(
        short = 'd',
        long = "depth",
        value_name = "DEPTH",
        allow_hyphen_values = true
    )]
    depth: Option<String>,
    /// Format of the image
    #[arg(short = 'f', long = "format", value_name = "FMT")]
    format: Option<String>,
    /// Linux native AIO, as -i native
    #[arg(short = 'n', long = "native")]
    native: bool,
    /// How I/O is done: threads, native or io_uring
    #[arg(short = 'i', long = "aio", value_name = "AIO")]
    aio: Option<String>,
    /// Where the first request starts
    #[arg(
        short = 'o',
        long = "offset",
        value_name = "OFFSET",
        allow_hyphen_values = true
    )]
    offset: Option<String>,
    /// Size of a request
    #[arg(
        short = 's',
        long = "buffer-size",
        value_name = "SIZE",
        allow_hyphen_values = true
    )]
    buffer_size: Option<String>,
    /// From one request's start to the next one's; 0: the buffer size
    #[arg(
        short = 'S',
        long = "step-size",
        value_name = "SIZE",
        allow_hyphen_values = true
    )]
    step_size: Option<String>,
    /// Cache mode: none, writeback, writethrough, directsync or unsafe
    #[arg(short = 't', long = "cache", value_name = "CACHE")]
    cache: Option<String>,
    /// Accepted, without effect, as in qemu-img
    #[arg(short = 'q', long = "quiet")]
    quiet: bool,
    /// Open the image although others may write to it
    #[arg(short = 'U', long = "force-share")]
    force_share: bool,
    /// The image is given as options, not by its name
    #[arg(long = "image-opts")]
    image_opts: bool,
    /// Write instead (not in this version)
    #[arg(short = 'w', long = "write")]
    write: bool,
    /// Byte to write
    #[arg(long = "pattern", value_name = "BYTE", allow_hyphen_values = true)]
    pattern: Option<String>,
    /// Flush after so many writes
    #[arg(
        long = "flush-interval",
        value_name = "COUNT",
        allow_hyphen_values = true
    )]
    flush_interval: Option<String>,
    /// Do not wait for requests in flight before a flush
    #[arg(long = "no-drain")]
    no_drain: bool,
    /// Requests at random multiples of the buffer size, the same in every run,
    /// instead of in steps (not in qemu-img)
    #[arg(long = "random")]
    random: bool,
    /// Threads that share the requests, each with a queue of its own and its
    /// part of the depth (not in qemu-img)
    #[arg(long = "threads", value_name = "N", allow_hyphen_values = true)]
    threads: Option<String>,
    /// The image
    #[arg(value_name = "FILE")]
    files: Vec<String>,
}

/// What to do, as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    count: u64,
    depth: u64,
    size: u64,
    step: u64,
    offset: u64,
    random: bool,
    threads: u64,
}

impl Plan {
    fn new(arguments: &Arguments) -> Result<Plan, Failure> {
        let depth = number("queue depth", &arguments.depth, integer, 64, 1)?;
        let count = number("request count", &arguments.count, integer, 75000, 1)?;
        let size = number("buffer size", &arguments.buffer_size, size::parse, 4096, 1)?;
        let step = number("step size", &arguments.step_size, size::parse, 0, 0)?;
        let threads = number("number of threads", &arguments.threads, integer, 1, 1)?;
        let offset = match &arguments.offset {
            Some(text) => size::parse_option("offset", text).map_err(Failure::new)?,
            None => 0,
        };
        if size.saturating_mul(depth.min(count)) > MAX_BUFFERS {
            return Err(Failure::new(format!(
                "The buffers of {depth} requests of {size} bytes take more than {MAX_BUFFERS} bytes"
            )));
        }
        if threads > 1024 {
            let text = "Invalid number of threads specified. Must be between 1 and 1024.";
            return Err(Failure::new(text));
        }
        Ok(Plan {
            count,
            depth,
            size,
            step: if step == 0 { size } else { step },
            offset,
            random: arguments.random,
            threads,
        })
    }

    /// What thread `index` does: its share of the requests and of the depth.
    fn share(&self, index: u64) -> Plan {
        let part = |n: u64| n / self.threads + u64::from(index < n % self.threads);
        let before = (0..index).map(|i| self.share_of_count(i)).sum::<u64>();
        Plan {
            count: part(self.count),
            depth: part(self.depth).max(1),
            offset: self.offset.wrapping_add(before.wrapping_mul(self.step)),
            ..*self
        }
    }

    fn share_of_count(&self, index: u64) -> u64 {
        self.count / self.threads + u64::from(index < self.count % self.threads)
    }
}

/// An option's number from `min` to [`MAX`].
fn number(
    what: &str,
    text: &Option<String>,
    parse: fn(&str) -> Result<u64, SizeError>,
    default: u64,
    min: u64,
) -> Result<u64, Failure> {
    let Some(text) = text else {
        return Ok(default);
    };
    match parse(text) {
        Ok(n) if (min..=MAX).contains(&n) => Ok(n),
        Err(SizeError::Syntax) => Err(Failure::new(format!("Invalid {what} specified: '{text}'."))),
        _ => Err(Failure::new(format!(
            "Invalid {what} specified. Must be between {min} and {MAX}."
        ))),
    }
}

/// A number without a suffix.
fn integer(text: &str) -> Result<u64, SizeError> {
    match size::parse(text) {
        Ok(n) if !text.contains(|c: char| c.is_ascii_alphabetic() && !text.starts_with("0x")) => {
            Ok(n)
        }
        Ok(_) => Err(SizeError::Syntax),
        Err(error) => Err(error),
    }
}

/// The offsets of one thread's requests.
struct Offsets {
    next: u64,
    step: u64,
    disk: u64,
    /// The state of the random numbers, and the number of blocks.
    random: Option<(u64, u64)>,
    size: u64,
}

impl Offsets {
    fn new(plan: &Plan, disk: u64, index: u64) -> Offsets {
        let random = plan.random.then(|| {
            let state = SEED ^ (index + 1).wrapping_mul(0xd134_2543_de82_ef95);
            (state, disk / plan.size)
        });
        Offsets {
            next: plan.offset,
            step: plan.step,
            disk,
            random,
            size: plan.size,
        }
    }

    /// Where the next request starts. Steps wrap around at the end of the
    /// disk, as qemu-img's do; a request may then reach past it, and fails.
    fn next(&mut self) -> u64 {
        if let Some((state, blocks)) = &mut self.random {
            // xorshift64*.
            *state ^= *state >> 12;
            *state ^= *state << 25;
            *state ^= *state >> 27;
            let number = state.wrapping_mul(0x2545_f491_4f6c_dd1d);
            // The high half scaled to the number of blocks: no division.
            let block = (u128::from(number) * u128::from(*blocks)) >> 64;
            return block as u64 * self.size;
        }
        let offset = self.next;
        self.next = match offset.checked_add(self.step) {
            Some(next) if next < self.disk => next,
            Some(next) => next % self.disk.max(1),
            None => 0,
        };
        offset
    }
}

/// Runs the command.
pub fn run(invocation: &Invocation, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = program::parse(invocation, arguments)?;
    let plan = Plan::new(&arguments)?;
    refuse_writes(&arguments)?;
    let [file] = arguments.files.as_slice() else {
        return Err(Failure::new("Expecting one image file name").with_hint());
    };
    let (engine, how) = opening(&arguments)?;
    let source = match arguments.image_opts {
        true => Source::Options(file.clone()),
        false => Source::Name(file.clone()),
    };
    let can_not = |why: String| Failure::new(format!("Could not open '{file}': {why}"));
    if engine == EngineKind::Native && !how.cache.is_direct() {
        return Err(can_not(NATIVE_NEEDS_DIRECT.into()));
    }
    let queue = queue(engine).map_err(|e| can_not(e.to_string()))?;
    let how = OpenOptions {
        format: match &arguments.format {
            Some(name) => Some(
                name.parse()
                    .map_err(|e: zebu::Error| can_not(e.to_string()))?,
            ),
            None => None,
        },
        ..how
    };
    let device = Device::open(&queue, &source, &how).map_err(|e| can_not(e.to_string()))?;
    let device = Arc::new(device);
    announce(&plan)?;
    let time = match plan.threads {
        1 => measure(device, queue, &plan)?,
        _ => measure_threads(&device, engine, &plan)?,
    };
    crate::output::print(&format!(
        "Run completed in {:3.3} seconds.\n",
        time.as_secs_f64()
    ))
}

fn announce(plan: &Plan) -> Result<(), Failure> {
    let line = match plan.random {
        true => format!(
            "Sending {} read requests, {} bytes each, {} in parallel (at random offsets)\n",
            plan.count, plan.size, plan.depth
        ),
        false => format!(
            "Sending {} read requests, {} bytes each, {} in parallel \
             (starting at offset {}, step size {})\n",
            plan.count, plan.size, plan.depth, plan.offset, plan.step
        ),
    };
    crate::output::print(&line).map(drop)
}

/// What comes with the write side.
fn refuse_writes(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.write {
        let text = "bench -w: writing is not supported in this version";
        return Err(Failure::new(text));
    }
    number("flush interval", &arguments.flush_interval, integer, 0, 0)?;
    if arguments.flush_interval.is_some() {
        let text = "--flush-interval is only available in write tests";
        return Err(Failure::new(text));
    }
    if let Some(text) = &arguments.pattern {
        match integer(text) {
            Ok(0..=255) => {}
            Err(SizeError::Syntax) => {
                let text = format!("Invalid pattern byte specified: '{text}'.");
                return Err(Failure::new(text));
            }
            _ => {
                let text = "Invalid pattern byte specified. Must be between 0 and 255.";
                return Err(Failure::new(text));
            }
        }
    }
    Ok(())
}

fn opening(arguments: &Arguments) -> Result<(EngineKind, OpenOptions), Failure> {
    let engine = match &arguments.aio {
        Some(name) => name.parse().map_err(Failure::new)?,
        None if arguments.native => EngineKind::Native,
        None => EngineKind::best(),
    };
    let cache = match &arguments.cache {
        Some(name) => name
            .parse()
            .map_err(|()| Failure::new("Invalid cache mode"))?,
        None => CacheMode::default(),
    };
    if arguments.image_opts && arguments.format.is_some() {
        let text = "--image-opts and --format are mutually exclusive";
        return Err(Failure::new(text));
    }
    let how = OpenOptions {
        cache,
        force_share: arguments.force_share,
        ..OpenOptions::default()
    };
    Ok((engine, how))
}

fn queue(engine: EngineKind) -> std::io::Result<Queue> {
    Queue::new(QueueOptions {
        engine,
        ..QueueOptions::default()
    })
}

/// What the requests of one thread share.
struct Share {
    device: Arc<Device>,
    queue: Queue,
    size: usize,
    /// Requests not yet made.
    left: Cell<u64>,
    offsets: RefCell<Offsets>,
    error: RefCell<Option<zebu::Error>>,
}

impl Share {
    /// The offset of the next request; None if there are no more.
    fn next(&self) -> Option<u64> {
        let left = self.left.get().checked_sub(1)?;
        self.left.set(left);
        Some(self.offsets.borrow_mut().next())
    }

    /// Makes one request after another, as long as there are any.
    async fn work(self: Rc<Self>, mut buffer: Buffer) {
        while let Some(offset) = self.next() {
            let reading = self
                .device
                .read_buffer(&self.queue, offset, buffer, self.size);
            let result;
            (buffer, result) = reading.await;
            if let Err(error) = result {
                self.left.set(0);
                self.error.borrow_mut().get_or_insert(error);
            }
        }
    }
}

/// One thread's requests, ready to start.
struct Run {
    share: Rc<Share>,
    buffers: Vec<Buffer>,
}

impl Run {
    fn new(device: Arc<Device>, queue: Queue, plan: &Plan, index: u64) -> Run {
        let size = plan.size as usize;
        let offsets = Offsets::new(plan, device.size(), index);
        let depth = plan.depth.min(plan.count);
        let share = Share {
            device,
            queue,
            size,
            left: Cell::new(plan.count),
            offsets: RefCell::new(offsets),
            error: RefCell::new(None),
        };
        Run {
            share: Rc::new(share),
            // Touched here, so that no page fault is measured.
            buffers: (0..depth).map(|_| touched(size)).collect(),
        }
    }

    /// Makes all requests.
    fn finish(self) -> zebu::Result<()> {
        let queue = &self.share.queue;
        let workers: Vec<_> = self
            .buffers
            .into_iter()
            .map(|buffer| queue.spawn(self.share.clone().work(buffer)))
            .collect();
        queue.block_on(async {
            for worker in workers {
                worker.await;
            }
        });
        self.share.error.take().map_or(Ok(()), Err)
    }
}

fn touched(size: usize) -> Buffer {
    let mut buffer = Buffer::new(size);
    buffer.fill(0xa5);
    buffer
}

/// Makes all requests on this thread and returns how long that took.
fn measure(device: Arc<Device>, queue: Queue, plan: &Plan) -> Result<Duration, Failure> {
    let run = Run::new(device, queue, plan, 0);
    let start = Instant::now();
    run.finish().map_err(|e| request_failed(&e))?;
    Ok(start.elapsed())
}

/// Shares the requests out to threads and returns how long all of them took.
fn measure_threads(
    device: &Arc<Device>,
    engine: EngineKind,
    plan: &Plan,
) -> Result<Duration, Failure> {
    let ready = Barrier::new(plan.threads as usize + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.threads)
            .map(|index| {
                let (device, ready) = (device.clone(), &ready);
                scope.spawn(move || {
                    let run = queue(engine)
                        .map(|queue| Run::new(device, queue, &plan.share(index), index));
                    ready.wait();
                    run?.finish()
                })
            })
            .collect();
        ready.wait();
        let start = Instant::now();
        for thread in threads {
            let result = thread.join().map_err(|_| Failure::new("A thread failed"))?;
            result.map_err(|e| request_failed(&e))?;
        }
        Ok(start.elapsed())
    })
}

fn request_failed(error: &zebu::Error) -> Failure {
    let text = match error {
        // QEMU's word for it.
        zebu::Error::OutOfRange { .. } => "Input/output error".to_string(),
        other => other.to_string(),
    };
    Failure::new(format!("Failed request: {text}"))
}

#[cfg(test)]
mod tests {
    //! Guards against requests at other places than qemu-img's: the offsets
    //! expected are those that qemu-img 10 was seen to read.
    use super::*;

    fn plan(arguments: &[&str]) -> Result<Plan, Failure> {
        let all = std::iter::once("bench").chain(arguments.iter().copied());
        let arguments = Arguments::try_parse_from(all).expect("arguments");
        Plan::new(&arguments)
    }

    fn offsets(arguments: &[&str], disk: u64, count: usize) -> Vec<u64> {
        let plan = plan(arguments).expect("a plan");
        let mut offsets = Offsets::new(&plan, disk, 0);
        (0..count).map(|_| offsets.next()).collect()
    }

    #[test]
    fn steps_wrap_around() {
        assert_eq!(offsets(&[], 10240, 3), [0, 4096, 8192]);
        assert_eq!(
            offsets(&["-o", "9k", "-s", "1k", "-S", "3k"], 10240, 6),
            [9216, 2048, 5120, 8192, 1024, 4096]
        );
        assert_eq!(offsets(&["-S", "20000", "-s", "1k"], 10240, 2), [0, 9760]);
        assert_eq!(
            offsets(&["-S", "10240", "-o", "512", "-s", "1k"], 10240, 3),
            [512; 3]
        );
        assert_eq!(offsets(&["-o", "11k"], 10240, 1), [11264]);
        assert_eq!(offsets(&[], 0, 2), [0, 0]);
    }

    #[test]
    fn random_offsets_are_blocks_of_the_disk() {
        let list = offsets(&["--random"], 40960, 1000);
        assert!(list.iter().all(|o| o % 4096 == 0 && *o < 40960));
        let mut seen = list.clone();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 10);
        assert_eq!(offsets(&["--random"], 40960, 1000), list);
    }

    #[test]
    fn threads_share_all_requests() {
        let plan = plan(&["-c", "10", "-d", "3", "--threads", "4"]).expect("a plan");
        let shares: Vec<_> = (0..4).map(|i| plan.share(i)).collect();
        assert_eq!(shares.iter().map(|s| s.count).sum::<u64>(), 10);
        assert!(shares.iter().all(|s| s.depth == 1));
        assert_eq!(shares[2].offset, 6 * 4096);
    }

    #[test]
    fn numbers_are_checked() {
        for (arguments, text) in [
            (
                ["-c", "0"],
                "Invalid request count specified. Must be between 1 and 2147483647.",
            ),
            (["-c", "4k"], "Invalid request count specified: '4k'."),
            (
                ["-d", "2147483648"],
                "Invalid queue depth specified. Must be between 1 and 2147483647.",
            ),
            (
                ["-s", "4G"],
                "Invalid buffer size specified. Must be between 1 and 2147483647.",
            ),
            (
                ["-S", "4G"],
                "Invalid step size specified. Must be between 0 and 2147483647.",
            ),
            (["-o", "x"], "Invalid offset specified: 'x'."),
            (
                ["-o", "-1"],
                "Invalid offset specified. Must be between 0 and 9223372036854775807.",
            ),
        ] {
            match plan(&arguments) {
                Err(Failure::Message { text: said, .. }) => assert_eq!(said, text),
                other => panic!("{arguments:?}: {other:?}"),
            }
        }
    }
}
