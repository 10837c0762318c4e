//! Whose turn it is of two programs on one machine, of which one runs: until it comes to an operation of the disk or
//! of a name.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard};

use zebu_testkit::Rng;

thread_local! {
    /// The number of this thread's program.
    static PROGRAM: Cell<usize> = const { Cell::new(0) };
}

/// The number of the program that runs: 0, or 1 for the second one.
pub fn running() -> usize {
    PROGRAM.get()
}

/// This thread is the second program.
pub(crate) fn be_second() {
    PROGRAM.set(1);
}

/// Whose turn it is.
#[derive(Debug)]
pub struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
pub(crate) struct State {
    /// The program that runs.
    pub runs: usize,
    /// Whether both are there.
    pub are_two: bool,
    /// One pause in so many gives the turn to the other program.
    pub every: u64,
    pub rng: Rng,
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
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
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

    /// Waits until it is the turn of this program.
    pub(crate) fn await_turn<'a>(
        &self,
        state: MutexGuard<'a, State>,
        own: usize,
    ) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_while(state, |state| state.runs != own);
        waited.unwrap_or_else(|e| e.into_inner())
    }

    /// This program has ended: the other one runs from here on.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        state.are_two = false;
        state.runs = 1 - running();
        self.changed.notify_all();
    }
}
