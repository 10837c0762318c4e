//! Asynchronous calls: their memory is their own until the library ends them, so a future that waits
//! for one may be dropped.

use std::ffi::c_void;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use super::library::{Ceph, Handle};
use super::open::{Image, Open};
use crate::dropped::{DroppedChange, DroppedChanges};

/// A call that was started: its result, and its memory.
pub(super) struct Call {
    state: Arc<Mutex<State>>,
    /// The bytes that it changes.
    change: Option<(Arc<DroppedChanges>, Range<u64>)>,
}

#[derive(Default)]
struct State {
    ended: Option<(isize, Vec<u8>)>,
    waker: Option<Waker>,
    /// Of a change whose future was dropped.
    dropped: Option<DroppedChange>,
}

/// What the library holds of a call.
struct Held {
    ceph: &'static Ceph,
    memory: Vec<u8>,
    state: Arc<Mutex<State>>,
}

impl Call {
    /// Starts a call with this memory: `start` gets the image, the memory and the completion.
    pub fn start(
        image: &Image,
        memory: Vec<u8>,
        start: impl FnOnce(&Open, *mut u8, Handle) -> i32,
    ) -> Result<Call, i32> {
        let open = image.get();
        let Some(open) = open.as_ref() else {
            return Err(libc::EBADF);
        };
        let rbd = &open.ceph.rbd;
        let state: Arc<Mutex<State>> = Arc::default();
        let mut held = Box::new(Held {
            ceph: open.ceph,
            memory,
            state: state.clone(),
        });
        let pointer = held.memory.as_mut_ptr();
        let held = Box::into_raw(held);
        let mut completion = null_mut();
        // SAFETY: `ended` takes `held`, once.
        let made = unsafe { (rbd.rbd_aio_create_completion)(held.cast(), ended, &mut completion) };
        let result = match made < 0 {
            true => made,
            false => start(open, pointer, completion),
        };
        if result < 0 {
            // SAFETY: the call has not begun, so nothing else takes them.
            unsafe {
                if made >= 0 {
                    (rbd.rbd_aio_release)(completion);
                }
                drop(Box::from_raw(held));
            }
            return Err(-result);
        }
        Ok(Call {
            state,
            change: None,
        })
    }

    /// The call changes these bytes.
    pub fn changes(mut self, changes: &Arc<DroppedChanges>, range: Range<u64>) -> Call {
        self.change = Some((changes.clone(), range));
        self
    }
}

/// Called by the library when a call has ended.
extern "C" fn ended(completion: Handle, held: *mut c_void) {
    // SAFETY: `Call::start` has passed it, for this one call.
    let held = unsafe { Box::from_raw(held.cast::<Held>()) };
    let rbd = &held.ceph.rbd;
    // SAFETY: the completion is that of the call, and not used afterwards.
    let result = unsafe {
        let result = (rbd.rbd_aio_get_return_value)(completion);
        (rbd.rbd_aio_release)(completion);
        result
    };
    let (waker, _dropped) = {
        let mut state = crate::lock(&held.state);
        state.ended = Some((result, held.memory));
        (state.waker.take(), state.dropped.take())
    };
    waker.into_iter().for_each(Waker::wake);
}

impl Future for Call {
    type Output = Result<(usize, Vec<u8>), i32>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Call { state, change } = self.get_mut();
        let mut state = crate::lock(state);
        let Some((result, memory)) = state.ended.take() else {
            state.waker = Some(context.waker().clone());
            return Poll::Pending;
        };
        *change = None;
        Poll::Ready(match result < 0 {
            true => Err(-result as i32),
            false => Ok((result as usize, memory)),
        })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut state = crate::lock(&self.state);
        if state.ended.is_none()
            && let Some((changes, range)) = self.change.take()
        {
            state.dropped = Some(changes.add(range));
        }
    }
}
