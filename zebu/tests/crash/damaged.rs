//! Guards against a change of the whole image that fails because of damage, after which the same
//! session loses or mixes up data that are not damaged.
//!
//! One entry of an L1 or L2 table is damaged. One session makes requests to the other ranges,
//! resizes and changes of snapshots, which may fail. Then the image is opened again.

use std::ops::Range;
use std::sync::Arc;

use zebu::block::{Device, OpenOptions, Preallocation, Zeroing};
use zebu::internal::structures::Header;
use zebu::jobs::{CreateQcow2, create_qcow2};
use zebu::qcow2::SnapshotName;
use zebu::storage::{Memory, Queue};

use crate::common::{Rng, Watchdog, cases, progress};
use crate::queue;

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// An image in use, and its expected content.
struct Damaged {
    rng: Rng,
    queue: Queue,
    cluster: usize,
    /// The content of the disk.
    active: Vec<u8>,
    /// The range that cannot be read or written.
    lost: Range<usize>,
    /// Name, content and lost range of each snapshot.
    snapshots: Vec<(String, Vec<u8>, Range<usize>)>,
    taken: u64,
    /// Changes of the whole image that failed.
    failed: u64,
}

fn word(image: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(image[at..at + 8].try_into().unwrap())
}

fn set_word(image: &mut [u8], at: usize, word: u64) {
    image[at..at + 8].copy_from_slice(&word.to_be_bytes());
}

fn open_options() -> OpenOptions {
    OpenOptions::default()
        .write(true)
        .discard(Some(true))
        .l2_cache_entry_size(Some(512))
}

impl Damaged {
    /// A range of the disk that is not damaged.
    fn range(&mut self) -> Option<Range<usize>> {
        let size = self.active.len();
        let most = self.rng.pick(&[512, self.cluster, 5 * self.cluster]);
        let start = self.rng.index(size) / 512 * 512;
        let length = 1 + self.rng.index(most);
        let range = start..(start + length.next_multiple_of(512)).min(size);
        let apart = range.end <= self.lost.start || range.start >= self.lost.end;
        apart.then_some(range)
    }

    /// One request. Its range must then be old or new.
    fn request(&mut self, device: &Device) {
        let Some(range) = self.range() else {
            return;
        };
        let (offset, length) = (range.start as u64, range.len() as u64);
        let queue = &self.queue;
        let mut new = vec![0; range.len()];
        let result = match self.rng.below(6) {
            0..3 => {
                self.rng.fill(&mut new);
                device.write_blocking(queue, offset, &new)
            }
            3 => queue.block_on(device.write_zeroes(queue, offset, length, Zeroing::Unmap)),
            4 => queue.block_on(device.discard(queue, offset, length)),
            _ => {
                new.copy_from_slice(&self.active[range.clone()]);
                queue.block_on(device.flush(queue))
            }
        };
        let mut found = vec![0; range.len()];
        device.read_blocking(queue, offset, &mut found).unwrap();
        let old = &self.active[range.clone()];
        let known = found.iter().zip(old.iter().zip(&new));
        let made_up = known.filter(|(f, (o, n))| f != o && f != n).count();
        assert_eq!(made_up, 0, "at {range:x?} after {result:?}");
        self.active[range].copy_from_slice(&found);
    }

    /// A change of the whole image, which must succeed or change nothing.
    fn change(&mut self, device: &mut Device) {
        let queue = self.queue.clone();
        let lost = self.lost.clone();
        let before = (self.active.clone(), self.snapshots.clone(), lost.clone());
        let count = self.snapshots.len() as u64;
        let pick = self.rng.below(count.max(1)) as usize;
        let name = |s: &Damaged| SnapshotName::from(s.snapshots[pick].0.as_str());
        let result = match self.rng.below(6) {
            0 if count > 0 => {
                let name = name(self);
                self.snapshots.remove(pick);
                queue.block_on(device.snapshot_delete(&queue, &name))
            }
            1 if count > 0 => {
                self.active.clone_from(&self.snapshots[pick].1);
                self.lost = self.snapshots[pick].2.clone();
                queue.block_on(device.snapshot_apply(&queue, &name(self)))
            }
            2 => {
                self.taken += 1;
                let name = self.taken.to_string();
                self.snapshots
                    .push((name.clone(), self.active.clone(), lost));
                queue.block_on(device.snapshot_create(&queue, &name))
            }
            _ => {
                let new = 512 * (1 + self.rng.below(3 * self.active.len() as u64 / 1024) as usize);
                let modes = [
                    Preallocation::Off,
                    Preallocation::Metadata,
                    Preallocation::Falloc,
                ];
                let mode = match new > self.active.len() {
                    true => self.rng.pick(&modes),
                    false => Preallocation::Off,
                };
                self.active.resize(new, 0);
                // A range that was cut off is not damaged when the disk grows again.
                self.lost.end = self.lost.end.min(new);
                queue.block_on(device.resize(&queue, new as u64, mode))
            }
        };
        if result.is_err() {
            (self.active, self.snapshots, self.lost) = before;
            self.failed += 1;
        }
        self.compare(device, &format!("after {result:?}"));
    }

    /// Verifies the content of disk and snapshots, except the lost ranges.
    fn compare(&self, device: &Device, what: &str) {
        assert_eq!(device.size() as usize, self.active.len(), "{what}");
        for range in [
            0..self.lost.start.min(self.active.len()),
            self.lost.end..self.active.len(),
        ] {
            let mut found = vec![0; range.len()];
            let read = device.read_blocking(&self.queue, range.start as u64, &mut found);
            read.unwrap_or_else(|e| panic!("{what}: {range:x?}: {e}"));
            let mut pairs = found.iter().zip(&self.active[range.clone()]);
            let differs = pairs.position(|(a, b)| a != b);
            let at = differs.map(|n| range.start + n);
            assert!(at.is_none(), "{what}: other data at {at:x?}");
        }
    }
}

/// Damages one entry of a table. Returns the range of the disk that it maps.
fn damage(rng: &mut Rng, image: &mut [u8], cluster: usize, size: usize) -> Option<Range<usize>> {
    let header = Header::decode(&image[..cluster]).unwrap();
    let coverage = cluster / 8 * cluster;
    let index = rng.below(u64::from(header.l1_size)) as usize;
    let entry = header.l1_offset as usize + 8 * index;
    let table = (word(image, entry) & OFFSET) as usize;
    if table == 0 {
        return None;
    }
    let (at, lost) = match rng.one_in(2) {
        true => (entry, index * coverage..(index + 1) * coverage),
        false => {
            let nth = rng.below(cluster as u64 / 8) as usize;
            let start = index * coverage + nth * cluster;
            (table + 8 * nth, start..start + cluster)
        }
    };
    let old = word(image, at);
    if old & OFFSET == 0 || old >> 62 & 1 == 1 {
        return None;
    }
    // An unaligned offset, or one far behind the end of the file.
    set_word(image, at, old ^ rng.pick(&[1 << 9, 1 << 50]));
    Some(lost.start.min(size)..lost.end.min(size))
}

/// Tests one image. Returns the number of changes that failed; None if nothing was damaged.
fn use_on(seed: u64) -> Option<u64> {
    let mut rng = Rng::new(seed);
    let cluster_bits = 10 + rng.below(3) as u32;
    let cluster = 1usize << cluster_bits;
    let options = CreateQcow2::default()
        .size((2 + rng.below(5)) * (cluster * cluster / 8) as u64 + 512 * rng.below(40))
        .cluster_bits(cluster_bits);
    let made = Memory::default();
    let queue = queue();
    queue
        .block_on(create_qcow2(&queue, &made, None, &options, |_| {}))
        .unwrap();
    let mut used = Damaged {
        rng,
        queue,
        cluster,
        active: vec![0; options.size as usize],
        lost: 0..0,
        snapshots: Vec::new(),
        taken: 0,
        failed: 0,
    };
    let file = Arc::new(Memory::new(made.to_vec()));
    let device = Device::from_storage(&used.queue, file.clone(), &open_options()).unwrap();
    for _ in 0..30 {
        used.request(&device);
    }
    used.queue.block_on(device.close(&used.queue)).unwrap();
    let mut image = file.to_vec();
    used.lost = damage(&mut used.rng, &mut image, cluster, used.active.len())?;
    let file = Arc::new(Memory::new(image));
    let mut device = Device::from_storage(&used.queue, file.clone(), &open_options()).ok()?;
    for _ in 0..4 {
        for _ in 0..used.rng.below(6) {
            used.request(&device);
        }
        used.change(&mut device);
    }
    for _ in 0..used.rng.below(6) {
        used.request(&device);
    }
    let _ = used.queue.block_on(device.close(&used.queue));
    let again = Device::from_storage(&used.queue, file, &OpenOptions::default()).unwrap();
    used.compare(&again, "opened again");
    Some(used.failed)
}

#[test]
fn damage_makes_a_change_fail() {
    let mut used = 0;
    let mut seeds = cases(120, "changes of damaged images failed");
    let _watchdog = Watchdog::new("damaged images");
    while let Some(seed) = seeds.next() {
        if let Some(count) = use_on(seed) {
            used += 1;
            seeds.add(count);
        }
        progress();
    }
    println!("{used} images");
    assert!(seeds.seeds() < 100 || seeds.done() > 0);
}
