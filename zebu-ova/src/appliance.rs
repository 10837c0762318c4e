//! Appliances that are read.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::archive::{self, BLOCK, Member};
use crate::checksum::{Algorithm, Checksum};
use crate::descriptor::{Descriptor, DiskEntry};
use crate::manifest::Manifest;
use crate::{Error, Result, href, printable, refused, text};

/// Bytes of a descriptor or a manifest at most.
const MAX_TEXT: u64 = 16 << 20;
/// Files of a directory that are looked at for a manifest at most.
const MAX_BESIDE: usize = 10_000;

/// A virtual appliance.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Appliance {
    /// The name of the virtual system, if it has one.
    pub name: Option<String>,
    /// Its disks, in the order of the descriptor.
    pub disks: Vec<Disk>,
    /// What a user should know, each a sentence: what of the manifests verifies nothing.
    pub warnings: Vec<String>,
}

/// A disk of an appliance.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Disk {
    /// The id in the descriptor.
    pub id: String,
    /// The size of the disk in bytes, if the descriptor has it as a number.
    pub capacity: Option<u64>,
    /// The image format, as qemu-img calls it; None: the URI in the descriptor is not known.
    pub format: Option<&'static str>,
    /// The image; None: the disk is empty, or `missing`.
    pub stored: Option<Stored>,
    /// Why there is no image, though the disk is not empty.
    pub missing: Option<String>,
}

/// Where the image of a disk is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stored {
    /// Its name in the appliance.
    pub name: String,
    /// The file that it is in.
    pub path: PathBuf,
    /// Its first byte in the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The checksum that the manifest has of it.
    pub checksum: Option<Checksum>,
    /// Why it cannot be read as an image, if it cannot.
    pub packed: Option<&'static str>,
}

impl Appliance {
    /// Opens an archive (OVA), or a descriptor (OVF) that is a file of its own. If the manifest has
    /// a checksum of the descriptor, that is verified; [`Stored::verify`] verifies disks.
    ///
    /// # Errors
    /// If the file is no appliance or a damaged one. If it is a descriptor whose disks are files
    /// and `opens_files` is false.
    pub fn open(path: &Path, opens_files: bool) -> Result<Self> {
        let found = fs::metadata(path).map_err(Error::io(path))?;
        if !found.is_file() {
            // To open a FIFO would wait for its writer.
            return refused(format!("'{}' is no regular file", path.display()));
        }
        let file = File::open(path).map_err(Error::io(path))?;
        let mut block = [0; BLOCK as usize];
        if found.len() >= BLOCK {
            file.read_exact_at(&mut block, 0).map_err(Error::io(path))?;
        }
        let container = match archive::is_header(&block) {
            true => {
                let members = archive::members(&file).map_err(Error::io(path))?;
                Container::Archive(path, file, members)
            }
            false => Container::Folder(path, opens_files),
        };
        container.read()
    }
}

impl Stored {
    /// Verifies the checksum, if the manifest has one. `progress` is given the bytes that were read.
    ///
    /// # Errors
    /// If the bytes have another checksum or cannot be read, or [`Error::Stopped`].
    pub fn verify(&self, progress: &mut dyn FnMut(u64) -> ControlFlow<()>) -> Result<()> {
        let Some(expected) = &self.checksum else {
            return Ok(());
        };
        let file = File::open(&self.path).map_err(Error::io(&self.path))?;
        let range = self.offset..self.offset + self.length;
        let found = Checksum::of_file(expected.algorithm, &file, &self.path, range, progress)?;
        expected.expect(&found, &self.name)
    }

    /// The algorithm of the checksum in the manifest.
    pub fn algorithm(&self) -> Option<Algorithm> {
        self.checksum.as_ref().map(|checksum| checksum.algorithm)
    }
}

/// What the files of an appliance are in.
enum Container<'a> {
    /// An archive, and its members.
    Archive(&'a Path, File, HashMap<String, Member>),
    /// The directory of a descriptor, and whether other files of it are opened.
    Folder(&'a Path, bool),
}

impl Container<'_> {
    fn read(&self) -> Result<Appliance> {
        let name = self.descriptor_name()?;
        let Some(bytes) = self.text(&name)? else {
            return refused(format!("There is no '{name}'"));
        };
        let (folder, _) = href::split(&name);
        let (manifest_name, manifest) = match self.manifest_name(&name)? {
            Some(name) => {
                let bytes = self.text(&name)?.unwrap_or_default();
                let manifest = Manifest::parse(&text::decode(bytes, "manifest")?);
                (name, manifest)
            }
            None => Default::default(),
        };
        let mut warnings = Vec::from_iter(manifest.warning());
        let unused = self.all_of("mf").filter(|other| **other != manifest_name);
        warnings
            .extend(unused.map(|name| printable(&format!("The manifest '{name}' is not used"))));
        let mut is_used = manifest.is_empty();
        if let Some(expected) = manifest.of_file(folder, &name) {
            expected.expect(&Checksum::of_bytes(expected.algorithm, &bytes), &name)?;
            is_used = true;
        }
        let descriptor = Descriptor::parse(&text::decode(bytes, "descriptor")?)?;
        let disks = descriptor.disks.into_iter();
        let disks = disks.map(|entry| self.disk(entry, folder, &manifest));
        let disks = disks.collect::<Result<Vec<_>>>()?;
        let mut stored = disks.iter().filter_map(|disk| disk.stored.as_ref());
        is_used |= stored.any(|stored| stored.checksum.is_some());
        if !is_used && disks.iter().any(|disk| disk.stored.is_some()) {
            return refused(format!(
                "The manifest '{manifest_name}' has no checksum of a file of this appliance"
            ));
        }
        Ok(Appliance {
            name: descriptor.name,
            disks,
            warnings,
        })
    }

    /// The members of an archive with this ending.
    fn all_of(&self, ending: &'static str) -> impl Iterator<Item = &String> {
        let members = match self {
            Container::Archive(_, _, members) => Some(members),
            Container::Folder(..) => None,
        };
        let names = members.into_iter().flat_map(HashMap::keys);
        names.filter(move |name| has_ending(name, ending))
    }

    fn descriptor_name(&self) -> Result<String> {
        match self {
            Container::Archive(..) => {
                let mut names: Vec<&String> = self.all_of("ovf").collect();
                names.sort();
                match &names[..] {
                    [] => refused("The archive has no OVF descriptor"),
                    [only] => Ok((*only).clone()),
                    [one, other, ..] => refused(format!(
                        "The archive has {} OVF descriptors, such as '{one}' and '{other}': extract it, and \
                         name the one that is meant",
                        names.len()
                    )),
                }
            }
            Container::Folder(path, _) => {
                let name = path.file_name().and_then(|name| name.to_str());
                match name {
                    Some(name) => Ok(name.to_owned()),
                    None => refused("The name of the descriptor is not UTF-8"),
                }
            }
        }
    }

    /// The manifest beside the descriptor of this name: the one that is called like it, else the only
    /// one that there is.
    fn manifest_name(&self, descriptor: &str) -> Result<Option<String>> {
        let (folder, base) = href::split(descriptor);
        let stem = base.rsplit_once('.').map_or(base, |(stem, _)| stem);
        let beside: Vec<String> = match self {
            Container::Archive(_, _, members) => {
                let names = members.keys().filter(|name| href::split(name).0 == folder);
                names.cloned().collect()
            }
            // Where no other file is opened, the manifest is not read, and nothing is verified.
            Container::Folder(_, false) => return Ok(None),
            Container::Folder(path, true) => names_beside(path)?,
        };
        let all = |ending| beside.iter().filter(move |name| has_ending(name, ending));
        let is_own = |name: &&String| {
            let base = href::split(name).1;
            base.rsplit_once('.')
                .is_some_and(|(found, _)| found == stem)
        };
        // The last one counts, as the ending is usually written.
        if let Some(own) = all("mf").filter(is_own).max() {
            return Ok(Some(own.clone()));
        }
        let others: Vec<&String> = all("mf").collect();
        match (&others[..], self) {
            ([], _) => Ok(None),
            // That of another appliance in the same directory.
            (_, Container::Folder(..)) if all("ovf").count() > 1 => Ok(None),
            ([only], _) => Ok(Some((*only).clone())),
            (several, _) => refused(format!(
                "There are {} manifests, none of which is called like the descriptor '{base}'",
                several.len()
            )),
        }
    }

    fn disk(&self, entry: DiskEntry, folder: &str, manifest: &Manifest) -> Result<Disk> {
        let mut disk = Disk {
            id: entry.id,
            capacity: entry.capacity,
            format: entry.format,
            stored: None,
            missing: entry.missing,
        };
        let Some(href) = entry.file else {
            return Ok(disk);
        };
        let names = href::names(&href);
        for name in &names {
            // Relative to the descriptor; some programs mean the archive.
            let mut places = vec![name.clone()];
            if !folder.is_empty() {
                places.splice(0..0, href::beside(folder, name));
            }
            for place in &places {
                let Some((path, offset, length)) = self.find(place)? else {
                    continue;
                };
                // A manifest may call it by any of its names.
                let checksum = manifest.of_file(folder, place);
                let checksum = checksum.or_else(|| names.iter().find_map(|n| manifest.of(n)));
                disk.stored = Some(Stored {
                    path,
                    offset,
                    length,
                    checksum: checksum.cloned(),
                    packed: entry.packed,
                    name: place.clone(),
                });
                return Ok(disk);
            }
        }
        disk.missing = Some(match entry.packed {
            Some(why) => why.to_owned(),
            None => printable(&format!("There is no '{}'", names[0])),
        });
        Ok(disk)
    }

    /// Where a file is stored: its path, the first byte, and how many there are.
    fn find(&self, name: &str) -> Result<Option<(PathBuf, u64, u64)>> {
        match self {
            Container::Archive(path, _, members) => {
                let Some(member) = members.get(name) else {
                    return Ok(None);
                };
                match member.unreadable {
                    None => Ok(Some((path.to_path_buf(), member.offset, member.length))),
                    Some(why) => refused(format!("'{name}' {why}")),
                }
            }
            Container::Folder(path, opens_files) => {
                let is_own = path.file_name().is_some_and(|own| own == name);
                if !opens_files && !is_own {
                    return refused(format!(
                        "The descriptor names '{name}', which is not opened"
                    ));
                }
                if name.contains('/') || matches!(name, "" | "." | "..") {
                    return refused(format!(
                        "The descriptor names '{name}', which is not a file of its directory"
                    ));
                }
                let path = path.with_file_name(name);
                match fs::metadata(&path) {
                    Ok(found) if found.is_file() => Ok(Some((path, 0, found.len()))),
                    Ok(_) => refused(format!("'{}' is no regular file", path.display())),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                    Err(e) => Err(Error::io(&path)(e)),
                }
            }
        }
    }

    /// The bytes of a file, if there is one of this name.
    fn text(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some((path, offset, length)) = self.find(name)? else {
            return Ok(None);
        };
        if length > MAX_TEXT {
            return refused(format!("'{name}' is longer than {} MiB", MAX_TEXT >> 20));
        }
        let mut bytes = vec![0; length as usize];
        let read = match self {
            Container::Archive(_, file, _) => file.read_exact_at(&mut bytes, offset),
            Container::Folder(..) => {
                File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, offset))
            }
        };
        read.map_err(Error::io(&path))?;
        Ok(Some(bytes))
    }
}

/// Whether a file has this ending, in letters of any case. Files of macOS that have the attributes of
/// others (`._NAME`) do not count.
fn has_ending(name: &str, ending: &str) -> bool {
    let base = href::split(name).1;
    let found = base.rsplit_once('.');
    found.is_some_and(|(_, found)| found.eq_ignore_ascii_case(ending)) && !base.starts_with("._")
}

/// The names of the files in the directory of a descriptor, as far as they are UTF-8.
fn names_beside(path: &Path) -> Result<Vec<String>> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let entries = fs::read_dir(folder).map_err(Error::io(folder))?;
    let mut names = Vec::new();
    for entry in entries.take(MAX_BESIDE) {
        let entry = entry.map_err(Error::io(folder))?;
        names.extend(entry.file_name().into_string());
    }
    Ok(names)
}
