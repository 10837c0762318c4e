//! Repairs of damaged images. A sector that was right before the repair must be right afterwards,
//! unless QEMU's repair of the same image loses it, too.

use std::path::Path;

use zebu::block::Preallocation;
use zebu::jobs::{self, RepairMode};
use zebu::storage::Queue;

use crate::common::Rng;
use crate::common::peer::{qemu_img, text};
use crate::images::{Files, Sound, check, stamp};
use crate::layout::Suspects;
use crate::work::{read, truncated};

const SECTOR: usize = 512;

/// The sectors of each disk that read as they should.
fn right(queue: &Queue, sound: &Sound, files: &Files) -> Vec<Vec<bool>> {
    let cluster = sound.layout.cluster;
    let views = sound.content.iter().enumerate();
    views
        .map(|(view, content)| {
            let sectors = content.len() / SECTOR;
            let Ok(device) = files.open_view(queue, &sound.layout.snapshot_ids, view) else {
                return vec![false; sectors];
            };
            let mut right = Vec::with_capacity(sectors);
            for found in read(queue, &device, cluster, content.len()) {
                let start = right.len() * SECTOR;
                let length = (cluster as usize).min(content.len() - start);
                for at in (0..length).step_by(SECTOR) {
                    let expected = &content[start + at..start + at + SECTOR];
                    let there = found.as_ref().and_then(|bytes| bytes.get(at..at + SECTOR));
                    right.push(there == Some(expected));
                }
            }
            right.resize(sectors, false);
            right
        })
        .collect()
}

/// The result of a repair.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Whether nothing was left to repair.
    pub sound: bool,
    /// The number of sectors that zebu's and QEMU's repair lost.
    pub lost: u64,
}

/// Repairs a damaged image. If it is sound then, it is written. What the truncated file lacks must
/// not be read as something else then.
pub fn repair(
    queue: &Queue,
    rng: &mut Rng,
    sound: &Sound,
    damaged: &[u8],
    suspects: &Suspects,
    folder: &Path,
) -> Outcome {
    let files = Files::new(sound, damaged);
    let before = right(queue, sound, &files);
    let mode = match rng.one_in(4) {
        true => RepairMode::Leaks,
        false => RepairMode::All,
    };
    let mut messages = Vec::new();
    let result = queue.block_on(jobs::repair(
        queue,
        files.file.clone(),
        mode,
        &mut |message| {
            if messages.len() < 20 {
                messages.push(message.to_string());
            }
        },
        |_| {},
    ));
    let mut after = right(queue, sound, &files);
    let clean = result
        .as_ref()
        .is_ok_and(|report| report.corruptions == 0 && report.check_errors == 0);
    let mut what = format!("{mode:?}: {result:?}, {messages:#?}");
    let whole = !lost_any(&before, &after);
    if clean && let Ok(device) = files.open(queue, false, true) {
        let found = read(queue, &device, sound.layout.cluster, sound.content[0].len());
        truncated(&found, sound, suspects, &[], &what);
    }
    if clean {
        match check(queue, &files.file) {
            Ok(again) => {
                let left = (again.corruptions, again.check_errors);
                assert_eq!(left, (0, 0), "{what}: it is not sound");
            }
            // The damage concerns the name of the data file.
            Err(error) => assert!(error.to_string().contains("data-file"), "{what}: {error}"),
        }
    }
    if clean {
        let file = files.file.to_vec();
        let two = sound.layout.root_with_another_use(&file);
        assert_eq!(two, None, "{what}: the cluster of a table has another use");
        let counted = sound.layout.counted_past_end(&file);
        assert_eq!(
            counted, None,
            "{what}: a cluster past the end has references"
        );
    }
    if clean && whole {
        what += ", then a session";
        for n in write(queue, rng, sound, &files, damaged, &before) {
            after[0][n] = true;
        }
        let now = right(queue, sound, &files);
        for (after, now) in after.iter_mut().zip(now) {
            for (after, now) in after.iter_mut().zip(now) {
                *after &= now;
            }
        }
    }
    Outcome {
        sound: clean,
        lost: judge(sound, damaged, &before, &after, folder, &what),
    }
}

fn lost_any(before: &[Vec<bool>], after: &[Vec<bool>]) -> bool {
    let (before, after) = (before.iter().flatten(), after.iter().flatten());
    before.zip(after).any(|(before, after)| *before && !*after)
}

/// Rewrites whole clusters of the active disk with their right content, some of them after a
/// discard, and some of those that read wrong. Returns the clusters to leave out of a comparison.
fn write(
    queue: &Queue,
    rng: &mut Rng,
    sound: &Sound,
    files: &Files,
    damaged: &[u8],
    right: &[Vec<bool>],
) -> Vec<usize> {
    // Also before the writes, which copy shared L2 tables.
    let resizable = sound.content.len() == 1 || sound.layout.version >= 3;
    if resizable && rng.one_in(2) {
        resize(queue, rng, sound, files, damaged);
    }
    let Ok(device) = files.open(queue, true, true) else {
        return Vec::new();
    };
    let cluster = sound.layout.cluster;
    let content = &sound.content[0];
    let clusters = (content.len() as u64).div_ceil(cluster);
    for _ in 0..24 {
        let n = rng.below(clusters);
        let start = n * cluster;
        let end = (start + cluster)
            .min(content.len() as u64)
            .min(device.size());
        if start >= end {
            continue;
        }
        let sectors = start as usize / SECTOR..end as usize / SECTOR;
        let bytes = match right[0][sectors].iter().all(|right| *right) {
            true => content[start as usize..end as usize].to_vec(),
            false => continue,
        };
        let other = stamp(rng, start, bytes.len());
        // Elsewhere, and back.
        let discarded = queue.block_on(device.discard(queue, start, end - start));
        let written = device.write_blocking(queue, start, &other);
        let back = device.write_blocking(queue, start, &bytes);
        let results = [discarded, written, back];
        let well = results.iter().all(Result::is_ok);
        assert!(
            well,
            "writing to a repaired image at {start:#x}: {results:?}"
        );
    }
    queue
        .block_on(device.close(queue))
        .expect("a repaired image closes");
    if resizable {
        resize(queue, rng, sound, files, damaged);
    }
    Vec::new()
}

/// Enlarges a repaired disk, writes to the added part, and shrinks it to its old size.
fn resize(queue: &Queue, rng: &mut Rng, sound: &Sound, files: &Files, damaged: &[u8]) {
    let Ok(mut device) = files.open(queue, true, true) else {
        return;
    };
    let old = device.size();
    let cluster = sound.layout.cluster;
    let coverage = sound.layout.per_table() * cluster;
    // (Files in memory are limited.)
    let most = (2 * coverage).min(64 << 20);
    let new = old + 512 * (1 + rng.below(most / 512));
    if !old.is_multiple_of(512) || new > 200 << 20 {
        return;
    }
    for size in [new, old] {
        let resize = device.resize(queue, size, Preallocation::Off);
        let result = queue.block_on(resize);
        // Damage may have changed the version to 2.
        if matches!(&result, Err(zebu::Error::Refused(why)) if why.contains("v2 image")) {
            return;
        }
        // The cluster with the old end, whose rest must be zeroed, cannot be read.
        use zebu::Error::{Compressed, Corrupt};
        if let Err(Compressed { guest, .. } | Corrupt { guest, .. }) = &result
            && guest / cluster == old / cluster
            && (sound.layout).may_be_unreadable(&sound.file, damaged, old / cluster)
        {
            return;
        }
        assert!(
            result.is_ok(),
            "a repaired disk of {old:#x} bytes gets {size:#x}: {result:?}"
        );
        if size == new {
            let mut bytes = [1; 512];
            device
                .read_blocking(queue, new - 512, &mut bytes)
                .expect("the added part reads");
            assert_eq!(bytes, [0; 512], "the added part");
            device
                .write_blocking(queue, new - 512, &[1; 512])
                .expect("the added part is written");
        }
    }
    queue
        .block_on(device.close(queue))
        .expect("a repaired image closes");
}

/// Fails if a sector was lost that QEMU's repair keeps. Returns the number of sectors that both
/// lose.
fn judge(
    sound: &Sound,
    damaged: &[u8],
    before: &[Vec<bool>],
    after: &[Vec<bool>],
    folder: &Path,
    what: &str,
) -> u64 {
    let mut both = 0;
    let mut theirs = None;
    for (view, (before, after)) in before.iter().zip(after).enumerate() {
        for n in 0..before.len() {
            if !before[n] || after[n] {
                continue;
            }
            let theirs: &Vec<Vec<u8>> =
                theirs.get_or_insert_with(|| by_qemu(sound, damaged, folder));
            let expected = &sound.content[view][n * SECTOR..(n + 1) * SECTOR];
            let kept = theirs[view].get(n * SECTOR..(n + 1) * SECTOR) == Some(expected);
            assert!(
                !kept,
                "{what}: sector {n} of view {view} read right before; QEMU's repair keeps it"
            );
            both += 1;
        }
    }
    both
}

/// The content of each disk after QEMU's repair; empty if it cannot be read.
fn by_qemu(sound: &Sound, damaged: &[u8], folder: &Path) -> Vec<Vec<u8>> {
    let (image, out) = (folder.join("damaged.qcow2"), folder.join("out.raw"));
    std::fs::write(&image, damaged).unwrap();
    if let Some(base) = &sound.base {
        std::fs::write(folder.join("base.raw"), base).unwrap();
    }
    let _ = qemu_img(&["check", "-q", "-r", "all", "-f", "qcow2", text(&image)]);
    let views = 0..sound.content.len();
    views
        .map(|view| {
            let id = view
                .checked_sub(1)
                .map(|n| sound.layout.snapshot_ids[n].clone());
            let id = id.map(|id| format!("snapshot.id={id}"));
            let mut args = vec!["convert", "-f", "qcow2", "-O", "raw"];
            args.extend(id.iter().flat_map(|id| ["-l", id]));
            args.extend([text(&image), text(&out)]);
            let _ = std::fs::remove_file(&out);
            match qemu_img(&args).status {
                0 => std::fs::read(&out).unwrap_or_default(),
                _ => Vec::new(),
            }
        })
        .collect()
}
