//! streamOptimized VMDKs as streams, which are read and written in order.

mod read;
mod write;

use super::stream::StreamStart;
use crate::drivers::stream::StreamFormat;

/// How they are read and written.
pub static STREAM: StreamFormat = StreamFormat {
    needed: |head| Ok(read::needed(head)),
    open: |_, head, limits| Ok(Box::new(read::VmdkHead::read(head, limits)?)),
    write: Some(|size, options| {
        Ok(Box::new(write::Grains::new(StreamStart::new(
            size, options,
        )?)))
    }),
};
