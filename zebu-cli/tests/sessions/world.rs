//! The image, what is behind it, and what is known of both.

use std::fs::{self, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::bytes;
use crate::program::{Answer, By, Shell, engines};
use crate::rng::Rng;

/// The unit of what is written.
pub const SECTOR: usize = 512;

/// What a disk must read as.
#[derive(Clone, Default)]
pub struct Disk {
    pub bytes: Vec<u8>,
    /// By sector: the image itself must say what is there, whatever is behind it.
    pub own: Vec<bool>,
}

impl Disk {
    pub fn new(bytes: Vec<u8>) -> Self {
        let own = vec![false; bytes.len() / SECTOR];
        Disk { bytes, own }
    }

    pub fn put(&mut self, at: usize, length: usize, byte: u8, own: bool) {
        self.bytes[at..at + length].fill(byte);
        self.own[at / SECTOR..(at + length) / SECTOR].fill(own);
    }

    pub fn resize(&mut self, length: usize) {
        self.bytes.resize(length, 0);
        self.own.resize(length / SECTOR, false);
    }

    pub fn disown(&mut self) {
        self.own.fill(false);
    }
}

/// A part of the mapping.
struct Part {
    start: usize,
    length: usize,
    /// The image itself says it.
    own: bool,
    /// It is data, not zeroes.
    data: bool,
    /// Where it is in the file.
    host: Option<usize>,
}

/// An internal snapshot.
pub struct Snap {
    pub name: String,
    pub disk: Disk,
}

/// An image that may be behind the one that is changed.
pub struct Base {
    pub name: String,
    pub format: &'static str,
    pub bytes: Vec<u8>,
    /// What is behind it.
    pub backing: Option<usize>,
}

/// How the image was made, as far as steps depend on it.
#[derive(Clone, Default)]
pub struct Kind {
    pub cluster: usize,
    pub version: u32,
    pub extended: bool,
    /// Its name as the header has it, and whether it is the raw disk.
    pub data_file: Option<(String, bool)>,
}

/// The image and all around it.
pub struct World {
    /// The image's name in its folder.
    pub name: String,
    pub kind: Kind,
    /// Folder in which commands run if the image has a relative data file name.
    pub fixed_cwd: Option<&'static str>,
    pub disk: Disk,
    /// By cluster: something may have been allocated there since it was made.
    pub touched: Vec<bool>,
    pub snaps: Vec<Snap>,
    pub bases: Vec<Base>,
    /// What is behind the image.
    pub base: Option<usize>,
    /// What the last cluster has behind the end of the disk is zero: QEMU wrote
    /// nothing there, which may leave other content.
    pub clean_end: bool,
    /// It was left by a program that was killed: clusters may be leaked, and it
    /// may be marked dirty.
    pub killed: bool,
    /// Number of names given.
    pub count: u32,
}

/// Parts of names that mean something elsewhere, or are not UTF-8.
const ODD: [&str; 12] = [
    "",
    "",
    " ",
    ",",
    ":",
    "=",
    "\n",
    "%41",
    "\u{e9}",
    "\u{e0ff}",
    "\u{e0e2}\u{e082}",
    "\u{e0c0}\u{e080}\"\\",
];

/// A file name in the folder of the image, as it is written where a protocol may begin it.
pub fn odd_name(rng: &mut Rng, start: &str, end: &str) -> String {
    let odd = rng.pick(&ODD);
    let folder = if odd == ":" { "./" } else { "" };
    format!("{folder}{start}{odd}{end}")
}

/// A name in a list of options.
pub fn as_value(name: &str) -> String {
    name.replace(',', ",,")
}

pub const FOLDERS: [&str; 3] = [".", "img", "other"];

impl World {
    /// The folder to run in, and the image's name from there.
    pub fn place(&self, shell: &Shell, rng: &mut Rng) -> (&'static str, String) {
        self.place_of(&self.name, shell, rng)
    }

    pub fn place_of(&self, name: &str, shell: &Shell, rng: &mut Rng) -> (&'static str, String) {
        let cwd = self.fixed_cwd.unwrap_or_else(|| rng.pick(&FOLDERS));
        let name = match (rng.below(4), cwd) {
            (0, _) => shell.absolute(name),
            (_, ".") => format!("img/{name}"),
            (_, "img") => name.to_string(),
            _ => format!("../img/{name}"),
        };
        (cwd, name)
    }

    pub fn path(&self, shell: &Shell) -> PathBuf {
        shell.root.join("img").join(bytes::os(&self.name))
    }

    /// Of the external data file, if there is one.
    pub fn data_path(&self, shell: &Shell) -> Option<PathBuf> {
        let (name, _) = self.kind.data_file.as_ref()?;
        let folder = shell.root.join(self.fixed_cwd.unwrap_or("img"));
        Some(folder.join(bytes::os(name)))
    }

    pub fn size(&self) -> usize {
        self.disk.bytes.len()
    }

    pub fn clusters(&self) -> usize {
        self.size().div_ceil(self.kind.cluster)
    }

    pub fn is_data_raw(&self) -> bool {
        self.kind.data_file.as_ref().is_some_and(|d| d.1)
    }

    /// What the base shows in the first `size` bytes.
    pub fn below(&self, base: Option<usize>, size: usize) -> Vec<u8> {
        let mut bytes = base.map_or_else(Vec::new, |b| self.bases[b].bytes.clone());
        bytes.resize(size, 0);
        bytes
    }

    /// Which sectors the image itself says something of, as QEMU has it.
    pub fn mapped(&self, shell: &mut Shell, rng: &mut Rng) -> Result<Vec<bool>, String> {
        let mut own = vec![false; self.size() / SECTOR];
        for part in self.map(shell, rng)? {
            own[part.start / SECTOR..(part.start + part.length).div_ceil(SECTOR)].fill(part.own);
        }
        Ok(own)
    }

    /// Whether the cluster at a host offset has plain data of the active disk.
    fn is_data(&self, shell: &mut Shell, rng: &mut Rng, host: u64) -> Result<bool, String> {
        let host = host as usize;
        let here = |part: Part| {
            let at = part.host.filter(|_| part.own);
            at.is_some_and(|at| (at..at + part.length).contains(&host))
        };
        Ok(self.kind.data_file.is_none() && self.map(shell, rng)?.into_iter().any(here))
    }

    /// The mapping as QEMU has it.
    fn map(&self, shell: &mut Shell, rng: &mut Rng) -> Result<Vec<Part>, String> {
        let (cwd, name) = self.place(shell, rng);
        let args = words(&["map", "--output=json", "-f", "qcow2", &name]);
        let answer = done(shell.img(By::Qemu, cwd, &args)?)?;
        let lines = answer.out.lines().filter(|l| l.contains("\"start\""));
        let part = |line: &str| {
            let number = |key: &str| -> Option<usize> {
                let rest = line.split(&format!("\"{key}\": ")).nth(1)?;
                let end = rest.find(|c: char| !c.is_ascii_digit())?;
                rest[..end].parse().ok()
            };
            Some(Part {
                start: number("start")?,
                length: number("length")?,
                own: number("depth")? == 0 && line.contains("\"present\": true"),
                data: line.contains("\"data\": true"),
                host: number("offset"),
            })
        };
        lines
            .map(|line| part(line).ok_or_else(|| format!("qemu-img map: {line}")))
            .collect()
    }

    /// How a program opens a file: a random cache mode and engine.
    pub fn opening(&self, shell: &Shell, rng: &mut Rng) -> Vec<String> {
        let cache = rng.pick(&[
            "none",
            "writeback",
            "writethrough",
            "directsync",
            "unsafe",
            "",
        ]);
        let mut args = Vec::new();
        let direct = match cache {
            "" => false,
            "none" if rng.one_in(2) => {
                args.push("-n".to_string());
                true
            }
            cache => {
                args.extend(words(&["-t", cache]));
                cache == "none" || cache == "directsync"
            }
        };
        let engine = rng.pick(engines(&shell.root));
        if !rng.one_in(3) && (direct || engine != "native") {
            args.extend(words(&["-i", engine]));
        }
        args
    }

    /// Both programs read all of it and check it.
    pub fn verify(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<(), String> {
        self.check(shell, rng)?;
        for by in [By::Qemu, By::Zebu] {
            self.reads_right(shell, rng, by)?;
        }
        if !self.snaps.is_empty() {
            let nth = rng.below(self.snaps.len() as u64) as usize;
            for by in [By::Qemu, By::Zebu] {
                let bytes = self.snapshot_content(shell, rng, nth, by)?;
                let snap = &self.snaps[nth];
                let kept = self.size().min(snap.disk.bytes.len());
                compare(&bytes[..kept.min(bytes.len())], &snap.disk.bytes[..kept])
                    .map_err(|e| format!("{by:?} reads snapshot {}: {e}", snap.name))?;
            }
        }
        if let (true, Some(data)) = (self.is_data_raw(), self.data_path(shell)) {
            let mut bytes = fs::read(data).map_err(|e| e.to_string())?;
            bytes.truncate(self.size());
            compare(&bytes, &self.disk.bytes).map_err(|e| format!("the raw data file: {e}"))?;
        }
        self.end_is_clean(shell, rng)
    }

    /// If so, what the last cluster has behind the end of the disk is zero: QEMU shows it in a
    /// larger disk.
    fn end_is_clean(&self, shell: &mut Shell, rng: &mut Rng) -> Result<(), String> {
        let unit = match self.kind.extended {
            true => self.kind.cluster / 32,
            false => self.kind.cluster,
        };
        let rest = self.size().next_multiple_of(unit) - self.size();
        if !self.clean_end || rest == 0 {
            return Ok(());
        }
        let last = self.map(shell, rng)?.pop();
        let Some((last, host)) = last.and_then(|last| last.host.map(|host| (last, host))) else {
            return Ok(());
        };
        if !last.own || !last.data {
            return Ok(());
        }
        let path = self.data_path(shell).unwrap_or_else(|| self.path(shell));
        let bytes = fs::read(path).map_err(|e| e.to_string())?;
        let rest = bytes.into_iter().skip(host + last.length).take(rest);
        match rest.into_iter().position(|byte| byte != 0) {
            None => Ok(()),
            Some(at) => Err(format!("data {at} bytes behind the end of the disk")),
        }
    }

    fn check(&self, shell: &mut Shell, rng: &mut Rng) -> Result<(), String> {
        for by in [By::Qemu, By::Zebu] {
            let (cwd, name) = self.place(shell, rng);
            let answer = shell.img(by, cwd, &words(&["check", "-f", "qcow2", &name]))?;
            let allowed = match self.killed {
                true => [0, 3, 2].contains(&answer.status),
                false => answer.status == 0,
            };
            if !allowed {
                return Err(format!("{by:?} checks: {}", answer.text()));
            }
        }
        Ok(())
    }

    /// One program reads the disk.
    fn reads_right(&self, shell: &mut Shell, rng: &mut Rng, by: By) -> Result<(), String> {
        if by == By::Zebu && rng.one_in(2) {
            return self.reads_by_requests(shell, rng);
        }
        let bytes = self.content(shell, rng, by, &[])?;
        compare(&bytes, &self.disk.bytes).map_err(|e| format!("{by:?} reads: {e}"))
    }

    /// Reads, verified by the program, of ranges that have one value.
    fn reads_by_requests(&self, shell: &mut Shell, rng: &mut Rng) -> Result<(), String> {
        let bytes = &self.disk.bytes;
        let mut commands = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let end = (at..bytes.len())
                .find(|i| bytes[*i] != bytes[at])
                .unwrap_or(bytes.len());
            commands.push(format!("read -P {} {at} {}", bytes[at], end - at));
            at = end;
        }
        let (cwd, name) = self.place(shell, rng);
        let mut args = words(&["-f", "qcow2", "-r"]);
        args.extend(self.opening(shell, rng));
        args.push(name);
        for some in commands.chunks(400) {
            let answer = shell.io(By::Zebu, cwd, &args, some)?;
            if answer.status != 0 || answer.out.contains("failed") {
                return Err(format!("zebu io reads: {}", answer.text()));
            }
        }
        Ok(())
    }

    /// What one program reads, with more options.
    pub fn content(
        &self,
        shell: &mut Shell,
        rng: &mut Rng,
        by: By,
        more: &[&str],
    ) -> Result<Vec<u8>, String> {
        let (cwd, name) = self.place(shell, rng);
        self.content_of(shell, rng, by, cwd, "qcow2", &name, more)
    }

    #[allow(clippy::too_many_arguments)]
    fn content_of(
        &self,
        shell: &mut Shell,
        rng: &mut Rng,
        by: By,
        cwd: &str,
        format: &str,
        name: &str,
        more: &[&str],
    ) -> Result<Vec<u8>, String> {
        let out = shell.root.join("out.raw");
        let mut args = words(&["convert", "-f", format, "-O", "raw"]);
        if rng.one_in(2) {
            args.extend(words(&["-T", "none"]));
        }
        args.extend(words(more));
        args.push(name.into());
        args.push(bytes::text(out.as_os_str().as_bytes()));
        done(shell.img(by, cwd, &args)?)?;
        let bytes = fs::read(&out).map_err(|e| e.to_string())?;
        fs::remove_file(&out).map_err(|e| e.to_string())?;
        Ok(bytes)
    }

    pub fn snapshot_content(
        &self,
        shell: &mut Shell,
        rng: &mut Rng,
        nth: usize,
        by: By,
    ) -> Result<Vec<u8>, String> {
        let snap = format!("snapshot.name={}", self.snaps[nth].name);
        self.content(shell, rng, by, &["-l", &snap])
    }

    /// The backing files read as they must.
    pub fn verify_bases(&self, shell: &mut Shell) -> Result<(), String> {
        let mut rng = Rng::new(0);
        for base in &self.bases {
            let (name, format) = (&base.name, base.format);
            let read = self.content_of(shell, &mut rng, By::Qemu, "img", format, name, &[])?;
            compare(&read, &base.bytes).map_err(|e| format!("{name}: {e}"))?;
        }
        Ok(())
    }

    /// Whether some snapshot is larger than the disk is now: QEMU shows no more of
    /// it than the disk has.
    pub fn has_larger_snapshots(&self) -> bool {
        let size = self.size();
        self.snaps.iter().any(|s| s.disk.bytes.len() > size)
    }

    /// What is behind the image has changed: its snapshots show that where they
    /// say nothing themselves.
    pub fn adopt_snapshots(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<(), String> {
        for nth in 0..self.snaps.len() {
            let mut bytes = self.snapshot_content(shell, rng, nth, By::Qemu)?;
            let snap = &mut self.snaps[nth];
            bytes.resize(snap.disk.bytes.len(), 0);
            for (sector, own) in snap.disk.own.iter().enumerate() {
                let range = sector * SECTOR..(sector + 1) * SECTOR;
                if *own && bytes[range.clone()] != snap.disk.bytes[range] {
                    return Err(format!(
                        "snapshot {} lost sector {sector:#x} of its own",
                        snap.name
                    ));
                }
            }
            snap.disk.bytes = bytes;
        }
        Ok(())
    }

    /// Leaves the file as other programs may: cut behind the last byte that is
    /// not zero, in its last cluster, or a little longer.
    pub fn change_length(&self, shell: &mut Shell, rng: &mut Rng) -> Result<(), String> {
        let path = self.path(shell);
        let open = OpenOptions::new().read(true).write(true).open(&path);
        let file = open.map_err(|e| e.to_string())?;
        let length = file.metadata().map_err(|e| e.to_string())?.len();
        let cluster = self.kind.cluster as u64;
        let wanted = match rng.below(4) {
            0 => length + 1 + rng.below(2 * cluster),
            1 => length.next_multiple_of(512) + 512 * rng.below(9),
            kind => {
                let start = (length - 1) / cluster * cluster;
                let mut last = vec![0; (length - start) as usize];
                file.read_exact_at(&mut last, start)
                    .map_err(|e| e.to_string())?;
                let used = last.iter().rposition(|b| *b != 0).map_or(1, |n| n + 1) as u64;
                let unit = if kind == 2 { 1 } else { 512 };
                match self.is_data(shell, rng, start)? {
                    true => (start + used).next_multiple_of(unit).min(length),
                    // A table that is cut off is damage.
                    false => length,
                }
            }
        };
        shell.note(format!(
            "truncate -s {wanted} img/{}",
            self.name.escape_debug()
        ));
        file.set_len(wanted).map_err(|e| e.to_string())
    }
}

/// Where two contents differ first, if they do.
pub fn compare(found: &[u8], right: &[u8]) -> Result<(), String> {
    if found.len() != right.len() {
        return Err(format!("{} bytes instead of {}", found.len(), right.len()));
    }
    match found.iter().zip(right).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => {
            let differ = found[at..].iter().zip(&right[at..]);
            let length = differ.take_while(|(a, b)| a != b).count();
            Err(format!(
                "{length} bytes at {at} ({at:#x}) are {:#x} instead of {:#x}",
                found[at], right[at]
            ))
        }
    }
}

/// An answer of a program that had to succeed.
pub fn done(answer: Answer) -> Result<Answer, String> {
    match answer.status {
        0 => Ok(answer),
        _ => Err(answer.text()),
    }
}

pub fn words(all: &[&str]) -> Vec<String> {
    all.iter().map(|w| w.to_string()).collect()
}
