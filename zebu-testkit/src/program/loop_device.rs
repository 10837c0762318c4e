//! Block devices that are files.

use std::ops::Range;
use std::path::Path;
use std::process::Command;

/// A loop device on a file, detached when dropped.
pub struct Loop(pub String);

impl Loop {
    /// None if that is not possible here.
    pub fn on(path: &Path) -> Option<Self> {
        Self::over(path, &[])
    }

    /// A device on these bytes of the file. None if that is not possible here.
    pub fn at(path: &Path, bytes: Range<u64>) -> Option<Self> {
        let (offset, size) = (bytes.start.to_string(), bytes.end - bytes.start);
        Self::over(path, &["-o", &offset, "--sizelimit", &size.to_string()])
    }

    fn over(path: &Path, options: &[&str]) -> Option<Self> {
        let answer = Command::new("losetup")
            .args(["--find", "--show"])
            .args(options)
            .arg(path)
            .output()
            .ok()?;
        let name = String::from_utf8(answer.stdout).ok()?.trim().to_string();
        (answer.status.success() && !name.is_empty()).then_some(Self(name))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}
