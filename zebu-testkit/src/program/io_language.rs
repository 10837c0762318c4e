//! Runs qemu-io commands on an image in memory.

use std::sync::Arc;

use zebu::block::{Device, OpenOptions};
use zebu::jobs::{CreateQcow2, create_qcow2};
use zebu::storage::{Memory, Queue, Storage};

/// Commands with effects outside of the image: files, signals, time.
const OUTSIDE: [&str; 8] = [
    "open",
    "o",
    "reopen",
    "sleep",
    "abort",
    "sigraise",
    "wait_break",
    "break",
];
/// The most lines of a script that are run.
const LINES: usize = 30;

/// Whether a line has effects on the image alone. `-s` reads a file.
fn is_inside(line: &str) -> bool {
    let mut words = line.split(' ').filter(|word| !word.is_empty());
    let command = words.next().unwrap_or_default();
    !OUTSIDE.contains(&command) && !words.any(|w| w.starts_with('-') && w.contains('s'))
}

/// Runs the lines of `text`, by `run`.
pub fn exercise<R>(queue: &Queue, text: &str, run: impl FnOnce(Queue, Device, &str) -> R) {
    let storage: Arc<dyn Storage> = Arc::new(Memory::new(Vec::new()));
    let create = CreateQcow2::default().size(1 << 20).cluster_bits(12);
    queue
        .block_on(create_qcow2(queue, &*storage, None, &create, |_| {}))
        .expect("a new image");
    let options = OpenOptions::default().write(true);
    let device = Device::from_storage(queue, storage, &options).expect("a new image opens");
    let lines: Vec<&str> = text.lines().filter(|l| is_inside(l)).take(LINES).collect();
    run(queue.clone(), device, &lines.join("\n"));
}
