//! The places of an image's structures, and what depends on each. Independent of the library's
//! decoder.

use std::ops::Range;

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
const COPIED: u64 = 1 << 63;
/// The most clusters that a session adds to the file, but at least 4 MiB (a MiB is allocated ahead
/// for small tables).
const REACH: u64 = 512;

pub fn be32(bytes: &[u8], at: u64) -> u32 {
    let at = at as usize;
    let word = bytes
        .get(at..at + 4)
        .map_or([0; 4], |b| b.try_into().unwrap());
    u32::from_be_bytes(word)
}

pub fn be64(bytes: &[u8], at: u64) -> u64 {
    let at = at as usize;
    let word = bytes
        .get(at..at + 8)
        .map_or([0; 8], |b| b.try_into().unwrap());
    u64::from_be_bytes(word)
}

fn be16(bytes: &[u8], at: u64) -> u64 {
    u64::from(be32(bytes, at) >> 16)
}

/// The mapping of one guest cluster, from the L1 entry to its data.
#[derive(Clone, Debug, Default)]
pub struct Path {
    /// The L1 entry.
    pub l1: Range<u64>,
    /// The L2 table.
    pub table: Option<u64>,
    /// The L2 entry.
    pub entry: Range<u64>,
    /// The data in the file; empty if there are none.
    pub data: Range<u64>,
    pub compressed: bool,
    /// Whether all bytes of the cluster are read from there.
    pub stored: bool,
    /// Whether it has a cluster of the external data file.
    pub external: bool,
}

/// A piece of metadata.
#[derive(Clone, Debug)]
pub struct Field {
    pub what: &'static str,
    pub at: Range<u64>,
}

/// The structures of an image.
#[derive(Clone, Debug)]
pub struct Layout {
    pub cluster: u64,
    pub version: u32,
    pub size: u64,
    pub extended: bool,
    pub data_file: bool,
    pub compressed_shift: u32,
    pub refcount_bits: u64,
    pub refcount_table: Range<u64>,
    pub snapshot_table: Range<u64>,
    /// Of the active disk, then of each snapshot.
    pub paths: Vec<Vec<Path>>,
    /// The offsets of the refcount blocks; 0 for none.
    pub blocks: Vec<u64>,
    pub fields: Vec<Field>,
    pub snapshot_ids: Vec<String>,
    header: [u64; 6],
}

impl Layout {
    pub fn of(file: &[u8]) -> Layout {
        let version = be32(file, 4);
        let bits = be32(file, 20);
        let cluster = 1u64 << bits;
        let incompatible = if version >= 3 { be64(file, 72) } else { 0 };
        let refcount_order = if version >= 3 { be32(file, 96) } else { 4 };
        let table = be64(file, 48);
        let mut layout = Layout {
            cluster,
            version,
            size: be64(file, 24),
            extended: incompatible & 16 != 0,
            data_file: incompatible & 4 != 0,
            compressed_shift: 62 - (bits - 8),
            refcount_bits: 1 << refcount_order,
            refcount_table: table..table + u64::from(be32(file, 56)) * cluster,
            snapshot_table: 0..0,
            paths: Vec::new(),
            blocks: Vec::new(),
            fields: Vec::new(),
            snapshot_ids: Vec::new(),
            header: Layout::header_of(file),
        };
        layout.header(file);
        layout.disk(file, be64(file, 40), be32(file, 36));
        layout.snapshots(file);
        layout.refcounts(file);
        layout.bitmaps(file);
        layout
    }

    fn add(&mut self, what: &'static str, at: Range<u64>) {
        if !self.fields.iter().any(|f| f.at == at) {
            self.fields.push(Field { what, at });
        }
    }

    fn header(&mut self, file: &[u8]) {
        let fields = [
            0, 4, 8, 16, 20, 24, 32, 36, 40, 48, 56, 60, 64, 72, 80, 88, 96, 100, 104, 112,
        ];
        let end = if self.version >= 3 { 112 } else { 72 };
        for pair in fields.windows(2).filter(|pair| pair[1] <= end) {
            self.add("header", pair[0]..pair[1]);
        }
        let mut at = if self.version >= 3 {
            u64::from(be32(file, 100))
        } else {
            72
        };
        while at + 8 <= self.cluster {
            let (kind, length) = (be32(file, at), u64::from(be32(file, at + 4)));
            self.add("extension", at..at + 8 + length.min(64));
            if kind == 0 || kind == 0xe279_2aca && length > 64 {
                break;
            }
            at += (8 + length).next_multiple_of(8);
        }
        let name = be64(file, 8);
        if name != 0 {
            self.add(
                "backing file's name",
                name..name + u64::from(be32(file, 16)),
            );
        }
    }

    fn entry_size(&self) -> u64 {
        if self.extended { 16 } else { 8 }
    }

    /// The data in the file that an L2 entry refers to.
    fn data_of(&self, desc: u64) -> (Range<u64>, bool) {
        if desc & COMPRESSED != 0 {
            let shift = self.compressed_shift;
            let offset = desc & ((1 << shift) - 1);
            let more = (desc & !(3 << 62)) >> shift;
            let end = (offset & !511) + (more + 1) * 512;
            return (offset..end, true);
        }
        let host = desc & OFFSET;
        match host == 0 || self.data_file {
            true => (0..0, false),
            false => (host..host + self.cluster, false),
        }
    }

    /// Adds the disk that an L1 table maps.
    fn disk(&mut self, file: &[u8], l1: u64, entries: u32) {
        let step = self.entry_size();
        let per_table = self.cluster / step;
        let clusters = self.size.div_ceil(self.cluster);
        let mut paths = Vec::new();
        for n in 0..clusters {
            let index = n / per_table;
            let mut path = Path {
                l1: l1 + index * 8..l1 + index * 8 + 8,
                ..Path::default()
            };
            if index >= u64::from(entries) {
                path.l1 = 0..0;
                paths.push(path);
                continue;
            }
            let table = be64(file, path.l1.start) & OFFSET;
            if table != 0 {
                path.table = Some(table);
                let at = table + n % per_table * step;
                path.entry = at..at + step;
                let desc = be64(file, at);
                (path.data, path.compressed) = self.data_of(desc);
                let mapped = desc & (OFFSET | COPIED) != 0;
                path.external = self.data_file && mapped;
                path.stored = match self.extended {
                    true => be32(file, at + 12) == u32::MAX,
                    false => desc & 1 == 0,
                };
            }
            paths.push(path);
        }
        for index in 0..u64::from(entries) {
            self.add("L1 entry", l1 + index * 8..l1 + index * 8 + 8);
        }
        let mut seen = Vec::new();
        for path in &paths {
            if path.table.is_some() && !seen.contains(&path.entry.start) && seen.len() < 400 {
                seen.push(path.entry.start);
                self.fields.push(Field {
                    what: "L2 entry",
                    at: path.entry.clone(),
                });
            }
        }
        self.paths.push(paths);
    }

    fn snapshots(&mut self, file: &[u8]) {
        let start = be64(file, 64);
        let mut at = start;
        for _ in 0..be32(file, 60) {
            at = at.next_multiple_of(8);
            let (id, name) = (be16(file, at + 12), be16(file, at + 14));
            let extra = u64::from(be32(file, at + 36));
            for (from, to) in [
                (0, 8),
                (8, 12),
                (12, 14),
                (14, 16),
                (16, 20),
                (20, 24),
                (24, 32),
                (32, 36),
                (36, 40),
                (40, 40 + extra),
                (40 + extra, 40 + extra + id + name),
            ] {
                if from < to {
                    self.add("snapshot table", at + from..at + to);
                }
            }
            let from = (at + 40 + extra) as usize;
            let text = &file[from..from + id as usize];
            self.snapshot_ids
                .push(String::from_utf8_lossy(text).into_owned());
            self.disk(file, be64(file, at), be32(file, at + 8));
            at += 40 + extra + id + name;
        }
        self.snapshot_table = start..at;
    }

    fn refcounts(&mut self, file: &[u8]) {
        let entries = self.refcount_table.clone().step_by(8);
        self.blocks = entries.map(|at| be64(file, at)).collect();
        let used = self
            .blocks
            .iter()
            .rposition(|b| *b != 0)
            .map_or(0, |n| n + 1);
        self.blocks.truncate(used);
        for (n, block) in (0..).zip(self.blocks.clone()) {
            let at = self.refcount_table.start + n * 8;
            self.add("refcount table entry", at..at + 8);
            if block == 0 {
                continue;
            }
            // The entries that count something, then some of clusters past the end.
            let hosts = self.per_block() * self.cluster;
            let left = (file.len() as u64).saturating_sub(n * hosts).min(hosts);
            let bytes = (left.div_ceil(self.cluster) * self.refcount_bits).div_ceil(8);
            let used = bytes.next_multiple_of(8).min(self.cluster);
            let words = |range: Range<u64>| range.step_by(8).map(move |at| block + at);
            let counting = words(0..used).take(200).map(|at| ("refcounts", at));
            let rest = words(used..self.cluster).take(50);
            let rest = rest.map(|at| ("refcounts past the end", at));
            for (what, at) in counting.chain(rest) {
                let at = at..at + 8;
                self.fields.push(Field { what, at });
            }
        }
        // The next one, for which there is no block.
        let next = self.refcount_table.start + self.blocks.len() as u64 * 8;
        if next < self.refcount_table.end {
            self.add("refcount table entry", next..next + 8);
        }
    }

    fn bitmaps(&mut self, file: &[u8]) {
        if self.version < 3 {
            return;
        }
        let mut at = u64::from(be32(file, 100));
        while at + 8 <= self.cluster && be32(file, at) != 0 {
            let length = u64::from(be32(file, at + 4));
            if be32(file, at) == 0x2385_2875 {
                let (size, start) = (be64(file, at + 16), be64(file, at + 24));
                self.add("bitmap directory", start..start + size);
                let table = be64(file, start);
                self.add(
                    "bitmap table",
                    table..table + u64::from(be32(file, start + 8)) * 8,
                );
            }
            at += (8 + length).next_multiple_of(8);
        }
    }

    /// Clusters of the disk that one L2 table maps.
    pub fn per_table(&self) -> u64 {
        self.cluster / self.entry_size()
    }

    /// Whether the refcount table of a damaged image of version 3 has an unaligned entry. The table
    /// must be at its old place.
    pub fn has_unaligned_block(&self, file: &[u8]) -> bool {
        let at = |nth: usize| self.refcount_table.start + nth as u64 * 8;
        let same = be64(file, 48) == self.refcount_table.start;
        let entries = (0..self.blocks.len()).map(|nth| be64(file, at(nth)) & !511);
        let mut wrong = entries.filter(|entry| !entry.is_multiple_of(self.cluster));
        self.version >= 3 && be32(file, 4) == self.version && same && wrong.next().is_some()
    }

    /// A cluster of a repaired image that has two uses: as header, L1 table or snapshot table, and
    /// as data, L2 table or refcount block.
    pub fn root_with_another_use(&self, file: &[u8]) -> Option<u64> {
        // If the header has other sizes or offsets, this cannot be told.
        let (here, sound) = (Layout::header_of(file), self.header);
        if here != sound {
            return None;
        }
        let now = Layout::of(file);
        let mut roots = vec![(0, 1), (be64(file, 40), u64::from(be32(file, 36)) * 8)];
        roots.push((
            now.snapshot_table.start,
            now.snapshot_table.end - now.snapshot_table.start,
        ));
        let disks = now.paths.iter().flatten();
        let data = disks
            .clone()
            .map(|path| path.data.clone())
            .filter(|data| !data.is_empty());
        let tables = disks.filter_map(|path| path.table);
        let tables = tables.chain(now.blocks.iter().copied().filter(|block| *block != 0));
        let mut others = data.chain(tables.map(|at| at..at + self.cluster));
        let found = others.find(|other| {
            let mut roots = roots.iter();
            roots.any(|(at, length)| {
                *at < other.end && other.start < (at + length).next_multiple_of(self.cluster)
            })
        });
        found.map(|range| range.start)
    }

    /// A cluster past the end of an image that was repaired which has references by its refcount.
    /// (The first one may have: a table that is less than a cluster is there, all zeroes.)
    pub fn counted_past_end(&self, file: &[u8]) -> Option<u64> {
        if Layout::header_of(file) != self.header {
            return None;
        }
        let now = Layout::of(file);
        let end = (file.len() as u64).div_ceil(now.cluster) + 1;
        let blocks = (0..).zip(&now.blocks).filter(|(_, block)| **block != 0);
        let mut clusters = blocks.flat_map(|(number, _): (u64, _)| {
            let first = number * now.per_block();
            first.max(end)..first + now.per_block()
        });
        clusters.find(|cluster| now.refcount(file, *cluster) != 0)
    }

    /// The fields of the header with the size of the disk and the places of tables.
    fn header_of(file: &[u8]) -> [u64; 6] {
        [
            be64(file, 0),
            be64(file, 24),
            u64::from(be32(file, 20)),
            u64::from(be32(file, 60)),
            be64(file, 64),
            u64::from(be32(file, 96)),
        ]
    }

    /// Clusters that one refcount block counts.
    pub fn per_block(&self) -> u64 {
        self.cluster * 8 / self.refcount_bits
    }

    /// The bytes of the file whose refcounts are in a range of a block.
    fn counted(&self, number: u64, block: u64, bytes: Range<u64>) -> Range<u64> {
        let first = number * self.per_block();
        let bits = self.refcount_bits;
        let from = (bytes.start - block) * 8 / bits;
        let to = ((bytes.end - block) * 8).div_ceil(bits);
        (first + from) * self.cluster..(first + to) * self.cluster
    }
}

/// The clusters of each disk (the active one, then the snapshots) whose content may have changed.
#[derive(Clone, Debug)]
pub struct Suspects {
    /// When the image is read.
    pub read: Vec<Vec<bool>>,
    /// When the image was written.
    pub written: Vec<Vec<bool>>,
    /// Clusters of the active disk that are mapped behind the end of the truncated file, or whose
    /// entries were there, so that reading them is an error.
    pub gone: Vec<bool>,
    /// Compressed clusters of the active disk of which the truncated file lacks a part. They cannot
    /// be read, or are as before.
    pub cut: Vec<bool>,
    /// Whether the snapshot table has changed.
    pub snapshot_table: bool,
    /// Whether the header describes another disk.
    pub header: bool,
    /// Whether the external data file was truncated.
    pub data_file: bool,
    /// Whether a damaged entry refers to a free cluster, to a cluster that a session may add to the
    /// file, or to a structure, which a session may move: data may be written there.
    pub free: bool,
}

impl Suspects {
    /// Whether anything is suspected.
    pub fn any(&self) -> bool {
        let all = self.read.iter().chain(&self.written).flatten();
        self.snapshot_table || self.header || all.into_iter().any(|suspect| *suspect)
    }

    /// Whether what is written may go to where a suspect has its data, too, or a damaged entry
    /// leads.
    pub fn shared(&self) -> bool {
        self.free || self.written != self.read
    }
}

/// The parts of `before` that have changed.
struct Changed<'a> {
    before: &'a [u8],
    after: &'a [u8],
}

impl Changed<'_> {
    fn touches(&self, range: &Range<u64>) -> bool {
        let end = range.end.min(self.before.len() as u64);
        if range.start >= end {
            return false;
        }
        let (start, end) = (range.start as usize, end as usize);
        end > self.after.len() || self.before[start..end] != self.after[start..end]
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Layout {
    /// The effect that damage to a sound image of this layout may have.
    ///
    /// - A cluster whose L1 or L2 entry or stored bytes are damaged reads as anything, or fails.
    ///   All others read as before.
    /// - If a damaged entry refers to a cluster of the file, the content of that cluster may be lost
    ///   when the image is written: it cannot be detected that the cluster has another use.
    /// - The same holds for clusters whose refcount is damaged, and for all clusters if the header
    ///   refers to other refcounts, unless those are invalid. A refcount block at an invalid offset
    ///   is known to be damaged, so the whole disk must survive.
    /// - A session may write to free clusters, behind the end of the file, or to where a structure
    ///   was, where a damaged entry refers to. These data are lost with that entry.
    pub fn suspects(&self, before: &[u8], after: &[u8]) -> Suspects {
        let changed = Changed { before, after };
        let lost = self.lost_refcounts(&changed);
        let led_to = self.damaged_targets(&changed);
        let ext_end = match self.version >= 3 {
            true => 104..self.cluster,
            false => 72..self.cluster,
        };
        let disk = [0..48, 72..80, 96..104, ext_end];
        let header = disk.iter().any(|range| {
            (self.version >= 3 || range.end <= 72 || range.start == 72) && changed.touches(range)
        });
        let refcounts = !self.refcounts_are_known_to_be_wrong(&changed)
            && changed.touches(&(48..60))
            || (self.version >= 3 && changed.touches(&(96..100)));
        let snapshot_table = changed.touches(&(60..72)) || changed.touches(&self.snapshot_table);
        let of = |view: usize, path: &Path, written: bool| {
            header
                || (view > 0 && snapshot_table)
                || changed.touches(&path.l1)
                || changed.touches(&path.entry)
                || changed.touches(&path.data)
                || (written
                    && (refcounts
                        || lost
                            .iter()
                            .any(|range| self.depends_on(path, range, view > 0))
                        || led_to
                            .iter()
                            .any(|range| self.depends_on(path, range, true))))
        };
        let all = |written| {
            let views = self.paths.iter().enumerate();
            views
                .map(|(view, paths)| paths.iter().map(|path| of(view, path, written)).collect())
                .collect::<Vec<Vec<bool>>>()
        };
        let length = after.len() as u64;
        let end = length.next_multiple_of(self.cluster);
        let is_reached = |path: &Path| !header && !changed.touches(&path.l1);
        let cut = |path: &Path| {
            let is_mapped = is_reached(path) && !changed.touches(&path.entry);
            is_mapped && path.compressed && length < path.data.end && before.starts_with(after)
        };
        let gone = |path: &Path| {
            // Of compressed data a part of the last sector may be missing.
            let last = match path.compressed {
                true => (path.data.end - 512).max(path.data.start) >= length,
                false => path.data.start >= end,
            };
            let no_data = !changed.touches(&path.entry) && !path.data.is_empty() && last;
            let no_entry = path.entry.end > length;
            is_reached(path) && path.stored && (no_data || no_entry)
        };
        Suspects {
            read: all(false),
            written: all(true),
            gone: self.paths[0].iter().map(gone).collect(),
            cut: self.paths[0].iter().map(cut).collect(),
            snapshot_table,
            header,
            data_file: false,
            free: led_to
                .iter()
                .any(|range| self.has_free(before, range) || self.has_field(range)),
        }
    }

    /// The effect of an external data file that was truncated to `length` bytes.
    pub fn suspects_of_cut(&self, file: &[u8], length: u64) -> Suspects {
        let mut suspects = self.suspects(file, file);
        for (n, path) in self.paths[0].iter().enumerate().filter(|(_, p)| p.external) {
            let start = n as u64 * self.cluster;
            if start + self.cluster > length {
                suspects.read[0][n] = true;
                suspects.written[0][n] = true;
            }
            suspects.gone[n] = path.stored && (start + self.cluster).min(self.size) > length;
        }
        suspects.data_file = true;
        suspects
    }

    /// Whether the refcounts that the header refers to are known to be wrong: the refcount of the
    /// header's own cluster must be 1.
    fn refcounts_are_known_to_be_wrong(&self, changed: &Changed<'_>) -> bool {
        let file = changed.after;
        let order = if self.version >= 3 { be32(file, 96) } else { 4 };
        let block = be64(file, be64(file, 48)) & !511;
        let at = block as usize;
        if order > 6 || block == 0 || !block.is_multiple_of(self.cluster) || at + 8 > file.len() {
            return !changed.touches(&(56..60));
        }
        let refcount = match order {
            0..=2 => u64::from(file[at]) & ((1 << (1 << order)) - 1),
            _ => be64(file, block) >> (64 - (1 << order)),
        };
        refcount != 1 && !changed.touches(&(56..60))
    }

    /// Whether a guest cluster is lost if these bytes of the file are allocated again. Tables of the
    /// active disk are protected from wrong refcounts (`with_table` is false).
    fn depends_on(&self, path: &Path, lost: &Range<u64>, with_table: bool) -> bool {
        let table = path.table.filter(|_| with_table);
        overlap(&path.data, lost) || table.is_some_and(|at| overlap(&(at..at + self.cluster), lost))
    }

    /// The bytes of the file whose refcounts have undetectable damage, or to which refcounts may be
    /// written.
    fn lost_refcounts(&self, changed: &Changed<'_>) -> Vec<Range<u64>> {
        let mut lost = Vec::new();
        // Also of the next entry, for which there is no block.
        for (number, block) in (0..).zip(self.blocks.iter().copied().chain([0])) {
            let at = self.refcount_table.start + number * 8;
            if at >= self.refcount_table.end {
                break;
            }
            let all = self.counted(number, block, block..block + self.cluster);
            let entry = be64(changed.after, at) & !511;
            if entry != block {
                let known =
                    !entry.is_multiple_of(self.cluster) || entry >= changed.after.len() as u64;
                if !known || at + 8 > changed.after.len() as u64 {
                    lost.push(all);
                }
                // What is taken for a block gets refcounts.
                if !known && entry != 0 {
                    lost.push(entry..entry + self.cluster);
                }
                continue;
            }
            if block == 0 || block >= changed.after.len() as u64 {
                continue;
            }
            for at in (block..block + self.cluster).step_by(8) {
                if changed.touches(&(at..at + 8)) {
                    lost.push(self.counted(number, block, at..at + 8));
                }
            }
        }
        lost
    }

    /// Whether a structure is in the clusters of a range.
    fn has_field(&self, range: &Range<u64>) -> bool {
        let clusters =
            range.start / self.cluster * self.cluster..range.end.next_multiple_of(self.cluster);
        self.fields
            .iter()
            .any(|field| overlap(&field.at, &clusters))
    }

    /// Whether a range of the sound file has a free cluster.
    fn has_free(&self, file: &[u8], range: &Range<u64>) -> bool {
        let mut clusters = range.start / self.cluster..range.end.div_ceil(self.cluster);
        clusters.any(|cluster| self.refcount(file, cluster) == 0)
    }

    /// The refcount of a cluster in the sound file.
    fn refcount(&self, file: &[u8], cluster: u64) -> u64 {
        let (number, index) = (cluster / self.per_block(), cluster % self.per_block());
        let block = self.blocks.get(number as usize).copied().unwrap_or(0);
        if block == 0 {
            return 0;
        }
        let bit = index * self.refcount_bits;
        match self.refcount_bits {
            bits @ 1..8 => {
                u64::from(file[(block + bit / 8) as usize]) >> (bit % 8) & ((1 << bits) - 1)
            }
            bits => be64(file, block + bit / 8) >> (64 - bits),
        }
    }

    /// Whether reading cluster `n` of the active disk may fail although a check finds nothing: its
    /// compressed bytes are damaged, or a damaged entry leads to another place of the external data
    /// file.
    pub fn may_be_unreadable(&self, before: &[u8], after: &[u8], n: u64) -> bool {
        let changed = Changed { before, after };
        let path = self.paths[0].get(n as usize);
        path.is_some_and(|path| {
            (path.compressed && changed.touches(&path.data))
                || (self.data_file && (changed.touches(&path.l1) || changed.touches(&path.entry)))
        })
    }

    /// The bytes of the file, or behind its end, that damaged entries of the mapping refer to.
    fn damaged_targets(&self, changed: &Changed<'_>) -> Vec<Range<u64>> {
        let mut all = Vec::new();
        let end = changed.after.len() as u64 + (REACH * self.cluster).max(4 << 20);
        let entry = |at: u64, all: &mut Vec<Range<u64>>| {
            let (data, compressed) = self.data_of(be64(changed.after, at));
            let possible = compressed || data.start.is_multiple_of(self.cluster);
            if possible && data.start < end {
                all.push(data);
            }
        };
        for path in self.paths.iter().flatten() {
            if changed.touches(&path.l1) {
                let table = be64(changed.after, path.l1.start) & OFFSET;
                if table.is_multiple_of(self.cluster) && table < end {
                    all.push(table..table + self.cluster);
                    for at in (table..table + self.cluster).step_by(self.entry_size() as usize) {
                        entry(at, &mut all);
                    }
                }
            } else if changed.touches(&path.entry) {
                entry(path.entry.start, &mut all);
            }
        }
        all.sort_by_key(|range| range.start);
        all.dedup();
        all
    }
}
