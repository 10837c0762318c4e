//! A snapshot is shown by each command, server and function that can.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use zebu::block::{Device, Format, OpenOptions};
use zebu::names::Source;
use zebu::qcow2::SnapshotName;
use zebu::storage::Queue;

use crate::common::server::wait_until;
use crate::common::vhost::{Disk, READ};
use crate::common::{Rng, bytes, program};
use crate::program::{By, Shell};
use crate::world::{SECTOR, World, done, words};

type Result<T> = std::result::Result<T, String>;

/// A server that is killed when dropped.
struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl World {
    /// A snapshot as one of them shows it.
    pub fn view(&self, shell: &mut Shell, rng: &mut Rng, nth: usize) -> Result<Vec<u8>> {
        match rng.below(12) {
            0 => self.measures(shell, rng, nth)?,
            1 => return self.view_by_nbd(shell, rng, nth),
            2 => return self.view_by_vhost(shell, rng, nth),
            // A relative name of a data file is looked up in the current folder.
            3..=6 if self.fixed_cwd.is_none() => return self.view_by_library(shell, rng, nth),
            _ => {}
        }
        self.snapshot_content(shell, rng, nth, By::Zebu)
    }

    fn option(&self, nth: usize) -> String {
        format!("snapshot.name={}", self.snaps[nth].name)
    }

    fn exact(&self, nth: usize) -> SnapshotName {
        SnapshotName::from(bytes::os(&self.option(nth)).as_bytes())
    }

    /// A raw copy has the size of the snapshot's disk.
    fn measures(&self, shell: &mut Shell, rng: &mut Rng, nth: usize) -> Result<()> {
        let (cwd, name) = self.place(shell, rng);
        let args = words(&[
            "measure",
            "-l",
            &self.option(nth),
            "-f",
            "qcow2",
            "-O",
            "raw",
            &name,
        ]);
        let answer = done(shell.img(By::Zebu, cwd, &args)?)?;
        let right = format!("required size: {}\n", self.snaps[nth].disk.bytes.len());
        match answer.out.starts_with(&right) {
            true => Ok(()),
            false => Err(format!("measure -l: {}, not {right}", answer.out)),
        }
    }

    /// Starts a server of the snapshot.
    fn serve_view(
        &self,
        (shell, rng): (&mut Shell, &mut Rng),
        nth: usize,
        command: &[&str],
        socket: &Path,
    ) -> Result<Serving> {
        let (cwd, name) = self.place(shell, rng);
        let option = self.option(nth);
        shell.note(format!("# zebu {} serves {option} in {cwd}", command[0]));
        let child = Command::new(program())
            .args(command)
            .arg(socket)
            .args(["-f", "qcow2", "-l"])
            .args([bytes::os(&option), bytes::os(&name)])
            .current_dir(shell.root.join(cwd))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut server = Serving(child.map_err(|e| format!("{command:?}: {e}"))?);
        let mut ended = false;
        wait_until("the server listens", || {
            ended = server.0.try_wait().is_ok_and(|status| status.is_some());
            ended || UnixStream::connect(socket).is_ok()
        });
        if !ended {
            return Ok(server);
        }
        let mut why = String::new();
        if let Some(mut err) = server.0.stderr.take() {
            let _ = io::Read::read_to_string(&mut err, &mut why);
        }
        Err(format!("{command:?} of {option}: {why}"))
    }

    fn view_by_nbd(&self, shell: &mut Shell, rng: &mut Rng, nth: usize) -> Result<Vec<u8>> {
        // Of a name that needs no escapes in a URI.
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let (socket, out) = (folder.path().join("sock"), folder.path().join("raw"));
        let server =
            self.serve_view((shell, rng), nth, &["nbd", "-t", "-e", "9", "-k"], &socket)?;
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let to = out.display().to_string();
        let convert = words(&["convert", "-f", "raw", "-O", "raw", &uri, &to]);
        done(shell.img(By::Zebu, ".", &convert)?)?;
        drop(server);
        fs::read(out).map_err(|e| e.to_string())
    }

    fn view_by_vhost(&self, shell: &mut Shell, rng: &mut Rng, nth: usize) -> Result<Vec<u8>> {
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let socket = folder.path().join("sock");
        let command = ["vhost-user-blk", "--socket-path"];
        let _server = self.serve_view((shell, rng), nth, &command, &socket)?;
        let mut disk = Disk::at(&socket, Default::default());
        let capacity = disk.connection.config(0, 8).map_err(|e| e.to_string())?;
        let sectors = capacity.into_iter().rev();
        let sectors = sectors.fold(0, |n, byte| n << 8 | u64::from(byte));
        let mut all = Vec::new();
        while (all.len() / SECTOR) < sectors as usize {
            let at = (all.len() / SECTOR) as u64;
            let length = (sectors - at).min(128) as usize * SECTOR;
            let read = disk.take(READ, at, length);
            all.extend(
                read.map_err(|status| format!("vhost-user-blk: status {status} at sector {at}"))?,
            );
        }
        Ok(all)
    }

    /// By the option to open it, or in a device that is open, and may show another one.
    fn view_by_library(&self, shell: &mut Shell, rng: &mut Rng, nth: usize) -> Result<Vec<u8>> {
        let failed = |e: zebu::Error| format!("the library: {e}");
        shell.note(format!("# the library shows {}", self.option(nth)));
        let queue = Queue::new(Default::default()).map_err(|e| e.to_string())?;
        let source = Source::Name(self.path(shell).into());
        let plain = OpenOptions::default().format(Some(Format::QCOW2));
        let device = match rng.one_in(2) {
            true => {
                let options = plain.snapshot(Some(self.exact(nth)));
                Device::open(&queue, &source, &options).map_err(failed)?
            }
            false => {
                let mut device = Device::open(&queue, &source, &plain).map_err(failed)?;
                let other = rng.below(self.snaps.len() as u64) as usize;
                let mut start = [0; SECTOR];
                device
                    .read_blocking(&queue, 0, &mut start)
                    .map_err(failed)?;
                for nth in [other, nth] {
                    let name = self.exact(nth);
                    let shown = device.show_snapshot(&queue, &name);
                    queue.block_on(shown).map_err(failed)?;
                    device
                        .read_blocking(&queue, 0, &mut start)
                        .map_err(failed)?;
                }
                device
            }
        };
        let mut all = vec![0; device.size() as usize];
        device.read_blocking(&queue, 0, &mut all).map_err(failed)?;
        Ok(all)
    }
}
