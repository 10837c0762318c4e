//! The programs to measure against. One that is not there is left out with a line.

pub mod fio;
pub mod go_qcow2reader;
pub mod imago;
pub mod qcow2_rs;
pub mod qemu;

use crate::options::Run;
use std::path::{Path, PathBuf};

/// What was found.
#[derive(Debug)]
pub struct Peers {
    /// QEMU's programs.
    pub qemu: qemu::Qemu,
    /// fio, the device's own limit.
    pub fio: Option<fio::Fio>,
    /// The driver of go-qcow2reader.
    pub go: Option<go_qcow2reader::GoQcow2Reader>,
    /// The driver of imago.
    pub imago: Option<imago::Imago>,
    /// The program of qcow2-rs.
    pub qcow2_rs: Option<qcow2_rs::Qcow2Rs>,
}

impl Peers {
    /// Finds, fetches or builds the peers under `dir`; says in `notes` what is left out.
    pub fn find(options: &Run, dir: &Path, notes: &mut Vec<String>) -> crate::error::Result<Peers> {
        let qemu = qemu::find(options.qemu_img.as_deref())?;
        let fio = fio::find().or_else(|| left_out(notes, "fio", "it is not on PATH"));
        let go = match go_qcow2reader::build(&dir.join("go-qcow2reader"), options.offline) {
            Ok(go) => Some(go),
            Err(e) => left_out(notes, "go-qcow2reader", &e.to_string()),
        };
        let imago = match imago::build(&dir.join("imago"), options.offline) {
            Ok(it) => Some(it),
            Err(e) => left_out(notes, "imago", &e.to_string()),
        };
        let qcow2_rs = match qcow2_rs::install(&dir.join("qcow2-rs"), options.offline) {
            Ok(it) => Some(it),
            Err(e) => left_out(notes, "qcow2-rs", &e.to_string()),
        };
        Ok(Peers {
            qemu,
            fio,
            go,
            imago,
            qcow2_rs,
        })
    }
}

fn left_out<T>(notes: &mut Vec<String>, peer: &str, why: &str) -> Option<T> {
    let line = format!("{peer} is left out: {why}");
    println!("note: {line}");
    notes.push(line);
    None
}

/// Looks a program up on PATH and in the places where system programs lie.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/local/go/bin"].map(PathBuf::from))
        .chain(std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo/bin")))
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}
