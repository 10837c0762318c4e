//! Damaged and broken bitmaps. Guards against one that is taken for right, or that stands in the way
//! of the disk, of other bitmaps, of a repair or of its own removal.

use std::fs;
use std::ops::Range;

use serde_json::Value;

use super::bitmap::{bitmaps, dirty, listed, ready};
use crate::common::{Cases, Lab, Rng, part};

/// Where the bitmaps of an image are: directory, its length, and each entry with its table.
struct Places {
    extension: u64,
    directory: u64,
    entries: Vec<(u64, u64)>,
}

fn places(lab: &Lab, file: &str) -> Places {
    let mut at = u64::from(lab.u32_at(file, 100));
    while lab.u32_at(file, at) != 0x2385_2875 {
        at += 8 + u64::from(lab.u32_at(file, at + 4)).next_multiple_of(8);
    }
    let extension = at + 8;
    let directory = lab.u64_at(file, extension + 16);
    let mut entries = Vec::new();
    let mut at = directory;
    for _ in 0..lab.u32_at(file, extension) {
        entries.push((at, lab.u64_at(file, at)));
        let name = u64::from(lab.u32_at(file, at + 16) & 0xffff);
        at += (24 + name).next_multiple_of(8);
    }
    Places {
        extension,
        directory,
        entries,
    }
}

/// Damage to the first of three bitmaps: offset, bytes, which bitmaps a repair leaves.
type Damage = (
    &'static str,
    fn(&Lab, &Places) -> (u64, Vec<u8>),
    &'static [&'static str],
);

const DAMAGE: [Damage; 25] = [
    (
        "granularity",
        |_, p| (p.entries[0].0 + 17, vec![8]),
        &["b1", "b2"],
    ),
    ("type", |_, p| (p.entries[0].0 + 16, vec![7]), &["b1", "b2"]),
    (
        "table of gigabytes",
        |_, p| (p.entries[0].0 + 8, vec![0xff]),
        &["b1", "b2"],
    ),
    (
        "flags",
        |_, p| (p.entries[0].0 + 15, vec![0x82]),
        &["b1", "b2"],
    ),
    (
        "no table",
        |_, p| (p.entries[0].0 + 8, vec![0; 4]),
        &["b1", "b2"],
    ),
    (
        "long table",
        |_, p| (p.entries[0].0 + 8, vec![0, 0, 0x40, 0]),
        &["b1", "b2"],
    ),
    (
        "table past the end",
        |_, p| (p.entries[0].0, 0x8000_0000u64.to_be_bytes().into()),
        &["b1", "b2"],
    ),
    (
        "table of another",
        |_, p| (p.entries[0].0, p.entries[1].1.to_be_bytes().into()),
        &["b2"],
    ),
    (
        "table in guest data",
        |lab, p| (p.entries[0].0, guest(lab).to_be_bytes().into()),
        &["b1", "b2"],
    ),
    (
        "table is the L1 table",
        |lab, p| (p.entries[0].0, lab.u64_at("a.q", 40).to_be_bytes().into()),
        &["b1", "b2"],
    ),
    (
        "bits of another",
        |lab, p| {
            (
                p.entries[0].1,
                lab.u64_at("a.q", p.entries[1].1).to_be_bytes().into(),
            )
        },
        &["b2"],
    ),
    (
        "bits past the end",
        |_, p| (p.entries[0].1, 0x8000_0000u64.to_be_bytes().into()),
        &["b1", "b2"],
    ),
    (
        "bits in guest data",
        |lab, p| (p.entries[0].1, guest(lab).to_be_bytes().into()),
        &["b1", "b2"],
    ),
    (
        "bits with reserved bits",
        |_, p| (p.entries[0].1 + 7, vec![0x42]),
        &["b1", "b2"],
    ),
    (
        "same name",
        |_, p| (p.entries[0].0 + 25, vec![b'1']),
        &["b2"],
    ),
    ("count", |_, p| (p.extension + 3, vec![4]), &[]),
    ("no bitmaps", |_, p| (p.extension, vec![0; 4]), &[]),
    ("too many bitmaps", |_, p| (p.extension, vec![1; 4]), &[]),
    ("reserved field", |_, p| (p.extension + 7, vec![1]), &[]),
    (
        "length of the extension",
        |_, p| (p.extension - 1, vec![32]),
        &[],
    ),
    ("long directory", |_, p| (p.extension + 13, vec![1]), &[]),
    ("too long directory", |_, p| (p.extension + 8, vec![1]), &[]),
    (
        "directory in guest data",
        |lab, p| (p.extension + 16, guest(lab).to_be_bytes().into()),
        &[],
    ),
    ("cut directory", |_, p| (p.extension + 15, vec![80]), &[]),
    (
        "directory past the end",
        |_, p| (p.extension + 16, 0x8000_0000u64.to_be_bytes().into()),
        &[],
    ),
];

/// The host cluster of the first guest cluster.
fn guest(lab: &Lab) -> u64 {
    let offset = |at| lab.u64_at("a.q", at) & 0x00ff_ffff_ffff_fe00;
    offset(offset(offset(40)))
}

#[test]
fn damaged_bitmaps_are_reported_and_removed() {
    if !ready() {
        return;
    }
    for (what, damage, left) in part(2, DAMAGE) {
        let lab = Lab::new();
        lab.make(
            "create a.q 10M; img bitmap --add a.q b0; img bitmap --add -g 4k a.q b1; \
             img bitmap --add a.q b2; io a.q: write -P 1 0 64k | write -P 2 1M 1M",
        );
        let places = places(&lab, "a.q");
        assert!(places.directory > 0);
        let (at, bytes) = damage(&lab, &places);
        lab.patch("a.q", at, &bytes);
        // The disk can be read, listed and written all the same.
        let read = ["-c", "read -P 1 0 64k", "-c", "read -P 2 1M 1M", "a.q"];
        lab.zebu_io(&read).ok(what);
        lab.zebu(&["info", "a.q"]).ok(what);
        lab.zebu(&["info", "--output=json", "a.q"]).ok(what);
        lab.zebu(&["measure", "-O", "qcow2", "a.q"]).ok(what);
        let found = lab.zebu(&["check", "a.q"]);
        assert_eq!(found.status, 2, "{what}: {found:?}");
        // What lies behind a table is no part of it.
        let errors = found.err.lines().count();
        assert!(errors < 20, "{what}: {found:?}");
        for is_written in [false, true] {
            fs::copy(lab.path("a.q"), lab.path("b.q")).expect("copy");
            if is_written {
                lab.zebu_io(&["-c", "write -P 3 3M 64k", "b.q"]).ok(what);
            }
            lab.zebu(&["bitmap", "--remove", "b.q", "b0"]);
            lab.zebu_io(&["-c", "write -P 3 5M 1M", "b.q"]).ok(what);
            lab.zebu_io(&[&read[..4], &["b.q"]].concat()).ok(what);
            // Nothing was freed that something else has.
            let found = lab.zebu(&["check", "b.q"]);
            assert!(!found.err.contains("refcount=0"), "{what}: {found:?}");
        }
        let repaired = lab.zebu(&["check", "-r", "all", "a.q"]).ok(what);
        assert!(
            repaired.err.contains("Repairing bitmap"),
            "{what}: {repaired:?}"
        );
        lab.zebu(&["check", "a.q"]).ok(what);
        lab.qemu_img(&["check", "a.q"]).ok(what);
        lab.zebu_io(&read).ok(what);
        let list = bitmaps(&lab, "a.q");
        let names: Vec<&str> = list
            .as_array()
            .into_iter()
            .flatten()
            .map(|bitmap| bitmap["name"].as_str().expect("a name"))
            .collect();
        assert_eq!(names, left, "{what}: {repaired:?}");
        for name in left {
            let end = (1 << 20) + (1 << 20);
            assert_eq!(dirty(&lab, "a.q", name), [0..65536, 1 << 20..end], "{what}");
        }
        lab.zebu_io(&["-c", "write -P 3 3M 64k", "a.q"]).ok(what);
        lab.qemu_img(&["check", "a.q"]).ok(what);
        // A bitmap can be added again.
        lab.zebu(&["bitmap", "--add", "a.q", "b0"]).ok(what);
        lab.qemu_img(&["check", "a.q"]).ok(what);
    }
}

/// A bitmap as it is found in practice: what is done to `b0`, the status of a check, and whether a
/// repair removes it.
type Broken = (&'static str, fn(&Lab, &Places), i32, bool);

const BROKEN: [Broken; 10] = [
    (
        "a table that was truncated",
        |lab, p| lab.patch("a.q", p.entries[0].0 + 8, &3u32.to_be_bytes()),
        2,
        true,
    ),
    (
        "a table that ends past the end of the file",
        |lab, p| {
            // Of a copy of the table, the file has two entries.
            let end = fs::metadata(lab.path("a.q")).expect("a file").len();
            let words = [0, 8].map(|n| lab.u64_at("a.q", p.entries[0].1 + n).to_be_bytes());
            lab.patch("a.q", end, &words.concat());
            lab.patch("a.q", p.entries[0].0, &end.to_be_bytes());
        },
        2,
        true,
    ),
    (
        "an entry past the end",
        |lab, p| lab.patch("a.q", p.entries[0].1 + 16, &(1u64 << 40).to_be_bytes()),
        2,
        true,
    ),
    ("in use", |lab, p| in_use(lab, p), 0, false),
    (
        "in use, with an entry past the end",
        |lab, p| {
            in_use(lab, p);
            lab.patch("a.q", p.entries[0].1, &(1u64 << 40).to_be_bytes());
        },
        2,
        true,
    ),
    (
        "in use, with a table that was truncated",
        |lab, p| {
            in_use(lab, p);
            lab.patch("a.q", p.entries[0].0 + 8, &1u32.to_be_bytes());
        },
        3,
        false,
    ),
    (
        "a granularity of 256",
        |lab, p| lab.patch("a.q", p.entries[0].0 + 17, &[8]),
        2,
        true,
    ),
    (
        "a granularity of 4 GiB",
        |lab, p| lab.patch("a.q", p.entries[0].0 + 17, &[32]),
        2,
        true,
    ),
    (
        "a granularity of 2^255",
        |lab, p| lab.patch("a.q", p.entries[0].0 + 17, &[255]),
        2,
        true,
    ),
    (
        "another granularity than the table has",
        |lab, p| lab.patch("a.q", p.entries[0].0 + 17, &[12]),
        2,
        true,
    ),
];

fn in_use(lab: &Lab, places: &Places) {
    lab.patch("a.q", places.entries[0].0 + 15, &[3]);
}

/// The dirty ranges of a bitmap, in bytes. (QEMU opens no image with a broken bitmap for its server.)
#[track_caller]
fn dirty_to_zebu(lab: &Lab, file: &str, name: &str) -> Vec<Range<u64>> {
    let queue = zebu::Queue::new(Default::default()).expect("a queue");
    let source = zebu::names::Source::Name(lab.path(file).into());
    let device = zebu::Device::open(&queue, &source, &zebu::OpenOptions::default());
    let device = device.expect("an image");
    let bits = queue.block_on(device.bitmap(&queue, name));
    bits.expect("a bitmap").ranges().collect()
}

/// The names of the bitmaps of an image, and those that are marked as in use.
fn names(lab: &Lab, file: &str) -> (Vec<String>, Vec<String>) {
    let list = listed(lab.zebu(&["info", "--output=json", file]));
    let of = |bitmap: &Value| bitmap["name"].as_str().expect("a name").to_owned();
    let list: Vec<Value> = list.as_array().into_iter().flatten().cloned().collect();
    let is_in_use = |bitmap: &&Value| {
        let flags = bitmap["flags"].as_array().expect("flags");
        flags.iter().any(|flag| flag == "in-use")
    };
    let in_use = list.iter().filter(is_in_use).map(of).collect();
    (list.iter().map(of).collect(), in_use)
}

/// A broken bitmap does not stand in the way: of `info`, of reading and writing, of the other bitmap,
/// of a repair, and of its own removal. It is never taken for right.
#[test]
fn broken_bitmaps_stand_in_no_way() {
    if !ready() {
        return;
    }
    for (what, damage, status, is_removed) in part(2, BROKEN) {
        let lab = Lab::new();
        // The table of `b0` has five entries.
        lab.make(
            "create -o cluster_size=512 a.q 10M; img bitmap --add -g 512 a.q b0; \
             img bitmap --add a.q b1; io a.q: write -P 1 0 64k | write -P 2 8M 1M",
        );
        damage(&lab, &places(&lab, "a.q"));
        let reads = |file: &str| {
            let read = ["-c", "read -P 1 0 64k", "-c", "read -P 2 8M 1M", file];
            lab.zebu_io(&read).ok(what);
        };
        let refused = |file: &str, args: &[&str]| {
            let answer = lab.zebu(&[args, &[file, "b0"]].concat());
            answer.orderly(what);
            assert_eq!(answer.status, 1, "{what}: {answer:?}");
        };
        let checked = lab.zebu(&["check", "a.q"]);
        assert_eq!(checked.status, status, "{what}: {checked:?}");
        for is_written in [false, true] {
            fs::copy(lab.path("a.q"), lab.path("b.q")).expect("copy");
            let mut dirty_too = vec![0..64 << 10, 8 << 20..9 << 20];
            if is_written {
                lab.zebu_io(&["-c", "write -P 3 3M 64k", "b.q"]).ok(what);
                dirty_too.insert(1, 3 << 20..(3 << 20) + (64 << 10));
            }
            let (all, in_use) = names(&lab, "b.q");
            assert_eq!(all, ["b0", "b1"], "{what}");
            // A list does not tell of all damage, for which all tables would be read.
            if is_written || what.starts_with("in use") || !in_use.is_empty() {
                assert_eq!(in_use, ["b0"], "{what}");
            }
            reads("b.q");
            lab.zebu(&["convert", "-O", "raw", "b.q", "copy"]).ok(what);
            lab.zebu(&["measure", "-O", "qcow2", "b.q"]).ok(what);
            // A change that is refused marks it, too, as any change of the image does.
            fs::copy(lab.path("b.q"), lab.path("d.q")).expect("copy");
            for action in ["--clear", "--enable", "--disable"] {
                refused("d.q", &["bitmap", action]);
            }
            refused("d.q", &["bitmap", "--merge", "b1"]);
            let socket = lab.path("n.sock");
            let served = [
                "nbd",
                "-r",
                "-B",
                "b0",
                "-k",
                socket.to_str().unwrap(),
                "b.q",
            ];
            let served = lab.zebu(&served);
            served.orderly(what);
            assert_eq!(served.status, 1, "{what}: {served:?}");
            assert_eq!(dirty_to_zebu(&lab, "b.q", "b1"), dirty_too, "{what}");
            for is_repaired in [false, true] {
                fs::copy(lab.path("b.q"), lab.path("c.q")).expect("copy");
                if is_repaired {
                    lab.zebu(&["check", "-r", "all", "c.q"]).ok(what);
                    lab.qemu_img(&["check", "c.q"]).ok(what);
                }
                let (left, in_use) = names(&lab, "c.q");
                if left == ["b0", "b1"] {
                    // Of one that is marked, the length of the table need not be right.
                    assert!(!is_repaired || in_use == ["b0"], "{what}");
                    assert!(!is_repaired || is_written || !is_removed, "{what}");
                    lab.zebu(&["bitmap", "--remove", "c.q", "b0"]).ok(what);
                }
                assert_eq!(names(&lab, "c.q").0, ["b1"], "{what}");
                assert_eq!(dirty_to_zebu(&lab, "c.q", "b1"), dirty_too, "{what}");
                // What the table led to may be leaked.
                let checked = lab.qemu_img(&["check", "-q", "c.q"]);
                assert!([0, 3].contains(&checked.status), "{what}: {checked:?}");
                lab.zebu(&["bitmap", "--add", "c.q", "b0"]).ok(what);
                lab.zebu_io(&["-c", "write -P 4 5M 64k", "c.q"]).ok(what);
                let range = 5 << 20..(5 << 20) + (64 << 10);
                assert_eq!(dirty_to_zebu(&lab, "c.q", "b0"), [range], "{what}");
                reads("c.q");
            }
        }
    }
}

/// Of two bitmaps of one name each is removed, the first one first; both by a repair.
#[test]
fn two_bitmaps_of_one_name_are_removed() {
    if !ready() {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "create a.q 10M; img bitmap --add -g 4k a.q b0; img bitmap --add a.q b1; \
         img bitmap --add a.q b2; io a.q: write -P 1 0 64k",
    );
    lab.patch("a.q", places(&lab, "a.q").entries[0].0 + 25, b"1");
    assert_eq!(names(&lab, "a.q").0, ["b1", "b1", "b2"]);
    lab.zebu_io(&["-c", "read -P 1 0 64k", "a.q"]).ok("read");
    lab.zebu_io(&["-c", "write -P 1 1M 64k", "a.q"]).ok("write");
    let both = vec![0..64 << 10, 1 << 20..(1 << 20) + (64 << 10)];
    assert_eq!(dirty_to_zebu(&lab, "a.q", "b2"), both);
    let checked = lab.zebu(&["check", "a.q"]);
    assert_eq!(checked.status, 2, "{checked:?}");
    fs::copy(lab.path("a.q"), lab.path("b.q")).expect("copy");
    lab.zebu(&["check", "-r", "all", "b.q"]).ok("repair");
    assert_eq!(names(&lab, "b.q").0, ["b2"]);
    for left in [&["b1", "b2"][..], &["b2"]] {
        lab.zebu(&["bitmap", "--remove", "a.q", "b1"]).ok("remove");
        assert_eq!(names(&lab, "a.q").0, left);
    }
    for file in ["a.q", "b.q"] {
        lab.qemu_img(&["check", "-q", file]).ok("check");
        assert_eq!(dirty_to_zebu(&lab, file, "b2"), both);
    }
}

/// Kinds of images whose bitmaps are damaged. The bits of each fill less than a cluster, and the
/// guest's data are nowhere zero: so these cannot be taken for bits.
const DAMAGED: [&str; 5] = [
    "create a.q 10M",
    "create a.q 10M; io a.q: write -P 7 0 3M; img snapshot -c s a.q",
    "create -o cluster_size=4k,refcount_bits=1 a.q 10M",
    "create -o extended_l2=on a.q 10M",
    "create -o data_file=data.raw a.q 10M",
];

/// Where the damage is, in bytes: header extension, directory, tables, and refcounts of 16 bits.
fn regions(lab: &Lab, file: &str, places: &Places) -> Vec<Range<u64>> {
    let tables = places.entries.iter().map(|entry| entry.1);
    let mut regions = vec![
        places.extension..places.extension + 24,
        places.directory..places.directory + 96,
    ];
    regions.extend(tables.clone().map(|table| table..table + 8));
    if lab.u32_at(file, 96) == 4 {
        let block = lab.u64_at(file, lab.u64_at(file, 48));
        let own = tables.chain([places.directory]);
        let counts = own.map(|at| block + (at >> lab.u32_at(file, 20)) * 2);
        regions.extend(counts.map(|at| at..at + 2));
    }
    regions
}

/// Changes one or two places of an image. Returns a description.
fn damage(random: &mut Rng, lab: &Lab, file: &str, regions: &[Range<u64>]) -> String {
    let cluster = 1 << lab.u32_at(file, 20);
    let clusters = fs::metadata(lab.path(file)).expect("a file").len() / cluster;
    let mut what = String::new();
    for _ in 0..1 + random.below(2) {
        let Range { start, end } = regions[random.below(regions.len() as u64) as usize];
        let at = start + random.below(end - start);
        let word = start + (at - start) / 8 * 8;
        let (at, bytes) = match random.below(3) {
            _ if end - start == 2 => (start, vec![0, random.below(3) as u8]),
            0 => {
                let old = lab.u64_at(file, word);
                (word, (old ^ 1 << random.below(64)).to_be_bytes().to_vec())
            }
            1 => (at, vec![random.below(256) as u8]),
            // A cluster of something else.
            _ => {
                let place = random.below(clusters + 1) * cluster;
                (word, place.to_be_bytes().to_vec())
            }
        };
        what += &format!(" {bytes:x?} at {at:#x}");
        lab.patch(file, at, &bytes);
    }
    what
}

/// Damage of bitmaps neither changes what the disk reads nor prevents that it is written.
#[test]
fn damage_of_bitmaps_leaves_the_disk_alone() {
    if !ready() {
        return;
    }
    for kind in DAMAGED {
        let seeds = zebu_testkit::cases(4, format!("damaged bitmaps ({kind})"));
        damage_leaves_the_disk_alone(kind, seeds.share(1, DAMAGED.len()));
    }
}

fn damage_leaves_the_disk_alone(kind: &str, seeds: Cases) {
    let lab = Lab::new();
    lab.make(kind);
    lab.make(
        "img bitmap --add a.q b0; img bitmap --add -g 4k a.q b1; img bitmap --add -g 512 a.q b2; \
         io a.q: write -P 1 0 64k | write -P 2 1M 1M; img bitmap --disable a.q b1",
    );
    let regions = regions(&lab, "a.q", &places(&lab, "a.q"));
    let has_data_file = kind.contains("data_file");
    if has_data_file {
        fs::copy(lab.path("data.raw"), lab.path("data.old")).expect("copy");
    }
    let copy = || {
        fs::copy(lab.path("a.q"), lab.path("b.q")).expect("copy");
        if has_data_file {
            fs::copy(lab.path("data.old"), lab.path("data.raw")).expect("copy");
        }
    };
    let read = |what: &str| {
        lab.zebu(&["convert", "-O", "raw", "b.q", "read"]).ok(what);
        fs::read(lab.path("read")).expect("read")
    };
    let write = |what: &str| {
        let mut args = Vec::new();
        for command in [
            "write -P 3 3M 64k",
            "write -P 4 4k 4k",
            "write -P 5 7M 300k",
        ] {
            args.extend(["-c", command]);
        }
        args.push("b.q");
        lab.zebu_io(&args).ok(what);
    };
    copy();
    let before = read(kind);
    write(kind);
    let after = read(kind);
    for seed in seeds {
        copy();
        let mut random = Rng::new(seed);
        let what = damage(&mut random, &lab, "b.q", &regions);
        let what = format!("{kind}, seed {seed}:{what}");
        assert!(read(&what) == before, "{what}");
        lab.zebu(&["info", "b.q"]).ok(&what);
        for _ in 0..2 {
            write(&what);
            assert!(read(&what) == after, "{what}");
        }
        lab.zebu(&["bitmap", "--remove", "b.q", "b0"]);
        write(&what);
        let repaired = lab.zebu(&["check", "-q", "-r", "all", "b.q"]);
        assert!(read(&what) == after, "{what}");
        // Where a bitmap leads to the header or an L1 table, either may be what is damaged.
        if !repaired.err.contains("nothing is repaired") {
            repaired.ok(&what);
            lab.qemu_img(&["check", "-q", "b.q"]).ok(&what);
        }
    }
}
