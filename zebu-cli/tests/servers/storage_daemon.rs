//! Guards against bitmaps that lack what a running machine wrote, or what zebu wrote before it ran.
//! The machine is qemu-storage-daemon: it has the image open as QEMU has, and clients write to it.

use std::ops::Range;

use zebu::{BitmapInfo, Device, DirtyBits, OpenOptions, Queue, names::Source};

use crate::common::other_server::Other;
use crate::common::rng::Rng;
use crate::common::server::have;
use crate::common::{Lab, beyond_qemu, cases, peer};

const SIZE: u64 = 8 << 20;

/// Kinds of images that may have bitmaps.
const KINDS: [&str; 6] = [
    "create a.q 8M",
    "create -o cluster_size=4k a.q 8M",
    "create -o extended_l2=on,cluster_size=16k a.q 8M",
    "create -o data_file=data.raw a.q 8M",
    "create -o data_file=data.raw,data_file_raw=on a.q 8M",
    "raw base.raw 4194304; create -b base.raw -F raw a.q 8M",
];

/// Name, granularity, and whether it is enabled.
const BITMAPS: [(&str, &str, bool); 3] = [
    ("coarse", "64k", true),
    ("fine", "512", true),
    ("off", "4k", false),
];

/// An image, and what was written to it since its bitmaps were added.
struct Disk {
    lab: Lab,
    written: Vec<Range<u64>>,
}

/// A bitmap of the image; no bits if it is inconsistent.
type Found = (BitmapInfo, Option<DirtyBits>);

impl Disk {
    fn new(kind: &str) -> Disk {
        let lab = Lab::new();
        // A relative name would be one in the folder of this process.
        let data = lab.path("data.raw");
        lab.make(&kind.replace("data.raw", data.to_str().expect("UTF-8")));
        let disk = Disk {
            lab,
            written: Vec::new(),
        };
        disk.add_bitmaps();
        disk
    }

    fn add_bitmaps(&self) {
        for (name, granularity, enabled) in BITMAPS {
            let enable = if enabled { "--enable" } else { "--disable" };
            self.lab
                .zebu(&["bitmap", "--add", "-g", granularity, enable, "a.q", name])
                .ok("add");
        }
    }

    /// Writes to the image, or to its export.
    fn write(&mut self, random: &mut Rng, uri: Option<&str>) {
        let mut commands = Vec::new();
        for _ in 0..1 + random.below(12) {
            let at = random.below(SIZE / 512) * 512;
            let length = (512 + random.below(200) * 512).min(SIZE - at);
            commands.push(match random.below(6) {
                0 => format!("aio_write -q -z {at} {length}"),
                1 => format!("aio_write -q -z -u {at} {length}"),
                2 => format!("discard -q {at} {length}"),
                n => format!("aio_write -q -P {} {at} {length}", n + random.below(250)),
            });
            // A discard is a hint, and need not change all of its range.
            if !commands[commands.len() - 1].starts_with("discard") {
                self.written.push(at..at + length);
            }
        }
        let mut args = vec!["-d", "unmap"];
        for command in &commands {
            args.extend(["-c", command]);
        }
        args.extend(["-c", "aio_flush"]);
        match uri {
            None => self.lab.zebu_io(&[&args[..], &["a.q"]].concat()),
            Some(uri) if random.below(2) == 0 => {
                self.lab.zebu_io(&[&args[..], &["-f", "raw", uri]].concat())
            }
            Some(uri) => self.lab.qemu_io(&[&args[..], &["-f", "raw", uri]].concat()),
        }
        .ok("write");
    }

    /// The bitmaps as zebu reads them.
    fn bitmaps(&self) -> Vec<Found> {
        let queue = Queue::new(Default::default()).unwrap();
        let source = Source::Name(self.lab.path("a.q").into());
        let device = Device::open(&queue, &source, &OpenOptions::default()).unwrap();
        let list = queue.block_on(device.bitmaps(&queue)).unwrap();
        let read = |info: BitmapInfo| {
            let bits = queue.block_on(device.bitmap(&queue, &info.name));
            (info, bits.ok())
        };
        list.into_iter().map(read).collect()
    }

    /// Fails unless the bitmaps are consistent, and the enabled ones have what was written.
    #[track_caller]
    fn compare(&self, what: &str) {
        let found = self.bitmaps();
        assert_eq!(found.len(), BITMAPS.len(), "{what}");
        for ((info, bits), (name, _, enabled)) in found.iter().zip(BITMAPS) {
            assert_eq!(info.name, name.as_bytes(), "{what}");
            assert_eq!(info.enabled, enabled, "{what}: {name}");
            let bits = bits.as_ref().unwrap_or_else(|| panic!("{what}: {name}"));
            if !enabled {
                assert_eq!(bits.ranges().count(), 0, "{what}: {name}");
                continue;
            }
            for range in &self.written {
                let run = bits.run(range.start, range.end);
                assert_eq!(run, (true, range.end), "{what}: {name}: {range:?}");
            }
        }
    }

    /// Fails unless the daemon tells of the same as dirty.
    #[track_caller]
    fn compare_exports(&self, found: &[Found], daemon: &Other, what: &str) {
        let queue = Queue::new(Default::default()).unwrap();
        let source = Source::Name(daemon.uri("").into());
        let device = Device::open(&queue, &source, &OpenOptions::default()).unwrap();
        for (info, bits) in found {
            let name = std::str::from_utf8(&info.name).unwrap();
            let context = format!("qemu:dirty-bitmap:{name}");
            let theirs = queue.block_on(device.remote_bitmap(&queue, &context));
            let theirs: Vec<_> = theirs.unwrap().ranges().collect();
            let ours: Vec<_> = bits.as_ref().unwrap().ranges().collect();
            assert_eq!(ours, theirs, "{what}: {name}");
        }
    }
}

/// Whether the tests can run.
fn ready() -> bool {
    let daemon = peer().storage_daemon();
    have(daemon.to_str().expect("UTF-8")) && !beyond_qemu("a library that reads bitmaps")
}

#[test]
fn bitmaps_are_kept_in_turn_with_a_running_machine() {
    if !ready() {
        return;
    }
    let mut kills = 0;
    for seed in cases(KINDS.len() as u64, "images of a running machine") {
        let kind = KINDS[(seed % KINDS.len() as u64) as usize];
        let random = &mut Rng::new(seed);
        let mut disk = Disk::new(kind);
        for round in 0..4 {
            let what = format!("seed {seed}, round {round}, {kind}");
            if random.below(4) > 0 {
                disk.write(random, None);
            }
            disk.compare(&format!("{what}, before"));
            let before = disk.bitmaps();
            let mut names = BITMAPS.map(|bitmap| bitmap.0).to_vec();
            if random.below(3) == 0 {
                // Bitmaps that are not exported are kept all the same.
                names.truncate(1);
            }
            let mut daemon = Other::storage_daemon(&disk.lab, "d", "a.q", &names);
            disk.compare_exports(&before[..names.len()], &daemon, &what);
            for _ in 0..random.below(4) {
                disk.write(random, Some(&daemon.uri("")));
            }
            if random.below(4) == 0 {
                kills += 1;
                daemon.kill();
                after_a_kill(&mut disk, &what);
                continue;
            }
            daemon.stop();
            disk.compare(&what);
        }
        disk.lab.qemu_img(&["check", "-q", "a.q"]).ok(kind);
        disk.lab.zebu(&["check", "-q", "a.q"]).ok(kind);
    }
    println!("{kills} kills");
}

/// The daemon was killed: no bitmap that it had open is taken for right, whoever writes, until it is
/// removed.
fn after_a_kill(disk: &mut Disk, what: &str) {
    let lost = |disk: &Disk| {
        let found = disk.bitmaps();
        assert_eq!(found.len(), BITMAPS.len(), "{what}");
        for (info, bits) in found {
            assert_eq!(info.inconsistent, bits.is_none(), "{what}: {info:?}");
            // Those that do not record may be as they were.
            assert!(info.inconsistent || !info.enabled, "{what}: {info:?}");
        }
    };
    lost(disk);
    let info = disk.lab.zebu(&["info", "--output=json", "a.q"]).ok(what);
    assert!(info.out.contains("\"in-use\""), "{what}: {info:?}");
    let socket = disk.lab.path("n.sock");
    let socket = socket.to_str().expect("UTF-8");
    for args in [
        &["nbd", "-r", "-k", socket, "-B", "fine", "a.q"][..],
        &["bitmap", "--clear", "a.q", "fine"],
        &["bitmap", "--enable", "a.q", "fine"],
        &["bitmap", "--merge", "fine", "a.q", "coarse"],
    ] {
        let refused = disk.lab.zebu(args);
        assert_eq!(refused.status, 1, "{what}: {refused:?}");
        assert!(refused.err.contains("inconsistent"), "{what}: {refused:?}");
    }
    // The disk is written and checked as before.
    disk.write(&mut Rng::new(7), None);
    lost(disk);
    disk.lab.zebu(&["check", "-q", "-r", "all", "a.q"]).ok(what);
    lost(disk);
    for (name, ..) in BITMAPS {
        disk.lab.zebu(&["bitmap", "--remove", "a.q", name]).ok(what);
    }
    disk.add_bitmaps();
    disk.written.clear();
    disk.compare(what);
}
