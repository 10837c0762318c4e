//! One request: checked and executed.

use zebu::block::Zeroing;
use zebu::storage::Queue;

use crate::export::Export;
use crate::request::{MAX_SECTORS, Range, SECTOR, Work};

/// The flag of a write of zeroes that may deallocate.
const UNMAP: u32 = 1;

/// The status byte of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    Ok = 0,
    Error = 1,
    Unsupported = 2,
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("{0}")]
    Invalid(&'static str),
    #[error("{0}")]
    Unsupported(String),
    #[error(transparent)]
    Device(#[from] zebu::Error),
}

/// Executes `work`. With `through`, what was written is durable afterwards.
pub async fn execute(queue: &Queue, export: &Export, work: &Work, through: bool) -> Status {
    match run(queue, export, work, through).await {
        Ok(()) => Status::Ok,
        Err(failed) => {
            tracing::debug!("export {:?}: a request failed: {failed}", export.name());
            match failed {
                Failed::Unsupported(_) => Status::Unsupported,
                _ => Status::Error,
            }
        }
    }
}

async fn run(queue: &Queue, export: &Export, work: &Work, through: bool) -> Result<(), Failed> {
    let device = export.device();
    match work {
        Work::Read { sector, data } => {
            let offset = offset(export, *sector, data.len() as u64)?;
            return Ok(device.read(queue, offset, data).await?);
        }
        Work::Write { sector, data } => {
            check_writable(export)?;
            let offset = offset(export, *sector, data.len() as u64)?;
            device.write(queue, offset, data).await?;
        }
        Work::Flush => return Ok(device.flush(queue).await?),
        Work::Discard(ranges) => {
            for (offset, length) in check(export, ranges, 0)? {
                device.discard(queue, offset, length).await?;
            }
        }
        Work::WriteZeroes(ranges) => {
            let checked = check(export, ranges, UNMAP)?;
            for ((offset, length), range) in checked.into_iter().zip(ranges) {
                let zeroing = match range.flags & UNMAP {
                    0 => Zeroing::Keep,
                    _ => Zeroing::Unmap,
                };
                device.write_zeroes(queue, offset, length, zeroing).await?;
            }
        }
        Work::Id(data) => {
            let id = export.id();
            data.copy_from(&id[..data.len()]);
            return Ok(());
        }
        Work::Unknown(kind) => {
            return Err(Failed::Unsupported(format!(
                "the request {kind}, which does not exist"
            )));
        }
        Work::Invalid(why) => return Err(Failed::Invalid(why)),
    }
    if through {
        device.flush(queue).await?;
    }
    Ok(())
}

fn check_writable(export: &Export) -> Result<(), Failed> {
    match export.is_writable() {
        true => Ok(()),
        false => Err(Failed::Invalid("the export is read-only")),
    }
}

/// The offset of a range in bytes. The range must be within the disk, in whole blocks.
fn offset(export: &Export, sector: u64, length: u64) -> Result<u64, Failed> {
    let offset = sector
        .checked_mul(SECTOR)
        .ok_or(Failed::Invalid("past the end of the disk"))?;
    let block = u64::from(export.block_size());
    if !offset.is_multiple_of(block) || !length.is_multiple_of(block) {
        return Err(Failed::Invalid("not in whole blocks"));
    }
    match offset.checked_add(length) {
        Some(end) if end <= export.sectors() * SECTOR => Ok(offset),
        _ => Err(Failed::Invalid("past the end of the disk")),
    }
}

/// The offsets and lengths of `ranges`, whose flags may be `flags`.
fn check(export: &Export, ranges: &[Range], flags: u32) -> Result<Vec<(u64, u64)>, Failed> {
    check_writable(export)?;
    let one = |range: &Range| {
        if range.flags & !flags != 0 {
            return Err(Failed::Unsupported(format!("flags {:#x}", range.flags)));
        }
        if range.sectors > MAX_SECTORS {
            return Err(Failed::Invalid("a range that is too long"));
        }
        let length = u64::from(range.sectors) * SECTOR;
        Ok((offset(export, range.sector, length)?, length))
    };
    ranges.iter().map(one).collect()
}
