//! A random request, executed as a future.

use std::ops::Range;
use std::rc::Rc;

use zebu::Result;
use zebu::block::{Device, Zeroing};
use zebu::storage::Queue;

use crate::common::{Pieces, Rng};

#[derive(Debug)]
pub enum Kind {
    Read,
    Write(Vec<u8>),
    Compressed(Vec<u8>),
    Zero(Zeroing),
    Discard,
    Flush,
}

/// A request for a range of the disk. The layout of its memory is drawn from `seed`.
#[derive(Debug)]
pub struct Step {
    pub kind: Kind,
    pub range: Range<usize>,
    seed: u64,
}

impl Step {
    /// Whether it changes its range.
    pub fn changes(&self) -> bool {
        !matches!(self.kind, Kind::Read | Kind::Flush)
    }

    /// Whether the results depend on the order of the two.
    pub fn conflicts(&self, other: &Step) -> bool {
        let overlap = self.range.start < other.range.end && other.range.start < self.range.end;
        overlap && (self.changes() || other.changes())
    }

    /// One line for a trace.
    pub fn line(&self) -> String {
        let name = match &self.kind {
            Kind::Read => "read".to_string(),
            Kind::Write(bytes) => format!("write {:02x}..", bytes.first().unwrap_or(&0)),
            Kind::Compressed(bytes) => {
                format!("write compressed {:02x}..", bytes.first().unwrap_or(&0))
            }
            Kind::Zero(zeroing) => format!("zero {zeroing:?}"),
            Kind::Discard => "discard".to_string(),
            Kind::Flush => return "flush".to_string(),
        };
        format!("{name} {:#x}+{:#x}", self.range.start, self.range.len())
    }
}

/// The properties of the disk that steps are drawn for.
pub struct Shape {
    pub size: usize,
    pub cluster: usize,
    /// Where half of the requests go.
    hot: usize,
    /// Whether every offset and length is a multiple of 512.
    sectors: bool,
}

impl Shape {
    pub fn random(rng: &mut Rng, size: u64, cluster: u64) -> Shape {
        Shape {
            size: size as usize,
            cluster: cluster as usize,
            hot: rng.below(size) as usize,
            sectors: rng.one_in(3),
        }
    }

    pub fn step(&self, rng: &mut Rng) -> Step {
        let kind = rng.below(32);
        let range = match kind {
            20..24 => self.clusters(rng),
            _ => self.range(rng),
        };
        let kind = match kind {
            0..8 => Kind::Read,
            8..20 => Kind::Write(data(rng, range.len())),
            20..24 => Kind::Compressed(data(rng, range.len())),
            24..26 => Kind::Zero(Zeroing::Keep),
            26..28 => Kind::Zero(Zeroing::Unmap),
            28..31 => Kind::Discard,
            _ => Kind::Flush,
        };
        Step {
            range: match kind {
                Kind::Flush => 0..0,
                _ => range,
            },
            kind,
            seed: rng.next(),
        }
    }

    /// Any range, often one that ends or begins within a cluster.
    fn range(&self, rng: &mut Rng) -> Range<usize> {
        let unit = match rng.below(8) {
            0 if !self.sectors => 1,
            0..4 => 512,
            4 => 4096,
            _ => self.cluster,
        };
        let near = 3 * self.cluster;
        let start = match rng.one_in(2) {
            true => rng.index(self.size),
            false => (self.hot + rng.index(near)) % self.size,
        };
        let start = start / unit * unit;
        let most = match rng.below(8) {
            0..4 => 4096,
            4..6 => self.cluster * 2,
            6 => 64 << 10,
            _ => self.cluster * 4,
        };
        let most = most.clamp(unit, 4 << 20);
        let mut length = (1 + rng.index(most)).next_multiple_of(unit);
        if rng.one_in(100) {
            length = 0;
        }
        start..(start + length).min(self.size)
    }

    /// Whole clusters.
    fn clusters(&self, rng: &mut Rng) -> Range<usize> {
        let range = self.range(rng);
        let start = range.start / self.cluster * self.cluster;
        let count = 1 + rng.below(3) as usize;
        start..(start + count * self.cluster).min(self.size)
    }
}

/// Data to write: mostly noise, sometimes compressible, sometimes zeroes.
fn data(rng: &mut Rng, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    match rng.below(8) {
        0 => {}
        1 | 2 => bytes.fill(1 + rng.below(255) as u8),
        3 => {
            rng.fill(&mut bytes);
            // Zeroes of whole and half sectors between the noise.
            for piece in bytes.chunks_mut(2048) {
                let from = 256 * rng.below(9) as usize;
                let from = from.min(piece.len());
                piece[from..].fill(0);
            }
        }
        _ => rng.fill(&mut bytes),
    }
    bytes
}

/// Executes a step. Returns the bytes of a read.
pub async fn perform(device: Rc<Device>, queue: Queue, step: Rc<Step>) -> Result<Vec<u8>> {
    let (offset, length) = (step.range.start as u64, step.range.len());
    let mut rng = Rng::new(step.seed);
    let align = match rng.below(3) {
        0 if length <= 4096 => 1,
        0 | 1 if length <= 128 << 10 => 512,
        _ => 4096,
    };
    let memory = |rng: &mut Rng| match rng.below(2) {
        0 => Pieces::one(length),
        _ => Pieces::random(rng, length, align),
    };
    match &step.kind {
        Kind::Read => {
            let mut pieces = memory(&mut rng);
            // SAFETY: `pieces` lives until the read has ended.
            let iov = unsafe { pieces.iov(&mut [], &mut []) };
            device.read(&queue, offset, &iov).await?;
            return Ok(pieces.get());
        }
        Kind::Write(bytes) | Kind::Compressed(bytes) => {
            let mut pieces = memory(&mut rng);
            pieces.put(bytes);
            // SAFETY: `pieces` lives until the write has ended.
            let iov = unsafe { pieces.iov(&mut [], &mut []) };
            match step.kind {
                Kind::Write(_) => device.write(&queue, offset, &iov).await?,
                _ => device.write_compressed(&queue, offset, &iov).await?,
            }
            assert!(pieces.get() == *bytes, "a write changed the memory");
        }
        Kind::Zero(zeroing) => {
            let length = length as u64;
            (device.write_zeroes(&queue, offset, length, *zeroing)).await?;
        }
        Kind::Discard => device.discard(&queue, offset, length as u64).await?,
        Kind::Flush => device.flush(&queue).await?,
    }
    Ok(Vec::new())
}
