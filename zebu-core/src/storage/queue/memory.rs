//! Memory that requests of a queue reserve, if it has a budget.

use super::Queue;
use crate::storage::{Reserved, Step};

impl Queue {
    /// Reserves `bytes` for a step of a request; in an unbroken section without waiting. None: the
    /// queue has no budget.
    #[doc(hidden)]
    pub async fn reserve(&self, step: Step, bytes: usize) -> Option<Reserved> {
        let budget = self.options().memory.as_ref()?;
        let step = step.index(self.depth());
        // A drop may wait for the section, and polls none of the requests that hold the bytes. So
        // these few are taken over the budget.
        if self.is_unbroken() {
            return Some(budget.step_now(step, bytes));
        }
        Some(budget.step(step, bytes).await)
    }

    /// Reserves `bytes` for a step of a request, unless that must wait.
    pub(crate) fn try_reserve(&self, step: Step, bytes: usize) -> Result<Option<Reserved>, Full> {
        match &self.options().memory {
            None => Ok(None),
            Some(budget) => match budget.try_step(step.index(self.depth()), bytes) {
                Some(reserved) => Ok(Some(reserved)),
                None => Err(Full),
            },
        }
    }
}

/// No bytes are free.
#[derive(Clone, Copy, Debug)]
pub struct Full;
