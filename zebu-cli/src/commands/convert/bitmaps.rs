//! `--bitmaps`: the bitmaps of the source, which the target gets.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use zebu::block::{BitmapInfo, Device, DirtyBits};
use zebu::storage::Queue;
use zebu::{Error, ErrorKind};

use super::Arguments;
use crate::output::Shown;
use crate::program::{Context, Failure};

/// The bitmaps of the only source. Those that are inconsistent or damaged are an error, or left out
/// with a warning. They are looked at in QEMU's order, the last one first.
pub fn of_source(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    sources: &[Device],
) -> Result<Vec<(BitmapInfo, DirtyBits)>, Failure> {
    let [source] = sources else {
        let why = "Copying bitmaps only possible with single source";
        return Err(Failure::new(why));
    };
    if !has_bitmaps(source) {
        return Err(Failure::new("Source lacks bitmap support"));
    }
    let failure = |error: Error| Failure::new(format!("Could not read bitmaps: {error}"));
    let list = match queue.block_on(source.bitmaps(queue)) {
        Err(error) if error.kind() == ErrorKind::Corrupt && arguments.skip_broken_bitmaps => {
            context.say(&format!("warning: Skipping all bitmaps: {error}"));
            Vec::new()
        }
        list => list.map_err(failure)?,
    };
    let mut bitmaps = Vec::new();
    for info in list.into_iter().rev() {
        let name = OsStr::from_bytes(&info.name).shown();
        match queue.block_on(source.bitmap(queue, &info.name)) {
            Ok(bits) => bitmaps.push((info, bits)),
            Err(error) if !info.inconsistent && error.kind() != ErrorKind::Corrupt => {
                return Err(failure(error));
            }
            Err(_) if arguments.skip_broken_bitmaps => {
                context.say(&format!("warning: Skipping inconsistent bitmap '{name}'"));
            }
            Err(_) => {
                return Err(Failure::new(format!(
                    "Cannot copy inconsistent bitmap '{name}'\nTry --skip-broken-bitmaps, or use \
                     'qemu-img bitmap --remove' to delete it"
                )));
            }
        }
    }
    bitmaps.reverse();
    Ok(bitmaps)
}

/// Whether an image can have bitmaps.
fn has_bitmaps(device: &Device) -> bool {
    device.top().stores_bitmaps()
}

/// The failure for a target that cannot have bitmaps.
pub fn unsupported(format: &str) -> Failure {
    Failure::new(format!("Format driver '{format}' does not support bitmaps"))
}

/// Refuses an existing target that cannot get the bitmaps.
pub fn check_target(
    queue: &Queue,
    target: &Device,
    bitmaps: &[(BitmapInfo, DirtyBits)],
) -> Result<(), Failure> {
    if !has_bitmaps(target) {
        return Err(unsupported(target.top().format().name()));
    }
    let list = queue.block_on(target.bitmaps(queue));
    let list = list.map_err(|error| Failure::new(error.to_string()))?;
    for (bitmap, bits) in bitmaps.iter().rev() {
        let name = OsStr::from_bytes(&bitmap.name).shown();
        if list.iter().any(|other| other.name == bitmap.name) {
            return Err(Failure::new(format!(
                "Failed to create bitmap {name}: Bitmap already exists: {name}"
            )));
        }
        if bits.size() != target.size() {
            return Err(Failure::new(format!(
                "Failed to populate bitmap {name}: Bitmaps are of different sizes (destination \
                 size is {}, source size is {}) and can't be merged",
                target.size(),
                bits.size()
            )));
        }
    }
    Ok(())
}
