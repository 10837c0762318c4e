//! VHDX images: images that QEMU made must be read and reported as by QEMU, and those with a log as
//! QEMU reads them once it has replayed the log. What QEMU does not read (differencing images,
//! sectors of 4 KiB) is built from the specification.
//!

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use crate::common::server::Server;
use crate::common::vhost::{Disk, READ, serve};
use crate::common::{Answer, Lab, Rng, assert_same_answer, beyond_qemu, cases};
use zebu_testkit::library::vhdx_image::{
    Builder, Change, HEADERS, LOG_SECTOR, LogEntry, METADATA_TABLE, MIB, NOT_PRESENT, OLD_UNMAPPED,
    PARTIALLY_PRESENT, PRESENT, REGION_TABLES, UNDEFINED, UNMAPPED, ZERO, guid, seal, seal_all,
};
use zebu_vhost::front_end::Setup;

/// What these tests do in a lab.
pub trait VhdxLab {
    fn bytes_at<const N: usize>(&self, name: &str, offset: u64) -> [u8; N];
    fn u64_le(&self, name: &str, offset: u64) -> u64;
    /// Where an image of QEMU has its block allocation table.
    fn bat(&self, name: &str) -> u64;
    /// Creates an image with qemu-img.
    fn create(&self, name: &str, options: &str, size: u64);
    /// Runs commands of qemu-io on an image.
    fn change(&self, name: &str, script: &str);
    /// Converts an image to raw with both programs, and compares the results.
    #[track_caller]
    fn assert_same_disk(&self, image: &str, what: &str);
    /// The disk must be this one.
    #[track_caller]
    fn assert_disk(&self, image: &str, expected: &str, what: &str);
    /// What `map` says must agree with the disk, and with the file if there is one only.
    #[track_caller]
    fn assert_map(&self, image: &str, disk: &str, what: &str);
}

impl VhdxLab for Lab {
    fn bytes_at<const N: usize>(&self, name: &str, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        let file = File::open(self.path(name)).unwrap();
        file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    fn u64_le(&self, name: &str, offset: u64) -> u64 {
        u64::from_le_bytes(self.bytes_at(name, offset))
    }

    fn bat(&self, name: &str) -> u64 {
        self.u64_le(name, REGION_TABLES[0] + 32)
    }

    fn create(&self, name: &str, options: &str, size: u64) {
        let mut args = vec!["create", "-q", "-f", "vhdx"];
        if !options.is_empty() {
            args.extend(["-o", options]);
        }
        let size = size.to_string();
        args.extend([name, &size]);
        self.qemu_img(&args).ok("create");
    }

    fn change(&self, name: &str, script: &str) {
        let args = ["-f", "vhdx", name];
        self.qemu_io_script(&args, script).ok("change");
    }

    #[track_caller]
    fn assert_same_disk(&self, image: &str, what: &str) {
        self.qemu_img(&["convert", image, "-O", "raw", "theirs.raw"])
            .ok(what);
        self.assert_disk(image, "theirs.raw", what);
    }

    #[track_caller]
    fn assert_disk(&self, image: &str, expected: &str, what: &str) {
        let args = ["convert", image, "-O", "raw", "ours.raw"];
        self.zebu(&args).ok(what);
        self.assert_same_bytes("ours.raw", expected, what);
        self.assert_map(image, expected, what);
    }

    #[track_caller]
    fn assert_map(&self, image: &str, disk: &str, what: &str) {
        let answer = self.zebu(&["map", "--output=json", image]).ok(what);
        let (disk, file) = (File::open(self.path(disk)), File::open(self.path(image)));
        let (disk, file) = (disk.unwrap(), file.unwrap());
        let mut at = 0;
        for line in answer.out.lines() {
            let number = |key: &str| {
                let rest = line.split(&format!("\"{key}\": ")).nth(1)?;
                let end = rest.find([',', ' ', '}'])?;
                rest[..end].parse::<u64>().ok()
            };
            let (start, length) = (number("start").unwrap(), number("length").unwrap());
            assert_eq!(start, at, "{what}: {line}");
            at += length;
            // Enough of long extents.
            let mut bytes = vec![0; length.min(2 * MIB) as usize];
            disk.read_exact_at(&mut bytes, start).unwrap();
            if line.contains("\"zero\": true") {
                assert!(bytes.iter().all(|byte| *byte == 0), "{what}: {line}");
            } else if number("depth") == Some(0)
                && let Some(offset) = number("offset")
            {
                let mut in_file = vec![0; bytes.len()];
                file.read_exact_at(&mut in_file, offset).unwrap();
                assert!(bytes == in_file, "{what}: {line}");
            }
        }
        assert_eq!(at, disk.metadata().unwrap().len(), "{what}");
    }
}

/// An image of a random size with random options and data.
fn generate(lab: &Lab, random: &mut Rng) -> u64 {
    let block = [1, 2, 8, 32, 256][random.below(5) as usize] * MIB;
    let size = match random.below(3) {
        0 => 512 * (1 + random.below(100)),
        1 => block * (1 + random.below(3)),
        _ => 512 * (1 + random.below(3 * block / 512)),
    };
    let size = size.min(300 * MIB);
    let mut options = format!("block_size={block}");
    if random.one_in(3) {
        options += ",subformat=fixed";
    }
    if random.one_in(2) {
        options += ",block_state_zero=off";
    }
    if random.one_in(3) {
        options += ",log_size=3M";
    }
    lab.create("x.vhdx", &options, size);
    let mut script = String::new();
    for number in 0..random.below(8) {
        let at = random.below(size / 512) * 512;
        let length = (512 * (1 + random.below(400))).min(size - at);
        script += &format!("write -P {} {at} {length}\n", number + 1);
    }
    lab.change("x.vhdx", &script);
    size
}

#[test]
fn images_are_read_as_by_qemu() {
    for seed in cases(4, "images") {
        let lab = Lab::new();
        let mut random = Rng::new(seed);
        let size = generate(&lab, &mut random);
        lab.sync_files();
        let what = &format!("seed {seed}, {size} bytes");
        for args in [
            &["info", "x.vhdx"][..],
            &["info", "--output=json", "x.vhdx"],
            &["check", "x.vhdx"],
            &["check", "--output=json", "x.vhdx"],
            &["snapshot", "-l", "x.vhdx"],
            &["measure", "-O", "raw", "x.vhdx"],
            &["compare", "x.vhdx", "x.vhdx"],
        ] {
            assert_same_answer(&lab, args, what);
        }
        lab.assert_same_disk("x.vhdx", what);
        assert_same_answer(&lab, &["compare", "x.vhdx", "theirs.raw"], what);
        lab.zebu(&["convert", "-c", "x.vhdx", "-O", "qcow2", "ours.qcow2"])
            .ok(what);
        lab.qemu_img(&["compare", "ours.qcow2", "theirs.raw"])
            .ok(what);
        // QEMU takes the whole disk for data.
        let measure = ["measure", "-O", "qcow2", "x.vhdx"];
        let sizes = |answer: Answer| {
            let numbers = answer.out.split_whitespace();
            let numbers = numbers.filter_map(|word| word.parse::<u64>().ok());
            numbers.collect::<Vec<_>>()
        };
        let ours = sizes(lab.zebu(&measure).ok(what));
        let theirs = sizes(lab.qemu_img(&measure).ok(what));
        assert!(ours[0] <= theirs[0] && ours[1] == theirs[1], "{what}");
        // As a backing file, and a read of a part of it.
        let over = ["create", "-q", "-f", "qcow2", "-b", "x.vhdx", "-F", "vhdx"];
        lab.zebu(&[&over[..], &["over.qcow2"]].concat()).ok(what);
        lab.assert_same_disk("over.qcow2", what);
        let at = (size / 3).to_string();
        let read = [format!("read -v {at} 600")];
        let args = ["-c", &read[0], "over.qcow2"];
        let (ours, theirs) = (lab.zebu_io(&args), lab.qemu_io(&args));
        let bytes = |text: &str| {
            let lines = text.lines().filter(|line| line.contains(":  "));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(bytes(&ours.out), bytes(&theirs.out), "{what}");
    }
}

#[test]
fn blocks_of_all_states() {
    let lab = Lab::new();
    let states = [
        NOT_PRESENT,
        UNDEFINED,
        ZERO,
        UNMAPPED,
        OLD_UNMAPPED,
        PRESENT,
        PRESENT,
    ];
    let mut builder = Builder::new(states.len() as u64 * MIB, MIB, 512);
    let place = builder.block(5, PRESENT, vec![5; MIB as usize]);
    builder.block(6, PRESENT, vec![6; MIB as usize]);
    for (block, state) in (0..).zip(states).take(5) {
        builder.set(block, state, place);
    }
    builder.save(&lab.path("x.vhdx")).unwrap();
    lab.assert_same_disk("x.vhdx", "all states");
    for state in [4, PARTIALLY_PRESENT] {
        builder.set(3, state, place);
        builder.save(&lab.path("x.vhdx")).unwrap();
        let convert = ["convert", "x.vhdx", "-O", "raw", "ours.raw"];
        lab.zebu(&convert).failed_with_one_line(1, "a state");
        assert_eq!(lab.qemu_img(&convert).status, 1);
        if !beyond_qemu("it does not look at states") {
            assert_eq!(lab.zebu(&["check", "x.vhdx"]).status, 2);
        }
    }
}

/// QEMU is stopped by an error at some write, and leaves a log that must be replayed.
#[test]
fn logs_that_qemu_left() {
    if beyond_qemu("it opens such images only for writing") {
        return;
    }
    let (mut dirty, mut clean) = (0, 0);
    for (number, at) in [0, 0, 0, HEADERS[0], HEADERS[1], MIB, MIB + LOG_SECTOR]
        .into_iter()
        .enumerate()
    {
        let lab = Lab::new();
        let mut random = Rng::new(number as u64 + 1);
        let size = 24 * MIB;
        let block = 1 + random.below(3);
        lab.create(
            "x.vhdx",
            &format!("block_size={}M", block.next_power_of_two()),
            size,
        );
        let mut writes = |count: u64| {
            let write = |_| {
                let (at, length) = (random.below(44) * MIB / 2, 512 * (1 + random.below(500)));
                let value = 1 + random.below(255);
                format!("write -P {value} {at} {length}\n")
            };
            (0..count).map(write).collect::<String>()
        };
        lab.change("x.vhdx", &writes(number as u64));
        // 0 stands for the table, in whose first sector all entries are.
        let sector = if at == 0 { lab.bat("x.vhdx") } else { at } / 512;
        let image = format!(
            r#"json:{{"driver":"vhdx","file":{{"driver":"blkdebug",
            "image":{{"driver":"file","filename":"x.vhdx"}},
            "inject-error":[{{"event":"none","iotype":"write","sector":{sector}}}]}}}}"#
        );
        lab.qemu_io_script(&[&image], &writes(6));
        let what = &format!("an error at {at:#x}");
        fs::copy(lab.path("x.vhdx"), lab.path("replayed.vhdx")).unwrap();
        match lab.qemu_img(&["info", "x.vhdx"]).status {
            0 => clean += 1,
            _ => dirty += 1,
        }
        lab.qemu_img(&["check", "-r", "all", "replayed.vhdx"])
            .ok(what);
        let convert = ["convert", "replayed.vhdx", "-O", "raw", "theirs.raw"];
        lab.qemu_img(&convert).ok(what);
        let before = fs::read(lab.path("x.vhdx")).unwrap();
        let args = ["convert", "x.vhdx", "-O", "raw", "ours.raw"];
        lab.zebu(&args).ok(what);
        lab.assert_same_bytes("ours.raw", "theirs.raw", what);
        for args in [
            &["check", "x.vhdx"][..],
            &["info", "x.vhdx"],
            &["compare", "x.vhdx", "replayed.vhdx"],
        ] {
            lab.zebu(args).ok(what);
        }
        assert!(before == fs::read(lab.path("x.vhdx")).unwrap(), "{what}");
    }
    assert!(
        dirty >= 3 && clean >= 1,
        "{dirty} with a log, {clean} without"
    );
}

/// Sequences of several entries anywhere in the log.
#[test]
fn logs_are_replayed_as_by_qemu() {
    if beyond_qemu("it opens such images only for writing") {
        return;
    }
    for seed in cases(12, "logs") {
        let lab = Lab::new();
        let mut random = Rng::new(seed);
        let blocks = 4;
        let mut builder = Builder::new(blocks * MIB, MIB, 512);
        for block in 0..blocks {
            builder.block(block, PRESENT, vec![block as u8 + 1; MIB as usize]);
        }
        let bat = builder.bat();
        let file = builder.to_vec();
        let sector = file[bat as usize..][..LOG_SECTOR as usize].to_vec();
        let end = builder.end();
        builder.log_id = 77;
        builder.put(bat, vec![random.below(2) as u8 * 0x55; LOG_SECTOR as usize]);
        let count = 1 + random.below(3);
        let mut at = random.below(200) * LOG_SECTOR;
        let (tail, first) = (at, 1 + random.below(1 << 33));
        for sequence in first..first + count {
            let is_last = sequence + 1 == first + count;
            let mut changes = vec![Change::Zero {
                at: bat,
                length: LOG_SECTOR * (1 + random.below(3)),
            }];
            if is_last {
                let sector = sector.clone();
                changes.push(Change::Data { at: bat, sector });
            }
            // Bytes of a block, too.
            let sector = vec![random.below(256) as u8; LOG_SECTOR as usize];
            let offset = end - LOG_SECTOR * (1 + random.below(40));
            changes.push(Change::Data { at: offset, sector });
            let entry = LogEntry {
                id: 77,
                sequence,
                tail,
                flushed: end,
                last: end,
                changes,
            };
            at = builder.put_log(at, &entry);
        }
        builder.save(&lab.path("x.vhdx")).unwrap();
        builder.save(&lab.path("replayed.vhdx")).unwrap();
        let what = &format!("seed {seed}");
        assert_eq!(lab.qemu_img(&["info", "x.vhdx"]).status, 1, "{what}");
        let check = ["check", "-r", "all", "replayed.vhdx"];
        lab.qemu_img(&check).ok(what);
        let convert = ["convert", "replayed.vhdx", "-O", "raw", "theirs.raw"];
        lab.qemu_img(&convert).ok(what);
        let convert = ["convert", "x.vhdx", "-O", "raw", "ours.raw"];
        lab.zebu(&convert).ok(what);
        lab.assert_same_bytes("ours.raw", "theirs.raw", what);
    }
}

/// A GUID in the file, as the number whose digits are its text.
fn digits(bytes: [u8; 16]) -> u128 {
    u128::from_be_bytes(guid(u128::from_be_bytes(bytes)))
}

/// The identity of the content of an image.
fn content_id(lab: &Lab, name: &str) -> u128 {
    let current = HEADERS
        .into_iter()
        .max_by_key(|at| lab.u64_le(name, at + 8));
    digits(lab.bytes_at(name, current.unwrap() + 32))
}

/// A chain: an image of QEMU, and two that have a part of their blocks.
fn chain(lab: &Lab) -> Vec<u8> {
    let size = 6 * MIB;
    fs::create_dir(lab.path("sub")).unwrap();
    lab.create("base.vhdx", "block_size=2M", size);
    lab.change("base.vhdx", "write -P 1 0 3M\nwrite -P 2 5M 512\n");
    lab.qemu_img(&["convert", "base.vhdx", "-O", "raw", "base.raw"])
        .ok("base");
    let mut disk = fs::read(lab.path("base.raw")).unwrap();
    let mut put = |from: u64, length: u64, value: u8| {
        disk[from as usize..(from + length) as usize].fill(value);
    };
    let id = content_id(lab, "base.vhdx");
    let mut middle = Builder::new(size, MIB, 512).child(id, r"..\base.vhdx");
    middle.id = 0xabc;
    middle.block(0, PARTIALLY_PRESENT, vec![3; MIB as usize]);
    middle.set_present(512, 4096);
    put(512, 4096, 3);
    middle.set_present(MIB - 512, 512);
    put(MIB - 512, 512, 3);
    middle.set(1, ZERO, 0);
    put(MIB, MIB, 0);
    middle.block(4, PRESENT, vec![4; MIB as usize]);
    put(4 * MIB, MIB, 4);
    middle.save(&lab.path("sub/middle.vhdx")).unwrap();
    let mut top = Builder::new(size, 2 * MIB, 512).child(0xabc, r".\sub\middle.vhdx");
    top.block(2, PARTIALLY_PRESENT, vec![5; 2 * MIB as usize]);
    top.set_present(4 * MIB + 1024, 512);
    put(4 * MIB + 1024, 512, 5);
    top.save(&lab.path("top.vhdx")).unwrap();
    disk
}

#[test]
fn differencing_images() {
    if beyond_qemu("it does not read them") {
        return;
    }
    let lab = Lab::new();
    fs::write(lab.path("expected.raw"), chain(&lab)).unwrap();
    assert_eq!(lab.qemu_img(&["info", "top.vhdx"]).status, 1);
    lab.assert_disk("top.vhdx", "expected.raw", "a chain");
    for args in [
        &["compare", "top.vhdx", "expected.raw"][..],
        &["check", "top.vhdx"],
        &["check", "sub/middle.vhdx"],
    ] {
        lab.zebu(args).ok("a chain");
    }
    let info = lab
        .zebu(&["info", "--backing-chain", "top.vhdx"])
        .ok("info");
    for line in [
        "backing file: ./sub/middle.vhdx\nbacking file format: vhdx\n",
        "image: ./sub/../base.vhdx\n",
    ] {
        assert!(info.out.contains(line), "{line}: {info:?}");
    }
    let json = lab.zebu(&["info", "--output=json", "top.vhdx"]).ok("info");
    assert!(json.out.contains("\"backing-filename-format\": \"vhdx\""));

    // In strict mode no parent is opened, and it is said what would be.
    let untrusted = lab.zebu(&["--untrusted", "map", "top.vhdx"]);
    untrusted.failed_with_one_line(1, "strict mode");
    assert!(untrusted.err.contains("may not open"), "{untrusted:?}");
    let info = lab.zebu(&["--untrusted", "info", "top.vhdx"]).ok("info");
    let line =
        "would open: backing-file './sub/middle.vhdx' (format: vhdx; path: ./sub/middle.vhdx)";
    assert!(info.out.contains(line), "{info:?}");

    // The caller may name another image, of any format.
    lab.zebu(&["convert", "sub/middle.vhdx", "-O", "qcow2", "middle.qcow2"])
        .ok("the parent");
    let top = r#"json:{"driver":"vhdx","file":{"driver":"file","filename":"top.vhdx"},
        "backing":{"driver":"qcow2","file":{"driver":"file","filename":"middle.qcow2"}}}"#;
    lab.zebu(&["compare", top, "expected.raw"])
        .ok("another parent");

    // A parent that has changed is another one.
    lab.change("base.vhdx", "write -P 9 0 512\n");
    let changed = lab.zebu(&["map", "top.vhdx"]);
    changed.failed_with_one_line(1, "a changed parent");
    assert!(changed.err.contains("has changed"), "{changed:?}");
    fs::remove_file(lab.path("base.vhdx")).unwrap();
    let missing = lab.zebu(&["map", "top.vhdx"]);
    missing.failed_with_one_line(1, "no parent");
    assert!(
        missing.err.contains("Could not open backing file"),
        "{missing:?}"
    );
    lab.zebu(&["info", "top.vhdx"]).ok("info");
}

/// A parent is a file, whatever its name looks like.
#[test]
fn names_of_parents_are_paths() {
    if beyond_qemu("it does not read them") {
        return;
    }
    let lab = Lab::new();
    for (key, name, path) in [
        ("relative_path", "nbd:unix:x", "./nbd:unix:x"),
        ("relative_path", r"a\b", "a/b"),
        ("absolute_win32_path", r"\\?\d:\b.vhdx", r"./\\?\d:\b.vhdx"),
        ("absolute_win32_path", "/nothing/b.vhdx", "/nothing/b.vhdx"),
    ] {
        let mut builder = Builder::new(MIB, MIB, 512).child(5, "");
        let entries = builder.parent.as_mut().unwrap();
        entries[1] = (key.into(), name.into());
        builder.save(&lab.path("x.vhdx")).unwrap();
        let answer = lab.zebu(&["map", "x.vhdx"]);
        answer.failed_with_one_line(1, name);
        let said = format!("Could not open '{path}': No such file");
        assert!(answer.err.contains(&said), "{answer:?}");
    }
    // Without a name it must not read as zeroes.
    let mut builder = Builder::new(MIB, MIB, 512).child(5, "a");
    builder.parent.as_mut().unwrap().pop();
    builder.save(&lab.path("x.vhdx")).unwrap();
    lab.zebu(&["map", "x.vhdx"])
        .failed_with_one_line(1, "no name");
}

#[test]
fn sectors_of_4_kib() {
    if beyond_qemu("it takes these disks for smaller ones") {
        return;
    }
    let lab = Lab::new();
    let size = 3 * MIB + 4096;
    let mut builder = Builder::new(size, MIB, 4096);
    let mut disk = vec![0; size as usize];
    for block in [0, 2, 3] {
        let bytes: Vec<u8> = (0..MIB).map(|n| (n / 512 + block) as u8 | 1).collect();
        let start = (block * MIB) as usize;
        let length = (size as usize - start).min(MIB as usize);
        disk[start..start + length].copy_from_slice(&bytes[..length]);
        builder.block(block, PRESENT, bytes);
    }
    builder.save(&lab.path("x.vhdx")).unwrap();
    fs::write(lab.path("expected.raw"), &disk).unwrap();
    lab.assert_disk("x.vhdx", "expected.raw", "4 KiB");
    // A child with a part of a block.
    let mut child = Builder::new(size, MIB, 4096).child(builder.id, "x.vhdx");
    child.block(1, PARTIALLY_PRESENT, vec![9; MIB as usize]);
    child.set_present(MIB + 8192, 4096);
    disk[MIB as usize + 8192..][..4096].fill(9);
    child.save(&lab.path("child.vhdx")).unwrap();
    fs::write(lab.path("expected.raw"), &disk).unwrap();
    lab.assert_disk("child.vhdx", "expected.raw", "a child");
}

/// A disk of 64 TiB with blocks of 1 MiB has a table of 512 MiB, which must not be read at once.
#[test]
fn the_largest_disk() {
    if beyond_qemu("it reads the whole table") {
        return;
    }
    let lab = Lab::new();
    let blocks = 64u64 << 20;
    let mut builder = Builder::new(blocks * MIB, MIB, 512);
    for block in [7, blocks / 3, blocks - 1] {
        builder.block(block, PRESENT, vec![block as u8 | 1; MIB as usize]);
    }
    builder.save(&lab.path("x.vhdx")).unwrap();
    let info = lab.zebu(&["info", "x.vhdx"]).ok("info");
    assert!(info.out.contains("virtual size: 64 TiB"), "{info:?}");
    let reads = format!(
        "read -P {} {} 1M\nread -P 0 1M 4k\n",
        (blocks - 1) as u8,
        (blocks - 1) * MIB
    );
    let answer = lab.zebu_io_script(&["-r", "x.vhdx"], &reads).ok("read");
    assert!(!answer.out.contains("failed"), "{answer:?}");
    let mut server = Server::start(&lab, &["-t", "-r", "x.vhdx"]);
    let map = lab.zebu(&["map", "--output=json", "x.vhdx"]).ok("map");
    assert_eq!(map.out.lines().count(), 6, "{map:?}");
    let over_nbd = lab.zebu(&["map", "--output=json", &server.uri("")]);
    assert_eq!(over_nbd.ok("map").out.lines().count(), 6);
    let peak = server.peak_memory();
    assert!(peak < 128 * MIB, "{peak}");
    server.stop();
    lab.zebu(&["check", "x.vhdx"]).ok("check");
}

#[test]
fn servers() {
    if beyond_qemu("servers of zebu") {
        return;
    }
    let lab = Lab::new();
    lab.create("x.vhdx", "block_size=1M", 5 * MIB);
    lab.change("x.vhdx", "write -P 5 1M 1536k\nwrite -P 6 4M 512\n");
    lab.qemu_img(&["convert", "x.vhdx", "-O", "raw", "x.raw"])
        .ok("convert");
    let mut server = Server::start(&lab, &["-r", "x.vhdx"]);
    lab.qemu_img(&["compare", &server.uri(""), "x.raw"])
        .ok("over NBD");
    server.stop();
    let server = serve(&lab, &["-r", "x.vhdx"]);
    let mut disk = Disk::new(&lab, Setup::default());
    let expected = fs::read(lab.path("x.raw")).unwrap();
    for at in [0, MIB - 4096, 2 * MIB, 4 * MIB] {
        let bytes = disk.take(READ, at / 512, 8192).unwrap();
        assert!(bytes == expected[at as usize..][..8192], "{at}");
    }
    drop(server);
}

/// Numbers of headers, tables and metadata: their offsets and widths. Those of `bat` and `metadata`
/// are of an image of QEMU.
fn fields(bat: u64, metadata: u64) -> Vec<(u64, usize)> {
    let mut fields = vec![(0, 8)];
    for header in HEADERS {
        fields.extend(
            [(0, 4), (8, 8), (64, 2), (66, 2), (68, 4), (72, 8)].map(|(at, n)| (header + at, n)),
        );
    }
    let table = REGION_TABLES[0];
    fields.extend([(0, 4), (8, 4)].map(|(at, n)| (table + at, n)));
    for entry in 0..2 {
        let at = table + 16 + entry * 32;
        fields.extend([(0, 4), (16, 8), (24, 4), (28, 4)].map(|(more, n)| (at + more, n)));
    }
    fields.extend([(0, 8), (10, 2)].map(|(at, n)| (metadata + at, n)));
    for entry in 0..5 {
        let at = metadata + 32 + entry * 32;
        fields.extend([(0, 4), (16, 4), (20, 4), (24, 4)].map(|(more, n)| (at + more, n)));
    }
    let items = metadata + METADATA_TABLE;
    fields.extend([(0, 4), (4, 4), (8, 8), (32, 4), (36, 4)].map(|(at, n)| (items + at, n)));
    fields.extend((0..5).map(|entry| (bat + entry * 8, 8)));
    fields
}

/// A value for a number that was `old`.
fn damaged(random: &mut Rng, old: u64) -> u64 {
    match random.below(8) {
        0 => 0,
        1 => u64::MAX,
        2 => 1 << random.below(30),
        3 => random.below(20) * MIB,
        4 => (random.below(20) * MIB) | random.below(8),
        5 => old ^ random.below(8),
        6 => old + MIB,
        _ => old + random.below(3) * 512,
    }
}

#[test]
fn damaged_images_are_refused_as_by_qemu() {
    let lab = Lab::new();
    lab.create("sound.vhdx", "block_size=1M", 5 * MIB);
    lab.change("sound.vhdx", "write -P 3 1M 2M\nwrite -P 4 4M 512\n");
    let sound = fs::read(lab.path("sound.vhdx")).unwrap();
    let bat = lab.bat("sound.vhdx");
    let metadata = lab.u64_le("sound.vhdx", REGION_TABLES[0] + 64);
    let items = metadata + METADATA_TABLE;
    let (mut refused, mut stricter, mut read) = (0, 0, 0);
    let fields = fields(bat, metadata);
    let mut seeds = cases(2 * fields.len() as u64, "damaged images");
    for number in &mut seeds {
        let mut random = Rng::new(number);
        let (offset, width) = &fields[number as usize % fields.len()];
        let mut file = sound.clone();
        let place = *offset as usize..*offset as usize + width;
        let mut old = [0; 8];
        old[..*width].copy_from_slice(&file[place.clone()]);
        let mut value = damaged(&mut random, u64::from_le_bytes(old));
        if *offset == items + 8 {
            // QEMU would read gigabytes of zeroes.
            value %= 64 * MIB;
        }
        file[place].copy_from_slice(&value.to_le_bytes()[..*width]);
        // QEMU reads only the first copy of the table.
        let [first, second] = REGION_TABLES.map(|at| at as usize);
        file.copy_within(first..first + (64 << 10), second);
        if !random.one_in(8) {
            seal_all(&mut file);
        }
        fs::write(lab.path("x.vhdx"), &file).unwrap();
        let what = &format!("case {number}: {value:#x} at {offset:#x}");
        let args = |to| ["convert", "-f", "vhdx", "-O", "raw", "x.vhdx", to];
        let theirs = lab.qemu_img(&args("theirs.raw"));
        let ours = lab.zebu(&args("ours.raw"));
        lab.zebu(&["info", "-f", "vhdx", "x.vhdx"]).orderly(what);
        let check = lab.zebu(&["check", "-f", "vhdx", "x.vhdx"]);
        check.orderly(what);
        let is_empty = || fs::metadata(lab.path("ours.raw")).unwrap().len() == 0;
        match (ours.status, theirs.status) {
            // QEMU expects a large table for a disk without blocks.
            (0, 1) if is_empty() => {}
            // It takes a disk with larger sectors for a smaller one.
            (0, 0) if *offset == items + 32 => {}
            (0, 0) => {
                read += 1;
                lab.assert_same_bytes("ours.raw", "theirs.raw", what);
                let theirs = lab.qemu_img(&["check", "-f", "vhdx", "x.vhdx"]);
                assert!(check.status >= theirs.status, "{what}: {check:?}");
            }
            (_, theirs_status) => {
                ours.failed_with_one_line(1, &format!("{what}: {theirs:?}"));
                refused += u32::from(theirs_status != 0);
                stricter += u32::from(theirs_status == 0);
            }
        }
    }
    println!("{read} read, {refused} refused by both, {stricter} only by zebu");
    let is_enough = read > 20 && refused > 40;
    assert!(is_enough || !zebu_testkit::are_usual(), "{read} {refused}");
}

/// The second copy of a damaged region table is used.
#[test]
fn one_damaged_copy_is_no_damage() {
    if beyond_qemu("it reads the first copy of the region table only") {
        return;
    }
    let lab = Lab::new();
    lab.create("x.vhdx", "block_size=1M", 2 * MIB);
    lab.change("x.vhdx", "write -P 3 512 1M\n");
    lab.qemu_img(&["convert", "x.vhdx", "-O", "raw", "expected.raw"])
        .ok("convert");
    for header in HEADERS {
        fs::copy(lab.path("x.vhdx"), lab.path("y.vhdx")).unwrap();
        lab.patch("y.vhdx", header + 20, &[0xff; 8]);
        lab.patch("y.vhdx", REGION_TABLES[0] + 20, &[0xff; 8]);
        lab.assert_disk("y.vhdx", "expected.raw", "the other copies");
        lab.patch("y.vhdx", REGION_TABLES[1] + 20, &[0xff; 8]);
        lab.zebu(&["info", "y.vhdx"])
            .failed_with_one_line(1, "no region table");
    }
    for header in HEADERS {
        lab.patch("x.vhdx", header + 20, &[0xff; 8]);
    }
    lab.zebu(&["info", "x.vhdx"])
        .failed_with_one_line(1, "no header");
}

/// Each number of a log with one entry. A copy of the image is opened by QEMU for writing, which
/// replays the log.
#[test]
fn damaged_logs_are_refused_as_by_qemu() {
    if beyond_qemu("it opens such images only for writing") {
        return;
    }
    let lab = Lab::new();
    let mut builder = Builder::new(2 * MIB, MIB, 512);
    builder.block(0, PRESENT, vec![1; MIB as usize]);
    builder.block(1, PRESENT, vec![2; MIB as usize]);
    let (bat, end) = (builder.bat(), builder.end());
    let sector = builder.to_vec()[bat as usize..][..LOG_SECTOR as usize].to_vec();
    builder.put(bat, vec![0; LOG_SECTOR as usize]);
    builder.log_id = 9;
    let entry = LogEntry {
        id: 9,
        sequence: 0x1_0000_0007,
        tail: 0,
        flushed: end,
        last: end,
        changes: vec![
            Change::Data { at: bat, sector },
            Change::Zero {
                at: end - MIB,
                length: 8192,
            },
        ],
    };
    builder.put_log(0, &entry);
    let sound = builder.to_vec();
    let length = entry.encode().len();
    let mut fields = vec![
        (0, 4),
        (4, 4),
        (8, 4),
        (12, 4),
        (16, 8),
        (24, 4),
        (32, 8),
        (48, 8),
        (56, 8),
    ];
    for descriptor in [64, 96] {
        fields.extend([(0, 4), (8, 8), (16, 8), (24, 8)].map(|(at, n)| (descriptor + at, n)));
    }
    let mut random = Rng::new(3);
    let (mut refused, mut read) = (0, 0);
    for (number, (offset, width)) in fields.iter().cycle().take(fields.len() * 6).enumerate() {
        let mut file = sound.clone();
        let log = &mut file[MIB as usize..][..length];
        let place = *offset..*offset + *width;
        let mut old = [0; 8];
        old[..*width].copy_from_slice(&log[place.clone()]);
        let mut value = damaged(&mut random, u64::from_le_bytes(old));
        if (*offset, *width) == (104, 8) || *offset == 56 {
            // QEMU would write zeroes for hours, or make the file as long.
            value %= 64 * MIB;
        }
        log[place].copy_from_slice(&value.to_le_bytes()[..*width]);
        if *offset != 4 && !random.one_in(5) {
            seal(log);
        }
        fs::write(lab.path("x.vhdx"), &file).unwrap();
        fs::write(lab.path("replayed.vhdx"), &file).unwrap();
        let what = &format!("case {number}: {value:#x} at {offset} of the log");
        let theirs = lab.qemu_img(&["check", "-f", "vhdx", "-r", "all", "replayed.vhdx"]);
        let convert = |image, to| ["convert", "-f", "vhdx", "-O", "raw", image, to];
        let ours = lab.zebu(&convert("x.vhdx", "ours.raw"));
        if ours.status != 0 {
            ours.failed_with_one_line(1, what);
            refused += 1;
            continue;
        }
        theirs.ok(what);
        // An entry whose tail is elsewhere is no sequence, which QEMU does not look at; a length
        // beyond that of its data is damage.
        let theirs = lab.qemu_img(&convert("replayed.vhdx", "theirs.raw"));
        if theirs.status == 0 && *offset != 12 {
            read += 1;
            lab.assert_same_bytes("ours.raw", "theirs.raw", what);
        }
    }
    println!("{read} read, {refused} refused");
    assert!(read > 20 && refused > 20, "{read} {refused}");
}

/// Blocks past the end of the file must not read as zeroes.
#[test]
fn truncated_data_are_errors() {
    let lab = Lab::new();
    lab.create("x.vhdx", "block_size=1M", 4 * MIB);
    lab.change("x.vhdx", "write -P 9 0 4M\n");
    let file = File::options()
        .write(true)
        .open(lab.path("x.vhdx"))
        .unwrap();
    let length = file.metadata().unwrap().len();
    for missing in [512, MIB, 3 * MIB] {
        file.set_len(length - missing).unwrap();
        let args = ["convert", "x.vhdx", "-O", "raw", "x.raw"];
        let answer = lab.zebu(&args);
        assert_eq!(answer.status, 1, "{answer:?}");
        assert_eq!(lab.qemu_img(&args).status, 1);
        let (ours, theirs) = (
            lab.zebu(&["check", "x.vhdx"]),
            lab.qemu_img(&["check", "x.vhdx"]),
        );
        assert_eq!((ours.out, ours.status), (theirs.out, theirs.status));
    }
    file.set_len(3 * MIB).unwrap();
    lab.zebu(&["info", "x.vhdx"])
        .failed_with_one_line(1, "the metadata are missing");
}

#[test]
fn limits_apply_to_untrusted_images() {
    if beyond_qemu("it has no limits") {
        return;
    }
    let lab = Lab::new();
    lab.create("x.vhdx", "block_size=1M", 2 << 40);
    lab.zebu(&["info", "x.vhdx"]).ok("without limits");
    let answer = lab.zebu(&["info", "--untrusted", "x.vhdx"]);
    answer.failed_with_one_line(1, "a table of 16 MiB");
    assert!(answer.err.contains("'table-size'"), "{answer:?}");
    lab.create("y.vhdx", "", 64 * MIB);
    lab.zebu(&["convert", "--untrusted", "y.vhdx", "y.raw"])
        .ok("a small one");
    let answer = lab.zebu(&["info", "--untrusted=virtual-size=1M", "y.vhdx"]);
    answer.failed_with_one_line(1, "a disk of 64 MiB");
    assert!(answer.err.contains("'virtual-size'"), "{answer:?}");
}

/// Writes of random ranges of a disk, and zeroes.
fn requests(random: &mut Rng, size: u64, unit: u64) -> String {
    let mut script = String::new();
    for _ in 0..2 + random.below(7) {
        let at = random.below(size / unit) * unit;
        let most = [unit, 70_000, 3 * MIB][random.below(3) as usize];
        let length = (1 + random.below(most))
            .next_multiple_of(unit)
            .min(size - at);
        script += &match random.below(6) {
            0 => format!("write -z {at} {length}\n"),
            1 => format!("write -z -u {at} {length}\n"),
            2 => "flush\n".into(),
            _ => format!("write -P {} {at} {length}\n", 1 + random.below(255)),
        };
    }
    script
}

/// Both programs write to one image in turn, of either program, and both read the same. Blocks of all
/// sizes, the last of which is shorter than the others.
#[test]
fn both_programs_write() {
    if beyond_qemu("it would compare QEMU with itself") {
        return;
    }
    let mut random = Rng::new(5);
    for (number, block) in [1, 2, 8, 64, 256].into_iter().enumerate() {
        for subformat in ["dynamic", "fixed"] {
            let lab = Lab::new();
            let block = block * MIB;
            let size = match subformat {
                "fixed" => block.min(8 * MIB) + 512 * (1 + random.below(MIB / 512)),
                _ => block.min(64 * MIB) + 512 * (1 + random.below(block / 2 / 512)),
            };
            let state = ["on", "off"][random.below(2) as usize];
            let options = format!(
                "block_size={block},subformat={subformat},block_state_zero={state},log_size={}M",
                1 + random.below(3)
            );
            let what = &format!("{options}, {size} bytes");
            let length = size.to_string();
            let create = [
                "create", "-q", "-f", "vhdx", "-o", &options, "x.vhdx", &length,
            ];
            match number % 2 {
                0 => lab.qemu_img(&create).ok(what),
                _ => lab.zebu(&create).ok(what),
            };
            lab.zebu(&["create", "-q", "-f", "raw", "mirror.raw", &length])
                .ok(what);
            for turn in 0..if block > 8 * MIB { 2 } else { 4 } {
                let script = requests(&mut random, size, 512);
                let args = ["-d", "unmap", "-f", "vhdx", "x.vhdx"];
                let answer = match turn % 2 {
                    0 => lab.zebu_io_script(&args, &script),
                    _ => lab.qemu_io_script(&args, &script),
                };
                assert!(!answer.ok(what).out.contains("failed"), "{what}: {script}");
                lab.zebu_io_script(&["-f", "raw", "mirror.raw"], &script)
                    .ok(what);
                for args in [
                    &["check", "-q", "x.vhdx"][..],
                    &[
                        "compare",
                        "-q",
                        "-f",
                        "vhdx",
                        "-F",
                        "raw",
                        "x.vhdx",
                        "mirror.raw",
                    ],
                ] {
                    lab.zebu(args).ok(what);
                    lab.qemu_img(args).ok(what);
                }
            }
            lab.assert_same_disk("x.vhdx", what);
        }
    }
}

/// QEMU cannot read them, so the disk is compared with a raw one.
#[test]
fn sectors_of_4_kib_are_written() {
    if beyond_qemu("it takes these disks for smaller ones") {
        return;
    }
    let lab = Lab::new();
    let size = 5 * MIB + 4096;
    let mut builder = Builder::new(size, 2 * MIB, 4096);
    builder.block(1, PRESENT, vec![7; 2 << 20]);
    builder.save(&lab.path("x.vhdx")).unwrap();
    lab.zebu(&["convert", "-O", "raw", "x.vhdx", "mirror.raw"])
        .ok("convert");
    let mut random = Rng::new(6);
    for _ in 0..4 {
        let script = requests(&mut random, size, 4096);
        for (format, image) in [("vhdx", "x.vhdx"), ("raw", "mirror.raw")] {
            lab.zebu_io_script(&["-f", format, image], &script)
                .ok("write");
        }
        lab.assert_disk("x.vhdx", "mirror.raw", &script);
        lab.zebu(&["check", "-q", "x.vhdx"]).ok("check");
    }
}

/// A program that was killed leaves changes in the log: `check -r` of either program carries them out,
/// and so does zebu when it opens the image for writing.
#[test]
fn a_log_is_carried_out() {
    let lab = Lab::new();
    lab.create("x.vhdx", "block_size=1M", 8 * MIB);
    let script = "write -P 5 1M 2M\nflush\nwrite -P 6 4M 64k\nflush\nabort\n";
    lab.zebu_io_script(&["-f", "vhdx", "x.vhdx"], script);
    assert_eq!(lab.qemu_img(&["info", "x.vhdx"]).status, 1, "a log is left");
    for mode in ["leaks", "all"] {
        for output in ["human", "json"] {
            let args = ["check", "-r", mode, "--output", output, "y.vhdx"];
            fs::copy(lab.path("x.vhdx"), lab.path("y.vhdx")).unwrap();
            let theirs = lab.qemu_img(&args);
            fs::copy(lab.path("x.vhdx"), lab.path("y.vhdx")).unwrap();
            let ours = lab.zebu(&args);
            assert_eq!((ours.out, ours.status), (theirs.out, theirs.status));
            // Now there is nothing to repair.
            assert_same_answer(&lab, &args, "a second repair");
        }
    }
    fs::copy(lab.path("x.vhdx"), lab.path("z.vhdx")).unwrap();
    lab.zebu_io(&["-f", "vhdx", "-c", "write -P 6 4M 64k", "z.vhdx"])
        .ok("write");
    for image in ["y.vhdx", "z.vhdx"] {
        let script = "read -P 5 1M 2M\nread -P 6 4M 64k\nread -P 0 3M 1M\n";
        let answer = lab.qemu_io_script(&["-f", "vhdx", image], script);
        assert!(!answer.ok(image).out.contains("failed"), "{image}");
        lab.qemu_img(&["check", "-q", image]).ok(image);
    }
}

#[test]
fn what_the_format_cannot_do_is_refused_as_by_qemu() {
    let lab = Lab::new();
    lab.create("x.vhdx", "", 4 * MIB);
    let before = fs::read(lab.path("x.vhdx")).unwrap();
    for args in [
        &["resize", "x.vhdx", "8M"][..],
        &["resize", "--shrink", "x.vhdx", "1M"],
    ] {
        assert_same_answer(&lab, args, "of a VHDX");
    }
    lab.zebu(&["snapshot", "-c", "a", "x.vhdx"])
        .failed_with_one_line(1, "a snapshot");
    assert!(before == fs::read(lab.path("x.vhdx")).unwrap());
}

/// Differencing images, and those in which a write could destroy more than its range.
#[test]
fn what_is_not_written_stays_as_it_is() {
    if beyond_qemu("it writes to damaged images") {
        return;
    }
    let lab = Lab::new();
    let mut builder = Builder::new(4 * MIB, MIB, 512);
    let place = builder.block(0, PRESENT, vec![1; MIB as usize]);
    builder.save(&lab.path("sound.vhdx")).unwrap();
    let entry = builder.entry(1);
    builder.save(&lab.path("twice.vhdx")).unwrap();
    lab.patch("twice.vhdx", entry, &(place | PRESENT).to_le_bytes());
    builder.save(&lab.path("tables.vhdx")).unwrap();
    lab.patch("tables.vhdx", entry, &(MIB | PRESENT).to_le_bytes());
    let child = Builder::new(4 * MIB, MIB, 512).child(builder.id, "sound.vhdx");
    child.save(&lab.path("child.vhdx")).unwrap();
    for (name, why) in [
        ("child.vhdx", "VHDX images with a parent are not written"),
        ("twice.vhdx", "overlaps that of entry"),
        ("tables.vhdx", "overlaps metadata"),
    ] {
        let before = fs::read(lab.path(name)).unwrap();
        let answer = lab.zebu_io(&["-f", "vhdx", "-c", "write 0 512", name]);
        assert_ne!(answer.status, 0, "{name}");
        assert!(answer.err.contains(why), "{name}: {answer:?}");
        assert!(fs::read(lab.path(name)).unwrap() == before, "{name}");
    }
    lab.zebu_io(&["-f", "vhdx", "-c", "write 0 512", "sound.vhdx"])
        .ok("a sound one");
}
