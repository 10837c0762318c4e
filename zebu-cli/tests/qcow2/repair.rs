//! `check -r`: copies of a damaged image are repaired by qemu-img and by zebu. Both must have the same
//! output and leave the same disk, and qemu-img's check must find the same in both.

use std::fs;

use crate::common::{Answer, Lab, assert_same_answer, beyond_qemu, compare_answers, peer};

/// The offset in an L1 or L2 entry.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The flag of a cluster with one reference.
const COPIED: u64 = 1 << 63;

/// The offsets of tables in the image `x.qcow2`.
struct Layout<'a> {
    lab: &'a Lab,
    bits: u32,
    refcount_order: u32,
    l1: u64,
    l2: u64,
    table: u64,
    block: u64,
}

impl<'a> Layout<'a> {
    fn new(lab: &'a Lab) -> Self {
        let number = |at| lab.u64_at("x.qcow2", at);
        let (l1, table) = (number(40), number(48));
        let is_v3 = lab.u32_at("x.qcow2", 4) == 3;
        Layout {
            lab,
            bits: lab.u32_at("x.qcow2", 20),
            refcount_order: if is_v3 { lab.u32_at("x.qcow2", 96) } else { 4 },
            l1,
            l2: number(l1) & OFFSET,
            table,
            block: number(table),
        }
    }

    fn get(&self, at: u64) -> u64 {
        self.lab.u64_at("x.qcow2", at)
    }

    fn put(&self, at: u64, number: u64) {
        self.lab.patch("x.qcow2", at, &number.to_be_bytes());
    }

    fn zero(&self, cluster_at: u64) {
        let zeroes = vec![0; 1 << self.bits];
        self.lab.patch("x.qcow2", cluster_at, &zeroes);
    }

    /// Sets the refcount of the cluster at an offset.
    fn set_refcount(&self, at: u64, refcount: u64) {
        let width = 1 << self.refcount_order;
        let bit = (at >> self.bits) * width;
        let byte = self.block + bit / 8;
        if width >= 8 {
            let bytes = refcount.to_be_bytes();
            self.lab
                .patch("x.qcow2", byte, &bytes[8 - width as usize / 8..]);
            return;
        }
        let old = fs::read(self.lab.path("x.qcow2")).expect("read")[byte as usize];
        let mask = ((1u8 << width) - 1) << (bit % 8);
        let new = (old & !mask) | ((refcount as u8) << (bit % 8));
        self.lab.patch("x.qcow2", byte, &[new]);
    }

    /// The size of an L2 entry.
    fn entry(&self) -> u64 {
        let incompatible = self.get(72);
        let is_v3 = self.lab.u32_at("x.qcow2", 4) == 3;
        if is_v3 && incompatible & 16 != 0 {
            16
        } else {
            8
        }
    }
}

type Damage = (&'static str, fn(&Layout));

/// Damage that is possible in any image.
const DAMAGES: &[Damage] = &[
    ("nothing", |_| {}),
    ("a refcount of 0", |x| x.set_refcount(x.l2, 0)),
    ("a leaked cluster", |x| {
        x.put(40 << x.bits, 1);
        x.set_refcount(40 << x.bits, 1);
    }),
    ("leak and refcount of 0", |x| {
        x.set_refcount(35 << x.bits, 1);
        x.set_refcount(x.l1, 0);
    }),
    ("an L2 entry twice", |x| {
        for bytes in (0..x.entry()).step_by(8) {
            x.put(x.l2 + 20 * x.entry() + bytes, x.get(x.l2 + bytes));
        }
    }),
    ("copied flags", |x| {
        x.put(x.l1, x.get(x.l1) ^ COPIED);
        x.put(x.l2 + 3 * x.entry(), x.get(x.l2 + 3 * x.entry()) ^ COPIED);
    }),
    ("no refcount table", |x| {
        x.lab.patch("x.qcow2", 56, &[0; 4]);
    }),
    ("an empty refcount table", |x| x.zero(x.table)),
    ("a refcount table past the end", |x| x.put(48, 1 << 40)),
    ("an empty refcount block", |x| x.zero(x.block)),
    ("a refcount block that is an L2 table", |x| {
        x.put(x.table, x.l2);
    }),
    ("an L2 entry past the end", |x| {
        x.put(x.l2 + 3 * x.entry(), COPIED | 1 << 40);
    }),
    ("an L1 entry past the end", |x| {
        x.put(x.l1, COPIED | 1 << 40);
    }),
];

/// Repairs copies of `x.qcow2` with both programs, and compares.
#[track_caller]
fn same_repair(lab: &Lab, flags: &[&str], what: &str) -> Answer {
    let mut args = vec!["check", "-r"];
    args.extend(flags);
    args.push("x.qcow2");
    same_change(lab, &args, what)
}

/// Runs a command that repairs `x.qcow2` with both, and compares.
#[track_caller]
fn same_change(lab: &Lab, args: &[&str], what: &str) -> Answer {
    fs::copy(lab.path("x.qcow2"), lab.path("damaged")).expect("copy");
    let theirs = lab.qemu_img(args);
    let check_theirs = lab.qemu_img(&["check", "x.qcow2"]);
    fs::rename(lab.path("x.qcow2"), lab.path("theirs")).expect("rename");

    fs::rename(lab.path("damaged"), lab.path("x.qcow2")).expect("rename");
    let ours = lab.zebu(args);
    let check_ours = lab.qemu_img(&["check", "x.qcow2"]);
    ours.orderly(what);
    // Output and places of new tables differ between versions of QEMU.
    if peer().is_current() {
        compare_answers(&ours, &theirs, args, what);
        compare_answers(&check_ours, &check_theirs, args, what);
        // Fields of the header: offsets of tables, and features.
        for at in [40, 48, 56, 64, 72] {
            let number = |file| lab.u64_at(file, at);
            assert_eq!(
                number("x.qcow2"),
                number("theirs"),
                "{what}: header at {at}"
            );
        }
    } else {
        assert_eq!(check_ours.status, check_theirs.status, "{what}");
    }
    if check_ours.status == 0 {
        let compare = |a| lab.qemu_img(&["compare", a, "theirs"]).status;
        let status = compare("x.qcow2");
        // The check ignores some unreadable entries.
        assert!(status == 0 || status == compare("theirs"), "{what}");
    }
    ours
}

/// Repairs an image with each kind of damage.
fn repair_all(create: &str, more: &str) {
    let lab = Lab::new();
    lab.make(&format!(
        "create {create} g.qcow2 1M; io g.qcow2: write -P 1 0 12k | write -P 2 256k 50k{more}"
    ));
    for (name, damage) in DAMAGES {
        fs::copy(lab.path("g.qcow2"), lab.path("x.qcow2")).expect("copy");
        damage(&Layout::new(&lab));
        if create.contains("data_file") && *name == "an L2 entry past the end" {
            // Only zebu reports data past the end of the data file, which cannot be repaired.
            let ours = lab.zebu(&["check", "-r", "all", "x.qcow2"]);
            assert_eq!(ours.status, 2, "{ours:?}");
            assert!(ours.out.contains("1 errors were found"), "{ours:?}");
            continue;
        }
        same_repair(&lab, &["all"], &format!("{create}: {name}"));
    }
}

#[test]
fn plain_images() {
    repair_all("-o cluster_size=4k", "");
}

#[test]
fn large_clusters() {
    repair_all("", "| write -P 3 640k 300k");
}

#[test]
fn narrow_refcounts() {
    repair_all("-o refcount_bits=1,cluster_size=4k", "");
}

#[test]
fn refcounts_of_a_byte() {
    repair_all("-o refcount_bits=8,cluster_size=512", "");
}

#[test]
fn wide_refcounts() {
    repair_all("-o refcount_bits=64,cluster_size=4k", "");
}

#[test]
fn version_2() {
    repair_all("-o compat=0.10,cluster_size=4k", "");
}

#[test]
fn subclusters() {
    repair_all("-o extended_l2=on,cluster_size=16k", "");
}

#[test]
fn external_data_file() {
    repair_all("-o data_file=d.raw,cluster_size=4k", "");
}

#[test]
fn snapshots() {
    let more = "; img snapshot -c one g.qcow2; io g.qcow2: write -P 7 4k 9k\
                ; img snapshot -c two g.qcow2; io g.qcow2: write -P 8 8k 9k";
    repair_all("-o cluster_size=4k", more);
}

#[test]
fn compressed_clusters() {
    repair_all(
        "-o cluster_size=4k",
        "| write -c -P 4 512k 4k | write -c -P 5 600k 4k; io g.qcow2: write -c -P 1 700k 4k",
    );
}

#[test]
fn bitmaps_are_kept() {
    if !peer().is_current() {
        println!("skipped: older QEMU versions treat bitmaps differently");
        return;
    }
    let lab = Lab::new();
    lab.make(
        "create x.qcow2 4M; img bitmap --add x.qcow2 b; io x.qcow2: write 0 1M; \
         img bitmap --add -g 4k x.qcow2 c",
    );
    let layout = Layout::new(&lab);
    layout.set_refcount(layout.l2, 3);
    let info = |lab: &Lab| {
        lab.qemu_img(&["info", "--output=json", "x.qcow2"])
            .ok("info")
            .out
    };
    let bitmaps = |text: String| {
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        value["format-specific"]["data"]["bitmaps"].clone()
    };
    let before = bitmaps(info(&lab));
    lab.zebu(&["check", "-r", "all", "x.qcow2"]).ok("repair");
    assert_eq!(bitmaps(info(&lab)), before);
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");

    // With an unreadable bitmap, no cluster can be assumed to be free.
    layout.set_refcount(layout.l2, 3);
    let header = fs::read(lab.path("x.qcow2")).expect("read");
    let at = header
        .windows(4)
        .position(|w| w == 0x2385_2875u32.to_be_bytes());
    let directory = layout.get(at.expect("extension") as u64 + 24);
    lab.patch("x.qcow2", directory + 17, &[7]);
    let damaged = fs::read(lab.path("x.qcow2")).expect("read");
    let answer = lab.zebu(&["check", "-r", "leaks", "x.qcow2"]);
    if !beyond_qemu("QEMU does not open the image") {
        assert_eq!(answer.status, 2, "{answer:#?}");
        assert!(fs::read(lab.path("x.qcow2")).expect("read") == damaged);
    }
}

#[test]
fn repair_of_leaks_only() {
    let lab = Lab::new();
    lab.make("create -o cluster_size=4k g.qcow2 1M; io g.qcow2: write -P 1 0 12k");
    for (name, damage) in DAMAGES {
        for flags in [
            &["leaks"][..],
            &["leaks", "--output=json"],
            &["leaks", "-q"],
        ] {
            fs::copy(lab.path("g.qcow2"), lab.path("x.qcow2")).expect("copy");
            damage(&Layout::new(&lab));
            same_repair(&lab, flags, name);
        }
    }
}

#[test]
fn json_reports() {
    let lab = Lab::new();
    lab.make("create g.qcow2 4M; io g.qcow2: write -P 1 0 1M");
    let damages: [Damage; 3] = [
        ("fixed", |x| {
            x.set_refcount(x.l2, 0);
            x.set_refcount(20 << x.bits, 2);
            x.set_refcount(40 << x.bits, 1);
        }),
        ("some fixed", |x| {
            x.set_refcount(20 << x.bits, 2);
            x.put(x.l2 + 8 * 33, x.get(x.l2) | 512);
        }),
        ("leaks that stay", |x| {
            x.set_refcount(8 << x.bits, 2);
            x.put(x.l2 + 8 * 20, x.get(x.l2));
        }),
    ];
    for (name, damage) in damages {
        for flags in [
            &["all", "--output=json"][..],
            &["all", "-q"],
            &["leaks", "--output=json"],
            &["leaks"],
        ] {
            fs::copy(lab.path("g.qcow2"), lab.path("x.qcow2")).expect("copy");
            damage(&Layout::new(&lab));
            same_repair(&lab, flags, name);
        }
    }
}

#[test]
fn entries_that_are_not_aligned() {
    for create in [
        "",
        "-o compat=0.10",
        "-o extended_l2=on",
        "-o data_file=d.raw",
    ] {
        let lab = Lab::new();
        lab.make(&format!(
            "create {create} g.qcow2 1M; io g.qcow2: write -P 1 0 300k"
        ));
        let damages: [Damage; 2] = [
            ("data", |x| x.put(x.l2, x.get(x.l2) | 512)),
            ("no data yet", |x| match x.entry() {
                8 => x.put(x.l2, x.get(x.l2) | 513),
                _ => {
                    x.put(x.l2, x.get(x.l2) | 512);
                    x.put(x.l2 + 8, 0x00ff_00f0 << 32);
                }
            }),
        ];
        for (name, damage) in damages {
            for mode in ["leaks", "all"] {
                fs::copy(lab.path("g.qcow2"), lab.path("x.qcow2")).expect("copy");
                damage(&Layout::new(&lab));
                same_repair(&lab, &[mode], &format!("{create}: {name}"));
            }
        }
    }
}

#[test]
fn dirty_and_corrupt_bits() {
    let lab = Lab::new();
    lab.make("create g.qcow2 4M; io g.qcow2: write -P 1 0 1M");
    for bits in 1..=3 {
        for mode in ["leaks", "all"] {
            for leak in [false, true] {
                fs::copy(lab.path("g.qcow2"), lab.path("x.qcow2")).expect("copy");
                let layout = Layout::new(&lab);
                layout.put(72, bits);
                if leak {
                    layout.set_refcount(9 << 16, 2);
                }
                same_repair(&lab, &[mode], &format!("features {bits}"));
                assert_eq!(layout.get(72), 0);
            }
        }
    }
    // If errors remain, the bits stay set.
    fs::copy(lab.path("g.qcow2"), lab.path("x.qcow2")).expect("copy");
    let layout = Layout::new(&lab);
    layout.put(72, 3);
    layout.put(layout.l2, layout.get(layout.l2) | 512);
    assert_eq!(lab.zebu(&["check", "-r", "all", "x.qcow2"]).status, 2);
    if !beyond_qemu("QEMU clears the dirty bit all the same") {
        assert_eq!(layout.get(72), 3);
    }
}

#[test]
fn lazy_refcounts() {
    let lab = Lab::new();
    lab.make(
        "create -o lazy_refcounts=on,cluster_size=4k g.qcow2 1M; \
         crash g.qcow2: write -P 1 0 300k | flush",
    );
    // Every command that writes repairs the image first.
    for args in [
        &["check", "-r", "all", "x.qcow2"][..],
        &["amend", "-o", "compat=1.1", "x.qcow2"],
        &["resize", "x.qcow2", "2M"],
        &["rebase", "-u", "-b", "", "x.qcow2"],
    ] {
        fs::copy(lab.path("g.qcow2"), lab.path("x.qcow2")).expect("copy");
        let answer = same_change(&lab, args, "lazy refcounts");
        assert_eq!(answer.status, 0, "{answer:#?}");
        assert_eq!(lab.u64_at("x.qcow2", 72), 0);
    }
}

#[test]
fn snapshot_tables() {
    let lab = Lab::new();
    lab.make(
        "create g.qcow2 4M; io g.qcow2: write -P 1 0 1M; img snapshot -c one g.qcow2; \
         img snapshot -c two g.qcow2",
    );
    let damages: [Damage; 6] = [
        ("too much extra data", |x| {
            x.lab
                .patch("x.qcow2", x.get(64) + 36, &5000u32.to_be_bytes());
        }),
        ("by far", |x| {
            x.lab.patch("x.qcow2", x.get(64) + 36, &[0xff; 4]);
        }),
        ("no extra data", |x| {
            x.lab.patch("x.qcow2", x.get(64) + 36, &[0; 4]);
        }),
        ("more snapshots than there are", |x| {
            x.lab.patch("x.qcow2", 60, &5u32.to_be_bytes());
        }),
        ("a table where none can be", |x| x.put(64, x.get(64) + 512)),
        ("an L1 table past the end", |x| x.put(x.get(64), 1 << 40)),
    ];
    for (name, damage) in damages {
        for mode in ["leaks", "all"] {
            fs::copy(lab.path("g.qcow2"), lab.path("x.qcow2")).expect("copy");
            damage(&Layout::new(&lab));
            assert_same_answer(&lab, &["check", "x.qcow2"], name);
            same_repair(&lab, &[mode], name);
            let list = |file| lab.qemu_img(&["snapshot", "-l", file]);
            let (ours, theirs) = (list("x.qcow2"), list("theirs"));
            assert_eq!(
                (ours.status, ours.out),
                (theirs.status, theirs.out),
                "{name}"
            );
        }
    }
}

/// If the L1 table of a snapshot has an invalid offset, QEMU frees the snapshot's clusters. zebu frees
/// nothing, so that the snapshot can be read again when its entry is corrected.
#[test]
fn repair_keeps_clusters_of_a_snapshot_without_an_l1_table() {
    let lab = Lab::new();
    lab.make("create x.qcow2 4M; io x.qcow2: write -P 1 0 1M; img snapshot -c one x.qcow2");
    let layout = Layout::new(&lab);
    let entry = layout.get(64);
    let l1 = layout.get(entry);
    layout.put(entry, l1 + 512);
    assert_same_answer(&lab, &["check", "x.qcow2"], "an L1 table where none can be");
    for mode in ["leaks", "all"] {
        assert_eq!(lab.zebu(&["check", "-r", mode, "x.qcow2"]).status, 2);
    }
    layout.put(entry, l1);
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
    lab.zebu(&["snapshot", "-a", "one", "x.qcow2"]).ok("apply");
    lab.zebu(&["io", "-c", "read -P 1 0 1M", "x.qcow2"])
        .ok("read");
}

#[test]
fn refcount_blocks_that_qemu_gives_up_on() {
    if beyond_qemu("QEMU fails, or makes the file as long as the damaged entry says") {
        return;
    }
    let lab = Lab::new();
    lab.make("create g.qcow2 4M; io g.qcow2: write -P 1 0 1M");
    let damages: [Damage; 4] = [
        ("not aligned", |x| x.put(x.table, x.block + 512)),
        ("reserved bits", |x| x.put(x.table, x.block + 5)),
        ("past the end", |x| x.put(x.table, 1 << 50)),
        ("past the end of offsets", |x| x.put(x.table, 1 << 63)),
    ];
    let length = fs::metadata(lab.path("g.qcow2")).expect("stat").len();
    for (name, damage) in damages {
        fs::copy(lab.path("g.qcow2"), lab.path("x.qcow2")).expect("copy");
        damage(&Layout::new(&lab));
        let answer = lab.zebu(&["check", "-r", "all", "x.qcow2"]).ok(name);
        assert!(answer.err.contains("Rebuilding"), "{name}: {answer:#?}");
        lab.qemu_img(&["check", "x.qcow2"]).ok(name);
        lab.qemu_img(&["compare", "x.qcow2", "g.qcow2"]).ok(name);
        let repaired = fs::metadata(lab.path("x.qcow2")).expect("stat").len();
        assert!(repaired <= length + (4 << 16), "{name}: {repaired}");
    }
}

#[test]
fn images_in_use_are_not_repaired() {
    let lab = Lab::new();
    lab.make("create x.qcow2 1M");
    for args in [&["x.qcow2"][..], &["-r", "x.qcow2"]] {
        let _held = lab.held_by_qemu(args);
        let answer = assert_same_answer(&lab, &["check", "-r", "all", "x.qcow2"], "held");
        assert_eq!(answer.status, 1);
    }
    let other = lab.zebu(&["check", "-r", "some", "x.qcow2"]);
    assert_eq!(other.status, 1);
    assert!(other.err.contains("'leaks' or 'all', not 'some'"));
    lab.make("img create -q -f raw x.raw 1M");
    assert_same_answer(&lab, &["check", "-r", "all", "-f", "raw", "x.raw"], "raw");
}
