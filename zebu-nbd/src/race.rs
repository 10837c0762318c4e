//! Two futures of which the first that is ready counts.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

/// Which future was ready first, and its output. The other is dropped.
pub enum First<A, B> {
    A(A),
    B(B),
}

/// Runs both until one is ready; `a` is asked first.
pub async fn race<A: Future, B: Future>(a: A, b: B) -> First<A::Output, B::Output> {
    let (mut a, mut b) = (pin!(a), pin!(b));
    poll_fn(|context| {
        if let Poll::Ready(output) = a.as_mut().poll(context) {
            return Poll::Ready(First::A(output));
        }
        b.as_mut().poll(context).map(First::B)
    })
    .await
}
