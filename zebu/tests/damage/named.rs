//! Regression tests: damage that once caused a loss of data.

use zebu::block::{Device, Format, OpenOptions};
use zebu::internal::structures::INCOMPATIBLE_CORRUPT;
use zebu::jobs::{
    self, AmendOptions, ConvertOptions, CreateQcow2, NewBacking, NewDataFile, Preallocation,
    RepairMode, Target,
};
use zebu::storage::{EngineKind, Queue};

use crate::common::{Rng, repair_all};
use crate::images::{Files, Sound, raw, stamp, write_compressed};
use crate::layout::{be32, be64};
use crate::storage::Sparse;
use crate::{queue, work};

/// An image with some ranges written.
fn written(queue: &Queue, options: &CreateQcow2, ranges: &[(u64, usize)]) -> Sound {
    let mut rng = Rng::new(1);
    let base = options.backing.is_some();
    let files = Files {
        file: Sparse::new(&[]),
        data: None,
        base: base.then(|| Sparse::new(&stamp(&mut rng, 0, options.size as usize))),
    };
    queue
        .block_on(jobs::create_qcow2(
            queue,
            &*files.file,
            None,
            options,
            |_| {},
        ))
        .unwrap();
    let device = files.open(queue, true, true).unwrap();
    for (at, length) in ranges {
        let bytes = stamp(&mut rng, *at, *length);
        device.write_blocking(queue, *at, &bytes).unwrap();
    }
    queue.block_on(device.close(queue)).unwrap();
    Sound::new(queue, format!("{options:?}"), &files)
}

fn convert(device: Device, salvage: bool) -> bool {
    let target = raw(vec![0; device.size() as usize]);
    let options = ConvertOptions::default()
        .workers(Some(1))
        .engine(EngineKind::Threads)
        .zero_from(Some(0))
        .salvage(salvage);
    jobs::convert(vec![device], Target::Raw(target), &options, |_| {}).is_ok()
}

#[test]
fn truncated_data_are_an_error_and_no_hole() {
    let queue = queue();
    let options = CreateQcow2::default()
        .size(4 << 20)
        .preallocation(Preallocation::Metadata);
    let sound = written(&queue, &options, &[(2 << 20, 256 << 10)]);
    let files = Files::new(&sound, &sound.file[..1 << 20]);
    let open = || files.open(&queue, false, true).unwrap();
    assert!(!convert(open(), false));
    assert!(convert(open(), true));
    work::jobs(&queue, &sound, &files);

    // The same with a backing file, which a commit must not fill with zeroes.
    let options = options
        .extended_l2(true)
        .backing(Some(NewBacking::new("base.raw").format(Some("raw".into()))));
    let sound = written(&queue, &options, &[(2 << 20, 256 << 10)]);
    work::jobs(&queue, &sound, &Files::new(&sound, &sound.file[..1 << 20]));
    // Truncated within a cluster: its rest reads as zeroes, since QEMU leaves such files.
    let sound = written(&queue, &options, &[(0, 64 << 10)]);
    let end = sound.layout.paths[0][0].data.start + 512;
    let files = Files::new(&sound, &sound.file[..end as usize]);
    let mut bytes = vec![1; 64 << 10];
    let device = files.open(&queue, false, true).unwrap();
    device.read_blocking(&queue, 0, &mut bytes).unwrap();
    assert!(bytes[..512] == sound.content[0][..512]);
    assert!(bytes[512..].iter().all(|byte| *byte == 0));
}

/// Clusters of 512 bytes, so that there are several refcount blocks.
fn small_clusters(queue: &Queue) -> Sound {
    let options = CreateQcow2::default().size(1 << 20).cluster_bits(9);
    written(queue, &options, &[(0, 600 << 10)])
}

/// Truncated tables and data would read as zeroes once the file has grown behind them.
#[test]
fn a_truncated_image_is_not_made_longer() {
    let queue = queue();
    let sound = small_clusters(&queue);
    for length in (16 << 10..sound.file.len() - 512).step_by(4096) {
        let files = Files::new(&sound, &sound.file[..length]);
        let report = crate::images::check(&queue, &files.file).unwrap();
        assert!(report.corruptions > 0, "{length}: {report:?}");
        let device = files.open(&queue, true, true).unwrap();
        let written = device.write_blocking(&queue, 700 << 10, &[7; 300 << 10]);
        assert!(written.is_err(), "{length}");
        drop(device);
        assert!(files.file.to_vec() == sound.file[..length]);
        let _ = crate::common::repair_all(&queue, files.file.clone());
        let device = files.open(&queue, false, true).unwrap();
        for (sector, expected) in sound.content[0].chunks(512).enumerate().take(600 << 1) {
            let mut bytes = [0; 512];
            let read = device.read_blocking(&queue, sector as u64 * 512, &mut bytes);
            let is_right = bytes == expected;
            assert!(read.is_err() || is_right, "{length}: sector {sector}");
        }
    }
}

/// A zlib stream has no checksum: with zeroes in place of its end it may inflate to other data.
#[test]
fn a_compressed_cluster_is_not_completed_with_zeroes() {
    let queue = queue();
    let mut rng = Rng::new(3);
    let mut content = Vec::new();
    content.resize_with(64 << 10, || b'a' + (rng.next() % 26) as u8);
    let sound = written(&queue, &CreateQcow2::default().size(1 << 20), &[]);
    let files = Files::new(&sound, &sound.file);
    let device = files.open(&queue, true, true).unwrap();
    write_compressed(&queue, &device, 0, &content).unwrap();
    queue.block_on(device.close(&queue)).unwrap();
    let sound = files.file.to_vec();
    let end = sound.iter().rposition(|byte| *byte != 0).unwrap();
    let mut reads = 0;
    for lacking in (0..700).step_by(7) {
        let file = Sparse::new(&sound[..end - lacking]);
        let files = Files {
            file,
            data: None,
            base: None,
        };
        for written in [false, true] {
            if written {
                let device = files.open(&queue, true, true).unwrap();
                let write = device.write_blocking(&queue, 512 << 10, &[5; 128 << 10]);
                let known = crate::images::check(&queue, &files.file)
                    .unwrap()
                    .corruptions;
                assert_eq!(write.is_err(), known > 0, "{lacking} bytes");
            }
            let device = files.open(&queue, false, true).unwrap();
            let mut bytes = vec![0; 64 << 10];
            let read = device.read_blocking(&queue, 0, &mut bytes);
            reads += usize::from(read.is_ok());
            assert!(read.is_err() || bytes == content, "{lacking} bytes");
        }
    }
    assert!(reads < 20, "{reads}");
}

/// The new refcounts would be written behind data that the file lacks.
#[test]
fn amend_does_not_make_a_truncated_image_longer() {
    let queue = queue();
    let sound = written(
        &queue,
        &CreateQcow2::default().size(4 << 20),
        &[(0, 1 << 20)],
    );
    for length in [256 << 10, 768 << 10] {
        let files = Files::new(&sound, &sound.file[..length]);
        let device = files.open(&queue, true, true).unwrap();
        let width = AmendOptions::default().refcount_order(Some(6));
        let error = jobs::amend(&queue, device, &width, |_| {}).unwrap_err();
        assert!(error.to_string().contains("past the end"), "{error}");
        assert!(files.file.to_vec() == sound.file[..length]);
    }
}

#[test]
fn reserved_bits_of_a_refcount_table_entry_are_ignored() {
    let queue = queue();
    let sound = small_clusters(&queue);
    let entry = be64(&sound.file, 48) as usize + 8;
    for bit in 0..9 {
        let mut file = sound.file.clone();
        file[entry + 7 - bit / 8] ^= 1 << (bit % 8);
        let files = Files::new(&sound, &file);
        let device = files.open(&queue, true, true).unwrap();
        let discard = device.discard(&queue, 150 << 10, 64 << 10);
        queue.block_on(discard).unwrap();
        device
            .write_blocking(&queue, 700 << 10, &[7; 100 << 10])
            .unwrap();
        queue.block_on(device.close(&queue)).unwrap();
        let device = files.open(&queue, false, true).unwrap();
        let mut bytes = vec![0; 150 << 10];
        device.read_blocking(&queue, 0, &mut bytes).unwrap();
        assert!(bytes == sound.content[0][..150 << 10], "bit {bit}");
        let report = crate::images::check(&queue, &files.file).unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0), "bit {bit}");
    }
}

/// Where they stay, the next allocation leaves a hole of as much as a refcount block counts.
#[test]
fn refcounts_past_the_end_do_not_survive_a_repair() {
    let queue = queue();
    let sound = small_clusters(&queue);
    let layout = &sound.layout;
    let (mut file, end) = (sound.file.clone(), sound.file.len() as u64);
    assert!(end.is_multiple_of(512) && layout.counted_past_end(&file).is_none());
    // One more refcount block, with old data, in a cluster that is counted.
    file.extend(stamp(&mut Rng::new(2), end, 512));
    let entry = layout.refcount_table.start as usize + 8 * layout.blocks.len();
    file[entry..entry + 8].copy_from_slice(&end.to_be_bytes());
    let last = *layout.blocks.last().unwrap() as usize;
    let at = last + 2 * (end / 512 % layout.per_block()) as usize;
    file[at + 1] = 1;
    // The rest of the last block says that all is in use, with one free cluster before.
    assert!(at + 4 < last + 512);
    file[at + 4..last + 512].fill(1);
    for mode in [RepairMode::Leaks, RepairMode::All] {
        let files = Files::new(&sound, &file);
        assert!(layout.counted_past_end(&file).is_some());
        let report = queue.block_on(jobs::repair(
            &queue,
            files.file.clone(),
            mode,
            &mut |message| panic!("{message}, which QEMU does not report"),
            |_| {},
        ));
        assert_eq!(report.unwrap().leaks_fixed, 0);
        assert_eq!(layout.counted_past_end(&files.file.to_vec()), None);
        let device = files.open(&queue, true, true).unwrap();
        let bytes = vec![7; 100 << 10];
        device.write_blocking(&queue, 700 << 10, &bytes).unwrap();
        queue.block_on(device.close(&queue)).unwrap();
        let grown = files.file.to_vec().len() - file.len();
        assert!(
            (100 << 10..110 << 10).contains(&grown),
            "{grown:#x} more bytes"
        );
        let report = crate::images::check(&queue, &files.file).unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0));
    }
}

#[test]
fn an_unaligned_refcount_block_marks_the_image_corrupt() {
    let queue = queue();
    let options = CreateQcow2::default().size(4 << 20);
    let sound = written(&queue, &options, &[(0, 64 << 10)]);
    let mut file = sound.file.clone();
    let entry = be64(&file, 48) as usize;
    file[entry + 6] |= 2;
    let files = Files::new(&sound, &file);
    let device = files.open(&queue, true, true).unwrap();
    let error = device
        .write_blocking(&queue, 1 << 20, &[1; 512])
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("Refblock offset 0x") && text.ends_with("unaligned (reftable index: 0)")
    );
    assert!(device.write_blocking(&queue, 0, &[1; 512]).is_err());
    drop(device);
    let bits = be64(&files.file.to_vec(), 72);
    assert_eq!(bits & INCOMPATIBLE_CORRUPT, INCOMPATIBLE_CORRUPT);
    assert!(files.open(&queue, true, true).is_err());
    // After a repair the image can be written.
    let report = repair_all(&queue, files.file.clone()).unwrap();
    assert_eq!(report.corruptions, 0);
    let device = files.open(&queue, true, true).unwrap();
    device.write_blocking(&queue, 1 << 20, &[1; 512]).unwrap();
    queue.block_on(device.close(&queue)).unwrap();
}

#[test]
fn a_repair_stops_if_tables_overlap_other_structures() {
    let queue = queue();
    let options = CreateQcow2::default().size(64 << 20);
    let sound = written(&queue, &options, &[(0, 1 << 20)]);
    // An L1 table of 16385 entries, whose cluster has space for 8192.
    let mut file = sound.file.clone();
    file[38] = 0x40;
    assert_eq!(be32(&file, 36), 0x4001);
    for mode in [RepairMode::Leaks, RepairMode::All] {
        let files = Files::new(&sound, &file);
        let mut last = String::new();
        let report = queue.block_on(jobs::repair(
            &queue,
            files.file.clone(),
            mode,
            &mut |message| {
                last = message.to_string();
            },
            |_| {},
        ));
        assert!(report.unwrap().check_errors > 0);
        assert!(last.contains("nothing is repaired"), "{last}");
        assert!(files.file.to_vec() == file);
    }
}

/// After a repair of two L1 entries that refer to the same table, neither has the copied flag.
#[test]
fn an_l2_table_of_two_l1_entries_is_copied() {
    let queue = queue();
    let sound = small_clusters(&queue);
    let l1 = be64(&sound.file, 40) as usize;
    let mut file = sound.file.clone();
    file.copy_within(l1..l1 + 8, l1 + 8);
    let files = Files::new(&sound, &file);
    let report = repair_all(&queue, files.file.clone()).unwrap();
    assert_eq!(report.corruptions, 0);
    let device = files.open(&queue, true, true).unwrap();
    for at in [0, 32 << 10, 512, 33 << 10] {
        let bytes = stamp(&mut Rng::new(at), at, 2048);
        device.write_blocking(&queue, at, &bytes).unwrap();
        let mut read = vec![0; 2048];
        device.read_blocking(&queue, at, &mut read).unwrap();
        assert!(read == bytes);
    }
    queue.block_on(device.close(&queue)).unwrap();
    // Copied flags may be missing, which is harmless.
    let report = repair_all(&queue, files.file.clone()).unwrap();
    assert_eq!(report.corruptions, 0);
    let report = crate::images::check(&queue, &files.file).unwrap();
    assert_eq!((report.corruptions, report.leaks), (0, 0));
}

/// A raw image that shrinks while it is open cannot be read past its end.
#[test]
fn a_raw_image_ends_with_its_file() {
    let queue = queue();
    let options = OpenOptions::default().format(Some(Format::RAW));
    let device = Device::from_storage(&queue, Sparse::new(&[1; 700]), &options).unwrap();
    assert_eq!(device.size(), 1024);
    let status = queue.block_on(device.status(&queue, 700, 324)).unwrap();
    assert!(status.zero);
}

#[test]
fn a_repaired_image_with_a_shared_l2_table_is_resized() {
    let queue = queue();
    let options = CreateQcow2::default().size(8 << 20).cluster_bits(12);
    // A table maps 2 MiB.
    let sound = written(&queue, &options, &[(0, 64 << 10), (2 << 20, 64 << 10)]);
    let mut file = sound.file.clone();
    let l1 = be64(&file, 40) as usize;
    file.copy_within(l1..l1 + 8, l1 + 24);
    let files = Files::new(&sound, &file);
    let resized = |device: &mut zebu::block::Device, mib: u64| {
        let resize = device.resize(&queue, mib << 20, zebu::block::Preallocation::Off);
        queue.block_on(resize).is_ok()
    };
    // The damaged image is refused.
    let mut device = files.open(&queue, true, true).unwrap();
    assert!(!resized(&mut device, 7) && !resized(&mut device, 4));
    queue.block_on(device.close(&queue)).unwrap();

    let report = repair_all(&queue, files.file.clone()).unwrap();
    assert_eq!(report.corruptions, 0);
    let mut device = files.open(&queue, true, true).unwrap();
    assert!(!resized(&mut device, 4), "a shared table was dropped");
    for mib in [9, 8, 7, 16] {
        assert!(resized(&mut device, mib), "{mib} MiB");
    }
    // The table was copied when a part of it was dropped.
    assert!(resized(&mut device, 4));
    queue.block_on(device.close(&queue)).unwrap();
    // Copied flags are missing where one of two references was dropped, as after writes.
    let report = repair_all(&queue, files.file.clone()).unwrap();
    assert_eq!(report.corruptions, 0);
    let device = files.open(&queue, false, true).unwrap();
    let mut bytes = vec![0; 4 << 20];
    device.read_blocking(&queue, 0, &mut bytes).unwrap();
    assert!(bytes == sound.content[0][..4 << 20]);
}

#[test]
fn an_entry_with_another_offset_in_the_data_file_is_refused() {
    let queue = queue();
    let options = CreateQcow2::default()
        .size(1 << 20)
        .data_file(Some(NewDataFile::new("data.raw")));
    let files = Files {
        file: Sparse::new(&[]),
        data: Some(Sparse::new(&[])),
        base: None,
    };
    let data = files.data.clone().unwrap();
    queue
        .block_on(jobs::create_qcow2(
            &queue,
            &*files.file,
            Some(&*data),
            &options,
            |_| {},
        ))
        .unwrap();
    let device = files.open(&queue, true, true).unwrap();
    device.write_blocking(&queue, 0, &[1; 256 << 10]).unwrap();
    queue.block_on(device.close(&queue)).unwrap();
    let sound = Sound::new(&queue, "a data file".into(), &files);
    let entry = sound.layout.paths[0][1].entry.start as usize;
    // The offset of another cluster, one behind the disk, and one behind the file.
    for place in [2u64 << 16, 1 << 21, 1 << 45] {
        let mut file = sound.file.clone();
        file[entry..entry + 8].copy_from_slice(&(1 << 63 | place).to_be_bytes());
        let files = Files::new(&sound, &file);
        let device = files.open(&queue, true, true).unwrap();
        let mut bytes = vec![0; 64 << 10];
        for cluster in 0..4 {
            let read = device.read_blocking(&queue, cluster << 16, &mut bytes);
            assert_eq!(read.is_ok(), cluster != 1, "{place:#x}, cluster {cluster}");
        }
        let text = device
            .write_blocking(&queue, 1 << 16, &[2; 512])
            .unwrap_err();
        let text = text.to_string();
        assert!(
            text.contains("does not match guest cluster offset"),
            "{text}"
        );
        drop(device);
        assert!(files.data.unwrap().to_vec() == *sound.data.as_ref().unwrap());
    }
}

#[test]
fn amend_and_commit_refuse_a_refcount_block_past_the_end() {
    let queue = queue();
    let options = CreateQcow2::default()
        .size(1 << 20)
        .cluster_bits(9)
        .backing(Some(NewBacking::new("base.raw").format(Some("raw".into()))));
    let sound = written(&queue, &options, &[(0, 600 << 10)]);
    let mut file = sound.file.clone();
    let entry = be64(&file, 48) as usize + 8;
    let past = (file.len() as u64).next_multiple_of(512) + 512;
    file[entry..entry + 8].copy_from_slice(&past.to_be_bytes());

    let files = Files::new(&sound, &file);
    let device = files.open(&queue, true, true).unwrap();
    let width = AmendOptions::default().refcount_order(Some(5));
    let error = jobs::amend(&queue, device, &width, |_| {}).unwrap_err();
    assert!(
        error.to_string().contains("past the end of the file"),
        "{error}"
    );
    let reads = |files: &Files| {
        let device = files.open(&queue, false, true).unwrap();
        let mut bytes = vec![0; 1 << 20];
        device.read_blocking(&queue, 0, &mut bytes).unwrap();
        bytes
    };
    assert!(reads(&files) == sound.content[0]);

    let files = Files::new(&sound, &file);
    let below = Device::from_storage(
        &queue,
        files.base.clone().unwrap(),
        &OpenOptions::default().format(Some(Format::RAW)).write(true),
    )
    .unwrap();
    let top = files.open(&queue, true, false).unwrap();
    let options = jobs::CommitOptions::default()
        .empty(true)
        .engine(EngineKind::Threads);
    let committed = jobs::commit(&queue, top, below, &options, |_| {});
    assert!(committed.is_err());
    assert!(reads(&files) == sound.content[0]);
}
