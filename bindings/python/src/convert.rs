//! Conversion.

use pyo3::prelude::*;
use zebu::jobs::{self, CompressOptions, ConvertError, ConvertEvent, ConvertOptions};
use zebu::{Queue, QueueOptions};

use crate::create::{NewFile, Planned};
use crate::error::{Failure, Result, refused};
use crate::open::Opening;
use crate::progress::Reporter;

/// Bytes of L2 tables that are kept of an image that is read once.
const ONCE_THROUGH: u64 = 1 << 20;

/// How the content is written: the arguments of `zebu.convert`.
#[derive(Clone, Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub struct How {
    compress: bool,
    level: Option<i32>,
    /// Bytes a second at most.
    rate: Option<u64>,
    workers: Option<usize>,
}

fn failure(error: ConvertError) -> Failure {
    match error {
        ConvertError::Engine(error) => error.into(),
        ConvertError::Read { offset, source } => {
            Failure::from(source).during(&format!("Error while reading at byte {offset}"))
        }
        ConvertError::Write { offset, source } => {
            Failure::from(source).during(&format!("Error while writing at byte {offset}"))
        }
        other => refused(other.to_string()),
    }
}

/// Converts the image. A target that is not finished is marked as incomplete.
fn run(source: &Opening, target: &NewFile, how: &How, reporter: &mut Reporter) -> Result<()> {
    let planned = Planned::new(target)?;
    planned.check_target(how.compress)?;
    let options = source
        .options()?
        .exclude_writers(true)
        .l2_cache_size(Some(ONCE_THROUGH));
    let queue = Queue::new(QueueOptions::default())?;
    let source = source.open(&queue, &options)?;
    let is_direct = !how.compress && source.size().is_multiple_of(4096);
    let begun = planned.begin(&queue, source.size(), is_direct)?;
    let compress = CompressOptions::default().level(how.level);
    let options = ConvertOptions::default()
        .compress(how.compress.then_some(compress))
        .rate(how.rate)
        .workers(how.workers)
        .zero_from(begun.is_zero.then_some(0));
    // It stays open, and locked, when the device is closed.
    let file = begun.target.qcow2_file();
    let progress = |event| match event {
        ConvertEvent::Progress(now) => reporter.report(now),
        // Only with `salvage`, which is not set.
        ConvertEvent::Unreadable { .. } => std::ops::ControlFlow::Continue(()),
    };
    jobs::convert(vec![source], begun.target, &options, progress).map_err(|error| {
        if let Some(file) = file {
            // The job has failed already.
            let _ = jobs::mark_incomplete(&queue, &*file);
        }
        failure(error)
    })
}

/// Writes the content of an image to a new one. `progress` takes the bytes done and their total.
#[pyfunction]
pub fn convert(
    py: Python<'_>,
    source: Opening,
    target: NewFile,
    how: How,
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    let mut reporter = Reporter::new(progress);
    let result = py.detach(|| run(&source, &target, &how, &mut reporter));
    reporter.end(py, result)
}
