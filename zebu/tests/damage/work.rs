//! The work on damaged images, and the conditions that must hold.

use std::collections::BTreeSet;

use zebu::block::{Device, Preallocation, Zeroing};
use zebu::jobs::{
    self, AmendOptions, CommitOptions, CompareOptions, Comparison, ConvertOptions, RebaseOptions,
    Target,
};
use zebu::qcow2::SnapshotName;
use zebu::storage::{EngineKind, Queue};

use crate::common::Rng;
use crate::images::{Files, Sound, check, raw, stamp};
use crate::layout::Suspects;

/// Reads each cluster of the first `length` bytes; `None`: an error.
pub fn read(queue: &Queue, device: &Device, cluster: u64, length: usize) -> Vec<Option<Vec<u8>>> {
    let length = length.min(device.size() as usize);
    (0..length)
        .step_by(cluster as usize)
        .map(|at| {
            let mut bytes = vec![0; (cluster as usize).min(length - at)];
            let result = device.read_blocking(queue, at as u64, &mut bytes);
            result.is_ok().then_some(bytes)
        })
        .collect()
}

/// The bytes of cluster `n`.
fn part(content: &[u8], n: usize, cluster: u64) -> &[u8] {
    let start = n * cluster as usize;
    &content[start..content.len().min(start + cluster as usize)]
}

/// Fails unless each cluster of a disk that is not suspected reads as it should. Returns the
/// content.
fn judge(
    queue: &Queue,
    device: &Device,
    cluster: u64,
    content: &[u8],
    suspects: &[bool],
    what: &str,
) -> Vec<Option<Vec<u8>>> {
    let found = read(queue, device, cluster, content.len());
    for (n, found) in found.iter().enumerate() {
        if suspects.get(n) == Some(&true) {
            continue;
        }
        match found {
            None => panic!("{what}: cluster {n}, which is not damaged, cannot be read"),
            Some(bytes) if bytes[..] != *part(content, n, cluster) => {
                let at = (0..bytes.len()).find(|at| bytes[*at] != part(content, n, cluster)[*at]);
                panic!("{what}: cluster {n}, which is not damaged, differs from byte {at:?} on");
            }
            Some(_) => {}
        }
    }
    let least = suspects
        .iter()
        .rposition(|suspect| !suspect)
        .map_or(0, |n| n + 1);
    assert!(found.len() >= least, "{what}: the disk is shorter");
    found
}

/// Clusters whose status is zero must read as zeroes.
fn status_agrees(queue: &Queue, device: &Device, cluster: u64, clusters: usize) {
    let size = device.size().min(clusters as u64 * cluster);
    let mut at = 0;
    while at < size {
        let Ok(status) = queue.block_on(device.status(queue, at, size - at)) else {
            at = (at / cluster + 1) * cluster;
            continue;
        };
        let end = (at + status.length).min(size);
        while at < end {
            let to = end.min((at / cluster + 1) * cluster);
            if status.zero {
                let mut bytes = vec![0; (to - at) as usize];
                let read = device.read_blocking(queue, at, &mut bytes);
                let zero = read.is_ok() && bytes.iter().all(|byte| *byte == 0);
                assert!(zero, "the status of {at:#x} is zero, and it reads as data");
            }
            at = to;
        }
    }
}

/// What a truncated file lacks must not be read as something else. `left_out` are clusters that were
/// written meanwhile.
pub fn truncated(
    found: &[Option<Vec<u8>>],
    sound: &Sound,
    suspects: &Suspects,
    left_out: &[usize],
    what: &str,
) {
    for (n, found) in found.iter().enumerate() {
        let expected = part(&sound.content[0], n, sound.layout.cluster);
        if left_out.contains(&n) {
            continue;
        }
        assert!(
            !suspects.gone[n] || found.is_none(),
            "{what}: cluster {n} was truncated, and can be read"
        );
        let is_right = found.as_ref().is_none_or(|bytes| bytes[..] == *expected);
        assert!(
            !suspects.cut[n] || is_right,
            "{what}: cluster {n}, which is compressed and cut off, differs"
        );
    }
}

/// Reads all of a damaged image.
pub fn reading(queue: &Queue, sound: &Sound, files: &Files, suspects: &Suspects) {
    let cluster = sound.layout.cluster;
    for (view, content) in sound.content.iter().enumerate() {
        let Ok(device) = files.open_view(queue, &sound.layout.snapshot_ids, view) else {
            continue;
        };
        let what = format!("reading view {view}");
        let found = judge(
            queue,
            &device,
            cluster,
            content,
            &suspects.read[view],
            &what,
        );
        status_agrees(queue, &device, cluster, found.len());
        if view == 0 {
            truncated(&found, sound, suspects, &[], &what);
        }
    }
}

/// A check must report the data that a truncated data file lacks, and nothing else.
pub fn check_of_data_file(queue: &Queue, files: &Files, suspects: &Suspects) {
    let gone = suspects.gone.iter().filter(|gone| **gone).count();
    let device = files.open(queue, false, true).expect("the image is sound");
    let Some(image) = device.top().as_qcow2() else {
        unreachable!("opened as qcow2");
    };
    let report = queue
        .block_on(jobs::check(queue, image, &mut |_| {}, |_| {}))
        .expect("the image is sound");
    // (With subclusters a part of a cluster may be data.)
    let found = report.corruptions as usize;
    let possible = suspects.read[0].iter().filter(|suspect| **suspect).count();
    assert!(
        gone <= found && found <= possible,
        "{found} errors, {gone} clusters are gone"
    );
}

/// Jobs that read the whole image must have the same result as reads, and fail where these do.
pub fn jobs(queue: &Queue, sound: &Sound, files: &Files) {
    let open = || files.open(queue, false, true).ok();
    let Some(device) = open() else {
        return;
    };
    let content = &sound.content[0];
    if device.size() != content.len() as u64 {
        return;
    }
    let cluster = sound.layout.cluster;
    let found = read(queue, &device, cluster, content.len());
    let readable = found.iter().all(Option::is_some);
    let zeroed = |n: usize| vec![0; part(content, n, cluster).len()];
    let parts = found.iter().enumerate();
    let bytes: Vec<u8> = parts
        .flat_map(|(n, found)| found.clone().unwrap_or_else(|| zeroed(n)))
        .collect();
    let copy = raw(vec![0; bytes.len()]);
    let options = ConvertOptions::default()
        .workers(Some(1))
        .engine(EngineKind::Threads)
        .zero_from(Some(0));
    let converted = jobs::convert(vec![device], Target::Raw(copy.clone()), &options, |_| {});
    assert_eq!(converted.is_ok(), readable, "convert: {converted:?}");
    assert!(
        !readable || copy.to_vec() == bytes,
        "the converted disk differs"
    );

    let other = Device::from_storage(
        queue,
        raw(bytes.clone()),
        &zebu::block::OpenOptions::default().format(Some(zebu::block::Format::RAW)),
    );
    let pair = [
        open().expect("it opened before"),
        other.expect("a raw image opens"),
    ];
    let options = CompareOptions::default().engine(EngineKind::Threads);
    let compared = jobs::compare(pair, &options, |_| {});
    match readable {
        true => assert_eq!(compared.expect("all can be read"), Comparison::Identical),
        // What is readable of a cluster may be found to differ first.
        false => assert!(!matches!(compared, Ok(Comparison::Identical))),
    }
    if let Some(base) = &sound.base {
        commit(queue, files, base, &found, cluster);
    }
}

/// Commits into the base, which must keep its data where the top cannot be read.
fn commit(queue: &Queue, files: &Files, base: &[u8], found: &[Option<Vec<u8>>], cluster: u64) {
    let target = raw(base.to_vec());
    let options = zebu::block::OpenOptions::default()
        .format(Some(zebu::block::Format::RAW))
        .write(true);
    let device = Device::from_storage(queue, target.clone(), &options).expect("a raw image opens");
    let copy = Files {
        file: crate::storage::Sparse::new(&files.file.to_vec()),
        data: None,
        base: files.base.clone(),
    };
    let Ok(top) = copy.open(queue, true, false) else {
        return;
    };
    // Of a cluster that cannot be read, sectors may be.
    let sectors = |n: usize| {
        let sector = |at: usize| {
            let mut bytes = vec![0; 512];
            let read = top.read_blocking(queue, at as u64, &mut bytes);
            read.ok().map(|()| bytes)
        };
        let start = n * cluster as usize;
        let end = base.len().min(start + cluster as usize);
        (start..end / 512 * 512).step_by(512).map(sector).collect()
    };
    let unreadable =
        |(n, found): (usize, &Option<Vec<u8>>)| found.is_none().then(|| (n, sectors(n)));
    let partly: Vec<(usize, Vec<Option<Vec<u8>>>)> =
        found.iter().enumerate().filter_map(unreadable).collect();
    let options = CommitOptions::default()
        .change_snapshots(true)
        .engine(EngineKind::Threads);
    let committed = jobs::commit(queue, top, device, &options, |_| {});
    let readable = found.iter().all(Option::is_some);
    assert_eq!(committed.is_ok(), readable, "commit: {committed:?}");
    let after = target.to_vec();
    for (n, found) in found.iter().enumerate() {
        let start = n * cluster as usize;
        match found {
            Some(bytes) if readable => {
                assert!(
                    after[start..start + bytes.len()] == bytes[..],
                    "commit, cluster {n}"
                );
            }
            _ => {}
        }
    }
    for (n, sectors) in partly {
        for (nth, sector) in sectors.iter().enumerate() {
            let start = n * cluster as usize + nth * 512;
            let bytes = &after[start..start + 512];
            assert!(
                bytes == &base[start..start + 512] || sector.as_deref() == Some(bytes),
                "commit: cluster {n}, which cannot be read, replaced data of the base"
            );
        }
    }
}

/// Gives the image refcounts of another width.
pub fn amend(queue: &Queue, rng: &mut Rng, sound: &Sound, files: &Files, suspects: &Suspects) {
    let Ok(device) = files.open(queue, true, true) else {
        return;
    };
    let options = AmendOptions::default().refcount_order(Some(rng.below(7) as u32));
    let amended = jobs::amend(queue, device, &options, |_| {});
    let what = format!("after amend: {amended:?}");
    if let Ok(device) = files.open(queue, false, true) {
        let cluster = sound.layout.cluster;
        let (content, written) = (&sound.content[0], &suspects.written[0]);
        let found = judge(queue, &device, cluster, content, written, &what);
        truncated(&found, sound, suspects, &[], &what);
    }
}

/// Rebases the image to no backing file.
pub fn rebase(queue: &Queue, sound: &Sound, files: &mut Files, suspects: &Suspects) {
    let Ok(overlay) = files.open(queue, true, true) else {
        return;
    };
    let options = RebaseOptions::default()
        .change_snapshots(true)
        .engine(EngineKind::Threads);
    if jobs::rebase(queue, overlay, None, None, &options, |_| {}).is_ok() {
        files.base = None;
    }
    let mut written = suspects.written[0].clone();
    if suspects.shared() && sound.layout.extended {
        // A suspect that has a part of the base is written, too, and may be where other parts of
        // the base were written.
        for (suspect, path) in written.iter_mut().zip(&sound.layout.paths[0]) {
            *suspect |= !path.stored;
        }
    }
    if let Ok(device) = files.open(queue, false, true) {
        let cluster = sound.layout.cluster;
        let content = &sound.content[0];
        judge(queue, &device, cluster, content, &written, "after rebase");
    }
}

/// A session that writes, and the expected content of the image.
struct Session<'a> {
    queue: &'a Queue,
    rng: &'a mut Rng,
    cluster: u64,
    /// The content of the active disk and of the snapshots.
    content: Vec<Vec<u8>>,
    /// The clusters whose content is not known.
    suspects: Vec<Vec<bool>>,
    ids: Vec<String>,
    /// Clusters that were written since the last flush.
    touched: Vec<usize>,
    /// Clusters that were written.
    mine: BTreeSet<usize>,
    /// [`Suspects::shared`]. If a suspect's data are given up, what was written there is lost, too.
    shared: bool,
    /// The number of clusters that an L2 table maps.
    per_table: usize,
    /// Whether snapshots are created, applied and deleted.
    snapshots: bool,
    resized: bool,
    /// The disk is that of a snapshot.
    applied: bool,
    log: Vec<String>,
}

/// Prints the log if the test fails.
impl Drop for Session<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the session: {:#?}", self.log);
        }
    }
}

/// Writes to a damaged image in every way, and verifies the content.
pub fn session(queue: &Queue, rng: &mut Rng, sound: &Sound, files: &Files, suspects: &Suspects) {
    let mut session = Session {
        queue,
        rng,
        cluster: sound.layout.cluster,
        content: sound.content.clone(),
        suspects: suspects.written.clone(),
        ids: sound.layout.snapshot_ids.clone(),
        touched: Vec::new(),
        mine: BTreeSet::new(),
        shared: suspects.shared(),
        per_table: sound.layout.per_table() as usize,
        snapshots: !suspects.snapshot_table && sound.data.is_none(),
        resized: false,
        applied: false,
        log: Vec::new(),
    };
    let before = files.file.to_vec();
    let errors = |files: &Files| check(queue, &files.file).map(|report| report.corruptions);
    // (If the header refers to other refcounts, nothing is known of them.)
    let same = [48..60, 96..100]
        .into_iter()
        .all(|field| before.get(field.clone()) == sound.file.get(field));
    let known = errors(files).ok().filter(|_| same && !suspects.any());
    for _ in 0..2 {
        let Ok(device) = files.open(queue, true, true) else {
            break;
        };
        if suspects.header || device.size() != session.content[0].len() as u64 {
            wild(queue, session.rng, device);
            return;
        }
        session.run(device);
    }
    // If the refcount of a table is too high, copied flags that a snapshot took away stay away.
    let deleted = session.log.iter().any(|line| line.starts_with("delete"));
    if let Some(known) = known.filter(|known| *known == 0 || !deleted) {
        let found = errors(files).expect("it could be checked before");
        assert!(
            found <= known,
            "{found} errors after a session, {known} before"
        );
    }
    let wrote = session.log.iter().any(|line| line.starts_with("write"));
    if wrote && sound.layout.has_unaligned_block(&before) {
        let corrupt = files.file.to_vec()[79] & 2 != 0;
        assert!(
            corrupt,
            "a refcount block is not aligned, and the image not marked as corrupt"
        );
    }
    for view in 0..session.content.len() {
        let Ok(device) = files.open_view(queue, &session.ids, view) else {
            continue;
        };
        let what = format!("after a session, view {view}");
        let found = judge(
            queue,
            &device,
            session.cluster,
            &session.content[view],
            &session.suspects[view],
            &what,
        );
        // (A shrink may have dropped them; enlarged again, they are zero.)
        if view == 0 && !session.resized && !session.applied {
            truncated(&found, sound, suspects, &session.touched, &what);
        }
        status_agrees(queue, &device, session.cluster, found.len());
    }
}

/// Writes to an image whose content is unknown.
fn wild(queue: &Queue, rng: &mut Rng, device: Device) {
    let size = device.size().min(1 << 20);
    for _ in 0..10 {
        let length = 4096.min(size);
        let at = rng.below(size - length + 1);
        let bytes = stamp(rng, at, length as usize);
        let _ = device.write_blocking(queue, at, &bytes);
        let _ = queue.block_on(device.discard(queue, at, length));
    }
    let _ = queue.block_on(device.close(queue));
}

impl Session<'_> {
    fn run(&mut self, mut device: Device) {
        for _ in 0..12 {
            match self.rng.below(20) {
                0..=6 => self.write(&device),
                7 | 8 => self.zero(&device),
                9..=11 => self.discard(&device),
                12 => self.flush(&device),
                13 | 14 => self.snapshot_create(&mut device),
                15 => self.snapshot_apply(&mut device),
                16 => self.snapshot_delete(&mut device),
                17 | 18 => self.resize(&mut device),
                _ => self.read(&device),
            }
        }
        let closed = self.queue.block_on(device.close(self.queue));
        self.log.push(format!("close: {closed:?}"));
        self.flushed(closed.is_ok());
    }

    fn flushed(&mut self, ok: bool) {
        for n in std::mem::take(&mut self.touched) {
            if let Some(suspect) = self.suspects[0].get_mut(n) {
                *suspect |= !ok;
            }
        }
    }

    /// Marks the written clusters as suspect before references of suspects are dropped.
    fn drop_shared(&mut self) {
        for suspects in self.suspects.iter_mut().filter(|_| self.shared) {
            for n in &self.mine {
                // The L2 table may be in such a cluster.
                let first = n / self.per_table * self.per_table;
                let clusters = suspects.iter_mut().skip(first).take(self.per_table);
                clusters.for_each(|suspect| *suspect = true);
            }
        }
    }

    /// A random range without suspects, of whole clusters or of parts.
    fn range(&mut self) -> Option<(u64, usize)> {
        let clusters = self.suspects[0].len() as u64;
        let first = self.rng.below(clusters.max(1)) as usize;
        let most = 1 + self.rng.below(12) as usize;
        let free = self.suspects[0][first.min(clusters as usize)..].iter();
        let count = free.take(most).take_while(|suspect| !**suspect).count();
        let size = self.content[0].len() as u64;
        let (start, end) = (
            first as u64 * self.cluster,
            (first + count) as u64 * self.cluster,
        );
        let (mut start, mut end) = (start, end.min(size));
        if self.rng.one_in(2) && end > start {
            start += 512 * self.rng.below((end - start).div_ceil(512));
            end -= 512 * self.rng.below((end - start).div_ceil(512));
        }
        (end > start).then_some((start, (end - start) as usize))
    }

    fn clusters(&self, at: u64, length: usize) -> std::ops::Range<usize> {
        let end = (at + length as u64).div_ceil(self.cluster);
        (at / self.cluster) as usize..end as usize
    }

    /// Records the result of a request that fills a range with these bytes.
    fn changed(&mut self, at: u64, bytes: &[u8], result: zebu::Result<()>, what: &str) {
        self.log
            .push(format!("{what} {at:#x}+{:#x}: {result:?}", bytes.len()));
        let range = self.clusters(at, bytes.len());
        match result {
            Ok(()) => {
                self.content[0][at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                self.mine.extend(range.clone());
                self.touched.extend(range);
            }
            Err(_) => self.suspects[0][range].fill(true),
        }
    }

    fn write(&mut self, device: &Device) {
        if let Some((at, length)) = self.range() {
            let bytes = stamp(self.rng, at, length);
            let result = device.write_blocking(self.queue, at, &bytes);
            self.changed(at, &bytes, result, "write");
        }
    }

    fn zero(&mut self, device: &Device) {
        if let Some((at, length)) = self.range() {
            let how = self.rng.pick(&[Zeroing::Keep, Zeroing::Unmap]);
            let zero = device.write_zeroes(self.queue, at, length as u64, how);
            let result = self.queue.block_on(zero);
            self.changed(at, &vec![0; length], result, "zero");
        }
    }

    fn discard(&mut self, device: &Device) {
        if let Some((at, length)) = self.range() {
            let discard = device.discard(self.queue, at, length as u64);
            let result = self.queue.block_on(discard);
            let mut bytes = vec![0; length];
            // Zeroes, the old content, or, in version 2, the content of the base.
            let read = device.read_blocking(self.queue, at, &mut bytes);
            self.changed(at, &bytes, result.and(read), "discard");
        }
    }

    fn read(&mut self, device: &Device) {
        if let Some((at, length)) = self.range() {
            let mut bytes = vec![0; length];
            let read = device.read_blocking(self.queue, at, &mut bytes);
            read.expect("what is not damaged reads");
            let expected = &self.content[0][at as usize..at as usize + length];
            assert!(bytes == expected, "reading {at:#x} in a session");
        }
    }

    fn flush(&mut self, device: &Device) {
        let result = self.queue.block_on(device.flush(self.queue));
        self.log.push(format!("flush: {result:?}"));
        self.flushed(result.is_ok());
    }

    fn snapshot_create(&mut self, device: &mut Device) {
        if !self.snapshots || self.resized {
            return;
        }
        let result = self
            .queue
            .block_on(device.snapshot_create(self.queue, "new"));
        self.log.push(format!("snapshot: {result:?}"));
        if result.is_err() {
            return;
        }
        self.flushed(true);
        if let Some(image) = device.top().as_qcow2() {
            let id = image
                .snapshots()
                .last()
                .expect("the snapshot was created")
                .id
                .clone();
            self.ids.push(String::from_utf8(id).unwrap());
            self.content.push(self.content[0].clone());
            self.suspects.push(self.suspects[0].clone());
        }
    }

    fn one_snapshot(&mut self) -> Option<(usize, SnapshotName)> {
        if !self.snapshots || self.resized || self.ids.is_empty() {
            return None;
        }
        let n = self.rng.index(self.ids.len());
        Some((n, SnapshotName::IdOrName(self.ids[n].clone().into())))
    }

    fn snapshot_apply(&mut self, device: &mut Device) {
        let Some((n, name)) = self.one_snapshot() else {
            return;
        };
        self.drop_shared();
        let result = self
            .queue
            .block_on(device.snapshot_apply(self.queue, &name));
        self.log.push(format!("apply {n}: {result:?}"));
        if result.is_ok() {
            self.content[0] = self.content[n + 1].clone();
            self.suspects[0] = self.suspects[n + 1].clone();
            self.touched.clear();
            self.applied = true;
        }
    }

    fn snapshot_delete(&mut self, device: &mut Device) {
        let Some((n, name)) = self.one_snapshot() else {
            return;
        };
        self.drop_shared();
        let result = self
            .queue
            .block_on(device.snapshot_delete(self.queue, &name));
        self.log.push(format!("delete {n}: {result:?}"));
        // After an error it may or may not be deleted.
        self.ids.remove(n);
        self.content.remove(n + 1);
        self.suspects.remove(n + 1);
    }

    fn resize(&mut self, device: &mut Device) {
        if self.content.len() > 1 {
            return;
        }
        let old = self.content[0].len() as u64;
        let new = match self.rng.one_in(2) {
            true => old + 512 * self.rng.below(40 * self.cluster / 512),
            false => (old - 512 * self.rng.below(old / 512)).max(512),
        };
        self.drop_shared();
        let resize = device.resize(self.queue, new, Preallocation::Off);
        let result = self.queue.block_on(resize);
        self.log
            .push(format!("resize from {old:#x} to {new:#x}: {result:?}"));
        self.resized = true;
        let size = device.size();
        let clusters = size.div_ceil(self.cluster) as usize;
        let first = (new.min(old) / self.cluster) as usize;
        if result.is_err() {
            let from = first.min(self.suspects[0].len());
            self.suspects[0][from..].fill(true);
            // A failed resize does not make earlier writes durable.
        }
        self.content[0].resize(size as usize, 0);
        self.suspects[0].resize(clusters, false);
    }
}
