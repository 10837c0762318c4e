//! The places of an image's structures: as much of qcow2 as is needed to find the sectors that
//! damage affects. Independent of zebu's own decoder.

/// Cluster offsets in table entries.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// The header extension of bitmaps.
const BITMAPS: u64 = 0x2385_2875;

/// A table entry: where it is in the file, and its value.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Offset of its 8 bytes.
    pub at: u64,
    /// The bytes as a number.
    pub value: u64,
}

/// A mapped part of the disk, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Mapped {
    /// Its offset on the disk.
    pub guest: u64,
    /// Its L2 entry.
    pub entry: Entry,
    /// Its offset and length in the file; None: it is in a data file, or nowhere.
    pub host: Option<(u64, u64)>,
}

/// The structures of an image.
#[derive(Clone, Debug, Default)]
pub struct Walk {
    /// Bytes of a cluster.
    pub cluster: u64,
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of the disk that an L2 table maps.
    pub coverage: u64,
    /// The active L1 table: guest offset and entry.
    pub l1: Vec<(u64, Entry)>,
    /// All entries of the active L2 tables that are not zero.
    pub mapped: Vec<Mapped>,
    /// The refcount table.
    pub refcounts: Vec<Entry>,
    /// Offset and length of all tables.
    pub tables: Vec<(u64, u64)>,
}

fn word(bytes: &[u8], at: u64) -> u64 {
    let at = at as usize;
    match bytes.get(at..at.saturating_add(8)) {
        Some(bytes) => u64::from_be_bytes(bytes.try_into().expect("8 bytes")),
        None => 0,
    }
}

fn half(bytes: &[u8], at: u64) -> u64 {
    word(bytes, at) >> 32
}

/// Finds the structures of an image with a valid header. Unaligned L1 entries are not followed.
pub fn walk(bytes: &[u8]) -> Walk {
    let cluster = 1u64 << half(bytes, 20).min(21);
    let version = half(bytes, 4);
    let incompatible = if version >= 3 { word(bytes, 72) } else { 0 };
    let (data_file, extended) = (incompatible & 4 != 0, incompatible & 16 != 0);
    let entry_bytes = if extended { 16 } else { 8 };
    let entry = |at| Entry {
        at,
        value: word(bytes, at),
    };
    let mut walk = Walk {
        cluster,
        size: word(bytes, 24),
        coverage: cluster * (cluster / entry_bytes),
        ..Walk::default()
    };
    let (table, clusters) = (word(bytes, 48), half(bytes, 56));
    walk.tables
        .extend([(0, cluster), (table, clusters * cluster)]);
    for n in 0..clusters * cluster / 8 {
        let entry = entry(table + 8 * n);
        if entry.value != 0 {
            walk.refcounts.push(entry);
            walk.tables.push((entry.value & OFFSET, cluster));
        }
    }
    if version >= 3 {
        walk.tables.extend(bitmap_places(bytes, cluster));
    }
    let (l1_entries, l1) = (half(bytes, 36), word(bytes, 40));
    walk.tables.push((l1, l1_entries * 8));
    for n in 0..l1_entries {
        let l1_entry = entry(l1 + 8 * n);
        if l1_entry.value == 0 {
            continue;
        }
        walk.l1.push((n * walk.coverage, l1_entry));
        let l2 = l1_entry.value & OFFSET;
        if !l2.is_multiple_of(cluster) {
            continue;
        }
        walk.tables.push((l2, cluster));
        for m in 0..cluster / entry_bytes {
            let entry = entry(l2 + m * entry_bytes);
            if entry.value == 0 {
                continue;
            }
            let host = match entry.value >> 62 & 1 {
                1 => {
                    let bits = 62 - (cluster.trailing_zeros() - 8);
                    let at = entry.value & ((1 << bits) - 1);
                    let sectors = (entry.value & !(3 << 62)) >> bits;
                    Some((at, (sectors + 1) * 512 - at % 512))
                }
                _ if data_file || entry.value & OFFSET == 0 => None,
                _ => Some((entry.value & OFFSET, cluster)),
            };
            walk.mapped.push(Mapped {
                guest: n * walk.coverage + m * cluster,
                entry,
                host,
            });
        }
    }
    walk
}

/// Offset and length of everything that the bitmaps of an image consist of.
fn bitmap_places(bytes: &[u8], cluster: u64) -> Vec<(u64, u64)> {
    let mut at = half(bytes, 100);
    let (directory, length) = loop {
        let length = half(bytes, at + 4);
        match half(bytes, at) {
            0 => return Vec::new(),
            BITMAPS => break (word(bytes, at + 24), word(bytes, at + 16)),
            _ => at += 8 + length.next_multiple_of(8),
        }
    };
    let mut places = vec![(directory, length)];
    let mut at = directory;
    while at < directory + length {
        let (table, entries) = (word(bytes, at), half(bytes, at + 8));
        places.push((table, entries * 8));
        for n in 0..entries {
            let host = word(bytes, table + 8 * n) & OFFSET;
            places.extend((host != 0).then_some((host, cluster)));
        }
        let (name, extra) = (half(bytes, at + 16) & 0xffff, half(bytes, at + 20));
        at += (24 + name + extra).next_multiple_of(8);
    }
    places
}

impl Walk {
    /// The end of the last table.
    pub fn end_of_tables(&self) -> u64 {
        self.tables.iter().map(|t| t.0 + t.1).max().unwrap_or(0)
    }
}
