//! Hostile images, and all operations that only read an image, for the tests of `hostile` and, by
//! path, for the fuzz targets.
//!
//! [`build`] makes a small image of any geometry. Its tables may share clusters and refer to
//! clusters that do not exist. [`build_sound`] makes an image in which a check finds nothing.
//! [`mutate`] damages header, tables and compressed data. [`exercise`] opens an image, reads
//! everything, and compares the results with each other.

use std::sync::Arc;

use zebu::block::{Device, OpenOptions, Policy};
use zebu::internal::codec::{self, Compressor};
use zebu::internal::structures::{
    BITMAP_TYPE_DIRTY_TRACKING, BitmapsExtension, CryptoExtension, Extension, Geometry, Header,
    HostOffset, INCOMPATIBLE_DATA_FILE, L1Entry, L2Entry, RefcountBlock, RefcountTableEntry,
};
use zebu::internal::{CacheOptions, OpenImage};
use zebu::jobs::{self, CheckReport, MeasureTarget, Qcow2Target};
use zebu::qcow2::{BitmapEntry, Compression, Snapshot, SnapshotName};
use zebu::storage::{Buffer, Memory, Queue, Storage};
use zebu::{Error, Result};

pub use crate::Rng;

/// An image that is built cluster by cluster.
struct Builder {
    header: Header,
    geometry: Geometry,
    bytes: Vec<u8>,
    refcounts: Vec<u64>,
    /// Whether a check must find nothing.
    sound: bool,
    /// References to each cluster of the disk: one, and one for each snapshot.
    shares: u64,
}

impl Builder {
    fn end(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Appends data of the disk in new clusters, which the snapshots share.
    fn put_shared(&mut self, bytes: &[u8]) -> HostOffset {
        let first = self.refcounts.len();
        let at = self.put(bytes);
        self.refcounts[first..].fill(self.shares);
        at
    }

    /// Whether no snapshot shares the clusters of the disk.
    fn copied(&self) -> bool {
        self.shares == 1
    }

    /// Appends bytes in new clusters.
    fn put(&mut self, bytes: &[u8]) -> HostOffset {
        let at = self.end();
        self.bytes.extend_from_slice(bytes);
        let size = self.geometry.cluster_size() as usize;
        self.bytes
            .resize(self.bytes.len().next_multiple_of(size), 0);
        self.refcounts.resize(self.bytes.len() / size, 1);
        HostOffset(at)
    }

    fn write(&mut self, at: HostOffset, bytes: &[u8]) {
        let at = at.0 as usize;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// Bytes of one cluster, which compress well or badly.
fn content(rng: &mut Rng, size: u64) -> Vec<u8> {
    let (seed, step) = (rng.next(), rng.pick(&[1, 7, 64, 4096]));
    (0..size)
        .map(|i| (seed.wrapping_mul(i / step + 1) >> 24) as u8)
        .collect()
}

/// An image of any geometry, of about at most `most` bytes, with all features that an image can
/// have.
pub fn build(rng: &mut Rng, most: usize) -> Vec<u8> {
    match rng.one_in(2) {
        true => build_sound(rng, most),
        false => build_kind(rng, most, false),
    }
}

/// An image in which a check finds nothing and that opens for writing.
pub fn build_sound(rng: &mut Rng, most: usize) -> Vec<u8> {
    build_kind(rng, most, true)
}

fn build_kind(rng: &mut Rng, most: usize, sound: bool) -> Vec<u8> {
    let cluster_bits = match most {
        0..=0x3ffff => rng.pick(&[9, 9, 9, 10, 12, 12, 14]),
        _ => rng.pick(&[9, 9, 10, 12, 12, 14, 14, 16, 21]),
    };
    let cluster_size = 1u64 << cluster_bits;
    let clusters = 1 + rng.below(200);
    let size = clusters * cluster_size - rng.pick(&[0, 0, 512, 511, 1]).min(cluster_size - 1);
    let v2 = rng.one_in(6);
    let mut header = if v2 {
        Header::new_v2(cluster_bits, size)
    } else {
        Header::new(cluster_bits, size)
    };
    if !v2 {
        header.refcount_order = rng.pick(&[0, 1, 2, 3, 4, 4, 4, 5, 6]);
        header.set_extended_l2(cluster_bits >= 14 && rng.one_in(2));
        if rng.one_in(3) {
            header.set_compression(Compression::Zstd);
        }
        if !sound && rng.one_in(8) {
            header.set_incompatible(INCOMPATIBLE_DATA_FILE, true);
            header.set_data_file_name(Some(b"/etc/passwd"));
        }
        if !sound && rng.one_in(16) {
            header.crypt_method = 2;
            let (offset, length) = (rng.below(64) * cluster_size, 592);
            let crypto = CryptoExtension { offset, length };
            header.extensions.set(Extension::Crypto(crypto));
        }
        if rng.one_in(4) {
            header.compatible = rng.below(if sound { 2 } else { 4 });
        }
    }
    if rng.one_in(4) {
        header.set_backing(Some(b"json:{\"file.driver\":\"nbd\"}"), Some(b"raw"));
    }
    let geometry = Geometry::new(&header).expect("a sound geometry");
    let mut image = Builder {
        header,
        geometry,
        bytes: vec![0; cluster_size as usize],
        refcounts: vec![1],
        sound,
        shares: 1,
    };
    let count = if rng.one_in(3) { 1 + rng.below(3) } else { 0 };
    if sound && count < geometry.refcount_max() {
        image.shares += count;
    }
    disk(rng, &mut image, clusters, most);
    if sound {
        own_snapshots(rng, &mut image);
    } else if count > 0 {
        snapshots(rng, &mut image, count);
    }
    if !v2 && rng.one_in(3) {
        bitmaps(rng, &mut image);
    }
    refcounts(&mut image);
    if image.header.fit().is_err() {
        image.header.set_backing(None, None);
        let _ = image.header.fit();
    }
    if let Ok(first) = image.header.encode() {
        image.write(HostOffset(0), &first);
    }
    image.bytes
}

fn disk(rng: &mut Rng, image: &mut Builder, clusters: u64, most: usize) {
    let geometry = image.geometry;
    let entries = geometry.l1_entries_for(clusters << geometry.cluster_bits());
    let mut l1 = vec![0; (entries as usize + rng.below(3) as usize) * 8];
    image.header.l1_size = l1.len() as u32 / 8;
    image.header.l1_offset = image.put(&l1).0;
    for index in 0..entries {
        if rng.one_in(5) {
            continue;
        }
        let mut table = vec![0; geometry.cluster_size() as usize];
        let at = image.put_shared(&table);
        let used = (clusters - index * geometry.l2_entries() as u64)
            .min(geometry.l2_entries() as u64)
            .min(64);
        for entry in 0..used as usize {
            if let Some(entry_value) = cluster(rng, image, most) {
                let _ = entry_value.write(&mut table, entry, &geometry);
            }
        }
        image.write(at, &table);
        let entry = L1Entry::new(at, image.copied(), &geometry).expect("an aligned table");
        l1[index as usize * 8..][..8].copy_from_slice(&entry.to_be_bytes());
    }
    let at = HostOffset(image.header.l1_offset);
    image.write(at, &l1);
}

/// The L2 entry of one cluster of the disk. Appends its data to the file.
fn cluster(rng: &mut Rng, image: &mut Builder, most: usize) -> Option<L2Entry> {
    let geometry = image.geometry;
    let full = image.bytes.len() + 4 * geometry.cluster_size() as usize > most;
    let kind = rng.below(if full { 3 } else { 9 });
    if kind == 0 || (kind == 2 && image.sound) {
        return None;
    }
    if kind == 1 {
        return L2Entry::zero_plain(&geometry).ok();
    }
    if kind == 2 {
        // Behind the end of the file, or shared with another structure.
        let at = rng.below(image.refcounts.len() as u64 + 1) << geometry.cluster_bits();
        return L2Entry::data(HostOffset(at), rng.one_in(2), &geometry).ok();
    }
    let data = content(rng, geometry.cluster_size());
    if kind <= 4 {
        let kind = match image.header.compression {
            Compression::Zlib => codec::Compression::Zlib,
            Compression::Zstd => codec::Compression::Zstd,
        };
        let mut stream = vec![0; data.len()];
        let length = Compressor::new().compress(kind, None, &data, &mut stream);
        let length = length.ok().flatten()?;
        let skip = rng.below(600) as usize % (geometry.cluster_size() as usize / 2);
        let mut padded = vec![0; skip];
        padded.extend_from_slice(&stream[..length]);
        let at = image.put_shared(&padded).0 + skip as u64;
        return L2Entry::compressed(HostOffset(at), length as u64, &geometry).ok();
    }
    let host = image.put_shared(&data);
    let copied = image.copied();
    if kind == 5 {
        return L2Entry::zero_allocated(host, copied, &geometry).ok();
    }
    if geometry.has_extended_l2() && kind <= 7 {
        let (allocated, zero) = (rng.next() as u32, rng.next() as u32);
        return L2Entry::subclusters(Some(host), copied, allocated, zero & !allocated, &geometry)
            .ok();
    }
    L2Entry::data(host, copied, &geometry).ok()
}

/// Valid snapshots of the disk.
fn own_snapshots(rng: &mut Rng, image: &mut Builder) {
    let length = image.header.l1_size as usize * 8;
    let start = image.header.l1_offset as usize;
    let mut l1 = image.bytes[start..start + length].to_vec();
    for entry in l1.chunks_exact_mut(8) {
        // No copied flags.
        entry[0] &= 0x7f;
    }
    let table: Vec<Snapshot> = (1..image.shares)
        .map(|n| {
            let mut snapshot = Snapshot {
                l1_offset: image.put(&l1).0,
                l1_size: image.header.l1_size,
                id: n.to_string().into_bytes(),
                name: vec![b'x'; rng.below(40) as usize],
                ..Snapshot::default()
            };
            snapshot.set_extra(0, image.header.size, None);
            snapshot
        })
        .collect();
    if table.is_empty() {
        return;
    }
    let bytes = Snapshot::encode_table(&table).expect("a sound table");
    image.header.snapshots_offset = image.put(&bytes).0;
    image.header.nb_snapshots = table.len() as u32;
}

fn snapshots(rng: &mut Rng, image: &mut Builder, count: u64) {
    let table: Vec<Snapshot> = (0..count)
        .map(|n| {
            let mut snapshot = Snapshot {
                l1_offset: image.header.l1_offset,
                l1_size: image.header.l1_size,
                id: (n + 1).to_string().into_bytes(),
                name: vec![b'x'; rng.below(40) as usize],
                ..Snapshot::default()
            };
            if rng.one_in(2) {
                snapshot.set_extra(rng.below(9000), image.header.size, None);
            }
            snapshot
        })
        .collect();
    if let Ok(bytes) = Snapshot::encode_table(&table) {
        image.header.snapshots_offset = image.put(&bytes).0;
        image.header.nb_snapshots = count as u32;
    }
}

fn bitmaps(rng: &mut Rng, image: &mut Builder) {
    let data = image.put(&[0x55; 64]).0;
    let table = image.put(&data.to_be_bytes()).0;
    // All bitmaps share a table.
    let count = if image.sound { 1 } else { 1 + rng.below(3) };
    let list: Vec<BitmapEntry> = (0..count)
        .map(|n| BitmapEntry {
            table_offset: table,
            table_size: 1,
            flags: rng.below(4) as u32,
            kind: BITMAP_TYPE_DIRTY_TRACKING,
            granularity_bits: 16,
            extra_data: Vec::new(),
            name: format!("b{n}").into_bytes(),
        })
        .collect();
    if let Ok(bytes) = BitmapEntry::encode_directory(&list) {
        let extension = BitmapsExtension {
            count: list.len() as u32,
            reserved: 0,
            directory_size: bytes.len() as u64,
            directory_offset: image.put(&bytes).0,
        };
        image.header.extensions.set(Extension::Bitmaps(extension));
        image.header.autoclear |= 1;
    }
}

/// A sound table as the argument of [`with_table`].
pub fn table(rng: &mut Rng) -> Vec<u8> {
    let image = &mut Builder {
        sound: true,
        ..plain()
    };
    let is_directory = rng.one_in(2);
    let count = match is_directory {
        true => {
            bitmaps(rng, image);
            1
        }
        false => {
            let count = 1 + rng.below(3);
            snapshots(rng, image, count);
            count
        }
    };
    let at = match image.header.extensions.bitmaps() {
        Ok(Some(bitmaps)) => bitmaps.directory_offset,
        _ => image.header.snapshots_offset,
    };
    let mut data = vec![u8::from(is_directory), count as u8];
    data.extend_from_slice(&image.bytes[at as usize..]);
    data
}

/// A sound image with this snapshot table or, if the first byte is odd, bitmap directory. The second
/// byte is the number of entries in the header, the rest are the bytes of the table.
pub fn with_table(data: &[u8]) -> Vec<u8> {
    let [kind, count, rest @ ..] = data else {
        return Vec::new();
    };
    let mut image = plain();
    let at = image.put(rest).0;
    if kind % 2 == 1 {
        let extension = BitmapsExtension {
            // A header with no bitmaps has no such extension.
            count: u32::from(*count).max(1),
            reserved: 0,
            directory_size: rest.len() as u64,
            directory_offset: at,
        };
        image.header.extensions.set(Extension::Bitmaps(extension));
        image.header.autoclear |= 1;
    } else {
        image.header.snapshots_offset = at;
        image.header.nb_snapshots = u32::from(*count);
    }
    refcounts(&mut image);
    let first = image.header.encode().expect("a sound header");
    image.write(HostOffset(0), &first);
    image.bytes
}

/// An image with an L1 table, an L2 table and a data cluster at fixed offsets.
fn plain() -> Builder {
    let mut header = Header::new(12, 1 << 20);
    let geometry = Geometry::new(&header).expect("a sound header");
    header.l1_size = 1;
    let mut image = Builder {
        header,
        geometry,
        bytes: Vec::new(),
        refcounts: Vec::new(),
        sound: false,
        shares: 1,
    };
    image.put(&[0; 4096]);
    let data = image.put(&[0x5a; 4096]);
    let entry = L2Entry::data(data, true, &geometry).expect("aligned");
    let table = image.put(&entry.desc.to_be_bytes());
    let l1 = L1Entry::new(table, true, &geometry).expect("aligned");
    image.header.l1_offset = image.put(&l1.to_be_bytes()).0;
    image
}

/// Appends refcount table and blocks.
fn refcounts(image: &mut Builder) {
    let geometry = image.geometry;
    let cluster_size = geometry.cluster_size();
    let per_block = geometry.refcount_block_entries() as u64;
    // Blocks and table have refcounts, too.
    let (mut blocks, mut table_clusters) = (0, 0);
    loop {
        let clusters = image.refcounts.len() as u64 + blocks + table_clusters;
        let enough = clusters.div_ceil(per_block);
        if enough == blocks {
            break;
        }
        (blocks, table_clusters) = (enough, (enough * 8).div_ceil(cluster_size));
    }
    let table = image.put(&vec![0; (table_clusters * cluster_size) as usize]);
    image.header.refcount_table_offset = table.0;
    image.header.refcount_table_clusters = table_clusters as u32;
    let places: Vec<_> = (0..blocks)
        .map(|_| image.put(&vec![0; cluster_size as usize]))
        .collect();
    for (index, place) in places.iter().enumerate() {
        let mut bytes = vec![0; cluster_size as usize];
        let mut block = RefcountBlock::new(&mut bytes[..], &geometry);
        let counts = image.refcounts.iter().skip(index * per_block as usize);
        for (entry, count) in counts.take(per_block as usize).enumerate() {
            let _ = block.set(entry, *count);
        }
        image.write(*place, &bytes);
        let entry = RefcountTableEntry::new(*place, &geometry).expect("aligned");
        let at = HostOffset(table.0 + index as u64 * 8);
        image.write(at, &entry.to_be_bytes());
    }
}

/// The fields of a header: offset and length.
const FIELDS: &[(usize, usize)] = &[
    (4, 4),
    (8, 8),
    (16, 4),
    (20, 4),
    (24, 8),
    (32, 4),
    (36, 4),
    (40, 8),
    (48, 8),
    (56, 4),
    (60, 4),
    (64, 8),
    (72, 8),
    (80, 8),
    (88, 8),
    (96, 4),
    (100, 4),
    (104, 1),
];

fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    let field = bytes.get(at..at.saturating_add(length)).unwrap_or(&[]);
    field.iter().fold(0, |n, b| (n << 8) | u64::from(*b))
}

fn set_number(bytes: &mut [u8], at: usize, length: usize, value: u64) {
    if let Some(field) = bytes.get_mut(at..at.saturating_add(length)) {
        field.copy_from_slice(&value.to_be_bytes()[8 - length..]);
    }
}

/// An unusual number for a field that has the value `was`.
fn odd_number(rng: &mut Rng, was: u64, cluster_size: u64, file_len: u64) -> u64 {
    let clusters = file_len / cluster_size + 2;
    match rng.below(14) {
        0 => was.wrapping_add(1),
        1 => was.wrapping_sub(1),
        2 => was ^ (1 << rng.below(64)),
        3 => u64::MAX,
        4 => 0,
        5 => rng.next(),
        6 => 1 << rng.below(64),
        7 => (1u64 << rng.below(64)).wrapping_sub(1),
        8 => file_len.wrapping_add(rng.below(3)).wrapping_sub(1),
        9 => was << rng.below(64) | was,
        10 => was ^ (rng.below(8) << 61),
        // Another cluster of this file: tables overlap.
        _ => (rng.below(clusters) * cluster_size) | (was & 0xe000_0000_0000_0001),
    }
}

/// Damages an image in one to eight places.
pub fn mutate(rng: &mut Rng, bytes: &mut Vec<u8>) {
    for _ in 0..1 + rng.below(8) {
        mutate_once(rng, bytes);
    }
}

/// Damages an image in one place, mostly in metadata.
pub fn mutate_once(rng: &mut Rng, bytes: &mut Vec<u8>) {
    if bytes.is_empty() {
        return;
    }
    let len = bytes.len() as u64;
    let bits = number(bytes, 20, 4).clamp(9, 21);
    let cluster_size = 1u64 << bits;
    let l1 = number(bytes, 40, 8) as usize;
    let l1_entry = l1.saturating_add(8 * rng.below(4) as usize);
    let l2 = (number(bytes, l1_entry, 8) & 0x00ff_ffff_ffff_fe00) as usize;
    let l2_entry = l2.saturating_add(8 * rng.below(64) as usize);
    let table = number(bytes, 48, 8) as usize;
    let (at, length) = match rng.below(16) {
        0..=2 => rng.pick(FIELDS),
        3 | 4 => (l1_entry, 8),
        5..=7 => (l2_entry, 8),
        8 => {
            // Fields of the compressed descriptor: sectors and offset.
            let was = number(bytes, l2_entry, 8);
            let shift = 62 - (bits - 8);
            let sectors = rng.below(1 << (bits - 8));
            let offset = was & ((1 << shift) - 1);
            let offset = rng.pick(&[offset, len - 1, len, 1 << 40, (len - 1) & !511, 1 << 48]);
            let value = 1 << 62 | sectors << shift | (offset & ((1 << shift) - 1));
            return set_number(bytes, l2_entry, 8, value);
        }
        9 => (table.saturating_add(8 * rng.below(4) as usize), 8),
        10 => {
            let snapshot = number(bytes, 64, 8) as usize;
            let fields = [(0, 8), (8, 4), (12, 2), (14, 2), (32, 4), (36, 4), (40, 8)];
            let (at, length) = rng.pick(&fields);
            (snapshot.saturating_add(at), length)
        }
        11 => {
            // A header extension: type or length.
            let start = number(bytes, 100, 4) as usize;
            (start.saturating_add(4 * rng.below(40) as usize), 4)
        }
        12 => {
            // A truncated file.
            return bytes.truncate(1 + rng.below(len) as usize);
        }
        13 => {
            // A cluster is copied over another one.
            let from = rng.below(len) / cluster_size * cluster_size;
            let to = rng.below(len) / cluster_size * cluster_size;
            let count = cluster_size.min(len - from.max(to)) as usize;
            let (from, to) = (from as usize, to as usize);
            return bytes.copy_within(from..from + count, to);
        }
        14 => (rng.below(len) as usize & !7, 8),
        _ => (rng.below(len) as usize, 1),
    };
    let was = number(bytes, at, length);
    let value = odd_number(rng, was, cluster_size, len);
    set_number(bytes, at, length, value);
}

/// What a check finds.
pub fn check(queue: &Queue, storage: Arc<dyn Storage>) -> Result<CheckReport> {
    let options = OpenOptions::default().inspect(true).check(true);
    let device = Device::from_storage(queue, storage, &options)?;
    match device.top().as_qcow2() {
        Some(image) => queue.block_on(jobs::check(queue, image, &mut |_| {}, |_| {})),
        None => Err(Error::Refused("a raw image".into())),
    }
}

/// The most status requests for one disk.
const STEPS: usize = 1500;
/// Bytes at the start of the disk that are read twice and compared.
const WINDOW: u64 = 96 << 10;

/// Opens an image and performs every operation that only reads. Panics if results contradict each
/// other.
pub fn exercise(queue: &Queue, bytes: &[u8]) {
    let storage: Arc<dyn Storage> = Arc::new(Memory::new(bytes.to_vec()));
    let options = OpenOptions::default().no_backing(true);
    // The image must not open other files: if it names one, it opens only with `no_backing`.
    let strict = OpenOptions::default();
    assert_eq!(strict.policy, Policy::Follow);
    if let Ok(device) = Device::from_storage(queue, storage.clone(), &strict) {
        assert_eq!(device.layers().len(), 1);
        if let Some(image) = device.top().as_qcow2() {
            assert!(image.header().backing_file().is_none());
            assert!(!image.header().has_data_file());
        }
    }
    let inspect = OpenOptions::default().inspect(true);
    if let Ok(device) = Device::from_storage(queue, storage.clone(), &inspect) {
        jobs_of(queue, &device);
    }
    with_data_file(queue, &storage);
    match Device::from_storage(queue, storage.clone(), &options) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(device) => {
            disk_of(queue, &device);
            let Some(image) = device.top().as_qcow2() else {
                return;
            };
            for snapshot in image.snapshots().iter().take(3) {
                let id = String::from_utf8_lossy(&snapshot.id).into_owned();
                let options = options
                    .clone()
                    .snapshot(Some(SnapshotName::IdOrName(id.into())));
                if let Ok(device) = Device::from_storage(queue, storage.clone(), &options) {
                    disk_of(queue, &device);
                }
            }
        }
    }
}

/// Reads and looks at a whole disk, or parts of a large one.
pub fn disk_of(queue: &Queue, device: &Device) {
    walk(queue, device);
    reads(queue, device);
    if device.size() < 8 << 20 {
        let target = MeasureTarget::Qcow2(Qcow2Target::default());
        let _ = queue.block_on(jobs::measure(queue, device, &target, |_| {}));
    }
    let state = device.read_vm_state(queue, 0, Buffer::new(700), 700);
    let _ = queue.block_on(state);
}

/// Requests the status of the whole disk, and at its end.
fn walk(queue: &Queue, device: &Device) {
    let size = device.size();
    let mut at = 0;
    for _ in 0..STEPS {
        if at >= size {
            break;
        }
        match queue.block_on(device.status(queue, at, size - at)) {
            Ok(status) => {
                assert!(status.length >= 1 && status.length <= size - at);
                assert!(status.zero || status.present);
                at += status.length;
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                at += 512;
            }
        }
    }
    if size > 0 {
        let _ = queue.block_on(device.status(queue, size - 1, 1));
        let outside = queue.block_on(device.status(queue, size - 1, 2));
        assert!(outside.is_err());
    }
}

fn read(
    queue: &Queue,
    device: &Device,
    at: u64,
    length: u64,
) -> std::result::Result<Vec<u8>, String> {
    let mut bytes = vec![0xa5; length as usize];
    match device.read_blocking(queue, at, &mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) => {
            let text = error.to_string();
            assert!(!text.is_empty());
            Err(text)
        }
    }
}

/// Reads ranges of several kinds, which must agree with each other and with the status.
fn reads(queue: &Queue, device: &Device) {
    let size = device.size();
    let window = size.min(WINDOW);
    assert!(read(queue, device, size, 1).is_err());
    assert!(read(queue, device, u64::MAX, 2).is_err());
    let whole = read(queue, device, 0, window);
    for (at, length) in [
        (0, 1),
        (511, 1027),
        (4096, 4096),
        (1, 70_000),
        (65_535, 2),
        (30_000, 3),
        (0, 96 << 10),
    ] {
        if at + length > window {
            continue;
        }
        let part = read(queue, device, at, length);
        if let Ok(whole) = &whole {
            let expected = &whole[at as usize..(at + length) as usize];
            assert_eq!(part.as_deref(), Ok(expected), "{length} bytes at {at}");
        }
    }
    if let Ok(whole) = &whole {
        let mut at = 0;
        while at < window {
            let Ok(status) = queue.block_on(device.status(queue, at, window - at)) else {
                panic!("no status at {at} of what can be read");
            };
            let bytes = &whole[at as usize..(at + status.length) as usize];
            if status.zero {
                assert!(bytes.iter().all(|b| *b == 0), "not zero at {at}");
            }
            at += status.length;
        }
    }
    let tail = size.min(5000);
    let _ = read(queue, device, size - tail, tail);
}

/// The jobs that only need metadata.
fn jobs_of(queue: &Queue, device: &Device) {
    assert!(read(queue, device, 0, 1).is_err());
    let Some(image) = device.top().as_qcow2() else {
        return;
    };
    let mut messages = 0;
    let _ = queue.block_on(jobs::check(
        queue,
        image,
        &mut |message| {
            messages += 1;
            if messages < 50 {
                assert!(!message.to_string().is_empty());
            }
        },
        |_| {},
    ));
    let bitmaps = queue.block_on(device.bitmaps(queue)).unwrap_or_default();
    for bitmap in bitmaps.iter().take(20) {
        let _ = queue.block_on(device.bitmap(queue, &bitmap.name));
    }
    let _ = queue.block_on(image.luks_header(queue));
}

/// Maps an image whose external data file is given by the caller.
fn with_data_file(queue: &Queue, storage: &Arc<dyn Storage>) {
    let Ok(image) = queue.block_on(OpenImage::new(queue, storage.clone())) else {
        return;
    };
    if !image.header().has_data_file() {
        return;
    }
    let data: Arc<dyn Storage> = Arc::new(Memory::new(vec![7; 8192]));
    let image = image.finish(queue, Some(data), CacheOptions::default());
    let Ok(image) = queue.block_on(image) else {
        return;
    };
    let (mut at, size) = (0, image.size());
    for _ in 0..STEPS {
        if at >= size {
            break;
        }
        at += match queue.block_on(image.extent(queue, at, size - at)) {
            Ok(extent) => {
                assert!(extent.length >= 1 && extent.length <= size - at);
                extent.length
            }
            Err(_) => 512,
        };
    }
}
