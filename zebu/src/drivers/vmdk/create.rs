//! New VMDKs: sparse or flat, in one piece or in pieces of 2 GiB, and streams of compressed grains.

use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::header::{HOSTED_MAGIC, MARKER_BYTES, MARKERS, MAX_SIZE, SECTOR, ZERO_GRAINS};
use super::open::{MAX_DESCRIPTOR, MAX_EXTENTS};
use crate::drivers::{
    BlockLayout, BoxFuture, CreateOption, ImagePlan, Linear, NewBlocks, NewImage, OptionKind,
    PlanRequest, random_uuid, too_large, write_table,
};
use crate::format::{INCOMPLETE_VERSION, printable};
use crate::storage::{self, Iov, Queue, Storage};
use crate::{Error, Result};

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
    CreateOption::FILE_PREALLOCATION,
    CreateOption::NOCOW,
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

/// Sectors of a grain.
const GRAIN: u64 = 128;
const GRAIN_BYTES: u64 = GRAIN * SECTOR;
/// Entries of a grain table.
const TABLE: u64 = 512;
/// Sectors of a grain table.
const TABLE_SECTORS: u64 = TABLE * 4 / SECTOR;
/// The first sector of the descriptor in a sparse file, and its length.
const DESCRIPTOR: u64 = 1;
const DESCRIPTOR_SECTORS: u64 = 20;
/// Bytes of an extent of an image in pieces.
const SPLIT: u64 = 2 << 30;
/// Bytes of the largest disk with grain tables; VMware's limit is a little lower.
const MAX_SPARSE: u64 = 64 << 40;
/// Bytes of tables that are written at a time.
const TABLES_AT_ONCE: usize = 1 << 20;

/// How an image is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subformat {
    MonolithicSparse,
    MonolithicFlat,
    SplitSparse,
    SplitFlat,
    Stream,
}

impl Subformat {
    const ALL: [Subformat; 5] = [
        Subformat::MonolithicSparse,
        Subformat::MonolithicFlat,
        Subformat::SplitSparse,
        Subformat::SplitFlat,
        Subformat::Stream,
    ];

    fn name(self) -> &'static str {
        match self {
            Subformat::MonolithicSparse => "monolithicSparse",
            Subformat::MonolithicFlat => "monolithicFlat",
            Subformat::SplitSparse => "twoGbMaxExtentSparse",
            Subformat::SplitFlat => "twoGbMaxExtentFlat",
            Subformat::Stream => "streamOptimized",
        }
    }

    fn is_flat(self) -> bool {
        matches!(self, Subformat::MonolithicFlat | Subformat::SplitFlat)
    }

    fn is_split(self) -> bool {
        matches!(self, Subformat::SplitSparse | Subformat::SplitFlat)
    }

    /// Whether the image is one file, which has the descriptor inside.
    fn is_one_file(self) -> bool {
        matches!(self, Subformat::MonolithicSparse | Subformat::Stream)
    }
}

#[derive(Clone, Debug)]
struct Plan {
    /// The path of the image, and of each extent if they are other files, in the order of the disk.
    path: PathBuf,
    extents: Vec<PathBuf>,
    size: u64,
    subformat: Subformat,
    zeroed_grain: bool,
    adapter: (&'static str, u64),
    hardware: Vec<u8>,
    tools: Vec<u8>,
}

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(Error::Refused(why.into()))
}

/// The one of `all` that has this name; the first one if no name is given.
fn named<T: Copy>(all: &[T], name: impl Fn(T) -> &'static str, given: Option<&OsStr>) -> Result<T> {
    let Some(given) = given else {
        return Ok(all[0]);
    };
    match all.iter().find(|one| given == name(**one)) {
        Some(found) => Ok(*found),
        None => refused(format!(
            "invalid parameter value: {}",
            printable(given.as_bytes())
        )),
    }
}

pub(super) fn plan(request: &PlanRequest<'_>) -> Result<Box<dyn ImagePlan>> {
    let options = request.options;
    if options
        .text("backing_fmt")
        .is_some_and(|format| format != "vmdk")
    {
        return refused("backing_file must be a vmdk image");
    }
    let adapter = named(&ADAPTERS, |(name, _)| name, options.text("adapter_type"))?;
    let subformat = named(&Subformat::ALL, Subformat::name, options.text("subformat"))?;
    let zeroed_grain = options.is_on("zeroed_grain");
    let hardware = options.text("hwversion").filter(|v| *v != "undefined");
    let hardware = match (options.is_on("compat6"), hardware) {
        (true, Some(_)) => return refused("compat6 cannot be enabled with hwversion set"),
        (true, None) => OsStr::new("6"),
        (false, given) => given.unwrap_or(OsStr::new("4")),
    };
    let tools = options.text("toolsversion");
    if subformat.is_flat() && options.text("backing_file").is_some() {
        return refused("Flat image can't have backing file");
    }
    if subformat.is_flat() && zeroed_grain {
        return refused("Flat image can't enable zeroed grain");
    }
    if options.text("backing_file").is_some() {
        return refused("New VMDKs with a backing file are not part of this version");
    }
    let size = request.size.checked_next_multiple_of(SECTOR);
    let size = size.filter(|size| *size <= MAX_SIZE);
    let size = size.ok_or_else(|| too_large("The disk is too large"))?;
    if !subformat.is_flat() && size > MAX_SPARSE {
        return Err(too_large("The disk is too large for grain tables"));
    }
    let plan = Plan {
        path: request.path.to_owned(),
        extents: extent_paths(request.path, size, subformat),
        size,
        subformat,
        zeroed_grain,
        adapter,
        hardware: hardware.as_bytes().to_vec(),
        tools: tools
            .unwrap_or(OsStr::new("2147483647"))
            .as_bytes()
            .to_vec(),
    };
    let breaks = |text: &[u8]| text.iter().any(|b| b"\"\r\n\0".contains(b));
    let texts = [&plan.hardware[..], &plan.tools, base_name(&plan.path)];
    if texts.into_iter().any(breaks) {
        return refused("The descriptor of a VMDK cannot have quotation marks and line ends");
    }
    let length = plan.descriptor(u32::MAX, subformat.name()).len() as u64;
    let most = match subformat.is_one_file() {
        true => DESCRIPTOR_SECTORS * SECTOR - 1,
        false => MAX_DESCRIPTOR,
    };
    match length <= most {
        true => Ok(Box::new(plan)),
        false => Err(too_large("The descriptor is too long")),
    }
}

/// The files of the extents besides that of the image, named as by QEMU.
fn extent_paths(path: &Path, size: u64, subformat: Subformat) -> Vec<PathBuf> {
    let whole = path.as_os_str().as_bytes();
    let folder = whole.iter().rposition(|b| *b == b'/');
    let (folder, file) = whole.split_at(folder.map_or(0, |slash| slash + 1));
    let dot = file.iter().rposition(|b| *b == b'.');
    let (prefix, suffix) = file.split_at(dot.unwrap_or(file.len()));
    let named = |infix: String| {
        let bytes = [folder, prefix, infix.as_bytes(), suffix].concat();
        PathBuf::from(OsString::from_vec(bytes))
    };
    if subformat.is_one_file() {
        return Vec::new();
    }
    if !subformat.is_split() {
        return match size {
            0 => Vec::new(),
            _ => vec![named("-flat".into())],
        };
    }
    let letter = if subformat.is_flat() { 'f' } else { 's' };
    let count = size.div_ceil(SPLIT);
    let numbers = 1..=count.min(MAX_EXTENTS as u64 + 1);
    numbers
        .map(|nth| named(format!("-{letter}{nth:03}")))
        .collect()
}

/// The last part of a path.
fn base_name(path: &Path) -> &[u8] {
    let whole = path.as_os_str().as_bytes();
    whole.rsplit(|b| *b == b'/').next().unwrap_or_default()
}

impl Plan {
    /// Bytes of each extent but the last.
    fn extent_size(&self) -> u64 {
        match self.subformat.is_split() {
            true => SPLIT,
            false => self.size,
        }
    }

    /// The ranges of the disk that the extents are.
    fn ranges(&self) -> Vec<Range<u64>> {
        if self.subformat.is_one_file() {
            return vec![0..self.size];
        }
        let step = self.extent_size();
        let starts = (0..self.extents.len() as u64).map(|nth| nth * step);
        starts
            .map(|start| start..(start + step).min(self.size))
            .collect()
    }

    /// The descriptor of an image of this type.
    fn descriptor(&self, cid: u32, create_type: &str) -> Vec<u8> {
        let mut text = Vec::new();
        let mut add = |parts: &[&[u8]]| parts.iter().for_each(|part| text.extend(*part));
        add(&[format!(
            "# Disk DescriptorFile\nversion=1\nCID={cid:08x}\nparentCID=ffffffff\n\
             createType=\"{create_type}\"\n\n# Extent description\n"
        )
        .as_bytes()]);
        let (kind, offset) = match self.subformat.is_flat() {
            true => ("FLAT", " 0"),
            false => ("SPARSE", ""),
        };
        let own = [self.path.clone()];
        let files = match self.subformat.is_one_file() {
            true => &own[..],
            false => &self.extents,
        };
        for (range, file) in self.ranges().iter().zip(files) {
            let sectors = (range.end - range.start) / SECTOR;
            add(&[
                format!("RW {sectors} {kind} \"").as_bytes(),
                base_name(file),
                format!("\"{offset}\n").as_bytes(),
            ]);
        }
        let (adapter, heads) = self.adapter;
        let cylinders = self.size / (TRACK * heads * SECTOR);
        add(&[
            b"\n# The Disk Data Base\n#DDB\n\nddb.virtualHWVersion = \"",
            &self.hardware,
            format!(
                "\"\nddb.geometry.cylinders = \"{cylinders}\"\nddb.geometry.heads = \"{heads}\"\n\
                 ddb.geometry.sectors = \"{TRACK}\"\nddb.adapterType = \"{adapter}\"\n\
                 ddb.toolsVersion = \""
            )
            .as_bytes(),
            &self.tools,
            b"\"\n",
        ]);
        text
    }

    /// The descriptor of the image while it is not finished: of the same length, and differing in
    /// the first sector only.
    fn unfinished_descriptor(&self, cid: u32) -> Vec<u8> {
        let length = self.subformat.name().len();
        self.descriptor(cid, &format!("{:-<length$}", "unfinished"))
    }

    /// The layout of a sparse extent of so many bytes.
    fn sparse(&self, size: u64) -> SparseLayout {
        SparseLayout::new(
            size / SECTOR,
            self.zeroed_grain,
            self.subformat == Subformat::Stream,
        )
    }
}

impl ImagePlan for Plan {
    fn size(&self) -> u64 {
        self.size
    }

    fn alignment(&self) -> u64 {
        match self.subformat {
            Subformat::Stream => 1,
            _ => GRAIN_BYTES,
        }
    }

    fn other_files(&self) -> Vec<PathBuf> {
        self.extents.clone()
    }

    fn begin<'a>(
        &'a self,
        queue: &'a Queue,
        files: Vec<Arc<dyn Storage>>,
    ) -> BoxFuture<'a, Result<Box<dyn NewImage>>> {
        Box::pin(async move {
            let bytes = random_uuid()?;
            // With all digits, as VMware writes it. `ffffffff` means that there is no parent.
            let cid = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let cid = cid.clamp(1, u32::MAX - 1);
            let (own, text) = (
                files[0].clone(),
                self.descriptor(cid, self.subformat.name()),
            );
            let unfinished = self.unfinished_descriptor(cid);
            let mut parts = Vec::new();
            if self.subformat.is_one_file() {
                let layout = self.sparse(self.size);
                let part = Part::sparse(queue, own.clone(), layout, Some(&text)).await?;
                parts.push((0..self.size, part));
            } else {
                write_text(queue, &*own, &unfinished).await?;
                storage::flush(&*own, queue).await?;
            }
            let files = files.into_iter().skip(1);
            for (range, file) in self.ranges().into_iter().zip(files) {
                let size = range.end - range.start;
                let part = match self.subformat.is_flat() {
                    true => {
                        let disk = Linear::begin(queue, file.clone(), 0, size).await?;
                        Part::Flat { file, disk }
                    }
                    false => Part::sparse(queue, file, self.sparse(size), None).await?,
                };
                parts.push((range, part));
            }
            Ok(Box::new(NewVmdk {
                parts,
                descriptor: (!self.subformat.is_one_file()).then_some((own, text)),
                is_stream: self.subformat == Subformat::Stream,
                is_flat: self.subformat.is_flat(),
            }) as Box<dyn NewImage>)
        })
    }
}

/// Writes a descriptor at the start of a file of its own.
async fn write_text(queue: &Queue, file: &dyn Storage, text: &[u8]) -> Result<()> {
    let mut bytes = text.to_vec();
    if file.is_device() {
        // A zero byte ends it.
        bytes.resize((text.len() + 1).next_multiple_of(SECTOR as usize), 0);
    }
    Ok(storage::write_slice(file, queue, 0, &bytes).await?)
}

/// A VMDK that is being filled.
#[derive(Debug)]
struct NewVmdk {
    /// By range of the disk, in ascending order without gaps.
    parts: Vec<(Range<u64>, Part)>,
    /// The file of the descriptor and its text, unless it is in the one sparse file.
    descriptor: Option<(Arc<dyn Storage>, Vec<u8>)>,
    is_stream: bool,
    is_flat: bool,
}

impl NewImage for NewVmdk {
    fn has_order(&self) -> bool {
        !self.is_flat
    }

    fn zlib_block(&self) -> Option<u64> {
        self.is_stream.then_some(GRAIN_BYTES)
    }

    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: Iov) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let end = offset + iov.len() as u64;
            let first = self.parts.partition_point(|(range, _)| range.end <= offset);
            for (range, part) in &self.parts[first..] {
                if range.start >= end {
                    break;
                }
                let (from, to) = (offset.max(range.start), end.min(range.end));
                let piece = iov.slice((from - offset) as usize, (to - from) as usize);
                part.write(queue, from - range.start, &piece).await?;
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
        Box::pin(async move {
            match &self.parts[..] {
                [(_, Part::Stream { file, grains, .. })] => {
                    grains.write(queue, &**file, blocks, data).await
                }
                _ => unreachable!("the image stores blocks as they are"),
            }
        })
    }

    fn finish<'a>(self: Box<Self>, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            for (_, part) in self.parts {
                part.finish(queue).await?;
            }
            if let Some((file, text)) = self.descriptor {
                let first = &text[..text.len().min(SECTOR as usize)];
                storage::write_slice(&*file, queue, 0, first).await?;
                storage::flush(&*file, queue).await?;
            }
            Ok(())
        })
    }
}

/// An extent that is being filled.
#[derive(Debug)]
enum Part {
    Flat {
        file: Arc<dyn Storage>,
        disk: Linear,
    },
    Sparse {
        file: Arc<dyn Storage>,
        layout: SparseLayout,
        blocks: NewBlocks,
    },
    Stream {
        file: Arc<dyn Storage>,
        layout: SparseLayout,
        grains: StreamGrains,
    },
}

impl Part {
    /// Begins a sparse extent, with the descriptor `text` inside if there is one.
    async fn sparse(
        queue: &Queue,
        file: Arc<dyn Storage>,
        layout: SparseLayout,
        text: Option<&[u8]>,
    ) -> Result<Part> {
        let start = layout.grains * SECTOR;
        storage::set_len(&*file, queue, start).await?;
        let header = layout.header(INCOMPLETE_VERSION);
        storage::write_slice(&*file, queue, 0, &header).await?;
        if file.is_device() {
            storage::zero_range(&*file, queue, SECTOR, start - SECTOR).await?;
        }
        if let Some(text) = text {
            storage::write_slice(&*file, queue, DESCRIPTOR * SECTOR, text).await?;
        }
        // What a device held must not be opened with new data.
        storage::flush(&*file, queue).await?;
        let count = layout.sectors.div_ceil(GRAIN);
        if layout.is_stream {
            let grains = StreamGrains::new(layout.grains, count);
            return Ok(Part::Stream {
                file,
                layout,
                grains,
            });
        }
        let places = BlockLayout {
            start,
            size: GRAIN_BYTES,
            prefix: &[],
        };
        // At most MAX_SPARSE bytes.
        let blocks = NewBlocks::new(file.clone(), places, count as u32);
        Ok(Part::Sparse {
            file,
            layout,
            blocks,
        })
    }

    async fn write(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        match self {
            Part::Flat { disk, .. } => disk.write(queue, offset, iov).await,
            Part::Sparse { blocks, .. } => blocks.write(queue, offset, iov).await,
            Part::Stream { .. } => unreachable!("all grains of the image are compressed"),
        }
    }

    /// Writes the tables, and the header after everything else is durable.
    async fn finish(self, queue: &Queue) -> Result<()> {
        let (file, layout) = match self {
            Part::Flat { file, .. } => return Ok(storage::flush(&*file, queue).await?),
            Part::Sparse {
                file,
                layout,
                blocks,
            } => {
                storage::set_len(&*file, queue, blocks.end()).await?;
                let places = blocks.into_places();
                let sectors = places.map(|place| match place {
                    None => Some(0),
                    Some(place) => u32::try_from(layout.grains + u64::from(place) * GRAIN).ok(),
                });
                layout.write_tables(queue, &*file, sectors).await?;
                (file, layout)
            }
            Part::Stream {
                file,
                layout,
                grains,
            } => {
                let (end, sectors) = grains.into_sectors();
                storage::set_len(&*file, queue, end * SECTOR).await?;
                layout
                    .write_tables(queue, &*file, sectors.into_iter().map(Some))
                    .await?;
                (file, layout)
            }
        };
        storage::flush(&*file, queue).await?;
        let header = layout.header(layout.version());
        storage::write_slice(&*file, queue, 0, &header).await?;
        Ok(storage::flush(&*file, queue).await?)
    }
}

/// Compressed grains, which get their places in the order of the writes.
#[derive(Debug)]
struct StreamGrains(Mutex<(u64, Vec<u32>)>);

impl StreamGrains {
    /// `count` grains, to be stored from a sector on.
    fn new(first: u64, count: u64) -> Self {
        StreamGrains(Mutex::new((first, vec![0; count as usize])))
    }

    /// Writes grains, each with a marker, as [`NewImage::write_packed`].
    async fn write(
        &self,
        queue: &Queue,
        file: &dyn Storage,
        blocks: &[(u64, Range<usize>)],
        data: &[u8],
    ) -> Result<()> {
        let sectors = |range: &Range<usize>| (MARKER_BYTES + range.len() as u64).div_ceil(SECTOR);
        let start = {
            let mut places = crate::lock(&self.0);
            let start = places.0;
            for (offset, range) in blocks {
                let (next, grains) = &mut *places;
                let grain = grains.get_mut((offset / GRAIN_BYTES) as usize);
                let (Some(grain), Ok(sector)) = (grain, u32::try_from(*next)) else {
                    return refused("The file would become too long for a VMDK");
                };
                *grain = sector;
                *next += sectors(range);
            }
            start
        };
        let mut bytes = Vec::new();
        for (offset, range) in blocks {
            bytes.extend((offset / SECTOR).to_le_bytes());
            bytes.extend((range.len() as u32).to_le_bytes());
            bytes.extend(&data[range.clone()]);
            bytes.resize(bytes.len().next_multiple_of(SECTOR as usize), 0);
        }
        Ok(storage::write_slice(file, queue, start * SECTOR, &bytes).await?)
    }

    /// The sector behind the last grain, and those at which grains start; 0: not stored.
    fn into_sectors(self) -> (u64, Vec<u32>) {
        self.0.into_inner().unwrap_or_else(|e| e.into_inner())
    }
}

/// Where the tables of a new sparse extent are, in sectors. There are two directories with tables
/// of their own, and all tables have their places from the start, as in QEMU's images.
#[derive(Clone, Copy, Debug)]
struct SparseLayout {
    /// Sectors of the disk.
    sectors: u64,
    zeroed_grain: bool,
    is_stream: bool,
    tables: u64,
    redundant: u64,
    directory: u64,
    /// The first sector of grains.
    grains: u64,
}

impl SparseLayout {
    fn new(sectors: u64, zeroed_grain: bool, is_stream: bool) -> Self {
        let tables = sectors.div_ceil(GRAIN).div_ceil(TABLE);
        let length = Self::directory_sectors(tables) + tables * TABLE_SECTORS;
        let redundant = DESCRIPTOR + DESCRIPTOR_SECTORS;
        let directory = redundant + length;
        SparseLayout {
            sectors,
            zeroed_grain,
            is_stream,
            tables,
            redundant,
            directory,
            grains: (directory + length).next_multiple_of(GRAIN),
        }
    }

    /// Sectors of a directory.
    fn directory_sectors(tables: u64) -> u64 {
        (tables * 4).div_ceil(SECTOR)
    }

    fn version(&self) -> u32 {
        match (self.is_stream, self.zeroed_grain) {
            (true, _) => 3,
            (false, true) => 2,
            (false, false) => 1,
        }
    }

    /// The header with this version.
    fn header(&self, version: u32) -> [u8; SECTOR as usize] {
        // Line ends that a transfer as text would change; a redundant directory.
        const LINE_ENDS: u32 = 1 << 0;
        const REDUNDANT: u32 = 1 << 1;
        // Grains are compressed, and have markers.
        const STREAM: u32 = 1 << 16 | MARKERS;
        let mut flags = LINE_ENDS | REDUNDANT;
        if self.zeroed_grain {
            flags |= ZERO_GRAINS;
        }
        if self.is_stream {
            flags |= STREAM;
        }
        let mut bytes = [0; SECTOR as usize];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, HOSTED_MAGIC);
        put(4, &version.to_le_bytes());
        put(8, &flags.to_le_bytes());
        for (at, number) in [
            (12, self.sectors),
            (20, GRAIN),
            (28, DESCRIPTOR),
            (36, DESCRIPTOR_SECTORS),
            (48, self.redundant),
            (56, self.directory),
            (64, self.grains),
        ] {
            put(at, &number.to_le_bytes());
        }
        put(44, &(TABLE as u32).to_le_bytes());
        put(73, b"\n \r\n");
        put(77, &u16::from(self.is_stream).to_le_bytes());
        bytes
    }

    /// Writes both directories, and the tables with grains. `sectors` has the first sector of each
    /// grain; 0: it is not stored. None: it is too far behind in the file.
    async fn write_tables(
        &self,
        queue: &Queue,
        file: &dyn Storage,
        mut sectors: impl Iterator<Item = Option<u32>>,
    ) -> Result<()> {
        let behind = Self::directory_sectors(self.tables);
        let both = [self.redundant, self.directory];
        for start in both {
            let tables = (0..self.tables).map(|nth| start + behind + nth * TABLE_SECTORS);
            // Below 2^32: at most MAX_SPARSE bytes of the disk.
            let entries = tables.map(|sector| (sector as u32).to_le_bytes());
            write_table(file, queue, start * SECTOR, entries).await?;
        }
        let (mut first, mut run) = (0, Vec::new());
        for nth in 0..=self.tables {
            let mut table = Vec::new();
            for sector in sectors.by_ref().take(TABLE as usize) {
                let Some(sector) = sector else {
                    return refused("The file became too long for a VMDK");
                };
                table.extend(sector.to_le_bytes());
            }
            table.resize((TABLE * 4) as usize, 0);
            let is_empty = nth == self.tables || table.iter().all(|byte| *byte == 0);
            if !run.is_empty() && (is_empty || run.len() >= TABLES_AT_ONCE) {
                for start in both {
                    let at = start + behind + first * TABLE_SECTORS;
                    storage::write_slice(file, queue, at * SECTOR, &run).await?;
                }
                run.clear();
            }
            if run.is_empty() {
                first = nth;
            }
            if !is_empty {
                run.extend(table);
            }
        }
        Ok(())
    }
}
