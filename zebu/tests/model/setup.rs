//! Random images, and random ways to open them.

use std::path::{Path, PathBuf};

use zebu::block::{DetectZeroes, Device, Format, OpenOptions};
use zebu::jobs::{CreateQcow2, NewBacking, NewDataFile, Preallocation, create_qcow2, create_raw};
use zebu::names::Source;
use zebu::qcow2::Compression;
use zebu::storage::{CacheMode, EngineKind, OpenFile, Queue, QueueOptions, open_file};

use crate::common::peer::{self, qemu_img, qemu_io, text};
use crate::common::{Rng, encryption};
use crate::filters::{Filters, throttle_groups};
use zebu_testkit::Written;

/// An image and its backing file.
#[derive(Clone, Debug)]
pub struct Setup {
    pub format: Format,
    /// The image, if it is neither raw nor qcow2.
    pub other: Option<Written>,
    /// The options of a qcow2 image.
    pub options: CreateQcow2,
    /// Size and format of the backing file.
    pub backing: Option<(u64, Format)>,
    /// Whether QEMU writes clusters of every kind before the first request.
    pub used_before: bool,
}

impl Setup {
    pub fn random(rng: &mut Rng) -> Setup {
        loop {
            let setup = Setup::draw(rng);
            if setup.options.check().is_ok() {
                return setup;
            }
        }
    }

    fn draw(rng: &mut Rng) -> Setup {
        let extended_l2 = rng.one_in(3);
        let mut cluster_bits = match rng.below(8) {
            _ if extended_l2 => 14 + rng.below(3) as u32,
            0 => 16 + rng.below(6) as u32,
            1 | 2 => 16,
            3 | 4 => 9,
            _ => 9 + rng.below(8) as u32,
        };
        // Enough small clusters for several L2 tables and refcount blocks; few large ones.
        let most = (16u64 << 20)
            .min((1 << cluster_bits) * 2048)
            .max(8 << cluster_bits);
        let mut size = 512 * (1 + rng.below(most / 512));
        if rng.one_in(2) {
            size = size.next_multiple_of(1 << cluster_bits);
        }
        let version = if rng.one_in(5) { 2 } else { 3 };
        let backing = (rng.one_in(2)).then(|| {
            let backing = match rng.below(3) {
                0 => size,
                1 => 512 * (1 + rng.below(size / 512)),
                _ => size + 512 * rng.below(300),
            };
            (backing, rng.pick(&[Format::RAW, Format::QCOW2]))
        });
        let data_file = rng
            .one_in(5)
            .then(|| NewDataFile::new("data.raw").raw(rng.one_in(2)));
        let preallocation = match rng.below(12) {
            0 => Preallocation::Metadata,
            1 => Preallocation::Falloc,
            2 => Preallocation::Full,
            _ => Preallocation::Off,
        };
        let other = rng.one_in(8).then(|| Written::other(rng));
        let format = match other {
            Some(other) => other.format(),
            None if rng.one_in(16) => Format::RAW,
            None => Format::QCOW2,
        };
        if other.is_some() {
            // A few blocks, and requests that have a part of one.
            cluster_bits = 16 + rng.below(5) as u32;
            size = 512 * (1 + rng.below((6 << 20) / 512));
        }
        let backing = backing.filter(|_| format == Format::QCOW2);
        let has_data_file = data_file.is_some();
        let plain = match format == Format::QCOW2 && rng.one_in(5) {
            true => encryption::encrypted(CreateQcow2::default(), "aes-256"),
            false => CreateQcow2::default(),
        };
        Setup {
            format,
            other,
            options: plain
                .size(size)
                .version(version)
                .cluster_bits(cluster_bits)
                .refcount_order(match rng.one_in(2) {
                    true => 4,
                    false => rng.below(7) as u32,
                })
                .extended_l2(extended_l2)
                .lazy_refcounts(version == 3 && rng.one_in(4))
                .compression(match rng.one_in(3) {
                    true => Compression::Zstd,
                    false => Compression::Zlib,
                })
                .preallocation(preallocation)
                .backing(backing.map(|(_, format)| {
                    NewBacking::new(format!("backing.{}", format.name()))
                        .format(Some(format.name().into()))
                }))
                .data_file(data_file),
            backing,
            used_before: format == Format::QCOW2 && !has_data_file && rng.one_in(2),
        }
    }

    /// An image of one of the other formats.
    pub fn of(other: Written) -> Setup {
        Setup {
            format: other.format(),
            other: Some(other),
            options: CreateQcow2::default().size((3 << 20) + 5 * 512),
            backing: None,
            used_before: false,
        }
    }

    pub fn size(&self) -> u64 {
        self.options.size
    }

    /// Bytes of a cluster. Images of other formats have a value, too, so that requests have the same
    /// sizes.
    pub fn cluster(&self) -> u64 {
        1 << self.options.cluster_bits
    }

    pub fn is_preallocated(&self) -> bool {
        self.other.is_some()
            || self.options.preallocation != Preallocation::Off
            || self.data_file_is_raw()
    }

    pub fn has_data_file(&self) -> bool {
        self.format == Format::QCOW2 && self.options.data_file.is_some()
    }

    pub fn is_encrypted(&self) -> bool {
        self.options.encryption.is_some()
    }

    /// Whether compressed clusters may be written.
    pub fn compresses(&self) -> bool {
        self.format == Format::QCOW2 && !self.has_data_file() && !self.is_encrypted()
    }

    /// Whether the data file must always be the raw image of the disk.
    pub fn data_file_is_raw(&self) -> bool {
        self.format == Format::QCOW2 && self.options.data_file.as_ref().is_some_and(|d| d.raw)
    }

    /// Whether a discard does nothing: an entry of version 2 cannot hide the data of the backing
    /// file.
    pub fn ignores_discards(&self) -> bool {
        self.format == Format::QCOW2 && self.backing.is_some() && self.options.version == 2
    }

    pub fn image(&self, folder: &Path) -> PathBuf {
        folder.join(format!("disk.{}", self.format.name()))
    }

    /// Makes the backing file with this content, if there is one. Its bytes past the end of the
    /// disk must never be read.
    pub fn make_backing(&self, folder: &Path, content: &[u8]) {
        let Some((_, format)) = self.backing else {
            return;
        };
        let raw = folder.join("backing.raw");
        peer::write_sparse(&raw, content);
        if format == Format::QCOW2 {
            let qcow2 = folder.join("backing.qcow2");
            // Compressed, so that copy on write inflates.
            let args = ["convert", "-c", "-f", "raw", "-O", "qcow2"];
            let names = [text(&raw), text(&qcow2)];
            qemu_img(&[&args[..], &names].concat()).ok("making a backing file");
        }
    }

    /// Makes the empty image.
    pub fn make(&self, folder: &Path) {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let create = |path: PathBuf| {
            let how = OpenFile::default()
                .write(true)
                .create(true)
                .cache(CacheMode::Unsafe);
            open_file(path, how).unwrap()
        };
        let file = create(self.image(folder));
        if let Some(other) = self.other {
            return other.make(&queue, file, self.size());
        }
        if self.format == Format::RAW {
            queue
                .block_on(create_raw(
                    &queue,
                    &*file,
                    self.size(),
                    Preallocation::Off,
                    |_| {},
                ))
                .unwrap();
            return;
        }
        let mut options = self.options.clone();
        let data = options.data_file.as_mut().map(|data| {
            // QEMU takes a relative name relative to the current folder.
            let path = folder.join(&data.name);
            data.name = text(&path).into();
            create(path)
        });
        let data = data.as_deref();
        queue
            .block_on(create_qcow2(&queue, &*file, data, &options, |_| {}))
            .unwrap();
    }

    /// Makes an overlay of the image, for a disk of this size. Its clusters are like those of the image.
    pub fn make_overlay(&self, folder: &Path, name: &str, size: u64) -> PathBuf {
        let (image, overlay) = (self.image(folder), folder.join(name));
        let backing = NewBacking::new(text(&image)).format(Some(self.format.name().into()));
        let options = self.options.clone().size(size).backing(Some(backing));
        let options = options.data_file(None).preallocation(Preallocation::Off);
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let how = OpenFile::default().write(true).create(true);
        let file = open_file(&overlay, how.cache(CacheMode::Unsafe)).unwrap();
        let created = create_qcow2(&queue, &*file, None, &options, |_| {});
        queue.block_on(created).unwrap();
        overlay
    }

    /// QEMU writes clusters of every kind. Returns the ranges and the bytes that fill them.
    pub fn use_before(&self, folder: &Path, rng: &mut Rng) -> Vec<Used> {
        let clusters = self.size() / self.cluster();
        if !self.used_before || clusters == 0 {
            return Vec::new();
        }
        let mut used: Vec<Used> = Vec::new();
        let mut commands = Vec::new();
        for _ in 0..1 + rng.below(20) {
            let cluster = rng.below(clusters);
            if used.iter().any(|u| u.cluster == cluster) {
                continue;
            }
            let (at, length) = (cluster * self.cluster(), self.cluster());
            let byte = 1 + rng.below(255) as u8;
            // Compressed writes fail where a cluster is allocated.
            let is_free = !self.is_preallocated() && self.compresses();
            let kind = rng.below(if is_free { 6 } else { 3 });
            let command = match kind {
                0 => "write -z".to_string(),
                1 if self.options.version == 3 => "write -z -u".to_string(),
                1 | 2 => format!("write -P {byte}"),
                _ => format!("write -c -P {byte}"),
            };
            commands.push(format!("{command} {at} {length}"));
            used.push(Used {
                cluster,
                byte: if command.starts_with("write -z") {
                    0
                } else {
                    byte
                },
            });
        }
        qemu_io(&self.image(folder), "qcow2", &[], &commands).ok("using an image before");
        used
    }
}

/// A cluster that QEMU wrote.
pub struct Used {
    pub cluster: u64,
    pub byte: u8,
}

/// How an image is opened.
#[derive(Clone, Debug)]
pub struct Opening {
    pub queue: QueueOptions,
    pub cache: CacheMode,
    pub l2_cache_size: Option<u64>,
    pub l2_cache_entry_size: Option<u64>,
    pub discard: bool,
    pub detect_zeroes: DetectZeroes,
    pub store_bitmaps: bool,
    pub filters: Filters,
}

impl Opening {
    /// The default of each option.
    pub fn plain() -> Opening {
        Opening {
            queue: Default::default(),
            cache: Default::default(),
            l2_cache_size: None,
            l2_cache_entry_size: None,
            discard: false,
            detect_zeroes: DetectZeroes::Off,
            store_bitmaps: false,
            filters: Filters::default(),
        }
    }

    pub fn random(rng: &mut Rng, setup: &Setup, engines: &[EngineKind]) -> Opening {
        let cluster = setup.cluster();
        // Half of the images have caches so small that slices are evicted.
        let entry = 512u64 << rng.below(4);
        let entry = rng.one_in(2).then_some(entry.min(cluster));
        let size = rng
            .one_in(2)
            .then(|| entry.unwrap_or(cluster.min(4096)) * (1 + rng.below(3)));
        let discard = rng.one_in(2);
        Opening {
            queue: queue_options(rng, engines),
            cache: match rng.below(12) {
                0..4 => CacheMode::WriteBack,
                4..8 => CacheMode::Unsafe,
                8 => CacheMode::WriteThrough,
                9 => CacheMode::DirectSync,
                _ => CacheMode::None,
            },
            l2_cache_size: size,
            l2_cache_entry_size: entry,
            discard,
            detect_zeroes: match rng.below(4) {
                0 => DetectZeroes::On,
                1 if discard => DetectZeroes::Unmap,
                _ => DetectZeroes::Off,
            },
            store_bitmaps: rng.one_in(2),
            filters: Filters::random(rng, setup),
        }
    }

    fn options(&self, write: bool) -> OpenOptions {
        OpenOptions::default()
            .write(write)
            .cache(self.cache)
            .l2_cache_size(self.l2_cache_size)
            .l2_cache_entry_size(self.l2_cache_entry_size)
            .discard(Some(self.discard))
            .detect_zeroes(Some(self.detect_zeroes))
            .store_bitmaps(self.store_bitmaps)
            .objects(encryption::objects().throttle_groups(throttle_groups()))
    }

    pub fn open(&self, queue: &Queue, setup: &Setup, folder: &Path, write: bool) -> Device {
        let name = self.filters.name(setup, folder, write);
        let source = Source::Name(name.into());
        let is_put_below = write && self.filters.are_below();
        let options = self.options(write).no_backing(is_put_below);
        let opened = Device::open(queue, &source, &options);
        let mut device = opened.unwrap_or_else(|e| panic!("open: {e}"));
        if is_put_below {
            let below = self.open_backing(queue, setup, folder, &self.filters);
            let put = self.put_below(queue, &mut device, setup, below);
            drop(queue.block_on(put).unwrap_or_else(|e| panic!("open: {e}")));
        }
        device
    }

    /// Puts another chain below an image in the place of its backing chain, which had the same content.
    pub async fn put_below(
        &self,
        queue: &Queue,
        device: &mut Device,
        setup: &Setup,
        below: Option<Device>,
    ) -> zebu::Result<Option<Device>> {
        let (_, format) = setup.backing.expect("a backing file");
        let name = format!("backing.{}", format.name());
        let name = Some(name.as_ref());
        let put = device.replace_below(queue, below, name, Some(format.name()));
        put.await
    }

    /// Opens an image alone for writing, to be put on top.
    pub fn open_alone(&self, queue: &Queue, image: &Path) -> Device {
        let options = self.options(true).no_backing(true);
        let source = Source::Name(text(image).into());
        Device::open(queue, &source, &options).unwrap_or_else(|e| panic!("open {image:?}: {e}"))
    }

    /// Opens the backing chain of an image, with these filters in it.
    pub fn open_backing(
        &self,
        queue: &Queue,
        setup: &Setup,
        folder: &Path,
        filters: &Filters,
    ) -> Option<Device> {
        let node = filters.backing(setup, folder)?;
        let source = Source::Name(format!("json:{node}").into());
        let opened = Device::open(queue, &source, &self.options(false));
        Some(opened.unwrap_or_else(|e| panic!("open {node}: {e}")))
    }
}

/// A queue of one of the engines.
pub fn queue_options(rng: &mut Rng, engines: &[EngineKind]) -> QueueOptions {
    QueueOptions::default()
        .engine(rng.pick(engines))
        .parts(1 + rng.below(8) as usize)
        .inflate_inline(rng.one_in(2))
        .inline_buffered(rng.one_in(3))
        .force_async(rng.below(3) as u32)
}
