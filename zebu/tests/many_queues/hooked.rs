//! Jobs beside the threads that write: a copy of the disk at one instant (copy-before-write), and a copy that
//! follows it (a mirror). Both are made of hooks.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::task::{Poll, Waker};

use zebu::Result;
use zebu::block::{ChangeHook, Device, HookFuture};
use zebu::storage::Queue;

/// Bytes of a block that is copied.
pub const COPIED: u64 = 4096;

fn blocks(range: &Range<u64>) -> Range<u64> {
    range.start / COPIED..range.end.div_ceil(COPIED)
}

async fn read(device: &Device, queue: &Queue, block: u64) -> Result<Vec<u8>> {
    let at = block * COPIED;
    let length = COPIED.min(device.size() - at) as usize;
    let (buffer, read) = device.read_buffer(queue, at, vec![0; length], length).await;
    read.map(|()| buffer)
}

/// A block of a [`Backup`].
#[derive(Clone, Debug)]
enum Block {
    Old,
    /// Somebody copies it.
    Busy,
    Copied(Vec<u8>),
}

/// The content of a disk when the hook was added.
#[derive(Debug)]
pub struct Backup(Mutex<(Vec<Block>, Vec<Waker>)>);

/// A block that is being copied: another request does it if this one is dropped.
struct Copying<'a>(&'a Backup, u64, Block);

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        let woken = {
            let mut state = self.0.state();
            state.0[self.1 as usize] = std::mem::replace(&mut self.2, Block::Old);
            std::mem::take(&mut state.1)
        };
        woken.into_iter().for_each(Waker::wake);
    }
}

impl Backup {
    pub fn new(size: u64) -> Backup {
        let blocks = vec![Block::Old; size.div_ceil(COPIED) as usize];
        Backup(Mutex::new((blocks, Vec::new())))
    }

    fn state(&self) -> MutexGuard<'_, (Vec<Block>, Vec<Waker>)> {
        self.0.lock().unwrap()
    }

    /// Copies a block, unless it was copied.
    pub async fn copy(&self, device: &Device, queue: &Queue, block: u64) -> Result<()> {
        let copying = poll_fn(|context| {
            let mut state = self.state();
            match state.0[block as usize] {
                Block::Copied(_) => Poll::Ready(None),
                Block::Old => {
                    state.0[block as usize] = Block::Busy;
                    Poll::Ready(Some(Copying(self, block, Block::Old)))
                }
                Block::Busy => {
                    state.1.push(context.waker().clone());
                    Poll::Pending
                }
            }
        });
        if let Some(mut copying) = copying.await {
            copying.2 = Block::Copied(read(device, queue, block).await?);
        }
        Ok(())
    }

    /// The copy, after all blocks were copied.
    pub fn bytes(&self) -> Vec<u8> {
        let state = self.state();
        let bytes = state.0.iter().flat_map(|block| match block {
            Block::Copied(bytes) => bytes.clone(),
            other => panic!("{other:?}"),
        });
        bytes.collect()
    }
}

impl ChangeHook for Backup {
    fn before<'a>(
        &'a self,
        device: &'a Device,
        queue: &'a Queue,
        range: Range<u64>,
    ) -> HookFuture<'a> {
        Box::pin(async move {
            for block in blocks(&range) {
                self.copy(device, queue, block).await?;
            }
            Ok(())
        })
    }
}

/// The blocks that a copy lacks.
#[derive(Debug)]
pub struct Mirror(Mutex<BTreeSet<u64>>);

impl Mirror {
    pub fn new(size: u64) -> Mirror {
        Mirror(Mutex::new(blocks(&(0..size)).collect()))
    }

    /// How many are lacking.
    pub fn dirty(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Copies one of them.
    pub async fn copy(&self, device: &Device, queue: &Queue, target: &Device) -> Result<()> {
        // What changes it meanwhile puts it back.
        let Some(block) = self.0.lock().unwrap().pop_first() else {
            return Ok(());
        };
        let bytes = read(device, queue, block).await?;
        let length = bytes.len();
        target
            .write_buffer(queue, block * COPIED, bytes, length)
            .await
            .1
    }
}

impl ChangeHook for Mirror {
    fn after(&self, range: Range<u64>) {
        self.0.lock().unwrap().extend(blocks(&range));
    }
}
