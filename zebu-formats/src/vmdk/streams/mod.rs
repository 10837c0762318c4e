//! streamOptimized VMDKs as streams, which are read and written in order.

mod read;
mod write;

use super::stream::StreamStart;
use crate::jobs::StreamFormat;

/// How they are read and written.
pub static STREAM: StreamFormat = StreamFormat {
    name: "vmdk",
    needed: read::needed,
    open: |head, policy| Ok(Box::new(read::VmdkHead::read(head, policy)?)),
    write: |size, options| {
        Ok(Box::new(write::Grains::new(StreamStart::new(
            size, options,
        )?)))
    },
};
