//! Big-endian numbers in a slice. Every reader answers `None` past the end
//! instead of panicking, since lengths come from the file.

pub(super) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(array(bytes, at)?))
}

pub(super) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(array(bytes, at)?))
}

pub(super) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(array(bytes, at)?))
}

/// The `len` bytes at `at`, if all of them are there.
pub(super) fn slice(bytes: &[u8], at: usize, len: usize) -> Option<&[u8]> {
    bytes.get(at..at.checked_add(len)?)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    slice(bytes, at, N)?.try_into().ok()
}

/// `len` rounded up to a multiple of eight: the padding of every
/// variable-length structure of the format.
pub(super) fn pad8(len: usize) -> usize {
    len.next_multiple_of(8)
}
