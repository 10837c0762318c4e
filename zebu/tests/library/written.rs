//! Images of the formats that are written in place, besides raw and qcow2, as other parts of the
//! library use them. (`crash`, `model` and `dropped` write them at random.)

use std::sync::Arc;

use zebu::block::{Device, OpenOptions, SharedDevice, Zeroing};
use zebu::jobs::{CreateQcow2, NewBacking, create_qcow2};
use zebu::storage::{CacheMode, Memory, Queue};
use zebu::{Format, Result};
use zebu_testkit::library::queue as queue_of;
use zebu_testkit::library::{Place, Places};
use zebu_testkit::{Rng, Written, cases};

const SIZE: u64 = 4 << 20;

fn queue() -> Queue {
    queue_of(zebu::storage::EngineKind::Threads, false)
}

fn open(queue: &Queue, format: Format, file: &Arc<Memory>, write: bool) -> Device {
    let options = OpenOptions::default()
        .format(Some(format))
        .write(write)
        .no_backing(true);
    Device::from_storage(queue, file.clone(), &options).unwrap()
}

async fn fill(device: &Device, queue: &Queue, at: u64, byte: u8) -> Result<()> {
    let bytes = vec![byte; 4096];
    device.write_buffer(queue, at, bytes, 4096).await.1
}

/// An image that something was put on rests, and is written again afterwards: its writer ends and
/// begins anew.
#[test]
fn an_overlay_is_put_on_and_taken_away() {
    for written in Written::others() {
        let queue = queue();
        let (base, over) = (Arc::new(Memory::default()), Arc::new(Memory::default()));
        written.make(&queue, base.clone(), SIZE);
        let backing = NewBacking::new("base").format(Some(written.name.into()));
        let options = CreateQcow2::default().size(SIZE).backing(Some(backing));
        let created = create_qcow2(&queue, &*over, None, &options, |_| {});
        queue.block_on(created).unwrap();
        let shared = SharedDevice::new(open(&queue, written.format(), &base, true));
        for round in 0..3u8 {
            queue.block_on(async {
                let device = shared.enter().await.unwrap();
                fill(&device, &queue, u64::from(round) << 20, 1)
                    .await
                    .unwrap();
            });
            let overlay = open(&queue, Format::QCOW2, &over, true);
            let change = shared.change(async |device| device.put_on_top(&queue, overlay).await);
            queue.block_on(change).unwrap();
            let before = base.to_vec();
            queue.block_on(async {
                let device = shared.enter().await.unwrap();
                fill(&device, &queue, 3 << 20 | u64::from(round) << 16, 2)
                    .await
                    .unwrap();
                device.flush(&queue).await.unwrap();
            });
            assert!(base.to_vec() == before, "{written:?}: the base has changed");
            let change = shared.change(async |device| {
                device.commit_top(&queue).await?;
                device.take_off_top(&queue).await
            });
            let overlay = queue.block_on(change).unwrap();
            queue.block_on(overlay.close(&queue)).unwrap();
        }
        let closed = shared.change(async |device| {
            let mut expected = vec![0; SIZE as usize];
            for round in 0..3 {
                expected[round << 20..][..4096].fill(1);
                expected[3 << 20 | round << 16..][..4096].fill(2);
            }
            let mut found = vec![0; SIZE as usize];
            let buffer = device.read_buffer(&queue, 0, std::mem::take(&mut found), SIZE as usize);
            let (found, result) = buffer.await;
            result?;
            assert!(found == expected, "{written:?}");
            device.flush(&queue).await
        });
        queue.block_on(closed).unwrap();
        drop(shared);
        let device = open(&queue, written.format(), &base, false);
        let sound = written.check(&queue, device.top(), true);
        sound.unwrap_or_else(|why| panic!("{written:?}: {why}"));
    }
}

/// Blocks follow each other on the disk in another order than in the file, and with direct I/O only whole
/// pages are quick: so one part of a range may be quick and the next not. Then nothing changes. A discard
/// and zeroes that free space concern all blocks of a range.
#[test]
fn a_range_of_many_blocks_is_cleared_as_a_whole() {
    let queue = queue();
    let places = Places::new();
    for seed in cases(20, "images in whose scattered blocks ranges were cleared") {
        let mut rng = Rng::new(seed);
        let written = Written::other(&mut rng);
        let cache = rng.pick(&[CacheMode::None, CacheMode::WriteBack]);
        let Some(file) = places.open(Place::Disk, cache) else {
            continue;
        };
        written.make(&queue, file.clone(), SIZE);
        let options = OpenOptions::default()
            .format(Some(written.format()))
            .write(true)
            .discard(Some(true));
        let device = Device::from_storage(&queue, file, &options).unwrap();
        let mut expected = vec![0; SIZE as usize];
        for step in 0..40 {
            let at = rng.below(SIZE / 512) * 512;
            let length = (1 + rng.below(SIZE / 512)) * 512;
            let length = length.min(SIZE - at);
            let range = at as usize..(at + length) as usize;
            let how = rng.below(8);
            match how {
                0 => queue.block_on(device.discard(&queue, at, length)).unwrap(),
                1 => queue
                    .block_on(device.write_zeroes(&queue, at, length, Zeroing::Unmap))
                    .unwrap(),
                2 | 3 => {
                    let quickly = device.write_zeroes_quickly(&queue, at, length, Zeroing::Keep);
                    match queue.block_on(quickly) {
                        Ok(()) => expected[range.clone()].fill(0),
                        Err(e) => assert_eq!(e.errno(), libc::EOPNOTSUPP, "{e}"),
                    }
                }
                _ => {
                    let range = range.start..range.end.min(range.start + (1 << 16));
                    expected[range.clone()].fill(step + 1);
                    let bytes = &expected[range];
                    device.write_blocking(&queue, at, bytes).unwrap();
                }
            }
            if how < 2 {
                expected[range].fill(0);
            }
            let mut found = vec![0; SIZE as usize];
            device.read_blocking(&queue, 0, &mut found).unwrap();
            assert!(
                found == expected,
                "{written:?}, {cache:?}, step {step} ({how} at {at:#x}+{length:#x})"
            );
        }
        queue.block_on(device.close(&queue)).unwrap();
    }
}
