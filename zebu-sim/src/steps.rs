//! A scenario as data: an image and a list of steps, drawn from a seed. Any part of the list is a
//! scenario, too, so that failing ones can be shrunk.

use std::fmt;

use zebu::block::{DetectZeroes, Preallocation, Zeroing};
use zebu::jobs::{CreateQcow2, RepairMode};
use zebu::qcow2::Compression;
use zebu::storage::CacheMode;

use crate::deeds::Deed;
use crate::disk::{Class, Cut, Failure, Fault};
use zebu_testkit::{Rng, Written};

/// A simulation.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The image that it begins with.
    pub origin: Origin,
    /// The steps.
    pub steps: Vec<Step>,
}

/// An image and its possible backing files.
#[derive(Clone, Debug)]
pub struct Origin {
    /// Its format, if it is not qcow2. It has no backing file then, and no bitmaps.
    pub other: Option<Written>,
    /// Its options, without the name of its backing file. Of another format only the size counts.
    pub create: CreateQcow2,
    /// The images that may be its backing file.
    pub bases: Vec<Base>,
    /// The index of its backing file; none if there is no such base.
    pub backing: usize,
    /// Its dirty bitmaps. A base may have some of the same names.
    pub bitmaps: Vec<NewBitmap>,
}

/// A dirty bitmap that is added.
#[derive(Clone, Copy, Debug)]
pub struct NewBitmap {
    /// Bytes of the disk to a bit.
    pub granularity: u64,
    /// Whether it records changes.
    pub enabled: bool,
}

/// A backing file.
#[derive(Clone, Debug)]
pub struct Base {
    /// Bytes of its disk. For a raw image this is any number.
    pub bytes: u64,
    /// The cluster bits of a qcow2 image; None: raw.
    pub qcow2: Option<u32>,
    /// Whether the next base is its backing file.
    pub above: bool,
    /// One part in this many has data.
    pub sparse: u64,
    /// The seed of its content.
    pub seed: u64,
    /// The dirty bitmaps of a qcow2 image.
    pub bitmaps: Vec<NewBitmap>,
}

/// A step. It has its own seed, and its data contain its number, so neither changes when other steps
/// are left out.
#[derive(Clone, Debug)]
pub struct Step {
    /// The tag of what it writes.
    pub id: u32,
    /// The seed of disk and scheduler while it runs.
    pub seed: u64,
    /// Its kind.
    pub what: What,
    /// What another program does meanwhile.
    pub beside: Option<Beside>,
}

/// What another program does with the files of the simulation.
#[derive(Clone, Copy, Debug)]
pub struct Beside {
    /// What it does.
    pub deed: Deed,
    /// The base that it reads instead of the image; none if there is no such base.
    pub base: Option<usize>,
    /// It is killed after so many operations.
    pub dies: Option<u32>,
    /// The seed of the turns.
    pub seed: u64,
}

/// Two programs that do something with one name at once.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// What they do.
    pub deeds: [Deed; 2],
    /// Whether by a symbolic link.
    pub by_link: [bool; 2],
    /// What is there before.
    pub before: Before,
    /// What stops them.
    pub stop: PairStop,
}

/// What a name leads to at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// Nothing.
    Nothing,
    /// An empty file.
    Empty,
    /// A raw disk.
    Raw,
    /// A qcow2 image.
    Qcow2,
}

/// What stops two programs.
#[derive(Clone, Copy, Debug)]
pub enum PairStop {
    /// Nothing.
    No,
    /// The disk stops after so many operations.
    Cut(u32, Cut),
    /// One of them is killed after so many operations.
    Kill(usize, u32),
    /// Operations fail.
    Fault(Fault),
}

/// The kind of a step.
#[derive(Clone, Debug)]
pub enum What {
    /// Opens the image for writing, if it is not open.
    Open(Opening),
    /// Begins a request, and lets some time pass.
    Request(Request),
    /// Waits until all requests have ended.
    Wait,
    /// Changes the whole image while nothing else is in flight.
    Change(ImageChange, Stop),
    /// Exchanges the chain of the open image while requests are in flight.
    Exchange(Exchange),
    /// Operations of the disk fail from now on.
    Fault(Fault),
    /// Closes the image.
    Close(Stop),
    /// Drops all requests, then the device, without closing it.
    Abandon,
    /// The process or the machine stops now.
    Cut(Cut),
    /// A job, with the image closed.
    Job(Job, Stop),
    /// Two programs and one name, with the image closed.
    Pair(Pair),
    /// Zeroes at the end of the file are cut off, down to this length, as QEMU leaves files.
    Trim(u64),
    /// Another program leaves an autoclear bit that nobody knows in the header.
    Mark(u32),
    /// The file is damaged.
    Damage(Damage),
}

/// How a step is interrupted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stop {
    /// Not at all.
    #[default]
    No,
    /// The disk stops after so many operations.
    Cut(u32, Cut),
    /// Its future is dropped after so many polls.
    Drop(u32),
}

/// How a device is opened.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    /// Queues that requests come from.
    pub queues: usize,
    /// Whether discards are carried out.
    pub discard: bool,
    /// How writes of zeroes are treated.
    pub detect_zeroes: DetectZeroes,
    /// Bytes of L2 slices.
    pub cache: Option<(u64, u64)>,
    /// The cache mode.
    pub mode: CacheMode,
    /// The alignment of direct I/O.
    pub align: usize,
    /// The most parts of a request in flight.
    pub parts: usize,
    /// Whether each flush stores dirty bitmaps.
    pub store_bitmaps: bool,
    /// Whether inconsistent bitmaps are removed first.
    pub forget: bool,
    /// The filter `copy-on-read` over the image.
    pub copy_on_read: bool,
    /// The filter `preallocate` over its file.
    pub preallocate: bool,
}

/// A request for a range of the disk.
#[derive(Clone, Debug)]
pub struct Request {
    /// The queue that drives it.
    pub queue: usize,
    /// Its kind.
    pub kind: Kind,
    /// First sector, modulo the size of the disk.
    pub start: usize,
    /// The number of sectors.
    pub count: usize,
    /// What happens to its future.
    pub fate: Fate,
    /// Turns of the scheduler after it has begun.
    pub turns: u32,
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Write whole clusters compressed.
    Compressed,
    /// Make zero.
    Zero(Zeroing),
    /// Discard.
    Discard,
    /// Make durable.
    Flush,
    /// Exchange the chain.
    Exchange(ExchangeKind),
}

impl Kind {
    /// Whether it changes the disk.
    pub fn is_change(self) -> bool {
        !matches!(self, Kind::Read | Kind::Flush | Kind::Exchange(_))
    }
}

/// An exchange of the chain.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    /// The queue that drives it.
    pub queue: usize,
    /// What is exchanged.
    pub kind: ExchangeKind,
    /// What happens to its future.
    pub fate: Fate,
    /// Turns of the scheduler after it has begun.
    pub turns: u32,
}

/// What is exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeKind {
    /// An overlay is put on top, with clusters of so many bits, or is committed and taken away if there is
    /// one.
    Overlay(u32),
    /// The backing chain is opened again, and takes the place of itself.
    Below,
    /// A hook is added, or removed if there is one.
    Hook,
}

/// What happens to a request's future.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is polled to its end.
    Run,
    /// It is dropped after this number of polls.
    Drop(u32),
    /// After this number of polls it is suspended until all other requests have ended.
    Stall(u32),
    /// The same, and then it is dropped.
    StallDrop(u32),
}

/// A change of the whole image.
#[derive(Clone, Copy, Debug)]
pub enum ImageChange {
    /// A resize by this number of sectors.
    Resize(i64, Preallocation),
    /// A snapshot is created.
    Take,
    /// A snapshot is applied: its index, modulo their number.
    Apply(usize),
    /// A snapshot is deleted, likewise.
    Delete(usize),
    /// This number of sectors of VM state is written.
    VmState(usize),
    /// The dirty bitmaps are changed.
    Bitmap(BitmapChange),
}

impl ImageChange {
    /// Whether it changes snapshots.
    pub fn is_of_snapshots(&self) -> bool {
        match self {
            ImageChange::Take | ImageChange::Apply(_) | ImageChange::Delete(_) => true,
            ImageChange::Resize(..) | ImageChange::VmState(_) | ImageChange::Bitmap(_) => false,
        }
    }
}

/// A change of one dirty bitmap: its index, modulo their number.
#[derive(Clone, Copy, Debug)]
pub enum BitmapChange {
    /// It is added.
    Add(NewBitmap),
    /// It is removed.
    Remove(usize),
    /// It is cleared.
    Clear(usize),
    /// It records changes from now on, or does not.
    Enable(usize, bool),
    /// Another bitmap is merged into it.
    Merge(usize, usize),
    /// Random bits are merged into it, drawn from this seed.
    MergeRandom(usize, u64),
}

/// A job on the closed image.
#[derive(Clone, Copy, Debug)]
pub enum Job {
    /// Commit into the backing file; whether the image is emptied then.
    Commit(bool),
    /// Rebase to another base; whether written clusters are compressed.
    Rebase(usize, bool),
    /// An unsafe rebase, which only changes the name of the base.
    RebaseUnsafe(usize),
    /// Amend: version, refcount order, lazy refcounts.
    Amend(Option<u32>, Option<u32>, Option<bool>),
    /// A repair.
    Repair(RepairMode),
    /// Convert to a new image: cluster bits, whether compressed, whether with its bitmaps.
    Convert(u32, bool, bool),
}

/// Damage to the file of a closed image.
#[derive(Clone, Copy, Debug)]
pub enum Damage {
    /// A bit of an L1 entry is set that makes it invalid, or is ignored.
    L1(u64),
    /// The same for an L2 entry.
    L2(u64),
    /// The same for a refcount table entry.
    Refcount(u64),
    /// The file is truncated.
    Truncate(u64),
    /// This number of bytes of noise is appended.
    Extend(u64),
}

/// Kinds of steps that a simulation can leave out.
pub const KINDS: &[&str] = &[
    "drops",
    "stalls",
    "faults",
    "damage",
    "cuts",
    "jobs",
    "wholes",
    "bitmaps",
    "programs",
    "exchanges",
    "formats",
];

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

impl Origin {
    fn random(rng: &mut Rng, has_bitmaps: bool) -> Origin {
        loop {
            let origin = Origin::draw(rng, has_bitmaps);
            if origin.create.check().is_ok() {
                return origin;
            }
        }
    }

    /// Makes it an image of another format, with a few blocks.
    fn become_other(&mut self, rng: &mut Rng) {
        let other = Written::other(rng);
        let size = (other.block + 512 * rng.below(other.block / 512)).min(2 << 20);
        *self = Origin {
            other: Some(other),
            create: CreateQcow2::default().size(size),
            bases: Vec::new(),
            backing: 0,
            bitmaps: Vec::new(),
        };
    }

    fn draw(rng: &mut Rng, has_bitmaps: bool) -> Origin {
        let version = if rng.one_in(5) { 2 } else { 3 };
        let extended_l2 = version == 3 && rng.one_in(3);
        let cluster_bits = match rng.below(8) {
            _ if extended_l2 => 14 + rng.below(3) as u32,
            0 => 16,
            1..4 => 9,
            _ => 9 + rng.below(7) as u32,
        };
        let most = (1 << 20).min((1u64 << cluster_bits) * 700);
        let mut size = 512 * (8 + rng.below(most / 512));
        if rng.one_in(2) {
            size = size.next_multiple_of(1 << cluster_bits);
        }
        let bases: Vec<_> = (0..rng.below(4))
            .map(|_| Base::draw(rng, size, has_bitmaps))
            .collect();
        let backing = if rng.one_in(3) { bases.len() } else { 0 };
        let has_backing = backing < bases.len();
        let data_file = (version == 3 && rng.one_in(8))
            .then(|| zebu::jobs::NewDataFile::new("data").raw(!has_backing && rng.one_in(2)));
        Origin {
            other: None,
            create: CreateQcow2::default()
                .size(size)
                .version(version)
                .cluster_bits(cluster_bits)
                .refcount_order(match version == 3 && rng.one_in(3) {
                    true => rng.below(7) as u32,
                    false => 4,
                })
                .extended_l2(extended_l2)
                .lazy_refcounts(version == 3 && rng.one_in(4))
                .compression(match version == 3 && rng.one_in(3) {
                    true => Compression::Zstd,
                    false => Compression::Zlib,
                })
                .preallocation(match has_backing && !extended_l2 {
                    true => Preallocation::Off,
                    false => draw_preallocation(rng),
                })
                .data_file(data_file),
            bases,
            backing,
            bitmaps: draw_bitmaps(rng, has_bitmaps && version == 3),
        }
    }
}

fn draw_bitmaps(rng: &mut Rng, has_bitmaps: bool) -> Vec<NewBitmap> {
    let count = if has_bitmaps { rng.below(4) } else { 0 };
    (0..count).map(|_| NewBitmap::draw(rng)).collect()
}

impl NewBitmap {
    fn draw(rng: &mut Rng) -> NewBitmap {
        NewBitmap {
            granularity: rng.pick(&[512, 512, 1024, 4096, 64 << 10, 1 << 20]),
            enabled: !rng.one_in(4),
        }
    }
}

fn draw_preallocation(rng: &mut Rng) -> Preallocation {
    match rng.below(10) {
        0 | 1 => Preallocation::Metadata,
        2 => Preallocation::Falloc,
        3 => Preallocation::Full,
        _ => Preallocation::Off,
    }
}

impl Base {
    fn draw(rng: &mut Rng, size: u64, has_bitmaps: bool) -> Base {
        let sectors = size / 512;
        let bytes = 512
            * match rng.below(3) {
                0 => sectors,
                1 => 1 + rng.below(sectors),
                _ => sectors + rng.below(300),
            };
        let qcow2 = rng.one_in(2).then(|| 9 + rng.below(8) as u32);
        // The end of a raw image may lie within a sector.
        let odd = match qcow2.is_none() && rng.one_in(3) {
            true => crate::content::LEAST_PART + rng.below(512 - crate::content::LEAST_PART),
            false => 0,
        };
        Base {
            bytes: bytes + odd,
            qcow2,
            above: qcow2.is_some() && rng.one_in(2),
            sparse: 1 + rng.below(4),
            seed: rng.next(),
            bitmaps: draw_bitmaps(rng, has_bitmaps && qcow2.is_some()),
        }
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

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Origin {
            other,
            create,
            bases,
            backing,
            bitmaps,
        } = &self.origin;
        if let Some(other) = other {
            writeln!(f, "  of another format: {other:?}")?;
        }
        writeln!(f, "  image: {create:?}, {bitmaps:?}")?;
        for (n, base) in bases.iter().enumerate() {
            let below = if n == *backing { " (behind it)" } else { "" };
            writeln!(f, "  base {n}{below}: {base:?}")?;
        }
        for step in &self.steps {
            write!(f, "  {:>4}  {:?}", step.id, step.what)?;
            match &step.beside {
                Some(beside) => writeln!(f, " beside {beside:?}")?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }
}
