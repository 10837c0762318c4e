//! Between the thread of a stream and the workers of a job: at most so much at a time.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};
use std::task::{Context, Poll, Waker};

use crate::lock;

/// A queue of values, each of which takes up some bytes.
#[derive(Debug)]
pub struct Channel<T> {
    state: Mutex<State<T>>,
    /// There is space, or the channel is closed.
    space: Condvar,
    /// There is a value, or the channel is closed.
    values: Condvar,
    /// Bytes that wait at most, unless a single value has more.
    most: usize,
}

#[derive(Debug)]
struct State<T> {
    values: VecDeque<Measured<T>>,
    bytes: usize,
    /// No more values come.
    ended: bool,
    /// No more values are taken.
    stopped: bool,
    waiting: Vec<Waker>,
}

/// A value and its bytes.
type Measured<T> = (usize, T);
/// Takes the next value out of a channel.
type Pop<'a, T> = &'a mut dyn FnMut() -> Option<Measured<T>>;

/// The receivers take no more values.
#[derive(Debug)]
pub struct Stopped;

impl<T> Channel<T> {
    /// An empty channel for `most` bytes.
    pub fn new(most: usize) -> Self {
        Channel {
            state: Mutex::new(State {
                values: VecDeque::new(),
                bytes: 0,
                ended: false,
                stopped: false,
                waiting: Vec::new(),
            }),
            space: Condvar::new(),
            values: Condvar::new(),
            most,
        }
    }

    /// Adds a value of so many bytes; blocks until there is space.
    pub fn send(&self, bytes: usize, value: T) -> Result<(), Stopped> {
        let mut state = lock(&self.state);
        while !state.stopped && !state.values.is_empty() && state.bytes + bytes > self.most {
            state = self.space.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        if state.stopped {
            return Err(Stopped);
        }
        state.bytes += bytes;
        state.values.push_back((bytes, value));
        let waker = state.waiting.pop();
        drop(state);
        self.values.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    /// No more values come.
    pub fn end(&self) {
        self.close(|state| state.ended = true);
    }

    /// No more values are taken: those that wait are dropped.
    pub fn stop(&self) {
        self.close(|state| {
            state.stopped = true;
            state.values.clear();
        });
    }

    /// Whether [`Channel::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        lock(&self.state).stopped
    }

    fn close(&self, change: impl FnOnce(&mut State<T>)) {
        let mut state = lock(&self.state);
        change(&mut state);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.space.notify_all();
        self.values.notify_all();
        waiting.into_iter().for_each(Waker::wake);
    }

    /// The next value; blocks until there is one. None: there are no more.
    pub fn receive(&self) -> Option<T> {
        let mut state = lock(&self.state);
        loop {
            if let Some((bytes, value)) = state.values.pop_front() {
                state.bytes -= bytes;
                drop(state);
                self.space.notify_one();
                return Some(value);
            }
            if state.ended || state.stopped {
                return None;
            }
            state = self.values.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// The next value, with what `take` adds to it: it is called under the lock, so that what it takes has
    /// the order of the values. None: there are no more.
    pub async fn next<A>(
        &self,
        take: impl Fn(Pop<'_, T>) -> Option<(A, Measured<T>)>,
    ) -> Option<(A, T)> {
        std::future::poll_fn(|context| self.poll(&take, context)).await
    }

    fn poll<A>(
        &self,
        take: impl Fn(Pop<'_, T>) -> Option<(A, Measured<T>)>,
        context: &mut Context<'_>,
    ) -> Poll<Option<(A, T)>> {
        let mut state = lock(&self.state);
        match take(&mut || state.values.pop_front()) {
            Some((added, (bytes, value))) => {
                state.bytes -= bytes;
                drop(state);
                self.space.notify_one();
                Poll::Ready(Some((added, value)))
            }
            None if state.ended || state.stopped => Poll::Ready(None),
            None => {
                state.waiting.push(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against values that are lost or out of order, and against threads that wait for ever.
    use std::sync::Arc;

    use super::*;
    use crate::storage::{Queue, QueueOptions};

    #[test]
    fn values_arrive_in_order_through_little_space() {
        let channel = Arc::new(Channel::new(100));
        let sender = channel.clone();
        let thread = std::thread::spawn(move || {
            for n in 0..1000 {
                sender.send(30, n).unwrap();
            }
            sender.end();
        });
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let got = queue.block_on(async {
            let mut got = Vec::new();
            while let Some(((), n)) = channel.next(|pop| Some(((), pop()?))).await {
                got.push(n);
            }
            got
        });
        thread.join().unwrap();
        assert!(got.into_iter().eq(0..1000));
    }

    #[test]
    fn a_stop_ends_both_sides() {
        let channel = Arc::new(Channel::new(10));
        let sender = channel.clone();
        let thread = std::thread::spawn(move || while sender.send(7, ()).is_ok() {});
        let stopper = channel.clone();
        std::thread::spawn(move || stopper.stop()).join().unwrap();
        thread.join().unwrap();
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let next = channel.next(|pop| Some(((), pop()?)));
        assert!(queue.block_on(next).is_none());
        assert!(channel.receive().is_none());
    }
}
