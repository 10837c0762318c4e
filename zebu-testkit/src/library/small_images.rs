//! Images of formats that are only read, built from their descriptions: VHD, qcow version 1, QED,
//! Parallels, DMG, cloop and Bochs.
use bzip2::{Action, Compress, Compression};
use zebu_deflate::{Encoder, Level};

/// Random numbers: one below the argument, which is not 0.
pub type Random<'a> = &'a mut dyn FnMut(u64) -> u64;

/// A number in an image, which may be damaged.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub at: usize,
    pub width: usize,
    pub is_big_endian: bool,
}

/// An image.
#[derive(Clone, Debug, Default)]
pub struct Built {
    pub bytes: Vec<u8>,
    /// What it reads as, over nothing.
    pub content: Vec<u8>,
    pub fields: Vec<Field>,
}

impl Field {
    pub fn get(&self, bytes: &[u8]) -> u64 {
        let mut number = [0; 8];
        let here = &bytes[self.at..self.at + self.width];
        if self.is_big_endian {
            number[8 - self.width..].copy_from_slice(here);
            u64::from_be_bytes(number)
        } else {
            number[..self.width].copy_from_slice(here);
            u64::from_le_bytes(number)
        }
    }

    pub fn put(&self, bytes: &mut [u8], value: u64) {
        let here = &mut bytes[self.at..self.at + self.width];
        match self.is_big_endian {
            true => here.copy_from_slice(&value.to_be_bytes()[8 - self.width..]),
            false => here.copy_from_slice(&value.to_le_bytes()[..self.width]),
        }
    }
}

impl Built {
    /// Appends numbers that may be damaged.
    fn be(&mut self, width: usize, numbers: &[u64]) {
        self.numbers(width, true, numbers);
    }

    fn le(&mut self, width: usize, numbers: &[u64]) {
        self.numbers(width, false, numbers);
    }

    fn numbers(&mut self, width: usize, is_big_endian: bool, numbers: &[u64]) {
        for number in numbers {
            let field = Field {
                at: self.bytes.len(),
                width,
                is_big_endian,
            };
            self.bytes.resize(field.at + width, 0);
            field.put(&mut self.bytes, *number);
            self.fields.push(field);
        }
    }

    fn pad(&mut self, unit: usize) {
        let length = self.bytes.len().next_multiple_of(unit);
        self.bytes.resize(length, 0);
    }

    /// Damages a number. Returns what was done.
    pub fn damage(&mut self, random: Random) -> String {
        let field = self.fields[random(self.fields.len() as u64) as usize];
        let value = damaged(field.get(&self.bytes), random);
        field.put(&mut self.bytes, value);
        format!("{value:#x} at {:#x}", field.at)
    }
}

/// A number for a field that has `old`.
pub fn damaged(old: u64, random: Random) -> u64 {
    match random(8) {
        0 => 0,
        1 => u64::MAX,
        2 => 1,
        3 => old.wrapping_add(random(3) * 512),
        4 => old ^ 1 << random(64),
        5 => 1 << random(64),
        6 => old.wrapping_sub(1),
        _ => random(1 << 40),
    }
}

/// The numbers below `count` in any order.
fn shuffled(count: usize, random: Random) -> Vec<usize> {
    let mut all: Vec<usize> = (0..count).collect();
    for at in (1..count).rev() {
        all.swap(at, random(at as u64 + 1) as usize);
    }
    all
}

/// Content of some sectors: repeated, of one byte, or of any.
fn content(sectors: u64, random: Random) -> Vec<u8> {
    let length = sectors as usize * 512;
    match random(4) {
        0 => vec![0; length],
        1 => vec![random(256) as u8; length],
        2 => (0..length).map(|_| random(256) as u8).collect(),
        _ => {
            let period = 1 + random(5000) as usize;
            (0..length).map(|n| (n % period / 3) as u8).collect()
        }
    }
}

fn zlib(data: &[u8]) -> Vec<u8> {
    let mut out = vec![0; data.len() + data.len() / 100 + 1000];
    let length = Encoder::new().compress_zlib(Level::DEFAULT, data, &mut out);
    out.truncate(length.expect("there is space"));
    out
}

fn deflate(data: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![0; data.len() - 1];
    let length = Encoder::new().compress(Level::DEFAULT, data, &mut out)?;
    out.truncate(length);
    Some(out)
}

fn bzip2(data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len() * 2 + 1000);
    let mut compress = Compress::new(Compression::fast(), 0);
    compress
        .compress_vec(data, &mut out, Action::Finish)
        .expect("it compresses");
    out
}

/// A VHD image that grows.
pub struct Vhd {
    pub is_differencing: bool,
    pub block_size: u32,
    pub sectors: u64,
    /// By block: the bits of its sectors, and its data.
    pub blocks: Vec<Option<(Vec<bool>, Vec<u8>)>>,
    /// Kind and path.
    pub locators: Vec<([u8; 4], Vec<u8>)>,
    /// The parent's name in the header.
    pub parent: String,
    /// What identifies this image, and its parent.
    pub id: [u8; 16],
    pub parent_id: [u8; 16],
}

impl Vhd {
    /// An image whose blocks and sectors are stored or not by chance.
    pub fn random(is_differencing: bool, random: Random) -> Vhd {
        // QEMU computes no bitmap for blocks of less than 4 KiB.
        let least = if is_differencing { 9 } else { 12 };
        let block_size = 1 << (least + random(25 - least));
        let per_block = u64::from(block_size) / 512;
        let blocks = (1 + (4 << 20) / u64::from(block_size)).min(20);
        let sectors = 1 + random(per_block * blocks);
        let blocks = (0..sectors.div_ceil(per_block)).map(|_| {
            let dense = random(4);
            let mut bit = false;
            let bits = (0..per_block).map(|_| {
                if random(1 + dense * 40) == 0 {
                    bit = random(2) == 0;
                }
                bit
            });
            let bits = bits.collect();
            let data = (0..per_block).flat_map(|_| [random(256) as u8; 512]);
            let block = (bits, data.collect());
            (dense > 0).then_some(block)
        });
        Vhd {
            is_differencing,
            block_size,
            sectors,
            blocks: blocks.collect(),
            locators: Vec::new(),
            parent: String::new(),
            id: [random(256) as u8; 16],
            parent_id: [0; 16],
        }
    }

    pub fn build(&self, random: Random) -> Built {
        let mut footer = Built::default();
        footer.bytes.extend(b"conectix");
        footer.be(4, &[2, 0x0001_0000]);
        footer.be(8, &[512]);
        footer.be(4, &[0]);
        footer.bytes.extend(b"win ");
        footer.be(4, &[0, 0]);
        footer.be(8, &[self.sectors * 512; 2]);
        footer.be(4, &[0, if self.is_differencing { 4 } else { 3 }, 0]);
        footer.bytes.extend(self.id);
        footer.pad(512);
        set_checksum(&mut footer.bytes, 64);
        let end = footer.bytes.clone();

        let mut all = footer;
        let header = all.bytes.len();
        let table = header as u64 + 1024;
        let table_bytes = (self.blocks.len() * 4).next_multiple_of(512);
        all.bytes.extend(b"cxsparse");
        all.be(8, &[u64::MAX, table]);
        let numbers = [
            0x0001_0000,
            self.blocks.len() as u64,
            self.block_size.into(),
            0,
        ];
        all.be(4, &numbers);
        all.bytes.extend(self.parent_id);
        all.be(4, &[0, 0]);
        let name = self.parent.encode_utf16().flat_map(u16::to_be_bytes);
        all.bytes.extend(name);
        all.bytes.resize(header + 576, 0);
        let mut after = Vec::new();
        let locators_at = table + table_bytes as u64;
        for (kind, path) in &self.locators {
            all.bytes.extend(kind);
            all.be(4, &[512, path.len() as u64, 0]);
            all.be(8, &[locators_at + after.len() as u64]);
            after.extend(path);
            after.resize(after.len().next_multiple_of(512), 0);
        }
        all.bytes.resize(table as usize, 0);
        set_checksum(&mut all.bytes[header..], 36);
        let mut entries = vec![u64::from(u32::MAX); self.blocks.len()];
        for index in shuffled(self.blocks.len(), random) {
            let Some((bits, data)) = &self.blocks[index] else {
                continue;
            };
            entries[index] = (locators_at + after.len() as u64) / 512;
            let mut bitmap = vec![0u8; bits.len().div_ceil(8).next_multiple_of(512)];
            for (bit, _) in bits.iter().enumerate().filter(|(_, here)| **here) {
                bitmap[bit / 8] |= 0x80 >> (bit % 8);
            }
            after.extend(bitmap);
            after.extend(data);
        }
        all.be(4, &entries);
        all.bytes.resize(locators_at as usize, 0xff);
        all.bytes.extend(after);
        all.bytes.extend(end);
        all.content = self.content(self.is_differencing.then_some(&[]));
        all
    }

    /// What it reads as over a parent with this content. None: it has none.
    pub fn content(&self, parent: Option<&[u8]>) -> Vec<u8> {
        let mut content = vec![0; self.sectors as usize * 512];
        let per_block = self.block_size as usize / 512;
        for (sector, out) in content.chunks_mut(512).enumerate() {
            let block = self.blocks[sector / per_block].as_ref();
            let within = sector % per_block;
            let here = block.filter(|(bits, _)| parent.is_none() || bits[within]);
            if let Some((_, data)) = here {
                out.copy_from_slice(&data[within * 512..][..512]);
            } else if let Some(below) = parent.and_then(|p| p.get(sector * 512..)) {
                let length = below.len().min(512);
                out[..length].copy_from_slice(&below[..length]);
            }
        }
        content
    }
}

/// Sets the sum of a footer or header, which is at `at`.
pub fn set_checksum(structure: &mut [u8], at: usize) {
    structure[at..at + 4].fill(0);
    let sum: u32 = structure.iter().map(|b| u32::from(*b)).sum();
    structure[at..at + 4].copy_from_slice(&(!sum).to_be_bytes());
}

/// A qcow image of version 1.
pub fn qcow(random: Random) -> Built {
    let (cluster_bits, l2_bits) = (9 + random(4), 6 + random(3));
    let cluster = 1u64 << cluster_bits;
    let size = 1 + random(cluster << l2_bits << 1);
    let tables = size.max(2).div_ceil(cluster << l2_bits);
    let mut all = Built::default();
    all.bytes.extend(b"QFI\xfb");
    all.be(4, &[1]);
    all.be(8, &[0]);
    all.be(4, &[0, 0]);
    all.be(8, &[size.max(2)]);
    all.be(1, &[cluster_bits, l2_bits, 0, 0]);
    all.be(4, &[0]);
    all.be(8, &[48]);
    let mut at = 48 + tables * 8;
    let (mut l1, mut l2s, mut data) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..tables {
        let is_there = random(4) > 0;
        l1.push(if is_there {
            at + l2s.len() as u64 * 8
        } else {
            0
        });
        l2s.extend(vec![0; if is_there { 1 << l2_bits } else { 0 }]);
    }
    at = (at + l2s.len() as u64 * 8).next_multiple_of(512);
    for entry in &mut l2s {
        let here = at + data.len() as u64;
        let bytes = content(cluster / 512, random);
        match (random(4), deflate(&bytes)) {
            (0 | 1, _) => {}
            (2, Some(packed)) => {
                *entry = 1 << 63 | (packed.len() as u64) << (63 - cluster_bits) | here;
                data.extend(packed);
                data.resize(data.len().next_multiple_of(512), 0);
            }
            _ => {
                *entry = here;
                data.extend(bytes);
            }
        }
    }
    all.be(8, &l1);
    all.be(8, &l2s);
    all.bytes.resize(at as usize, 0);
    all.bytes.extend(data);
    all
}

/// A QED image.
pub fn qed(random: Random) -> Built {
    let (cluster, table) = (4096u64, 2u64);
    let entries = table * cluster / 8;
    let tables = 1 + random(3);
    let mut all = Built::default();
    all.bytes.extend(b"QED\0");
    all.le(4, &[cluster, table, 1]);
    let size = (1 + random(tables * entries * cluster / 512)) * 512;
    all.le(8, &[random(2) * 2, 0, 0, cluster, size]);
    all.le(4, &[64, 0]);
    all.pad(cluster as usize);
    let data = 1 + table * (1 + tables);
    let clusters = 1 + random(20);
    let l1 = (0..tables).map(|n| (1 + table * (1 + n)) * cluster);
    let l1: Vec<u64> = l1.collect();
    all.le(8, &l1);
    all.pad((table * cluster) as usize);
    all.bytes.resize(((1 + table) * cluster) as usize, 0);
    for _ in 0..tables {
        let mut l2 = vec![0; entries as usize];
        for _ in 0..random(10) {
            let at = random(30) as usize;
            l2[at] = match random(4) {
                0 => 1,
                _ => (data + random(clusters)) * cluster,
            };
        }
        let start = all.bytes.len();
        // Those that are used, and some more.
        all.le(8, &l2[..34]);
        all.bytes.resize(start + (table * cluster) as usize, 0);
    }
    all.bytes.extend(content(clusters * cluster / 512, random));
    all
}

/// A Parallels image.
pub fn parallels(random: Random) -> Built {
    let is_old = random(2) == 0;
    let tracks = 1 << random(6);
    let entries = 1 + random(60);
    let mut all = Built::default();
    let magic = if is_old {
        b"WithoutFreeSpace"
    } else {
        b"WithouFreSpacExt"
    };
    all.bytes.extend(magic);
    let start = (64 + entries * 4).next_multiple_of(512 * tracks) / 512;
    all.le(4, &[2, 16, 1, tracks, entries]);
    all.le(8, &[1 + random(entries * tracks)]);
    all.le(4, &[0, start, 0]);
    all.le(8, &[0]);
    let stored = 1 + random(20);
    let unit = if is_old { 1 } else { tracks };
    let table = (0..entries).map(|_| match random(2) {
        0 => 0,
        _ => (start + random(stored) * tracks) / unit,
    });
    let table: Vec<u64> = table.collect();
    all.le(4, &table);
    all.bytes.resize((start * 512) as usize, 0);
    all.bytes.extend(content(stored * tracks, random));
    all
}

/// A DMG image. `with_bzip2`: some chunks are of the type UDBZ. `as_list`: a property list describes
/// it.
pub fn dmg(with_bzip2: bool, as_list: bool, random: Random) -> Built {
    let mut all = Built::default();
    let data_fork = random(3) * 100;
    all.bytes.resize(data_fork as usize, 0xee);
    let mut blocks = Vec::new();
    for _ in 0..1 + random(3) {
        let first = all.content.len() as u64 / 512;
        let start = all.bytes.len() as u64 - data_fork;
        let mut block = Built::default();
        block.bytes.extend(b"mish\0\0\0\x01");
        block.be(8, &[first, 0, start]);
        block.bytes.resize(204, 0);
        for _ in 0..random(8) {
            let count = 1 + random(300);
            let sector = all.content.len() as u64 / 512 - first;
            let here = content(count, random);
            let (kind, data) = match random(6) {
                0 => (0, Vec::new()),
                1 => (2, Vec::new()),
                2 => (1, here.clone()),
                3 if with_bzip2 => (0x8000_0006, bzip2(&here)),
                _ => (0x8000_0005, zlib(&here)),
            };
            match data.is_empty() {
                true => all.content.extend(vec![0; count as usize * 512]),
                false => all.content.extend(here),
            }
            let offset = all.bytes.len() as u64 - data_fork - start;
            block.be(4, &[kind, 0]);
            block.be(8, &[sector, count, offset, data.len() as u64]);
            all.bytes.extend(data);
            if random(3) == 0 {
                // A comment.
                block.be(4, &[0x7fff_fffe]);
                block.bytes.extend([7; 36]);
            }
        }
        block.be(4, &[0xffff_ffff]);
        block.bytes.extend([0; 36]);
        blocks.push(block);
    }
    let start = all.bytes.len() as u64;
    if as_list {
        all.bytes
            .extend(b"<?xml version=\"1.0\"?>\n<plist><dict><key>blkx</key><array>\n");
        for block in &blocks {
            let text = format!(
                "<dict><data>\n\t\t{}\n</data></dict>\n",
                base64(&block.bytes)
            );
            all.bytes.extend(text.into_bytes());
        }
        let rest = b"<dict><data>bm90IGEgYmxvY2s=</data></dict></array></dict></plist>\n";
        all.bytes.extend(rest);
    } else {
        let length: usize = blocks.iter().map(|block| block.bytes.len() + 4).sum();
        all.be(4, &[256, 0, length as u64]);
        all.bytes.resize(start as usize + 256, 0);
        for block in blocks {
            all.be(4, &[block.bytes.len() as u64]);
            let at = all.bytes.len();
            all.bytes.extend(&block.bytes);
            let moved = block.fields.iter().map(|field| Field {
                at: field.at + at,
                ..*field
            });
            all.fields.extend(moved);
        }
        all.bytes.extend([0; 50]);
    }
    let place = [start, all.bytes.len() as u64 - start];
    let (list, resources) = match as_list {
        true => (place, [0; 2]),
        false => ([0; 2], place),
    };
    let koly = all.bytes.len();
    all.bytes.extend(b"koly\0\0\0\x04");
    let mut put = |at: usize, numbers: &[u64]| {
        all.bytes.resize(koly + at, 0);
        all.be(8, numbers);
    };
    put(0x18, &[data_fork]);
    put(0x28, &resources);
    put(0xd8, &list);
    let sectors = all.content.len() as u64 / 512;
    all.bytes.resize(koly + 0x1ec, 0);
    all.be(8, &[sectors]);
    all.bytes.resize(koly + 512, 0);
    all
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for (at, three) in bytes.chunks(3).enumerate() {
        let mut all = [0; 4];
        all[1..=three.len()].copy_from_slice(three);
        let bits = u32::from_be_bytes(all);
        for digit in 0..4 {
            match digit <= three.len() {
                true => text.push(DIGITS[(bits >> (18 - 6 * digit)) as usize & 63] as char),
                false => text.push('='),
            }
        }
        if at % 17 == 16 {
            text += "\n\t\t";
        }
    }
    text
}

/// A cloop image.
pub fn cloop(random: Random) -> Built {
    let sectors = [1, 2, 7, 8, 64, 128, 300][random(7) as usize];
    let count = random((2048 / sectors).clamp(4, 60));
    let mut all = Built::default();
    let script = b"#!/bin/sh\n#V2.0 Format\n\
        modprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\nexit $?\n";
    all.bytes.extend(script);
    all.bytes.resize(128, 0);
    all.be(4, &[sectors * 512, count]);
    let mut at = all.bytes.len() as u64 + (count + 1) * 8;
    let (mut offsets, mut packed) = (vec![at], Vec::new());
    for _ in 0..count {
        let block = content(sectors, random);
        let data = zlib(&block);
        at += data.len() as u64;
        offsets.push(at);
        packed.extend(data);
        all.content.extend(block);
    }
    all.be(8, &offsets);
    all.bytes.extend(packed);
    all
}

/// A growing Bochs image.
pub fn bochs(random: Random) -> Built {
    let extent = 512usize << random(9);
    let per_extent = extent as u64 / 512;
    let sectors = 1 + random((per_extent * 30).min(8192));
    let count = (sectors.div_ceil(per_extent) + random(3)) as usize;
    let bitmap = per_extent.div_ceil(8).max(random(600));
    let bitmap_size = (bitmap as usize).next_multiple_of(512);
    let header_size = 512 * (1 + random(2));
    let mut all = Built::default();
    for text in ["Bochs Virtual HD Image", "Redolog", "Growing"] {
        let (start, length) = (all.bytes.len(), if text.len() > 16 { 32 } else { 16 });
        all.bytes.extend(text.as_bytes());
        all.bytes.resize(start + length, 0);
    }
    let is_first = random(2) == 0;
    let version = if is_first { 0x0001_0000 } else { 0x0002_0000 };
    all.le(
        4,
        &[version, header_size, count as u64, bitmap, extent as u64],
    );
    if !is_first {
        all.le(4, &[0]);
    }
    all.le(8, &[sectors * 512 + random(512)]);
    all.bytes.resize(header_size as usize, 0);
    let mut places = shuffled(count, random);
    let step = bitmap_size + extent;
    let mut extents = vec![0u8; step * count];
    all.content.resize(sectors as usize * 512, 0);
    for (index, place) in places.iter_mut().enumerate() {
        if random(3) == 0 {
            *place = u32::MAX as usize;
            continue;
        }
        let at = *place * step;
        let dense = random(60);
        let mut stored = false;
        for sector in 0..per_extent as usize {
            if random(1 + dense) == 0 {
                stored = random(2) == 0;
            }
            let byte = random(256) as u8;
            extents[at + bitmap_size + sector * 512..][..512].fill(byte);
            if stored {
                extents[at + sector / 8] |= 1 << (sector % 8);
                let guest = (index * per_extent as usize + sector) * 512;
                if let Some(out) = all.content.get_mut(guest..guest + 512) {
                    out.fill(byte);
                }
            }
        }
    }
    let places: Vec<u64> = places.iter().map(|place| *place as u64).collect();
    all.le(4, &places);
    all.bytes.extend(extents);
    all
}
