//! Conversion.

use pyo3::prelude::*;
use zebu::jobs::{CompressOptions, ConvertOptions};
use zebu::{Queue, QueueOptions};

use crate::create::NewFile;
use crate::error::Result;
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

/// Converts the image.
fn run(source: &Opening, target: &NewFile, how: &How, reporter: &mut Reporter) -> Result<()> {
    let target = target.creation()?;
    target.check_target(how.compress)?;
    let options = source
        .options()?
        .exclude_writers(true)
        .l2_cache_size(Some(ONCE_THROUGH));
    let queue = Queue::new(QueueOptions::default())?;
    let source = source.open(&queue, &options)?;
    let compress = CompressOptions::default().level(how.level);
    let begun = target.begin(&queue, &source, how.compress.then_some(compress))?;
    let options = ConvertOptions::default()
        .rate(how.rate)
        .workers(how.workers);
    Ok(begun.fill(source, options, |now| reporter.report(now))?)
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
