//! CRC-32C, the checksum of headers, region tables and log entries.

/// Castagnoli's polynomial, the lowest bit first.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// By byte: its effect on the checksum.
static TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (POLYNOMIAL & (crc & 1).wrapping_neg());
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// Puts its checksum into a structure, which is complete otherwise.
pub(super) fn seal(structure: &mut [u8]) {
    let checksum = Crc::of_start(structure).finish();
    structure[4..8].copy_from_slice(&checksum.to_le_bytes());
}

/// The checksum of bytes that come piece by piece.
pub(super) struct Crc(u32);

impl Crc {
    /// The checksum of a structure that begins with `bytes`. The bytes 4 to 7 count as zeroes: the
    /// checksum itself is there.
    pub(super) fn of_start(bytes: &[u8]) -> Crc {
        let mut crc = Crc(!0);
        let (start, rest) = bytes.split_at(bytes.len().min(4));
        crc.update(start);
        crc.update(&[0; 4]);
        crc.update(rest.get(4..).unwrap_or_default());
        crc
    }

    /// Adds the bytes that follow.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |crc, byte| {
            (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)]
        });
    }

    /// The checksum.
    pub(super) fn finish(self) -> u32 {
        !self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value() {
        let mut crc = Crc(!0);
        crc.update(b"12345");
        crc.update(b"6789");
        assert_eq!(crc.finish(), 0xe306_9283);
        let whole = Crc::of_start(b"head\xff\xff\xff\xff789").finish();
        let mut zeroed = Crc(!0);
        zeroed.update(b"head\x00\x00\x00\x00789");
        assert_eq!(whole, zeroed.finish());
    }
}
