//! Sound images of many kinds, made by zebu and by QEMU.

use std::path::Path;
use std::sync::Arc;

use zebu::block::{Device, Format, OpenOptions, Storages, Zeroing};
use zebu::jobs::{self, CreateQcow2, NewBacking, NewDataFile, Preallocation};
use zebu::qcow2::Compression;
use zebu::qcow2::SnapshotName;
use zebu::storage::{Memory, Queue, Storage};

use crate::common::Rng;
use crate::common::peer::{self, qemu_img, qemu_io, text};
use crate::layout::Layout;
use crate::storage::Sparse;

/// A sound image with known content.
#[derive(Clone)]
pub struct Sound {
    pub name: String,
    pub file: Vec<u8>,
    pub data: Option<Vec<u8>>,
    pub base: Option<Vec<u8>>,
    pub layout: Layout,
    /// The content of the active disk and of each snapshot.
    pub content: Vec<Vec<u8>>,
}

/// The files of an image in use.
pub struct Files {
    pub file: Arc<Sparse>,
    pub data: Option<Arc<Sparse>>,
    pub base: Option<Arc<Sparse>>,
}

impl Files {
    /// The files of `sound`, with another image file.
    pub fn new(sound: &Sound, file: &[u8]) -> Files {
        Files {
            file: Sparse::new(file),
            data: sound.data.as_deref().map(Sparse::new),
            base: sound.base.as_deref().map(Sparse::new),
        }
    }

    /// The files of `sound`, with a truncated data file.
    pub fn with_data_cut(sound: &Sound, length: usize) -> Files {
        let data = sound.data.as_deref().expect("it has a data file");
        Files {
            data: Some(Sparse::new(&data[..length])),
            ..Files::new(sound, &sound.file)
        }
    }

    fn storages(&self, queue: &Queue, chain: bool) -> Storages {
        let base = self.base.clone().filter(|_| chain);
        let raw = OpenOptions::default().format(Some(Format::RAW));
        Storages::new(self.file.clone())
            .data(self.data.clone().map(|data| data as Arc<dyn Storage>))
            .backing(base.map(|base| {
                let image = Storages::new(base);
                Device::from_storages(queue, image, &raw).expect("a raw image opens")
            }))
    }

    /// Opens the chain, or the image without its backing file.
    pub fn open(&self, queue: &Queue, write: bool, chain: bool) -> zebu::Result<Device> {
        let options = OpenOptions::default()
            .format(Some(Format::QCOW2))
            .write(write)
            .discard(Some(true))
            .no_backing(self.base.is_none() || !chain);
        Device::from_storages(queue, self.storages(queue, chain), &options)
    }

    /// Opens a snapshot by its id.
    pub fn open_snapshot(&self, queue: &Queue, id: &str) -> zebu::Result<Device> {
        let options = OpenOptions::default()
            .format(Some(Format::QCOW2))
            .no_backing(self.base.is_none())
            .snapshot(Some(SnapshotName::IdOrName(id.into())));
        Device::from_storages(queue, self.storages(queue, true), &options)
    }

    /// The active disk, or a snapshot.
    pub fn open_view(&self, queue: &Queue, ids: &[String], view: usize) -> zebu::Result<Device> {
        match view.checked_sub(1) {
            None => self.open(queue, false, true),
            Some(n) => self.open_snapshot(queue, &ids[n]),
        }
    }
}

/// Reads a sound device in full.
pub fn whole(queue: &Queue, device: &Device) -> Vec<u8> {
    let mut bytes = vec![0; device.size() as usize];
    device
        .read_blocking(queue, 0, &mut bytes)
        .expect("a sound image reads");
    bytes
}

impl Sound {
    pub fn new(queue: &Queue, name: String, files: &Files) -> Sound {
        let file = files.file.to_vec();
        let layout = Layout::of(&file);
        let views = 0..layout.paths.len();
        let content = views
            .map(|view| {
                let device = files.open_view(queue, &layout.snapshot_ids, view);
                whole(queue, &device.expect("a sound image opens"))
            })
            .collect();
        let report = check(queue, &files.file).expect("a sound image is checked");
        assert_eq!((report.corruptions, report.check_errors), (0, 0), "{name}");
        Sound {
            name,
            file,
            data: files.data.as_ref().map(|data| data.to_vec()),
            base: files.base.as_ref().map(|base| base.to_vec()),
            layout,
            content,
        }
    }
}

/// What a check finds.
pub fn check(queue: &Queue, file: &Arc<Sparse>) -> zebu::Result<jobs::CheckReport> {
    let options = OpenOptions::default()
        .format(Some(Format::QCOW2))
        .inspect(true)
        .check(true);
    let device = Device::from_storage(queue, file.clone(), &options)?;
    match device.top().as_qcow2() {
        Some(image) => {
            let mut messages = 0;
            queue.block_on(jobs::check(
                queue,
                image,
                &mut |message| {
                    messages += 1;
                    if messages < 10 {
                        eprintln!("check: {message}");
                    }
                },
                |_| {},
            ))
        }
        None => unreachable!("opened as qcow2"),
    }
}

/// Bytes whose sectors contain their offset and the number of the write, so that misplaced and lost
/// data are detected.
pub fn stamp(rng: &mut Rng, offset: u64, length: usize) -> Vec<u8> {
    let seed = rng.next();
    let mut bytes = vec![0; length];
    for (n, chunk) in bytes.chunks_mut(16).enumerate() {
        let mut words = [0; 16];
        words[..8].copy_from_slice(&(offset + n as u64 * 16).to_le_bytes());
        words[8..].copy_from_slice(&seed.to_le_bytes());
        let length = chunk.len();
        chunk.copy_from_slice(&words[..length]);
    }
    bytes
}

/// Writes a compressed cluster.
pub fn write_compressed(queue: &Queue, device: &Device, at: u64, bytes: &[u8]) -> zebu::Result<()> {
    let mut buffer = zebu::storage::Buffer::new(bytes.len());
    buffer[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: `buffer` lives until the write has ended.
    #[allow(unsafe_code)]
    let iov = unsafe { buffer.iov() }.slice(0, bytes.len());
    queue.block_on(device.write_compressed(queue, at, &iov))
}

/// A random image that zebu makes.
pub fn by_zebu(queue: &Queue, rng: &mut Rng) -> Sound {
    loop {
        let bits = match rng.below(24) {
            0 => 21,
            n => [9, 9, 9, 10, 12, 12, 12, 14, 16, 16][n as usize % 10],
        };
        if let Some(sound) = try_by_zebu(queue, rng, bits) {
            return sound;
        }
    }
}

/// The same with clusters of `1 << bits` bytes; `None` if the options conflict.
pub fn try_by_zebu(queue: &Queue, rng: &mut Rng, bits: u32) -> Option<Sound> {
    let cluster = 1u64 << bits;
    let clusters = match bits {
        21 => 4,
        16 => 8 + rng.below(24),
        14 => 16 + rng.below(100),
        _ => 64 + rng.below(400),
    };
    let size = (clusters * cluster - 512 * rng.below(3).min(cluster / 512 - 1)).max(512);
    let kind = rng.below(8);
    let options = CreateQcow2::default()
        .size(size)
        .version(if rng.one_in(5) { 2 } else { 3 })
        .cluster_bits(bits)
        .refcount_order(if rng.one_in(2) {
            4
        } else {
            rng.below(7) as u32
        })
        .extended_l2(bits >= 14 && rng.one_in(2))
        .compression(rng.pick(&[Compression::Zlib, Compression::Zstd]))
        .preallocation(match rng.below(4) {
            0 => Preallocation::Metadata,
            _ => Preallocation::Off,
        })
        .backing(
            (kind == 0 || kind == 1)
                .then(|| NewBacking::new("base.raw").format(Some("raw".into()))),
        )
        .data_file((kind == 2).then(|| NewDataFile::new("data.raw").raw(rng.one_in(2))));
    options.check().ok()?;
    let base = options.backing.is_some().then(|| {
        let length = size - 512 * rng.below(4).min(size / 512 - 1);
        stamp(rng, 0, length as usize)
    });
    let files = Files {
        file: Sparse::new(&[]),
        data: options.data_file.is_some().then(|| Sparse::new(&[])),
        base: base.as_deref().map(Sparse::new),
    };
    let data = files.data.as_deref().map(|data| data as &dyn Storage);
    queue
        .block_on(jobs::create_qcow2(
            queue,
            &*files.file,
            data,
            &options,
            |_| {},
        ))
        .ok()?;
    let mut device = files.open(queue, true, true).ok()?;
    let snapshots = match files.data.is_none() && rng.one_in(2) {
        true => 1 + rng.below(2).min((1 << options.refcount_order) - 1),
        false => 0,
    };
    for round in 0..=snapshots {
        for _ in 0..3 + rng.below(12) {
            fill(queue, rng, &device, cluster);
        }
        if round < snapshots && options.refcount_order > 1 {
            queue
                .block_on(device.snapshot_create(queue, &format!("snapshot {round}")))
                .ok()?;
        }
    }
    queue.block_on(device.close(queue)).ok()?;
    let name = format!("by zebu: {options:?}, {snapshots} snapshots");
    Some(Sound::new(queue, name, &files))
}

/// One write of any kind, of whole clusters or of parts.
fn fill(queue: &Queue, rng: &mut Rng, device: &Device, cluster: u64) {
    let size = device.size();
    let unit = if rng.one_in(2) { cluster } else { 512 };
    let at = rng.below(size / unit.min(size)) * unit;
    let most = (20 * cluster).clamp(64 << 10, 256 << 10) / unit;
    let length = (unit * (1 + rng.below(most.max(1)))).min(size - at);
    match rng.below(8) {
        0 => {
            let zero = device.write_zeroes(queue, at, length, Zeroing::Keep);
            queue.block_on(zero).expect("a sound image is written");
        }
        1 => {
            let zero = device.write_zeroes(queue, at, length, Zeroing::Unmap);
            queue.block_on(zero).expect("a sound image is written");
        }
        2 | 3 if cluster <= 1 << 16 => {
            let at = at & !(cluster - 1);
            let mut bytes = stamp(rng, at, cluster.min(size - at) as usize);
            if rng.one_in(2) {
                // A stream of many short codes, of which any may be cut off.
                bytes.fill_with(|| b'a' + (rng.next() % 26) as u8);
            }
            // It fails for a data file and for an allocated cluster.
            let _ = write_compressed(queue, device, at, &bytes);
        }
        _ => {
            let bytes = stamp(rng, at, length as usize);
            device
                .write_blocking(queue, at, &bytes)
                .expect("a sound image is written");
        }
    }
}

/// A set of images that QEMU makes.
pub fn by_qemu(queue: &Queue, rng: &mut Rng, folder: &Path) -> Vec<Sound> {
    let kinds: &[(&str, u64, bool)] = &[
        ("cluster_size=512", 200, true),
        ("cluster_size=512,refcount_bits=1", 300, false),
        ("cluster_size=4k", 600, true),
        ("cluster_size=4k,compat=0.10", 300, true),
        (
            "cluster_size=4k,refcount_bits=64,preallocation=metadata",
            100,
            false,
        ),
        ("cluster_size=64k", 40, true),
        ("cluster_size=64k,extended_l2=on", 40, true),
        (
            "cluster_size=16k,extended_l2=on,preallocation=metadata",
            40,
            false,
        ),
        (
            "cluster_size=64k,compression_type=zstd,lazy_refcounts=on",
            24,
            true,
        ),
        ("cluster_size=64k,preallocation=metadata", 24, false),
        ("cluster_size=2M", 3, false),
        ("cluster_size=4k,data_file=data.raw", 100, false),
        (
            "cluster_size=64k,backing_file=base.raw,backing_fmt=raw",
            16,
            true,
        ),
        (
            "cluster_size=64k,extended_l2=on,preallocation=metadata,backing_file=base.raw,backing_fmt=raw",
            16,
            false,
        ),
    ];
    kinds
        .iter()
        .map(|(options, clusters, snapshots)| {
            let unit = options.split(['=', ',']).nth(1).expect("a cluster size");
            let cluster = match unit {
                "512" => 512,
                "4k" => 4 << 10,
                "16k" => 16 << 10,
                "64k" => 64 << 10,
                _ => 2 << 20,
            };
            let size = cluster * clusters - 512 * rng.below(2);
            let image = folder.join("image.qcow2");
            let base = folder.join("base.raw");
            let data = folder.join("data.raw");
            for old in [&image, &data] {
                let _ = std::fs::remove_file(old);
            }
            let has_base = options.contains("base.raw");
            if has_base {
                std::fs::write(&base, stamp(rng, 0, size as usize)).unwrap();
            }
            let full = options
                .replace("data.raw", text(&data))
                .replace("base.raw", text(&base));
            let create = [
                "create",
                "-q",
                "-f",
                "qcow2",
                "-o",
                &full,
                text(&image),
                &size.to_string(),
            ];
            qemu_img(&create).ok(options);
            let rounds = if *snapshots { 3 } else { 1 };
            for round in 0..rounds {
                let commands: Vec<String> = (0..8)
                    .map(|_| {
                        let first = rng.below(*clusters - 1);
                        let count = (1 + rng.below(12)).min(clusters - 1 - first);
                        let (at, length) = (first * cluster, count.max(1) * cluster);
                        let byte = 1 + rng.below(255);
                        match rng.below(8) {
                            0 => format!("write -z {at} {length}"),
                            1 | 2
                                if !options.contains("data_file")
                                    && !options.contains("prealloc") =>
                            {
                                format!("write -c -P {byte} {at} {cluster}")
                            }
                            3 => format!(
                                "write -P {byte} {} 512",
                                at + 512 * rng.below(cluster / 512)
                            ),
                            _ => format!("write -P {byte} {at} {length}"),
                        }
                    })
                    .collect();
                // Compressed writes fail where a cluster is allocated.
                let _ = qemu_io(&image, "qcow2", &[], &commands);
                if round + 1 < rounds {
                    let name = format!("s{round}");
                    qemu_img(&["snapshot", "-c", &name, text(&image)]).ok(options);
                }
            }
            if *options == "cluster_size=64k" {
                let add = ["bitmap", "--add", "-f", "qcow2", text(&image), "bitmap"];
                qemu_img(&add).ok("a bitmap");
            }
            peer::assert_consistent(&image, options);
            let read = |path: &Path| Sparse::new(&std::fs::read(path).unwrap());
            let files = Files {
                file: read(&image),
                data: options.contains("data_file").then(|| read(&data)),
                base: has_base.then(|| read(&base)),
            };
            Sound::new(queue, format!("by QEMU: {options}"), &files)
        })
        .collect()
}

/// A raw image in memory.
pub fn raw(bytes: Vec<u8>) -> Arc<Memory> {
    Arc::new(Memory::new(bytes))
}
