//! The results of requests, on their way to Python.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use zebu::Buffer;

use crate::extents::Extent;
use crate::info::Info;

/// What a request has found.
pub enum Value {
    None,
    Bytes(Buffer),
    Extents(Vec<Extent>),
    Info(Box<Info>),
    Snapshots(Vec<Snapshot>),
}

/// A snapshot: its ID, its name, sizes of disk and VM state in bytes, when it was taken in seconds
/// since the epoch, how long the guest had run in nanoseconds.
pub type Snapshot = (String, String, Option<u64>, u64, f64, u64);

impl Value {
    /// The object of Python.
    pub fn into_object(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(match self {
            Value::None => py.None(),
            Value::Bytes(bytes) => PyBytes::new(py, &bytes).into_any().unbind(),
            Value::Extents(extents) => extents.into_pyobject(py)?.into_any().unbind(),
            Value::Info(info) => info.into_pyobject(py)?.into_any().unbind(),
            Value::Snapshots(snapshots) => snapshots.into_pyobject(py)?.into_any().unbind(),
        })
    }
}
