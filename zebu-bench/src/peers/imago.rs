//! imago, a Rust library for disk images, behind a small driver.

use super::on_path;
use super::qemu::done;
use crate::error::{Context, Error, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version that is measured; IMAGO_VERSION names another.
const VERSION: &str = "0.2.6";
const DRIVER: &str = include_str!("../../peers/imago/main.rs");

/// The built driver.
#[derive(Debug, Clone)]
pub struct Imago {
    /// `PROGRAM IMAGE none|writeback DEPTH COUNT`.
    pub program: PathBuf,
    /// The version of the crate.
    pub version: String,
}

/// Builds the driver in `dir` with cargo, once.
pub fn build(dir: &Path, offline: bool) -> Result<Imago> {
    let version = std::env::var("IMAGO_VERSION").unwrap_or_else(|_| VERSION.into());
    let root = dir.join(&version);
    let program = root.join("imago-reads");
    if !program.is_file() {
        if offline {
            return Err(Error::new("it is not built yet and --offline is given"));
        }
        let cargo = on_path("cargo").ok_or_else(|| Error::new("cargo is not there"))?;
        println!("building imago {version}");
        std::fs::create_dir_all(root.join("src")).context(|| root.display().to_string())?;
        let write = |name: &str, text: &str| {
            std::fs::write(root.join(name), text).context(|| name.to_owned())
        };
        write("Cargo.toml", &manifest(&version))?;
        write("src/main.rs", DRIVER)?;
        let mut command = Command::new(cargo);
        command
            .args(["build", "--quiet", "--release"])
            .current_dir(&root)
            // A directory of its own, that is removed again: nothing else uses what is in it.
            .env("CARGO_TARGET_DIR", root.join("build"));
        let built = done(command).and_then(|_| {
            std::fs::rename(root.join("build/release/imago-reads"), &program)
                .context(|| program.display().to_string())
        });
        let _ = std::fs::remove_dir_all(root.join("build"));
        built?;
    }
    Ok(Imago { program, version })
}

fn manifest(version: &str) -> String {
    format!(
        "[package]\nname = \"imago-reads\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n\
         [dependencies]\nimago = {{ version = \"={version}\", features = [\"sync-wrappers\"] }}\n\
         tokio = {{ version = \"1\", features = [\"rt\"] }}\n\n[profile.release]\nlto = \"thin\"\n"
    )
}
