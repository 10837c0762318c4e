//! New images of formats that zebu fills once: they must be those of qemu-img but for
//! what is different in each image (names of programs, UUIDs, times, checksums). An image that was
//! not finished must not open.
//!

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::server::Server;
use crate::common::{
    Answer, Lab, Limits, Rng, assert_same_answer, beyond_qemu, cases, compare_answers, part, peer,
};
use zebu_testkit::WRITTEN;

/// A format with options.
struct Form {
    format: &'static str,
    options: &'static str,
    /// What differs between two images that were made alike: ranges, from the start and from the
    /// end of the file.
    differs: &'static [(u64, u64)],
    differs_at_end: &'static [(u64, u64)],
    /// What QEMU says of an image that was not finished.
    unfinished: &'static str,
    can_be_checked: bool,
    /// Whether zebu reads the format.
    is_read: bool,
}

/// The name of the program, and two UUIDs.
const OF_VDI: &[(u64, u64)] = &[(0, 0x40), (0x188, 0x1a8)];
/// Time, checksum and UUID of a footer.
const OF_FOOTER: &[(u64, u64)] = &[(24, 28), (64, 84)];

const VDI: Form = Form {
    format: "vdi",
    options: "static=off",
    differs: OF_VDI,
    differs_at_end: &[],
    unfinished: "unsupported VDI image (version 65535.65535)",
    can_be_checked: true,
    is_read: true,
};
const VHD: Form = Form {
    format: "vpc",
    options: "subformat=dynamic",
    differs: OF_FOOTER,
    differs_at_end: OF_FOOTER,
    unfinished: "Incorrect header checksum",
    can_be_checked: false,
    is_read: false,
};
const FIXED_VHD: Form = Form {
    options: "subformat=fixed",
    differs: &[],
    unfinished: "invalid VPC image",
    ..VHD
};

/// Of a VMDK the descriptor, which the tests of VMDK compare.
const VMDK: Form = Form {
    format: "vmdk",
    options: "subformat=monolithicSparse",
    differs: &[(512, 21 * 512)],
    differs_at_end: &[],
    unfinished: "Unsupported VMDK version 4294967295",
    can_be_checked: true,
    is_read: true,
};

const FORMS: [Form; 9] = [
    VDI,
    VMDK,
    Form {
        options: "zeroed_grain=on",
        ..VMDK
    },
    Form {
        options: "subformat=streamOptimized",
        ..VMDK
    },
    Form {
        options: "static=on",
        ..VDI
    },
    VHD,
    Form {
        options: "force_size=on",
        ..VHD
    },
    FIXED_VHD,
    Form {
        options: "subformat=fixed,force_size=on",
        ..FIXED_VHD
    },
];

impl Form {
    /// `convert` or `create` with this form as the target.
    fn args<'a>(&self, command: &[&'a str]) -> Vec<&'a str> {
        let flag = match command[0] {
            "create" => "-f",
            _ => "-O",
        };
        let mut args = vec![command[0], flag, self.format, "-o", self.options];
        args.extend(&command[1..]);
        args
    }

    /// Fails the test unless two images are the same but for what always differs. The same data may
    /// be compressed in many ways.
    #[track_caller]
    fn assert_same(&self, lab: &Lab, ours: &str, theirs: &str, what: &str) {
        match self.options.contains("streamOptimized") {
            true => self.assert_same_disk(lab, &["-s"], ours, theirs, what),
            false => self.assert_same_files(lab, ours, theirs, what),
        }
    }

    #[track_caller]
    fn assert_same_disk(&self, lab: &Lab, more: &[&str], ours: &str, theirs: &str, what: &str) {
        let format = self.format;
        let compare = ["compare", "-f", format, "-F", format];
        lab.qemu_img(&[&compare, more, &[ours, theirs]].concat())
            .ok(what);
    }

    #[track_caller]
    fn assert_same_files(&self, lab: &Lab, ours: &str, theirs: &str, what: &str) {
        for name in [ours, theirs] {
            let path = lab.path(name);
            let file = File::options().write(true).open(path).expect("image");
            let length = file.metadata().expect("stat").len();
            let from_end =
                (self.differs_at_end.iter()).map(|(a, b)| (length - 512 + a, length - 512 + b));
            for (from, to) in self.differs.iter().copied().chain(from_end) {
                let zeroes = vec![0; (to - from) as usize];
                file.write_all_at(&zeroes, from).expect("write");
            }
        }
        lab.assert_same_bytes(ours, theirs, what);
    }
}

/// Makes `src`, a disk of a random size with data, zeroes and holes, and the same as `src.qcow2`.
fn generate(lab: &Lab, random: &mut Rng) -> u64 {
    const MIB: u64 = 1 << 20;
    let size = match random.below(6) {
        0 => 512 * (1 + random.below(100)),
        1 => MIB * (1 + random.below(9)),
        2 => 4096 * (1 + random.below(9 * MIB / 4096)),
        3 => 1 + random.below(9 * MIB),
        // Sizes without a rest in the geometry of VHD.
        4 => 512 * 4 * 17 * (1 + random.below(200)),
        _ => 512 * (1 + random.below(9 * MIB / 512)),
    };
    let file = File::create(lab.path("src")).expect("create");
    file.set_len(size).expect("length");
    for _ in 0..random.below(9) {
        let at = match random.below(3) {
            0 => random.below(size),
            1 => random.below(size.div_ceil(MIB)) * MIB,
            _ => random.below(size.div_ceil(4096)) * 4096,
        };
        let at = at.min(size - 1);
        let length = match random.below(4) {
            0 => 1 + random.below(600),
            1 => 4096 * (1 + random.below(20)),
            _ => 1 + random.below(2 * MIB),
        };
        let length = length.min(size - at) as usize;
        let byte = random.below(4) as u8;
        let data: Vec<u8> = match byte {
            // Zeroes that take up space.
            0 => vec![0; length],
            1 => (0..length).map(|_| random.below(256) as u8).collect(),
            byte => vec![byte; length],
        };
        file.write_all_at(&data, at).expect("write");
    }
    lab.qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "src", "src.qcow2"])
        .ok("the same as qcow2");
    size
}

fn blocks(lab: &Lab, name: &str) -> u64 {
    fs::metadata(lab.path(name)).expect("stat").blocks()
}

#[test]
fn converted_images_are_those_of_qemu() {
    let mut seeds = cases(3, "conversions");
    while let Some(seed) = seeds.next() {
        let mut random = Rng::new(seed);
        let lab = Lab::new();
        let size = generate(&lab, &mut random);
        for form in &FORMS {
            let (source_format, source) = match random.below(2) {
                0 => ("raw", "src"),
                _ => ("qcow2", "src.qcow2"),
            };
            let sparse: &[&str] = match random.below(3) {
                0 => &["-S", "0"],
                1 => &["-S", "64k"],
                _ => &[],
            };
            let cache: &[&str] = match random.below(3) {
                0 => &["-t", "none"],
                1 => &["-t", "writeback"],
                _ => &[],
            };
            let convert = [&["convert", "-f", source_format], sparse, cache, &[source]].concat();
            let what = format!(
                "seed {seed}, {size} bytes: {}",
                form.args(&convert).join(" ")
            );
            let both = |program: fn(&Lab, &[&str]) -> Answer, target| {
                program(&lab, &[&form.args(&convert)[..], &[target]].concat()).ok(&what);
            };
            both(Lab::zebu, "ours");
            both(Lab::qemu_img, "theirs");
            lab.sync_files();
            if !sparse.contains(&"0") {
                let (ours, theirs) = (blocks(&lab, "ours"), blocks(&lab, "theirs"));
                assert!(
                    ours <= theirs + 64,
                    "{what}: {ours} blocks, QEMU's {theirs}"
                );
            }
            judge(&lab, form, "ours", &what);
            form.assert_same(&lab, "ours", "theirs", &what);
            seeds.add(1);
        }
    }
}

/// Fails the test unless QEMU, and zebu if it can, read the disk `src` in an image.
#[track_caller]
fn judge(lab: &Lab, form: &Form, image: &str, what: &str) {
    let compare = ["compare", "-f", form.format, "-F", "raw", image, "src"];
    lab.qemu_img(&compare).ok(what);
    if form.can_be_checked {
        lab.qemu_img(&["check", "-f", form.format, image]).ok(what);
    }
    if form.is_read {
        for args in [
            &compare[..],
            &["check", "-f", form.format, image],
            &["info", "-f", form.format, image],
            &["map", "-f", form.format, image],
        ] {
            assert_same_answer(lab, args, what);
        }
    }
}

/// Many workers that write in any order, several to the same block.
#[test]
fn blocks_that_many_workers_fill() {
    let lab = Lab::new();
    let size = 70_000_000;
    let file = File::create(lab.path("src")).expect("create");
    file.set_len(size).expect("length");
    let mut random = Rng::new(3);
    for _ in 0..400 {
        let at = random.below(size - 300_000);
        let data = vec![1 + random.below(255) as u8; 1 + random.below(300_000) as usize];
        file.write_all_at(&data, at).expect("write");
    }
    for form in &FORMS {
        let ways = [
            &["-W"][..],
            &["-W", "-m", "16", "-t", "none"],
            &["-m", "16"],
        ];
        for more in part(2, ways) {
            let convert = [&["convert", "-f", "raw"], more, &["src", "x"]].concat();
            let what = form.args(&convert).join(" ");
            lab.zebu(&form.args(&convert)).ok(&what);
            judge(&lab, form, "x", &what);
        }
    }
}

#[test]
fn several_sources_and_parts() {
    let lab = Lab::new();
    lab.make("raw one 1500160; raw two 3000320");
    for form in &FORMS {
        let join = form.args(&["convert", "-f", "raw", "one", "two", "ours"]);
        lab.zebu(&join).ok("two sources");
        let theirs = form.args(&["convert", "-f", "raw", "one", "two", "theirs"]);
        lab.qemu_img(&theirs).ok("two sources");
        form.assert_same(&lab, "ours", "theirs", form.options);
        for range in [&["bs=1000"][..], &["bs=4k", "skip=100", "count=300"]] {
            let dd = |target| [&["dd", "-O", form.format, "if=two", target], range].concat();
            let ours = lab.zebu(&dd("of=ours"));
            compare_answers(&ours, &lab.qemu_img(&dd("of=theirs")), range, "dd");
            // QEMU stores zeroes, too.
            let strict: &[&str] = match form.format {
                "vmdk" => &[],
                _ => &["-s"],
            };
            form.assert_same_disk(&lab, strict, "ours", "theirs", "the same part");
        }
    }
}

/// Runs `create` with both programs and compares the answers. Returns whether the image was made,
/// as `ours` and `theirs`.
#[track_caller]
fn create(lab: &Lab, args: &[&str]) -> bool {
    let all = [&["create"], args].concat();
    let made = |program: fn(&Lab, &[&str]) -> Answer, name: &str| {
        let _ = fs::remove_file(lab.path("x"));
        let answer = program(lab, &all);
        if answer.status == 0 {
            fs::rename(lab.path("x"), lab.path(name)).expect("an image");
        }
        answer
    };
    let (ours, theirs) = (made(Lab::zebu, "ours"), made(Lab::qemu_img, "theirs"));
    compare_answers(&ours, &theirs, &all, "create");
    ours.status == 0
}

#[test]
fn created_images_are_those_of_qemu() {
    let lab = Lab::new();
    let mut random = Rng::new(11);
    for form in &FORMS {
        let mut sizes: Vec<String> = [
            "0", "1", "511", "512", "513", "34816", "34817", "1M", "1048577", "5242368", "127G",
        ]
        .map(String::from)
        .into();
        for _ in 0..6 {
            let bits = 10 + random.below(32);
            sizes.push(random.below(1 << bits).to_string());
        }
        if form.format == "vpc" {
            sizes.extend(["2040G", "2190433320961", "2041G", "7E"].map(String::from));
            // Around the largest geometries with 17, 31, 63 and 255 sectors.
            let sectors = [
                17 * 16 * 1024,
                31 * 16 * 1024,
                63 * 16 * 65535,
                255 * 16 * 65535,
            ];
            sizes.extend(sectors.map(|n: u64| (n * 512).to_string()));
            sizes.extend(sectors.map(|n: u64| ((n - 1) * 512).to_string()));
        } else if form.format == "vdi" {
            sizes.extend(["600T", "562949819203584", "562949819203585"].map(String::from));
        }
        for size in sizes {
            // The map of the largest disks has gigabytes.
            let is_huge = size.len() > 14 && form.format == "vdi" && !size.ends_with('5');
            if is_huge {
                continue;
            }
            let args = form.args(&["create", "x", &size]);
            let what = args.join(" ");
            if create(&lab, &args[1..]) {
                form.assert_same_files(&lab, "ours", "theirs", &what);
            }
        }
    }
}

#[test]
fn options_are_those_of_qemu() {
    if !peer().is_current() {
        return;
    }
    let lab = Lab::new();
    lab.make("raw src 100000; create base.qcow2 1M");
    for args in [
        "create -f vdi -o help",
        "create -f vdi -o help x",
        "create -f vpc -o help",
        "create -f vpc -o help x",
        "convert -O vdi -o help",
        "convert -O vpc -o ? src x",
        "create -f vdi -o static=yes x 1M",
        "create -f vdi -o nostatic x 1M",
        "create -f vdi -o static=maybe x 1M",
        "create -f vdi -o static x 1M",
        "create -f vdi -o static=on,static=off x 1M",
        "create -f vdi -o size=1M x",
        "create -f vdi -o block_size=2M x 1M",
        "create -f vdi -o preallocation=full x 1M",
        "create -f vdi -o preallocation=metadata x 1M",
        "create -f vdi -o preallocation=bad x 600T",
        "create -f vdi -o nocow=on,extent_size_hint=1M x 1M",
        "create -f vdi -b base.qcow2 -F qcow2 x",
        "create -f vdi -F qcow2 x 1M",
        "create -f vdi -o backing_file=base.qcow2 x 1M",
        "create -f vdi x",
        "create -f vpc -o subformat=bad x 1M",
        "create -f vpc -o subformat=Fixed x 1M",
        "create -f vpc -o subformat= x 1M",
        "create -f vpc -o subformat=bad,preallocation=bad x 1M",
        "create -f vpc -o force_size=1 x 1M",
        "create -f vpc -o force_size x 3T",
        "create -f vpc -o preallocation=falloc,subformat=fixed x 1M",
        "create -f vpc missing/x 1M",
        "create -f vmdk -o help",
        "create -f vmdk -o help x",
        "convert -O vmdk -o help",
        "create -f vmdk x",
        "create -f vmdk x 1000",
        "create -f vmdk -o adapter_type=bad x 1M",
        "create -f vmdk -o adapter_type=legacyESX,toolsversion=8 x 1M",
        "create -f vmdk -o subformat=bad x 1M",
        "create -f vmdk -o subformat=monolithicsparse x 1M",
        "create -f vmdk -o compat6=on,hwversion=7 x 1M",
        "create -f vmdk -o compat6=maybe x 1M",
        "create -f vmdk -o hwversion=undefined,zeroed_grain x 1M",
        "create -f vmdk -o subformat=monolithicFlat,zeroed_grain=on x 1M",
        "create -f vmdk -o subformat=twoGbMaxExtentFlat,zeroed_grain=on x 1M",
        "create -f vmdk -o subformat=twoGbMaxExtentSparse x 1M",
        "create -f vmdk -o preallocation=full x 1M",
        "create -f vmdk missing/x 1M",
        "convert -O vmdk -o subformat=bad src x",
        "convert -O vmdk -o nothing=bad src x",
        "convert -c -O vmdk src x",
        "convert -c -O vmdk -o subformat=monolithicFlat src x",
        "convert -c -O vmdk -o subformat=streamOptimized src x",
        "convert --bitmaps -O vmdk base.qcow2 x",
        "measure -O vmdk src",
        "convert -c -O vdi src x",
        "convert -c -O vpc -o subformat=bad src x",
        "convert -c -O vpc -o preallocation=full src x",
        "convert -B base.qcow2 -F qcow2 -O vdi src x",
        "convert -F qcow2 -O vpc src x",
        "convert --bitmaps -O vdi base.qcow2 x",
        "convert -O vdi -o static=bad src x",
        "convert -O vdi -o nothing=bad src x",
        "convert -O vpc -o subformat=bad src x",
        "convert -O vpc -o subformat=bad,preallocation=bad src x",
        "measure -O vdi src",
        "measure -O vpc --size 1M",
    ] {
        let words: Vec<&str> = args.split(' ').collect();
        let _ = fs::remove_file(lab.path("x"));
        assert_same_answer(&lab, &words, args);
    }
    // Too large for the format.
    let file = File::create(lab.path("large")).expect("create");
    file.set_len(3 << 40).expect("length");
    for options in ["force_size=off", "force_size=on,subformat=fixed"] {
        let args = ["convert", "-O", "vpc", "-o", options, "large", "x"];
        assert_same_answer(&lab, &args, options);
    }
}

#[test]
fn a_refused_image_leaves_an_existing_file() {
    if beyond_qemu("it removes the file, or writes to the image") {
        return;
    }
    let lab = Lab::new();
    lab.make("raw src 100000");
    for form in &FORMS {
        lab.qemu_img(&form.args(&["create", "-q", "x", "1M"]))
            .ok("create");
        let before = fs::read(lab.path("x")).expect("read");
        for args in [
            &[
                "convert",
                "-f",
                "raw",
                "-O",
                form.format,
                "-o",
                "nothing=1",
                "src",
                "x",
            ][..],
            &["create", "-q", "-f", form.format, "x", "9000T"],
            &[
                "create",
                "-q",
                "-f",
                form.format,
                "-o",
                "preallocation=bad",
                "x",
                "1M",
            ],
        ] {
            let what = args.join(" ");
            lab.zebu(args).failed_with_one_line(1, &what);
            assert!(fs::read(lab.path("x")).expect("read") == before, "{what}");
        }
        if form.format != "vmdk" {
            let args = ["convert", "-f", "raw", "-c", "-O", form.format, "src", "x"];
            lab.zebu(&args).failed_with_one_line(1, "compressed");
            assert!(fs::read(lab.path("x")).expect("read") == before);
        }
        if WRITTEN.iter().all(|written| written.name != form.format) {
            let args = ["convert", "-f", "raw", "-n", "-O", form.format, "src", "x"];
            let answer = lab.zebu(&args);
            answer.failed_with_one_line(1, "-n");
            let err = answer.err;
            assert!(err.contains("does not write to existing images"), "{err}");
            assert!(fs::read(lab.path("x")).expect("read") == before);
        }
    }
}

/// Fails the test if QEMU or zebu open an image that was not finished.
#[track_caller]
fn assert_unfinished(lab: &Lab, form: &Form, image: &str, what: &str) {
    let is_found = !form.differs.is_empty();
    for args in [&["info", "-f", form.format, image][..], &["info", image]] {
        if args.len() == 2 && !is_found {
            // Without its footer it is not known from a raw disk.
            continue;
        }
        let theirs = lab.qemu_img(args);
        assert_eq!(theirs.status, 1, "{what}: {theirs:#?}");
        assert!(theirs.err.contains(form.unfinished), "{what}: {theirs:#?}");
        lab.zebu(args).failed_with_one_line(1, what);
    }
}

#[test]
fn interrupted_conversions_leave_no_image() {
    if beyond_qemu("it leaves an image that opens without errors") {
        return;
    }
    let lab = Lab::new();
    lab.make("create src.qcow2 16M; io src.qcow2: write -s noise 0 16M");
    for form in &FORMS {
        for signal in [libc::SIGKILL, libc::SIGTERM] {
            let _ = fs::remove_file(lab.path("x"));
            // Rate-limited, so that it does not end before the signal.
            let args = form.args(&["convert", "-r", "2M", "-m", "1", "src.qcow2", "x"]);
            let mut child = std::process::Command::new(crate::common::program())
                .args(&args)
                .current_dir(lab.path(""))
                .stderr(Stdio::piped())
                .spawn()
                .expect("the program under test");
            let start = Instant::now();
            while fs::metadata(lab.path("x")).map_or(0, |m| m.blocks()) < 2 << 10 {
                assert!(
                    start.elapsed() < crate::common::TIME_LIMIT,
                    "nothing is written"
                );
                std::thread::sleep(Duration::from_millis(10));
            }
            assert!(child.try_wait().expect("wait").is_none(), "it has ended");
            // SAFETY: the child was not waited for, so the id is its own.
            assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
            let output = child.wait_with_output().expect("wait");
            if signal == libc::SIGTERM {
                let err = String::from_utf8_lossy(&output.stderr);
                assert_eq!(err, "zebu: Interrupted; 'x' is incomplete\n");
                assert_eq!(output.status.code(), Some(143));
            }
            assert_unfinished(&lab, form, "x", &args.join(" "));
        }
    }
}

#[test]
fn full_file_systems() {
    let lab = Lab::new();
    lab.make("create src.qcow2 8M; io src.qcow2: write -s noise 0 8M");
    fs::create_dir(lab.path("small")).expect("folder");
    // A file system of 1 MiB that only this command sees.
    let script = "mount -t tmpfs -o size=1m none small && echo mounted && \"$0\" \"$@\"; \
                  status=$?; cp --sparse=always small/x left 2>/dev/null; exit $status";
    for form in &FORMS {
        let _ = fs::remove_file(lab.path("left"));
        let args = form.args(&["convert", "src.qcow2", "small/x"]);
        let Some(answer) = lab.in_namespace(script, &args, &Limits::default()) else {
            println!("skipped: no mount namespaces here");
            return;
        };
        let what = args.join(" ");
        answer.orderly(&what);
        assert_eq!(answer.status, 1, "{what}: {answer:#?}");
        let says = |words: &str| answer.err.contains(words);
        assert!(says("No space left on device"), "{what}: {answer:#?}");
        if !crate::common::testing_qemu() {
            answer.failed_with_one_line(1, &what);
            assert!(says("small/x"), "{what}: {answer:#?}");
            assert_unfinished(&lab, form, "left", &what);
        }
    }
    if beyond_qemu("it leaves a file") {
        return;
    }
    // The map has 4 MiB.
    let args = ["create", "-q", "-f", "vdi", "small/x", "1T"];
    let answer = lab.in_namespace(script, &args, &Limits::default());
    let answer = answer.expect("mounted before");
    answer.failed_with_one_line(1, "create");
    assert!(
        answer.err.contains("No space left on device"),
        "{answer:#?}"
    );
    assert!(!lab.path("left").exists() || blocks(&lab, "left") > 0);
}

/// On a device, what it held must neither be read as a part of the disk nor make an image that was
/// cut off a whole one. The device is an export.
#[test]
fn old_content_of_a_device_is_gone() {
    let lab = Lab::new();
    let mut random = Rng::new(5);
    for form in &FORMS {
        generate(&lab, &mut random);
        lab.qemu_img(&form.args(&["convert", "-f", "raw", "src", "theirs"]))
            .ok("its size");
        // The footer of a fixed image is the end of the device.
        let length = fs::metadata(lab.path("theirs")).expect("stat").len();
        let length = match form.differs.is_empty() {
            true => length,
            false => length + (4 << 20),
        };
        fs::write(lab.path("old"), vec![0xaa; length as usize]).expect("write");
        let server = Server::start(&lab, &["-f", "raw", "-t", "old"]);
        let target = format!("nbd:unix:{}", server.socket.display());
        lab.zebu(&form.args(&["convert", "-f", "raw", "src", &target]))
            .ok(form.options);
        drop(server);
        judge(&lab, form, "old", form.options);
    }
}
