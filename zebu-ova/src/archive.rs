//! Members of a tar archive: ustar, and the extensions of GNU and pax for long names and sizes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use tar::{EntryType, Header};

use crate::printable;

/// Bytes of a block.
pub(crate) const BLOCK: u64 = 512;
/// Headers at most, those of extensions among them.
const MAX_HEADERS: usize = 10_000;
/// Bytes of an extension at most.
const MAX_EXTENSION: u64 = 64 << 10;

/// A member of an archive, inside the archive's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Its first byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Why it is no file that can be read, if it is none.
    pub unreadable: Option<&'static str>,
}

fn invalid<T>(why: impl AsRef<str>) -> io::Result<T> {
    let why = printable(why.as_ref());
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// Whether this is a header: its checksum is right.
pub(crate) fn is_header(block: &[u8; BLOCK as usize]) -> bool {
    // Sums of signed characters, which some old programs wrote, are not accepted.
    let field = 148..156;
    let bytes = block.iter().enumerate();
    let sum = bytes.map(|(at, byte)| match field.contains(&at) {
        true => u32::from(b' '),
        false => u32::from(*byte),
    });
    let sum = sum.sum();
    block.iter().any(|byte| *byte != 0)
        && Header::from_byte_slice(block)
            .cksum()
            .is_ok_and(|found| found == sum)
}

/// What extended headers say of the next member.
#[derive(Default)]
struct Extended {
    name: Option<Vec<u8>>,
    size: Option<u64>,
    is_sparse: bool,
}

/// The members of an archive by name, without directories. What is no regular file, or has the name of
/// another, is unreadable: it matters only if something names it.
pub(crate) fn members(file: &File) -> io::Result<HashMap<String, Member>> {
    let end = file.metadata()?.len();
    let mut members = HashMap::new();
    let mut extended = Extended::default();
    let mut at = 0;
    for _ in 0..MAX_HEADERS {
        if at == end {
            return Ok(members);
        }
        let mut block = [0; BLOCK as usize];
        match end - at < BLOCK {
            true => return invalid("The archive is truncated"),
            false => file.read_exact_at(&mut block, at)?,
        }
        if block == [0; BLOCK as usize] {
            return Ok(members);
        }
        if !is_header(&block) {
            return invalid(format!("The archive has no valid header at offset {at}"));
        }
        let header = Header::from_byte_slice(&block);
        let kind = header.entry_type();
        let is_extension = matches!(
            kind,
            EntryType::GNULongName
                | EntryType::GNULongLink
                | EntryType::XHeader
                | EntryType::XGlobalHeader
        );
        let length = match extended.size {
            Some(size) if !is_extension => size,
            _ => header.entry_size()?,
        };
        let mut offset = at + BLOCK;
        if kind == EntryType::GNUSparse {
            offset = behind_map(file, &block, offset, end)?;
        }
        let length = match kind {
            EntryType::Symlink | EntryType::Char | EntryType::Block | EntryType::Fifo => 0,
            // Some programs write the length of the file that it is a link of.
            EntryType::Link if !has_data(file, offset, end)? => 0,
            _ => length,
        };
        let next = match offset.checked_add(length) {
            Some(last) if last <= end => last.next_multiple_of(BLOCK).min(end),
            _ => return invalid(format!("The member at offset {at} ends behind the archive")),
        };
        match kind {
            EntryType::GNULongName => {
                let mut name = extension(file, offset, length)?;
                name.truncate(name.iter().position(|b| *b == 0).unwrap_or(name.len()));
                extended.name = Some(name);
            }
            EntryType::XHeader => extended.read_pax(&extension(file, offset, length)?)?,
            EntryType::GNULongLink | EntryType::XGlobalHeader => {}
            EntryType::Directory => extended = Extended::default(),
            _ => {
                let Extended {
                    name, is_sparse, ..
                } = std::mem::take(&mut extended);
                let name = name.unwrap_or_else(|| header.path_bytes().into_owned());
                let name = String::from_utf8_lossy(&name);
                let parts = name.split('/').filter(|part| !["", "."].contains(part));
                let name = parts.collect::<Vec<_>>().join("/");
                let unreadable = match kind {
                    EntryType::GNUSparse => Some(SPARSE),
                    EntryType::Regular | EntryType::Continuous => is_sparse.then_some(SPARSE),
                    EntryType::Link | EntryType::Symlink => Some("is a link in the archive"),
                    _ => Some("is no regular file in the archive"),
                };
                match members.entry(name) {
                    Entry::Vacant(entry) => {
                        entry.insert(Member {
                            offset,
                            length,
                            unreadable,
                        });
                    }
                    Entry::Occupied(mut entry) => {
                        entry.get_mut().unreadable = Some("is in the archive twice");
                    }
                }
            }
        }
        at = next;
    }
    invalid(format!("The archive has more than {MAX_HEADERS} headers"))
}

/// The message about a file of which holes are left out.
const SPARSE: &str = "is a sparse file in the archive, which is not supported";

/// Where the data of a sparse member of GNU tar begin: more of its map may follow the header.
fn behind_map(file: &File, header: &[u8], mut at: u64, end: u64) -> io::Result<u64> {
    // Whether there is more of it, in the header and in each block of the map.
    let (in_header, in_map) = (482, 504);
    let mut goes_on = header[in_header] != 0;
    while goes_on && at + BLOCK <= end {
        let mut block = [0; BLOCK as usize];
        file.read_exact_at(&mut block, at)?;
        goes_on = block[in_map] != 0;
        at += BLOCK;
    }
    Ok(at)
}

/// Whether what follows a header is neither another one nor the end of the archive.
fn has_data(file: &File, at: u64, end: u64) -> io::Result<bool> {
    let mut block = [0; BLOCK as usize];
    if end - at < BLOCK {
        return Ok(false);
    }
    file.read_exact_at(&mut block, at)?;
    Ok(block != [0; BLOCK as usize] && !is_header(&block))
}

/// The bytes of an extension.
fn extension(file: &File, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    if length > MAX_EXTENSION {
        return invalid("An extended header of the archive is too long");
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

impl Extended {
    /// Reads records of the form `LENGTH KEY=VALUE`, each with a newline at its end. A value may have
    /// newlines, too.
    fn read_pax(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() && bytes[0] != 0 {
            let record = record(bytes);
            let Some((length, key, value)) = record else {
                return invalid("An extended header of the archive is damaged");
            };
            bytes = &bytes[length..];
            match key {
                b"path" => self.name = Some(value.to_vec()),
                b"size" => {
                    let size = str::from_utf8(value)
                        .ok()
                        .and_then(|size| size.parse().ok());
                    self.size = match size {
                        Some(size) => Some(size),
                        None => return invalid("A member of the archive has an invalid size"),
                    };
                }
                key if key.starts_with(b"GNU.sparse.") => self.is_sparse = true,
                _ => {}
            }
        }
        Ok(())
    }
}

/// The first of these records: its length, the key and the value.
fn record(bytes: &[u8]) -> Option<(usize, &[u8], &[u8])> {
    let digits = bytes.iter().position(|byte| *byte == b' ')?;
    let length: usize = str::from_utf8(&bytes[..digits]).ok()?.parse().ok()?;
    let rest = bytes.get(digits + 1..length)?.strip_suffix(b"\n")?;
    let equals = rest.iter().position(|byte| *byte == b'=')?;
    Some((length, &rest[..equals], &rest[equals + 1..]))
}

/// The header of a new member.
pub(crate) fn header(name: &str, length: u64, time: u64) -> io::Result<[u8; BLOCK as usize]> {
    let mut header = Header::new_ustar();
    header.set_path(name)?;
    header.set_size(length);
    header.set_mode(0o644);
    header.set_mtime(time);
    header.set_entry_type(EntryType::Regular);
    header.set_cksum();
    Ok(*header.as_bytes())
}

#[cfg(test)]
mod tests {
    //! Guards against members that are not found where tar programs find them, and against ranges
    //! outside the file.
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn archive(names: &[&str]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (nth, name) in names.iter().enumerate() {
            let content = vec![b'x'; 300 * nth];
            let mut header = Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_entry_type(EntryType::Regular);
            builder
                .append_data(&mut header, name, &content[..])
                .unwrap();
        }
        builder.into_inner().unwrap()
    }

    /// Name, offset and length of each member, in the order of the archive.
    fn listed(bytes: &[u8]) -> Vec<(String, u64, u64)> {
        let members = members(&file(bytes)).unwrap().into_iter();
        let mut listed: Vec<_> = members
            .map(|(name, m)| (name, m.offset, m.length))
            .collect();
        listed.sort_by_key(|(_, offset, _)| *offset);
        listed
    }

    #[test]
    fn long_names() {
        let long = format!("{}/{}", "d".repeat(90), "n".repeat(200));
        let found = listed(&archive(&["./a.ovf", &long, "b"]));
        let found: Vec<_> = found
            .iter()
            .map(|(name, _, length)| (&**name, *length))
            .collect();
        assert_eq!(found, [("a.ovf", 0), (&*long, 300), ("b", 600)]);
    }

    #[test]
    fn pax_names_and_sizes() {
        let mut bytes = Vec::new();
        let records = b"19 comment=a\n9 b=c\n17 path=x/y.vmdk\n12 size=700\n";
        let mut extension = Header::new_ustar();
        extension.set_path("pax").unwrap();
        extension.set_size(records.len() as u64);
        extension.set_entry_type(EntryType::XHeader);
        extension.set_cksum();
        bytes.extend(extension.as_bytes());
        bytes.extend(records);
        bytes.resize(1024, 0);
        bytes.extend(header("short", 0, 0).unwrap());
        bytes.resize(1536 + 1024, 1);
        bytes.extend(header("next", 0, 0).unwrap());
        let expected = [("x/y.vmdk".into(), 1536, 700), ("next".into(), 3072, 0)];
        assert_eq!(listed(&bytes), expected);
    }

    #[test]
    fn links_sparse_files_and_twins_are_unreadable_alone() {
        let unreadable = |bytes: &[u8], name: &str| {
            let found = members(&file(bytes)).unwrap();
            assert_eq!(found["next"].unreadable, None);
            found[name].unreadable.is_some()
        };
        let next = archive(&["next"]);
        for (kind, size) in [
            (EntryType::Link, 0),
            // The length of the file that it is a link of.
            (EntryType::Link, 700),
            (EntryType::Symlink, 0),
            (EntryType::GNUSparse, 0),
            (EntryType::Fifo, 0),
        ] {
            let mut header = Header::new_gnu();
            header.set_path("x").unwrap();
            header.set_size(size);
            header.set_entry_type(kind);
            header.set_cksum();
            let all = [header.as_bytes(), &next[..]].concat();
            assert!(unreadable(&all, "x"), "{kind:?}");
        }
        // One more block of the map of a sparse file.
        let mut header = Header::new_gnu();
        header.set_path("x").unwrap();
        header.set_size(512);
        header.set_entry_type(EntryType::GNUSparse);
        header.as_gnu_mut().unwrap().isextended = [1];
        header.set_cksum();
        let all = [header.as_bytes(), &[0; 1024][..], &next].concat();
        assert!(unreadable(&all, "x"));
        assert!(unreadable(&archive(&["a", "./a", "next"]), "a"));
        assert_eq!(members(&file(&archive(&["a", "b"]))).unwrap().len(), 2);
        let mut folder = archive(&["a"]);
        let mut header = Header::new_ustar();
        header.set_path("d/").unwrap();
        header.set_size(0);
        header.set_entry_type(EntryType::Directory);
        header.set_cksum();
        folder.splice(0..0, *header.as_bytes());
        assert_eq!(members(&file(&folder)).unwrap().len(), 1);
    }

    proptest! {
        #[test]
        fn members_are_inside(
            changes in prop::collection::vec((0usize..4000, any::<u8>(), any::<bool>()), 0..4),
            length in 0usize..4500,
        ) {
            let mut bytes = archive(&["a.ovf", "b", &"c".repeat(150), "d"]);
            for (at, byte, fix) in changes {
                bytes[at] = byte;
                let start = at / 512 * 512;
                if fix {
                    // A header that is valid again.
                    let header = &mut bytes[start..start + 512];
                    header[148..156].fill(b' ');
                    let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
                    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
                }
            }
            bytes.truncate(length);
            for member in members(&file(&bytes)).unwrap_or_default().values() {
                prop_assert!(member.offset + member.length <= length as u64);
            }
        }
    }
}
