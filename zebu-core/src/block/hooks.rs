//! Hooks: what follows the changes of a device, while jobs read it beside its users.

use std::fmt::Debug;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use super::Device;
use crate::Result;
use crate::storage::Queue;

/// The future of [`ChangeHook::before`].
pub type HookFuture<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// Is told of each change of a device's content: by writes, zeroes, discards, a resize to a smaller size,
/// and an internal snapshot that is applied. An exchange of the chain does not change the content.
///
/// Hooks are added and removed by `&mut Device` ([`Device::add_hook`]), so under load by
/// [`SharedDevice::change`](super::SharedDevice::change): every change either began after the hook was
/// there, or had ended before. Without hooks a change pays nothing for them.
pub trait ChangeHook: Debug + Send + Sync {
    /// A range of the disk, in bytes, is about to change. The change waits for the future, which may read
    /// the old content from `device`. It runs on the queue of the request, and is dropped with it.
    /// Several run at once, also for the same range. The future must not change the device, nor wait for
    /// a change of it as a whole.
    ///
    /// # Errors
    ///
    /// The change fails with the error, and nothing is changed.
    fn before<'a>(
        &'a self,
        device: &'a Device,
        queue: &'a Queue,
        range: Range<u64>,
    ) -> HookFuture<'a> {
        let _ = (device, queue, range);
        Box::pin(std::future::ready(Ok(())))
    }

    /// A change of which [`ChangeHook::before`] has succeeded is over: it has ended, has failed, or was
    /// dropped. Unless it has ended, the content of the range is old, new or mixed. Must not block.
    fn after(&self, range: Range<u64>) {
        let _ = range;
    }
}

/// A change on its way, of which hooks are told when this is dropped.
pub(super) struct Hooked {
    passed: Vec<Arc<dyn ChangeHook>>,
    range: Range<u64>,
}

impl Drop for Hooked {
    fn drop(&mut self) {
        for hook in &self.passed {
            hook.after(self.range.clone());
        }
    }
}

impl Device {
    /// Adds a hook, which is told of all changes from now on.
    pub fn add_hook(&mut self, hook: Arc<dyn ChangeHook>) {
        self.hooks.push(hook);
    }

    /// Removes a hook. False if it is not there.
    pub fn remove_hook(&mut self, hook: &Arc<dyn ChangeHook>) -> bool {
        let is_it = |other: &Arc<dyn ChangeHook>| std::ptr::addr_eq(&**other, &**hook);
        let place = self.hooks.iter().position(is_it);
        place.map(|place| self.hooks.remove(place)).is_some()
    }

    /// Tells the hooks of a change, which is carried out while the result lives. None: there are none.
    pub(super) async fn hooked(&self, queue: &Queue, range: Range<u64>) -> Result<Option<Hooked>> {
        match self.hooks.is_empty() || range.is_empty() {
            true => Ok(None),
            false => Box::pin(self.tell_hooks(queue, range)).await.map(Some),
        }
    }

    async fn tell_hooks(&self, queue: &Queue, range: Range<u64>) -> Result<Hooked> {
        let mut hooked = Hooked {
            passed: Vec::with_capacity(self.hooks.len()),
            range,
        };
        for hook in &self.hooks {
            hook.before(self, queue, hooked.range.clone()).await?;
            hooked.passed.push(hook.clone());
        }
        Ok(hooked)
    }
}
