//! bzip2, of which only whole streams are inflated.

use bzip2::{Decompress, Status};

use super::CodecError;

/// Fills `dst` from a bzip2 stream at the start of `src`. The stream must be complete, and hold
/// exactly that much. What follows it is ignored.
pub(super) fn inflate_bzip2(src: &[u8], dst: &mut [u8]) -> Result<(), CodecError> {
    let mut stream = Decompress::new(false);
    let expected = dst.len();
    let ended = stream.decompress(src, dst);
    let got = stream.total_out() as usize;
    match ended {
        Ok(Status::StreamEnd) if got == expected => Ok(()),
        Ok(Status::StreamEnd) => Err(CodecError::Short { got, expected }),
        Ok(_) if got == expected => Err(CodecError::Long { expected }),
        Ok(_) => Err(CodecError::Short { got, expected }),
        Err(_) => Err(CodecError::Damaged),
    }
}

#[cfg(test)]
mod tests {
    use bzip2::{Action, Compress, Compression};

    use super::*;

    #[test]
    fn a_stream_is_complete_and_has_its_size() {
        let data: Vec<u8> = (0..300_000u32).map(|n| (n / 7 % 251) as u8).collect();
        let mut src = Vec::with_capacity(400_000);
        let mut compress = Compress::new(Compression::best(), 0);
        let status = compress.compress_vec(&data, &mut src, Action::Finish);
        assert_eq!(status, Ok(Status::StreamEnd));
        let inflate = |src: &[u8], len| {
            let mut dst = vec![0xa5; len];
            inflate_bzip2(src, &mut dst).map(|()| dst)
        };
        assert_eq!(inflate(&src, data.len()).unwrap(), data);
        let more = [&src[..], b"more"].concat();
        assert_eq!(inflate(&more, data.len()).unwrap(), data);
        for len in [1, 1000, data.len() - 1, data.len() + 1] {
            assert!(inflate(&src, len).is_err(), "{len}");
        }
        for len in [0, 1, 4, 100, src.len() - 1] {
            assert!(inflate(&src[..len], data.len()).is_err(), "{len}");
        }
    }
}
