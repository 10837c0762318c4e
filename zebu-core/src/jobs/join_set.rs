//! Several operations of one worker, in flight at once.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

type Operation<'a, E> = Pin<Box<dyn Future<Output = Result<(), E>> + 'a>>;

/// Operations that are polled by one future.
pub(super) struct JoinSet<'a, E> {
    operations: Vec<Operation<'a, E>>,
    failure: Option<E>,
}

impl<'a, E> JoinSet<'a, E> {
    /// An empty set.
    pub(super) fn new() -> Self {
        JoinSet {
            operations: Vec::new(),
            failure: None,
        }
    }

    /// Adds an operation, which is not started yet.
    pub(super) fn push(&mut self, operation: impl Future<Output = Result<(), E>> + 'a) {
        self.operations.push(Box::pin(operation));
    }

    /// Whether all operations have ended.
    pub(super) fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Starts them, in order: each is polled once.
    pub(super) async fn start(&mut self) {
        poll_fn(|context| {
            self.poll(context);
            Poll::Ready(())
        })
        .await;
    }

    /// Waits until all have ended; returns the error of the first that failed.
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
    //! Guards against an operation that is never polled, and an error that is lost.
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
    fn all_end_and_the_first_failure_is_returned() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let ended = Cell::new(0);
        let result = queue.block_on(async {
            let mut set = JoinSet::new();
            for (times, result) in [(3, Ok(())), (2, Err(7)), (1, Ok(())), (5, Err(8))] {
                let ended = &ended;
                set.push(async move {
                    after(times, ended).await;
                    result
                });
            }
            assert_eq!(ended.get(), 0, "nothing starts by itself");
            set.start().await;
            assert_eq!(ended.get(), 1);
            set.finish().await
        });
        assert_eq!((result, ended.get()), (Err(7), 4));
        assert_eq!(
            queue.block_on(JoinSet::<()>::new().finish()),
            Ok(()),
            "nothing to do"
        );
    }
}
