//! Another program writes to what a command reads, which takes no locks: at any moment, any of the
//! files, in any way. The command fails, or its result is one state of its source.
//!
//! The moment is the n-th time that the command opens or reads a file of the source, as inotify tells.
//! It is stopped then, so that the change is one step.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::common::stopping::is_stopped;
use crate::common::{Lab, Rng, beyond_qemu, cases, program};

/// Bytes of the disks.
const SIZE: usize = 6 << 20;

/// A kind of source: its files, and the options by which it is opened.
struct Kind {
    name: &'static str,
    /// How it is made of `raw`, and of what is behind it.
    make: &'static str,
    files: &'static [&'static str],
    format: &'static str,
}

/// The file of a source's disk is `disk`. Relative names of backing files are of its own folder, those of
/// data files of the one in which commands run.
const KINDS: [Kind; 9] = [
    Kind {
        name: "raw",
        make: "cp raw disk",
        files: &["disk"],
        format: "raw",
    },
    Kind {
        name: "qcow2",
        make: "$Z convert -f raw -O qcow2 raw disk",
        files: &["disk"],
        format: "qcow2",
    },
    Kind {
        name: "compressed",
        make: "$Z convert -c -f raw -O qcow2 raw disk",
        files: &["disk"],
        format: "qcow2",
    },
    Kind {
        name: "over raw",
        make: "cp raw base; $Z create -q -f qcow2 -b base -F raw disk; $Z io -c 'write -q -P 9 1M 1M' disk",
        files: &["base", "disk"],
        format: "qcow2",
    },
    Kind {
        name: "over qcow2",
        make: "$Z convert -f raw -O qcow2 raw base; $Z create -q -f qcow2 -b base -F qcow2 disk; \
               $Z io -c 'write -q -P 8 3M 1M' disk",
        files: &["base", "disk"],
        format: "qcow2",
    },
    Kind {
        name: "data file",
        make: "mkdir src; $Z convert -f raw -O qcow2 -o data_file=src/data raw disk; mv src/data .; \
               rmdir src",
        files: &["data", "disk"],
        format: "qcow2",
    },
    Kind {
        name: "vmdk",
        make: "$Z convert -f raw -O vmdk raw disk",
        files: &["disk"],
        format: "vmdk",
    },
    Kind {
        name: "vmdk of two files",
        make: "$Z convert -f raw -O vmdk -o subformat=monolithicFlat raw disk.vmdk; mv disk.vmdk disk",
        files: &["disk-flat.vmdk", "disk"],
        format: "vmdk",
    },
    Kind {
        name: "vhdx",
        make: "$Z convert -f raw -O vhdx raw disk",
        files: &["disk"],
        format: "vhdx",
    },
];

/// What reads the source, and how its result is made a raw disk `result`. Where a rate can be given it is,
/// so that there is time for changes between two reads.
struct Reader {
    name: &'static str,
    /// Before the source changes.
    before: &'static str,
    command: &'static str,
    result: &'static str,
}

const READERS: [Reader; 12] = [
    Reader {
        name: "convert",
        before: "",
        command: "convert -r 40M -f FMT -O raw src/disk result",
        result: "",
    },
    Reader {
        name: "convert to qcow2",
        before: "",
        command: "convert -r 40M -f FMT -O qcow2 src/disk out",
        result: "$Z convert -f qcow2 -O raw out result",
    },
    Reader {
        name: "convert, compressed",
        before: "",
        command: "convert -r 40M -c -f FMT -O qcow2 src/disk out",
        result: "$Z convert -f qcow2 -O raw out result",
    },
    Reader {
        name: "convert to a pipe",
        before: "",
        command: "convert -r 40M -f FMT -O raw src/disk -",
        result: "mv stdout result",
    },
    Reader {
        name: "dd",
        before: "",
        command: "dd -f FMT -O raw bs=64k if=src/disk of=result",
        result: "",
    },
    Reader {
        name: "ova",
        before: "",
        command: "ova -f FMT --output out.ova src/disk",
        result: "$Z convert out.ova --disk 1 -O raw result",
    },
    // It is the same as a mixture of the states only if it read one.
    Reader {
        name: "compare",
        before: "head -c 3M first > mixed; tail -c 3M second >> mixed",
        command: "compare -f FMT -F raw src/disk mixed",
        result: "mv mixed result",
    },
    Reader {
        name: "import",
        before: "",
        command: "import -f FMT src/disk result",
        result: "",
    },
    Reader {
        name: "backup",
        before: "",
        command: "backup -q -r 40M -f FMT src/disk --to set",
        result: "$Z backup restore set result",
    },
    Reader {
        name: "backup, verified",
        before: "",
        command: "backup -q -r 40M --verify -f FMT src/disk --to set",
        result: "$Z backup restore set result",
    },
    Reader {
        name: "incremental backup",
        before: "$Z backup -q -f FMT src/disk --to set; cp old/* src",
        command: "backup -q -r 40M -f FMT src/disk --to set",
        result: "$Z backup restore set result",
    },
    Reader {
        name: "incremental backup, verified",
        before: "$Z backup -q -f FMT src/disk --to set; cp old/* src",
        command: "backup -q -r 40M --verify -f FMT src/disk --to set",
        result: "$Z backup restore set result",
    },
];

/// Changes a file of the source: to its other state, or by a part of it. How, and whether its time of change
/// is that of before.
fn change(file: &Path, other: &Path, rng: &mut Rng) -> (&'static str, bool) {
    let bytes = fs::read(other).unwrap();
    let open = || File::options().write(true).open(file).unwrap();
    let modified = open().metadata().and_then(|found| found.modified());
    let sets_time_back = rng.one_in(2);
    let how = match rng.below(6) {
        0 => {
            let file = open();
            file.write_all_at(&bytes, 0).unwrap();
            file.set_len(bytes.len() as u64).unwrap();
            "written in place"
        }
        1 => {
            fs::write(file, bytes).unwrap();
            "emptied and written"
        }
        2 => {
            let new = file.with_extension("new");
            fs::write(&new, bytes).unwrap();
            fs::rename(&new, file).unwrap();
            "renamed over it"
        }
        3 => {
            let mut file = File::options().append(true).open(file).unwrap();
            file.write_all(&bytes[..bytes.len().min(64 << 10)]).unwrap();
            "longer"
        }
        4 => {
            let length = open().metadata().unwrap().len();
            open().set_len((length / 2) & !0xffff).unwrap();
            "shorter"
        }
        _ => {
            let at = (rng.below(bytes.len() as u64 / 2) as usize) & !0xffff;
            let part = &bytes[at..][..bytes.len() / 4];
            open().write_all_at(part, at as u64).unwrap();
            "written in part"
        }
    };
    if sets_time_back {
        open().set_modified(modified.unwrap()).unwrap();
    }
    (how, sets_time_back)
}

/// Tells when a folder's files are opened and read.
struct Watch(OwnedFd);

impl Watch {
    fn new(folder: &Path, reads_only: bool) -> Watch {
        let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).unwrap();
        // SAFETY: plain system calls; the name is a C string, and the descriptor is owned from here on.
        unsafe {
            let fd = libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC);
            assert!(fd >= 0);
            let mask = match reads_only {
                true => libc::IN_ACCESS,
                false => libc::IN_OPEN | libc::IN_ACCESS | libc::IN_CLOSE_NOWRITE,
            };
            assert!(libc::inotify_add_watch(fd, path.as_ptr(), mask) >= 0);
            Watch(OwnedFd::from_raw_fd(fd))
        }
    }

    /// How many events there are, after a wait for the first one of some milliseconds.
    fn events(&self) -> u64 {
        let mut poll = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let mut buffer = [0u8; 64 << 10];
        // SAFETY: both have the length that is given.
        let length = unsafe {
            libc::poll(&raw mut poll, 1, 5);
            libc::read(poll.fd, buffer.as_mut_ptr().cast(), buffer.len())
        };
        let mut rest = &buffer[..length.max(0) as usize];
        let mut count = 0;
        const HEAD: usize = size_of::<libc::inotify_event>();
        while rest.len() >= HEAD {
            let name = u32::from_ne_bytes(rest[HEAD - 4..HEAD].try_into().unwrap());
            rest = &rest[HEAD + name as usize..];
            count += 1;
        }
        count
    }
}

/// Runs a command, and `at_event` when that many accesses of the source were seen. How many were seen.
fn run(
    lab: &Lab,
    command: &str,
    reads_only: bool,
    event: u64,
    at_event: &mut dyn FnMut(),
) -> (ExitStatus, String, u64) {
    let watch = Watch::new(&lab.path("src"), reads_only);
    let mut child: Child = Command::new(program())
        .args(command.split(' '))
        .current_dir(lab.path(""))
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(File::create(lab.path("stdout")).unwrap())
        .stderr(File::create(lab.path("stderr")).unwrap())
        .spawn()
        .expect("the program under test");
    let mut seen = 0;
    let status = loop {
        let before = seen;
        seen += watch.events();
        if before < event && seen >= event && is_stopped(&child) {
            at_event();
            // SAFETY: the child was not waited for, so the id is its own.
            unsafe { libc::kill(child.id() as i32, libc::SIGCONT) };
        }
        if let Some(status) = child.try_wait().expect("wait") {
            break status;
        }
    };
    let err = fs::read_to_string(lab.path("stderr")).unwrap();
    (status, err, seen)
}

/// The content of the source as it is now, if it can be read.
fn content(lab: &Lab, kind: &Kind) -> Result<Vec<u8>, String> {
    let args = [
        "convert",
        "-f",
        kind.format,
        "-O",
        "raw",
        "src/disk",
        "content",
    ];
    let answer = lab.zebu(&args);
    match answer.status {
        0 => Ok(fs::read(lab.path("content")).unwrap()),
        _ => Err(answer.err),
    }
}

/// The files of both states of a source, in `old` and `new`.
fn make(lab: &Lab, kind: &Kind) {
    for (folder, seed) in [("old", 1), ("new", 2)] {
        let mut rng = Rng::new(seed);
        let mut bytes = vec![0; SIZE];
        for piece in bytes.chunks_mut(64 << 10) {
            let value = rng.next() as u8;
            // Compressible, and no two pieces of the states are the same.
            piece.fill(value | seed as u8);
            piece[..8].copy_from_slice(&rng.next().to_le_bytes());
        }
        fs::create_dir(lab.path(folder)).unwrap();
        fs::write(lab.path(&format!("{folder}/raw")), bytes).unwrap();
        let script = format!("set -e; cd {folder}; {}; rm raw", kind.make);
        shell(lab, &script, kind);
    }
}

fn shell(lab: &Lab, script: &str, kind: &Kind) -> bool {
    let script = script
        .replace("$Z", program().to_str().unwrap())
        .replace("FMT", kind.format);
    let answer = lab.shell(&script);
    assert!(
        answer.status == 0 || script.contains("result"),
        "{script}: {answer:#?}"
    );
    answer.status == 0
}

#[test]
fn a_result_is_one_state_of_its_source() {
    if beyond_qemu("it does not look") {
        return;
    }
    let only = zebu_testkit::only().unwrap_or_default();
    let readers: Vec<_> = READERS.iter().filter(|r| r.name.contains(&only)).collect();
    let mut changed = 0;
    let mut noticed = 0;
    let mut seeds = cases(15, "sources that change");
    for seed in &mut seeds {
        let mut rng = Rng::new(seed);
        let kind = &KINDS[rng.below(KINDS.len() as u64) as usize];
        let reader = readers[rng.below(readers.len() as u64) as usize];
        // It takes no images that name others.
        if reader.name == "import" && kind.files.len() > 1 {
            continue;
        }
        let lab = Lab::new();
        make(&lab, kind);
        for (state, name) in [("old", "first"), ("new", "second")] {
            fs::rename(lab.path(state), lab.path("src")).unwrap();
            let content = content(&lab, kind).expect("a state");
            fs::write(lab.path(name), content).unwrap();
            fs::rename(lab.path("src"), lab.path(state)).unwrap();
        }
        let file = rng.pick(kind.files);
        let reads_only = !rng.one_in(3);
        let mut total = 0;
        let mut case = String::new();
        // The first time nothing changes: that counts the accesses.
        for changes in [false, true] {
            shell(
                &lab,
                "rm -rf src set result out out.ova; cp -r old src",
                kind,
            );
            shell(&lab, reader.before, kind);
            let before = content(&lab, kind).expect("the first state");
            let event = match changes {
                false => u64::MAX,
                true => 1 + rng.below(total + 1),
            };
            let (path, other) = (lab.path("src").join(file), lab.path("new").join(file));
            let mut how = None;
            let command = reader.command.replace("FMT", kind.format);
            let (status, err, seen) = run(&lab, &command, reads_only, event, &mut || {
                how = Some(change(&path, &other, &mut rng));
            });
            total = seen;
            case = format!(
                "seed {seed}: {}, {}: {file} {how:?} at {event}",
                reader.name, kind.name
            );
            if !status.success() {
                let differs = reader.name == "compare" && status.code() == Some(1);
                assert!(changes || differs, "{case}: {err}");
                noticed += u64::from(!differs);
                continue;
            }
            changed += u64::from(how.is_some());
            let states = [Ok(before), content(&lab, kind)];
            assert!(shell(&lab, reader.result, kind), "{case}: no result");
            let result = fs::read(lab.path("result")).expect("result");
            let is_one = states.iter().flatten().any(|state| *state == result);
            assert!(is_one, "{case}: the result is no state of the source");
        }
        println!("{case}");
    }
    println!("{changed} changes were not in what was read, {noticed} were noticed");
}
