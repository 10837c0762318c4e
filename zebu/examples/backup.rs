//! Copies the data of an untrusted image into a sparse raw file. It shows its progress, and Ctrl-C
//! cancels it.
//!
//! [`Policy::Untrusted`]: the image opens no other file, and its limits bound the memory and work
//! of reading it. The extents of the disk show which parts have data.

use std::collections::VecDeque;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use zebu::{
    Device, Error, ErrorKind, Format, Handle, Limits, OpenOptions, Policy, Queue, QueueOptions,
    Result, Source,
};

/// Bytes that are copied at a time.
const PART: u64 = 1 << 20;
/// Parts that are copied at once.
const DEPTH: usize = 8;

/// Copies one part. Returns the number of bytes of data.
async fn copy_part(
    queue: Queue,
    source: Rc<Device>,
    target: Rc<Device>,
    at: u64,
    length: u64,
) -> Result<u64> {
    let buffer = queue.buffer(length as usize);
    let (buffer, read) = source
        .read_buffer(&queue, at, buffer, length as usize)
        .await;
    read?;
    let (_, written) = target
        .write_buffer(&queue, at, buffer, length as usize)
        .await;
    written.map(|()| length)
}

/// Copies all data. Returns the number of bytes, or None if `cancelled` was set.
async fn copy(
    queue: &Queue,
    source: &Rc<Device>,
    target: &Rc<Device>,
    cancelled: &AtomicBool,
) -> Result<Option<u64>> {
    let mut copied = 0;
    let mut in_flight: VecDeque<Handle<Result<u64>>> = VecDeque::new();
    let mut extents = source.extents(queue, 0..source.size());
    while let Some(extent) = extents.next().await {
        let (offset, status) = extent?;
        let end = offset + status.length;
        let mut at = if status.zero { end } else { offset };
        while at < end {
            if cancelled.load(Ordering::Relaxed) {
                // An aborted part waits for its operations in the kernel, and starts no more.
                in_flight.into_iter().for_each(Handle::abort);
                return Ok(None);
            }
            let length = PART.min(end - at);
            in_flight.push_back(queue.spawn(copy_part(
                queue.clone(),
                source.clone(),
                target.clone(),
                at,
                length,
            )));
            at += length;
            if in_flight.len() == DEPTH
                && let Some(part) = in_flight.pop_front()
            {
                copied += part.await?;
            }
        }
        eprint!("\r{:3} %", end * 100 / source.size());
    }
    for part in in_flight {
        copied += part.await?;
    }
    eprintln!();
    Ok(Some(copied))
}

/// Makes the copy. Returns None if it was cancelled: the target is not complete then.
fn backup(source: &str, target: &Path, cancelled: &AtomicBool) -> Result<Option<u64>> {
    let queue = Queue::new(QueueOptions::default())?;
    let untrusted = OpenOptions::default().policy(Policy::Untrusted(Limits::default()));
    let source = Device::open(&queue, &Source::Name(source.into()), &untrusted)?;
    // A new file of holes, which read as zeroes.
    std::fs::File::create_new(target)?.set_len(source.size())?;
    let writable = OpenOptions::default().format(Some(Format::RAW)).write(true);
    let target = Device::open(&queue, &Source::Name(target.into()), &writable)?;
    let (source, target) = (Rc::new(source), Rc::new(target));
    let copied = queue.block_on(async {
        let copied = copy(&queue, &source, &target, cancelled).await;
        // Also after an error: parts may be in flight.
        queue.drain().await;
        copied
    })?;
    let target = Rc::into_inner(target).expect("no part is in flight");
    queue.block_on(target.close(&queue))?;
    Ok(copied)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let (Some(source), Some(target)) = (args.next(), args.next()) else {
        panic!("usage: backup IMAGE TARGET");
    };
    let cancelled = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGINT, cancelled.clone())
        .expect("the signal can be caught");
    let target = Path::new(&target);
    let advice = |e: &Error| match e.kind() {
        ErrorKind::Locked => " (it is in use)",
        ErrorKind::Limit => " (it asks for more than an untrusted image may)",
        ErrorKind::Corrupt => " (it is damaged)",
        _ => "",
    };
    match backup(&source, target, &cancelled) {
        Ok(Some(copied)) => println!("{copied} bytes of data copied"),
        Ok(None) => {
            let _ = std::fs::remove_file(target);
            eprintln!("\nbackup: cancelled");
            std::process::exit(130);
        }
        Err(e) => {
            eprintln!("backup: {source}: {e}{}", advice(&e));
            std::process::exit(1);
        }
    }
}
