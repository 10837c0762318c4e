//! The snapshot table. Section "Snapshots".

use super::bounds::{MAX_L1_BYTES, MAX_SNAPSHOTS, SNAPSHOT_HEADER_BYTES, validate_table};
use super::bytes::{be16, be32, be64, pad8, slice};
use super::extensions::until_nul;
use super::geometry::Geometry;
use crate::error::FormatError;
use crate::offset::HostOffset;

/// Most extra data of a snapshot in bytes. A limit of QEMU.
pub const MAX_SNAPSHOT_EXTRA: usize = 1024;
/// Largest snapshot table in bytes. A limit of QEMU.
pub const MAX_SNAPSHOT_TABLE_BYTES: usize = 1024 * MAX_SNAPSHOTS as usize;
/// Bytes of the extra data that QEMU writes: size of the VM state, size of the disk, instruction
/// count.
const KNOWN_EXTRA: usize = 24;
/// The instruction count of a snapshot that has none.
const NO_ICOUNT: u64 = u64::MAX;

/// One internal snapshot: an entry of the snapshot table, whole and lossless.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Offset of its L1 table in bytes.
    pub l1_offset: u64,
    /// Entries of its L1 table.
    pub l1_size: u32,
    /// The unique ID, usually a decimal number.
    pub id: Vec<u8>,
    /// The name.
    pub name: Vec<u8>,
    /// When it was taken, in seconds since the epoch.
    pub date_sec: u32,
    /// The nanoseconds of that time.
    pub date_nsec: u32,
    /// How long the guest had run, in nanoseconds.
    pub vm_clock_nsec: u64,
    /// The 32-bit field for the size of the VM state in bytes; means nothing
    /// when the extra data has a wider one. See [`Snapshot::vm_state_size`].
    pub vm_state_size_32: u32,
    /// The extra data as it is stored.
    pub extra: Vec<u8>,
}

impl Snapshot {
    /// Reads one entry at the start of `bytes`, which reach up to the end of
    /// the table or less far. `index` is its place in the table, for errors.
    ///
    /// `None` means that more bytes are needed: [`Snapshot::MAX_ENCODED`] are
    /// always enough. Otherwise the answer has the length of the entry with
    /// its padding; of the last entry the padding may lie after the end of
    /// the file, so the length may be more than that of `bytes`.
    #[doc(hidden)]
    pub fn decode(bytes: &[u8], index: u64) -> Result<Option<(Self, usize)>, FormatError> {
        let fixed = SNAPSHOT_HEADER_BYTES as usize;
        let Some(extra_len) = be32(bytes, 36) else {
            return Ok(None);
        };
        let extra_len = extra_len as usize;
        if extra_len > MAX_SNAPSHOT_EXTRA {
            return Err(FormatError::SnapshotExtraTooLarge(index));
        }
        let all = || {
            let id_len = usize::from(be16(bytes, 12)?);
            let name_len = usize::from(be16(bytes, 14)?);
            let id_at = fixed + extra_len;
            let name_at = id_at + id_len;
            let snapshot = Self {
                l1_offset: be64(bytes, 0)?,
                l1_size: be32(bytes, 8)?,
                date_sec: be32(bytes, 16)?,
                date_nsec: be32(bytes, 20)?,
                vm_clock_nsec: be64(bytes, 24)?,
                vm_state_size_32: be32(bytes, 32)?,
                extra: slice(bytes, fixed, extra_len)?.to_vec(),
                id: slice(bytes, id_at, id_len)?.to_vec(),
                name: slice(bytes, name_at, name_len)?.to_vec(),
            };
            Some((snapshot, pad8(name_at + name_len)))
        };
        Ok(all())
    }

    /// Length of the longest entry in bytes.
    #[doc(hidden)]
    pub const MAX_ENCODED: usize = 40 + MAX_SNAPSHOT_EXTRA + 2 * 65535 + 7;

    /// Length of the entry in bytes, with its padding.
    #[must_use]
    #[doc(hidden)]
    pub fn encoded_len(&self) -> usize {
        pad8(SNAPSHOT_HEADER_BYTES as usize + self.extra.len() + self.id.len() + self.name.len())
    }

    /// The stored form, with padding to a multiple of 8 bytes.
    #[doc(hidden)]
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        let too_long = |what, length, max| FormatError::TooLong { what, length, max };
        let id_len = u16::try_from(self.id.len())
            .map_err(|_| too_long("snapshot ID", self.id.len(), 65535))?;
        let name_len = u16::try_from(self.name.len())
            .map_err(|_| too_long("snapshot name", self.name.len(), 65535))?;
        if self.extra.len() > MAX_SNAPSHOT_EXTRA {
            return Err(too_long(
                "snapshot extra data",
                self.extra.len(),
                MAX_SNAPSHOT_EXTRA,
            ));
        }
        let mut out = Vec::with_capacity(self.encoded_len());
        out.extend_from_slice(&self.l1_offset.to_be_bytes());
        out.extend_from_slice(&self.l1_size.to_be_bytes());
        out.extend_from_slice(&id_len.to_be_bytes());
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&self.date_sec.to_be_bytes());
        out.extend_from_slice(&self.date_nsec.to_be_bytes());
        out.extend_from_slice(&self.vm_clock_nsec.to_be_bytes());
        out.extend_from_slice(&self.vm_state_size_32.to_be_bytes());
        // At most 1024, see above.
        out.extend_from_slice(&(self.extra.len() as u32).to_be_bytes());
        out.extend_from_slice(&self.extra);
        out.extend_from_slice(&self.id);
        out.extend_from_slice(&self.name);
        out.resize(self.encoded_len(), 0);
        Ok(out)
    }

    /// Reads a table of `count` entries. `bytes` must hold it all.
    #[doc(hidden)]
    pub fn decode_table(bytes: &[u8], count: u32) -> Result<Vec<Self>, FormatError> {
        if count > MAX_SNAPSHOTS {
            return Err(FormatError::TableTooLarge("Snapshot table"));
        }
        let mut table = Vec::new();
        let mut at = 0usize;
        for index in 0..u64::from(count) {
            let rest = bytes.get(at..).unwrap_or(&[]);
            let Some((snapshot, used)) = Self::decode(rest, index)? else {
                return Err(FormatError::Truncated {
                    what: "snapshot table entry",
                    offset: at as u64,
                    need: SNAPSHOT_HEADER_BYTES,
                    have: rest.len() as u64,
                }
                .at("snapshot", index));
            };
            at = at.saturating_add(used);
            if at > MAX_SNAPSHOT_TABLE_BYTES {
                return Err(FormatError::SnapshotTableTooBig);
            }
            table.push(snapshot);
        }
        Ok(table)
    }

    /// The stored form of a whole table.
    #[doc(hidden)]
    pub fn encode_table(table: &[Self]) -> Result<Vec<u8>, FormatError> {
        if table.len() > MAX_SNAPSHOTS as usize {
            return Err(FormatError::TableTooLarge("Snapshot table"));
        }
        let mut out = Vec::new();
        for (snapshot, index) in table.iter().zip(0..) {
            out.extend(snapshot.encode().map_err(|e| e.at("snapshot", index))?);
            if out.len() > MAX_SNAPSHOT_TABLE_BYTES {
                return Err(FormatError::SnapshotTableTooBig);
            }
        }
        Ok(out)
    }

    /// Size of its disk in bytes, in an image whose geometry has the size of the active disk. An
    /// old image does not record it: it is that of the active disk then, as far as the L1 table maps
    /// it.
    #[must_use]
    pub(crate) fn size_in(&self, geometry: &Geometry) -> u64 {
        let reach = u64::from(self.l1_size).saturating_mul(geometry.l2_coverage());
        let active = geometry.virtual_size();
        self.disk_size().unwrap_or(active.min(reach))
    }

    /// Whether its L1 table is large enough for its disk.
    pub(crate) fn maps_its_disk(&self, geometry: &Geometry) -> bool {
        geometry.l1_entries_for(self.size_in(geometry)) <= u64::from(self.l1_size)
    }

    /// Offset of its L1 table.
    #[must_use]
    #[doc(hidden)]
    pub const fn l1_table(&self) -> HostOffset {
        HostOffset(self.l1_offset)
    }

    /// Checks size and place of its L1 table, without the length of the file.
    #[doc(hidden)]
    pub fn check_l1(&self, cluster_size: u64) -> Result<(), FormatError> {
        validate_table(
            "Snapshot L1 table",
            self.l1_offset,
            u64::from(self.l1_size),
            8,
            cluster_size,
            MAX_L1_BYTES,
        )
    }

    /// The id as QEMU has it: up to its first NUL.
    #[must_use]
    pub fn id_text(&self) -> &[u8] {
        until_nul(&self.id)
    }

    /// The same of the name.
    #[must_use]
    pub fn name_text(&self) -> &[u8] {
        until_nul(&self.name)
    }

    /// Size of the VM state in bytes; 0 if none is saved.
    #[must_use]
    pub fn vm_state_size(&self) -> u64 {
        be64(&self.extra, 0).unwrap_or(u64::from(self.vm_state_size_32))
    }

    /// Size of the virtual disk in bytes when the snapshot was taken. `None`
    /// in old images: it is the size of the image then.
    #[must_use]
    pub fn disk_size(&self) -> Option<u64> {
        be64(&self.extra, 8)
    }

    /// Instructions that the guest had executed, if it counted them.
    #[must_use]
    pub fn icount(&self) -> Option<u64> {
        be64(&self.extra, 16).filter(|count| *count != NO_ICOUNT)
    }

    /// Extra data after the fields that are known.
    #[must_use]
    #[doc(hidden)]
    pub fn unknown_extra(&self) -> &[u8] {
        self.extra.get(KNOWN_EXTRA..).unwrap_or(&[])
    }

    /// Sets the three fields of the extra data and keeps what is after them.
    /// Sizes in bytes; the 32-bit size field follows as QEMU has it: 0 when
    /// the size does not fit.
    #[doc(hidden)]
    pub fn set_extra(&mut self, vm_state_size: u64, disk_size: u64, icount: Option<u64>) {
        let mut extra = Vec::with_capacity(self.extra.len().max(KNOWN_EXTRA));
        extra.extend_from_slice(&vm_state_size.to_be_bytes());
        extra.extend_from_slice(&disk_size.to_be_bytes());
        extra.extend_from_slice(&icount.unwrap_or(NO_ICOUNT).to_be_bytes());
        extra.extend_from_slice(self.unknown_extra());
        self.extra = extra;
        self.vm_state_size_32 = u32::try_from(vm_state_size).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against: a snapshot lost or altered when the table is
    //! rewritten, and a table that makes the reader run past its end.
    use super::*;
    use proptest::prelude::*;

    /// The entry that `qemu-img snapshot -c one` wrote.
    const ENTRY: &[u8] = b"\0\0\0\0\0\x04\0\0\0\0\0\x02\0\x01\0\x03\
        \x6b\0\xa9\x16\x0f\x79\x69\x18\0\0\0\0\0\0\0\0\
        \0\0\0\0\0\0\0\x18\0\0\0\0\0\0\0\0\
        \0\0\0\0\x40\0\0\0\0\0\0\0\0\0\0\x001one";

    #[test]
    fn known_entry_without_padding() {
        // The file ends with the name: 68 bytes, of which padding makes 72.
        let mut bytes = ENTRY.to_vec();
        assert_eq!(bytes.len(), 68);
        let (snapshot, used) = Snapshot::decode(&bytes, 0).unwrap().unwrap();
        assert_eq!(used, 72);
        assert_eq!(snapshot.l1_table(), HostOffset(0x4_0000));
        assert_eq!(snapshot.l1_size, 2);
        assert_eq!(
            (&snapshot.id[..], &snapshot.name[..]),
            (&b"1"[..], &b"one"[..])
        );
        assert_eq!(snapshot.disk_size(), Some(1 << 30));
        assert_eq!(snapshot.icount(), Some(0));
        assert_eq!(snapshot.vm_state_size(), 0);
        bytes.resize(72, 0);
        assert_eq!(snapshot.encode().unwrap(), bytes);
        for len in 0..68 {
            assert_eq!(Snapshot::decode(&bytes[..len], 0), Ok(None));
        }
    }

    #[test]
    fn limits() {
        let mut bytes = ENTRY.to_vec();
        bytes[36..40].copy_from_slice(&1025u32.to_be_bytes());
        assert_eq!(
            Snapshot::decode(&bytes, 3).unwrap_err().to_string(),
            "Too much extra metadata in snapshot table entry 3"
        );
        let large = Snapshot {
            name: vec![b'x'; 65535],
            ..Snapshot::default()
        };
        assert_eq!(
            Snapshot::encode_table(&vec![large.clone(); 1024]),
            Err(FormatError::SnapshotTableTooBig)
        );
        assert!(Snapshot::decode_table(&[], u32::MAX).is_err());
        let longer = Snapshot {
            name: vec![b'x'; 65536],
            ..large
        };
        assert!(longer.encode().is_err());
    }

    #[test]
    fn old_entries_have_the_narrow_size() {
        let mut old = Snapshot {
            vm_state_size_32: 77,
            ..Snapshot::default()
        };
        assert_eq!(old.vm_state_size(), 77);
        assert_eq!(old.disk_size(), None);
        old.set_extra(1 << 33, 5, None);
        assert_eq!((old.vm_state_size(), old.vm_state_size_32), (1 << 33, 0));
        assert_eq!((old.disk_size(), old.icount()), (Some(5), None));
        old.extra.push(9);
        old.set_extra(1, 2, Some(3));
        assert_eq!(old.unknown_extra(), [9]);
        assert_eq!(old.icount(), Some(3));
    }

    fn snapshots() -> impl Strategy<Value = Snapshot> {
        let bytes = |n| prop::collection::vec(any::<u8>(), 0..n);
        (
            any::<(u64, u32, u32, u32, u64, u32)>(),
            bytes(40),
            bytes(40),
            bytes(1025),
        )
            .prop_map(
                |((l1_offset, l1_size, date_sec, date_nsec, clock, state), id, name, extra)| {
                    Snapshot {
                        l1_offset,
                        l1_size,
                        id,
                        name,
                        date_sec,
                        date_nsec,
                        vm_clock_nsec: clock,
                        vm_state_size_32: state,
                        extra,
                    }
                },
            )
    }

    proptest! {
        #[test]
        fn round_trip(table in prop::collection::vec(snapshots(), 0..5)) {
            let bytes = Snapshot::encode_table(&table).unwrap();
            prop_assert_eq!(Snapshot::decode_table(&bytes, table.len() as u32), Ok(table));
        }

        #[test]
        fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300), count: u32) {
            let _ = Snapshot::decode(&bytes, 0);
            let _ = Snapshot::decode_table(&bytes, count % 70000);
        }

        #[test]
        fn damaged_bytes(
            table in prop::collection::vec(snapshots(), 1..4), at: usize, byte: u8, cut: usize,
        ) {
            let mut bytes = Snapshot::encode_table(&table).unwrap();
            let len = bytes.len();
            bytes[at % len] = byte;
            bytes.truncate(len - cut % len);
            let _ = Snapshot::decode_table(&bytes, table.len() as u32);
        }
    }
}
