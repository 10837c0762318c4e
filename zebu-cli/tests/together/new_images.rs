//! New images of every format, by every command that makes one, over every kind of target: what a
//! program leaves that is killed at any of its system calls, or fails, and what it makes if it succeeds.
//!
//! While a program waits at a call, its files are what a kill would leave.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::common::{Rng, cases, program};
use crate::supervised::{Ended, Supervised};
use crate::world::{folder, run};

/// Bytes of the disks.
const DISK: usize = 640 << 10;

/// A form of new images.
struct Form {
    format: &'static str,
    /// Several of `-o`, of which a run has one.
    options: &'static [&'static str],
    /// Whether its file can say that it is not finished.
    has_mark: bool,
    /// Whether `-c` compresses.
    is_compressed: bool,
}

const FORMS: [Form; 10] = [
    Form {
        format: "qcow2",
        options: &[
            "cluster_size=64k",
            "compat=0.10,cluster_size=512",
            "extended_l2=on,lazy_refcounts=on",
            "compression_type=zstd,cluster_size=4k",
        ],
        has_mark: true,
        is_compressed: true,
    },
    Form {
        format: "qcow2",
        options: &[
            "preallocation=metadata",
            "preallocation=falloc",
            "preallocation=full,cluster_size=4k",
            "data_file=t.data",
            "data_file=t.data,data_file_raw=on",
            "data_file=t.data,preallocation=full",
        ],
        has_mark: true,
        is_compressed: false,
    },
    Form {
        format: "raw",
        options: &[
            "preallocation=off",
            "preallocation=falloc",
            "preallocation=full",
        ],
        has_mark: false,
        is_compressed: false,
    },
    Form {
        format: "vdi",
        options: &["static=off", "static=on"],
        has_mark: true,
        is_compressed: false,
    },
    Form {
        format: "vhdx",
        options: &["subformat=dynamic", "subformat=fixed"],
        has_mark: true,
        is_compressed: false,
    },
    Form {
        format: "vpc",
        options: &["subformat=dynamic,force_size=on"],
        has_mark: true,
        is_compressed: false,
    },
    Form {
        format: "vpc",
        options: &["subformat=fixed,force_size=on"],
        has_mark: false,
        is_compressed: false,
    },
    Form {
        format: "vmdk",
        options: &["subformat=monolithicSparse", "zeroed_grain=on"],
        has_mark: true,
        is_compressed: false,
    },
    Form {
        format: "vmdk",
        options: &[
            "subformat=monolithicFlat",
            "subformat=twoGbMaxExtentSparse",
            "subformat=twoGbMaxExtentFlat",
        ],
        has_mark: true,
        is_compressed: false,
    },
    Form {
        format: "vmdk",
        options: &["subformat=streamOptimized"],
        has_mark: true,
        is_compressed: true,
    },
];

/// How an image is made.
const WAYS: [&str; 7] = [
    "create",
    "convert",
    "convert -c",
    "convert -S 0",
    "dd",
    "import",
    "import --sha256 BAD",
];

/// What is there before.
const TARGETS: [&str; 6] = ["nothing", "old", "other", "junk", "dangling", "link"];

/// A run: what is made, how and over what.
#[derive(Debug)]
struct Run {
    form: usize,
    options: &'static str,
    way: &'static str,
    target: &'static str,
    /// Bytes of a file at most.
    most: Option<u64>,
}

/// What files hold, by their names.
type Files = Vec<(String, Vec<u8>)>;

impl Run {
    fn random(rng: &mut Rng) -> Run {
        loop {
            let form = rng.below(FORMS.len() as u64) as usize;
            let Form { options, .. } = &FORMS[form];
            let run = Run {
                form,
                options: options[rng.below(options.len() as u64) as usize],
                way: WAYS[rng.below(WAYS.len() as u64) as usize],
                target: TARGETS[rng.below(TARGETS.len() as u64) as usize],
                most: rng.one_in(4).then(|| rng.below(DISK as u64 / 512) * 512),
            };
            let Form {
                format,
                is_compressed,
                ..
            } = run.form();
            let is_possible = match run.way {
                "convert -c" => *is_compressed,
                // Without options the disk is larger.
                "dd" => *format != "vpc",
                way => !way.starts_with("import") || ["raw", "qcow2"].contains(format),
            };
            if is_possible {
                return run;
            }
        }
    }

    fn form(&self) -> &Form {
        &FORMS[self.form]
    }

    /// The words of a command that makes an image of `source`.
    fn words(&self, way: &str, source: &str, target: &str) -> Vec<String> {
        let Form { format, .. } = self.form();
        let options = self.options;
        let line = match way {
            "create" => format!("create -q -f {format} -o {options} {target} {DISK}"),
            "dd" => format!("dd -f raw -O {format} if={source} of={target}"),
            "import" => format!("import -f raw -O {format} {source} {target}"),
            "import --sha256 BAD" => {
                let bad = "0".repeat(64);
                format!("import -f raw -O {format} --sha256 {bad} {source} {target}")
            }
            way => format!("{way} -f raw -O {format} -o {options} {source} {target}"),
        };
        line.split(' ').map(String::from).collect()
    }

    /// Whether the options of the form are those of the image.
    fn has_options(&self) -> bool {
        self.way == "create" || self.way.starts_with("convert")
    }

    /// Whether an image that is not finished can say so. Without options it is of the usual form.
    fn has_mark(&self) -> bool {
        match self.has_options() {
            true => self.form().has_mark,
            false => self.form().format != "raw",
        }
    }

    /// A folder with two disks and what is there before.
    fn folder(&self, rng: &mut Rng) -> TempDir {
        let folder = folder();
        let at = |name: &str| folder.path().join(name);
        for name in ["new", "before"] {
            // Noise, holes, and a start that is no image.
            let mut disk = vec![0; DISK];
            for piece in disk[..].chunks_mut(DISK / 10) {
                if rng.one_in(2) {
                    piece.fill_with(|| rng.next() as u8);
                }
            }
            disk[0] = 0;
            fs::write(at(name), disk).expect("write");
        }
        let old = |words: Vec<String>| {
            let (status, _) = run(folder.path(), &words, None);
            assert_eq!(status, 0, "{words:?}");
        };
        match self.target {
            "old" | "link" => {
                old(self.words("convert", "before", "t"));
                if self.target == "link" {
                    // It is the name of the image itself that the files beside it have.
                    fs::rename(at("t"), at("behind")).expect("rename");
                    symlink("behind", at("t")).expect("link");
                }
            }
            "other" => {
                let rng_format = ["raw", "qcow2", "vdi"][rng.below(3) as usize];
                let words = ["convert", "-f", "raw", "-O", rng_format, "before", "t"];
                old(words.map(String::from).to_vec());
            }
            "junk" => fs::write(at("t"), [0x53; 100_000]).expect("write"),
            "dangling" => symlink("behind", at("t")).expect("link"),
            _ => {}
        }
        folder
    }

    /// Why files that a kill or a failure leaves are wrong.
    fn check(&self, before: &Files, now: &Files, expected: &[String]) -> Result<(), String> {
        let target = |files: &Files| files.iter().find(|file| file.0 == "t").cloned();
        let Some((_, bytes)) = target(now) else {
            return Ok(());
        };
        // What was there is as it was, perhaps beside a new file.
        let is_before = !before.is_empty() && before.iter().all(|file| now.contains(file));
        // A file that is empty holds no disk.
        if bytes.is_empty() || is_before || !self.has_mark() && self.form().format == "raw" {
            return Ok(());
        }
        let found = self.found(now);
        let is_whole = |one: &Option<String>| one.as_ref().is_none_or(|one| expected.contains(one));
        let [named, probed] = &found;
        // What has no mark is only known by its name.
        match is_whole(named) && (!self.has_mark() || is_whole(probed)) {
            true => Ok(()),
            false => Err(format!(
                "it opens as {found:?}, and should be none or {expected:?}"
            )),
        }
    }

    /// What the files open as: by the name of the format, and by what is in them.
    fn found(&self, files: &Files) -> [Option<String>; 2] {
        let folder = folder();
        for (name, bytes) in files {
            fs::write(folder.path().join(name), bytes).expect("write");
        }
        let format = self.form().format;
        [&["-f", format][..], &[]].map(|format| {
            let words = [&["convert", "-q"], format, &["-O", "raw", "t", "out"]].concat();
            let words: Vec<_> = words.into_iter().map(String::from).collect();
            let (status, _) = run(folder.path(), &words, None);
            let out = fs::read(folder.path().join("out")).unwrap_or_default();
            let _ = fs::remove_file(folder.path().join("out"));
            (status == 0).then(|| digest(&out))
        })
    }

    /// Runs it, and looks at what it leaves at each call.
    fn go(&self, rng: &mut Rng) -> Result<u64, String> {
        let folder = self.folder(rng);
        let before = files(folder.path());
        let disk = match self.way {
            "create" => vec![0; DISK],
            _ => fs::read(folder.path().join("new")).expect("read"),
        };
        let expected = [digest(&disk)];
        let mut command = Command::new(program());
        let words = self.words(self.way, "new", "t");
        command.args(&words).stdout(Stdio::null());
        let mut program = Supervised::start(command, folder.path(), self.most).expect("start");
        let (mut trace, mut last, mut states) = (Vec::new(), before.clone(), 0);
        while !program.has_ended() {
            program.settle();
            if !program.is_stopped() {
                continue;
            }
            let now = files(folder.path());
            if now != last {
                states += 1;
                self.check(&before, &now, &expected)
                    .map_err(|why| format!("{words:?}, killed after {trace:#?}: {why}"))?;
                last = now;
            }
            trace.push(program.go_on());
        }
        let Ended { status, err } = program.ended();
        let now = files(folder.path());
        let ended = match status {
            // It may be none of a format that needs data.
            0 => match self.found(&now)[0] == Some(expected[0].clone()) {
                true => Ok(()),
                false => Err("it is another disk".into()),
            },
            _ => self.check(&before, &now, &expected),
        };
        let ended = ended.and_then(|()| match status == 1 && self.most.is_none() {
            true if self.way != "import --sha256 BAD" => Err("it has failed".into()),
            _ => Ok(()),
        });
        ended.map_err(|why| format!("{words:?}: status {status}, {err}\n{trace:#?}: {why}"))?;
        Ok(states)
    }
}

fn digest(bytes: &[u8]) -> String {
    format!("{} bytes {:x?}", bytes.len(), &Sha256::digest(bytes)[..4])
}

/// What the files of a target hold; of a link what it leads to.
fn files(folder: &Path) -> Files {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("list") {
        let name = entry.expect("an entry").file_name().into_string().unwrap();
        if name.starts_with('t')
            && let Ok(bytes) = fs::read(folder.join(&name))
        {
            files.push((name, bytes));
        }
    }
    files.sort();
    files
}

#[test]
fn no_kill_leaves_a_part_of_a_new_image() {
    let mut states = 0;
    for seed in cases(12, "runs that make an image") {
        let mut rng = Rng::new(seed);
        let run = Run::random(&mut rng);
        match run.go(&mut rng) {
            Ok(seen) => states += seen,
            Err(why) => panic!("ZEBU_SEED={seed}, {run:?}: {why}"),
        }
    }
    println!("{states} states of new images");
}
