//! Known attacks on other programs: QEMU's CVEs of 2014 in its image drivers (0142 to 0147, 0222,
//! 0223), overlapping metadata, which fuzzing found later, and CVE-2024-4467, a file that is opened
//! because a header names it. The images are made by hand from the public descriptions, and are
//! read, written, checked and repaired.

use crate::hostile_changes;
use crate::hostile_images;
use std::sync::Arc;

use crate::bounds::{alone, case, case_within, queue};
use crate::common::repair_all;
use crate::hostile_images::check;
use crate::sound::{
    CLUSTER, DATA, END, L1, L2, REFCOUNT_BLOCK, REFCOUNT_TABLE, append_cluster, header, memory,
    put, put32, sound, with_header,
};
use zebu::Limits;
use zebu::block::{Device, OpenOptions, Policy};
use zebu::internal::structures::{COPIED, INCOMPATIBLE_DATA_FILE};
use zebu::jobs;
use zebu::qcow2::{Snapshot, SnapshotName};
use zebu::storage::Storage;
use zebu::{Error, Result};

/// Where some tests append a cluster for the snapshot table.
const SNAPSHOTS: u64 = END;
/// Memory that a case may take.
const MEMORY: usize = 384 << 20;

/// Reads, writes, repairs and copies an image, and changes its snapshots, within the bounds.
#[track_caller]
fn all(name: &str, bytes: &[u8]) {
    let queue = queue();
    let run = |what: &str, run: &dyn Fn()| {
        println!("cases: 1 image: {name}: {what}");
        case_within(&format!("{name}: {what}"), MEMORY, run)
    };
    case(&format!("{name}: read"), || {
        hostile_images::exercise(&queue, bytes)
    });
    run("write", &|| hostile_changes::write(&queue, bytes));
    run("repair", &|| hostile_changes::repair(&queue, bytes));
    run("snapshots", &|| hostile_changes::snapshots(&queue, bytes));
    run("copy", &|| hostile_changes::copies(&queue, bytes));
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

/// Writes to all guest clusters. No data may be written to `keep`, and at least one write must be
/// refused as an overlap, unless the image does not open.
#[track_caller]
fn metadata_are_kept(name: &str, bytes: &[u8], keep: std::ops::Range<u64>) {
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
    assert!(refused > 0, "{name}: no write was refused");
}

const TABLES: [(&str, u64); 4] = [
    ("the header", 0),
    ("the refcount table", REFCOUNT_TABLE),
    ("a refcount block", REFCOUNT_BLOCK),
    ("the L1 table", L1),
];

/// If the guest's first cluster is mapped to the image's own tables, the guest could write tables.
#[test]
fn data_over_metadata_is_not_written() {
    let _alone = alone();
    for (what, at) in TABLES.into_iter().chain([("an L2 table", L2)]).skip(1) {
        let mut bytes = sound();
        put(&mut bytes, L2, at | COPIED);
        metadata_are_kept(&format!("data over {what}"), &bytes, 0..DATA);
    }
    let mut bytes = sound();
    let table = Snapshot::encode_table(&[Snapshot {
        l1_offset: SNAPSHOTS + 2048,
        l1_size: 0,
        id: b"1".to_vec(),
        ..Snapshot::default()
    }])
    .expect("a table");
    append_cluster(&mut bytes, &table);
    put32(&mut bytes, 60, 1);
    put(&mut bytes, 64, SNAPSHOTS);
    put(&mut bytes, L2, SNAPSHOTS | COPIED);
    metadata_are_kept(
        "data over the snapshot table",
        &bytes,
        SNAPSHOTS..SNAPSHOTS + CLUSTER,
    );
}

/// An L2 table that overlaps other tables: an allocating write would set an entry there.
#[test]
fn l2_tables_over_metadata_are_not_written() {
    let _alone = alone();
    for (what, at) in TABLES.into_iter().skip(1) {
        let mut bytes = sound();
        put(&mut bytes, L1, at | COPIED);
        metadata_are_kept(&format!("an L2 table over {what}"), &bytes, 0..L2);
    }
}

/// Regression (generated images): a discard of a guest cluster that is mapped to an L2 table freed
/// the table, and the next write replaced it. A cluster that is both data and a table must be kept.
#[test]
fn a_discard_does_not_free_a_table() {
    let _alone = alone();
    let mut bytes = sound();
    append_cluster(&mut bytes, &[]);
    // A second table, which the first one maps as data.
    put(&mut bytes, L1 + 8, SNAPSHOTS | COPIED);
    put(&mut bytes, L2 + 8, SNAPSHOTS | COPIED);
    all("an L2 table as data", &bytes);
    let storage = memory(&bytes);
    let queue = queue();
    let options = OpenOptions::default().write(true).discard(Some(true));
    let device = Device::from_storage(&queue, storage.clone(), &options).expect("it opens");
    for _ in 0..4 {
        let discard = device.discard(&queue, CLUSTER, CLUSTER);
        queue.block_on(discard).expect("discarded");
        queue.block_on(device.flush(&queue)).expect("flushed");
    }
    for cluster in 2..100 {
        let _ = device.write_blocking(&queue, cluster * CLUSTER, &[0xee; CLUSTER as usize]);
    }
    let _ = queue.block_on(device.close(&queue));
    let after = &storage.to_vec()[SNAPSHOTS as usize..][..CLUSTER as usize];
    assert!(
        !after.windows(64).any(|w| w == [0xee; 64]),
        "a guest's data in the table"
    );
}

/// All refcounts are 0, so new clusters could be allocated where the tables are.
#[test]
fn metadata_with_refcounts_of_0() {
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

/// A refcount table that refers to itself, the header or another table as a refcount block.
#[test]
fn refcount_blocks_over_metadata() {
    let _alone = alone();
    for (what, at) in TABLES.into_iter().chain([("an L2 table", L2)]) {
        if at == REFCOUNT_BLOCK {
            continue;
        }
        let mut bytes = sound();
        put(&mut bytes, REFCOUNT_TABLE, at);
        let name = format!("a refcount block over {what}");
        all(&name, &bytes);
        let found = check(&queue(), memory(&bytes));
        // An entry of 0 is no refcount block.
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

/// Regression (generated images): the end of a block at such an offset overflowed when the image was
/// opened for writing.
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

/// Every entry of the refcount table refers to the same block.
#[test]
fn one_refcount_block_for_all_entries() {
    let _alone = alone();
    let mut bytes = sound();
    for slot in 0..CLUSTER / 8 {
        put(&mut bytes, REFCOUNT_TABLE + slot * 8, REFCOUNT_BLOCK);
    }
    all("one block for all", &bytes);
    assert!(
        check(&queue(), memory(&bytes))
            .expect("a check")
            .corruptions
            > 0
    );
}

/// CVE-2014-0142: a division by a field of the header that is 0; CVE-2014-0143 and -0147: products
/// that overflow. Cluster sizes and refcount widths of any value.
#[test]
fn cve_2014_0142_0143_0147_sizes_that_overflow() {
    let _alone = alone();
    for bits in [0, 1, 8, 22, 31, 32, 63, 64, u32::MAX] {
        let mut bytes = sound();
        put32(&mut bytes, 20, bits);
        refused(&format!("cluster_bits {bits}"), &bytes, "luster size");
    }
    for order in [7, 31, 32, 63, u32::MAX] {
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

/// CVE-2014-0144: unchecked lengths of tables and header extensions.
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

/// CVE-2014-0145 and -0146: a snapshot whose L1 table is larger than the buffer for it, and one that
/// fails to open and leaves the image with a partial table.
#[test]
fn cve_2014_0145_0146_snapshot_tables() {
    let _alone = alone();
    for (name, l1_offset, l1_size) in [
        ("larger than the active one", L1, 512),
        ("of the largest size", L1, u32::MAX),
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
        append_cluster(&mut bytes, &table);
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
                "{name}: the disk has changed"
            );
        }
    }
}

/// CVE-2014-0222 and -0223 (in the qcow driver; here the same numbers): table sizes that overflow by
/// shifts, and a disk that is larger than its L1 table.
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
/// (`zebu-cli/tests/cli/untrusted.rs` tests all commands.)
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

/// Tables whose entries all refer to the table itself.
#[test]
fn tables_that_map_themselves() {
    let _alone = alone();
    let mut bytes = sound();
    for entry in 0..CLUSTER / 8 {
        put(&mut bytes, L2 + entry * 8, L2 | COPIED);
    }
    metadata_are_kept("an L2 table of itself", &bytes, 0..DATA);
    let mut bytes = sound();
    for entry in 0..8 {
        put(&mut bytes, L1 + entry * 8, L1 | COPIED);
    }
    metadata_are_kept("an L1 table of itself", &bytes, 0..DATA);
}

/// More references to one cluster than its refcount can count. Dropping one of them must not free
/// the cluster.
#[test]
fn more_references_than_a_refcount_can_count() {
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
    if let Ok(report) = repair_all(&queue, storage.clone()) {
        let again = check(&queue, storage).expect("a check");
        assert_eq!(again.corruptions > 0, report.corruptions > 0);
    }
}

/// The work limit for untrusted images: a small file maps a large disk.
#[test]
fn the_work_limit_ends_reads_and_jobs() {
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
    // The limit stays exceeded.
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
