//! Disks for VMDK files, and what both programs must say of these. Files that qemu-img cannot make,
//! written from their descriptions, and places in which files are damaged.

use zebu::internal::codec::{Compression, Compressor};

use super::{Lab, Rng, assert_same_answer};

const SECTOR: usize = 512;
/// Bytes of a grain.
pub const GRAIN: u64 = 64 << 10;

/// What a new image can be.
pub const SUBFORMATS: [&str; 5] = [
    "monolithicSparse",
    "monolithicFlat",
    "twoGbMaxExtentSparse",
    "twoGbMaxExtentFlat",
    "streamOptimized",
];

/// Bytes of a disk: zeroes, text, noise and repeated bytes in pieces of any length.
pub fn content(random: &mut Rng, size: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < size {
        let length = match random.below(3) {
            0 => random.below(2000),
            1 => GRAIN * random.below(6),
            _ => random.below(300_000),
        };
        let length = length.min(size - bytes.len() as u64);
        let (kind, byte) = (random.below(4), random.below(256) as u8);
        bytes.extend((0..length).map(|at| match kind {
            0 => 0,
            1 => byte,
            2 => (at / 7 * 31 + at % 7) as u8 ^ byte,
            _ => random.next() as u8,
        }));
    }
    bytes
}

/// What both programs say of an image must be the same.
pub fn assert_same_reports(lab: &Lab, image: &str, what: &str) {
    for args in [
        &["info", image][..],
        &["info", "--output=json", image],
        &["map", image],
        &["map", "--output=json", image],
        &["map", "--output=json", "-s", "1000448", "-l", "600k", image],
        &["check", image],
        &["check", "--output=json", image],
        &["snapshot", "-l", image],
        &["measure", "-O", "qcow2", image],
        &["measure", "-O", "raw", image],
        &["compare", image, image],
    ] {
        assert_same_answer(lab, args, what);
    }
}

/// What both programs read of an image must be the same. Leaves it in `theirs.raw`.
pub fn assert_same_content(lab: &Lab, image: &str, what: &str) {
    lab.qemu_img(&["convert", image, "-O", "raw", "theirs.raw"])
        .ok(what);
    lab.zebu(&["convert", image, "-O", "raw", "ours.raw"])
        .ok(what);
    lab.assert_same_bytes("ours.raw", "theirs.raw", what);
    assert_same_answer(lab, &["compare", image, "theirs.raw"], what);
}

/// A descriptor with these lines of extents.
pub fn descriptor(kind: &str, lines: &str, cid: u32) -> String {
    format!(
        "# Disk DescriptorFile\nversion=1\nCID={cid:08x}\nparentCID=ffffffff\n\
         createType=\"{kind}\"\n\n# Extent description\n{lines}\n# The Disk Data Base\n#DDB\n\n\
         ddb.adapterType = \"lsilogic\"\n"
    )
}

/// A file that is made from numbers at offsets.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        let end = at + bytes.len();
        if self.0.len() < end {
            self.0.resize(end, 0);
        }
        self.0[at..end].copy_from_slice(bytes);
    }

    fn put32(&mut self, at: usize, value: usize) {
        self.put(at, &(value as u32).to_le_bytes());
    }

    fn put64(&mut self, at: usize, value: u64) {
        self.put(at, &value.to_le_bytes());
    }

    /// Adds zeroes up to a multiple of sectors. The number of the next sector.
    fn pad(&mut self, sectors: usize) -> usize {
        let length = self.0.len().next_multiple_of(sectors * SECTOR);
        self.0.resize(length, 0);
        length / SECTOR
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// A sparse extent of ESX with grains of so many sectors.
pub fn esx(disk: &[u8], grain: usize) -> Vec<u8> {
    const TABLE: usize = 4096;
    let grains: Vec<&[u8]> = disk.chunks(grain * SECTOR).collect();
    let tables = grains.len().div_ceil(TABLE);
    let mut file = Bytes::default();
    file.put(0, b"COWD");
    for (at, value) in [
        (4, 1),
        (8, 3),
        (12, disk.len() / SECTOR),
        (16, grain),
        (20, 4),
        (24, tables),
    ] {
        file.put32(at, value);
    }
    let directory = 4 * SECTOR;
    file.put(directory + tables * 4 - 1, &[0]);
    for (nth, grains) in grains.chunks(TABLE).enumerate() {
        if grains.iter().all(|grain| is_zero(grain)) {
            continue;
        }
        let table = file.pad(1);
        file.put32(directory + nth * 4, table);
        file.put((table + 32) * SECTOR - 1, &[0]);
        for (entry, bytes) in grains.iter().enumerate() {
            if !is_zero(bytes) {
                let at = file.pad(1);
                file.put32(table * SECTOR + entry * 4, at);
                file.put(at * SECTOR, bytes);
                file.put(
                    (at + grain) * SECTOR - 1,
                    &[*bytes.get(grain * SECTOR - 1).unwrap_or(&0)],
                );
            }
        }
    }
    file.pad(1);
    file.0
}

/// A seSparse extent. Its grains are in any order.
pub fn se_sparse(disk: &[u8], random: &mut Rng) -> Vec<u8> {
    const TABLE: usize = 4096;
    const GRAIN: usize = 8 * SECTOR;
    let grains: Vec<&[u8]> = disk.chunks(GRAIN).collect();
    let tables = grains.len().div_ceil(TABLE);
    let directory_sectors = (tables * 8).div_ceil(SECTOR);
    let tables_at = 2 + directory_sectors;
    let grains_at = tables_at + tables * 64;
    let mut file = Bytes::default();
    for (nth, value) in [
        (0, 0xcafe_babe),
        (1, 0x2_0000_0001),
        (2, disk.len() as u64 / 512),
        (3, 8),
        (4, 64),
        (10, 1),
        (11, 1),
        (16, 2),
        (17, directory_sectors as u64),
        (18, tables_at as u64),
        (19, tables as u64 * 64),
        (24, grains_at as u64),
    ] {
        file.put64(nth * 8, value);
    }
    file.put64(SECTOR, 0xcafe_cafe);
    file.put(grains_at * SECTOR - 1, &[0]);
    let stored = grains.iter().filter(|grain| !is_zero(grain)).count();
    let mut places: Vec<usize> = (0..stored).collect();
    if random.below(2) == 0 {
        for nth in 0..stored {
            places.swap(nth, random.below(stored as u64) as usize);
        }
    }
    for (nth, grains) in grains.chunks(TABLE).enumerate() {
        if grains.iter().all(|grain| is_zero(grain)) {
            continue;
        }
        // Tables are in the order of the disk.
        file.put64(2 * SECTOR + nth * 8, 0x1000_0000 << 32 | nth as u64);
        for (entry, bytes) in grains.iter().enumerate() {
            let value = match is_zero(bytes) {
                true => random.below(3) << 60,
                false => {
                    let place = places.pop().expect("a place for each");
                    file.put(grains_at * SECTOR + place * GRAIN, bytes);
                    let place = place as u64;
                    3 << 60 | (place & 0xfff) << 48 | place >> 12
                }
            };
            file.put64((tables_at + nth * 64) * SECTOR + entry * 8, value);
        }
    }
    file.pad(8);
    file.0
}

/// A zlib stream.
fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut packed = vec![0; bytes.len()];
    let length = Compressor::new()
        .compress(Compression::Zlib, None, bytes, &mut packed)
        .expect("a level that exists");
    let mut stream = vec![0x78, 0x9c];
    match length {
        Some(length) => stream.extend(&packed[..length]),
        None => {
            let mut blocks = bytes.chunks(0xffff).peekable();
            while let Some(block) = blocks.next() {
                let length = block.len() as u16;
                stream.push(u8::from(blocks.peek().is_none()));
                stream.extend(length.to_le_bytes());
                stream.extend((!length).to_le_bytes());
                stream.extend(block);
            }
        }
    }
    let (mut a, mut b) = (1u32, 0u32);
    for byte in bytes {
        a = (a + u32::from(*byte)) % 65521;
        b = (b + a) % 65521;
    }
    stream.extend((b << 16 | a).to_be_bytes());
    stream
}

/// An extent with compressed grains, as VMware streams it: tables follow their grains, and the
/// directory is at the end. Only the footer tells where, if there is one; the grains of a table are not
/// in order then.
pub fn stream(disk: &[u8], grain: usize, markers: bool, footer: bool, text: &str) -> Vec<u8> {
    const TABLE: usize = 512;
    let mut file = Bytes::default();
    file.put(SECTOR, text.as_bytes());
    file.put(128 * SECTOR - 1, &[0]);
    let marker = |file: &mut Bytes, sectors: usize, kind: usize| {
        let at = file.pad(1) * SECTOR;
        file.put64(at, sectors as u64);
        file.put32(at + 12, kind);
        file.pad(1)
    };
    let grains: Vec<&[u8]> = disk.chunks(grain * SECTOR).collect();
    let mut directory = Vec::new();
    for (nth, grains) in grains.chunks(TABLE).enumerate() {
        let mut entries = Bytes(vec![0; TABLE * 4]);
        let ordered = (0..grains.len()).collect();
        let odd_first = || {
            (1..grains.len())
                .step_by(2)
                .chain((0..grains.len()).step_by(2))
        };
        let order: Vec<usize> = if footer {
            odd_first().collect()
        } else {
            ordered
        };
        for entry in order {
            let bytes = grains[entry];
            if is_zero(bytes) {
                continue;
            }
            let start = file.pad(1);
            entries.put32(entry * 4, start);
            // The last grain is whole, or ends where the disk does.
            let mut bytes = bytes.to_vec();
            if nth % 2 == 0 {
                bytes.resize(grain * SECTOR, 0);
            }
            let stream = zlib(&bytes);
            let mut at = start * SECTOR;
            if markers {
                file.put64(at, ((nth * TABLE + entry) * grain) as u64);
                file.put32(at + 8, stream.len());
                at += 12;
            }
            file.put(at, &stream);
        }
        directory.push(match is_zero(&entries.0) {
            true => 0,
            false => {
                let table = marker(&mut file, 4, 1);
                file.put(table * SECTOR, &entries.0);
                table
            }
        });
    }
    let sectors = (directory.len() * 4).div_ceil(SECTOR).max(1);
    let directory_at = marker(&mut file, sectors, 2);
    for (nth, table) in directory.iter().enumerate() {
        file.put32(directory_at * SECTOR + nth * 4, *table);
    }
    file.put((directory_at + sectors) * SECTOR - 1, &[0]);
    let header = |directory: u64| {
        let mut header = Bytes(vec![0; SECTOR]);
        header.put(0, b"KDMV");
        header.put32(4, 3);
        header.put32(8, 1 | 1 << 16 | usize::from(markers) << 17);
        header.put64(12, (disk.len() / SECTOR) as u64);
        header.put64(20, grain as u64);
        header.put64(28, u64::from(!text.is_empty()));
        header.put64(36, 20);
        header.put32(44, TABLE);
        header.put64(56, directory);
        header.put64(64, 128);
        header.put(73, b"\n \r\n");
        header.put(77, &[1, 0]);
        header.0
    };
    match footer {
        false => file.put(0, &header(directory_at as u64)),
        true => {
            file.put(0, &header(u64::MAX));
            let at = marker(&mut file, 1, 3) * SECTOR;
            file.put(at, &header(directory_at as u64));
            marker(&mut file, 0, 0);
        }
    }
    file.0
}

/// A number in a file that is damaged.
pub struct Damage {
    at: u64,
    width: usize,
}

impl Damage {
    /// A number of so many bytes.
    pub fn new(at: u64, width: usize) -> Self {
        Damage { at, width }
    }

    /// The numbers of a `KDMV` header, and some of the directory in this sector and of the table
    /// behind it; 0: without these.
    pub fn of_hosted(directory: u64) -> Vec<Damage> {
        let mut places = vec![Damage::new(0, 4), Damage::new(4, 4), Damage::new(8, 4)];
        places.extend([12, 20, 28, 36].map(|at| Damage::new(at, 8)));
        places.push(Damage::new(44, 4));
        places.extend([48, 56, 64].map(|at| Damage::new(at, 8)));
        places.extend([Damage::new(72, 1), Damage::new(73, 4), Damage::new(77, 2)]);
        if directory > 0 {
            // QEMU has the redundant directory first, then its table, then those in use.
            let table = directory + 6;
            for at in [
                directory * 512,
                (directory + 5) * 512,
                table * 512,
                table * 512 + 12,
            ] {
                places.push(Damage::new(at, 4));
            }
        }
        places
    }

    /// The numbers of a `COWD` header, of the directory and the first table.
    pub fn of_esx() -> Vec<Damage> {
        let header = (0..10).map(|nth| nth * 4);
        let tables = [4 * 512, 5 * 512, 5 * 512 + 4, 5 * 512 + 8];
        header.chain(tables).map(|at| Damage::new(at, 4)).collect()
    }

    /// The numbers of both headers of seSparse, of the directory and the first table.
    pub fn of_se_sparse() -> Vec<Damage> {
        let header = (0..28).map(|nth| nth * 8);
        let volatile = (0..6).map(|nth| 512 + nth * 8);
        let tables = [2 * 512, 3 * 512, 3 * 512 + 8, 3 * 512 + 16];
        let all = header.chain(volatile).chain(tables);
        all.map(|at| Damage::new(at, 8)).collect()
    }

    /// Changes the number, and returns it and its place.
    pub fn apply(&self, random: &mut Rng, bytes: &mut [u8]) -> (u64, u64) {
        let at = self.at as usize;
        let field = &mut bytes[at..at + self.width];
        let mut old = [0; 8];
        old[..self.width].copy_from_slice(field);
        let old = u64::from_le_bytes(old);
        let value = match random.below(8) {
            0 => 0,
            1 => u64::MAX,
            2 => 1,
            3 => old.wrapping_add(1),
            4 => old.wrapping_sub(1),
            5 => old ^ 1 << random.below(self.width as u64 * 8),
            6 => random.below(300),
            _ => random.below(1 << 40),
        };
        field.copy_from_slice(&value.to_le_bytes()[..self.width]);
        (value, self.at)
    }
}
