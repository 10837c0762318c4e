//! A first backup that fails: nothing is left of its set, and nothing in the image.

use std::fs;
use std::process::ExitStatus;

use crate::common::stopping::start;
use crate::common::{Lab, Rng, cases, program};

/// What there may be before where the set is to be: commands of a shell.
const FOLDERS: [(&str, &str); 4] = [
    ("none", ""),
    ("an empty one", "mkdir -p a/set"),
    ("its parent", "mkdir a"),
    (
        "the lock of one that was killed",
        "mkdir -p a/set; : > a/set/lock",
    ),
];

/// Why it fails: commands of a shell, of which the last one is the backup.
const FAILURES: [(&str, &str); 6] = [
    ("no source", "$Z backup -f qcow2 nothing --to a/set"),
    ("another format", "$Z backup -f vmdk disk --to a/set"),
    (
        "the second disk is missing",
        "$Z backup -f qcow2 disk nothing --to a/set",
    ),
    ("two of one name", "$Z backup -f qcow2 disk disk --to a/set"),
    (
        "a file outgrows its limit",
        "trap '' XFSZ; ulimit -f 2048; $Z backup -f qcow2 disk --to a/set",
    ),
    ("nothing to keep less of", "$Z backup keep a/set 0"),
];

/// What is in the folder, and the bitmaps of the disk.
fn state(lab: &Lab) -> String {
    let list = "find . | grep -v '/lock$' | sort; $Z info -f qcow2 disk | grep 'zebu-'; true";
    lab.shell(&list.replace("$Z", program().to_str().unwrap()))
        .ok("a list")
        .out
}

fn prepared(folder: &str) -> Lab {
    let lab = Lab::new();
    lab.make("create plain 8M; io plain: write -P 7 0 8M; img convert -c -O qcow2 plain disk");
    lab.shell(folder).ok("the folder");
    lab
}

#[test]
fn a_first_backup_that_fails_leaves_nothing() {
    for (was, folder) in FOLDERS {
        let lab = prepared(folder);
        let before = state(&lab);
        for (why, command) in FAILURES {
            let answer = lab.shell(&command.replace("$Z", program().to_str().unwrap()));
            let case = format!("{was}, {why}: {answer:?}");
            assert_ne!(answer.status, 0, "{case}");
            assert_eq!(state(&lab), before, "{case}");
            assert!(
                !lab.path("a/set/lock").exists() || was.contains("lock"),
                "{case}"
            );
        }
        lab.zebu(&["backup", "-f", "qcow2", "disk", "--to", "a/set"])
            .ok("then it works");
        lab.zebu(&["backup", "verify", "a/set"]).ok("verify");
    }
}

#[test]
fn a_first_backup_that_is_stopped_leaves_nothing() {
    for (_, folder) in FOLDERS {
        let lab = prepared(folder);
        let before = state(&lab);
        let args = ["backup", "-r", "1M", "-f", "qcow2", "disk", "--to", "a/set"];
        let mut child = start(&lab, &args);
        while fs::read_dir(lab.path("a/set")).map_or(0, Iterator::count) < 3 {
            assert!(child.try_wait().expect("wait").is_none(), "it ended");
            std::thread::yield_now();
        }
        // SAFETY: the child was not waited for, so the id is its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTERM) }, 0);
        assert_eq!(
            child.wait().expect("wait").code(),
            Some(128 + libc::SIGTERM)
        );
        assert_eq!(state(&lab), before);
    }
}

/// The files of others are not a set's.
#[test]
fn a_folder_with_other_files_stays_as_it_was() {
    let lab = prepared("mkdir -p a/set; : > a/set/letter");
    let before = state(&lab);
    let answer = lab.zebu(&["backup", "-f", "qcow2", "disk", "--to", "a/set"]);
    assert_eq!(answer.status, 1);
    assert_eq!(state(&lab), before);
    assert!(!lab.path("a/set/lock").exists());
}

/// Several programs begin one set at once, and some of them fail: nobody removes what another one fills.
#[test]
fn one_that_fails_leaves_the_set_of_another_one() {
    let mut rng = Rng::new(1);
    let mut taken = 0;
    for round in cases(8, "backups that begin one set") {
        let lab = prepared(FOLDERS[rng.below(4) as usize].1);
        let mut children = Vec::new();
        for _ in 0..4 {
            let disk = rng.pick(&["disk", "nothing"]);
            let args = ["backup", "-q", "-f", "qcow2", disk, "--to", "a/set"];
            children.push(start(&lab, &args));
            std::thread::sleep(std::time::Duration::from_micros(rng.below(8000)));
        }
        let ended = children
            .into_iter()
            .map(|mut child| child.wait().expect("wait"));
        let points = ended.filter(ExitStatus::success).count();
        assert_eq!(
            super::backup::points_in(&lab, "a/set").len(),
            points,
            "round {round}"
        );
        if points > 0 {
            lab.zebu(&["backup", "verify", "a/set"]).ok("verify");
        }
        taken += points;
    }
    println!("{taken} points");
}
