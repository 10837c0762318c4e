//! A device, for any number of threads and event loops.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use zebu::qcow2::SnapshotName;
use zebu::{Preallocation, Queue, Remote, SharedDevice, Zeroing};

use crate::completions::Completions;
use crate::error::{Failure, Result, refused};
use crate::extents;
use crate::info::Info;
use crate::value::{Snapshot, Value};
use crate::wait::{wait, wait_through};

/// Where the result of an asynchronous request goes, and its number there. None: the call waits.
type To<'py> = Option<(Bound<'py, Completions>, u64)>;

/// An open image. Every request returns its result, or ends in the `Completions` given by `to`.
#[pyclass(frozen, module = "zebu._zebu")]
pub struct Device {
    /// None: it is closed.
    remote: Mutex<Option<Arc<Remote>>>,
    /// The process that has opened it. Its children have neither the threads nor the queues.
    process: u32,
}

impl Device {
    /// Of these threads.
    pub fn new(remote: Remote) -> Device {
        Device {
            remote: Mutex::new(Some(Arc::new(remote))),
            process: std::process::id(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Remote>>> {
        self.remote.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    fn remote(&self) -> PyResult<Arc<Remote>> {
        if self.is_forked() {
            let why = "The image was opened before a fork: open it again in this process";
            return Err(PyRuntimeError::new_err(why));
        }
        let remote = self.lock().clone();
        remote.ok_or_else(|| PyValueError::new_err("I/O operation on closed file."))
    }

    /// Executes a request.
    fn execute<F>(
        &self,
        py: Python<'_>,
        to: To<'_>,
        request: impl FnOnce(Queue, SharedDevice) -> F + Send + 'static,
    ) -> PyResult<Py<PyAny>>
    where
        F: Future<Output = zebu::Result<Value>> + 'static,
    {
        let remote = self.remote()?;
        let Some((completions, number)) = to else {
            return wait(py, remote.run(request))?.into_object(py);
        };
        let place = completions.get().place(number);
        drop(remote.run(|queue, device| async move {
            let result = request(queue, device).await;
            place.end(result.map_err(Failure::from));
            Ok(())
        }));
        Ok(py.None())
    }

    /// [`Device::execute`] of a change that has no result.
    fn change<F>(
        &self,
        py: Python<'_>,
        to: To<'_>,
        change: impl FnOnce(Queue, SharedDevice) -> F + Send + 'static,
    ) -> PyResult<Py<PyAny>>
    where
        F: Future<Output = zebu::Result<()>> + 'static,
    {
        self.execute(py, to, |queue, device| async move {
            change(queue, device).await.map(|()| Value::None)
        })
    }
}

/// Ends the threads without the interpreter's lock, for which others may wait.
impl Drop for Device {
    fn drop(&mut self) {
        let remote = self.remote.get_mut();
        let remote = remote.unwrap_or_else(|e| e.into_inner()).take();
        match self.is_forked() {
            // The threads are not there to be waited for.
            true => std::mem::forget(remote),
            false => Python::attach(|py| py.detach(|| drop(remote))),
        }
    }
}

#[pymethods]
impl Device {
    fn size(&self, py: Python<'_>) -> PyResult<u64> {
        let remote = self.remote()?;
        wait(py, async { Ok(remote.device().enter().await?.size()) })
    }

    #[pyo3(signature = (offset, length, to=None))]
    fn pread(&self, py: Python<'_>, offset: u64, length: usize, to: To<'_>) -> PyResult<Py<PyAny>> {
        self.execute(py, to, move |queue, device| async move {
            let device = device.enter().await?;
            // What lies behind the end is not read.
            let left = device.size().saturating_sub(offset);
            let length = length.min(usize::try_from(left).unwrap_or(usize::MAX));
            let buffer = zebu::Buffer::try_new(length)?;
            if length == 0 {
                return Ok(Value::Bytes(buffer));
            }
            let (buffer, result) = device.read_buffer(&queue, offset, buffer, length).await;
            result.map(|()| Value::Bytes(buffer))
        })
    }

    #[pyo3(signature = (offset, data, to=None))]
    fn pwrite(
        &self,
        py: Python<'_>,
        offset: u64,
        data: PyBackedBytes,
        to: To<'_>,
    ) -> PyResult<Py<PyAny>> {
        let remote = self.remote()?;
        let Some((completions, number)) = to else {
            wait(py, remote.write(offset, data))?;
            return Ok(py.None());
        };
        let place = completions.get().place(number);
        let write = remote.write(offset, data);
        // A future on any of the threads may wait for that of another.
        drop(remote.run(|_, _| async move {
            place.end(write.await.map(|_| Value::None).map_err(Failure::from));
            Ok(())
        }));
        Ok(py.None())
    }

    #[pyo3(signature = (offset, length, unmap, to=None))]
    fn write_zeroes(
        &self,
        py: Python<'_>,
        offset: u64,
        length: u64,
        unmap: bool,
        to: To<'_>,
    ) -> PyResult<Py<PyAny>> {
        let zeroing = if unmap { Zeroing::Unmap } else { Zeroing::Keep };
        self.change(py, to, move |queue, device| async move {
            let device = device.enter().await?;
            device.write_zeroes(&queue, offset, length, zeroing).await
        })
    }

    #[pyo3(signature = (offset, length, to=None))]
    fn discard(&self, py: Python<'_>, offset: u64, length: u64, to: To<'_>) -> PyResult<Py<PyAny>> {
        self.change(py, to, move |queue, device| async move {
            device.enter().await?.discard(&queue, offset, length).await
        })
    }

    #[pyo3(signature = (to=None))]
    fn flush(&self, py: Python<'_>, to: To<'_>) -> PyResult<Py<PyAny>> {
        self.change(py, to, |queue, device| async move {
            device.enter().await?.flush(&queue).await
        })
    }

    #[pyo3(signature = (size, preallocation, to=None))]
    fn resize(
        &self,
        py: Python<'_>,
        size: u64,
        preallocation: &str,
        to: To<'_>,
    ) -> PyResult<Py<PyAny>> {
        let unknown = || refused(format!("There is no preallocation '{preallocation}'")).raise(py);
        let preallocation = Preallocation::from_name(preallocation).ok_or_else(unknown)?;
        self.change(py, to, move |queue, device| async move {
            device.resize(&queue, size, preallocation).await
        })
    }

    #[pyo3(signature = (start, end, to=None))]
    fn extents(&self, py: Python<'_>, start: u64, end: u64, to: To<'_>) -> PyResult<Py<PyAny>> {
        self.execute(py, to, move |queue, device| {
            extents::extents(queue, device, start, end)
        })
    }

    #[pyo3(signature = (to=None))]
    fn info(&self, py: Python<'_>, to: To<'_>) -> PyResult<Py<PyAny>> {
        self.execute(py, to, |_, device| async move {
            let device = device.enter().await?;
            Ok(Value::Info(Box::new(Info::of(&device))))
        })
    }

    #[pyo3(signature = (to=None))]
    fn snapshots(&self, py: Python<'_>, to: To<'_>) -> PyResult<Py<PyAny>> {
        self.execute(py, to, |_, device| async move {
            let device = device.enter().await?;
            let snapshots = device.top().snapshots().unwrap_or_default();
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let described = snapshots.iter().map(|snapshot| -> Snapshot {
                (
                    text(snapshot.id_text()),
                    text(snapshot.name_text()),
                    snapshot.disk_size(),
                    snapshot.vm_state_size(),
                    f64::from(snapshot.date_sec) + f64::from(snapshot.date_nsec) / 1e9,
                    snapshot.vm_clock_nsec,
                )
            });
            Ok(Value::Snapshots(described.collect()))
        })
    }

    #[pyo3(signature = (name, to=None))]
    fn snapshot_create(&self, py: Python<'_>, name: String, to: To<'_>) -> PyResult<Py<PyAny>> {
        self.change(py, to, |queue, device| async move {
            device.snapshot_create(&queue, name).await
        })
    }

    #[pyo3(signature = (name, to=None))]
    fn snapshot_apply(&self, py: Python<'_>, name: String, to: To<'_>) -> PyResult<Py<PyAny>> {
        let name = SnapshotName::from(name.as_bytes());
        self.change(py, to, |queue, device| async move {
            device.snapshot_apply(&queue, &name).await
        })
    }

    #[pyo3(signature = (name, to=None))]
    fn snapshot_delete(&self, py: Python<'_>, name: String, to: To<'_>) -> PyResult<Py<PyAny>> {
        let name = SnapshotName::from(name.as_bytes());
        self.change(py, to, |queue, device| async move {
            device.snapshot_delete(&queue, &name).await
        })
    }

    /// Waits for the requests in flight, makes everything durable and gives up the image's locks.
    /// Nothing is done in a process that was forked.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_forked() {
            return Ok(());
        }
        let Some(remote) = self.lock().take() else {
            return Ok(());
        };
        let closed = py.detach(|| {
            let close = |queue, device: SharedDevice| -> Pin<Box<dyn Future<Output = _>>> {
                Box::pin(async move { device.close(&queue).await })
            };
            let closed: Result<()> = wait_through(remote.run(close)).map_err(Failure::from);
            drop(remote);
            closed
        });
        closed.map_err(|failure| failure.raise(py))
    }
}
