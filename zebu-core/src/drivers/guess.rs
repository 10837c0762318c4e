//! Guessing the format of an image, and guarding a raw image whose format was guessed.
//!
//! A guest may write the header of another format to the start of its disk. A raw image whose
//! format is guessed would open as that format the next time, with a backing file of the guest's
//! choice. So writes to the start of such an image must keep it raw, as in QEMU.

use std::os::unix::ffi::OsStrExt;

use super::{Format, Pass, Raw};
use crate::drivers::signature::{
    Foreign, INNER, PROBED_BYTES, TAIL_BYTES, Tail, foreign, foreign_format, foreign_inside,
};
use crate::storage::{self, Iov, Queue, Storage};
use crate::{Error, Result};

/// What a file is taken for.
pub struct Guess {
    /// The format.
    pub format: Format,
    /// What it looks like, if it was taken for a raw disk nevertheless.
    pub looks_like: Option<Foreign>,
}

/// The format of a file by its content. A file that is neither an image that zebu reads nor looks like
/// a disk is an error: opening it as a raw disk would be a silent mistake. `as_qemu`: what QEMU takes
/// for a raw disk is one.
pub async fn probe(queue: &Queue, file: &dyn Storage, as_qemu: bool) -> Result<Guess> {
    let head = storage::read_vec(file, queue, 0, PROBED_BYTES).await;
    let head =
        head.map_err(|e| Error::Io(e).during("Could not read image for determining its format"))?;
    let format = known(&head)?;
    let guess = |format| Guess {
        format,
        looks_like: None,
    };
    let dmg = || Format::named("dmg").filter(|_| is_named(file, "dmg", !as_qemu));
    if let Some(format) = format.or_else(dmg) {
        return match foreign(&head).filter(|other| !as_qemu && other.is_archive()) {
            Some(other) => Err(refused(other)),
            _ => Ok(guess(format)),
        };
    }
    let looks_like = match look_at_start(&head) {
        Look::Disk => look_further(queue, file, &head).await,
        look => look,
    };
    match looks_like {
        Look::Disk => Ok(guess(Format::RAW)),
        Look::Format(format, _) if !as_qemu => Ok(guess(format)),
        Look::Foreign(other) if !as_qemu => Err(refused(other)),
        Look::Format(_, other) | Look::Foreign(other) => Ok(Guess {
            format: Format::RAW,
            looks_like: Some(other),
        }),
    }
}

/// The format of an image that begins with `head`, which has [`PROBED_BYTES`] unless the image is
/// shorter. The errors are those of [`probe`].
pub fn probe_head(head: &[u8]) -> Result<Format> {
    let mut padded = [0; PROBED_BYTES];
    let length = head.len().min(PROBED_BYTES);
    padded[..length].copy_from_slice(&head[..length]);
    if let Some(format) = known(&padded)? {
        return match foreign(&padded).filter(Foreign::is_archive) {
            Some(other) => Err(refused(other)),
            None => Ok(format),
        };
    }
    match look_at_start(&padded) {
        Look::Disk => Ok(Format::RAW),
        Look::Format(format, _) => Ok(format),
        Look::Foreign(other) => Err(refused(other)),
    }
}

/// Refuses a raw disk that was guessed by its start, by its last [`TAIL_BYTES`] in whole sectors.
pub fn check_tail(tail: &[u8]) -> Result<()> {
    match Tail::of(tail) {
        Some(found) => Err(refused(found.foreign())),
        None => Ok(()),
    }
}

/// Refuses a raw disk that was guessed by its start, of which the sectors at [`INNER`] are these.
pub fn check_inner(sectors: &[(u64, Vec<u8>)]) -> Result<()> {
    foreign_inside(sectors).map_or(Ok(()), |found| Err(refused(found)))
}

/// Whether a disk that begins with `head` has partitions: what was there before may still be inside.
pub fn is_partitioned(head: &[u8]) -> bool {
    head.get(510..512) == Some(&[0x55, 0xaa])
}

/// What a file that QEMU takes for a raw disk looks like.
enum Look {
    Disk,
    /// An image of a format, in a form that QEMU does not know.
    Format(Format, Foreign),
    Foreign(Foreign),
}

fn refused(found: Foreign) -> Error {
    let Foreign { what, next } = found;
    let next = match next {
        "" => String::new(),
        next => format!("{next}, and "),
    };
    Error::Refused(format!(
        "The file is {what}, not the image of a disk ({next}format 'raw' takes the file as it is)"
    ))
}

/// The format that QEMU finds in a file that begins with `head`; None: it takes it for a raw disk.
/// One that zebu does not read is an error.
fn known(head: &[u8]) -> Result<Option<Format>> {
    match (format_of(head), foreign_format(head)) {
        (Some(format), _) => Ok(Some(format)),
        (None, None) => Ok(None),
        (None, Some(other)) => Err(Error::Refused(format!(
            "Driver '{other}' is not supported by zebu (format 'raw' takes the file as it is)"
        ))),
    }
}

/// By the first bytes.
fn look_at_start(head: &[u8]) -> Look {
    match in_other_form(head) {
        Some((format, looks_like)) => Look::Format(format, looks_like),
        None => foreign(head).map_or(Look::Disk, Look::Foreign),
    }
}

/// The format of a file that begins with `head` in a form that QEMU does not know.
fn in_other_form(head: &[u8]) -> Option<(Format, Foreign)> {
    Format::all().find_map(|format| {
        let form = format.driver().other_form.as_ref()?;
        (form.is_one)(head).then_some((format, form.looks_like))
    })
}

/// By the end, and by what is inside. What cannot be read is as if it were not there: the disk itself
/// is read later.
async fn look_further(queue: &Queue, file: &dyn Storage, head: &[u8]) -> Look {
    const SECTOR: u64 = 512;
    let Ok(length) = file.len() else {
        return Look::Disk;
    };
    let end = length.next_multiple_of(SECTOR);
    let at = end.saturating_sub(TAIL_BYTES as u64);
    if let Ok(bytes) = storage::read_vec(file, queue, at, (end - at) as usize).await
        && let Some(found) = Tail::of(&bytes)
    {
        return match found {
            Tail::FixedVhd if is_named(file, "vhd", true) => match Format::named("vpc") {
                Some(format) => Look::Format(format, found.foreign()),
                None => Look::Foreign(found.foreign()),
            },
            _ => Look::Foreign(found.foreign()),
        };
    }
    if is_partitioned(head) {
        return Look::Disk;
    }
    let mut sectors = Vec::new();
    for at in INNER
        .iter()
        .take_while(|at| **at + (PROBED_BYTES as u64) <= length)
    {
        if let Ok(sector) = storage::read_vec(file, queue, *at, PROBED_BYTES).await {
            sectors.push((*at, sector));
        }
    }
    foreign_inside(&sectors).map_or(Look::Disk, Look::Foreign)
}

/// The format of a file that begins with `head`, unless it is raw.
fn format_of(head: &[u8]) -> Option<Format> {
    Format::all().find(|format| format.driver().probe.is_some_and(|probe| probe(head)))
}

/// Whether the name of a file has this ending, as it is or in letters of any case.
fn is_named(file: &dyn Storage, ending: &str, any_case: bool) -> bool {
    let name = file.path().as_os_str().as_bytes();
    let Some(at) = name.len().checked_sub(ending.len() + 1) else {
        return false;
    };
    let (stem, found) = name.split_at(at);
    let found = found.strip_prefix(b".").unwrap_or_default();
    !stem.is_empty()
        && match any_case {
            true => found.eq_ignore_ascii_case(ending.as_bytes()),
            false => found == ending.as_bytes(),
        }
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
        let is_other = format_of(&head).is_some()
            || foreign_format(&head).is_some()
            || in_other_form(&head).is_some();
        match is_other {
            false => Ok(pass),
            true => Err(Error::os(libc::EPERM)),
        }
    }
}
