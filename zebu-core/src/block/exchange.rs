//! Exchanging images of a device's chain.
//!
//! Each exchange changes the list of images in one step without an await. So a future that is dropped, or
//! an error, leaves either the old chain or the new one; in the new one the old top image may not rest yet.
//!
//! An image that others are put on *rests*: everything in it is durable, its writer has ended, and its
//! file is locked like a backing file's. It is woken before it is written again.

use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;

use super::device::{Device, Layer, WriteMode};
use super::filtered::{Filters, Found, Rest};
use super::open::MAX_CHAIN;
use super::read::over;
use crate::drivers::{Below, Clear, Extent, Mapping, Preallocation};
use crate::storage::named::named_file;
use crate::storage::{self, LockRequest, Queue, Storage};
use crate::{Error, Result};

/// Bytes that are committed at once.
const COMMITTED: u64 = 1 << 20;

/// What an image had before it rested.
#[derive(Debug)]
pub(super) struct Resting {
    write: WriteMode,
    locks: Vec<Lock>,
}

/// A file that is locked: before its image rested, and now.
#[derive(Debug)]
struct Lock {
    storage: Arc<dyn Storage>,
    before: LockRequest,
    now: LockRequest,
}

impl Device {
    /// Puts an image on top, without a content of its own: what is written from now on goes there, and
    /// what was the top image stays as it is (an external snapshot). `overlay` is a device of that image
    /// alone, opened for writing with [`OpenOptions::no_backing`](super::OpenOptions::no_backing); its
    /// header names what is the top image now.
    ///
    /// Everything written so far is durable on return. The file of the old top image is locked like that
    /// of a backing file from then on, and its bitmaps are stored: they record no more changes.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if `overlay` is not such a device, has another size or filters of its own, or if
    /// a filter of this device cannot be over it. Those of [`Device::flush`] and of [`Device::close`] for
    /// the old top image. The chain is the old one then, and can be written unless a flush has failed.
    pub async fn put_on_top(&mut self, queue: &Queue, overlay: Device) -> Result<()> {
        let refuse = |why: &str| Err(Error::Refused(why.into()));
        if !self.is_writable() || !overlay.is_writable() {
            return Err(Error::os(libc::EPERM));
        }
        if overlay.layers.len() != 1 || overlay.top().backing().is_none() {
            return refuse("What is put on top must be one image that names a backing file");
        }
        if overlay.has_filters {
            return refuse(
                "What is put on top must have no filters: those of the disk stay over it",
            );
        }
        let none = Filters::default();
        self.filters.check_over(overlay.top().format(), &none)?;
        if overlay.size() != self.size() {
            return refuse("What is put on top must have the size of the disk");
        }
        if self.layers.len() >= MAX_CHAIN {
            return refuse("The backing chain is too long");
        }
        overlay.flush(queue).await?;
        self.flush(queue).await?;
        self.layers.splice(0..0, overlay.layers);
        self.find_filters();
        let Err(error) = self.rest(queue, 1).await else {
            return Ok(());
        };
        self.layers.remove(0);
        self.find_filters();
        // If it cannot be written any more, each write says so.
        let _ = self.wake(queue, 0).await;
        Err(error)
    }

    /// Takes the top image away, whose content the image below has by now: that one is written from now
    /// on. Filters of the device stay over it. The result is a device of the old top image alone, to be
    /// closed or dropped.
    ///
    /// Whatever was durable in the old top image is durable in the image below on return.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the image below was not open for writing when another one was put on it, has
    /// another size, or is one over which a filter of the device cannot be. [`Error::Locked`] if another program uses it. [`Error::Io`] if it cannot be
    /// read or flushed. The chain is the old one then.
    pub async fn take_off_top(&mut self, queue: &Queue) -> Result<Device> {
        let below = self.below_for_writing()?;
        self.filters.check_over(below.format(), &below.filters)?;
        let has_size = |device: &Device| match device.layers[1].size() == device.size() {
            true => Ok(()),
            false => Err(Error::Refused(
                "The image below has another size than the disk".into(),
            )),
        };
        // Before it is locked for writing, and once more: it may be read again.
        has_size(self)?;
        self.wake(queue, 1).await?;
        has_size(self)?;
        let (below, rest) = self.layers[1..].split_first().expect("it is there");
        let behind = Rest::below(rest);
        below.image.flush(over(queue, &behind)).await?;
        let top = self.layers.remove(0);
        self.find_filters();
        Ok(Device::new(vec![top], self.inspect))
    }

    /// Writes what the top image has to the image below, which was the top one before
    /// [`Device::put_on_top`]: the last step before [`Device::take_off_top`]. The disk does not change. An
    /// image below that is smaller is enlarged. Internal snapshots of the top image show the image below
    /// where they have nothing of their own, and change with it.
    ///
    /// # Errors
    ///
    /// As of [`Device::take_off_top`], and those of [`Device::write`] and of [`Device::resize`] for the
    /// image below. The chain is as before, and shows the same; the call may be repeated.
    pub async fn commit_top(&mut self, queue: &Queue) -> Result<()> {
        self.below_for_writing()?;
        self.wake(queue, 1).await?;
        let size = self.size();
        if self.layers[1].size() < size {
            let off = Preallocation::Off;
            self.resize_image(queue, 1, size, off).await?;
        }
        let mut at = 0;
        while at < size {
            let length = (size - at).min(COMMITTED);
            let found = self.filtered().image().find(queue, at, length).await?;
            at += match found {
                Found::Mapped(
                    0,
                    Extent {
                        mapping, length, ..
                    },
                ) if !matches!(mapping, Mapping::Unallocated { .. }) => {
                    let is_zero = matches!(mapping, Mapping::Zero { .. });
                    self.commit_range(queue, at..at + length, is_zero).await?;
                    length
                }
                Found::Mapped(_, Extent { length, .. }) | Found::Changed(_, length) => length,
            };
        }
        Ok(())
    }

    /// Writes a range of the disk to the image below the top one.
    async fn commit_range(&self, queue: &Queue, range: Range<u64>, is_zero: bool) -> Result<()> {
        let below = self.codes_over(1);
        if is_zero {
            return below.clear(queue, range, Clear::Zero).await;
        }
        let length = (range.end - range.start) as usize;
        let mut buffer = queue.buffer(length);
        // SAFETY: the buffer lives until the read and the write, awaited here, have ended.
        #[allow(unsafe_code)]
        let iov = unsafe { buffer.iov() }.slice(0, length);
        let image = self.filtered().image();
        image.read(queue, range.start, &iov).await?;
        below.write(queue, range.start, &iov).await
    }

    /// Replaces what the top image lies on by another chain of the same content, or by nothing if the
    /// top image has everything, and records its name and the name of its format in the header, durably.
    /// The result is a device of the old chain below, to be closed or dropped.
    ///
    /// # Errors
    ///
    /// Those of [`Device::set_backing`]. [`Error::Refused`] if the chain would be too long, if a filter over
    /// `below` writes (`copy-on-read`), or if the image can tell that it was made for another content. Those of [`Device::close`] for a `below` that
    /// is open for writing. The chain is the old one then.
    pub async fn replace_below(
        &mut self,
        queue: &Queue,
        below: Option<Device>,
        name: Option<&OsStr>,
        format: Option<&str>,
    ) -> Result<Option<Device>> {
        let mut below = below;
        if below.is_some() != name.is_some() {
            return Err(Error::Refused(
                "A backing chain and its name are given together".into(),
            ));
        }
        if let Some(below) = &mut below {
            if below.layers.len() >= MAX_CHAIN {
                return Err(Error::Refused("The backing chain is too long".into()));
            }
            if below.filters.need_writing() {
                let why = "A filter over the backing chain writes to it: it must not be written";
                return Err(Error::Refused(why.into()));
            }
            self.top().image.check_backing(&*below.top().image)?;
            below.flush(queue).await?;
            if below.is_writable() {
                below.close_filters(queue).await?;
            }
            below.rest(queue, 0).await?;
        }
        self.set_backing(queue, name, format).await?;
        let old = self.layers.split_off(1);
        self.layers
            .extend(below.into_iter().flat_map(Device::into_layers));
        self.find_filters();
        Ok((!old.is_empty()).then(|| Device::new(old, self.inspect)))
    }

    /// Replaces all images, with the filters over them, by those of another device of the same content
    /// (the end of a mirror). Both are open for writing, or both are not. Hooks stay. The result is a
    /// device of the old images, to be closed.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the size is another one, or only one of them is open for writing. Those of
    /// [`Device::flush`], for either. The chain is the old one then.
    pub async fn replace(&mut self, queue: &Queue, other: Device) -> Result<Device> {
        if other.size() != self.size() || other.is_writable() != self.is_writable() {
            return Err(Error::Refused(
                "A device is replaced by one of the same size that is written like it".into(),
            ));
        }
        self.flush(queue).await?;
        other.flush(queue).await?;
        let old = std::mem::replace(&mut self.layers, other.layers);
        let mut old = Device::new(old, self.inspect);
        old.filters = std::mem::replace(&mut self.filters, other.filters);
        old.find_filters();
        self.find_filters();
        Ok(old)
    }

    /// The image below the top one, which was open for writing.
    fn below_for_writing(&self) -> Result<&Layer> {
        let below = self.layers.get(1);
        below
            .filter(|below| below.write.is_some() || below.resting.is_some())
            .ok_or_else(|| Error::Refused("The image below was not opened for writing".into()))
    }

    /// Ends the writing of an image of the chain. If the future is dropped, it may be written still.
    async fn rest(&mut self, queue: &Queue, depth: usize) -> Result<()> {
        self.close_below(queue, depth).await?;
        let layer = &mut self.layers[depth];
        let Some(write) = layer.write else {
            return Ok(());
        };
        for file in layer.storages() {
            storage::end(&*file, queue).await?;
        }
        layer.write = None;
        layer.resting = Some(Resting {
            write,
            locks: layer.unlock_writing(),
        });
        Ok(())
    }

    /// Makes an image of the chain writable again.
    async fn wake(&mut self, queue: &Queue, depth: usize) -> Result<()> {
        let (layers, rest) = self.layers.split_at_mut(depth + 1);
        let (layer, behind) = (&mut layers[depth], Rest::below(rest));
        if let Some(resting) = &layer.resting {
            resting.lock_again()?;
        }
        if let Some(resting) = layer.resting.take() {
            layer.write = Some(resting.write);
        }
        let result = layer.image.reopen(over(queue, &behind)).await;
        if result.is_err() {
            let _ = self.rest(queue, depth).await;
        }
        result
    }

    /// Ends the writing of an image, if it is written.
    pub(super) async fn close_below(&mut self, queue: &Queue, depth: usize) -> Result<()> {
        let (layers, rest) = self.layers.split_at_mut(depth + 1);
        let (layer, behind) = (&mut layers[depth], Rest::below(rest));
        match layer.write {
            Some(_) => layer.image.close(over(queue, &behind)).await,
            None => Ok(()),
        }
    }
}

impl Layer {
    /// Locks its files like those of a backing file.
    fn unlock_writing(&self) -> Vec<Lock> {
        let mut locks = Vec::new();
        for (nth, storage) in self.storages().into_iter().enumerate() {
            let now = match nth {
                0 => self.format().driver().locks[0],
                _ => LockRequest::DATA_READ,
            };
            // The file of an image inside of another one is locked for that one.
            let Some(file) = named_file(&*storage).filter(|_| !storage.is_in_image()) else {
                continue;
            };
            let before = *crate::lock(file.locked());
            // It asks for less than before. If the file cannot be locked any more, it stays as it is.
            if before != LockRequest::NOTHING && file.lock(now).is_ok() {
                locks.push(Lock {
                    storage,
                    before,
                    now,
                });
            }
        }
        locks
    }
}

impl Resting {
    /// Takes the locks again that the image had. After an error it has those of a backing file.
    fn lock_again(&self) -> Result<()> {
        for (nth, lock) in self.locks.iter().enumerate() {
            if let Err(error) = lock.take(lock.before) {
                for taken in &self.locks[..nth] {
                    let _ = taken.take(taken.now);
                }
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Lock {
    fn take(&self, request: LockRequest) -> Result<()> {
        named_file(&*self.storage).map_or(Ok(()), |file| file.lock(request))
    }
}
