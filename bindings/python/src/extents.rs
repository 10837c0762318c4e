//! What a disk is made of.

use zebu::{Queue, SharedDevice};

use crate::value::Value;

/// Offset and length in bytes, data, zero, compressed, present, depth, offset in the file.
pub type Extent = (u64, u64, bool, bool, bool, bool, usize, Option<u64>);

/// Extents that are looked up at a time.
const PART: usize = 1024;

/// The first extents of the range.
pub async fn extents(
    queue: Queue,
    device: SharedDevice,
    start: u64,
    end: u64,
) -> zebu::Result<Value> {
    let device = device.enter().await?;
    let end = end.min(device.size());
    let mut list = Vec::new();
    let mut extents = device.extents(&queue, start.min(end)..end);
    while list.len() < PART
        && let Some(extent) = extents.next().await
    {
        let (offset, status) = match extent {
            Ok(extent) => extent,
            // What was found is returned first. The next call meets the error again.
            Err(_) if !list.is_empty() => break,
            Err(error) => return Err(error),
        };
        list.push((
            offset,
            status.length,
            status.data,
            status.zero,
            status.compressed,
            status.present,
            status.depth,
            status.host,
        ));
    }
    Ok(Value::Extents(list))
}
