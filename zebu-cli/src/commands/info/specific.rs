//! What `info` says of images of one format only: "Format specific information".

use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use zebu::block::{BitmapInfo, Device, Layer, Luks, StorageId, Vmdk, VmdkExtent};
use zebu::internal::structures::{LuksHeader, LuksSlot};
use zebu::qcow2::Image;
use zebu::storage::Queue;

use crate::output::json::{Map, Value};
use crate::output::printable;

/// That of a device's top image, in qemu-img's order; None: there is none.
pub fn of(queue: &Queue, device: &Device) -> zebu::Result<Option<Value>> {
    let layer = device.top();
    if let Some(image) = layer.as_qcow2() {
        return qcow2(queue, device, image).map(Some);
    }
    if let Some(image) = layer.get::<Luks>() {
        return Ok(Some(luks(image.header(), false).into()));
    }
    Ok(layer.get::<Vmdk>().map(|image| vmdk(layer, image)))
}

fn vmdk(layer: &Layer, image: &Vmdk) -> Value {
    let extents: Vec<Value> = image.extents().map(|e| extent(layer, &e)).collect();
    Map::new()
        .with("cid", image.cid())
        .with("parent-cid", image.parent_cid())
        .with("create-type", image.create_type())
        .with("extents", extents)
        .into()
}

fn extent(layer: &Layer, extent: &VmdkExtent) -> Value {
    let mut map = Map::new();
    if extent.is_compressed {
        map.add("compressed", true);
    }
    map.add("virtual-size", extent.size);
    let file = match extent.storage {
        StorageId::FILE => Some(&layer.spec.file),
        StorageId(nth) => layer.spec.extents.get(nth as usize - 1),
    };
    map.add("filename", &file.unwrap_or(&layer.spec.file).display_name());
    if let Some(cluster_size) = extent.cluster_size {
        map.add("cluster-size", cluster_size);
    }
    map.add("format", extent.kind.unwrap_or_default());
    map.into()
}

fn qcow2(queue: &Queue, device: &Device, image: &Image) -> zebu::Result<Value> {
    let bitmaps = queue
        .block_on(device.bitmaps(queue))
        .unwrap_or_else(|error| {
            // An error of standard error cannot be reported.
            let _ = writeln!(
                std::io::stderr(),
                "WARNING: The bitmaps of '{}' cannot be listed: {error}",
                printable(device.top().spec.display_name().as_bytes())
            );
            Vec::new()
        });
    let within = queue.block_on(image.luks_header(queue))?;
    let header = image.header();
    let mut map = Map::new();
    let is_v3 = header.version >= 3;
    map.add("compat", if is_v3 { "1.1" } else { "0.10" });
    map.add("compression-type", header.compression.name());
    if is_v3 {
        map.add("lazy-refcounts", header.lazy_refcounts());
        if !bitmaps.is_empty() {
            let list: Vec<Value> = bitmaps.iter().map(bitmap).collect();
            map.add("bitmaps", list);
        }
    }
    map.add("refcount-bits", image.geometry().refcount_bits());
    let data_file = header.extensions.data_file();
    if let Some(name) = data_file.filter(|_| is_v3 && header.has_data_file()) {
        map.add("data-file", name);
    }
    if let Some(within) = within {
        map.add("encrypt", luks(&within, true));
    } else if header.is_encrypted() {
        map.add("encrypt", Map::new().with("format", "aes"));
    }
    if is_v3 {
        if header.has_data_file() {
            map.add("data-file-raw", header.is_data_file_raw());
        }
        map.add("corrupt", header.is_corrupt());
        map.add("extended-l2", header.has_extended_l2());
    }
    Ok(Value::Object(map))
}

/// The header of a LUKS container, which may be within an image.
fn luks(header: &LuksHeader, is_within: bool) -> Map {
    let mut map = Map::new();
    map.add("ivgen-alg", header.iv_generator.name());
    map.add("detached-header", false);
    map.add("hash-alg", header.hash.name());
    map.add("cipher-alg", &*header.cipher.to_string());
    map.add("uuid", &header.uuid[..]);
    if let Some(hash) = header.iv_generator.hash() {
        map.add("ivgen-hash-alg", hash.name());
    }
    if is_within {
        map.add("format", "luks");
    }
    map.add("cipher-mode", header.mode.name());
    let slots: Vec<Value> = header.slots.iter().map(luks_slot).collect();
    map.add("slots", slots);
    map.add("payload-offset", header.payload_offset());
    map.add("master-key-iters", header.digest_iterations);
    map
}

fn luks_slot(slot: &LuksSlot) -> Value {
    if !slot.active {
        return Map::new()
            .with("active", false)
            .with("key-offset", slot.key_offset())
            .into();
    }
    Map::new()
        .with("active", true)
        .with("iters", slot.iterations)
        .with("key-offset", slot.key_offset())
        .with("stripes", slot.stripes)
        .into()
}

fn bitmap(bitmap: &BitmapInfo) -> Value {
    let mut flags = Vec::new();
    if bitmap.inconsistent {
        flags.push("in-use");
    }
    if bitmap.enabled {
        flags.push("auto");
    }
    Map::new()
        .with("flags", flags)
        .with("name", &bitmap.name[..])
        .with("granularity", bitmap.granularity)
        .into()
}
