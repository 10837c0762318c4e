//! Where requests start.

use super::plan::Plan;

/// Offsets of `--random` are the same in every run.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// The offsets of one thread's requests.
pub struct Offsets {
    next: u64,
    step: u64,
    disk: u64,
    /// The state of the random numbers, and the number of blocks.
    random: Option<(u64, u64)>,
    size: u64,
}

impl Offsets {
    /// The offsets of thread `index`, on a disk of `disk` bytes.
    pub fn new(plan: &Plan, disk: u64, index: u64) -> Offsets {
        let random = plan.random.then(|| {
            let state = SEED ^ (index + 1).wrapping_mul(0xd134_2543_de82_ef95);
            (state, disk / plan.size)
        });
        Offsets {
            next: plan.offset,
            step: plan.step,
            disk,
            random,
            size: plan.size,
        }
    }

    /// The offset of the next request. Steps wrap around at the end of the disk, as in qemu-img,
    /// where a request may reach past it and fail.
    pub fn next(&mut self) -> u64 {
        if let Some((state, blocks)) = &mut self.random {
            // xorshift64*.
            *state ^= *state >> 12;
            *state ^= *state << 25;
            *state ^= *state >> 27;
            let number = state.wrapping_mul(0x2545_f491_4f6c_dd1d);
            // The high half scaled to the number of blocks: no division.
            let block = (u128::from(number) * u128::from(*blocks)) >> 64;
            return block as u64 * self.size;
        }
        let offset = self.next;
        self.next = match offset.checked_add(self.step) {
            Some(next) if next < self.disk => next,
            Some(next) => next % self.disk.max(1),
            None => 0,
        };
        offset
    }
}

#[cfg(test)]
mod tests {
    //! Guards against other offsets than those of qemu-img 10.
    use super::super::plan::tests::plan;
    use super::*;

    fn offsets(arguments: &[&str], disk: u64, count: usize) -> Vec<u64> {
        let plan = plan(arguments).expect("a plan");
        let mut offsets = Offsets::new(&plan, disk, 0);
        (0..count).map(|_| offsets.next()).collect()
    }

    #[test]
    fn steps_wrap_around() {
        assert_eq!(offsets(&[], 10240, 3), [0, 4096, 8192]);
        assert_eq!(
            offsets(&["-o", "9k", "-s", "1k", "-S", "3k"], 10240, 6),
            [9216, 2048, 5120, 8192, 1024, 4096]
        );
        assert_eq!(offsets(&["-S", "20000", "-s", "1k"], 10240, 2), [0, 9760]);
        assert_eq!(
            offsets(&["-S", "10240", "-o", "512", "-s", "1k"], 10240, 3),
            [512; 3]
        );
        assert_eq!(offsets(&["-o", "11k"], 10240, 1), [11264]);
        assert_eq!(offsets(&[], 0, 2), [0, 0]);
    }

    #[test]
    fn random_offsets_are_blocks_of_the_disk() {
        let list = offsets(&["--random"], 40960, 1000);
        assert!(list.iter().all(|o| o % 4096 == 0 && *o < 40960));
        let mut seen = list.clone();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 10);
        assert_eq!(offsets(&["--random"], 40960, 1000), list);
    }
}
