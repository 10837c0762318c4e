//! Exchanges of a device's chain, and hooks (`zebu/tests/many_queues/exchanges.rs` does it under load).
//!
//! Guards against content, bitmaps and locks that do not follow the chain, against an exchange that is
//! refused, dropped or fails and leaves half a chain, and against a hook that misses a change.

use std::ffi::OsStr;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use zebu::block::{ChangeHook, Device, HookFuture, OpenOptions, SharedDevice, Zeroing};
use zebu::jobs::{CreateQcow2, NewBacking, create_qcow2};
use zebu::names::Source;
use zebu::storage::{EngineKind, Memory, OpenFile, Queue, QueueOptions, Storage, open_file};
use zebu::{Error, ErrorKind, Format, Result};

use crate::common::faulty::{Faulty, libc_enospc};

const SIZE: u64 = 1 << 20;
const CLUSTER: u64 = 64 << 10;

fn queue() -> Queue {
    Queue::new(QueueOptions::default()).unwrap()
}

/// A new image in memory, over another one if it has a name.
fn make(queue: &Queue, size: u64, backing: Option<&str>) -> Arc<Memory> {
    let storage = Arc::new(Memory::new(Vec::new()));
    let backing = backing.map(|name| NewBacking::new(name).format(Some("qcow2".into())));
    let options = CreateQcow2::default().size(size).backing(backing);
    let created = create_qcow2(queue, &*storage, None, &options, |_| {});
    queue.block_on(created).unwrap();
    storage
}

fn open(queue: &Queue, storage: &Arc<impl Storage + 'static>, write: bool) -> Device {
    let options = OpenOptions::default()
        .write(write)
        .no_backing(true)
        .discard(Some(true));
    Device::from_storage(queue, storage.clone(), &options).unwrap()
}

async fn fill(device: &Device, queue: &Queue, cluster: u64, byte: u8) -> Result<()> {
    let bytes = vec![byte; 4096];
    let written = device.write_buffer(queue, cluster * CLUSTER, bytes, 4096);
    written.await.1
}

async fn byte(device: &Device, queue: &Queue, cluster: u64) -> u8 {
    let read = device.read_buffer(queue, cluster * CLUSTER, vec![0; 4096], 4096);
    let (bytes, result) = read.await;
    result.unwrap();
    assert!(bytes.iter().all(|b| *b == bytes[0]));
    bytes[0]
}

/// The clusters that are dirty in the bitmap of an image that nobody has open.
fn dirty(queue: &Queue, storage: &Arc<Memory>) -> Vec<u64> {
    let device = open(queue, storage, false);
    let bits = queue.block_on(device.bitmap(queue, "b")).unwrap();
    bits.ranges()
        .flat_map(|r| r.start / CLUSTER..r.end / CLUSTER)
        .collect()
}

#[test]
fn an_overlay_is_put_on_and_taken_away() {
    let queue = queue();
    let (base, over) = (make(&queue, SIZE, None), make(&queue, SIZE, Some("base")));
    let shared = SharedDevice::new(open(&queue, &base, true));
    queue.block_on(async {
        let added = shared.bitmap_add(&queue, "b", Some(CLUSTER), true);
        added.await.unwrap();
        fill(&shared.enter().await.unwrap(), &queue, 1, 1)
            .await
            .unwrap();
        fill(&shared.enter().await.unwrap(), &queue, 2, 1)
            .await
            .unwrap();
    });
    let overlay = open(&queue, &over, true);
    let change = shared.change(async |device| device.put_on_top(&queue, overlay).await);
    queue.block_on(change).unwrap();
    // Everything is durable in the base, and its bitmap is stored.
    assert_eq!(dirty(&queue, &base), [1, 2]);
    let before = base.to_vec();
    queue.block_on(async {
        let device = shared.enter().await.unwrap();
        assert_eq!(device.layers().len(), 2);
        fill(&device, &queue, 2, 2).await.unwrap();
        fill(&device, &queue, 3, 2).await.unwrap();
        let zeroed = device.write_zeroes(&queue, CLUSTER, CLUSTER, Zeroing::Keep);
        zeroed.await.unwrap();
        device.flush(&queue).await.unwrap();
    });
    assert_eq!(base.to_vec(), before, "the base has changed");
    let change = shared.change(async |device| {
        device.commit_top(&queue).await?;
        device.take_off_top(&queue).await
    });
    let overlay = queue.block_on(change).unwrap();
    queue.block_on(overlay.close(&queue)).unwrap();
    queue.block_on(async {
        let device = shared.enter().await.unwrap();
        assert_eq!(device.layers().len(), 1);
        fill(&device, &queue, 4, 3).await.unwrap();
        for (cluster, is) in [(1, 0), (2, 2), (3, 2), (4, 3), (5, 0)] {
            assert_eq!(byte(&device, &queue, cluster).await, is, "{cluster}");
        }
        drop(device);
        shared.close(&queue).await.unwrap();
    });
    assert_eq!(dirty(&queue, &base), [1, 2, 3, 4]);
}

#[test]
fn bitmaps_that_cannot_be_stored_are_kept() {
    let queue = queue();
    let (base, over) = (make(&queue, SIZE, None), make(&queue, SIZE, Some("base")));
    let disk = Faulty::new(base.clone(), 1);
    let shared = SharedDevice::new(open(&queue, &disk, true));
    let write = async |cluster| {
        let device = shared.enter().await?;
        fill(&device, &queue, cluster, 1).await?;
        device.flush(&queue).await
    };
    let added = shared.bitmap_add(&queue, "b", Some(CLUSTER), true);
    queue.block_on(added).unwrap();
    queue.block_on(write(1)).unwrap();
    // There is space for the bits, and none for their table.
    disk.set_free_blocks(1);
    let overlay = open(&queue, &over, true);
    let change = shared.change(async |device| device.put_on_top(&queue, overlay).await);
    let failed = queue.block_on(change).unwrap_err();
    assert_eq!(failed.errno(), libc_enospc(), "{failed}");
    disk.set_free_blocks(0);
    queue.block_on(write(2)).unwrap();
    queue.block_on(shared.close(&queue)).unwrap();
    assert_eq!(dirty(&queue, &base), [1, 2]);
}

#[test]
fn what_cannot_be_exchanged_changes_nothing() {
    let queue = queue();
    let base = make(&queue, SIZE, None);
    let shared = SharedDevice::new(open(&queue, &base, true));
    let refused = |overlay: Device| {
        let change = shared.change(async |device| device.put_on_top(&queue, overlay).await);
        queue.block_on(change).unwrap_err()
    };
    let larger = make(&queue, 2 * SIZE, Some("base"));
    let nameless = make(&queue, SIZE, None);
    assert_eq!(
        refused(open(&queue, &larger, true)).kind(),
        ErrorKind::Refused
    );
    assert_eq!(
        refused(open(&queue, &nameless, true)).kind(),
        ErrorKind::Refused
    );
    let overlay = make(&queue, SIZE, Some("base"));
    refused(open(&queue, &overlay, false));
    let change = shared.change(async |device| device.take_off_top(&queue).await.map(drop));
    assert_eq!(
        queue.block_on(change).unwrap_err().kind(),
        ErrorKind::Refused
    );
    let name = Some(OsStr::new("x"));
    let change = shared.change(async |device| {
        let replaced = device.replace_below(&queue, None, name, None);
        replaced.await.map(drop)
    });
    assert_eq!(
        queue.block_on(change).unwrap_err().kind(),
        ErrorKind::Refused
    );
    let other = open(&queue, &larger, true);
    let change = shared.change(async |device| device.replace(&queue, other).await.map(drop));
    assert_eq!(
        queue.block_on(change).unwrap_err().kind(),
        ErrorKind::Refused
    );
    queue.block_on(async {
        let device = shared.enter().await.unwrap();
        assert_eq!(device.layers().len(), 1);
        fill(&device, &queue, 1, 1).await.unwrap();
        drop(device);
        shared.close(&queue).await.unwrap();
    });
}

fn create(queue: &Queue, path: &Path, backing: Option<&Path>) {
    let how = OpenFile::default().write(true).create(true);
    let file = open_file(path, how).unwrap();
    let backing = backing.map(|path| NewBacking::new(path).format(Some("qcow2".into())));
    let options = CreateQcow2::default().size(SIZE).backing(backing);
    let created = create_qcow2(queue, &*file, None, &options, |_| {});
    queue.block_on(created).unwrap();
}

fn open_path(queue: &Queue, path: &Path, write: bool, no_backing: bool) -> Result<Device> {
    let options = OpenOptions::default()
        .format(Some(Format::QCOW2))
        .write(write)
        .no_backing(no_backing);
    Device::open(queue, &Source::Name(path.into()), &options)
}

#[test]
fn locks_follow_the_chain() {
    let (queue, folder) = (queue(), tempfile::tempdir().unwrap());
    let [base, over] = ["base", "over"].map(|name| folder.path().join(name));
    create(&queue, &base, None);
    create(&queue, &over, Some(&base));
    let mut device = open_path(&queue, &base, true, true).unwrap();
    let is_free = |path, write| open_path(&queue, path, write, true).is_ok();
    assert!(!is_free(&base, false));
    let overlay = open_path(&queue, &over, true, true).unwrap();
    queue.block_on(device.put_on_top(&queue, overlay)).unwrap();
    assert!(is_free(&base, false) && !is_free(&base, true) && !is_free(&over, false));
    // While another program reads the base, it cannot be written.
    let reader = open_path(&queue, &base, false, true).unwrap();
    let error = queue.block_on(device.take_off_top(&queue)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    queue.block_on(fill(&device, &queue, 1, 1)).unwrap();
    drop(reader);
    queue.block_on(device.commit_top(&queue)).unwrap();
    let overlay = queue.block_on(device.take_off_top(&queue)).unwrap();
    assert!(!is_free(&base, false) && !is_free(&over, false));
    queue.block_on(overlay.close(&queue)).unwrap();
    assert!(is_free(&over, true));
    assert_eq!(queue.block_on(byte(&device, &queue, 1)), 1);
    queue.block_on(device.close(&queue)).unwrap();
    assert!(is_free(&base, true));
}

#[test]
fn an_exchange_that_is_dropped_leaves_a_whole_chain() {
    let options = QueueOptions::default().engine(EngineKind::Threads);
    let queue = Queue::new(options).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (mut has_ended, mut polls) = (false, 1);
    while !has_ended {
        let [base, over] =
            ["base", "over"].map(|name| folder.path().join(format!("{name}{polls}")));
        create(&queue, &base, None);
        create(&queue, &over, Some(&base));
        let shared = SharedDevice::new(open_path(&queue, &base, true, true).unwrap());
        queue.block_on(async {
            let device = shared.enter().await.unwrap();
            fill(&device, &queue, 1, 1).await.unwrap();
            device.flush(&queue).await.unwrap();
        });
        let overlay = open_path(&queue, &over, true, true).unwrap();
        {
            let change = shared.change(async |device| {
                device.put_on_top(&queue, overlay).await?;
                fill(device, &queue, 1, 2).await?;
                device.commit_top(&queue).await?;
                device.take_off_top(&queue).await
            });
            let mut change = pin!(change);
            let mut left = polls;
            queue.block_on(poll_fn(|context| {
                left -= 1;
                match change.as_mut().poll(context) {
                    Poll::Ready(result) => {
                        result.unwrap();
                        has_ended = true;
                        Poll::Ready(())
                    }
                    Poll::Pending if left == 0 => Poll::Ready(()),
                    Poll::Pending => Poll::Pending,
                }
            }));
        }
        let (on_top, is) = queue.block_on(async {
            let device = shared.enter().await.unwrap();
            let is = byte(&device, &queue, 1).await;
            assert!(is == 1 || is == 2);
            (device.layers().len() == 2, is)
        });
        drop(shared);
        // What is on the disk opens, and has what was durable.
        let top = if on_top { &over } else { &base };
        let device = open_path(&queue, top, false, false).unwrap();
        let stored = queue.block_on(byte(&device, &queue, 1));
        assert!(stored == is || stored == 1, "{stored} {is} after {polls}");
        polls += 1;
    }
    assert!(polls > 10, "{polls}");
}

/// Notes what it is told, and refuses changes of a cluster.
#[derive(Debug, Default)]
struct Notes {
    before: Mutex<Vec<(Range<u64>, u8)>>,
    after: Mutex<Vec<Range<u64>>>,
    refused: Option<u64>,
}

impl ChangeHook for Notes {
    fn before<'a>(
        &'a self,
        device: &'a Device,
        queue: &'a Queue,
        range: Range<u64>,
    ) -> HookFuture<'a> {
        Box::pin(async move {
            let cluster = range.start / CLUSTER;
            if self.refused == Some(cluster) {
                return Err(Error::from(full()));
            }
            let old = byte(device, queue, cluster).await;
            self.before.lock().unwrap().push((range, old));
            Ok(())
        })
    }

    fn after(&self, range: Range<u64>) {
        self.after.lock().unwrap().push(range);
    }
}

fn full() -> std::io::Error {
    std::io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error())
}

#[test]
fn a_hook_sees_each_change_before_and_after() {
    let queue = queue();
    let base = make(&queue, SIZE, None);
    let mut device = open(&queue, &base, true);
    queue.block_on(fill(&device, &queue, 1, 1)).unwrap();
    let notes = Arc::new(Notes {
        refused: Some(3),
        ..Notes::default()
    });
    let hook: Arc<dyn ChangeHook> = notes.clone();
    device.add_hook(hook.clone());
    let cluster = |n: u64| n * CLUSTER..(n + 1) * CLUSTER;
    queue.block_on(async {
        fill(&device, &queue, 1, 2).await.unwrap();
        let zeroed = device.write_zeroes(&queue, CLUSTER, CLUSTER, Zeroing::Unmap);
        zeroed.await.unwrap();
        device.discard(&queue, 2 * CLUSTER, CLUSTER).await.unwrap();
        let error = fill(&device, &queue, 3, 9).await.unwrap_err();
        assert_eq!(error.to_string(), Error::from(full()).to_string());
        assert_eq!(byte(&device, &queue, 3).await, 0);
        device.flush(&queue).await.unwrap();
    });
    let seen = std::mem::take(&mut *notes.before.lock().unwrap());
    let first = CLUSTER..CLUSTER + 4096;
    assert_eq!(seen, [(first.clone(), 1), (cluster(1), 2), (cluster(2), 0)]);
    let over = std::mem::take(&mut *notes.after.lock().unwrap());
    assert_eq!(over, [first, cluster(1), cluster(2)]);
    // A resize changes what it cuts off; an overlay changes nothing.
    queue.block_on(async {
        let resized = device.resize(&queue, SIZE - CLUSTER, Default::default());
        resized.await.unwrap();
        let over = make_over(&queue);
        device.put_on_top(&queue, over).await.unwrap();
        fill(&device, &queue, 1, 5).await.unwrap();
    });
    let over = std::mem::take(&mut *notes.after.lock().unwrap());
    assert_eq!(over, [SIZE - CLUSTER..SIZE, CLUSTER..CLUSTER + 4096]);
    assert!(device.remove_hook(&hook) && !device.remove_hook(&hook));
    queue.block_on(fill(&device, &queue, 3, 9)).unwrap();
    queue.block_on(device.close(&queue)).unwrap();
}

/// An overlay for the smaller disk. Another queue makes it: this one is driven.
fn make_over(_: &Queue) -> Device {
    let queue = queue();
    let storage = make(&queue, SIZE - CLUSTER, Some("base"));
    open(&queue, &storage, true)
}

/// A device that is described by options.
fn open_as(queue: &Queue, text: &str, options: OpenOptions) -> Result<Device> {
    Device::open(queue, &Source::Options(text.into()), &options)
}

#[test]
fn filters_stay_where_they_were_put() {
    let (queue, folder) = (queue(), tempfile::tempdir().unwrap());
    let [base, middle, over, other] =
        ["base", "middle", "over", "other"].map(|name| folder.path().join(name));
    create(&queue, &base, None);
    create(&queue, &middle, Some(&base));
    create(&queue, &over, Some(&middle));
    create(&queue, &other, None);
    let mut device = open_path(&queue, &base, true, true).unwrap();
    queue.block_on(fill(&device, &queue, 1, 1)).unwrap();
    queue.block_on(device.close(&queue)).unwrap();
    let copying = OpenOptions::default()
        .format(Some(Format::QCOW2))
        .write(true)
        .copy_on_read(true);
    let open = |path: &Path, options: &OpenOptions| {
        Device::open(&queue, &Source::Name(path.into()), options).unwrap()
    };
    device = open(&middle, &copying);
    // One with a filter of its own is not put below that.
    let alone = copying.clone().no_backing(true);
    let refused = device.put_on_top(&queue, open(&over, &alone));
    let error = queue.block_on(refused).unwrap_err();
    assert!(error.to_string().contains("filters"), "{error}");
    let overlay = open_path(&queue, &over, true, true).unwrap();
    queue.block_on(device.put_on_top(&queue, overlay)).unwrap();
    let depth = async |device: &Device, cluster: u64| {
        let status = device.status(&queue, cluster * CLUSTER, CLUSTER);
        status.await.unwrap().depth
    };
    queue.block_on(async {
        assert_eq!(depth(&device, 1).await, 2);
        assert_eq!(byte(&device, &queue, 1).await, 1);
        assert_eq!(depth(&device, 1).await, 0, "the filter is gone");
        device.commit_top(&queue).await.unwrap();
        let top = device.take_off_top(&queue).await.unwrap();
        top.close(&queue).await.unwrap();
        fill(&device, &queue, 1, 3).await.unwrap();
        assert_eq!(byte(&device, &queue, 1).await, 3);
    });
    // A filter over a chain goes with it, unless it writes.
    let name = Some(other.as_os_str());
    let below = open(&other, &alone);
    let refused = device.replace_below(&queue, Some(below), name, Some("qcow2"));
    let error = queue.block_on(refused).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    let text = format!(
        "driver=preallocate,file.driver=qcow2,file.file.filename={}",
        other.display()
    );
    let below = open_as(&queue, &text, OpenOptions::default().write(true)).unwrap();
    let replaced = device.replace_below(&queue, Some(below), name, Some("qcow2"));
    drop(queue.block_on(replaced).unwrap());
    let shown = device.layers()[1].whole_spec().display_name();
    assert!(shown.to_string_lossy().contains("preallocate"), "{shown:?}");
    queue.block_on(async {
        fill(&device, &queue, 2, 2).await.unwrap();
        device.commit_top(&queue).await.unwrap();
        let top = device.take_off_top(&queue).await.unwrap();
        top.close(&queue).await.unwrap();
        fill(&device, &queue, 4, 4).await.unwrap();
        for (cluster, is) in [(1, 3), (2, 2), (3, 0), (4, 4)] {
            assert_eq!(byte(&device, &queue, cluster).await, is, "{cluster}");
        }
        device.close(&queue).await.unwrap();
    });
}

#[test]
fn compress_stays_over_what_can_be_compressed() {
    let (queue, folder) = (queue(), tempfile::tempdir().unwrap());
    let [base, over] = ["base", "over"].map(|name| folder.path().join(name));
    std::fs::write(&base, vec![7; SIZE as usize]).unwrap();
    create(&queue, &over, Some(&base));
    let text = format!(
        "driver=compress,file.driver=qcow2,file.file.filename={}",
        over.display()
    );
    let options = OpenOptions::default().write(true).no_backing(true);
    let mut device = open_as(&queue, &text, options.clone()).unwrap();
    let raw = Source::Name(base.clone().into());
    let raw = Device::open(&queue, &raw, &options.format(Some(Format::RAW))).unwrap();
    queue.block_on(async {
        let name = Some(base.as_os_str());
        let replaced = device.replace_below(&queue, Some(raw), name, Some("raw"));
        assert!(replaced.await.unwrap().is_none());
        fill(&device, &queue, 1, 1).await.unwrap();
        device.commit_top(&queue).await.unwrap();
        let error = device.take_off_top(&queue).await.map(drop).unwrap_err();
        let text = "Compression is not supported for underlying format: raw";
        assert_eq!(error.to_string(), text);
        fill(&device, &queue, 2, 2).await.unwrap();
        for (cluster, is) in [(1, 1), (2, 2), (3, 7)] {
            assert_eq!(byte(&device, &queue, cluster).await, is, "{cluster}");
        }
        device.close(&queue).await.unwrap();
    });
}

#[test]
fn a_live_bitmap_is_live_again_when_its_image_is_written_again() {
    let queue = queue();
    let (base, over) = (make(&queue, SIZE, None), make(&queue, SIZE, Some("base")));
    let mut device = open(&queue, &base, true);
    let overlay = open(&queue, &over, true);
    queue.block_on(async {
        let added = device.bitmap_add(&queue, "b", Some(CLUSTER), true);
        added.await.unwrap();
        fill(&device, &queue, 1, 1).await.unwrap();
        let live = device.live_bitmap(&queue, "b").await.unwrap();
        device.put_on_top(&queue, overlay).await.unwrap();
        fill(&device, &queue, 2, 2).await.unwrap();
        // It records what its own image says.
        let later = device.live_bitmap(&queue, "b").await.unwrap();
        let clusters = |bits: &zebu::DirtyBits| -> Vec<u64> {
            let ranges = bits.ranges();
            ranges
                .flat_map(|r| r.start / CLUSTER..r.end / CLUSTER)
                .collect()
        };
        assert_eq!((clusters(&live), clusters(&later)), (vec![1], vec![1]));
        device.commit_top(&queue).await.unwrap();
        drop(device.take_off_top(&queue).await.unwrap());
        fill(&device, &queue, 4, 4).await.unwrap();
        assert_eq!(clusters(&live), [1, 2, 4]);
        assert_eq!(clusters(&later), [1, 2, 4]);
        device.close(&queue).await.unwrap();
    });
    assert_eq!(dirty(&queue, &base), [1, 2, 4]);
}

/// The image below is smaller, and a dropped commit leaves it at some point of its enlargement.
#[test]
fn a_commit_that_is_dropped_may_be_repeated() {
    let options = QueueOptions::default().engine(EngineKind::Threads);
    let queue = Queue::new(options).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (mut has_ended, mut polls) = (false, 1);
    while !has_ended {
        let [base, over] =
            ["base", "over"].map(|name| folder.path().join(format!("{name}{polls}")));
        create(&queue, &base, None);
        create(&queue, &over, Some(&base));
        let mut device = open_path(&queue, &base, true, true).unwrap();
        let overlay = open_path(&queue, &over, true, true).unwrap();
        // With an L1 table of another size.
        let larger = SIZE + (5 << 30);
        let last = larger / CLUSTER - 1;
        queue.block_on(async {
            fill(&device, &queue, 1, 1).await.unwrap();
            device.put_on_top(&queue, overlay).await.unwrap();
            device
                .resize(&queue, larger, Default::default())
                .await
                .unwrap();
            fill(&device, &queue, last, 2).await.unwrap();
        });
        {
            let mut commit = pin!(device.commit_top(&queue));
            let mut left = polls;
            queue.block_on(poll_fn(|context| {
                left -= 1;
                match commit.as_mut().poll(context) {
                    Poll::Ready(result) => {
                        result.unwrap();
                        has_ended = true;
                        Poll::Ready(())
                    }
                    Poll::Pending if left == 0 => Poll::Ready(()),
                    Poll::Pending => Poll::Pending,
                }
            }));
        }
        queue.block_on(async {
            fill(&device, &queue, 2, 3).await.unwrap();
            device.commit_top(&queue).await.unwrap();
            let top = device.take_off_top(&queue).await.unwrap();
            top.close(&queue).await.unwrap();
            for (cluster, is) in [(1, 1), (2, 3), (3, 0), (last, 2)] {
                assert_eq!(byte(&device, &queue, cluster).await, is, "{polls}");
            }
            device.close(&queue).await.unwrap();
        });
        let options = OpenOptions::default().check(true);
        let device = Device::open(&queue, &Source::Name(base.into()), &options).unwrap();
        let image = device.top().as_qcow2().unwrap();
        let mut say = |message| println!("{message}");
        let checked = zebu::jobs::check(&queue, image, &mut say, |_| {});
        assert_eq!(queue.block_on(checked).unwrap().corruptions, 0, "{polls}");
        polls += 1;
    }
    assert!(polls > 10, "{polls}");
}
