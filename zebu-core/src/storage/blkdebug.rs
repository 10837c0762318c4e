//! Error injection with the rules of QEMU's blkdebug.
//!
//! An image reports its steps ([`Event`]s). At an event, a rule injects errors into requests, or
//! changes the state of the storage, which selects the rules that hold, or suspends a request.
//! Injections stay until another event replaces them.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use super::{
    Alignment, Blocks, Event, Iov, OpKind, Properties, Queue, Started, Storage, extent,
    write_zeroes, yield_once,
};

/// An action at an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The event.
    pub event: Event,
    /// The state in which the rule holds; 0: any.
    pub state: i32,
    /// The action.
    pub action: Action,
}

/// What a rule does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Requests fail from now on.
    Inject(Injection),
    /// The storage has this state from now on. It begins in state 1.
    SetState(i32),
    /// The next request waits until it is resumed, by this tag.
    Suspend(String),
}

/// Which requests fail, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The `errno` that they fail with; 0: they succeed.
    pub errno: i32,
    /// Those that this byte is part of; None: all.
    pub offset: Option<u64>,
    /// Those of these kinds.
    pub kinds: IoKinds,
    /// Only the first one.
    pub once: bool,
    /// When they are started, else in a later turn of the queue.
    pub immediately: bool,
}

/// Kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoKinds(u8);

impl IoKinds {
    const READ: IoKinds = IoKinds(1);
    const WRITE: IoKinds = IoKinds(2);
    const WRITE_ZEROES: IoKinds = IoKinds(4);
    const DISCARD: IoKinds = IoKinds(8);
    const FLUSH: IoKinds = IoKinds(16);
    const BLOCK_STATUS: IoKinds = IoKinds(32);

    /// The kind of this name; without a name all that move data or make it durable.
    pub fn named(name: Option<&str>) -> Option<IoKinds> {
        Some(match name {
            None => IoKinds(31),
            Some("read") => Self::READ,
            Some("write") => Self::WRITE,
            Some("write-zeroes") => Self::WRITE_ZEROES,
            Some("discard") => Self::DISCARD,
            Some("flush") => Self::FLUSH,
            Some("block-status") => Self::BLOCK_STATUS,
            Some(_) => return None,
        })
    }
}

/// Limits of requests; 0: that of the storage below.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkdebugLimits {
    /// Requests are multiples of it: a power of two.
    pub align: u64,
    /// Bytes of a read or write at most.
    pub max_transfer: u64,
    /// The unit of zeroing without data, in bytes; the rest is written.
    pub opt_write_zero: u64,
    /// Bytes of one zeroing operation at most.
    pub max_write_zero: u64,
    /// The unit of discards in bytes; the rest is discarded separately.
    pub opt_discard: u64,
    /// Bytes of one discard at most.
    pub max_discard: u64,
}

/// A storage with injected errors.
#[derive(Debug)]
pub struct Blkdebug {
    shared: Arc<Shared>,
    properties: Properties,
    blocks: Blocks,
}

#[derive(Debug)]
struct Shared {
    storage: Arc<dyn Storage>,
    limits: BlkdebugLimits,
    /// The unit of zeroing in bytes.
    zero_unit: u64,
    discard_unit: u64,
    /// A bit for each event that has rules.
    events: AtomicU64,
    /// Whether there are injections or suspensions.
    armed: AtomicBool,
    /// Written to since the last flush. Without that a flush has nothing to do, in
    /// QEMU as well, and so cannot fail.
    changed: AtomicBool,
    rules: Mutex<Rules>,
}

#[derive(Debug)]
struct Rules {
    state: i32,
    /// With their numbers, the newest first, which is QEMU's order.
    rules: VecDeque<(u64, Rule)>,
    /// Numbers of the rules whose injections hold now, in order.
    active: Vec<u64>,
    next: u64,
    /// The next requests are suspended, with these tags.
    to_suspend: Vec<String>,
    suspended: Vec<Arc<Suspended>>,
    /// Messages to be printed.
    log: Vec<String>,
}

/// A suspended request.
#[derive(Debug)]
struct Suspended {
    tag: String,
    go: Mutex<(bool, Option<Waker>)>,
}

impl Suspended {
    async fn wait(&self) {
        poll_fn(|context| {
            let mut go = crate::lock(&self.go);
            if go.0 {
                return Poll::Ready(());
            }
            go.1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn resume(&self) {
        let waker = {
            let mut go = crate::lock(&self.go);
            go.0 = true;
            go.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A suspended request. Dropped with its future, it is not listed any more.
struct Suspension<'a> {
    shared: &'a Shared,
    suspended: Arc<Suspended>,
}

impl Drop for Suspension<'_> {
    fn drop(&mut self) {
        let mut rules = self.shared.rules();
        rules
            .suspended
            .retain(|suspended| !Arc::ptr_eq(suspended, &self.suspended));
    }
}

impl Blkdebug {
    /// `storage` with these rules.
    ///
    /// # Errors
    /// QEMU's message for limits that contradict each other or the storage.
    pub fn new(
        storage: Arc<dyn Storage>,
        rules: Vec<Rule>,
        limits: BlkdebugLimits,
    ) -> Result<Blkdebug, String> {
        limits.check(&*storage)?;
        let below = storage.alignment();
        let offset = below.offset.max(limits.align as usize);
        let unit = |optimal: u64| optimal.max(offset as u64);
        let page = storage.blocks().map_or(1, Blocks::page);
        let debug = Blkdebug {
            properties: Properties {
                alignment: Alignment {
                    memory: below.memory,
                    offset,
                },
                ..storage.properties().clone()
            },
            blocks: Blocks::new(page.max(offset as u64)),
            shared: Arc::new(Shared {
                storage,
                limits,
                zero_unit: unit(limits.opt_write_zero),
                discard_unit: unit(limits.opt_discard),
                events: AtomicU64::new(0),
                armed: AtomicBool::new(false),
                changed: AtomicBool::new(false),
                rules: Mutex::new(Rules {
                    state: 1,
                    rules: VecDeque::new(),
                    active: Vec::new(),
                    next: 0,
                    to_suspend: Vec::new(),
                    suspended: Vec::new(),
                    log: Vec::new(),
                }),
            }),
        };
        for rule in rules {
            debug.shared.add(rule);
        }
        debug.event(Event::None);
        Ok(debug)
    }

    /// Reports an event.
    pub fn event(&self, event: Event) {
        // Without writes a flush does nothing, as in QEMU.
        let changed = || self.shared.changed.load(Ordering::Relaxed);
        if event != Event::FlushToDisk || changed() {
            self.shared.event(event);
        }
    }

    /// Suspends a request at the next such event.
    pub fn suspend_at(&self, event: Event, tag: &str) {
        self.shared.add(Rule {
            event,
            state: 0,
            action: Action::Suspend(tag.into()),
        });
    }

    /// Resumes the first request that was suspended with this tag. False: there is none.
    pub fn resume(&self, tag: &str) -> bool {
        let mut rules = self.shared.rules();
        let Some(place) = rules.suspended.iter().position(|s| s.tag == tag) else {
            return false;
        };
        let suspended = rules.suspended.remove(place);
        rules
            .log
            .push(format!("blkdebug: Resuming request '{tag}'"));
        drop(rules);
        suspended.resume();
        true
    }

    /// Removes the suspensions with this tag and resumes their requests. False: there are none.
    pub fn forget_tag(&self, tag: &str) -> bool {
        let mut found = {
            let mut rules = self.shared.rules();
            let count = rules.rules.len() + rules.to_suspend.len();
            let is_it = |rule: &Rule| matches!(&rule.action, Action::Suspend(t) if t == tag);
            rules.rules.retain(|(_, rule)| !is_it(rule));
            rules.to_suspend.retain(|t| t != tag);
            rules.rules.len() + rules.to_suspend.len() < count
        };
        while self.resume(tag) {
            found = true;
        }
        found
    }

    /// Removes all suspensions and resumes their requests.
    pub fn resume_all(&self) {
        let suspended = {
            let mut rules = self.shared.rules();
            let suspends = |rule: &Rule| matches!(rule.action, Action::Suspend(_));
            rules.rules.retain(|(_, rule)| !suspends(rule));
            rules.to_suspend.clear();
            std::mem::take(&mut rules.suspended)
        };
        for suspended in suspended {
            suspended.resume();
        }
    }

    /// Whether a request is suspended with this tag.
    pub fn is_suspended(&self, tag: &str) -> bool {
        self.shared.rules().suspended.iter().any(|s| s.tag == tag)
    }

    /// Takes the messages since the last call.
    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.rules().log)
    }
}

impl BlkdebugLimits {
    fn check(&self, storage: &dyn Storage) -> Result<(), String> {
        const MOST: u64 = i32::MAX as u64;
        let align = self.align.max(storage.alignment().offset as u64).max(1);
        let check = |name: &str, value: u64, unit: u64| match value {
            0 => Ok(()),
            _ if value < MOST && value.is_multiple_of(unit.max(1)) => Ok(()),
            _ => Err(format!("Cannot meet constraints with {name} {value}")),
        };
        if self.align >= MOST || (self.align != 0 && !self.align.is_power_of_two()) {
            return Err(format!("Cannot meet constraints with align {}", self.align));
        }
        check("max-transfer", self.max_transfer, align)?;
        check("opt-write-zero", self.opt_write_zero, align)?;
        let unit = self.opt_write_zero.max(align);
        check("max-write-zero", self.max_write_zero, unit)?;
        check("opt-discard", self.opt_discard, align)?;
        check("max-discard", self.max_discard, self.opt_discard.max(align))
    }
}

impl Shared {
    fn rules(&self) -> MutexGuard<'_, Rules> {
        crate::lock(&self.rules)
    }

    fn add(&self, rule: Rule) {
        let mut rules = self.rules();
        self.events
            .fetch_or(1 << rule.event as u64, Ordering::Relaxed);
        let number = rules.next;
        rules.next += 1;
        rules.rules.push_front((number, rule));
    }

    fn event(&self, event: Event) {
        if self.events.load(Ordering::Relaxed) & 1 << event as u64 == 0 {
            return;
        }
        let mut rules = self.rules();
        let rules = &mut *rules;
        let state = rules.state;
        let (mut injected, mut suspends) = (Vec::new(), Vec::new());
        rules.rules.retain(|(number, rule)| {
            if rule.event != event || (rule.state != 0 && rule.state != state) {
                return true;
            }
            match &rule.action {
                Action::Inject(_) => injected.insert(0, *number),
                Action::SetState(new) => rules.state = *new,
                Action::Suspend(tag) => {
                    suspends.push(tag.clone());
                    return false;
                }
            }
            true
        });
        if !injected.is_empty() {
            rules.active = injected;
        }
        rules.to_suspend.extend(suspends);
        let armed = !rules.active.is_empty() || !rules.to_suspend.is_empty();
        self.armed.store(armed, Ordering::Relaxed);
    }

    /// Whether a request of this kind fails now, and whether at once.
    fn injected(&self, kind: IoKinds, offset: u64, length: u64) -> Option<(io::Error, bool)> {
        if !self.armed.load(Ordering::Relaxed) {
            return None;
        }
        let mut rules = self.rules();
        let rules = &mut *rules;
        let range = offset..offset.saturating_add(length);
        let matches = |injection: &Injection| {
            injection.kinds.0 & kind.0 != 0 && injection.offset.is_none_or(|at| range.contains(&at))
        };
        let found = rules.active.iter().find_map(|number| {
            let (_, rule) = rules.rules.iter().find(|(n, _)| n == number)?;
            match &rule.action {
                Action::Inject(injection) if matches(injection) => {
                    Some((*number, injection.clone()))
                }
                _ => None,
            }
        });
        let (number, injection) = found.filter(|(_, injection)| injection.errno != 0)?;
        if injection.once {
            rules.active.retain(|n| *n != number);
            rules.rules.retain(|(n, _)| *n != number);
        }
        let error = io::Error::from_raw_os_error(injection.errno);
        Some((error, injection.immediately))
    }

    /// Fails if a request of this kind does now.
    async fn check(&self, kind: IoKinds, offset: u64, length: u64) -> io::Result<()> {
        match self.injected(kind, offset, length) {
            None => Ok(()),
            Some((error, at_once)) => {
                if !at_once {
                    yield_once().await;
                }
                Err(error)
            }
        }
    }

    /// Suspensions of the next request.
    fn suspensions(&self) -> Vec<Suspension<'_>> {
        if !self.armed.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let mut rules = self.rules();
        let tags = std::mem::take(&mut rules.to_suspend);
        let new: Vec<_> = tags
            .into_iter()
            .map(|tag| {
                Arc::new(Suspended {
                    tag,
                    go: Mutex::default(),
                })
            })
            .collect();
        for suspended in &new {
            let line = format!("blkdebug: Suspended request '{}'", suspended.tag);
            rules.log.push(line);
        }
        rules.suspended.extend(new.iter().cloned());
        drop(rules);
        let suspension = |suspended| Suspension {
            shared: self,
            suspended,
        };
        new.into_iter().map(suspension).collect()
    }

    /// A read or write, cut as the limits say.
    async fn transfer(
        &self,
        queue: &Queue,
        op: OpKind,
        offset: u64,
        iov: &Iov,
    ) -> io::Result<usize> {
        let kind = match op {
            OpKind::Read => IoKinds::READ,
            _ => IoKinds::WRITE,
        };
        let most = match self.limits.max_transfer {
            0 => iov.len(),
            most => most as usize,
        };
        let mut done = 0;
        while done < iov.len() {
            let length = (iov.len() - done).min(most);
            let at = offset + done as u64;
            self.check(kind, at, length as u64).await?;
            let part = iov.slice(done, length);
            // SAFETY: the storage is borrowed, and the memory valid, until the
            // operation, awaited here, has ended.
            #[allow(unsafe_code)]
            let started = unsafe {
                self.storage
                    .start(queue, op, at, length as u64, Some(&part))
            };
            let count = started.wait().await?;
            done += count;
            if count < length {
                break;
            }
        }
        Ok(done)
    }

    /// Makes a range zero: as the limits say, in whole units without data, and the
    /// rest written.
    async fn zero(&self, queue: &Queue, op: OpKind, offset: u64, length: u64) -> io::Result<()> {
        let end = offset + length;
        let unit = self.zero_unit;
        let first = offset.next_multiple_of(unit).min(end);
        let last = (end - end % unit).max(first);
        if op == OpKind::ZeroQuickly && (offset, end) != (first, last) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        self.write_zero_part(queue, offset, first).await?;
        let most = most(self.limits.max_write_zero, unit);
        self.pieces(queue, op, IoKinds::WRITE_ZEROES, first..last, most)
            .await?;
        self.write_zero_part(queue, last, end).await
    }

    /// Writes zeroes as data. The storage does not become longer.
    async fn write_zero_part(&self, queue: &Queue, start: u64, end: u64) -> io::Result<()> {
        let length = end.min(self.storage.len()?).saturating_sub(start);
        if length == 0 {
            return Ok(());
        }
        self.check(IoKinds::WRITE, start, length).await?;
        write_zeroes(&*self.storage, queue, start, length).await
    }

    /// Discards a range: its whole units, and what is left at both ends.
    async fn discard(&self, queue: &Queue, offset: u64, length: u64) -> io::Result<()> {
        let (end, unit) = (offset + length, self.discard_unit);
        let first = offset.next_multiple_of(unit).min(end);
        let last = (end - end % unit).max(first);
        let most = most(self.limits.max_discard, unit);
        for range in [offset..first, first..last, last..end] {
            self.pieces(queue, OpKind::Discard, IoKinds::DISCARD, range, most)
                .await?;
        }
        Ok(())
    }

    /// An operation without memory on a range, in pieces of at most so many bytes.
    async fn pieces(
        &self,
        queue: &Queue,
        op: OpKind,
        kind: IoKinds,
        range: std::ops::Range<u64>,
        most: u64,
    ) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let length = (range.end - at).min(most);
            self.check(kind, at, length).await?;
            // SAFETY: the storage is borrowed until the operation, awaited here,
            // has ended; there is no memory.
            #[allow(unsafe_code)]
            let started = unsafe { self.storage.start(queue, op, at, length, None) };
            started.wait().await?;
            at += length;
        }
        Ok(())
    }

    async fn flush(&self, queue: &Queue) -> io::Result<()> {
        if self.changed.load(Ordering::Relaxed) {
            self.check(IoKinds::FLUSH, 0, 0).await?;
        }
        self.changed.store(false, Ordering::Relaxed);
        let flushed = {
            // SAFETY: as above.
            #[allow(unsafe_code)]
            let started = unsafe { self.storage.start(queue, OpKind::Flush, 0, 0, None) };
            started.wait().await
        };
        if flushed.is_err() {
            self.changed.store(true, Ordering::Relaxed);
        }
        flushed.map(drop)
    }

    async fn perform(
        &self,
        queue: &Queue,
        op: OpKind,
        offset: u64,
        length: u64,
        iov: Option<Iov>,
    ) -> io::Result<usize> {
        if let (OpKind::Extent, Some(iov)) = (op, &iov) {
            let found = extent(&*self.storage, queue, offset).await?;
            self.check(IoKinds::BLOCK_STATUS, offset, found.length)
                .await?;
            return Ok(found.put(iov));
        }
        for suspension in self.suspensions() {
            suspension.suspended.wait().await;
        }
        match (op, iov) {
            (OpKind::Read, Some(iov)) => self.transfer(queue, op, offset, &iov).await,
            (_, Some(iov)) => {
                self.event(Event::Pwritev);
                let result = self.transfer(queue, op, offset, &iov).await;
                self.changed.store(true, Ordering::Relaxed);
                self.event(Event::PwritevDone);
                result
            }
            (OpKind::Flush, None) => self.flush(queue).await.map(|()| 0),
            (OpKind::Discard, None) => {
                let result = self.discard(queue, offset, length).await;
                self.changed.store(true, Ordering::Relaxed);
                result.map(|()| 0)
            }
            (OpKind::Allocate, None) => {
                // SAFETY: as above.
                #[allow(unsafe_code)]
                let started = unsafe { self.storage.start(queue, op, offset, length, None) };
                started.wait().await
            }
            (_, None) => {
                self.event(Event::PwritevZero);
                let result = self.zero(queue, op, offset, length).await;
                self.changed.store(true, Ordering::Relaxed);
                self.event(Event::PwritevDone);
                result.map(|()| 0)
            }
        }
    }
}

/// The largest piece: 0 means any, else whole units.
fn most(limit: u64, unit: u64) -> u64 {
    match limit / unit * unit {
        0 => u64::MAX,
        most => most,
    }
}

// SAFETY: the future holds what it uses, and awaits each operation on the memory;
// dropped, it drops that operation, which waits for its end.
#[allow(unsafe_code)]
unsafe impl Storage for Blkdebug {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if kind == OpKind::SetLength {
            // SAFETY: passed on; there is no memory.
            return unsafe { self.shared.storage.start(queue, kind, offset, length, None) };
        }
        let (shared, queue, iov) = (self.shared.clone(), queue.for_itself(), memory.cloned());
        Started::later(async move { shared.perform(&queue, kind, offset, length, iov).await })
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocated(&self) -> io::Result<u64> {
        // As QEMU, which does not ask the image below.
        Err(io::ErrorKind::Unsupported.into())
    }

    fn blocks(&self) -> Option<&Blocks> {
        (self.properties.alignment.offset > 1).then_some(&self.blocks)
    }

    fn below(&self) -> Option<&dyn Storage> {
        Some(&*self.shared.storage)
    }

    fn blkdebug(&self) -> Option<&Blkdebug> {
        Some(self)
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&*self.shared.storage)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against requests that stay suspended, or listed, after their tag is forgotten
    //! or their future is dropped.
    use super::super::Memory;
    use super::*;

    #[test]
    fn a_suspension_ends_with_its_tag_and_with_its_request() {
        let none = BlkdebugLimits::default();
        let debug = Blkdebug::new(Arc::new(Memory::default()), Vec::new(), none).unwrap();
        debug.suspend_at(Event::WriteAio, "a");
        debug.event(Event::WriteAio);
        assert!(debug.forget_tag("a"));
        assert!(debug.shared.suspensions().is_empty());

        debug.suspend_at(Event::WriteAio, "b");
        debug.event(Event::WriteAio);
        let request = debug.shared.suspensions();
        assert!(debug.is_suspended("b"));
        drop(request);
        assert!(!debug.is_suspended("b"));
    }
}
