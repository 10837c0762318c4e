//! The state of the page cache and of free memory before a run: the same for every contender.

use crate::error::{Context, Result};
use crate::report::machine;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Hot or cold inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Temperature {
    /// Every input is read once before each run, so it lies in the page cache as far as it fits.
    Hot,
    /// Every input is dropped from the page cache before each run. The cache of a hypervisor or
    /// of the device itself stays as it is.
    Cold,
}

/// Brings the inputs to that temperature.
pub fn prepare(inputs: &[PathBuf], temperature: Temperature) -> Result<()> {
    match temperature {
        Temperature::Hot => inputs.iter().try_for_each(|p| heat(p)),
        Temperature::Cold => drop_cached(inputs),
    }
}

fn heat(path: &Path) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut file = File::open(path).context(|| path.display().to_string())?;
    while file
        .read(&mut buffer)
        .context(|| path.display().to_string())?
        > 0
    {}
    Ok(())
}

/// Drops clean pages: of the whole machine where that is allowed, else of these files.
fn drop_cached(inputs: &[PathBuf]) -> Result<()> {
    if std::fs::write("/proc/sys/vm/drop_caches", "1").is_ok() {
        return Ok(());
    }
    for path in inputs {
        // dd with iflag=nocache and count=0 is posix_fadvise(DONTNEED) over the whole file.
        let mut of = std::ffi::OsString::from("if=");
        of.push(path);
        Command::new("dd")
            .arg(of)
            .args(["iflag=nocache", "count=0", "status=none"])
            .status()
            .context(|| "dd".into())?;
    }
    Ok(())
}

/// Touches `bytes` of memory and gives them up. A guest's kernel may give free pages back to the
/// host after a second or two, and a page that the host must find anew takes longer to fill than
/// all else that a conversion does with it: whoever ran behind one who had freed many was faster.
/// So each has its pages at hand, as on a machine of its own. Of memory that is short half is left.
pub fn pages_at_hand(bytes: u64) {
    let most = machine::available_memory() / 2;
    let touched = vec![1u8; usize::try_from(bytes.min(most)).unwrap_or(0)];
    std::hint::black_box(&touched);
}

/// Writes back what is dirty on the file system of `dir`, so that the writeback of one run does
/// not take the device from the next. Neither qemu-img convert nor zebu waits for its writeback
/// by default, so without this each run would pay for the run before it.
pub fn settle(dir: &Path) -> Result<()> {
    Command::new("sync")
        .arg("-f")
        .arg(dir)
        .status()
        .context(|| "sync".into())?;
    Ok(())
}
