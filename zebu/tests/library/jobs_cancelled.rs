//! Guards against jobs that do not report progress, do not end when they are cancelled, or leave
//! another state than `zebu::jobs` promises.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use zebu::jobs::{
    AmendOptions, CheckReport, CreateQcow2, MeasureTarget, Preallocation, Progress, Qcow2Target,
    RepairMode, amend, check, create_qcow2, create_raw, measure, repair,
};
use zebu::storage::{Memory, Queue, QueueOptions};
use zebu::{Device, Error, Format, OpenOptions, Result};

fn queue() -> Queue {
    Queue::new(QueueOptions::default()).unwrap()
}

/// An image of 32 L2 tables.
fn options() -> CreateQcow2 {
    CreateQcow2::default()
        .size(1 << 20)
        .cluster_bits(9)
        .preallocation(Preallocation::Full)
}

fn image(queue: &Queue) -> Vec<u8> {
    let memory = Memory::new(Vec::new());
    let options = options();
    let create = create_qcow2(queue, &memory, None, &options, |_| {});
    queue.block_on(create).unwrap();
    memory.to_vec()
}

fn open(queue: &Queue, bytes: Vec<u8>, options: OpenOptions) -> Result<Device> {
    let options = options.format(Some(Format::QCOW2));
    let storage = Arc::new(Memory::new(bytes));
    Device::from_storage(queue, storage, &options)
}

/// Calls `job` until it ends. The callback stops it at its first call, then at its second, and so
/// on.
fn stop_everywhere<T>(
    mut job: impl FnMut(&mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<T>,
) {
    for stop in 1.. {
        let (mut calls, mut last) = (0, None);
        let result = job(&mut |now: Progress| {
            assert!(now.done <= now.total, "{now:?}");
            calls += 1;
            last = Some(now);
            match calls >= stop {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        let last = last.expect("progress is reported");
        match result {
            Err(e) => {
                assert_eq!(e.errno(), libc::ECANCELED, "{e}");
                assert_eq!(calls, stop, "the job continued after it was cancelled");
                assert!(last.done < last.total, "{last:?}");
            }
            Ok(_) => {
                assert_eq!(last.done, last.total);
                assert!(stop > 2, "stopped in {stop} places only");
                return;
            }
        }
    }
}

#[test]
fn a_cancelled_check_or_measure_changes_nothing() {
    let queue = queue();
    let bytes = image(&queue);
    let device = open(&queue, bytes, OpenOptions::default()).unwrap();
    let image = device.top().as_qcow2().unwrap();
    stop_everywhere(|on_progress| {
        queue.block_on(check(&queue, image, &mut |m| panic!("{m}"), on_progress))
    });
    let target = MeasureTarget::Qcow2(Qcow2Target::default());
    stop_everywhere(|on_progress| queue.block_on(measure(&queue, &device, &target, on_progress)));
}

#[test]
fn a_cancelled_repair_can_be_done_again() {
    fn run(
        queue: &Queue,
        memory: &Arc<Memory>,
        on_progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<CheckReport> {
        let file = memory.clone();
        queue.block_on(repair(
            queue,
            file,
            RepairMode::All,
            &mut |_| {},
            on_progress,
        ))
    }
    let queue = queue();
    let mut damaged = image(&queue);
    damaged[1024 + 2 * 7..][..2].fill(0); // The refcount of cluster 7.
    stop_everywhere(|on_progress| {
        let memory = Arc::new(Memory::new(damaged.clone()));
        let result = run(&queue, &memory, on_progress);
        let again = run(&queue, &memory, &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!((again.corruptions, again.check_errors), (0, 0), "{again:?}");
        result
    });
}

#[test]
fn a_cancelled_creation_leaves_no_image() {
    let queue = queue();
    let is_image = |memory: &Memory| {
        let opened = open(&queue, memory.to_vec(), OpenOptions::default());
        opened.is_ok()
    };
    stop_everywhere(|on_progress| {
        let memory = Memory::new(b"QFI\xfb of before".repeat(100));
        let options = options();
        let create = create_qcow2(&queue, &memory, None, &options, on_progress);
        let result = queue.block_on(create);
        assert_eq!(is_image(&memory), result.is_ok());
        result
    });
    // A future that is dropped. The first poll runs up to the first wait.
    let memory = Memory::new(Vec::new());
    let (options, mut polls) = (options(), 0);
    loop {
        let mut create = Box::pin(create_qcow2(&queue, &memory, None, &options, |_| {}));
        let mut context = Context::from_waker(Waker::noop());
        let ended = (0..polls).any(|_| {
            let poll = create.as_mut().poll(&mut context);
            queue.turn();
            matches!(poll, Poll::Ready(Ok(())))
        });
        drop(create);
        assert_eq!(is_image(&memory), ended, "after {polls} polls");
        if ended {
            break;
        }
        polls += 1;
    }
}

#[test]
fn a_cancelled_creation_of_a_raw_image_leaves_its_size() {
    let (queue, size) = (queue(), 200 << 20);
    let file = tempfile::NamedTempFile::new().unwrap();
    let open = zebu::storage::OpenFile::default().write(true);
    let storage = zebu::storage::open_file(file.path(), open).unwrap();
    let stop = |_| ControlFlow::Break(());
    let create = create_raw(&queue, &*storage, size, Preallocation::Full, stop);
    let error = queue.block_on(create).unwrap_err();
    assert!(matches!(&error, Error::Io(_)) && error.errno() == libc::ECANCELED);
    assert_eq!(file.path().metadata().unwrap().len(), size);
}

#[test]
fn a_cancelled_amend_leaves_a_sound_image() {
    let queue = queue();
    let bytes = image(&queue);
    let options = AmendOptions::default().refcount_order(Some(5));
    stop_everywhere(|on_progress| {
        let memory = Arc::new(Memory::new(bytes.clone()));
        let how = OpenOptions::default()
            .write(true)
            .format(Some(Format::QCOW2));
        let device = Device::from_storage(&queue, memory.clone(), &how)?;
        let result = amend(&queue, device, &options, on_progress);
        let after = open(&queue, memory.to_vec(), OpenOptions::default()).unwrap();
        let image = after.top().as_qcow2().unwrap();
        let report = queue.block_on(check(&queue, image, &mut |_| {}, |_| {}))?;
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
        result
    });
}
