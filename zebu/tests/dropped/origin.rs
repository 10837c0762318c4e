//! Random images, and random requests.

use super::*;

/// The image that cases begin with.
pub struct Origin {
    pub format: Format,
    /// The image, if it is neither raw nor qcow2.
    pub other: Option<Written>,
    pub bytes: Vec<u8>,
    pub backing: Option<Vec<u8>>,
    pub model: Model,
    /// Sectors of a cluster: what a request may hold.
    pub cluster: usize,
    /// Sectors of the unit of requests.
    unit: usize,
    pub options: OpenOptions,
    pub version: u32,
    /// Whether a case begins with more dirty tables than the limit.
    pub large: bool,
    /// Whether a bitmap `b` records the changes.
    pub bitmap: bool,
    pub note: String,
}

impl Origin {
    pub fn sectors(&self) -> usize {
        self.model.now.len()
    }

    /// A random image with clusters of every kind.
    pub fn new(seed: u64) -> Origin {
        // By a seed of its own, so that the rest of the image does not depend on it.
        let mut own = Rng::new(seed ^ 0x0f0 << 32);
        let other = own.one_in(6).then(|| Written::other(&mut own));
        Origin::of(seed, other)
    }

    /// The same, of this format if it is neither raw nor qcow2.
    pub fn of(seed: u64, other: Option<Written>) -> Origin {
        let mut rng = Rng::new(seed);
        // With a refcount table that is nearly full.
        let large = rng.one_in(6) && other.is_none();
        let extended_l2 = !large && rng.one_in(4);
        let cluster_bits = match extended_l2 {
            true => 14,
            false if large => 9,
            false => 9 + rng.below(5) as u32,
        };
        let version = if !extended_l2 && rng.one_in(5) { 2 } else { 3 };
        let unit = (1usize << cluster_bits) / SECTOR;
        let cluster = match other {
            Some(other) => other.block as usize / SECTOR,
            None => unit,
        };
        let sectors = match large {
            true => 6000,
            // Three blocks, the last of which is shorter.
            false if other.is_some() => 2 * cluster + 700,
            false => (24 * cluster).clamp(160, 640),
        };
        let is_raw = !large && rng.one_in(10);
        let format = match other {
            Some(other) => other.format(),
            None if is_raw => Format::RAW,
            None => Format::QCOW2,
        };
        let create = CreateQcow2::default()
            .size((sectors * SECTOR) as u64)
            .version(version)
            .cluster_bits(cluster_bits)
            .extended_l2(extended_l2)
            .refcount_order(match version {
                2 => 4,
                _ if large => 6,
                _ => 3 + rng.below(4) as u32,
            })
            .compression(match version == 3 && rng.one_in(2) {
                true => Compression::Zstd,
                false => Compression::Zlib,
            });
        let queue = common::queue(EngineKind::Threads, false);
        let memory = Arc::new(Memory::default());
        if format == Format::QCOW2 {
            queue
                .block_on(create_qcow2(&queue, &*memory, None, &create, |_| {}))
                .unwrap();
        } else {
            let written = other.unwrap_or(Written::RAW);
            written.make(&queue, memory.clone(), (sectors * SECTOR) as u64);
        }
        let has_backing = format == Format::QCOW2 && rng.one_in(2);
        let backing = has_backing.then(|| {
            let length = rng.pick(&[sectors, sectors / 2, sectors + 9]);
            vec![9u8; length * SECTOR]
        });
        let options = OpenOptions::default()
            .format(Some(format))
            .write(true)
            .discard(Some(true))
            .l2_cache_entry_size(Some(512))
            .l2_cache_size(rng.one_in(2).then_some(512));
        let mut origin = Origin {
            format,
            other,
            bytes: Vec::new(),
            backing,
            model: Model::new(sectors),
            cluster,
            unit,
            options,
            version,
            large,
            bitmap: false,
            note: format!("{format:?}, {other:?}, {create:?}"),
        };
        if let Some(backing) = &origin.backing {
            let behind = backing.len() / SECTOR;
            for model in [&mut origin.model.now, &mut origin.model.ever] {
                model[..sectors.min(behind)].fill(BTreeSet::from([9]));
            }
        }
        let mut device = origin.open(&queue, memory.clone()).unwrap();
        if large {
            // Nearly all clusters that one cluster of the refcount table counts.
            let mut done = 0;
            while done < 3700 {
                let end = (done + 500).min(3700);
                let what = What::Write(done..end, 3);
                queue.block_on(start(&device, &queue, &what)).unwrap();
                origin.model.end(&what, true);
                done = end;
            }
            queue.block_on(device.close(&queue)).unwrap();
            let used = memory.len().unwrap() as usize / SECTOR;
            let left = (4080 + rng.below(16) as usize).saturating_sub(used);
            device = origin.open(&queue, memory.clone()).unwrap();
            let what = What::Write(done..done + left.max(1), 3);
            queue.block_on(start(&device, &queue, &what)).unwrap();
            origin.model.end(&what, true);
        } else if format == Format::QCOW2 {
            for _ in 0..4 {
                let at = rng.index(sectors / cluster) * cluster;
                let what = What::Compressed(at..at + cluster, 7);
                let result = queue.block_on(start(&device, &queue, &what));
                origin.model.end(&what, true);
                if let Err(e) = result {
                    assert!(allowed(&what, &e), "{what:?}: {e}");
                }
            }
        }
        let rounds = if large { 0 } else { 1 + rng.below(2) };
        for round in 0..rounds {
            if round == 1 && format == Format::QCOW2 {
                queue.block_on(device.snapshot_create(&queue, "s")).unwrap();
            }
            for _ in 0..rng.below(12) {
                let what = origin.request(&mut rng, &[], None);
                origin.model.begin(&what);
                let result = queue.block_on(start(&device, &queue, &what));
                match result {
                    Ok(_) => origin.model.end(&what, true),
                    // A cluster is allocated already; others are written.
                    Err(_) if matches!(what, What::Compressed(..)) => {
                        origin.model.end(&what, false);
                    }
                    Err(e) => panic!("{what:?}: {e}"),
                }
                // The result of a discard is read back.
                if let (What::Discard(range), true) = (&what, true) {
                    let read = queue.block_on(start(&device, &queue, &What::Read(range.clone())));
                    for (set, sector) in origin.model.now[range.clone()]
                        .iter_mut()
                        .zip(read.unwrap().chunks(SECTOR))
                    {
                        *set = BTreeSet::from([sector[0]]);
                    }
                }
            }
        }
        // By a seed of its own, so that the rest of the image does not depend on it.
        let mut own = Rng::new(seed ^ 0xb17 << 32);
        if format == Format::QCOW2 && version == 3 && !large && own.one_in(2) {
            let granularity = 512 << own.below(4);
            let add = device.bitmap_add(&queue, "b", Some(granularity), true);
            queue.block_on(add).unwrap();
            origin.bitmap = true;
            origin.note += &format!(", bitmap of {granularity}");
        }
        queue.block_on(device.close(&queue)).unwrap();
        origin.bytes = memory.to_vec();
        if format == Format::QCOW2 && version == 3 && rng.one_in(3) {
            // An unknown feature: the first write clears it.
            origin.bytes[95] |= 0x40;
        }
        origin.model.ever = origin.model.now.clone();
        origin
    }

    /// Fails unless the bitmap is sound, and dirty where the disk has changed to these bytes. After a
    /// `lost` request, which keeps it from being stored, it may be marked.
    pub fn check_bitmap(&self, queue: &Queue, device: &Device, bytes: &[u8], lost: bool) {
        if !self.bitmap {
            return;
        }
        let found = queue.block_on(device.bitmaps(queue)).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        if found[0].inconsistent {
            assert!(lost, "the bitmap is marked as in use");
            return;
        }
        let bits = queue.block_on(device.bitmap(queue, "b")).unwrap();
        for (nth, sector) in bytes.chunks(SECTOR).enumerate() {
            let at = (nth * SECTOR) as u64;
            let has_changed = !self.model.now[nth].contains(&sector[0]);
            assert!(
                !has_changed || bits.run(at, at + 1).0,
                "sector {nth} is clean"
            );
        }
    }

    /// Whether a request does nothing in this image.
    pub fn does_nothing(&self, what: &What) -> bool {
        matches!(what, What::Compressed(..)) && self.format != Format::QCOW2
            // An entry of version 2 cannot hide the data of the backing file.
            || matches!(what, What::Discard(_)) && self.version == 2 && self.backing.is_some()
    }

    pub fn open(&self, queue: &Queue, image: Arc<dyn Storage>) -> zebu::Result<Device> {
        let backing = self.backing.clone().map(|bytes| {
            let raw = OpenOptions::default().format(Some(Format::RAW));
            Device::from_storage(queue, Arc::new(Memory::new(bytes)), &raw).unwrap()
        });
        let storages = Storages::new(image).backing(backing);
        Device::from_storages(queue, storages, &self.options)
    }

    /// A random request that does not change these ranges, mostly near a sector.
    pub fn request(&self, rng: &mut Rng, taken: &[Range<usize>], near: Option<usize>) -> What {
        loop {
            let tag = 10 + rng.below(240) as u8;
            let whole = rng.one_in(2);
            let most = (3 * self.unit).max(4) as u64;
            let unit = if whole { self.unit } else { 1 };
            let start = match near.filter(|_| !rng.one_in(4)) {
                Some(near) => near + rng.below(2 * most) as usize,
                None => rng.index(self.sectors()),
            };
            let start = start.min(self.sectors() - 1) / unit * unit;
            let count = (1 + rng.below(most) as usize).next_multiple_of(unit);
            let range = start..(start + count).min(self.sectors());
            let what = match rng.below(16) {
                0 | 1 | 12 | 13 => What::Read(range),
                2 => What::Flush,
                3 => What::Zero(range, Zeroing::Keep),
                4 => What::Zero(range, Zeroing::Unmap),
                5 => What::Discard(range),
                6 | 14 if whole => What::Compressed(range, tag),
                7 => What::Status(range),
                8 => What::ZeroQuickly(range),
                _ => What::Write(range, tag),
            };
            if self.does_nothing(&what) {
                continue;
            }
            let hits = |changed: &Range<usize>| {
                taken
                    .iter()
                    .any(|t| t.start < changed.end && changed.start < t.end)
            };
            if what.change().is_some_and(|(range, _)| hits(&range)) {
                continue;
            }
            return what;
        }
    }

    /// The range of whole clusters that contain it.
    pub fn clusters(&self, range: &Range<usize>) -> Range<usize> {
        range.start / self.cluster * self.cluster..range.end.next_multiple_of(self.cluster)
    }
}
