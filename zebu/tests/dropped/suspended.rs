//! A request that is dropped, or no longer polled, while one of its operations is suspended.
//! Meanwhile other requests free the clusters that it uses and allocate them again. Then the
//! operation goes on.

use super::*;
use zebu::internal::blkdebug::{Blkdebug, Event};

const TAG: &str = "victim";
/// Turns without an end after which a request waits for the suspended one.
const WAITS: usize = 60;

/// Runs requests one after the other. Those that wait for the suspended one go to `waiting`, and the
/// ranges that they change at an unknown time to `taken`.
fn chain<'a>(
    origin: &Origin,
    rng: &mut Rng,
    device: &'a Device,
    [first, second]: [&'a Queue; 2],
    model: &mut Model,
    taken: &mut Vec<Range<usize>>,
    waiting: &mut Vec<Task<'a>>,
) {
    // Often everything is freed first.
    let all = 0..origin.sectors();
    let frees_all = taken.is_empty() && rng.one_in(2);
    for nth in 0..18 {
        let what = match nth {
            0 if frees_all => match rng.below(3) {
                0 => What::Write(all.clone(), 1),
                1 => What::Zero(all.clone(), Zeroing::Unmap),
                _ => What::Discard(all.clone()),
            },
            1 | 2 | 7 | 12 | 17 => What::Flush,
            _ if taken.is_empty() && rng.one_in(3) => {
                let start = rng.index(origin.sectors() / origin.cluster) * origin.cluster;
                What::Compressed(start..start + origin.cluster, 10 + nth)
            }
            _ => origin.request(rng, taken, None),
        };
        if origin.does_nothing(&what) {
            continue;
        }
        model.begin(&what);
        let mut task = vec![Task::new(device, second, what.clone())];
        let mut result = None;
        for _ in 0..WAITS {
            turn(first, &mut [], &mut |_, _| ());
            turn(second, &mut task, &mut |_, done| result = Some(done));
            if result.is_some() {
                break;
            }
        }
        match result {
            Some(done) => {
                let ever = model.ever.clone();
                ended(model, &ever, &what, done);
            }
            None => {
                taken.extend(what.change().map(|(range, _)| range));
                waiting.append(&mut task);
            }
        }
    }
}

/// Waits for all of them.
fn finish(
    [first, second]: [&Queue; 2],
    own: &mut [Task<'_>],
    waiting: &mut [Task<'_>],
    model: &mut Model,
) {
    let mut turns = Turns::new(&Delayed);
    while own.iter().chain(&*waiting).any(|t| t.running.is_some()) {
        let ever = model.ever.clone();
        turn(first, own, &mut |what, done| {
            assert!(done.is_ok() || allowed(what, &done.unwrap_err()));
        });
        turn(second, waiting, &mut |what, done| {
            ended(model, &ever, what, done)
        });
        turns.next(own, waiting);
    }
}

/// Drops requests. The drop of one that is flushing a file waits for that, so the operation goes on
/// then.
fn drop_all(debug: &Blkdebug, own: &mut Vec<Task<'_>>) {
    let (dropped, is_dropped) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if is_dropped.recv_timeout(Duration::from_millis(100)).is_err() {
                debug.resume_all();
            }
        });
        own.clear();
        // That thread may have ended.
        let _ = dropped.send(());
    });
}

/// Suspends `victim` at an event and runs others. Returns false if the event was not met.
fn suspended(origin: &Origin, seed: u64, victim: &What, event: Event, dropped: bool) -> bool {
    let mut rng = Rng::new(seed ^ (event as u64) << 32);
    let disk = Delayed.storage("image", &origin.bytes, &mut rng);
    let debug = Arc::new(Blkdebug::new(disk, Vec::new(), Default::default()).unwrap());
    let (first, second) = (Delayed.queue(), Delayed.queue());
    let device = origin.open(&second, debug.clone()).unwrap();
    let mut model = origin.model.clone();

    model.begin(victim);
    let mut own = Task::all(&device, &first, vec![victim.clone()]);
    let mut turns = Turns::new(&Delayed);
    for _ in 0..=rng.below(3) {
        debug.suspend_at(event, TAG);
        debug.resume(TAG);
        while own[0].running.is_some() && !debug.is_suspended(TAG) {
            turn(&first, &mut own, &mut |what, done| {
                assert!(done.is_ok() || allowed(what, &done.unwrap_err()));
            });
            turns.next(&own, &[]);
        }
    }
    if !debug.is_suspended(TAG) {
        return false;
    }
    model.end(victim, false);
    // Those that wait, and the ranges that are changed at an unknown time.
    let mut waiting: Vec<Task<'_>> = Vec::new();
    let mut taken: Vec<Range<usize>> = Vec::new();
    if dropped {
        drop_all(&debug, &mut own);
    } else {
        own[0].left = Some(0);
        taken.extend(victim.change().map(|(range, _)| range));
    }

    let queues = [&first, &second];
    chain(
        origin,
        &mut rng,
        &device,
        queues,
        &mut model,
        &mut taken,
        &mut waiting,
    );
    debug.resume_all();
    own.iter_mut().for_each(|task| task.left = None);
    finish(queues, &mut own, &mut waiting, &mut model);
    taken.clear();
    chain(
        origin,
        &mut rng,
        &device,
        queues,
        &mut model,
        &mut taken,
        &mut waiting,
    );
    finish(queues, &mut own, &mut waiting, &mut model);
    drop((own, waiting));
    // Small reads, which use the cache of inflated clusters.
    for start in (0..origin.sectors()).step_by(origin.cluster) {
        let what = What::Read(start..start + 1);
        let read = drive(&Delayed, &queues, super::start(&device, &second, &what)).unwrap();
        Model::check(&model.now[start..start + 1], &read, "small read");
    }
    after(
        &Delayed,
        origin,
        &mut rng,
        device,
        debug,
        &queues,
        model,
        victim,
        How::Drop,
    );
    true
}

#[test]
fn suspended_while_others_go_on() {
    let _watchdog = Watchdog::new("requests that are suspended");
    let mut seeds = cases(25, "requests suspended");
    while let Some(seed) = seeds.next() {
        let origin = Origin::new(seed);
        if origin.large {
            continue;
        }
        let mut rng = Rng::new(seed);
        for _ in 0..4 {
            let victim = origin.request(&mut rng, &[], None);
            let dropped = !rng.one_in(4);
            for &event in Event::ALL {
                let _note = PrintOnPanic(format!(
                    "seed {seed}: {victim:?} at {event:?}, dropped: {dropped}; {}",
                    origin.note
                ));
                seeds.add(u64::from(suspended(&origin, seed, &victim, event, dropped)));
            }
        }
    }
}
