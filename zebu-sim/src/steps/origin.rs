//! The image that a simulation begins with.

use zebu::block::Preallocation;
use zebu::jobs::CreateQcow2;
use zebu::qcow2::Compression;
use zebu_testkit::{Rng, Written};

/// An image and its possible backing files.
#[derive(Clone, Debug)]
pub struct Origin {
    /// Its format, if it is not qcow2. It has no backing file then, and no bitmaps.
    pub other: Option<Written>,
    /// Its options, without the name of its backing file. Of another format only the size counts.
    pub create: CreateQcow2,
    /// The images that may be its backing file.
    pub bases: Vec<Base>,
    /// The index of its backing file; none if there is no such base.
    pub backing: usize,
    /// Its dirty bitmaps. A base may have some of the same names.
    pub bitmaps: Vec<NewBitmap>,
}

/// A dirty bitmap that is added.
#[derive(Clone, Copy, Debug)]
pub struct NewBitmap {
    /// Bytes of the disk to a bit.
    pub granularity: u64,
    /// Whether it records changes.
    pub enabled: bool,
}

/// A backing file.
#[derive(Clone, Debug)]
pub struct Base {
    /// Bytes of its disk. For a raw image this is any number.
    pub bytes: u64,
    /// The cluster bits of a qcow2 image; None: raw.
    pub qcow2: Option<u32>,
    /// Whether the next base is its backing file.
    pub above: bool,
    /// One part in this many has data.
    pub sparse: u64,
    /// The seed of its content.
    pub seed: u64,
    /// The dirty bitmaps of a qcow2 image.
    pub bitmaps: Vec<NewBitmap>,
}

impl Origin {
    pub(super) fn random(rng: &mut Rng, has_bitmaps: bool) -> Origin {
        loop {
            let origin = Origin::draw(rng, has_bitmaps);
            if origin.create.check().is_ok() {
                return origin;
            }
        }
    }

    /// Makes it an image of another format, with a few blocks.
    pub(super) fn become_other(&mut self, rng: &mut Rng) {
        let other = Written::other(rng);
        let size = (other.block + 512 * rng.below(other.block / 512)).min(2 << 20);
        *self = Origin {
            other: Some(other),
            create: CreateQcow2::default().size(size),
            bases: Vec::new(),
            backing: 0,
            bitmaps: Vec::new(),
        };
    }

    pub(super) fn draw(rng: &mut Rng, has_bitmaps: bool) -> Origin {
        let version = if rng.one_in(5) { 2 } else { 3 };
        let extended_l2 = version == 3 && rng.one_in(3);
        let cluster_bits = match rng.below(8) {
            _ if extended_l2 => 14 + rng.below(3) as u32,
            0 => 16,
            1..4 => 9,
            _ => 9 + rng.below(7) as u32,
        };
        let most = (1 << 20).min((1u64 << cluster_bits) * 700);
        let mut size = 512 * (8 + rng.below(most / 512));
        if rng.one_in(2) {
            size = size.next_multiple_of(1 << cluster_bits);
        }
        let bases: Vec<_> = (0..rng.below(4))
            .map(|_| Base::draw(rng, size, has_bitmaps))
            .collect();
        let backing = if rng.one_in(3) { bases.len() } else { 0 };
        let has_backing = backing < bases.len();
        let data_file = (version == 3 && rng.one_in(8))
            .then(|| zebu::jobs::NewDataFile::new("data").raw(!has_backing && rng.one_in(2)));
        Origin {
            other: None,
            create: CreateQcow2::default()
                .size(size)
                .version(version)
                .cluster_bits(cluster_bits)
                .refcount_order(match version == 3 && rng.one_in(3) {
                    true => rng.below(7) as u32,
                    false => 4,
                })
                .extended_l2(extended_l2)
                .lazy_refcounts(version == 3 && rng.one_in(4))
                .compression(match version == 3 && rng.one_in(3) {
                    true => Compression::Zstd,
                    false => Compression::Zlib,
                })
                .preallocation(match has_backing && !extended_l2 {
                    true => Preallocation::Off,
                    false => draw_preallocation(rng),
                })
                .data_file(data_file),
            bases,
            backing,
            bitmaps: draw_bitmaps(rng, has_bitmaps && version == 3),
        }
    }
}

fn draw_bitmaps(rng: &mut Rng, has_bitmaps: bool) -> Vec<NewBitmap> {
    let count = if has_bitmaps { rng.below(4) } else { 0 };
    (0..count).map(|_| NewBitmap::draw(rng)).collect()
}

impl NewBitmap {
    pub(super) fn draw(rng: &mut Rng) -> NewBitmap {
        NewBitmap {
            granularity: rng.pick(&[512, 512, 1024, 4096, 64 << 10, 1 << 20]),
            enabled: !rng.one_in(4),
        }
    }
}

pub(super) fn draw_preallocation(rng: &mut Rng) -> Preallocation {
    match rng.below(10) {
        0 | 1 => Preallocation::Metadata,
        2 => Preallocation::Falloc,
        3 => Preallocation::Full,
        _ => Preallocation::Off,
    }
}

impl Base {
    pub(super) fn draw(rng: &mut Rng, size: u64, has_bitmaps: bool) -> Base {
        let sectors = size / 512;
        let bytes = 512
            * match rng.below(3) {
                0 => sectors,
                1 => 1 + rng.below(sectors),
                _ => sectors + rng.below(300),
            };
        let qcow2 = rng.one_in(2).then(|| 9 + rng.below(8) as u32);
        // The end of a raw image may lie within a sector.
        let odd = match qcow2.is_none() && rng.one_in(3) {
            true => crate::content::LEAST_PART + rng.below(512 - crate::content::LEAST_PART),
            false => 0,
        };
        Base {
            bytes: bytes + odd,
            qcow2,
            above: qcow2.is_some() && rng.one_in(2),
            sparse: 1 + rng.below(4),
            seed: rng.next(),
            bitmaps: draw_bitmaps(rng, has_bitmaps && qcow2.is_some()),
        }
    }
}
