//! The end of a program or of the machine: what is left of operations in flight and of what is not durable.

use std::task::Waker;

use zebu_testkit::Rng;

use super::State;
use super::bytes::FileState;
use super::faults::Cut;
use super::operations::Operation;

impl State {
    /// Counts an operation. If it stops the disk, returns the wakers of all requests.
    pub(super) fn count_down(&mut self) -> Option<Vec<Waker>> {
        self.started += 1;
        let (left, cut) = self.cut.as_mut()?;
        if *left > 0 {
            *left -= 1;
            return None;
        }
        let cut = *cut;
        self.cut = None;
        Some(self.cut_now(cut))
    }

    /// Counts an operation of a program. If it is killed by that, returns the wakers of its requests.
    pub(super) fn count_death(&mut self, program: usize) -> Vec<Waker> {
        match &mut self.deaths[program] {
            None => Vec::new(),
            Some(0) => self.kill(program),
            Some(left) => {
                *left -= 1;
                Vec::new()
            }
        }
    }

    /// A program is killed: operations in flight may be done in part, and its locks end.
    fn kill(&mut self, program: usize) -> Vec<Waker> {
        self.mix(&[78, program as u64]);
        (self.dead[program], self.deaths[program]) = (true, None);
        self.folder.kill(program);
        let mut rng = Rng::new(self.rng.next());
        let is_its = |o: &Operation| o.program == program && o.result.is_none();
        let ids = self.operations.iter().filter(|(_, o)| is_its(o));
        let ids: Vec<_> = ids.map(|(id, _)| *id).collect();
        let mut wakers = Vec::new();
        for id in ids {
            if rng.one_in(2) {
                let operation = &self.operations[&id];
                let (file, change) = (operation.file, State::change_of(operation));
                let now = self.tick();
                if let Some(change) = change {
                    self.files[file].change(change, now);
                }
            }
            let operation = self.operations.get_mut(&id).expect("it is in flight");
            operation.result = Some(Err(libc::EIO));
            operation.memory = None;
            wakers.extend(operation.waker.take());
        }
        wakers
    }

    /// The process or the machine stops; returns the wakers of all requests.
    pub(super) fn cut_now(&mut self, cut: Cut) -> Vec<Waker> {
        self.mix(&[77, cut as u64]);
        let mut rng = Rng::new(self.rng.next());
        let flights: Vec<_> = (self.operations.values())
            .filter(|o| o.result.is_none())
            .filter_map(|o| State::change_of(o).map(|change| (o.file, change)))
            .collect();
        for (number, file) in self.files.iter_mut().enumerate() {
            let in_flight = flights.iter().filter(|f| f.0 == number).map(|f| &f.1);
            // The chances that a whole operation or a sector survives.
            let (whole, torn) = (rng.below(5), rng.below(5));
            match cut {
                Cut::Kill => {
                    for change in in_flight {
                        let all = rng.one_in(2);
                        change.apply_sectors(&mut file.bytes, || all || rng.below(4) < torn);
                    }
                    // The content of the page cache counts as durable from here on.
                    *file = FileState::new(std::mem::take(&mut file.bytes));
                }
                Cut::Power => {
                    let pending = file.pending.iter().map(|p| &p.change);
                    let mut bytes = std::mem::take(&mut file.durable);
                    for change in pending.chain(in_flight) {
                        let all = rng.below(4) < whole;
                        change.apply_sectors(&mut bytes, || all || rng.below(4) < torn);
                    }
                    *file = FileState::new(bytes);
                }
            }
        }
        match cut {
            Cut::Kill => self.folder.kill_all(),
            Cut::Power => self.folder.cut(&mut rng),
        }
        // The first one is what starts again.
        self.dead[1] = true;
        self.off = true;
        self.cut = None;
        self.due.clear();
        let ids: Vec<_> = self.operations.keys().copied().collect();
        ids.into_iter().filter_map(|id| self.end(id)).collect()
    }
}
