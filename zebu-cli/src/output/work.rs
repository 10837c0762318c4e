//! What a job over a disk has to read: progress is told in data, since holes are passed over in no time.

use std::time::{Duration, Instant};

use zebu::block::Device;
use zebu::storage::Queue;

/// Parts of the disks whose data are added up.
const PARTS: u64 = 4096;
/// Time that looking for data may take: of what is not looked at by then, as much is taken to be data as of
/// what was.
const PATIENCE: Duration = Duration::from_secs(2);

/// How much data lie before a place of disks that are read one after the other.
#[derive(Debug)]
pub struct Work {
    /// Bytes of the disks.
    size: u64,
    /// Bytes of a part.
    part: u64,
    /// The data before the end of each part.
    sums: Vec<u64>,
}

impl Work {
    /// Looks at `disks`, each of which is made of images of the same content or that are compared: where one
    /// of them has data, there is work. None if that is not known, or there is none.
    pub fn of(queue: &Queue, disks: &[&[&Device]]) -> Option<Work> {
        let length = |disk: &&[&Device]| disk.iter().map(|device| device.size()).max();
        let mut lengths = disks.iter().filter_map(length);
        let size = lengths.try_fold(0, u64::checked_add)?;
        let part = size.div_ceil(PARTS).max(1);
        let end = Instant::now() + PATIENCE;
        let mut data = vec![0; size.div_ceil(part) as usize];
        let (mut start, mut seen) = (0, 0);
        'all: for disk in disks {
            let length = length(disk).unwrap_or(0);
            let mut at = 0;
            while at < length {
                if Instant::now() > end {
                    break 'all;
                }
                // Up to the end of a part.
                let most = (part - (start + at) % part).min(length - at);
                let (is_data, run) = status(queue, disk, at, most)?;
                if is_data {
                    data[((start + at) / part) as usize] += run;
                }
                at += run;
                seen += run;
            }
            start += length;
        }
        let found: u64 = data.iter().sum();
        let whole = (seen / part) as usize;
        let share =
            |bytes: u64| (u128::from(bytes) * u128::from(found) / u128::from(seen.max(1))) as u64;
        let mut sum = 0;
        let sums = data.iter().enumerate().map(|(nth, data)| {
            sum += if seen < size && nth >= whole {
                share(part)
            } else {
                *data
            };
            sum
        });
        let sums: Vec<u64> = sums.collect();
        (sum_of(&sums) > 0).then_some(Work { size, part, sums })
    }

    /// All data.
    pub fn total(&self) -> u64 {
        sum_of(&self.sums)
    }

    /// The data before this place.
    pub fn before(&self, place: u64) -> u64 {
        if place >= self.size {
            return self.total();
        }
        let nth = (place / self.part) as usize;
        let before = nth.checked_sub(1).map_or(0, |nth| self.sums[nth]);
        let of_part = u128::from(self.sums[nth] - before);
        before + (of_part * u128::from(place % self.part) / u128::from(self.part)) as u64
    }
}

fn sum_of(sums: &[u64]) -> u64 {
    sums.last().copied().unwrap_or(0)
}

/// Whether one of the images has data at `at`, and how far that is known: `most` bytes at most.
fn status(queue: &Queue, disk: &[&Device], at: u64, most: u64) -> Option<(bool, u64)> {
    let (mut is_data, mut run) = (false, most);
    for device in disk {
        let left = device.size().saturating_sub(at).min(most);
        if left == 0 {
            continue;
        }
        // An error is told by the job, which reads.
        let status = queue.block_on(device.status(queue, at, left)).ok()?;
        is_data |= status.data && !status.zero;
        run = run.min(status.length.clamp(1, left));
    }
    Some((is_data, run))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_no_work() {
        let work = Work {
            size: 400,
            part: 100,
            sums: vec![100, 100, 100, 200],
        };
        let places = [0, 50, 100, 300, 350, 400, 500];
        let before = places.map(|place| work.before(place));
        assert_eq!(before, [0, 50, 100, 100, 150, 200, 200]);
    }
}
