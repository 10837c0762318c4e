//! The image that is open, and the requests in flight on it.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use zebu::block::{Device, Format, NATIVE_NEEDS_DIRECT, Preallocation};
use zebu::names::Source;
use zebu::storage::{Buffer, EngineKind, Handle, Queue, QueueOptions};

use super::opening::{Opening, changed};
use super::overlay::Overlay;
use crate::arguments::untrusted;
use crate::images::open;
use crate::program::Context;

/// Requests in flight at most; a further one waits for all of them.
const MAX_IN_FLIGHT: usize = 1024;
/// Bytes of requests in flight at most, unless a single one has more.
const MAX_BYTES_IN_FLIGHT: usize = 256 << 20;
/// The largest buffer kept for the next request.
const MAX_SPARE: usize = 1 << 20;

/// The open image.
pub struct OpenImage {
    /// The queue of its requests.
    pub queue: Queue,
    /// The image.
    pub device: Rc<Device>,
    /// The options that it was opened with.
    pub opening: Opening,
    /// The overlay that writes go to, with `-s`.
    pub overlay: Option<Rc<Overlay>>,
    in_flight: Vec<Handle<()>>,
    bytes_in_flight: usize,
    spare: Option<Buffer>,
}

impl OpenImage {
    /// An image that was just opened.
    pub fn new(
        queue: Queue,
        device: Device,
        opening: Opening,
        overlay: Option<Rc<Overlay>>,
    ) -> OpenImage {
        OpenImage {
            queue,
            device: Rc::new(device),
            opening,
            overlay,
            in_flight: Vec::new(),
            bytes_in_flight: 0,
            spare: None,
        }
    }

    /// Opens an image. With `-s`, creates the overlay that writes go to.
    ///
    /// # Errors
    ///
    /// The text that follows `can't open device NAME: `.
    pub fn open(context: &Context, opening: &Opening) -> Result<OpenImage, String> {
        let overlay = match opening.snapshot && !opening.read_only {
            true => Some(Rc::new(Overlay::new(context, opening)?)),
            false => None,
        };
        Self::open_over(context, opening, overlay)
    }

    /// Opens an image, or the overlay if there is one.
    ///
    /// # Errors
    ///
    /// As [`OpenImage::open`].
    pub fn open_over(
        context: &Context,
        opening: &Opening,
        overlay: Option<Rc<Overlay>>,
    ) -> Result<OpenImage, String> {
        if opening.force_share && !opening.read_only {
            return Err("force-share=on can only be used with read-only images".into());
        }
        if opening.copy_on_read && opening.read_only {
            return Err("Can't use copy-on-read on read-only device".into());
        }
        let engine = opening.engine.unwrap_or_else(EngineKind::best);
        if engine == EngineKind::Native && !opening.cache_mode().is_direct() {
            return Err(NATIVE_NEEDS_DIRECT.into());
        }
        let (source, format) = match &overlay {
            Some(overlay) => (overlay.source(), None),
            None => (opening.source(), opening.format.as_ref()),
        };
        let format = format.map(|name| open::format(name)).transpose();
        let format = format.map_err(|e| e.to_string())?.flatten();
        if let Some(name) = &opening.name {
            let name = Source::Name(name.clone());
            let allowed = untrusted::policy(context).check_source(&name);
            allowed.map_err(|e| e.to_string())?;
        }
        let source = changed(source, &opening.changes);
        let spec = source.resolve(None, format).map_err(|e| e.to_string())?;
        let discard = match spec.options.common.discard {
            Some(_) => None,
            None => Some(!opening.ignore_discards),
        };
        let queue = Queue::new(QueueOptions::default().engine(engine));
        let queue = queue.map_err(|e| e.to_string())?;
        let how = untrusted::defaults(context)
            .format(format)
            .write(!opening.read_only)
            .cache(opening.cache_mode())
            .force_share(opening.force_share)
            .copy_on_read(opening.copy_on_read)
            .discard(discard);
        let device =
            open::repaired(context, &queue, &source, &how).map_err(|error| error.to_string())?;
        Ok(OpenImage::new(queue, device, opening.clone(), overlay))
    }

    /// Whether a range lies inside the disk.
    pub fn has_range(&self, offset: u64, length: u64) -> bool {
        let size = self.device.size();
        offset <= size && length <= size - offset
    }

    /// A buffer of at least `length` bytes of any content. An error: there is no memory.
    pub fn take_buffer(&mut self, length: usize) -> zebu::Result<Buffer> {
        match self.spare.take() {
            Some(buffer) if buffer.len() >= length => Ok(buffer),
            _ => Ok(Buffer::try_new(length)?),
        }
    }

    /// Keeps a buffer for the next request.
    pub fn give_buffer(&mut self, buffer: Buffer) {
        if buffer.len() <= MAX_SPARE {
            self.spare = Some(buffer);
        }
    }

    /// Starts a request of `bytes`, which proceeds whenever the session waits. It prints nothing
    /// before the next prompt, as in qemu-io.
    pub fn start(&mut self, bytes: usize, request: impl Future<Output = ()> + 'static) {
        if self.in_flight.len() >= MAX_IN_FLIGHT
            || self.bytes_in_flight.saturating_add(bytes) > MAX_BYTES_IN_FLIGHT
        {
            self.finish_all();
        }
        self.in_flight.push(self.queue.spawn(request));
        self.bytes_in_flight += bytes;
    }

    /// Whether there may be requests in flight.
    pub fn is_busy(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Waits for all requests in flight.
    pub fn finish_all(&mut self) {
        let handles = std::mem::take(&mut self.in_flight);
        self.bytes_in_flight = 0;
        self.queue.block_on(async {
            for handle in handles {
                handle.await;
            }
        });
    }

    /// Lets requests in flight go on without waiting for them.
    pub fn advance(&self) {
        if !self.is_busy() {
            return;
        }
        let mut polled = false;
        self.queue.block_on(poll_fn(|context| {
            if std::mem::replace(&mut polled, true) {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        }));
    }

    /// Resizes the disk after requests in flight have ended.
    pub fn resize(&mut self, size: u64, preallocation: Preallocation) -> zebu::Result<()> {
        if self.device.top().format() == Format::QCOW2 && !size.is_multiple_of(512) {
            let text = "The new size must be a multiple of 512";
            return Err(zebu::Error::Refused(text.into()));
        }
        let (device, queue) = self.own_device()?;
        queue.block_on(device.resize(queue, size, preallocation))
    }

    /// Writes to the VM state after requests in flight have ended.
    pub fn write_vm_state(
        &mut self,
        position: u64,
        buffer: Buffer,
        length: usize,
    ) -> (Buffer, zebu::Result<()>) {
        match self.own_device() {
            Ok((device, queue)) => {
                queue.block_on(device.write_vm_state(queue, position, buffer, length))
            }
            Err(error) => (buffer, Err(error)),
        }
    }

    /// The device for a change that needs exclusive access.
    fn own_device(&mut self) -> zebu::Result<(&mut Device, &Queue)> {
        self.finish_all();
        match Rc::get_mut(&mut self.device) {
            Some(device) => Ok((device, &self.queue)),
            None => Err(zebu::Error::Refused("Requests are in flight".into())),
        }
    }

    /// Closes the image. Everything is durable afterwards.
    pub fn close(mut self) -> zebu::Result<()> {
        // Suspended requests would wait for ever.
        if let Some(debug) = self.device.top().file().blkdebug() {
            debug.resume_all();
        }
        self.finish_all();
        match Rc::try_unwrap(self.device) {
            Ok(device) => self.queue.block_on(device.close(&self.queue)),
            Err(shared) => self.queue.block_on(shared.flush(&self.queue)),
        }
    }
}
