//! A device that is changed as a whole while others use it.

use std::future::poll_fn;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::task::{Poll, Waker};

use super::{BitmapInfo, Device, Preallocation};
use crate::drivers::qcow2::SnapshotName;
use crate::storage::Queue;
use crate::{Error, Result, lock};

/// A device whose size, snapshots and bitmaps can be changed by a shared reference.
///
/// Requests go through [`SharedDevice::enter`]. A change of the whole device waits until all that
/// came before have ended, and later ones wait for it. Clones are of the same device.
///
/// ```
/// # use std::sync::Arc;
/// # use zebu::jobs::{CreateQcow2, create_qcow2};
/// use zebu::block::{Device, OpenOptions, Preallocation, SharedDevice};
/// use zebu::storage::{Memory, Queue, QueueOptions};
///
/// # let storage = Arc::new(Memory::new(Vec::new()));
/// let queue = Queue::new(QueueOptions::default())?;
/// # let options = CreateQcow2::default().size(1 << 20);
/// # queue.block_on(create_qcow2(&queue, &*storage, None, &options, |_| {}))?;
/// let options = OpenOptions::default().write(true);
/// let device = SharedDevice::new(Device::from_storage(&queue, storage, &options)?);
/// queue.block_on(async {
///     device.snapshot_create(&queue, "before").await?;
///     device.resize(&queue, 2 << 20, Preallocation::Off).await?;
///     assert_eq!(device.size().await?, 2 << 20);
///     device.close(&queue).await
/// })?;
/// # Ok::<(), zebu::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SharedDevice(Arc<Shared>);

/// Places in which threads find the device. Threads that share one only wait for each other for an
/// instant.
const PLACES: usize = 16;

#[derive(Debug)]
struct Shared {
    /// Each is for some threads, so that requests of different threads change no memory together. Empty
    /// while a change is made or waits.
    places: [Shard; PLACES],
    core: Arc<Core>,
}

/// One place, in a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard(RwLock<Option<Arc<Slot>>>);

/// The device for the requests of one place. Its drop, with the last of them, lets a change go on.
#[derive(Debug)]
#[repr(align(128))]
struct Slot {
    /// None only in `drop`.
    device: Option<Arc<Device>>,
    core: Arc<Core>,
}

#[derive(Debug)]
struct Core(Mutex<State>);

#[derive(Debug)]
struct State {
    device: Place,
    /// Changes that wait. Requests that enter later wait for them.
    changes: usize,
    waiting: Vec<Waker>,
}

#[derive(Debug)]
enum Place {
    /// In use by the slots that have further references.
    Here(Arc<Device>),
    /// Taken by the change that is being made.
    Changing,
    Closed,
}

/// The right to use a [`SharedDevice`]: no change of the whole device begins while it exists.
#[derive(Debug)]
pub struct InUse(Arc<Slot>);

/// The device of the change that is being made. It is given back on drop.
struct Exclusive<'a> {
    device: Option<Device>,
    shared: &'a SharedDevice,
}

/// A change that waits.
struct Waiting<'a>(&'a SharedDevice);

thread_local! {
    /// The place of the thread.
    static OWN: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % PLACES
    };
}

impl SharedDevice {
    /// Shares a device.
    pub fn new(device: Device) -> Self {
        SharedDevice(Arc::new(Shared {
            places: Default::default(),
            core: Arc::new(Core(Mutex::new(State {
                device: Place::Here(Arc::new(device)),
                changes: 0,
                waiting: Vec::new(),
            }))),
        }))
    }

    /// The device, for requests: keep the guard until they have ended, and no longer. Waits for
    /// changes of the whole device that are being made or began to wait before.
    ///
    /// A task that holds a guard must not wait for a change, nor enter again while a change waits:
    /// it would wait for ever.
    ///
    /// # Errors
    /// [`Error::Refused`] after [`SharedDevice::close`].
    pub async fn enter(&self) -> Result<InUse> {
        // Without thread-local data its end has come: any place will do.
        let place = &self.0.places[OWN.try_with(|own| *own).unwrap_or_default()];
        if let Some(slot) = &*place.0.read().unwrap_or_else(PoisonError::into_inner) {
            return Ok(InUse(slot.clone()));
        }
        poll_fn(|context| {
            let mut state = lock(&self.0.core.0);
            let device = match &state.device {
                Place::Closed => return Poll::Ready(Err(closed())),
                Place::Here(device) if state.changes == 0 => device.clone(),
                _ => return state.wait(context.waker()),
            };
            // A change that comes takes it out again: it holds the lock of the state, too.
            let mut place = place.0.write().unwrap_or_else(PoisonError::into_inner);
            let slot = place.get_or_insert_with(|| {
                Arc::new(Slot {
                    device: Some(device),
                    core: self.0.core.clone(),
                })
            });
            Poll::Ready(Ok(InUse(slot.clone())))
        })
        .await
    }

    /// [`Device::size`], after changes of the whole device that are being made.
    ///
    /// # Errors
    /// As [`SharedDevice::enter`].
    pub async fn size(&self) -> Result<u64> {
        Ok(self.enter().await?.size())
    }

    /// [`Device::bitmaps`].
    ///
    /// # Errors
    /// Those of [`Device::bitmaps`], and as [`SharedDevice::enter`].
    pub async fn bitmaps(&self, queue: &Queue) -> Result<Vec<BitmapInfo>> {
        self.enter().await?.bitmaps(queue).await
    }

    /// Changes the device as a whole: its images are exchanged, several changes are made at one instant.
    /// Waits until all requests have ended that entered before; later ones wait for the change. So its
    /// time is that of the longest request in flight and its own.
    ///
    /// While it waits the future may be dropped, for example after a time limit: nothing has changed, and
    /// requests go on. Once `change` runs, dropping the future drops that one, and the device is as that
    /// leaves it. (`change` may be spawned on a queue instead, with a clone of the `SharedDevice`, to be
    /// ended in any case.)
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use zebu::jobs::{CreateQcow2, NewBacking, create_qcow2};
    /// # use zebu::{Device, Memory, OpenOptions, Queue, QueueOptions, SharedDevice};
    /// # let queue = Queue::new(QueueOptions::default())?;
    /// # let make = |backing: Option<NewBacking>| -> zebu::Result<Device> {
    /// #     let storage = Arc::new(Memory::new(Vec::new()));
    /// #     let options = CreateQcow2::default().size(1 << 20).backing(backing);
    /// #     queue.block_on(create_qcow2(&queue, &*storage, None, &options, |_| {}))?;
    /// #     let options = OpenOptions::default().write(true).no_backing(true);
    /// #     Device::from_storage(&queue, storage, &options)
    /// # };
    /// # let disk = make(None)?;
    /// # let overlay = make(Some(NewBacking::new("disk.qcow2")))?;
    /// let shared = SharedDevice::new(disk);
    /// queue.block_on(async {
    ///     // An external snapshot.
    ///     let change = shared.change(async |device| device.put_on_top(&queue, overlay).await);
    ///     change.await?;
    ///     // It is merged back.
    ///     let change = shared.change(async |device| {
    ///         device.commit_top(&queue).await?;
    ///         device.take_off_top(&queue).await
    ///     });
    ///     change.await?.close(&queue).await
    /// })?;
    /// # Ok::<(), zebu::Error>(())
    /// ```
    ///
    /// # Errors
    /// That of `change`, and [`Error::Refused`] after [`SharedDevice::close`].
    pub async fn change<T>(&self, change: impl AsyncFnOnce(&mut Device) -> Result<T>) -> Result<T> {
        let mut device = self.exclusive().await?;
        change(device.get()).await
    }

    /// [`Device::resize`], when all requests have ended that entered before. If the future is
    /// dropped midway, every write fails until the image is opened again.
    ///
    /// # Errors
    /// Those of [`Device::resize`], and [`Error::Refused`] after [`SharedDevice::close`].
    pub async fn resize(
        &self,
        queue: &Queue,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let mut device = self.exclusive().await?;
        device.get().resize(queue, size, preallocation).await
    }

    /// As [`SharedDevice::resize`], but never to a smaller size, also if others change it meanwhile.
    ///
    /// # Errors
    /// Those of [`SharedDevice::resize`], and [`Error::Refused`] if the disk is larger.
    pub async fn grow(&self, queue: &Queue, size: u64, preallocation: Preallocation) -> Result<()> {
        let mut device = self.exclusive().await?;
        let device = device.get();
        if size < device.size() {
            return Err(Error::Refused("the new size is smaller".into()));
        }
        device.resize(queue, size, preallocation).await
    }

    /// [`Device::snapshot_create`], as [`SharedDevice::resize`]: no request is in flight at its
    /// instant.
    ///
    /// # Errors
    /// As [`SharedDevice::resize`].
    pub async fn snapshot_create(&self, queue: &Queue, name: impl AsRef<[u8]>) -> Result<()> {
        let mut device = self.exclusive().await?;
        device.get().snapshot_create(queue, name).await
    }

    /// [`Device::snapshot_apply`], as [`SharedDevice::resize`].
    ///
    /// # Errors
    /// As [`SharedDevice::resize`].
    pub async fn snapshot_apply(&self, queue: &Queue, name: &SnapshotName) -> Result<()> {
        let mut device = self.exclusive().await?;
        device.get().snapshot_apply(queue, name).await
    }

    /// [`Device::snapshot_delete`], as [`SharedDevice::resize`].
    ///
    /// # Errors
    /// As [`SharedDevice::resize`].
    pub async fn snapshot_delete(&self, queue: &Queue, name: &SnapshotName) -> Result<()> {
        let mut device = self.exclusive().await?;
        device.get().snapshot_delete(queue, name).await
    }

    /// [`Device::bitmap_add`], as [`SharedDevice::resize`].
    ///
    /// # Errors
    /// As [`SharedDevice::resize`].
    pub async fn bitmap_add(
        &self,
        queue: &Queue,
        name: impl AsRef<[u8]>,
        granularity: Option<u64>,
        enabled: bool,
    ) -> Result<()> {
        let mut device = self.exclusive().await?;
        let device = device.get();
        device.bitmap_add(queue, name, granularity, enabled).await
    }

    /// [`Device::bitmap_remove`], as [`SharedDevice::resize`].
    ///
    /// # Errors
    /// As [`SharedDevice::resize`].
    pub async fn bitmap_remove(&self, queue: &Queue, name: impl AsRef<[u8]>) -> Result<()> {
        let mut device = self.exclusive().await?;
        device.get().bitmap_remove(queue, name).await
    }

    /// [`Device::bitmap_clear`], as [`SharedDevice::resize`].
    ///
    /// # Errors
    /// As [`SharedDevice::resize`].
    pub async fn bitmap_clear(&self, queue: &Queue, name: impl AsRef<[u8]>) -> Result<()> {
        let mut device = self.exclusive().await?;
        device.get().bitmap_clear(queue, name).await
    }

    /// [`Device::bitmap_enable`], as [`SharedDevice::resize`].
    ///
    /// # Errors
    /// As [`SharedDevice::resize`].
    pub async fn bitmap_enable(
        &self,
        queue: &Queue,
        name: impl AsRef<[u8]>,
        enabled: bool,
    ) -> Result<()> {
        let mut device = self.exclusive().await?;
        device.get().bitmap_enable(queue, name, enabled).await
    }

    /// [`Device::close`], when all requests have ended. The device cannot be used from then on,
    /// also after an error.
    ///
    /// # Errors
    /// As [`SharedDevice::resize`].
    pub async fn close(&self, queue: &Queue) -> Result<()> {
        let mut exclusive = self.exclusive().await?;
        let device = exclusive.device.take().expect("it is here");
        device.close(queue).await
    }

    /// Waits until the device is not in use, and takes it.
    async fn exclusive(&self) -> Result<Exclusive<'_>> {
        let slots = {
            let mut state = lock(&self.0.core.0);
            state.changes += 1;
            let places = self.0.places.iter();
            places
                .map(|place| {
                    let mut place = place.0.write().unwrap_or_else(PoisonError::into_inner);
                    place.take()
                })
                .collect::<Vec<_>>()
        };
        let _waiting = Waiting(self);
        // Their drop takes the lock of the state.
        drop(slots);
        poll_fn(|context| {
            let mut state = lock(&self.0.core.0);
            match std::mem::replace(&mut state.device, Place::Changing) {
                Place::Closed => {
                    state.device = Place::Closed;
                    Poll::Ready(Err(closed()))
                }
                Place::Changing => state.wait(context.waker()),
                Place::Here(device) => match Arc::try_unwrap(device) {
                    Ok(device) => Poll::Ready(Ok(Exclusive {
                        device: Some(device),
                        shared: self,
                    })),
                    Err(device) => {
                        state.device = Place::Here(device);
                        state.wait(context.waker())
                    }
                },
            }
        })
        .await
    }
}

impl Core {
    /// Changes the state, and wakes all waiting tasks.
    fn update(&self, change: impl FnOnce(&mut State)) {
        let waiting = {
            let mut state = lock(&self.0);
            change(&mut state);
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl State {
    fn wait<T>(&mut self, waker: &Waker) -> Poll<T> {
        if !self.waiting.iter().any(|w| w.will_wake(waker)) {
            self.waiting.push(waker.clone());
        }
        Poll::Pending
    }
}

impl Exclusive<'_> {
    fn get(&mut self) -> &mut Device {
        self.device.as_mut().expect("it is here until it is closed")
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        let place = match self.device.take() {
            Some(device) => Place::Here(Arc::new(device)),
            None => Place::Closed,
        };
        let core = &self.shared.0.core;
        core.update(|state| state.device = place);
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let core = &self.0.0.core;
        core.update(|state| state.changes -= 1);
    }
}

impl Deref for InUse {
    type Target = Device;

    #[inline]
    fn deref(&self) -> &Device {
        self.0.device.as_ref().expect("there until it is dropped")
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // Under the lock, so that a woken task finds the reference gone.
        let device = self.device.take();
        self.core.update(|_| drop(device));
    }
}

fn closed() -> Error {
    Error::Refused("The device is closed".into())
}
