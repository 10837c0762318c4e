//! qcow2 images as streams: `read`, and `write` by a `layout`, which is known before the first byte.

mod layout;
mod read;
mod write;

pub use layout::Layout;

use crate::drivers::stream::StreamFormat;

/// How they are read as streams. They are written by their [`Layout`].
pub static STREAM: StreamFormat = StreamFormat {
    needed: |head| read::Qcow2Head::needed(head).map(Some),
    open: |queue, head, limits| Ok(Box::new(read::Qcow2Head::read(queue, head, limits)?)),
    write: None,
};
