//! Replacing a header so that a power cut leaves the old one or the new one.
//!
//! A disk writes a sector as a whole. Headers that differ only in the first sector are replaced by
//! one write. What lies behind it, most often a long backing file name, goes to a place that the
//! old header does not use, and is durable before the first sector refers to it.

use std::ops::Range;

use super::{AUTOCLEAR_KNOWN, FormatError, Header};

/// Bytes that a disk writes as a whole or not at all.
const SECTOR: usize = 512;

/// What is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replacement {
    /// Bytes at an offset, which must be durable before the rest is written.
    pub before: Option<(u64, Vec<u8>)>,
    /// Bytes at the start of the file.
    pub last: Vec<u8>,
}

/// Where the extensions of a header end, and its backing file name.
fn used(header: &Header) -> (usize, Range<usize>) {
    let extensions = header.header_length as usize + header.extensions.encoded_len();
    let start = header.backing_offset as usize;
    let length = header.backing_name.as_ref().map_or(0, Vec::len);
    (extensions, start..start + length)
}

impl Header {
    /// The bytes of the file that [`Header::replace`] needs.
    #[must_use]
    pub fn replaced_len(&self, old: &Header) -> u64 {
        let (extensions, name) = used(self);
        let (old_extensions, old_name) = used(old);
        let end = extensions.max(old_extensions).max(old_name.end) + name.len();
        (end.next_multiple_of(SECTOR) as u64).min(self.cluster_size())
    }

    /// How to put this header in the place of `old`, of which the file has
    /// `bytes`. The backing file name may go to another place. Autoclear bits that are not known
    /// are cleared: the image changes.
    ///
    /// There is no safe way where the extensions alone are longer than a sector
    /// and change there, or the cluster has no space for two names: then all
    /// is written at once.
    pub fn replace(&mut self, old: &Header, bytes: &[u8]) -> Result<Replacement, FormatError> {
        self.autoclear &= AUTOCLEAR_KNOWN;
        self.place_backing_name()?;
        let (old_extensions, old_name) = used(old);
        let in_use = |at: usize| at < old_extensions || old_name.contains(&at);
        let kept = self.backing_offset;
        let extensions = used(self).0.max(old_extensions);
        for place in [kept as usize, extensions, extensions.max(old_name.end)] {
            if self.backing_name.is_some() {
                self.backing_offset = place as u64;
            }
            let Ok(encoded) = self.encode() else {
                continue;
            };
            let (end, name) = used(self);
            if name.end > encoded.len() {
                // There it does not fit.
                continue;
            }
            // As it is, with what is new over it.
            let length = end
                .max(name.end)
                .next_multiple_of(SECTOR)
                .min(encoded.len());
            let mut tail = bytes[..bytes.len().min(length)].to_vec();
            tail.resize(length, 0);
            let changed: Vec<usize> = (SECTOR..end)
                .chain(name.start.max(SECTOR)..name.end)
                .filter(|at| tail[*at] != encoded[*at])
                .collect();
            if changed.iter().any(|at| in_use(*at)) {
                continue;
            }
            for at in &changed {
                tail[*at] = encoded[*at];
            }
            let before = changed.first().map(|at| {
                let start = at / SECTOR * SECTOR;
                (start as u64, tail[start..].to_vec())
            });
            let last = encoded[..SECTOR.min(encoded.len())].to_vec();
            return Ok(Replacement { before, last });
        }
        self.backing_offset = kept;
        let mut last = self.encode()?;
        let (end, name) = used(self);
        let length = end.max(name.end).next_multiple_of(SECTOR);
        last.truncate(length);
        Ok(Replacement { before: None, last })
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a header that is neither the old one nor the new one after a power cut, which
    //! may lose any of the written sectors.

    use super::*;

    fn name(byte: u8, length: usize) -> Vec<u8> {
        vec![byte; length]
    }

    /// Fails unless every intermediate state decodes as one of the two headers. Returns whether the
    /// replacement is possible.
    fn is_safe(old: &Header, bytes: &[u8], new: &Header, steps: &Replacement) -> bool {
        let is_one = |bytes: &[u8]| match Header::decode(bytes) {
            Ok(header) => {
                let alike = |other: &Header| {
                    let mut other = other.clone();
                    other.backing_offset = header.backing_offset;
                    other == header
                };
                alike(old) || alike(new)
            }
            Err(_) => false,
        };
        let mut now = bytes.to_vec();
        let before = steps.before.iter().map(|(at, bytes)| (*at as usize, bytes));
        for (at, bytes) in before.chain([(0, &steps.last)]) {
            let sectors = bytes.len().div_ceil(SECTOR);
            for there in 0..1u32 << sectors.min(10) {
                let mut torn = now.clone();
                for (nth, sector) in bytes.chunks(SECTOR).enumerate() {
                    if there >> nth & 1 == 1 {
                        let start = at + nth * SECTOR;
                        torn[start..start + sector.len()].copy_from_slice(sector);
                    }
                }
                if !is_one(&torn) {
                    return false;
                }
            }
            now[at..at + bytes.len()].copy_from_slice(bytes);
        }
        let header = Header::decode(&now);
        header.is_ok_and(|header| header == *new)
    }

    #[test]
    fn a_torn_header_is_the_old_or_the_new() {
        for bits in [9, 10, 12, 16] {
            let mut header = Header::new(bits, 1 << 14);
            header.l1_offset = 3 << bits;
            header.refcount_table_offset = 1 << bits;
            header.refcount_table_clusters = 1;
            header.l1_size = 1;
            if header.fit().is_err() {
                continue;
            }
            let mut bytes = header.encode().unwrap();
            let (mut safe, mut all) = (0, 0);
            for (nth, length) in [3, 200, 190, 210, 1000, 20, 1023, 1023, 0, 700, 500]
                .into_iter()
                .enumerate()
            {
                let mut new = header.clone();
                let of = name(b'a' + nth as u8, length);
                new.set_backing(Some(&of), Some(b"qcow2"));
                if new.encode().is_err() {
                    continue;
                }
                let steps = new.replace(&header, &bytes).unwrap();
                all += 1;
                safe += u32::from(is_safe(&header, &bytes, &new, &steps));
                if let Some((at, tail)) = &steps.before {
                    bytes[*at as usize..*at as usize + tail.len()].copy_from_slice(tail);
                }
                bytes[..steps.last.len()].copy_from_slice(&steps.last);
                header = Header::decode(&bytes).unwrap();
                assert_eq!(header, new, "{bits}, {length}");
            }
            assert!(all > 1);
            // Small clusters have no space for two names.
            assert!(safe == all || bits < 12, "{bits}: {safe} of {all}");
        }
    }
}
