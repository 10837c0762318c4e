//! Guards against the faults that images were known to use in other programs:
//! QEMU's CVEs of 2014 (0142 to 0148, 0222, 0223) in its qcow2 driver, those of
//! metadata that lie on each other, which fuzzing found later, and CVE-2024-4467,
//! a file opened by its name in a header. Each is made by hand here from what is
//! publicly told of it, and is read, written, checked and repaired.

#[path = "common/hostile_bounds.rs"]
mod hostile_bounds;
#[path = "common/hostile_changes.rs"]
#[allow(dead_code)]
mod hostile_changes;
#[path = "common/hostile_images.rs"]
#[allow(dead_code)]
mod hostile_images;

use std::sync::Arc;

use hostile_bounds::{alone, case_within, queue};
use zebu::Limits;
use zebu::block::{Device, OpenOptions, Policy};
use zebu::internal::format::{COPIED, Header, INCOMPATIBLE_DATA_FILE};
use zebu::jobs::{self, RepairMode};
use zebu::qcow2::Snapshot;
use zebu::qcow2::SnapshotName;
use zebu::storage::{Memory, Storage};
use zebu::{Error, Result};

const CLUSTER: u64 = 4096;
const REFCOUNT_TABLE: u64 = CLUSTER;
const REFCOUNT_BLOCK: u64 = 2 * CLUSTER;
const L1: u64 = 3 * CLUSTER;
const L2: u64 = 4 * CLUSTER;
const DATA: u64 = 5 * CLUSTER;
const SNAPSHOTS: u64 = 6 * CLUSTER;
const END: u64 = 7 * CLUSTER;
/// Memory that a case may take.
const MEMORY: usize = 384 << 20;

fn header() -> Header {
    let mut header = Header::new(12, 16 << 20);
    header.refcount_table_offset = REFCOUNT_TABLE;
    header.refcount_table_clusters = 1;
    header.l1_offset = L1;
    header.l1_size = 8;
    header
}

/// A sound image, the tables where the constants say; nothing is at `SNAPSHOTS`.
fn with_header(header: &Header) -> Vec<u8> {
    let mut bytes = header.encode().expect("a sound header");
    bytes.resize(END as usize, 0);
    put(&mut bytes, REFCOUNT_TABLE, REFCOUNT_BLOCK);
    for cluster in 0..7 {
        bytes[(REFCOUNT_BLOCK + 2 * cluster) as usize + 1] = 1;
    }
    put(&mut bytes, L1, L2 | COPIED);
    put(&mut bytes, L2, DATA | COPIED);
    bytes[DATA as usize..SNAPSHOTS as usize].fill(0x5a);
    bytes
}

fn sound() -> Vec<u8> {
    with_header(&header())
}

fn put(bytes: &mut [u8], at: u64, value: u64) {
    bytes[at as usize..at as usize + 8].copy_from_slice(&value.to_be_bytes());
}

fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

/// All that can be done to an image, within the bounds.
#[track_caller]
fn all(name: &str, bytes: &[u8]) {
    let queue = queue();
    let run = |what: &str, run: &dyn Fn()| {
        println!("cases: 1 image: {name}: {what}");
        case_within(&format!("{name}: {what}"), MEMORY, run)
    };
    run("read", &|| hostile_images::exercise(&queue, bytes));
    run("write", &|| hostile_changes::write(&queue, bytes));
    run("repair", &|| hostile_changes::repair(&queue, bytes));
    run("snapshots", &|| hostile_changes::snapshots(&queue, bytes));
    run("copy", &|| hostile_changes::copies(&queue, bytes));
}

fn memory(bytes: &[u8]) -> Arc<Memory> {
    Arc::new(Memory::new(bytes.to_vec()))
}

fn open(storage: Arc<dyn Storage>, write: bool) -> Result<Device> {
    let options = OpenOptions::default().write(write);
    Device::from_storage(&queue(), storage, &options)
}

#[track_caller]
fn refused(name: &str, bytes: &[u8], words: &str) {
    all(name, bytes);
    let text = open(memory(bytes), false).expect_err(name).to_string();
    assert!(text.contains(words), "{name}: {text}");
}

/// Guests' writes to the whole disk: none may change a byte of `keep`, and at
/// least one must be refused as an overlap (or the image, when it is opened).
#[track_caller]
fn metadata_stay(name: &str, bytes: &[u8], keep: std::ops::Range<u64>) {
    all(name, bytes);
    let storage = memory(bytes);
    let queue = queue();
    let Ok(device) = open(storage.clone(), true) else {
        return;
    };
    let mut refused = 0;
    for cluster in 0..64 {
        let written = device.write_blocking(&queue, cluster * CLUSTER, &[0xee; CLUSTER as usize]);
        refused += u32::from(written.is_err());
    }
    let _ = queue.block_on(device.close(&queue));
    let after = storage.to_vec();
    let kept = &after[keep.start as usize..keep.end as usize];
    let hit = kept.windows(64).any(|w| w == [0xee; 64]);
    assert!(!hit, "{name}: a guest's data in {keep:#x?}");
    assert!(refused > 0, "{name}: every write was carried out");
}

const TABLES: [(&str, u64); 4] = [
    ("the header", 0),
    ("the refcount table", REFCOUNT_TABLE),
    ("a refcount block", REFCOUNT_BLOCK),
    ("the L1 table", L1),
];

/// A mapping of the guest's first cluster to the image's own tables is how a
/// guest takes over its image: it writes what the host then believes.
#[test]
fn data_over_metadata_is_not_written() {
    let _alone = alone();
    for (what, at) in TABLES.into_iter().chain([("an L2 table", L2)]).skip(1) {
        let mut bytes = sound();
        put(&mut bytes, L2, at | COPIED);
        metadata_stay(&format!("data over {what}"), &bytes, 0..DATA);
    }
    let mut bytes = sound();
    bytes[SNAPSHOTS as usize..].copy_from_slice(&[0; CLUSTER as usize]);
    let table = Snapshot::encode_table(&[Snapshot {
        l1_offset: SNAPSHOTS + 2048,
        l1_size: 0,
        id: b"1".to_vec(),
        ..Snapshot::default()
    }])
    .expect("a table");
    bytes[SNAPSHOTS as usize..][..table.len()].copy_from_slice(&table);
    put32(&mut bytes, 60, 1);
    put(&mut bytes, 64, SNAPSHOTS);
    put(&mut bytes, L2, SNAPSHOTS | COPIED);
    metadata_stay("data over the snapshot table", &bytes, SNAPSHOTS..END);
}

/// An L2 table on other tables: whoever allocates a cluster writes an entry
/// there.
#[test]
fn l2_tables_over_metadata_are_not_written() {
    let _alone = alone();
    for (what, at) in TABLES.into_iter().skip(1) {
        let mut bytes = sound();
        put(&mut bytes, L1, at | COPIED);
        metadata_stay(&format!("an L2 table over {what}"), &bytes, 0..L2);
    }
}

/// Found by generated images: a guest that discards what is mapped to an L2
/// table frees that, and what it writes next is the table. In a cluster that
/// is data for one and a table for another, the table wins.
#[test]
fn a_discard_does_not_free_a_table() {
    let _alone = alone();
    let mut bytes = sound();
    // A second table, which the first one has as data.
    put(&mut bytes, L1 + 8, SNAPSHOTS | COPIED);
    put(&mut bytes, L2 + 8, SNAPSHOTS | COPIED);
    all("an L2 table as data", &bytes);
    let storage = memory(&bytes);
    let queue = queue();
    let options = OpenOptions::default().write(true).discard(Some(true));
    let device = Device::from_storage(&queue, storage.clone(), &options).expect("it opens");
    for _ in 0..4 {
        let discard = device.discard(&queue, CLUSTER, CLUSTER);
        queue.block_on(discard).expect("it can be dropped");
        queue.block_on(device.flush(&queue)).expect("flushed");
    }
    for cluster in 2..100 {
        let _ = device.write_blocking(&queue, cluster * CLUSTER, &[0xee; CLUSTER as usize]);
    }
    let _ = queue.block_on(device.close(&queue));
    let after = &storage.to_vec()[SNAPSHOTS as usize..END as usize];
    assert!(
        !after.windows(64).any(|w| w == [0xee; 64]),
        "a guest's data in the table"
    );
}

/// Refcounts that call everything free: new clusters would be taken where the
/// tables are.
#[test]
fn free_refcounts_of_metadata() {
    let _alone = alone();
    let mut bytes = sound();
    bytes[REFCOUNT_BLOCK as usize..][..CLUSTER as usize].fill(0);
    all("all clusters free", &bytes);
    let storage = memory(&bytes);
    let queue = queue();
    if let Ok(device) = open(storage.clone(), true) {
        for cluster in 1..32 {
            let _ = device.write_blocking(&queue, cluster * CLUSTER, &[0xee; CLUSTER as usize]);
        }
        let _ = queue.block_on(device.close(&queue));
    }
    let after = storage.to_vec();
    let hit = after[..DATA as usize].windows(64).any(|w| w == [0xee; 64]);
    assert!(!hit, "a guest's data in the tables");
}

/// A refcount table that names itself, the header or the L1 table as a block of
/// refcounts.
#[test]
fn refcount_tables_that_describe_themselves() {
    let _alone = alone();
    for (what, at) in TABLES.into_iter().chain([("an L2 table", L2)]) {
        if at == REFCOUNT_BLOCK {
            continue;
        }
        let mut bytes = sound();
        put(&mut bytes, REFCOUNT_TABLE, at);
        let name = format!("a refcount block over {what}");
        all(&name, &bytes);
        let found = hostile_changes::check(&queue(), &bytes);
        // At 0 there is none.
        let report = found.expect("a check");
        assert!(
            report.corruptions + report.leaks > 0 || at == 0,
            "{name}: {report:?}"
        );
    }
    let mut bytes = sound();
    put(&mut bytes, 48, REFCOUNT_BLOCK);
    all("the refcount table over its block", &bytes);
    put(&mut bytes, 48, L1);
    all("the refcount table over the L1 table", &bytes);
}

/// Found by generated images: the last byte of a block there is past 2^64, and
/// opening for writing added up to that.
#[test]
fn a_refcount_block_at_the_end_of_all_offsets() {
    let _alone = alone();
    for offset in [u64::MAX << 12, 1 << 63, u64::MAX] {
        let mut bytes = sound();
        put(&mut bytes, REFCOUNT_TABLE + 8, offset);
        all(&format!("a refcount block at {offset:#x}"), &bytes);
        let mut bytes = sound();
        put(&mut bytes, L1 + 8, offset);
        all(&format!("an L2 table at {offset:#x}"), &bytes);
    }
}

/// Every slot of a refcount table names the same block.
#[test]
fn refcount_blocks_that_are_one() {
    let _alone = alone();
    let mut bytes = sound();
    for slot in 0..CLUSTER / 8 {
        put(&mut bytes, REFCOUNT_TABLE + slot * 8, REFCOUNT_BLOCK);
    }
    all("one block for all", &bytes);
    assert!(
        hostile_changes::check(&queue(), &bytes)
            .expect("a check")
            .corruptions
            > 0
    );
}

/// CVE-2014-0142: a division by a number of the header that is 0; CVE-2014-0143
/// and -0147: products that overflow; cluster sizes from nothing to everything.
#[test]
fn cve_2014_0142_0143_0147_sizes_that_overflow() {
    let _alone = alone();
    for bits in [0, 1, 8, 22, 31, 32, 63, 64, u32::MAX] {
        let mut bytes = sound();
        put32(&mut bytes, 20, bits);
        refused(&format!("cluster_bits {bits}"), &bytes, "luster size");
    }
    for order in [7, 31, 32, u32::MAX] {
        let mut bytes = sound();
        put32(&mut bytes, 96, order);
        refused(&format!("refcount_order {order}"), &bytes, "width");
    }
    for size in [0, 1, 511, 1 << 56, i64::MAX as u64, u64::MAX] {
        let mut bytes = sound();
        put(&mut bytes, 24, size);
        all(&format!("a disk of {size} bytes"), &bytes);
    }
}

/// CVE-2014-0144: lengths of tables and extensions that nobody bounds.
#[test]
fn cve_2014_0144_lengths_without_bounds() {
    let _alone = alone();
    let mut bytes = sound();
    put32(&mut bytes, 56, 0x0010_0000);
    refused(
        "a refcount table of 2^20 clusters",
        &bytes,
        "eference count",
    );
    let mut bytes = sound();
    put32(&mut bytes, 36, 0x1000_0000);
    refused("an L1 table of 2^31 bytes", &bytes, "L1 table");
    for length in [0xffff_fff8, u32::MAX, 1 << 31, 4096] {
        let mut bytes = sound();
        // An extension of a format name, after the header.
        put32(&mut bytes, 104, 0xe279_2aca);
        put32(&mut bytes, 108, length);
        all(&format!("an extension of {length} bytes"), &bytes);
        assert!(open(memory(&bytes), false).is_err());
    }
    for length in [1024, 4096, u32::MAX] {
        let mut bytes = sound();
        put(&mut bytes, 8, 256);
        put32(&mut bytes, 16, length);
        all(&format!("a backing name of {length} bytes"), &bytes);
        assert!(open(memory(&bytes), false).is_err());
    }
}

/// CVE-2014-0145 and -0146: a snapshot whose L1 table is larger than the buffer
/// for it, and one that does not open leaving the image with half a table.
#[test]
fn cve_2014_0145_0146_snapshot_tables() {
    let _alone = alone();
    for (name, l1_offset, l1_size) in [
        ("larger than the active one", L1, 512),
        ("as large as can be said", L1, u32::MAX),
        ("at 2^63", 1 << 63, 8),
        ("past the end", 1 << 40, 8),
        ("unaligned", L1 + 8, 8),
        ("over the header", 0, 8),
        ("over the refcounts", REFCOUNT_BLOCK, 512),
    ] {
        let mut header = header();
        header.nb_snapshots = 1;
        header.snapshots_offset = SNAPSHOTS;
        let mut bytes = with_header(&header);
        let snapshot = Snapshot {
            l1_offset,
            l1_size,
            id: b"1".to_vec(),
            name: b"s".to_vec(),
            ..Snapshot::default()
        };
        let table = Snapshot::encode_table(&[snapshot]).expect("a table");
        bytes[SNAPSHOTS as usize..][..table.len()].copy_from_slice(&table);
        all(name, &bytes);
        let storage = memory(&bytes);
        let queue = queue();
        let Ok(mut device) = open(storage.clone(), true) else {
            continue;
        };
        let id = SnapshotName::IdOrName("1".into());
        if queue.block_on(device.snapshot_apply(&queue, &id)).is_err() {
            let mut sector = [0; 512];
            let read = device.read_blocking(&queue, 0, &mut sector);
            assert!(
                read.is_err() || sector == [0x5a; 512],
                "{name}: another disk"
            );
        }
    }
}

/// CVE-2014-0222 and -0223 (of the older format, the same numbers here): table
/// sizes by shifts that leave their type, and a disk larger than its L1 table.
#[test]
fn cve_2014_0222_0223_disks_larger_than_their_table() {
    let _alone = alone();
    for size in [(16 << 20) + CLUSTER, 1 << 40, 1 << 62] {
        let mut bytes = sound();
        put(&mut bytes, 24, size);
        put32(&mut bytes, 36, 1);
        refused(&format!("{size} bytes, an L1 entry"), &bytes, "");
    }
}

/// CVE-2024-4467: `info` opened the data file that a header names with `json:`.
/// A file that reading a name would block on, or that nobody may read, shows
/// it. (`zebu-cli/tests/untrusted.rs` watches every command.)
#[test]
fn cve_2024_4467_data_file_with_a_json_name() {
    let _alone = alone();
    let queue = queue();
    for name in [
        r#"json:{"driver":"raw","file":{"driver":"file","filename":"/etc/passwd"}}"#,
        r#"json:{"file.driver":"file","file.filename":"/etc/shadow"}"#,
        r#"json:{"driver":"qcow2","file":{"driver":"nbd","host":"localhost"}}"#,
        "/etc/passwd",
        "/dev/stdin",
    ] {
        let mut header = header();
        header.set_incompatible(INCOMPATIBLE_DATA_FILE, true);
        header.set_data_file_name(Some(name.as_bytes()));
        let bytes = with_header(&header);
        all(name, &bytes);
        for policy in [Policy::Nothing, Policy::Untrusted(Limits::default())] {
            let options = |inspect| OpenOptions::default().policy(policy).inspect(inspect);
            let refused = Device::from_storage(&queue, memory(&bytes), &options(false));
            let text = refused.expect_err(name).to_string();
            assert!(text.contains("may not open"), "{text}");
        }
        let strict = OpenOptions::default()
            .policy(Policy::Untrusted(Limits::default()))
            .inspect(true);
        let device = Device::from_storage(&queue, memory(&bytes), &strict).expect("info");
        assert!(device.read_blocking(&queue, 0, &mut [0; 512]).is_err());
    }
}

/// A mapping that leads around: L2 tables on L1 tables, each other, and their
/// own data, with compressed clusters among them.
#[test]
fn l2_tables_that_are_their_own_data() {
    let _alone = alone();
    let mut bytes = sound();
    for entry in 0..CLUSTER / 8 {
        put(&mut bytes, L2 + entry * 8, L2 | COPIED);
    }
    metadata_stay("an L2 table of itself", &bytes, 0..DATA);
    let mut bytes = sound();
    for entry in 0..8 {
        put(&mut bytes, L1 + entry * 8, L1 | COPIED);
    }
    metadata_stay("an L1 table of itself", &bytes, 0..DATA);
}

/// Many references to one cluster, more than its refcount can say: freeing one
/// of them must not free it for all.
#[test]
fn refcounts_that_wrap() {
    let _alone = alone();
    let mut header = header();
    header.refcount_order = 0;
    let mut bytes = with_header(&header);
    bytes[REFCOUNT_BLOCK as usize..][..CLUSTER as usize].fill(0);
    bytes[REFCOUNT_BLOCK as usize] = 0x7f;
    for entry in 0..64 {
        put(&mut bytes, L2 + entry * 8, DATA | COPIED);
    }
    all("64 references, one bit", &bytes);
    let storage = memory(&bytes);
    let queue = queue();
    let result = queue.block_on(jobs::repair(
        &queue,
        storage.clone(),
        RepairMode::All,
        &mut |_| {},
        |_| {},
    ));
    if let Ok(report) = result {
        let again = hostile_changes::check(&queue, &storage.to_vec()).expect("a check");
        assert_eq!(again.corruptions > 0, report.corruptions > 0);
    }
}

/// Limits of strict mode in the library: a chain of tables that a small file can
/// say, and the work that is left of it.
#[test]
fn work_ends_in_the_library() {
    let _alone = alone();
    let mut bytes = sound();
    put(&mut bytes, 24, 16 << 20);
    for entry in 0..8 {
        put(&mut bytes, L1 + entry * 8, L2);
    }
    for entry in 0..CLUSTER / 8 {
        put(&mut bytes, L2 + entry * 8, DATA);
    }
    let queue = queue();
    let limits = Limits::default().work(1 << 20).work_per_byte(0);
    let options = OpenOptions::default().policy(Policy::Untrusted(limits));
    let device = Device::from_storage(&queue, memory(&bytes), &options).expect("it opens");
    let mut out = vec![0; 64 << 10];
    let error: Error = (0..256)
        .find_map(|n| device.read_blocking(&queue, n * (64 << 10), &mut out).err())
        .expect("16 MiB are more than 1 MiB");
    let limit = error.limit().expect("a limit");
    assert_eq!((limit.name, limit.limit), ("work", 1 << 20));
    // It is spent for good.
    assert!(device.read_blocking(&queue, 0, &mut out).is_err());
    let Some(image) = device.top().as_qcow2() else {
        panic!("a raw image");
    };
    assert!(
        queue
            .block_on(jobs::check(&queue, image, &mut |_| {}, |_| {}))
            .is_err()
    );
}
