//! Guessing the format of an image, and guarding a raw image whose format was guessed.
//!
//! A guest may write the header of another format to the start of its disk. A raw image whose
//! format is guessed would open as that format the next time, with a backing file of the guest's
//! choice. So writes to the start of such an image must keep it raw, as in QEMU.

use std::os::unix::ffi::OsStrExt;

use super::{Format, Pass, Raw};
use crate::format::{PROBED_BYTES, foreign_format, is_tar};
use crate::storage::{self, Iov, Queue, Storage};
use crate::{Error, Result};

/// The format of a file by its first bytes, as QEMU finds it. A format that zebu does not read is
/// an error: opening it as a raw disk would be a silent mistake. So is in strict mode an archive,
/// which QEMU takes for a raw disk.
pub(crate) async fn probe(queue: &Queue, file: &dyn Storage, strict: bool) -> Result<Format> {
    let head = storage::read_vec(file, queue, 0, PROBED_BYTES).await;
    let head =
        head.map_err(|e| Error::Io(e).during("Could not read image for determining its format"))?;
    let format = probe_head(&head, strict)?;
    match format == Format::RAW && is_dmg(file) {
        true => Ok(Format::DMG),
        false => Ok(format),
    }
}

/// The format of an image that begins with `head`, which has [`PROBED_BYTES`] unless the image is
/// shorter. The errors are those of [`probe`].
pub(crate) fn probe_head(head: &[u8], strict: bool) -> Result<Format> {
    let mut padded = [0; PROBED_BYTES];
    let length = head.len().min(PROBED_BYTES);
    padded[..length].copy_from_slice(&head[..length]);
    match (format_of(&padded), foreign_format(&padded)) {
        (Some(format), _) => Ok(format),
        (None, None) if strict && is_tar(&padded) => Err(Error::Refused(
            "The file is a tar archive, not the image of a disk ('zebu convert FILE.ova --disk N' \
             takes a disk out of an appliance, and format 'raw' takes the file as it is)"
                .into(),
        )),
        (None, None) => Ok(Format::RAW),
        (None, Some(other)) => Err(Error::Refused(format!(
            "Driver '{other}' is not supported by zebu (format 'raw' takes the file as it is)"
        ))),
    }
}

/// The format of a file that begins with `head`, unless it is raw.
fn format_of(head: &[u8]) -> Option<Format> {
    Format::all().find(|format| format.driver().probe.is_some_and(|probe| probe(head)))
}

/// Whether a file is a DMG image by its name, as in QEMU: its first bytes do not tell.
fn is_dmg(file: &dyn Storage) -> bool {
    let name = file.path().as_os_str().as_bytes();
    name.len() > 4 && name.ends_with(b".dmg")
}

/// Bytes of a write to the start that are checked and written as one.
const AS_ONE: u64 = 64 << 10;

impl Raw {
    /// Whether a write from `offset` on must go through [`Raw::write_start`]. The start of the
    /// storage counts, since that is probed.
    pub(crate) fn is_guarded(&self, offset: u64) -> bool {
        self.guard.is_some() && self.offset() + offset < PROBED_BYTES as u64
    }

    /// Writes to the start of a guarded image. Fails with `EPERM` if it would look like an image of
    /// another format afterwards.
    pub(crate) async fn write_start(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let at = self.offset() + offset;
        let inside = (iov.len() as u64).min(AS_ONE - at) as usize;
        // Checked and written is a copy: the memory may be a guest's, and change meanwhile.
        let mut buffer = queue.buffer(inside);
        let looked_at = &mut buffer[..inside];
        iov.slice(0, inside).copy_to(looked_at);
        let _pass = self.pass(queue, at, looked_at).await?;
        let file = &**self.storage();
        storage::write_slice(file, queue, at, looked_at).await?;
        if inside < iov.len() {
            let rest = iov.slice(inside, iov.len() - inside);
            storage::write(file, queue, AS_ONE, &rest).await?;
        }
        Ok(())
    }

    /// The guard for zeroing `length` bytes from `offset` on; None: none is needed. Fails as
    /// [`Raw::write_start`].
    pub(crate) async fn zero_start(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
    ) -> Result<Option<Pass<'_>>> {
        if !self.is_guarded(offset) {
            return Ok(None);
        }
        let at = self.offset() + offset;
        let zeroes = vec![0; length.min(PROBED_BYTES as u64) as usize];
        self.pass(queue, at, &zeroes).await.map(Some)
    }

    /// Waits for other requests that change the start, and checks the start as it will be with
    /// `bytes` at `at` in the storage. One request at a time: two together must not make a header
    /// either.
    async fn pass(&self, queue: &Queue, at: u64, bytes: &[u8]) -> Result<Pass<'_>> {
        let gate = self.guard.as_ref().expect("only asked of a guarded image");
        let pass = gate.enter().await;
        let mut head = storage::read_vec(&**self.storage(), queue, 0, PROBED_BYTES).await?;
        let changed = &mut head[at as usize..];
        let length = changed.len().min(bytes.len());
        changed[..length].copy_from_slice(&bytes[..length]);
        match format_of(&head).is_some() || foreign_format(&head).is_some() {
            false => Ok(pass),
            true => Err(Error::os(libc::EPERM)),
        }
    }
}
