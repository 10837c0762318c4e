//! Filters over images: requests of the device pass through those over its top image, and what is read of
//! an image below through those over that one.

use std::ops::Range;
use std::sync::Arc;

use super::device::{Device, Layer};
use super::read::{Chain, over};
use super::{BackingSpec, FileDriver, FileSpec, FilterSpec, ImageSpec, Objects};
use crate::drivers::stream::Packing;
use crate::drivers::{Below, BoxFuture, Changing, Clear, Extent, Format, Mapping};
use crate::filters::{CopyOnRead, Filter, Over, Under, write_zeroes};
use crate::storage::{Event, Iov, Queue};
use crate::{Error, Result, printable};

/// Filters over an image, the uppermost first.
#[derive(Debug, Default)]
pub(super) struct Filters {
    nodes: Vec<Node>,
    /// The description by which they and the image were opened.
    spec: Option<Box<ImageSpec>>,
}

#[derive(Debug)]
struct Node {
    /// QEMU's name of the driver.
    name: &'static str,
    filter: Arc<dyn Filter>,
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

    /// Makes the filters over an image of this format, which is open, perhaps for writing.
    pub fn over(self, format: Format, objects: &Objects, write: bool) -> Result<Filters> {
        let mut filters = Filters::default();
        for spec in self.specs.iter().rev() {
            let filter = spec.filter(objects, write, filters.top(format))?;
            let name = spec.name();
            if filter.content().unit() > 1 {
                let why = format!("'{name}' is over a file, not over an image");
                return Err(Error::Refused(why));
            }
            filters.nodes.insert(0, Node { name, filter });
        }
        filters.spec = Some(self.spec);
        Ok(filters)
    }
}

/// What a filter lies on directly, if these are the others over an image of a format.
fn under(nodes: &[Node], format: Format) -> Under<'static> {
    let driver = format.driver();
    Under {
        name: nodes.first().map_or(driver.name, |node| node.name),
        can_compress: driver.can_compress && nodes.iter().all(|n| n.filter.passes_compressed()),
    }
}

impl Filters {
    /// Whether there are none, which every request asks.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// What is uppermost over an image of this format.
    fn top(&self, format: Format) -> Under<'static> {
        under(&self.nodes, format)
    }

    /// Whether bytes pass all of them as they are, so that what is known of the image below holds above.
    pub fn keep_bytes(&self) -> bool {
        self.nodes
            .iter()
            .all(|node| node.filter.content().is_kept())
    }

    /// Takes those away that change bytes.
    fn leave_out_changes(&mut self) {
        self.nodes.retain(|node| node.filter.content().is_kept());
    }

    /// Adds a filter below all others.
    pub fn copy_on_read(&mut self) {
        self.nodes.push(Node {
            name: "copy-on-read",
            filter: Arc::new(CopyOnRead::default()),
        });
    }

    /// Whether one of them is of use only over an image that is written.
    pub fn need_writing(&self) -> bool {
        self.nodes.iter().any(|node| node.filter.needs_writing())
    }

    /// Refuses another image below these filters, of this format and with filters of its own, over which
    /// one of them cannot be.
    pub fn check_over(&self, format: Format, own: &Filters) -> Result<()> {
        let mut below = own.top(format);
        for node in self.nodes.iter().rev() {
            let refused = |e: String| Error::Refused(printable(e.as_bytes()));
            node.filter.may_be_over(below).map_err(refused)?;
            below.name = node.name;
            below.can_compress &= node.filter.passes_compressed();
        }
        Ok(())
    }

    /// These over others.
    pub fn onto(mut self, lower: Filters) -> Filters {
        self.nodes.extend(lower.nodes);
        self.spec = self.spec.or(lower.spec);
        self
    }

    /// The description by which they and the image below were opened.
    pub fn spec(&self) -> Option<&ImageSpec> {
        self.spec.as_deref()
    }
}

impl Device {
    /// Whether requests pass through filters, over the top image or over one below it.
    pub(crate) fn has_filters(&self) -> bool {
        self.has_filters
    }

    /// Whether bytes pass the filters over the top image as they are.
    pub(crate) fn keeps_bytes(&self) -> bool {
        self.filtered().keeps_bytes()
    }

    /// How a job writes compressed data, if it can.
    pub(crate) fn packing(&self) -> Option<Packing> {
        let packed_by = self.top().image.packed_by()?;
        let rest = self.filtered();
        match rest.left().all(|filter| filter.passes_compressed()) {
            true if rest.keeps_bytes() => Some(Packing::Shorter(packed_by)),
            true => Some(Packing::Below),
            false => None,
        }
    }

    /// Takes those filters over the top image away that change bytes, for a job that moves what the image
    /// has and not what the disk reads as.
    pub(crate) fn leave_out_changes(&mut self) {
        self.filters.leave_out_changes();
        self.layers[0].filters.leave_out_changes();
        self.find_filters();
    }

    /// The description by which the device was opened: that of its filters, if it has some, else that
    /// of its top image.
    pub fn spec(&self) -> &ImageSpec {
        self.filters.spec().unwrap_or(self.top().whole_spec())
    }

    /// Whether its description has filters over the top image.
    pub fn is_filtered(&self) -> bool {
        self.filters.spec.is_some()
    }

    /// Where requests of the device go.
    pub(super) fn filtered(&self) -> Rest<'_> {
        Rest {
            over: &self.filters.nodes,
            ..Rest::of(self.chain())
        }
    }

    /// An image of the chain below the filters that change its bytes. As in QEMU, what is written to a whole image
    /// passes the others by.
    pub(super) fn codes_over(&self, depth: usize) -> Rest<'_> {
        let over = match depth {
            0 => &self.filters.nodes[..],
            _ => &[],
        };
        let chain = Chain::of(&self.layers[depth..]).expect("it is there");
        Rest {
            over,
            only_codes: true,
            ..Rest::of(chain)
        }
    }

    /// Ends the use of the filters over the top image. The first error is the result.
    pub(super) async fn close_filters(&self, queue: &Queue) -> Result<()> {
        let mut result = Ok(());
        let mut rest = self.filtered();
        while let Some(filter) = rest.next() {
            rest.passed += 1;
            let over = Over {
                queue,
                below: &rest,
            };
            result = result.and(filter.close(over).await);
        }
        result
    }
}

impl Layer {
    /// Whether a filter over it changes bytes, so that the image is not written without it. Those over a
    /// device's top image are the device's.
    pub fn is_changed_by_filters(&self) -> bool {
        !self.filters.keep_bytes()
    }

    /// The description by which the image and the filters over it were opened. Those over a device's top
    /// image are the device's: see [`Device::spec`].
    pub fn whole_spec(&self) -> &ImageSpec {
        self.filters.spec().unwrap_or(&self.spec)
    }

    /// The description of the image over another backing file, with the filters over it.
    pub fn whole_spec_over(&self, backing: BackingSpec) -> ImageSpec {
        let mut image = self.spec.clone();
        image.backing = backing;
        let Some(mut whole) = self.filters.spec().cloned() else {
            return image;
        };
        put_below(&mut whole.file, image);
        whole
    }
}

/// Replaces the image below filters.
fn put_below(file: &mut FileSpec, image: ImageSpec) {
    match &mut file.driver {
        FileDriver::Filter(filter) => put_below(&mut filter.file, image),
        driver => *driver = FileDriver::Image(Box::new(image)),
    }
}

/// The nodes below the filters that a request has passed. What is known of a range without reading it, this alone
/// tells.
#[derive(Clone, Copy)]
pub(super) struct Rest<'a> {
    /// The filters of a device, over whatever is on top.
    over: &'a [Node],
    chain: Chain<'a>,
    passed: usize,
    /// Whether filters that keep bytes are passed by.
    only_codes: bool,
}

impl<'a> Rest<'a> {
    /// Images of a chain, with the filters over the first one.
    pub fn of(chain: Chain<'a>) -> Self {
        Rest {
            over: &[],
            chain,
            passed: 0,
            only_codes: false,
        }
    }

    /// What lies below an image: these, the next one first.
    pub fn below(layers: &'a [Layer]) -> Option<Self> {
        Chain::of(layers).map(Rest::of)
    }

    /// Below all filters of the first image.
    pub fn image(self) -> Self {
        Rest {
            passed: usize::MAX,
            ..self
        }
    }

    /// The filters that are left.
    fn left(&self) -> impl Iterator<Item = &'a dyn Filter> {
        let nodes = self.over.iter().chain(&self.chain.first().filters.nodes);
        let (only_codes, passed) = (self.only_codes, self.passed);
        let filters = nodes.map(|node| &*node.filter);
        let counts = move |filter: &&dyn Filter| !(only_codes && filter.content().is_kept());
        filters.filter(counts).skip(passed)
    }

    /// The filter that is next.
    fn next(&self) -> Option<&'a dyn Filter> {
        self.left().next()
    }

    /// Whether bytes pass all of them as they are.
    pub fn keeps_bytes(&self) -> bool {
        self.left().all(|filter| filter.content().is_kept())
    }

    /// What a range is, as far as filters keep bytes.
    pub async fn find(self, queue: &Queue, offset: u64, limit: u64) -> Result<Found> {
        if !self.keeps_bytes() {
            return Ok(Found::Changed(0, limit));
        }
        let changes = |filters: &Filters| !filters.keep_bytes();
        let cut = self.chain.cut_at(changes);
        let upper = cut.map_or(self.chain, |(upper, _)| upper);
        let (depth, extent) = upper.resolve(queue, offset, limit).await?;
        let is_unallocated = matches!(extent.mapping, Mapping::Unallocated { .. });
        Ok(match cut {
            Some((_, lower)) if is_unallocated && upper.is_last(depth) && offset < lower.size() => {
                Found::Changed(depth + 1, extent.length.min(lower.size() - offset))
            }
            _ => Found::Mapped(depth, extent),
        })
    }

    /// What the next filter makes of a request; None: there is none, and the image has it.
    fn pass<'b>(
        &'b self,
        request: impl AsyncFnOnce(&dyn Filter, &dyn Below) -> Result<()> + 'b,
    ) -> Option<impl Future<Output = Result<()>> + 'b> {
        let filter = self.next()?;
        let below = Rest {
            passed: self.passed + 1,
            ..*self
        };
        Some(async move { request(filter, &below).await })
    }

    /// The images, for a change of the first one.
    fn written(&self) -> Result<Chain<'a>> {
        let chain = self.chain.first().write.map(|_| self.chain);
        chain.ok_or_else(|| Error::os(libc::EPERM))
    }
}

impl Below for Rest<'_> {
    fn size(&self) -> u64 {
        self.chain.size()
    }

    fn read<'a>(&'a self, queue: &'a Queue, offset: u64, iov: &'a Iov) -> Changing<'a> {
        let pass = async move |filter: &dyn Filter, below: &dyn Below| {
            filter.read(Over { queue, below }, offset, iov).await
        };
        match self.pass(pass) {
            Some(passing) => Box::pin(passing),
            None => Box::pin(self.chain.read_image(queue, offset, iov)),
        }
    }

    fn is_zero<'a>(&'a self, queue: &'a Queue, range: Range<u64>) -> BoxFuture<'a, Result<bool>> {
        Box::pin(async move {
            let _stay = self.chain.first().image.enter();
            let mut at = range.start;
            while at < range.end {
                let found = self.find(queue, at, range.end - at).await?;
                let Found::Mapped(_, extent) = found else {
                    return Ok(false);
                };
                match extent.mapping {
                    Mapping::Zero { .. } | Mapping::Unallocated { .. } => at += extent.length,
                    _ => return Ok(false),
                }
            }
            Ok(true)
        })
    }

    fn cluster_size(&self) -> Option<u64> {
        self.chain.first().cluster_size()
    }

    fn unit(&self) -> u64 {
        self.chain.first().image.zero_unit()
    }

    fn is_own<'a>(
        &'a self,
        queue: &'a Queue,
        range: Range<u64>,
    ) -> BoxFuture<'a, Result<(bool, u64)>> {
        Box::pin(async move {
            let length = range.end - range.start;
            let _stay = self.chain.first().image.enter();
            let (depth, extent) = self.chain.resolve(queue, range.start, length).await?;
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
            None => Box::pin(async move { self.written()?.write_image(queue, offset, iov).await }),
        }
    }

    fn write_compressed<'a>(&'a self, queue: &'a Queue, offset: u64, iov: &'a Iov) -> Changing<'a> {
        let pass = async move |filter: &dyn Filter, below: &dyn Below| {
            let over = Over { queue, below };
            filter.write_compressed(over, offset, iov).await
        };
        match self.pass(pass) {
            Some(passing) => Box::pin(passing),
            None => Box::pin(async move {
                let (chain, below) = (self.written()?, self.chain.behind());
                let context = over(queue, &below);
                chain
                    .first()
                    .image
                    .write_compressed(context, offset, iov)
                    .await
            }),
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
            None => Box::pin(async move {
                let (chain, below) = (self.written()?, self.chain.behind());
                let context = over(queue, &below);
                chain
                    .first()
                    .image
                    .write_packed(context, clusters, data)
                    .await
            }),
        }
    }

    fn clear<'a>(&'a self, queue: &'a Queue, range: Range<u64>, how: Clear) -> Changing<'a> {
        let own = range.clone();
        let pass = async move |filter: &dyn Filter, below: &dyn Below| {
            let over = Over { queue, below };
            match filter.clear(over, range.clone(), how).await {
                Err(e) if e.errno() == libc::EOPNOTSUPP => match how {
                    Clear::Zero | Clear::Unmap => write_zeroes(filter, over, range).await,
                    Clear::Discard => Ok(()),
                    Clear::Quickly => Err(e),
                },
                done => done,
            }
        };
        match self.pass(pass) {
            Some(passing) => Box::pin(passing),
            None => Box::pin(async move {
                let chain = self.written()?;
                match how {
                    Clear::Quickly => chain.zero_quickly(queue, own, Clear::Zero).await,
                    _ => chain.clear(queue, own, how).await,
                }
            }),
        }
    }

    fn flush<'a>(&'a self, queue: &'a Queue) -> Changing<'a> {
        let pass = async move |filter: &dyn Filter, below: &dyn Below| {
            filter.flush(Over { queue, below }).await
        };
        match self.pass(pass) {
            Some(passing) => Box::pin(passing),
            None => Box::pin(async move {
                let (chain, below) = (self.written()?, self.chain.behind());
                chain.first().image.flush(over(queue, &below)).await
            }),
        }
    }
}

/// What a range of a chain is, with the filters over its images.
pub(super) enum Found {
    /// What [`Chain::resolve`] finds.
    Mapped(usize, Extent),
    /// What filters over the image of this depth make of it, for so many bytes.
    Changed(usize, u64),
}

impl Chain<'_> {
    /// Reads below the filters of the first image. What is below another one with filters is asked of
    /// these.
    pub(super) async fn read_image(self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let _stay = self.first().image.enter();
        match self.cut_at_filters() {
            None => self.read_mapped(queue, offset, iov).await,
            Some((upper, lower)) => upper.read_over(lower, queue, offset, iov).await,
        }
    }

    /// Reads these images, and what they leave to those below, which have filters.
    pub(super) async fn read_over(
        self,
        lower: Chain<'_>,
        queue: &Queue,
        offset: u64,
        iov: &Iov,
    ) -> Result<()> {
        let (upper, lower) = (self, Rest::of(lower));
        let mut at = 0;
        while at < iov.len() {
            let (is_lower, length) = upper
                .leaves(lower.size(), queue, offset + at as u64, iov.len() - at)
                .await?;
            let part = iov.slice(at, length);
            match is_lower {
                true => {
                    upper.event(Event::ReadBackingAio);
                    lower.read(queue, offset + at as u64, &part).await?;
                }
                false => upper.read_by_plan(queue, offset + at as u64, &part).await?,
            }
            at += length;
        }
        Ok(())
    }

    /// Whether the start of a range is left to what is below these images, of which `below` bytes show,
    /// and for how much of it that holds.
    async fn leaves(
        self,
        below: u64,
        queue: &Queue,
        offset: u64,
        length: usize,
    ) -> Result<(bool, usize)> {
        let mut at = 0;
        let mut first = None;
        while at < length {
            let (guest, limit) = (offset + at as u64, (length - at) as u64);
            let (depth, extent) = self.resolve(queue, guest, limit).await?;
            let is_unallocated = matches!(extent.mapping, Mapping::Unallocated { .. });
            let is_left = is_unallocated && self.is_last(depth) && guest < below;
            if *first.get_or_insert(is_left) != is_left {
                break;
            }
            let mut part = extent.length;
            if is_left {
                part = part.min(below - guest);
            }
            at += part as usize;
        }
        Ok((first.unwrap_or(false), at))
    }
}
