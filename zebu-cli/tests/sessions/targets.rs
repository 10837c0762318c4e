//! Steps in which a command would write to a file that its source reads, under any name: zebu must
//! refuse it for that reason and change nothing. The sources are the image of the run with its backing
//! files and data file, VMDKs of several files and over parents, images under nested drivers, and
//! appliances.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::vmdk::SUBFORMATS;
use crate::common::{Rng, bytes};
use crate::make::either;
use crate::program::{By, Shell};
use crate::refused::{Files, files, unchanged};
use crate::world::{FOLDERS, World, as_value, done, words};

type Result<T> = std::result::Result<T, String>;

/// The folder of the files that a step makes.
const OWN: &str = "own";
/// What zebu says of such a target, or of a source or a name that it does not take at all.
const REASONS: [&str; 10] = [
    "read from this file",
    "reads this file",
    "are the same file",
    "infinite loop",
    "is the data file of the image",
    "the same filename as the backing file",
    "Failed to get",
    "which it may not open",
    "--spill",
    "Names in a VMDK",
];

/// An image that is read, and what it is read from.
struct Source {
    /// Its name in the folder that commands run in: a path, or a `json:` name.
    name: String,
    format: &'static str,
    kind: Kind,
    /// All files that it reads, its own first.
    reads: Vec<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Json,
    /// One that `convert --disk` reads.
    Appliance,
}

impl World {
    /// Some of these steps, with one source.
    pub fn onto_what_is_read(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let own = shell.root.join(OWN);
        fs::create_dir(&own).map_err(|e| e.to_string())?;
        let cwd = self.fixed_cwd.unwrap_or_else(|| rng.pick(&FOLDERS));
        let result = match rng.one_in(12) {
            true => self.onto_own_data(shell, rng),
            false => self
                .source(shell, rng, cwd)
                .and_then(|source| (0..4).try_for_each(|_| onto_file(shell, rng, cwd, &source))),
        };
        fs::remove_dir_all(own).map_err(|e| e.to_string())?;
        result
    }

    /// A source of any kind.
    fn source(&self, shell: &mut Shell, rng: &mut Rng, cwd: &str) -> Result<Source> {
        let chain = std::iter::successors(self.base, |base| self.bases[*base].backing);
        let mut reads = vec![self.path(shell)];
        reads.extend(self.data_path(shell));
        let image = |name: &str| shell.root.join("img").join(bytes::os(name));
        reads.extend(chain.map(|base| image(&self.bases[base].name)));
        let mut source = Source {
            name: named(&reads[0], shell, rng, cwd),
            format: "qcow2",
            kind: Kind::File,
            reads,
        };
        if rng.one_in(4) {
            return Ok(source);
        }
        if rng.one_in(3) {
            return self.appliance(shell, rng, cwd, &source);
        }
        vmdk(shell, rng, cwd, &mut source)?;
        if rng.one_in(3) {
            source.over("vmdk", "child.vmdk", shell, rng, cwd)?;
        }
        match rng.below(4) {
            0 => source.over("qcow2", "child.qcow2", shell, rng, cwd)?,
            1 => {
                let file = named_plainly(&source.reads[0], shell, cwd);
                source.name = format!(
                    "json:{{\"driver\":\"raw\",\"file\":{{\"driver\":\"{}\",\"file\":\
                     {{\"driver\":\"file\",\"filename\":\"{file}\"}}}}}}",
                    source.format
                );
                (source.format, source.kind) = ("raw", Kind::Json);
            }
            _ => {}
        }
        Ok(source)
    }

    /// An appliance of the image, as an archive or as files.
    fn appliance(
        &self,
        shell: &mut Shell,
        rng: &mut Rng,
        cwd: &str,
        of: &Source,
    ) -> Result<Source> {
        let own = shell.root.join(OWN);
        let output = named_plainly(&own.join("a.ova"), shell, cwd);
        let args = words(&["ova", "-f", "qcow2", "--output", &output, &of.name]);
        done(shell.img(By::Zebu, cwd, &args)?)?;
        let mut reads = vec![own.join("a.ova")];
        if rng.one_in(2) {
            let tar = Command::new("tar")
                .args(["-xf", "a.ova"])
                .current_dir(&own)
                .status();
            if !tar.is_ok_and(|status| status.success()) {
                return Err("tar -xf a.ova".into());
            }
            shell.note(format!("(cd {OWN}; tar -xf a.ova)"));
            let manifest = rng.pick(&["a.mf", "a.MF"]);
            fs::rename(own.join("a.mf"), own.join(manifest)).map_err(|e| e.to_string())?;
            reads = ["a.ovf", manifest, "a-disk1.vmdk"]
                .map(|name| own.join(name))
                .into();
        }
        Ok(Source {
            name: named_plainly(&reads[0], shell, cwd),
            format: "vmdk",
            kind: Kind::Appliance,
            reads,
        })
    }

    /// An image whose data file is its backing file: what reads one and writes to the other.
    fn onto_own_data(&self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let own = shell.root.join(OWN);
        fs::write(own.join("base.raw"), [1; 200_000]).map_err(|e| e.to_string())?;
        let options = "data_file=../own/data.raw";
        let backing = "-b base.raw -F raw ../own/top.qcow2".split(' ');
        let mut args = words(&["create", "-q", "-f", "qcow2", "-o", options]);
        args.extend(backing.map(String::from));
        done(shell.img(either(rng), "img", &args)?)?;
        let write = ["write -P 2 70000 60000".to_string()];
        let image = words(&["-f", "qcow2", "../own/top.qcow2"]);
        done(shell.io(either(rng), "img", &image, &write)?)?;
        // A new backing file that is the data file, by its own name or by another one.
        let backing = match rng.below(3) {
            0 => "data.raw".to_string(),
            _ => alias(&own.join("data.raw"), shell, rng)?,
        };
        let before = files(shell)?;
        let args = words(&[
            "rebase",
            "-f",
            "qcow2",
            "-b",
            &backing,
            "-F",
            "raw",
            "top.qcow2",
        ]);
        refused(shell, OWN, &args, &before)?;
        Ok(())
    }
}

impl Source {
    /// Puts a new image over it, whose own file has this name.
    fn over(
        &mut self,
        format: &'static str,
        name: &str,
        shell: &mut Shell,
        rng: &mut Rng,
        cwd: &str,
    ) -> Result<()> {
        // Beside it; an absolute name may be none that a VMDK can have.
        let backing = self.reads[0].file_name().unwrap_or_default();
        let backing = bytes::text(backing.as_bytes());
        let child = shell.root.join(OWN).join(name);
        let plain = named_plainly(&child, shell, cwd);
        let mut args = words(&["create", "-q", "-f", format, "-b", &backing]);
        args.extend(words(&["-F", self.format]));
        if format == "vmdk" && rng.one_in(2) {
            args.extend(words(&["-o", "subformat=twoGbMaxExtentSparse"]));
        }
        args.push(plain);
        done(shell.img(either(rng), cwd, &args)?)?;
        self.name = named(&child, shell, rng, cwd);
        self.format = format;
        self.add_new(shell, child)
    }

    /// Adds the files that were made, the image's own first.
    fn add_new(&mut self, shell: &Shell, first: PathBuf) -> Result<()> {
        let entries = fs::read_dir(shell.root.join(OWN)).map_err(|e| e.to_string())?;
        for entry in entries {
            let path = entry.map_err(|e| e.to_string())?.path();
            if path != first && !self.reads.contains(&path) {
                self.reads.push(path);
            }
        }
        self.reads.insert(0, first);
        Ok(())
    }
}

/// Replaces a source by a VMDK of any subformat with the same content.
fn vmdk(shell: &mut Shell, rng: &mut Rng, cwd: &str, source: &mut Source) -> Result<()> {
    let subformat = rng.pick(&SUBFORMATS);
    let first = shell.root.join(OWN).join("disk.vmdk");
    let target = named_plainly(&first, shell, cwd);
    let options = format!("subformat={subformat}");
    let args = ["convert", "-f", source.format, "-O", "vmdk", "-o", &options];
    let mut args = words(&args);
    args.extend([source.name.clone(), target]);
    done(shell.img(either(rng), cwd, &args)?)?;
    source.name = named(&first, shell, rng, cwd);
    source.format = "vmdk";
    source.reads.clear();
    source.add_new(shell, first)
}

/// A command that would write to one of the files.
fn onto_file(shell: &mut Shell, rng: &mut Rng, cwd: &str, source: &Source) -> Result<()> {
    let file = &source.reads[rng.below(source.reads.len() as u64) as usize];
    let (is_own, ending) = (*file == source.reads[0], file.extension());
    let target = target(file, shell, rng, cwd)?;
    let own = shell.root.join(OWN);
    let new = named_plainly(&own.join("new"), shell, cwd);
    let absolute = bytes::text(source.reads[0].as_os_str().as_bytes());
    let is_plain = source.kind == Kind::File;
    let formats: [&str; 6] = ["raw", "qcow2", "vmdk", "vdi", "vhdx", "vpc"];
    let data_file = format!("data_file={}", as_value(&target));
    let mut input = match source.kind {
        Kind::File => words(&["-f", source.format]),
        Kind::Json => Vec::new(),
        Kind::Appliance => words(&["--disk", "1"]),
    };
    input.extend((!rng.one_in(4)).then(|| "-U".to_string()));
    let mut args;
    match rng.below(8) {
        0 if is_plain => {
            args = words(&["create", "-b", &absolute, "-F", source.format, "-f"]);
            match (source.format, rng.below(3)) {
                ("vmdk", 0) => args.extend(words(&["vmdk", &target])),
                (_, 1) => args.extend(words(&["qcow2", "-o", &data_file, &new])),
                _ => args.extend(words(&["qcow2", &target])),
            }
        }
        1 if source.kind != Kind::Appliance => {
            args = words(&["dd", "-O", rng.pick(&formats)]);
            args.extend(input);
            args.extend([format!("if={}", source.name), format!("of={target}")]);
        }
        2 if source.kind != Kind::Appliance => {
            args = words(&["ova", "--name", "x", "--output", &target]);
            args.extend(input);
            args.push(source.name.clone());
        }
        3 if is_plain || is_own && source.kind == Kind::Appliance => {
            args = words(&["import", "-O", rng.pick(&["raw", "qcow2"])]);
            args.extend(rng.one_in(2).then(|| "--spill=.".to_string()));
            args.extend(rng.one_in(4).then(|| format!("--sums={target}")));
            args.extend(words(&[&source.name, &target]));
        }
        // Only images can be changed, and those that are above others.
        4 if is_plain && !is_own && ending == Some(OsStr::new("qcow2")) => {
            args = words(&[
                "rebase",
                "-f",
                "qcow2",
                "-b",
                &absolute,
                "-F",
                source.format,
            ]);
            args.extend(rng.one_in(2).then(|| "-u".to_string()));
            args.push(target);
        }
        5 if is_plain => {
            // The target's backing file reads it.
            fs::write(own.join("other"), [3; 4096]).map_err(|e| e.to_string())?;
            let other = named_plainly(&own.join("other"), shell, cwd);
            args = words(&[
                "convert",
                "-O",
                "qcow2",
                "-B",
                &absolute,
                "-F",
                source.format,
            ]);
            args.extend(words(&["-f", "raw", &other, &target]));
        }
        _ => {
            args = words(&["convert"]);
            args.extend(input);
            let extent = extent_of(file).filter(|_| rng.one_in(2));
            if let Some((subformat, image)) = extent {
                let image = named_plainly(&own.join(image), shell, cwd);
                args.extend(words(&[
                    "-O",
                    "vmdk",
                    "-o",
                    subformat,
                    &source.name,
                    &image,
                ]));
            } else if rng.one_in(3) {
                let all = ["-O", "qcow2", "-o", &data_file, &source.name, &new];
                args.extend(words(&all));
            } else if rng.one_in(3) {
                args.extend(words(&["-n", "-O", "raw", &source.name, &target]));
            } else {
                args.extend(words(&["-O", rng.pick(&formats), &source.name, &target]));
            }
        }
    }
    let before = files(shell)?;
    refused(shell, cwd, &args, &before)
}

/// The options and the name of a VMDK one of whose extents would have the name of a file.
fn extent_of(file: &Path) -> Option<(&'static str, String)> {
    let name = file.file_name()?.to_str()?;
    let forms = [
        ("-flat.vmdk", "subformat=monolithicFlat"),
        ("-f001.vmdk", "subformat=twoGbMaxExtentFlat"),
        ("-s001.vmdk", "subformat=twoGbMaxExtentSparse"),
    ];
    forms.iter().find_map(|(end, subformat)| {
        let stem = name.strip_suffix(end)?;
        Some((*subformat, format!("{stem}.vmdk")))
    })
}

/// Fails unless a command is refused because its target is read, and changes nothing.
fn refused(shell: &mut Shell, cwd: &str, args: &[String], before: &Files) -> Result<()> {
    let answer = shell.img(By::Zebu, cwd, args)?;
    unchanged(before, shell, &args[0])?;
    let is_reason = REASONS.iter().any(|reason| answer.err.contains(reason));
    match answer.status == 1 || answer.status == 2 && args[0] == "import" {
        true if is_reason => Ok(()),
        _ => Err(format!("{} onto what it reads: {}", args[0], answer.text())),
    }
}

/// Another name of a file, in the folder of the step.
fn alias(file: &Path, shell: &mut Shell, rng: &mut Rng) -> Result<String> {
    let place = shell.root.join(OWN).join("alias");
    let _ = fs::remove_file(&place);
    let is_symbolic = rng.one_in(2);
    let made = match is_symbolic {
        true => symlink(file, &place),
        false => fs::hard_link(file, &place),
    };
    made.map_err(|e| e.to_string())?;
    let option = if is_symbolic { "-sf" } else { "-f" };
    shell.note(format!("ln {option} {} {OWN}/alias", file.display()));
    Ok("alias".into())
}

/// A name of a file that is written: its own, or that of a link.
fn target(file: &Path, shell: &mut Shell, rng: &mut Rng, cwd: &str) -> Result<String> {
    let own = shell.root.join(OWN);
    Ok(match rng.below(5) {
        0 | 1 => {
            let alias = alias(file, shell, rng)?;
            named(&own.join(alias), shell, rng, cwd)
        }
        2 => {
            let folder = own.join("folder");
            let _ = fs::remove_file(&folder);
            let parent = file.parent().unwrap_or(file);
            symlink(parent, &folder).map_err(|e| e.to_string())?;
            shell.note(format!("ln -sfT {} {OWN}/folder", parent.display()));
            named(
                &folder.join(file.file_name().unwrap_or_default()),
                shell,
                rng,
                cwd,
            )
        }
        _ => named(file, shell, rng, cwd),
    })
}

/// A name of a file in the folder `cwd`.
fn named(file: &Path, shell: &Shell, rng: &mut Rng, cwd: &str) -> String {
    match rng.below(4) {
        0 => bytes::text(file.as_os_str().as_bytes()),
        1 => format!("file:{}", named_plainly(file, shell, cwd)),
        _ => named_plainly(file, shell, cwd),
    }
}

/// The relative name.
fn named_plainly(file: &Path, shell: &Shell, cwd: &str) -> String {
    let rest = file.strip_prefix(&shell.root).unwrap_or(file);
    let (folder, rest) = match (cwd, rest.strip_prefix(cwd)) {
        (".", _) => (".", rest),
        (_, Ok(inner)) => (".", inner),
        _ => ("..", rest),
    };
    format!("{folder}/{}", bytes::text(rest.as_os_str().as_bytes()))
}
