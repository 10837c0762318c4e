//! Guards against a program that is killed in the middle of its work and leaves
//! an image that does not open, that has errors, that stays locked, or that has
//! lost what was flushed.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::Child;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use common::{Lab, PATIENCE};
use zebu::storage::{LockRequest, OpenFile, open_file};

/// How often each is killed, unless `ZEBU_KILLS` says more.
const KILLS: u64 = 15;
const BLOCK: usize = 4096;

/// Random numbers that can be had again.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

fn kills() -> u64 {
    let more = std::env::var("ZEBU_KILLS").ok();
    more.map_or(KILLS, |text| text.parse().expect("ZEBU_KILLS"))
}

/// Kills a program after a while; whether it was still running. Nothing keeps
/// these images locked then.
fn kill_later(lab: &Lab, child: &mut Child, micros: u64, images: &[&str]) -> bool {
    thread::sleep(Duration::from_micros(micros));
    let was_running = child.try_wait().expect("wait").is_none();
    let _ = child.kill();
    child.wait().expect("wait");
    for image in images {
        if let Ok(file) = open_file(lab.path(image), OpenFile::default()) {
            let locked = file
                .host_file()
                .expect("a file")
                .lock(LockRequest::QCOW2_WRITE);
            locked.unwrap_or_else(|e| panic!("{image}: {e}"));
        }
    }
    was_running
}

/// Fails unless QEMU and zebu find leaks at worst.
fn assert_consistent(lab: &Lab, image: &str, what: &str) {
    let ours = lab.zebu(&["check", "-q", image]);
    assert!(matches!(ours.status, 0 | 3), "{what}: {ours:#?}");
    let theirs = lab.qemu_img(&["check", "-q", "-f", "qcow2", image]);
    assert!(matches!(theirs.status, 0 | 3), "{what}: {theirs:#?}");
}

/// The same; but where snapshots were being changed copied flags may be wrong,
/// too (docs/reliability.md says which).
fn assert_consistent_but_flags(lab: &Lab, image: &str, what: &str) {
    let ours = lab.zebu(&["check", "-q", image]);
    let allowed = ["Leaked cluster", "ERROR OFLAG_COPIED"];
    let is_allowed = |line: &str| allowed.iter().any(|start| line.starts_with(start));
    let only_flags = ours.status == 2 && ours.err.lines().all(is_allowed);
    assert!(
        matches!(ours.status, 0 | 3) || only_flags,
        "{what}: {ours:#?}"
    );
}

/// What an image reads as.
fn content(lab: &Lab, image: &str) -> Vec<u8> {
    lab.qemu_img(&["convert", "-O", "raw", image, "content.raw"])
        .ok("qemu-img convert");
    std::fs::read(lab.path("content.raw")).expect("content")
}

/// One command of a script, and what it does.
enum Step {
    /// Blocks from the first on, so many, and the byte that they get.
    Write(usize, usize, u8),
    Flush,
}

fn script(random: &mut Random, blocks: usize) -> Vec<Step> {
    let step = |nth: usize| match nth % 9 {
        8 => Step::Flush,
        _ => {
            let first = random.below(blocks as u64 - 40) as usize;
            let count = 1 + random.below(40) as usize;
            // Discarded and zeroed blocks are zero.
            let byte = if random.below(6) == 0 {
                0
            } else {
                1 + nth as u8 % 250
            };
            Step::Write(first, count, byte)
        }
    };
    (0..3000).map(step).collect()
}

fn text(steps: &[Step]) -> String {
    let line = |step: &Step| match step {
        Step::Flush => "flush\n".to_string(),
        Step::Write(first, count, byte) => {
            let (at, length) = (first * BLOCK, count * BLOCK);
            match byte {
                0 => format!("write -z -u {at} {length}\n"),
                byte => format!("write -P {byte} {at} {length}\n"),
            }
        }
    };
    steps.iter().map(line).collect()
}

/// Runs a script, kills it, and says how many writes had ended.
fn run_and_kill(lab: &Lab, args: &[&str], script: String, micros: u64) -> usize {
    let mut child = lab.start_zebu(args);
    let mut stdin = child.stdin.take().expect("piped");
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    thread::spawn(move || drop(stdin.write_all(script.as_bytes())));
    let (sender, ended) = mpsc::channel();
    thread::spawn(move || {
        let lines = stdout.lines().map_while(Result::ok);
        let count = lines.filter(|line| line.contains("wrote ")).count();
        let _ = sender.send(count);
    });
    kill_later(lab, &mut child, micros, &["disk"]);
    ended.recv_timeout(PATIENCE).expect("its output ends")
}

/// Fails unless each block is as the last flush left it, or as a later write.
fn judge(steps: &[Step], ended: usize, found: &[u8], what: &str) {
    // A flush has ended if the write after it has.
    let (mut writes, mut flush, mut flushed) = (0, 0, 0);
    for (nth, step) in steps.iter().enumerate() {
        match step {
            Step::Flush => flush = nth,
            Step::Write(..) if writes == ended => break,
            Step::Write(..) => {
                writes += 1;
                flushed = flush;
            }
        }
    }
    let mut last = vec![0u8; found.len() / BLOCK];
    let mut later = vec![Vec::new(); last.len()];
    for (nth, step) in steps.iter().enumerate() {
        if let Step::Write(first, count, byte) = step {
            for block in *first..first + count {
                match nth < flushed {
                    true => last[block] = *byte,
                    false => later[block].push(*byte),
                }
            }
        }
    }
    for (nth, block) in found.chunks(BLOCK).enumerate() {
        let is_known = |byte: u8| byte == last[nth] || later[nth].contains(&byte);
        for sector in block.chunks(512) {
            let byte = sector[0];
            assert!(
                sector.iter().all(|b| *b == byte) && is_known(byte),
                "{what}: block {nth} has {byte}, {} was flushed, {:?} came later",
                last[nth],
                later[nth]
            );
        }
    }
}

#[test]
fn while_it_writes() {
    const SIZE: usize = 16 << 20;
    let kinds = [
        "cluster_size=64k",
        "cluster_size=4k",
        "cluster_size=64k,extended_l2=on",
        "cluster_size=512,lazy_refcounts=on",
    ];
    let mut before_end = 0;
    for round in 0..kills() {
        let mut random = Random(round + 1);
        let options = kinds[round as usize % kinds.len()];
        let cache = ["none", "writeback"][random.below(2) as usize];
        let what = format!("round {round}, {options}, {cache}");
        let lab = Lab::new();
        let size = SIZE.to_string();
        lab.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "disk", &size])
            .ok(&what);
        let steps = script(&mut random, SIZE / BLOCK);
        let args = ["io", "-f", "qcow2", "-t", cache, "-d", "unmap", "disk"];
        let micros = 20_000 + random.below(400_000);
        let ended = run_and_kill(&lab, &args, text(&steps), micros);
        before_end += usize::from(ended > 0 && ended < 2600);
        // As lazy refcounts are written in time, it is not even dirty.
        assert_consistent(&lab, "disk", &what);
        judge(&steps, ended, &content(&lab, "disk"), &what);
        // It can be written to at once.
        lab.zebu(&["io", "-f", "qcow2", "-c", "write -P 9 0 1M", "disk"])
            .ok(&what);
        assert_consistent(&lab, "disk", &what);
    }
    println!("{before_end} were killed in the middle");
    println!("cases: {} kills", kills());
    assert!(before_end > 0);
}

#[test]
fn while_it_is_measured() {
    for round in 0..kills() {
        let mut random = Random(100 + round);
        let what = format!("round {round}");
        let lab = Lab::new();
        lab.qemu_img(&["create", "-q", "-f", "qcow2", "disk", "64M"])
            .ok(&what);
        let args = [
            "bench",
            "-w",
            "-c",
            "1000000",
            "-d",
            "16",
            "-s",
            "4k",
            "-S",
            "20480",
            "-t",
            "none",
            "--pattern",
            "7",
            "--flush-interval",
            "64",
            "-f",
            "qcow2",
            "disk",
        ];
        let mut child = lab.start_zebu(&args);
        kill_later(&lab, &mut child, 20_000 + random.below(300_000), &["disk"]);
        assert_consistent(&lab, "disk", &what);
        let found = content(&lab, "disk");
        let is_known = |sector: &[u8]| sector == [0; 512] || sector == [7; 512];
        assert!(found.chunks(512).all(is_known), "{what}: other data");
    }
    println!("cases: {} kills", kills());
}

#[test]
fn while_it_converts() {
    let lab = Lab::new();
    lab.make("raw source 50331648");
    let mut random = Random(7);
    let bytes: Vec<u8> = (0..6 << 20).map(|_| random.below(256) as u8).collect();
    for nth in 0..8 {
        lab.patch("source", nth * (6 << 20), &bytes);
    }
    let before = std::fs::read(lab.path("source")).expect("source");
    for round in 0..kills() {
        let what = format!("round {round}");
        let mut args = vec!["convert", "-f", "raw", "-O", "qcow2"];
        if round % 3 == 0 {
            args.push("-c");
        }
        args.extend(["source", "target"]);
        let _ = std::fs::remove_file(lab.path("target"));
        let mut child = lab.start_zebu(&args);
        let was_running = kill_later(&lab, &mut child, 1_000 + random.below(150_000), &["target"]);
        let target = std::fs::read(lab.path("target")).unwrap_or_default();
        // Until its header is written it is no image at all.
        if target.starts_with(b"QFI\xfb") {
            assert_consistent(&lab, "target", &what);
            let found = content(&lab, "target");
            let pairs = found.chunks(512).zip(before.chunks(512));
            let is_known = |(now, then): (&[u8], &[u8])| now == then || now == [0; 512];
            assert!(pairs.into_iter().all(is_known), "{what}: other data");
            assert!(was_running || found == before, "{what}: it had ended");
        }
        let source = std::fs::read(lab.path("source")).expect("source");
        assert!(source == before, "{what}: the source has changed");
    }
    println!("cases: {} kills", kills());
}

/// What changes a whole image: how the files are made, and the command.
const CHANGES: [(&str, &str, &[&str]); 12] = [
    ("shrink", "", &["resize", "--shrink", "disk", "5000k"]),
    (
        "shrink to half a cluster",
        "",
        &["resize", "--shrink", "disk", "5009k"],
    ),
    (
        "shrink an overlay",
        OVERLAY,
        &["resize", "--shrink", "disk", "7001k"],
    ),
    ("grow", "", &["resize", "disk", "300M"]),
    ("grow an overlay", OVERLAY, &["resize", "disk", "40M"]),
    (
        "preallocate",
        "",
        &["resize", "--preallocation=metadata", "disk", "80M"],
    ),
    (
        "fill",
        OVERLAY,
        &["resize", "--preallocation=full", "disk", "50M"],
    ),
    ("take", "", &["snapshot", "-c", "new", "disk"]),
    ("apply", TAKEN, &["snapshot", "-a", "one", "disk"]),
    ("delete", TAKEN, &["snapshot", "-d", "one", "disk"]),
    ("commit", OVERLAY, &["commit", "disk"]),
    ("rebase", OVERLAY, &["rebase", "-b", "", "disk"]),
];
/// Over a longer and a shorter base.
const OVERLAY: &str = "create -o cluster_size=4k base 60M; random base 5 60 wz; \
    create -o cluster_size=4k -b base -F qcow2 disk 24M; random disk 7 150 wz";
const TAKEN: &str = "create -o cluster_size=4k disk 24M; random disk 7 150 wz; \
    img snapshot -c one disk; random disk 9 150 wz";
const PLAIN: &str = "create -o cluster_size=4k disk 24M; random disk 7 300 wz";

/// A change has happened or not: what the disk reads as, and how large it is.
#[test]
fn while_everything_changes() {
    let mut in_the_middle = 0;
    for (name, recipe, args) in CHANGES {
        let original = Lab::new();
        original.make(if recipe.is_empty() { PLAIN } else { recipe });
        let files = ["disk", "base"].map(|file| std::fs::read(original.path(file)).ok());
        let before = content(&original, "disk");
        // Once to its end, to know how long it takes, and what it does.
        let begun = Instant::now();
        original.zebu(args).ok(name);
        let whole = begun.elapsed().as_micros() as u64;
        let after = content(&original, "disk");
        let all = [&before, &after].map(Vec::len).into_iter().max();
        let lab = Lab::new();
        for round in 0..kills() / 3 {
            for (file, bytes) in ["disk", "base"].iter().zip(&files) {
                if let Some(bytes) = bytes {
                    std::fs::write(lab.path(file), bytes).expect("write");
                }
            }
            let mut random = Random(1000 * round + whole + 1);
            let mut child = lab.start_zebu(args);
            let micros = random.below(whole);
            let running = kill_later(&lab, &mut child, micros, &["disk", "base"]);
            in_the_middle += u64::from(running);
            let what = format!("{name}, killed after {micros} of {whole} microseconds");
            let check = match args[0] {
                "snapshot" => assert_consistent_but_flags,
                _ => assert_consistent,
            };
            check(&lab, "disk", &what);
            let found = content(&lab, "disk");
            assert!(found == before || found == after, "{what}: neither");
            assert!(running || found == after, "{what}: it had ended");
            // What a disk that was made smaller had must not come back.
            let mut larger = found;
            larger.resize(all.unwrap_or(0), 0);
            let size = larger.len().to_string();
            lab.zebu(&["resize", "-q", "disk", &size]).ok(&what);
            assert!(content(&lab, "disk") == larger, "{what}: made larger");
            check(&lab, "disk", &what);
        }
    }
    println!("{in_the_middle} were killed in the middle");
    println!("cases: {} kills", kills() / 3 * CHANGES.len() as u64);
    assert!(in_the_middle > 0);
}
