//! Finding zeroes in data.

/// Whether every byte is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Most data differ from zero early, so the chunks are short. The inner fold has no exit, so
    // that it becomes vector instructions.
    let mut chunks = bytes.chunks_exact(128);
    chunks.all(|chunk| {
        chunk.chunks_exact(8).fold(0, |all, word| {
            all | u64::from_ne_bytes(word.try_into().expect("8 bytes"))
        }) == 0
    }) && bytes[bytes.len() / 128 * 128..]
        .iter()
        .all(|byte| *byte == 0)
}
