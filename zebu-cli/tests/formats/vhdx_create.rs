//! New VHDX images: they must be those of qemu-img but for what is different in each image (names of
//! programs, GUIDs, checksums), and QEMU must read them and find no errors. An image that was not
//! finished must not open.
//!

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::part;
use crate::common::server::Server;
use crate::common::{
    Answer, Lab, Rng, assert_same_answer, beyond_qemu, cases, compare_answers, peer,
};

const MIB: u64 = 1 << 20;

const OPTIONS: [&str; 6] = [
    "subformat=dynamic",
    "block_state_zero=off,block_size=1M",
    "log_size=3M,block_size=2M",
    "subformat=fixed",
    "subformat=fixed,block_state_zero=off,block_size=1M",
    "block_size=256M,block_state_zero=off",
];

/// `convert` or `create` of VHDX images with these options.
fn args<'a>(options: &'a str, command: &[&'a str]) -> Vec<&'a str> {
    let flag = if command[0] == "create" { "-f" } else { "-O" };
    let mut args = vec![command[0], flag, "vhdx", "-o", options];
    args.extend(&command[1..]);
    args
}

/// Makes `src`, a disk of a random size with data, zeroes and holes.
fn generate(lab: &Lab, random: &mut Rng) -> u64 {
    let size = match random.below(4) {
        0 => 512 * (1 + random.below(100)),
        1 => MIB * (1 + random.below(20)),
        2 => 1 + random.below(9 * MIB),
        _ => 512 * (1 + random.below(20 * MIB / 512)),
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
        let length = match random.below(3) {
            0 => 1 + random.below(600),
            1 => 4096 * (1 + random.below(20)),
            _ => 1 + random.below(2 * MIB),
        };
        let data = vec![random.below(4) as u8; length.min(size - at) as usize];
        file.write_all_at(&data, at).expect("write");
    }
    size
}

/// Fails the test unless both programs read the disk `src` in an image and find no errors.
#[track_caller]
fn judge(lab: &Lab, image: &str, what: &str) {
    let compare = ["compare", "-f", "vhdx", "-F", "raw", image, "src"];
    for args in [&compare[..], &["check", image], &["info", image]] {
        let answer = assert_same_answer(lab, args, what);
        answer.ok(what);
    }
    lab.zebu(&["map", image]).ok(what);
}

/// Space on the disk, in blocks of 512 bytes.
fn blocks(lab: &Lab, name: &str) -> u64 {
    fs::metadata(lab.path(name)).expect("stat").blocks()
}

#[test]
fn converted_images_are_read_by_qemu() {
    let mut seeds = cases(2, "conversions");
    while let Some(seed) = seeds.next() {
        let lab = Lab::new();
        let mut random = Rng::new(seed);
        let size = generate(&lab, &mut random);
        for options in OPTIONS {
            for more in [
                &[][..],
                &["-W", "-m", "16"],
                &["-S", "0"],
                &["-t", "none", "-m", "1"],
            ] {
                let convert = [&["convert", "-f", "raw"], more, &["src"]].concat();
                let what = format!("seed {seed}, {size} bytes, {options}, {more:?}");
                let both = |program: fn(&Lab, &[&str]) -> Answer, target| {
                    let convert = args(options, &convert);
                    program(&lab, &[&convert[..], &[target]].concat()).ok(&what);
                };
                both(Lab::zebu, "ours");
                both(Lab::qemu_img, "theirs");
                lab.sync_files();
                // QEMU leaves the space of fixed images unused, and appends blocks.
                if !more.contains(&"0") {
                    let (ours, theirs) = (blocks(&lab, "ours"), blocks(&lab, "theirs"));
                    let slack = 2 * 64;
                    assert!(
                        ours <= theirs + slack,
                        "{what}: {ours} blocks, QEMU's {theirs}"
                    );
                }
                judge(&lab, "ours", &what);
                seeds.add(1);
            }
        }
    }
}

/// Sets what differs in each image to zeroes, and the length to `length`.
fn normalize(lab: &Lab, name: &str, length: u64) {
    let path = lab.path(name);
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .expect("image");
    let mut offset = [0; 8];
    file.read_exact_at(&mut offset, (192 << 10) + 64)
        .expect("read");
    let metadata = u64::from_le_bytes(offset);
    // The creator, the headers, the identity of the disk.
    let mut ranges = vec![(8, 520), (64 << 10, 68 << 10), (128 << 10, 132 << 10)];
    ranges.push((metadata + (64 << 10) + 16, metadata + (64 << 10) + 32));
    for table in [192 << 10, 256 << 10] {
        // QEMU does not say that the regions are required.
        ranges.extend([(4, 8), (44, 48), (76, 80)].map(|(from, to)| (table + from, table + to)));
    }
    for (from, to) in ranges {
        let zeroes = vec![0; (to - from) as usize];
        file.write_all_at(&zeroes, from).expect("write");
    }
    // That of a fixed image has space for the whole last block.
    file.set_len(length).expect("length");
}

#[test]
fn created_images_are_those_of_qemu() {
    let lab = Lab::new();
    let mut random = Rng::new(11);
    let sizes = [
        "0", "1", "512", "513", "1M", "5242368", "1G", "1025M", "100G", "101G",
    ];
    let mut sizes: Vec<String> = sizes.map(String::from).into();
    for _ in 0..6 {
        let bits = 10 + random.below(32);
        sizes.push(random.below(1 << bits).to_string());
    }
    for (i, options) in OPTIONS.into_iter().enumerate() {
        for size in part(3, sizes.iter().cycle().skip(i).take(sizes.len())) {
            if size == "0" && options.contains("block_size=256M") {
                // QEMU opens no such image, its own neither.
                continue;
            }
            let bytes = |program: fn(&Lab, &[&str]) -> Answer, name: &str| {
                let _ = fs::remove_file(lab.path("x"));
                let answer = program(&lab, &args(options, &["create", "x", size]));
                fs::rename(lab.path("x"), lab.path(name)).expect("an image");
                answer.ok(size)
            };
            let what = format!("{options}, {size}");
            let (ours, theirs) = (bytes(Lab::zebu, "ours"), bytes(Lab::qemu_img, "theirs"));
            compare_answers(&ours, &theirs, &["create"], &what);
            for command in [&["check", "ours"][..], &["map", "--output=json", "ours"]] {
                lab.qemu_img(command).ok(&what);
                lab.zebu(command).ok(&what);
            }
            let length = fs::metadata(lab.path("theirs")).expect("stat").len();
            assert!(fs::metadata(lab.path("ours")).expect("stat").len() >= length);
            lab.sync_files();
            let (ours, theirs) = (blocks(&lab, "ours"), blocks(&lab, "theirs"));
            assert!(
                ours <= theirs + 64,
                "{what}: {ours} blocks, QEMU's {theirs}"
            );
            normalize(&lab, "ours", length);
            normalize(&lab, "theirs", length);
            lab.assert_same_bytes("ours", "theirs", &what);
        }
    }
    // The largest disk with the smallest blocks: its table has 512 MiB, which are not written.
    let create = args(
        "block_size=1M,block_state_zero=off",
        &["create", "-q", "x", "64T"],
    );
    lab.zebu(&create).ok("64 TiB");
    lab.sync_files();
    assert!(blocks(&lab, "x") < 2048);
    assert_same_answer(&lab, &["info", "x"], "64 TiB").ok("64 TiB");
    assert_same_answer(&lab, &["check", "x"], "64 TiB").ok("64 TiB");
}

#[test]
fn options_are_those_of_qemu() {
    if !peer().is_current() {
        return;
    }
    let lab = Lab::new();
    lab.make("raw src 100000; create base.qcow2 1M");
    for args in [
        "create -f vhdx -o help",
        "create -f vhdx -o help x",
        "convert -O vhdx -o ? src x",
        "create -f vhdx -o log_size=0 x 1M",
        "create -f vhdx -o log_size=1536k x 1M",
        "create -f vhdx -o log_size=4095M x 1M",
        "create -f vhdx -o log_size=4G x 1M",
        "create -f vhdx -o log_size=5G x 1M",
        "create -f vhdx -o log_size=1 x 1M",
        "create -f vhdx -o block_size=512M x 1M",
        "create -f vhdx -o block_size=300M x 1M",
        "create -f vhdx -o block_size=3M x 1M",
        "create -f vhdx -o block_size=1 x 1M",
        "create -f vhdx -o block_size=1500k x 1M",
        "create -f vhdx x 70368744177665",
        "create -f vhdx x 7E",
        "create -f vhdx -o subformat= x 1M",
        "create -f vhdx -o subformat=Fixed x 1M",
        "create -f vhdx -o subformat=differencing x 1M",
        "create -f vhdx -o subformat=bad,block_size=3M,log_size=5G x 65T",
        "create -f vhdx -o block_size=3M,log_size=5G x 65T",
        "create -f vhdx -o block_size=3M,log_size=5G x 1M",
        "create -f vhdx -o block_state_zero=bad x 1M",
        "create -f vhdx -o preallocation=bad,subformat=bad x 1M",
        "create -f vhdx -o preallocation=full,subformat=fixed x 1M",
        "create -f vhdx -o nothing=1 x 1M",
        "create -f vhdx -b base.qcow2 -F qcow2 x",
        "create -f vhdx -F qcow2 x 1M",
        "create -f vhdx -o backing_file=base.qcow2 x 1M",
        "create -f vhdx x",
        "convert -c -O vhdx src x",
        "convert -B base.qcow2 -F qcow2 -O vhdx src x",
        "convert -F qcow2 -O vhdx src x",
        "convert --bitmaps -O vhdx base.qcow2 x",
        "convert -O vhdx -o subformat=bad src x",
        "convert -O vhdx -o block_size=3M src x",
        "measure -O vhdx src",
    ] {
        let words: Vec<&str> = args.split(' ').collect();
        let _ = fs::remove_file(lab.path("x"));
        assert_same_answer(&lab, &words, args);
    }
    let file = File::create(lab.path("large")).expect("create");
    // Files of the file system may be smaller than the largest disk.
    if file.set_len(65 << 40).is_ok() {
        assert_same_answer(&lab, &["convert", "-O", "vhdx", "large", "x"], "large");
    }
}

#[test]
fn parts_and_several_sources() {
    let lab = Lab::new();
    lab.make("raw one 1500160; raw two 3000320");
    for options in OPTIONS {
        let convert = |target| args(options, &["convert", "-f", "raw", "one", "two", target]);
        lab.zebu(&convert("ours")).ok("two sources");
        lab.qemu_img(&convert("theirs")).ok("two sources");
        lab.qemu_img(&["compare", "-s", "ours", "theirs"])
            .ok("two sources");
    }
    for range in [&["bs=1000"][..], &["bs=4k", "skip=100", "count=300"]] {
        let dd = |target| [&["dd", "-O", "vhdx", "if=two", target], range].concat();
        let ours = lab.zebu(&dd("of=ours"));
        compare_answers(&ours, &lab.qemu_img(&dd("of=theirs")), range, "dd");
        lab.qemu_img(&["compare", "-s", "ours", "theirs"]).ok("dd");
    }
}

/// QEMU writes to our images, and both read the result.
#[test]
fn qemu_writes_to_new_images() {
    let lab = Lab::new();
    let mut random = Rng::new(4);
    for options in OPTIONS {
        generate(&lab, &mut random);
        lab.zebu(&args(options, &["convert", "-f", "raw", "src", "x"]))
            .ok(options);
        let size = fs::metadata(lab.path("src")).expect("stat").len();
        let size = size.next_multiple_of(512);
        File::options()
            .write(true)
            .open(lab.path("src"))
            .and_then(|file| file.set_len(size))
            .expect("length");
        let mut script = String::new();
        for _ in 0..5 {
            let at = random.below(size / 512) * 512;
            let length = (512 * (1 + random.below(300))).min(size - at);
            script += &format!("write -P {} {at} {length}\n", 1 + random.below(255));
        }
        for (format, image) in [("vhdx", "x"), ("raw", "src")] {
            lab.qemu_io_script(&["-f", format, image], &script)
                .ok(options);
        }
        judge(&lab, "x", options);
    }
}

/// Fails the test if QEMU or zebu open an image that was not finished.
#[track_caller]
fn assert_unfinished(lab: &Lab, image: &str, what: &str) {
    for args in [&["info", "-f", "vhdx", image][..], &["info", image]] {
        let theirs = lab.qemu_img(args);
        assert_eq!(theirs.status, 1, "{what}: {theirs:#?}");
        assert!(
            theirs.err.contains("No valid VHDX header found"),
            "{theirs:#?}"
        );
        lab.zebu(args).failed_with_one_line(1, what);
    }
}

#[test]
fn interrupted_conversions_leave_no_image() {
    if beyond_qemu("it leaves an image that opens without errors") {
        return;
    }
    let lab = Lab::new();
    lab.make("create src.qcow2 16M; io src.qcow2: write -P 7 0 16M");
    for options in ["subformat=dynamic", "subformat=fixed"] {
        for signal in [libc::SIGKILL, libc::SIGTERM] {
            let _ = fs::remove_file(lab.path("x"));
            // Rate-limited, so that it does not end before the signal.
            let args = args(
                options,
                &["convert", "-r", "2M", "-m", "1", "src.qcow2", "x"],
            );
            let mut child = std::process::Command::new(crate::common::program())
                .args(&args)
                .current_dir(lab.path(""))
                .stderr(Stdio::null())
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
            child.wait().expect("wait");
            assert_unfinished(&lab, "x", &args.join(" "));
        }
    }
}

/// What a device held must not be read as a part of the disk. The device is an export, and held
/// another image.
#[test]
fn old_content_of_a_device_is_gone() {
    let lab = Lab::new();
    let mut random = Rng::new(5);
    for options in OPTIONS {
        if options.contains("256M") {
            continue;
        }
        generate(&lab, &mut random);
        let convert = |target| args(options, &["convert", "-f", "raw", "src", target]);
        lab.zebu(&convert("first")).ok("its size");
        let length = fs::metadata(lab.path("first")).expect("stat").len() + 4 * MIB;
        let mut old = vec![0xaa; length as usize];
        let first = fs::read(lab.path("first")).expect("read");
        old[64 << 10..192 << 10].copy_from_slice(&first[64 << 10..192 << 10]);
        fs::write(lab.path("old"), old).expect("write");
        let server = Server::start(&lab, &["-f", "raw", "-t", "old"]);
        let target = format!("nbd:unix:{}", server.socket.display());
        lab.zebu(&convert(&target)).ok(options);
        drop(server);
        judge(&lab, "old", options);
    }
}
