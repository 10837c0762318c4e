//! `--selinux-label`: the label of new sockets.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;

use crate::output::Shown;
use crate::program::Failure;

/// The file in which the kernel keeps the label of the thread's new sockets: empty for that of the process.
const FILE: &str = "/proc/thread-self/attr/sockcreate";

/// While it exists, sockets that this thread makes have a label of their own.
pub struct SocketLabel(bool);

impl SocketLabel {
    /// Sets the label, if one is wanted.
    pub fn set(label: Option<&OsStr>) -> Result<Self, Failure> {
        let Some(label) = label else {
            return Ok(SocketLabel(false));
        };
        // The kernel wants the zero byte of C.
        let bytes = [label.as_bytes(), b"\0"].concat();
        fs::write(FILE, bytes).map_err(|e| {
            Failure::new(format!(
                "Cannot set SELinux socket create context to {}: {}",
                label.shown(),
                zebu::strerror(&e)
            ))
        })?;
        Ok(SocketLabel(true))
    }
}

impl Drop for SocketLabel {
    fn drop(&mut self) {
        if self.0 {
            // Later sockets would have the label, too; there are none that matter.
            let _ = fs::write(FILE, b"");
        }
    }
}
