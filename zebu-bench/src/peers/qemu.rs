//! QEMU: the newest that Debian offers, unpacked into a directory of the suite, not installed.

use super::on_path;
use crate::error::{Context, Error, Result};
use crate::options::Options;
use crate::report::machine::said;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIRROR: &str = "http://deb.debian.org/debian";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// QEMU's programs for images.
#[derive(Debug, Clone)]
pub struct Qemu {
    /// qemu-img.
    pub img: PathBuf,
    /// qemu-io of the same version, which makes the fragmented images.
    pub io: PathBuf,
    /// What `qemu-img --version` says.
    pub version: String,
}

/// The qemu-img that was named, else the fetched one, else the one on PATH.
pub fn find(options: &Options, dir: &Path, notes: &mut Vec<String>) -> Result<Qemu> {
    if let Some(img) = &options.qemu_img {
        return with_img(img);
    }
    let fetched = dir.join("root/usr/bin/qemu-img");
    if !fetched.is_file() && !options.offline {
        println!("fetching the newest qemu-utils from Debian's backports");
        if let Err(e) = fetch(dir) {
            notes.push(format!(
                "the newest QEMU could not be fetched ({e}); the one on PATH is taken"
            ));
        }
    }
    if fetched.is_file() {
        match with_img(&fetched) {
            Ok(qemu) => return Ok(qemu),
            Err(e) => notes.push(format!(
                "the fetched QEMU does not run ({e}); the one on PATH is taken. Its libraries come \
                 with Debian's own package: apt-get install qemu-utils"
            )),
        }
    }
    let img = on_path("qemu-img").ok_or_else(|| {
        Error::new("no qemu-img: install qemu-utils, or name one with --qemu-img")
    })?;
    with_img(&img)
}

fn with_img(img: &Path) -> Result<Qemu> {
    let version = said(&img.to_string_lossy(), &["--version"]);
    if version.is_empty() {
        return Err(Error::new(format!("{} --version fails", img.display())));
    }
    let beside = img.with_file_name("qemu-io");
    let io = if beside.is_file() {
        beside
    } else {
        on_path("qemu-io").unwrap_or(beside)
    };
    Ok(Qemu {
        img: img.to_owned(),
        io,
        version,
    })
}

/// Fetches and unpacks qemu-utils with a list of sources of its own; nothing of the system's
/// apt is read or changed but its keyring.
fn fetch(dir: &Path) -> Result<()> {
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let suite = format!(
        "{}-backports",
        codename(&release).ok_or_else(|| Error::new("this is not Debian"))?
    );
    for sub in [
        "lists/partial",
        "cache/archives/partial",
        "parts",
        "deb",
        "root",
    ] {
        std::fs::create_dir_all(dir.join(sub)).context(|| sub.into())?;
    }
    let dir = dir.canonicalize().context(|| dir.display().to_string())?;
    let list = dir.join("sources.list");
    std::fs::write(
        &list,
        format!("deb [signed-by={KEYRING}] {MIRROR} {suite} main\n"),
    )
    .context(|| list.display().to_string())?;
    let apt = |args: &[&str]| {
        let option = |name: &str, at: &Path| format!("-o{name}={}", at.display());
        let mut command = Command::new("apt-get");
        command
            .arg(option("Dir::Etc::sourcelist", &list))
            .arg(option("Dir::Etc::sourceparts", &dir.join("parts")))
            .arg(option("Dir::State::lists", &dir.join("lists")))
            .arg(option("Dir::Cache", &dir.join("cache")))
            .args([
                "-oAPT::Sandbox::User=root",
                "-oAPT::Update::Post-Invoke=",
                "-qq",
            ])
            .args(args)
            .current_dir(dir.join("deb"));
        done(command)
    };
    apt(&["update"])?;
    apt(&["download", "qemu-utils"])?;
    let deb = std::fs::read_dir(dir.join("deb"))
        .context(|| "deb".into())?
        .filter_map(|e| e.ok().map(|e| e.path()))
        .find(|p| p.extension().is_some_and(|e| e == "deb"))
        .ok_or_else(|| Error::new("apt-get download left no package"))?;
    let mut unpack = Command::new("dpkg-deb");
    unpack.arg("-x").arg(deb).arg(dir.join("root"));
    done(unpack)
}

/// The code name of a Debian release.
fn codename(release: &str) -> Option<&str> {
    release.lines().any(|l| l == "ID=debian").then_some(())?;
    release
        .lines()
        .find_map(|l| l.strip_prefix("VERSION_CODENAME="))
}

/// Runs a command that has to succeed.
pub fn done(mut command: Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().context(|| name.clone())?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find(|l| !l.trim().is_empty()).unwrap_or("");
    Err(Error::new(format!("{name}: {}: {line}", output.status)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_debian_has_backports() {
        assert_eq!(
            codename("ID=debian\nVERSION_CODENAME=bookworm\n"),
            Some("bookworm")
        );
        assert_eq!(codename("ID=ubuntu\nVERSION_CODENAME=noble\n"), None);
    }

    #[test]
    fn a_failed_command_tells_its_name_and_first_line() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo no >&2; exit 1"]);
        assert_eq!(done(command).unwrap_err().0, "sh: exit status: 1: no");
    }
}
