//! Carries out the steps of a scenario, and judges what comes of them.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use zebu::block::{DetectZeroes, Device, Format, LayerImage, OpenOptions, Preallocation, Storages};
use zebu::image::SnapshotName;
use zebu::jobs::{
    self, AmendOptions, CheckMessage, CommitOptions, CompressOptions, ConvertOptions, CreateQcow2,
    NewBacking, RebaseOptions, RepairMode, Target, create_qcow2,
};
use zebu::storage::{CacheMode, EngineKind, Iov, Queue};

use crate::content::{self, LEAST_PART, Tag, ZERO};
use crate::disk::{Cut, Disk, SECTOR};
use crate::model::{Cell, Model, Readings, Snapshot, Time, UNREADABLE, check_cells, zeroes};
use crate::rng::Rng;
use crate::sched::{self, Driven, Polls};
use crate::steps::{Damage, Fate, Job, Kind, Opening, Request, Scenario, Step, Stop, What, Whole};
use crate::walk::walk;

/// Requests in flight at most.
const MOST_IN_FLIGHT: usize = 24;
/// Turns of the scheduler without any request ending that count as a hang.
const TURNS: usize = 200_000;

/// Turns of all queues in which nothing happens, until nothing will.
const IDLE_ROUNDS: usize = 16;

/// What is wrong: a word for the kind, and the rest.
pub type Verdict<T = ()> = Result<T, String>;

/// Snapshots as they were found: name and content.
type Contents = Vec<(String, Vec<Tag>)>;

/// What a simulation came to.
#[derive(Debug)]
pub struct Report {
    /// Depends on everything that was done.
    pub trace: u64,
    /// Operations of the disk.
    pub operations: u64,
    /// Requests, jobs and other steps that were carried out.
    pub steps: usize,
}

/// Carries out a scenario; the error says the step and what is wrong.
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

/// An image behind another one.
struct Base {
    file: usize,
    format: Format,
    /// The base that it lies on.
    below: Option<usize>,
    /// Its own content, as a device shows it.
    cells: Vec<Cell>,
}

/// A device that is open for writing.
struct Session {
    queues: Vec<Queue>,
    device: Rc<Device>,
    flying: Vec<Flying>,
    readings: Readings,
    polls: Polls,
    /// Whether a write is durable when it ends.
    write_through: bool,
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
    /// What else the image may turn out to be when it is opened again: a change of the whole image
    /// failed or was interrupted.
    others: Vec<Model>,
    session: Option<Session>,
    /// The file was damaged: errors are right answers, wrong content is none.
    damaged: bool,
    /// What the damage has done to snapshots is not followed.
    lost_snapshots: bool,
    /// A damaged image that cannot be opened: there is nothing more to do.
    refused: bool,
    /// A device went without being closed, or something failed: clusters may be leaked.
    untidy: bool,
    /// Whether copied flags may be wrong: a change of snapshots was interrupted.
    flags: bool,
    /// Everything has stopped since the image was looked at: what is there is durable.
    restarted: bool,
    /// A change of the whole image was dropped: there are no more writes until it is opened again.
    doubt: bool,
}

fn is_refusal(error: &zebu::Error) -> bool {
    match error {
        zebu::Error::Refused(_) | zebu::Error::RefcountOverflow { .. } => true,
        zebu::Error::Io(e) => matches!(e.raw_os_error(), Some(libc::ENOTSUP | libc::EFBIG)),
        zebu::Error::While { source, .. } => is_refusal(source),
        _ => false,
    }
}

impl<'a> Run<'a> {
    fn new(scenario: &'a Scenario, disk: Arc<Disk>) -> Verdict<Self> {
        let origin = &scenario.origin;
        let queue = sched::queue(4);
        let mut run = Run {
            scenario,
            rng: Rng::new(0),
            clock: 1,
            image: disk.add(Vec::new()),
            data: None,
            bases: Vec::new(),
            backing: (origin.backing < origin.bases.len()).then_some(origin.backing),
            cluster: 1 << (origin.create.cluster_bits - 9),
            version: origin.create.version,
            model: Model::default(),
            others: Vec::new(),
            session: None,
            damaged: false,
            lost_snapshots: false,
            refused: false,
            untidy: false,
            flags: false,
            restarted: false,
            doubt: false,
            disk,
        };
        for _ in &origin.bases {
            let file = run.disk.add(Vec::new());
            run.bases.push(Base {
                file,
                format: Format::Raw,
                below: None,
                cells: Vec::new(),
            });
        }
        for number in (0..origin.bases.len()).rev() {
            run.make_base(&queue, number)?;
        }
        let mut create = origin.create.clone();
        create.backing = run.backing.map(|number| run.backing_name(number));
        run.data = create.data_file.is_some().then(|| run.disk.add(Vec::new()));
        let open = |file| run.disk.open(file, CacheMode::WriteBack, 1);
        let data = run.data.map(open);
        let data = data.as_ref().map(|file| &**file as _);
        create_qcow2(&queue, &*open(run.image), data, &create).map_err(said("create"))?;
        let mut cells = zeroes((create.size / SECTOR) as usize);
        if let Some(base) = run.backing {
            for (cell, below) in cells.iter_mut().zip(&run.bases[base].cells) {
                *cell = below.clone();
            }
        }
        run.model.cells = cells;
        run.judge()?;
        run.disk.set_slow(true);
        Ok(run)
    }

    fn backing_name(&self, number: usize) -> NewBacking {
        NewBacking {
            name: format!("base{number}"),
            format: Some(self.bases[number].format.name().into()),
        }
    }

    fn make_base(&mut self, queue: &Queue, number: usize) -> Verdict {
        let origin = &self.scenario.origin.bases[number];
        let mut rng = Rng::new(origin.seed);
        let sectors = (origin.bytes / SECTOR) as usize;
        let mut tags = vec![ZERO; sectors];
        for piece in tags.chunks_mut(1 << rng.below(6)) {
            if rng.one_in(origin.sparse) {
                piece.fill(content::base_tag(number));
            }
        }
        let Some(cluster_bits) = origin.qcow2 else {
            let mut bytes = content::bytes_of(tags.iter().copied(), 0);
            let part = origin.bytes % SECTOR;
            if part >= LEAST_PART {
                let tag = content::part_tag(number, part);
                bytes.extend(content::bytes_of([tag], sectors as u64));
                bytes.truncate(origin.bytes as usize);
                tags.push(tag);
            }
            self.disk.set_bytes(self.bases[number].file, bytes);
            self.bases[number].cells = tags.into_iter().map(Cell::new).collect();
            return Ok(());
        };
        let below = (origin.above && number + 1 < self.bases.len()).then_some(number + 1);
        let create = CreateQcow2 {
            size: sectors as u64 * SECTOR,
            cluster_bits,
            backing: below.map(|below| self.backing_name(below)),
            ..CreateQcow2::default()
        };
        let base = &mut self.bases[number];
        base.format = Format::Qcow2;
        base.below = below;
        let file = self.disk.open(base.file, CacheMode::WriteBack, 1);
        create_qcow2(queue, &*file, None, &create).map_err(said("create a base"))?;
        let device = self
            .open_base(queue, number, true)
            .map_err(said("open a base"))?;
        let mut at = 0;
        for piece in tags.chunk_by(|a, b| a == b) {
            if piece[0] != ZERO {
                let bytes = content::bytes_of(piece.iter().copied(), at as u64);
                let write = device.write_blocking(queue, at as u64 * SECTOR, &bytes);
                write.map_err(said("write to a base"))?;
            }
            at += piece.len();
        }
        queue
            .block_on(device.close(queue))
            .map_err(said("close a base"))?;
        let under = |sector: usize| {
            let cell = below.and_then(|below| self.bases[below].cells.get(sector));
            cell.cloned().unwrap_or_else(|| Cell::new(ZERO))
        };
        let cells = tags.iter().enumerate().map(|(sector, tag)| match *tag {
            ZERO => under(sector),
            tag => Cell::new(tag),
        });
        self.bases[number].cells = cells.collect();
        Ok(())
    }

    fn open_base(&self, queue: &Queue, number: usize, write: bool) -> zebu::Result<Device> {
        let base = &self.bases[number];
        let options = OpenOptions {
            format: Some(base.format),
            write,
            discard: Some(true),
            ..OpenOptions::default()
        };
        let below = base.below.map(|below| self.open_base(queue, below, false));
        let storages = Storages {
            backing: below.transpose()?,
            ..Storages::new(self.disk.open(base.file, CacheMode::WriteBack, 1))
        };
        Device::from_storages(queue, storages, &options)
    }

    fn open(&self, queue: &Queue, opening: &Opening, options: OpenOptions) -> zebu::Result<Device> {
        let backing = match options.no_backing || options.check || options.inspect {
            true => None,
            false => self.backing.map(|base| self.open_base(queue, base, false)),
        };
        let open = |file| self.disk.open(file, opening.mode, opening.align) as _;
        let storages = Storages {
            image: open(self.image),
            data: self.data.map(open),
            backing: backing.transpose()?,
        };
        Device::from_storages(
            queue,
            storages,
            &OpenOptions {
                format: Some(Format::Qcow2),
                ..options
            },
        )
    }

    /// How the image is opened where nothing depends on it.
    fn plain() -> Opening {
        Opening {
            queues: 1,
            discard: true,
            detect_zeroes: DetectZeroes::Off,
            cache: None,
            mode: CacheMode::WriteBack,
            align: 1,
            parts: 4,
        }
    }

    fn now(&mut self) -> Time {
        self.clock += 1;
        self.clock
    }

    /// The models that a change applies to.
    fn models(&mut self) -> impl Iterator<Item = &mut Model> {
        std::iter::once(&mut self.model).chain(&mut self.others)
    }

    fn step(&mut self, step: &Step) -> Verdict {
        self.rng = Rng::new(step.seed);
        let seed = self.rng.next();
        self.disk.seed(seed);
        match &step.what {
            What::Open(opening) => self.open_session(opening),
            What::Request(request) => self.request(step.id, request),
            What::Wait => self.wait(),
            What::Whole(whole, stop) => self.whole(step.id, *whole, *stop),
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
            What::Trim(bytes) => {
                self.close(Stop::No)?;
                self.trim(*bytes);
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

    /// Whether an error is a right answer now.
    fn may_fail(&self) -> bool {
        self.damaged || self.doubt || self.disk.is_off() || !self.disk.hits().is_none()
    }

    /// Opens the image for writing, after a repair if it asks for one.
    fn open_for_writing(&mut self, opening: &Opening, queue: &Queue) -> Verdict<Option<Device>> {
        let options = OpenOptions {
            write: true,
            discard: Some(opening.discard),
            detect_zeroes: Some(opening.detect_zeroes),
            l2_cache_size: opening.cache.map(|c| c.0),
            l2_cache_entry_size: opening.cache.map(|c| c.1),
            ..OpenOptions::default()
        };
        for _ in 0..3 {
            match self.open(queue, opening, options.clone()) {
                Ok(device) => {
                    if self.damaged {
                        // Clusters that were cut off may be part of the file again.
                        self.regrow();
                    }
                    return Ok(Some(device));
                }
                Err(e) if self.disk.hits().is_none() => {
                    if !self.damaged {
                        return Err(format!("error: open: {e}"));
                    }
                    self.refused = true;
                    return Ok(None);
                }
                // What was to fail has failed.
                Err(_) => self.disk.calm(),
            }
        }
        Err("error: open fails again and again".into())
    }

    fn open_session(&mut self, opening: &Opening) -> Verdict {
        if self.session.is_some() || self.refused {
            return Ok(());
        }
        let opening = &Opening {
            cache: (opening.cache)
                .map(|(size, slice)| (size, slice.min(self.cluster as u64 * SECTOR))),
            ..*opening
        };
        let queues: Vec<_> = (0..opening.queues)
            .map(|_| sched::queue(opening.parts))
            .collect();
        let Some(device) = self.open_for_writing(opening, &queues[0])? else {
            return Ok(());
        };
        self.session = Some(Session {
            queues,
            device: Rc::new(device),
            flying: Vec::new(),
            readings: Readings::default(),
            polls: Polls::default(),
            write_through: opening.mode.is_write_through(),
        });
        Ok(())
    }

    /// The session, begun if there is none.
    fn session(&mut self) -> Verdict<Option<&mut Session>> {
        self.open_session(&Run::plain())?;
        Ok(self.session.as_mut())
    }

    fn request(&mut self, id: u32, request: &Request) -> Verdict {
        if self.session()?.is_none() {
            return Ok(());
        }
        let sectors = self.model.sectors();
        let start = request.start % sectors.max(1);
        let unit = match request.kind {
            Kind::Compressed => self.cluster,
            _ => 1,
        };
        let start = start / unit * unit;
        let mut range = start..(start + request.count.next_multiple_of(unit)).min(sectors);
        if request.kind == Kind::Flush {
            range = 0..0;
        }
        while self
            .session
            .as_ref()
            .is_some_and(|s| s.flying.len() >= MOST_IN_FLIGHT)
        {
            self.go_on()?;
        }
        let began = self.now();
        let tag = match request.kind {
            Kind::Zero(_) | Kind::Discard => Some(ZERO),
            Kind::Write | Kind::Compressed => Some(id),
            Kind::Read | Kind::Flush => None,
        };
        if let Some(tag) = tag {
            for model in self.models() {
                let clipped = range.start.min(model.sectors())..range.end.min(model.sectors());
                model.begin(clipped, tag, began);
            }
        }
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        if let Some(tag) = tag {
            session.readings.see(range.clone(), tag);
        }
        let reading = match request.kind {
            Kind::Read => session.readings.begin(&self.model, range.clone()),
            _ => 0,
        };
        let queue = &session.queues[request.queue % session.queues.len()];
        let future = perform(
            session.device.clone(),
            queue.clone(),
            request.kind,
            range.clone(),
            tag.unwrap_or(ZERO),
        );
        let driven = Driven::spawn(queue, Box::pin(future), request.fate, &session.polls);
        self.untidy |= matches!(request.fate, Fate::Drop(_) | Fate::StallDrop(_));
        session.flying.push(Flying {
            id,
            kind: request.kind,
            range,
            began,
            reading,
            driven,
        });
        for _ in 0..request.turns {
            self.turn()?;
        }
        Ok(())
    }

    /// Something goes on: an operation of the disk ends, or a queue has its turn.
    fn turn(&mut self) -> Verdict {
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        if self.rng.one_in(2) {
            self.disk.advance();
        } else {
            let which = self.rng.below(session.queues.len() as u64) as usize;
            sched::turn(&session.queues[which]);
        }
        self.collect()
    }

    /// Takes the requests that have ended.
    fn collect(&mut self) -> Verdict {
        while let Some(session) = &mut self.session {
            let Some(place) = session.flying.iter().position(|f| f.driven.is_over()) else {
                break;
            };
            let flying = session.flying.remove(place);
            self.ended(flying)?;
        }
        Ok(())
    }

    /// Goes on until a request has ended, or releases one that is left alone.
    fn go_on(&mut self) -> Verdict {
        let in_flight = |run: &Self| run.session.as_ref().map_or(0, |s| s.flying.len());
        let before = in_flight(self);
        for _ in 0..TURNS {
            self.turn()?;
            if in_flight(self) < before || before == 0 {
                return Ok(());
            }
            let Some(session) = &self.session else {
                return Ok(());
            };
            if self.disk.is_busy() {
                continue;
            }
            // Nothing is in flight on the disk: does anybody still run? Tasks of the library may
            // wake each other before they wake a request.
            let polls = session.polls.get();
            let still = |_| {
                session.queues.iter().for_each(sched::turn);
                session.polls.get() == polls && !self.disk.is_busy()
            };
            if (0..IDLE_ROUNDS).all(still) {
                return self.idle();
            }
        }
        Err(format!("hang: no request has ended within {TURNS} turns"))
    }

    /// Nothing goes on by itself.
    fn idle(&mut self) -> Verdict {
        let Some(session) = &self.session else {
            return Ok(());
        };
        let stalled = session.flying.iter().find(|f| f.driven.is_stalled());
        let waiting = session.flying.iter().filter(|f| !f.driven.is_stalled());
        match stalled {
            Some(stalled) => {
                if let Some(read) = waiting.clone().find(|f| f.kind == Kind::Read) {
                    return Err(format!(
                        "hang: the read of step {} waits for a request that is not polled (one is \
                         that of step {})",
                        read.id, stalled.id
                    ));
                }
                stalled.driven.release();
            }
            None => {
                let ids: Vec<_> = waiting.map(|f| f.id).collect();
                if !ids.is_empty() {
                    return Err(format!("hang: nothing goes on, and steps {ids:?} wait"));
                }
            }
        }
        self.collect()
    }

    /// Waits until no request is in flight.
    fn wait(&mut self) -> Verdict {
        while self.session.as_ref().is_some_and(|s| !s.flying.is_empty()) {
            self.go_on()?;
        }
        Ok(())
    }

    /// A request has ended.
    fn ended(&mut self, flying: Flying) -> Verdict {
        let Flying {
            id,
            kind,
            range,
            began,
            reading,
            driven,
        } = flying;
        let now = self.now();
        let outcome = driven.take_outcome();
        let stopped = self.disk.is_off();
        let session = self.session.as_mut().expect("it was a request of it");
        let write_through = session.write_through;
        let seen = session.readings.end(reading);
        let what = format!("{kind:?} of sectors {range:#x?}, step {id}");
        let done = match &outcome {
            Some(Ok(_)) => true,
            Some(Err(e)) => {
                let hits = self.disk.hits();
                let may = match kind {
                    Kind::Compressed => true,
                    // What only reads have failed with can still be made durable.
                    Kind::Flush => {
                        self.damaged || self.doubt || stopped || hits.writes + hits.flushes > 0
                    }
                    _ => self.may_fail(),
                };
                if !may {
                    return Err(format!("error: {what}: {e} ({hits:?})"));
                }
                self.untidy = true;
                false
            }
            None => false,
        };
        match kind {
            Kind::Read => {
                if let (Some(Ok(bytes)), Some(seen)) = (outcome, seen) {
                    check_read(&self.model, &range, &seen, &bytes)
                        .map_err(|e| format!("{e}, {what}"))?;
                }
            }
            Kind::Flush => {
                if done {
                    self.models().for_each(|model| model.flushed(began));
                }
            }
            _ => {
                let tag = match kind {
                    Kind::Write | Kind::Compressed => id,
                    _ => ZERO,
                };
                let version = self.version;
                for model in self.models() {
                    let clipped = range.start.min(model.sectors())..range.end.min(model.sectors());
                    // A discard may do nothing.
                    let sure = done && kind != Kind::Discard;
                    model.end(clipped.clone(), tag, began, now, sure);
                    if write_through && sure {
                        model.flushed_range(clipped.clone(), now + 1);
                    }
                    let unsaid = match kind {
                        Kind::Discard => true,
                        Kind::Zero(_) => version < 3,
                        _ => false,
                    };
                    if unsaid {
                        model.cells[clipped]
                            .iter_mut()
                            .for_each(|c| c.explicit = false);
                    }
                }
            }
        }
        Ok(())
    }

    /// Changes the whole image.
    fn whole(&mut self, id: u32, whole: Whole, stop: Stop) -> Verdict {
        if self.session()?.is_none() {
            return Ok(());
        }
        self.wait()?;
        if self.doubt {
            return Ok(());
        }
        let mut after = self.model.clone();
        let mut before = self.model.clone();
        let count = after.snapshots.len();
        let old = after.sectors();
        let mut new = old;
        let mut preallocation = Preallocation::Off;
        match whole {
            Whole::Resize(more, how) => {
                new = (old as i64 + more).clamp(1, 4096) as usize;
                if new > old {
                    preallocation = how;
                }
                after.cells.resize_with(new, || Cell::new(ZERO));
                // What is cut off may be gone before the size is.
                let now = self.now();
                for cell in before.cells.iter_mut().skip(new) {
                    cell.add(ZERO, now);
                }
            }
            Whole::Take => {
                let mut cells = after.cells.clone();
                cells.iter_mut().for_each(Cell::settle);
                after.snapshots.push(Snapshot {
                    name: format!("snapshot{id}"),
                    cells,
                });
            }
            Whole::Apply(n) if count > 0 => {
                after.cells = after.snapshots[n % count].cells.clone();
            }
            Whole::Delete(n) if count > 0 => {
                after.snapshots.remove(n % count);
            }
            _ => return Ok(()),
        }
        after.settled();
        let names: Vec<_> = self
            .model
            .snapshots
            .iter()
            .map(|s| s.name.clone())
            .collect();
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        let queue = session.queues[0].clone();
        let device = Rc::get_mut(&mut session.device).ok_or("hang: a request is not over")?;
        if let Stop::Cut(operations, cut) = stop {
            self.disk.cut_after(operations, cut);
        }
        let drop_after = match stop {
            Stop::Drop(polls) => Some(polls),
            _ => None,
        };
        let name = |n: usize| SnapshotName::from(names[n % count].as_str());
        let result = sched::run_or_drop(&queue, drop_after, async {
            match whole {
                Whole::Resize(..) => {
                    device
                        .resize(&queue, new as u64 * SECTOR, preallocation)
                        .await
                }
                Whole::Take => {
                    device
                        .snapshot_create(&queue, &format!("snapshot{id}"))
                        .await
                }
                Whole::Apply(n) => device.snapshot_apply(&queue, &name(n)).await,
                Whole::Delete(n) => device.snapshot_delete(&queue, &name(n)).await,
            }
        });
        let size = device.size() / SECTOR;
        if self.disk.is_off() {
            self.flags |= !matches!(whole, Whole::Resize(..));
            self.model = before;
            self.others.push(after);
            return self.after_cut();
        }
        self.disk.cut_off();
        match result {
            Some(Ok(())) => {
                for other in &mut self.others {
                    // It is not known any more what it would be.
                    other.cells.truncate(after.sectors());
                    other.cells.resize_with(after.sectors(), || Cell::new(ZERO));
                    for (cell, tag) in other.cells.iter_mut().zip(&after.cells) {
                        *cell = tag.clone();
                    }
                    other.snapshots = after.snapshots.clone();
                }
                self.others.clear();
                self.model = after;
                Ok(())
            }
            Some(Err(e)) if !self.may_fail() => {
                // Refused: nothing has happened.
                match is_refusal(&e) && size == old as u64 {
                    true => Ok(()),
                    false => Err(format!("error: {whole:?}: {e}")),
                }
            }
            // It has failed, or was dropped.
            result => {
                self.doubt |= result.is_none();
                self.untidy = true;
                self.flags |= !matches!(whole, Whole::Resize(..));
                let failed_flush = self.disk.hits().flushes > 0;
                if matches!(whole, Whole::Resize(..))
                    && let Some(Err(e)) = &result
                    && size != old as u64
                    && !failed_flush
                {
                    return Err(format!(
                        "promise: {whole:?} failed ({e}), and the size has changed"
                    ));
                }
                // The device knows which it is; the file may still become the other one.
                self.others.push(match size == new as u64 && new != old {
                    true => std::mem::replace(&mut self.model, after),
                    false => {
                        self.model = before;
                        after
                    }
                });
                Ok(())
            }
        }
    }

    /// Closes the device, and judges what is left.
    fn close(&mut self, stop: Stop) -> Verdict {
        if self.session.is_none() {
            return Ok(());
        }
        self.wait()?;
        let Some(session) = self.session.take() else {
            return Ok(());
        };
        let queue = session.queues[0].clone();
        let device = Rc::into_inner(session.device).ok_or("hang: a request is not over")?;
        if let Stop::Cut(operations, cut) = stop {
            self.disk.cut_after(operations, cut);
        }
        let drop_after = match stop {
            Stop::Drop(polls) => Some(polls),
            _ => None,
        };
        let result = sched::run_or_drop(&queue, drop_after, device.close(&queue));
        // With the last handle of a queue its tasks end.
        drop((queue, session.queues));
        if self.disk.is_off() {
            return self.after_cut();
        }
        match result {
            Some(Ok(())) => self.models().for_each(Model::settled),
            Some(Err(e)) => {
                let hits = self.disk.hits();
                if !self.damaged && !self.doubt && hits.writes + hits.flushes == 0 {
                    return Err(format!("error: close: {e} ({hits:?})"));
                }
                self.untidy = true;
                self.models().for_each(Model::crashed);
            }
            None => {
                self.untidy = true;
                self.models().for_each(Model::crashed);
            }
        }
        self.judge()
    }

    /// Drops everything.
    fn abandon(&mut self) -> Verdict {
        let Some(session) = self.session.take() else {
            return Ok(());
        };
        for flying in &session.flying {
            flying.driven.abandon();
        }
        // The tasks end, and with them what they hold.
        session.queues.iter().for_each(sched::turn);
        drop(session);
        self.untidy = true;
        self.models().for_each(Model::crashed);
        self.judge()
    }

    /// Everything has stopped: what is left?
    fn after_cut(&mut self) -> Verdict {
        if let Some(session) = self.session.take() {
            for flying in &session.flying {
                flying.driven.abandon();
            }
            session.queues.iter().for_each(sched::turn);
        }
        self.disk.power_on();
        self.restarted = true;
        self.untidy = true;
        self.models().for_each(Model::crashed);
        self.judge()
    }

    /// What a device contains; sectors of a damaged image that cannot be read say so.
    fn read_all(&self, queue: &Queue, device: &Device) -> Verdict<Vec<Tag>> {
        let sectors = (device.size() / SECTOR) as usize;
        let mut tags = Vec::with_capacity(sectors);
        while tags.len() < sectors {
            let at = tags.len();
            let mut bytes = vec![
                0;
                512.min((sectors - at) * 512)
                    .max((sectors - at).min(128) * 512)
            ];
            match device.read_blocking(queue, at as u64 * SECTOR, &mut bytes) {
                Ok(()) => tags.extend(identify_all(&bytes, at)),
                Err(e) if !self.damaged => {
                    return Err(format!("error: read at sector {at:#x}: {e}"));
                }
                Err(_) => {
                    for (n, sector) in bytes.chunks_mut(512).enumerate() {
                        let at = at + n;
                        let read = device.read_blocking(queue, at as u64 * SECTOR, sector);
                        tags.push(match read {
                            Ok(()) => content::identify(sector, at as u64),
                            Err(_) => UNREADABLE,
                        });
                    }
                }
            }
        }
        Ok(tags)
    }

    /// Opens what is left, reads all of it and has it checked.
    fn judge(&mut self) -> Verdict {
        if self.disk.hits().flushes > 0 {
            // What that flush should have covered may be lost, and no later one makes it durable.
            self.disk.cut(Cut::Power);
            self.disk.power_on();
            self.models().for_each(Model::crashed);
            self.restarted = true;
        }
        self.disk.calm();
        self.doubt = false;
        let queue = sched::queue(4);
        self.find_backing(&queue)?;
        let read_only = OpenOptions::default();
        let device = match self.open(&queue, &Run::plain(), read_only) {
            Ok(device) => device,
            Err(_) if self.damaged => {
                // Refused. A repair may still come.
                return Ok(());
            }
            Err(e) => return Err(format!("error: open to look: {e}")),
        };
        let found = self.read_all(&queue, &device)?;
        let snapshots = self.read_snapshots(&queue, &device)?;
        let verdict = self
            .model
            .check(&found)
            .and_then(|()| self.compare_snapshots(&self.model, &snapshots));
        if let Err(e) = verdict {
            let fits = |other: &Model| {
                let content = other.check(&found);
                content.and_then(|()| self.compare_snapshots(other, &snapshots))
            };
            match self.others.iter().position(|other| fits(other).is_ok()) {
                Some(which) => self.model = self.others.swap_remove(which),
                None => {
                    let others: Vec<_> = self.others.iter().map(|o| fits(o).unwrap_err()).collect();
                    let others = match others.is_empty() {
                        true => String::new(),
                        false => {
                            format!("; nor is it as it might be instead: {}", others.join("; "))
                        }
                    };
                    return Err(format!("content: {e}{others}"));
                }
            }
        }
        self.others.clear();
        self.model.pin(&found, std::mem::take(&mut self.restarted));
        self.check_status(&queue, &device, &found)?;
        self.check_tables(&queue, &device)?;
        for number in 0..self.bases.len() {
            self.judge_base(&queue, number)?;
        }
        Ok(())
    }

    /// The base that the image names, which may be an old one or a new one.
    fn find_backing(&mut self, queue: &Queue) -> Verdict {
        let inspect = OpenOptions {
            inspect: true,
            ..OpenOptions::default()
        };
        let device = match self.open(queue, &Run::plain(), inspect) {
            Ok(device) => device,
            Err(_) if self.damaged => return Ok(()),
            Err(e) => return Err(format!("error: look at the header: {e}")),
        };
        let LayerImage::Qcow2(image) = &device.top().image else {
            return Err("error: it is not a qcow2 image any more".into());
        };
        self.version = image.header().version;
        let name = image.header().backing_file();
        let number = |name: &[u8]| {
            let digits = name.strip_prefix(b"base")?;
            let number: usize = std::str::from_utf8(digits).ok()?.parse().ok()?;
            (number < self.bases.len()).then_some(number)
        };
        self.backing = match name {
            None => None,
            Some(name) => match number(name) {
                Some(number) => Some(number),
                None if self.damaged => None,
                None => {
                    return Err(format!(
                        "content: it names {:?}",
                        name.escape_ascii().to_string()
                    ));
                }
            },
        };
        Ok(())
    }

    /// Names and contents of the snapshots; None if that is not followed.
    fn read_snapshots(&self, queue: &Queue, device: &Device) -> Verdict<Option<Contents>> {
        let LayerImage::Qcow2(image) = &device.top().image else {
            return Ok(None);
        };
        if self.lost_snapshots {
            return Ok(None);
        }
        let mut found = Vec::new();
        for snapshot in image.snapshots() {
            let name = String::from_utf8_lossy(&snapshot.name).into_owned();
            let options = OpenOptions {
                snapshot: Some(SnapshotName::from(name.as_str())),
                ..OpenOptions::default()
            };
            match self.open(queue, &Run::plain(), options) {
                Ok(device) => found.push((name, self.read_all(queue, &device)?)),
                Err(_) if self.damaged => found.push((name, Vec::new())),
                Err(e) => return Err(format!("error: open {name}: {e}")),
            }
        }
        Ok(Some(found))
    }

    fn compare_snapshots(&self, model: &Model, found: &Option<Contents>) -> Verdict {
        let Some(found) = found else {
            return Ok(());
        };
        let is: Vec<_> = found.iter().map(|(name, _)| name).collect();
        let was: Vec<_> = model.snapshots.iter().map(|s| &s.name).collect();
        if is != was {
            return Err(format!("the snapshots are {is:?} instead of {was:?}"));
        }
        for ((name, tags), snapshot) in found.iter().zip(&model.snapshots) {
            check_cells(&snapshot.cells, tags).map_err(|e| format!("{name}: {e}"))?;
        }
        Ok(())
    }

    /// What is said to be zero is.
    fn check_status(&self, queue: &Queue, device: &Device, found: &[Tag]) -> Verdict {
        let size = device.size();
        let mut at = 0;
        while at < size {
            let status = match queue.block_on(device.status(queue, at, size - at)) {
                Ok(status) => status,
                Err(_) if self.damaged => {
                    at += SECTOR;
                    continue;
                }
                Err(e) => return Err(format!("error: status at {at:#x}: {e}")),
            };
            let sectors = at.div_ceil(SECTOR)..(at + status.length) / SECTOR;
            for sector in sectors {
                let cell = &self.model.cells[sector as usize];
                if status.zero && found[sector as usize] != ZERO && !cell.may_be(ZERO) {
                    return Err(format!(
                        "content: status says that sector {sector:#x} is zero, it reads as {}, and was {}",
                        match found[sector as usize] {
                            UNREADABLE => "an error".into(),
                            tag => content::name(tag),
                        },
                        cell.now()
                            .map(content::name)
                            .collect::<Vec<_>>()
                            .join(" or ")
                    ));
                }
            }
            at += status.length;
        }
        Ok(())
    }

    /// A check finds leaked clusters at worst, and none if nothing was interrupted.
    fn check_tables(&mut self, queue: &Queue, device: &Device) -> Verdict {
        if self.damaged {
            return Ok(());
        }
        let LayerImage::Qcow2(image) = &device.top().image else {
            return Ok(());
        };
        let mut messages = Vec::new();
        let report = jobs::check(queue, image, &mut |message| messages.push(message));
        let report = report.map_err(said("check"))?;
        let allowed = match self.flags {
            true => allowed_flags(&messages, image.geometry().cluster_size()),
            false => 0,
        };
        let bad = report.corruptions > allowed
            || report.check_errors > 0
            || report.leaks > 0 && !self.untidy;
        match bad {
            true => {
                let messages: Vec<_> = messages.iter().take(10).map(ToString::to_string).collect();
                Err(format!("check: {report:?}\n{}", messages.join("\n")))
            }
            false => Ok(()),
        }
    }

    fn judge_base(&mut self, queue: &Queue, number: usize) -> Verdict {
        let device = self
            .open_base(queue, number, false)
            .map_err(said("open a base"))?;
        let sectors = device.size().div_ceil(SECTOR) as usize;
        let mut bytes = vec![0; sectors * SECTOR as usize];
        let length = device.size() as usize;
        let read = device.read_blocking(queue, 0, &mut bytes[..length]);
        read.map_err(said("read a base"))?;
        let found: Vec<_> = identify_all(&bytes, 0).collect();
        check_cells(&self.bases[number].cells, &found)
            .map_err(|e| format!("content: base {number}: {e}"))
    }

    fn job(&mut self, id: u32, job: Job, stop: Stop) -> Verdict {
        if let Stop::Cut(operations, cut) = stop {
            self.disk.cut_after(operations, cut);
        }
        let result = match job {
            Job::Commit(empty) => self.commit(empty),
            Job::Rebase(base, compress) => self.rebase(Some(compress), base),
            Job::RebaseUnsafe(base) => self.rebase(None, base),
            Job::Amend(version, order, lazy) => self.amend(version, order, lazy),
            Job::Repair(mode) => self.repair(mode),
            Job::Convert(bits, compress) => self.convert(id, bits, compress),
        };
        let off = self.disk.is_off();
        let refused = match &result {
            Err(e) => e.starts_with("refused: "),
            Ok(()) => false,
        };
        if off || result.is_err() && !refused {
            self.untidy = true;
        }
        if let Err(e) = result
            && !refused
            && !self.may_fail()
        {
            return Err(format!("error: {job:?}: {e}"));
        }
        if off {
            return self.after_cut();
        }
        self.disk.cut_off();
        self.judge()
    }

    /// Opens the image for a job; None: it refuses.
    fn open_for_job(&mut self, queue: &Queue, no_backing: bool) -> Verdict<Device> {
        let options = OpenOptions {
            write: true,
            discard: Some(true),
            no_backing,
            ..OpenOptions::default()
        };
        let device = self
            .open(queue, &Run::plain(), options)
            .map_err(said("open"))?;
        if self.damaged {
            self.regrow();
        }
        Ok(device)
    }

    fn commit(&mut self, empty: bool) -> Verdict {
        let Some(number) = self.backing else {
            return Ok(());
        };
        let queue = sched::queue(4);
        let top = self.open_for_job(&queue, true)?;
        let base = self
            .open_base(&queue, number, true)
            .map_err(said("open the base"))?;
        let options = CommitOptions {
            empty,
            rate: None,
            engine: EngineKind::Threads,
        };
        let result = jobs::commit(&queue, top, base, &options, |_| {});
        // The base has what the image says, and the image reads as before.
        let now = self.now();
        let below = &mut self.bases[number].cells;
        if below.len() < self.model.cells.len() {
            below.resize_with(self.model.cells.len(), || Cell::new(ZERO));
        }
        for (cell, view) in below.iter_mut().zip(&self.model.cells) {
            let old = std::mem::take(cell);
            *cell = view.clone();
            if result.is_err() {
                old.now().for_each(|tag| cell.add(tag, now));
            }
        }
        for model in self.models() {
            if empty {
                model
                    .cells
                    .iter_mut()
                    .for_each(|cell| cell.explicit = false);
            }
        }
        self.shift_snapshots(number);
        // Other images that lie on it show its content.
        let mut changed = vec![number];
        for above in (0..number).rev() {
            let Some(below) = self.bases[above]
                .below
                .filter(|below| changed.contains(below))
            else {
                continue;
            };
            changed.push(above);
            let under = self.bases[below].cells.clone();
            for (cell, under) in self.bases[above].cells.iter_mut().zip(under) {
                under.now().for_each(|tag| cell.add(tag, now));
            }
        }
        result.map_err(|e| e.to_string())
    }

    /// Snapshots show the base where they say nothing themselves.
    fn shift_snapshots(&mut self, number: usize) {
        let now = self.now();
        let base = self.bases[number].cells.clone();
        for snapshot in &mut self.model.snapshots {
            for (sector, cell) in snapshot.cells.iter_mut().enumerate() {
                if !cell.explicit {
                    match base.get(sector) {
                        Some(base) => base.now().for_each(|tag| cell.add(tag, now)),
                        None => cell.add(ZERO, now),
                    }
                }
            }
        }
    }

    fn rebase(&mut self, safe: Option<bool>, base: usize) -> Verdict {
        if self.data_is_raw() {
            return Ok(());
        }
        let queue = sched::queue(4);
        let number = (base < self.bases.len()).then_some(base);
        let name = number.map(|number| self.backing_name(number));
        let overlay = self.open_for_job(&queue, safe.is_none())?;
        let result = match safe {
            Some(compress) => {
                let new = number.map(|number| self.open_base(&queue, number, false));
                let new = new.transpose().map_err(said("open the new base"))?;
                let options = RebaseOptions {
                    compress,
                    engine: EngineKind::Threads,
                };
                jobs::rebase(&queue, overlay, new, name.as_ref(), &options, |_| {})
            }
            None => jobs::rebase_unsafe(&queue, overlay, name.as_ref()),
        };
        if safe.is_none() {
            let now = self.now();
            let below = number
                .map(|number| self.bases[number].cells.clone())
                .unwrap_or_default();
            for model in self.models() {
                for (sector, cell) in model.cells.iter_mut().enumerate() {
                    if !cell.explicit {
                        match below.get(sector) {
                            Some(below) => below.now().for_each(|tag| cell.add(tag, now)),
                            None => cell.add(ZERO, now),
                        }
                    }
                }
            }
        }
        match number {
            Some(number) => self.shift_snapshots(number),
            None => {
                let now = self.now();
                let cells = self.model.snapshots.iter_mut().flat_map(|s| &mut s.cells);
                cells
                    .filter(|cell| !cell.explicit)
                    .for_each(|cell| cell.add(ZERO, now));
            }
        }
        result.map_err(|e| match &e {
            jobs::RebaseError::Header(e) | jobs::RebaseError::Write(e) if is_refusal(e) => {
                format!("refused: {e}")
            }
            e => e.to_string(),
        })
    }

    fn data_is_raw(&self) -> bool {
        let data_file = &self.scenario.origin.create.data_file;
        self.data.is_some() && data_file.as_ref().is_some_and(|d| d.raw)
    }

    fn amend(&mut self, version: Option<u32>, order: Option<u32>, lazy: Option<bool>) -> Verdict {
        let queue = sched::queue(4);
        let device = self.open_for_job(&queue, false)?;
        let options = AmendOptions {
            version,
            refcount_order: order,
            lazy_refcounts: lazy,
            ..AmendOptions::default()
        };
        if version == Some(2) {
            // There a cluster cannot say that it is zero.
            for model in self.models() {
                let zeroes = model.cells.iter_mut().filter(|cell| cell.may_be(ZERO));
                zeroes.for_each(|cell| cell.explicit = false);
            }
        }
        jobs::amend(&queue, device, &options).map_err(|e| match is_refusal(&e) {
            true => format!("refused: {e}"),
            false => e.to_string(),
        })
    }

    fn repair(&mut self, mode: RepairMode) -> Verdict {
        let queue = sched::queue(4);
        let file = self.disk.open(self.image, CacheMode::WriteBack, 1);
        let report = jobs::repair(&queue, file, mode, &mut |_| {});
        let report = report.map_err(|e| e.to_string())?;
        if self.damaged {
            // What the damage touched may be gone for good, and is not followed any further.
            self.refused = true;
            return Ok(());
        }
        if report.corruptions == 0 && mode == RepairMode::All {
            self.flags = false;
        }
        Ok(())
    }

    fn convert(&mut self, id: u32, cluster_bits: u32, compress: bool) -> Verdict {
        let queue = sched::queue(4);
        let source = self.open(&queue, &Run::plain(), OpenOptions::default());
        let source = source.map_err(said("open the source"))?;
        let create = CreateQcow2 {
            size: source.size(),
            cluster_bits,
            extended_l2: cluster_bits >= 14 && id & 1 == 1,
            ..CreateQcow2::default()
        };
        let file = self.disk.add(Vec::new());
        let storage = self.disk.open(file, CacheMode::WriteBack, 1);
        create_qcow2(&queue, &*storage, None, &create).map_err(said("create the target"))?;
        let options = OpenOptions {
            write: true,
            format: Some(Format::Qcow2),
            ..OpenOptions::default()
        };
        let target = Device::from_storage(&queue, storage, &options);
        let target = target.map_err(said("open the target"))?;
        let options = ConvertOptions {
            zero_from: Some(0),
            compress: compress.then(CompressOptions::default),
            engine: EngineKind::Threads,
            ..ConvertOptions::default()
        };
        let result = jobs::convert(vec![source], Target::Image(target), &options, |_| {});
        result.map_err(|e| e.to_string())?;
        // Work goes on with the new image.
        self.image = file;
        self.data = None;
        self.cluster = 1 << (cluster_bits - 9);
        self.model.snapshots.clear();
        self.others.clear();
        self.untidy = false;
        self.flags = false;
        for cell in &mut self.model.cells {
            let has_data = cell.now().all(|tag| tag != ZERO);
            cell.explicit = has_data;
        }
        if self.damaged {
            // It has what could be read.
            self.damaged = false;
            self.lost_snapshots = false;
        }
        Ok(())
    }

    fn trim(&mut self, bytes: u64) {
        let mut content = self.disk.bytes(self.image);
        let walk = walk(&content);
        let has_snapshots = !self.model.snapshots.is_empty() || self.lost_snapshots;
        if has_snapshots || self.damaged || self.data.is_some() || self.refused {
            return;
        }
        let last = walk
            .mapped
            .iter()
            .filter_map(|m| m.host)
            .map(|h| h.0 + 1)
            .max();
        let used = content
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |at| at as u64 + 1);
        let needed = used.max(walk.end_of_tables()).max(last.unwrap_or(0));
        let length = content.len() as u64;
        if needed < length {
            content.truncate((needed + bytes % (length - needed)) as usize);
            self.disk.set_bytes(self.image, content);
        }
    }

    /// Damages the file, and notes which sectors that touches.
    fn damage(&mut self, damage: Damage) {
        let mut bytes = self.disk.bytes(self.image);
        let seen = walk(&bytes);
        let version = self.version;
        // A reserved bit, or one of the offset that is zero where clusters are aligned.
        let bit = |n: u64, low: u64| {
            let align = seen.cluster.trailing_zeros() as u64;
            let bits: Vec<u64> = (low..align)
                .chain(if version >= 3 { 57..62 } else { 0..0 })
                .collect();
            bits[(n >> 20) as usize % bits.len()]
        };
        let entry = match damage {
            Damage::L1(n) => {
                let all: Vec<_> = seen.l1.iter().map(|e| e.1).collect();
                (!all.is_empty()).then(|| (all[n as usize % all.len()], bit(n, 1)))
            }
            Damage::L2(n) => {
                let plain = |m: &&crate::walk::Mapped| m.entry.value >> 62 & 1 == 0;
                let all: Vec<_> = seen.mapped.iter().filter(plain).map(|m| m.entry).collect();
                (!all.is_empty()).then(|| (all[n as usize % all.len()], bit(n, 1)))
            }
            Damage::Refcount(n) => {
                let all = &seen.refcounts;
                (!all.is_empty()).then(|| (all[n as usize % all.len()], bit(n, 0)))
            }
            Damage::Truncate(n) => {
                if bytes.is_empty() {
                    return;
                }
                let length = n % bytes.len() as u64;
                self.truncated(&seen, length, bytes.len() as u64);
                bytes.truncate(length as usize);
                self.disk.set_bytes(self.image, bytes);
                return;
            }
            Damage::Extend(n) => {
                let mut rng = Rng::new(n);
                // The cluster in which the file ends is there as a whole, as zeroes.
                bytes.resize(bytes.len().next_multiple_of(seen.cluster as usize), 0);
                let noise = (0..n).map(|_| rng.next() as u8);
                bytes.extend(noise);
                self.disk.set_bytes(self.image, bytes);
                // What was cut off may be there again, as noise.
                let cut = self.model.cells.iter_mut().filter(|cell| cell.cut);
                cut.for_each(|cell| cell.wild = true);
                self.untidy = true;
                return;
            }
        };
        let Some((entry, bit)) = entry else {
            return;
        };
        let value = entry.value ^ 1 << bit;
        bytes[entry.at as usize..][..8].copy_from_slice(&value.to_be_bytes());
        self.disk.set_bytes(self.image, bytes);
        self.damaged = true;
        self.untidy = true;
    }

    /// The file of an image was cut: what lay behind its end is an error, or what it was.
    fn truncated(&mut self, seen: &crate::walk::Walk, length: u64, old: u64) {
        if length == old {
            return;
        }
        self.damaged = true;
        self.untidy = true;
        self.lost_snapshots = true;
        let now = self.now();
        let lost = |at: u64, size: u64| at + size > length;
        let sectors = self.model.cells.len();
        let cells = &mut self.model.cells;
        let mut each = |guest: u64, size: u64, change: &mut dyn FnMut(&mut Cell)| {
            let first = (guest / SECTOR) as usize;
            let last = ((guest + size).div_ceil(SECTOR) as usize).min(sectors);
            cells[first.min(last)..last].iter_mut().for_each(change);
        };
        // Tables that are gone: what they mapped may be anything that the base has, or zero.
        let main = seen.tables.first().is_some_and(|t| lost(t.0, t.1));
        if main {
            each(0, u64::MAX >> 1, &mut |cell| cell.wild = true);
        }
        for (guest, entry) in &seen.l1 {
            let table = entry.value & 0x00ff_ffff_ffff_fe00;
            if lost(table, seen.cluster) || lost(entry.at, 8) {
                each(*guest, seen.coverage, &mut |cell| cell.wild = true);
            }
        }
        for mapped in &seen.mapped {
            if let Some((host, size)) = mapped.host
                && lost(host, size)
            {
                each(mapped.guest, seen.cluster, &mut |cell| cell.cut = true);
                let compressed = mapped.entry.value >> 62 & 1 == 1;
                if host < length && compressed {
                    each(mapped.guest, seen.cluster, &mut |cell| cell.wild = true);
                } else if host < length {
                    // The rest of the cluster where the file ends is zero.
                    let end = mapped.guest + (length - host) / SECTOR * SECTOR;
                    each(end, SECTOR, &mut |cell| cell.wild = true);
                    let rest = seen.cluster - (length - host) / SECTOR * SECTOR;
                    each(end, rest, &mut |cell| cell.add(ZERO, now));
                }
            }
        }
    }

    /// A damaged file is opened for writing, and may grow: what was cut off is zero then.
    fn regrow(&mut self) {
        let now = self.now();
        let cut = self.model.cells.iter_mut().filter(|cell| cell.cut);
        cut.for_each(|cell| cell.add(ZERO, now));
    }
}

/// The contents of sectors.
fn identify_all(bytes: &[u8], first: usize) -> impl Iterator<Item = Tag> + '_ {
    let sectors = (first as u64..).zip(bytes.chunks(SECTOR as usize));
    sectors.map(|(sector, bytes)| content::identify(bytes, sector))
}

fn check_read(model: &Model, range: &Range<usize>, seen: &[Vec<Tag>], bytes: &[u8]) -> Verdict {
    let found = bytes.chunks(SECTOR as usize);
    for ((sector, found), may_be) in range.clone().zip(found).zip(seen) {
        let is_wild = model.cells.get(sector).is_some_and(|cell| cell.wild);
        let tag = content::identify(found, sector as u64);
        let is_right = may_be.contains(&tag) || is_wild;
        if !is_right && !content::is_mixture(found, sector as u64, may_be) {
            let names: Vec<_> = may_be.iter().map(|tag| content::name(*tag)).collect();
            return Err(format!(
                "content: sector {sector:#x} is {} instead of {}",
                content::describe(found, sector as u64),
                names.join(" or ")
            ));
        }
    }
    Ok(())
}

fn said(what: &str) -> impl FnOnce(zebu::Error) -> String {
    move |e| format!("{what}: {e}")
}

/// Carries a request out; what was read.
async fn perform(
    device: Rc<Device>,
    queue: Queue,
    kind: Kind,
    range: Range<usize>,
    tag: Tag,
) -> zebu::Result<Vec<u8>> {
    let (offset, length) = (range.start as u64 * SECTOR, range.len() as u64 * SECTOR);
    let mut bytes = match kind {
        Kind::Read => vec![0; length as usize],
        Kind::Write | Kind::Compressed => {
            content::bytes_of(range.clone().map(|_| tag), range.start as u64)
        }
        _ => Vec::new(),
    };
    // SAFETY: `bytes` lives in this future until the request has ended; a future that is dropped
    // ends the request first, since that is dropped before its variables.
    #[allow(unsafe_code)]
    let iov = unsafe { Iov::from_raw(bytes.as_mut_ptr(), bytes.len()) };
    match kind {
        Kind::Read => device.read(&queue, offset, &iov).await?,
        Kind::Write => device.write(&queue, offset, &iov).await?,
        Kind::Compressed => device.write_compressed(&queue, offset, &iov).await?,
        Kind::Zero(zeroing) => device.write_zeroes(&queue, offset, length, zeroing).await?,
        Kind::Discard => device.discard(&queue, offset, length).await?,
        Kind::Flush => device.flush(&queue).await?,
    }
    Ok(bytes)
}

/// How many copied flags are wrong without danger, as docs/reliability.md has it: one that is
/// missing where the refcount is 1, and one that is set where there is one reference and the
/// refcount is too high.
fn allowed_flags(messages: &[CheckMessage], cluster_size: u64) -> u64 {
    const COPIED: u64 = 1 << 63;
    const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
    let alone = |entry: u64| {
        messages.iter().any(|message| match message {
            CheckMessage::Leaked {
                cluster,
                references,
                ..
            } => *references == 1 && *cluster == (entry & OFFSET) / cluster_size,
            _ => false,
        })
    };
    let is_allowed = |message: &&CheckMessage| match **message {
        CheckMessage::CopiedL2 {
            entry, refcount, ..
        }
        | CheckMessage::CopiedData { entry, refcount } => match entry & COPIED {
            0 => refcount == 1,
            _ => refcount > 1 && alone(entry),
        },
        _ => false,
    };
    messages.iter().filter(is_allowed).count() as u64
}
