//! New VMDKs: sparse or flat, in one piece or in pieces of 2 GiB, and streams of compressed grains.

use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::descriptor::STREAM_TYPE;
use super::header::SECTOR;
use super::new_extent::{DESCRIPTOR, DESCRIPTOR_SECTORS, GRAIN_BYTES, Kind, NewExtent};
use super::open::{MAX_DESCRIPTOR, MAX_EXTENTS};
use super::{DRIVER, refused};
use crate::Result;
use crate::drivers::limits::MAX_DISK;
use crate::drivers::{
    BoxFuture, CreateOption, CreateValue, CreateValues, ImagePlan, NewImage, OptionKind,
    PlanRequest, begin_file, check_inside, make_valid, random_uuid, refuse_empty, too_large,
};
use crate::printable;
use crate::spelling::path::as_name;
use crate::storage::{self, Iov, Queue, Storage};

/// In the order in which they are shown.
pub(super) static CREATE_OPTIONS: [CreateOption; 12] = [
    CreateOption::SIZE,
    CreateOption::new(
        "adapter_type",
        OptionKind::Text,
        "Virtual adapter type, can be one of ide (default), lsilogic, buslogic or legacyESX",
    ),
    CreateOption::new(
        "backing_file",
        OptionKind::Text,
        "File name of a base image",
    ),
    CreateOption::new("backing_fmt", OptionKind::Text, "Must be 'vmdk' if present"),
    CreateOption::new("compat6", OptionKind::Switch, "VMDK version 6 image").or("off"),
    CreateOption::new("hwversion", OptionKind::Text, "VMDK hardware version").or("undefined"),
    CreateOption::new(
        "toolsversion",
        OptionKind::Text,
        "VMware guest tools version",
    ),
    CreateOption::new(
        "subformat",
        OptionKind::Text,
        "VMDK flat extent format, can be one of {monolithicSparse (default) | monolithicFlat | \
         twoGbMaxExtentSparse | twoGbMaxExtentFlat | streamOptimized} ",
    ),
    CreateOption::new(
        "zeroed_grain",
        OptionKind::Switch,
        "Enable efficient zero writes using the zeroed-grain GTE feature",
    ),
    CreateOption::NOCOW,
    CreateOption::FILE_PREALLOCATION,
    CreateOption::EXTENT_SIZE_HINT,
];

/// Adapters, and the heads of the geometry that belongs to each.
const ADAPTERS: [(&str, u64); 4] = [
    ("ide", 16),
    ("buslogic", 255),
    ("lsilogic", 255),
    ("legacyESX", 255),
];
/// Sectors of a track.
const TRACK: u64 = 63;
/// Bytes of an extent of an image in pieces.
const SPLIT: u64 = 2 << 30;
/// Bytes of the largest disk with grain tables; VMware's limit is a little lower.
const MAX_SPARSE: u64 = 64 << 40;
/// Bytes of the largest disk in pieces.
const MAX_SPLIT: u64 = MAX_EXTENTS as u64 * SPLIT;
/// The type of an image that is not finished.
const UNFINISHED: &str = "unfinished";

/// What the name of a subformat means.
#[derive(Clone, Copy, Debug)]
struct Subformat {
    name: &'static str,
    kind: Kind,
    /// Whether the disk is stored in pieces of [`SPLIT`] bytes.
    is_split: bool,
    /// Whether the image is one file, which has the descriptor inside.
    is_one_file: bool,
}

const SUBFORMATS: [Subformat; 5] = [
    Subformat {
        name: "monolithicSparse",
        kind: Kind::Sparse,
        is_split: false,
        is_one_file: true,
    },
    Subformat {
        name: "monolithicFlat",
        kind: Kind::Flat,
        is_split: false,
        is_one_file: false,
    },
    Subformat {
        name: "twoGbMaxExtentSparse",
        kind: Kind::Sparse,
        is_split: true,
        is_one_file: false,
    },
    Subformat {
        name: "twoGbMaxExtentFlat",
        kind: Kind::Flat,
        is_split: true,
        is_one_file: false,
    },
    Subformat {
        name: STREAM_TYPE,
        kind: Kind::Stream,
        is_split: false,
        is_one_file: true,
    },
];

#[derive(Debug)]
struct Plan {
    size: u64,
    subformat: Subformat,
    zeroed_grain: bool,
    /// The ranges of the disk, and the files that they are stored in.
    extents: Vec<(Range<u64>, PathBuf)>,
    descriptor: String,
}

/// The one of `all` that has this name; the first one if no name is given.
fn named<T: Copy>(
    all: &[T],
    name: impl Fn(&T) -> &'static str,
    given: Option<&OsStr>,
) -> Result<T> {
    let Some(given) = given else {
        return Ok(all[0]);
    };
    match all.iter().find(|one| given == name(one)) {
        Some(found) => Ok(*found),
        None => refused(format!(
            "invalid parameter value: {}",
            printable(given.as_encoded_bytes())
        )),
    }
}

pub(super) fn plan(request: &PlanRequest<'_>) -> Result<Box<dyn ImagePlan>> {
    planned(request).map(|plan| Box::new(plan) as Box<dyn ImagePlan>)
}

/// The size in bytes and the descriptor of a streamOptimized image.
pub(super) fn stream_descriptor(
    path: &Path,
    size: u64,
    options: &CreateValues,
) -> Result<(u64, String)> {
    let subformat = CreateValue::Text(STREAM_TYPE.into());
    let options = &options.clone().with("subformat", subformat);
    let plan = planned(&PlanRequest {
        path,
        size,
        options,
        backing_id: None,
    })?;
    plan.check_opens()?;
    Ok((plan.size, plan.descriptor))
}

fn planned(request: &PlanRequest<'_>) -> Result<Plan> {
    let options = request.options;
    if options
        .text("backing_fmt")
        .is_some_and(|f| f != DRIVER.name)
    {
        return refused("backing_file must be a vmdk image");
    }
    let adapter = named(&ADAPTERS, |a| a.0, options.text("adapter_type"))?;
    let subformat = named(&SUBFORMATS, |s| s.name, options.text("subformat"))?;
    let zeroed_grain = options.is_on("zeroed_grain");
    let hardware = options.text("hwversion").filter(|v| *v != "undefined");
    let hardware = match (options.is_on("compat6"), hardware) {
        (true, Some(_)) => return refused("compat6 cannot be enabled with hwversion set"),
        (true, None) => OsStr::new("6"),
        (false, given) => given.unwrap_or(OsStr::new("4")),
    };
    let tools = options.text("toolsversion");
    let parent = match (options.text("backing_file"), request.backing_id) {
        (None, _) => None,
        (Some(_), _) if subformat.kind == Kind::Flat => {
            return refused("Flat image can't have backing file");
        }
        (Some(name), Some(id)) => Some((quotable(name)?, id)),
        (Some(_), None) => return refused("The content ID of the backing file is not known"),
    };
    if subformat.kind == Kind::Flat && zeroed_grain {
        return refused("Flat image can't enable zeroed grain");
    }
    let most = match (subformat.is_split, subformat.kind) {
        (true, _) => MAX_SPLIT,
        (false, Kind::Flat) => MAX_DISK,
        (false, _) => MAX_SPARSE,
    };
    let size = request.size.checked_next_multiple_of(SECTOR);
    let size = size.filter(|size| *size <= most);
    let size = size.ok_or_else(|| too_large("The disk is too large for the subformat"))?;
    let extents = extents(request.path, size, subformat)?;
    let descriptor = Descriptor {
        cid: new_cid()?,
        parent,
        subformat,
        extents: &extents,
        hardware: quotable(hardware)?,
        cylinders: size / (TRACK * adapter.1 * SECTOR),
        adapter,
        tools: quotable(tools.unwrap_or(OsStr::new("2147483647")))?,
    };
    let descriptor = descriptor.text()?;
    let most = match subformat.is_one_file {
        true => DESCRIPTOR_SECTORS * SECTOR - 1,
        false => MAX_DESCRIPTOR,
    };
    if descriptor.len() as u64 > most {
        return Err(too_large("The descriptor is too long"));
    }
    Ok(Plan {
        size,
        subformat,
        zeroed_grain,
        extents,
        descriptor,
    })
}

/// The extents of a new image. Files besides that of the image are named as by QEMU.
fn extents(path: &Path, size: u64, subformat: Subformat) -> Result<Vec<(Range<u64>, PathBuf)>> {
    if subformat.is_one_file {
        return Ok(vec![(0..size, path.to_owned())]);
    }
    let name = file_name(path)?;
    let (stem, suffix) = name.split_at(name.rfind('.').unwrap_or(name.len()));
    let named = |nth: usize| match (subformat.is_split, subformat.kind) {
        (false, _) => path.with_file_name(format!("{stem}-flat{suffix}")),
        (true, Kind::Flat) => path.with_file_name(format!("{stem}-f{nth:03}{suffix}")),
        (true, _) => path.with_file_name(format!("{stem}-s{nth:03}{suffix}")),
    };
    let step = match subformat.is_split {
        true => SPLIT,
        false => size.max(1),
    };
    let ranges = (0..size.div_ceil(step)).map(|n| n * step..((n + 1) * step).min(size));
    Ok(ranges
        .zip(1..)
        .map(|(range, nth)| (range, named(nth)))
        .collect())
}

/// The last part of a path, as a descriptor can have it.
fn file_name(path: &Path) -> Result<&str> {
    quotable(path.file_name().unwrap_or_default())
}

/// A text that can be between the quotation marks of a descriptor.
fn quotable(text: &OsStr) -> Result<&str> {
    let text = text.to_str();
    match text.filter(|text| !text.contains(['"', '\r', '\n', '\0'])) {
        Some(text) => Ok(text),
        None => refused("Names in a VMDK must be UTF-8, without quotation marks and line ends"),
    }
}

/// A content ID, with all digits as VMware writes it. `ffffffff` means that there is no parent.
fn new_cid() -> Result<u32> {
    let [a, b, c, d, ..] = random_uuid()?;
    Ok(u32::from_be_bytes([a, b, c, d]).clamp(1, u32::MAX - 1))
}

/// The text that describes an image.
struct Descriptor<'a> {
    cid: u32,
    /// The name of the parent, and its content ID.
    parent: Option<(&'a str, &'a [u8])>,
    subformat: Subformat,
    extents: &'a [(Range<u64>, PathBuf)],
    hardware: &'a str,
    cylinders: u64,
    adapter: (&'static str, u64),
    tools: &'a str,
}

impl Descriptor<'_> {
    fn text(&self) -> Result<String> {
        let (parent_cid, hint) = match self.parent {
            None => (u32::MAX, String::new()),
            Some((name, id)) => {
                let id = id
                    .try_into()
                    .or_else(|_| refused("The backing file is no VMDK"))?;
                let hint = format!("parentFileNameHint=\"{name}\"");
                (u32::from_be_bytes(id), hint)
            }
        };
        let (kind, offset) = match self.subformat.kind {
            Kind::Flat => ("FLAT", " 0"),
            Kind::Sparse | Kind::Stream => ("SPARSE", ""),
        };
        let mut lines = String::new();
        for (range, path) in self.extents {
            let sectors = (range.end - range.start) / SECTOR;
            let name = file_name(path)?;
            lines += &format!("RW {sectors} {kind} \"{name}\"{offset}\n");
        }
        let Descriptor {
            cid,
            subformat: Subformat { name, .. },
            hardware,
            cylinders,
            adapter: (adapter, heads),
            tools,
            ..
        } = self;
        Ok(format!(
            "# Disk DescriptorFile\nversion=1\nCID={cid:x}\nparentCID={parent_cid:x}\n\
             createType=\"{name}\"\n{hint}\n# Extent description\n{lines}\n\
             # The Disk Data Base\n#DDB\n\nddb.virtualHWVersion = \"{hardware}\"\n\
             ddb.geometry.cylinders = \"{cylinders}\"\nddb.geometry.heads = \"{heads}\"\n\
             ddb.geometry.sectors = \"{TRACK}\"\nddb.adapterType = \"{adapter}\"\n\
             ddb.toolsVersion = \"{tools}\"\n"
        ))
    }
}

impl ImagePlan for Plan {
    fn size(&self) -> u64 {
        self.size
    }

    fn alignment(&self) -> u64 {
        match self.subformat.kind {
            Kind::Stream => 1,
            Kind::Flat | Kind::Sparse => GRAIN_BYTES,
        }
    }

    fn other_files(&self) -> Vec<OsString> {
        match self.subformat.is_one_file {
            true => Vec::new(),
            false => self.extents.iter().map(|(_, path)| as_name(path)).collect(),
        }
    }

    fn check_opens(&self) -> Result<()> {
        refuse_empty(self.size, "A VMDK")
    }

    fn mark(&self) -> Result<Option<Vec<u8>>> {
        Ok(Some(match self.subformat.is_one_file {
            true => NewExtent::mark(&self.extents[0].0, self.subformat.kind, self.zeroed_grain),
            false => self.unfinished_descriptor()[..SECTOR as usize].to_vec(),
        }))
    }

    fn begin<'a>(
        &'a self,
        queue: &'a Queue,
        mut files: Vec<Arc<dyn Storage>>,
    ) -> BoxFuture<'a, Result<Box<dyn NewImage>>> {
        Box::pin(async move {
            let mut descriptor = None;
            if !self.subformat.is_one_file {
                let file = files.remove(0);
                let first = self.descriptor.len().min(SECTOR as usize);
                let mut text = self.unfinished_descriptor();
                if !file.is_device() {
                    text.truncate(self.descriptor.len());
                    storage::set_len(&*file, queue, text.len() as u64).await?;
                }
                // Its first sector is the mark.
                if let Some(rest) = text.get(SECTOR as usize..) {
                    storage::write_slice(&*file, queue, SECTOR, rest).await?;
                }
                descriptor = Some((file, self.descriptor.as_bytes()[..first].to_vec()));
            }
            let mut extents = Vec::new();
            for ((range, _), file) in self.extents.iter().zip(&files) {
                let (file, range) = (file.clone(), range.clone());
                let kind = self.subformat.kind;
                if kind != Kind::Flat && !self.subformat.is_one_file {
                    let mark = NewExtent::mark(&range, kind, self.zeroed_grain);
                    begin_file(queue, &*file, Some(&mark)).await?;
                }
                let extent = NewExtent::begin(queue, file, range, kind, self.zeroed_grain).await?;
                extents.push(extent);
            }
            if self.subformat.is_one_file {
                let text = self.descriptor.as_bytes();
                storage::write_slice(&*files[0], queue, DESCRIPTOR * SECTOR, text).await?;
            }
            Ok(Box::new(NewVmdk {
                size: self.size,
                kind: self.subformat.kind,
                extents,
                descriptor,
            }) as Box<dyn NewImage>)
        })
    }
}

impl Plan {
    /// The descriptor of an image that is not finished, in whole sectors.
    fn unfinished_descriptor(&self) -> Vec<u8> {
        let name = self.subformat.name;
        let width = name.len();
        // In place of the name, which is in the first sector.
        let unfinished = format!("{UNFINISHED:-<width$}");
        let mut bytes = self.descriptor.replacen(name, &unfinished, 1).into_bytes();
        // A zero byte ends it.
        bytes.resize((bytes.len() + 1).next_multiple_of(SECTOR as usize), 0);
        bytes
    }
}

/// A VMDK that is being filled.
#[derive(Debug)]
struct NewVmdk {
    size: u64,
    kind: Kind,
    /// In the order of the disk, without gaps.
    extents: Vec<NewExtent>,
    /// The file of the descriptor, unless that is inside an extent, and what makes it valid.
    descriptor: Option<(Arc<dyn Storage>, Vec<u8>)>,
}

impl NewImage for NewVmdk {
    fn has_order(&self) -> bool {
        self.kind != Kind::Flat
    }

    fn zlib_block(&self) -> Option<u64> {
        (self.kind == Kind::Stream).then_some(GRAIN_BYTES)
    }

    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: Iov) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            check_inside(offset, &iov, self.size)?;
            let end = offset + iov.len() as u64;
            let first = self.extents.partition_point(|e| e.range.end <= offset);
            let touched = self.extents[first..].iter();
            for extent in touched.take_while(|e| e.range.start < end) {
                let range = &extent.range;
                let (from, to) = (offset.max(range.start), end.min(range.end));
                let piece = iov.slice((from - offset) as usize, (to - from) as usize);
                extent.write(queue, from - range.start, &piece).await?;
            }
            Ok(())
        })
    }

    fn write_packed<'a>(
        &'a self,
        queue: &'a Queue,
        blocks: &'a [(u64, Range<usize>)],
        data: &'a [u8],
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.extents[0].write_packed(queue, blocks, data))
    }

    fn finish<'a>(self: Box<Self>, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            for extent in self.extents {
                extent.finish(queue).await?;
            }
            match self.descriptor {
                Some((file, first)) => make_valid(&*file, queue, 0, &first).await,
                None => Ok(()),
            }
        })
    }
}
