//! go-qcow2reader, the library that Lima converts images with, behind a small driver.

use super::on_path;
use super::qemu::done;
use crate::error::{Context, Error, Result};
use crate::measure::Program;
use crate::measure::child::command;
use crate::measure::meter::Meter;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version that is measured; GO_QCOW2READER_VERSION names another.
const VERSION: &str = "v0.7.1";
const ZSTD_VERSION: &str = "v1.17.11";
const DRIVER: &str = include_str!("../../peers/go-qcow2reader/main.go");

/// The built driver.
#[derive(Debug, Clone)]
pub struct GoQcow2Reader {
    /// `PROGRAM [-m WORKERS] IMAGE RAW`.
    pub program: PathBuf,
    /// The library's version and the Go it was built with.
    pub version: String,
}

impl GoQcow2Reader {
    /// The conversion of `image` to raw; the output is still to be added.
    pub fn convert(&self, image: &Path) -> Program {
        let line = command([self.program.as_os_str(), image.as_os_str()]);
        Program::new("go-qcow2reader", "", line, Meter::Wall)
    }
}

/// Builds the driver in `dir` through the Go module proxy, once.
pub fn build(dir: &Path, offline: bool) -> Result<GoQcow2Reader> {
    let version = std::env::var("GO_QCOW2READER_VERSION").unwrap_or_else(|_| VERSION.into());
    let go = on_path("go");
    let program = dir.join(format!("convert-{version}"));
    let toolchain = dir.join("go-version");
    if !program.is_file() {
        if offline {
            return Err(Error::new("it is not built yet and --offline is given"));
        }
        let go = go.ok_or_else(|| Error::new("go is not there"))?;
        println!("building go-qcow2reader {version}");
        std::fs::create_dir_all(dir).context(|| dir.display().to_string())?;
        let write = |name: &str, text: &str| {
            std::fs::write(dir.join(name), text).context(|| name.to_owned())
        };
        write("main.go", DRIVER)?;
        write("go.mod", &module(&version))?;
        let _ = std::fs::remove_file(dir.join("go.sum"));
        let part = dir.join("part");
        let mut command = Command::new(&go);
        command
            .args(["build", "-mod=mod", "-o", "part", "."])
            .current_dir(dir);
        done(command)?;
        write(
            "go-version",
            &crate::report::machine::said(&go.to_string_lossy(), &["env", "GOVERSION"]),
        )?;
        std::fs::rename(&part, &program).context(|| program.display().to_string())?;
    }
    let built_with = std::fs::read_to_string(&toolchain).unwrap_or_default();
    Ok(GoQcow2Reader {
        program,
        version: format!("{version}, {built_with}"),
    })
}

fn module(version: &str) -> String {
    format!(
        "module driver\n\ngo 1.22\n\nrequire (\n\tgithub.com/klauspost/compress {ZSTD_VERSION}\n\t\
         github.com/lima-vm/go-qcow2reader {version}\n)\n"
    )
}
