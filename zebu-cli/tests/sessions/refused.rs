//! Steps in which zebu must fail without changes: writing to an image that another program has open,
//! converting a file onto itself, continuing after a read error.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use crate::common::{Rng, bytes};
use crate::program::{By, Shell};
use crate::world::{SECTOR, World, compare, words};

type Result<T> = std::result::Result<T, String>;

/// All files and their content.
pub type Files = BTreeMap<PathBuf, Vec<u8>>;

pub fn files(shell: &Shell) -> Result<Files> {
    let mut all = Files::new();
    let mut folders = vec![shell.root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).map_err(|e| e.to_string())? {
            let entry = entry.map_err(|e| e.to_string())?;
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(path);
            } else if path.is_file() {
                all.insert(path.clone(), fs::read(&path).map_err(|e| e.to_string())?);
            }
        }
    }
    Ok(all)
}

/// Fails if a file was changed, created or removed.
pub fn unchanged(before: &Files, shell: &Shell, what: &str) -> Result<()> {
    let now = files(shell)?;
    let paths = before.keys().chain(now.keys());
    match paths
        .into_iter()
        .find(|path| before.get(*path) != now.get(*path))
    {
        None => Ok(()),
        Some(path) => Err(format!("{what} changed {}", path.display())),
    }
}

impl World {
    /// One of these steps.
    pub fn refused(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        match rng.below(3) {
            0 => self.in_use(shell, rng),
            1 => self.onto_itself(shell, rng),
            _ => self.read_error(shell, rng),
        }
    }

    /// QEMU has the image open for writing: zebu must not write to it, also with `-U`.
    fn in_use(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let (cwd, name) = self.place(shell, rng);
        let held = shell.hold(cwd, &name)?;
        let before = files(shell)?;
        let commands: [&[&str]; 9] = [
            &["resize", "+1M"],
            &["check", "-r", "all"],
            &["check", "-r", "leaks"],
            &["commit"],
            &["rebase", "-b", ""],
            &["rebase", "-u", "-b", ""],
            &["amend", "-o", "lazy_refcounts=on"],
            &["snapshot", "-c", "s"],
            &["bench", "-w", "-c", "1"],
        ];
        for _ in 0..3 {
            let command = commands[rng.below(9) as usize];
            let (cwd, name) = self.place(shell, rng);
            let mut args = words(&command[..1]);
            args.extend((!rng.one_in(4)).then(|| "-U".into()));
            args.extend(words(&["-f", "qcow2"]));
            if command[0] == "resize" {
                args.extend([name, command[1].into()]);
            } else {
                args.extend(words(&command[1..]));
                args.push(name);
            }
            let answer = shell.img(By::Zebu, cwd, &args)?;
            if answer.status != 1 {
                return Err(format!("an image in use: {}", answer.text()));
            }
            unchanged(&before, shell, command[0])?;
        }
        shell.release(held)
    }

    /// The target is a file that is read, by the same or another name.
    fn onto_itself(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let chain = std::iter::successors(self.base, |base| self.bases[*base].backing);
        let mut names = vec![self.name.clone()];
        names.extend(chain.map(|base| self.bases[base].name.clone()));
        let target = &names[rng.below(names.len() as u64) as usize];
        // The top image is read with its chain, a raw one without.
        let (source, format) = match target.ends_with(".raw") && rng.one_in(2) {
            true => (target.as_str(), "raw"),
            false => (self.name.as_str(), "qcow2"),
        };
        let file = shell.root.join("img").join(bytes::os(target));
        let alias = shell.root.join("img/alias");
        let (cwd, named) = match rng.below(4) {
            0 => {
                symlink(&file, &alias).map_err(|e| e.to_string())?;
                shell.note(format!("ln -s {} img/alias", target.escape_debug()));
                ("img", "alias".to_string())
            }
            1 => {
                fs::hard_link(&file, &alias).map_err(|e| e.to_string())?;
                shell.note(format!("ln img/{} img/alias", target.escape_debug()));
                ("img", "alias".to_string())
            }
            _ => self.place_of(target, shell, rng),
        };
        let source = shell.absolute(source);
        let before = files(shell)?;
        let mut args = words(&["convert", "-f", format, "-O", rng.pick(&["raw", "qcow2"])]);
        args.extend((!rng.one_in(4)).then(|| "-U".into()));
        args.extend(rng.one_in(2).then(|| "-n".into()));
        args.extend([source, named]);
        let answer = shell.img(By::Zebu, cwd, &args)?;
        if answer.status != 1 {
            return Err(format!("a file onto itself: {}", answer.text()));
        }
        unchanged(&before, shell, "convert")?;
        let _ = fs::remove_file(alias);
        Ok(())
    }

    /// A sector of an image cannot be read. Either it is not needed, or the copy is reported as
    /// incomplete.
    fn read_error(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        // Names relative to an image are not known through other drivers.
        let bases = self.bases.iter().filter(|base| base.backing.is_none());
        let mut sources: Vec<_> = bases.map(|b| (&b.name, b.format, &b.bytes)).collect();
        if self.base.is_none() && self.kind.data_file.is_none() {
            sources.push((&self.name, "qcow2", &self.disk.bytes));
        }
        if sources.is_empty() {
            return Ok(());
        }
        let (name, format, content) = sources[rng.below(sources.len() as u64) as usize];
        let path = shell.root.join("img").join(bytes::os(name));
        // A name that needs no escapes.
        let plain = shell.root.join("img/plain");
        fs::hard_link(&path, &plain).map_err(|e| e.to_string())?;
        shell.note(format!("ln img/{} img/plain", name.escape_debug()));
        let length = fs::metadata(&path).map_err(|e| e.to_string())?.len();
        let sector = rng.below(length.div_ceil(SECTOR as u64));
        let source = format!(
            "json:{{\"driver\":\"{format}\",\"file\":{{\"driver\":\"blkdebug\",\"image\":\
             {{\"driver\":\"file\",\"filename\":\"plain\"}},\"inject-error\":\
             [{{\"event\":\"none\",\"iotype\":\"read\",\"sector\":{sector}}}]}}}}"
        );
        let before = files(shell)?;
        let copy = shell.root.join("img/copy.qcow2");
        let mut args = words(&["convert", "-O", "qcow2"]);
        args.extend(rng.one_in(3).then(|| "-c".into()));
        args.extend([source, "copy.qcow2".into()]);
        let answer = shell.img(By::Zebu, "img", &args)?;
        if answer.status == 0 {
            let raw = shell.root.join("out.raw");
            let args = words(&["convert", "-O", "raw", "copy.qcow2", "../out.raw"]);
            crate::world::done(shell.img(By::Qemu, "img", &args)?)?;
            let bytes = fs::read(&raw).map_err(|e| e.to_string())?;
            fs::remove_file(raw).map_err(|e| e.to_string())?;
            compare(&bytes, content).map_err(|e| format!("sector {sector} cannot be read: {e}"))?;
        } else if copy.exists() {
            let check = shell.img(By::Zebu, "img", &words(&["check", "copy.qcow2"]))?;
            let named = answer
                .err
                .trim_end()
                .ends_with("'copy.qcow2' is incomplete");
            if check.status == 0 || !named {
                return Err(format!(
                    "an incomplete copy: {}, {}",
                    answer.text(),
                    check.text()
                ));
            }
        }
        let _ = fs::remove_file(copy);
        unchanged(&before, shell, "convert")?;
        fs::remove_file(plain).map_err(|e| e.to_string())
    }
}
