//! Tables of numbers that a driver keeps in memory, and numbers in headers.

use super::refused;
use crate::Result;
use crate::storage::{self, Queue, Storage};

/// Bytes of a table that are read at a time: it is kept in another form.
const PIECE: u64 = 1 << 20;

/// The `N` bytes at `at`; zeroes if they are not all there.
pub(super) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = at.checked_add(N).and_then(|end| bytes.get(at..end));
    found.and_then(|b| b.try_into().ok()).unwrap_or([0; N])
}

/// The `count` entries of `N` bytes at `at`, decoded. `what` is the table's name for the error if
/// the file does not have all of it.
pub(super) async fn read_table<const N: usize, T>(
    queue: &Queue,
    file: &dyn Storage,
    what: &str,
    at: u64,
    count: u64,
    decode: impl Fn([u8; N]) -> T,
) -> Result<Vec<T>> {
    let end = check_in_file(what, at, count.saturating_mul(N as u64), file.len()?)?;
    let mut table = storage::reserved(count as usize)?;
    let mut at = at;
    while at < end {
        let length = (end - at).min(PIECE - PIECE % N as u64);
        let bytes = storage::read_vec(file, queue, at, length as usize).await?;
        let (entries, _) = bytes.as_chunks();
        table.extend(entries.iter().map(|entry| decode(*entry)));
        at += length;
    }
    Ok(table)
}

/// The end of a table of `bytes` bytes at `at`. Refuses one that is not in the file: QEMU would
/// read zeroes, which may be valid entries.
pub(super) fn check_in_file(what: &str, at: u64, bytes: u64, file_len: u64) -> Result<u64> {
    match at.checked_add(bytes) {
        Some(end) if end <= file_len => Ok(end),
        _ => Err(refused(format!(
            "{what} at {at:#x} ({bytes} bytes) reaches past the end of the file"
        ))),
    }
}

/// The name of a backing file, of `length` bytes at `at`: what precedes the first zero byte. None:
/// it is empty.
pub(super) async fn read_backing_name(
    queue: &Queue,
    file: &dyn Storage,
    at: u64,
    length: u32,
    file_len: u64,
) -> Result<Option<Vec<u8>>> {
    check_in_file("The backing file's name", at, length.into(), file_len)?;
    let bytes = storage::read_vec(file, queue, at, length as usize).await?;
    let name = bytes.split(|b| *b == 0).next().unwrap_or_default();
    Ok(Some(name.to_vec()).filter(|name| !name.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_past_the_end_are_zero() {
        assert_eq!(array::<2>(&[1, 2, 3], 1), [2, 3]);
        assert_eq!(array::<2>(&[1, 2, 3], 2), [0, 0]);
        assert_eq!(array::<2>(&[1, 2, 3], usize::MAX), [0, 0]);
    }
}
