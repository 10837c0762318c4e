//! An array of small numbers, one for each cluster of a file. Memory is allocated at the first
//! write to a chunk, so a sparse file needs memory for its data only.

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

    /// Makes it at least `len` numbers long.
    pub(super) fn grow(&mut self, len: u64) {
        if len > self.len {
            let chunks = Cells::new(len, self.order).chunks.len();
            self.chunks.resize_with(chunks, || None);
            self.len = len;
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

/// Numbers of 8 bits, in bulk.
impl Cells {
    /// The numbers from `index` to the end of its chunk. Empty if the chunk was never written, or
    /// if numbers are not 8 bits wide.
    pub(super) fn bytes(&self, index: u64) -> &[u8] {
        let (chunk, byte, _) = self.place(index);
        match self.chunks.get(chunk) {
            Some(Some(bytes)) if self.order == 3 => &bytes[byte..],
            _ => &[],
        }
    }

    /// The same, mutable; allocates the chunk. Empty past the end.
    pub(super) fn bytes_mut(&mut self, index: u64) -> &mut [u8] {
        let (chunk, byte, _) = self.place(index);
        match self.chunks.get_mut(chunk) {
            Some(bytes) if self.order == 3 => {
                &mut bytes.get_or_insert_with(|| vec![0; CHUNK].into_boxed_slice())[byte..]
            }
            _ => &mut [],
        }
    }
}

/// Numbers of one bit, in bulk.
impl Cells {
    /// Sets eight bits at once, from `index` on, a multiple of eight.
    pub(super) fn set_eight(&mut self, index: u64, bits: u8) {
        debug_assert!(self.order == 0 && index.is_multiple_of(8));
        let (chunk, byte, _) = self.place(index);
        if bits != 0
            && let Some(bytes) = self.chunks.get_mut(chunk)
        {
            bytes.get_or_insert_with(|| vec![0; CHUNK].into_boxed_slice())[byte] = bits;
        }
    }

    /// Whether `count` bits from `index` on all are `value`.
    pub(super) fn all(&self, index: u64, count: u64, value: bool) -> bool {
        let value = u8::from(value);
        let (mut at, end) = (index, index + count);
        while at < end {
            let (chunk, byte, bit) = self.place(at);
            let whole = bit == 0 && end - at >= 8;
            let bits = match self.chunks.get(chunk) {
                Some(Some(bytes)) => bytes[byte],
                _ => 0,
            };
            if whole {
                if bits != 0u8.wrapping_sub(value) {
                    return false;
                }
                at += 8;
            } else {
                if (bits >> bit) & 1 != value {
                    return false;
                }
                at += 1;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_of_every_width_are_independent() {
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

    #[test]
    fn runs_of_bits() {
        let mut cells = Cells::new(10_000, 0);
        for i in 100..2000 {
            cells.set(i, 1);
        }
        cells.set_eight(4000, 0xff);
        assert!(cells.all(100, 1900, true));
        assert!(!cells.all(99, 1900, true));
        assert!(!cells.all(101, 1900, true));
        assert!(cells.all(4000, 8, true));
        assert!(cells.all(2000, 2000, false));
        assert!(!cells.all(1999, 10, false));
        assert!(cells.all(5, 0, true));
    }

    fn cells_max(order: u32) -> u8 {
        Cells::new(0, order).max()
    }
}
