//! `-C`: what is read from behind the image is written into it.

use zebu::block::{Device, Zeroing};
use zebu::storage::{Buffer, Queue};

use super::report::is_filled_with;

/// Bytes copied at once.
const PIECE: u64 = 1 << 20;

/// Copies the parts of a range that the image itself lacks, in whole clusters or subclusters.
///
/// There must be no other write to the device meanwhile.
pub async fn copy_up(device: &Device, queue: &Queue, offset: u64, length: u64) -> zebu::Result<()> {
    let Some(image) = device.top().as_qcow2() else {
        return Ok(());
    };
    let unit = image.geometry().subcluster_size();
    let end = (offset + length).next_multiple_of(unit).min(device.size());
    let mut at = offset - offset % unit;
    let mut buffer = Buffer::new(PIECE.min(end.saturating_sub(at)) as usize);
    while at < end {
        let status = device.status(queue, at, (end - at).min(PIECE)).await?;
        if status.depth > 0 || !status.present {
            buffer = copy(device, queue, at, status.length, buffer).await?;
        }
        at += status.length;
    }
    Ok(())
}

async fn copy(
    device: &Device,
    queue: &Queue,
    offset: u64,
    length: u64,
    buffer: Buffer,
) -> zebu::Result<Buffer> {
    let count = length as usize;
    let (buffer, result) = device.read_buffer(queue, offset, buffer, count).await;
    result?;
    if is_filled_with(&buffer[..count], 0) {
        let keep = Zeroing::Keep;
        device.write_zeroes(queue, offset, length, keep).await?;
        return Ok(buffer);
    }
    let (buffer, result) = device.write_buffer(queue, offset, buffer, count).await;
    result.map(|()| buffer)
}
