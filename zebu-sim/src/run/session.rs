//! Sessions: opening, requests and their ends, closing, and stopping without.

use std::ops::Range;

use zebu::block::{Device, OpenOptions, SharedDevice};
use zebu::storage::{Iov, Queue};

use super::{Flying, IDLE_ROUNDS, MOST_IN_FLIGHT, Run, Session, TURNS, Verdict};
use crate::cell::Time;
use crate::content::{self, Tag, ZERO};
use crate::disk::SECTOR;
use crate::model::{Model, Readings};
use crate::sched::{self, Driven, Polls};
use crate::steps::{Fate, Kind, Opening, Request, Stop};

impl Session {
    /// A change began or ended at this time.
    pub(super) fn note_change(&mut self, at: Time) {
        self.changed = self.changed.max(Some(at));
    }

    /// A flush that began at this time has ended.
    fn flushed(&mut self, began: Time) {
        let is_changing = self.flying.iter().any(|f| f.kind.is_change());
        if self.store_bitmaps && !is_changing {
            self.changed = self.changed.filter(|at| *at > began);
        }
    }
}

impl Run<'_> {
    /// Opens the image for writing, after a repair if it asks for one.
    pub(super) fn open_for_writing(
        &mut self,
        opening: &Opening,
        queue: &Queue,
    ) -> Verdict<Option<Device>> {
        let options = OpenOptions::default()
            .write(true)
            .discard(Some(opening.discard))
            .store_bitmaps(opening.store_bitmaps)
            .detect_zeroes(Some(opening.detect_zeroes))
            .copy_on_read(opening.copy_on_read)
            .l2_cache_size(opening.cache.map(|c| c.0))
            .l2_cache_entry_size(opening.cache.map(|c| c.1));
        for _ in 0..3 {
            match self.open(queue, opening, options.clone()) {
                Ok(device) => {
                    if self.damaged {
                        // Truncated clusters may be inside of the file again.
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
                // The fault has made it fail.
                Err(_) => self.disk.clear_faults(),
            }
        }
        Err("error: open fails again and again".into())
    }

    pub(super) fn open_session(&mut self, opening: &Opening) -> Verdict {
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
            device: SharedDevice::new(device),
            opening: *opening,
            watch: Default::default(),
            watched: false,
            flying: Vec::new(),
            readings: Readings::default(),
            polls: Polls::default(),
            write_through: opening.mode.is_write_through(),
            store_bitmaps: opening.store_bitmaps,
            copies: opening.copy_on_read,
            changed: None,
        });
        match opening.forget {
            true => self.forget_bitmaps(),
            false => Ok(()),
        }
    }

    /// The session. Opens the image if there is none.
    pub(super) fn session(&mut self) -> Verdict<Option<&mut Session>> {
        self.open_session(&Run::plain())?;
        Ok(self.session.as_mut())
    }

    pub(super) fn request(&mut self, id: u32, request: &Request) -> Verdict {
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
            Kind::Read | Kind::Flush | Kind::Exchange(_) => None,
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
            session.note_change(match request.fate {
                // It may go on after its end.
                Fate::Drop(_) | Fate::StallDrop(_) => Time::MAX,
                Fate::Run | Fate::Stall(_) => began,
            });
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

    /// One turn of the scheduler: an operation of the disk ends, or a queue runs.
    pub(super) fn turn(&mut self) -> Verdict {
        self.disk.pause();
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        if self.rng.one_in(2) {
            self.disk.advance();
        } else {
            let which = self.rng.index(session.queues.len());
            sched::turn(&session.queues[which]);
        }
        self.collect()
    }

    /// Takes the requests that have ended.
    pub(super) fn collect(&mut self) -> Verdict {
        while let Some(session) = &mut self.session {
            let Some(place) = session.flying.iter().position(|f| f.driven.is_over()) else {
                break;
            };
            let flying = session.flying.remove(place);
            self.ended(flying)?;
        }
        Ok(())
    }

    /// Runs until a request has ended, or releases a suspended one.
    pub(super) fn go_on(&mut self) -> Verdict {
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
            // No operation is in flight. Tasks of the library may still wake each other before they
            // wake a request.
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

    /// No request can make progress: releases a suspended one, or reports a hang.
    pub(super) fn idle(&mut self) -> Verdict {
        let Some(session) = &self.session else {
            return Ok(());
        };
        let stalled = session.flying.iter().find(|f| f.driven.is_stalled());
        let waiting = session.flying.iter().filter(|f| !f.driven.is_stalled());
        match stalled {
            Some(stalled) => {
                // A read that copies is a change, which may wait for others. All requests wait for an
                // exchange, and it waits for those before it.
                let is_exchange = |f: &Flying| matches!(f.kind, Kind::Exchange(_));
                let may_wait = session.copies || session.flying.iter().any(is_exchange);
                let is_read = |f: &&Flying| f.kind == Kind::Read && !may_wait;
                if let Some(read) = waiting.clone().find(is_read) {
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
                    return Err(format!("hang: no progress, and steps {ids:?} wait"));
                }
            }
        }
        self.collect()
    }

    /// Waits until no request is in flight, and no task of the library is left.
    pub(super) fn wait(&mut self) -> Verdict {
        while self.session.as_ref().is_some_and(|s| !s.flying.is_empty()) {
            self.go_on()?;
        }
        let Some(session) = &self.session else {
            return Ok(());
        };
        let mut idle = 0;
        while idle < IDLE_ROUNDS {
            idle = if self.disk.advance() { 0 } else { idle + 1 };
            session.queues.iter().for_each(sched::turn);
        }
        self.check_hook()
    }

    /// A request has ended.
    pub(super) fn ended(&mut self, flying: Flying) -> Verdict {
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
        let stores = session.store_bitmaps;
        let seen = session.readings.end(reading);
        let what = format!("{kind:?} of sectors {range:#x?}, step {id}");
        let done = match &outcome {
            Some(Ok(_)) => true,
            Some(Err(e)) => {
                let hits = self.disk.hits();
                let may = match kind {
                    Kind::Compressed => true,
                    Kind::Flush => stopped || self.flush_may_fail(stores),
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
                // After a dropped change of the whole image, the content may be the old or the new
                // one.
                if let (Some(Ok(bytes)), Some(seen), false) = (outcome, seen, self.change_dropped) {
                    check_read(&self.model, &range, &seen, &bytes)
                        .map_err(|e| format!("{e}, {what}"))?;
                }
            }
            Kind::Exchange(exchanged) => self.exchanged(exchanged, done)?,
            Kind::Flush => {
                if done {
                    if let Some(session) = &mut self.session {
                        session.flushed(began);
                    }
                    self.models().for_each(|model| model.flushed(began));
                    self.former.clear();
                }
            }
            _ => {
                let tag = match kind {
                    Kind::Write | Kind::Compressed => id,
                    _ => ZERO,
                };
                let version = self.version;
                if let Some(session) = &mut self.session {
                    session.note_change(now);
                }
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

    /// Closes the device, and verifies the image.
    pub(super) fn close(&mut self, stop: Stop) -> Verdict {
        if self.session.is_none() {
            return Ok(());
        }
        self.wait()?;
        let Some(session) = self.session.take() else {
            return Ok(());
        };
        self.interrupted |= session.changed.is_some();
        let queue = session.queues[0].clone();
        let device = session.device;
        if let Stop::Cut(operations, cut) = stop {
            self.disk.cut_after(operations, cut);
        }
        let drop_after = match stop {
            Stop::Drop(polls) => Some(polls),
            _ => None,
        };
        let result = sched::run_or_drop(&queue, drop_after, device.close(&queue));
        // The tasks of a queue end with its last handle.
        drop((queue, session.queues));
        if self.disk.is_off() {
            return self.after_cut();
        }
        match result {
            Some(Ok(())) => {
                self.interrupted = false;
                self.closed = true;
                self.models().for_each(Model::all_durable);
            }
            Some(Err(e)) => {
                let hits = self.disk.hits();
                if !self.flush_may_fail(true) {
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
    pub(super) fn abandon(&mut self) -> Verdict {
        let Some(session) = self.session.take() else {
            return Ok(());
        };
        self.interrupted |= session.changed.is_some();
        for flying in &session.flying {
            flying.driven.abandon();
        }
        // The tasks end and drop what they hold.
        session.queues.iter().for_each(sched::turn);
        drop(session);
        self.untidy = true;
        self.models().for_each(Model::crashed);
        self.judge()
    }

    /// Verifies the image after everything has stopped.
    pub(super) fn after_cut(&mut self) -> Verdict {
        if let Some(session) = self.session.take() {
            self.interrupted |= session.changed.is_some();
            for flying in &session.flying {
                flying.driven.abandon();
            }
            session.queues.iter().for_each(sched::turn);
        }
        self.disk.power_on();
        self.restarted = true;
        self.untidy = true;
        self.models().for_each(Model::crashed);
        self.undo_marks();
        self.judge()
    }
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

/// Executes a request; returns the bytes read.
async fn perform(
    device: SharedDevice,
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
    // SAFETY: `bytes` outlives the request, whose future is a temporary that is dropped first.
    #[allow(unsafe_code)]
    let iov = unsafe { Iov::from_raw(bytes.as_mut_ptr(), bytes.len()) };
    let device = device.enter().await?;
    match kind {
        Kind::Read => device.read(&queue, offset, &iov).await?,
        Kind::Write => device.write(&queue, offset, &iov).await?,
        Kind::Compressed => device.write_compressed(&queue, offset, &iov).await?,
        Kind::Zero(zeroing) => device.write_zeroes(&queue, offset, length, zeroing).await?,
        Kind::Discard => device.discard(&queue, offset, length).await?,
        Kind::Flush => device.flush(&queue).await?,
        Kind::Exchange(_) => unreachable!("it is no request"),
    }
    Ok(bytes)
}
