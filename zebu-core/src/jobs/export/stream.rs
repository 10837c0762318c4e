//! A stream as the target of a conversion. Writes are started in the order of the disk; each has
//! its bytes in the pipe before the next one starts.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::qcow2::{Layout, Places, Stored};
use crate::Result;
use crate::drivers::stream::{PackedOrder, Pipe, Slice, changed};
use crate::jobs::packing::Packing;
use crate::lock;
use crate::storage::Buffer;

/// A stream that is written, shared by the workers of a conversion.
#[derive(Clone)]
pub struct OutStream(Arc<Shared>);

struct Shared {
    cluster_size: u64,
    packing: Option<Packing>,
    stop: Box<dyn Fn() + Send + Sync>,
    state: Mutex<State>,
}

enum State {
    /// Nothing is written: the layout learns what would be.
    Survey(Layout),
    Writing(Order, Pipe),
    /// It was finished; its length in bytes.
    Finished(u64),
}

/// In what order a stream has the disk.
pub enum Order {
    /// All of it, so many bytes, of which `at` are written.
    Raw { at: u64, size: u64 },
    /// What a layout has.
    Qcow2(Box<InLayout>),
    /// Packed units of a registered format.
    Packed(Box<dyn PackedOrder>),
}

/// A place in a layout.
pub struct InLayout {
    layout: Layout,
    places: Places,
    /// The number of the next entry.
    next: usize,
    /// The range of the disk that is still to come of the entry before that.
    rest: Range<u64>,
    /// Where data begin in the stream.
    start: u64,
}

impl Order {
    /// The whole disk.
    pub fn raw(size: u64) -> Self {
        Order::Raw { at: 0, size }
    }

    /// What `layout` has.
    pub fn qcow2(layout: Layout) -> Self {
        Order::Qcow2(Box::new(InLayout {
            places: layout.places(),
            layout,
            next: 0,
            rest: 0..0,
            start: 0,
        }))
    }

    fn write(&mut self, pipe: &mut Pipe, offset: u64, slice: &Slice) -> Result<()> {
        match self {
            Order::Raw { at, .. } => {
                pipe.send_zeroes(offset.checked_sub(*at).ok_or_else(changed)?)?;
                *at = offset + slice.len() as u64;
                Ok(pipe.send_slice(slice.clone())?)
            }
            Order::Qcow2(place) => place.write(pipe, offset, slice),
            Order::Packed(_) => Err(changed()),
        }
    }

    /// Bytes of the stream; None: they are known when it is written.
    pub fn length(&self) -> Option<u64> {
        match self {
            Order::Raw { size, .. } => Some(*size),
            Order::Qcow2(place) => Some(place.layout.length()),
            Order::Packed(_) => None,
        }
    }
}

impl OutStream {
    /// A stream that learns its layout.
    pub fn survey(layout: Layout) -> Self {
        OutStream(Arc::new(Shared {
            cluster_size: layout.cluster_size(),
            packing: layout.packing(),
            stop: Box::new(|| ()),
            state: Mutex::new(State::Survey(layout)),
        }))
    }

    /// A stream that is written. Writes what precedes the data.
    pub fn new(mut order: Order, mut pipe: Pipe) -> Result<Self> {
        let (cluster_size, packing) = match &mut order {
            Order::Raw { size, .. } => {
                // Of a stream whose size is not known, it is 0 yet.
                if *size > 0 {
                    pipe.expect(*size)?;
                }
                (1, None)
            }
            Order::Qcow2(place) => {
                place.layout.write_tables(&mut pipe)?;
                place.start = pipe.length();
                (place.layout.cluster_size(), place.layout.packing())
            }
            Order::Packed(order) => {
                order.begin(&mut pipe)?;
                (order.unit(), Some(Packing::Zlib))
            }
        };
        Ok(OutStream(Arc::new(Shared {
            cluster_size,
            packing,
            stop: Box::new(pipe.stopper()),
            state: Mutex::new(State::Writing(order, pipe)),
        })))
    }

    /// The unit of writes in bytes.
    pub fn cluster_size(&self) -> u64 {
        self.0.cluster_size
    }

    /// How it compresses.
    pub(in crate::jobs) fn packing(&self) -> Option<Packing> {
        self.0.packing
    }

    /// Makes all writes fail.
    pub fn stop(&self) {
        (self.0.stop)();
    }

    /// Sets the size of a raw image, which is known at its end.
    pub fn set_size(&self, new: u64) {
        if let State::Writing(Order::Raw { size, .. }, _) = &mut *lock(&self.0.state) {
            *size = new;
        }
    }

    /// The layout that was learned; empty if it was none.
    pub fn into_layout(self) -> Layout {
        let shared = Arc::into_inner(self.0).expect("the job has ended");
        let state = shared.state.into_inner().unwrap_or_else(|e| e.into_inner());
        match state {
            State::Survey(layout) => layout,
            _ => unreachable!("only asked of a survey"),
        }
    }

    /// Bytes of the stream, after it was finished.
    pub fn length(&self) -> u64 {
        match &*lock(&self.0.state) {
            State::Finished(length) => *length,
            _ => 0,
        }
    }

    /// Writes ranges of the disk. Their bytes are in `buffer`, which begins at `start` of the disk;
    /// its content is unspecified afterwards.
    pub fn write(&self, start: u64, ranges: Vec<Range<u64>>, buffer: &mut Buffer) -> Result<()> {
        let mut taken: Option<Slice> = None;
        for range in ranges {
            match &mut *lock(&self.0.state) {
                State::Survey(layout) => layout.push_range(range.start, range.end),
                State::Writing(order, pipe) => {
                    let taken = taken.get_or_insert_with(|| pipe.exchange(buffer));
                    let at = (range.start - start) as usize..(range.end - start) as usize;
                    order.write(pipe, range.start, &taken.slice(at))?;
                }
                State::Finished(_) => return Err(changed()),
            }
        }
        Ok(())
    }

    /// Writes compressed clusters.
    pub fn write_packed(&self, clusters: &[(u64, Range<usize>)], data: &[u8]) -> Result<()> {
        let size = self.0.cluster_size;
        for (offset, range) in clusters {
            match &mut *lock(&self.0.state) {
                State::Survey(layout) => layout.push(Stored::Compressed {
                    cluster: offset / size,
                    length: range.len() as u64,
                }),
                State::Writing(Order::Qcow2(place), pipe) => {
                    place.write_packed(pipe, offset / size, &data[range.clone()])?;
                }
                State::Writing(Order::Packed(order), pipe) => {
                    order.write(pipe, *offset, &data[range.clone()])?;
                }
                State::Writing(Order::Raw { .. }, _) | State::Finished(_) => return Err(changed()),
            }
        }
        Ok(())
    }

    /// Writes what follows the data, and waits until all is written.
    pub fn finish(&self) -> Result<()> {
        let mut state = lock(&self.0.state);
        if let State::Survey(_) = &*state {
            return Ok(());
        }
        let State::Writing(order, mut pipe) = std::mem::replace(&mut *state, State::Finished(0))
        else {
            return Err(changed());
        };
        match order {
            Order::Raw { at, size } => pipe.send_zeroes(size.saturating_sub(at))?,
            Order::Qcow2(mut place) => place.finish(&mut pipe)?,
            Order::Packed(order) => order.finish(&mut pipe)?,
        }
        *state = State::Finished(pipe.finish()?);
        Ok(())
    }
}

impl std::fmt::Debug for OutStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OutStream").finish_non_exhaustive()
    }
}

impl InLayout {
    /// Ends the present entry with zeroes, and begins the next one. Returns it.
    fn advance(&mut self, pipe: &mut Pipe) -> Result<Option<Stored>> {
        pipe.send_zeroes(self.rest.end - self.rest.start)?;
        self.rest = 0..0;
        let Some(stored) = self.layout.stored(self.next) else {
            return Ok(None);
        };
        self.next += 1;
        let at = self.start + self.places.place(stored);
        pipe.send_zeroes(at - pipe.length())?;
        if let Stored::Plain { first, count } = stored {
            let size = self.layout.cluster_size();
            self.rest = first * size..(first + count) * size;
        }
        Ok(Some(stored))
    }

    fn write(&mut self, pipe: &mut Pipe, offset: u64, slice: &Slice) -> Result<()> {
        let mut done = 0;
        while done < slice.len() {
            let at = offset + done as u64;
            if at >= self.rest.end {
                match self.advance(pipe)? {
                    Some(Stored::Plain { .. }) => continue,
                    _ => return Err(changed()),
                }
            }
            pipe.send_zeroes(at.checked_sub(self.rest.start).ok_or_else(changed)?)?;
            let count = (slice.len() - done).min((self.rest.end - at) as usize);
            pipe.send_slice(slice.slice(done..done + count))?;
            done += count;
            self.rest.start = at + count as u64;
        }
        Ok(())
    }

    fn write_packed(&mut self, pipe: &mut Pipe, cluster: u64, data: &[u8]) -> Result<()> {
        let expected = Stored::Compressed {
            cluster,
            length: data.len() as u64,
        };
        loop {
            match self.advance(pipe)? {
                Some(stored) if stored == expected => return Ok(pipe.send(data.to_vec())?),
                // It reads as zeroes now.
                Some(Stored::Plain { .. }) => {}
                _ => return Err(changed()),
            }
        }
    }

    fn finish(&mut self, pipe: &mut Pipe) -> Result<()> {
        while let Some(stored) = self.advance(pipe)? {
            if let Stored::Compressed { .. } = stored {
                return Err(changed());
            }
        }
        // So that the last sector of compressed data is whole.
        Ok(pipe.pad(self.layout.cluster_size())?)
    }
}
