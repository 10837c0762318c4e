//! `backup`: what the disk is read as, and that it does not change meanwhile. Whose file a target is.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use super::backup::{points, refused, restored};
use crate::common::stopping::is_stopped;
use crate::common::{Lab, Rng, program};

/// Writes the header of a qcow2 image over a secret file to the start of `file`, as a guest can.
fn make_header(lab: &Lab, file: &str) {
    let name = lab.path("secret");
    fs::write(&name, vec![b's'; 64 << 10]).unwrap();
    lab.zebu(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-u",
        "-b",
        name.to_str().unwrap(),
        "-F",
        "raw",
        "evil",
        "64k",
    ])
    .ok("create");
    let script = format!("dd if=evil of={file} conv=notrunc status=none");
    lab.shell(&script).ok("dd");
}

fn raw_disk(lab: &Lab, file: &str) {
    let bytes: Vec<u8> = (0..1u32 << 20).map(|n| (n / 4096) as u8 | 1).collect();
    fs::write(lab.path(file), bytes).unwrap();
}

const DISK: [&str; 4] = ["backup", "disk", "--to", "set"];

#[test]
fn a_guest_does_not_choose_the_format_of_its_disk() {
    for old_manifest in [false, true] {
        let lab = Lab::new();
        raw_disk(&lab, "disk");
        let first = lab.zebu(&DISK).ok("the first");
        let said = "disk: the format of disk was guessed: raw (give -f raw)";
        assert!(first.err.contains(said), "{first:?}");
        // Only once.
        assert_eq!(lab.zebu(&DISK).err, "");
        if old_manifest {
            let path = lab.path("set/manifest.json");
            let text = fs::read_to_string(&path).unwrap();
            let is_format = |line: &&str| {
                !line.contains("\"formats\"") && line.trim() != "\"raw\"" && line.trim() != "],"
            };
            let lines: Vec<_> = text.lines().filter(is_format).collect();
            fs::write(&path, lines.join("\n").replace("}\n}", "}}")).unwrap();
        }
        make_header(&lab, "disk");
        let before = fs::read(lab.path("disk")).unwrap();
        for more in [&[][..], &["--full"], &["--verify"]] {
            let answer = lab.zebu(&[&DISK[..], more].concat());
            refused(
                &answer,
                "was 'raw' before and by its content is 'qcow2' now",
            );
        }
        assert_eq!(points(&lab), [1, 2]);
        // What is said is done.
        lab.zebu(&[&DISK[..], &["-f", "raw"]].concat())
            .ok("as before");
        assert!(restored(&lab, 3) == before);
        assert!(fs::read(lab.path("disk")).unwrap() == before);
        lab.zebu(&["backup", "disk", "--to", "new", "-f", "raw"])
            .ok("a new set");
    }
}

/// The headers that a guest may write, and other data: whatever is on its raw disk, a backup leaves the
/// disk as it is, and is the disk or fails.
#[test]
fn whatever_a_guest_writes_its_disk_stays_raw() {
    let mut seeds = zebu_testkit::cases(6, "backups of what a guest wrote");
    while let Some(seed) = seeds.next() {
        let mut rng = Rng::new(seed);
        let lab = Lab::new();
        raw_disk(&lab, "disk");
        let mut args = DISK.to_vec();
        args.extend(rng.one_in(3).then_some(["-f", "raw"]).into_iter().flatten());
        lab.zebu(&args).ok("the first");
        let mut done = Vec::new();
        for _ in 0..4 {
            let what = rng.pick(&["qcow2", "vmdk", "vdi", "vhdx", "luks", "data", "nothing"]);
            done.push(what);
            let mut bytes = fs::read(lab.path("disk")).unwrap();
            match what {
                "qcow2" => make_header(&lab, "disk"),
                "luks" => bytes[..8].copy_from_slice(b"LUKS\xba\xbe\0\x01"),
                "data" => bytes[rng.below(1 << 19) as usize..][..4096].fill(seed as u8),
                "nothing" => bytes[..64 << 10].fill(0),
                format => {
                    let args = ["convert", "-f", "raw", "-O", format, "small", "image"];
                    fs::write(lab.path("small"), vec![1; 64 << 10]).unwrap();
                    lab.zebu(&args).ok("the image");
                    let head = fs::read(lab.path("image")).unwrap();
                    let length = head.len().min(bytes.len());
                    bytes[..length].copy_from_slice(&head[..length]);
                }
            }
            if what != "qcow2" {
                fs::write(lab.path("disk"), &bytes).unwrap();
            }
            let bytes = fs::read(lab.path("disk")).unwrap();
            let before = points(&lab);
            let mut args = DISK.to_vec();
            for more in [
                &["-f", "raw"][..],
                &["--full"],
                &["--verify"],
                &["-c"],
                &["--keep=2"],
            ] {
                if rng.one_in(3) {
                    args.extend(more);
                    done.extend(more);
                }
            }
            let answer = lab.zebu(&args);
            let case = format!("seed {seed}: {done:?}: {answer:?}");
            assert!(
                fs::read(lab.path("disk")).unwrap() == bytes,
                "{case}: it was written"
            );
            match answer.status {
                0 => {
                    let last = points(&lab).pop().unwrap();
                    assert!(restored(&lab, last) == bytes, "{case}: another disk");
                }
                _ => {
                    assert!(!args.contains(&"raw"), "{case}");
                    assert_eq!(points(&lab), before, "{case}");
                }
            }
            lab.zebu(&["backup", "verify", "set"]).ok(&case);
        }
        seeds.add(4);
    }
}

/// A backing file whose format the image above does not say.
#[test]
fn formats_of_backing_files_stay() {
    let lab = Lab::new();
    raw_disk(&lab, "base");
    lab.qemu_img(&[
        "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "disk",
    ])
    .ok("create");
    // Old programs wrote no such extension: it becomes an unknown one.
    let mut bytes = fs::read(lab.path("disk")).unwrap();
    let extension = 0xe279_2aca_u32.to_be_bytes();
    let at = bytes.windows(4).position(|word| *word == extension);
    bytes[at.expect("the backing format")..][..4].copy_from_slice(b"none");
    fs::write(lab.path("disk"), bytes).unwrap();
    let first = lab.zebu(&["backup", "-f", "qcow2", "disk", "--to", "set"]);
    let first = first.ok("the first");
    assert!(first.err.contains("base was guessed: raw"), "{first:?}");
    make_header(&lab, "base");
    let answer = lab.zebu(&["backup", "-f", "qcow2", "disk", "--to", "set"]);
    refused(
        &answer,
        "was 'raw' before and by its content is 'qcow2' now",
    );
    lab.zebu(&["rebase", "-u", "-b", "base", "-F", "raw", "disk"])
        .ok("say it");
    // No bitmap has what is written to a backing file.
    lab.zebu(&["backup", "--full", "disk", "--to", "set"])
        .ok("the second");
    let now = fs::read(lab.path("base")).unwrap();
    assert!(restored(&lab, 2) == now);
}

#[test]
fn a_file_of_the_set_is_behind_no_source() {
    let lab = Lab::new();
    raw_disk(&lab, "disk");
    lab.zebu(&[&DISK[..], &["-f", "raw"]].concat()).ok("backup");
    let args = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        "set/disk.1.qcow2",
        "-F",
        "qcow2",
        "over",
    ];
    lab.zebu(&args).ok("create");
    let answer = lab.zebu(&["backup", "over", "--to", "set"]);
    refused(&answer, "is in the directory of the backups");
    lab.zebu(&["backup", "over", "--to", "other"])
        .ok("another set");
}

#[test]
fn restore_replaces_nothing_unasked() {
    let lab = Lab::new();
    raw_disk(&lab, "disk");
    lab.zebu(&[&DISK[..], &["-f", "raw"]].concat()).ok("backup");
    fs::write(lab.path("there"), "something").unwrap();
    let answer = lab.zebu(&["backup", "restore", "set", "there"]);
    refused(&answer, "there exists: restore to another file");
    assert_eq!(fs::read(lab.path("there")).unwrap(), b"something");
    // An empty file has nothing to lose.
    fs::write(lab.path("empty"), "").unwrap();
    for args in [&["set", "empty"][..], &["--overwrite", "set", "there"]] {
        lab.zebu(&[&["backup", "restore"], args].concat())
            .ok("restore");
        lab.assert_same_bytes("disk", args.last().unwrap(), "restored");
    }
    lab.zebu(&["backup", "restore", "-n", "set", "there"])
        .ok("into it");
    lab.assert_same_bytes("disk", "there", "restored into it");
    let answer = lab.zebu(&[
        "backup",
        "restore",
        "--overwrite",
        "set",
        "set/disk.1.qcow2",
    ]);
    refused(&answer, "is in the directory of the backups");
}

#[test]
fn verify_says_what_it_has_verified() {
    let lab = Lab::new();
    raw_disk(&lab, "disk");
    for _ in 0..2 {
        lab.zebu(&[&DISK[..], &["-f", "raw", "--verify"]].concat())
            .ok("backup");
    }
    let answer = lab.zebu(&["backup", "verify", "set"]).ok("verify");
    let said = "2 points and 2 files as in the manifest: ";
    assert!(answer.out.starts_with(said), "{answer:?}");
    assert_eq!(answer.out.lines().count(), 1, "{answer:?}");
    let answer = lab.zebu(&["backup", "verify", "--content", "set"]);
    let said = "; the content of 2 disks, 2 MiB, too\n";
    assert!(answer.out.ends_with(said), "{answer:?}");
    assert_eq!(lab.zebu(&["backup", "verify", "-q", "set"]).out, "");
}

/// What another program has changed is not damaged.
#[test]
fn verify_blames_no_set_that_changes() {
    let lab = Lab::new();
    raw_disk(&lab, "disk");
    for _ in 0..2 {
        lab.zebu(&[&DISK[..], &["-f", "raw"]].concat()).ok("backup");
    }
    // As long as a program changes it, its files may be any.
    let lock = File::open(lab.path("set/lock")).unwrap();
    let file = lab.path("set/disk.2.qcow2");
    let mut damaged = File::options().append(true).open(file).unwrap();
    damaged.write_all(b"more").unwrap();
    assert_eq!(lab.zebu(&["backup", "verify", "set"]).status, 2);
    lock.lock().unwrap();
    let answer = lab.zebu(&["backup", "verify", "set"]);
    refused(&answer, "verify it again");
}

/// A second name gives a guest no second guess.
#[test]
fn the_format_of_a_disk_is_known_under_any_name() {
    let lab = Lab::new();
    raw_disk(&lab, "disk");
    lab.zebu(&DISK).ok("the first");
    make_header(&lab, "disk");
    symlink("disk", lab.path("link")).unwrap();
    let before = fs::read(lab.path("disk")).unwrap();
    for args in [&["disk", "--name", "new"][..], &["link"]] {
        let answer = lab.zebu(&[&["backup", "--to", "set"], args].concat());
        refused(
            &answer,
            "was 'raw' before and by its content is 'qcow2' now",
        );
    }
    assert_eq!(points(&lab), [1]);
    assert!(fs::read(lab.path("disk")).unwrap() == before);
    // A name that has another disk's format does not help either.
    lab.zebu(&["create", "-q", "-f", "qcow2", "image", "1M"])
        .ok("create");
    lab.zebu(&["backup", "image", "--to", "set"]).ok("an image");
    let answer = lab.zebu(&["backup", "disk", "--name", "image", "--to", "set"]);
    refused(
        &answer,
        "was 'raw' before and by its content is 'qcow2' now",
    );
    assert!(fs::read(lab.path("disk")).unwrap() == before);
    lab.zebu(&["backup", "-f", "raw", "link", "--to", "set"])
        .ok("what is said is done");
    assert!(fs::read(lab.path("disk")).unwrap() == before);
}

#[test]
fn a_guess_that_reads_other_files_is_said() {
    let lab = Lab::new();
    raw_disk(&lab, "base");
    let over = [
        "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "disk",
    ];
    lab.zebu(&over).ok("create");
    let first = lab.zebu(&DISK).ok("the first");
    let said =
        "disk: the format of disk was guessed: qcow2, and it names other files (give -f qcow2";
    assert!(first.err.contains(said), "{first:?}");
    assert_eq!(lab.zebu(&DISK).err, "");
    let given = lab.zebu(&["backup", "-f", "qcow2", "disk", "--to", "new"]);
    assert_eq!(given.ok("given").err, "");
}

/// Makes a source of the files in `src`, of which one is replaced.
struct Replaced {
    name: &'static str,
    make: &'static str,
    replace: &'static str,
}

/// Of all sources `src/disk` is the disk, `a` and `b` are raw disks.
const REPLACED: [Replaced; 6] = [
    Replaced {
        name: "backing file",
        make: "mv a src/base; $Z create -q -f qcow2 -b base -F raw src/disk",
        replace: "mv b src/base",
    },
    Replaced {
        name: "data file",
        make: "$Z convert -f raw -O qcow2 -o data_file=src/data,data_file_raw=on a src/disk",
        replace: "mv b src/data",
    },
    Replaced {
        name: "raw disk",
        make: "mv a src/disk",
        replace: "mv b src/disk",
    },
    Replaced {
        name: "raw disk that is gone",
        make: "mv a src/disk",
        replace: "rm src/disk",
    },
    Replaced {
        name: "link",
        make: "ln -s ../a src/disk",
        replace: "ln -sfn ../b src/disk",
    },
    Replaced {
        name: "link to a backing file",
        make: "ln -s ../a src/base; $Z create -q -f qcow2 -b base -F raw src/disk",
        replace: "ln -sfn ../b src/base",
    },
];

impl Replaced {
    fn lab(&self) -> Lab {
        let lab = Lab::new();
        fs::create_dir(lab.path("src")).unwrap();
        for name in ["a", "b"] {
            fs::write(lab.path(name), name.repeat(6 << 20)).unwrap();
        }
        self.shell(&lab, self.make);
        lab
    }

    fn shell(&self, lab: &Lab, script: &str) {
        let script = script.replace("$Z", program().to_str().unwrap());
        lab.shell(&format!("set -e; {script}")).ok(self.name);
    }

    /// The next backup is what is there now.
    fn assert_next(&self, lab: &Lab, point: u64) {
        if !lab.path("src/disk").exists() {
            return;
        }
        lab.zebu(&["backup", "src/disk", "--to", "set"])
            .ok(self.name);
        lab.zebu(&["convert", "-O", "raw", "src/disk", "now"])
            .ok(self.name);
        let now = fs::read(lab.path("now")).unwrap();
        assert!(restored(lab, point) == now, "{}: another disk", self.name);
    }

    fn during_a_backup(&self) {
        let lab = self.lab();
        let mut child = Command::new(program())
            .args("backup -q -r 3M src/disk --to set".split(' '))
            .current_dir(lab.path(""))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(lab.path("stderr")).unwrap())
            .spawn()
            .expect("the program under test");
        // The source is open as soon as there is a target.
        let part = lab.path("set/disk.1.qcow2.part");
        while !part.exists() {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{}: {ended:?}", self.name);
            std::thread::yield_now();
        }
        let stopped = is_stopped(&child);
        self.shell(&lab, self.replace);
        // SAFETY: the child was not waited for, so the id is its own.
        unsafe { libc::kill(child.id() as i32, libc::SIGCONT) };
        let status = child.wait().unwrap();
        let kept = match stopped {
            // It was too quick to be caught.
            false => 1,
            true => {
                let err = fs::read_to_string(lab.path("stderr")).unwrap();
                let said = "was removed or replaced while it was read";
                assert!(err.contains(said), "{}: {status} {err}", self.name);
                assert_eq!(status.code(), Some(1), "{}", self.name);
                0
            }
        };
        assert_eq!(points(&lab).len(), kept, "{}", self.name);
        self.assert_next(&lab, points(&lab).last().unwrap_or(&0) + 1);
    }

    fn between_backups(&self) {
        let lab = self.lab();
        lab.zebu(&["backup", "src/disk", "--to", "set"])
            .ok(self.name);
        self.shell(&lab, self.replace);
        self.assert_next(&lab, 2);
    }
}

#[test]
fn a_file_that_is_replaced_during_a_backup_fails_it() {
    std::thread::scope(|scope| {
        for case in &REPLACED {
            scope.spawn(|| case.during_a_backup());
        }
    });
}

#[test]
fn a_file_that_is_replaced_between_backups_is_noticed() {
    for case in &REPLACED {
        case.between_backups();
    }
    // Written in place, which no bitmap of the image above has.
    let case = &REPLACED[0];
    let lab = case.lab();
    lab.zebu(&["backup", "src/disk", "--to", "set"])
        .ok("the first");
    case.shell(
        &lab,
        "dd if=b of=src/base bs=64k count=1 conv=notrunc status=none",
    );
    case.assert_next(&lab, 2);
}

/// A raw disk that ends within a sector ends there when it is restored, also by an increment and after merges.
#[test]
fn the_length_of_a_raw_disk_is_kept() {
    let lab = Lab::new();
    for length in [1000, 512, 70_001, 1 << 20, 70_001 + 512] {
        let bytes: Vec<u8> = (0..length).map(|nth| (nth % 251) as u8).collect();
        fs::write(lab.path("odd.raw"), &bytes).unwrap();
        lab.zebu(&[
            "backup", "-f", "raw", "odd.raw", "--to", "lengths", "--keep", "2",
        ])
        .ok("backup");
        let restore = ["backup", "restore", "--overwrite", "lengths", "new.raw"];
        lab.zebu(&restore).ok("restore");
        assert!(fs::read(lab.path("new.raw")).unwrap() == bytes, "{length}");
        // Elsewhere it has whole sectors.
        let mut padded = bytes.clone();
        padded.resize(bytes.len().next_multiple_of(512), 0);
        let piped = lab.shell("\"$0\" backup restore lengths - > piped");
        piped.ok("restore to a stream");
        assert!(fs::read(lab.path("piped")).unwrap() == padded, "{length}");
        let image = [
            "backup",
            "restore",
            "--overwrite",
            "-O",
            "qcow2",
            "lengths",
            "new.q",
        ];
        lab.zebu(&image).ok("restore as qcow2");
        lab.zebu(&["compare", "-f", "raw", "-F", "qcow2", "odd.raw", "new.q"])
            .ok("compare");
    }
    lab.zebu(&["backup", "verify", "lengths"]).ok("verify");
}
