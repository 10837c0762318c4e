//! qcow2-rs, a Rust library for qcow2 images, through the program that comes with it.

use super::on_path;
use super::qemu::done;
use crate::error::{Error, Result};
use crate::measure::Program;
use crate::measure::child::command;
use crate::measure::meter::Meter;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version that is measured; QCOW2_RS_VERSION names another.
const VERSION: &str = "0.1.6";

/// The installed program.
#[derive(Debug, Clone)]
pub struct Qcow2Rs {
    /// rqcow2.
    pub program: PathBuf,
    /// The version of the crate.
    pub version: String,
}

impl Qcow2Rs {
    /// The conversion of `image` to raw; the output is still to be added.
    pub fn convert(&self, image: &Path) -> Program {
        let mut line = command([self.program.as_os_str()]);
        line.extend(command(["convert", "-f", "qcow2", "-O", "raw"]));
        line.push(image.into());
        line.push("-o".into());
        Program::new("qcow2-rs", "", line, Meter::Wall)
    }
}

/// Installs the program into `dir` with cargo, once.
pub fn install(dir: &Path, offline: bool) -> Result<Qcow2Rs> {
    let version = std::env::var("QCOW2_RS_VERSION").unwrap_or_else(|_| VERSION.into());
    let root = dir.join(&version);
    let program = root.join("bin/rqcow2");
    if !program.is_file() {
        if offline {
            return Err(Error::new("it is not built yet and --offline is given"));
        }
        let cargo = on_path("cargo").ok_or_else(|| Error::new("cargo is not there"))?;
        println!("building qcow2-rs {version}");
        let mut command = Command::new(cargo);
        command
            .args(["install", "--quiet", "--locked", "qcow2-rs", "--version"])
            .arg(&version)
            .arg("--root")
            .arg(&root)
            // A directory of its own, that is removed again: nothing else uses what is in it.
            .env("CARGO_TARGET_DIR", root.join("build"));
        let built = done(command);
        let _ = std::fs::remove_dir_all(root.join("build"));
        built?;
    }
    Ok(Qcow2Rs { program, version })
}
