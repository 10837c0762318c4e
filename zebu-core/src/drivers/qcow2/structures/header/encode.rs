//! Writing a header.

use super::super::bounds::{
    INCOMPLETE_VERSION, MAX_BACKING_NAME, check_cluster_bits, check_version,
};
use super::super::extensions::EXTENSION_FEATURE_NAMES;
use super::super::features::INCOMPATIBLE_KNOWN;
use super::check::Strictness;
use super::{HEADER_LENGTH_MIN, Header, MAGIC};
use crate::error::FormatError;

impl Header {
    /// The first cluster: header, extensions, backing file name, and zeros to
    /// the end of the cluster.
    ///
    /// Refuses a header that could not be opened again, except that tables
    /// which only a check may miss (see [`Header::decode_for_check`]) may be
    /// missing, so that an image can be built and repaired step by step.
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        check_version(self.version)?;
        check_cluster_bits(self.cluster_bits)?;
        self.check_layout()?;
        self.check_compression()?;
        if self.incompatible & !INCOMPATIBLE_KNOWN != 0 {
            return Err(FormatError::UnsupportedFeatures(format!(
                "Unknown incompatible feature: {:x}",
                self.incompatible & !INCOMPATIBLE_KNOWN
            )));
        }
        self.check_numbers(Strictness::Check)?;
        self.check_extensions()?;
        let cluster_size = self.cluster_size();
        let (backing_offset, need) = self.backing_place()?;
        if need > cluster_size {
            return Err(FormatError::HeaderDoesNotFit { need, cluster_size });
        }
        let name = self.backing_name.as_deref().unwrap_or(&[]);

        let mut out = Vec::with_capacity(cluster_size as usize);
        out.extend_from_slice(&MAGIC.to_be_bytes());
        let version = match self.unfinished {
            true => INCOMPLETE_VERSION,
            false => self.version,
        };
        out.extend_from_slice(&version.to_be_bytes());
        out.extend_from_slice(&backing_offset.to_be_bytes());
        // Fits: at most 1023, see `backing_place`.
        out.extend_from_slice(&(name.len() as u32).to_be_bytes());
        out.extend_from_slice(&self.cluster_bits.to_be_bytes());
        out.extend_from_slice(&self.size.to_be_bytes());
        out.extend_from_slice(&self.crypt_method.to_be_bytes());
        out.extend_from_slice(&self.l1_size.to_be_bytes());
        out.extend_from_slice(&self.l1_offset.to_be_bytes());
        out.extend_from_slice(&self.refcount_table_offset.to_be_bytes());
        out.extend_from_slice(&self.refcount_table_clusters.to_be_bytes());
        out.extend_from_slice(&self.nb_snapshots.to_be_bytes());
        out.extend_from_slice(&self.snapshots_offset.to_be_bytes());
        if self.version >= 3 {
            out.extend_from_slice(&self.incompatible.to_be_bytes());
            out.extend_from_slice(&self.compatible.to_be_bytes());
            out.extend_from_slice(&self.autoclear.to_be_bytes());
            out.extend_from_slice(&self.refcount_order.to_be_bytes());
            out.extend_from_slice(&self.header_length.to_be_bytes());
            if self.header_length > HEADER_LENGTH_MIN {
                out.push(self.compression.byte());
                out.extend_from_slice(&self.unknown_fields);
            }
        }
        self.extensions.put(&mut out)?;
        out.resize(cluster_size as usize, 0);
        // In range: `need` is at least the end of the name.
        let at = backing_offset as usize;
        if let Some(space) = out.get_mut(at..at + name.len()) {
            space.copy_from_slice(name);
        }
        Ok(out)
    }

    /// Sets [`Header::backing_offset`] to where [`Header::encode`] would put the name, and returns
    /// how many bytes of the first cluster are used then.
    pub fn place_backing_name(&mut self) -> Result<u64, FormatError> {
        let (offset, need) = self.backing_place()?;
        self.backing_offset = offset;
        Ok(need)
    }

    /// Makes the header fit in its cluster: the feature name table, which is
    /// informative only, is left out if there is no space for it. Places the
    /// backing file name anew.
    pub fn fit(&mut self) -> Result<(), FormatError> {
        let cluster_size = self.cluster_size();
        self.backing_offset = 0;
        if self.place_backing_name()? > cluster_size {
            self.extensions.remove(EXTENSION_FEATURE_NAMES);
            self.backing_offset = 0;
        }
        let need = self.place_backing_name()?;
        if need > cluster_size {
            return Err(FormatError::HeaderDoesNotFit { need, cluster_size });
        }
        Ok(())
    }

    /// Where the backing file name goes (0 without one), and where the used
    /// part of the cluster ends.
    pub(super) fn backing_place(&self) -> Result<(u64, u64), FormatError> {
        let extensions_end =
            u64::from(self.header_length).saturating_add(self.extensions.encoded_len() as u64);
        let Some(name) = &self.backing_name else {
            return Ok((0, extensions_end));
        };
        if name.len() > MAX_BACKING_NAME {
            return Err(FormatError::BackingNameTooLong);
        }
        let len = name.len() as u64;
        let kept = self.backing_offset;
        let stays = kept >= extensions_end && kept.saturating_add(len) <= self.cluster_size();
        let at = if stays { kept } else { extensions_end };
        Ok((at, at.saturating_add(len)))
    }
}
