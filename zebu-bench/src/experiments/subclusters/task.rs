//! What is measured: layouts of images, and the cells of the tables.

use crate::units::{self, KIB, MIB};

/// Bytes of a request, unless its size is what is looked at.
pub const BLOCK: u64 = 4 * KIB;
/// Clusters have 32 subclusters of at least 512 bytes.
const SUBCLUSTERS: u64 = 32;
const LEAST_EXTENDED: u64 = 16 * KIB;
const CLUSTERS: [u64; 10] = [
    4 * KIB,
    8 * KIB,
    16 * KIB,
    32 * KIB,
    64 * KIB,
    128 * KIB,
    256 * KIB,
    512 * KIB,
    MIB,
    2 * MIB,
];
const QUICK_CLUSTERS: [u64; 3] = [4 * KIB, 64 * KIB, 2 * MIB];

/// How an image is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of a cluster.
    pub cluster: u64,
    /// Whether it has subclusters.
    pub extended: bool,
}

/// That of an image made without options.
const DEFAULT: Layout = Layout {
    cluster: 64 * KIB,
    extended: false,
};

impl Layout {
    /// As a row of the seed: the cluster size, and that of a subcluster in brackets.
    pub fn name(self) -> String {
        match self.extended {
            true => format!(
                "{} ({})",
                units::size(self.cluster),
                units::size(self.cluster / SUBCLUSTERS)
            ),
            false => units::size(self.cluster),
        }
    }

    /// Arguments of `create` for it.
    pub fn options(self) -> String {
        let extended = if self.extended { "on" } else { "off" };
        format!("cluster_size={},extended_l2={extended}", self.cluster)
    }
}

/// What a cell measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// The image.
    pub layout: Layout,
    /// Whether there is a fully populated backing file.
    pub backed: bool,
    /// Requests in flight.
    pub depth: u64,
    /// Bytes of a request.
    pub block: u64,
    /// QEMU initialises new clusters by writing to them, not by fallocate.
    pub written: bool,
}

impl Task {
    /// Its name in tables.
    pub fn label(self) -> String {
        format!(
            "{}{}, {} in flight, {}{}",
            self.layout.name(),
            if self.layout.extended {
                ""
            } else {
                ", no subclusters"
            },
            self.depth,
            if self.backed { "backed" } else { "empty" },
            match (self.block, self.written) {
                (BLOCK, false) => String::new(),
                (BLOCK, true) => ", QEMU without fallocate".into(),
                (block, _) => format!(", {} requests", units::size(block)),
            }
        )
    }
}

/// Everything that is measured, in the order of the tables.
pub fn all(quick: bool) -> Vec<Task> {
    let clusters: &[u64] = if quick { &QUICK_CLUSTERS } else { &CLUSTERS };
    let layouts = |clusters: &[u64]| {
        clusters
            .iter()
            .flat_map(|&cluster| [false, true].map(|extended| Layout { cluster, extended }))
            .filter(|l| !l.extended || l.cluster >= LEAST_EXTENDED)
            .collect::<Vec<_>>()
    };
    let mut tasks = Vec::new();
    for backed in [true, false] {
        for depth in [32, 1] {
            // With --quick one write at a time is measured at the default cluster size only.
            let clusters = if quick && depth == 1 {
                &[64 * KIB][..]
            } else {
                clusters
            };
            tasks.extend(layouts(clusters).into_iter().map(|layout| Task {
                layout,
                backed,
                depth,
                block: BLOCK,
                written: false,
            }));
        }
    }
    let empty = |layout| Task {
        layout,
        backed: false,
        depth: 32,
        block: BLOCK,
        written: false,
    };
    let written = if quick {
        vec![DEFAULT]
    } else {
        layouts(clusters)
    };
    tasks.extend(written.into_iter().map(|layout| Task {
        written: true,
        ..empty(layout)
    }));
    if quick {
        return tasks;
    }
    for block in [8 * KIB, 16 * KIB, 32 * KIB] {
        for backed in [true, false] {
            tasks.extend(layouts(&[64 * KIB]).into_iter().map(|layout| Task {
                block,
                backed,
                ..empty(layout)
            }));
        }
    }
    tasks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cluster_size_is_measured_with_and_without_subclusters() {
        let tasks = all(false);
        for cluster in CLUSTERS {
            let of = |extended, backed| {
                tasks.iter().any(|t| {
                    t.layout == Layout { cluster, extended } && t.backed == backed && t.depth == 32
                })
            };
            assert!(of(false, true) && of(false, false));
            assert_eq!(of(true, true), cluster >= LEAST_EXTENDED);
        }
        for (i, task) in tasks.iter().enumerate() {
            assert!(!tasks[..i].contains(task), "{task:?} twice");
        }
        let quick = all(true);
        assert!(quick.len() < tasks.len() && quick.iter().all(|t| tasks.contains(t)));
    }

    #[test]
    fn rows_are_named_as_in_the_seed() {
        let layout = |cluster, extended| Layout { cluster, extended };
        assert_eq!(layout(2 * MIB, true).name(), "2M (64K)");
        assert_eq!(layout(16 * KIB, true).name(), "16K (512)");
        assert_eq!(layout(4 * KIB, false).name(), "4K");
    }
}
