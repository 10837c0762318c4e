//! `write -z -n`: zeroes that are not written as data, or an error.

use std::io;

use zebu::block::{Device, LayerImage, Raw, Zeroing};
use zebu::image::Image;
use zebu::storage::{OpKind, Queue};

/// Makes a range read as zeroes if that needs no data.
pub async fn write(
    device: &Device,
    queue: &Queue,
    offset: u64,
    count: u64,
    zeroing: Zeroing,
) -> zebu::Result<()> {
    match &device.top().image {
        LayerImage::Raw(raw) => zero_file(queue, raw, offset, count).await?,
        LayerImage::Qcow2(image) => check_image(device, queue, image, offset, count).await?,
    }
    device.write_zeroes(queue, offset, count, zeroing).await
}

fn unsupported() -> zebu::Error {
    io::Error::from_raw_os_error(libc::EOPNOTSUPP).into()
}

/// Has the file system do it.
async fn zero_file(queue: &Queue, raw: &Raw, offset: u64, count: u64) -> zebu::Result<()> {
    let storage = raw.storage();
    let (host, unit) = (raw.offset() + offset, storage.alignment().offset as u64);
    if !host.is_multiple_of(unit) || !count.is_multiple_of(unit) {
        return Err(unsupported());
    }
    // SAFETY: `storage` is borrowed until the operation, awaited here, has
    // ended; no memory takes part.
    #[allow(unsafe_code)]
    let started = unsafe { storage.start(queue, OpKind::ZeroRange, host, count, None) };
    started.wait().await.map(drop).map_err(zebu::Error::from)
}

/// Version 2 has no zeroes, and none has them for a part of a cluster (or of
/// a subcluster, where it has these) that is not zero all over already.
async fn check_image(
    device: &Device,
    queue: &Queue,
    image: &Image,
    offset: u64,
    count: u64,
) -> zebu::Result<()> {
    let geometry = image.geometry();
    let (unit, end) = (geometry.subcluster_size(), offset + count);
    if geometry.version() < 3 {
        return Err(unsupported());
    }
    for at in [offset, end] {
        let start = at - at % unit;
        let is_whole = at == start || at == device.size();
        if !is_whole && !reads_as_zero(device, queue, start, start + unit).await? {
            return Err(unsupported());
        }
    }
    Ok(())
}

async fn reads_as_zero(device: &Device, queue: &Queue, start: u64, end: u64) -> zebu::Result<bool> {
    let mut at = start;
    let end = end.min(device.size());
    while at < end {
        let status = device.status(queue, at, end - at).await?;
        if !status.zero {
            return Ok(false);
        }
        at += status.length;
    }
    Ok(true)
}
