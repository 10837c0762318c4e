//! qcow2 images as streams.

mod read;

use crate::drivers::stream::StreamFormat;

/// How they are read as streams.
pub static STREAM: StreamFormat = StreamFormat {
    needed: |head| read::Qcow2Head::needed(head).map(Some),
    open: |queue, head, limits| Ok(Box::new(read::Qcow2Head::read(queue, head, limits)?)),
    write: None,
};
