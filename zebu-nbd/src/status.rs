//! Block status: the extents of a range in the terms of metadata contexts.

use zebu::Result;
use zebu::block::Status;
use zebu::internal::nbd::{Extent, Headers, STATE_HOLE, STATE_ZERO};
use zebu::storage::Queue;

use crate::export::{DEPTH, Export};

/// Extents in one reply at most.
const MAX_EXTENTS: usize = 4096;
/// Extents of the device that one request visits at most, which bounds its time for any image.
const MAX_STEPS: usize = 64 << 10;

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
    let mut all = vec![Vec::<Extent>::new(); contexts.len()];
    // With 32-bit lengths an extent is cut at the last page below 4 GiB.
    let longest = match headers {
        Headers::Extended => u64::MAX,
        _ => u64::from(u32::MAX) & !4095,
    };
    let length = length.min(longest);
    let (mut at, mut steps) = (0, 0);
    while at < length && steps < MAX_STEPS {
        let from = export.options().offset + offset + at;
        let status = export.device().status(queue, from, length - at).await?;
        let mut full = false;
        for (extents, context) in all.iter_mut().zip(contexts) {
            let flags = flags(*context, &status);
            // With `one`, an extent that has ended is complete.
            let ended = one && !extents.is_empty() && end(extents) < at;
            match extents.last_mut() {
                _ if ended => {}
                Some(last) if last.flags == flags => last.length += status.length,
                Some(_) if one => {}
                _ => extents.push(Extent {
                    length: status.length,
                    flags,
                }),
            }
            full |= extents.len() == MAX_EXTENTS;
        }
        at += status.length;
        steps += 1;
        let ended = |extents: &Vec<Extent>| end(extents) < at;
        if full || one && all.iter().all(ended) {
            break;
        }
    }
    Ok(all)
}

/// Bytes that the extents cover.
fn end(extents: &[Extent]) -> u64 {
    extents.iter().map(|extent| extent.length).sum()
}
