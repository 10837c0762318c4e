//! Epochs of requests, which decide when a freed cluster may be reused.
//!
//! A request maps a guest offset and then uses the host cluster while its I/O lasts. If the cluster
//! is unmapped meanwhile, it must not be reused before that request has ended: a read would return
//! foreign data, a write would overwrite them. So a freed cluster waits for a *grace period*, until
//! every request has ended that was in flight when the period began. Later requests see the new
//! mapping.

use super::sync::atomic::{AtomicU64, Ordering};

/// Counts the requests in flight by the epoch in which they came.
#[derive(Debug, Default)]
pub struct Epochs {
    now: AtomicU64,
    /// Requests of even and of odd epochs. There are never more than two
    /// epochs with requests: [`Epochs::begin`] waits for the last but one.
    inside: [AtomicU64; 2],
}

/// A request in flight.
#[derive(Debug)]
pub struct Stay<'a>(&'a AtomicU64);

impl Epochs {
    /// A request begins.
    pub(crate) fn enter(&self) -> Stay<'_> {
        loop {
            let now = self.now.load(Ordering::SeqCst);
            let inside = &self.inside[(now & 1) as usize];
            inside.fetch_add(1, Ordering::SeqCst);
            // If the epoch is still the same, the thread that ends it sees the count. If not, this
            // request may be counted in the wrong one.
            if self.now.load(Ordering::SeqCst) == now {
                return Stay(inside);
            }
            inside.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Begins a grace period. The one before was seen to have elapsed; one
    /// caller at a time.
    pub(crate) fn begin(&self) {
        // It need not look elapsed now: a request that comes this moment with the
        // number of an old epoch counts there until it sees that it is over.
        self.now.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether every request has ended that was in flight when the last grace
    /// period began.
    pub(crate) fn elapsed(&self) -> bool {
        let before = self.now.load(Ordering::SeqCst).wrapping_sub(1);
        self.inside[(before & 1) as usize].load(Ordering::SeqCst) == 0
    }
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a grace period that ends while a request from before it
    //! is in flight, and one that never ends because new requests come.
    use super::*;

    #[test]
    fn a_grace_period_waits_for_earlier_requests_only() {
        let epochs = Epochs::default();
        let old = epochs.enter();
        epochs.begin();
        assert!(!epochs.elapsed());
        let new = epochs.enter();
        drop(old);
        assert!(epochs.elapsed());
        epochs.begin();
        assert!(!epochs.elapsed());
        drop(new);
        assert!(epochs.elapsed());
    }
}
