//! The same for images of the other formats that are written in place: zebu and QEMU write to one in
//! turn, by `io` with any cache mode, also killed after a flush, as the target of `convert -n` and as
//! the base of `commit`. After each step both read the same, and find no errors.

use std::fs;
use std::path::Path;

use crate::common::Rng;
use crate::make::either;
use crate::program::{By, Shell};
use crate::world::{compare, done, words};
use zebu_testkit::{Written, work};

const MIB: u64 = 1 << 20;

/// An image, and its expected content.
struct Image {
    written: Written,
    /// It is within the disk of a qcow2 image.
    is_inside: bool,
    bytes: Vec<u8>,
}

type Result<T> = std::result::Result<T, String>;

impl Image {
    fn new(shell: &mut Shell, rng: &mut Rng, written: Written) -> Result<Self> {
        let size = 512 * (1 + rng.below(7 * MIB / 512));
        let mut args = words(&written.create());
        args.extend(["x".into(), size.to_string()]);
        done(shell.img(either(rng), ".", &args)?)?;
        // A dynamic VHDX has its new blocks at the end, and the disk that it is in does not grow.
        let is_inside = !written.options.contains("dynamic") && rng.one_in(2);
        if is_inside {
            let args = words(&["convert", "-f", "raw", "-O", "qcow2", "x", "outer"]);
            done(shell.img(either(rng), ".", &args)?)?;
            let args = words(&["resize", "-q", "-f", "qcow2", "outer", "32M"]);
            done(shell.img(either(rng), ".", &args)?)?;
        }
        Ok(Image {
            written,
            is_inside,
            bytes: vec![0; size as usize],
        })
    }

    /// Its format and name as arguments.
    fn place(&self) -> Vec<String> {
        let name = self.written.name;
        match self.is_inside {
            true => vec![format!(
                "json:{{'driver':'{name}','file':{{'driver':'qcow2','file.filename':'outer'}}}}"
            )],
            false => words(&["-f", name, "x"]),
        }
    }

    fn step(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        match rng.below(8) {
            0 if !self.is_inside => self.convert(shell, rng),
            1 if !self.is_inside => self.commit(shell, rng),
            2 => self.session(shell, rng, true),
            _ => self.session(shell, rng, false),
        }
    }

    /// A random range.
    fn range(&self, rng: &mut Rng) -> std::ops::Range<usize> {
        let size = self.bytes.len() as u64;
        let unit = [1, 512, 4096, MIB][rng.below(4) as usize];
        let most = [4096, 70_000, 2 * MIB + 5000][rng.below(3) as usize];
        let at = rng.below(size) / unit * unit;
        let length = (1 + rng.below(most)).next_multiple_of(unit).min(size - at);
        at as usize..(at + length) as usize
    }

    fn session(&mut self, shell: &mut Shell, rng: &mut Rng, killed: bool) -> Result<()> {
        let by = either(rng);
        let concurrent = rng.one_in(2);
        let mut commands = Vec::new();
        let mut in_flight: Vec<std::ops::Range<usize>> = Vec::new();
        for _ in 0..1 + rng.below(12) {
            let range = self.range(rng);
            let (at, length) = (range.start, range.len());
            let byte = 1 + rng.below(255) as u8;
            let (command, byte) = match rng.below(8) {
                0 => (format!("write -z {at} {length}"), 0),
                1 => (format!("write -z -u {at} {length}"), 0),
                // QEMU leaves what it discards.
                2 if by == By::Zebu && !concurrent => (format!("discard {at} {length}"), 0),
                _ => (format!("write -P {byte} {at} {length}"), byte),
            };
            if concurrent {
                let apart = |other: &std::ops::Range<usize>| {
                    other.end <= range.start || range.end <= other.start
                };
                if !in_flight.iter().all(apart) {
                    in_flight.clear();
                    commands.push("aio_flush".into());
                }
                in_flight.push(range.clone());
                commands.push(format!("aio_{command}"));
            } else {
                commands.push(command);
            }
            if rng.one_in(6) {
                in_flight.clear();
                commands.extend(words(&["aio_flush", "flush"]));
            }
            self.bytes[range].fill(byte);
        }
        commands.extend(words(&["aio_flush", "flush"]));
        commands.extend(killed.then(|| "abort".into()));
        let cache = ["writeback", "none", "writethrough", "directsync", "unsafe"];
        let cache = cache[rng.below(5) as usize];
        let args = [words(&["-d", "unmap", "-t", cache]), self.place()].concat();
        let answer = shell.io(by, ".", &args, &commands)?;
        let right = match killed {
            true => answer.status >= 128,
            false => answer.status == 0 && !answer.out.contains("failed"),
        };
        if !right {
            return Err(format!("{by:?} session: {}", answer.text()));
        }
        // QEMU only reads it afterwards.
        match killed.then_some(()).filter(|()| self.written.has_log) {
            // What opens it for writing carries out the log itself.
            Some(_) if rng.one_in(2) => self.session(shell, rng, false),
            Some(_) => {
                let args = [words(&["check", "-q", "-r", "all"]), self.place()].concat();
                done(shell.img(either(rng), ".", &args)?).map(drop)
            }
            None => Ok(()),
        }
    }

    /// The image is the target of a conversion.
    fn convert(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        for _ in 0..1 + rng.below(5) {
            let range = self.range(rng);
            self.bytes[range].fill(rng.below(256) as u8);
        }
        fs::write(shell.root.join("source"), &self.bytes).map_err(|e| e.to_string())?;
        let mut args = words(&["convert", "-n", "-f", "raw", "-O", self.written.name]);
        args.extend(rng.one_in(2).then(|| "-W".into()));
        args.extend(words(&["source", "x"]));
        done(shell.img(either(rng), ".", &args)?).map(drop)
    }

    /// An image over it is committed.
    fn commit(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let mut args = words(&["create", "-q", "-f", "qcow2", "-b", "x"]);
        args.extend(words(&["-F", self.written.name, "top"]));
        done(shell.img(either(rng), ".", &args)?)?;
        let mut commands = Vec::new();
        for _ in 0..1 + rng.below(5) {
            let range = self.range(rng);
            let byte = rng.below(256) as u8;
            let (at, length) = (range.start, range.len());
            commands.push(match byte {
                0..64 => format!("write -z {at} {length}"),
                _ => format!("write -P {byte} {at} {length}"),
            });
            self.bytes[range].fill(if byte < 64 { 0 } else { byte });
        }
        let args = words(&["-f", "qcow2", "top"]);
        done(shell.io(either(rng), ".", &args, &commands)?)?;
        let mut args = words(&["commit", "-q", "-f", "qcow2"]);
        args.extend(rng.one_in(2).then(|| "-d".into()));
        args.push("top".into());
        done(shell.img(either(rng), ".", &args)?)?;
        fs::remove_file(shell.root.join("top")).map_err(|e| e.to_string())
    }

    /// Both programs find no errors, and read what is expected.
    fn verify(&self, shell: &mut Shell) -> Result<()> {
        for by in [By::Qemu, By::Zebu] {
            if self.written.is_checked {
                let args = [words(&["check", "-q"]), self.place()].concat();
                done(shell.img(by, ".", &args)?).map_err(|e| format!("{by:?} checks: {e}"))?;
            }
            let mut args = words(&["convert", "-O", "raw"]);
            args.extend(self.place().into_iter().chain(["out".into()]));
            done(shell.img(by, ".", &args)?).map_err(|e| format!("{by:?} reads: {e}"))?;
            let out = fs::read(shell.root.join("out")).map_err(|e| e.to_string())?;
            compare(&out, &self.bytes).map_err(|e| format!("{by:?} reads: {e}"))?;
        }
        Ok(())
    }
}

fn run(seed: u64, written: Written, steps: u64) -> std::result::Result<(), (String, Vec<String>)> {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = tempfile::tempdir_in(place).expect("a temporary folder");
    let mut shell = Shell::new(folder.path());
    let mut all = || {
        let mut rng = Rng::new(seed);
        let mut image = Image::new(&mut shell, &mut rng, written)?;
        for _ in 0..steps {
            image.step(&mut shell, &mut rng)?;
            image.verify(&mut shell)?;
        }
        Ok(())
    };
    all().map_err(|why| (why, shell.log))
}

#[test]
fn images_of_other_formats() {
    let mut seeds = work(
        40,
        "steps of zebu and QEMU in turn on images of other formats",
    );
    while let Some(seed) = seeds.next() {
        for written in Written::others() {
            let steps = 5;
            if let Err((why, log)) = run(seed, written, steps) {
                panic!("seed {seed}, {written:?}: {}\n{why}", log.join("\n"));
            }
            seeds.add(steps);
        }
    }
}
