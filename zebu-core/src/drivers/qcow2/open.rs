//! Opening an image: header, L1 table, snapshots.

use std::sync::Arc;

use super::map::table::L1Table;
use super::{CacheOptions, Image, Limits};
use crate::drivers::cache::Cache;
use crate::drivers::qcow2::structures::{
    CryptMethod, FormatError, Geometry, Header, MAX_SNAPSHOT_TABLE_BYTES, SNAPSHOT_HEADER_BYTES,
    Snapshot, check_table,
};
use crate::drivers::{OpenEncryption, encryption};
use crate::storage::{self, Queue, Secret, Storage, Work};
use crate::{Error, Result};

/// Bytes of cached L2 tables by default, at most.
const DEFAULT_L2_CACHE: u64 = 32 << 20;
/// Bytes of a slice by default.
const DEFAULT_SLICE: u64 = 4096;
/// Bytes of an L1 table read at once: it is kept in another form.
const L1_PIECE: u64 = 1 << 20;
/// Bytes of the snapshot table read at once.
const SNAPSHOT_PIECE: u64 = 64 << 10;
/// The name of this table in the error of a limit.
const SNAPSHOT_TABLE: &str = "The snapshot table's length";
/// [`MAX_SNAPSHOT_TABLE_BYTES`] as an offset.
const MAX_SNAPSHOT_TABLE: u64 = MAX_SNAPSHOT_TABLE_BYTES as u64;
/// Bytes of inflated clusters kept.
const INFLATED_CACHE: u64 = 2 << 20;

/// An image file whose header has been read: what it names can be looked at
/// before anything of that is opened.
#[derive(Debug)]
pub struct OpenImage {
    file: Arc<dyn Storage>,
    file_len: u64,
    header: Header,
    geometry: Geometry,
    /// Whether the tables are left to a check.
    for_check: bool,
    /// Its limits, if it is untrusted.
    limits: Option<(Limits, Arc<Work>)>,
}

impl Image {
    /// Reads the image again, of which nothing else is in use. After an error it is as before.
    pub(super) async fn read_again(&mut self, queue: &Queue) -> Result<()> {
        let open = OpenImage::new(queue, self.file.clone()).await?;
        let (l1, snapshots) = open.read_tables(queue).await?;
        self.file_len = open.file_len.into();
        self.header = open.header;
        self.geometry = open.geometry;
        (self.l1, self.snapshots) = (l1, snapshots);
        self.slices.clear();
        self.inflated.clear();
        self.preallocated = Default::default();
        Ok(())
    }
}

impl OpenImage {
    /// Reads and checks the header.
    pub async fn new(queue: &Queue, file: Arc<dyn Storage>) -> Result<Self> {
        Self::open(queue, file, false, None).await
    }

    /// [`OpenImage::new`] of a new image that is not finished, and will have this version.
    pub(super) async fn of_version(
        queue: &Queue,
        file: Arc<dyn Storage>,
        unfinished: Option<u32>,
    ) -> Result<Self> {
        Self::open(queue, file, false, unfinished).await
    }

    /// [`OpenImage::new`] for a check: the refcount table may be missing, and tables may lie past
    /// the end of the file. Tables are not read, so the [`Image`] has neither guest data nor
    /// snapshots.
    pub async fn for_check(queue: &Queue, file: Arc<dyn Storage>) -> Result<Self> {
        Self::open(queue, file, true, None).await
    }

    async fn open(
        queue: &Queue,
        file: Arc<dyn Storage>,
        for_check: bool,
        unfinished: Option<u32>,
    ) -> Result<Self> {
        let file_len = file.len()?;
        let start = storage::read_vec(&*file, queue, 0, file_len.min(512) as usize).await;
        let mut start = start.map_err(|e| Error::Io(e).during("Could not read qcow2 header"))?;
        let set_version = |bytes: &mut [u8]| {
            let field = bytes.get_mut(4..8).zip(unfinished);
            field.map(|(field, version)| field.copy_from_slice(&version.to_be_bytes()))
        };
        set_version(&mut start);
        let cluster_size = Header::decode_fixed(&start)?.cluster_size();
        let length = file_len.min(cluster_size) as usize;
        let mut first_cluster = storage::read_vec(&*file, queue, 0, length).await?;
        set_version(&mut first_cluster);
        let mut header = match for_check {
            false => Header::decode(&first_cluster)?,
            true => Header::decode_for_check(&first_cluster)?,
        };
        header.unfinished = unfinished.is_some();
        let geometry = Geometry::new(&header)?;
        // QEMU counts in sectors, and ignores odd bytes at the end.
        let geometry = geometry.with_virtual_size(header.size & !511);
        if let CryptMethod::Unknown(method) = header.crypt() {
            return Err(Error::Refused(format!(
                "Unsupported encryption method {method}"
            )));
        }
        if header.crypt() == CryptMethod::Luks && header.extensions.crypto().is_none() {
            return Err(FormatError::CryptoMissing(header.crypt_method).into());
        }
        Ok(OpenImage {
            file,
            file_len,
            header,
            geometry,
            for_check,
            limits: None,
        })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// What the header's numbers mean.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Refuses an image whose header goes beyond `limits`, and holds its tables
    /// to them, too. `work` is what was left to be done when it was opened.
    pub(crate) fn limit(&mut self, limits: Limits, work: Arc<Work>) -> Result<()> {
        limits.check_header(&self.header, self.file_len)?;
        self.limits = Some((limits, work));
        Ok(())
    }

    /// Refuses an image whose data cannot be read without decrypting them.
    pub fn refuse_encrypted(&self) -> Result<()> {
        if !self.header.is_encrypted() {
            return Ok(());
        }
        Err(Error::encrypted())
    }

    /// What the data of an encrypted image are read and written through, with the secret that `key` finds; else `data`,
    /// which is the external data file, if it has one.
    ///
    /// # Errors
    /// If the image cannot be decrypted: in QEMU's words.
    pub(super) async fn unlock(
        &self,
        queue: &Queue,
        data: Option<Arc<dyn Storage>>,
        key: &dyn Fn() -> Result<Option<Secret>>,
    ) -> Result<Option<Arc<dyn Storage>>> {
        if !self.header.is_encrypted() {
            return Ok(data);
        }
        let place = self.header.extensions.crypto();
        let place = place.filter(|_| self.header.crypt() == CryptMethod::Luks);
        let (Some(encryption), Some(place)) = (encryption::find(), place) else {
            return Err(Error::encrypted());
        };
        let request = OpenEncryption {
            queue,
            file: self.file.clone(),
            place: place.offset..place.offset.saturating_add(place.length),
            data: data.unwrap_or_else(|| self.file.clone()),
            key,
            is_untrusted: self.limits.is_some(),
        };
        encryption.open(request).await.map(Some)
    }

    /// Reads the tables. `data` is what the guest's clusters are in, if it is not the file.
    pub async fn finish(
        self,
        queue: &Queue,
        data: Option<Arc<dyn Storage>>,
        caches: CacheOptions,
    ) -> Result<Image> {
        let (l1, snapshots) = match self.for_check {
            false => self.read_tables(queue).await?,
            true => (L1Table::reserved(0)?, Vec::new()),
        };
        let cluster_size = self.header.cluster_size();
        let (limits, work) = self.limits.unzip();
        if let Some(limits) = &limits {
            limits.check_snapshots(&snapshots)?;
        }
        let l1_bytes = u64::from(self.header.l1_size) * 8;
        let (slice_entries, slices) =
            slice_cache(&self.geometry, caches, limits.as_ref(), l1_bytes)?;
        let inflated = (INFLATED_CACHE / cluster_size).max(4) as usize;
        let cluster_bits = self.geometry.cluster_bits();
        Ok(Image {
            has_own_data: data.is_some(),
            data: data.unwrap_or_else(|| self.file.clone()),
            file: self.file,
            file_len: self.file_len.into(),
            data_len: 0.into(),
            snapshots,
            l1,
            slice_entries,
            slice_bits: slice_entries.trailing_zeros() + cluster_bits,
            slices,
            inflated: Cache::new(inflated),
            preallocated: Default::default(),
            shown: None,
            limits,
            work,
            header: self.header,
            geometry: self.geometry,
            whole_clusters: false,
            tasks: Default::default(),
            writer: None,
            written: None,
            followed: Default::default(),
        })
    }

    /// Reads the tables that are kept in memory.
    async fn read_tables(&self, queue: &Queue) -> Result<(L1Table, Vec<Snapshot>)> {
        let header = &self.header;
        let cluster_size = header.cluster_size();
        let l1_entries = u64::from(header.l1_size);
        check_table(
            "Active L1 table",
            header.l1_offset,
            l1_entries,
            8,
            cluster_size,
            self.file_len,
        )?;
        check_table(
            "Reference count table",
            header.refcount_table_offset,
            u64::from(header.refcount_table_clusters),
            // Only its start must be there: the rest reads as zeroes.
            8,
            cluster_size,
            self.file_len,
        )?;
        let l1 = read_l1(&*self.file, queue, header.l1_offset, l1_entries).await?;
        Ok((l1, self.read_snapshots(queue).await?))
    }

    /// Reads the snapshot table, whose length is known only by reading it.
    async fn read_snapshots(&self, queue: &Queue) -> Result<Vec<Snapshot>> {
        let count = self.header.nb_snapshots;
        let start = self.header.snapshots_offset;
        if count == 0 {
            return Ok(Vec::new());
        }
        check_table(
            "Snapshot table",
            start,
            u64::from(count),
            SNAPSHOT_HEADER_BYTES,
            self.header.cluster_size(),
            self.file_len,
        )?;
        let most = match &self.limits {
            None => MAX_SNAPSHOT_TABLE,
            Some((limits, _)) => limits.table_size.min(MAX_SNAPSHOT_TABLE),
        };
        let end = self.file_len.min(start + most);
        let mut snapshots = Vec::new();
        let mut entries: Vec<u8> = Vec::new();
        let (mut used, mut read) = (0, start);
        for index in 0..u64::from(count) {
            let (snapshot, length) = loop {
                let rest = entries.get(used..).unwrap_or(&[]);
                if let Some(found) = Snapshot::decode(rest, index)? {
                    break found;
                }
                if read == end {
                    if let Some((limits, _)) = &self.limits {
                        // The table is at least so long.
                        limits.check_table(SNAPSHOT_TABLE, end - start + 1)?;
                    }
                    return Err(match end - start {
                        MAX_SNAPSHOT_TABLE => FormatError::SnapshotTableTooBig,
                        _ => FormatError::Truncated {
                            what: "snapshot table entry",
                            offset: read - entries.len() as u64 + used as u64,
                            need: SNAPSHOT_HEADER_BYTES,
                            have: rest.len() as u64,
                        }
                        .at("snapshot", index),
                    }
                    .into());
                }
                // What was used goes, so that a table with holes costs no more
                // than what it holds.
                let gone = used.min(entries.len());
                entries.drain(..gone);
                used -= gone;
                let length = (end - read).min(SNAPSHOT_PIECE);
                entries.extend(storage::read_vec(&*self.file, queue, read, length as usize).await?);
                read += length;
            };
            used += length;
            snapshots.push(snapshot);
        }
        Ok(snapshots)
    }
}

/// Reads an L1 table, which the caller has bounded.
pub(super) async fn read_l1(
    file: &dyn Storage,
    queue: &Queue,
    offset: u64,
    entries: u64,
) -> Result<L1Table> {
    let mut table = L1Table::reserved(entries as usize)?;
    let end = offset + entries * 8;
    let mut at = offset;
    while at < end {
        let length = (end - at).min(L1_PIECE);
        table.push(&storage::read_vec(file, queue, at, length as usize).await?);
        at += length;
    }
    Ok(table)
}

/// How many entries a slice has, and the cache for them.
fn slice_cache(
    geometry: &Geometry,
    options: CacheOptions,
    limits: Option<&Limits>,
    l1_bytes: u64,
) -> Result<(usize, Cache<super::map::table::Slice>)> {
    let entry_size = geometry.l2_entry_size() as u64;
    let cluster_size = geometry.cluster_size();
    let slice_bytes = options
        .entry_size
        .unwrap_or(DEFAULT_SLICE.min(cluster_size));
    if !slice_bytes.is_power_of_two() || !(512..=cluster_size).contains(&slice_bytes) {
        return Err(Error::Refused(format!(
            "L2 cache entry size must be a power of two between 512 and the cluster size ({cluster_size})"
        )));
    }
    let slice_entries = slice_bytes / entry_size;
    let whole_disk = geometry.guest_clusters().saturating_mul(entry_size);
    let wanted = options.size.map(|bytes| bytes.min(whole_disk));
    let default = whole_disk.min(DEFAULT_L2_CACHE);
    let bytes = match limits {
        None => wanted.unwrap_or(default),
        Some(limits) => limits.l2_cache(l1_bytes, wanted, default)?,
    };
    let slices = bytes.div_ceil(slice_bytes).max(1);
    let slices = usize::try_from(slices).unwrap_or(usize::MAX);
    Ok((slice_entries as usize, Cache::new(slices)))
}
