//! Reading and inflating compressed clusters.

use std::sync::Arc;

use super::cache::Cache;
use super::wait::Gate;
use super::{CompressedData, spend};
use crate::Result;
use crate::storage::{self, Queue, Step, Storage, Work};

/// Bytes of inflated clusters that are kept of an image, unless one has more.
const KEPT: u64 = 2 << 20;

/// The inflated bytes of the cluster at `guest`.
pub async fn inflate(
    queue: &Queue,
    storage: &dyn Storage,
    guest: u64,
    data: CompressedData,
) -> Result<Vec<u8>> {
    // The caller holds no memory of this step, and no lock that such a request waits for.
    let bytes = data.length as usize + data.inflater.output_len();
    let _memory = queue.reserve(Step::Inflated, bytes).await;
    storage::event(storage, storage::Event::ReadCompressed);
    let source = storage::read_vec(storage, queue, data.host.0, data.length as usize).await?;
    let here = queue.options().inflate_inline;
    let inflated = data.inflater.inflated(source, here).await;
    inflated.map_err(|e| data.error(guest, e))
}

/// Inflated clusters of an image that does not change, kept for small reads.
#[derive(Debug)]
pub struct Inflated(Arc<Shared>);

/// The state that the tasks which inflate share.
#[derive(Debug)]
struct Shared {
    file: Arc<dyn Storage>,
    work: Option<Arc<Work>>,
    /// By guest offset.
    clusters: Cache<Vec<u8>>,
    /// Large clusters are inflated one at a time: their size is chosen by the image, and many
    /// requests would take that much memory each.
    large: Gate,
}

impl Inflated {
    /// For clusters of up to `size` bytes in `file`. What is inflated counts as `work`.
    #[doc(hidden)]
    pub fn new(file: Arc<dyn Storage>, size: u64, work: Option<Arc<Work>>) -> Self {
        let count = match size > KEPT {
            true => 1,
            false => (KEPT / size.max(1)).clamp(4, 4096) as usize,
        };
        Inflated(Arc::new(Shared {
            file,
            work,
            clusters: Cache::new(count),
            large: Gate::default(),
        }))
    }

    /// The inflated cluster that is mapped at `guest`. A task of the queue inflates it, since other
    /// requests may wait for it.
    #[doc(hidden)]
    pub async fn get(
        &self,
        queue: &Queue,
        guest: u64,
        data: CompressedData,
    ) -> Result<Arc<Vec<u8>>> {
        if let Some(bytes) = self.0.clusters.get(guest) {
            return Ok(bytes);
        }
        let shared = self.0.clone();
        let inflating = queue.begin(|queue| async move {
            let load = async || {
                let is_large = u64::from(data.inflater.size.max(data.length)) > KEPT;
                let _alone = match is_large {
                    true => Some(shared.large.enter().await),
                    false => None,
                };
                spend(shared.work.as_deref(), data.work())?;
                inflate(&queue, &*shared.file, guest, data).await
            };
            shared.clusters.get_or_load(guest, load).await
        });
        inflating.await
    }
}
