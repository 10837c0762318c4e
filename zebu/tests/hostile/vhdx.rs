//! VHDX images that are built from the specification: what they read as, and that no damage leads
//! to a panic, an endless loop or much memory.

use std::sync::Arc;

use crate::bounds::{alone, case, generated, queue};
use crate::common::cases;
use crate::hostile_images::Rng;
use crate::hostile_vhdx::{damaged, damaged_by, exercise};
use crate::vhdx_image::{Builder, Built, MIB, PRESENT, build};
use zebu::Result;
use zebu::block::{Device, OpenOptions, Storages};
use zebu::storage::{Memory, OpenFile, Queue, open_file};

fn open(queue: &Queue, file: &[u8], backing: Option<Device>) -> Result<Device> {
    let mut storages = Storages::new(Arc::new(Memory::new(file.to_vec())));
    storages.backing = backing;
    Device::from_storages(queue, storages, &OpenOptions::default())
}

/// Errors that a check finds.
fn errors(queue: &Queue, device: &Device) -> Vec<String> {
    let mut said = Vec::new();
    let checked = queue.block_on(device.top().check(queue, &mut |text| said.push(text)));
    let count = checked.expect("a check").expect("the format has one");
    assert_eq!(count.corruptions, said.len() as u64);
    said
}

fn assert_reads(queue: &Queue, device: &Device, expected: &[u8], rng: &mut Rng) {
    let size = device.size();
    assert_eq!(size, expected.len() as u64);
    let mut all = vec![0xa5; expected.len()];
    device.read_blocking(queue, 0, &mut all).expect("read");
    if let Some(at) = (0..all.len()).find(|at| all[*at] != expected[*at]) {
        panic!(
            "differs at {at:#x}: {} instead of {}",
            all[at], expected[at]
        );
    }
    for _ in 0..20 {
        let start = rng.below(size);
        let length = (1 + rng.below(9000)).min(size - start) as usize;
        let mut part = vec![0xa5; length];
        device.read_blocking(queue, start, &mut part).expect("read");
        assert!(
            part == expected[start as usize..][..length],
            "{start} {length}"
        );
    }
    let mut at = 0;
    while at < size {
        let status = queue.block_on(device.status(queue, at, size - at));
        let status = status.expect("status");
        let range = at as usize..(at + status.length) as usize;
        assert!(!status.zero || expected[range].iter().all(|byte| *byte == 0));
        assert!(status.present || status.zero);
        at += status.length;
    }
}

/// Chains of up to three images with blocks of all states, sector bitmaps and logs.
#[test]
fn chains_are_read_as_built() {
    let queue = queue();
    for seed in cases(40, "chains of VHDX").from(0) {
        let _alone = alone();
        let mut rng = Rng::new(seed);
        let mut device = None;
        let mut parent: Option<Built> = None;
        for _ in 0..1 + rng.below(3) {
            let built = build(&mut |n| rng.below(n), parent.as_ref(), 4);
            let opened = open(&queue, &built.file, device.take()).expect("it opens");
            assert_eq!(errors(&queue, &opened), [""; 0]);
            assert_reads(&queue, &opened, &built.disk, &mut rng);
            device = Some(opened);
            parent = Some(built);
        }
    }
}

/// The parent must be the one that the image was made for.
#[test]
fn another_parent_is_refused() {
    let _alone = alone();
    let queue = queue();
    let mut rng = Rng::new(1);
    let parent = build(&mut |n| rng.below(n), None, 1);
    let child = build(&mut |n| rng.below(n), Some(&parent), 1);
    let other = build(&mut |n| rng.below(n), None, 1);
    let below = |built: &Built| Some(open(&queue, &built.file, None).expect("it opens"));
    open(&queue, &child.file, below(&parent)).expect("the right one");
    let error = open(&queue, &child.file, below(&other)).expect_err("another one");
    assert!(error.to_string().contains("has changed"), "{error}");
    // Without any, it must not read as if it had no parent.
    let error = open(&queue, &child.file, None).expect_err("none");
    assert!(error.to_string().contains("may not open"), "{error}");
}

#[test]
fn damaged_images() {
    generated(80, 160 << 20, |queue, rng| {
        let file = match rng.one_in(4) {
            false => damaged(&mut |n| rng.below(n)),
            true => {
                let mut input = vec![0; rng.index(1000)];
                rng.fill(&mut input);
                damaged_by(&input)
            }
        };
        exercise(queue, &file);
    });
}

/// A table of 128 MiB must not be read at once.
#[test]
fn the_largest_table_takes_little_memory() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("x.vhdx");
    let blocks = 16u64 << 20;
    let mut builder = Builder::new(blocks * MIB, MIB, 512);
    builder.block(blocks - 1, PRESENT, vec![7; MIB as usize]);
    builder.save(&path).expect("save");
    let queue = queue();
    case("16 TiB", || {
        let file = open_file(&path, OpenFile::default()).expect("open");
        let device = Device::from_storage(&queue, file, &OpenOptions::default()).expect("open");
        let (mut at, mut data) = (0, 0);
        while at < device.size() {
            let status = queue.block_on(device.status(&queue, at, device.size() - at));
            let status = status.expect("status");
            at += status.length;
            data += if status.data { status.length } else { 0 };
        }
        assert_eq!(data, MIB);
        assert_eq!(errors(&queue, &device), [""; 0]);
    });
}
