//! Guards against anything that is known of an image and does not hold above a filter that changes its bytes:
//! zeroes, allocation, the place in a file, compressed data, what a resize, a commit or a rebase leaves.
//!
//! Each case makes a chain of images of any format that is written in place, with `xor` and other filters over
//! images and over files, and does to it whatever a disk allows. The content is that of plain memory.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zebu::block::{Device, Format, Objects, OpenOptions, Preallocation, Status, Zeroing};
use zebu::jobs::{
    self, CommitError, CommitOptions, CompareOptions, Comparison, CompressOptions, ConvertError,
    ConvertOptions, CreateQcow2, NewBacking, RebaseOptions, Target, create_qcow2,
};
use zebu::names::Source;
use zebu::storage::{
    EngineKind, Iov, Memory, OpenFile, OwnedBuffer, Queue, QueueOptions, open_file,
};
use zebu_testkit::{WRITTEN, Written};

use crate::common::peer::text;
use crate::common::{Rng, progress};
use crate::disk::assert_same;
use crate::filters::throttle_groups;
use crate::trace;

/// A filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Xor(u8),
    Throttle,
    CopyOnRead,
    Preallocate,
    Blkdebug,
}

/// An image of the chain.
#[derive(Clone, Debug)]
struct Level {
    format: &'static str,
    file: PathBuf,
    /// The uppermost first.
    over: Vec<Node>,
    over_file: Vec<Node>,
}

struct Case {
    rng: Rng,
    folder: PathBuf,
    queue: Queue,
    /// The lowest first.
    levels: Vec<Level>,
    /// What the chain reads as.
    bytes: Vec<u8>,
    /// The disk of the top image is the file of a raw one.
    is_stacked: bool,
    discard: bool,
    names: usize,
}

fn xor(nodes: &[Node], bytes: &mut [u8]) {
    for node in nodes {
        if let Node::Xor(key) = node {
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte ^= key ^ (at >> 9) as u8;
            }
        }
    }
}

fn wrap(nodes: &[Node], mut below: String) -> String {
    for node in nodes.iter().rev() {
        below = match node {
            Node::Xor(key) => format!(r#"{{"driver":"xor","key":{key},"file":{below}}}"#),
            Node::Throttle => {
                format!(r#"{{"driver":"throttle","throttle-group":"g","file":{below}}}"#)
            }
            Node::CopyOnRead => format!(r#"{{"driver":"copy-on-read","file":{below}}}"#),
            Node::Preallocate => {
                format!(r#"{{"driver":"preallocate","prealloc-size":100000,"file":{below}}}"#)
            }
            Node::Blkdebug => format!(r#"{{"driver":"blkdebug","image":{below}}}"#),
        };
    }
    below
}

fn nodes(rng: &mut Rng, kinds: &[Node]) -> Vec<Node> {
    let mut nodes = Vec::new();
    while nodes.len() < 3 && rng.one_in(2) {
        nodes.push(match rng.one_in(2) {
            true => Node::Xor(rng.below(256) as u8),
            false => rng.pick(kinds),
        });
    }
    nodes
}

impl Level {
    fn node(&self, backing: Option<String>) -> String {
        let file = format!(r#"{{"driver":"file","filename":"{}"}}"#, text(&self.file));
        let file = wrap(&self.over_file, file);
        let backing = match self.format {
            "qcow2" => format!(r#","backing":{}"#, backing.unwrap_or_else(|| "null".into())),
            _ => String::new(),
        };
        let image = format!(r#"{{"driver":"{}","file":{file}{backing}}}"#, self.format);
        wrap(&self.over, image)
    }
}

/// Makes a random chain and uses it. Returns the number of requests.
pub fn run(seed: u64, folder: &Path, engines: &[EngineKind]) -> usize {
    let mut rng = Rng::new(seed);
    let options = QueueOptions::default()
        .engine(rng.pick(engines))
        .inflate_inline(rng.one_in(2));
    let mut case = Case {
        queue: Queue::new(options).unwrap(),
        folder: folder.to_path_buf(),
        levels: Vec::new(),
        bytes: Vec::new(),
        is_stacked: false,
        discard: rng.one_in(2),
        names: 0,
        rng,
    };
    let mut steps = 0;
    for depth in 0..1 + case.rng.below(3) {
        case.add_level(depth > 0);
        case.is_stacked = case.rng.one_in(6);
        steps += case.session();
        case.is_stacked = false;
    }
    case.jobs();
    steps
}

impl Case {
    fn new_file(&mut self) -> PathBuf {
        self.names += 1;
        self.folder.join(format!("{}", self.names))
    }

    /// Makes an image, over the others if it has a backing file.
    fn add_level(&mut self, over_others: bool) {
        let kind = match over_others {
            true => Written::QCOW2,
            false => self.rng.pick(WRITTEN),
        };
        let rng = &mut self.rng;
        let size = match over_others && rng.one_in(2) {
            true => self.bytes.len() as u64,
            false => 512 * (1 + rng.below(6000)),
        };
        let mut over = nodes(rng, &[Node::Throttle, Node::CopyOnRead]);
        let over_file = nodes(rng, &[Node::Throttle, Node::Preallocate, Node::Blkdebug]);
        if over_others && rng.one_in(2) {
            over.push(Node::Xor(1 + rng.below(255) as u8));
        }
        let level = Level {
            format: kind.name,
            file: self.new_file(),
            over,
            over_file,
        };
        trace(|| format!("{level:?} of {size} bytes"));
        self.make(&kind, &level, size);
        self.bytes.resize(size as usize, 0);
        xor(&level.over, &mut self.bytes);
        self.levels.push(level);
    }

    fn make(&mut self, kind: &Written, level: &Level, size: u64) {
        let how = OpenFile::default().write(true).create(true);
        let file = open_file(&level.file, how).unwrap();
        match kind.name {
            "qcow2" => {
                // Options name what is below.
                let mut options = CreateQcow2::default().size(size);
                options = options.cluster_bits(9 + self.rng.below(9) as u32);
                if self.rng.one_in(3) {
                    options = options.cluster_bits(16).extended_l2(true);
                }
                let made = create_qcow2(&self.queue, &*file, None, &options, |_| {});
                self.queue.block_on(made).unwrap();
            }
            _ => kind.make(&self.queue, file.clone(), size),
        }
        drop(file);
        let mut bytes = fs::read(&level.file).unwrap();
        xor(&level.over_file, &mut bytes);
        fs::write(&level.file, bytes).unwrap();
    }

    fn open_node(&self, node: &str, write: bool) -> Device {
        let source = Source::Name(format!("json:{node}").into());
        let options = OpenOptions::default()
            .write(write)
            .discard(Some(self.discard))
            .objects(Objects::default().throttle_groups(throttle_groups()));
        Device::open(&self.queue, &source, &options).unwrap_or_else(|e| panic!("{node}: {e}"))
    }

    fn open(&self, write: bool) -> Device {
        let mut levels = self.levels.clone();
        let top = levels.len() - 1;
        if !write {
            levels[top].over.retain(|node| *node != Node::CopyOnRead);
        }
        let mut node = levels[top].node((top > 0).then(|| self.node_read(top - 1)));
        if self.is_stacked {
            node = format!(r#"{{"driver":"raw","file":{node}}}"#);
        }
        self.open_node(&node, write)
    }

    /// The chain from this level down, to be opened by any number.
    fn node_read(&self, level: usize) -> String {
        let below = (level > 0).then(|| self.node_read(level - 1));
        let mut level = self.levels[level].clone();
        level.over.retain(|node| *node != Node::CopyOnRead);
        level.node(below)
    }

    fn close(&self, device: Device) {
        let closed = self.queue.block_on(device.close(&self.queue));
        closed.unwrap_or_else(|e| panic!("close: {e}"));
    }

    /// Uses the chain.
    fn session(&mut self) -> usize {
        let mut device = self.open(true);
        let steps = 10 + self.rng.below(30) as usize;
        for _ in 0..steps {
            self.step(&mut device);
            progress();
        }
        if self.rng.one_in(2) && !self.is_stacked {
            self.overlay(&mut device);
        }
        self.verify(&device, "before a close");
        self.close(device);
        let device = self.open(false);
        self.verify(&device, "after a close");
        steps
    }

    fn range(&mut self, unit: usize) -> std::ops::Range<usize> {
        let size = self.bytes.len();
        let start = self.rng.index(size) / unit * unit;
        let most = 1usize << self.rng.below(20);
        let end = (start + (1 + self.rng.index(most)).next_multiple_of(unit)).min(size);
        start..end
    }

    fn step(&mut self, device: &mut Device) {
        let queue = self.queue.clone();
        let kind = self.rng.below(10);
        let unit = match kind {
            7 => device.top().cluster_size().unwrap_or(512) as usize,
            _ => self.rng.pick(&[1, 512, 4096]),
        };
        let range = self.range(unit);
        let (at, length) = (range.start as u64, range.len() as u64);
        trace(|| format!("{kind} {range:x?}"));
        let mut data = vec![0; range.len()];
        if !self.rng.one_in(4) {
            self.rng.fill(&mut data);
        }
        match kind {
            0..3 => {
                device.write_blocking(&queue, at, &data).unwrap();
                self.bytes[range].copy_from_slice(&data);
            }
            3 | 4 => {
                let zeroing = self.rng.pick(&[Zeroing::Keep, Zeroing::Unmap]);
                queue
                    .block_on(device.write_zeroes(&queue, at, length, zeroing))
                    .unwrap();
                self.bytes[range].fill(0);
            }
            5 => {
                let quickly = device.write_zeroes_quickly(&queue, at, length, Zeroing::Keep);
                match queue.block_on(quickly) {
                    Ok(()) => self.bytes[range].fill(0),
                    Err(e) => assert_eq!(e.errno(), libc::EOPNOTSUPP, "{e}"),
                }
            }
            6 => {
                queue.block_on(device.discard(&queue, at, length)).unwrap();
                data.fill(0);
                self.adopt(device, range, &data);
            }
            7 => {
                let mut buffer = data.clone();
                #[allow(unsafe_code)]
                // SAFETY: the buffer lives until the write, waited for here, has ended.
                let iov: Iov = unsafe { buffer.first(data.len()) }.unwrap();
                match queue.block_on(device.write_compressed(&queue, at, &iov)) {
                    Ok(()) => self.bytes[range].copy_from_slice(&data),
                    Err(_) => self.adopt(device, range, &data),
                }
            }
            // The disk of an image that is a file has a fixed size.
            8 if !self.is_stacked && self.rng.one_in(3) => self.resize(device),
            _ => {
                device.read_blocking(&queue, at, &mut data).unwrap();
                assert_same(&data, &self.bytes[range.clone()], range.start, "a read");
                self.look(device, range);
            }
        }
    }

    fn resize(&mut self, device: &mut Device) {
        let size = 512 * (1 + self.rng.below(6000));
        let queue = self.queue.clone();
        let resized = device.resize(&queue, size, Preallocation::Off);
        if queue.block_on(resized).is_ok() {
            trace(|| format!("resized to {size}"));
            self.bytes.resize(size as usize, 0);
        }
    }

    /// Each byte is the old one or that of `new`.
    fn adopt(&mut self, device: &Device, range: std::ops::Range<usize>, new: &[u8]) {
        let mut found = vec![0; range.len()];
        device
            .read_blocking(&self.queue, range.start as u64, &mut found)
            .unwrap();
        let old = &mut self.bytes[range.clone()];
        for (at, byte) in found.iter().enumerate() {
            let fits = *byte == old[at] || *byte == new[at];
            assert!(fits, "{:#x} is {byte:#x}", range.start + at);
        }
        old.copy_from_slice(&found);
    }

    /// What the status says of a range must hold.
    fn look(&self, device: &Device, range: std::ops::Range<usize>) {
        let mut at = range.start;
        while at < range.end {
            let left = (range.end - at) as u64;
            let status = device.status(&self.queue, at as u64, left);
            let status = self.queue.block_on(status).unwrap();
            let end = at + status.length as usize;
            if status.zero || !status.present {
                let found = self.bytes[at..end].iter().position(|byte| *byte != 0);
                assert_eq!(found, None, "{status:?} at {at:#x}");
            }
            if let Some(host) = status.host.filter(|_| status.data && !status.zero) {
                self.look_in_file(device, &status, host, at..end);
            }
            at = end;
        }
    }

    /// What stands in the file where the status says that a range is must be its bytes.
    fn look_in_file(
        &self,
        device: &Device,
        status: &Status,
        host: u64,
        range: std::ops::Range<usize>,
    ) {
        if self.is_stacked {
            // It is a place of the disk below.
            return;
        }
        let layer = &device.layers()[status.depth];
        let file = std::fs::File::open(layer.storage(status.storage).path()).unwrap();
        let mut found = vec![0; range.len()];
        // A disk of whole sectors may end behind its file.
        let length = file.metadata().unwrap().len().saturating_sub(host);
        let length = found.len().min(length as usize);
        file.read_exact_at(&mut found[..length], host).unwrap();
        assert_same(
            &found,
            &self.bytes[range.clone()],
            range.start,
            "the place in the file",
        );
    }

    fn verify(&self, device: &Device, what: &str) {
        let mut found = vec![0; self.bytes.len()];
        assert_eq!(device.size(), self.bytes.len() as u64, "{what}");
        device.read_blocking(&self.queue, 0, &mut found).unwrap();
        assert_same(&found, &self.bytes, 0, what);
        self.look(device, 0..self.bytes.len());
    }

    /// An overlay is on top for a while.
    fn overlay(&mut self, device: &mut Device) {
        let queue = self.queue.clone();
        let path = self.new_file();
        let size = device.size();
        let how = OpenFile::default().write(true).create(true);
        let backing = NewBacking::new("never opened").format(Some("raw".into()));
        let options = CreateQcow2::default().size(size).backing(Some(backing));
        let file = open_file(&path, how).unwrap();
        queue
            .block_on(create_qcow2(&queue, &*file, None, &options, |_| {}))
            .unwrap();
        drop(file);
        let options = OpenOptions::default()
            .write(true)
            .discard(Some(self.discard))
            .no_backing(true);
        let source = Source::Name(text(&path).into());
        let overlay = Device::open(&queue, &source, &options).unwrap();
        trace(|| "an overlay".into());
        queue.block_on(device.put_on_top(&queue, overlay)).unwrap();
        for _ in 0..self.rng.below(12) {
            let before = device.size();
            self.step(device);
            if device.size() != before {
                // The image below gets that size by the commit, or cannot.
                break;
            }
        }
        self.verify(device, "with an overlay");
        let taken = queue.block_on(async {
            device.commit_top(&queue).await?;
            device.take_off_top(&queue).await
        });
        match taken {
            Ok(top) => self.close(top),
            // It has another size, and then another program's overlay would stay.
            Err(e) => {
                trace(|| format!("not taken off: {e}"));
                let (size, format) = (device.layers()[1].size(), device.layers()[1].format());
                assert_ne!(size, device.size(), "{e}");
                let is_fixed = ![Format::QCOW2, Format::RAW].contains(&format);
                assert!(is_fixed || size > device.size(), "{e}");
                let back = device.resize(&queue, size, Preallocation::Off);
                queue.block_on(back).unwrap();
                self.bytes.resize(size as usize, 0);
                queue.block_on(device.commit_top(&queue)).unwrap();
                let top = queue.block_on(device.take_off_top(&queue)).unwrap();
                self.close(top);
            }
        }
        self.verify(device, "without the overlay");
    }

    /// Whole images are read, written and moved.
    fn jobs(&mut self) {
        let queue = self.queue.clone();
        let options = ConvertOptions::default().copy_range(self.rng.one_in(2));
        // A file, so that the kernel may copy.
        let raw = self.new_file();
        fs::write(&raw, vec![0xaa; self.bytes.len()]).unwrap();
        let file = open_file(&raw, OpenFile::default().write(true)).unwrap();
        jobs::convert(vec![self.open(false)], Target::Raw(file), &options, |_| {}).unwrap();
        let found = fs::read(&raw).unwrap();
        assert_same(&found, &self.bytes, 0, "a conversion from it");
        self.compare();
        if self.rng.one_in(2) {
            self.convert_into();
        }
        if self.levels.len() > 1 {
            match self.rng.one_in(2) {
                true => self.rebase(),
                false => self.commit(),
            }
        }
        let device = self.open(true);
        self.verify(&device, "in the end");
        for layer in device.all_layers() {
            let mut said = Vec::new();
            let mut say = |what| said.push(what);
            let report = queue.block_on(layer.check(&queue, &mut say)).unwrap();
            let errors = report.map_or(0, |report| report.corruptions);
            assert_eq!(errors, 0, "{said:?}");
        }
        self.close(device);
    }

    fn model(&self) -> Device {
        let memory = Arc::new(Memory::new(self.bytes.clone()));
        let options = OpenOptions::default().format(Some(Format::RAW));
        Device::from_storage(&self.queue, memory, &options).unwrap()
    }

    fn compare(&self) {
        let found = jobs::compare(
            [self.open(false), self.model()],
            &CompareOptions::default(),
            |_| {},
        );
        assert_eq!(found.unwrap(), Comparison::Identical);
    }

    /// Other content is converted into it.
    fn convert_into(&mut self) {
        for chunk in self.bytes.chunks_mut(65536) {
            match self.rng.below(3) {
                0 => chunk.fill(0),
                1 => self.rng.fill(chunk),
                _ => {}
            }
        }
        let compress = self.rng.one_in(2).then(CompressOptions::default);
        trace(|| format!("convert into it: {compress:?}"));
        let is_compressed = compress.is_some();
        let options = ConvertOptions::default().compress(compress);
        let target = Target::Image(self.open(true));
        match jobs::convert(vec![self.model()], target, &options, |_| {}) {
            Ok(()) => self.compare(),
            Err(e) => {
                trace(|| format!("{e}"));
                assert!(is_compressed, "{e}");
                let is_qcow2 = self.levels.last().is_some_and(|top| top.format == "qcow2");
                let is_refused = matches!(e, ConvertError::NotCompressible);
                assert_eq!(is_refused, !is_qcow2 || self.is_stacked, "{e}");
                // Clusters are allocated: some have the old content.
                let target = Target::Image(self.open(true));
                let options = ConvertOptions::default();
                jobs::convert(vec![self.model()], target, &options, |_| {}).unwrap();
                self.compare();
            }
        }
    }

    fn rebase(&mut self) {
        let mut new = Level {
            format: "raw",
            file: self.new_file(),
            over: nodes(&mut self.rng, &[Node::Throttle]),
            over_file: nodes(&mut self.rng, &[Node::Throttle, Node::Preallocate]),
        };
        let mut bytes = vec![0; 512 * (1 + self.rng.index(6000))];
        for chunk in bytes.chunks_mut(65536) {
            if self.rng.one_in(2) {
                let end = chunk.len();
                let same = self.bytes.len().min(end);
                chunk[..same].copy_from_slice(&self.bytes[..same]);
            }
        }
        fs::write(&new.file, bytes).unwrap();
        // Now and then it is the image that is below already.
        if self.rng.one_in(3) {
            new = self.levels[self.levels.len() - 2].clone();
            new.over = nodes(&mut self.rng, &[Node::Throttle]);
        }
        trace(|| format!("rebase to {new:?}"));
        let top = self.levels.len() - 1;
        let node = match new.format {
            "qcow2" if top > 1 => new.node(Some(self.node_read(top - 2))),
            _ => new.node(None),
        };
        let device = self.open_node(&node, false);
        let overlay = self.open(true);
        let options = RebaseOptions::default().compress(self.rng.one_in(2));
        let rebased = jobs::rebase(&self.queue, overlay, Some(device), None, &options, |_| {});
        rebased.unwrap();
        let lowest = match new.format {
            "qcow2" => top - 1,
            _ => 0,
        };
        let mut levels: Vec<_> = self.levels[..lowest].to_vec();
        levels.push(new);
        levels.push(self.levels[top].clone());
        self.levels = levels;
    }

    /// The top image is committed to that below it, which is written through what changes its bytes.
    fn commit(&mut self) {
        let top = self.levels.len() - 1;
        let mut alone = self.levels[top].clone();
        alone.over.retain(|node| *node != Node::CopyOnRead);
        let upper = self.open_node(&alone.node(None), true);
        let base = self.open_node(&self.node_read(top - 1), true);
        trace(|| "commit".into());
        let options = CommitOptions::default().empty(self.rng.one_in(2));
        match jobs::commit(&self.queue, upper, base, &options, |_| {}) {
            // Not every format can have another size.
            Ok(()) | Err(CommitError::Enlarge(_)) => {}
            Err(e) => panic!("commit: {e}"),
        }
    }
}
