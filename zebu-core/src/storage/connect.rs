//! Opening a storage on another machine without blocking.

use std::io;

use crate::Result;

/// Opens a storage on a thread of its own, which may block. If the future is dropped, the storage is
/// closed again.
///
/// # Errors
/// Those of `open`, and of starting a thread.
pub async fn on_thread<T: Send + 'static>(
    name: &str,
    open: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = futures_channel::oneshot::channel();
    let thread = std::thread::Builder::new().name(name.into());
    // An error: the future was dropped.
    thread.spawn(move || drop(sender.send(open())))?;
    let gone = |_| io::Error::other("the connecting thread has panicked");
    receiver.await.map_err(gone)?
}
