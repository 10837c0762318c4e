//! Two programs of one machine that take turns. Each has a thread, of which one runs: until it comes to
//! an operation of the disk or of a name, where the schedule may give the turn to the other.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use zebu_testkit::Rng;

use crate::disk::Disk;
use crate::panics::quietly;
use crate::sched;
use crate::turns::be_second;

/// Runs `second` as a second program beside `first`. Each may be anywhere when the other one ends; both
/// have ended on return. `seed` determines the turns.
///
/// # Errors
/// A panic of `second`.
pub fn together<A, B: Send>(
    disk: &Arc<Disk>,
    seed: u64,
    first: impl FnOnce() -> A,
    second: impl FnOnce() -> B + Send,
) -> (A, Result<B, String>) {
    let mut rng = Rng::new(seed);
    {
        let mut state = disk.turns.state();
        state.every = rng.pick(&[1, 2, 4, 16, 64]);
        state.runs = rng.below(2) as usize;
        state.are_two = true;
        state.rng = rng;
    }
    let (a, b) = std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            be_second();
            drop(disk.turns.await_turn(disk.turns.state(), 1));
            sched::simulate(disk);
            let result = quietly(second);
            sched::end_simulation();
            disk.turns.end();
            result
        });
        drop(disk.turns.await_turn(disk.turns.state(), 0));
        let first = catch_unwind(AssertUnwindSafe(first));
        disk.turns.end();
        let second = second.join();
        (first, second)
    });
    let mut state = disk.turns.state();
    state.are_two = false;
    state.runs = 0;
    drop(state);
    match (a, b) {
        (Err(panic), _) | (_, Err(panic)) => resume_unwind(panic),
        (Ok(a), Ok(b)) => (a, b),
    }
}
