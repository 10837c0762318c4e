//! The state of the page cache and of free memory before a run: the same for every program.

use crate::error::{Context, Result};
use crate::report::machine;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Command;

/// Reads a file once, so that it lies in the page cache as far as it fits.
pub fn read_in(path: &Path) -> Result<()> {
    let name = || path.display().to_string();
    let mut buffer = vec![0; 1 << 20];
    let mut file = File::open(path).context(name)?;
    while file.read(&mut buffer).context(name)? > 0 {}
    Ok(())
}

/// Touches `bytes` of memory and gives them up. A guest's kernel may give free pages back to the
/// host after a second or two, and a page that the host must find anew takes longer to fill than
/// all else that a conversion does with it. So every run finds its pages ready, as on a machine
/// without a hypervisor. Half of the free memory at most.
pub fn touch_pages(bytes: u64) {
    let most = machine::available_memory() / 2;
    let touched = vec![1u8; usize::try_from(bytes.min(most)).unwrap_or(0)];
    std::hint::black_box(&touched);
}

/// Writes back what is dirty on the file system of `dir`, so that the write-back of one run does
/// not take the device from the next.
pub fn write_back(dir: &Path) -> Result<()> {
    Command::new("sync")
        .arg("-f")
        .arg(dir)
        .status()
        .context(|| "sync".into())?;
    Ok(())
}
