//! Filters over the top image: requests of the device pass through them.

use std::ops::Range;
use std::sync::Arc;

use super::device::Device;
use super::{FileDriver, FilterSpec, ImageSpec, Objects, Zeroing};
use crate::Result;
use crate::drivers::{Below, BoxFuture, Changing, Clear, Mapping};
use crate::filters::{CopyOnRead, Filter, Over};
use crate::storage::{Iov, Queue};

/// The filters of a device, the uppermost first.
#[derive(Debug, Default)]
pub(super) struct Filters {
    nodes: Box<[Arc<dyn Filter>]>,
    /// The description by which they and the image were opened.
    spec: Option<Box<ImageSpec>>,
}

/// What filters lie on, as they are described.
pub(super) struct Peeled {
    specs: Vec<FilterSpec>,
    spec: Box<ImageSpec>,
}

impl Peeled {
    /// Takes the filters from the description of an image, if they lie over an image. Those over a file
    /// are a part of that file.
    pub fn take(spec: ImageSpec) -> (Option<Peeled>, ImageSpec) {
        let (mut specs, mut common) = (Vec::new(), spec.options.common.clone());
        let mut file = &spec.file;
        if !spec.bare {
            return (None, spec);
        }
        while let FileDriver::Filter(filter) = &file.driver {
            specs.push((**filter).clone());
            file = &filter.file;
            let own = &file.options.common;
            let (above, below) = (common, own.clone());
            common = super::CommonOptions {
                read_only: match above.read_only {
                    Some(true) => Some(true),
                    _ => below.read_only,
                },
                force_share: above.force_share.or(below.force_share),
                direct: below.direct.or(above.direct),
                no_flush: below.no_flush.or(above.no_flush),
                discard: above.discard.or(below.discard),
                detect_zeroes: above.detect_zeroes.or(below.detect_zeroes),
            };
        }
        let FileDriver::Image(image) = &file.driver else {
            return (None, spec);
        };
        if specs.is_empty() {
            return (None, spec);
        }
        let mut image = (**image).clone();
        image.options.common = common;
        let spec = Box::new(spec);
        (Some(Peeled { specs, spec }), image)
    }

    /// Makes the filters over the image of a device, which is open.
    pub fn over(self, device: &mut Device, objects: &Objects) -> Result<()> {
        let write = device.is_writable();
        let mut nodes = Vec::new();
        let driver = device.top().format().driver();
        let (mut below, mut can_compress) = (driver.name, driver.can_compress);
        for spec in self.specs.iter().rev() {
            nodes.push(spec.filter(objects, write, below, can_compress)?);
            below = spec.name();
            can_compress &= below != "compress";
        }
        nodes.reverse();
        device.filters = Filters {
            nodes: nodes.into(),
            spec: Some(self.spec),
        };
        Ok(())
    }
}

impl Filters {
    /// Whether there are none, which every request asks.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Adds a filter below all others.
    pub fn copy_on_read(&mut self) {
        let filter: Arc<dyn Filter> = Arc::new(CopyOnRead::default());
        let nodes = std::mem::take(&mut self.nodes);
        self.nodes = nodes.into_iter().chain([filter]).collect();
    }
}

impl Device {
    /// The description by which the device was opened: that of its filters, if it has some, else that
    /// of its top image.
    pub fn spec(&self) -> &ImageSpec {
        self.filters.spec.as_deref().unwrap_or(&self.top().spec)
    }

    /// Whether its description has filters over the top image.
    pub fn is_filtered(&self) -> bool {
        self.filters.spec.is_some()
    }

    /// Where requests of a device with filters go.
    pub(super) fn filtered(&self) -> Rest<'_> {
        Rest {
            device: self,
            passed: 0,
        }
    }

    /// Ends the use of the filters. The first error is the result.
    pub(super) async fn close_filters(&self, queue: &Queue) -> Result<()> {
        let mut result = Ok(());
        for passed in 0..self.filters.nodes.len() {
            let rest = Rest {
                device: self,
                passed,
            };
            let closing =
                rest.pass(async |filter, below| filter.close(Over { queue, below }).await);
            if let Some(closing) = closing {
                result = result.and(closing.await);
            }
        }
        result
    }
}

/// The nodes of a device below the filters that a request has passed.
pub(super) struct Rest<'a> {
    device: &'a Device,
    passed: usize,
}

impl<'d> Rest<'d> {
    /// What the next filter makes of a request; None: there is none, and the image has it.
    fn pass<'a>(
        &'a self,
        request: impl AsyncFnOnce(&dyn Filter, &dyn Below) -> Result<()> + 'a,
    ) -> Option<impl Future<Output = Result<()>> + 'a> {
        let filter = self.device.filters.nodes.get(self.passed)?;
        let below = Rest {
            device: self.device,
            passed: self.passed + 1,
        };
        Some(async move { request(&**filter, &below).await })
    }
}

impl Below for Rest<'_> {
    fn size(&self) -> u64 {
        self.device.size()
    }

    fn read<'a>(&'a self, queue: &'a Queue, offset: u64, iov: &'a Iov) -> Changing<'a> {
        let pass = async move |filter: &dyn Filter, below: &dyn Below| {
            filter.read(Over { queue, below }, offset, iov).await
        };
        match self.pass(pass) {
            Some(passing) => Box::pin(passing),
            None => Box::pin(self.device.read_image(queue, offset, iov)),
        }
    }

    fn is_zero<'a>(&'a self, queue: &'a Queue, range: Range<u64>) -> BoxFuture<'a, Result<bool>> {
        Box::pin(self.device.is_zero(queue, range))
    }

    fn cluster_size(&self) -> Option<u64> {
        self.device.top().cluster_size()
    }

    fn unit(&self) -> u64 {
        self.device.top().image.zero_unit()
    }

    fn is_own<'a>(
        &'a self,
        queue: &'a Queue,
        range: Range<u64>,
    ) -> BoxFuture<'a, Result<(bool, u64)>> {
        Box::pin(async move {
            let length = range.end - range.start;
            let _stay = self.device.enter();
            let chain = self.device.chain();
            let (depth, extent) = chain.resolve(queue, range.start, length).await?;
            let is_unallocated = matches!(extent.mapping, Mapping::Unallocated { .. });
            Ok((depth == 0 && !is_unallocated, extent.length))
        })
    }

    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: &'a Iov) -> Changing<'a> {
        let pass = async move |filter: &dyn Filter, below: &dyn Below| {
            filter.write(Over { queue, below }, offset, iov).await
        };
        match self.pass(pass) {
            Some(passing) => Box::pin(passing),
            None => Box::pin(self.device.write_image(queue, offset, iov)),
        }
    }

    fn write_compressed<'a>(&'a self, queue: &'a Queue, offset: u64, iov: &'a Iov) -> Changing<'a> {
        let pass = async move |filter: &dyn Filter, below: &dyn Below| {
            let over = Over { queue, below };
            filter.write_compressed(over, offset, iov).await
        };
        match self.pass(pass) {
            Some(passing) => Box::pin(passing),
            None => Box::pin(self.device.write_image_compressed(queue, offset, iov)),
        }
    }

    fn write_packed<'a>(
        &'a self,
        queue: &'a Queue,
        clusters: &'a [(u64, Range<usize>)],
        data: &'a [u8],
    ) -> Changing<'a> {
        let pass = async move |filter: &dyn Filter, below: &dyn Below| {
            let over = Over { queue, below };
            filter.write_packed(over, clusters, data).await
        };
        match self.pass(pass) {
            Some(passing) => Box::pin(passing),
            None => Box::pin(self.device.write_image_packed(queue, clusters, data)),
        }
    }

    fn clear<'a>(&'a self, queue: &'a Queue, range: Range<u64>, how: Clear) -> Changing<'a> {
        let own = range.clone();
        let pass = async move |filter: &dyn Filter, below: &dyn Below| {
            filter.clear(Over { queue, below }, range, how).await
        };
        match (self.pass(pass), how) {
            (Some(passing), _) => Box::pin(passing),
            (None, Clear::Quickly) => {
                Box::pin(self.device.zero_image_quickly(queue, own, Zeroing::Keep))
            }
            (None, _) => Box::pin(self.device.clear_image(queue, own, how)),
        }
    }

    fn flush<'a>(&'a self, queue: &'a Queue) -> Changing<'a> {
        let pass = async move |filter: &dyn Filter, below: &dyn Below| {
            filter.flush(Over { queue, below }).await
        };
        match self.pass(pass) {
            Some(passing) => Box::pin(passing),
            None => Box::pin(self.device.flush_image(queue)),
        }
    }
}
