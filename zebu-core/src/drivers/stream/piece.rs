//! What the reader of a stream hands to the workers.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::block::{BLOCK, Block};
use super::channel::{Channel, Stopped};
use crate::Error;
use crate::codec::Inflater;

/// Bytes of the disk that wait for workers at most.
pub const WAITING: usize = 12 << 20;
/// Bytes of a range of the backing file that a worker copies.
const BACKING: u64 = 16 << 20;

/// A range of the disk.
#[derive(Debug)]
pub struct Piece {
    /// Where it starts on the disk.
    pub guest: u64,
    /// What it reads as.
    pub content: Content,
}

/// What a range of the disk reads as.
#[derive(Debug)]
pub enum Content {
    /// As a part of a block of the stream.
    Data(Arc<Block>, Range<usize>),
    /// As clusters that follow each other, each of them compressed.
    Compressed(Clusters),
    /// As zeroes.
    Zero(u64),
    /// As the backing file.
    Backing(u64),
}

/// Compressed clusters that follow each other on the disk.
#[derive(Debug)]
pub struct Clusters {
    /// How they are inflated.
    pub inflater: Inflater,
    /// Bytes of the disk that they are: the last cluster may reach past its end.
    pub length: u64,
    /// Where each is in `bytes`, and where it was in the stream.
    pub places: Vec<(Range<usize>, u64)>,
    /// Their data.
    pub bytes: Vec<u8>,
}

/// Why a reader has not read on.
#[derive(Debug)]
pub enum Fault {
    /// The workers have stopped.
    Stopped,
    /// The stream is wrong.
    Stream(Error),
}

impl From<Stopped> for Fault {
    fn from(_: Stopped) -> Self {
        Fault::Stopped
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault::Stream(error)
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Fault::Stream(error.into())
    }
}

/// Where the reader of a stream puts the pieces of the disk.
pub struct Sink<'a> {
    channel: &'a Channel<Piece>,
    /// Compressed clusters that others may follow.
    clusters: Option<(u64, Clusters)>,
}

impl<'a> Sink<'a> {
    /// A sender of pieces into `channel`.
    pub fn new(channel: &'a Channel<Piece>) -> Self {
        Sink {
            channel,
            clusters: None,
        }
    }

    /// A part of a block is the disk's bytes at `guest`.
    pub fn data(
        &mut self,
        guest: u64,
        block: Arc<Block>,
        range: Range<usize>,
    ) -> Result<(), Stopped> {
        let bytes = range.len();
        self.send(bytes, guest, Content::Data(block, range))
    }

    /// A whole block is the disk's bytes at `guest`.
    pub fn block(&mut self, guest: u64, block: Block) -> Result<(), Stopped> {
        let length = block.len();
        self.send(length, guest, Content::Data(Arc::new(block), 0..length))
    }

    /// The cluster at `guest` has this compressed data, which were at `host` of the stream.
    /// `length` bytes of it are inside the disk.
    pub fn compressed(
        &mut self,
        guest: u64,
        length: u64,
        inflater: Inflater,
        host: u64,
        bytes: &[u8],
    ) -> Result<(), Stopped> {
        let follows = self.clusters.as_ref().is_some_and(|(start, clusters)| {
            start + clusters.length == guest
                && clusters.length < BLOCK as u64
                && clusters.inflater == inflater
        });
        if !follows {
            self.flush()?;
        }
        let (_, clusters) = self.clusters.get_or_insert_with(|| {
            let clusters = Clusters {
                inflater,
                length: 0,
                places: Vec::new(),
                bytes: Vec::new(),
            };
            (guest, clusters)
        });
        let at = clusters.bytes.len();
        clusters.bytes.extend(bytes);
        clusters.places.push((at..clusters.bytes.len(), host));
        clusters.length += length;
        Ok(())
    }

    /// `length` bytes at `guest` are zero.
    pub fn zero(&mut self, guest: u64, length: u64) -> Result<(), Stopped> {
        self.send(0, guest, Content::Zero(length))
    }

    /// `length` bytes at `guest` are those of the backing file.
    pub fn backing(&mut self, guest: u64, length: u64) -> Result<(), Stopped> {
        let end = guest + length;
        let mut at = guest;
        while at < end {
            let next = (at / BACKING + 1).saturating_mul(BACKING).min(end);
            self.send(BLOCK, at, Content::Backing(next - at))?;
            at = next;
        }
        Ok(())
    }

    /// Hands over what is kept back.
    pub fn flush(&mut self) -> Result<(), Stopped> {
        match self.clusters.take() {
            None => Ok(()),
            Some((guest, clusters)) => {
                let bytes = clusters.bytes.len() + clusters.length as usize;
                let content = Content::Compressed(clusters);
                self.channel.send(bytes, Piece { guest, content })
            }
        }
    }

    fn send(&mut self, bytes: usize, guest: u64, content: Content) -> Result<(), Stopped> {
        self.flush()?;
        self.channel.send(bytes, Piece { guest, content })
    }
}
