//! Which bytes of a file are read to find the header, and which copy is taken.

use std::collections::VecDeque;
use std::ops::Range;

use super::Luks2;
use super::binary::{BINARY_BYTES, Binary, Found, SIZES, Which};
use super::error::Luks2Error;

/// Finds the header of a LUKS2 container, while the caller reads: as long as [`wants`](Self::wants) names a range of
/// the file, its bytes are given to [`give`](Self::give), then [`finish`](Self::finish) has the header. If the first
/// copy is whole, just this one and the second are read; if not, the second is looked for in each place where it
/// may be.
#[derive(Debug)]
pub struct Search {
    file_bytes: u64,
    wanted: VecDeque<Place>,
    copies: Vec<Copy>,
    /// Why the first copy is none.
    first: Luks2Error,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    which: Which,
    offset: u64,
    bytes: u64,
}

/// A copy with the right checksum.
#[derive(Debug)]
pub(super) struct Copy {
    pub which: Which,
    pub binary: Binary,
    pub metadata: Vec<u8>,
}

impl Search {
    /// For a file of so many bytes.
    #[must_use]
    pub fn new(file_bytes: u64) -> Self {
        let place = Place {
            which: Which::First,
            offset: 0,
            // What nearly all containers have.
            bytes: SIZES[0],
        };
        Search {
            file_bytes,
            wanted: VecDeque::from([place]),
            copies: Vec::new(),
            first: Luks2Error::NotLuks,
        }
    }

    /// The range of the file that is to be read next, at most 4 MiB; None: all is known.
    #[must_use]
    pub fn wants(&self) -> Option<Range<u64>> {
        let place = self.wanted.front()?;
        let end = place.offset.saturating_add(place.bytes);
        Some(place.offset.min(self.file_bytes)..end.min(self.file_bytes))
    }

    /// Takes the bytes of the range that was wanted.
    pub fn give(&mut self, bytes: &[u8]) {
        let Some(place) = self.wanted.pop_front() else {
            return;
        };
        let found = Binary::decode(place.which, place.offset, bytes);
        if let Found::Header(binary) = &found
            && binary.bytes > place.bytes
        {
            self.wanted.push_front(Place {
                bytes: binary.bytes,
                ..place
            });
            return;
        }
        match (whole(place.which, found, bytes), place.which) {
            (Ok(copy), Which::First) => {
                self.wanted
                    .push_back(second(copy.binary.bytes, copy.binary.bytes));
                self.copies.push(copy);
            }
            (Ok(copy), Which::Second) => {
                self.wanted.clear();
                self.copies.push(copy);
            }
            (Err(error), Which::First) => {
                self.first = error;
                let file_bytes = self.file_bytes;
                let places = SIZES.into_iter().filter(|offset| *offset < file_bytes);
                let places = places.map(|offset| second(offset, BINARY_BYTES as u64));
                self.wanted.extend(places);
            }
            // That of a version is a damaged one, since the magic is no other's.
            (Err(error), Which::Second) if error != Luks2Error::NotLuks => {
                if self.first == Luks2Error::NotLuks {
                    self.first = Luks2Error::Damaged;
                }
            }
            (Err(_), Which::Second) => (),
        }
    }

    /// The header: of the copy that was written last.
    ///
    /// # Errors
    /// If no copy is whole, or it has what is not supported or not valid.
    pub fn finish(self) -> Result<Luks2, Luks2Error> {
        let sequences: Vec<u64> = self
            .copies
            .iter()
            .map(|copy| copy.binary.sequence)
            .collect();
        let are_equal = matches!(sequences[..], [a, b] if a == b);
        // Of two equal ones the first.
        let newest = self
            .copies
            .into_iter()
            .rev()
            .max_by_key(|copy| copy.binary.sequence)
            .ok_or(self.first)?;
        Luks2::decode(newest, !are_equal, self.file_bytes)
    }
}

fn second(offset: u64, bytes: u64) -> Place {
    Place {
        which: Which::Second,
        offset,
        bytes,
    }
}

fn whole(which: Which, found: Found, bytes: &[u8]) -> Result<Copy, Luks2Error> {
    let binary = match found {
        Found::Nothing => return Err(Luks2Error::NotLuks),
        Found::Version(version) => return Err(Luks2Error::Version(version)),
        Found::Damaged => return Err(Luks2Error::Damaged),
        Found::Header(binary) => binary,
    };
    let copy = usize::try_from(binary.bytes).ok();
    match copy.and_then(|length| bytes.get(..length)) {
        Some(copy) if binary.is_whole(copy) => {
            let metadata = &copy[BINARY_BYTES..];
            let end = metadata.iter().position(|byte| *byte == 0);
            Ok(Copy {
                which,
                binary,
                metadata: metadata[..end.unwrap_or(metadata.len())].to_vec(),
            })
        }
        _ => Err(Luks2Error::Damaged),
    }
}
