//! The manifest: what a set of backups consists of.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use zebu::Format;
use zebu::internal::printable;

use crate::chain::raw_chain;
use crate::error::{Result, refuse};

/// The version that is written, and the only one that is read.
const VERSION: u32 = 2;

/// A set of backups, as `manifest.json` has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    version: u32,
    /// Identifies the set in the names of bitmaps: 16 hexadecimal digits.
    pub id: String,
    /// The points in time, oldest first.
    pub points: Vec<Point>,
    /// Increments that are being merged into the full backups before them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub merging: Vec<Merge>,
    /// Files that are not, or not yet, those of a point: of a backup that is being taken, and of
    /// points that were forgotten. Before anything else is done they are removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removing: Vec<String>,
}

/// A point in time: one backup of one or more disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Its number; later points have larger ones.
    pub number: u64,
    /// When it was taken, in seconds since 1970-01-01 UTC.
    pub time: u64,
    /// The disks, by name.
    pub disks: BTreeMap<String, Entry>,
}

/// A disk at a point in time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The qcow2 file, in the directory of the manifest.
    pub file: String,
    /// Whether it needs the file before it.
    pub kind: Kind,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Length of the source in bytes, if it is a raw disk that ends within a sector: the disk is longer, as the
    /// sector is filled up with zeroes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raw_length: Option<u64>,
    /// Bytes of the disk that the file has: all, or those that had changed.
    pub changed: u64,
    /// Length of the file in bytes.
    pub length: u64,
    /// SHA-256 of the file.
    pub sha256: String,
    /// SHA-256 of the content of the disk, if it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_sha256: Option<String>,
    /// The bitmap of the source that records what changes after this point. A part of its name is
    /// random, so that no other bitmap is taken for it: copies of a set, and backups that were
    /// interrupted, have the same numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// The formats of the disk and of its backing files, as they were opened. Where none is given the
    /// next point has the same: a guest can make a raw disk look like an image of another format.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub formats: Vec<String>,
    /// SHA-256 of the formats and paths of what the source consists of beside its own file: backing
    /// files and data files. If these are others at the next point, the disk may have changed without
    /// a write, which no bitmap records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain_sha256: Option<String>,
    /// SHA-256 of the identities (device, inode, time of creation) of data and backing files of this machine,
    /// and of the lengths and times of change (of the content and of the inode) of backing files. If
    /// these are others at the next point, the disk may have changed without a write, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain_files_sha256: Option<String>,
    /// SHA-256 of where the disk is. What is known of its format counts for whatever name it gets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_sha256: Option<String>,
}

/// What a file of a point has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// All of the disk.
    Full,
    /// What has changed since the point before that has this disk.
    Increment,
}

/// An increment that is being merged into the full backup before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Merge {
    /// The disk.
    pub disk: String,
    /// The full backup, whose own point is gone.
    pub base: String,
    /// The increment, whose place the merged file takes.
    pub top: String,
}

impl Entry {
    /// [`Entry::formats`]; empty if they are not known. Of an entry that lacks them, `chain_sha256` tells
    /// a raw disk.
    pub(crate) fn formats(&self) -> Vec<Format> {
        let known = self.formats.iter().map(|name| name.parse());
        match known.collect::<Result<Vec<Format>, _>>() {
            Ok(known) if !known.is_empty() => known,
            _ if self.chain_sha256.as_deref() == Some(&*raw_chain()) => vec![Format::RAW],
            _ => Vec::new(),
        }
    }
}

impl Manifest {
    /// That of an empty set.
    pub(crate) fn new(id: String) -> Self {
        Manifest {
            version: VERSION,
            id,
            points: Vec::new(),
            merging: Vec::new(),
            removing: Vec::new(),
        }
    }

    /// Reads a manifest and checks it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let manifest: Manifest = match serde_json::from_slice(bytes) {
            Ok(manifest) => manifest,
            Err(error) => return refuse(format!("the manifest is not valid: {error}")),
        };
        manifest.check()?;
        Ok(manifest)
    }

    /// The stored form.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).expect("strings and numbers");
        text.push(b'\n');
        text
    }

    /// Refuses a manifest that makes no sense. File names have no directory, so that nothing outside
    /// of the set is read or removed.
    fn check(&self) -> Result<()> {
        if self.version != VERSION {
            return refuse(format!(
                "the manifest has version {}, not {VERSION}",
                self.version
            ));
        }
        let is_id = |id: &str| id.len() == 16 && id.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_id(&self.id) {
            return refuse("the manifest has no valid id");
        }
        let mut files = BTreeSet::new();
        let mut seen = BTreeSet::new();
        let mut last = 0;
        for point in &self.points {
            if point.number <= last {
                return refuse("the manifest's points are not in order");
            }
            last = point.number;
            for (name, entry) in &point.disks {
                check_name(name)?;
                let number = point.number;
                if entry.file != file_name(name, number) || !files.insert(&entry.file) {
                    return refuse(format!(
                        "the manifest has a wrong file name at point {number}: '{}'",
                        entry.file
                    ));
                }
                let is_first = seen.insert(name);
                let is_merging = |merge: &Merge| merge.top == entry.file;
                let has_base = !is_first || self.merging.iter().any(is_merging);
                if entry.kind != Kind::Full && !has_base {
                    return refuse(format!(
                        "the manifest lacks the full backup that point {number} of disk '{name}' \
                         needs"
                    ));
                }
            }
        }
        let mut merging = BTreeSet::new();
        for merge in &self.merging {
            check_name(&merge.disk)?;
            let is_own = |file: &str| number_of(&merge.disk, file).is_some();
            let entries = self.points.iter().filter_map(|p| p.disks.get(&merge.disk));
            let is_first = |first: &Entry| first.file == merge.top && first.kind != Kind::Full;
            if !is_own(&merge.base)
                || files.contains(&merge.base)
                || !entries.take(1).any(is_first)
                || !merging.insert(&merge.disk)
            {
                return refuse("the manifest has a merge that makes no sense");
            }
        }
        let needed = self.files();
        for file in &self.removing {
            if number_in(file).is_none() || needed.contains(&**file) {
                return refuse(format!("the manifest has '{file}' to be removed"));
            }
        }
        Ok(())
    }

    /// The point of this number.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn point(&self, number: u64) -> Result<&Point> {
        match self.points.iter().find(|point| point.number == number) {
            Some(point) => Ok(point),
            None => refuse(format!("there is no point {number}")),
        }
    }

    /// The latest point that has a disk, and its entry there.
    pub fn latest(&self, disk: &str) -> Option<(&Point, &Entry)> {
        let mut points = self.points.iter().rev();
        points.find_map(|point| Some((point, point.disks.get(disk)?)))
    }

    /// The bitmap of a disk's last point is not used any more.
    pub(crate) fn forget_bitmap(&mut self, disk: &str) {
        let mut points = self.points.iter_mut().rev();
        if let Some(entry) = points.find_map(|point| point.disks.get_mut(disk)) {
            entry.bitmap = None;
        }
    }

    /// Names of the files that the points and merges have.
    pub(crate) fn files(&self) -> BTreeSet<&str> {
        let points = self.points.iter().flat_map(|point| point.disks.values());
        let merging = self
            .merging
            .iter()
            .flat_map(|merge| [&*merge.base, &*merge.top]);
        points.map(|entry| &*entry.file).chain(merging).collect()
    }

    /// The names of the disks.
    pub(crate) fn disks(&self) -> BTreeSet<String> {
        let names = self.points.iter().flat_map(|point| point.disks.keys());
        names.cloned().collect()
    }

    /// The numbers of the points that have a disk, and its entries there, oldest first.
    pub(crate) fn of_disk(&self, disk: &str) -> Vec<(u64, Entry)> {
        let own = |point: &Point| Some((point.number, point.disks.get(disk)?.clone()));
        self.points.iter().filter_map(own).collect()
    }

    /// Forgets a disk at a point, and the point if it has no other.
    pub(crate) fn remove(&mut self, disk: &str, number: u64) {
        for point in self.points.iter_mut().filter(|p| p.number == number) {
            point.disks.remove(disk);
        }
        self.points.retain(|point| !point.disks.is_empty());
    }

    /// The files that a disk consists of at a point, the newest first. The last one is a full backup,
    /// or being merged into one.
    ///
    /// # Errors
    ///
    /// If the point does not have the disk.
    pub fn chain(&self, disk: &str, number: u64) -> Result<Vec<&Entry>> {
        if !self.point(number)?.disks.contains_key(disk) {
            return refuse(format!("point {number} has no disk '{disk}'"));
        }
        let mut chain = Vec::new();
        let points = self.points.iter().rev();
        for point in points.skip_while(|point| point.number != number) {
            if let Some(entry) = point.disks.get(disk) {
                chain.push(entry);
                if entry.kind == Kind::Full {
                    break;
                }
            }
        }
        Ok(chain)
    }
}

/// The name of the file of a disk at a point.
pub(crate) fn file_name(disk: &str, number: u64) -> String {
    format!("{disk}.{number}.qcow2")
}

/// The number of the point that a file of a disk belongs to.
pub(crate) fn number_of(disk: &str, file: &str) -> Option<u64> {
    let rest = file.strip_prefix(disk)?.strip_prefix('.')?;
    let number = rest.strip_suffix(".qcow2")?;
    number
        .parse()
        .ok()
        .filter(|n: &u64| n.to_string() == number)
}

/// The number of the point that a file belongs to.
pub(crate) fn number_in(file: &str) -> Option<u64> {
    let (disk, _) = file.strip_suffix(".qcow2")?.rsplit_once('.')?;
    check_name(disk).ok()?;
    number_of(disk, file)
}

/// The name of the unfinished form of a file.
pub(crate) fn part(file: &str) -> String {
    format!("{file}.part")
}

/// Refuses a name of a disk that cannot be a part of a file name.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
    match name.is_empty()
        || name.len() > 200
        || name.starts_with('.')
        || !name.chars().all(is_plain)
    {
        false => Ok(()),
        true => refuse(format!(
            "'{}' cannot be the name of a disk: letters, digits, '-', '_' and '.' can",
            printable(name.as_bytes())
        )),
    }
}
