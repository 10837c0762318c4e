//! How a container is spelt. Whatever the order, blanks, encoding, names and copies in which the same
//! disk is described: the disk is right, or the command refuses it by the name of its format. It is
//! never a raw disk with status 0, for `convert`, `info`, strict mode, `import`, from a stream without a
//! name, and as a backing file whose format is guessed.
//!

mod others;
mod ova;
mod qcow2;
mod vmdk;

use zebu_testkit::library::small_images as images;
use zebu_testkit::program::{self as common};

use std::fs;

use common::{Lab, Rng, cases};

/// Runs `test` for each spelling, which tells it by what it returns.
fn for_each_spelling(what: &str, test: impl Fn(&Lab, &mut Rng) -> String) {
    for seed in cases(6, format!("spellings of {what}")) {
        let spelt = test(&Lab::new(), &mut Rng::new(seed));
        if zebu_testkit::trace() {
            println!("{what}: seed {seed}: {spelt}");
        }
    }
}

/// A container in a lab.
#[derive(Clone, Copy)]
struct Container<'a> {
    lab: &'a Lab,
    /// Its file.
    name: &'a str,
    /// What the disk reads as.
    disk: &'a [u8],
    /// One of these is in the message that refuses it. Empty: it must be read.
    refused_as: &'a [&'a str],
    /// The disk is in other files, which strict mode does not open.
    has_files: bool,
    /// What tells it apart.
    spelt: &'a str,
}

impl Container<'_> {
    /// Fails unless each command gives the disk, or refuses the container by its name.
    #[track_caller]
    fn judge(&self) {
        self.judge_by_name();
        self.judge_streams();
    }

    /// As [`Container::judge`], of the container by the name of its file.
    #[track_caller]
    fn judge_by_name(&self) {
        let Container { lab, name, .. } = *self;
        self.gives("convert", &["convert", "-O", "raw", name, "out"], 1, false);
        self.gives(
            "convert --untrusted",
            &["--untrusted", "convert", "-O", "raw", name, "out"],
            1,
            self.has_files,
        );
        self.gives("import", &["import", name, "out"], 2, self.has_files);
        for strict in [&[][..], &["--untrusted"]] {
            let answer = lab.zebu(&[strict, &["info", "--output=json", name]].concat());
            match answer.status {
                0 => assert!(
                    !answer.out.contains("\"format\": \"raw\",\n    \"actual"),
                    "info takes it for a raw disk: {}: {answer:#?}",
                    self.spelt
                ),
                _ => self.is_refused(&answer, "info"),
            }
        }
        self.is_guessed_behind_an_overlay();
    }

    /// As [`Container::judge`], of a stream, which has no name: a file as standard input, and a pipe.
    #[track_caller]
    fn judge_streams(&self) {
        let name = self.name;
        for (what, line, status) in [
            ("import <", format!("$0 import --spill . - out < {name}"), 2),
            (
                "import |",
                format!("cat {name} | $0 import --spill . - out"),
                2,
            ),
            (
                "convert |",
                format!("cat {name} | $0 convert --spill . - out"),
                1,
            ),
        ] {
            let _ = fs::remove_file(self.lab.path("out"));
            let answer = self.lab.shell(&line);
            self.is_given(&answer, what, status, self.has_files);
        }
    }

    #[track_caller]
    fn is_refused(&self, answer: &common::Answer, what: &str) {
        answer.orderly(what);
        let is_named = self.refused_as.iter().any(|name| answer.err.contains(name));
        assert!(is_named, "{what}: {}: {answer:#?}", self.spelt);
    }

    #[track_caller]
    fn gives(&self, what: &str, args: &[&str], status: i32, may_be_strict: bool) {
        let out = self.lab.path("out");
        let _ = fs::remove_file(&out);
        self.is_given(&self.lab.zebu(args), what, status, may_be_strict);
    }

    #[track_caller]
    fn is_given(&self, answer: &common::Answer, what: &str, status: i32, may_be_strict: bool) {
        if answer.status != 0 {
            let is_strict = may_be_strict && answer.err.contains("which it may not open");
            if !is_strict {
                self.is_refused(answer, what);
            }
            assert_eq!(answer.status, status, "{what}: {}: {answer:#?}", self.spelt);
            return;
        }
        let found = fs::read(self.lab.path("out")).unwrap();
        assert!(
            found == self.disk,
            "{what}: {} bytes that are not the disk's: {}",
            found.len(),
            self.spelt
        );
    }

    /// An overlay of an old program does not say what its backing file is.
    #[track_caller]
    fn is_guessed_behind_an_overlay(&self) {
        let lab = self.lab;
        let size = self.disk.len().to_string();
        let create = [
            "create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", self.name,
        ];
        lab.zebu(&[&create[..], &["over.qcow2", &size]].concat())
            .ok("an overlay");
        let mut over = fs::read(lab.path("over.qcow2")).unwrap();
        let said = over.windows(4).position(|w| w == [0xe2, 0x79, 0x2a, 0xca]);
        over[said.expect("the backing format")..][..4].copy_from_slice(b"none");
        fs::write(lab.path("over.qcow2"), over).unwrap();
        let args = ["convert", "-O", "raw", "over.qcow2", "out"];
        self.gives("behind an overlay", &args, 1, false);
    }
}

/// The content of a disk of whole sectors, without a header of its own.
fn content(random: &mut Rng, sectors: u64) -> Vec<u8> {
    let byte = |nth: u64, random: &mut Rng| match nth % 512 {
        0..8 => b'd',
        _ => random.next() as u8,
    };
    (0..sectors * 512).map(|nth| byte(nth, random)).collect()
}
