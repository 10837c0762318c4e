//! `snapshot`: writes to the disk must not change snapshots, `-a` must restore the disk, and refcounts
//! and copied flags must be correct, so that QEMU can use the snapshots. Messages, statuses and lists
//! must be those of qemu-img.

use crate::common::part;
use crate::common::{Answer, Lab, Rng, all_cases, beyond_qemu, cases, compare_answers, peer};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::MetadataExt;
use zebu::block::{Device, OpenOptions};
use zebu::names::Source;
use zebu::qcow2::SnapshotName;
use zebu::storage::{Queue, QueueOptions};

/// Runs the command with both programs on the same image, compares the answers, and leaves zebu's
/// image.
#[track_caller]
fn both(lab: &Lab, image: &str, args: &[&str]) -> i32 {
    let all: Vec<&str> = ["snapshot"].iter().chain(args).copied().collect();
    let kept = lab.path("kept");
    let _ = fs::remove_file(&kept);
    if lab.path(image).exists() {
        fs::copy(lab.path(image), &kept).expect("copy");
    }
    let theirs = without_paths(lab.qemu_img(&all));
    if kept.exists() {
        fs::copy(&kept, lab.path(image)).expect("copy");
    }
    let ours = without_paths(lab.zebu(&all));
    if peer().is_current() {
        compare_answers(&ours, &theirs, &all, "snapshot");
    } else {
        assert_eq!(ours.status, theirs.status, "{all:?}: {ours:#?}");
    }
    ours.status
}

/// Removes the program's path from usage messages.
fn without_paths(mut answer: Answer) -> Answer {
    let lines = answer.err.lines().map(|line| {
        let rest = line.find(" snapshot").filter(|_| line.contains('/'));
        format!("{}\n", &line[rest.unwrap_or(0)..])
    });
    answer.err = lines.collect();
    answer
}

#[test]
fn messages_and_statuses() {
    let lab = Lab::new();
    lab.make(
        "create a.qcow2 4M; io a.qcow2: write -P 1 0 1M; create narrow.qcow2 -o refcount_bits=1 4M;
         io narrow.qcow2: write 0 64k; create data.qcow2 -o data_file=data.raw 1M; raw r.raw 100000;
         create -o refcount_bits=2 two.qcow2 4M; io two.qcow2: write 0 64k; create zero.qcow2 0",
    );
    for args in [
        &["a.qcow2"][..],
        &["-l", "a.qcow2"],
        &["-l", "-q", "a.qcow2"],
        &["-d", "none", "a.qcow2"],
        &["-a", "none", "a.qcow2"],
        &["-c", "s", "-l", "a.qcow2"],
        &["-c", "s", "-c", "t", "a.qcow2"],
        &["-d", "s", "-a", "t", "a.qcow2"],
        &["-l", "-l", "a.qcow2"],
        &[],
        &["-l", "a.qcow2", "b"],
        &["-z", "a.qcow2"],
        &["-c"],
        &["absent"],
        &["-c", "s", "absent"],
        &["-f", "raw", "r.raw"],
        &["-f", "raw", "-c", "s", "r.raw"],
        &["-f", "raw", "-a", "s", "r.raw"],
        &["-f", "raw", "-d", "s", "r.raw"],
        &["-U", "a.qcow2"],
        &["-U", "-c", "s", "a.qcow2"],
        &["-f", "nonsense", "a.qcow2"],
        &["--image-opts", "driver=qcow2,file.filename=a.qcow2"],
        &[
            "--image-opts",
            "-f",
            "qcow2",
            "driver=qcow2,file.filename=a.qcow2",
        ],
        &["data.qcow2"],
        &["-c", "s", "data.qcow2"],
        &["-a", "s", "data.qcow2"],
        &["-d", "s", "data.qcow2"],
        &["-c", "s", "narrow.qcow2"],
        &["-c", "s", "zero.qcow2"],
        &["-a", "s", "zero.qcow2"],
        &["-d", "s", "zero.qcow2"],
    ] {
        let image = args.last().copied().unwrap_or("absent");
        both(&lab, image, args);
    }
    // With two bits, the largest refcount is 3.
    assert_eq!(both(&lab, "two.qcow2", &["-c", "1", "two.qcow2"]), 0);
    assert_eq!(both(&lab, "two.qcow2", &["-c", "2", "two.qcow2"]), 0);
    assert_eq!(both(&lab, "two.qcow2", &["-c", "3", "two.qcow2"]), 1);
    for image in ["narrow.qcow2", "two.qcow2", "zero.qcow2", "a.qcow2"] {
        if !beyond_qemu("it leaks clusters of a failed snapshot") {
            lab.qemu_img(&["check", image]).ok(image);
        }
    }
}

/// The list without dates.
fn list(answer: Answer) -> Vec<Vec<String>> {
    let rows = crate::common::comparable(&answer.ok("list").out);
    let words = |row: &str| -> Vec<String> {
        let words = row.split_whitespace().map(str::to_string);
        // Dates, and times of the day.
        let is_time = |w: &String| w.len() >= 8 && w.chars().all(|c| "0123456789-:".contains(c));
        words.filter(|w| !is_time(w)).collect()
    };
    rows.lines().map(words).collect()
}

#[test]
fn ids_and_names() {
    let lab = Lab::new();
    lab.make("create a.qcow2 4M");
    let long = "n".repeat(300);
    for args in [
        &["-c", "s1"][..],
        &["-c", "s1"],
        &["-c", "7"],
        &["-c", "2"],
        &["-c", ""],
        &["-c", &long],
        // The name goes before the id with -d, and the id before the name with -a.
        &["-d", "2"],
        &["-d", "3"],
        &["-a", "2"],
        &["-a", "7"],
        &["-a", &long],
        &["-d", &long],
        &["-d", "s1"],
        &["-c", "next"],
        &["-d", ""],
        &["-l"],
    ] {
        // Each program has its own image, since snapshots have dates.
        let ours: Vec<&str> = [&["snapshot"], args, &["ours"]].concat();
        let theirs: Vec<&str> = [&["snapshot"], args, &["theirs"]].concat();
        for name in ["ours", "theirs"] {
            if !lab.path(name).exists() {
                fs::copy(lab.path("a.qcow2"), lab.path(name)).expect("copy");
            }
        }
        let (ours, theirs) = (lab.zebu(&ours), lab.qemu_img(&theirs));
        assert_eq!(
            ours.status, theirs.status,
            "{args:?}: {ours:#?} {theirs:#?}"
        );
        let rows = |name| list(lab.qemu_img(&["snapshot", "-l", name]));
        assert_eq!(rows("ours"), rows("theirs"), "{args:?}");
    }
    let ours = list(lab.zebu(&["snapshot", "theirs"]));
    let theirs = list(lab.qemu_img(&["snapshot", "theirs"]));
    if peer().is_current() {
        assert_eq!(ours, theirs);
    }
}

/// Two equal images: zebu changes one, QEMU the other.
struct Pair<'a> {
    lab: &'a Lab,
    random: Rng,
    size: u64,
    cluster: u64,
    /// Names of the snapshots.
    names: Vec<String>,
    what: String,
}

impl Pair<'_> {
    /// Writes the same to both images; to ours by QEMU or by zebu's library.
    fn write(&mut self) {
        let by_library = self.random.below(2) == 0 && !crate::common::testing_qemu();
        let mut script = String::new();
        let mut writes = Vec::new();
        for _ in 0..1 + self.random.below(6) {
            let area = [self.size, self.size.min(30 * self.cluster)];
            let area = area[self.random.below(2) as usize];
            let at = self.random.below(area);
            let length = 1 + self.random.below((3 * self.cluster).min(self.size - at));
            let pattern = self.random.below(256);
            let kind = match self.random.below(if by_library { 1 } else { 4 }) {
                1 => "-z".to_string(),
                2 => "-z -u".to_string(),
                _ => format!("-P {pattern}"),
            };
            script += &format!("write -q {kind} {at} {length}\n");
            writes.push((at, vec![pattern as u8; length as usize]));
        }
        let how = ["-d", "unmap", "-f", "qcow2"];
        let to = |name: &'static str| [&how[..], &[name]].concat();
        let written = self.lab.qemu_io_script(&to("theirs"), &script);
        written.ok(&self.what);
        match by_library {
            false => {
                let written = self.lab.qemu_io_script(&to("ours"), &script);
                written.ok(&self.what);
            }
            true => {
                let queue = Queue::new(QueueOptions::default()).expect("queue");
                let path = self.lab.path("ours").to_str().expect("a name").to_string();
                let options = OpenOptions::default().write(true);
                let device = Device::open(&queue, &Source::Name(path.into()), &options);
                let device = device.expect("open");
                for (at, bytes) in &writes {
                    let written = device.write_blocking(&queue, *at, bytes);
                    written.expect("write");
                }
                queue.block_on(device.close(&queue)).expect("close");
            }
        }
    }

    /// Creates, applies or deletes the same snapshot of both.
    fn snapshot(&mut self, step: usize) {
        let count = self.names.len() as u64;
        let pick = self.random.below(count.max(1)) as usize;
        let (verb, name) = match self.random.below(4) {
            0 if count > 1 => ("-d", self.names.remove(pick)),
            1 if count > 0 => ("-a", self.names[pick].clone()),
            _ => {
                self.names.push(format!("s{step}"));
                ("-c", format!("s{step}"))
            }
        };
        let what = format!("{}: {verb} {name}", self.what);
        let ours = self.lab.zebu(&["snapshot", verb, &name, "ours"]);
        fs::copy(self.lab.path("theirs"), self.lab.path("kept")).expect("copy");
        let theirs = self.lab.qemu_img(&["snapshot", verb, &name, "theirs"]);
        assert_eq!(ours.status, theirs.status, "{what}: {ours:#?} {theirs:#?}");
        if theirs.status != 0 {
            // QEMU leaves refcounts raised that it increased before the failure, which could make
            // later snapshots fail.
            fs::copy(self.lab.path("kept"), self.lab.path("theirs")).expect("copy");
            if crate::common::testing_qemu() {
                fs::copy(self.lab.path("kept"), self.lab.path("ours")).expect("copy");
            }
            if verb == "-c" {
                self.names.pop();
            }
        }
        self.lab.qemu_img(&["check", "ours"]).ok(&what);
    }

    /// Fails the test unless both programs read the same from both images.
    fn compare(&self) {
        let lab = self.lab;
        lab.zebu(&["check", "ours"]).ok(&self.what);
        lab.qemu_img(&["check", "ours"]).ok(&self.what);
        lab.qemu_img(&["compare", "ours", "theirs"]).ok(&self.what);
        let rows = |name| list(lab.qemu_img(&["snapshot", "-l", name]));
        assert_eq!(rows("ours"), rows("theirs"), "{}", self.what);
        assert_eq!(info(lab, "ours"), info(lab, "theirs"), "{}", self.what);
        for name in &self.names {
            let tag = format!("snapshot.name={name}");
            let convert = |from, to| ["convert", "-O", "raw", "-l", &tag, from, to];
            lab.qemu_img(&convert("theirs", "theirs.raw"))
                .ok(&self.what);
            lab.qemu_img(&convert("ours", "ours.raw")).ok(&self.what);
            lab.zebu(&convert("ours", "zebu.raw")).ok(&self.what);
            let what = format!("{}: snapshot {name}", self.what);
            lab.assert_same_bytes("ours.raw", "theirs.raw", &what);
            lab.assert_same_bytes("zebu.raw", "theirs.raw", &what);
        }
    }
}

/// The output of `info` without names, dates and the size on disk.
fn info(lab: &Lab, name: &str) -> Value {
    let text = lab
        .qemu_img(&["info", "--output=json", name])
        .ok("info")
        .out;
    let mut info: Value = serde_json::from_str(&text).expect("JSON");
    let map = info.as_object_mut().expect("an object");
    for key in ["children", "filename", "actual-size"] {
        map.remove(key);
    }
    let snapshots = map.get_mut("snapshots").and_then(Value::as_array_mut);
    for snapshot in snapshots.into_iter().flatten() {
        let snapshot = snapshot.as_object_mut().expect("an object");
        snapshot.remove("date-sec");
        snapshot.remove("date-nsec");
    }
    info
}

/// A sequence of changes, after which everything is compared.
fn sequence(options: &str, cluster: u64, size: u64, kinds: &str, seed: u64) {
    let lab = Lab::new();
    lab.make(&format!(
        "raw base.raw 3000000; create ours {options} {size}; random ours {seed} 25 {kinds}"
    ));
    fs::copy(lab.path("ours"), lab.path("theirs")).expect("copy");
    let mut pair = Pair {
        lab: &lab,
        random: Rng::new(seed),
        size,
        cluster,
        names: Vec::new(),
        what: format!("{options}, seed {seed}"),
    };
    for step in 0..9 {
        pair.snapshot(step);
        pair.write();
        if step % 4 == 3 {
            pair.compare();
        }
    }
    pair.compare();
    // Deleting all snapshots must free all their clusters.
    for name in std::mem::take(&mut pair.names) {
        lab.zebu(&["snapshot", "-d", &name, "ours"]).ok(&pair.what);
        lab.qemu_img(&["snapshot", "-d", &name, "theirs"])
            .ok(&pair.what);
    }
    pair.compare();
}

/// Options, cluster size, size of the disk, and kinds of requests.
const SEQUENCES: [(&str, u64, u64, &str); 14] = [
    ("-o cluster_size=512", 512, 1 << 20, "wzucd"),
    ("-o cluster_size=4k", 4096, 8 << 20, "wzucd"),
    ("-o cluster_size=64k", 65536, 32 << 20, "wzucd"),
    ("-o cluster_size=2M", 2 << 20, 64 << 20, "wzuc"),
    ("-o refcount_bits=1", 65536, 8 << 20, "wzc"),
    ("-o refcount_bits=2", 65536, 8 << 20, "wzc"),
    ("-o refcount_bits=4", 65536, 8 << 20, "wc"),
    ("-o refcount_bits=64,cluster_size=1k", 1024, 2 << 20, "wzcd"),
    ("-o compat=0.10", 65536, 8 << 20, "wcd"),
    ("-o extended_l2=on", 65536, 8 << 20, "wzucd"),
    (
        "-o extended_l2=on,cluster_size=16k",
        16384,
        8 << 20,
        "wzucd",
    ),
    ("-o compression_type=zstd", 65536, 8 << 20, "wc"),
    ("-b base.raw -F raw", 65536, 8 << 20, "wzud"),
    ("-o preallocation=metadata", 65536, 8 << 20, "wz"),
];

#[test]
fn sequences() {
    for (nth, (options, cluster, size, kinds)) in part(5, (1..).zip(SEQUENCES)) {
        let of = if all_cases() { SEQUENCES.len() } else { 3 };
        let seeds = cases(1, format!("sequences with {options}")).share(1, of);
        for seed in seeds {
            sequence(options, cluster, size, kinds, 100 * nth + seed);
        }
    }
}

#[test]
fn applying_a_snapshot_restores_the_size() {
    let lab = Lab::new();
    lab.make(
        "create ours 4M; io ours: write -P 1 0 4M; img snapshot -c small ours; img resize -q ours 9M;
         io ours: write -P 2 3M 6M; img snapshot -c large ours; img resize -q --shrink ours 1M",
    );
    fs::copy(lab.path("ours"), lab.path("theirs")).expect("copy");
    for name in ["small", "large", "small"] {
        lab.zebu(&["snapshot", "-a", name, "ours"]).ok(name);
        lab.qemu_img(&["snapshot", "-a", name, "theirs"]).ok(name);
        lab.qemu_img(&["check", "ours"]).ok(name);
        lab.qemu_img(&["compare", "-s", "ours", "theirs"]).ok(name);
        lab.zebu(&["compare", "-s", "ours", "theirs"]).ok(name);
    }
    lab.make("io ours: read -P 1 0 4M");
}

#[test]
fn snapshots_of_an_open_device() {
    let lab = Lab::new();
    lab.make(
        "create a.qcow2 4M; io a.qcow2: write -P 1 0 1M; img snapshot -c theirs a.qcow2;
         io a.qcow2: write -P 2 0 4M",
    );
    let queue = Queue::new(QueueOptions::default()).expect("queue");
    let path = lab.path("a.qcow2").to_str().expect("a name").to_string();
    let options = OpenOptions::default().write(true);
    let device = Device::open(&queue, &Source::Name(path.into()), &options);
    let mut device = device.expect("open");
    let write = |device: &Device, at, pattern| {
        let written = device.write_blocking(&queue, at, &[pattern; 100_000]);
        written.expect("write");
    };
    let [theirs, ours, absent] = ["theirs", "ours", "absent"].map(SnapshotName::from);
    // The copied flags in the snapshot's L1 table are stale: a write right after the apply must not go
    // to clusters of the snapshot.
    let apply = device.snapshot_apply(&queue, &theirs);
    queue.block_on(apply).expect("apply");
    write(&device, 0, 3);
    let create = device.snapshot_create(&queue, "ours");
    queue.block_on(create).expect("create");
    write(&device, 0, 4);
    write(&device, 2 << 20, 5);
    let delete = device.snapshot_delete(&queue, &theirs);
    queue.block_on(delete).expect("delete");
    write(&device, 500_000, 6);
    let apply = device.snapshot_apply(&queue, &absent);
    assert!(queue.block_on(apply).is_err());
    let create = device.snapshot_create(&queue, "last");
    queue.block_on(create).expect("create");
    let apply = device.snapshot_apply(&queue, &ours);
    queue.block_on(apply).expect("apply");
    write(&device, 3 << 20, 7);
    queue.block_on(device.close(&queue)).expect("close");
    lab.qemu_img(&["check", "a.qcow2"]).ok("check");
    let read = |reads: &[&str]| lab.make(&format!("io a.qcow2: {}", reads.join(" | ")));
    read(&[
        "read -P 3 0 100000",
        "read -P 1 100000 948576",
        "read -P 0 1M 2M",
        "read -P 7 3M 100000",
    ]);
    lab.qemu_img(&["snapshot", "-a", "last", "a.qcow2"])
        .ok("last");
    read(&[
        "read -P 4 0 100000",
        "read -P 1 100000 400000",
        "read -P 6 500000 100000",
        "read -P 5 2M 100000",
        "read -P 0 3M 1M",
    ]);
    lab.qemu_img(&["check", "a.qcow2"]).ok("check");
}

#[test]
fn bitmaps_are_kept() {
    let lab = Lab::new();
    lab.make("create a.qcow2 4M; img bitmap --add a.qcow2 b; io a.qcow2: write 0 64k");
    lab.zebu(&["snapshot", "-c", "s", "a.qcow2"]).ok("create");
    lab.zebu(&["snapshot", "-d", "s", "a.qcow2"]).ok("delete");
    lab.qemu_img(&["check", "a.qcow2"]).ok("check");
    let info = info(&lab, "a.qcow2");
    let bitmap = &info["format-specific"]["data"]["bitmaps"][0];
    assert_eq!(bitmap["name"], "b");
    assert_eq!(bitmap["flags"], serde_json::json!(["auto"]), "{bitmap}");
}

#[test]
fn deleting_a_snapshot_frees_space() {
    let lab = Lab::new();
    lab.make("create a.qcow2 64M; io a.qcow2: write -P 1 0 32M");
    lab.zebu(&["snapshot", "-c", "s", "a.qcow2"]).ok("create");
    lab.make("io a.qcow2: write -P 2 0 32M");
    lab.sync_files();
    let blocks = || fs::metadata(lab.path("a.qcow2")).expect("stat").blocks() * 512;
    let before = blocks();
    lab.zebu(&["snapshot", "-d", "s", "a.qcow2"]).ok("delete");
    lab.sync_files();
    let after = blocks();
    assert!(
        after + (30 << 20) < before,
        "{after} of {before} bytes left"
    );
}

#[test]
fn damaged_images_are_refused_unchanged() {
    if beyond_qemu("it changes damaged images") {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "create good 4M; io good: write -P 1 0 1M; img snapshot -c s good; io good: write -P 2 0 64k",
    );
    let table = lab.u64_at("good", 64);
    let snapshot_l1 = lab.u64_at("good", table);
    let active_l1 = lab.u64_at("good", 40);
    let snapshot_l2 = lab.u64_at("good", snapshot_l1) & 0x00ff_ffff_ffff_fe00;
    let active_l2 = lab.u64_at("good", active_l1) & 0x00ff_ffff_ffff_fe00;
    let refcount_table = lab.u64_at("good", 48);
    let unaligned = 0x1_0200u64;
    let far = 1u64 << 40;
    // Offset, value, and which of -c, -a and -d must refuse the image.
    for (place, value, refused) in [
        (table, unaligned, "ad"),
        (table, far, "ad"),
        (table, refcount_table, "ad"),
        (table, 0, "ad"),
        (snapshot_l1, unaligned, "ad"),
        (snapshot_l1, far, "ad"),
        (snapshot_l1, refcount_table, "ad"),
        (snapshot_l1, active_l1, "ad"),
        (snapshot_l2 + 8, unaligned, "ad"),
        // A cluster in use with refcount 0.
        (snapshot_l2 + 8, 0x100_0000, "ad"),
        (active_l1, far, "ca"),
        (active_l1, refcount_table, "ca"),
        (active_l2 + 8, unaligned, "ca"),
        (active_l2 + 8, 0x100_0000, "ca"),
    ] {
        fs::copy(lab.path("good"), lab.path("bad")).expect("copy");
        lab.patch("bad", place, &value.to_be_bytes());
        fs::copy(lab.path("bad"), lab.path("copy")).expect("copy");
        for verb in refused.chars() {
            let what = format!("-{verb}, {value:#x} at {place:#x}");
            let answer = lab.zebu(&["snapshot", &format!("-{verb}"), "s", "bad"]);
            answer.failed_with_one_line(1, &what);
            lab.assert_same_bytes("bad", "copy", &what);
        }
        lab.zebu(&["snapshot", "-l", "bad"]).ok("list");
    }
}
