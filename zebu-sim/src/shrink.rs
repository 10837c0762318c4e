//! Runs scenarios, with panics as failures, and shrinks a failing one.

use crate::panics::quietly;
use crate::run::{Report, run};
use crate::steps::{BitmapChange, Fate, ImageChange, PairStop, Scenario, Stop, What};

/// Runs a scenario; the error describes the failure.
pub fn attempt(scenario: &Scenario) -> Result<Report, String> {
    quietly(|| run(scenario)).flatten()
}

/// The kind of a failure.
fn kind(failure: &str) -> &str {
    failure.split(':').next().unwrap_or_default()
}

/// The fewest and simplest steps that fail in the same way, and their failure.
pub fn shrink(scenario: &Scenario, failure: &str, mut attempts: usize) -> (Scenario, String) {
    let mut best = (scenario.clone(), failure.to_string());
    let mut is_better = |candidate: &Scenario, best: &mut (Scenario, String)| {
        if attempts == 0 {
            return false;
        }
        attempts -= 1;
        match attempt(candidate) {
            Err(e) if kind(&e) == kind(&best.1) => {
                *best = (candidate.clone(), e);
                true
            }
            _ => false,
        }
    };
    loop {
        let before = best.0.steps.len();
        // Halves, quarters, ... single steps are left out, from the end on.
        let mut size = before.div_ceil(2).max(1);
        loop {
            let mut end = best.0.steps.len();
            while end > 0 {
                let start = end.saturating_sub(size);
                let mut candidate = best.0.clone();
                candidate.steps.drain(start..end);
                is_better(&candidate, &mut best);
                end = start.min(best.0.steps.len());
            }
            if size == 1 {
                break;
            }
            size = size.div_ceil(2);
        }
        if best.0.steps.len() == before {
            break;
        }
    }
    for simpler in ORIGINS {
        let mut candidate = best.0.clone();
        simpler(&mut candidate);
        is_better(&candidate, &mut best);
    }
    for n in 0..best.0.steps.len() {
        let mut candidate = best.0.clone();
        candidate.steps[n].beside = None;
        is_better(&candidate, &mut best);
        for simpler in STEPS {
            let mut candidate = best.0.clone();
            simpler(&mut candidate.steps[n].what);
            is_better(&candidate, &mut best);
        }
    }
    best
}

/// Ways to simplify an image.
const ORIGINS: &[fn(&mut Scenario)] = &[
    |s| s.origin.backing = usize::MAX,
    |s| s.origin.bases.clear(),
    |s| s.origin.bases.truncate(1),
    |s| s.origin.bitmaps.clear(),
    |s| s.origin.bitmaps.truncate(1),
    |s| {
        s.origin
            .bases
            .iter_mut()
            .for_each(|base| base.bitmaps.clear())
    },
    |s| s.origin.create.lazy_refcounts = false,
    |s| s.origin.create.refcount_order = 4,
    |s| s.origin.create.data_file = None,
    |s| s.origin.create.preallocation = zebu::block::Preallocation::Off,
    |s| s.origin.create.extended_l2 = false,
    |s| s.origin.create.compression = zebu::qcow2::Compression::Zlib,
    |s| s.origin.create.version = 3,
    |s| {
        s.origin
            .bases
            .iter_mut()
            .for_each(|base| base.above = false)
    },
    |s| s.origin.bases.iter_mut().for_each(|base| base.qcow2 = None),
];

/// Ways to simplify a step.
const STEPS: &[fn(&mut What)] = &[
    |what| match what {
        What::Request(request) => request.fate = Fate::Run,
        What::Change(_, stop) | What::Close(stop) | What::Job(_, stop) => *stop = Stop::No,
        _ => {}
    },
    |what| {
        if let What::Request(request) = what {
            request.turns = 0;
        }
    },
    |what| {
        if let What::Pair(pair) = what {
            pair.stop = PairStop::No;
        }
    },
    |what| {
        if let What::Pair(pair) = what {
            pair.by_link = [false; 2];
        }
    },
    |what| {
        if let What::Request(request) = what {
            request.count = 1;
        }
    },
    |what| {
        if let What::Request(request) = what {
            request.queue = 0;
        }
    },
    |what| {
        if let What::Open(opening) = what {
            opening.store_bitmaps = false;
        }
    },
    |what| {
        if let What::Open(opening) = what {
            opening.copy_on_read = false;
        }
    },
    |what| {
        if let What::Open(opening) = what {
            opening.preallocate = false;
        }
    },
    |what| {
        if let What::Change(ImageChange::Bitmap(BitmapChange::Add(new)), _) = what {
            new.granularity = 512;
        }
    },
];
