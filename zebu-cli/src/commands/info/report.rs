//! The report of `info` about one image, and its JSON.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use zebu::Result;
use zebu::block::{Device, FileDriver, FileSpec, ImageSpec, Layer, StorageId, Vmdk};
use zebu::names::{Source, protocol};
use zebu::qcow2::{Image, Snapshot};
use zebu::storage::{Queue, Storage};

use super::limits::Limits;
use super::specific;
use super::untrusted_report::Untrusted;
use crate::output::json::{Map, Value};

/// One image.
pub struct Report {
    pub name: OsString,
    /// Whether it is a filter over an image.
    pub is_filter: bool,
    pub format: &'static str,
    pub virtual_size: u64,
    /// Bytes that the file takes on its device, if that is known.
    pub disk_size: Option<u64>,
    /// The files: the extents that have one of their own, from the last on, and the image's,
    /// unless that is the image itself, named without a format.
    pub files: Vec<FileReport>,
    /// The unit of allocation, if the format has one.
    pub cluster_size: Option<u64>,
    pub backing: Option<Backing>,
    pub is_encrypted: bool,
    /// Whether its last writer did not close it, if that is known.
    pub is_dirty: Option<bool>,
    pub qcow2: Option<Qcow2Report>,
    /// What requests must be like, if that is asked for.
    pub limits: Option<Limits>,
    /// "Format specific information".
    pub specific: Option<Value>,
    /// What it would have opened, in strict mode.
    pub untrusted: Option<Untrusted>,
}

/// The file that the image is.
pub struct FileReport {
    pub name: OsString,
    /// QEMU's name for what kind of file it is.
    pub protocol: &'static str,
    pub length: u64,
    /// Whether it is on another machine.
    is_remote: bool,
    pub disk_size: Option<u64>,
    /// What it is to the image above it: `file`, `image` or `extents.N`.
    pub role: String,
    /// As in [`Report::limits`].
    pub limits: Option<Limits>,
    /// The file below, if it is none of its own.
    pub below: Option<Box<FileReport>>,
    /// If it is an image, that: nothing else is shown.
    pub image: Option<Box<Report>>,
}

/// The backing file, by its names.
pub struct Backing {
    /// As the image has it.
    pub name: OsString,
    /// From where the program runs.
    pub full_name: OsString,
    pub format: Option<String>,
}

/// What only qcow2 images have.
#[derive(Clone)]
pub struct Qcow2Report {
    pub snapshots: Vec<Snapshot>,
}

impl Report {
    /// Looks at the uppermost node of a device.
    pub fn of(queue: &Queue, device: &Device, limits: bool) -> Result<Report> {
        let image = Report::of_image(queue, device, limits)?;
        match device.is_filtered() {
            true => Ok(Report::of_filter(device.spec(), image)),
            false => Ok(image),
        }
    }

    /// A filter, and what is below it down to an image.
    fn of_filter(spec: &ImageSpec, image: Report) -> Report {
        let file = match &spec.file.driver {
            FileDriver::Filter(filter) => &filter.file,
            _ => return image,
        };
        let mut below = ImageSpec::new(None, file.clone());
        below.bare = true;
        let below = Report::of_filter(&below, image);
        Report {
            name: spec.display_name(),
            is_filter: true,
            format: spec.format_name(),
            virtual_size: below.virtual_size,
            disk_size: below.disk_size,
            cluster_size: below.cluster_size,
            backing: None,
            is_encrypted: false,
            is_dirty: Some(false),
            qcow2: below.qcow2.clone(),
            files: vec![FileReport::of_image(below)],
            limits: None,
            specific: None,
            untrusted: None,
        }
    }

    /// Shows `behind` as the backing file of the image, below the filters over it.
    pub fn put_behind(&mut self, behind: Report) {
        match self.files.first_mut().and_then(|file| file.image.as_mut()) {
            Some(below) if self.is_filter => below.put_behind(behind),
            _ => {
                let mut child = FileReport::of_image(behind);
                child.role = "backing".into();
                self.files.insert(0, child);
            }
        }
    }

    /// Looks at the top image of a device.
    fn of_image(queue: &Queue, device: &Device, limits: bool) -> Result<Report> {
        let layer = device.top();
        let file = layer.file();
        let mut files = extents(layer, limits)?;
        let others = files.iter().map(|file| file.disk_size);
        let disk_sizes = others.chain([file.allocated().ok()]);
        let disk_size = disk_sizes.sum();
        files.extend(match layer.spec.bare {
            true => FileReport::below(&layer.spec.file, file, limits)?,
            false => Some(FileReport::of("file", &layer.spec.file, file, limits)?),
        });
        let is_remote = layer.spec.file.is_remote();
        // Of a server's bytes it is not known.
        let is_known = (!is_remote || layer.as_raw().is_none())
            && layer.get::<Vmdk>().is_none_or(Vmdk::is_uniform);
        Ok(Report {
            name: layer.spec.display_name(),
            is_filter: false,
            format: layer.spec.format_name(),
            virtual_size: layer.size(),
            disk_size,
            files,
            cluster_size: layer.cluster_size(),
            backing: Backing::of(layer),
            is_encrypted: layer.is_encrypted(),
            is_dirty: layer.is_dirty().filter(|_| is_known),
            specific: specific::of(queue, device)?,
            qcow2: layer.as_qcow2().map(Qcow2Report::of),
            limits: limits.then(|| Limits::of_image(layer)),
            untrusted: None,
        })
    }

    /// The report for programs, its keys in qemu-img's order.
    pub fn to_json(&self) -> Value {
        let mut map = Map::new();
        if let Some(limits) = &self.limits {
            map.add("limits", limits.to_json());
        }
        let children: Vec<Value> = self.files.iter().map(FileReport::to_json).collect();
        map.add("children", children);
        if let Some(format) = self.backing.as_ref().and_then(|b| b.format.as_ref()) {
            map.add("backing-filename-format", format.as_str());
        }
        let snapshots = self.qcow2.as_ref().map_or(&[][..], |q| &q.snapshots);
        if !snapshots.is_empty() {
            let list: Vec<Value> = snapshots.iter().map(snapshot).collect();
            map.add("snapshots", list);
        }
        map.add("virtual-size", self.virtual_size);
        map.add("filename", &self.name);
        if let Some(cluster_size) = self.cluster_size {
            map.add("cluster-size", cluster_size);
        }
        map.add("format", self.format);
        if let Some(disk_size) = self.disk_size {
            map.add("actual-size", disk_size);
        }
        if let Some(data) = &self.specific {
            let specific = Map::new()
                .with("type", self.format)
                .with("data", data.clone());
            map.add("format-specific", specific);
        } else if self.format == "file" {
            map.add("format-specific", nothing_specific());
        }
        if let Some(backing) = &self.backing {
            map.add("full-backing-filename", &backing.full_name);
            map.add("backing-filename", &backing.name);
        }
        if self.is_encrypted {
            map.add("encrypted", true);
        }
        if let Some(is_dirty) = self.is_dirty {
            map.add("dirty-flag", is_dirty);
        }
        if let Some(untrusted) = &self.untrusted {
            map.add("untrusted", untrusted.to_json());
        }
        Value::Object(map)
    }
}

/// The files of a VMDK's extents that were opened, besides that of the image. The last one first.
fn extents(layer: &Layer, limits: bool) -> Result<Vec<FileReport>> {
    let mut files = Vec::new();
    let extents = layer.get::<Vmdk>().into_iter().flat_map(Vmdk::extents);
    for (nth, extent) in extents.enumerate() {
        let StorageId(id) = extent.storage;
        let Some(spec) = layer.spec.extents.get((id as usize).wrapping_sub(1)) else {
            continue;
        };
        if extent.is_open {
            let file = layer.storage(extent.storage);
            files.push(FileReport::of(
                &format!("extents.{nth}"),
                spec,
                file,
                limits,
            )?);
        }
    }
    files.reverse();
    Ok(files)
}

impl FileReport {
    fn of(role: &str, spec: &FileSpec, file: &dyn Storage, limits: bool) -> Result<FileReport> {
        Ok(FileReport {
            name: spec.display_name(),
            protocol: match spec.driver {
                FileDriver::Any | FileDriver::File if file.is_device() => "host_device",
                ref driver => driver.name(),
            },
            length: file.len()?.next_multiple_of(512),
            disk_size: file.allocated().ok(),
            is_remote: spec.is_remote(),
            role: role.into(),
            limits: limits.then(|| Limits::of_file(file)),
            below: FileReport::below(spec, file, limits)?.map(Box::new),
            image: None,
        })
    }

    /// An image below a filter.
    fn of_image(image: Report) -> FileReport {
        FileReport {
            name: image.name.clone(),
            protocol: image.format,
            length: image.virtual_size,
            is_remote: false,
            disk_size: image.disk_size,
            role: "file".into(),
            limits: None,
            below: None,
            image: Some(Box::new(image)),
        }
    }

    /// The file that one is made of.
    fn below(spec: &FileSpec, file: &dyn Storage, limits: bool) -> Result<Option<FileReport>> {
        let Some((role, below)) = spec.below() else {
            return Ok(None);
        };
        let storage = match &spec.driver {
            FileDriver::Image(image) if image.is_whole_file() => Some(file),
            _ => file.below(),
        };
        let report = |storage| FileReport::of(role, below, storage, limits);
        storage.map(report).transpose()
    }

    fn to_json(&self) -> Value {
        if let Some(image) = &self.image {
            let info = image.to_json();
            return Map::new()
                .with("name", &*self.role)
                .with("info", info)
                .into();
        }
        let mut info = Map::new();
        if let Some(limits) = &self.limits {
            info.add("limits", limits.to_json());
        }
        let children: Vec<Value> = self.below.iter().map(|below| below.to_json()).collect();
        info.add("children", children);
        info.add("virtual-size", self.length);
        info.add("filename", &self.name);
        info.add("format", self.protocol);
        if let Some(disk_size) = self.disk_size {
            info.add("actual-size", disk_size);
        }
        if self.protocol == "file" {
            info.add("format-specific", nothing_specific());
        }
        if !self.is_remote {
            info.add("dirty-flag", false);
        }
        Map::new()
            .with("name", &*self.role)
            .with("info", info)
            .into()
    }
}

/// What QEMU says of a file of this machine.
fn nothing_specific() -> Map {
    Map::new().with("type", "file").with("data", Map::new())
}

impl Backing {
    fn of(layer: &Layer) -> Option<Backing> {
        let named = layer.backing()?;
        let name = OsStr::from_bytes(named.name).to_owned();
        let format = named.format;
        let format = format.map(|format| String::from_utf8_lossy(format).into_owned());
        // Names with a protocol, json: among them, are what they are.
        let resolved = match protocol(&name) {
            Some(_) => None,
            None => Source::Name(name.clone())
                .resolve(Some(layer.spec.file.name()), None)
                .ok(),
        };
        Some(Backing {
            // A name that cannot be resolved is printed as it is.
            full_name: resolved.map_or_else(|| name.clone(), |spec| spec.file.name().to_owned()),
            name,
            format: format.filter(|format| !format.is_empty()),
        })
    }
}

impl Qcow2Report {
    fn of(image: &Image) -> Self {
        Qcow2Report {
            snapshots: image.snapshots().to_vec(),
        }
    }
}

fn snapshot(snapshot: &Snapshot) -> Value {
    let mut map = Map::new();
    if let Some(icount) = snapshot.icount() {
        map.add("icount", icount);
    }
    map.add("vm-clock-nsec", snapshot.vm_clock_nsec % 1_000_000_000);
    map.add("name", snapshot.name_text());
    map.add("date-sec", snapshot.date_sec);
    map.add("date-nsec", snapshot.date_nsec);
    map.add("vm-clock-sec", snapshot.vm_clock_nsec / 1_000_000_000);
    map.add("id", snapshot.id_text());
    map.add("vm-state-size", snapshot.vm_state_size());
    Value::Object(map)
}
