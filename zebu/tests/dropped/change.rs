//! Changes of the whole image that are dropped.

use super::*;

/// After a dropped change of the whole image, all writes fail, or the session continues. When the
/// image is opened again, the change has happened or not.
#[test]
fn changes_of_the_whole_image() {
    let _watchdog = Watchdog::new("changes of the whole image that are dropped");
    let mut seeds = cases(12, "changes of the whole image dropped");
    while let Some(seed) = seeds.next() {
        let origin = Origin::new(seed);
        if origin.format != Format::QCOW2 || origin.large {
            continue;
        }
        for kind in 0..6 {
            for left in 0.. {
                let _note = PrintOnPanic(format!("seed {seed}: change {kind} after {left} polls"));
                seeds.add(1);
                if whole(&origin, seed, kind, left) {
                    break;
                }
            }
        }
    }
}

/// Whether the change ended before it was dropped.
fn whole(origin: &Origin, seed: u64, kind: u32, left: usize) -> bool {
    let mut rng = Rng::new(seed ^ (left as u64) << 32);
    let image = Delayed.storage("image", &origin.bytes, &mut rng);
    let queue = Delayed.queue();
    let mut device = origin.open(&queue, image.clone()).unwrap();
    let size = device.size();
    let unit = (origin.cluster * SECTOR) as u64;
    let mut model = origin.model.clone();
    // Earlier requests, one of which is dropped: its task may still run.
    for _ in 0..3 {
        let what = origin.request(&mut rng, &[], None);
        model.begin(&what);
        let result = drive(&Delayed, &[&queue], start(&device, &queue, &what));
        match result {
            Ok(_) => model.end(&what, true),
            Err(e) => {
                assert!(allowed(&what, &e), "{what:?}: {e}");
                model.end(&what, false);
            }
        }
    }
    drive(&Delayed, &[&queue], device.flush(&queue)).unwrap();
    // This one is not durable, since its flush is dropped.
    let what = What::Write(0..origin.cluster.min(origin.sectors()), 78);
    model.begin(&what);
    drive(&Delayed, &[&queue], start(&device, &queue, &what)).unwrap();
    model.end(&what, false);
    let mut flush = Task::all(&device, &queue, vec![What::Flush]);
    flush[0].poll();
    drop(flush);
    let ended = {
        let name = zebu::qcow2::SnapshotName::IdOrName("new".into());
        let mut change: Pin<Box<dyn Future<Output = zebu::Result<()>>>> = match kind {
            0 => Box::pin(device.resize(&queue, size + 5 * unit, Preallocation::Off)),
            1 => Box::pin(device.resize(&queue, size / 2 / 512 * 512, Preallocation::Off)),
            2 => Box::pin(device.resize(&queue, size + 5 * unit, Preallocation::Metadata)),
            3 => Box::pin(device.snapshot_create(&queue, "new")),
            4 => Box::pin(device.make_empty(&queue)),
            _ => Box::pin(async {
                device.snapshot_create(&queue, "new").await?;
                device.snapshot_apply(&queue, &name).await?;
                device.snapshot_delete(&queue, &name).await
            }),
        };
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        let waker = Waker::from(woken.clone());
        let mut polls = 0;
        let mut turns = Turns::new(&Delayed);
        loop {
            if woken.0.swap(false, Ordering::SeqCst) {
                if polls == left {
                    break false;
                }
                polls += 1;
                let mut context = Context::from_waker(&waker);
                if let Poll::Ready(result) = change.as_mut().poll(&mut context) {
                    // (A snapshot of version 2 may be impossible to resize.)
                    drop(result);
                    break true;
                }
            }
            turn(&queue, &mut [], &mut |_, _| ());
            turns.next(&[], &[]);
        }
    };
    progress();
    // Reads succeed, a write and the close return.
    let most = device.size().min(size) as usize / SECTOR;
    let read = What::Read(0..most.min(origin.sectors() / 2));
    let bytes = drive(&Delayed, &[&queue], start(&device, &queue, &read)).unwrap();
    if kind != 4 {
        Model::check(&model.now, &bytes, "after a change");
    }
    let what = What::Write(0..1, 77);
    let written = drive(&Delayed, &[&queue], start(&device, &queue, &what));
    model.end(&what, written.is_ok());
    let _ = drive(&Delayed, &[&queue], device.close(&queue));
    // The next session.
    let device = origin.open(&queue, image.clone()).unwrap();
    let found = device.size();
    assert!(
        [size, size + 5 * unit, size / 2 / 512 * 512].contains(&found),
        "{found} bytes"
    );
    let read = What::Read(0..origin.sectors() / 2);
    let bytes = drive(&Delayed, &[&queue], start(&device, &queue, &read)).unwrap();
    if kind != 4 {
        Model::check(&model.now, &bytes, "reopened after a change");
    }
    drive(&Delayed, &[&queue], device.close(&queue)).unwrap();
    if kind < 3 || kind == 4 {
        checked(origin, &queue, image, true);
    }
    ended
}
