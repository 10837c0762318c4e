//! Several operations of one lane, in flight at once.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

type Operation<'a, E> = Pin<Box<dyn Future<Output = Result<(), E>> + 'a>>;

/// Operations that are driven together.
pub(super) struct Together<'a, E> {
    operations: Vec<Operation<'a, E>>,
    failure: Option<E>,
}

impl<'a, E> Together<'a, E> {
    /// None yet.
    pub(super) fn new() -> Self {
        Together {
            operations: Vec::new(),
            failure: None,
        }
    }

    /// One more, not started yet.
    pub(super) fn push(&mut self, operation: impl Future<Output = Result<(), E>> + 'a) {
        self.operations.push(Box::pin(operation));
    }

    /// Whether none is left to be driven.
    pub(super) fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Starts them, in order: each goes as far as it gets without waiting.
    pub(super) async fn start(&mut self) {
        poll_fn(|context| {
            self.poll(context);
            Poll::Ready(())
        })
        .await;
    }

    /// Waits until all have ended; the failure of the one that failed first.
    pub(super) async fn finish(mut self) -> Result<(), E> {
        poll_fn(|context| {
            self.poll(context);
            match self.operations.is_empty() {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
        self.failure.map_or(Ok(()), Err)
    }

    fn poll(&mut self, context: &mut Context<'_>) {
        let failure = &mut self.failure;
        self.operations
            .retain_mut(|operation| match operation.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready(Ok(())) => false,
                Poll::Ready(Err(e)) => {
                    failure.get_or_insert(e);
                    false
                }
            });
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an operation that is forgotten, and a failure that is.
    use super::*;
    use crate::storage::{Queue, QueueOptions};
    use std::cell::Cell;

    /// Ends when it was polled `times` times.
    async fn after(times: u32, ended: &Cell<u32>) {
        let mut left = times;
        poll_fn(|context| {
            left = left.saturating_sub(1);
            context.waker().wake_by_ref();
            if left == 0 {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        ended.set(ended.get() + 1);
    }

    #[test]
    fn all_end_and_the_first_failure_is_told() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let ended = Cell::new(0);
        let result = queue.block_on(async {
            let mut together = Together::new();
            for (times, result) in [(3, Ok(())), (2, Err(7)), (1, Ok(())), (5, Err(8))] {
                let ended = &ended;
                together.push(async move {
                    after(times, ended).await;
                    result
                });
            }
            assert_eq!(ended.get(), 0, "nothing starts by itself");
            together.start().await;
            assert_eq!(ended.get(), 1);
            together.finish().await
        });
        assert_eq!((result, ended.get()), (Err(7), 4));
        assert_eq!(
            queue.block_on(Together::<()>::new().finish()),
            Ok(()),
            "nothing to do"
        );
    }
}
