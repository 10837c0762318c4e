//! Two programs of one machine that take turns. Each has a thread, of which one runs: until it comes to
//! an operation of the disk or of a name, where the schedule may give the turn to the other.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::disk::Disk;
use crate::sched;
use crate::shrink::quietly;
use zebu_testkit::Rng;

thread_local! {
    /// The number of this thread's program.
    static PROGRAM: Cell<usize> = const { Cell::new(0) };
}

/// The number of the program that runs: 0, or 1 for the second one.
pub fn running() -> usize {
    PROGRAM.get()
}

/// Whose turn it is.
#[derive(Debug)]
pub struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The program that runs.
    runs: usize,
    /// Whether both are there.
    are_two: bool,
    /// One pause in so many gives the turn to the other program.
    every: u64,
    rng: Rng,
}

impl Default for Turns {
    fn default() -> Self {
        let state = State {
            runs: 0,
            are_two: false,
            every: 1,
            rng: Rng::new(0),
        };
        Turns {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }
}

impl Turns {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Whether both programs run.
    pub fn are_two(&self) -> bool {
        self.state().are_two
    }

    /// Gives the turn to the other program, if the schedule says so, and waits for the next one.
    /// Whether it did.
    pub fn pause(&self) -> bool {
        let mut state = self.state();
        if !state.are_two {
            return false;
        }
        let every = state.every;
        if !state.rng.one_in(every) {
            return false;
        }
        let own = running();
        state.runs = 1 - own;
        self.changed.notify_all();
        drop(self.await_turn(state, own));
        true
    }

    fn await_turn<'a>(&self, state: MutexGuard<'a, State>, own: usize) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_while(state, |state| state.runs != own);
        waited.unwrap_or_else(|e| e.into_inner())
    }

    /// This program has ended: the other one runs from here on.
    fn end(&self) {
        let mut state = self.state();
        state.are_two = false;
        state.runs = 1 - running();
        self.changed.notify_all();
    }
}

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
            PROGRAM.set(1);
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
