//! A cache of values that are loaded from the image: L2 slices, inflated clusters. Eviction is by
//! second chance: entries are in a ring, and one that was used since the last round stays for
//! another. Requests for a value that is being loaded share the load.
//!
//! # Concurrency
//! The entries are spread over shards, each a map under a read-write lock. A hit takes the lock for
//! reading, and so does not block other hits. The lock is taken for writing only to insert or
//! remove an entry, and never held across I/O. A use sets a flag of the entry once a round, so hits
//! write only to the lock and to the value's reference count. The cost of eviction does not depend
//! on the size of the cache.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::hash::{BuildHasherDefault, Hasher};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::task::{Context, Poll, Waker};

/// At most this many shards.
const SHARDS: usize = 16;
/// A cache has a shard for each so many values: since a value displaces only values of its own
/// shard, shards must not be small.
const SHARD_ENTRIES: usize = 32;

/// A cache from `u64` keys to shared values.
#[derive(Debug)]
pub struct Cache<V> {
    shards: Box<[Counted<V>]>,
    /// Ready entries in all shards at most; at least 1.
    capacity: usize,
    /// Ready entries in all shards. One limit for all, since keys are not spread evenly: a cache
    /// that is as large as all values would evict some by a limit for each shard.
    ready: AtomicUsize,
    misses: AtomicU64,
}

/// A shard and its number of hits, which is approximate, since two hits at once may count as one.
/// It is beside the lock, in a cache line that a hit writes to anyway.
#[derive(Debug)]
struct Counted<V> {
    lock: RwLock<Shard<V>>,
    hits: AtomicU64,
}

#[derive(Debug)]
struct Shard<V> {
    entries: HashMap<u64, Entry<V>, BuildHasherDefault<KeyHasher>>,
    /// The keys of the ready entries. The next candidate for eviction is in front.
    ring: VecDeque<u64>,
}

#[derive(Debug)]
enum Entry<V> {
    Ready {
        value: Arc<V>,
        /// Whether it was used since the last round.
        used: AtomicBool,
    },
    /// Being loaded, and the tasks to wake after.
    Loading(Vec<Waker>),
}

/// Multiplies by a large odd number: keys are small integers or offsets, and
/// a shard's map is bounded, so that chosen collisions cost little.
#[derive(Default)]
pub struct KeyHasher(u64);

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
    #[doc(hidden)]
    pub fn new(capacity: usize) -> Self {
        let shards = (capacity / SHARD_ENTRIES).clamp(1, SHARDS);
        Cache {
            shards: (0..shards).map(|_| Counted::new()).collect(),
            capacity: capacity.max(1),
            ready: AtomicUsize::new(0),
            misses: AtomicU64::new(0),
        }
    }

    fn shard(&self, key: u64) -> &Counted<V> {
        // The map uses the low bits, the choice of shard the high ones.
        &self.shards[(hash(key) >> 48) as usize % self.shards.len()]
    }

    fn write(&self, key: u64) -> RwLockWriteGuard<'_, Shard<V>> {
        self.shard(key).write()
    }

    /// The value, if it is cached.
    #[doc(hidden)]
    pub fn get(&self, key: u64) -> Option<Arc<V>> {
        let shard = self.shard(key);
        match shard.read().entries.get(&key)? {
            Entry::Ready { value, used } => {
                let hits = shard.hits.load(Ordering::Relaxed);
                shard.hits.store(hits + 1, Ordering::Relaxed);
                // Read first, so that hits of many threads share the cache line.
                if !used.load(Ordering::Relaxed) {
                    used.store(true, Ordering::Relaxed);
                }
                Some(value.clone())
            }
            Entry::Loading(_) => None,
        }
    }

    /// The value, loaded by `load` unless it is cached or being loaded by another request. After a
    /// failed load each waiting request tries itself.
    #[doc(hidden)]
    pub async fn get_or_load<E, F>(
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
        if shard.entries.contains_key(&key) {
            return false;
        }
        shard.entries.insert(key, Entry::Loading(Vec::new()));
        self.misses.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Ends a load, with or without a value.
    fn end(&self, key: u64, value: Option<Arc<V>>) {
        let mut shard = self.write(key);
        let before = shard.entries.remove(&key);
        if let Some(value) = value {
            let others = self.ready.fetch_add(1, Ordering::Relaxed);
            let evicted = shard.evict((others + 1).saturating_sub(self.capacity));
            self.ready.fetch_sub(evicted, Ordering::Relaxed);
            shard.insert(key, value);
        }
        drop(shard);
        if let Some(Entry::Loading(wakers)) = before {
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// Values that it holds when none is in use.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Inserts a value. False, and no change, if the key is cached or being loaded.
    pub(crate) fn insert(&self, key: u64, value: Arc<V>) -> bool {
        if !self.begin(key) {
            return false;
        }
        self.end(key, Some(value));
        true
    }

    /// Removes every value. Loads in flight continue.
    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.write();
            shard
                .entries
                .retain(|_, entry| matches!(entry, Entry::Loading(_)));
            self.ready.fetch_sub(shard.ring.len(), Ordering::Relaxed);
            shard.ring.clear();
        }
    }

    /// Approximate number of hits.
    pub(crate) fn hits(&self) -> u64 {
        let hits = |shard: &Counted<V>| shard.hits.load(Ordering::Relaxed);
        self.shards.iter().map(hits).sum()
    }

    /// Number of loads.
    pub(crate) fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }
}

impl<V> Counted<V> {
    fn new() -> Self {
        Counted {
            lock: RwLock::new(Shard::new()),
            hits: AtomicU64::new(0),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Shard<V>> {
        // Nothing panics while holding the lock.
        self.lock.read().unwrap_or_else(|e| e.into_inner())
    }

    fn write(&self) -> RwLockWriteGuard<'_, Shard<V>> {
        self.lock.write().unwrap_or_else(|e| e.into_inner())
    }
}

impl<V> Shard<V> {
    fn new() -> Self {
        Shard {
            entries: HashMap::default(),
            ring: VecDeque::new(),
        }
    }

    /// Adds a ready entry, for which there is none yet.
    fn insert(&mut self, key: u64, value: Arc<V>) {
        let used = AtomicBool::new(false);
        self.entries.insert(key, Entry::Ready { value, used });
        self.ring.push_back(key);
    }

    /// Removes up to `excess` ready entries, and returns how many it removed. Those in use stay:
    /// they are bounded by the requests in flight, and by the slices that wait to be written.
    ///
    /// A value in use must stay since its user may change it: a second copy, loaded
    /// from the disk, would not have the change. (The caller has the shard for
    /// writing, so no request can begin to use it now.)
    fn evict(&mut self, excess: usize) -> usize {
        let mut removed = 0;
        // In the first round everything may be found used, in the second only what
        // is in use.
        let mut steps = 2 * self.ring.len();
        while removed < excess && steps > 0 {
            steps -= 1;
            let Some(key) = self.ring.pop_front() else {
                break;
            };
            let stays = match self.entries.get_mut(&key) {
                Some(Entry::Ready { value, used }) => {
                    std::mem::take(used.get_mut()) || Arc::strong_count(value) > 1
                }
                _ => unreachable!("the ring has the keys of ready entries"),
            };
            if stays {
                self.ring.push_back(key);
            } else {
                self.entries.remove(&key);
                removed += 1;
            }
        }
        removed
    }
}

/// Ends the load also when it fails or its request is dropped, so that those
/// that wait continue.
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

/// Ready when no request loads the key any more.
struct Loaded<'a, V> {
    cache: &'a Cache<V>,
    key: u64,
}

impl<V> Future for Loaded<'_, V> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut shard = self.cache.write(self.key);
        match shard.entries.get_mut(&self.key) {
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
    //! Guards against a value that is loaded twice or never, a waiter that is not woken after a failed
    //! load, and a cache that grows beyond its size.
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
    fn one_load_serves_all_waiters() {
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
    fn after_a_dropped_or_failed_load_a_waiter_loads() {
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
    fn the_size_is_bounded_and_unused_entries_are_evicted() {
        let waker = Waker::noop();
        let mut context = Context::from_waker(waker);
        for capacity in [1, 2, 31, 100, 1000] {
            let cache = Cache::<u64>::new(capacity);
            for key in 0..5000 {
                let mut get = pin!(cache.get_or_load(key, || async { Ok::<u64, ()>(key) }));
                assert!(get.as_mut().poll(&mut context).is_ready());
                if capacity > 1 {
                    assert!(
                        cache.get(0).is_some(),
                        "entry 0, which is used all the time, was evicted"
                    );
                }
            }
            let len: usize = (cache.shards.iter()).map(|s| s.read().entries.len()).sum();
            assert!(len <= capacity, "{len} entries in a cache of {capacity}");
            assert_eq!(cache.get(4999).as_deref(), Some(&4999));
        }
    }

    #[test]
    fn a_cache_as_large_as_all_values_keeps_all() {
        let cache = Cache::<u64>::new(64);
        for key in (0..64).map(|n| 0x5_0000 + n * 4096) {
            assert!(cache.insert(key, Arc::new(key)));
        }
        assert!((0..64).all(|n| cache.get(0x5_0000 + n * 4096).is_some()));
        cache.clear();
        assert_eq!(cache.ready.load(Ordering::Relaxed), 0);
    }
}
