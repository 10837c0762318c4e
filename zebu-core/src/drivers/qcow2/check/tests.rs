//! Guards against a check that reports too much or too little, and against images that make it hang
//! or panic.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::drivers::qcow2::structures::{
    AUTOCLEAR_BITMAPS, BITMAP_AUTO, BITMAP_TYPE_DIRTY_TRACKING, BitmapEntry, BitmapsExtension,
    Extension, L1Entry, L2Entry, RefcountBlock,
};
use crate::offset::HostOffset;
use crate::storage::{Memory, QueueOptions};

pub(super) const CLUSTER: usize = 512;
/// Cluster numbers of the image of [`image`].
pub(super) const REFCOUNT_TABLE: usize = 1;
pub(super) const REFCOUNT_BLOCK: usize = 2;
pub(super) const L1: usize = 3;
pub(super) const L2: usize = 4;
pub(super) const DATA: usize = 5;

/// An image of clusters of 512 bytes with one L2 table and `data` clusters.
pub(super) struct TestImage {
    pub(super) header: Header,
    pub(super) bytes: Vec<u8>,
    pub(super) snapshots: Vec<Snapshot>,
}

impl TestImage {
    pub(super) fn new(data: usize) -> Self {
        let mut header = Header::new(9, 1 << 20);
        header.fit().unwrap();
        header.l1_size = 32;
        header.l1_offset = (L1 * CLUSTER) as u64;
        header.refcount_table_offset = (REFCOUNT_TABLE * CLUSTER) as u64;
        header.refcount_table_clusters = 1;
        let mut image = TestImage {
            bytes: vec![0; (DATA + data) * CLUSTER],
            header,
            snapshots: Vec::new(),
        };
        let geometry = image.geometry();
        image.put(REFCOUNT_TABLE, 0, (REFCOUNT_BLOCK * CLUSTER) as u64);
        let l2 = HostOffset((L2 * CLUSTER) as u64);
        image.put(L1, 0, L1Entry::new(l2, true, &geometry).unwrap().0);
        for cluster in 0..DATA + data {
            image.set_refcount(cluster, 1);
        }
        for n in 0..data {
            let host = HostOffset(((DATA + n) * CLUSTER) as u64);
            let entry = L2Entry::data(host, true, &geometry).unwrap();
            image.put(L2, n, entry.desc);
        }
        image
    }

    pub(super) fn geometry(&self) -> Geometry {
        Geometry::new(&self.header).unwrap()
    }

    /// Stores a number in a table.
    pub(super) fn put(&mut self, cluster: usize, index: usize, number: u64) {
        let at = cluster * CLUSTER + index * 8;
        self.bytes[at..at + 8].copy_from_slice(&number.to_be_bytes());
    }

    pub(super) fn get(&self, cluster: usize, index: usize) -> u64 {
        let at = cluster * CLUSTER + index * 8;
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    pub(super) fn set_refcount(&mut self, cluster: usize, refcount: u64) {
        let geometry = self.geometry();
        let at = REFCOUNT_BLOCK * CLUSTER;
        let mut block = RefcountBlock::new(&mut self.bytes[at..at + CLUSTER], &geometry);
        block.set(cluster, refcount).unwrap();
    }

    /// Adds bitmaps `a` and `b` after the last cluster: the directory, then table and bits of each.
    /// Returns the cluster of the directory.
    pub(super) fn add_bitmaps(&mut self) -> usize {
        let first = self.bytes.len() / CLUSTER;
        self.bytes.resize((first + 5) * CLUSTER, 0);
        let list = [(1, b"a"), (3, b"b")].map(|(table, name)| BitmapEntry {
            table_offset: ((first + table) * CLUSTER) as u64,
            table_size: 1,
            flags: BITMAP_AUTO,
            kind: BITMAP_TYPE_DIRTY_TRACKING,
            granularity_bits: 9,
            extra_data: Vec::new(),
            name: name.to_vec(),
        });
        let directory = BitmapEntry::encode_directory(&list).unwrap();
        self.bytes[first * CLUSTER..][..directory.len()].copy_from_slice(&directory);
        for table in [1, 3] {
            self.put(first + table, 0, ((first + table + 1) * CLUSTER) as u64);
            self.put(first + table + 1, 3, 0xff);
        }
        (first..first + 5).for_each(|cluster| self.set_refcount(cluster, 1));
        let extension = BitmapsExtension {
            count: 2,
            reserved: 0,
            directory_size: directory.len() as u64,
            directory_offset: (first * CLUSTER) as u64,
        };
        self.header.extensions.set(Extension::Bitmaps(extension));
        self.header.autoclear |= AUTOCLEAR_BITMAPS;
        first
    }

    fn check(&self) -> (CheckReport, Vec<String>) {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let bytes = self
            .snapshots
            .iter()
            .map(Snapshot::encoded_len)
            .sum::<usize>();
        let metadata = Metadata {
            file: Arc::new(Memory::new(self.bytes.clone())),
            header: self.header.clone(),
            geometry: self.geometry(),
            snapshots: SnapshotTable {
                snapshots: self.snapshots.clone(),
                bytes: bytes as u64,
                errors: 0,
            },
            data_len: None,
        };
        let mut messages = Vec::new();
        let mut emit = |m: CheckMessage| messages.push(m.to_string());
        let reporter = Reporter::new(|_| {});
        let report = queue.block_on(check_metadata(&queue, &metadata, &mut emit, &reporter));
        (report.unwrap(), messages)
    }
}

#[test]
fn a_clean_image_has_nothing_to_report() {
    let (report, messages) = TestImage::new(10).check();
    assert!(messages.is_empty(), "{messages:?}");
    assert_eq!(report.corruptions + report.leaks + report.check_errors, 0);
    assert_eq!(report.allocated_clusters, 10);
    assert_eq!(report.fragmented_clusters, 0);
    assert_eq!(report.total_clusters, 2048);
    assert_eq!(report.image_end_offset, 15 * CLUSTER as u64);
}

#[test]
fn wrong_refcounts_are_leaks_or_errors() {
    let mut image = TestImage::new(10);
    image.set_refcount(DATA + 1, 3);
    image.set_refcount(DATA + 2, 0);
    let (report, messages) = image.check();
    assert_eq!((report.corruptions, report.leaks), (3, 1));
    assert_eq!(
        messages,
        [
            "Leaked cluster 6 refcount=3 reference=1",
            "ERROR cluster 7 refcount=0 reference=1",
            "ERROR OFLAG_COPIED data cluster: l2_entry=8000000000000c00 refcount=3",
            "ERROR OFLAG_COPIED data cluster: l2_entry=8000000000000e00 refcount=0",
        ]
    );
}

#[test]
fn fragments_are_counted() {
    let mut image = TestImage::new(10);
    let (a, b) = (image.get(L2, 3), image.get(L2, 4));
    image.put(L2, 3, b);
    image.put(L2, 4, a);
    let (report, messages) = image.check();
    assert!(messages.is_empty());
    assert_eq!(report.fragmented_clusters, 3);
}

#[test]
fn a_table_of_many_snapshots_is_counted_for_each() {
    let mut image = TestImage::new(4);
    let l1 = image.bytes.len() / CLUSTER;
    let table = l1 + 3;
    image.bytes.resize((table + 1) * CLUSTER, 0);
    image.header.snapshots_offset = (table * CLUSTER) as u64;
    image.set_refcount(table, 1);
    let entry = image.get(L1, 0) & !crate::drivers::qcow2::structures::COPIED;
    image.put(L1, 0, entry);
    for n in 0..3 {
        image.put(l1 + n, 0, entry);
        image.set_refcount(l1 + n, 1);
        image.snapshots.push(Snapshot {
            l1_offset: ((l1 + n) * CLUSTER) as u64,
            l1_size: 32,
            ..Snapshot::default()
        });
    }
    for n in 0..4 {
        let entry = image.get(L2, n) & !crate::drivers::qcow2::structures::COPIED;
        image.put(L2, n, entry);
        image.set_refcount(DATA + n, 4);
    }
    image.set_refcount(L2, 4);
    let (report, messages) = image.check();
    assert!(messages.is_empty(), "{messages:?}");
    assert_eq!(report.allocated_clusters, 4);
}

#[test]
fn a_table_that_every_entry_refers_to_is_read_once() {
    let mut image = TestImage::new(4);
    // 32 MiB of entries that name the same table, which must be read once.
    let l1 = image.bytes.len() / CLUSTER;
    let entries = 4 << 20;
    let entry = image.get(L1, 0).to_be_bytes();
    image
        .bytes
        .extend(std::iter::repeat_n(entry, entries).flatten());
    image.header.l1_offset = (l1 * CLUSTER) as u64;
    image.header.l1_size = entries as u32;
    let started = std::time::Instant::now();
    let (report, _) = image.check();
    assert!(report.corruptions > 0);
    assert_eq!(report.allocated_clusters, 4 * entries as u64);
    assert!(started.elapsed().as_secs() < 60);
}

#[test]
fn overlapping_snapshots_are_not_followed() {
    let mut image = TestImage::new(4);
    for _ in 0..60_000 {
        image.snapshots.push(Snapshot {
            l1_offset: 0,
            l1_size: 4 << 20,
            ..Snapshot::default()
        });
    }
    let (report, messages) = image.check();
    assert_eq!(report.check_errors, 1);
    assert!(messages.iter().any(|m| m.contains("overlap")));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_tables_can_be_checked(
        order in 0u32..=6,
        extended in any::<bool>(),
        numbers in prop::collection::vec(
            (1usize..9, 0usize..64, prop_oneof![any::<u64>(), (0u64..12).prop_map(|n| n << 9),
                (0u64..12).prop_map(|n| (n << 9) | (1 << 63))]),
            0..40,
        ),
    ) {
        let mut image = TestImage::new(6);
        image.header.refcount_order = order;
        if extended {
            // Larger clusters make fewer of them: the file ends early.
            image.header.cluster_bits = 14;
            image.header.set_extended_l2(true);
        }
        for (cluster, index, number) in numbers {
            image.put(cluster, index, number);
        }
        let (report, messages) = image.check();
        prop_assert!(report.leaks + report.corruptions + report.check_errors >= messages.len() as u64 / 2);
    }
}
