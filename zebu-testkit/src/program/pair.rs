//! Two folders with the same images. The program under test changes them in one and QEMU in the
//! other; then they must be alike.

use std::process::Command;

use super::{Answer, Lab, compare_answers, peer};

/// The two folders.
pub struct Pair {
    pub ours: Lab,
    pub theirs: Lab,
}

impl Pair {
    /// Both folders with the images of a recipe; see [`Lab::make`].
    #[track_caller]
    pub fn new(recipe: &str) -> Self {
        let ours = Lab::new();
        ours.make(&compressed_first(recipe));
        let theirs = Lab::new();
        let pair = Pair { ours, theirs };
        pair.copy();
        pair
    }

    /// Adds the images of a recipe to both.
    #[track_caller]
    pub fn make(&self, recipe: &str) {
        self.ours.make(&compressed_first(recipe));
        self.copy();
    }

    /// Makes the second folder like the first.
    #[track_caller]
    fn copy(&self) {
        let from = self.ours.path("");
        let status = Command::new("cp")
            .args(["-a", "--sparse=always", "."])
            .arg(self.theirs.path(""))
            .current_dir(from)
            .status()
            .expect("cp");
        assert!(status.success());
    }

    /// Runs a command in both. Messages and status must be the same; with an older QEMU, the
    /// status.
    #[track_caller]
    pub fn both(&self, args: &[&str]) -> Answer {
        let ours = without_path(self.ours.zebu(args));
        let theirs = without_path(self.theirs.qemu_img(args));
        if peer().is_current() {
            compare_answers(&ours, &theirs, args, "the same command by both");
        } else {
            assert_eq!(
                ours.status, theirs.status,
                "{args:?}: {ours:#?}\n{theirs:#?}"
            );
        }
        ours
    }

    /// Runs a command in both, as [`both`](Self::both); it must succeed.
    #[track_caller]
    pub fn succeed(&self, args: &[&str]) -> Answer {
        self.both(args).ok(&format!("{args:?}"))
    }

    /// Runs a command in both, as [`both`](Self::both); it must fail.
    #[track_caller]
    pub fn fail(&self, args: &[&str]) {
        let answer = self.both(args);
        assert_eq!(answer.status, 1, "{args:?}: {answer:#?}");
    }

    /// Fails the test unless the images pass `check` and have the same `info` and content.
    #[track_caller]
    pub fn assert_alike(&self, names: &[&str], what: &str) {
        for name in names {
            if self.format(&self.ours, name) == "qcow2" {
                for check in [
                    self.ours.qemu_img(&["check", name]),
                    self.ours.zebu(&["check", name]),
                ] {
                    assert_eq!(check.status, 0, "{what}: check of {name}: {check:#?}");
                }
            }
            let (ours, theirs) = (self.info(&self.ours, name), self.info(&self.theirs, name));
            assert_eq!(ours, theirs, "{what}: info of {name}");
            let other = self.theirs.path(name);
            let other = other.to_str().expect("UTF-8");
            let compared = self.ours.qemu_img(&["compare", name, other]);
            assert_eq!(compared.status, 0, "{what}: {name}: {compared:#?}");
        }
    }

    /// Runs qemu-io commands, from arguments or from standard input, in both. The answers must be
    /// the same without times and rates. None: QEMU crashed, and the folders may differ.
    #[track_caller]
    pub fn same_io(&self, args: &[&str], script: &str) -> Option<Answer> {
        let ours = timeless_answer(self.ours.zebu_io_script(args, script));
        let theirs = timeless_answer(self.theirs.qemu_io_script(args, script));
        if theirs.is_crash_of_qemu(script) {
            ours.orderly(script);
            return None;
        }
        compare_answers(&ours, &theirs, args, script);
        Some(ours)
    }

    /// Fails the test unless both disks have the same content, and ours has no errors.
    #[track_caller]
    pub fn assert_same_disk(&self, file: &str, format: &str) {
        let ours = self.ours.path(file);
        let ours = ours.to_str().expect("UTF-8");
        let args = ["compare", "-f", format, "-F", format, file, ours];
        self.theirs.qemu_img(&args).ok("compare");
        if format == "qcow2" {
            let check = self.theirs.qemu_img(&["check", ours]).ok("check");
            assert!(check.out.contains("No errors"), "{check:#?}");
        }
    }

    fn format(&self, lab: &Lab, name: &str) -> String {
        let info = self.info(lab, name);
        info["format"].as_str().unwrap_or_default().to_string()
    }

    /// The output of `info` without size on disk and file names.
    #[track_caller]
    fn info(&self, lab: &Lab, name: &str) -> serde_json::Value {
        let answer = lab.qemu_img(&["info", "--output=json", name]).ok("info");
        let mut info: serde_json::Value = serde_json::from_str(&answer.out).expect("JSON");
        let map = info.as_object_mut().expect("an object");
        map.remove("children");
        map.remove("actual-size");
        info
    }
}

/// Makes each `random` step write compressed data first, and everything else in a second run:
/// QEMU may append compressed data to a cluster that it has freed in the same session.
fn compressed_first(recipe: &str) -> String {
    let steps = recipe.split(';').map(|step| {
        let words: Vec<&str> = step.split_whitespace().collect();
        match words[..] {
            ["random", file, seed, count, kinds] if kinds.contains('c') => {
                let others = kinds.replace('c', "");
                format!("random {file} {seed} {count} c; random {file} {seed} {count} {others}")
            }
            _ => step.to_string(),
        }
    });
    steps.collect::<Vec<_>>().join(";")
}

/// Replaces the program's path in the line that refers to the help.
fn without_path(mut answer: Answer) -> Answer {
    let lines = answer.err.split_inclusive('\n').map(|line| {
        let path = line
            .strip_prefix("Try '")
            .and_then(|rest| rest.split(' ').next());
        path.map_or_else(|| line.to_string(), |path| line.replace(path, "PROGRAM"))
    });
    answer.err = lines.collect();
    answer
}

/// Fails the test unless an image has the content of a raw file.
#[track_caller]
pub fn assert_content(lab: &Lab, image: &str, raw: &str, what: &str) {
    let compared = lab.qemu_img(&["compare", "-F", "raw", image, raw]);
    assert_eq!(compared.status, 0, "{what}: {image}: {compared:#?}");
}

/// Replaces times and rates in the output of qemu-io.
fn timeless(text: &str) -> String {
    let mut kept = String::new();
    for line in text.split_inclusive('\n') {
        let ops = line.find(" ops; ");
        let machine = line.split(',').count() == 5 && line.contains(",0:00:");
        match ops {
            Some(at) => {
                kept.push_str(&line[..at]);
                kept.push_str(" ops; (…)\n");
            }
            None if machine => {
                let fields: Vec<&str> = line.split(',').take(2).collect();
                kept.push_str(&fields.join(","));
                kept.push_str(",…\n");
            }
            None => kept.push_str(line),
        }
    }
    kept
}

/// An answer of qemu-io without times and rates.
pub fn timeless_answer(answer: Answer) -> Answer {
    Answer {
        out: timeless(&answer.out),
        ..answer
    }
}
