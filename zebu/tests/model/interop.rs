//! zebu and QEMU change the same image in turn, for all kinds of images: every pair of values of two
//! options occurs.

use std::collections::HashSet;
use std::path::Path;

use zebu::block::Format;
use zebu::jobs::{CreateQcow2, NewBacking, NewDataFile, Preallocation};
use zebu::qcow2::Compression;

use crate::common::peer::qemu_io;
use crate::common::{Rng, encryption};
use crate::disk::Disk;
use crate::setup::Setup;
use crate::trace;
use zebu_testkit::Written;

/// The values of each option.
const AXES: [(&str, u64); 10] = [
    ("cluster size", 5),
    ("extended_l2", 2),
    ("refcount_bits", 4),
    ("version", 2),
    ("lazy_refcounts", 2),
    ("compression", 2),
    ("data file", 3),
    ("backing file", 4),
    ("preallocation", 4),
    ("encryption", 2),
];

/// Two options with a value each.
type Pair = (usize, u64, usize, u64);

/// Kinds of images that cover each possible pair of values at least once.
pub fn kinds() -> Vec<Setup> {
    // The seed is fixed, so the kinds are the same in each run.
    let mut rng = Rng::new(1);
    let mut covered: HashSet<Pair> = HashSet::new();
    let mut kinds = Vec::new();
    loop {
        // The draw that covers most new pairs.
        let draws = (0..500).filter_map(|_| {
            let values: Vec<u64> = AXES.iter().map(|(_, count)| rng.below(*count)).collect();
            let setup = setup(&values);
            setup.options.check().ok()?;
            let new = pairs(&values)
                .filter(|pair| !covered.contains(pair))
                .count();
            Some((new, values, setup))
        });
        let Some((1.., values, setup)) = draws.max_by_key(|(new, ..)| *new) else {
            kinds.extend(Written::others().into_iter().map(Setup::of));
            return kinds;
        };
        covered.extend(pairs(&values));
        kinds.push(setup);
    }
}

fn pairs(values: &[u64]) -> impl Iterator<Item = Pair> {
    let all = (0..values.len()).flat_map(|a| (0..a).map(move |b| (a, b)));
    all.map(|(a, b)| (a, values[a], b, values[b]))
}

fn setup(values: &[u64]) -> Setup {
    let cluster_bits = [9, 12, 14, 16, 21][values[0] as usize];
    // The last cluster is partial, and small clusters need several L2 tables.
    let size = ((200u64 << cluster_bits).min(3 << 20)).max(3 << cluster_bits) + 5 * 512;
    let backing = match values[7] {
        0 => None,
        1 => Some((size / 2 / 512 * 512, Format::RAW)),
        2 => Some((size, Format::QCOW2)),
        _ => Some((size + 4096, Format::QCOW2)),
    };
    let plain = match values[9] {
        0 => CreateQcow2::default(),
        _ => encryption::encrypted(CreateQcow2::default(), "aes-256"),
    };
    Setup {
        format: Format::QCOW2,
        other: None,
        options: plain
            .size(size)
            .cluster_bits(cluster_bits)
            .extended_l2(values[1] == 1)
            .refcount_order([4, 0, 3, 6][values[2] as usize])
            .version([3, 2][values[3] as usize])
            .lazy_refcounts(values[4] == 1)
            .compression([Compression::Zlib, Compression::Zstd][values[5] as usize])
            .data_file((values[6] > 0).then(|| NewDataFile::new("data.raw").raw(values[6] == 2)))
            .backing(backing.map(|(_, format)| {
                NewBacking::new(format!("backing.{}", format.name()))
                    .format(Some(format.name().into()))
            }))
            .preallocation(
                [
                    Preallocation::Off,
                    Preallocation::Metadata,
                    Preallocation::Falloc,
                    Preallocation::Full,
                ][values[8] as usize],
            ),
        backing,
        used_before: false,
    }
}

/// QEMU writes to the closed image.
pub fn used_by_qemu(setup: &Setup, folder: &Path, disk: &mut Disk, rng: &mut Rng) {
    let mut commands = Vec::new();
    let size = disk.bytes.len();
    let cluster = setup.cluster() as usize;
    let count = 1 + rng.below(12);
    let others = rng.below(count + 1);
    for nth in 0..count {
        let mut start = rng.index(size) / 512 * 512;
        let mut length = 512 * (1 + rng.index(2 * cluster / 512));
        // Compressed writes come last: QEMU 10 packs them into a host cluster that it has freed and
        // allocated again.
        let kind = if nth < others { rng.below(6) } else { 6 };
        let whole = size / cluster;
        if kind >= 4 && whole > 0 {
            start = rng.index(whole) * cluster;
            length = cluster;
        }
        let range = start..(start + length).min(size);
        let byte = 1 + rng.below(255) as u8;
        let is_free = !disk.clusters(&range).any(|n| disk.may_be_allocated[n]);
        let is_whole = range.len() == cluster && range.start.is_multiple_of(cluster);
        let (command, byte) = match kind {
            0 => ("write -z".to_string(), 0),
            1 if setup.options.version == 3 => ("write -z -u".to_string(), 0),
            5 | 6 if setup.other.is_some() => continue,
            6 if is_whole && is_free && setup.compresses() => (format!("write -c -P {byte}"), byte),
            6 => continue,
            5 if is_whole && setup.options.version == 3 => ("discard".to_string(), 0),
            _ => (format!("write -P {byte}"), byte),
        };
        let command = format!("{command} {} {}", range.start, range.len());
        trace(|| format!("QEMU: {command}"));
        commands.push(command);
        disk.put(range.start, &vec![byte; range.len()]);
        disk.set_allocated(&range);
    }
    disk.flush(disk.changes());
    if commands.is_empty() {
        return;
    }
    let (image, format) = (setup.image(folder), setup.format.name());
    qemu_io(&image, format, &["-d", "unmap"], &commands).ok("QEMU writes");
}
