//! Requests: chains of descriptors are decoded.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use vm_memory::{Bytes, GuestAddress};
use zebu::storage::Iov;

use crate::chain::{Chain, Malformed, length};
use crate::memory::{Guest, OutsideMemory, Segment, iov};

/// Bytes of data of one request at most.
pub const MAX_BYTES: usize = 64 << 20;
/// Ranges of one discard or write of zeroes at most.
pub const MAX_RANGES: usize = 32;
/// Sectors of one such range at most: 2 GiB.
pub const MAX_SECTORS: u32 = 1 << 22;
/// Bytes of a sector, the unit of offsets and lengths.
pub const SECTOR: u64 = 512;
/// Bytes of the serial number.
pub const ID: usize = 20;

const HEADER: usize = 16;
const RANGE: usize = 16;

/// The operation of a request.
pub enum Work {
    Read {
        sector: u64,
        data: Iov,
    },
    Write {
        sector: u64,
        data: Iov,
    },
    Flush,
    Discard(Vec<Range>),
    WriteZeroes(Vec<Range>),
    Id(Iov),
    /// An operation that does not exist.
    Unknown(u32),
    /// A request that cannot be executed, and why.
    Invalid(&'static str),
}

/// A range of a discard or a write of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub sector: u64,
    pub sectors: u32,
    pub flags: u32,
}

/// The range of a read or a write.
#[derive(Clone, Copy)]
pub struct Span {
    write: bool,
    /// The first byte.
    start: u64,
    /// The byte behind the last.
    end: u64,
}

impl Span {
    /// Whether it continues `last`: the same operation from its end on.
    pub fn continues(self, last: Span) -> bool {
        self.write == last.write && self.start == last.end
    }
}

/// A decoded request.
pub struct Request {
    pub work: Work,
    /// The address of the status.
    pub status: GuestAddress,
    /// Bytes that the device writes if the request succeeds.
    pub written: u32,
    /// Bytes of data.
    pub bytes: usize,
}

impl Request {
    /// The range of a read or a write; `None` for other requests.
    pub fn span(&self) -> Option<Span> {
        let (write, sector, data) = match &self.work {
            Work::Read { sector, data } => (false, *sector, data),
            Work::Write { sector, data } => (true, *sector, data),
            _ => return None,
        };
        // The range is not checked yet.
        let start = sector.saturating_mul(SECTOR);
        let end = start.saturating_add(data.len() as u64);
        Some(Span { write, start, end })
    }

    /// Decodes the request of `chain`, which was read from `guest`. Its division into descriptors
    /// is irrelevant. The caller must keep `guest` until the request is dropped.
    ///
    /// # Errors
    ///
    /// There is no byte for the status, or memory is outside of the guest's.
    pub fn decode(guest: &Guest, chain: &Chain) -> Result<Self, Malformed> {
        let status = chain.status().ok_or(Malformed::NoStatus)?;
        let given = length(&chain.readable);
        let room = length(&chain.writable) - 1;
        let mut request = Request {
            work: Work::Invalid("an incomplete header"),
            status,
            written: 1,
            bytes: 0,
        };
        if given < HEADER {
            return Ok(request);
        }
        let mut header = [0; HEADER];
        copy(guest, &chain.readable, 0, &mut header)?;
        let kind = u32::from_le_bytes(header[..4].try_into().expect("4 bytes"));
        let sector = u64::from_le_bytes(header[8..].try_into().expect("8 bytes"));
        let given = given - HEADER;
        if given.max(room) > MAX_BYTES {
            request.work = Work::Invalid("too much data");
            return Ok(request);
        }
        request.work = match kind {
            VIRTIO_BLK_T_IN => {
                request.bytes = room;
                let data = iov(guest, &chain.writable, 0, room)?;
                Work::Read { sector, data }
            }
            VIRTIO_BLK_T_OUT => {
                request.bytes = given;
                let data = iov(guest, &chain.readable, HEADER, given)?;
                Work::Write { sector, data }
            }
            VIRTIO_BLK_T_FLUSH => Work::Flush,
            VIRTIO_BLK_T_DISCARD => match ranges(guest, chain, given)? {
                Some(ranges) => Work::Discard(ranges),
                None => Work::Invalid("no, incomplete or too many ranges to discard"),
            },
            VIRTIO_BLK_T_WRITE_ZEROES => match ranges(guest, chain, given)? {
                Some(ranges) => Work::WriteZeroes(ranges),
                None => Work::Invalid("no, incomplete or too many ranges to zero"),
            },
            VIRTIO_BLK_T_GET_ID => {
                request.bytes = room.min(ID);
                Work::Id(iov(guest, &chain.writable, 0, room.min(ID))?)
            }
            kind => Work::Unknown(kind),
        };
        if matches!(request.work, Work::Read { .. } | Work::Id(_)) {
            request.written += request.bytes as u32;
        }
        Ok(request)
    }
}

fn ranges(guest: &Guest, chain: &Chain, given: usize) -> Result<Option<Vec<Range>>, Malformed> {
    if given == 0 || !given.is_multiple_of(RANGE) || given / RANGE > MAX_RANGES {
        return Ok(None);
    }
    let mut bytes = [0; MAX_RANGES * RANGE];
    let bytes = &mut bytes[..given];
    copy(guest, &chain.readable, HEADER, bytes)?;
    let range = |bytes: &[u8]| Range {
        sector: u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")),
        sectors: u32::from_le_bytes(bytes[8..12].try_into().expect("4 bytes")),
        flags: u32::from_le_bytes(bytes[12..16].try_into().expect("4 bytes")),
    };
    Ok(Some(bytes.chunks(RANGE).map(range).collect()))
}

/// Copies bytes of `segments` from `skip` on. There must be enough.
fn copy(
    guest: &Guest,
    segments: &[Segment],
    mut skip: usize,
    mut out: &mut [u8],
) -> Result<(), OutsideMemory> {
    for segment in segments {
        let length = segment.length as usize;
        let passed = skip.min(length);
        skip -= passed;
        let n = (length - passed).min(out.len());
        if n == 0 {
            continue;
        }
        let (now, later) = out.split_at_mut(n);
        let start = GuestAddress(segment.address.0 + passed as u64);
        guest.read_slice(now, start).map_err(|_| OutsideMemory)?;
        out = later;
    }
    Ok(())
}
