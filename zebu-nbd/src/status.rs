//! Block status: the extents of a range, as the contexts define them.

use zebu::Result;
use zebu::block::Status;
use zebu::internal::nbd::{Extent, Headers, STATE_HOLE, STATE_ZERO};
use zebu::storage::Queue;

use crate::export::{DEPTH, Export};

/// Extents in one answer at most.
const MAX_EXTENTS: usize = 4096;
/// Pieces of the mapping that one request looks at at most, so that none
/// takes long, whatever the image is like.
const MAX_STEPS: usize = 64 << 10;

/// What `context` says of a piece of the mapping.
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

/// The extents of a range of at least one byte inside the export, for each of
/// `contexts`. They are as many as fit; neighbours differ. `one`: the first
/// extent alone.
pub async fn extents(
    export: &Export,
    queue: &Queue,
    headers: Headers,
    contexts: &[u32],
    (offset, length): (u64, u64),
    one: bool,
) -> Result<Vec<Vec<Extent>>> {
    let mut all = vec![Vec::<Extent>::new(); contexts.len()];
    // In 32 bits an extent ends at a multiple of a page below 4 GiB.
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
            // With one extent the reply is complete.
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

/// Bytes that extents are about.
fn end(extents: &[Extent]) -> u64 {
    extents.iter().map(|extent| extent.length).sum()
}
