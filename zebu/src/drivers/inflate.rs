//! Reading and inflating one compressed cluster.

use super::CompressedData;
use crate::Result;
use crate::storage::{self, Queue, Storage};

/// The inflated bytes of the cluster that contains `guest`.
pub(super) async fn inflate(
    queue: &Queue,
    storage: &dyn Storage,
    guest: u64,
    data: CompressedData,
) -> Result<Vec<u8>> {
    storage::event(storage, storage::Event::ReadCompressed);
    let source = storage::read_vec(storage, queue, data.host.0, data.length as usize).await?;
    let here = queue.options().inflate_inline;
    let inflated = data.inflater.inflated(source, here).await;
    inflated.map_err(|e| data.error(guest, e))
}
