//! A storage that remembers everything done to it, so that one can see what a
//! power cut at any moment may leave.

use std::io;
use std::path::Path;
use std::sync::Mutex;

use zebu::storage::{
    Alignment, CacheMode, Iov, Memory, OpKind, Queue, Started, Storage, StorageExtent,
};

use super::Rng;

/// What a disk writes as a whole or not at all.
const SECTOR: u64 = 512;

/// Something that was done.
#[derive(Clone, Debug)]
pub enum Entry {
    Write {
        offset: u64,
        bytes: Vec<u8>,
    },
    SetLen(u64),
    /// Everything before is durable.
    Flush,
}

/// Memory, and all that was done to it since it was made.
#[derive(Debug)]
pub struct Recorder {
    memory: Memory,
    before: Vec<u8>,
    log: Mutex<Vec<Entry>>,
}

impl Recorder {
    pub fn new(bytes: Vec<u8>) -> Self {
        Recorder {
            memory: Memory::new(bytes.clone()),
            before: bytes,
            log: Mutex::default(),
        }
    }

    /// How much was done until now.
    pub fn len_of_log(&self) -> usize {
        self.log.lock().unwrap().len()
    }

    fn note(&self, entry: Entry) {
        self.log.lock().unwrap().push(entry);
    }

    /// What may be there if the power goes after the first `count` entries:
    /// what was flushed, and of the rest any part.
    pub fn after_cut(&self, count: usize, rng: &mut Rng) -> Vec<u8> {
        let log = self.log.lock().unwrap();
        let log = &log[..count];
        let flushed = log.iter().rposition(|e| matches!(e, Entry::Flush));
        let (durable, rest) = log.split_at(flushed.map_or(0, |n| n + 1));
        let mut bytes = self.before.clone();
        for entry in durable {
            apply(&mut bytes, entry, |_| true);
        }
        let how = rng.below(5);
        let kept = rng.below(rest.len() as u64 + 1) as usize;
        for (nth, entry) in rest.iter().enumerate() {
            let whole = rng.one_in(2);
            apply(&mut bytes, entry, |_| match how {
                0 => true,
                1 => false,
                // Everything up to some moment.
                2 => nth < kept,
                3 => whole,
                _ => rng.one_in(2),
            });
        }
        bytes
    }
}

/// Does what an entry says, to those sectors that `keeps` wants.
fn apply(image: &mut Vec<u8>, entry: &Entry, mut keeps: impl FnMut(u64) -> bool) {
    match entry {
        Entry::Flush => {}
        Entry::SetLen(length) => {
            if keeps(0) {
                image.resize(*length as usize, 0);
            }
        }
        Entry::Write { offset, bytes } => {
            let mut done = 0;
            while done < bytes.len() {
                let at = offset + done as u64;
                let length = ((SECTOR - at % SECTOR) as usize).min(bytes.len() - done);
                if keeps(at / SECTOR) {
                    let (start, end) = (at as usize, at as usize + length);
                    if image.len() < end {
                        image.resize(end, 0);
                    }
                    image[start..end].copy_from_slice(&bytes[done..done + length]);
                }
                done += length;
            }
        }
    }
}

// SAFETY: passed on to `Memory`, where each operation has ended when it was
// started.
unsafe impl Storage for Recorder {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        match (kind, memory) {
            (OpKind::Write, Some(iov)) => {
                let mut bytes = vec![0; iov.len()];
                iov.copy_to(&mut bytes);
                self.note(Entry::Write { offset, bytes });
            }
            (OpKind::WriteDurable, _) => panic!("the cache mode is not a write-through one"),
            (OpKind::ZeroRange | OpKind::PunchHole, _) => {
                let end = (offset + length).min(self.memory.len().unwrap());
                let bytes = vec![0; end.saturating_sub(offset) as usize];
                self.note(Entry::Write { offset, bytes });
            }
            (OpKind::Allocate, _) => {
                let end = (offset + length).max(self.memory.len().unwrap());
                self.note(Entry::SetLen(end));
            }
            (OpKind::Flush, _) => self.note(Entry::Flush),
            _ => {}
        }
        // SAFETY: passed on.
        unsafe { self.memory.start(queue, kind, offset, length, memory) }
    }

    fn len(&self) -> io::Result<u64> {
        self.memory.len()
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.note(Entry::SetLen(length));
        self.memory.set_len(length)
    }

    fn allocated(&self) -> io::Result<u64> {
        self.memory.allocated()
    }

    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    fn extent(&self, offset: u64) -> io::Result<StorageExtent> {
        self.memory.extent(offset)
    }

    fn path(&self) -> &Path {
        Path::new("")
    }

    fn cache_mode(&self) -> CacheMode {
        CacheMode::WriteBack
    }

    fn is_device(&self) -> bool {
        false
    }
}
