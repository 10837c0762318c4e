//! Writes to damaged images of the formats that are written in place, besides raw and qcow2. Guards
//! against a write that changes more than its range: an image is refused, and its file stays as it is,
//! or each write goes where it belongs.

use std::sync::Arc;

use zebu::block::{Device, OpenOptions};
use zebu::storage::{Memory, Queue};
use zebu_testkit::library::vhdx_image::{HEADERS, METADATA_TABLE, MIB, REGION_TABLES, seal_all};
use zebu_testkit::{Rng, Written};

use crate::bounds::{alone, queue};
use crate::common::{PrintOnPanic, cases, progress};

const SECTOR: usize = 512;

/// Ranges of a small image in which numbers are damaged: headers and tables, and how many bytes of each.
fn tables(written: &Written, rng: &mut Rng) -> (u64, u64) {
    if written.name != "vhdx" {
        // The header of one sector and the table behind it, whose first entries count most.
        return rng.pick(&[(0, 1024), (512, 16)]);
    }
    // The log, the block allocation table and the metadata follow each other.
    rng.pick(&[
        (HEADERS[0], 80),
        (HEADERS[1], 80),
        (REGION_TABLES[0], 80),
        (REGION_TABLES[1], 80),
        (MIB, 160),
        (MIB + MIB / 2, 160),
        (2 * MIB, 40),
        (2 * MIB, 40),
        (3 * MIB, 200),
        (3 * MIB + METADATA_TABLE, 48),
    ])
}

fn open(queue: &Queue, written: &Written, file: Arc<Memory>, write: bool) -> zebu::Result<Device> {
    let options = OpenOptions::default()
        .format(Some(written.format()))
        .discard(Some(true))
        .write(write);
    Device::from_storage(queue, file, &options)
}

/// The sectors of a disk; None: one that cannot be read.
fn sectors(queue: &Queue, device: &Device) -> Vec<Option<Vec<u8>>> {
    let count = device.size() / SECTOR as u64;
    let sector = |n: u64| {
        let mut bytes = vec![0; SECTOR];
        let read = device.read_blocking(queue, n * SECTOR as u64, &mut bytes);
        read.ok().map(|()| bytes)
    };
    (0..count).map(sector).collect()
}

/// An image of a few blocks with data.
fn sound(queue: &Queue, written: &Written, rng: &mut Rng) -> Vec<u8> {
    let file = Arc::new(Memory::default());
    let size = written.block + 512 * rng.below(2 * written.block / 512);
    written.make(queue, file.clone(), size);
    let device = open(queue, written, file.clone(), true).unwrap();
    for _ in 0..rng.below(5) {
        let at = rng.below(size / 512) * 512;
        let mut bytes = vec![0; (512 * (1 + rng.below(20))).min(size - at) as usize];
        rng.fill(&mut bytes);
        device.write_blocking(queue, at, &bytes).unwrap();
    }
    match rng.one_in(3) {
        // Its last writer was killed.
        true => queue.block_on(device.flush(queue)).unwrap(),
        false => queue.block_on(device.close(queue)).unwrap(),
    }
    file.to_vec()
}

fn damage(written: &Written, bytes: &mut Vec<u8>, rng: &mut Rng) {
    let (start, length) = tables(written, rng);
    let at = (start + 4 * rng.below(length / 4)) as usize;
    let value = match rng.below(5) {
        0 => rng.next() as u32,
        1 => 512 * rng.below(8) as u32,
        // A place of a VHDX, perhaps with a state.
        2 => ((rng.below(9) << 20) | (6 * rng.below(2))) as u32,
        _ => rng.below(8) as u32,
    };
    if let Some(number) = bytes.get_mut(at..at + 4) {
        number.copy_from_slice(&value.to_le_bytes());
    }
    if rng.one_in(4) {
        let length = bytes.len();
        bytes.truncate(length - rng.index(length / 2 + 1));
    }
    if written.name == "vhdx" && !rng.one_in(4) {
        seal_all(bytes);
    }
}

#[test]
fn writes_to_damaged_images_change_nothing_else() {
    let _alone = alone();
    let queue = queue();
    let mut refused = 0;
    let mut seeds = cases(40, "damaged images that are written");
    while let Some(seed) = seeds.next() {
        for written in Written::others() {
            let _note = PrintOnPanic(format!("seed {seed}, {written:?}"));
            let rng = &mut Rng::new(seed);
            let mut bytes = sound(&queue, &written, rng);
            (0..1 + rng.below(2)).for_each(|_| damage(&written, &mut bytes, rng));
            progress();
            seeds.add(1);
            let file = Arc::new(Memory::new(bytes.clone()));
            // (A number may make the disk empty, or much larger.)
            let before = match open(&queue, &written, file.clone(), false) {
                Ok(device) if (1..64 << 20).contains(&device.size()) => sectors(&queue, &device),
                _ => continue,
            };
            let Ok(device) = open(&queue, &written, file.clone(), true) else {
                assert!(file.to_vec() == bytes, "it was refused, and has changed");
                refused += 1;
                continue;
            };
            let mut expected = before;
            for _ in 0..4 {
                let count = expected.len() as u64;
                let start = rng.below(count);
                let length = (1 + rng.below(300)).min(count - start);
                let mut bytes = vec![0; length as usize * SECTOR];
                rng.fill(&mut bytes);
                let written = device.write_blocking(&queue, start * SECTOR as u64, &bytes);
                for (n, sector) in (start..).zip(bytes.chunks(SECTOR)) {
                    expected[n as usize] = written.is_ok().then(|| sector.to_vec());
                }
            }
            let now = sectors(&queue, &device);
            let closed = queue.block_on(device.close(&queue));
            let reopened = open(&queue, &written, file, false).unwrap();
            for found in [now, sectors(&queue, &reopened)] {
                for (n, (is, was)) in found.iter().zip(&expected).enumerate() {
                    assert!(was.is_none() || is == was, "sector {n:#x} has changed");
                }
                if closed.is_err() {
                    break;
                }
            }
        }
    }
    assert!(
        !zebu_testkit::are_usual() || refused > 0,
        "none was refused"
    );
}
