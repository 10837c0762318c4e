//! Bits, lowest first.

#[derive(Default)]
pub(super) struct BitWriter {
    pub(super) out: Vec<u8>,
    /// Bytes of `out` that are written.
    pub(super) len: usize,
    pub(super) bits: u64,
    pub(super) count: u32,
}

impl BitWriter {
    pub(super) fn clear(&mut self) {
        self.len = 0;
        self.bits = 0;
        self.count = 0;
    }

    pub(super) fn reserve(&mut self, bytes: usize) {
        let need = self.len + bytes + 16;
        if self.out.len() < need {
            self.out.resize(need.next_power_of_two(), 0);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len + self.count.div_ceil(8) as usize
    }

    /// At most 56 - 7 bits between flushes.
    #[inline(always)]
    pub(super) fn put(&mut self, bits: u64, count: u32) {
        self.bits |= bits << (self.count & 63);
        self.count += count;
    }

    #[inline(always)]
    pub(super) fn flush(&mut self) {
        if let Some(out) = self.out.get_mut(self.len..self.len + 8) {
            out.copy_from_slice(&self.bits.to_le_bytes());
        }
        let bytes = self.count >> 3;
        self.len += bytes as usize;
        self.bits >>= (bytes * 8) & 63;
        self.count &= 7;
    }

    pub(super) fn align(&mut self) {
        self.count = self.count.next_multiple_of(8);
        self.flush();
    }

    pub(super) fn finish(&mut self) -> &[u8] {
        self.align();
        &self.out[..self.len]
    }
}
