//! Check and repair.

use pyo3::prelude::*;
use zebu::jobs::{self, CheckMessage, CheckReport, RepairMode};
use zebu::{Device, Queue, QueueOptions};

use crate::error::{Result, refused};
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

/// Checks the image, and repairs it first in the mode given.
fn run(
    queue: &Queue,
    device: &Device,
    mode: Option<RepairMode>,
    reporter: &mut Reporter,
    keep: &mut dyn FnMut(String),
) -> Result<CheckReport> {
    let Some(image) = device.top().as_qcow2() else {
        if mode.is_some() {
            return Err(refused("Only qcow2 images are repaired"));
        }
        let report = queue.block_on(device.top().check(queue, keep))?;
        return report.ok_or_else(|| refused("This image format does not support checks"));
    };
    let emit = &mut |message: CheckMessage| keep(message.to_string());
    let mut fixed = None;
    if let Some(mode) = mode {
        let progress = |now| reporter.report(now);
        let repair = jobs::repair_image(queue, image, mode, emit, progress);
        let repaired = queue.block_on(repair)?;
        if repaired.corruptions_fixed == 0 && repaired.leaks_fixed == 0 {
            return Ok(repaired);
        }
        fixed = Some(repaired);
    }
    let progress = |now| reporter.report(now);
    let mut report = queue.block_on(jobs::check(queue, image, emit, progress))?;
    if let Some(fixed) = fixed {
        report.corruptions_fixed = fixed.corruptions_fixed;
        report.leaks_fixed = fixed.leaks_fixed;
    }
    Ok(report)
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
        let report = run(&queue, &device, mode, &mut reporter, &mut keep)?;
        Ok(Found::new(&report, messages))
    });
    reporter.end(py, result)
}
