//! Hostile VMDKs in one file, for the tests of `hostile` and, by path, for the fuzz targets: [`build`] makes a
//! small one, whose entries may lead anywhere, and [`mutate_once`] damages header, descriptor, tables
//! and streams.

use zebu::internal::codec::{Compression, Compressor};

use super::hostile_images::Rng;

const SECTOR: usize = 512;
/// The first sector behind the descriptor.
const TABLES: usize = 21;

/// A file that grows by whole sectors.
struct Builder(Vec<u8>);

impl Builder {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        let end = at + bytes.len();
        if self.0.len() < end {
            self.0.resize(end.next_multiple_of(SECTOR), 0);
        }
        self.0[at..end].copy_from_slice(bytes);
    }

    fn put32(&mut self, at: usize, value: u64) {
        self.put(at, &(value as u32).to_le_bytes());
    }

    /// Appends bytes; the number of their first sector.
    fn append(&mut self, bytes: &[u8]) -> u64 {
        let at = self.0.len();
        self.put(at, bytes);
        (at / SECTOR) as u64
    }
}

/// A zlib stream.
fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut packed = vec![0; bytes.len() + 100];
    let length = Compressor::new().compress(Compression::Zlib, None, bytes, &mut packed);
    let length = length.expect("a level that exists").unwrap_or(0);
    let (mut a, mut b) = (1u32, 0u32);
    for byte in bytes {
        a = (a + u32::from(*byte)) % 65521;
        b = (b + a) % 65521;
    }
    let checksum = (b << 16 | a).to_be_bytes();
    [&[0x78, 0x9c], &packed[..length], &checksum].concat()
}

/// An image of about `most` bytes at most.
pub fn build(rng: &mut Rng, most: usize) -> Vec<u8> {
    let is_esx = rng.one_in(4);
    let is_stream = !is_esx && rng.one_in(2);
    let has_marker = rng.one_in(2);
    let grain = rng.pick(&[1u64, 3, 8, 16]);
    let table_len = match is_esx {
        true => 4096,
        false => rng.pick(&[1u64, 4, 100, 512]),
    };
    let grains = 1 + rng.below(200);
    let sectors = grains * grain - rng.below(grain);
    let tables = grains.div_ceil(table_len);
    let mut file = Builder(vec![0; SECTOR]);
    let parent = match rng.one_in(8) {
        true => "parentFileNameHint=\"base.vmdk\"\n",
        false => "",
    };
    let text = format!(
        "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\n\
         createType=\"monolithicSparse\"\n{parent}RW {sectors} SPARSE \"x.vmdk\"\n"
    );
    file.put(SECTOR, text.as_bytes());
    file.put(TABLES * SECTOR - 1, &[0]);
    let directory = file.append(&vec![0; tables as usize * 4]);
    for table in 0..tables {
        if rng.one_in(6) {
            continue;
        }
        let at = file.append(&vec![0; table_len as usize * 4]);
        file.put32((directory * 512 + table * 4) as usize, at);
        for entry in 0..table_len.min(grains - table * table_len) {
            let end = (file.0.len() / SECTOR) as u64;
            let sector = match rng.below(8) {
                0 => 0,
                1 => 1,
                2 => rng.below(end),
                _ if file.0.len() > most => rng.below(2 * end),
                _ => {
                    let byte = rng.below(256) as u8;
                    let bytes = vec![byte; (grain * 512) as usize];
                    let marker = [&(entry * grain).to_le_bytes()[..], &[0; 4]].concat();
                    match (is_stream, has_marker) {
                        (false, _) => file.append(&bytes),
                        (true, false) => file.append(&zlib(&bytes)),
                        (true, true) => {
                            let stream = zlib(&bytes);
                            let at = file.append(&[&marker[..], &stream].concat());
                            file.put32(at as usize * SECTOR + 8, stream.len() as u64);
                            at
                        }
                    }
                }
            };
            file.put32((at * 512 + entry * 4) as usize, sector);
        }
    }
    if is_esx {
        file.put(0, b"COWD");
        for (at, value) in [
            (4, 1),
            (8, 3),
            (12, sectors),
            (16, grain),
            (20, directory),
            (24, tables),
        ] {
            file.put32(at, value);
        }
        return file.0;
    }
    let at_end = rng.one_in(3);
    let header = |directory: u64| {
        // Grains of a sector have entries of 1 for data.
        let flags = 1 | u64::from(grain > 1) << 2 | u64::from(has_marker) << 17;
        let mut header = Builder(vec![0; SECTOR]);
        header.put(0, b"KDMV");
        for (at, value) in [
            (4, 1),
            (8, flags),
            (12, sectors),
            (20, grain),
            (28, 1),
            (36, 20),
        ] {
            header.put32(at, value);
        }
        header.put32(44, table_len);
        header.put(56, &directory.to_le_bytes());
        header.put(73, b"\n \r\n");
        header.put(77, &[u8::from(is_stream), 0]);
        header.0
    };
    file.put(0, &header(if at_end { u64::MAX } else { directory }));
    if at_end {
        let mut marker = [0; SECTOR];
        marker[12] = 3;
        file.append(&marker);
        file.append(&header(directory));
        file.append(&[0; SECTOR]);
    }
    file.0
}

/// Damages an image in one place, mostly in metadata.
pub fn mutate_once(rng: &mut Rng, bytes: &mut Vec<u8>) {
    if bytes.len() <= TABLES * SECTOR {
        bytes.resize((TABLES + 1) * SECTOR, 0);
    }
    let length = bytes.len() as u64;
    let at = match rng.below(8) {
        0..=2 => rng.pick(&[4, 8, 12, 16, 20, 24, 28, 36, 44, 56, 60, 64, 76]),
        3 => SECTOR as u64 + rng.below(250),
        4 | 5 => (TABLES * SECTOR) as u64 + rng.below(2048),
        6 => rng.below(length),
        _ => length - 1 - rng.below(1536.min(length)),
    };
    let at = at.min(length - 1) as usize;
    let width = rng.pick(&[1usize, 2, 4, 8]).min(bytes.len() - at);
    let value = match rng.below(6) {
        0 => 0,
        1 => u64::MAX,
        2 => rng.below(300),
        3 => length / 512 - rng.below(4),
        4 => 1 << rng.below(64),
        _ => rng.below(u64::MAX),
    };
    bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
    if rng.one_in(12) {
        bytes.truncate(rng.below(length) as usize);
    }
}
