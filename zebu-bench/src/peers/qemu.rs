//! QEMU's programs; `scripts/get-qemu-newest.sh` fetches the newest that Debian offers.

use super::on_path;
use crate::error::{Context, Error, Result};
use crate::report::machine::said;
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// The qemu-img that was named, else the one on PATH.
pub fn find(named: Option<&Path>) -> Result<Qemu> {
    match (named, on_path("qemu-img")) {
        (Some(img), _) => with_img(img),
        (None, Some(img)) => with_img(&img),
        (None, None) => Err(Error::new(
            "no qemu-img: install qemu-utils, or name one with --qemu-img",
        )),
    }
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
