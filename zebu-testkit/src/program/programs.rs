//! The programs: QEMU's, which images are made with and answers are compared with, and the
//! program under test.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The QEMU that images are made with and answers are compared with.
pub struct Peer {
    img: PathBuf,
    pub io: PathBuf,
    /// Major version of QEMU.
    pub major: u32,
}

/// The QEMU to compare with.
///
/// # Panics
///
/// If there is none.
pub fn peer() -> &'static Peer {
    static PEER: OnceLock<Peer> = OnceLock::new();
    PEER.get_or_init(|| {
        let named = |var, default: &str| {
            std::env::var_os(var).map_or_else(|| PathBuf::from(default), program_path)
        };
        let img = named("ZEBU_QEMU_IMG", "qemu-img");
        let io = named("ZEBU_QEMU_IO", "qemu-io");
        let version = |program: &Path| {
            let answer = Command::new(program)
                .arg("--version")
                .output()
                .unwrap_or_else(|error| {
                    panic!(
                        "cannot run {}: {error}. These tests compare with QEMU: install qemu-utils \
                         (Debian, Ubuntu) or qemu-img (Fedora), or name the programs in \
                         ZEBU_QEMU_IMG and ZEBU_QEMU_IO",
                        program.display()
                    )
                });
            let text = String::from_utf8_lossy(&answer.stdout).into_owned();
            text.split("version ")
                .nth(1)
                .and_then(|rest| rest.split('.').next())
                .and_then(|major| major.trim().parse::<u32>().ok())
                .unwrap_or_else(|| panic!("{}: no version in {text:?}", program.display()))
        };
        let major = version(&img);
        version(&io);
        Peer { img, io, major }
    })
}

impl Peer {
    /// Whether this is a QEMU whose output zebu follows, so that outputs are
    /// compared byte for byte.
    pub fn is_current(&self) -> bool {
        self.major >= 10
    }

    /// Whether this is a QEMU whose options zebu has.
    pub fn is_newest(&self) -> bool {
        self.major >= 11
    }

    /// qemu-img.
    pub fn img(&self) -> &Path {
        &self.img
    }

    /// The qemu-nbd in the directory of qemu-img.
    pub fn nbd(&self) -> PathBuf {
        self.img.with_file_name("qemu-nbd")
    }

    /// The qemu-storage-daemon in the directory of qemu-img.
    pub fn storage_daemon(&self) -> PathBuf {
        self.img.with_file_name("qemu-storage-daemon")
    }
}

/// A name without a slash is looked up on `PATH`. A path is made absolute, because
/// programs run in other folders than the tests.
fn program_path(named: OsString) -> PathBuf {
    let path = PathBuf::from(named);
    if path.components().count() > 1 {
        std::path::absolute(&path).expect("a current folder")
    } else {
        path
    }
}

/// The program under test.
struct Subject {
    program: PathBuf,
    /// The qemu-io to run for `io`; `None` for zebu, which has it as a subcommand.
    io: Option<PathBuf>,
}

fn subject() -> &'static Subject {
    static SUBJECT: OnceLock<Subject> = OnceLock::new();
    SUBJECT.get_or_init(|| {
        let program = std::env::var_os("ZEBU_TEST_BIN")
            .map_or_else(|| crate::built().join("zebu"), program_path);
        let io = (program.file_name() == Some(OsStr::new("qemu-img")))
            .then(|| program.with_file_name("qemu-io"));
        Subject { program, io }
    })
}

/// The program under test.
pub fn program() -> &'static Path {
    &subject().program
}

/// Whether QEMU is tested in the place of zebu.
pub fn testing_qemu() -> bool {
    subject().io.is_some()
}

/// For tests that demand more than QEMU does. If QEMU is tested, prints the reason
/// and returns true: the test is skipped.
pub fn beyond_qemu(why: &str) -> bool {
    if testing_qemu() {
        println!("skipped, QEMU is tested: {why}");
    }
    testing_qemu()
}

/// The program and the arguments that run `io` of the program under test.
pub fn io_subject<'a>(args: &[&'a str]) -> (&'static Path, Vec<&'a str>) {
    let subject = subject();
    match &subject.io {
        Some(io) => (io, args.to_vec()),
        None => {
            let mut all = vec!["io"];
            all.extend(args);
            (&subject.program, all)
        }
    }
}
