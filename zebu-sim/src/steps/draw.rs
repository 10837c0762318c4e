//! Steps that are drawn from a seed.

use zebu::block::{DetectZeroes, Preallocation, Zeroing};
use zebu::jobs::RepairMode;
use zebu::storage::CacheMode;
use zebu_testkit::Rng;

use super::origin::draw_preallocation;
use super::{
    Before, Beside, BitmapChange, Damage, Exchange, ExchangeKind, Fate, ImageChange, Job, Kind,
    NewBitmap, Opening, Origin, Pair, PairStop, Request, Scenario, Step, Stop, What,
};
use crate::deeds::Deed;
use crate::disk::{Class, Cut, Failure, Fault};

impl Scenario {
    /// The simulation of a seed, with this number of steps and without these [`KINDS`].
    pub fn random(seed: u64, steps: usize, without: &[String]) -> Scenario {
        let with = |kind: &str| !without.iter().any(|w| w == kind);
        let mut rng = Rng::new(seed);
        let has_bitmaps = rng.one_in(2) && with("bitmaps");
        let mut origin = Origin::random(&mut rng, has_bitmaps);
        // By a seed of its own, so that other simulations do not depend on it.
        let mut own = Rng::new(seed ^ 0x0f0 << 32);
        if own.one_in(8) && with("formats") {
            origin.become_other(&mut own);
        }
        let mut draw = Draw::new(rng, &origin, has_bitmaps, &with);
        let steps = (1..=steps as u32).map(|id| draw.step(id)).collect();
        Scenario { origin, steps }
    }

    /// A simulation that has only steps with two programs.
    pub fn of_programs(seed: u64, steps: usize) -> Scenario {
        let mut rng = Rng::new(seed);
        let mut origin = Origin::random(&mut rng, false);
        // Most of the operations are those of the names then.
        origin.create.size = origin.create.size.min(64 << 10);
        let mut draw = Draw::new(rng, &origin, false, &|_| true);
        let steps = (1..=steps as u32).map(|id| Step {
            id,
            seed: draw.rng.next(),
            what: What::Pair(draw.pair(id)),
            beside: None,
        });
        let steps = steps.collect();
        Scenario { origin, steps }
    }
}

/// The properties of the image that steps are drawn for.
struct Draw {
    rng: Rng,
    is_qcow2: bool,
    /// Sectors of a cluster, and of the disk.
    cluster: usize,
    sectors: usize,
    /// Where half of the requests go.
    hot: usize,
    discards: u64,
    drops: bool,
    stalls: bool,
    faults: bool,
    damage: bool,
    cuts: bool,
    jobs: bool,
    changes: bool,
    bitmaps: bool,
    programs: bool,
    exchanges: bool,
    bases: u64,
    /// What comes next, the last one first.
    planned: Vec<What>,
    /// What comes at once.
    next: Option<What>,
}

impl Draw {
    fn new(mut rng: Rng, origin: &Origin, has_bitmaps: bool, with: &dyn Fn(&str) -> bool) -> Draw {
        // Steps that other formats do not have, or that need to know the tables.
        let (is_qcow2, with) = (origin.other.is_none(), |kind: &str| {
            let of_all = ["drops", "stalls", "faults", "cuts"];
            with(kind) && (origin.other.is_none() || of_all.contains(&kind))
        });
        Draw {
            is_qcow2,
            cluster: 1 << (origin.create.cluster_bits - 9),
            sectors: (origin.create.size / 512) as usize,
            hot: rng.below(1 << 20) as usize,
            discards: 1 + rng.below(3),
            drops: rng.one_in(2) && with("drops"),
            stalls: rng.one_in(3) && with("stalls"),
            faults: rng.one_in(3) && with("faults"),
            damage: rng.one_in(3) && with("damage"),
            cuts: rng.one_in(2) && with("cuts"),
            jobs: rng.one_in(2) && with("jobs"),
            changes: rng.one_in(2) && with("wholes"),
            bitmaps: has_bitmaps && is_qcow2,
            programs: rng.one_in(2) && with("programs"),
            bases: origin.bases.len() as u64,
            exchanges: rng.one_in(2) && with("exchanges"),
            planned: Vec::new(),
            next: None,
            rng,
        }
    }

    fn step(&mut self, id: u32) -> Step {
        let seed = self.rng.next();
        let what = match self.rng.below(100) {
            _ if self.next.is_some() => self.next.take().unwrap_or(What::Wait),
            // Requests between them are as likely as elsewhere.
            0..40 if !self.planned.is_empty() => self.planned.pop().unwrap_or(What::Wait),
            83 if self.changes => self.life_of_a_snapshot(),
            76..80 if self.bitmaps => {
                let change = ImageChange::Bitmap(self.change_bitmap());
                What::Change(change, self.stop())
            }
            66..74 if self.exchanges => What::Exchange(self.exchange()),
            74..76 if self.programs => What::Pair(self.pair(id)),
            0..80 => What::Request(self.request()),
            80..83 => What::Wait,
            83..88 if self.changes => What::Change(self.change_image(), self.stop()),
            88..90 if self.faults => What::Fault(self.fault()),
            90 if self.cuts => What::Cut(self.cut()),
            91 if self.cuts => What::Abandon,
            92..94 => What::Close(self.stop()),
            97 | 98 if self.damage => What::Damage(self.damage()),
            // A session would clear it first.
            94 | 98 if self.jobs && self.rng.one_in(2) => {
                self.next = Some(What::Job(self.job(), self.stop()));
                What::Mark(2 + self.rng.below(62) as u32)
            }
            94..97 if self.jobs => What::Job(self.job(), self.stop()),
            98 if self.is_qcow2 => What::Trim(self.rng.below(4096)),
            99 => What::Open(self.opening()),
            _ => What::Request(self.request()),
        };
        let is_alone = matches!(what, What::Pair(_));
        let beside = self.programs && !is_alone && self.rng.one_in(10);
        Step {
            id,
            seed,
            what,
            beside: beside.then(|| self.beside(id)),
        }
    }

    fn beside(&mut self, id: u32) -> Beside {
        let deed = Deed::draw(&mut self.rng, id, false);
        let rng = &mut self.rng;
        Beside {
            deed,
            base: rng.one_in(4).then(|| rng.below(3) as usize),
            dies: (self.cuts && rng.one_in(5)).then(|| rng.below(30) as u32),
            seed: rng.next(),
        }
    }

    fn pair(&mut self, id: u32) -> Pair {
        let drops = self.drops;
        let deeds = [0, 1].map(|n| Deed::draw(&mut self.rng, 0x800 * (n + 1) + id, drops));
        let stop = match self.rng.below(8) {
            0 if self.cuts => PairStop::Cut(self.operations(), self.cut()),
            1 | 2 if self.cuts => {
                let program = self.rng.below(2) as usize;
                PairStop::Kill(program, self.operations())
            }
            3 | 4 if self.faults => PairStop::Fault(self.fault()),
            _ => PairStop::No,
        };
        let rng = &mut self.rng;
        Pair {
            deeds,
            by_link: [0, 1].map(|_| rng.one_in(4)),
            before: rng.pick(&[
                Before::Nothing,
                Before::Nothing,
                Before::Empty,
                Before::Raw,
                Before::Qcow2,
            ]),
            stop,
        }
    }

    /// A number of operations, as often small as large.
    fn operations(&mut self) -> u32 {
        let most = 1 << self.rng.below(9);
        self.rng.below(most) as u32
    }

    fn cut(&mut self) -> Cut {
        self.rng.pick(&[Cut::Kill, Cut::Power])
    }

    fn stop(&mut self) -> Stop {
        match self.rng.below(6) {
            0 if self.cuts => Stop::Cut(self.rng.below(40) as u32, self.cut()),
            1 if self.drops => Stop::Drop(1 + self.rng.below(12) as u32),
            _ => Stop::No,
        }
    }

    fn opening(&mut self) -> Opening {
        let rng = &mut self.rng;
        let discard = rng.one_in(2);
        let slice = 512u64 << rng.below(4);
        let slice = slice.min(512 * self.cluster as u64);
        let mode = match rng.below(6) {
            0 | 1 => CacheMode::None,
            2 => CacheMode::WriteThrough,
            3 => CacheMode::DirectSync,
            _ => CacheMode::WriteBack,
        };
        Opening {
            queues: 1 + rng.below(3) as usize,
            discard,
            detect_zeroes: match rng.below(4) {
                0 => DetectZeroes::On,
                1 if discard => DetectZeroes::Unmap,
                _ => DetectZeroes::Off,
            },
            cache: rng.one_in(2).then(|| (slice * (1 + rng.below(3)), slice)),
            mode,
            align: match mode {
                CacheMode::None | CacheMode::DirectSync => rng.pick(&[512, 4096]),
                _ => 1,
            },
            parts: 1 + rng.below(8) as usize,
            store_bitmaps: rng.one_in(2),
            forget: !rng.one_in(4),
            copy_on_read: rng.one_in(4),
            preallocate: rng.one_in(4),
        }
    }

    fn request(&mut self) -> Request {
        let kind = match self.rng.below(32) {
            0..7 => Kind::Read,
            7..18 => Kind::Write,
            18..20 => Kind::Compressed,
            20..22 => Kind::Zero(Zeroing::Keep),
            22..24 => Kind::Zero(Zeroing::Unmap),
            24..29 if !self.rng.one_in(self.discards) => Kind::Discard,
            29..31 => Kind::Flush,
            _ => Kind::Write,
        };
        let (cluster, rng) = (self.cluster, &mut self.rng);
        let unit = match kind {
            Kind::Compressed => cluster,
            _ => rng.pick(&[1, 1, 4, 8, cluster]),
        };
        let start = match rng.one_in(2) {
            true => rng.index(self.sectors),
            false => self.hot + rng.index(4 * cluster),
        };
        let most = match rng.below(8) {
            0..5 => 2 * unit as u64,
            5..7 => 2 * cluster as u64,
            _ => 8 * cluster as u64,
        };
        let queue = rng.below(8) as usize;
        let count = ((1 + rng.below(most) as usize).next_multiple_of(unit)).min(512);
        Request {
            queue,
            kind,
            start: start / unit * unit,
            count,
            fate: self.fate(),
            turns: self.rng.pick(&[0, 0, 2, 8, 60]),
        }
    }

    fn fate(&mut self) -> Fate {
        let rng = &mut self.rng;
        let polls = 1 << rng.below(5);
        let polls = 1 + rng.below(polls) as u32;
        match rng.below(10) {
            0 if self.drops => Fate::Drop(polls),
            1 if self.stalls => Fate::Stall(polls),
            2 if self.stalls && self.drops => Fate::StallDrop(polls),
            _ => Fate::Run,
        }
    }

    fn exchange(&mut self) -> Exchange {
        let bits = 9 + self.rng.below(8) as u32;
        let kinds = [
            ExchangeKind::Overlay(bits),
            ExchangeKind::Overlay(bits),
            ExchangeKind::Overlay(bits),
            ExchangeKind::Below,
            ExchangeKind::Hook,
        ];
        Exchange {
            queue: self.rng.below(8) as usize,
            kind: self.rng.pick(&kinds),
            fate: self.fate(),
            turns: self.rng.pick(&[0, 0, 2, 8, 60]),
        }
    }

    fn change_image(&mut self) -> ImageChange {
        let rng = &mut self.rng;
        match rng.below(9) {
            0 => ImageChange::Resize(
                -(1 + rng.below(self.sectors as u64) as i64),
                Preallocation::Off,
            ),
            1 => ImageChange::Resize(-(1 + rng.below(16) as i64), Preallocation::Off),
            2 | 3 => {
                let more = 1 + rng.below(20 * self.cluster as u64) as i64;
                ImageChange::Resize(more, draw_preallocation(rng))
            }
            4 | 5 => ImageChange::Take,
            6 => ImageChange::Apply(rng.below(8) as usize),
            7 => ImageChange::VmState(1 + rng.below(64) as usize),
            _ => ImageChange::Delete(rng.below(8) as usize),
        }
    }

    /// A snapshot, most often with VM state, and what may become of its disk: another size, another
    /// backing file, or that it is taken back.
    fn life_of_a_snapshot(&mut self) -> What {
        let change = |change| What::Change(change, Stop::No);
        for _ in 0..2 + self.rng.below(3) {
            let next = match self.rng.below(5) {
                0 => change(ImageChange::Apply(self.rng.below(8) as usize)),
                // So far that VM state would be in the disk.
                1 => {
                    let more = 1 + self.rng.below(200 * self.cluster as u64) as i64;
                    change(ImageChange::Resize(more, Preallocation::Off))
                }
                2 => {
                    let less = 1 + self.rng.below(self.sectors as u64) as i64;
                    change(ImageChange::Resize(-less, Preallocation::Off))
                }
                _ if self.jobs => {
                    let base = self.rng.below(self.bases + 1) as usize;
                    What::Job(
                        match self.rng.one_in(2) {
                            true => Job::Commit(!self.rng.one_in(4)),
                            false => Job::Rebase(base, false),
                        },
                        Stop::No,
                    )
                }
                _ => What::Wait,
            };
            self.planned.push(next);
        }
        self.planned.push(change(ImageChange::Take));
        let sectors = 1 + self.rng.below(64) as usize;
        change(ImageChange::VmState(sectors))
    }

    fn change_bitmap(&mut self) -> BitmapChange {
        let rng = &mut self.rng;
        let nth = rng.below(8) as usize;
        match rng.below(10) {
            0..3 => BitmapChange::Add(NewBitmap::draw(rng)),
            3 => BitmapChange::Remove(nth),
            4 | 5 => BitmapChange::Clear(nth),
            6 | 7 => BitmapChange::Enable(nth, !rng.one_in(3)),
            8 => BitmapChange::Merge(nth, rng.below(8) as usize),
            _ => BitmapChange::MergeRandom(nth, rng.next() >> 40),
        }
    }

    fn fault(&mut self) -> Fault {
        let rng = &mut self.rng;
        let skip = 1 << rng.below(7);
        Fault {
            class: rng.pick(&[
                Class::Read,
                Class::Write,
                Class::Write,
                Class::Flush,
                Class::Punch,
            ]),
            skip: rng.below(skip) as u32,
            count: rng.pick(&[1, 1, 1, 3, 1000]),
            how: rng.pick(&[
                Failure::Error(libc::EIO),
                Failure::Error(libc::ENOSPC),
                Failure::Short,
            ]),
        }
    }

    fn job(&mut self) -> Job {
        let rng = &mut self.rng;
        let base = rng.below(self.bases + 1) as usize;
        match rng.below(7) {
            0 => Job::Commit(!rng.one_in(4)),
            1 => Job::Rebase(base, rng.one_in(4)),
            2 => Job::RebaseUnsafe(base),
            3 => Job::Amend(
                rng.one_in(2).then(|| 2 + rng.below(2) as u32),
                rng.one_in(2).then(|| rng.below(7) as u32),
                rng.one_in(3).then(|| rng.one_in(2)),
            ),
            4 => Job::Repair(RepairMode::Leaks),
            5 => Job::Repair(RepairMode::All),
            _ => Job::Convert(9 + rng.below(8) as u32, rng.one_in(3), !rng.one_in(4)),
        }
    }

    fn damage(&mut self) -> Damage {
        let rng = &mut self.rng;
        let n = rng.next() >> 8;
        match rng.below(8) {
            0..3 => Damage::L1(n),
            3 => Damage::L2(n),
            4 => Damage::Refcount(n),
            5 | 6 => Damage::Truncate(n),
            _ => Damage::Extend(1 + rng.below(100_000)),
        }
    }
}
