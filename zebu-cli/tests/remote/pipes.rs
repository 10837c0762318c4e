//! Images that are read from streams and written to streams. Guards against a wrong disk with exit
//! status 0, whatever comes first in the stream and wherever it is cut off, against streams that
//! QEMU does not read, and against messages among the data.

use std::fs;
use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::terminal::terminal;
use crate::common::{Answer, Lab, Rng, beyond_qemu, cases, part, program, rotated};

/// Feeds bytes to a conversion from standard input, in pieces of up to `step` bytes.
fn fed(lab: &Lab, bytes: &[u8], step: usize, args: &[&str]) -> Answer {
    let all = [&["convert"], args].concat();
    let mut child = lab.start_zebu_heard(&all);
    let mut stdin = child.stdin.take().expect("piped");
    let mut random = Rng::new(step as u64);
    let mut rest = bytes;
    while !rest.is_empty() {
        let count = (1 + random.below(step as u64) as usize).min(rest.len());
        // It may have ended with an error.
        if stdin.write_all(&rest[..count]).is_err() {
            break;
        }
        rest = &rest[count..];
    }
    drop(stdin);
    ended(child)
}

/// Waits for the end of a program.
fn ended(mut child: Child) -> Answer {
    let (mut out, mut err) = (String::new(), String::new());
    let streams = (child.stdout.take(), child.stderr.take());
    if let (Some(mut stdout), Some(mut stderr)) = streams {
        stdout.read_to_string(&mut out).expect("standard output");
        stderr.read_to_string(&mut err).expect("standard error");
    }
    let status = child.wait().expect("wait");
    Answer {
        status: status.code().unwrap_or(255),
        out,
        err,
    }
}

/// What these tests do in a lab.
pub trait Streams {
    /// As [`Lab::start_zebu`], with a pipe for messages.
    fn start_zebu_heard(&self, args: &[&str]) -> Child;
    /// The disk of an image as a raw file, by QEMU.
    fn expand(&self, format: &str, image: &str, raw: &str);
    fn read(&self, name: &str) -> Vec<u8>;
    /// Fails the test unless QEMU finds no error in the image and the disk of `raw`.
    fn assert_good(&self, format: &str, image: &str, raw: &str, what: &str);
}

impl Streams for Lab {
    fn start_zebu_heard(&self, args: &[&str]) -> Child {
        std::process::Command::new(program())
            .args(args)
            .current_dir(self.path(""))
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program under test")
    }

    fn expand(&self, format: &str, image: &str, raw: &str) {
        self.qemu_img(&["convert", "-f", format, "-O", "raw", image, raw])
            .ok("qemu-img convert");
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).expect(name)
    }

    fn assert_good(&self, format: &str, image: &str, raw: &str, what: &str) {
        if format != "raw" {
            self.qemu_img(&["check", "-f", format, image]).ok(what);
        }
        let compare = ["compare", "-f", format, "-F", "raw", image, raw];
        self.qemu_img(&compare).ok(what);
    }
}

/// Ways to make images that come in a stream.
const IMAGES: [&str; 15] = [
    "create i 8M; random i 1 60 wzu",
    "create -o cluster_size=512 i 3M; random i 2 300 wzud",
    "create -o cluster_size=2M i 40M; random i 3 40 wz",
    "create -o cluster_size=4k i 20M; random i 4 200 wzudc",
    "create -o compat=0.10,cluster_size=1k i 5M; random i 5 100 wc",
    "create -o extended_l2=on i 9M; random i 6 100 wzud",
    "create -o extended_l2=on,cluster_size=16k i 9M; random i 7 200 wzu",
    "create -o compression_type=zstd i 9M; random i 8 100 wc",
    "create -o preallocation=metadata i 9M; random i 9 20 w",
    "create -o preallocation=full,cluster_size=4k i 3M; random i 10 20 wz",
    "create i 9M; random i 11 30 wc; img snapshot -c a i; random i 12 30 wzc; \
     img snapshot -c b i; random i 13 20 w",
    "create i 9M; random i 14 60 w; img snapshot -c a i; random i 15 5 w; img snapshot -d a i",
    "create -o refcount_bits=1,cluster_size=512 i 1M; random i 16 80 w",
    "create i 1M; io i: write -s noise 0 100k; img resize i 3G; io i: write -P 3 2900M 70000",
    "create i 0",
];

#[test]
fn images_from_standard_input() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    for recipe in part(3, IMAGES) {
        let lab = Lab::new();
        lab.make(recipe);
        lab.expand("qcow2", "i", "want");
        lab.shell("cat i | \"$0\" convert - raw").ok(recipe);
        lab.assert_same_bytes("raw", "want", recipe);
        lab.shell("cat i | \"$0\" convert -f qcow2 -O qcow2 - copy")
            .ok(recipe);
        lab.assert_good("qcow2", "copy", "want", recipe);
        if !lab.read("want").is_empty() {
            lab.shell("cat i | \"$0\" convert -W -O vdi - vdi")
                .ok(recipe);
            lab.assert_good("vdi", "vdi", "want", recipe);
        }
        // Into a target whose content must go.
        let size = lab.read("want").len();
        fs::write(lab.path("old"), vec![0xaa; size]).expect("write");
        lab.shell("cat i | \"$0\" convert -n - old").ok(recipe);
        lab.assert_same_bytes("old", "want", recipe);
        // Any bytes may come in any pieces.
        let answer = fed(&lab, &lab.read("i"), 7000, &["-f", "qcow2", "-", "pieces"]);
        answer.ok(recipe);
        lab.assert_same_bytes("pieces", "want", recipe);
    }
}

#[test]
fn raw_disks_from_standard_input() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let sizes = [1u64, 511, 512, 1 << 20, (1 << 20) + 1, 5_000_000];
    for (i, size) in sizes.into_iter().enumerate() {
        let lab = Lab::new();
        lab.make(&format!("raw i {size}"));
        let mut want = lab.read("i");
        want.resize(want.len().next_multiple_of(512), 0);
        fs::write(lab.path("want"), want).expect("write");
        lab.shell("cat i | \"$0\" convert -f raw - raw").ok("raw");
        lab.assert_same_bytes("raw", "want", "raw");
        let all = ["", "-S 0", "-c", "-o cluster_size=512", "-o extended_l2=on"];
        for options in part(2, rotated(all, i)) {
            let what = format!("{size} {options}");
            let script = format!("cat i | \"$0\" convert {options} -f raw -O qcow2 - q");
            lab.shell(&script).ok(&what);
            lab.assert_good("qcow2", "q", "want", &what);
            let info = lab.qemu_img(&["info", "--output=json", "q"]).ok(&what);
            let info: serde_json::Value = serde_json::from_str(&info.out).expect("JSON");
            assert_eq!(info["virtual-size"], size.next_multiple_of(512), "{what}");
        }
        // Through two pipes.
        lab.shell("cat i | \"$0\" convert -f raw - - | cat > both")
            .ok("both");
        lab.assert_same_bytes("both", "want", "both");
        let small = lab.shell("truncate -s 300 s; cat i i | \"$0\" convert -n -f raw - s");
        small.failed_with_one_line(1, "a target that is too small");
    }
}

/// Compressors, and the option that makes them print.
const COMPRESSORS: [&str; 6] = [
    "gzip -c",
    "zstd -qc",
    "zstd -qc --long=24 --check",
    "xz -c -1",
    "xz -c --check=sha256 -0",
    "bzip2 -c",
];

#[test]
fn compressed_streams() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let lab = Lab::new();
    lab.make("create i 9M; random i 8 100 wc; raw r 3000000");
    lab.expand("qcow2", "i", "want");
    for compressor in part(2, COMPRESSORS) {
        let from = |what: &str| format!("{what} | \"$0\" convert -O raw - raw");
        lab.shell(&from(&format!("{compressor} i"))).ok(compressor);
        lab.assert_same_bytes("raw", "want", compressor);
        lab.shell(&from(&format!("{compressor} r"))).ok(compressor);
        lab.qemu_img(&["compare", "-f", "raw", "-F", "raw", "raw", "r"])
            .ok(compressor);
        // Members that follow each other are one stream.
        let parts = format!("(head -c 100000 i | {compressor}; tail -c +100001 i | {compressor})");
        lab.shell(&from(&parts)).ok(compressor);
        lab.assert_same_bytes("raw", "want", compressor);
        for (damage, says) in [
            (format!("{compressor} i | head -c -5"), "stream is cut off"),
            (
                format!("{compressor} i | head -c 3000"),
                "stream is cut off",
            ),
            (
                format!("({compressor} i; echo more than that)"),
                "stream is",
            ),
        ] {
            let answer = lab.shell(&from(&damage));
            assert!(answer.err.contains(says), "{damage}: {answer:#?}");
            answer.failed_with_one_line(1, &damage);
        }
    }
}

#[test]
fn generated_images() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    for seed in cases(3, "images from streams and to them") {
        generated_image(seed);
    }
}

/// Converts an image from a stream, and to streams.
fn generated_image(seed: u64) {
    let mut random = Rng::new(seed);
    let lab = Lab::new();
    let cluster = random.pick(&["512", "1k", "4k", "16k", "64k", "256k", "2M"]);
    let mut options = format!("cluster_size={cluster}");
    if ["16k", "64k", "256k", "2M"].contains(&cluster) && random.one_in(3) {
        options += ",extended_l2=on";
    }
    options += random.pick(&["", "", ",compression_type=zstd", ",preallocation=metadata"]);
    let size = 1 + random.below(48) * 512 + random.below(20 << 20) / 512 * 512;
    let mut recipe = format!("create -o {options} i {}", size.next_multiple_of(512));
    if random.one_in(4) {
        recipe = format!(
            "create b {}; random b {seed} 20 w; create -b b -F qcow2 -o {} i {}",
            1 + random.below(9 << 20) / 512 * 512,
            options.replace(",preallocation=metadata", ""),
            size.next_multiple_of(512)
        );
    }
    for step in 0..1 + random.below(4) {
        let kinds = random.pick(&["w", "wz", "wc", "c", "wzudc"]);
        let count = 1 + random.below(80);
        recipe += &format!("; random i {} {count} {kinds}", seed * 10 + step);
        match random.below(5) {
            0 => recipe += &format!("; img snapshot -c s{step} i"),
            1 => recipe += &format!("; img resize -q i +{}", 512 * (1 + random.below(9000))),
            _ => {}
        }
    }
    let what = format!("seed {seed}: {recipe}");
    for step in recipe.split("; ") {
        // QEMU finds some of its own images over a base of odd length corrupt, and changes them no more.
        let is_marked = || lab.qemu_img(&["info", "i"]).out.contains("corrupt: true");
        if step.starts_with("img") && is_marked() {
            println!("{what}: corrupt");
            return;
        }
        lab.make(step);
    }
    lab.expand("qcow2", "i", "want");
    let pack = random.pick(&["cat", "cat", "gzip -c1", "zstd -qc1"]);
    lab.shell(&format!("{pack} i | \"$0\" convert - raw"))
        .ok(&what);
    lab.assert_same_bytes("raw", "want", &what);
    let kept = random.pick(&["--salvage", "-l s0", "--bitmaps -O qcow2"]);
    if lab.qemu_img(&["snapshot", "-l", "i"]).out.contains("s0") || !kept.starts_with("-l") {
        let script = format!("{pack} i | \"$0\" convert --spill . {kept} - kept");
        lab.shell(&script).ok(&what);
        let format = ["raw", "qcow2"][usize::from(kept.contains("qcow2"))];
        match kept.starts_with("-l") {
            true => {
                lab.qemu_img(&["convert", "-O", "raw", "-l", "s0", "i", "snapshot"])
                    .ok(&what);
                lab.assert_same_bytes("kept", "snapshot", &what);
            }
            false => lab.assert_good(format, "kept", "want", &what),
        }
    }
    let more = random.pick(&["", "-S 0", "-m 1", "-W", "-o cluster_size=4k"]);
    let script = format!("{pack} i | \"$0\" convert {more} -O qcow2 - copy");
    lab.shell(&script).ok(&what);
    lab.assert_good("qcow2", "copy", "want", &what);
    // To a stream, and back.
    let target = random.pick(&["512", "4k", "64k", "2M"]);
    let packed = random.pick(&["", "", "-c", "-c -o compression_type=zstd", "-S 4k"]);
    let script = format!("\"$0\" convert {packed} -O qcow2 -o cluster_size={target} i - | cat > q");
    let what = format!("{what}: {script}");
    lab.shell(&script).ok(&what);
    lab.assert_good("qcow2", "q", "want", &what);
    lab.shell("cat q | \"$0\" convert - back").ok(&what);
    lab.assert_same_bytes("back", "want", &what);
}

#[test]
fn streams_that_are_cut_off_or_damaged() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    for (recipe, format) in [
        ("create -o cluster_size=4k i 1M; random i 1 60 w", "qcow2"),
        ("create i 2M; random i 2 20 c", "qcow2"),
        (
            "create i 2M; random i 3 20 w; img snapshot -c a i; random i 4 9 w",
            "qcow2",
        ),
        (
            "create q 2M; random q 5 40 w; img convert -O vmdk -o subformat=streamOptimized q i",
            "vmdk",
        ),
    ] {
        let lab = Lab::new();
        lab.make(recipe);
        lab.expand(format, "i", "want");
        let (bytes, want) = (lab.read("i"), lab.read("want"));
        let mut random = Rng::new(3);
        for run in 0..40 {
            let mut bad = bytes.clone();
            let what = match run % 2 {
                0 => {
                    bad.truncate(random.below(bytes.len() as u64) as usize);
                    format!("{recipe}: cut at {}", bad.len())
                }
                _ => {
                    // Metadata are at the start of most of these images.
                    let at = random.below(bytes.len().min(300_000) as u64) as usize;
                    bad[at] ^= 1 << random.below(8);
                    format!("{recipe}: damaged at {at}")
                }
            };
            let answer = fed(&lab, &bad, 1 << 20, &["-f", format, "-", "out"]);
            answer.orderly(&what);
            match answer.status {
                0 if run % 2 == 0 => assert!(lab.read("out") == want, "{what}"),
                // Data have no checksums, so what they are is what a file has.
                0 => {
                    fs::write(lab.path("bad"), &bad).expect("write");
                    let file = lab.zebu(&["convert", "-f", format, "bad", "file"]);
                    // A file is refused for tables that a stream does not need.
                    let right = match file.status {
                        0 => lab.read("file"),
                        _ => want.clone(),
                    };
                    assert!(lab.read("out") == right, "{what}");
                }
                1 => assert_eq!(answer.err.lines().count(), 1, "{what}: {answer:#?}"),
                _ => panic!("{what}: {answer:#?}"),
            }
        }
    }
}

#[test]
fn vmdks_from_standard_input() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    for size in ["1M", "40M", "33619968", "1G"] {
        let lab = Lab::new();
        lab.make(&format!("create q {size}; random q 4 60 wz"));
        lab.expand("qcow2", "q", "want");
        let stream = "-O vmdk -o subformat=streamOptimized";
        lab.make("img convert -O vmdk -o subformat=streamOptimized q by-qemu");
        lab.shell(&format!("\"$0\" convert {stream} q by-zebu"))
            .ok(size);
        lab.shell(&format!("\"$0\" convert {stream} q - | cat > piped"))
            .ok(size);
        for image in ["by-qemu", "by-zebu", "piped"] {
            lab.assert_good("vmdk", image, "want", image);
            for pack in ["cat", "gzip -c1"] {
                lab.shell(&format!("{pack} {image} | \"$0\" convert - raw"))
                    .ok(image);
                lab.assert_same_bytes("raw", "want", image);
            }
        }
        // Grains of 64 KiB are whole clusters.
        lab.shell("cat piped | \"$0\" convert -c -O qcow2 - c")
            .ok(size);
        lab.assert_good("qcow2", "c", "want", size);
    }
}

#[test]
fn streams_are_written_for_qemu() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let lab = Lab::new();
    lab.make("create i 30000128; random i 21 150 wzc; raw r 5000001");
    lab.expand("qcow2", "i", "want");
    for options in [
        "-O raw",
        "-O qcow2",
        "-O qcow2 -S 4k",
        "-O qcow2 -S 0",
        "-O qcow2 -o cluster_size=512",
        "-O qcow2 -o cluster_size=2M",
        "-O qcow2 -o compat=0.10",
        "-O qcow2 -o extended_l2=on",
        "-O qcow2 -o refcount_bits=64,lazy_refcounts=on",
        "-O qcow2 -o refcount_bits=1",
        "-c -O qcow2",
        "-c -O qcow2 -o compression_type=zstd --level 1",
        "-c -O qcow2 -o cluster_size=512",
        "-c -O qcow2 -o cluster_size=2M,refcount_bits=8",
        "-c -O qcow2 -o refcount_bits=1,cluster_size=4k",
        "-c -m 1 -O qcow2 -o extended_l2=on",
    ] {
        let format = options.split("-O ").nth(1).expect("-O");
        let format = format.split(' ').next().expect("a format");
        let script = format!("\"$0\" convert -p {options} i - | cat > out");
        let answer = lab.shell(&script).ok(options);
        assert_eq!(answer.err, "", "{options}");
        lab.assert_good(format, "out", "want", options);
        let length = lab.read("out").len();
        assert!(length.is_multiple_of(512), "{options}: {length}");
        // The same each time.
        lab.shell(&format!("\"$0\" convert {options} i - | cat > again"))
            .ok(options);
        lab.assert_same_bytes("out", "again", options);
        let script = format!("\"$0\" convert -f raw {options} r - | cat > out");
        lab.shell(&script).ok(options);
        lab.qemu_img(&["compare", "-f", format, "-F", "raw", "out", "r"])
            .ok(options);
    }
    lab.shell("\"$0\" convert -O qcow2 i r - | cat > out")
        .ok("two sources");
    lab.qemu_img(&["check", "out"]).ok("two sources");
}

#[test]
fn tables_that_come_late_are_waited_for() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let lab = Lab::new();
    // The table is copied behind its data.
    lab.make(
        "create i 100M; io i: write -s noise 0 60M; img snapshot -c a i; io i: write -P 1 5M 64k",
    );
    lab.expand("qcow2", "i", "want");
    let answer = lab.shell("cat i | \"$0\" convert - raw");
    assert!(answer.err.contains("--spill DIR"), "{answer:#?}");
    answer.failed_with_one_line(1, "no spill");
    let answer = lab.shell("cat i | \"$0\" convert --spill . --spill-size 1M - raw");
    assert!(answer.err.contains("--spill-size SIZE"), "{answer:#?}");
    answer.failed_with_one_line(1, "a small spill");
    lab.shell("cat i | \"$0\" convert --spill . - raw")
        .ok("spill");
    lab.assert_same_bytes("raw", "want", "spill");
    let files = fs::read_dir(lab.path("")).expect("list").count();
    assert_eq!(files, 5, "noise, text, i, want, raw");
}

#[test]
fn other_formats_are_kept() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let lab = Lab::new();
    lab.make("create q 9M; random q 4 60 wz; img snapshot -c a q; random q 5 10 w");
    lab.expand("qcow2", "q", "want");
    for format in ["vdi", "vpc", "vhdx", "qed", "vmdk"] {
        lab.make(&format!("img convert -O {format} q i"));
        let answer = lab.shell("cat i | \"$0\" convert - raw");
        assert!(answer.err.contains("--spill DIR"), "{answer:#?}");
        answer.failed_with_one_line(1, format);
        lab.shell("gzip -c1 i | \"$0\" convert --spill . - raw")
            .ok(format);
        lab.qemu_img(&["compare", "-f", "raw", "-F", format, "raw", "i"])
            .ok(format);
        let answer = lab.shell("cat i | \"$0\" convert --spill . --spill-size 1M - raw");
        answer.failed_with_one_line(1, format);
    }
    // What needs a file of a format that needs none.
    let answer = lab.shell("cat q | \"$0\" convert -l a - raw");
    answer.failed_with_one_line(1, "a snapshot");
    lab.shell("cat q | \"$0\" convert --spill . -l a - raw")
        .ok("a snapshot");
    lab.qemu_img(&["convert", "-l", "a", "q", "snapshot"])
        .ok("a snapshot");
    lab.assert_same_bytes("raw", "snapshot", "a snapshot");
    let answer = lab.shell("cat want | \"$0\" convert -f raw -O vdi - v");
    assert!(answer.err.contains("size of the disk"), "{answer:#?}");
    answer.failed_with_one_line(1, "an unknown size");
    lab.shell("cat want | \"$0\" convert --spill . -f raw -O vdi - v")
        .ok("kept");
    lab.assert_good("vdi", "v", "want", "kept");
    lab.shell("cat q | \"$0\" convert --spill . -O qcow2 - - | cat > piped")
        .ok("kept");
    lab.assert_good("qcow2", "piped", "want", "kept");
}

#[test]
fn backing_files_and_names() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let lab = Lab::new();
    lab.make("create b 5M; random b 1 40 w; create -b b -F qcow2 i 8M; random i 2 20 wz");
    lab.expand("qcow2", "i", "want");
    let script = "cat i | \"$0\" convert - raw";
    lab.shell(script).ok("a backing file");
    lab.assert_same_bytes("raw", "want", "a backing file");
    lab.shell("cat i | \"$0\" convert -O qcow2 - q")
        .ok("a backing file");
    lab.assert_good("qcow2", "q", "want", "a backing file");
    lab.shell("cat i | \"$0\" convert --spill . --salvage - kept")
        .ok("kept");
    lab.assert_same_bytes("kept", "want", "kept");
    let answer = lab.shell("cat i | \"$0\" convert --untrusted - raw");
    answer.failed_with_one_line(1, "untrusted");
    // Files and pipes by other names.
    for script in [
        "\"$0\" convert - raw < i",
        "\"$0\" convert /dev/stdin raw < i",
        "cat i | \"$0\" convert /dev/stdin raw",
        "cat i | \"$0\" convert /dev/fd/0 raw",
        "\"$0\" convert <(cat i) raw",
        "mkfifo f; cat i > f & \"$0\" convert f raw",
        "mkfifo o; cat o > raw & \"$0\" convert i o; wait",
        "\"$0\" convert i - > raw",
        "\"$0\" convert i /dev/stdout | cat > raw",
        "(head -c 0; cat) < i | \"$0\" convert - raw",
    ] {
        fs::write(lab.path("raw"), "").expect("write");
        lab.shell(script).ok(script);
        lab.assert_same_bytes("raw", "want", script);
    }
    // What precedes the image was read already.
    lab.make("raw r 2000000");
    let script = "(dd bs=512 count=3 of=/dev/null status=none; \"$0\" convert -f raw - out) < r; \
                  tail -c +1537 r > rest; truncate -s %512 rest; cmp out rest";
    lab.shell(script).ok("a file that is not at its start");
}

#[test]
fn what_makes_no_sense_is_refused() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let lab = Lab::new();
    lab.make("create i 4M; random i 2 20 wz; create b 4M");
    for script in [
        "true | \"$0\" convert - x",
        "cat i | \"$0\" convert -f vmdk - x",
        "cat text | \"$0\" convert -f qcow2 - x",
        "cat i | \"$0\" convert - i x",
        "cat i | \"$0\" convert --bitmaps -O qcow2 - x",
        "cat i | \"$0\" convert -B b -F qcow2 -O qcow2 - x",
        "cat i | \"$0\" convert --spill no/such/folder --bitmaps -O qcow2 - x",
        "cat i | \"$0\" convert --spill-size 1M - x",
        "cat i | \"$0\" convert -O qcow2 - - | cat",
        "cat i | \"$0\" convert -c - x",
        "\"$0\" convert -n i - | cat",
        "\"$0\" convert -B b -F qcow2 -O qcow2 i - | cat",
        "\"$0\" convert -O vdi i - | cat",
        "\"$0\" convert -O vmdk i - | cat",
        "\"$0\" convert -O qcow2 -o preallocation=full i - | cat",
        "\"$0\" convert -O qcow2 -o backing_file=b,backing_fmt=qcow2 i - | cat",
        "\"$0\" convert -c i - | cat",
    ] {
        let answer = lab.shell(script);
        answer.failed_with_one_line(1, script);
        assert_eq!(answer.out, "", "{script}");
        assert!(!lab.path("x").exists(), "{script}");
    }
}

#[test]
fn readers_and_writers_that_go_away() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let lab = Lab::new();
    lab.make("create i 40M; io i: write -s noise 0 40M");
    for options in [
        "-O raw",
        "-O qcow2",
        "-c -O qcow2",
        "-O vmdk -o subformat=streamOptimized",
    ] {
        let script = format!("\"$0\" convert {options} i - | head -c 100000 > /dev/null");
        let answer = lab.shell(&script);
        assert!(answer.err.contains("Broken pipe"), "{options}: {answer:#?}");
        answer.failed_with_one_line(1, options);
    }
    // Nothing comes, and then a signal.
    let mut child = lab.start_zebu_heard(&["convert", "-f", "raw", "-O", "qcow2", "-", "out"]);
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(&[7; 3 << 20]).expect("write");
    std::thread::sleep(Duration::from_millis(500));
    let began = Instant::now();
    lab.shell(&format!("kill -TERM {}", child.id())).ok("kill");
    let answer = ended(child);
    assert_eq!(answer.status, 143, "{answer:#?}");
    assert!(began.elapsed() < Duration::from_secs(20));
    assert!(answer.err.contains("incomplete"), "{answer:#?}");
    assert!(lab.qemu_img(&["info", "-f", "qcow2", "out"]).status != 0);
    drop(stdin);
    // A reader that does not read.
    let mut child = lab.start_zebu_heard(&["convert", "i", "-"]);
    std::thread::sleep(Duration::from_millis(500));
    lab.shell(&format!("kill -TERM {}", child.id())).ok("kill");
    let began = Instant::now();
    let status = child.wait().expect("wait");
    assert_eq!(status.code(), Some(143));
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn memory_is_bounded() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let lab = Lab::new();
    lab.make("create i 300M; io i: write -s noise 0 300M");
    let bytes = lab.read("i");
    let mut child = lab.start_zebu_heard(&["convert", "-", "raw"]);
    let mut stdin = child.stdin.take().expect("piped");
    let (last, most) = (bytes.len() - 1, 128 << 10);
    stdin.write_all(&bytes[..last]).expect("write");
    std::thread::sleep(Duration::from_millis(300));
    let peak = peak(child.id());
    assert!(peak < most, "{peak} KiB");
    stdin.write_all(&bytes[last..]).expect("write");
    drop(stdin);
    ended(child).ok("from a stream");
    for options in ["-O raw", "-c -O qcow2"] {
        let args = format!("convert {options} i -");
        let args: Vec<&str> = args.split(' ').collect();
        let mut child = lab.start_zebu_heard(&args);
        let mut stdout = child.stdout.take().expect("piped");
        let mut some = vec![0; 100 << 20];
        stdout.read_exact(&mut some).expect("read");
        let peak = self::peak(child.id());
        assert!(peak < most, "{options}: {peak} KiB");
        std::io::copy(&mut stdout, &mut std::io::sink()).expect("read");
        assert!(child.wait().expect("wait").success(), "{options}");
    }
}

/// Standard output that is open for reading and writing keeps what is in its file.
#[test]
fn standard_output_is_no_file_with_content() {
    if beyond_qemu("QEMU writes no streams") {
        return;
    }
    let lab = Lab::new();
    fs::write(lab.path("i"), vec![7; 1 << 20]).unwrap();
    lab.make("create -b i -F raw top");
    let old = vec![9; 3 << 20];
    fs::write(lab.path("longer"), &old).unwrap();
    for options in ["-O raw", "-O qcow2"] {
        let line = format!("\"$0\" convert -f raw {options} i - 1<>longer");
        lab.shell(&line)
            .fails_with("that has content, of which a part would stay");
        assert!(fs::read(lab.path("longer")).unwrap() == old, "{options}");
    }
    // At its end, and where nothing is behind.
    lab.shell("\"$0\" convert -f raw i - >>longer").ok(">>");
    let appended = fs::read(lab.path("longer")).unwrap();
    assert!(appended == [&old[..], &vec![7; 1 << 20]].concat());
    lab.shell("\"$0\" convert -f raw i - 1<>new")
        .ok("1<> a new file");
    lab.assert_same_bytes("new", "i", "1<>");
    // What is printed would replace what is read.
    let before = (
        fs::read(lab.path("top")).unwrap(),
        fs::read(lab.path("i")).unwrap(),
    );
    for line in [
        "info top 1<>top",
        "info --output=json top >>top",
        "info -f raw i 1<>i",
        "info --backing-chain top 1<>i",
        "map top 1<>i",
        "check top 1<>top",
        "check -r all top 1<>top",
        "measure -O raw top 1<>top",
        "compare top top 2>>top",
        "io -c 'read 0 1M' top 1<>i",
        "resize top 2M 2>>i",
        "dd if=top of=out 2>>top",
        "backup top --to set 1<>top",
    ] {
        let answer = lab.shell(&format!("\"$0\" {line}"));
        assert!(answer.status != 0, "{line}: {answer:#?}");
        let said = answer.err + &answer.out;
        assert!(
            said.is_empty() || said.contains("goes to this file"),
            "{line}: {said}"
        );
        let now = (
            fs::read(lab.path("top")).unwrap(),
            fs::read(lab.path("i")).unwrap(),
        );
        // A message that goes there is there.
        if !line.contains("2>>") {
            assert!(now == before, "{line}");
        }
        fs::write(lab.path("top"), &before.0).unwrap();
        fs::write(lab.path("i"), &before.1).unwrap();
    }
}

/// The size of a raw disk or of a compressed image in a pipe is known when it has ended: until then
/// nothing says that all is done.
#[test]
fn the_progress_of_an_unknown_size_is_not_full() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let lab = Lab::new();
    for command in [
        "convert -p - out",
        "import -p - out",
        "convert -p -O qcow2 - out",
    ] {
        let (mut ours, theirs) = terminal();
        let handle = || Stdio::from(theirs.try_clone().unwrap());
        let mut child = std::process::Command::new(program())
            .args(command.split(' '))
            .current_dir(lab.path(""))
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(handle())
            .stderr(handle())
            .spawn()
            .unwrap();
        drop(theirs);
        let shown = Arc::new(Mutex::new(Vec::new()));
        let reader = std::thread::spawn({
            let shown = shown.clone();
            move || {
                let mut piece = [0; 4096];
                // The end of a pseudoterminal is an error.
                while let Ok(count @ 1..) = ours.read(&mut piece) {
                    shown.lock().unwrap().extend(&piece[..count]);
                }
            }
        });
        let is_full = || {
            let shown = shown.lock().unwrap();
            String::from_utf8_lossy(&shown).contains("100%")
        };
        let mut stdin = child.stdin.take().unwrap();
        for _ in 0..20 {
            stdin.write_all(&[b'd'; 1 << 20]).unwrap();
            // So that it may show something.
            std::thread::sleep(Duration::from_millis(20));
            assert!(!is_full(), "{command}: {:?}", shown.lock().unwrap());
        }
        drop(stdin);
        assert!(child.wait().unwrap().success(), "{command}");
        reader.join().unwrap();
        assert!(is_full(), "{command}: {:?}", shown.lock().unwrap());
        let _ = fs::remove_file(lab.path("out"));
    }
}

/// The most memory that a running process has had, in KiB.
fn peak(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let words = line.expect("VmHWM").trim().trim_end_matches(" kB");
    words.parse().expect("a number")
}

/// A name of a descriptor leads to the whole file, wherever its position is, as in QEMU. Standard input
/// begins at its position.
#[test]
fn the_name_of_a_descriptor_is_the_whole_file() {
    let lab = Lab::new();
    fs::write(lab.path("d.raw"), [7; 1 << 20]).unwrap();
    let script = "exec 7< d.raw; head -c 512 <&7 > start; dd bs=512 count=1 status=none <&7 > /dev/null; \
                  \"$0\" convert -f raw -O raw /dev/fd/7 all && cmp d.raw all && \
                  \"$0\" convert -f raw -O raw /dev/fd/7 again && cmp d.raw again";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script]).arg(program());
    let output = command.current_dir(lab.path("")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
