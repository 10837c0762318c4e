//! New image files.

use std::ffi::OsString;

use pyo3::prelude::*;
use zebu::internal::new_image::Creation;
use zebu::{Queue, QueueOptions};

use crate::error::Result;

/// A file that is to become an image: the dictionary that `zebu._names.new_image` makes.
#[derive(Clone, Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub struct NewFile {
    name: OsString,
    format: String,
    /// `key=value` each, with commas doubled.
    options: Vec<OsString>,
}

impl NewFile {
    /// The image that this means.
    pub fn creation(&self) -> Result<Creation> {
        Ok(Creation::new(&self.name, &self.format, &self.options)?)
    }
}

/// Makes a new image of `size` bytes.
#[pyfunction]
pub fn create(py: Python<'_>, new: NewFile, size: Option<u64>) -> PyResult<()> {
    let created = py.detach(|| -> Result<()> {
        let queue = Queue::new(QueueOptions::default())?;
        Ok(new.creation()?.create(&queue, size)?)
    });
    created.map_err(|failure| failure.raise(py))
}
