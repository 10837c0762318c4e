//! A cache of things that are loaded from the image: L2 slices, inflated
//! clusters. Least recently used goes first; a load is shared by all who want
//! the same thing meanwhile.
//!
//! # Concurrency
//! The entries are spread over shards, each a map under a read-write lock. A
//! hit takes the lock for reading, which no other hit makes wait; it is held
//! for writing only to insert or remove an entry, never across I/O. Recency
//! is a tick stored in the entry, so that a hit need not write to the shard.

use std::collections::HashMap;
use std::future::Future;
use std::hash::{BuildHasherDefault, Hasher};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::task::{Context, Poll, Waker};

/// At most this many shards.
const SHARDS: usize = 16;
/// A shard is not made smaller than this, so that keys which fall into one
/// shard by chance do not displace each other in a small cache.
const SHARD_ENTRIES: usize = 32;

/// A cache from `u64` keys to shared values.
#[derive(Debug)]
pub(crate) struct Cache<V> {
    shards: Box<[RwLock<Shard<V>>]>,
    /// Ready entries in a shard at most; at least 1.
    shard_capacity: usize,
    /// Goes up with every use of an entry.
    tick: AtomicU64,
    misses: AtomicU64,
}

type Shard<V> = HashMap<u64, Entry<V>, BuildHasherDefault<KeyHasher>>;

#[derive(Debug)]
enum Entry<V> {
    Ready {
        value: Arc<V>,
        used: AtomicU64,
    },
    /// Being loaded, and who to wake after.
    Loading(Vec<Waker>),
}

/// Multiplies by a large odd number: keys are small integers or offsets, and
/// a shard's map is bounded, so that chosen collisions cost little.
#[derive(Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }
    fn write_u64(&mut self, n: u64) {
        let product = (self.0 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 29);
    }
}

fn hash(key: u64) -> u64 {
    let mut hasher = KeyHasher::default();
    hasher.write_u64(key);
    hasher.finish()
}

impl<V> Cache<V> {
    /// A cache of about `capacity` values, at least one.
    pub(crate) fn new(capacity: usize) -> Self {
        let shards = (capacity / SHARD_ENTRIES).clamp(1, SHARDS);
        Cache {
            shards: (0..shards).map(|_| RwLock::default()).collect(),
            shard_capacity: (capacity / shards).max(1),
            tick: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    fn shard(&self, key: u64) -> &RwLock<Shard<V>> {
        // The map uses the low bits, the choice of shard the high ones.
        &self.shards[(hash(key) >> 48) as usize % self.shards.len()]
    }

    fn read(&self, key: u64) -> RwLockReadGuard<'_, Shard<V>> {
        // Nothing panics while holding the lock.
        self.shard(key).read().unwrap_or_else(|e| e.into_inner())
    }

    fn write(&self, key: u64) -> RwLockWriteGuard<'_, Shard<V>> {
        self.shard(key).write().unwrap_or_else(|e| e.into_inner())
    }

    /// The value, if it is here.
    pub(crate) fn get(&self, key: u64) -> Option<Arc<V>> {
        match self.read(key).get(&key)? {
            Entry::Ready { value, used } => {
                used.store(self.now(), Ordering::Relaxed);
                Some(value.clone())
            }
            Entry::Loading(_) => None,
        }
    }

    /// The time of a use. Only the order of uses counts, and that roughly: two
    /// uses at once may get the same time, so no read-modify-write is needed.
    fn now(&self) -> u64 {
        let now = self.tick.load(Ordering::Relaxed) + 1;
        self.tick.store(now, Ordering::Relaxed);
        now
    }

    /// The value, loaded by `load` if neither it is here nor somebody else
    /// loads it already. After a failed load those who waited try themselves.
    pub(crate) async fn get_or_load<E, F>(
        &self,
        key: u64,
        mut load: impl FnMut() -> F,
    ) -> Result<Arc<V>, E>
    where
        F: Future<Output = Result<V, E>>,
    {
        loop {
            if let Some(value) = self.get(key) {
                return Ok(value);
            }
            if self.begin(key) {
                let guard = LoadGuard { cache: self, key };
                let value = Arc::new(load().await?);
                guard.finish(value.clone());
                return Ok(value);
            }
            Loaded { cache: self, key }.await;
        }
    }

    /// Whether the caller is the one to load.
    fn begin(&self, key: u64) -> bool {
        let mut shard = self.write(key);
        if shard.contains_key(&key) {
            return false;
        }
        shard.insert(key, Entry::Loading(Vec::new()));
        self.misses.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Ends a load, with or without a value.
    fn end(&self, key: u64, value: Option<Arc<V>>) {
        let mut shard = self.write(key);
        let before = shard.remove(&key);
        if let Some(value) = value {
            if shard.len() >= self.shard_capacity {
                evict(&mut shard, self.shard_capacity - 1);
            }
            let used = AtomicU64::new(self.now());
            shard.insert(key, Entry::Ready { value, used });
        }
        drop(shard);
        if let Some(Entry::Loading(wakers)) = before {
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// Values that it keeps when none is in use.
    pub(crate) fn capacity(&self) -> usize {
        self.shard_capacity * self.shards.len()
    }

    /// Puts a value in, unless there is one or it is being loaded: then that
    /// is left, and the answer is false.
    pub(crate) fn insert(&self, key: u64, value: Arc<V>) -> bool {
        if !self.begin(key) {
            return false;
        }
        self.end(key, Some(value));
        true
    }

    /// Forgets every value. What is being loaded now stays.
    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            shard
                .write()
                .unwrap_or_else(|e| e.into_inner())
                .retain(|_, entry| matches!(entry, Entry::Loading(_)));
        }
    }

    /// Values found so far: about, since uses are counted so.
    pub(crate) fn hits(&self) -> u64 {
        self.tick.load(Ordering::Relaxed)
    }

    /// Loads so far.
    pub(crate) fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }
}

/// Removes the least recently used ready entries until `keep` are left. Those
/// being loaded or in use stay: they are bounded by the requests in flight, and
/// by the slices that wait to be written.
///
/// A value in use must stay since its user may change it: a second copy, loaded
/// from the disk, would not have the change. (The caller has the shard for
/// writing, so nobody can begin to use it now.)
fn evict<V>(shard: &mut Shard<V>, keep: usize) {
    loop {
        let ready = shard.iter().filter_map(|(key, entry)| match entry {
            Entry::Ready { used, value } => {
                let free = Arc::strong_count(value) == 1;
                Some((used.load(Ordering::Relaxed), *key, free))
            }
            Entry::Loading(_) => None,
        });
        let (mut count, mut oldest) = (0, None);
        for (used, key, free) in ready {
            count += 1;
            if free {
                let entry = (used, key);
                oldest = Some(oldest.map_or(entry, |o: (u64, u64)| o.min(entry)));
            }
        }
        match oldest {
            Some((_, key)) if count > keep => shard.remove(&key),
            _ => return,
        };
    }
}

/// Ends the load also when it fails or its request is dropped, so that those
/// who wait go on.
struct LoadGuard<'a, V> {
    cache: &'a Cache<V>,
    key: u64,
}

impl<V> LoadGuard<'_, V> {
    fn finish(self, value: Arc<V>) {
        self.cache.end(self.key, Some(value));
        std::mem::forget(self);
    }
}

impl<V> Drop for LoadGuard<'_, V> {
    fn drop(&mut self) {
        self.cache.end(self.key, None);
    }
}

/// Ready when nobody loads the key any more.
struct Loaded<'a, V> {
    cache: &'a Cache<V>,
    key: u64,
}

impl<V> Future for Loaded<'_, V> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut shard = self.cache.write(self.key);
        match shard.get_mut(&self.key) {
            Some(Entry::Loading(wakers)) => {
                if !wakers.iter().any(|w| w.will_wake(context.waker())) {
                    wakers.push(context.waker().clone());
                }
                Poll::Pending
            }
            _ => Poll::Ready(()),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a value loaded twice or never, a waiter forgotten after
    //! a failed load, and a cache that grows beyond its size.
    use super::*;
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Ready at the second poll.
    struct Later(bool);
    impl Future for Later {
        type Output = ();
        fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
            if std::mem::replace(&mut self.0, true) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        }
    }

    #[test]
    fn one_load_serves_all_who_wait() {
        let cache = Cache::<u32>::new(4);
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        let load = || async {
            Later(false).await;
            Ok::<u32, ()>(7)
        };
        let mut first = pin!(cache.get_or_load(1, load));
        let mut second = pin!(cache.get_or_load(1, load));
        assert!(first.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        let ready = |poll: Poll<Result<Arc<u32>, ()>>| match poll {
            Poll::Ready(Ok(v)) => *v,
            _ => panic!("not ready"),
        };
        assert_eq!(ready(first.as_mut().poll(&mut context)), 7);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert_eq!(ready(second.as_mut().poll(&mut context)), 7);
        assert_eq!(cache.misses(), 1);
    }

    #[test]
    fn a_dropped_or_failed_load_lets_the_next_try() {
        let cache = Cache::<u32>::new(4);
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        let mut second = pin!(cache.get_or_load(1, || async { Ok::<u32, ()>(8) }));
        {
            let mut first = pin!(cache.get_or_load(1, || async {
                Later(false).await;
                Err::<u32, ()>(())
            }));
            assert!(first.as_mut().poll(&mut context).is_pending());
            assert!(second.as_mut().poll(&mut context).is_pending());
            assert!(first.as_mut().poll(&mut context).is_ready());
        }
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        match second.as_mut().poll(&mut context) {
            Poll::Ready(Ok(v)) => assert_eq!(*v, 8),
            _ => panic!("the waiter did not load"),
        }
    }

    #[test]
    fn size_is_kept_and_the_oldest_goes() {
        let waker = Waker::noop();
        let mut context = Context::from_waker(waker);
        for capacity in [1, 2, 31, 100, 1000] {
            let cache = Cache::<u64>::new(capacity);
            for key in 0..5000 {
                let mut get = pin!(cache.get_or_load(key, || async { Ok::<u64, ()>(key) }));
                assert!(get.as_mut().poll(&mut context).is_ready());
                assert_eq!(cache.get(key).as_deref(), Some(&key));
                if capacity > 1 && capacity < 32 {
                    assert!(cache.get(0).is_some(), "0, used all the time, is gone");
                }
            }
            let len: usize = cache.shards.iter().map(|s| s.read().unwrap().len()).sum();
            assert!(len <= capacity, "{len} entries in a cache of {capacity}");
        }
    }
}
