//! The formats that are only read: VHD, qcow version 1, QED, Parallels, DMG, cloop, Bochs. Images
//! that QEMU made, or that are built here from the format's description, must be read and reported
//! as by QEMU; damaged ones must be refused where it refuses.
//!

mod built;
mod parallels;
mod qcow;
mod qed;
mod vpc;

use zebu_testkit::library::small_images as images;
use zebu_testkit::program::{self as common};

use std::fs;

use common::server::{Server, client};
use common::vhost::{Disk, READ, serve};
use common::{Answer, Lab, Rng, cases, compare_answers};
use zebu_vhost::front_end::Setup;

/// Runs `test` for each generated image.
fn for_each_seed(mut test: impl FnMut(&Lab, &mut Rng, &str)) {
    for seed in cases(1, "images") {
        test(&Lab::new(), &mut Rng::new(seed), &format!("seed {seed}"));
    }
}

/// Each field `times` times, and the seed of each case.
fn for_each_field<T>(fields: &[T], times: usize) -> impl Iterator<Item = (u64, &T)> {
    let seeds = cases((fields.len() * times) as u64, "damaged images").from(0);
    seeds.map(|seed| (seed, &fields[seed as usize % fields.len()]))
}

/// An image in a lab, and how it is named to the programs.
struct Subject<'a> {
    lab: &'a Lab,
    name: &'a str,
    format: &'a str,
    /// Whether the format is given by `-f`.
    given: bool,
}

impl<'a> Subject<'a> {
    fn new(lab: &'a Lab, name: &'a str, format: &'a str) -> Self {
        Subject {
            lab,
            name,
            format,
            given: false,
        }
    }

    fn given(self) -> Self {
        Subject {
            given: true,
            ..self
        }
    }

    /// The arguments of a command, to which the format is added.
    fn args<'b>(&'b self, command: &[&'b str]) -> Vec<&'b str> {
        let mut args = command.to_vec();
        // This command takes no format.
        if self.given && command[0] != "snapshot" {
            args.splice(1..1, ["-f", self.format]);
        }
        args
    }

    /// Both programs must give the same answers to commands that look at the image.
    #[track_caller]
    fn same_reports(&self, commands: &[&[&str]], what: &str) {
        self.lab.sync_files();
        for command in commands {
            let mut args = self.args(command);
            args.push(self.name);
            let (ours, mut theirs) = (self.lab.zebu(&args), self.lab.qemu_img(&args));
            // Of a part of QEMU that is a package of its own.
            let lines = theirs.err.split_inclusive('\n');
            theirs.err = lines
                .filter(|line| !line.starts_with("qemu: module"))
                .collect();
            compare_answers(&ours, &theirs, &args, what);
        }
    }

    /// Both programs must read the same bytes. Leaves them in `theirs.raw`, if they can be read.
    #[track_caller]
    fn same_bytes(&self, what: &str) {
        let convert = self.args(&["convert", "-O", "raw", self.name, "theirs.raw"]);
        let theirs = self.lab.qemu_img(&convert);
        if theirs.status == 0 {
            return self.reads_as("theirs.raw", what);
        }
        // Exchanged entries may be damage.
        let convert = self.args(&["convert", "-O", "raw", self.name, "ours.raw"]);
        compare_answers(&self.lab.zebu(&convert), &theirs, &convert, what);
    }

    /// The content must be that of this raw file, however it is read.
    #[track_caller]
    fn reads_as(&self, raw: &str, what: &str) {
        let (lab, name) = (self.lab, self.name);
        let convert = self.args(&["convert", "-O", "raw", name, "ours.raw"]);
        lab.zebu(&convert).ok(what);
        lab.assert_same_bytes("ours.raw", raw, what);
        let convert = self.args(&["convert", "-c", "-O", "qcow2", name, "ours.qcow2"]);
        lab.zebu(&convert).ok(what);
        lab.qemu_img(&["compare", "ours.qcow2", raw]).ok(what);
        let compare = ["compare", "-f", self.format, "-F", "raw", name, raw];
        lab.zebu(&compare).ok(what);
        // As a backing file.
        let over = ["create", "-q", "-f", "qcow2", "-b", name, "-F", self.format];
        lab.zebu(&[&over[..], &["over.qcow2"]].concat()).ok(what);
        lab.zebu(&["compare", "-F", "raw", "over.qcow2", raw])
            .ok(what);
        // Parts of it.
        let size = fs::metadata(lab.path(raw)).unwrap().len();
        let mut random = Rng::new(size);
        let mut script = String::new();
        for _ in 0..if size == 0 { 0 } else { 20 } {
            let at = random.below(size);
            let length = (1 + random.below(70_000)).min(size - at);
            script += &format!("read -v {at} {length}\n");
        }
        let bytes = |answer: Answer| {
            let lines = answer.out.lines().filter(|line| line.contains(":  "));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        let ours = lab.zebu_io_script(&["-r", "-f", self.format, name], &script);
        let theirs = lab.qemu_io_script(&["-r", "-f", "raw", raw], &script);
        assert!(bytes(ours) == bytes(theirs), "{what}: {script}");
    }

    /// The servers must serve the content of this raw file.
    #[track_caller]
    fn is_served_as(&self, raw: &str, what: &str) {
        let (lab, name) = (self.lab, self.name);
        let mut server = Server::start(lab, &["-r", "-f", self.format, name]);
        let uri = server.uri("");
        let copy = client(
            lab,
            "qemu-img",
            &["convert", "-O", "raw", &uri, "served.raw"],
        );
        copy.ok(what);
        lab.assert_same_bytes("served.raw", raw, what);
        server.stop();
        let export = format!("--export=d={name},socket=v.sock,writable=off");
        let mut server = serve(lab, &["-f", self.format, &export]);
        let mut disk = Disk::new(lab, Setup::default());
        let bytes = fs::read(lab.path(raw)).unwrap();
        for (number, chunk) in bytes.chunks(64 << 10).enumerate() {
            let sector = (number * (64 << 10) / 512) as u64;
            let read = disk.take(READ, sector, chunk.len()).expect(what);
            assert!(read == chunk, "{what}: sector {sector}");
        }
        server.stop();
    }

    /// Both programs must open or refuse a damaged image alike, and report the same of it. Returns
    /// whether it was refused.
    #[track_caller]
    fn same_after_damage(&self, reports: &[&str], what: &str) -> bool {
        self.lab.sync_files();
        let convert = self.args(&["convert", "-O", "raw", self.name, "ours.raw"]);
        for report in reports {
            let command: Vec<&str> = report.split(' ').collect();
            let mut args = self.args(&command);
            args.push(self.name);
            let (ours, theirs) = (self.lab.zebu(&args), self.lab.qemu_img(&args));
            ours.orderly(what);
            // QEMU reads what the file lacks as zeroes.
            let lacks = |answer: &Answer| answer.err.contains("past the end of the file");
            if lacks(&ours) && theirs.status == 0 {
                return true;
            }
            // And tells so in its map.
            if command[0] == "map" && ours.out != theirs.out && lacks(&self.lab.zebu(&convert)) {
                return true;
            }
            if ours.status == 1 && theirs.status == 1 {
                // The reasons are worded differently.
                ours.failed_with_one_line(1, what);
                if command[0] == "info" {
                    return true;
                }
                continue;
            }
            compare_answers(&ours, &theirs, &args, what);
        }
        let ours = self.lab.zebu(&convert);
        if ours.status == 0 {
            let convert = self.args(&["convert", "-O", "raw", self.name, "theirs.raw"]);
            self.lab.qemu_img(&convert).ok(what);
            self.lab.assert_same_bytes("ours.raw", "theirs.raw", what);
        } else {
            ours.failed_with_one_line(1, what);
        }
        false
    }
}

/// The commands that look at an image.
const REPORTS: &[&[&str]] = &[
    &["info"],
    &["info", "--output=json"],
    &["map"],
    &["map", "--output=json"],
    &["map", "--output=json", "-s", "1000448", "-l", "600k"],
    &["check"],
    &["check", "--output=json"],
    &["snapshot", "-l"],
    &["measure", "-O", "qcow2"],
];

/// Writes random data to an image by qemu-io.
fn write_randomly(lab: &Lab, name: &str, format: &str, size: u64, random: &mut Rng) {
    let mut script = String::new();
    for number in 0..random.below(8) {
        let at = random.below(size / 512) * 512;
        // QEMU does not write a part of a sector at the end of the disk.
        let length = (512 * (1 + random.below(400))).min(size / 512 * 512 - at);
        script += &format!("write -P {} {at} {length}\n", number + 1);
    }
    lab.qemu_io_script(&["-f", format, name], &script)
        .ok("write");
}

/// A number for a field of a damaged image, which has `old` there.
fn damaged(random: &mut Rng, old: u64) -> u64 {
    images::damaged(old, &mut |n| random.below(n))
}

/// The size of the disk by qemu-img.
fn virtual_size(lab: &Lab, name: &str, format: &str) -> u64 {
    let info = lab.qemu_img(&["info", "-f", format, "--output=json", name]);
    let info: serde_json::Value = serde_json::from_str(&info.ok("info").out).unwrap();
    info["virtual-size"].as_u64().expect("a size")
}

/// A program that writes must refuse the image.
fn is_read_only(lab: &Lab, name: &str, format: &str) {
    lab.make("raw source.raw 100000");
    for args in [
        &["resize", "-f", format, name, "64M"][..],
        &[
            "convert",
            "-n",
            "-f",
            "raw",
            "source.raw",
            "-O",
            format,
            name,
        ],
    ] {
        lab.zebu(args).failed_with_one_line(1, &args.join(" "));
    }
    let write = lab.zebu_io(&["-f", format, "-c", "write 0 512", name]);
    assert!(
        write.err.contains("does not write to existing images"),
        "{write:?}"
    );
}
