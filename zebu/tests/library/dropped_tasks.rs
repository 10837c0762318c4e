//! Guards against harm by a task of a request that was dropped, forgotten or is not polled any more:
//! a load that reads a cluster with another use, and a change of the header beside another one.
//!
//! blkdebug suspends the task at the step where it does harm.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use zebu::block::{Device, OpenOptions};
use zebu::internal::blkdebug::{Blkdebug, Event};
use zebu::jobs::{CreateQcow2, create_qcow2};
use zebu::names::Source;
use zebu::storage::{Buffer, Iov, Memory, Queue, QueueOptions, Storage, write_slice};

const CLUSTER: usize = 64 << 10;
/// Bytes of the disk that a slice of an L2 table maps.
const SLICE: u64 = 32 << 20;

fn queue() -> Queue {
    Queue::new(QueueOptions::default()).unwrap()
}

fn create(queue: &Queue, options: CreateQcow2) -> Arc<Memory> {
    let memory = Arc::new(Memory::new(Vec::new()));
    queue
        .block_on(create_qcow2(queue, &*memory, None, &options, |_| {}))
        .unwrap();
    memory
}

fn large() -> CreateQcow2 {
    CreateQcow2::default().size(4 * SLICE)
}

fn open(queue: &Queue, storage: Arc<dyn Storage>) -> Device {
    Device::from_storage(queue, storage, &OpenOptions::default().write(true)).unwrap()
}

fn open_debugged(queue: &Queue, memory: &Arc<Memory>) -> (Arc<Blkdebug>, Device) {
    let debug = Blkdebug::new(memory.clone(), Vec::new(), Default::default());
    let debug = Arc::new(debug.unwrap());
    let device = open(queue, debug.clone());
    (debug, device)
}

fn poll_once<F: Future>(request: Pin<&mut F>) -> Poll<F::Output> {
    request.poll(&mut Context::from_waker(Waker::noop()))
}

/// Polls a request once, which must wait then, and drops it.
fn drop_after_one_poll(request: impl Future) {
    assert!(poll_once(pin!(request)).is_pending());
}

/// Polls a request once, which must wait then, and is not polled any more.
fn keep_after_one_poll<F: Future>(request: F) -> Pin<Box<F>> {
    let mut request = Box::pin(request);
    assert!(poll_once(request.as_mut()).is_pending());
    request
}

/// The byte of which all of a sector consists.
fn read(queue: &Queue, device: &Device, offset: u64) -> u8 {
    let mut bytes = [0; 512];
    device.read_blocking(queue, offset, &mut bytes).unwrap();
    assert_eq!(bytes, [bytes[0]; 512]);
    bytes[0]
}

fn write_compressed(queue: &Queue, device: &Device, offset: u64, byte: u8) {
    let mut buffer = Buffer::new(CLUSTER);
    buffer.fill(byte);
    // SAFETY: the buffer lives until the write has ended.
    let iov = unsafe { buffer.iov() };
    let write = async |iov: &Iov| device.write_compressed(queue, offset, iov).await;
    queue.block_on(write(&iov)).unwrap();
}

/// Frees what was dropped.
fn flush(queue: &Queue, device: &Device) {
    for _ in 0..3 {
        queue.block_on(device.flush(queue)).unwrap();
    }
}

#[test]
fn inflated_clusters_are_those_of_their_requests() {
    let queue = queue();
    let (debug, device) = open_debugged(&queue, &create(&queue, large()));
    write_compressed(&queue, &device, 0, 1);
    flush(&queue, &device);
    debug.suspend_at(Event::ReadCompressed, "load");
    drop_after_one_poll(device.read_buffer(&queue, 0, Buffer::new(512), 512));
    device.write_blocking(&queue, 0, &[2; CLUSTER]).unwrap();
    flush(&queue, &device);
    debug.resume_all();
    flush(&queue, &device);
    write_compressed(&queue, &device, CLUSTER as u64, 3);
    assert_eq!(read(&queue, &device, CLUSTER as u64), 3);
    assert_eq!(read(&queue, &device, 0), 2);
}

#[test]
fn a_table_is_not_reused_while_it_is_loaded() {
    let queue = queue();
    let memory = create(&queue, large());
    let device = open(&queue, memory.clone());
    device.write_blocking(&queue, 0, &[1; CLUSTER]).unwrap();
    queue.block_on(device.close(&queue)).unwrap();
    // As after a power cut while a snapshot was deleted: the copied flag of the table is missing.
    let l1 = u64::from_be_bytes(memory.to_vec()[40..48].try_into().unwrap());
    let flags = memory.to_vec()[l1 as usize] & !0x80;
    queue
        .block_on(write_slice(&*memory, &queue, l1, &[flags]))
        .unwrap();

    let (debug, device) = open_debugged(&queue, &memory);
    debug.suspend_at(Event::L2Load, "load");
    let kept = keep_after_one_poll(device.read_buffer(&queue, 0, Buffer::new(512), 512));
    // It copies the table, and then waits for the load.
    let copies = keep_after_one_poll(device.write_buffer(&queue, 8192, Buffer::new(512), 512));
    flush(&queue, &device);
    device.write_blocking(&queue, SLICE, &[0; CLUSTER]).unwrap();
    flush(&queue, &device);
    debug.resume_all();
    flush(&queue, &device);
    drop((kept, copies));
    assert_eq!(read(&queue, &device, 0), 1);
}

#[test]
fn the_clusters_of_a_bitmap_are_not_reused_while_it_is_read() {
    let (queue, folder) = (queue(), tempfile::tempdir().unwrap());
    let path = folder.path().join("disk");
    let options = CreateQcow2::default().size(8 << 20).cluster_bits(9);
    let image = create(&queue, options);
    let mut device = open(&queue, image.clone());
    let add = device.bitmap_add(&queue, "b", Some(512), true);
    queue.block_on(add).unwrap();
    // A sector for each cluster of the bitmap.
    let dirty = [0, 2 << 20, 4 << 20, 6 << 20];
    for at in dirty {
        device.write_blocking(&queue, at, &[1; 512]).unwrap();
    }
    queue.block_on(device.close(&queue)).unwrap();
    for polls in 0..20 {
        std::fs::write(&path, image.to_vec()).unwrap();
        let options = OpenOptions::default().write(true).store_bitmaps(true);
        let source = Source::Name(path.clone().into());
        let device = Device::open(&queue, &source, &options).unwrap();
        let mut reading = pin!(device.bitmap(&queue, "b"));
        let mut found = None;
        for _ in 0..polls {
            if found.is_none()
                && let Poll::Ready(bits) = poll_once(reading.as_mut())
            {
                found = Some(bits);
            }
            queue.turn();
        }
        // The bitmap is stored in other clusters, and those before are reused.
        for nth in 1..8 {
            let at = nth * 4096;
            device.write_blocking(&queue, at, &[0; 4096]).unwrap();
            flush(&queue, &device);
        }
        let bits = match found {
            Some(bits) => bits.unwrap(),
            None => queue.block_on(reading).unwrap(),
        };
        for at in dirty {
            assert!(bits.run(at, at + 512).0, "{polls} polls: {at} is clean");
        }
    }
}

#[test]
fn the_header_is_changed_by_one_at_a_time() {
    let (queue, other) = (queue(), queue());
    // The refcount table counts 2 MiB.
    let options = CreateQcow2::default().size(4 << 20).cluster_bits(9);
    let memory = create(&queue, options.refcount_order(6));
    let (debug, mut device) = open_debugged(&queue, &memory);
    let filled = 1500;
    for at in 0..filled {
        let bytes = [1; 1024];
        device.write_blocking(&queue, at * 1024, &bytes).unwrap();
        if at % 64 == 0 {
            flush(&queue, &device);
        }
    }
    // A flush of the other queue has the gate, and a larger refcount table waits for it.
    debug.suspend_at(Event::FlushToDisk, "gate");
    let gate = keep_after_one_poll(device.flush(&other));
    let grows = (filled..4096).find_map(|at| {
        let write = device.write_buffer(&other, at * 1024, Buffer::new(1024), 1024);
        let mut write = Box::pin(write);
        poll_once(write.as_mut()).is_pending().then_some(write)
    });
    // Their tasks go on, and the borrows of the device end.
    std::mem::forget((gate, grows.expect("a refcount table that grows")));
    {
        let mut change = pin!(device.set_backing(&queue, Some("base".as_ref()), Some("raw")));
        assert!(poll_once(change.as_mut()).is_pending());
        assert!(debug.resume("gate"));
        other.turn();
        queue.turn();
        debug.suspend_at(Event::FlushToDisk, "header");
        assert!(poll_once(change.as_mut()).is_pending());
        while other.turn() {}
        debug.resume_all();
        while other.turn() {}
        queue.block_on(change).unwrap();
    }
    queue.block_on(device.close(&queue)).unwrap();
    let options = OpenOptions::default().no_backing(true);
    let device = Device::from_storage(&queue, memory, &options).unwrap();
    assert_eq!(device.top().backing().unwrap().name, b"base");
}
