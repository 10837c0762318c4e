//! Guards against a repair, complete or interrupted, that makes an image worse.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::tests::{CLUSTER, DATA, L1, L2, REFCOUNT_BLOCK, REFCOUNT_TABLE, TestImage};
use super::super::writer::Event;
use super::*;
use crate::drivers::qcow2::structures::{
    BitmapEntry, COMPRESSED, COPIED, Header, OFFSET_MASK, Snapshot,
};
use crate::storage::{Memory, QueueOptions};

/// The results of a check by which images are compared.
struct State {
    report: CheckReport,
    messages: Vec<String>,
    /// Clusters in use whose refcount is too low: they might be allocated again.
    too_low: BTreeSet<u64>,
    /// Entries that say "one reference" without a refcount of one.
    wrong_flags: BTreeSet<u64>,
}

fn queue() -> Queue {
    Queue::new(QueueOptions::default()).unwrap()
}

fn check(bytes: &[u8]) -> Result<State> {
    let queue = queue();
    let file: Arc<dyn Storage> = Arc::new(Memory::new(bytes.to_vec()));
    let (mut messages, mut too_low) = (Vec::new(), BTreeSet::new());
    let mut wrong_flags = BTreeSet::new();
    let report = queue.block_on(async {
        let mut emit = |message: CheckMessage| {
            match message {
                CheckMessage::TooLow { cluster, .. } => drop(too_low.insert(cluster)),
                CheckMessage::CopiedL2 { entry, .. } | CheckMessage::CopiedData { entry, .. }
                    if entry & COPIED != 0 =>
                {
                    wrong_flags.insert(entry);
                }
                _ => {}
            }
            messages.push(message.to_string());
        };
        let metadata = Metadata::load(&queue, &file, None, &mut emit).await?;
        let reporter = Reporter::new(|_| {});
        super::super::check_metadata(&queue, &metadata, &mut emit, &reporter).await
    })?;
    Ok(State {
        report,
        messages,
        too_low,
        wrong_flags,
    })
}

/// Repairs, and returns the writes.
fn repair_logged(bytes: &[u8], mode: RepairMode) -> (Result<CheckReport>, Vec<u8>, Vec<Event>) {
    let queue = queue();
    let memory = Arc::new(Memory::new(bytes.to_vec()));
    let file: Arc<dyn Storage> = memory.clone();
    let writer = RepairWriter::new(&queue, &file);
    let log = writer.log.clone();
    let result = queue.block_on(async {
        let metadata = Metadata::load(&queue, &file, Some(mode), &mut |_| {}).await?;
        let repair = Repair {
            queue: queue.clone(),
            writer,
            metadata,
            mode,
            reporter: &Reporter::new(|_| {}),
        };
        repair.run(&mut |_| {}).await
    });
    (result, memory.to_vec(), log.take())
}

fn apply(bytes: &mut Vec<u8>, event: &Event) {
    if let Event::Write(offset, data) = event {
        let end = *offset as usize + data.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[*offset as usize..end].copy_from_slice(data);
    }
}

/// All 64-bit numbers of a file.
fn numbers(bytes: &[u8]) -> BTreeSet<u64> {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().map(|word| u64::from_be_bytes(*word)).collect()
}

/// Interrupts a repair after each event. Events before the last barrier are durable; `lost` has a
/// bit for each later one that is lost.
fn interrupt_everywhere(before: &[u8], events: &[Event], lost: u64) {
    let first = check(before).unwrap();
    let known = numbers(before);
    let mut durable = before.to_vec();
    let mut pending: Vec<&Event> = Vec::new();
    for event in events {
        match event {
            Event::Write(..) => pending.push(event),
            Event::Barrier => pending
                .drain(..)
                .for_each(|event| apply(&mut durable, event)),
        }
        let mut crashed = durable.clone();
        for (n, event) in pending.iter().enumerate() {
            if lost >> (n % 64) & 1 == 0 {
                apply(&mut crashed, event);
            }
        }
        let mut state = check(&crashed).unwrap();
        // Clusters after the end of the file were as free before.
        let end = (before.len() / CLUSTER) as u64;
        state.too_low.retain(|cluster| *cluster < end);
        assert!(
            state.too_low.is_subset(&first.too_low),
            "more refcounts too low: {:?}\nthan before: {:?}",
            state.messages,
            first.messages
        );
        // A flag that the repair wrote is right; others were there before.
        let wrong = state.wrong_flags.difference(&known).collect::<Vec<_>>();
        assert!(wrong.is_empty(), "{wrong:x?}: {:?}", state.messages);
    }
}

/// The file of an image, header included.
fn file(image: &TestImage) -> Vec<u8> {
    let mut bytes = image.bytes.clone();
    let header = image.header.encode().unwrap();
    bytes[..header.len()].copy_from_slice(&header);
    bytes
}

/// Repairs all of an image and interrupts that; the image is sound afterwards.
fn repairs(image: &TestImage) -> CheckReport {
    let before = file(image);
    let (report, after, events) = repair_logged(&before, RepairMode::All);
    for lost in [0, u64::MAX, 0x5555_5555_5555_5555] {
        interrupt_everywhere(&before, &events, lost);
    }
    let state = check(&after).unwrap();
    assert!(state.messages.is_empty(), "{:?}", state.messages);
    report.unwrap()
}

#[test]
fn refcounts_and_flags() {
    let mut image = TestImage::new(10);
    image.header.set_incompatible(3, true);
    image.set_refcount(DATA + 1, 3);
    let entry = image.get(L2, 2);
    image.put(L2, 20, entry);
    image.put(L2, 3, 0);
    let report = repairs(&image);
    assert_eq!((report.corruptions_fixed, report.leaks_fixed), (3, 2));
    let (_, after, _) = repair_logged(&file(&image), RepairMode::All);
    assert_eq!(after[72..80], [0; 8], "marks of a damaged image");
}

#[test]
fn entries_without_data() {
    // Clusters of 1 KiB: table 1, block 2, L1 3, L2 4, data 5 and 6.
    let mut image = TestImage::new(0);
    image.header.cluster_bits = 10;
    image.header.refcount_table_offset = 1 << 10;
    image.header.l1_offset = 3 << 10;
    image.bytes = vec![0; 7 << 10];
    image.put(2, 0, 2 << 10);
    for cluster in 0..7 {
        image.bytes[(2 << 10) + 2 * cluster + 1] = 1;
    }
    image.put(6, 0, COPIED | 4 << 10);
    image.put(8, 0, COPIED | 5 << 10);
    // Zeroes that have half of a cluster and half of none.
    image.put(8, 1, COPIED | ((6 << 10) + 512) | 1);
    let report = repairs(&image);
    assert_eq!((report.corruptions_fixed, report.leaks_fixed), (1, 1));
}

#[test]
fn lost_refcounts() {
    let mut image = TestImage::new(10);
    image.set_refcount(DATA + 1, 0);
    assert_eq!(repairs(&image).corruptions_fixed, 1);
    image.put(REFCOUNT_TABLE, 0, 1 << 40);
    repairs(&image);
    image.put(REFCOUNT_TABLE, 0, 0);
    repairs(&image);
    image.put(REFCOUNT_TABLE, 0, ((REFCOUNT_BLOCK * CLUSTER) as u64) | 512);
    repairs(&image);
    image.put(REFCOUNT_TABLE, 0, ((REFCOUNT_BLOCK * CLUSTER) as u64) | 3);
    repairs(&image);
    image.put(REFCOUNT_TABLE, 0, (DATA * CLUSTER) as u64);
    repairs(&image);
    image.header.refcount_table_clusters = 0;
    repairs(&image);
}

/// The names of the bitmaps of a file.
fn bitmaps(bytes: &[u8]) -> Vec<Vec<u8>> {
    let header = Header::decode(bytes).unwrap();
    let Some(place) = header.bitmaps().unwrap() else {
        return Vec::new();
    };
    let directory = &bytes[place.directory_offset as usize..][..place.directory_size as usize];
    let list = BitmapEntry::decode_directory(directory, place.count).unwrap();
    list.into_iter().map(|bitmap| bitmap.name).collect()
}

#[test]
fn damaged_bitmaps() {
    type Damage = fn(&mut TestImage, usize);
    let at = |cluster: usize| (cluster * CLUSTER) as u64;
    let cases: [(Damage, &[&[u8]]); 8] = [
        (|_, _| {}, &[b"a", b"b"]),
        // Type and granularity.
        (
            |image, first| image.bytes[first * CLUSTER + 17] = 8,
            &[b"b"],
        ),
        (|image, first| image.put(first, 0, 1 << 40), &[b"b"]),
        (|image, first| image.put(first + 1, 0, 1 << 40), &[b"b"]),
        (
            |image, first| image.put(first + 1, 0, (DATA * CLUSTER) as u64),
            &[b"b"],
        ),
        (|image, first| image.bytes[first * CLUSTER + 24] = b'b', &[]),
        (
            |image, first| {
                let bits = image.get(first + 3, 0);
                image.put(first + 1, 0, bits);
            },
            &[],
        ),
        (|image, first| image.bytes[first * CLUSTER + 19] = 200, &[]),
    ];
    for (nth, (damage, left)) in cases.into_iter().enumerate() {
        let mut image = TestImage::new(6);
        let first = image.add_bitmaps();
        assert_eq!(first, DATA + 6);
        damage(&mut image, first);
        let report = repairs(&image);
        assert_eq!(report.corruptions_fixed > 0, nth > 0, "case {nth}");
        let (_, after, _) = repair_logged(&file(&image), RepairMode::All);
        assert_eq!(bitmaps(&after), left, "case {nth}");
        assert_eq!(
            after[..at(first) as usize][DATA * CLUSTER..],
            image.bytes[DATA * CLUSTER..at(first) as usize]
        );
    }
}

#[test]
fn a_table_in_the_place_of_a_bitmap_stops_the_repair() {
    let mut image = TestImage::new(6);
    let first = image.add_bitmaps();
    image.header.l1_offset = ((first + 2) * CLUSTER) as u64;
    image.put(first + 2, 3, 0);
    let before = file(&image);
    let (report, after, _) = repair_logged(&before, RepairMode::All);
    assert!(report.unwrap().check_errors > 0);
    assert!(after == before);
}

#[test]
fn refcounts_past_the_end() {
    let mut image = TestImage::new(10);
    image.set_refcount(DATA + 20, 3);
    // A block that counts only such clusters.
    image.put(REFCOUNT_TABLE, 1, image.bytes.len() as u64);
    image.bytes.extend([1; CLUSTER]);
    image.set_refcount(DATA + 10, 1);
    assert_eq!(repairs(&image).leaks_fixed, 0);
    for mode in [RepairMode::Leaks, RepairMode::All] {
        let (_, after, _) = repair_logged(&file(&image), mode);
        let place = |cluster| REFCOUNT_BLOCK * CLUSTER + 2 * cluster;
        assert_eq!(after[place(DATA + 10)..place(DATA + 11)], [0, 1]);
        assert_eq!(after[place(DATA + 20)..place(DATA + 21)], [0, 0]);
        assert_eq!(after[(DATA + 10) * CLUSTER..], [0; CLUSTER]);
    }
    // Those of what was cut off stay.
    let mut image = TestImage::new(10);
    image.bytes.truncate((DATA + 5) * CLUSTER);
    let before = file(&image);
    let (report, after, _) = repair_logged(&before, RepairMode::All);
    assert_eq!(report.unwrap().corruptions, 5);
    assert!(after == before);
}

#[test]
fn a_refcount_block_in_data_whose_count_overflows() {
    let mut image = TestImage::new(10);
    image.header.refcount_order = 0;
    // Refcounts of one bit for 15 clusters, and a second block that is data.
    let block = REFCOUNT_BLOCK * CLUSTER;
    image.bytes[block..block + CLUSTER].fill(0);
    image.bytes[block..block + 2].copy_from_slice(&[0xff, 0x7f]);
    image.bytes[DATA * CLUSTER..].fill(0xa5);
    image.put(REFCOUNT_TABLE, 1, (DATA * CLUSTER) as u64);
    assert_eq!(repairs(&image).corruptions_fixed, 1);
    let (_, after, _) = repair_logged(&file(&image), RepairMode::All);
    assert_eq!(
        after[DATA * CLUSTER..(DATA + 10) * CLUSTER],
        [0xa5; 10 * CLUSTER]
    );
    let before = file(&image);
    let (report, after, _) = repair_logged(&before, RepairMode::Leaks);
    assert!(report.is_err() && after == before);
}

#[test]
fn a_truncated_table_is_kept() {
    let mut image = TestImage::new(0);
    image.bytes.truncate(L2 * CLUSTER + 100);
    let before = file(&image);
    for mode in [RepairMode::Leaks, RepairMode::All] {
        let (report, after, _) = repair_logged(&before, mode);
        assert!(report.unwrap().corruptions > 0);
        assert!(after == before);
    }
    // Data may end where the file does.
    let mut image = TestImage::new(1);
    image.bytes.truncate(DATA * CLUSTER + 100);
    let (_, after, _) = repair_logged(&file(&image), RepairMode::All);
    assert_eq!(after.len(), image.bytes.len());
}

#[test]
fn nothing_is_repaired_if_data_overlap_the_header() {
    let mut image = TestImage::new(10);
    image.put(L2, 20, COMPRESSED | 200);
    let before = file(&image);
    for mode in [RepairMode::Leaks, RepairMode::All] {
        let (report, after, _) = repair_logged(&before, mode);
        assert!(report.unwrap().check_errors > 0);
        assert!(after == before);
    }
}

#[test]
fn a_rebuild_does_not_grow_a_truncated_file() {
    let mut image = TestImage::new(10);
    image.bytes.truncate((DATA + 5) * CLUSTER);
    image.put(REFCOUNT_TABLE, 0, 0);
    let before = file(&image);
    let (report, after, events) = repair_logged(&before, RepairMode::All);
    assert!(matches!(report, Err(Error::Refused(_))));
    assert!(events.is_empty() && after == before);
}

#[test]
fn metadata_that_an_entry_refers_to_as_a_table_are_kept() {
    let mut image = TestImage::new(10);
    image.put(L1, 1, COPIED);
    image.put(L1, 2, COPIED | (REFCOUNT_TABLE * CLUSTER) as u64);
    image.put(L1, 3, COPIED | (L1 * CLUSTER) as u64);
    let before = file(&image);
    let (_, after, _) = repair_logged(&before, RepairMode::All);
    assert_eq!(after[..48], before[..48]);
    assert_eq!(after[64..CLUSTER], before[64..CLUSTER]);
    check(&after).unwrap();
}

#[test]
fn leaks_are_not_repaired_where_references_are_unknown() {
    let mut image = TestImage::new(10);
    image.set_refcount(DATA + 1, 3);
    // Tables that overlap and are as long as the file.
    let snapshot = Snapshot {
        l1_size: (image.bytes.len() / 8) as u32,
        extra: vec![0; 24],
        ..Snapshot::default()
    };
    let table = Snapshot::encode_table(&vec![snapshot; 3]).unwrap();
    image.header.snapshots_offset = image.bytes.len() as u64;
    image.header.nb_snapshots = 3;
    image.bytes.extend(table);
    let before = file(&image);
    let (report, after, _) = repair_logged(&before, RepairMode::All);
    assert!(report.unwrap().check_errors > 0);
    assert_eq!(before, after);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_repair_can_be_interrupted(
        order in 0u32..=6,
        numbers in prop::collection::vec(
            (1usize..16, 0usize..64, prop_oneof![any::<u64>(), (0u64..16).prop_map(|n| n << 9),
                (0u64..16).prop_map(|n| (n << 9) | (1 << 63))]),
            0..12,
        ),
        lost: u64,
        all: bool,
        with_bitmaps: bool,
    ) {
        let mut image = TestImage::new(6);
        if with_bitmaps {
            image.add_bitmaps();
        }
        let clusters = image.bytes.len() / CLUSTER;
        image.header.refcount_order = order;
        for (cluster, index, number) in numbers.into_iter().filter(|(at, ..)| *at < clusters) {
            image.put(cluster, index, number);
        }
        // A header that is an L2 table, too, changes it when it is changed.
        let tables = (0..32).map(|n| image.get(L1, n)).filter(|n| *n != 0);
        let is_own = |entry: u64| (entry & OFFSET_MASK) / CLUSTER as u64 >= L2 as u64;
        prop_assume!(tables.clone().all(is_own));
        let before = file(&image);
        let mode = if all { RepairMode::All } else { RepairMode::Leaks };
        let (result, after, events) = repair_logged(&before, mode);
        interrupt_everywhere(&before, &events, lost);
        let state = check(&after).unwrap();
        if let (Ok(report), true) = (result, all)
            && report.check_errors == 0
        {
            prop_assert!(state.too_low.is_empty(), "{:?}", state.messages);
            prop_assert!(state.report.corruptions <= report.corruptions);
        }
    }
}
