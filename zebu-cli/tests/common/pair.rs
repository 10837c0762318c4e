//! Two folders with the same images: in one the program under test changes
//! them, in the other the peer, and then they must be alike.

use std::path::Path;
use std::process::Command;

use super::{Answer, Lab, compare_answers, peer};

/// The two folders.
pub struct Pair {
    pub ours: Lab,
    pub theirs: Lab,
}

impl Pair {
    /// Both with the images of a recipe; see [`Lab::make`].
    #[track_caller]
    pub fn new(recipe: &str) -> Self {
        let ours = Lab::new();
        ours.make(&compressed_first(recipe));
        let theirs = Lab::new();
        let pair = Pair { ours, theirs };
        pair.copy();
        pair
    }

    /// Adds what a recipe makes to both.
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

    /// The same command by both: message and status must be the same (of an
    /// older peer, the status).
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

    /// The same, and it must succeed.
    #[track_caller]
    pub fn succeed(&self, args: &[&str]) -> Answer {
        self.both(args).ok(&format!("{args:?}"))
    }

    /// The same, and it must fail.
    #[track_caller]
    pub fn fail(&self, args: &[&str]) {
        let answer = self.both(args);
        assert_eq!(answer.status, 1, "{args:?}: {answer:#?}");
    }

    /// Fails the test unless the images of both are whole, say the same of
    /// themselves, and have the same content.
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

    fn format(&self, lab: &Lab, name: &str) -> String {
        let info = self.info(lab, name);
        info["format"].as_str().unwrap_or_default().to_string()
    }

    /// What `info` says, but for what it costs on the disk and where it is.
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

/// QEMU adds compressed data to a cluster that it has freed meanwhile, and
/// damages the image so; it forgets that cluster when it opens the image anew.
/// So `random` writes what is compressed first, and all else in a second run.
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

/// The line that names the help names the program by its path.
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

/// Fails the test unless an image of the program under test has the content of
/// a file that was made before.
#[track_caller]
pub fn assert_content(lab: &Lab, image: &str, raw: &str, what: &str) {
    assert!(Path::new(&lab.path(raw)).exists());
    let compared = lab.qemu_img(&["compare", "-F", "raw", image, raw]);
    assert_eq!(compared.status, 0, "{what}: {image}: {compared:#?}");
}
