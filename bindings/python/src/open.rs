//! Opening images.

use std::ffi::OsString;
use std::str::FromStr;

use pyo3::prelude::*;
use zebu::qcow2::SnapshotName;
use zebu::{
    CacheMode, Limits, OpenOptions, Policy, Queue, QueueOptions, Remote, SharedDevice,
    Source, jobs,
};

use crate::device::Device;
use crate::error::{Result, refused};

/// What is opened, and how: the dictionary that `zebu._names.opening` makes.
#[derive(Clone, Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub struct Opening {
    name: OsString,
    write: bool,
    format: Option<String>,
    cache: String,
    /// The limits of an untrusted image that differ from the default; None: a trusted one.
    limits: Option<Vec<(String, u64)>>,
    snapshot: Option<String>,
    backing: bool,
    force_share: bool,
    discard: bool,
}

impl Opening {
    /// The options that this means.
    pub fn options(&self) -> Result<OpenOptions> {
        let cache = CacheMode::from_str(&self.cache)?;
        let policy = match &self.limits {
            None => Policy::Follow,
            Some(changed) => Policy::Untrusted(limits(changed)?),
        };
        let snapshot = self.snapshot.as_deref();
        Ok(OpenOptions::default()
            .write(self.write)
            .cache(cache)
            .policy(policy)
            .no_backing(!self.backing)
            .force_share(self.force_share)
            .discard(self.discard.then_some(true))
            .snapshot(snapshot.map(|name| SnapshotName::from(name.as_bytes()))))
    }

    /// Opens the image with these options.
    pub fn open(&self, queue: &Queue, options: &OpenOptions) -> Result<zebu::Device> {
        let source = Source::with_driver(self.name.clone(), self.format.as_deref())?;
        // What a repair says has no place to go.
        jobs::open(queue, &source, options, &mut |_| {}).map_err(|error| {
            let context = format!("Could not open '{}'", self.name.display());
            crate::error::Failure::from(error).during(&context)
        })
    }
}

fn limits(changed: &[(String, u64)]) -> Result<Limits> {
    let mut limits = Limits::default();
    for (name, value) in changed {
        *limits
            .by_name(name)
            .ok_or_else(|| refused(format!("There is no limit '{name}'")))? = *value;
    }
    Ok(limits)
}

/// Opens an image, whose requests `threads` threads execute.
#[pyfunction]
pub fn open(py: Python<'_>, opening: Opening, threads: usize) -> PyResult<Device> {
    let opened = py.detach(|| {
        let queue = Queue::new(QueueOptions::default())?;
        let device = SharedDevice::new(opening.open(&queue, &opening.options()?)?);
        Ok(Remote::new(device, threads, &QueueOptions::default())?)
    });
    let remote = opened.map_err(|failure: crate::error::Failure| failure.raise(py))?;
    Ok(Device::new(remote))
}
