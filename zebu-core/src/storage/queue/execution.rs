//! Which thread executes an operation.
#![allow(unsafe_code)]

use super::super::engine::{Op, OpKind};

/// Which thread executes an operation, for all engines alike.
///
/// A short read of what is in the page cache has ended before it gets here (`Inner::read_at_once`).
/// Of the others, the queue's thread executes a read, a write, a change of length or a search for
/// holes inline if it is the only operation in flight and the thread would sleep until its end. While
/// it waits for descriptors too, or has other work, it does so only with a write to the page cache,
/// which cannot take long. With
/// [`QueueOptions::inline_buffered`](super::QueueOptions::inline_buffered) it always executes these,
/// reads of what is in the page cache, and searches for holes. All others are the engine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Execution {
    /// By the queue's thread.
    Inline,
    /// By the queue's thread if the page cache has the bytes, else by the engine.
    InlineIfCached,
    /// By the engine.
    Engine,
}

/// What matters of the queue at the end of a turn of its loop.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Whether the operation is the only one in flight.
    pub alone: bool,
    /// Whether the thread would only wait for it.
    pub sleeps: bool,
    /// Whether the thread executes what goes through the page cache in any case.
    pub inline_buffered: bool,
}

impl Execution {
    /// How `op`, which was started in this turn, is executed.
    pub fn of(op: &Op, round: Round) -> Self {
        match op.kind {
            OpKind::Read | OpKind::Write | OpKind::SetLength | OpKind::Extent
                if round.alone && round.sleeps =>
            {
                Self::Inline
            }
            OpKind::Extent if round.inline_buffered => Self::Inline,
            OpKind::Read if op.buffered && round.inline_buffered => Self::InlineIfCached,
            OpKind::Write if op.buffered && (round.alone || round.inline_buffered) => Self::Inline,
            _ => Self::Engine,
        }
    }

    /// Executes `op` if that is for this thread; the result is one of a
    /// [`Completion`](super::Completion).
    ///
    /// # Safety
    /// The promise of [`Engine::submit`](super::engine::Engine::submit) holds.
    pub unsafe fn perform(self, op: &Op) -> Option<i32> {
        match self {
            // SAFETY: passed on.
            Self::Inline => Some(unsafe { op.complete() }),
            // SAFETY: passed on.
            Self::InlineIfCached => unsafe { op.complete_cached() },
            Self::Engine => None,
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a thread that blocks in an operation while others are in flight.
    use super::*;

    #[test]
    fn a_thread_blocks_only_for_a_single_operation() {
        let execution = |kind, buffered, alone, sleeps, inline_buffered| {
            let op = Op {
                buffered,
                ..Op::without_memory(kind, -1, 0, 0)
            };
            let round = Round {
                alone,
                sleeps,
                inline_buffered,
            };
            Execution::of(&op, round)
        };
        let kinds = [
            OpKind::Read,
            OpKind::Write,
            OpKind::SetLength,
            OpKind::Extent,
        ];
        for kind in kinds {
            assert_eq!(execution(kind, false, true, true, false), Execution::Inline);
            if kind == OpKind::Extent {
                continue;
            }
            for (alone, sleeps) in [(true, false), (false, true), (false, false)] {
                let engine = execution(kind, false, alone, sleeps, true);
                assert_eq!(engine, Execution::Engine);
            }
        }
        for (alone, inline) in [(true, false), (false, true)] {
            let read = execution(OpKind::Read, true, alone, false, inline);
            let expected = match inline {
                true => Execution::InlineIfCached,
                false => Execution::Engine,
            };
            assert_eq!(read, expected);
            let write = execution(OpKind::Write, true, alone, false, inline);
            assert_eq!(write, Execution::Inline);
        }
        let extent = |inline| execution(OpKind::Extent, true, true, false, inline);
        assert_eq!(
            (extent(false), extent(true)),
            (Execution::Engine, Execution::Inline)
        );
        for kind in [OpKind::WriteDurable, OpKind::Flush, OpKind::PunchHole] {
            assert_eq!(execution(kind, true, true, true, true), Execution::Engine);
        }
    }
}
