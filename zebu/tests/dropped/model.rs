//! The contents that each sector may have.

use super::*;

/// The bytes that each sector may be filled with.
#[derive(Clone)]
pub struct Model {
    pub now: Vec<BTreeSet<u8>>,
    /// Those that it may have had at any time.
    pub ever: Vec<BTreeSet<u8>>,
}

impl Model {
    pub fn new(sectors: usize) -> Self {
        let empty = vec![BTreeSet::from([0]); sectors];
        Model {
            now: empty.clone(),
            ever: empty,
        }
    }

    /// A request begins: it may take effect from now on.
    pub fn begin(&mut self, what: &What) {
        if let Some((range, tag)) = what.change() {
            self.ever[range].iter_mut().for_each(|set| {
                set.insert(tag);
            });
        }
    }

    /// A request has ended: it took effect, or, if not `sure`, it may have.
    pub fn end(&mut self, what: &What, sure: bool) {
        let Some((range, tag)) = what.change() else {
            return;
        };
        // A discard may do nothing, as for a part of a cluster.
        let sure = sure && !matches!(what, What::Discard(_));
        for set in &mut self.now[range] {
            if sure {
                set.clear();
            }
            set.insert(tag);
        }
    }

    pub fn check(sets: &[BTreeSet<u8>], bytes: &[u8], what: &str) {
        for ((nth, set), sector) in sets.iter().enumerate().zip(bytes.chunks(SECTOR)) {
            let tag = sector[0];
            assert!(
                set.contains(&tag) && sector.iter().all(|b| *b == tag),
                "{what}: sector {nth} reads {tag}, and may be {set:?}"
            );
        }
    }
}
