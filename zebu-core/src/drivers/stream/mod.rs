//! Images that are read and written in order, without a look back: what a format does for that. The jobs that
//! convert from and to streams are in `jobs/stream` and `jobs/export`.
//!
//! Reading: `block`: parts of the stream; `held`: what came before its use was known; `piece`: what a reader
//! hands to the workers, by a `channel`. Writing: `packing`: how data are
//! compressed; `pipe`: bytes on their way.

mod block;
mod channel;
mod held;
mod packing;
mod piece;
mod pipe;

use std::fmt;
use std::sync::Arc;

pub use block::{BLOCK, Block, Pool, read_full};
pub use channel::{Channel, Stopped};
pub use held::{Held, Spill};
pub use packing::Packing;
pub use piece::{Clusters, Content, Fault, Piece, Sink, WAITING};
pub use pipe::{Pipe, Slice, StreamSink, changed};

use super::{BackingName, CreateValues, Limits};
use crate::Result;
use crate::storage::Queue;

/// How a format is read and written as a stream.
pub struct StreamFormat {
    /// How many bytes of a stream `open` needs, by its first sectors. None: the image must be kept as a
    /// file.
    pub needed: fn(&[u8]) -> Result<Option<usize>>,
    /// What these bytes say, of an image that is within the limits.
    pub open: OpenStream,
    /// A new image of so many bytes, with options of the format.
    pub write: Option<WriteStream>,
}

/// Reads the head of a stream from its first bytes.
pub type OpenStream = fn(&Queue, &[u8], Option<&Limits>) -> Result<Box<dyn StreamHead>>;
/// Plans a new image that is written as a stream.
pub type WriteStream = fn(u64, &CreateValues) -> Result<Box<dyn StreamImage>>;

impl fmt::Debug for StreamFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamFormat").finish_non_exhaustive()
    }
}

/// What the start of a stream says.
pub trait StreamHead: Send {
    /// Bytes of the disk.
    fn size(&self) -> u64;

    /// The unit of ranges of the disk that the stream has in any order, in bytes.
    fn unit(&self) -> u64;

    /// Bytes of which blocks of the stream must be multiples: a power of two.
    fn block_unit(&self) -> u64 {
        1
    }

    /// The backing file that the image names.
    fn backing(&self) -> Option<BackingName<'_>> {
        None
    }

    /// The data file that the image names, if its data are in another file.
    fn data_file(&self) -> Option<&[u8]> {
        None
    }

    /// Why it must be kept as a file before it is converted; None: it need not.
    fn needs_file(&self) -> Option<&'static str>;

    /// What reads it.
    fn into_reader(self: Box<Self>, reading: Reading) -> Box<dyn Reader>;
}

/// What a reader is given.
pub struct Reading {
    /// Whether there is a backing file, which shows where the image has nothing.
    pub has_backing: bool,
    /// Where parts of the stream are held that do not fit in memory.
    pub spill: Option<Spill>,
    /// Memory of blocks.
    pub pool: Arc<Pool>,
}

/// Reads a format as a stream.
pub trait Reader: Send {
    /// The block at offset `at` of the stream. All but the last one have the same length.
    fn block(&mut self, at: u64, block: Block, sink: &mut Sink<'_>) -> Result<(), Fault>;

    /// The stream has ended after `length` bytes. Returns the size of the disk in bytes.
    fn end(&mut self, length: u64, sink: &mut Sink<'_>) -> Result<u64, Fault>;
}

/// A new image that is written as a stream.
pub trait StreamImage: Send {
    /// The unit of writes in bytes.
    fn unit(&self) -> u64 {
        1
    }

    /// How its data are compressed; None: they are stored as they are.
    fn packing(&self) -> Option<Packing> {
        None
    }

    /// Bytes of the stream; None: they are known when it is written.
    fn length(&self) -> Option<u64> {
        None
    }

    /// Writes what precedes the data.
    fn begin(&mut self, pipe: &mut Pipe) -> Result<()>;

    /// Writes the disk's bytes at `offset`, which follow those that were written last.
    fn write(&mut self, _pipe: &mut Pipe, _offset: u64, _slice: &Slice) -> Result<()> {
        Err(changed())
    }

    /// Writes the compressed unit at `offset` of the disk.
    fn write_packed(&mut self, _pipe: &mut Pipe, _offset: u64, _data: &[u8]) -> Result<()> {
        Err(changed())
    }

    /// Sets the size of the disk, if that is known at its end.
    fn set_size(&mut self, _size: u64) {}

    /// Writes what follows the data.
    fn finish(self: Box<Self>, pipe: &mut Pipe) -> Result<()>;
}
