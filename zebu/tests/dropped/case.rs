//! One case: a request that is abandoned among others, and the conditions that must hold afterwards.

use super::*;

/// Whether an error is expected: a compressed write to an allocated cluster. Free clusters of the request are written.
pub fn allowed(what: &What, error: &zebu::Error) -> bool {
    matches!(what, What::Compressed(..))
        && matches!(error, zebu::Error::Io(e) if e.raw_os_error() == Some(5))
}

/// Whether this may be because a change of the header has ended in the middle, with its queue. An image
/// within another one, or over a filter, refuses writes then, and is in one of its states when it is opened again
/// (docs/reliability.md, "Known limitations").
fn may_refuse(image: &Arc<dyn Storage>, how: How, error: &zebu::Error) -> bool {
    how == How::End && image.is_stacked() && error.errno() == 5
}

/// Records the result of a request.
pub fn ended(model: &mut Model, ever: &[BTreeSet<u8>], what: &What, done: Done) {
    progress();
    match (what, done) {
        (What::Read(range), Ok(bytes)) => {
            Model::check(&ever[range.clone()], &bytes, &format!("{what:?}"));
        }
        (_, Ok(_)) => model.end(what, true),
        (_, Err(e)) if allowed(what, &e) => model.end(what, false),
        (_, Err(e)) => panic!("{what:?}: {e}"),
    }
}

/// Runs one case. Returns false if the request ended before its `left`th poll.
pub fn case(
    place: &dyn Place,
    origin: &Origin,
    seed: u64,
    victim: &What,
    left: usize,
    how: How,
) -> bool {
    let mut rng = Rng::new(seed ^ (left as u64) << 32);
    let image = place.storage("image", &origin.bytes, &mut rng);
    let (first, second) = (place.queue(), place.queue());
    let device = origin.open(&second, image.clone()).unwrap();
    let mut model = origin.model.clone();
    if origin.large {
        for sector in (0..65 * 64).step_by(64) {
            let what = What::Write(sector..sector + 1, 4);
            drive(place, &[&second], start(&device, &second, &what)).unwrap();
            model.end(&what, true);
        }
        model.ever = model.now.clone();
    }

    // Requests that change something have adjacent ranges. They avoid the clusters that the
    // abandoned request may hold for long.
    let mut dice = Rng::new(seed);
    let mut taken: Vec<Range<usize>> = Vec::new();
    if let Some((range, _)) = victim.change() {
        taken.push(match how {
            How::Drop | How::End => range,
            How::Keep | How::Forget => origin.clusters(&range),
        });
    }
    let near = match victim {
        What::Flush => None,
        What::Read(range) | What::Status(range) => Some(range.start),
        other => other.change().map(|(range, _)| range.start),
    };
    let mut requests = [Vec::new(), Vec::new()];
    for _ in 0..2 + dice.below(8) {
        let what = origin.request(&mut dice, &taken, near);
        taken.extend(what.change().map(|(range, _)| range));
        requests[dice.below(2) as usize].push(what);
    }
    let nth = dice.below(requests[0].len() as u64 + 1) as usize;
    requests[0].insert(nth, victim.clone());
    requests.iter().flatten().for_each(|what| model.begin(what));
    let ever = model.ever.clone();

    let [on_first, on_second] = requests;
    let mut own = Task::all(&device, &first, on_first);
    let mut beside = Task::all(&device, &second, on_second);
    own[nth].left = Some(left);
    let mut turns = Turns::new(place);
    while own[nth].running.is_some() && own[nth].left != Some(0) {
        match rng.below(2) {
            0 => turn(&first, &mut own, &mut |what, done| {
                ended(&mut model, &ever, what, done)
            }),
            _ => turn(&second, &mut beside, &mut |what, done| {
                ended(&mut model, &ever, what, done);
            }),
        }
        turns.next(&own, &beside);
    }
    let abandoned = own[nth].running.is_some();
    if abandoned {
        model.end(victim, false);
    }
    if abandoned && how == How::End {
        for task in own.iter().filter(|task| task.running.is_some()) {
            model.end(&task.what, false);
        }
        drop(own);
        drop(first);
        let mut turns = Turns::new(place);
        while beside.iter().any(|task| task.running.is_some()) {
            turn(&second, &mut beside, &mut |what, done| match done {
                Err(e) if may_refuse(&image, how, &e) => model.end(what, false),
                done => ended(&mut model, &ever, what, done),
            });
            turns.next(&[], &beside);
        }
        drop(beside);
        after(
            place,
            origin,
            &mut rng,
            device,
            image,
            &[&second],
            model,
            victim,
            how,
        );
        return true;
    }
    if abandoned {
        match how {
            How::Drop => own[nth].running = None,
            How::Forget => std::mem::forget(own[nth].running.take()),
            How::Keep | How::End => {}
        }
    }
    // All other requests end first, then the one that was kept.
    for kept in [abandoned && how == How::Keep, false] {
        if !kept {
            own[nth].left = None;
        }
        let mut turns = Turns::new(place);
        loop {
            let count = own.iter().chain(&beside);
            let count = count.filter(|task| task.running.is_some()).count();
            if count == usize::from(kept) {
                break;
            }
            turn(&first, &mut own, &mut |what, done| {
                ended(&mut model, &ever, what, done)
            });
            turn(&second, &mut beside, &mut |what, done| {
                ended(&mut model, &ever, what, done)
            });
            turns.next(&own, &beside);
        }
    }
    drop((own, beside));
    let queues = [&first, &second];
    after(
        place, origin, &mut rng, device, image, &queues, model, victim, how,
    );
    abandoned
}

/// Counts turns, and reports a hang.
pub struct Turns {
    pub left: Option<usize>,
}

impl Turns {
    pub fn new(place: &dyn Place) -> Turns {
        Turns {
            left: place.is_prompt().then_some(TURNS),
        }
    }

    pub fn next(&mut self, own: &[Task<'_>], beside: &[Task<'_>]) {
        if let Some(left) = &mut self.left {
            *left -= 1;
            if *left < TURNS / 2 {
                // Give time to a thread that compresses.
                std::thread::sleep(Duration::from_millis(1));
            }
            let hang = own
                .iter()
                .chain(beside)
                .filter(|task| task.running.is_some());
            assert!(
                *left > 0,
                "hang: {:?}",
                hang.map(|t| &t.what).collect::<Vec<_>>()
            );
        }
    }
}

/// Runs one future on the last of these queues, and drives all.
pub fn drive<T>(place: &dyn Place, queues: &[&Queue], future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let woken = Arc::new(Woken(AtomicBool::new(true)));
    let waker = Waker::from(woken.clone());
    let mut turns = Turns::new(place);
    loop {
        let mut result = None;
        for (nth, queue) in queues.iter().enumerate() {
            let mut again = false;
            queue.block_on(poll_fn(|context| {
                if again {
                    return Poll::Ready(());
                }
                again = true;
                if nth + 1 == queues.len()
                    && woken.0.swap(false, Ordering::SeqCst)
                    && let Poll::Ready(value) =
                        future.as_mut().poll(&mut Context::from_waker(&waker))
                {
                    result = Some(value);
                }
                context.waker().wake_by_ref();
                Poll::Pending
            }));
        }
        if let Some(value) = result {
            return value;
        }
        turns.next(&[], &[]);
    }
}

/// Verifies that the device still works and that its content is right.
#[allow(clippy::too_many_arguments)]
pub fn after(
    place: &dyn Place,
    origin: &Origin,
    rng: &mut Rng,
    device: Device,
    image: Arc<dyn Storage>,
    queues: &[&Queue],
    mut model: Model,
    victim: &What,
    how: How,
) {
    let queue = *queues.last().unwrap();
    // A forgotten request holds its clusters for ever.
    let held = match (how, victim.change()) {
        (How::Forget, Some((range, _))) => vec![origin.clusters(&range)],
        _ => Vec::new(),
    };
    let all = What::Read(0..origin.sectors());
    for round in 0..3 {
        for _ in 0..4 {
            let what = origin.request(rng, &held, None);
            model.begin(&what);
            match drive(place, queues, start(&device, queue, &what)) {
                Ok(bytes) => {
                    if let What::Read(range) = &what {
                        Model::check(&model.ever[range.clone()], &bytes, "after");
                    }
                    model.end(&what, true);
                }
                Err(e) if allowed(&what, &e) => model.end(&what, false),
                Err(e) if may_refuse(&image, how, &e) => {
                    drop(device);
                    return opened_again(place, origin, image, queues, &model);
                }
                Err(e) => panic!("after, {what:?}: {e}"),
            }
        }
        match drive(place, queues, device.flush(queue)) {
            Ok(()) => {}
            Err(e) if may_refuse(&image, how, &e) => {
                drop(device);
                return opened_again(place, origin, image, queues, &model);
            }
            Err(e) => panic!("flush {round}: {e}"),
        }
    }
    let read = drive(place, queues, start(&device, queue, &all)).unwrap();
    Model::check(&model.now, &read, "after");
    if let Err(e) = drive(place, queues, device.close(queue)) {
        panic!("close: {e}");
    }
    // A forgotten future keeps the storage open.
    let reopened = origin.open(queue, image.clone()).unwrap();
    let read = drive(place, queues, start(&reopened, queue, &all)).unwrap();
    Model::check(&model.now, &read, "reopened");
    origin.check_bitmap(queue, &reopened, &read, how == How::Forget);
    drop(reopened);
    checked(origin, queue, image, how == How::Forget);
}

/// Verifies an image that refuses writes until it is opened again.
fn opened_again(
    place: &dyn Place,
    origin: &Origin,
    image: Arc<dyn Storage>,
    queues: &[&Queue],
    model: &Model,
) {
    let queue = *queues.last().unwrap();
    let reopened = origin.open(queue, image.clone()).unwrap();
    let all = What::Read(0..origin.sectors());
    let read = drive(place, queues, start(&reopened, queue, &all)).unwrap();
    Model::check(&model.ever, &read, "opened again");
    drop(reopened);
    checked(origin, queue, image, true);
}

/// Checks the image: no errors, and no leaks unless they are allowed.
pub fn checked(origin: &Origin, queue: &Queue, image: Arc<dyn Storage>, leaks: bool) {
    if origin.format == Format::RAW {
        return;
    }
    let options = OpenOptions::default()
        .inspect(true)
        .format(Some(origin.format));
    let device = Device::from_storage(queue, image, &options).unwrap();
    if let Some(other) = &origin.other {
        let sound = other.check(queue, device.top(), leaks);
        return sound.unwrap_or_else(|why| panic!("{why}"));
    }
    let Some(image) = device.top().as_qcow2() else {
        unreachable!("opened as qcow2");
    };
    let mut found = Vec::new();
    let report = queue
        .block_on(jobs::check(
            queue,
            image,
            &mut |message| found.push(format!("{message:?}")),
            |_| {},
        ))
        .unwrap();
    assert!(
        report.corruptions == 0 && report.check_errors == 0 && (leaks || report.leaks == 0),
        "{report:?} {found:?}"
    );
}
