//! Waiting for the first of two futures.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

/// The output of the future that was ready first. The other one is dropped.
pub enum First<A, B> {
    A(A),
    B(B),
}

/// Polls both until one is ready; `a` first.
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
