//! The thread of the process that talks to web servers and object stores.

use std::future::pending;
use std::io;
use std::sync::OnceLock;

use tokio::runtime::{Builder, Handle};

/// The runtime of that thread, which is started by the first call and runs until the process ends.
///
/// # Errors
/// If the thread could not be started.
pub(super) fn handle() -> io::Result<Handle> {
    static RUNTIME: OnceLock<Result<Handle, i32>> = OnceLock::new();
    let started =
        RUNTIME.get_or_init(|| start().map_err(|e| e.raw_os_error().unwrap_or(libc::EIO)));
    match started {
        Ok(handle) => Ok(handle.clone()),
        Err(errno) => Err(io::Error::from_raw_os_error(*errno)),
    }
}

fn start() -> io::Result<Handle> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("zebu-object".into())
        .spawn(move || runtime.block_on(pending::<()>()))?;
    Ok(handle)
}
