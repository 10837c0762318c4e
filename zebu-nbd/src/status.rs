//! Block status: the extents of a range in the terms of metadata contexts.

use std::ops::Range;

use zebu::Result;
use zebu::block::{DirtyBits, Status};
use zebu::internal::nbd::{Extent, Headers, STATE_HOLE, STATE_ZERO};
use zebu::storage::Queue;

use crate::export::{DEPTH, Export};

/// Extents in one reply at most, of all contexts (of which each has one at least).
const MAX_EXTENTS: usize = 16 << 10;
/// Bytes of memory for the extents of a reply, as they are and as they are sent.
pub const MEMORY: usize = 2 * MAX_EXTENTS * size_of::<Extent>();
/// Extents of the device that one request visits at most, which bounds its time for any image.
const MAX_STEPS: usize = 64 << 10;
/// The flag of a dirty extent.
const STATE_DIRTY: u64 = 1;

/// The flags of an extent of the device in `context`.
fn flags(context: u32, status: &Status) -> u64 {
    if context == DEPTH {
        return match status.present {
            true => status.depth as u64 + 1,
            false => 0,
        };
    }
    let hole = if status.data { 0 } else { STATE_HOLE };
    let zero = if status.zero { STATE_ZERO } else { 0 };
    hole | zero
}

/// The extents of a range of at least one byte within the export, for each of `contexts`. They are
/// merged, and may end before the range does. `one`: only the first extent.
pub async fn extents(
    export: &Export,
    queue: &Queue,
    headers: Headers,
    contexts: &[u32],
    (offset, length): (u64, u64),
    one: bool,
) -> Result<Vec<Vec<Extent>>> {
    // With 32-bit lengths an extent is cut at the last page below 4 GiB.
    let longest = match headers {
        Headers::Extended => u64::MAX,
        _ => u64::from(u32::MAX) & !4095,
    };
    let length = length.min(longest);
    let start = export.options().offset + offset;
    let most = match one {
        true => 1,
        false => (MAX_EXTENTS / contexts.len()).max(1),
    };
    let of_device: Vec<u32> = contexts
        .iter()
        .copied()
        .filter(|context| export.bitmap(*context).is_none())
        .collect();
    let found = device_extents(export, queue, &of_device, (start, length), most).await?;
    let mut found = found.into_iter();
    let all = contexts
        .iter()
        .map(|context| match export.bitmap(*context) {
            Some(bits) => dirty_extents(bits, start..start + length, most),
            None => found.next().unwrap_or_default(),
        });
    Ok(all.collect())
}

/// At most `most` extents of a range of the device, for each of `contexts`.
async fn device_extents(
    export: &Export,
    queue: &Queue,
    contexts: &[u32],
    (start, length): (u64, u64),
    most: usize,
) -> Result<Vec<Vec<Extent>>> {
    // Each with the bytes that it covers.
    let mut all = vec![(Vec::<Extent>::new(), 0); contexts.len()];
    let (mut at, mut steps) = (0, 0);
    while !contexts.is_empty() && at < length && steps < MAX_STEPS {
        let left = length - at;
        let status = export.device().status(queue, start + at, left).await?;
        let mut any = false;
        for ((extents, covered), context) in all.iter_mut().zip(contexts) {
            let flags = flags(*context, &status);
            let is_full = extents.len() == most;
            match extents.last_mut() {
                // It ended before.
                _ if *covered < at => continue,
                Some(last) if last.flags == flags => last.length += status.length,
                _ if is_full => continue,
                _ => extents.push(Extent {
                    length: status.length,
                    flags,
                }),
            }
            *covered += status.length;
            any = true;
        }
        if !any {
            break;
        }
        at += status.length;
        steps += 1;
    }
    Ok(all.into_iter().map(|(extents, _)| extents).collect())
}

/// At most `most` extents of a range of the device that is not empty. What a bitmap of a smaller
/// disk does not have is clean.
fn dirty_extents(bits: &DirtyBits, range: Range<u64>, most: usize) -> Vec<Extent> {
    let known = bits.size().min(range.end);
    let mut extents = Vec::new();
    let mut at = range.start;
    while at < range.end && extents.len() < most {
        let (dirty, next) = match at < known {
            true => bits.run(at, known),
            false => (false, known),
        };
        let next = match !dirty && next == known {
            true => range.end,
            false => next,
        };
        extents.push(Extent {
            length: next - at,
            flags: if dirty { STATE_DIRTY } else { 0 },
        });
        at = next;
    }
    extents
}
