//! Damage, then work: any bit of any metadata of a sound image is changed, or the file is truncated
//! or extended. Then the image is read, written, resized, given snapshots, converted, committed,
//! rebased and repaired. Data that the damage does not concern ([`layout::Layout::suspects`]) must
//! read as before, unless the image is refused.

mod images;
mod layout;
mod named;
mod repair;
mod storage;
mod work;

use zebu_testkit::library::{self as common};

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{PrintOnPanic, Rng, Watchdog, cases, progress, repair_all};
use images::{Files, Sound};
use layout::Layout;
use zebu::storage::{EngineKind, Queue, QueueOptions};

fn queue() -> Queue {
    let options = QueueOptions::default().engine(EngineKind::Threads);
    Queue::new(options).unwrap()
}

/// Changes one or two bytes of the metadata, or the length of the file. Returns a description.
fn damage(rng: &mut Rng, sound: &Sound, file: &mut Vec<u8>) -> String {
    match rng.below(12) {
        0 | 1 => return relength(rng, &sound.layout, file),
        2..=4 => return cross(rng, sound, file),
        _ => {}
    }
    let mut said = String::new();
    for _ in 0..1 + rng.below(8) / 7 {
        let mut kinds: Vec<&str> = sound.layout.fields.iter().map(|f| f.what).collect();
        kinds.dedup();
        kinds.sort_unstable();
        kinds.dedup();
        let kind = rng.pick(&kinds);
        let fields: Vec<_> = sound
            .layout
            .fields
            .iter()
            .filter(|f| f.what == kind)
            .collect();
        let field = rng.pick(&fields);
        let other = rng.pick(&fields);
        let length = field.at.end - field.at.start;
        let at = (field.at.start + rng.below(length)) as usize;
        if field.at.end as usize > file.len() {
            continue;
        }
        match rng.below(8) {
            0..=4 => file[at] ^= 1 << rng.below(8),
            5 => file[at] = rng.pick(&[0, 1, 0x7f, 0x80, 0xff, 0x40]),
            6 => file[field.at.start as usize..field.at.end as usize].fill(0),
            _ if other.at.end - other.at.start == length && other.at.end as usize <= file.len() => {
                let from = other.at.start as usize..other.at.end as usize;
                file.copy_within(from, field.at.start as usize);
            }
            _ => file[at] = file[at].wrapping_add(1),
        }
        said += &format!("{kind} {:#x?}, byte {at:#x} is {:#x}; ", field.at, file[at]);
    }
    said
}

/// Makes two or three entries refer to the same cluster. Returns a description.
fn cross(rng: &mut Rng, sound: &Sound, file: &mut [u8]) -> String {
    let layout = &sound.layout;
    let cluster = layout.cluster;
    let any = |rng: &mut Rng, list: Vec<u64>| list.get(rng.index(list.len().max(1))).copied();
    let disks = layout.paths.iter().flatten();
    let place = match rng.below(4) {
        0 => Some(layout::be64(file, 40)),
        1 => any(rng, disks.filter_map(|path| path.table).collect()),
        2 => any(
            rng,
            layout
                .blocks
                .iter()
                .copied()
                .filter(|block| *block != 0)
                .collect(),
        ),
        _ => any(rng, disks.map(|path| path.data.start).collect()),
    };
    let place = place.unwrap_or(0) / cluster * cluster;
    let mut said = format!("to {place:#x} lead ");
    let mut kinds = ["L1 entry", "L2 entry", "refcount table entry"];
    if rng.one_in(3) {
        kinds = ["L1 entry"; 3];
    }
    for _ in 0..2 + rng.below(2) {
        let kind = rng.pick(&kinds);
        let fields = layout.fields.iter().filter(|field| field.what == kind);
        let Some(at) = any(rng, fields.map(|field| field.at.start).collect()) else {
            continue;
        };
        let flags = layout::be64(file, at)
            & match kind {
                "refcount table entry" => 0,
                _ => 1 << 63,
            };
        if let Some(bytes) = file.get_mut(at as usize..at as usize + 8) {
            bytes.copy_from_slice(&(flags | place).to_be_bytes());
        }
        said += &format!("{kind} {at:#x}, ");
    }
    said
}

fn relength(rng: &mut Rng, layout: &Layout, file: &mut Vec<u8>) -> String {
    let unit = rng.pick(&[1, 512, layout.cluster, layout.cluster]);
    let old = file.len() as u64;
    if rng.one_in(3) {
        let more = unit * rng.below(8) + rng.below(2);
        let junk = rng.one_in(2);
        let mut bytes = vec![0; more as usize];
        if junk {
            rng.fill(&mut bytes);
        }
        file.extend(bytes);
        return format!("{more} bytes more, junk: {junk}");
    }
    let paths = layout.paths[0].iter().filter(|path| path.compressed);
    let compressed: Vec<_> = paths.map(|path| &path.data).collect();
    let length = match rng.below(3) {
        0 => rng.below(old / unit + 1) * unit,
        1 if !compressed.is_empty() => {
            let data = rng.pick(&compressed);
            data.end - 1 - rng.below((data.end - data.start).min(1200))
        }
        // In a table.
        _ => layout.fields[rng.index(layout.fields.len())].at.start,
    };
    let length = length.min(old);
    file.truncate(length as usize);
    format!("cut off at {length:#x} of {old:#x}")
}

/// One case, which the seed determines.
fn one(queue: &Queue, seed: u64, sound: &Sound, folder: &std::path::Path) {
    let mut rng = Rng::new(seed);
    if let Some(data) = sound.data.as_ref().filter(|_| seed.is_multiple_of(3)) {
        let unit = rng.pick(&[1, 512, sound.layout.cluster]);
        let length = rng.below(data.len() as u64 / unit) * unit;
        return one_with_data_cut(queue, seed, rng, sound, length);
    }
    let mut file = sound.file.clone();
    let said = damage(&mut rng, sound, &mut file);
    let _note = PrintOnPanic(format!(
        "ZEBU_SEED={seed} ZEBU_CASES=1: {}: {said}",
        sound.name
    ));
    let suspects = sound.layout.suspects(&sound.file, &file);
    let mut files = Files::new(sound, &file);
    work::reading(queue, sound, &files, &suspects);
    match rng.below(8) {
        0..=3 => {
            work::session(queue, &mut rng, sound, &files, &suspects);
            // Any result, but no panic.
            let _ = repair_all(queue, files.file);
        }
        4 => work::jobs(queue, sound, &files),
        5 if files.base.is_some() => work::rebase(queue, sound, &mut files, &suspects),
        6 if rng.one_in(2) => work::amend(queue, &mut rng, sound, &files, &suspects),
        _ => drop(repair::repair(
            queue, &mut rng, sound, &file, &suspects, folder,
        )),
    }
}

/// One case in which the image is sound and its external data file is truncated.
fn one_with_data_cut(queue: &Queue, seed: u64, mut rng: Rng, sound: &Sound, length: u64) {
    let said = format!("its data file is truncated to {length:#x}");
    let _note = PrintOnPanic(format!(
        "ZEBU_SEED={seed} ZEBU_CASES=1: {}: {said}",
        sound.name
    ));
    let suspects = sound.layout.suspects_of_cut(&sound.file, length);
    let files = Files::with_data_cut(sound, length as usize);
    work::reading(queue, sound, &files, &suspects);
    work::check_of_data_file(queue, &files, &suspects);
    match rng.below(2) {
        0 => work::session(queue, &mut rng, sound, &files, &suspects),
        _ => work::jobs(queue, sound, &files),
    }
}

/// Runs cases. A failure is printed at once, and the test continues.
struct Tries {
    failed: usize,
}

impl Tries {
    /// Failures after which the test ends.
    const MOST: usize = 20;

    fn run(&mut self, case: impl FnOnce()) {
        self.failed += usize::from(catch_unwind(AssertUnwindSafe(case)).is_err());
        progress();
    }

    fn end(self) {
        assert_eq!(self.failed, 0, "cases failed");
    }
}

/// The number of cases that an image is used for.
const USES: u64 = 20;

#[test]
fn damage_then_work() {
    let queue = queue();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let _watchdog = Watchdog::new("damage_then_work");
    let theirs = images::by_qemu(&queue, &mut Rng::new(7), folder.path());
    let mut made: Option<(u64, Sound)> = None;
    let mut tries = Tries { failed: 0 };
    for seed in cases(250, "images damaged, and worked with") {
        if tries.failed == Tries::MOST {
            break;
        }
        let batch = seed / USES;
        let sound = match batch % 2 {
            0 => &theirs[(batch / 2) as usize % theirs.len()],
            _ => {
                if made.as_ref().is_none_or(|(number, _)| *number != batch) {
                    let sound = images::by_zebu(&queue, &mut Rng::new(batch));
                    made = Some((batch, sound));
                }
                &made.as_ref().expect("made above").1
            }
        };
        tries.run(|| one(&queue, seed, sound, folder.path()));
    }
    tries.end();
}

/// Sets every byte of the header and of the snapshot table to some values. The image is read and
/// written, and repaired.
#[test]
fn repair_of_every_field() {
    let queue = queue();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let _watchdog = Watchdog::new("repair_of_every_field");
    let (mut sound_again, mut lost) = (0, 0);
    let mut tries = Tries { failed: 0 };
    let what = "repairs of a header or snapshot table with a wrong byte";
    let mut seeds = cases(3, what);
    while let Some(seed) = seeds.next() {
        let bits = [9, 12, 16][(seed % 3) as usize];
        let mut rng = Rng::new(seed);
        let sound = loop {
            let sound = images::try_by_zebu(&queue, &mut rng, bits);
            let fits = |s: &Sound| s.content.len() > 1 && s.data.is_none();
            if let Some(sound) = sound.filter(fits) {
                break sound;
            }
        };
        let fields = sound.layout.fields.iter();
        let fields = fields.filter(|f| f.what == "header" || f.what == "snapshot table");
        for at in fields.flat_map(|field| field.at.clone()) {
            let old = sound.file[at as usize];
            let mut values = vec![0, 0xff, 0x40, old ^ 1, old ^ 0x80, old.wrapping_add(2)];
            values.sort_unstable();
            values.dedup();
            for value in values.into_iter().filter(|value| *value != old) {
                let mut file = sound.file.clone();
                file[at as usize] = value;
                if tries.failed == Tries::MOST {
                    tries.end();
                    return;
                }
                tries.run(|| {
                    let _note = PrintOnPanic(format!("{}: byte {at:#x} is {value:#x}", sound.name));
                    let suspects = sound.layout.suspects(&sound.file, &file);
                    let outcome =
                        repair::repair(&queue, &mut rng, &sound, &file, &suspects, folder.path());
                    let files = Files::new(&sound, &file);
                    work::reading(&queue, &sound, &files, &suspects);
                    work::session(&queue, &mut rng, &sound, &files, &suspects);
                    sound_again += u64::from(outcome.sound);
                    lost += outcome.lost;
                });
                seeds.add(1);
            }
        }
    }
    tries.end();
    println!("{sound_again} sound after the repair; {lost} sectors lost that QEMU loses, too");
}
