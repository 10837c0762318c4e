//! An object that is written: parts, several at a time, become the object together.
//!
//! The writer fills a part in memory; tasks of the runtime's thread send those that are full. Until
//! the upload is completed, the store shows the object as it was.

use std::fmt;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::MultipartId;
use object_store::multipart::PartId;
use object_store::path::Path;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::client::in_time;
use super::failure::{ObjectError, Trouble};
use super::retry::Attempts;
use super::store::{self, Store, StoreKind, StoreOptions};
use super::{RemoteOptions, runtime};
use crate::{Error, Result, lock};

/// Bytes of a part, unless there would be more parts than a store allows.
const PART: u64 = 8 << 20;
/// Parts are multiples of this.
const PART_UNIT: u64 = 1 << 20;
/// If the length of the object is not known, so many parts have the same length, the next ones
/// twice that, up to [`LARGEST`].
const PARTS_ALIKE: usize = 2000;
const LARGEST: u64 = 128 << 20;
/// Parts that are sent at a time.
const IN_FLIGHT: u64 = 4;
/// Bytes in memory, unless two parts have more.
const MEMORY: u64 = 64 << 20;
/// A part whose transfer is slower than this, in bytes a second, is sent again.
const SLOWEST: u64 = 64 << 10;
/// How long a store may take to put the parts together, in all attempts.
const COMPLETION: Duration = Duration::from_secs(600);
/// How long an upload that is given up waits for parts that are being sent: a store may keep a
/// part that arrives later.
const GRACE: Duration = Duration::from_secs(3);
/// How long giving up may take after that.
const GIVING_UP: Duration = Duration::from_secs(15);
/// How often a thread that waits looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(100);

/// Whether all is to stop.
type Stop = Arc<dyn Fn() -> bool + Send + Sync>;

/// An object that is being written to an object store. Clones are the same upload.
///
/// The object is there, or replaces an older one, when [`Upload::complete`] has returned. An upload
/// that is neither completed nor aborted leaves its parts in the store.
#[derive(Clone)]
pub struct Upload(Arc<Shared>);

/// What has become of an object whose upload was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectState {
    /// It is as it was before the upload.
    Unchanged,
    /// The upload was completed.
    Written,
    /// The store was asked to complete the upload, and its answer was lost.
    Unknown,
}

struct Shared {
    store: Arc<dyn Store>,
    path: Path,
    id: MultipartId,
    /// For errors.
    name: String,
    timeout: Duration,
    kind: StoreKind,
    runtime: Handle,
    stop: Stop,
    state: Mutex<State>,
    /// A part has ended.
    changed: Condvar,
}

struct State {
    /// Bytes of the object, if that is known.
    expected: Option<u64>,
    /// The part that is being filled.
    filling: Vec<u8>,
    /// Those before it; None: it is being sent.
    parts: Vec<Option<PartId>>,
    in_flight: u64,
    tasks: Vec<AbortHandle>,
    failure: Option<ObjectError>,
    /// Nothing more is taken.
    is_over: bool,
    object: ObjectState,
}

impl Upload {
    /// Begins an upload. Once `stop` returns true, what waits ends with `ECANCELED`. Blocks.
    ///
    /// # Errors
    /// [`Error::Refused`] if the store does not allow it.
    pub(crate) fn begin(
        options: &StoreOptions,
        name: String,
        writing: &RemoteOptions,
        stop: Stop,
    ) -> Result<Upload> {
        let refused = |trouble: Trouble| Error::Refused(trouble.error("").what().into());
        let runtime = runtime::handle()?;
        let timeout = writing.timeout();
        let store = {
            // Its client belongs to the runtime.
            let _inside = runtime.enter();
            store::connect(options, timeout).map_err(refused)?.0
        };
        let path = store::path(&options.key).map_err(refused)?;
        let (own, to, until) = (store.clone(), path.clone(), stop.clone());
        let id = wait(&runtime, async move {
            let created = tried(timeout, &until, || own.create_multipart(&to));
            unless_stopped(&until, created).await
        })?;
        Ok(Upload(Arc::new(Shared {
            store,
            path,
            id: id.map_err(refused)?,
            name,
            timeout,
            kind: options.kind,
            runtime,
            stop,
            state: Mutex::new(State {
                expected: None,
                filling: Vec::new(),
                parts: Vec::new(),
                in_flight: 0,
                tasks: Vec::new(),
                failure: None,
                is_over: false,
                object: ObjectState::Unchanged,
            }),
            changed: Condvar::new(),
        })))
    }

    /// Says how many bytes the object will have, before the first one is sent. Then all parts have
    /// the same length, but for the last one.
    pub fn expect(&self, length: u64) {
        self.0.state().expected = Some(length);
    }

    /// Takes the next bytes of the object. Blocks while as many parts are being sent as may be.
    ///
    /// # Errors
    /// If a part could not be sent, the object has too many, or all is to stop.
    pub fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        let mut state = self.0.state();
        while !bytes.is_empty() {
            let length = self.0.part_length(&state)?;
            if state.filling.is_empty() {
                state.filling.reserve_exact(length as usize);
            }
            let space = length as usize - state.filling.len();
            let (now, rest) = bytes.split_at(space.min(bytes.len()));
            state.filling.extend_from_slice(now);
            bytes = rest;
            if state.filling.len() as u64 == length {
                let most = (MEMORY / length).saturating_sub(1).clamp(1, IN_FLIGHT);
                state = self.0.wait_for_parts(state, most - 1)?;
                self.0.start_part(&mut state);
            }
        }
        self.0.check(&state)
    }

    /// Makes what was sent the object. Blocks.
    ///
    /// # Errors
    /// As for [`Upload::send`], or if the store refuses it. The upload is to be aborted then.
    pub fn complete(&self) -> io::Result<()> {
        let shared = self.0.clone();
        let mut state = self.0.wait_for_parts(self.0.state(), IN_FLIGHT - 1)?;
        if !state.filling.is_empty() {
            self.0.start_part(&mut state);
        }
        state = self.0.wait_for_parts(state, 0)?;
        state.is_over = true;
        let parts: Vec<PartId> = state.parts.iter().flatten().cloned().collect();
        state.object = ObjectState::Unknown;
        drop(state);
        let (completed, attempts) = wait(&self.0.runtime, async move {
            let mut attempts = 0;
            let complete = || {
                attempts += 1;
                let parts = parts.clone();
                shared
                    .store
                    .complete_multipart(&shared.path, &shared.id, parts)
            };
            let completed = tried(COMPLETION, &shared.stop, complete);
            let completed = unless_stopped(&shared.stop, completed);
            (in_time(COMPLETION, completed).await, attempts)
        })?;
        let mut state = self.0.state();
        match &completed {
            Ok(_) => state.object = ObjectState::Written,
            // The first answer, and it says no.
            Err(Trouble::Permanent { errno, .. }) if attempts == 1 && *errno != libc::ECANCELED => {
                state.object = ObjectState::Unchanged;
            }
            Err(_) => {}
        }
        drop(state);
        let completed = completed.map_err(|trouble| trouble.error(&self.0.name));
        completed.map(drop).map_err(Into::into)
    }

    /// Ends the upload and removes its parts from the store, unless it was completed. (Azure has no
    /// such request: it removes them after a week.) Blocks for some seconds at most. Returns what
    /// has become of the object.
    ///
    /// # Errors
    /// If the parts could not be removed, and the object is as it was.
    pub fn abort(&self) -> io::Result<ObjectState> {
        let mut state = self.0.state();
        let object = state.object;
        if object == ObjectState::Written {
            return Ok(object);
        }
        state.is_over = true;
        let until = Instant::now() + GRACE;
        while state.in_flight > 0 && Instant::now() < until {
            state = self.0.pause(state);
        }
        state.tasks.drain(..).for_each(|task| task.abort());
        drop(state);
        let shared = self.0.clone();
        let aborted = wait(&self.0.runtime, async move {
            let never: Stop = Arc::new(|| false);
            let abort = || shared.store.abort_multipart(&shared.path, &shared.id);
            in_time(GIVING_UP, tried(GIVING_UP, &never, abort)).await
        })?;
        match aborted {
            // The upload was there, so it was not completed.
            Ok(()) if self.0.kind != StoreKind::Azure => Ok(ObjectState::Unchanged),
            _ if object == ObjectState::Unknown => Ok(object),
            // The store has none.
            Ok(())
            | Err(Trouble::Permanent {
                errno: libc::ENOENT,
                ..
            }) => Ok(object),
            Err(trouble) => Err(trouble.error(&self.0.name).into()),
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Bytes of the next part.
    fn part_length(&self, state: &State) -> io::Result<u64> {
        let before = state.parts.len();
        let most = match self.kind {
            StoreKind::Azure => 50_000,
            StoreKind::S3 | StoreKind::Google => 10_000,
        };
        if before as u64 >= most {
            let what = "the object has more parts than a store allows, since its length was not \
                        known before";
            return Err(Trouble::permanent(what).error(&self.name).into());
        }
        Ok(part_length(state.expected, before, most))
    }

    /// Waits until no more than `most` parts are being sent.
    fn wait_for_parts<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        most: u64,
    ) -> io::Result<MutexGuard<'a, State>> {
        loop {
            self.check(&state)?;
            if state.in_flight <= most {
                return Ok(state);
            }
            state = self.pause(state);
        }
    }

    /// Waits until a part has ended, or for a moment.
    fn pause<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, LOOK);
        waited.unwrap_or_else(|e| e.into_inner()).0
    }

    fn check(&self, state: &State) -> io::Result<()> {
        match &state.failure {
            Some(failure) => Err(failure.clone().into()),
            None if state.is_over || (self.stop)() => {
                Err(io::Error::from_raw_os_error(libc::ECANCELED))
            }
            None => Ok(()),
        }
    }

    /// Sends the part that is filled.
    fn start_part(self: &Arc<Self>, state: &mut State) {
        let data = Bytes::from(std::mem::take(&mut state.filling));
        let nth = state.parts.len();
        let shared = self.clone();
        let task = self.runtime.spawn(async move {
            let limit = shared.timeout + Duration::from_secs(data.len() as u64 / SLOWEST);
            let put = || {
                let data = data.clone().into();
                shared.store.put_part(&shared.path, &shared.id, nth, data)
            };
            let result = tried(limit, &shared.stop, put).await;
            let mut state = shared.state();
            state.in_flight -= 1;
            match result {
                Ok(part) => state.parts[nth] = Some(part),
                Err(trouble) => {
                    let error = trouble.error(&shared.name);
                    state.failure.get_or_insert(error);
                }
            }
            shared.changed.notify_all();
        });
        state.parts.push(None);
        state.in_flight += 1;
        state.tasks.retain(|task| !task.is_finished());
        state.tasks.push(task.abort_handle());
    }
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload")
            .field("name", &self.0.name)
            .finish_non_exhaustive()
    }
}

/// Bytes of the part after `before` others, of an object of `expected` bytes.
fn part_length(expected: Option<u64>, before: usize, most_parts: u64) -> u64 {
    match expected {
        Some(length) => length
            .div_ceil(most_parts)
            .next_multiple_of(PART_UNIT)
            .max(PART),
        None => LARGEST.min(PART << (before / PARTS_ALIKE).min(16)),
    }
}

/// What a request returns, which is made again while it may succeed later.
async fn tried<T, F>(
    limit: Duration,
    stop: &Stop,
    mut request: impl FnMut() -> F,
) -> Result<T, Trouble>
where
    F: Future<Output = object_store::Result<T>>,
{
    let mut attempts = Attempts::default();
    loop {
        let attempt = request();
        let attempt = async { attempt.await.map_err(store::trouble) };
        match in_time(limit, attempt).await {
            Ok(value) => return Ok(value),
            Err(_) if stop() => return Err(stopped()),
            Err(trouble) => {
                let (pause, _) = attempts.failed(trouble)?;
                tokio::time::sleep(pause).await;
            }
        }
    }
}

/// The end of `work`, unless all is to stop before.
async fn unless_stopped<T>(
    stop: &Stop,
    work: impl Future<Output = Result<T, Trouble>>,
) -> Result<T, Trouble> {
    let mut work = pin!(work);
    loop {
        match tokio::time::timeout(LOOK, work.as_mut()).await {
            Ok(result) => return result,
            Err(_) if stop() => return Err(stopped()),
            Err(_) => {}
        }
    }
}

fn stopped() -> Trouble {
    Trouble::Permanent {
        what: "the upload was stopped".into(),
        errno: libc::ECANCELED,
    }
}

/// What a future of the runtime's thread returns. Blocks.
fn wait<T: Send + 'static>(
    runtime: &Handle,
    future: impl Future<Output = T> + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = mpsc::channel();
    runtime.spawn(async move { sender.send(future.await) });
    let gone = |_| io::Error::other("the thread of requests has panicked");
    receiver.recv().map_err(gone)
}

#[cfg(test)]
mod tests {
    //! Guards against more parts than stores allow, and parts that take too much memory.
    use super::*;

    #[test]
    fn parts_fit_the_object() {
        let known = |length| part_length(Some(length), 0, 10_000);
        assert_eq!(known(0), PART);
        assert_eq!(known(80_000 << 20), PART);
        assert_eq!(known((80_000 << 20) + 1), 9 << 20);
        for length in [1 << 30, 1 << 40, 5 << 40, (5 << 40) - 1] {
            assert!(length <= known(length) * 10_000);
        }
        let unknown: u64 = (0..10_000).map(|nth| part_length(None, nth, 10_000)).sum();
        assert!(unknown > 480 << 30, "{unknown}");
        assert_eq!(part_length(None, 9_999, 10_000), LARGEST);
    }
}
