//! Images of the formats that are written in place, besides raw and qcow2, as other parts of the
//! library use them. (`crash`, `model` and `dropped` write them at random.)

use std::sync::Arc;

use zebu::block::{Device, OpenOptions, SharedDevice};
use zebu::jobs::{CreateQcow2, NewBacking, create_qcow2};
use zebu::storage::{Memory, Queue};
use zebu::{Format, Result};
use zebu_testkit::Written;
use zebu_testkit::library::queue as queue_of;

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
