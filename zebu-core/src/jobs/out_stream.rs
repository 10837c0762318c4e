//! A stream as the target of a conversion. Writes are started in the order of the disk; each has
//! its bytes in the pipe before the next one starts.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::Result;
use crate::drivers::qcow2::stream::Layout;
use crate::drivers::stream::{Packing, Pipe, Slice, StreamImage, changed};
use crate::lock;
use crate::storage::Buffer;

/// A stream that is written, shared by the workers of a conversion.
#[derive(Clone)]
pub struct OutStream(Arc<Shared>);

struct Shared {
    unit: u64,
    packing: Option<Packing>,
    stop: Box<dyn Fn() + Send + Sync>,
    state: Mutex<State>,
}

enum State {
    /// Nothing is written: the layout learns what would be.
    Survey(Layout),
    Writing(Box<dyn StreamImage>, Pipe),
    /// It was finished; its length in bytes.
    Finished(u64),
}

impl OutStream {
    /// A stream that learns its layout.
    pub fn survey(layout: Layout) -> Self {
        OutStream(Arc::new(Shared {
            unit: layout.cluster_size(),
            packing: layout.packing(),
            stop: Box::new(|| ()),
            state: Mutex::new(State::Survey(layout)),
        }))
    }

    /// A stream that is written. Writes what precedes the data.
    pub fn new(mut image: Box<dyn StreamImage>, mut pipe: Pipe) -> Result<Self> {
        image.begin(&mut pipe)?;
        Ok(OutStream(Arc::new(Shared {
            unit: image.unit(),
            packing: image.packing(),
            stop: Box::new(pipe.stopper()),
            state: Mutex::new(State::Writing(image, pipe)),
        })))
    }

    /// The unit of writes in bytes.
    pub fn cluster_size(&self) -> u64 {
        self.0.unit
    }

    /// How it compresses.
    pub fn packing(&self) -> Option<Packing> {
        self.0.packing
    }

    /// Makes all writes fail.
    pub fn stop(&self) {
        (self.0.stop)();
    }

    /// Sets the size of a raw image, which is known at its end.
    pub fn set_size(&self, size: u64) {
        if let State::Writing(image, _) = &mut *lock(&self.0.state) {
            image.set_size(size);
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
                State::Writing(image, pipe) => {
                    let taken = taken.get_or_insert_with(|| pipe.exchange(buffer));
                    let at = (range.start - start) as usize..(range.end - start) as usize;
                    image.write(pipe, range.start, &taken.slice(at))?;
                }
                State::Finished(_) => return Err(changed()),
            }
        }
        Ok(())
    }

    /// Writes compressed clusters.
    pub fn write_packed(&self, clusters: &[(u64, Range<usize>)], data: &[u8]) -> Result<()> {
        for (offset, range) in clusters {
            match &mut *lock(&self.0.state) {
                State::Survey(layout) => layout.push_packed(*offset, range.len() as u64),
                State::Writing(image, pipe) => {
                    image.write_packed(pipe, *offset, &data[range.clone()])?;
                }
                State::Finished(_) => return Err(changed()),
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
        let State::Writing(image, mut pipe) = std::mem::replace(&mut *state, State::Finished(0))
        else {
            return Err(changed());
        };
        image.finish(&mut pipe)?;
        *state = State::Finished(pipe.finish()?);
        Ok(())
    }
}

impl std::fmt::Debug for OutStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OutStream").finish_non_exhaustive()
    }
}
