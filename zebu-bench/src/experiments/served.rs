//! What the experiments with servers share: what is served, and the rows.

use crate::bench::{Bench, Requests};
use crate::error::Result;
use crate::inputs::filled;
use crate::measure::Program;
use crate::results::{self, Group, Row};
use crate::units::{KIB, MIB};
use std::path::PathBuf;

/// Bytes of a request.
pub const BLOCK: u64 = 4 * KIB;
/// The size of the image that is served from the page cache: it stays there.
const CACHED_SIZE: u64 = 256 * MIB;

/// One row: random requests of 4 KiB to a full qcow2 image.
#[derive(Debug, Clone)]
pub struct Task {
    /// The image.
    pub image: PathBuf,
    /// Bytes of the disk in it.
    pub size: u64,
    /// Whether it is served through the page cache, where it lies when a run begins: then the
    /// server is measured, else the server and the device.
    pub cached: bool,
    /// Writes, or reads.
    pub write: bool,
    /// Requests in flight.
    pub depth: u64,
}

/// All rows.
pub fn tasks(bench: &Bench) -> Result<Vec<Task>> {
    let device = bench.options.size;
    let device = (filled::qcow2_in_one_piece(bench, device)?.0, device);
    let cached = CACHED_SIZE.min(bench.options.size);
    let cached = (filled::qcow2(bench, cached, 64 * KIB)?, cached);
    let mut all = Vec::new();
    for (cached, (image, size)) in [(false, device), (true, cached)] {
        for write in [false, true] {
            all.extend([1, 32].map(|depth| Task {
                image: image.clone(),
                size,
                cached,
                write,
                depth,
            }));
        }
    }
    Ok(all)
}

/// Measures all rows. `floor` is what a row must reach for a number of requests in flight, and
/// `make` makes the programs of a task.
pub fn rows(
    bench: &Bench,
    to: &mut results::Experiment,
    group: &mut Group,
    floor: &dyn Fn(u64) -> Option<f64>,
    make: &dyn Fn(&Task, u64) -> Vec<Program>,
) -> Result<()> {
    for task in tasks(bench)? {
        let label = format!(
            "{}, {}, {} in flight",
            if task.cached { "page cache" } else { "disk" },
            if task.write { "write" } else { "read" },
            task.depth
        );
        let requests = Requests {
            depth: task.depth,
            // The first tenth of a second with one request in flight differs from what follows,
            // by where the scheduler put the processes.
            first: if task.cached && task.depth == 1 {
                10_000
            } else {
                500 * task.depth
            },
            most: u64::MAX / 2,
            make: &|count| make(&task, count),
        };
        let inputs: Vec<PathBuf> = task
            .cached
            .then(|| task.image.clone())
            .into_iter()
            .collect();
        let (count, all) = bench.measure_requests(&requests, &inputs, None);
        let row = Row::new(&label, floor(task.depth), &all, |s| count as f64 / s);
        to.add(group, row, &all);
    }
    Ok(())
}

/// Where servers listen. Paths of sockets are short.
pub fn socket() -> PathBuf {
    std::env::temp_dir().join(format!("zebu-bench-{}.sock", std::process::id()))
}
