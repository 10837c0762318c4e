//! An array of small numbers for the clusters of a file, as long as the file
//! has clusters, its memory taken as it is written to: a sparse file of many
//! clusters costs no more than it has data.

/// Bytes of one piece of the array.
const CHUNK: usize = 1 << 16;

/// Numbers of 1, 2, 4 or 8 bits, all 0 at first.
pub(super) struct Cells {
    /// Bits of a number, as a power of two: 0 to 3.
    order: u32,
    chunks: Vec<Option<Box<[u8]>>>,
    len: u64,
}

impl Cells {
    /// `len` numbers of `1 << order` bits.
    pub(super) fn new(len: u64, order: u32) -> Self {
        debug_assert!(order <= 3);
        let per_chunk = (CHUNK as u64) << (3 - order);
        let chunks = len.div_ceil(per_chunk) as usize;
        Cells {
            order,
            chunks: std::iter::repeat_with(|| None).take(chunks).collect(),
            len,
        }
    }

    /// How many there are.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The largest number.
    pub(super) fn max(&self) -> u8 {
        (0xff_u32 >> (8 - (1 << self.order))) as u8
    }

    /// Chunk, byte in it and bit in that byte.
    fn place(&self, index: u64) -> (usize, usize, u32) {
        let byte = index >> (3 - self.order);
        let bit = (index as u32 & ((8 >> self.order) - 1)) << self.order;
        (
            (byte / CHUNK as u64) as usize,
            (byte % CHUNK as u64) as usize,
            bit,
        )
    }

    /// Number `index`; 0 past the end.
    pub(super) fn get(&self, index: u64) -> u8 {
        let (chunk, byte, bit) = self.place(index);
        match self.chunks.get(chunk) {
            Some(Some(bytes)) => (bytes[byte] >> bit) & self.max(),
            _ => 0,
        }
    }

    /// Sets number `index`; nothing happens past the end.
    pub(super) fn set(&mut self, index: u64, value: u8) {
        let (chunk, byte, bit) = self.place(index);
        let max = self.max();
        debug_assert!(value <= max);
        if let Some(bytes) = self.chunks.get_mut(chunk) {
            let bytes = bytes.get_or_insert_with(|| vec![0; CHUNK].into_boxed_slice());
            bytes[byte] = (bytes[byte] & !(max << bit)) | (value << bit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_holds_its_numbers_apart() {
        for order in 0..=3 {
            let mut cells = Cells::new(1_000_000, order);
            let value = |i: u64| (i.wrapping_mul(0x9e37_79b9) >> 7) as u8 & cells_max(order);
            for i in (0..1_000_000).step_by(7) {
                cells.set(i, value(i));
            }
            for i in 0..1_000_000 {
                let expected = if i % 7 == 0 { value(i) } else { 0 };
                assert_eq!(cells.get(i), expected, "order {order}, index {i}");
            }
            assert_eq!(cells.get(u64::MAX >> 8), 0);
        }
    }

    fn cells_max(order: u32) -> u8 {
        Cells::new(0, order).max()
    }
}
