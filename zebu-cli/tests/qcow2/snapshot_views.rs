//! Internal snapshots are read as the disk was: with its size, its data and its VM state, whatever
//! became of the disk. A command that would change what they show, or give bitmaps to content that
//! they do not belong to, refuses.

use std::fs;
use std::path::Path;

use zebu::block::{Device, OpenOptions};
use zebu::names::Source;
use zebu::qcow2::SnapshotName;
use zebu::storage::{Buffer, Queue, QueueOptions};

use crate::common::server::Server;
use crate::common::{Lab, beyond_qemu};

const MIB: usize = 1 << 20;

/// The content of snapshot `s`, by `convert`.
#[track_caller]
fn snapshot(lab: &Lab, image: &str) -> Vec<u8> {
    lab.zebu(&["convert", "-l", "s", "-O", "raw", image, "s.raw"])
        .ok(image);
    fs::read(lab.path("s.raw")).expect("s.raw")
}

/// The content of the disk.
#[track_caller]
fn disk(lab: &Lab, image: &str) -> Vec<u8> {
    lab.zebu(&["convert", "-O", "raw", image, "disk.raw"])
        .ok(image);
    fs::read(lab.path("disk.raw")).expect("disk.raw")
}

#[track_caller]
fn run(lab: &Lab, lines: &str) {
    for line in lines.split(';').map(str::trim) {
        let words: Vec<&str> = line.split_whitespace().collect();
        lab.zebu(&words).ok(line);
    }
}

fn open_snapshot(queue: &Queue, path: &Path) -> Device {
    let options = OpenOptions::default().snapshot(Some(SnapshotName::from("s")));
    Device::open(queue, &Source::Name(path.into()), &options).expect("open")
}

#[test]
fn a_snapshot_has_a_size_of_its_own() {
    let lab = Lab::new();
    if beyond_qemu("it reads snapshots with the size of the disk") {
        return;
    }
    // Shrunk; grown; grown over a longer backing file; a size that is no multiple of a cluster.
    lab.make("raw base.raw 4194304");
    for (create, old, new) in [
        ("create -q -f qcow2 x 2M", 2 * MIB, "1M"),
        ("create -q -f qcow2 x 1M", MIB, "16M"),
        ("create -q -f qcow2 -b base.raw -F raw x 1M", MIB, "4M"),
        (
            "create -q -f qcow2 -b base.raw -F raw x 1000448",
            1_000_448,
            "4M",
        ),
        (
            "create -q -f qcow2 -b base.raw -F raw x 5M",
            5 * MIB,
            "1000448",
        ),
    ] {
        let _ = fs::remove_file(lab.path("x"));
        run(&lab, create);
        lab.zebu_io(&["-c", "write -P 7 64k 64k", "x"]).ok("write");
        let before = disk(&lab, "x");
        run(&lab, "snapshot -c s x");
        run(&lab, &format!("resize -q --shrink x {new}"));
        assert_eq!(before.len(), old);
        assert!(snapshot(&lab, "x") == before, "{create}, {new}");
        let measured = lab.zebu(&["measure", "-l", "s", "-O", "raw", "x"]);
        let measured = measured.ok("measure").out;
        assert!(
            measured.contains(&format!("required size: {old}\n")),
            "{measured}"
        );
        let server = Server::start(&lab, &["-l", "s", "x"]);
        let uri = server.uri("");
        lab.zebu(&["convert", "-f", "raw", "-O", "raw", &uri, "nbd.raw"])
            .ok("nbd");
        drop(server);
        assert!(
            fs::read(lab.path("nbd.raw")).unwrap() == before,
            "{create}, {new}"
        );
        run(&lab, "snapshot -a s x; check -q x");
        assert!(disk(&lab, "x") == before, "{create}, {new}");
    }
}

/// An old image has no sizes in its snapshots: they have that of the disk, until it changes.
#[test]
fn a_snapshot_without_a_size_keeps_that_of_the_disk() {
    let lab = Lab::new();
    if beyond_qemu("it has only the size of the disk") {
        return;
    }
    for new in ["1M", "3M"] {
        let _ = fs::remove_file(lab.path("x"));
        run(&lab, "create -q -f qcow2 x 2M; snapshot -c s x");
        let table = lab.u64_at("x", 64);
        let names = lab.u32_at("x", table + 12).to_be_bytes();
        let (id, name) = (names[1], names[3]);
        assert_eq!((id, name, lab.u32_at("x", table + 36)), (1, 1, 24));
        // Without the extra data, the names follow at once.
        lab.patch("x", table + 36, &[0, 0, 0, 0, b'1', b's', 0, 0, 0, 0]);
        assert_eq!(snapshot(&lab, "x").len(), 2 * MIB);
        run(&lab, &format!("resize -q --shrink x {new}"));
        assert_eq!(snapshot(&lab, "x").len(), 2 * MIB);
    }
}

#[test]
fn vm_state_belongs_to_its_snapshot_only() {
    let lab = Lab::new();
    if beyond_qemu("it shows VM state in a larger disk") {
        return;
    }
    let queue = Queue::new(QueueOptions::default()).expect("queue");
    for (grown_by_qemu, taken_back) in [(false, false), (false, true), (true, true)] {
        let _ = fs::remove_file(lab.path("x"));
        run(&lab, "create -q -f qcow2 -o cluster_size=4096 x 1M");
        let write = ["-c", "write -P 1 0 1M", "-c", "write -b -P 238 0 64k", "x"];
        lab.zebu_io(&write).ok("write");
        run(&lab, "snapshot -c s x");
        if taken_back {
            run(&lab, "snapshot -a s x; check -q x");
        }
        match grown_by_qemu {
            false => run(&lab, "resize -q x 16M"),
            true => drop(lab.qemu_img(&["resize", "-q", "x", "16M"]).ok("resize")),
        }
        let grown = disk(&lab, "x");
        assert!(grown[..MIB].iter().all(|b| *b == 1));
        assert!(grown[MIB..].iter().all(|b| *b == 0), "VM state in the disk");
        assert_eq!(snapshot(&lab, "x"), [1; MIB]);
        let view = open_snapshot(&queue, &lab.path("x"));
        let length = 64 << 10;
        let read = view.read_vm_state(&queue, 0, Buffer::new(length), length);
        let (buffer, read) = queue.block_on(read);
        read.expect("VM state");
        assert!(buffer[..length].iter().all(|b| *b == 238));
    }
}

#[test]
fn another_backing_file_is_refused_if_a_snapshot_shows_it() {
    let lab = Lab::new();
    if beyond_qemu("its rebase and commit change snapshots") {
        return;
    }
    lab.make("raw keep.raw 1048576; raw other.raw 900000");
    let make = || {
        fs::copy(lab.path("keep.raw"), lab.path("base.raw")).expect("copy");
        for name in ["x", "mid"] {
            let _ = fs::remove_file(lab.path(name));
        }
        run(
            &lab,
            "create -q -f qcow2 -b base.raw -F raw mid 1M;
             create -q -f qcow2 -b base.raw -F raw x 1M; snapshot -c s x",
        );
        lab.zebu_io(&["-c", "write -P 2 128k 64k", "x"]).ok("write");
        (snapshot(&lab, "x"), disk(&lab, "x"))
    };
    for args in [
        "rebase -b other.raw -F raw",
        "rebase -b mid -F qcow2",
        "rebase -b ",
        "commit",
        "commit -d",
        "commit -b base.raw",
    ] {
        let (before, whole) = make();
        let kept = [
            fs::read(lab.path("x")).unwrap(),
            fs::read(lab.path("base.raw")).unwrap(),
        ];
        let mut args: Vec<&str> = args.split(' ').collect();
        args.push("x");
        let refused = lab.zebu(&args);
        refused.failed_with_one_line(1, "refused");
        for text in [
            "Snapshot 's' (ID 1) shows data of the backing file",
            "convert -l",
            "snapshot -d",
        ] {
            assert!(refused.err.contains(text), "{refused:?}");
        }
        let now = [
            fs::read(lab.path("x")).unwrap(),
            fs::read(lab.path("base.raw")).unwrap(),
        ];
        assert!(
            now == kept,
            "{args:?} was refused, and has changed something"
        );
        assert!(snapshot(&lab, "x") == before, "{args:?}");
        args.insert(1, "--change-snapshots");
        lab.zebu(&args).ok("--change-snapshots");
        assert!(disk(&lab, "x") == whole, "{args:?}");
        make();
        run(&lab, "snapshot -d s x");
        args.remove(1);
        lab.zebu(&args).ok("without snapshots");
        assert!(disk(&lab, "x") == whole, "{args:?}");
    }
    // An image between that is committed, too, has the snapshot.
    let (before, _) = make();
    run(&lab, "create -q -f qcow2 -b x -F qcow2 top 1M");
    lab.zebu_io(&["-c", "write -P 3 0 64k", "top"]).ok("write");
    let refused = lab.zebu(&["commit", "-b", "base.raw", "top"]);
    assert_eq!(refused.status, 1, "{refused:?}");
    assert!(snapshot(&lab, "x") == before);
    // That of the image which is written keeps its data.
    run(&lab, "commit -q top");
    assert!(snapshot(&lab, "x") == before);
}

#[test]
fn another_backing_file_is_possible_if_no_snapshot_shows_it() {
    let lab = Lab::new();
    lab.make("raw base.raw 1048576; raw other.raw 900000");
    // The snapshot has all of its data; the same backing file by another name; only the name.
    let full = ["-c", "write -P 1 0 1M", "x"];
    for (write, args) in [
        (true, "rebase -b other.raw -F raw x"),
        (true, "rebase -b  x"),
        (true, "commit x"),
        (false, "rebase -b ./base.raw -F raw x"),
        (false, "rebase -u -b base.raw -F raw x"),
    ] {
        let _ = fs::remove_file(lab.path("x"));
        run(&lab, "create -q -f qcow2 -b base.raw -F raw x 1M");
        if write {
            lab.zebu_io(&full).ok("write");
        }
        run(&lab, "snapshot -c s x");
        let before = snapshot(&lab, "x");
        lab.zebu_io(&["-c", "write -P 2 128k 64k", "x"]).ok("write");
        let words: Vec<&str> = args.split(' ').collect();
        lab.zebu(&words).ok(args);
        assert!(snapshot(&lab, "x") == before, "{args}");
    }
}

#[test]
fn bitmaps_of_the_disk_are_not_those_of_a_snapshot() {
    let lab = Lab::new();
    if beyond_qemu("it passes bitmaps on") {
        return;
    }
    run(
        &lab,
        "create -q -f qcow2 x 1M; snapshot -c s x; bitmap --add x b",
    );
    let convert = ["convert", "-l", "s", "--bitmaps", "-O", "qcow2", "x", "y"];
    let refused = lab.zebu(&convert);
    refused.failed_with_one_line(1, "convert");
    assert!(refused.err.contains("leave out --bitmaps"), "{refused:?}");
    assert!(!lab.path("y").exists());
    let socket = lab.path("socket");
    let socket = socket.to_str().expect("UTF-8");
    let refused = lab.zebu(&["nbd", "-k", socket, "-l", "s", "-B", "b", "x"]);
    refused.failed_with_one_line(1, "nbd");
    assert!(refused.err.contains("leave out -B"), "{refused:?}");
    let queue = Queue::new(QueueOptions::default()).expect("queue");
    let view = open_snapshot(&queue, &lab.path("x"));
    for refused in [
        queue.block_on(view.bitmap(&queue, "b")),
        queue.block_on(view.live_bitmap(&queue, "b")),
    ] {
        let text = refused.expect_err("refused").to_string();
        assert!(text.contains("active disk, not in a snapshot"), "{text}");
    }
}

/// The target has zeroes where the source could not be read: for a backup, that is a change.
#[test]
fn salvaged_ranges_are_dirty() {
    let lab = Lab::new();
    if beyond_qemu("it does not make them dirty") {
        return;
    }
    lab.make("img convert -c -O qcow2 text x");
    run(
        &lab,
        "bitmap --add -g 65536 x on; bitmap --add --disable -g 4096 x off",
    );
    let l2 = lab.u64_at("x", lab.u64_at("x", 40)) & 0x00ff_ffff_ffff_fe00;
    let second = lab.u64_at("x", l2 + 8) & ((1 << 54) - 1);
    lab.patch("x", second, &[0xff; 64]);
    run(&lab, "convert -q --salvage --bitmaps -O qcow2 x y");
    let queue = Queue::new(QueueOptions::default()).expect("queue");
    let name = Source::Name(lab.path("y").into());
    let device = Device::open(&queue, &name, &OpenOptions::default()).expect("open");
    for bitmap in ["on", "off"] {
        let bits = queue.block_on(device.bitmap(&queue, bitmap)).expect(bitmap);
        let ranges: Vec<_> = bits.ranges().collect();
        assert_eq!(ranges.len(), 1, "{bitmap}: {ranges:?}");
        let end = device.size().min(131_072);
        assert_eq!(ranges[0], 65536..end, "{bitmap}");
    }
}

/// Whatever changes an image clears the autoclear bits that it does not know.
#[test]
fn unknown_autoclear_bits_are_cleared() {
    let lab = Lab::new();
    lab.make("raw base 1048576");
    for args in [
        "amend -o lazy_refcounts=on x",
        "amend -o refcount_bits=64 x",
        "amend -o refcount_bits=8 x",
        "amend -o size=2M x",
        "amend -o compat=0.10 x",
        "rebase -u -b base -F raw x",
        "rebase -b base -F raw x",
        "resize -q x 2M",
        "resize -q --shrink x 512k",
        "snapshot -c t x",
        "snapshot -a s x",
        "snapshot -d s x",
        "bitmap --add x b",
        "check -q -r all x",
        "check -q -r leaks x",
        "convert -n -O qcow2 base x",
        "io -c write\u{a0}0\u{a0}64k x",
        "io -c discard\u{a0}0\u{a0}64k x",
    ] {
        let _ = fs::remove_file(lab.path("x"));
        run(&lab, "create -q -f qcow2 x 1M; snapshot -c s x");
        if args.contains("size=2M") || args.contains("0.10") || args.contains("rebase") {
            run(&lab, "snapshot -d s x");
        }
        lab.patch("x", 88, &[0x80, 0, 0, 0, 0, 0, 0, 0x20]);
        let words: Vec<String> = args.split(' ').map(|w| w.replace('\u{a0}', " ")).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        lab.zebu(&words).ok(args);
        if lab.u32_at("x", 4) == 2 {
            continue;
        }
        let bits = lab.u64_at("x", 88);
        assert_eq!(bits & !1, 0, "{args}: {bits:#x}");
    }
    // Those of a backing file that a commit writes to, and of the image that it empties.
    run(
        &lab,
        "create -q -f qcow2 below 1M; create -q -f qcow2 -b below -F qcow2 above 1M",
    );
    lab.zebu_io(&["-c", "write 0 64k", "above"]).ok("write");
    for name in ["below", "above"] {
        lab.patch(name, 88, &[0x80, 0, 0, 0, 0, 0, 0, 0x20]);
    }
    run(&lab, "commit -q above");
    for name in ["below", "above"] {
        assert_eq!(lab.u64_at(name, 88), 0, "{name}");
    }
}

/// A size that is damaged is not believed.
#[test]
fn a_size_that_the_table_cannot_map_is_refused() {
    let lab = Lab::new();
    if beyond_qemu("it has only the size of the disk") {
        return;
    }
    for size in [1u64 << 62, u64::MAX, 1 << 30] {
        let _ = fs::remove_file(lab.path("x"));
        run(&lab, "create -q -f qcow2 x 2M; snapshot -c s x");
        let table = lab.u64_at("x", 64);
        lab.patch("x", table + 48, &size.to_be_bytes());
        let refused = lab.zebu(&["convert", "-l", "s", "-O", "raw", "x", "s.raw"]);
        refused.failed_with_one_line(1, "a damaged size");
        assert!(refused.err.contains("L1 table is too small"), "{refused:?}");
        let refused = lab.zebu(&["--untrusted", "info", "x"]);
        refused.ok("info");
        let (before, whole) = (fs::read(lab.path("x")).unwrap(), disk(&lab, "x"));
        let refused = lab.zebu(&["snapshot", "-a", "s", "x"]);
        refused.failed_with_one_line(1, "snapshot -a");
        assert!(refused.err.contains("L1 table is too small"), "{refused:?}");
        assert!(fs::read(lab.path("x")).unwrap() == before, "{size}");
        let socket = lab.path("socket").display().to_string();
        for command in [
            "measure -l s x",
            &format!("nbd -l s -k {socket} x"),
            &format!("vhost-user-blk -l s --socket-path {socket} x"),
        ] {
            let words: Vec<&str> = command.split(' ').collect();
            let refused = lab.zebu(&words);
            refused.failed_with_one_line(1, command);
            assert!(refused.err.contains("L1 table is too small"), "{refused:?}");
        }
        // What an open device shows is what it did before.
        let queue = Queue::new(QueueOptions::default()).expect("queue");
        let name = Source::Name(lab.path("x").into());
        let mut device = Device::open(&queue, &name, &OpenOptions::default()).expect("open");
        let shown = queue.block_on(device.show_snapshot(&queue, &SnapshotName::from("s")));
        assert!(shown.is_err() && device.top().shown_snapshot().is_none());
        let mut bytes = vec![1; 2 * MIB];
        device.read_blocking(&queue, 0, &mut bytes).expect("read");
        assert!(bytes == whole);
        drop(device);
        run(&lab, "snapshot -c t x; snapshot -d t x");
    }
}

/// One after the other in a device; each is what it was, also where the image records no size.
#[test]
fn a_device_shows_one_snapshot_after_the_other() {
    let lab = Lab::new();
    run(
        &lab,
        "create -q -f qcow2 x 1M; snapshot -c a x; resize -q x 2M; snapshot -c b x",
    );
    lab.zebu_io(&["-c", "write -P 5 0 64k", "x"]).ok("write");
    // The second entry gets no extra data.
    let second = lab.u64_at("x", 64) + 72;
    lab.patch("x", second + 36, &[0, 0, 0, 0, b'2', b'b', 0, 0, 0, 0]);
    let queue = Queue::new(QueueOptions::default()).expect("queue");
    let name = Source::Name(lab.path("x").into());
    let mut device = Device::open(&queue, &name, &OpenOptions::default()).expect("open");
    let mut sector = [0; 512];
    device.read_blocking(&queue, 0, &mut sector).expect("read");
    assert_eq!(sector, [5; 512]);
    for (shown, size) in [("b", 2 * MIB), ("a", MIB), ("b", 2 * MIB), ("a", MIB)] {
        let snapshot = SnapshotName::from(shown);
        let done = queue.block_on(device.show_snapshot(&queue, &snapshot));
        done.expect(shown);
        assert_eq!(device.size(), size as u64, "{shown}");
        device.read_blocking(&queue, 0, &mut sector).expect("read");
        assert_eq!(sector, [0; 512]);
        let snapshot = device.top().shown_snapshot().expect("a snapshot");
        assert_eq!(snapshot.name_text(), shown.as_bytes());
    }
    drop(device);
    let writable = OpenOptions::default().write(true);
    let mut device = Device::open(&queue, &name, &writable).expect("open");
    let shown = queue.block_on(device.show_snapshot(&queue, &SnapshotName::from("a")));
    let text = shown.expect_err("it is written").to_string();
    assert!(text.contains("read-only"), "{text}");
}

/// Where there are no snapshots, none is shown, and not the present disk in its place.
#[test]
fn a_format_without_snapshots_shows_none() {
    let lab = Lab::new();
    fs::write(lab.path("d.raw"), [7; MIB]).expect("d.raw");
    run(
        &lab,
        "convert -f raw -O qcow2 d.raw d.qcow2; snapshot -c s d.qcow2; convert -f raw -O vmdk d.raw d.vmdk; \
         ova -f raw --name vm --output o.ova d.raw",
    );
    let refused = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let answer = lab.zebu(&words);
        assert_eq!(answer.status, 1, "{line}: {answer:?}");
        assert!(answer.err.contains("snapshots"), "{line}: {answer:?}");
    };
    let within = "driver=raw,file.driver=qcow2,file.file.filename=d.qcow2";
    for image in ["-f raw d.raw", "d.vmdk", &format!("--image-opts {within}")] {
        refused(&format!("convert -O raw -l s {image} out"));
        refused(&format!("measure -l s {image}"));
        refused(&format!("nbd -l s -k {} {image}", lab.path("n").display()));
        let socket = lab.path("v").display().to_string();
        refused(&format!(
            "vhost-user-blk -l s --socket-path {socket} {image}"
        ));
    }
    refused(&format!(
        "nbd -l s -k {} --export a=d.qcow2 --export b=d.vmdk",
        lab.path("n").display()
    ));
    refused("convert -O raw -l s --disk 1 o.ova out");
    assert!(!lab.path("out").exists());
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let options = OpenOptions::default().snapshot(Some(SnapshotName::from(&b"s"[..])));
    let source = Source::Name(lab.path("d.vmdk").into());
    assert!(Device::open(&queue, &source, &options).is_err());
}
