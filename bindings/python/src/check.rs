//! Check and repair.

use pyo3::prelude::*;
use zebu::internal::check_device;
use zebu::jobs::{CheckReport, RepairMode};
use zebu::{Queue, QueueOptions};

use crate::error::refused;
use crate::open::Opening;
use crate::progress::Reporter;

/// The messages that are kept. A damaged image may have one for every cluster.
const MESSAGES: usize = 1000;

/// What was found: the members of `zebu.CheckResult`.
#[derive(Debug, IntoPyObject)]
pub struct Found {
    corruptions: u64,
    leaks: u64,
    check_errors: u64,
    corruptions_fixed: u64,
    leaks_fixed: u64,
    total_clusters: u64,
    allocated_clusters: u64,
    fragmented_clusters: u64,
    compressed_clusters: u64,
    image_end_offset: u64,
    messages: Vec<String>,
}

impl Found {
    fn new(report: &CheckReport, messages: Vec<String>) -> Found {
        Found {
            corruptions: report.corruptions,
            leaks: report.leaks,
            check_errors: report.check_errors,
            corruptions_fixed: report.corruptions_fixed,
            leaks_fixed: report.leaks_fixed,
            total_clusters: report.total_clusters,
            allocated_clusters: report.allocated_clusters,
            fragmented_clusters: report.fragmented_clusters,
            compressed_clusters: report.compressed_clusters,
            image_end_offset: report.image_end_offset,
            messages,
        }
    }
}

/// Checks an image. `progress` takes the table entries done and their total.
#[pyfunction]
pub fn check(
    py: Python<'_>,
    image: Opening,
    repair: Option<&str>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Found> {
    let mode = match repair {
        None => None,
        Some("leaks") => Some(RepairMode::Leaks),
        Some("all") => Some(RepairMode::All),
        Some(other) => return Err(refused(format!("There is no repair '{other}'")).raise(py)),
    };
    let mut reporter = Reporter::new(progress);
    let result = py.detach(|| {
        let mut messages = Vec::new();
        let mut keep = |message| {
            if messages.len() < MESSAGES {
                messages.push(message);
            }
        };
        let queue = Queue::new(QueueOptions::default())?;
        let options = image.options()?.write(mode.is_some()).check(true);
        let device = image.open(&queue, &options)?;
        let progress = |now| reporter.report(now);
        let check = check_device(&queue, &device, mode, &mut keep, progress);
        let report = queue.block_on(check)?;
        Ok(Found::new(&report, messages))
    });
    reporter.end(py, result)
}
