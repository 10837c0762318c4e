//! A session whose only request is dropped: nothing after it mends what it has left.

use super::*;

/// The device is closed after a request that was dropped. Its bitmap is stored then, whatever the
/// request had marked.
#[test]
fn closed_after_a_dropped_request() {
    let _watchdog = Watchdog::new("a session whose only request is dropped");
    let mut seeds = cases(40, "sessions with a dropped request");
    while let Some(seed) = seeds.next() {
        let origin = Origin::new(seed);
        let mut rng = Rng::new(seed);
        for _ in 0..3 {
            let victim = origin.request(&mut rng, &[], None);
            for left in 0.. {
                let _note = PrintOnPanic(format!(
                    "seed {seed}: {victim:?} after {left} polls; {}",
                    origin.note
                ));
                seeds.add(1);
                if !only(&origin, seed, &victim, left) {
                    break;
                }
            }
        }
    }
}

/// Returns false if the request ended before its `left`th poll.
fn only(origin: &Origin, seed: u64, victim: &What, left: usize) -> bool {
    let mut rng = Rng::new(seed ^ (left as u64) << 32);
    let image = Delayed.storage("image", &origin.bytes, &mut rng);
    let queue = Delayed.queue();
    let device = origin.open(&queue, image.clone()).unwrap();
    let mut model = origin.model.clone();
    model.begin(victim);
    let mut own = Task::all(&device, &queue, vec![victim.clone()]);
    own[0].left = Some(left);
    let mut turns = Turns::new(&Delayed);
    while own[0].running.is_some() && own[0].left != Some(0) {
        turn(&queue, &mut own, &mut |what, done| {
            assert!(done.is_ok() || allowed(what, &done.unwrap_err()));
        });
        turns.next(&own, &[]);
    }
    let abandoned = own[0].running.is_some();
    model.end(victim, false);
    drop(own);
    if let Err(e) = drive(&Delayed, &[&queue], device.close(&queue)) {
        panic!("close: {e}");
    }
    let reopened = origin.open(&queue, image.clone()).unwrap();
    let all = What::Read(0..origin.sectors());
    let read = drive(&Delayed, &[&queue], start(&reopened, &queue, &all)).unwrap();
    Model::check(&model.now, &read, "reopened");
    origin.check_bitmap(&queue, &reopened, &read, false);
    drop(reopened);
    checked(origin, &queue, image, false);
    abandoned
}
