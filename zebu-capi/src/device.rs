//! The device of the caller.

use std::ffi::c_int;

use zebu::{EngineKind, Preallocation, Queue, SharedDevice};

use crate::blocking;
use crate::error::{Failure, Out, Result, call, call_code};
use crate::fork::Process;
use crate::text::{Text, check_flags};

/// `zebu_device`.
#[derive(Debug)]
pub struct Handle {
    pub device: SharedDevice,
    pub process: Process,
    /// Of blocking calls.
    pub engine: EngineKind,
}

impl Handle {
    /// Executes the future of a request on this thread, and waits for it.
    pub fn wait<T, F>(&self, request: impl FnOnce(Queue, SharedDevice) -> F) -> Result<T>
    where
        T: 'static,
        F: Future<Output = zebu::Result<T>> + 'static,
    {
        let device = self.device.clone();
        blocking::wait(self.engine, |queue| request(queue, device))
    }
}

/// A device that must be given, of this process.
pub fn given(device: Option<&Handle>) -> Result<&Handle> {
    let device = device.ok_or_else(|| Failure::null("device"))?;
    device.process.check()?;
    Ok(device)
}

#[unsafe(no_mangle)]
extern "C" fn zebu_size(device: Option<&Handle>, error: Out<'_>) -> i64 {
    let size = call(error, || {
        given(device)?.wait(|_, device| async move { Ok(device.enter().await?.size()) })
    });
    match size {
        Ok(size) => size as i64,
        Err(failure) => failure.code().into(),
    }
}

const SHRINK: u32 = 1 << 0;

#[unsafe(no_mangle)]
extern "C" fn zebu_resize(
    device: Option<&Handle>,
    size: u64,
    preallocation: Text,
    flags: u32,
    error: Out<'_>,
) -> c_int {
    call_code(error, || {
        check_flags(flags, SHRINK)?;
        let preallocation = match preallocation.word("preallocation")? {
            None => Preallocation::Off,
            Some(name) => Preallocation::from_name(name)
                .ok_or_else(|| Failure::misuse(&format!("There is no preallocation '{name}'")))?,
        };
        given(device)?.wait(|queue, device| async move {
            match flags & SHRINK {
                0 => device.grow(&queue, size, preallocation).await,
                _ => device.resize(&queue, size, preallocation).await,
            }
        })
    })
}
