//! Executes the steps of a scenario, and compares the results with the model.

use std::ops::Range;

use std::sync::Arc;

use zebu::block::{Format, SharedDevice};
use zebu::storage::Queue;

use crate::cell::Time;
use crate::content::Tag;
use crate::disk::Disk;
use crate::model::{Model, Readings};
use crate::sched::{self, Driven, Polls};
use crate::steps::{ImageChange, Kind, Opening, Scenario, Step, Stop, What};
use zebu_testkit::Rng;

mod beside;
mod bitmaps;
mod change;
mod damage;
mod exchange;
mod job;
mod judge;
mod make;
mod pair;
mod session;

/// The most requests in flight.
const MOST_IN_FLIGHT: usize = 24;
/// The number of turns in which no request ends that counts as a hang.
const TURNS: usize = 200_000;

/// The number of idle turns of all queues after which nothing can happen.
const IDLE_ROUNDS: usize = 16;

/// A failure: its kind in one word, and a message.
pub type Verdict<T = ()> = Result<T, String>;

/// Snapshots as they were found: name and content.
type Contents = Vec<(String, Vec<Tag>)>;

/// The result of a simulation.
#[derive(Debug)]
pub struct Report {
    /// A hash of everything that was done.
    pub trace: u64,
    /// Operations of the disk.
    pub operations: u64,
    /// Requests, jobs and other steps that were carried out.
    pub steps: usize,
}

/// Runs a scenario; the error describes the step and the failure.
pub fn run(scenario: &Scenario) -> Verdict<Report> {
    let disk = Disk::new();
    sched::simulate(&disk);
    let mut run = Run::new(scenario, disk.clone())?;
    for step in &scenario.steps {
        run.step(step)
            .map_err(|e| format!("{e}\n  at step {}: {:?}", step.id, step.what))?;
        if run.refused {
            break;
        }
    }
    if !run.refused {
        run.close(Stop::No)
            .map_err(|e| format!("{e}\n  at the end"))?;
    }
    Ok(Report {
        trace: disk.trace(),
        operations: disk.operations(),
        steps: scenario.steps.len(),
    })
}

/// A backing file.
struct Base {
    file: usize,
    format: Format,
    /// The index of its own backing file.
    below: Option<usize>,
    /// The content of its disk, and its dirty bitmaps.
    model: Model,
}

/// A device that is open for writing.
struct Session {
    queues: Vec<Queue>,
    device: SharedDevice,
    opening: Opening,
    /// A hook, and whether it is told of changes now.
    watch: Arc<exchange::Watch>,
    watched: bool,
    flying: Vec<Flying>,
    readings: Readings,
    polls: Polls,
    /// Whether a write is durable when it ends.
    write_through: bool,
    /// Whether each flush stores dirty bitmaps.
    store_bitmaps: bool,
    /// Whether reads copy what is behind the image.
    copies: bool,
    /// When the last change began or ended; None: there was none, or a flush has stored the bitmaps.
    changed: Option<Time>,
}

/// A request in flight.
struct Flying {
    id: u32,
    kind: Kind,
    range: Range<usize>,
    began: Time,
    reading: u64,
    driven: Driven,
}

struct Run<'a> {
    scenario: &'a Scenario,
    disk: Arc<Disk>,
    rng: Rng,
    clock: Time,
    image: usize,
    data: Option<usize>,
    bases: Vec<Base>,
    backing: Option<usize>,
    cluster: usize,
    version: u32,
    model: Model,
    /// Other contents that the image may have when it is opened again, after a change of the whole
    /// image that failed or was interrupted.
    others: Vec<Model>,
    /// Those that it did not have when it was opened, but may have again if the next flush fails:
    /// what decided it is not durable.
    former: Vec<Model>,
    session: Option<Session>,
    /// The file was damaged: requests may fail, but must not return wrong data.
    damaged: bool,
    /// The model does not cover snapshots and bitmaps after damage.
    lost_snapshots: bool,
    /// A session or a job did not end properly: bitmaps may be inconsistent.
    interrupted: bool,
    /// The damaged image cannot be opened: the run ends.
    refused: bool,
    /// A device was dropped without being closed, or an operation failed: clusters may be leaked.
    untidy: bool,
    /// Whether copied flags may be wrong: a change of snapshots was interrupted.
    flags: bool,
    /// Everything has stopped since the last verification: the content is durable.
    restarted: bool,
    /// The last session was closed well.
    closed: bool,
    /// An exchange was dropped or has failed: writes may fail until the image is opened again.
    exchange_dropped: bool,
    /// An overlay on the image, or one that is being put on or taken away.
    overlay: Option<exchange::Overlay>,
    /// A change of the whole image was dropped: writes fail until it is opened again.
    change_dropped: bool,
    /// The file when an unknown autoclear bit was left in it.
    marked: Option<Vec<u8>>,
}

fn is_refusal(error: &zebu::Error) -> bool {
    match error {
        zebu::Error::Refused(_) | zebu::Error::RefcountOverflow { .. } => true,
        zebu::Error::Io(e) => matches!(e.raw_os_error(), Some(libc::ENOTSUP | libc::EFBIG)),
        zebu::Error::Open { source, .. } | zebu::Error::While { source, .. } => is_refusal(source),
        _ => false,
    }
}

impl Run<'_> {
    fn now(&mut self) -> Time {
        self.clock += 1;
        self.clock
    }

    /// The models that a change applies to.
    fn models(&mut self) -> impl Iterator<Item = &mut Model> {
        let models = std::iter::once(&mut self.model).chain(&mut self.others);
        models.chain(&mut self.former)
    }

    fn step(&mut self, step: &Step) -> Verdict {
        self.rng = Rng::new(step.seed);
        let seed = self.rng.next();
        self.disk.seed(seed);
        match &step.beside {
            Some(beside) if !self.damaged && !self.refused && !self.is_exchanged(step) => {
                self.step_beside(step, beside)
            }
            _ => self.step_alone(step),
        }
    }

    fn step_alone(&mut self, step: &Step) -> Verdict {
        match &step.what {
            What::Open(opening) => self.open_session(opening),
            What::Request(request) => self.request(step.id, request),
            What::Wait => self.wait(),
            What::Change(ImageChange::VmState(sectors), _) => {
                self.write_vm_state(step.id, *sectors)
            }
            What::Change(change, stop) => self.change_image(step.id, *change, *stop),
            What::Exchange(exchange) => self.exchange(step.id, exchange),
            What::Fault(fault) => {
                self.disk.arm(*fault);
                Ok(())
            }
            What::Close(stop) => self.close(*stop),
            What::Abandon => self.abandon(),
            What::Cut(cut) => {
                self.disk.cut(*cut);
                self.after_cut()
            }
            What::Job(job, stop) => {
                self.close(Stop::No)?;
                if self.refused {
                    return Ok(());
                }
                self.job(step.id, *job, *stop)
            }
            What::Pair(pair) => self.pair(step.id, pair),
            What::Trim(bytes) => {
                self.close(Stop::No)?;
                self.trim(*bytes);
                Ok(())
            }
            What::Mark(bit) => {
                self.close(Stop::No)?;
                self.mark(*bit);
                Ok(())
            }
            What::Damage(damage) => {
                self.close(Stop::No)?;
                if self.refused {
                    return Ok(());
                }
                self.damage(*damage);
                self.judge()
            }
        }
    }

    /// Whether a request may fail now.
    fn may_fail(&self) -> bool {
        self.damaged
            || self.change_dropped
            || self.exchange_dropped
            || self.disk.is_off()
            || !self.disk.hits().is_none()
    }

    /// Whether a flush or a close may fail now. If only reads failed, one must succeed that stores no
    /// bitmaps: what it writes is in memory. Entries of bitmaps are parts of a block of the file.
    fn flush_may_fail(&self, stores_bitmaps: bool) -> bool {
        let models = [&self.model]
            .into_iter()
            .chain(&self.others)
            .chain(&self.former);
        let hits = self.disk.hits();
        self.damaged
            || self.change_dropped
            || self.exchange_dropped
            || hits.writes + hits.flushes > 0
            || hits.reads > 0 && stores_bitmaps && models.into_iter().any(|m| !m.bitmaps.is_empty())
    }
}

fn context(what: &str) -> impl FnOnce(zebu::Error) -> String {
    move |e| format!("{what}: {e}")
}
