//! Two programs that do something with one name at once. What is there then is what one order of the two
//! gives, or what the one that succeeded gives alone.

use std::sync::Arc;

use zebu::internal::new_image::Creation;
use zebu::storage::Queue;

use super::make::IMAGE;
use super::{Run, Verdict, context};
use crate::content;
use crate::deeds::{Deed, Names, View};
use crate::disk::{Cut, Disk, SECTOR};
use crate::programs::together;
use crate::sched;
use crate::steps::{Before, Pair, PairStop, Stop};

/// The name.
const NAME: &str = "target";
/// Another name that leads to it.
const LINK: &str = "link";
/// A file that takes its place.
const OTHER: &str = "other";
/// Where its file goes.
const AWAY: &str = "away";

/// What is found: under the name, and where its file may have gone.
type Views = [View; 2];

/// What an order of the programs gives.
struct Reference {
    order: &'static [usize],
    ok: [bool; 2],
    views: Views,
}

/// The orders of two programs, and of one or none.
const ORDERS: [&[usize]; 5] = [&[0, 1], &[1, 0], &[0], &[1], &[]];

/// Looks at a disk whose operations end at once.
fn views(disk: &Arc<Disk>) -> Views {
    sched::simulate(disk);
    [View::of(disk, NAME), View::of(disk, AWAY)]
}

/// A deed that ends.
fn uncancelled(deed: Deed) -> Deed {
    match deed {
        Deed::Convert(format, compress, _) => Deed::Convert(format, compress, None),
        Deed::Write(tag, _) => Deed::Write(tag, None),
        other => other,
    }
}

impl Run<'_> {
    pub(super) fn pair(&mut self, id: u32, pair: &Pair) -> Verdict {
        self.close(Stop::No)?;
        if self.damaged || self.refused {
            return Ok(());
        }
        self.disk.set_slow(false);
        self.prepare(id, pair.before)?;
        let before = self.disk.copy();
        sched::simulate(&self.disk);
        self.disk.set_slow(true);
        self.disk.clear_faults();
        match pair.stop {
            PairStop::No => {}
            PairStop::Cut(operations, cut) => self.disk.cut_after(operations, cut),
            PairStop::Kill(program, operations) => self.disk.kill_after(program, operations),
            PairStop::Fault(fault) => self.disk.arm(fault),
        }
        let disk = self.disk.clone();
        let perform = |program: usize| {
            let result = pair.deeds[program].perform(&disk, &names(pair, program));
            (result, disk.tick())
        };
        let seed = self.rng.next();
        let (first, second) = together(&disk, seed, || perform(0), || perform(1));
        let results = [first, second?];
        let dead = [0, 1].map(|program| disk.is_dead(program));
        let (off, hit) = (disk.is_off(), !disk.hits().is_none());
        disk.revive();
        if off {
            disk.power_on();
        }
        if let Some(violation) = disk.take_violation() {
            return Err(violation);
        }
        let no_foreign = !pair.deeds.iter().any(|deed| deed.is_foreign());
        for ((result, _), dead) in results.iter().zip(dead) {
            match result {
                Err(e) if e.starts_with("promise: ") => return Err(e.clone()),
                // No program with locks takes a file away from another one. One that was killed sees no
                // names.
                Err(e) if no_foreign && !dead && e.contains("was removed or replaced") => {
                    return Err(format!("lost: {e}"));
                }
                _ => {}
            }
        }
        let found = views(&disk.copy());
        let seen = Seen {
            ok: [0, 1].map(|program| results[program].0.is_ok()),
            stopped: [0, 1].map(|program| {
                let is_cancelled = uncancelled(pair.deeds[program]) != pair.deeds[program];
                results[program].0.is_err() && (off || hit || dead[program] || is_cancelled)
            }),
            ended: [0, 1].map(|program| results[program].1),
            locked: disk.locked_at(),
            changed: disk.changed_at(),
            power: off && matches!(pair.stop, PairStop::Cut(_, Cut::Power)),
        };
        seen.check_names(&pair.deeds)?;
        let mut references = Vec::new();
        let mut is_right = false;
        for order in ORDERS {
            if !is_right {
                references.push(reference(&before, pair, order));
                is_right = seen.is_of(pair, &references[references.len() - 1], &found);
            }
        }
        sched::simulate(&disk);
        if !is_right && !seen.was_stopped(pair, &references, &found) {
            let results = results.map(|(result, _)| result);
            let references: Vec<_> = references
                .iter()
                .map(|r| format!("    {:?} gives {:?}, {:?}", r.order, r.ok, r.views))
                .collect();
            return Err(format!(
                "together: {results:?} and {found:?}, but\n{}",
                references.join("\n")
            ));
        }
        for name in [NAME, LINK, OTHER, AWAY] {
            // Not all of them are there.
            let _ = disk.remove(name);
        }
        disk.sync_names();
        disk.forget_nameless();
        match off {
            true => self.after_cut(),
            false => self.judge(),
        }
    }

    /// Makes what is there before.
    fn prepare(&self, id: u32, before: Before) -> Verdict {
        let disk = &self.disk;
        disk.link(LINK, NAME);
        let raw = |name: &str, tag, sectors: u64| {
            let file = disk.add_named(name);
            disk.set_bytes(file, content::bytes_of((0..sectors).map(|_| tag), 0));
        };
        raw(OTHER, 0x2000_0000 | id, 77);
        match before {
            Before::Nothing => {}
            Before::Empty => raw(NAME, 0, 0),
            Before::Raw => raw(NAME, 0x1000_0000 | id, 333),
            Before::Qcow2 => make_qcow2(&sched::queue(4), 0x1000_0000 | id, disk)?,
        }
        disk.sync_names();
        Ok(())
    }
}

/// What an order gives, without errors.
fn reference(before: &Disk, pair: &Pair, order: &'static [usize]) -> Reference {
    let copy = before.copy();
    sched::simulate(&copy);
    let mut ok = [false; 2];
    for program in order {
        let deed = uncancelled(pair.deeds[*program]);
        ok[*program] = deed.perform(&copy, &names(pair, *program)).is_ok();
    }
    Reference {
        order,
        ok,
        views: views(&copy),
    }
}

fn make_qcow2(queue: &Queue, tag: u32, disk: &Arc<Disk>) -> Verdict {
    let creation = Creation::new(NAME.as_ref(), "qcow2", &[]).map_err(context("prepare"))?;
    let made = creation.create(queue, Some(500 * SECTOR));
    made.map_err(context("prepare"))?;
    Deed::Write(tag, None).perform(disk, &names_of(NAME))
}

fn names(pair: &Pair, program: usize) -> Names<'static> {
    names_of(
        match pair.by_link[program] && !pair.deeds[program].is_foreign() {
            true => LINK,
            false => NAME,
        },
    )
}

fn names_of(name: &'static str) -> Names<'static> {
    Names {
        name,
        source: IMAGE,
        other: OTHER,
        away: AWAY,
    }
}

/// Whether a deed changes an image, and must say whether it did.
fn matters(deed: Deed) -> bool {
    !deed.is_foreign() && !deed.only_looks()
}

/// How two programs ended.
struct Seen {
    ok: [bool; 2],
    /// Those that failed because of an error of the disk, or were killed or cancelled.
    stopped: [bool; 2],
    /// When they ended.
    ended: [u64; 2],
    /// When they last locked a file for writing.
    locked: [u64; 2],
    /// When they last changed a file.
    changed: [u64; 2],
    /// Names that were not synced may be lost.
    power: bool,
}

impl Seen {
    /// A target that loses its name while it is written is an error.
    fn check_names(&self, deeds: &[Deed; 2]) -> Verdict {
        for p in 0..2 {
            let other = 1 - p;
            let loses = self.locked[p] < self.ended[other] && self.ended[other] < self.changed[p];
            // It is whole when it is opened, and closed later.
            let opens = matches!(deeds[p], Deed::CreateNew(_));
            if deeds[p].makes()
                && !opens
                && self.ok[p]
                && deeds[other].is_foreign()
                && self.ok[other]
                && loses
            {
                return Err(format!(
                    "lost: {:?} has lost its target to {:?}, and ended well",
                    deeds[p], deeds[other]
                ));
            }
        }
        Ok(())
    }

    /// Whether this order has given what was found.
    fn is_of(&self, pair: &Pair, reference: &Reference, found: &Views) -> bool {
        let matters = (0..2).filter(|p| matters(pair.deeds[*p]));
        let mut did = matters.map(|p| (p, reference.order.contains(&p) && reference.ok[p]));
        // A file that was made, and moved away before it was locked, is made again.
        let is_same = |n: usize| reference.views[n] == found[n];
        let is_same = is_same(0) && (is_same(1) || found[1] == View::Empty);
        did.all(|(p, did)| did == self.ok[p]) && is_same
    }

    /// Whether programs that were stopped may have left that.
    fn was_stopped(&self, pair: &Pair, references: &[Reference], found: &Views) -> bool {
        let deeds = &pair.deeds;
        // The file is under another name then, whatever it holds.
        let moved = deeds.contains(&Deed::MoveAway)
            && self
                .ok
                .iter()
                .zip(deeds)
                .any(|(ok, deed)| *ok && *deed == Deed::MoveAway);
        let foreign = deeds.iter().any(|deed| deed.is_foreign());
        if self.power && foreign || moved && !(0..2).any(|p| matters(deeds[p]) && self.ok[p]) {
            return true;
        }
        (0..2).any(|p| {
            let other = 1 - p;
            // What a program has finished stays, unless it is replaced later. It may end after another one
            // has taken its lock.
            let is_free = !self.ok[other]
                || deeds[other].only_looks()
                || self.locked[p] > self.changed[other];
            // What was written in part before the other program changed the image, and a file that was made after its
            // name was removed, and not locked yet.
            let is_write = |deed: Deed| matches!(deed, Deed::Write(..));
            let is_below =
                is_write(deeds[p]) && !deeds[other].makes() && self.locked[p] < self.locked[other];
            let is_made = deeds[p].makes() && deeds[other].is_foreign() && found[0] == View::Empty;
            // What it had done when it was stopped, with what the other program did.
            let is_done = references
                .iter()
                .any(|r| r.order.contains(&other) && r.ok[other] && r.views[0] == found[0]);
            let is_free = is_free || is_below || is_made || is_done;
            self.stopped[p] && is_free && self.is_left_by(p, deeds, references, found)
        })
    }

    /// Whether a program that was stopped may leave that: a new image opens only if it is whole or
    /// still empty.
    fn is_left_by(
        &self,
        p: usize,
        deeds: &[Deed; 2],
        references: &[Reference],
        found: &Views,
    ) -> bool {
        let deed = deeds[p];
        let whole = references.iter().any(|r| r.views[0] == found[0]);
        match &found[0] {
            _ if whole || deed.format() == "raw" => true,
            View::Disk(format, sum, ..) if deed.makes() => format != deed.format() || *sum == 0,
            // Part of a change.
            View::Disk(..) => true,
            View::Absent | View::Empty | View::Unopenable(..) => deed.makes(),
        }
    }
}
