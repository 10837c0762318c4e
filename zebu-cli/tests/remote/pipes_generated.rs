//! Generated streams: images of any format that are cut off anywhere, conversions over old data, and
//! compressed streams in many parts. Guards against zeroes for what the stream lacks, against old data
//! that stay where the disk is zero, and against content that is lost between two parts.

use std::fs::{self, File};

use zebu_testkit::library::small_images as images;

use crate::common::vmdk::{content, descriptor, stream};
use crate::common::{Answer, Lab, Loop, Rng, beyond_qemu, cases};

/// Runs `test` for each seed.
fn for_each_seed(default: u64, mut test: impl FnMut(&Lab, &mut Rng, u64)) {
    for seed in cases(default, "streams") {
        test(&Lab::new(), &mut Rng::new(seed), seed);
    }
}

/// An image of a format that is one file.
struct Form {
    format: &'static str,
    /// Options of qemu-img; None: the image is built here.
    options: Option<&'static str>,
    /// Whether QEMU writes to such images.
    is_written: bool,
}

const fn made(format: &'static str, options: &'static str, is_written: bool) -> Form {
    Form {
        format,
        options: Some(options),
        is_written,
    }
}

const fn built(format: &'static str) -> Form {
    Form {
        format,
        options: None,
        is_written: false,
    }
}

const FORMS: [Form; 20] = [
    made("qcow2", "-o cluster_size=4k", true),
    made("qcow2", "-o cluster_size=2M", true),
    made("qcow2", "-c", true),
    made("qcow2", "-c -o compression_type=zstd", false),
    made("vmdk", "-o subformat=monolithicSparse", true),
    made("vmdk", "-o subformat=streamOptimized", false),
    built("vmdk"),
    made("vdi", "-o static=off", true),
    made("vdi", "-o static=on", true),
    made("vpc", "-o subformat=dynamic,force_size=on", true),
    made("vpc", "-o subformat=fixed,force_size=on", false),
    made("vhdx", "-o subformat=dynamic,block_size=1M", true),
    made("qed", "-o cluster_size=4k", true),
    made("qcow", "", true),
    built("qcow"),
    made("parallels", "-o cluster_size=64k", true),
    built("parallels"),
    built("dmg"),
    built("cloop"),
    built("bochs"),
];

/// The start of a raw image is one, too, so nothing tells that it was cut off.
const RAW: Form = made("raw", "", false);

/// Makes `i`, and its disk as `want`. What it is.
fn make(lab: &Lab, random: &mut Rng, form: &Form, largest: u64) -> String {
    let Form {
        format,
        options,
        is_written,
    } = *form;
    let Some(options) = options else {
        return build(lab, random, format);
    };
    let size = 512 * (1 + random.below(largest / 512));
    let (seed, count) = (1 + random.below(1000), 1 + random.below(60));
    let mut recipe = format!(
        "create q {size}; random q {seed} {count} wz; img convert -O {format} {options} q i"
    );
    if is_written && random.one_in(2) {
        recipe += &format!("; random i {} {count} wz", seed + 1);
    }
    lab.make(&recipe);
    expand(lab, format, &recipe);
    recipe
}

/// Makes `want` by QEMU.
fn expand(lab: &Lab, format: &str, what: &str) {
    let expand = ["convert", "-f", format, "-O", "raw", "i", "want"];
    lab.qemu_img(&expand).ok(what);
}

fn build(lab: &Lab, random: &mut Rng, format: &str) -> String {
    let mut what = format!("a {format} that is built");
    let (bytes, disk) = match format {
        "vmdk" => {
            let size = 512 * (1 + random.below(12000));
            let disk = content(random, size);
            let grain = [8, 16, 128, 256][random.below(4) as usize];
            let text = descriptor("streamOptimized", "", random.next() as u32);
            let footer = random.below(3) > 0;
            what += &format!(": {size} bytes, grains of {grain}, footer {footer}");
            (stream(&disk, grain, true, footer, &text), disk)
        }
        _ => {
            let below = &mut |n| random.below(n);
            let image = match format {
                // One with bzip2 may begin as a bzip2 stream does.
                "dmg" => images::dmg(false, below(2) == 0, below),
                "qcow" => images::qcow(below),
                "parallels" => images::parallels(below),
                "cloop" => images::cloop(below),
                _ => images::bochs(below),
            };
            (image.bytes, image.content)
        }
    };
    fs::write(lab.path("i"), bytes).unwrap();
    match format {
        "qcow" | "parallels" => expand(lab, format, &what),
        _ => fs::write(lab.path("want"), disk).unwrap(),
    }
    what
}

/// Of what is read, all is right. Or it is an error.
#[track_caller]
fn right_or_refused(lab: &Lab, answer: &Answer, want: &[u8], what: &str) {
    match answer.status {
        0 => assert!(fs::read(lab.path("out")).unwrap() == want, "{what}"),
        _ => assert_eq!(answer.err.lines().count(), 1, "{what}: {answer:#?}"),
    }
    let _ = fs::remove_file(lab.path("out"));
}

#[test]
fn truncated_images_of_any_format() {
    if beyond_qemu("it reads zeroes") {
        return;
    }
    for_each_seed(1, |_, random, seed| {
        for form in &FORMS {
            let lab = Lab::new();
            let made = make(&lab, random, form, 5 << 20);
            let (bytes, want) = (
                fs::read(lab.path("i")).unwrap(),
                fs::read(lab.path("want")).unwrap(),
            );
            let length = bytes.len() as u64;
            let format = form.format;
            let from_pipe = format!("cat cut | \"$0\" convert --spill . -f {format} - out");
            let imported = format!("\"$0\" import --spill . -f {format} cut out");
            let from_file = format!("\"$0\" convert -f {format} cut out");
            // This option needs a file.
            let from_copy = format!("cat cut | \"$0\" convert --spill . -C -f {format} - out");
            fs::write(lab.path("cut"), &bytes).unwrap();
            for script in [&from_pipe, &imported, &from_file] {
                let what = format!("seed {seed}: {made}: {script}");
                let answer = lab.shell(script).ok(&what);
                right_or_refused(&lab, &answer, &want, &what);
            }
            for run in 0..9 {
                let cut = match run % 4 {
                    0 => random.below(length),
                    1 => length - 1 - random.below(length.min(2000)),
                    2 => length - 1 - random.below(length.min(1 << 20)),
                    _ => random.below(length.div_ceil(512)) * 512,
                };
                let file = File::options().write(true).open(lab.path("cut")).unwrap();
                fs::write(lab.path("cut"), &bytes).unwrap();
                file.set_len(cut).unwrap();
                let scripts = match format {
                    // The end of the last cluster of a file may be missing, but not of a copy.
                    "qcow2" => [&from_pipe, &imported, &from_copy],
                    _ => [&from_pipe, &imported, &from_file],
                };
                let script = scripts[run % 3];
                let what = format!("seed {seed}: {made}: {script}: {cut} of {length} bytes");
                right_or_refused(&lab, &lab.shell(script), &want, &what);
            }
        }
    });
}

/// The bytes that a target has before.
const OLD: u8 = 0xaa;

/// What has the old data.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    File,
    Qcow2,
    Device,
    /// A device, by `import`.
    Import,
}

#[test]
fn old_data_are_overwritten() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    for_each_seed(2, |_, random, seed| {
        for form in FORMS.iter().chain([&RAW]) {
            let lab = Lab::new();
            let largest = if random.one_in(4) { 70 << 20 } else { 6 << 20 };
            let made = make(&lab, random, form, largest);
            if fs::metadata(lab.path("want")).unwrap().len() == 0 {
                continue;
            }
            for over in [Over::File, Over::Qcow2, Over::Device, Over::Import] {
                if random.one_in(2) {
                    let what = format!("seed {seed}: {made}");
                    convert_over(&lab, random, form.format, over, &what);
                }
            }
        }
    });
}

/// Converts `i` from a stream to a target with old data.
fn convert_over(lab: &Lab, random: &mut Rng, format: &str, over: Over, what: &str) {
    let mut want = fs::read(lab.path("want")).unwrap();
    let disk = want.len();
    if random.one_in(2) {
        want.resize(disk + 512 * random.below(5000) as usize, OLD);
    }
    let length = want.len();
    fs::write(lab.path("t"), vec![OLD; length]).unwrap();
    let mut device = None;
    if matches!(over, Over::Device | Over::Import) {
        device = Loop::on(&lab.path("t"));
        if device.is_none() {
            println!("skipped: losetup does not work here");
            return;
        }
    }
    let target = device.as_ref().map_or("t", |device| &device.0);
    let pack = random.pick(&["cat", "cat", "gzip -c1", "zstd -qc1"]);
    let options = random.pick(&["", "", "-S 0", "-S 64k", "-m 1", "-W"]);
    let command = match over {
        Over::Import => "import --spill .".to_string(),
        Over::Device if random.one_in(2) => format!("convert --spill . {options}"),
        Over::Qcow2 => format!("convert --spill . -n -O qcow2 {options}"),
        _ => format!("convert --spill . -n {options}"),
    };
    if over == Over::Qcow2 {
        lab.make("img convert -f raw -O qcow2 t t.qcow2; img convert -O qcow2 t.qcow2 t");
    }
    let script = format!("{pack} i | \"$0\" {command} -f {format} - {target}");
    let what = &format!("{what}: {script}");
    lab.shell(&script).ok(what);
    let got = match over {
        Over::Qcow2 => {
            lab.qemu_img(&["check", "t"]).ok(what);
            lab.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "t", "got"])
                .ok(what);
            fs::read(lab.path("got")).unwrap()
        }
        _ => fs::read(match &device {
            Some(device) => device.0.clone().into(),
            None => lab.path("t"),
        })
        .unwrap(),
    };
    let differs = (0..length / 512).find(|nth| {
        let sector = nth * 512..(nth + 1) * 512;
        got.get(sector.clone()) != want.get(sector)
    });
    assert_eq!((got.len(), differs), (length, None), "{what}");
}

const TARGETS: [(&str, &str); 12] = [
    ("raw", ""),
    ("raw", "-o preallocation=falloc"),
    ("qcow2", ""),
    ("qcow2", "-c"),
    ("qcow2", "-o preallocation=metadata"),
    ("vmdk", ""),
    ("vmdk", "-o subformat=streamOptimized"),
    ("vmdk", "-o subformat=monolithicFlat"),
    ("vdi", ""),
    ("vdi", "-o static=on"),
    ("vpc", "-o force_size=on"),
    ("vhdx", ""),
];

#[test]
fn new_images_of_any_format() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    for_each_seed(2, |_, random, seed| {
        for form in FORMS.iter().chain([&RAW]) {
            let lab = Lab::new();
            let made = make(&lab, random, form, 6 << 20);
            for _ in 0..2 {
                let (format, options) = TARGETS[random.below(12) as usize];
                let sparse = random.pick(&["", "-S 0", "-S 64k", "-m 1", "-W"]);
                let spill = random.pick(&["", "--spill ."]);
                let script = format!(
                    "cat i | \"$0\" convert {spill} {sparse} -f {} -O {format} {options} - out",
                    form.format
                );
                let what = format!("seed {seed}: {made}: {script}");
                let answer = lab.shell(&script);
                if answer.status != 0 {
                    // Some need a spill, or larger parts.
                    answer.failed_with_one_line(1, &what);
                    continue;
                }
                let compare = ["compare", "-f", format, "-F", "raw", "out", "want"];
                lab.qemu_img(&compare).ok(&what);
            }
        }
    });
}

/// A skippable frame of zstd and LZ4.
fn skippable(random: &mut Rng) -> Vec<u8> {
    let length = match random.below(3) {
        0 => 4,
        1 => random.below(100),
        _ => random.below(200_000),
    };
    let mut frame = vec![0x50 + random.below(16) as u8, 0x2a, 0x4d, 0x18];
    frame.extend((length as u32).to_le_bytes());
    frame.extend((0..length).map(|_| random.below(256) as u8));
    frame
}

/// Compresses parts of the file `r` to `packed`, by a tool that this returns.
fn compress(lab: &Lab, random: &mut Rng) -> String {
    let tool = random.pick(&["gzip", "zstd", "xz", "bzip2"]);
    let disk = fs::read(lab.path("r")).unwrap();
    let (mut packed, mut at) = (Vec::new(), 0);
    while at < disk.len() {
        let left = (disk.len() - at) as u64;
        let length = match random.below(4) {
            0 => 0,
            1 => 1 + random.below(5000.min(left)),
            2 => 1 + random.below(left),
            _ => left,
        };
        let end = at + length as usize;
        fs::write(lab.path("part"), &disk[at..end]).unwrap();
        at = end;
        let how = match tool {
            "gzip" => random.pick(&["-1", "-9", "-n"]),
            "zstd" => random.pick(&["-1", "--check", "--no-check", "--long=27", "-9 --long=24"]),
            "xz" => random.pick(&[
                "-0",
                "-1 --check=none",
                "-1 --check=sha256",
                "--block-size=90k",
            ]),
            _ => random.pick(&["-1", "-9"]),
        };
        // Of a file its size is known.
        let input = random.pick(&["part", "< part"]);
        if tool == "zstd" && random.one_in(2) {
            packed.extend(skippable(random));
        }
        lab.shell(&format!("{tool} -qc {how} {input} > member"))
            .ok(tool);
        packed.extend(fs::read(lab.path("member")).unwrap());
        match tool {
            "zstd" if random.one_in(3) => packed.extend(skippable(random)),
            "xz" if random.one_in(3) => packed.extend(vec![0; 4 * random.below(2000) as usize]),
            _ => {}
        }
    }
    if tool == "gzip" && random.one_in(2) {
        packed.extend(vec![0; random.below(5000) as usize]);
    }
    fs::write(lab.path("packed"), packed).unwrap();
    tool.into()
}

#[test]
fn compressed_streams_in_parts() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    for_each_seed(12, |lab, random, seed| {
        lab.make(&format!("raw r {}", 512 * (1 + random.below(3000))));
        let tool = compress(lab, random);
        let what = format!("seed {seed}: {tool}");
        let script = "cat packed | \"$0\" convert -f raw - out";
        lab.shell(script).ok(&what);
        lab.assert_same_bytes("out", "r", &what);
        let script = "\"$0\" import -f raw packed out";
        let verdict = lab.shell(script).ok(&what);
        assert!(
            verdict.out.contains(&format!("\"{tool}\"")),
            "{what}: {verdict:?}"
        );
        lab.assert_same_bytes("out", "r", &what);
        let packed = fs::read(lab.path("packed")).unwrap();
        for run in 0..6 {
            // The first bytes tell the compression.
            let more = packed.len() as u64 - 10;
            let cut = match run % 2 {
                0 => 10 + random.below(more),
                _ => 10 + random.below(60.min(more)),
            };
            let what = format!("{what}: {cut} of {} bytes", packed.len());
            fs::write(lab.path("cut"), &packed[..cut as usize]).unwrap();
            let ours = lab.shell("cat cut | \"$0\" convert -f raw - out");
            let theirs = lab.shell(&format!("{tool} -dqc < cut > theirs"));
            ours.orderly(&what);
            // A stream may be cut off between two members.
            if ours.status == 0 {
                theirs.ok(&what);
                lab.shell("truncate -s %512 theirs").ok(&what);
                lab.assert_same_bytes("out", "theirs", &what);
            }
        }
    });
}

#[test]
fn windows_that_are_too_large_are_told() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let lab = Lab::new();
    lab.make("raw r 3000320");
    lab.shell("(zstd -qc < r; head -c 5M /dev/zero | zstd -qc) > packed; truncate -s +5M r")
        .ok("zstd");
    let packed = fs::read(lab.path("packed")).unwrap();
    let second = {
        let magic = [0x28, 0xb5, 0x2f, 0xfd];
        let found = packed.windows(4).rposition(|bytes| bytes == magic);
        found.expect("the second frame")
    };
    for frame in [0, second] {
        for (window, size) in [
            (0x88, Some(128u64)),
            (0x89, None),
            (0x90, None),
            (0xa8, None),
        ] {
            let mut bytes = packed.clone();
            bytes[frame + 5] = window;
            fs::write(lab.path("changed"), bytes).unwrap();
            let answer = lab.shell("cat changed | \"$0\" convert -f raw - out");
            let what = format!("window {window:#x} of the frame at {frame}");
            if size.is_some() {
                answer.ok(&what);
                lab.assert_same_bytes("out", "r", &what);
                continue;
            }
            let window = u64::from(window);
            let mib = (1u64 << (window >> 3)) / 1024 * (8 + window % 8) / 8;
            let says = format!("needs a window of {mib} MiB, and at most 128 MiB are allowed");
            assert!(answer.err.contains(&says), "{what}: {answer:#?}");
            answer.failed_with_one_line(1, &what);
            let answer = lab.shell("\"$0\" import -f raw changed imported");
            assert!(answer.err.contains(&says), "{what}: {answer:#?}");
        }
    }
}

/// LZ4, which is not undone, has the same skippable frames.
#[test]
fn skippable_frames_before_something_else_are_data() {
    if beyond_qemu("QEMU reads no streams") {
        return;
    }
    let lab = Lab::new();
    let mut random = Rng::new(1);
    for rest in [
        &[0x04, 0x22, 0x4d, 0x18][..],
        b"data",
        &[0x28, 0xb5, 0x2f, 0xfe],
    ] {
        let mut bytes = [skippable(&mut random), rest.to_vec()].concat();
        bytes.resize(bytes.len().next_multiple_of(512) + 512, 7);
        fs::write(lab.path("x"), bytes).unwrap();
        lab.shell("cat x | \"$0\" convert -f raw - out").ok("raw");
        lab.assert_same_bytes("out", "x", "raw");
    }
    // More than is looked behind.
    lab.shell("(printf 'P*M\\030\\0\\0\\040\\0'; head -c 3M /dev/zero) > x")
        .ok("a long frame");
    let answer = lab.shell("cat x | \"$0\" convert -f raw - out");
    answer.failed_with_one_line(1, "a long frame");
    assert!(answer.err.contains("skippable frames"), "{answer:#?}");
}
