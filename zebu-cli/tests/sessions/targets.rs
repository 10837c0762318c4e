//! Steps in which a command would write to a file that its source reads, under any name: of this
//! machine, of a server that is this machine, of a loop device, or as standard output. zebu must refuse
//! it for that reason and change nothing. So it must where a descriptor of the process is the target,
//! or standard output is closed. The sources are the image of the run with its backing
//! files and data file, VMDKs of several files and over parents, images under nested drivers, and
//! appliances.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
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
const REASONS: [&str; 14] = [
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
    "goes to this file",
    "is an open file that has content",
    "An appliance is a regular file",
    "Bad file descriptor",
];

/// OpenSSH's server of SFTP, which serves this machine's files under any name of a host.
const SFTP_SERVER: &str = "/usr/lib/openssh/sftp-server";

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
        make_ssh(&own)?;
        let cwd = self.fixed_cwd.unwrap_or_else(|| rng.pick(&FOLDERS));
        let result = match rng.one_in(12) {
            true => self.onto_own_data(shell, rng),
            false => self.source(shell, rng, cwd).and_then(|source| {
                (0..4).try_for_each(|_| match rng.below(8) {
                    0 => by_descriptor(shell, rng, cwd, &source),
                    1 => by_loop_device(shell, rng, cwd, &source),
                    2 => elsewhere(shell, rng, cwd, &source),
                    _ => onto_file(shell, rng, cwd, &source),
                })
            }),
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
            if path.ends_with("ssh") {
                continue;
            }
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

/// A program in the place of `ssh`.
fn make_ssh(folder: &Path) -> Result<()> {
    let path = folder.join("ssh");
    fs::write(&path, format!("#!/bin/sh\nexec {SFTP_SERVER}\n")).map_err(|e| e.to_string())?;
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(path, mode).map_err(|e| e.to_string())
}

/// A name of a file as one on a server, whose path has detours. None: there is none.
fn on_server(file: &Path, rng: &mut Rng) -> Option<String> {
    let parts: Vec<&str> = file.to_str()?.split('/').skip(1).collect();
    if !Path::new(SFTP_SERVER).exists() {
        return None;
    }
    let place = rng.below(parts.len() as u64) as usize;
    let mut path = String::new();
    for (nth, part) in parts.iter().enumerate() {
        if nth == place {
            path += match rng.below(4) {
                0 => "/.",
                1 => "/",
                2 if nth > 0 => "/..",
                _ => "",
            };
            // Back to where it was.
            if path.ends_with("/..") {
                path = format!("{path}/{}", parts[nth - 1]);
            }
        }
        path += "/";
        path += part;
    }
    let mut name = format!("ssh://{}", rng.pick(&["h", "localhost", "127.0.0.1"]));
    for byte in path.bytes() {
        match byte.is_ascii_alphanumeric() || b"/._-".contains(&byte) {
            true => name.push(byte.into()),
            false => name += &format!("%{byte:02X}"),
        }
    }
    Some(name)
}

/// The options of a command that reads the source.
fn input(source: &Source, rng: &mut Rng) -> Vec<String> {
    let mut input = match source.kind {
        Kind::File => words(&["-f", source.format]),
        Kind::Json => Vec::new(),
        Kind::Appliance => words(&["--disk", "1"]),
    };
    input.extend((!rng.one_in(4)).then(|| "-U".to_string()));
    input
}

/// The source or the target is a file on a server that is this machine.
fn elsewhere(shell: &mut Shell, rng: &mut Rng, cwd: &str, source: &Source) -> Result<()> {
    let file = &source.reads[rng.below(source.reads.len() as u64) as usize];
    let place = match rng.one_in(2) {
        true => shell.root.join(OWN).join(alias(file, shell, rng)?),
        false => file.clone(),
    };
    let Some(target) = on_server(&place, rng) else {
        return onto_file(shell, rng, cwd, source);
    };
    // As another one of a file that is a source alone.
    if source.kind == Kind::File && source.reads.len() == 1 && rng.one_in(3) {
        let mut args = words(&[rng.pick(&["convert", "import"])]);
        if args[0] == "convert" {
            args.extend(input(source, rng));
        }
        args.extend([target, self::target(file, shell, rng, cwd)?]);
        let before = files(shell)?;
        return refused(shell, cwd, &args, &before);
    }
    onto(shell, rng, cwd, source, file, target)
}

/// The target is a loop device over a file that is read, or such a file is the target of what is
/// read through a loop device.
fn by_loop_device(shell: &mut Shell, rng: &mut Rng, cwd: &str, source: &Source) -> Result<()> {
    let file = &source.reads[rng.below(source.reads.len() as u64) as usize];
    // A loop device on less than a sector has nothing of its file.
    if fs::metadata(file).is_ok_and(|file| file.len() < 512) {
        return onto_file(shell, rng, cwd, source);
    }
    let made = Command::new("losetup")
        .args(["-f", "--show"])
        .arg(file)
        .output();
    let device = match made {
        Ok(made) if made.status.success() => {
            String::from_utf8_lossy(&made.stdout).trim().to_string()
        }
        // Only root can.
        _ => return onto_file(shell, rng, cwd, source),
    };
    shell.note(format!("losetup {device} {}", file.display()));
    let mut args = words(&["convert"]);
    args.extend(input(source, rng));
    // A device has whole sectors.
    let is_whole = fs::metadata(file).is_ok_and(|file| file.len() % 512 == 0);
    if is_whole && source.format == "qcow2" && source.reads.len() == 1 && rng.one_in(2) {
        args.extend([device.clone(), target(file, shell, rng, cwd)?]);
    } else {
        args.extend(rng.one_in(2).then(|| "-n".to_string()));
        args.extend(words(&["-O", "raw", &source.name, &device]));
    }
    let before = files(shell)?;
    let result = refused(shell, cwd, &args, &before);
    let _ = Command::new("losetup").args(["-d", &device]).status();
    result
}

/// The target is what a descriptor of the process is open on, or is not.
fn by_descriptor(shell: &mut Shell, rng: &mut Rng, cwd: &str, source: &Source) -> Result<()> {
    let own = shell.root.join(OWN);
    let old = own.join("old");
    fs::write(&old, [5; 70_000]).map_err(|e| e.to_string())?;
    let old_name = named(&old, shell, rng, cwd);
    let new = named_plainly(&own.join("new"), shell, cwd);
    let read = &source.reads[rng.below(source.reads.len() as u64) as usize];
    let outputs = ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"];
    let append = rng.pick(&[">>\"$FILE\"", "1<>\"$FILE\""]);
    let input = input(source, rng);
    let name = source.name.as_str();
    let convert =
        |target: &str| [words(&["convert"]), input.clone(), words(&[name, target])].concat();
    let import = |target: &str| words(&["import", name, target]);
    let is_json = source.kind == Kind::Json;
    let (args, redirection, file) = match rng.below(8) {
        // The disk to what it is read from.
        0 | 1 => (convert(rng.pick(&outputs)), append, read),
        // The verdict to the source.
        2 if !is_json => (import(&new), append, &source.reads[0]),
        // Messages to the target.
        2 | 3 => {
            let create = words(&["create", "-f", "raw", &old_name, "1M"]);
            let all = [create, import(&old_name), convert(&old_name)];
            let of = if is_json { [0, 2, 2] } else { [0, 1, 2] };
            (all[of[rng.below(3) as usize]].clone(), append, &old)
        }
        // An image in the place of what was there.
        4 => {
            let name = rng.pick(&["/dev/fd/7", "/proc/self/fd/7", "file:/dev/fd/7"]);
            let create = words(&["create", "-f", "raw", name, "1M"]);
            let all = [create, convert(name)];
            let to = rng.pick(&["7>>\"$FILE\"", "7<>\"$FILE\""]);
            (all[rng.below(2) as usize].clone(), to, &old)
        }
        // What is printed about an image goes to what is read.
        5 if source.kind != Kind::Appliance => {
            let format = format!("--output={}", rng.pick(&["human", "json"]));
            let all = [
                [words(&["info"]), vec![format.clone()]].concat(),
                [words(&["map"]), vec![format]].concat(),
                words(&["measure", "-O", "qcow2"]),
                words(&["snapshot", "-l"]),
                words(&["check"]),
            ];
            // `check` is of images that have one.
            let of = if source.format == "qcow2" { 5 } else { 3 };
            let nth = rng.below(of) as usize;
            // Only these read what is behind the image.
            let file = if [1, 2].contains(&nth) {
                read
            } else {
                &source.reads[0]
            };
            let all = [all[nth].clone(), input.clone(), words(&[name])];
            (all.concat(), append, file)
        }
        // The old content would stay behind the image.
        5 | 6 => (convert(rng.pick(&outputs)), "1<>\"$FILE\"", &old),
        _ => {
            let all = [
                import(&new),
                convert(rng.pick(&outputs)),
                words(&["info", name]),
            ];
            let of = if is_json { [2, 1, 2] } else { [0, 1, 2] };
            (all[of[rng.below(3) as usize]].clone(), ">&-", &old)
        }
    };
    shell.redirection = Some((redirection.into(), file.clone()));
    let before = files(shell)?;
    refused(shell, cwd, &args, &before)
}

/// A command that would write to one of the files.
fn onto_file(shell: &mut Shell, rng: &mut Rng, cwd: &str, source: &Source) -> Result<()> {
    let file = &source.reads[rng.below(source.reads.len() as u64) as usize];
    let target = target(file, shell, rng, cwd)?;
    onto(shell, rng, cwd, source, file, target)
}

/// A command that would write to this file, which has the name `target`.
fn onto(
    shell: &mut Shell,
    rng: &mut Rng,
    cwd: &str,
    source: &Source,
    file: &Path,
    target: String,
) -> Result<()> {
    let (is_own, ending) = (*file == source.reads[0], file.extension());
    let is_here = !target.starts_with("ssh:");
    let own = shell.root.join(OWN);
    let new = named_plainly(&own.join("new"), shell, cwd);
    let absolute = bytes::text(source.reads[0].as_os_str().as_bytes());
    let is_plain = source.kind == Kind::File;
    let formats: [&str; 6] = ["raw", "qcow2", "vmdk", "vdi", "vhdx", "vpc"];
    let data_file = format!("data_file={}", as_value(&target));
    let input = input(source, rng);
    let mut args;
    match rng.below(9) {
        8 if is_here && is_plain => {
            // The number of a server's process.
            let socket = named_plainly(&own.join("socket"), shell, cwd);
            args = words(&["vhost-user-blk", "-r", "--socket-path", &socket, "-f"]);
            let target = target.strip_prefix("file:").unwrap_or(&target);
            args.extend(words(&[source.format, "--pid-file", target, &source.name]));
        }
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
        3 if is_here && (is_plain || is_own && source.kind == Kind::Appliance) => {
            args = words(&["import", "-O", rng.pick(&["raw", "qcow2"])]);
            args.extend(rng.one_in(2).then(|| "--spill=.".to_string()));
            args.extend(rng.one_in(4).then(|| format!("--sums={target}")));
            args.extend(words(&[&source.name, &target]));
        }
        // Only images can be changed, and those that are above others.
        4 if is_here && is_plain && !is_own && ending == Some(OsStr::new("qcow2")) => {
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
