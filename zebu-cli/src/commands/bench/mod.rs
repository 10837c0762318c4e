//! `bench`: the speed of requests, measured as by `qemu-img bench`.
//!
//! Each request in flight is a future with its own buffer, both reused for the next one. Nothing is
//! allocated, locked or printed for a request.

mod flush_schedule;
mod offsets;
mod plan;
mod requests;

use std::ffi::OsString;
use std::sync::Arc;

use clap::{CommandFactory, Parser};
use zebu::block::{NATIVE_NEEDS_DIRECT, OpenOptions};
use zebu::storage::{CacheMode, EngineKind};

use super::command::Command;
use crate::arguments::{objects, untrusted};
use crate::images::open;
use crate::output::Shown;
use crate::program::{Context, Failure, Outcome};
use plan::Plan;
use requests::{measure, measure_threads, queue};

pub const COMMAND: Command = Command {
    name: "bench",
    operands: "<FILENAME>",
    summary: "Run a simple benchmark on an image",
    options: Arguments::command,
    run,
    examples: "
        # Reads of 4 KiB, 32 in flight
        zebu bench -c 10000 -d 32 disk.qcow2
        # The same for writes, which change the image
        zebu bench -w -c 10000 -d 32 disk.qcow2",
    ..Command::PLAIN
};

/// Measures how fast an image is read or written.
#[derive(Debug, Parser)]
#[command(about = "Runs a simple benchmark on an image")]
pub struct Arguments {
    /// Number of requests
    #[arg(short = 'c', long = "count", value_name = "COUNT")]
    count: Option<String>,
    /// Number of requests in flight (queue depth)
    #[arg(short = 'd', long = "depth", value_name = "DEPTH")]
    depth: Option<String>,
    /// Format of the image
    #[arg(short = 'f', long = "format", value_name = "FMT")]
    format: Option<String>,
    /// Linux native AIO, as -i native
    #[arg(short = 'n', long = "native")]
    native: bool,
    /// AIO mode: threads, native or io_uring
    #[arg(short = 'i', long = "aio", value_name = "AIO")]
    aio: Option<String>,
    /// Offset of the first request
    #[arg(short = 'o', long = "offset", value_name = "OFFSET")]
    offset: Option<String>,
    /// Size of a request
    #[arg(short = 's', long = "buffer-size", value_name = "SIZE")]
    buffer_size: Option<String>,
    /// Distance between the offsets of requests; 0: the buffer size
    #[arg(short = 'S', long = "step-size", value_name = "SIZE")]
    step_size: Option<String>,
    /// Cache mode: none, writeback, writethrough, directsync or unsafe
    #[arg(short = 't', long = "cache", value_name = "CACHE")]
    cache: Option<String>,
    /// Accepted, without effect, as in qemu-img
    #[arg(short = 'q', long = "quiet")]
    quiet: bool,
    /// Open the image although another process may write to it
    #[arg(short = 'U', long = "force-share")]
    force_share: bool,
    /// Interpret the name as options (driver=qcow2,file.filename=PATH)
    #[arg(long = "image-opts")]
    image_opts: bool,
    /// TLS credentials of NBD clients and secrets, as for the other commands
    #[arg(long = "object", value_name = "OBJDEF")]
    object: Vec<OsString>,
    /// Write instead of reading, which destroys the content of the image
    #[arg(short = 'w', long = "write")]
    write: bool,
    /// Byte to write (default 0)
    #[arg(long = "pattern", value_name = "BYTE")]
    pattern: Option<String>,
    /// Flush after this number of writes
    #[arg(long = "flush-interval", value_name = "COUNT")]
    flush_interval: Option<String>,
    /// Do not wait for requests in flight before a flush
    #[arg(long = "no-drain")]
    no_drain: bool,
    /// Requests at random multiples of the buffer size, the same in every run (not in qemu-img)
    #[arg(long = "random")]
    random: bool,
    /// Number of threads, each with a queue and a part of the requests and of the depth (not in
    /// qemu-img)
    #[arg(long = "threads", value_name = "N")]
    threads: Option<String>,
    /// The image
    #[arg(value_name = "FILE")]
    files: Vec<OsString>,
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let plan = Plan::new(&arguments)?;
    arguments
        .object
        .iter()
        .try_for_each(|text| objects::add(context, text))?;
    let (engine, how) = opening(context, &arguments)?;
    let [file] = arguments.files.as_slice() else {
        return Err(Failure::new("Expecting one image file name").with_hint());
    };
    plan.check_flushes()?;
    let source = open::named(file, arguments.image_opts, arguments.format.as_deref());
    let can_not = |why: String| Failure::new(format!("Could not open '{}': {why}", file.shown()));
    if how.write && how.force_share {
        let text = "force-share=on can only be used with read-only images";
        return Err(can_not(text.into()));
    }
    if engine == EngineKind::Native && !how.cache.is_direct() {
        return Err(can_not(NATIVE_NEEDS_DIRECT.into()));
    }
    let queue = queue(engine).map_err(|e| can_not(e.to_string()))?;
    let how = how.format(match &arguments.format {
        Some(name) => open::format(name).map_err(|e| can_not(e.to_string()))?,
        None => None,
    });
    let device =
        open::repaired(context, &queue, &source, &how).map_err(|e| can_not(e.to_string()))?;
    let device = Arc::new(device);
    announce(&plan);
    let time = match plan.threads {
        1 => measure(device.clone(), queue.clone(), &plan),
        _ => measure_threads(&device, engine, &plan),
    };
    if let Some(device) = Arc::into_inner(device) {
        let closing = queue.block_on(device.close(&queue));
        closing.map_err(|e| Failure::new(format!("Could not close '{}': {e}", file.shown())))?;
    }
    let time = time?;
    crate::output::say(&format!(
        "Run completed in {:3.3} seconds.\n",
        time.as_secs_f64()
    ));
    Ok(0)
}

fn announce(plan: &Plan) {
    let kind = match plan.pattern {
        Some(_) => "write",
        None => "read",
    };
    let place = match plan.random {
        true => "at random offsets".to_owned(),
        false => format!(
            "starting at offset {}, step size {}",
            plan.offset, plan.step
        ),
    };
    let mut text = format!(
        "Sending {} {kind} requests, {} bytes each, {} in parallel ({place})\n",
        plan.count, plan.size, plan.depth
    );
    if plan.flush_interval > 0 {
        text.push_str(&format!(
            "Sending flush every {} requests\n",
            plan.flush_interval
        ));
    }
    crate::output::say(&text);
}

fn opening(context: &Context, arguments: &Arguments) -> Result<(EngineKind, OpenOptions), Failure> {
    let engine = match &arguments.aio {
        Some(name) => name
            .parse()
            .map_err(|e: zebu::Error| Failure::new(e.to_string()))?,
        None if arguments.native => EngineKind::Native,
        None => EngineKind::best(),
    };
    let cache = match &arguments.cache {
        Some(name) => name
            .parse()
            .map_err(|_| Failure::new("Invalid cache mode"))?,
        None => CacheMode::default(),
    };
    if arguments.image_opts && arguments.format.is_some() {
        let text = "--image-opts and --format are mutually exclusive";
        return Err(Failure::new(text));
    }
    let how = untrusted::defaults(context)
        .cache(cache)
        .write(arguments.write)
        .force_share(arguments.force_share);
    Ok((engine, how))
}
