//! How the queue of an abandoned request is driven afterwards: by its descriptor, by hand, by
//! `block_on`, or not at all, since its thread waits for something else or has dropped the queue
//! with spawned requests. Requests and a snapshot of another thread's queue must end. Then no
//! descriptor of the image may be open, and no lock be held.

use super::*;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};

use crate::driven_queue::{Driven, WAYS, is_readable};
use zebu::block::SharedDevice;

/// What the queue's thread does after it has abandoned the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It drives the queue, in which further requests are spawned.
    Drives,
    /// It waits for something else. The queue says that this is all right.
    Waits,
    /// It drops the queue with spawned requests, and waits for something else.
    Drops,
}

const THEN: [Then; 3] = [Then::Drives, Then::Waits, Then::Drops];

struct Case<'a> {
    origin: &'a Origin,
    engine: EngineKind,
    way: Driven,
    then: Then,
    victim: What,
    /// Polls after which the victim is dropped.
    left: usize,
}

impl Case<'_> {
    fn queue(&self) -> Queue {
        let options = QueueOptions::default().engine(self.engine);
        Queue::new(options).unwrap()
    }

    /// The thread of the victim. Returns whether it was abandoned.
    fn first(
        &self,
        device: &SharedDevice,
        abandoned: Sender<()>,
        end: futures_channel::oneshot::Receiver<()>,
    ) -> bool {
        let queue = self.queue();
        if self.way == Driven::Descriptor {
            self.events_are_reported(&queue);
        }
        let is_abandoned = {
            let device = self.way.run(&queue, device.enter()).unwrap();
            // A flush has something to do.
            let write = start(&device, &queue, &What::Write(0..1, 5));
            self.way.run(&queue, write).unwrap();
            let mut victim = Task::new(&device, &queue, self.victim.clone());
            let mut polls = 0;
            while polls < self.left && victim.running.is_some() {
                match victim.woken.0.load(Ordering::SeqCst) {
                    true => {
                        polls += 1;
                        drop(victim.poll());
                    }
                    false => self.way.step(&queue, &victim.woken),
                }
            }
            victim.running.is_some()
        };
        let spawn = |what: What| {
            let (device, queue_) = (device.clone(), queue.clone());
            drop(queue.spawn(async move {
                if let Ok(device) = device.enter().await {
                    let _ = start(&device, &queue_, &what).await;
                }
            }));
        };
        match self.then {
            Then::Drives => {
                spawn(What::Write(2..3, 6));
                abandoned.send(()).unwrap();
                self.way.run(&queue, end).unwrap();
            }
            Then::Waits => {
                assert!(queue.is_idle(), "nothing was spawned");
                abandoned.send(()).unwrap();
                park_until(end);
            }
            Then::Drops => {
                for what in [What::Flush, What::Write(2..3, 6), What::Read(0..4)] {
                    spawn(what);
                }
                self.way.step(&queue, &Woken(AtomicBool::new(true)));
                drop(queue);
                abandoned.send(()).unwrap();
                park_until(end);
            }
        }
        is_abandoned
    }

    /// What makes the descriptor readable does so at once.
    fn events_are_reported(&self, queue: &Queue) {
        // The kernel forwards the wake-up of an eventfd to Linux AIO later.
        let within = match self.engine {
            EngineKind::Native => 60_000,
            _ => 0,
        };
        while queue.turn() {}
        for round in 0..4 {
            let (wake, woken) = futures_channel::oneshot::channel::<()>();
            let waits = queue.spawn(woken);
            assert!(is_readable(queue, within), "round {round}: it was spawned");
            while queue.turn() {}
            std::thread::scope(|scope| scope.spawn(|| wake.send(()).unwrap()).join().unwrap());
            assert!(is_readable(queue, within), "round {round}: it was woken");
            while queue.turn() {}
            let flags = rustix::event::EventfdFlags::NONBLOCK;
            let kick = Arc::new(rustix::event::eventfd(0, flags).unwrap());
            let (queue_, kick_) = (queue.clone(), kick.clone());
            let kicked = queue.spawn(async move { queue_.readable(&*kick_).await });
            while queue.turn() {}
            rustix::io::write(&*kick, &1u64.to_ne_bytes()).unwrap();
            assert!(is_readable(queue, within), "round {round}: it was kicked");
            Driven::Descriptor.run(queue, kicked).unwrap();
            Driven::Descriptor.run(queue, waits).unwrap();
        }
    }

    /// The requests of the other thread, which must end.
    async fn second(&self, queue: &Queue, device: &SharedDevice) -> zebu::Result<()> {
        {
            let device = device.enter().await?;
            start(&device, queue, &What::Write(8..9, 7)).await?;
            start(&device, queue, &What::Flush).await?;
        }
        if self.origin.format == Format::QCOW2 {
            device.snapshot_create(queue, "s").await?;
        }
        Ok(())
    }

    /// Returns false if the request ended before its `left`th poll.
    fn run(&self, path: &Path) -> bool {
        std::fs::write(path, &self.origin.bytes).unwrap();
        let source = Source::Name(path.into());
        let queue = self.queue();
        let open = || Device::open(&queue, &source, &self.origin.options);
        let device = SharedDevice::new(open().unwrap());
        let (abandoned, is_abandoned) = channel();
        let (end, ends) = futures_channel::oneshot::channel();
        let abandoned = std::thread::scope(|scope| {
            let shared = device.clone();
            let first = scope.spawn(move || self.first(&shared, abandoned, ends));
            is_abandoned.recv().unwrap();
            let limit = async { queue.sleep(Duration::from_secs(60)).await.unwrap() };
            let (mut limit, mut requests) = (
                std::pin::pin!(limit),
                Box::pin(self.second(&queue, &device)),
            );
            queue.block_on(poll_fn(|context| {
                if let Poll::Ready(result) = requests.as_mut().poll(context) {
                    result.unwrap();
                    return Poll::Ready(());
                }
                // The other thread cannot be ended.
                if limit.as_mut().poll(context).is_ready() {
                    eprintln!("the other thread waits for ever: {:?}", self.victim);
                    std::process::abort();
                }
                Poll::Pending
            }));
            end.send(()).unwrap();
            first.join().unwrap()
        });
        queue.block_on(device.close(&queue)).unwrap();
        drop(device);
        assert_eq!(descriptors_of(path), 0, "descriptors of the image are open");
        // Its locks are free.
        let again = open().unwrap();
        queue.block_on(again.close(&queue)).unwrap();
        progress();
        abandoned
    }
}

/// Waits without a queue.
fn park_until(end: futures_channel::oneshot::Receiver<()>) {
    struct Thread(std::thread::Thread);
    impl Wake for Thread {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Thread(std::thread::current())));
    let mut end = std::pin::pin!(end);
    while end
        .as_mut()
        .poll(&mut Context::from_waker(&waker))
        .is_pending()
    {
        std::thread::park();
    }
}

/// How many descriptors of this process are of a file.
fn descriptors_of(path: &Path) -> usize {
    let path = path.canonicalize().unwrap();
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| *link == path).count()
}

#[test]
fn abandoned_by_a_queue_that_is_driven_or_not() {
    let _watchdog = Watchdog::new("queues that are driven in each way");
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut seeds = cases(6, "requests abandoned, by how their queue is driven");
    while let Some(seed) = seeds.next() {
        let origin = Origin::new(seed);
        if origin.large || origin.backing.is_some() {
            continue;
        }
        let mut rng = Rng::new(seed);
        // What the other thread writes is not in a block that this request may hold.
        let apart = match origin.other {
            Some(_) => origin.clusters(&(0..16)),
            None => 0..16,
        };
        let random = origin.request(&mut rng, &[apart], None);
        for engine in engines() {
            for (way, then) in WAYS
                .into_iter()
                .flat_map(|way| THEN.map(|then| (way, then)))
            {
                for victim in [What::Flush, random.clone()] {
                    for left in (0..).step_by(2) {
                        let _note = PrintOnPanic(format!(
                            "seed {seed}: {engine} by {way:?}, then {then:?}; {victim:?} after {left} polls"
                        ));
                        seeds.add(1);
                        let case = Case {
                            origin: &origin,
                            engine,
                            way,
                            then,
                            victim: victim.clone(),
                            left: left + (seed % 2) as usize,
                        };
                        if !case.run(&folder.path().join("image")) {
                            break;
                        }
                    }
                }
            }
        }
    }
}
