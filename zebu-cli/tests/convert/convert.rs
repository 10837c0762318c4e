//! `convert` to raw: all options must have the meaning of qemu-img's. Targets with old data must
//! have the content of the source, outputs must be sparse, and the progress must have the format
//! that scripts read.

use crate::common::{Answer, Lab, Loop, assert_same_answer, compare_answers, peer, testing_qemu};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Instant;
use zebu::internal::new_image::Creation;
use zebu::{Device, Format, OpenOptions, Queue, QueueOptions, Source};

/// Every kind of data: in the backing file, plain, compressed, zeroes, holes.
const IMAGE: &str = "raw base.raw 5000000; create -b base.raw -F raw x.qcow2 8M; \
    random x.qcow2 5 40 wwzuc; io x.qcow2: write -c -s text 7M 64k; \
    create other.qcow2 1000448; random other.qcow2 6 10 w; raw third.raw 70001";

fn lab() -> Lab {
    let lab = Lab::new();
    lab.make(IMAGE);
    lab
}

/// Runs convert with both programs; `prepare` makes the target before. Compares messages, status
/// and files, and returns the answer of zebu.
#[track_caller]
fn both(lab: &Lab, options: &[&str], sources: &[&str], prepare: impl Fn(&Path)) -> Answer {
    let run = |output: &str| -> (Answer, Vec<String>) {
        let path = lab.path(output);
        let _ = fs::remove_file(&path);
        prepare(&path);
        let mut args = vec!["convert", "-O", "raw"];
        args.extend(options);
        args.extend(sources);
        args.push(output);
        let answer = if output == "ours.raw" {
            lab.zebu(&args)
        } else {
            lab.qemu_img(&args)
        };
        (answer, args.into_iter().map(str::to_string).collect())
    };
    let (mut theirs, _) = run("theirs.raw");
    let (ours, args) = run("ours.raw");
    theirs.out = theirs.out.replace("theirs.raw", "ours.raw");
    theirs.err = theirs.err.replace("theirs.raw", "ours.raw");
    let what = args.join(" ");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    compare_answers(&ours, &theirs, &args, &what);
    let exist = ["ours.raw", "theirs.raw"].map(|name| lab.path(name).exists());
    assert_eq!(
        exist[0], exist[1],
        "{what}: one of the outputs does not exist"
    );
    if ours.status == 0 {
        lab.assert_same_bytes("ours.raw", "theirs.raw", &what);
    }
    ours
}

fn nothing(_: &Path) {}

/// A target full of 0xee.
fn dirty(length: usize) -> impl Fn(&Path) {
    move |path| fs::write(path, vec![0xee; length]).expect("write")
}

/// A target of zeroes.
fn zeroed(length: u64) -> impl Fn(&Path) {
    move |path| {
        File::create(path)
            .and_then(|file| file.set_len(length))
            .expect("create");
    }
}

const SIZE: usize = 8 << 20;

#[test]
fn options_of_reading_and_writing() {
    let lab = lab();
    for options in [
        &[][..],
        &["-f", "qcow2"],
        &["-m", "1"],
        &["-m", "16"],
        &["-W"],
        &["-W", "-m", "16"],
        &["-t", "none", "-T", "none"],
        &["-t", "none", "-T", "none", "-W"],
        &["-t", "writeback"],
        &["-t", "writethrough"],
        &["-t", "directsync", "-T", "directsync"],
        &["-t", "unsafe", "-T", "unsafe"],
        &["-S", "0"],
        &["-S", "512"],
        &["-S", "64k"],
        &["-S", "16M"],
        &["-U"],
        &["-q"],
        &["-r", "1G"],
        &["--salvage"],
    ] {
        both(&lab, options, &["x.qcow2"], nothing).ok(&options.join(" "));
    }
}

#[test]
fn an_output_that_exists_is_replaced() {
    let lab = lab();
    both(&lab, &[], &["x.qcow2"], dirty(SIZE + 100_000)).ok("longer");
    both(&lab, &[], &["x.qcow2"], dirty(1000)).ok("shorter");
    both(&lab, &["-t", "none"], &["x.qcow2"], dirty(1000)).ok("shorter");
}

#[test]
fn into_a_file_without_the_rest_of_its_last_sector() {
    let lab = Lab::new();
    lab.make("raw source 1000000");
    for length in [1_000_000, 1_000_447, 1_000_448, 999_936] {
        fs::write(lab.path("target"), vec![7; length]).expect("target");
        let convert = [
            "convert", "-n", "-f", "raw", "-O", "raw", "source", "target",
        ];
        let answer = lab.zebu(&convert);
        assert_eq!(answer.status, i32::from(length < 999_937), "{answer:#?}");
        if answer.status == 0 {
            let found = fs::read(lab.path("target")).expect("target");
            let source = fs::read(lab.path("source")).expect("source");
            assert!(found[..1_000_000] == source, "{length}");
        }
    }
}

#[test]
fn into_an_existing_file() {
    let lab = lab();
    for options in [
        &["-n"][..],
        &["-n", "-W"],
        &["-n", "-S", "0"],
        &["-n", "-t", "none"],
    ] {
        // Zeroes and holes must replace old data; bytes past the size of the disk stay.
        both(&lab, options, &["x.qcow2"], dirty(SIZE)).ok("dirty");
        both(&lab, options, &["x.qcow2"], dirty(SIZE + 100_352)).ok("larger");
        both(&lab, options, &["x.qcow2"], zeroed(SIZE as u64)).ok("zeroed");
        let short = both(&lab, options, &["x.qcow2"], zeroed(1 << 20));
        short.failed_with_one_line(1, "too small");
        assert!(
            short.err.contains("output file is smaller than input file"),
            "{short:?}"
        );
        let missing = both(&lab, options, &["x.qcow2"], nothing);
        missing.failed_with_one_line(1, "-n without a target");
    }
    both(
        &lab,
        &["-n", "--target-is-zero"],
        &["x.qcow2"],
        zeroed(SIZE as u64),
    )
    .ok("zeroed");
    // Zeroes are not written although the target is not zero.
    let lab = Lab::new();
    lab.make("create x.qcow2 1M; io x.qcow2: write -P 1 0 64k | write -z 128k 64k");
    both(
        &lab,
        &["-n", "--target-is-zero"],
        &["x.qcow2"],
        dirty(1 << 20),
    )
    .ok("a target that is not zero");
}

#[test]
fn several_sources_are_joined() {
    let lab = lab();
    for sources in [
        &["x.qcow2", "other.qcow2"][..],
        &["other.qcow2", "third.raw", "x.qcow2"],
        &["third.raw", "third.raw"],
        &["base.raw", "other.qcow2"],
    ] {
        for options in [&[][..], &["-W"], &["-S", "0"], &["-m", "1", "-t", "none"]] {
            both(&lab, options, sources, nothing).ok("joined");
        }
    }
}

#[test]
fn image_options() {
    let lab = lab();
    for source in [
        "driver=qcow2,file.filename=x.qcow2",
        "driver=qcow2,file.driver=file,file.filename=x.qcow2",
        "driver=raw,file.filename=x.qcow2",
        "driver=raw,offset=4096,size=8192,file.filename=base.raw",
        "file.filename=x.qcow2",
        "driver=qcow2,file.filename=x.qcow2,l2-cache-size=1M",
        "driver=qcow2,backing.driver=raw,backing.file.filename=third.raw,file.filename=x.qcow2",
    ] {
        both(&lab, &["--image-opts"], &[source], nothing).ok(source);
    }
    for source in [
        "driver=qcow9,file.filename=x.qcow2",
        "nofile=1",
        "driver=qcow2,file.filename=nothing",
    ] {
        both(&lab, &["--image-opts"], &[source], nothing).failed_with_one_line(1, source);
    }
    both(
        &lab,
        &[],
        &["json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"x.qcow2\"}}"],
        nothing,
    )
    .ok("json:");
    both(&lab, &[], &["file:x.qcow2"], nothing).ok("file:");
}

/// The percentages of a progress line, in order.
fn figures(out: &str) -> Vec<f64> {
    assert!(
        out.ends_with("    (100.00/100%)\r\n"),
        "the end of the progress: {out:?}"
    );
    out.trim_end()
        .split('\r')
        .map(|step| {
            step.strip_prefix("    (")
                .and_then(|step| step.strip_suffix("/100%)"))
                .and_then(|figure| figure.parse().ok())
                .unwrap_or_else(|| panic!("a step of the progress: {step:?}"))
        })
        .collect()
}

#[test]
fn progress() {
    let lab = lab();
    for options in [&["-p"][..], &["-p", "-W"], &["-p", "-m", "1"]] {
        for program in [Lab::zebu, Lab::qemu_img] {
            let mut args = vec!["convert", "-O", "raw"];
            args.extend(options);
            args.extend(["x.qcow2", "out.raw"]);
            let answer = program(&lab, &args).ok("progress");
            let figures = figures(&answer.out);
            assert_eq!(figures.first(), Some(&0.0), "{answer:?}");
            assert!(figures.is_sorted(), "{answer:?}");
        }
    }
    let quiet = lab
        .zebu(&["convert", "-p", "-q", "-O", "raw", "x.qcow2", "out.raw"])
        .ok("-q");
    assert_eq!(quiet.out, "");
}

#[test]
fn damaged_clusters() {
    let lab = Lab::new();
    lab.make("img convert -c -O qcow2 text x.qcow2");
    let l2 = lab.u64_at("x.qcow2", lab.u64_at("x.qcow2", 40)) & 0x00ff_ffff_ffff_fe00;
    let second = lab.u64_at("x.qcow2", l2 + 8) & ((1 << 54) - 1);
    lab.patch("x.qcow2", second, &[0xff; 64]);

    let refused = both(&lab, &[], &["x.qcow2"], nothing);
    refused.failed_with_one_line(1, "a damaged cluster");
    assert!(
        refused.err.contains("error while reading at byte 65536: "),
        "{refused:?}"
    );
    let salvaged = both(&lab, &["--salvage"], &["x.qcow2"], nothing).ok("--salvage");
    assert!(
        salvaged
            .err
            .contains("warning: error while reading offset 65536: Input/output error"),
        "{salvaged:?}"
    );
    let quiet = both(&lab, &["--salvage", "-q"], &["x.qcow2"], nothing).ok("--salvage -q");
    assert_eq!(quiet.err, "");
}

#[test]
fn rate() {
    let lab = Lab::new();
    lab.make("create x.qcow2 4M; io x.qcow2: write -s noise 0 4M");
    let start = Instant::now();
    lab.zebu(&["convert", "-r", "2M", "-O", "raw", "x.qcow2", "slow.raw"])
        .ok("-r");
    let took = start.elapsed();
    // The first 100 ms are not limited.
    assert!(took.as_secs_f64() > 0.7, "4 MiB at 2 MiB/s took {took:?}");
    assert!(took.as_secs_f64() < 10.0, "4 MiB at 2 MiB/s took {took:?}");

    // The rate limits written bytes, not the size of the disk.
    lab.make("create holes.qcow2 64G; io holes.qcow2: write -s noise 63G 64k");
    let start = Instant::now();
    lab.zebu(&[
        "convert",
        "-r",
        "2M",
        "-O",
        "raw",
        "holes.qcow2",
        "slow.raw",
    ])
    .ok("-r");
    let took = start.elapsed();
    assert!(took.as_secs_f64() < 10.0, "64 KiB at 2 MiB/s took {took:?}");

    let args = ["convert", "-r", "x", "-O", "raw", "x.qcow2", "out.raw"];
    let answer = lab.zebu(&args);
    if !testing_qemu() || peer().is_current() {
        answer.failed_with_one_line(1, "-r x");
    }
    assert!(
        answer.err.contains("Invalid rate limit specified"),
        "{answer:?}"
    );
}

#[test]
fn snapshots() {
    let lab = Lab::new();
    lab.make(
        "create x.qcow2 4M; random x.qcow2 1 20 wzc; img snapshot -c first x.qcow2; \
         random x.qcow2 2 20 wzu; img snapshot -c 1 x.qcow2; random x.qcow2 3 20 wzd; raw r.raw 5000",
    );
    for (snapshot, status) in [
        ("first", 0),
        ("1", 0),
        ("2", 0),
        ("snapshot.name=first", 0),
        ("snapshot.id=2", 0),
        ("snapshot.id=1,snapshot.name=first", 0),
        ("snapshot.name=1", 0),
        ("snapshot.id=2,snapshot.name=first", 1),
        ("none", 1),
        ("snapshot.id=9", 1),
    ] {
        let answer = both(&lab, &["-l", snapshot], &["x.qcow2"], nothing);
        assert_eq!(answer.status, status, "-l {snapshot}: {answer:?}");
    }
    both(&lab, &["-l", "first"], &["r.raw"], nothing).failed_with_one_line(1, "raw");
    both(&lab, &["-l", "first"], &["x.qcow2", "x.qcow2"], nothing).failed_with_one_line(1, "two");
}

#[test]
fn refusals() {
    let lab = lab();
    fs::create_dir(lab.path("folder")).expect("mkdir");
    for args in [
        &["-B", "base.raw", "x.qcow2", "out.raw"][..],
        &["-B", "base.raw", "-F", "raw", "x.qcow2", "out.raw"],
        &["-c", "x.qcow2", "out.raw"],
        &["-S", "3", "x.qcow2", "out.raw"],
        &["-S", "513", "x.qcow2", "out.raw"],
        &["-S", "17M", "x.qcow2", "out.raw"],
        &["-t", "bogus", "x.qcow2", "out.raw"],
        &["-T", "bogus", "x.qcow2", "out.raw"],
        &["--target-is-zero", "x.qcow2", "out.raw"],
        &["x.qcow2", "missing/out.raw"],
        &["x.qcow2", "folder"],
        &["nothing", "out.raw"],
        &["x.qcow2", "nothing", "out.raw"],
        &["x.qcow2"],
        &["-f", "bogus", "x.qcow2", "out.raw"],
    ] {
        let mut all = vec!["convert", "-O", "raw"];
        all.extend(args);
        lab.zebu(&all).failed_with_one_line(1, &all.join(" "));
        // QEMU looks at -t after it has created the output.
        assert!(
            !lab.path("out.raw").exists() || testing_qemu(),
            "{all:?} left an output"
        );
        assert_same_answer(&lab, &all, "refused");
        let _ = fs::remove_file(lab.path("out.raw"));
    }
    let answer = assert_same_answer(&lab, &["convert", "-O", "bogus", "x.qcow2", "out"], "-O");
    answer.failed_with_one_line(1, "-O bogus");
    for count in ["0", "17", "x", "-1"] {
        let answer = lab.zebu(&["convert", "-m", count, "-O", "raw", "x.qcow2", "out.raw"]);
        answer.failed_with_one_line(1, "-m");
        assert!(
            answer.err.contains("Invalid number of coroutines"),
            "{answer:?}"
        );
    }
}

#[test]
fn outputs_are_sparse() {
    let lab = Lab::new();
    lab.make(
        "create x.qcow2 64M; io x.qcow2: write -c -P 0 50M 64k | write -P 0 20M 4M | \
         write -P 1 30M 4k | write -P 0 40M 1M; random x.qcow2 9 40 wzucd",
    );
    for options in [
        &[][..],
        &["-W"],
        &["-t", "none"],
        &["-S", "64k"],
        &["-m", "1"],
    ] {
        both(&lab, options, &["x.qcow2"], nothing).ok("sparse");
        lab.sync_files();
        let [ours, theirs] = ["ours.raw", "theirs.raw"]
            .map(|name| fs::metadata(lab.path(name)).expect("stat").blocks());
        assert!(
            ours <= theirs + theirs / 20 + 16,
            "{options:?}: {ours} blocks on disk, QEMU's output has {theirs}"
        );
    }
    // -S 0: fully allocated.
    both(&lab, &["-S", "0"], &["x.qcow2"], nothing).ok("-S 0");
    lab.sync_files();
    let blocks = fs::metadata(lab.path("ours.raw")).expect("stat").blocks();
    assert!(blocks * 512 >= 64 << 20, "-S 0: {blocks} blocks on disk");
}

#[test]
fn large_images() {
    let lab = Lab::new();
    lab.make("raw r.raw 60000000; img convert -O qcow2 r.raw x.qcow2; random x.qcow2 4 150 wwzucd");
    for options in [&[][..], &["-W", "-m", "16"], &["-t", "none", "-T", "none"]] {
        both(&lab, options, &["x.qcow2"], nothing).ok("large");
    }
}

/// What the libraries for other languages call refuses a device whose bytes are in its source.
#[test]
fn a_library_does_not_write_over_its_source() {
    let lab = Lab::new();
    lab.make("raw disk 1048576");
    let Some(device) = Loop::at(&lab.path("disk"), 65536..131072) else {
        println!("skipped: losetup does not work here");
        return;
    };
    let before = fs::read(lab.path("disk")).unwrap();
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let source = Source::Name(lab.path("disk").into());
    let options = OpenOptions::default().format(Some(Format::RAW));
    let source = Device::open(&queue, &source, &options).unwrap();
    for format in ["raw", "qcow2"] {
        let creation = Creation::new(device.0.as_ref(), format, &[]).unwrap();
        let begun = creation.begin(&queue, &source, None);
        assert!(matches!(begun, Err(zebu::Error::Refused(_))), "{format}");
    }
    assert!(fs::read(lab.path("disk")).unwrap() == before);
}

#[test]
fn to_and_from_a_block_device() {
    let lab = lab();
    lab.qemu_img(&["convert", "-O", "raw", "x.qcow2", "theirs.raw"])
        .ok("QEMU");
    for options in [
        &[][..],
        &["-n"],
        &["-t", "none"],
        &["-n", "-W", "-t", "none"],
    ] {
        dirty(SIZE + 4096)(&lab.path("disk"));
        let Some(device) = Loop::on(&lab.path("disk")) else {
            println!("skipped: losetup does not work here");
            return;
        };
        let mut args = vec!["convert", "-O", "raw"];
        args.extend(options);
        args.extend(["x.qcow2", &device.0]);
        lab.zebu(&args).ok("to a block device");

        let mut written = vec![0; SIZE];
        File::open(&device.0)
            .and_then(|mut file| file.read_exact(&mut written))
            .expect("read back");
        let mut expected = vec![0; SIZE];
        File::open(lab.path("theirs.raw"))
            .and_then(|file| file.read_exact_at(&mut expected, 0))
            .expect("read");
        assert!(
            written == expected,
            "{options:?}: the device has other bytes"
        );

        let mut behind = [0; 4096];
        File::open(&device.0)
            .and_then(|file| file.read_exact_at(&mut behind, SIZE as u64))
            .expect("read back");
        assert!(
            behind == [0xee; 4096],
            "{options:?}: bytes behind the disk were changed"
        );

        lab.zebu(&["convert", "-O", "raw", &device.0, "back.raw"])
            .ok("from a block device");
        lab.assert_same_bytes("back.raw", "disk", "from a block device");
    }
    // Too small.
    dirty(1 << 20)(&lab.path("disk"));
    if let Some(device) = Loop::on(&lab.path("disk")) {
        for options in [&[][..], &["-n"]] {
            let mut args = vec!["convert", "-O", "raw"];
            args.extend(options);
            args.extend(["x.qcow2", &device.0]);
            assert_same_answer(&lab, &args, "a device that is too small")
                .failed_with_one_line(1, "too small");
        }
    }
}

/// Readers look for the footer of a fixed VHD at the end of the device.
#[test]
fn a_fixed_vhd_needs_a_device_of_its_length() {
    let lab = Lab::new();
    // Of a geometry, so that QEMU does not round it.
    lab.make("raw src.raw 4177920");
    let subformat = ["-o", "subformat=fixed"];
    for (length, fits) in [(4177920 + 512, true), (4177920 + 1024, false)] {
        File::create(lab.path("disk"))
            .and_then(|file| file.set_len(length))
            .expect("create");
        let Some(device) = Loop::on(&lab.path("disk")) else {
            println!("skipped: losetup does not work here");
            return;
        };
        let convert = ["convert", "-f", "raw", "-O", "vpc"];
        let args = [&convert[..], &subformat, &["src.raw", &device.0]].concat();
        let answer = lab.zebu(&args);
        if fits {
            answer.ok("it fits");
            lab.zebu(&["compare", "-F", "vpc", "src.raw", &device.0])
                .ok("it fits");
        } else {
            answer.failed_with_one_line(1, "the device must have 4178432 bytes");
        }
    }
}
