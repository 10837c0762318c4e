//! Conversion to a target with aligned I/O. Guards against data that are lost where two workers write
//! parts of one block, against a wrong length of the target, and against lost reports of progress.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::common::Rng;
use zebu::block::{Device, OpenOptions};
use zebu::jobs::{ConvertEvent, ConvertOptions, Target, convert};
use zebu::names::Source;
use zebu::storage::{
    Alignment, Blocks, CacheMode, Iov, Memory, OpKind, Properties, Queue, QueueOptions, Started,
    Storage,
};

/// Memory that needs aligned operations, as direct I/O does. Its reads are slow, so that
/// read-modify-writes of one block overlap.
#[derive(Debug)]
struct Aligned(Memory, Blocks, Properties);

const BLOCK: u64 = 4096;

// SAFETY: all is passed on to `Memory`, which keeps no memory.
unsafe impl Storage for Aligned {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if matches!(kind, OpKind::Read | OpKind::Write) {
            assert!(offset.is_multiple_of(BLOCK) && length.is_multiple_of(BLOCK));
        }
        // SAFETY: passed on.
        let started = unsafe { self.0.start(queue, kind, offset, length, memory) };
        if kind == OpKind::Read {
            std::thread::sleep(Duration::from_millis(5));
        }
        started
    }
    fn properties(&self) -> &Properties {
        &self.2
    }
    fn blocks(&self) -> Option<&Blocks> {
        Some(&self.1)
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&self.0)
    }
}

/// Bytes without zero or equal sectors.
fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

fn open(path: &Path) -> Device {
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let source = Source::Name(path.into());
    Device::open(&queue, &source, &OpenOptions::default()).unwrap()
}

/// Converts files with these contents to a target with the content `before`. Returns its new content
/// and the last report of progress.
fn converted(contents: &[Vec<u8>], before: Vec<u8>, options: &ConvertOptions) -> (Vec<u8>, u64) {
    let dir = tempfile::tempdir().unwrap();
    let sources = contents.iter().enumerate().map(|(i, content)| {
        let path = dir.path().join(format!("{i}.raw"));
        fs::write(&path, content).unwrap();
        open(&path)
    });
    let properties = Properties::PLAIN
        .cache(CacheMode::None)
        .alignment(Alignment {
            memory: BLOCK as usize,
            offset: BLOCK as usize,
        });
    let target = Aligned(Memory::new(before), Blocks::new(4096), properties);
    let target = Arc::new(target);
    let mut last = 0;
    let raw = Target::Raw(target.clone());
    convert(sources.collect(), raw, options, |event| {
        if let ConvertEvent::Progress(now) = event {
            last = now.done;
        }
    })
    .unwrap();
    (target.0.to_vec(), last)
}

#[test]
fn sources_that_meet_inside_a_block() {
    // All clusters of the second source begin within a block.
    let contents = [noise(1536, 1), noise(6 << 20, 2), noise(4096 - 1536, 3)];
    let expected = contents.concat();
    for workers in [1, 8] {
        for (before, zero_from) in [(0, Some(0)), (0xee, None)] {
            let options = ConvertOptions::default()
                .workers(Some(workers))
                .zero_from(zero_from);
            let before = vec![before; expected.len()];
            let (got, done) = converted(&contents, before, &options);
            assert!(got == expected, "{workers} workers");
            assert_eq!(done, expected.len() as u64);
        }
    }
}

#[test]
fn zeroes_next_to_data_inside_a_block() {
    let mut last = vec![0; 3 << 20];
    last[(1 << 20) - 512] = 1;
    let contents = [noise(512, 1), vec![0; (1 << 20) + 1024], last];
    let expected = contents.concat();
    for sparse in [0, 512, 4096, 16 << 20] {
        let options = ConvertOptions::default().workers(Some(8)).sparse(sparse);
        let (got, _) = converted(&contents, vec![0xee; expected.len()], &options);
        assert!(got == expected, "sparse {sparse}");
    }
}

#[test]
fn the_target_keeps_its_length() {
    for length in [512, 1536, 4096 + 512, (1 << 20) + 512] {
        let content = noise(length, 4);
        let options = ConvertOptions::default();
        let (got, _) = converted(std::slice::from_ref(&content), vec![0; length], &options);
        assert_eq!(got.len(), length);
        assert!(got == content);
        // A longer target keeps its rest.
        let (got, _) = converted(
            std::slice::from_ref(&content),
            vec![9; length + 512],
            &options,
        );
        assert!(got[..length] == content && got[length..] == [9; 512]);
    }
}
