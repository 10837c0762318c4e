//! VHDX images that are built from the specification (\[MS-VHDX\]), apart from the library's code.
//! The tests of the program and the fuzz targets include this file by its path.
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub const MIB: u64 = 1 << 20;
/// Bytes of a sector of the log.
pub const LOG_SECTOR: u64 = 4096;
/// Where the headers and the copies of the region table are.
pub const HEADERS: [u64; 2] = [64 << 10, 128 << 10];
pub const REGION_TABLES: [u64; 2] = [192 << 10, 256 << 10];
/// Bytes of the table of metadata, which the items follow.
pub const METADATA_TABLE: u64 = 64 << 10;

// States of blocks.
pub const NOT_PRESENT: u64 = 0;
pub const UNDEFINED: u64 = 1;
pub const ZERO: u64 = 2;
pub const UNMAPPED: u64 = 3;
/// [`UNMAPPED`] in version 0.95 of the format.
pub const OLD_UNMAPPED: u64 = 5;
pub const PRESENT: u64 = 6;
pub const PARTIALLY_PRESENT: u64 = 7;

const BAT: u128 = 0x2dc2_7766_f623_4200_9d64_115e_9bfd_4a08;
const METADATA: u128 = 0x8b7c_a206_4790_4b9a_b8fe_575f_050f_886e;
const FILE_PARAMETERS: u128 = 0xcaa1_6737_fa36_4d43_b3b6_33f0_aa44_e76b;
const DISK_SIZE: u128 = 0x2fa5_4224_cd1b_4876_b211_5dbe_d83b_f4b8;
const DISK_ID: u128 = 0xbeca_12ab_b2e6_4523_93ef_c309_e000_c746;
const LOGICAL_SECTOR: u128 = 0x8141_bf1d_a96f_4709_ba47_f233_a8fa_ab5f;
const PHYSICAL_SECTOR: u128 = 0xcda3_48c7_445d_4471_9cc9_e988_5251_c556;
const PARENT_LOCATOR: u128 = 0xa8d3_5f2d_b30b_454d_abf7_d3d8_4834_ab0c;
const VHDX_PARENT: u128 = 0xb04a_efb7_d19e_4a81_b789_25b8_e944_5913;

/// A number below the argument.
pub type Random<'a> = &'a mut dyn FnMut(u64) -> u64;

/// CRC-32C, bit by bit.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            let carry = crc & 1;
            crc >>= 1;
            if carry != 0 {
                crc ^= 0x82f6_3b78;
            }
        }
    }
    !crc
}

/// Puts its checksum into a structure.
pub fn seal(structure: &mut [u8]) {
    structure[4..8].fill(0);
    let checksum = crc32c(structure);
    structure[4..8].copy_from_slice(&checksum.to_le_bytes());
}

/// A GUID in the file.
pub fn guid(digits: u128) -> [u8; 16] {
    let mut bytes = digits.to_be_bytes();
    bytes[..4].reverse();
    bytes[4..6].reverse();
    bytes[6..8].reverse();
    bytes
}

/// A GUID as text in braces.
pub fn guid_text(digits: u128) -> String {
    let hex = format!("{digits:032x}");
    let parts = [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ];
    format!("{{{}}}", parts.join("-"))
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// A change in an entry of the log.
pub enum Change {
    Zero { at: u64, length: u64 },
    Data { at: u64, sector: Vec<u8> },
}

/// An entry of the log.
pub struct LogEntry {
    pub id: u128,
    pub sequence: u64,
    pub tail: u64,
    pub flushed: u64,
    pub last: u64,
    pub changes: Vec<Change>,
}

impl LogEntry {
    /// Its bytes, whole sectors.
    pub fn encode(&self) -> Vec<u8> {
        let count = self.changes.len();
        let mut bytes = vec![0; (64 + count * 32).next_multiple_of(LOG_SECTOR as usize)];
        for (index, change) in self.changes.iter().enumerate() {
            let descriptor = 64 + index * 32;
            match change {
                Change::Zero { at, length } => {
                    put(&mut bytes, descriptor, b"zero");
                    put(&mut bytes, descriptor + 8, &length.to_le_bytes());
                    put(&mut bytes, descriptor + 16, &at.to_le_bytes());
                }
                Change::Data { at, sector } => {
                    put(&mut bytes, descriptor, b"desc");
                    put(&mut bytes, descriptor + 4, &sector[4092..]);
                    put(&mut bytes, descriptor + 8, &sector[..8]);
                    put(&mut bytes, descriptor + 16, &at.to_le_bytes());
                    let mut data = sector.clone();
                    put(&mut data, 0, b"data");
                    let (high, low) = ((self.sequence >> 32) as u32, self.sequence as u32);
                    put(&mut data, 4, &high.to_le_bytes());
                    put(&mut data, 4092, &low.to_le_bytes());
                    bytes.extend(data);
                }
            }
            put(&mut bytes, descriptor + 24, &self.sequence.to_le_bytes());
        }
        put(&mut bytes, 0, b"loge");
        let length = bytes.len() as u32;
        put(&mut bytes, 8, &length.to_le_bytes());
        put(&mut bytes, 12, &(self.tail as u32).to_le_bytes());
        put(&mut bytes, 16, &self.sequence.to_le_bytes());
        put(&mut bytes, 24, &(count as u32).to_le_bytes());
        put(&mut bytes, 32, &guid(self.id));
        put(&mut bytes, 48, &self.flushed.to_le_bytes());
        put(&mut bytes, 56, &self.last.to_le_bytes());
        seal(&mut bytes);
        bytes
    }
}

/// An image that is built block by block.
pub struct Builder {
    pub size: u64,
    pub block_size: u64,
    pub sector_size: u64,
    /// The identity of its content.
    pub id: u128,
    /// The entries of the parent locator.
    pub parent: Option<Vec<(String, String)>>,
    /// What the entries of the log have; 0: there are none.
    pub log_id: u128,
    pub log_bytes: u64,
    parts: Vec<(u64, Vec<u8>)>,
    /// By chunk: the place of its sector bitmap, and its content.
    bitmaps: BTreeMap<u64, (u64, Vec<u8>)>,
    end: u64,
}

impl Builder {
    /// An image without blocks.
    pub fn new(size: u64, block_size: u64, sector_size: u64) -> Builder {
        let mut builder = Builder {
            size,
            block_size,
            sector_size,
            id: 0x1111_1111_2222_3333_4444_5555_5555_5555,
            parent: None,
            log_id: 0,
            log_bytes: MIB,
            parts: Vec::new(),
            bitmaps: BTreeMap::new(),
            end: 0,
        };
        builder.end = builder.bat() + builder.bat_bytes();
        builder
    }

    /// An image over a parent of this identity at a relative path.
    pub fn child(mut self, parent: u128, path: &str) -> Builder {
        let linkage = ("parent_linkage".into(), guid_text(parent));
        self.parent = Some(vec![linkage, ("relative_path".into(), path.into())]);
        self
    }

    /// Blocks with one sector bitmap.
    pub fn chunk(&self) -> u64 {
        (self.sector_size << 23) / self.block_size
    }

    pub fn log(&self) -> u64 {
        MIB
    }

    pub fn metadata(&self) -> u64 {
        MIB + self.log_bytes
    }

    pub fn bat(&self) -> u64 {
        self.metadata() + MIB
    }

    fn bat_bytes(&self) -> u64 {
        let chunks = self.size.div_ceil(self.block_size).div_ceil(self.chunk());
        let entries = chunks * (self.chunk() + 1);
        (entries * 8).next_multiple_of(MIB).max(MIB)
    }

    /// The end of the file so far.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Bytes at an offset of the file, over what was put there before.
    pub fn put(&mut self, offset: u64, bytes: Vec<u8>) {
        self.end = self.end.max(offset + bytes.len() as u64);
        self.parts.push((offset, bytes));
    }

    /// Space at the end of the file.
    pub fn allocate(&mut self, length: u64) -> u64 {
        let at = self.end.next_multiple_of(MIB);
        self.end = at + length;
        at
    }

    /// Where the entry of a block is in the file.
    pub fn entry(&self, block: u64) -> u64 {
        self.bat() + (block + block / self.chunk()) * 8
    }

    /// Sets the entry of a block. `extra` is or'ed to it.
    pub fn set(&mut self, block: u64, state: u64, extra: u64) {
        let at = self.entry(block);
        self.put(at, (state | extra).to_le_bytes().to_vec());
    }

    /// A block with these bytes. Returns its place.
    pub fn block(&mut self, block: u64, state: u64, bytes: Vec<u8>) -> u64 {
        let at = self.allocate(self.block_size);
        self.parts.push((at, bytes));
        self.set(block, state, at);
        at
    }

    /// Marks the sectors of a range of the disk as present in partially present blocks.
    pub fn set_present(&mut self, start: u64, length: u64) {
        let chunk_bytes = self.sector_size << 23;
        for sector in start / self.sector_size..(start + length) / self.sector_size {
            let chunk = sector >> 23;
            if !self.bitmaps.contains_key(&chunk) {
                let at = self.allocate(MIB);
                self.bitmaps.insert(chunk, (at, vec![0; MIB as usize]));
            }
            debug_assert_eq!(start / chunk_bytes, chunk);
            let (_, bits) = self.bitmaps.get_mut(&chunk).expect("just made");
            let bit = (sector & 0x7f_ffff) as usize;
            bits[bit / 8] |= 1 << (bit % 8);
        }
    }

    /// Puts an entry into the log. Returns the offset after it, in the log.
    pub fn put_log(&mut self, at: u64, entry: &LogEntry) -> u64 {
        let mut at = at;
        for sector in entry.encode().chunks(LOG_SECTOR as usize) {
            self.put(self.log() + at, sector.to_vec());
            at = (at + LOG_SECTOR) % self.log_bytes;
        }
        at
    }

    fn header(&self, sequence: u64) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        put(&mut bytes, 0, b"head");
        put(&mut bytes, 8, &sequence.to_le_bytes());
        put(&mut bytes, 16, &guid(0x9999));
        put(&mut bytes, 32, &guid(self.id));
        put(&mut bytes, 48, &guid(self.log_id));
        put(&mut bytes, 66, &1u16.to_le_bytes());
        put(&mut bytes, 68, &(self.log_bytes as u32).to_le_bytes());
        put(&mut bytes, 72, &self.log().to_le_bytes());
        seal(&mut bytes);
        bytes
    }

    fn region_table(&self) -> Vec<u8> {
        let mut bytes = vec![0; 64 << 10];
        put(&mut bytes, 0, b"regi");
        put(&mut bytes, 8, &2u32.to_le_bytes());
        let regions = [
            (METADATA, self.metadata(), MIB),
            (BAT, self.bat(), self.bat_bytes()),
        ];
        for (index, (id, at, length)) in regions.into_iter().enumerate() {
            let entry = 16 + index * 32;
            put(&mut bytes, entry, &guid(id));
            put(&mut bytes, entry + 16, &at.to_le_bytes());
            put(&mut bytes, entry + 24, &(length as u32).to_le_bytes());
            put(&mut bytes, entry + 28, &1u32.to_le_bytes());
        }
        seal(&mut bytes);
        bytes
    }

    fn metadata_region(&self) -> Vec<u8> {
        let flags = if self.parent.is_some() { 2u32 } else { 0 };
        let parameters = [(self.block_size as u32).to_le_bytes(), flags.to_le_bytes()];
        let sector = (self.sector_size as u32).to_le_bytes().to_vec();
        let mut items = vec![
            (FILE_PARAMETERS, 4u32, parameters.concat()),
            (DISK_SIZE, 6, self.size.to_le_bytes().to_vec()),
            (DISK_ID, 6, vec![7; 16]),
            (LOGICAL_SECTOR, 6, sector.clone()),
            (PHYSICAL_SECTOR, 6, sector),
        ];
        if let Some(entries) = &self.parent {
            items.push((PARENT_LOCATOR, 4, locator(entries)));
        }
        let mut bytes = vec![0; METADATA_TABLE as usize];
        put(&mut bytes, 0, b"metadata");
        put(&mut bytes, 10, &(items.len() as u16).to_le_bytes());
        for (index, (id, flags, item)) in items.into_iter().enumerate() {
            let entry = 32 + index * 32;
            let (at, length) = (bytes.len() as u32, item.len() as u32);
            put(&mut bytes, entry, &guid(id));
            put(&mut bytes, entry + 16, &at.to_le_bytes());
            put(&mut bytes, entry + 20, &length.to_le_bytes());
            put(&mut bytes, entry + 24, &flags.to_le_bytes());
            bytes.extend(item);
        }
        bytes
    }

    /// All parts of the file with their offsets; later ones count.
    fn all_parts(&self) -> Vec<(u64, Vec<u8>)> {
        let mut parts = vec![(0, b"vhdxfile".to_vec())];
        for (index, at) in HEADERS.into_iter().enumerate() {
            parts.push((at, self.header(5 + index as u64)));
        }
        parts.extend(REGION_TABLES.map(|at| (at, self.region_table())));
        parts.push((self.metadata(), self.metadata_region()));
        for (chunk, (at, bits)) in &self.bitmaps {
            let entry = self.bat() + ((chunk + 1) * self.chunk() + chunk) * 8;
            parts.push((entry, (at | PRESENT).to_le_bytes().to_vec()));
            parts.push((*at, bits.clone()));
        }
        parts.extend(self.parts.iter().cloned());
        parts
    }

    /// The file, in memory.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut file = vec![0; self.end as usize];
        for (at, bytes) in self.all_parts() {
            put(&mut file, at as usize, &bytes);
        }
        file
    }

    /// Writes the file, with holes.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let file = File::create(path)?;
        file.set_len(self.end)?;
        for (at, bytes) in self.all_parts() {
            file.write_all_at(&bytes, at)?;
        }
        Ok(())
    }
}

/// A parent locator with these keys and values.
fn locator(entries: &[(String, String)]) -> Vec<u8> {
    let mut bytes = guid(VHDX_PARENT).to_vec();
    bytes.extend([0, 0]);
    bytes.extend((entries.len() as u16).to_le_bytes());
    let (start, mut texts) = (20 + entries.len() * 12, Vec::new());
    for (key, value) in entries {
        let mut lengths = Vec::new();
        for text in [key, value] {
            let encoded: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
            bytes.extend(((start + texts.len()) as u32).to_le_bytes());
            lengths.extend((encoded.len() as u16).to_le_bytes());
            texts.extend(encoded);
        }
        bytes.extend(lengths);
    }
    bytes.extend(texts);
    bytes
}

/// An image with the disk that it must have.
pub struct Built {
    pub file: Vec<u8>,
    pub disk: Vec<u8>,
    pub id: u128,
    /// Where blocks and tables are, for damage.
    pub bat: u64,
    pub metadata: u64,
}

/// Random bytes, with zeroes between them.
fn content(random: Random<'_>, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    for _ in 0..random(6) {
        let start = random(length / 512) as usize * 512;
        let count = 512 * (1 + random(64)) as usize;
        let end = bytes.len().min(start + count);
        let seed = random(1 << 32);
        for (index, byte) in bytes[start..end].iter_mut().enumerate() {
            *byte = (seed.wrapping_mul(index as u64 / 8 + 1) >> 24) as u8 | 1;
        }
    }
    bytes
}

/// An image with blocks of all states, over a parent if there is one, and perhaps with a log that
/// must be replayed. It has at most `blocks` blocks.
pub fn build(random: Random<'_>, parent: Option<&Built>, blocks: u64) -> Built {
    let block_size = MIB << random(2);
    let sector_size = if random(2) == 0 { 512 } else { 4096 };
    let size = sector_size * (1 + random(blocks * block_size / sector_size));
    let mut builder = Builder::new(size, block_size, sector_size);
    builder.id = u128::from(random(u64::MAX)) << 64 | u128::from(random(u64::MAX));
    let mut disk = vec![0; size as usize];
    if let Some(parent) = parent {
        builder = builder.child(parent.id, r"..\parent.vhdx");
        let both = disk.len().min(parent.disk.len());
        disk[..both].copy_from_slice(&parent.disk[..both]);
    }
    for block in 0..size.div_ceil(block_size) {
        let start = block * block_size;
        let length = block_size.min(size - start);
        let range = start as usize..(start + length) as usize;
        // Reserved bits, and places of blocks that have none.
        let noise = random(1 << 17) << 3;
        let place = random(1 << 20) << 20;
        match random(8) {
            0 | 1 => builder.set(block, NOT_PRESENT, place | noise),
            state @ 2..=4 => {
                let state = [UNDEFINED, ZERO, UNMAPPED, OLD_UNMAPPED][(state + block) as usize % 4];
                builder.set(block, state, place | noise);
                disk[range].fill(0);
            }
            5 | 6 if parent.is_some() => {
                let bytes = content(random, block_size);
                builder.block(block, PARTIALLY_PRESENT, bytes.clone());
                for _ in 0..random(8) {
                    let from = random(length / sector_size) * sector_size;
                    let count = match random(3) {
                        0 => sector_size,
                        1 => sector_size * (1 + random(300)),
                        _ => length,
                    };
                    let count = count.min(length - from);
                    builder.set_present(start + from, count);
                    let at = (start + from) as usize;
                    let new = &bytes[from as usize..(from + count) as usize];
                    disk[at..at + new.len()].copy_from_slice(new);
                }
                // The bitmap must be there also if no sector is.
                if builder.bitmaps.is_empty() {
                    builder.set_present(start, sector_size);
                    let new = &bytes[..sector_size as usize];
                    disk[start as usize..][..new.len()].copy_from_slice(new);
                }
            }
            _ => {
                let bytes = content(random, block_size);
                disk[range].copy_from_slice(&bytes[..length as usize]);
                builder.block(block, PRESENT, bytes);
            }
        }
    }
    let mut built = Built {
        file: Vec::new(),
        disk,
        id: builder.id,
        bat: builder.bat(),
        metadata: builder.metadata(),
    };
    built.file = match random(2) {
        0 => builder.to_vec(),
        _ => with_log(random, builder),
    };
    built
}

/// The file with some sectors of its metadata damaged, and a log that corrects them.
fn with_log(random: Random<'_>, mut builder: Builder) -> Vec<u8> {
    builder.log_id = 0x1234_5678;
    let mut file = builder.to_vec();
    let mut candidates = vec![
        REGION_TABLES[0],
        builder.metadata(),
        builder.metadata() + METADATA_TABLE,
        builder.bat(),
        builder.bat() + LOG_SECTOR,
    ];
    candidates.extend(builder.bitmaps.values().map(|(at, _)| *at));
    let mut damaged: Vec<u64> = Vec::new();
    for at in candidates {
        if random(2) == 0 {
            damaged.push(at);
        }
    }
    let sector = |at: u64, file: &[u8]| file[at as usize..][..LOG_SECTOR as usize].to_vec();
    // Each sector is corrected by the last entry that has it.
    let count = 1 + random(4);
    let mut changes: Vec<Vec<Change>> = (0..count).map(|_| Vec::new()).collect();
    for at in damaged {
        let last = random(count) as usize;
        for entry in &mut changes[..last] {
            match random(3) {
                0 => entry.push(Change::Zero {
                    at,
                    length: LOG_SECTOR,
                }),
                1 => entry.push(Change::Data {
                    at,
                    sector: vec![0xa5; LOG_SECTOR as usize],
                }),
                _ => {}
            }
        }
        let right = sector(at, &file);
        match right.iter().all(|byte| *byte == 0) {
            true => changes[last].push(Change::Zero {
                at,
                length: LOG_SECTOR,
            }),
            false => changes[last].push(Change::Data { at, sector: right }),
        }
        file[at as usize..][..LOG_SECTOR as usize].fill(random(256) as u8);
    }
    let length = file.len() as u64;
    let flushed = length - random(2) * MIB;
    // Zeroes at the end of the file may be missing.
    let zeroes = file.iter().rev().take_while(|byte| **byte == 0).count() as u64;
    if zeroes > MIB && random(2) == 0 {
        file.truncate((length - zeroes.min(MIB)) as usize);
    }
    let flushed = flushed.min(file.len() as u64);
    let sectors = builder.log_bytes / LOG_SECTOR;
    let mut at = random(sectors) * LOG_SECTOR;
    let mut sequence = 1 + random(1 << 40);
    let mut entry = |at: u64, tail: u64, id: u128, changes: Vec<Change>, sequence: u64| {
        let last = length;
        let entry = LogEntry {
            id,
            sequence,
            tail,
            flushed,
            last,
            changes,
        };
        let mut at = at;
        for sector in entry.encode().chunks(LOG_SECTOR as usize) {
            let place = (builder.log() + at) as usize;
            file[place..place + sector.len()].copy_from_slice(sector);
            at = (at + LOG_SECTOR) % builder.log_bytes;
        }
        at
    };
    let wrong = || {
        vec![Change::Zero {
            at: 0,
            length: 64 * MIB,
        }]
    };
    if random(2) == 0 {
        // It was carried out before: the sequence begins after it.
        at = entry(at, at, builder.log_id, wrong(), sequence);
        sequence += 1;
    }
    let tail = at;
    for changes in changes {
        at = entry(at, tail, builder.log_id, changes, sequence);
        sequence += 1;
    }
    match random(4) {
        // An entry of another log, and one that was not written to its end.
        0 => drop(entry(at, tail, 0x4444, wrong(), sequence)),
        1 => {
            let place = (builder.log() + at) as usize;
            entry(at, tail, builder.log_id, wrong(), sequence);
            file[place + 5] ^= 1;
        }
        _ => {}
    }
    file
}

/// Changes a number of the metadata. With `resealed`, checksums are right afterwards.
pub fn damage(random: Random<'_>, built: &Built, file: &mut [u8], resealed: bool) {
    let fields = [
        (HEADERS[random(2) as usize], 80),
        (REGION_TABLES[random(2) as usize], 80),
        (built.metadata, 224),
        (built.metadata + METADATA_TABLE, 400),
        (built.bat, 128),
        (built.bat + built.bat % 7 * 4096, 64),
        (MIB + random(4) * LOG_SECTOR, 160),
    ];
    let (start, length) = fields[random(fields.len() as u64) as usize];
    let width = 1usize << random(4);
    let at = (start + random(length)) as usize / width * width;
    let Some(place) = file.get_mut(at..at + width) else {
        return;
    };
    let value = match random(6) {
        0 => 0,
        1 => u64::MAX,
        2 => 1 << random(64),
        3 => (random(16) * MIB) | random(8),
        4 => random(u64::MAX),
        _ => u64::from(place[0]).wrapping_add(random(3)).wrapping_sub(1),
    };
    place.copy_from_slice(&value.to_le_bytes()[..width]);
    if resealed {
        seal_all(file);
    }
}

/// Puts the right checksums into headers, region tables and entries of the log.
pub fn seal_all(file: &mut [u8]) {
    for (at, length) in [(HEADERS, 4096), (REGION_TABLES, 64 << 10)]
        .into_iter()
        .flat_map(|(places, length)| places.map(|at| (at as usize, length)))
    {
        if let Some(structure) = file.get_mut(at..at + length) {
            seal(structure);
        }
    }
    for at in (MIB..2 * MIB).step_by(LOG_SECTOR as usize) {
        let at = at as usize;
        if !file.get(at..).is_some_and(|rest| rest.starts_with(b"loge")) {
            continue;
        }
        let length =
            u32::from_le_bytes(file[at + 8..at + 12].try_into().expect("4 bytes")) as usize;
        if (64..=64 << 10).contains(&length)
            && let Some(entry) = file.get_mut(at..at + length)
        {
            seal(entry);
        }
    }
}
