//! Programs that are killed (SIGKILL). The image must open without errors, be unlocked, and have all
//! flushed data.

use std::io::{BufRead, BufReader, Write};
use std::process::Child;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{Cases, Lab, Rng, TIME_LIMIT, cases, testing_qemu};
use zebu::storage::{LockRequest, OpenFile, open_file};

const BLOCK: usize = 4096;

/// The kills of a test.
fn kills() -> Cases {
    cases(6, "kills")
}

/// Kills a program after a time, and returns whether it was still running. Fails the test if one of
/// the images is still locked.
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

/// Fails the test if QEMU or zebu find errors other than leaks.
fn assert_consistent(lab: &Lab, image: &str, what: &str) {
    let ours = lab.zebu(&["check", "-q", image]);
    assert!(matches!(ours.status, 0 | 3), "{what}: {ours:#?}");
    let theirs = lab.qemu_img(&["check", "-q", "-f", "qcow2", image]);
    assert!(matches!(theirs.status, 0 | 3), "{what}: {theirs:#?}");
}

/// The same during changes of snapshots, where copied flags may be wrong as well; see
/// docs/reliability.md.
fn assert_consistent_except_flags(lab: &Lab, image: &str, what: &str) {
    let ours = lab.zebu(&["check", "-q", image]);
    let allowed = ["Leaked cluster", "ERROR OFLAG_COPIED"];
    let is_allowed = |line: &str| allowed.iter().any(|start| line.starts_with(start));
    let only_flags = ours.status == 2 && ours.err.lines().all(is_allowed);
    assert!(
        matches!(ours.status, 0 | 3) || only_flags,
        "{what}: {ours:#?}"
    );
}

/// The content of an image.
fn content(lab: &Lab, image: &str) -> Vec<u8> {
    lab.qemu_img(&["convert", "-O", "raw", image, "content.raw"])
        .ok("qemu-img convert");
    std::fs::read(lab.path("content.raw")).expect("content")
}

/// One command of a script.
enum Step {
    /// The first block, the number of blocks, and their new byte.
    Write(usize, usize, u8),
    Flush,
}

/// A random script for a disk of `blocks` blocks.
fn script(random: &mut Rng, blocks: usize) -> Vec<Step> {
    let step = |nth: usize| match nth % 9 {
        8 => Step::Flush,
        _ => {
            let first = random.below(blocks as u64 - 40) as usize;
            let count = 1 + random.below(40) as usize;
            // 0 stands for a write of zeroes.
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

/// The script as qemu-io commands.
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

/// Runs a script, kills the program a moment after it has reported so many writes, and returns how
/// many it had reported in the end.
fn run_and_kill(lab: &Lab, args: &[&str], script: String, writes: u64, micros: u64) -> usize {
    let mut child = lab.start_zebu(args);
    let mut stdin = child.stdin.take().expect("piped");
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    thread::spawn(move || drop(stdin.write_all(script.as_bytes())));
    let (sender, counts) = mpsc::channel();
    thread::spawn(move || {
        let lines = stdout.lines().map_while(Result::ok);
        let mut count = 0;
        for _ in lines.filter(|line| line.contains("wrote ")) {
            count += 1;
            if count == writes {
                let _ = sender.send(count);
            }
        }
        let _ = sender.send(count);
    });
    let reached = counts.recv_timeout(TIME_LIMIT).expect("writes");
    assert_eq!(reached, writes);
    kill_later(lab, &mut child, micros, &["disk"]);
    counts.recv_timeout(TIME_LIMIT).expect("the output ends") as usize
}

/// Fails the test unless each block has the data of the last flush or of a later write.
fn assert_flushed(steps: &[Step], ended: usize, found: &[u8], what: &str) {
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
fn killed_during_writes() {
    const SIZE: usize = 16 << 20;
    let kinds = [
        "cluster_size=64k",
        "cluster_size=4k",
        "cluster_size=64k,extended_l2=on",
        "cluster_size=512,lazy_refcounts=on",
    ];
    let mut before_end = 0;
    let mut kills = kills();
    for round in &mut kills {
        let mut random = Rng::new(round);
        let options = kinds[round as usize % kinds.len()];
        let cache = ["none", "writeback"][random.below(2) as usize];
        let what = format!("round {round}, {options}, {cache}");
        let lab = Lab::new();
        let size = SIZE.to_string();
        lab.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "disk", &size])
            .ok(&what);
        let steps = script(&mut random, SIZE / BLOCK);
        let args = ["io", "-f", "qcow2", "-t", cache, "-d", "unmap", "disk"];
        let (writes, micros) = (1 + random.below(1500), random.below(10_000));
        let ended = run_and_kill(&lab, &args, text(&steps), writes, micros);
        before_end += usize::from(ended < 2600);
        // Also with lazy refcounts, since zebu does not postpone refcounts.
        assert_consistent(&lab, "disk", &what);
        assert_flushed(&steps, ended, &content(&lab, "disk"), &what);
        // The image can be written to without a repair.
        lab.zebu(&["io", "-f", "qcow2", "-c", "write -P 9 0 1M", "disk"])
            .ok(&what);
        assert_consistent(&lab, "disk", &what);
    }
    println!("{before_end} were killed before the end");
    assert!(before_end > 0 || !zebu_testkit::are_usual());
}

#[test]
fn killed_during_bench() {
    for round in kills() {
        let mut random = Rng::new(100 + round);
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
}

#[test]
fn killed_during_convert() {
    let lab = Lab::new();
    lab.make("raw source 50331648");
    let mut random = Rng::new(7);
    let bytes: Vec<u8> = (0..6 << 20).map(|_| random.below(256) as u8).collect();
    for nth in 0..8 {
        lab.patch("source", nth * (6 << 20), &bytes);
    }
    let before = std::fs::read(lab.path("source")).expect("source");
    let mut unfinished = 0;
    let mut kills = kills();
    for round in &mut kills {
        let what = format!("round {round}");
        let mut random = Rng::new(200 + round);
        let mut args = vec!["convert", "-f", "raw", "-O", "qcow2"];
        args.extend(match round % 6 {
            0 => &["-c"][..],
            1 => &["-o", "lazy_refcounts=on"],
            2 => &["-o", "preallocation=metadata"],
            3 => &["-o", "cluster_size=512"],
            4 => &["-o", "compat=0.10"],
            _ => &[],
        });
        args.extend(["source", "target"]);
        let _ = std::fs::remove_file(lab.path("target"));
        let mut child = lab.start_zebu(&args);
        let was_running = kill_later(&lab, &mut child, 1_000 + random.below(150_000), &["target"]);
        let target = std::fs::read(lab.path("target")).unwrap_or_default();
        // Before the header is written the file is no image, and while it is filled none that opens.
        if target.starts_with(b"QFI\xfb\xff\xff\xff\xff") && !testing_qemu() {
            assert!(was_running, "{what}: not complete after its end");
            let check = lab.qemu_img(&["check", "target"]);
            assert!(
                check.err.contains("Unsupported qcow2 version"),
                "{check:#?}"
            );
            unfinished += 1;
        } else if target.starts_with(b"QFI\xfb") {
            assert_consistent(&lab, "target", &what);
            let found = content(&lab, "target");
            let is_new = was_running && found.iter().all(|byte| *byte == 0);
            let is_right = is_new || found == before || testing_qemu();
            assert!(is_right, "{what}: a part of the data");
        }
        let source = std::fs::read(lab.path("source")).expect("source");
        assert!(source == before, "{what}: the source has changed");
    }
    assert!(
        unfinished > 0 || kills.done() < 10 || testing_qemu(),
        "none was killed midway"
    );
}

/// Changes of a whole image: name, recipe, command.
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
/// An image over a larger base.
const OVERLAY: &str = "create -o cluster_size=4k base 60M; random base 5 60 wz; \
    create -o cluster_size=4k -b base -F qcow2 disk 24M; random disk 7 150 wz";
const TAKEN: &str = "create -o cluster_size=4k disk 24M; random disk 7 150 wz; \
    img snapshot -c one disk; random disk 9 150 wz";
const PLAIN: &str = "create -o cluster_size=4k disk 24M; random disk 7 300 wz";

/// Changes are atomic: content and size are those before or those after.
#[test]
fn killed_during_changes_of_the_whole_image() {
    let mut killed = 0;
    for (name, recipe, args) in CHANGES {
        let original = Lab::new();
        original.make(if recipe.is_empty() { PLAIN } else { recipe });
        let files = ["disk", "base"].map(|file| std::fs::read(original.path(file)).ok());
        let before = content(&original, "disk");
        // A complete run gives the time and the result.
        let begun = Instant::now();
        original.zebu(args).ok(name);
        let whole = begun.elapsed().as_micros() as u64;
        let after = content(&original, "disk");
        let all = [&before, &after].map(Vec::len).into_iter().max();
        let lab = Lab::new();
        let seeds = cases(2, format!("kills ({name})"));
        for round in seeds.share(1, CHANGES.len()) {
            for (file, bytes) in ["disk", "base"].iter().zip(&files) {
                if let Some(bytes) = bytes {
                    std::fs::write(lab.path(file), bytes).expect("write");
                }
            }
            let mut random = Rng::new(1000 * round + whole + 1);
            let mut child = lab.start_zebu(args);
            let micros = random.below(whole);
            let running = kill_later(&lab, &mut child, micros, &["disk", "base"]);
            killed += u64::from(running);
            let what = format!("{name}, killed after {micros} of {whole} microseconds");
            let check = match args[0] {
                "snapshot" => assert_consistent_except_flags,
                _ => assert_consistent,
            };
            check(&lab, "disk", &what);
            let found = content(&lab, "disk");
            assert!(
                found == before || found == after,
                "{what}: neither before nor after"
            );
            assert!(
                running || found == after,
                "{what}: not complete after its end"
            );
            // Data of a disk that was made smaller must not reappear.
            let mut larger = found;
            larger.resize(all.unwrap_or(0), 0);
            let size = larger.len().to_string();
            lab.zebu(&["resize", "-q", "disk", &size]).ok(&what);
            assert!(content(&lab, "disk") == larger, "{what}: made larger");
            check(&lab, "disk", &what);
        }
    }
    println!("{killed} were killed before the end");
    assert!(killed > 0);
}
