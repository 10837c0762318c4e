//! What a stream is, by its first bytes.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Cursor, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

use super::raw::RawReader;
use crate::block::{Device, OpenOptions, Policy};
use crate::codec::{StreamCompression, Unpack};
use crate::drivers::signature::PROBED_BYTES;
use crate::drivers::stream::{BLOCK, Reader, Reading, StreamHead, read_full};
use crate::drivers::{BackingName, Format, probe_head};
use crate::names::Source;
use crate::storage::{Queue, is_zero};
use crate::{Error, Result};

/// Bytes that may tell the compression of a stream at most.
const MAX_TOLD: u64 = 1 << 20;

/// An image that is read once, from its start to its end.
pub struct ImageStream {
    /// From the start, decompressed.
    reader: Box<dyn Read + Send>,
    format: Format,
    /// The format was found by the content.
    is_guessed: bool,
    head: Head,
    /// Bytes that the disk may have at most.
    most: u64,
}

/// What the first bytes say.
enum Head {
    Raw,
    Image(Box<dyn StreamHead>),
    /// It must be kept as a file.
    Other(&'static str),
}

impl ImageStream {
    /// The image in a stream, which may be compressed ([`unpacked`]). None as the format: that is
    /// known by the content, too. Reads the start of the stream; blocks.
    ///
    /// # Errors
    /// Those of the reader. If the image is refused by `policy`, damaged, or encrypted.
    pub fn open(
        queue: &Queue,
        reader: Box<dyn Read + Send>,
        format: Option<Format>,
        policy: &Policy,
    ) -> Result<ImageStream> {
        ImageStream::open_unpacked(queue, unpacked(reader)?.0, format, policy)
    }

    /// As [`ImageStream::open`], of a stream that is not compressed.
    ///
    /// # Errors
    /// Those of [`ImageStream::open`].
    pub fn open_unpacked(
        queue: &Queue,
        mut reader: Box<dyn Read + Send>,
        format: Option<Format>,
        policy: &Policy,
    ) -> Result<ImageStream> {
        let mut head = Vec::new();
        fill(&mut *reader, &mut head, PROBED_BYTES)?;
        let is_guessed = format.is_none();
        let format = match format {
            Some(format) => format,
            None => probe_head(&head)?,
        };
        let found = if format == Format::RAW {
            Head::Raw
        } else if let Some(stream) = format.driver().stream
            && let Some(needed) = (stream.needed)(&head)?
        {
            fill(&mut *reader, &mut head, needed)?;
            Head::Image((stream.open)(queue, &head, policy.limits())?)
        } else {
            Head::Other(format.name())
        };
        Ok(ImageStream {
            reader: Box::new(Cursor::new(head).chain(reader)),
            format,
            is_guessed,
            head: found,
            most: policy.limits().map_or(i64::MAX as u64, |l| l.virtual_size),
        })
    }

    /// The format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Bytes of the disk; None: they are known at the end of the stream.
    pub fn size(&self) -> Option<u64> {
        match &self.head {
            Head::Raw | Head::Other(_) => None,
            Head::Image(head) => Some(head.size()),
        }
    }

    /// The backing file that the image names.
    pub fn backing(&self) -> Option<BackingName<'_>> {
        match &self.head {
            Head::Image(head) => head.backing(),
            _ => None,
        }
    }

    /// The data file that the image names, if its data are in another file.
    pub fn data_file(&self) -> Option<&[u8]> {
        match &self.head {
            Head::Image(head) => head.data_file(),
            _ => None,
        }
    }

    /// Why it must be kept as a file before it is converted; None: it need not.
    pub fn needs_file(&self) -> Option<String> {
        match &self.head {
            Head::Other(name) => Some(format!(
                "An image of format '{name}' cannot be converted from a stream as it comes"
            )),
            Head::Image(head) => {
                let what = head.needs_file()?;
                Some(format!("{what}: it can only be converted from a file"))
            }
            Head::Raw => None,
        }
    }

    /// The unit of ranges of the disk that the stream has in any order, in bytes; 1: it has the
    /// disk in order.
    pub fn unit(&self) -> u64 {
        match &self.head {
            Head::Raw | Head::Other(_) => 1,
            Head::Image(head) => head.unit(),
        }
    }

    /// Writes the stream to a file, which is empty. Blocks of zeroes become holes. Returns its
    /// length. Blocks.
    ///
    /// # Errors
    /// Those of the stream and of the file. Or if the stream is longer than `most` bytes.
    pub fn keep(mut self, file: &File, most: u64) -> io::Result<u64> {
        let mut buffer = vec![0; BLOCK];
        let mut length = 0;
        loop {
            let count = read_full(&mut *self.reader, &mut buffer)?;
            if length + count as u64 > most {
                let why = format!("The stream is longer than the {most} bytes that may be kept");
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
            }
            for (nth, part) in buffer[..count].chunks(64 << 10).enumerate() {
                if !is_zero(part) {
                    file.write_all_at(part, length + (nth as u64 * (64 << 10)))?;
                }
            }
            length += count as u64;
            if count < buffer.len() {
                file.set_len(length)?;
                return Ok(length);
            }
        }
    }

    /// Reads the stream to its end, and keeps nothing of it. Blocks.
    ///
    /// # Errors
    /// Those of the stream.
    pub fn skip(mut self) -> io::Result<()> {
        io::copy(&mut self.reader, &mut io::sink()).map(drop)
    }

    /// Opens the backing file that the image names, unless the policy of `options` forbids that.
    /// A relative name is relative to the current directory. Blocks.
    ///
    /// # Errors
    /// Those of [`Device::open`], or the policy forbids it.
    pub fn open_backing(&self, queue: &Queue, options: &OpenOptions) -> Result<Option<Device>> {
        let Some(BackingName { name, format }) = self.backing() else {
            return Ok(None);
        };
        let name = OsStr::from_bytes(name);
        if options.policy != Policy::Follow {
            return Err(Error::Refused(format!(
                "The image names a backing file ('{}'), which it may not open",
                name.display()
            )));
        }
        let behind = |e: Error| e.during("Could not open backing file");
        let format = format.map(String::from_utf8_lossy);
        let source = Source::with_driver(name, format.as_deref()).map_err(behind)?;
        let backing = Device::open(queue, &source, &options.clone().format(None));
        backing.map(Some).map_err(behind)
    }

    /// Bytes of its blocks: whole clusters.
    pub(super) fn block_len(&self) -> u64 {
        match &self.head {
            Head::Image(head) => head.block_unit().max(BLOCK as u64),
            _ => BLOCK as u64,
        }
    }

    /// The bytes, and what reads them: a raw image has at most `most` bytes.
    pub(super) fn into_reader(
        self,
        most: u64,
        reading: Reading,
    ) -> (Box<dyn Read + Send>, Box<dyn Reader>) {
        let reader: Box<dyn Reader> = match self.head {
            Head::Raw | Head::Other(_) => {
                Box::new(RawReader::new(most.min(self.most), self.is_guessed))
            }
            Head::Image(head) => head.into_reader(reading),
        };
        (self.reader, reader)
    }
}

/// The content of a stream that gzip, zstd, xz or bzip2 may have compressed, which is told by its
/// first bytes: what was undone, or None. Reads these bytes; blocks.
///
/// # Errors
/// Those of the reader; if the stream is empty; if it begins with skippable frames of zstd or LZ4 of
/// more than 1 MiB.
pub fn unpacked(
    mut reader: Box<dyn Read + Send>,
) -> Result<(Box<dyn Read + Send>, Option<StreamCompression>)> {
    let mut head = Vec::new();
    loop {
        let needed = StreamCompression::needed(&head);
        if needed > MAX_TOLD {
            let why = format!(
                "What tells the compression is behind more than {} MiB of skippable frames",
                MAX_TOLD >> 20
            );
            return Err(Error::Refused(why));
        }
        let there = head.len();
        fill(&mut *reader, &mut head, needed as usize)?;
        // It is all there, or the stream has ended.
        if head.len() == there {
            break;
        }
    }
    if head.is_empty() {
        return Err(Error::Refused("The stream is empty".into()));
    }
    let compression = StreamCompression::of(&head);
    let mut reader: Box<dyn Read + Send> = Box::new(Cursor::new(head).chain(reader));
    if let Some(compression) = compression {
        reader = Box::new(Unpack::new(reader, compression)?);
    }
    Ok((reader, compression))
}

/// Reads more of the stream, up to `length` bytes in all, as far as it has them.
fn fill(reader: &mut dyn Read, bytes: &mut Vec<u8>, length: usize) -> Result<()> {
    let there = bytes.len();
    bytes.resize(length.max(there), 0);
    let count = read_full(reader, &mut bytes[there..]);
    let count = count.map_err(|e| Error::Io(e).during("Could not read the start of the stream"))?;
    bytes.truncate(there + count);
    Ok(())
}
