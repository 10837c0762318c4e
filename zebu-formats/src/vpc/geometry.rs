//! The size of a VHD disk: cylinders, heads and sectors.

use crate::Result;
use crate::drivers::too_large;

/// Bytes of a sector.
pub(super) const SECTOR: u64 = 512;
/// Sectors of the largest geometry. A disk with this geometry may have more.
pub(super) const MAX_CHS: u64 = 65535 * 16 * 255;
/// Most sectors of a disk: 2040 GiB.
pub(super) const MAX_SECTORS: u64 = 2040 << 30 >> 9;

/// Cylinders, heads, and sectors of a track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub cylinders: u16,
    pub heads: u8,
    pub sectors: u8,
}

impl Geometry {
    /// The largest one. A disk with this geometry has the size in the footer.
    pub(super) const MAX: Geometry = Geometry {
        cylinders: 65535,
        heads: 16,
        sectors: 255,
    };

    /// That of an empty disk.
    const NONE: Geometry = Geometry {
        cylinders: 0,
        heads: 0,
        sectors: 0,
    };

    /// The geometry of a disk of so many sectors, by the appendix "CHS Calculation" of the
    /// specification. It may have fewer sectors.
    fn of(sectors: u64) -> Self {
        let sectors = sectors.min(MAX_CHS);
        let with = |heads: u64, per_track: u64| Geometry {
            // None of the three is larger than in `MAX`.
            cylinders: (sectors / per_track / heads) as u16,
            heads: heads as u8,
            sectors: per_track as u8,
        };
        if sectors >= 65535 * 16 * 63 {
            return with(16, 255);
        }
        let tracks = sectors / 17;
        let heads = tracks.div_ceil(1024).max(4);
        if heads <= 16 && tracks < heads * 1024 {
            return with(heads, 17);
        }
        match sectors / 31 < 16 * 1024 {
            true => with(16, 31),
            false => with(16, 63),
        }
    }

    /// Sectors of the disk.
    fn count(self) -> u64 {
        u64::from(self.cylinders) * u64::from(self.heads) * u64::from(self.sectors)
    }

    /// The geometry and the size in sectors of a new disk of at least so many sectors. Without
    /// `exact` the size is that of the geometry, as Virtual PC has it, if there is one.
    ///
    /// # Errors
    /// If the disk would be larger than 2040 GiB.
    pub(super) fn for_disk(sectors: u64, exact: bool) -> Result<(Self, u64)> {
        let least = sectors.min(MAX_CHS);
        let geometry = match exact {
            true => Geometry::MAX,
            false if sectors == 0 => Geometry::NONE,
            // A geometry is at most one cylinder smaller than what it is asked for.
            false => (least..)
                .map(Geometry::of)
                .find(|geometry| geometry.count() >= least)
                .expect("the largest one"),
        };
        match geometry == Geometry::MAX {
            false => Ok((geometry, geometry.count())),
            true if sectors > MAX_SECTORS => {
                Err(too_large("Disk size is too large, max size is 2040 GiB"))
            }
            true => Ok((geometry, sectors)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures of qemu-img 10 create.
    #[test]
    fn sizes_match_qemu() {
        let size = |bytes: u64| {
            let (geometry, sectors) = Geometry::for_disk(bytes / SECTOR, false).unwrap();
            (
                geometry.cylinders,
                geometry.heads,
                geometry.sectors,
                sectors * SECTOR,
            )
        };
        assert_eq!(size(512), (1, 4, 17, 34816));
        assert_eq!(size(6 << 20), (0xb5, 4, 0x11, 6301696));
        assert_eq!(size(2040 << 30), (65535, 16, 255, 2040 << 30));
        assert!(Geometry::for_disk(MAX_SECTORS + 1, false).is_err());
        assert!(Geometry::for_disk(MAX_SECTORS + 1, true).is_err());
        let (geometry, sectors) = Geometry::for_disk(1, true).unwrap();
        assert_eq!((geometry, sectors), (Geometry::MAX, 1));
        // Any size is reached.
        for sectors in (0..300_000_000).step_by(9_999_991) {
            let (_, rounded) = Geometry::for_disk(sectors, false).unwrap();
            assert!(
                (sectors..sectors + 16 * 255).contains(&rounded),
                "{sectors}"
            );
        }
    }
}
