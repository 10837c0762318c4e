//! What `info` knows of one image, and its form for programs.

use serde_json::{Map, Value, json};
use zebu::Result;
use zebu::block::{Device, FileDriver, FileSpec, Format, Layer, LayerImage, Source};
use zebu::format::{BitmapEntry, LuksHeader, LuksSlot, Snapshot};
use zebu::image::Image;
use zebu::jobs;
use zebu::storage::{Queue, Storage};

use super::untrusted_report::Untrusted;

/// One image.
pub struct Report {
    pub name: String,
    pub format: &'static str,
    pub virtual_size: u64,
    /// Bytes that the file takes on its device, if that is known.
    pub disk_size: Option<u64>,
    /// A server has the bytes.
    pub is_remote: bool,
    /// The file, unless it is the image itself, named without a format.
    pub file: Option<FileReport>,
    pub backing: Option<Backing>,
    pub qcow2: Option<Qcow2Report>,
    /// What it would have opened, in strict mode.
    pub untrusted: Option<Untrusted>,
}

/// The file that the image is.
pub struct FileReport {
    pub name: String,
    /// QEMU's name for what kind of file it is.
    pub protocol: &'static str,
    pub length: u64,
    pub disk_size: Option<u64>,
    /// What it is to the image above it: `file` or `image`.
    pub role: &'static str,
    /// The file below, if it is none of its own.
    pub below: Option<Box<FileReport>>,
}

/// The backing file, by its names.
pub struct Backing {
    /// As the image has it.
    pub name: String,
    /// From where the program runs.
    pub full_name: String,
    pub format: Option<String>,
}

/// What only qcow2 images have.
pub struct Qcow2Report {
    pub cluster_size: u64,
    pub is_encrypted: bool,
    pub is_dirty: bool,
    pub snapshots: Vec<Snapshot>,
    /// "Format specific information".
    pub specific: Value,
}

impl Report {
    /// Looks at the top image of a device.
    pub fn of(queue: &Queue, device: &Device) -> Result<Report> {
        let layer = device.top();
        let file = layer.file();
        let disk_size = file.allocated().ok();
        let qcow2 = match &layer.image {
            LayerImage::Raw(_) => None,
            LayerImage::Qcow2(image) => Some(image),
        };
        Ok(Report {
            name: layer.name.clone(),
            format: layer.spec.format_name(),
            virtual_size: layer.size(),
            disk_size,
            is_remote: layer.spec.file.nbd().is_some(),
            file: match layer.spec.bare {
                true => FileReport::below(&layer.spec.file, file)?,
                false => Some(FileReport::of("file", &layer.spec.file, file)?),
            },
            backing: qcow2.and_then(|image| Backing::of(layer, image)),
            qcow2: match qcow2 {
                Some(image) => Some(Qcow2Report::of(queue, image)?),
                None => None,
            },
            untrusted: None,
        })
    }

    /// The report for programs, its keys in qemu-img's order.
    pub fn to_json(&self) -> Value {
        let mut map = Map::new();
        let children: Vec<Value> = self.file.iter().map(FileReport::to_json).collect();
        map.insert("children".into(), json!(children));
        if let Some(format) = self.backing.as_ref().and_then(|b| b.format.as_ref()) {
            map.insert("backing-filename-format".into(), json!(format));
        }
        let snapshots = self.qcow2.as_ref().map_or(&[][..], |q| &q.snapshots);
        if !snapshots.is_empty() {
            let list: Vec<Value> = snapshots.iter().map(snapshot).collect();
            map.insert("snapshots".into(), json!(list));
        }
        map.insert("virtual-size".into(), json!(self.virtual_size));
        map.insert("filename".into(), json!(self.name));
        if let Some(qcow2) = &self.qcow2 {
            map.insert("cluster-size".into(), json!(qcow2.cluster_size));
        }
        map.insert("format".into(), json!(self.format));
        if let Some(disk_size) = self.disk_size {
            map.insert("actual-size".into(), json!(disk_size));
        }
        if let Some(qcow2) = &self.qcow2 {
            let specific = json!({"type": self.format, "data": qcow2.specific});
            map.insert("format-specific".into(), specific);
        }
        if let Some(backing) = &self.backing {
            map.insert("full-backing-filename".into(), json!(backing.full_name));
            map.insert("backing-filename".into(), json!(backing.name));
        }
        if self.qcow2.as_ref().is_some_and(|q| q.is_encrypted) {
            map.insert("encrypted".into(), json!(true));
        }
        let is_dirty = self.qcow2.as_ref().map(|q| q.is_dirty);
        // Of a server's bytes nobody knows.
        if let Some(is_dirty) = is_dirty.or((!self.is_remote).then_some(false)) {
            map.insert("dirty-flag".into(), json!(is_dirty));
        }
        if let Some(untrusted) = &self.untrusted {
            map.insert("untrusted".into(), untrusted.to_json());
        }
        Value::Object(map)
    }
}

impl FileReport {
    fn of(role: &'static str, spec: &FileSpec, file: &dyn Storage) -> Result<FileReport> {
        Ok(FileReport {
            name: spec.display_name(),
            protocol: match spec.driver {
                FileDriver::Any | FileDriver::File if file.is_device() => "host_device",
                ref driver => driver.name(),
            },
            length: file.len()?.next_multiple_of(512),
            disk_size: file.allocated().ok(),
            role,
            below: FileReport::below(spec, file)?.map(Box::new),
        })
    }

    /// The file that one is made of.
    fn below(spec: &FileSpec, file: &dyn Storage) -> Result<Option<FileReport>> {
        let (role, below, storage) = match &spec.driver {
            FileDriver::Blkdebug(debug) => ("image", &*debug.image, file.below()),
            FileDriver::Image(image) => {
                let raw = &image.options.raw;
                let is_whole = raw.offset.unwrap_or(0) == 0 && raw.size.is_none();
                let same = image.format == Some(Format::Raw) && is_whole;
                let storage = if same { Some(file) } else { file.below() };
                ("file", &image.file, storage)
            }
            _ => return Ok(None),
        };
        let report = |storage| FileReport::of(role, below, storage);
        storage.map(report).transpose()
    }

    fn to_json(&self) -> Value {
        let mut info = Map::new();
        let children: Vec<Value> = self.below.iter().map(|below| below.to_json()).collect();
        info.insert("children".into(), json!(children));
        info.insert("virtual-size".into(), json!(self.length));
        info.insert("filename".into(), json!(self.name));
        info.insert("format".into(), json!(self.protocol));
        if let Some(disk_size) = self.disk_size {
            info.insert("actual-size".into(), json!(disk_size));
        }
        if self.protocol == "file" {
            let specific = json!({"type": "file", "data": {}});
            info.insert("format-specific".into(), specific);
        }
        if self.protocol != "nbd" {
            info.insert("dirty-flag".into(), json!(false));
        }
        json!({"name": self.role, "info": info})
    }
}

impl Backing {
    fn of(layer: &Layer, image: &Image) -> Option<Backing> {
        let header = image.header();
        let name = text(header.backing_file()?);
        let format = header.extensions.backing_format().map(text);
        // Names with a protocol, json: among them, are what they are.
        let has_protocol = name
            .split_once(':')
            .is_some_and(|(protocol, _)| !protocol.contains('/'));
        let resolved = match has_protocol {
            true => None,
            false => Source::Name(name.clone())
                .resolve(Some(&layer.spec.file.name()), None)
                .ok(),
        };
        Some(Backing {
            // A name that means nothing here is shown as it is.
            full_name: resolved.map_or_else(|| name.clone(), |spec| spec.file.name().into_owned()),
            name,
            format: format.filter(|format| !format.is_empty()),
        })
    }
}

impl Qcow2Report {
    fn of(queue: &Queue, image: &Image) -> Result<Self> {
        let header = image.header();
        Ok(Qcow2Report {
            cluster_size: header.cluster_size(),
            is_encrypted: header.is_encrypted(),
            is_dirty: header.is_dirty(),
            snapshots: image.snapshots().to_vec(),
            specific: specific(queue, image)?,
        })
    }
}

/// The "format specific" part, in qemu-img's order.
pub fn specific(queue: &Queue, image: &Image) -> Result<Value> {
    let bitmaps = jobs::bitmaps(queue, image)?;
    let luks = queue.block_on(image.luks_header(queue))?;
    let header = image.header();
    let mut map = Map::new();
    let mut add = |key: &str, value: Value| {
        map.insert(key.to_string(), value);
    };
    let is_v3 = header.version >= 3;
    add("compat", json!(if is_v3 { "1.1" } else { "0.10" }));
    add("compression-type", json!(header.compression.name()));
    if is_v3 {
        add("lazy-refcounts", json!(header.lazy_refcounts()));
        if !bitmaps.is_empty() {
            let list: Vec<Value> = bitmaps.iter().map(bitmap).collect();
            add("bitmaps", json!(list));
        }
    }
    add("refcount-bits", json!(image.geometry().refcount_bits()));
    if let Some(luks) = luks {
        add("encrypt", encryption(&luks));
    } else if header.is_encrypted() {
        add("encrypt", json!({"format": "aes"}));
    }
    if is_v3 {
        if header.has_data_file() {
            if let Some(name) = header.extensions.data_file() {
                add("data-file", json!(text(name)));
            }
            add("data-file-raw", json!(header.is_data_file_raw()));
        }
        add("corrupt", json!(header.is_corrupt()));
        add("extended-l2", json!(header.has_extended_l2()));
    }
    Ok(Value::Object(map))
}

fn encryption(luks: &LuksHeader) -> Value {
    let mut map = Map::new();
    let mut add = |key: &str, value: Value| {
        map.insert(key.to_string(), value);
    };
    add("ivgen-alg", json!(luks.iv_generator.name()));
    add("detached-header", json!(false));
    add("hash-alg", json!(luks.hash.name()));
    add("cipher-alg", json!(luks.cipher.to_string()));
    add("uuid", json!(text(&luks.uuid)));
    if let Some(hash) = luks.iv_generator.hash() {
        add("ivgen-hash-alg", json!(hash.name()));
    }
    add("format", json!("luks"));
    add("cipher-mode", json!(luks.mode.name()));
    let slots: Vec<Value> = luks.slots.iter().map(luks_slot).collect();
    add("slots", json!(slots));
    add("payload-offset", json!(luks.payload_offset()));
    add("master-key-iters", json!(luks.digest_iterations));
    Value::Object(map)
}

fn luks_slot(slot: &LuksSlot) -> Value {
    if !slot.active {
        return json!({"active": false, "key-offset": slot.key_offset()});
    }
    json!({
        "active": true,
        "iters": slot.iterations,
        "key-offset": slot.key_offset(),
        "stripes": slot.stripes,
    })
}

fn bitmap(bitmap: &BitmapEntry) -> Value {
    let mut flags = Vec::new();
    if bitmap.in_use() {
        flags.push("in-use");
    }
    if bitmap.auto() {
        flags.push("auto");
    }
    json!({
        "flags": flags,
        "name": text(&bitmap.name),
        "granularity": bitmap.granularity().unwrap_or(0),
    })
}

fn snapshot(snapshot: &Snapshot) -> Value {
    let mut map = Map::new();
    let mut add = |key: &str, value: Value| {
        map.insert(key.to_string(), value);
    };
    if let Some(icount) = snapshot.icount() {
        add("icount", json!(icount));
    }
    add(
        "vm-clock-nsec",
        json!(snapshot.vm_clock_nsec % 1_000_000_000),
    );
    add("name", json!(text(snapshot.name_text())));
    add("date-sec", json!(snapshot.date_sec));
    add("date-nsec", json!(snapshot.date_nsec));
    add(
        "vm-clock-sec",
        json!(snapshot.vm_clock_nsec / 1_000_000_000),
    );
    add("id", json!(text(snapshot.id_text())));
    add("vm-state-size", json!(snapshot.vm_state_size()));
    Value::Object(map)
}

/// A string of an image, for people and programs that expect UTF-8.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
