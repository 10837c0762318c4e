//! Scripts in qemu-io's language, run by the program under test and by QEMU on
//! images that are alike.

use std::fs;

use super::{Answer, Lab, compare_answers};

/// Takes times and rates out of an answer.
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

/// An answer without its times and rates.
pub fn timeless_answer(answer: Answer) -> Answer {
    Answer {
        out: timeless(&answer.out),
        ..answer
    }
}

/// Two folders with the same files: what the program under test does in one,
/// QEMU does in the other.
pub struct Twins {
    pub ours: Lab,
    pub theirs: Lab,
}

impl Twins {
    /// The files that a recipe makes.
    #[track_caller]
    pub fn new(recipe: &str) -> Twins {
        let (ours, theirs) = (Lab::new(), Lab::new());
        theirs.make(recipe);
        for entry in fs::read_dir(theirs.path("")).expect("list") {
            let entry = entry.expect("entry");
            let name = entry.file_name();
            let name = name.to_str().expect("UTF-8");
            fs::copy(entry.path(), ours.path(name)).expect("copy");
        }
        Twins { ours, theirs }
    }

    /// Runs a script, from arguments or from standard input, in both; fails
    /// the test unless the answers are the same.
    #[track_caller]
    pub fn same(&self, args: &[&str], script: &str) -> Answer {
        let ours = timeless_answer(self.ours.zebu_io_script(args, script));
        let theirs = timeless_answer(self.theirs.qemu_io_script(args, script));
        compare_answers(&ours, &theirs, args, script);
        ours
    }

    /// Fails the test unless both disks read the same and ours is sound.
    #[track_caller]
    pub fn same_disk(&self, file: &str, format: &str) {
        let ours = self.ours.path(file);
        let ours = ours.to_str().expect("UTF-8");
        let args = ["compare", "-f", format, "-F", format, file, ours];
        self.theirs.qemu_img(&args).ok("compare");
        if format == "qcow2" {
            let check = self.theirs.qemu_img(&["check", ours]).ok("check");
            assert!(check.out.contains("No errors"), "{check:#?}");
        }
    }
}
