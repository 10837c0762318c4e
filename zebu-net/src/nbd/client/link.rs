//! A connection, and the requests that wait for its replies.
//!
//! Everything is behind one lock, under which nothing waits: the socket never blocks. Each queue
//! with requests in flight has a task that waits for the socket, and sends and receives for the
//! requests of all queues. So a future that is not polled delays no other request, and no queue
//! depends on another one.

mod reconnect;
mod watchdog;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::handshake::{Agreed, Facts};
use super::session::{Over, Session};
use super::slots::{Memory, Outcome, SlotId, Slots};
use super::wire::Socket;
use super::{NbdError, NbdOptions};
use crate::nbd::protocol::{Request, transmission};

/// One connection.
#[derive(Debug)]
pub(super) struct Link {
    options: Arc<NbdOptions>,
    /// For errors.
    server: Arc<str>,
    /// The properties of the export, which must be the same after a reconnect.
    facts: Facts,
    has_context: bool,
    /// Whether the server has flushes.
    flushes: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    slots: Slots,
    /// Requests that are not sent completely, in order.
    output: VecDeque<SlotId>,
    /// The tasks that send and receive, one of each queue with requests.
    drivers: Vec<Driver>,
    /// When the connection was lost, and how often until a reply came again.
    lost: Option<(Instant, u32)>,
    /// Counts receives.
    progress: u64,
}

#[derive(Debug)]
struct Driver {
    queue: u64,
    /// None before its first poll.
    waker: Option<Waker>,
    /// It was woken to send something and has not run since.
    notified: bool,
}

#[derive(Debug)]
enum Phase {
    Up(Box<Session>),
    /// Requests wait for another connection.
    Lost,
    /// Requests fail.
    Broken(NbdError),
}

/// The next step of a queue's task.
pub(super) enum Step {
    /// End: its queue has no requests.
    End,
    /// Wait to be woken: there is no connection.
    Rest,
    /// Wait to be woken, or for this socket to be readable or, if true, writable.
    Wait(Arc<Socket>, bool),
}

impl Link {
    pub(super) fn new(options: Arc<NbdOptions>, agreed: Agreed) -> Arc<Link> {
        let server: Arc<str> = options.server.to_string().into();
        let (facts, has_context) = (agreed.facts, agreed.context.is_some());
        let session = Session::new(agreed, server.clone());
        let link = Arc::new(Link {
            options,
            server,
            facts,
            has_context,
            flushes: facts.flags & transmission::SEND_FLUSH != 0,
            state: Mutex::new(State {
                phase: Phase::Up(Box::new(session)),
                slots: Slots::default(),
                output: VecDeque::new(),
                drivers: Vec::new(),
                lost: None,
                progress: 0,
            }),
        });
        watchdog::watch(&link);
        link
    }

    pub(super) fn options(&self) -> &NbdOptions {
        &self.options
    }

    /// Whether the server distinguishes data from holes.
    pub(super) fn has_context(&self) -> bool {
        self.has_context
    }

    fn state(&self) -> MutexGuard<'_, State> {
        crate::lock(&self.state)
    }

    /// Submits a request. True: the caller makes a task of the queue that calls [`Link::drive`].
    pub(super) fn submit(
        &self,
        queue: u64,
        request: Request,
        memory: Option<Memory>,
    ) -> Result<(SlotId, bool), NbdError> {
        let is_new;
        let (id, driver) = {
            let mut state = self.state();
            if let Phase::Broken(error) = &state.phase {
                return Err(error.clone());
            }
            let id = state.slots.insert(request, memory, queue);
            state.output.push_back(id);
            let driver = state.wake_driver(queue);
            is_new = state.needs_driver(queue);
            (id, driver)
        };
        driver.flatten().into_iter().for_each(Waker::wake);
        Ok((id, is_new))
    }

    /// The outcome of a request, after its reply.
    pub(super) fn poll(&self, id: SlotId, context: &Context<'_>) -> Poll<Outcome> {
        let mut state = self.state();
        match state.slots.take_outcome(id) {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                state.set_waker(id, context.waker());
                Poll::Pending
            }
        }
    }

    /// Sends and receives without waiting, for the task of a queue. `arrived`: the socket is
    /// readable.
    pub(super) fn drive(
        self: &Arc<Self>,
        queue: u64,
        arrived: bool,
        context: &Context<'_>,
    ) -> Step {
        let mut woken = Vec::new();
        let mut lost = None;
        let step = {
            let mut state = self.state();
            state.note_driver(queue, context.waker());
            let mut blocked = false;
            match state.pump(arrived, &mut woken) {
                Ok(more) => blocked = more,
                Err(over) => lost = self.lose(&mut state, over, &mut woken),
            }
            if state.slots.has_requests_of(queue) {
                match &state.phase {
                    Phase::Up(session) => Step::Wait(session.socket().clone(), blocked),
                    _ => Step::Rest,
                }
            } else {
                state.end_driver(queue, &mut woken);
                Step::End
            }
        };
        woken.into_iter().for_each(Waker::wake);
        if let Some(wait) = lost {
            reconnect::begin(self, wait);
        }
        step
    }

    /// Removes the task of a queue.
    pub(super) fn end_driver(&self, queue: u64) {
        let mut woken = Vec::new();
        self.state().end_driver(queue, &mut woken);
        woken.into_iter().for_each(Waker::wake);
    }

    /// A request was dropped. When this returns, its memory is not used.
    ///
    /// True: it is a change of which the server has received something. It goes on, and
    /// [`Link::poll`] returns its outcome.
    pub(super) fn abandon(&self, queue: u64, id: SlotId) -> bool {
        let driver = {
            let mut state = self.state();
            let state = &mut *state;
            if let Phase::Up(session) = &state.phase
                && state.slots.is_changing(id)
            {
                state.slots.keep(id, session.header());
                return true;
            }
            if state.slots.abandon(id) {
                state.output.retain(|other| *other != id);
            }
            // The task may have nothing to do any more.
            state.wake_driver(queue)
        };
        driver.flatten().into_iter().for_each(Waker::wake);
        false
    }

    /// True: the caller makes a task of the queue that calls [`Link::drive`].
    pub(super) fn needs_driver(&self, queue: u64) -> bool {
        self.state().needs_driver(queue)
    }

    /// Ends the session: requests fail, or wait for another one, which is to be tried after the
    /// time that is returned.
    fn lose(&self, state: &mut State, over: Over, woken: &mut Vec<Waker>) -> Option<Duration> {
        /// The time before the second attempt in a row, doubled for each further one.
        const FIRST_WAIT: Duration = Duration::from_millis(50);
        let what = match over {
            Over::Violation(what) => {
                let text = format!("the server breaks the protocol: {what}");
                self.fail(state, text, woken);
                return None;
            }
            Over::Lost(what) => format!("the connection was lost: {what}"),
        };
        if self.options.keeps_changes() && self.flushes && state.slots.are_owed() {
            // Another server may not have them, and its flush would succeed.
            let text = format!("{what}, and with it perhaps writes that were not flushed yet");
            self.fail(state, text, woken);
            return None;
        }
        let (since, times) = state.lost.unwrap_or_else(|| (Instant::now(), 0));
        if since.elapsed() >= self.options.reconnect_delay {
            self.fail(state, what, woken);
            return None;
        }
        tracing::debug!("NBD server {}: {what}", self.server);
        let error = NbdError::broken(&self.server, what);
        state.lost = Some((since, times + 1));
        state.phase = Phase::Lost;
        state.output = state.slots.rewind(&error, woken).into();
        state.wake_drivers(woken);
        Some(match times {
            0 => Duration::ZERO,
            _ => FIRST_WAIT * 2u32.pow((times - 1).min(4)),
        })
    }

    /// All requests fail from now on.
    fn fail(&self, state: &mut State, what: String, woken: &mut Vec<Waker>) {
        if let Phase::Up(session) = &state.phase {
            session.socket().shutdown();
        }
        let error = NbdError::broken(&self.server, what);
        let outstanding = state.slots.iter().filter(|(_, s)| s.outcome.is_none());
        let outstanding: Vec<SlotId> = outstanding.map(|(id, _)| id).collect();
        for id in outstanding {
            state.slots.finish(id, Err(error.clone()), woken);
        }
        state.output.clear();
        state.phase = Phase::Broken(error);
        state.wake_drivers(woken);
    }
}

/// For the threads of reconnects and time-outs.
impl Link {
    /// The deadline of a new connection; None: none is needed.
    pub(super) fn wants_connection_until(&self) -> Option<Instant> {
        let state = self.state();
        match (&state.phase, state.lost) {
            (Phase::Lost, Some((since, _))) => Some(since + self.options.reconnect_delay),
            _ => None,
        }
    }

    /// Continues the requests on a new connection.
    pub(super) fn restore(&self, agreed: Agreed) {
        let mut woken = Vec::new();
        {
            let mut state = self.state();
            let same = agreed.facts == self.facts && agreed.context.is_some() == self.has_context;
            if same {
                let session = Session::new(agreed, self.server.clone());
                state.phase = Phase::Up(Box::new(session));
                state.wake_drivers(&mut woken);
            } else {
                let text = "the export is another one after the connection was lost";
                self.fail(&mut state, text.into(), &mut woken);
            }
        }
        woken.into_iter().for_each(Waker::wake);
    }

    /// Fails the requests: there is no new connection.
    pub(super) fn give_up(&self, what: String) {
        let mut woken = Vec::new();
        self.fail(&mut self.state(), what, &mut woken);
        woken.into_iter().for_each(Waker::wake);
    }

    /// The number of receives, if a task waits for a reply. (Other replies are not received.)
    pub(super) fn owes(&self) -> Option<u64> {
        let state = self.state();
        let owes = matches!(state.phase, Phase::Up(_)) && state.slots.are_awaited();
        owes.then_some(state.progress)
    }

    /// Ends the session, unless something was received since `progress`.
    pub(super) fn is_silent(self: &Arc<Self>, progress: u64) {
        let mut woken = Vec::new();
        let mut lost = None;
        {
            let mut state = self.state();
            if let Phase::Up(session) = &state.phase
                && state.progress == progress
                && state.slots.are_awaited()
                && !session.socket().has_arrived()
            {
                session.socket().shutdown();
                let over = Over::Lost("it did not answer in time".into());
                lost = self.lose(&mut state, over, &mut woken);
            }
        }
        woken.into_iter().for_each(Waker::wake);
        if let Some(wait) = lost {
            reconnect::begin(self, wait);
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(|e| e.into_inner());
        // In the middle of a write a disconnect request would be taken for its data.
        if let Phase::Up(session) = &mut state.phase
            && state.output.is_empty()
        {
            session.close();
        }
    }
}

impl State {
    /// The waker of a queue's task, if it must be woken to send something: the first request of a
    /// batch wakes it. None: the queue has no task.
    fn wake_driver(&mut self, queue: u64) -> Option<Option<Waker>> {
        let mut drivers = self.drivers.iter_mut();
        match drivers.find(|driver| driver.queue == queue) {
            Some(driver) if driver.notified => Some(None),
            Some(driver) => {
                driver.notified = true;
                Some(driver.waker.clone())
            }
            None => None,
        }
    }

    /// Registers a task for the queue, unless it has one; whether it had none.
    fn needs_driver(&mut self, queue: u64) -> bool {
        let needs = !self.drivers.iter().any(|driver| driver.queue == queue);
        if needs {
            self.drivers.push(Driver {
                queue,
                waker: None,
                notified: true,
            });
        }
        needs
    }

    /// Notes that the task of a queue runs.
    fn note_driver(&mut self, queue: u64, waker: &Waker) {
        let mut drivers = self.drivers.iter_mut();
        if let Some(driver) = drivers.find(|driver| driver.queue == queue) {
            driver.notified = false;
            if !driver
                .waker
                .as_ref()
                .is_some_and(|old| old.will_wake(waker))
            {
                driver.waker = Some(waker.clone());
            }
        }
    }

    /// Removes the task of a queue.
    fn end_driver(&mut self, queue: u64, woken: &mut Vec<Waker>) {
        self.drivers.retain(|driver| driver.queue != queue);
        // It may have been the one that waited to send the rest.
        if !self.output.is_empty() {
            self.wake_drivers(woken);
        }
    }

    fn set_waker(&mut self, id: SlotId, waker: &Waker) {
        if let Some(slot) = self.slots.get_mut(id)
            && !slot.waker.as_ref().is_some_and(|old| old.will_wake(waker))
        {
            slot.waker = Some(waker.clone());
        }
    }

    fn wake_drivers(&self, woken: &mut Vec<Waker>) {
        let drivers = self.drivers.iter();
        woken.extend(drivers.filter_map(|driver| driver.waker.clone()));
    }

    /// Sends and receives without waiting. Whether something could not be sent.
    fn pump(&mut self, arrived: bool, woken: &mut Vec<Waker>) -> Result<bool, Over> {
        let Phase::Up(session) = &mut self.phase else {
            return Ok(false);
        };
        if arrived {
            session.arrived();
        }
        let blocked = session.send(&mut self.slots, &mut self.output)?;
        let before = self.slots.outstanding;
        let result = session.receive(&mut self.slots, woken);
        if arrived {
            self.progress += 1;
        }
        if self.slots.outstanding < before {
            self.lost = None;
        }
        result.map(|()| blocked)
    }
}
