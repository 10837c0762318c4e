//! The model: the image, its backing files, snapshots, and their expected content.

use std::fs::{self, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::bitmaps::Tracked;
use crate::common::{Rng, bytes};
use crate::program::{Answer, By, Shell, engines};

/// The unit of writes.
pub const SECTOR: usize = 512;

/// The expected content of a disk.
#[derive(Clone, Default)]
pub struct Disk {
    pub bytes: Vec<u8>,
    /// By sector: whether the image itself must have the data, with any backing file.
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

/// An extent of the mapping.
struct Part {
    start: usize,
    length: usize,
    /// Whether the image itself has it.
    own: bool,
    /// Whether it is data, not zeroes.
    data: bool,
    /// The offset in the file.
    host: Option<usize>,
}

/// An internal snapshot.
pub struct Snap {
    pub name: String,
    pub disk: Disk,
}

/// An image that may be a backing file of the one that is changed.
pub struct Base {
    pub name: String,
    pub format: &'static str,
    pub bytes: Vec<u8>,
    /// Its backing file.
    pub backing: Option<usize>,
}

/// Properties of the image on which steps depend.
#[derive(Clone, Default)]
pub struct Kind {
    pub cluster: usize,
    pub version: u32,
    pub extended: bool,
    /// The name of the data file in the header, and `data_file_raw`.
    pub data_file: Option<(String, bool)>,
}

/// The image, its surroundings, and the model of both.
pub struct World {
    /// The image's name in its folder.
    pub name: String,
    pub kind: Kind,
    /// The folder in which commands run, if the image has a relative data file name.
    pub fixed_cwd: Option<&'static str>,
    pub disk: Disk,
    /// By cluster: whether it may be allocated.
    pub touched: Vec<bool>,
    pub snaps: Vec<Snap>,
    pub bases: Vec<Base>,
    /// The backing file of the image.
    pub base: Option<usize>,
    /// Whether the last cluster is zero past the end of the disk. QEMU may leave other data there.
    pub clean_end: bool,
    /// Whether clusters may be mapped past that: QEMU has failed while it preallocated them.
    pub mapped_past_end: bool,
    /// Whether the last program was killed: clusters may be leaked, and the image may be dirty.
    pub killed: bool,
    /// Whether the active disk has VM state behind its end. QEMU shows it in a larger disk.
    pub vm_state: bool,
    pub bitmaps: Vec<Tracked>,
    /// The number of snapshots and bitmaps made, for their names.
    pub count: u32,
}

/// Parts of names that have a meaning elsewhere, or are not UTF-8.
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

/// A random file name in the folder of the image, which does not begin with a protocol.
pub fn odd_name(rng: &mut Rng, start: &str, end: &str) -> String {
    let odd = rng.pick(&ODD);
    let folder = if odd == ":" { "./" } else { "" };
    format!("{folder}{start}{odd}{end}")
}

/// The name as a value of an option.
pub fn as_value(name: &str) -> String {
    name.replace(',', ",,")
}

pub const FOLDERS: [&str; 3] = [".", "img", "other"];

impl World {
    /// A folder to run in, and the image's name relative to it.
    pub fn place(&self, shell: &Shell, rng: &mut Rng) -> (&'static str, String) {
        self.place_of(&self.name, shell, rng)
    }

    /// The same for another file in the folder of the image.
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

    /// The first `size` bytes of a backing file, zero past its end.
    pub fn below(&self, base: Option<usize>, size: usize) -> Vec<u8> {
        let mut bytes = base.map_or_else(Vec::new, |b| self.bases[b].bytes.clone());
        bytes.resize(size, 0);
        bytes
    }

    /// By sector: whether the image itself has the data, according to QEMU.
    pub fn mapped(&self, shell: &mut Shell, rng: &mut Rng) -> Result<Vec<bool>, String> {
        let mut own = vec![false; self.size() / SECTOR];
        for part in self.map(shell, rng)? {
            own[part.start / SECTOR..(part.start + part.length).div_ceil(SECTOR)].fill(part.own);
        }
        Ok(own)
    }

    /// Whether the cluster at a host offset is a data cluster of the active disk.
    fn is_data(&self, shell: &mut Shell, rng: &mut Rng, host: u64) -> Result<bool, String> {
        let host = host as usize;
        let here = |part: Part| {
            let at = part.host.filter(|_| part.own);
            at.is_some_and(|at| (at..at + part.length).contains(&host))
        };
        Ok(self.kind.data_file.is_none() && self.map(shell, rng)?.into_iter().any(here))
    }

    /// The map of QEMU.
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

    /// Options of a random cache mode and engine.
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

    /// Fails unless both programs read the right content and find no errors.
    pub fn verify(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<(), String> {
        self.check(shell, rng)?;
        self.verify_bitmaps(shell, rng)?;
        for by in [By::Qemu, By::Zebu] {
            self.reads_right(shell, rng, by)?;
        }
        if !self.snaps.is_empty() {
            let nth = rng.below(self.snaps.len() as u64) as usize;
            for by in [By::Qemu, By::Zebu] {
                let mut bytes = match by {
                    By::Qemu => self.snapshot_content(shell, rng, nth, by)?,
                    By::Zebu => self.view(shell, rng, nth)?,
                };
                let snap = &self.snaps[nth];
                let mut right = &snap.disk.bytes[..];
                if by == By::Qemu {
                    // It has the size of the disk there.
                    let kept = self.size().min(right.len());
                    bytes.truncate(kept);
                    right = &right[..kept];
                }
                compare(&bytes, right)
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

    /// Fails unless a program reads the right content.
    fn reads_right(&self, shell: &mut Shell, rng: &mut Rng, by: By) -> Result<(), String> {
        if by == By::Zebu && rng.one_in(2) {
            return self.reads_by_requests(shell, rng);
        }
        let bytes = self.content(shell, rng, by, &[])?;
        compare(&bytes, &self.disk.bytes).map_err(|e| format!("{by:?} reads: {e}"))
    }

    /// The same by reads of ranges with one value, which `io` verifies.
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

    /// The content as read by a program, with more options.
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

    /// Fails unless all backing files have the right content.
    pub fn verify_bases(&self, shell: &mut Shell) -> Result<(), String> {
        let mut rng = Rng::new(0);
        for base in &self.bases {
            let (name, format) = (&base.name, base.format);
            let read = self.content_of(shell, &mut rng, By::Qemu, "img", format, name, &[])?;
            compare(&read, &base.bytes).map_err(|e| format!("{name}: {e}"))?;
        }
        Ok(())
    }

    /// Whether a snapshot may show the backing file.
    pub fn has_showing_snapshots(&self) -> bool {
        self.snaps.iter().any(|s| s.disk.own.contains(&false))
    }

    /// Updates the model of the snapshots after a change of the backing file that lets them change:
    /// they show it where they have no data of their own.
    pub fn adopt_snapshots(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<(), String> {
        for nth in 0..self.snaps.len() {
            // They may be longer than the limit of a change.
            let limit = shell.limit.take();
            let bytes = self.snapshot_content(shell, rng, nth, By::Zebu)?;
            shell.limit = limit;
            let snap = &mut self.snaps[nth];
            if bytes.len() != snap.disk.bytes.len() {
                return Err(format!("snapshot {} has {} bytes", snap.name, bytes.len()));
            }
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

    /// Changes the length of the file as other programs may: a little longer, or truncated after the
    /// last byte of the last cluster that is not zero.
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
                    // A truncated table would be damage.
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

/// Fails with the first difference.
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

/// Fails unless the program succeeded.
pub fn done(answer: Answer) -> Result<Answer, String> {
    match answer.status {
        0 => Ok(answer),
        _ => Err(answer.text()),
    }
}

pub fn words(all: &[&str]) -> Vec<String> {
    all.iter().map(|w| w.to_string()).collect()
}
