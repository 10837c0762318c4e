//! The image that a simulation begins with and its backing files: how they are created and opened.

use std::sync::Arc;

use zebu::ErrorKind;
use zebu::block::{DetectZeroes, Device, Format, OpenOptions};
use zebu::jobs::{CreateQcow2, NewBacking, create_qcow2};
use zebu::names::Source;
use zebu::storage::{CacheMode, Queue};

use super::{Base, Run, Verdict, context};
use crate::bitmaps::Bitmap;
use crate::cell::Cell;
use crate::content::{self, LEAST_PART, ZERO};
use crate::disk::{Disk, SECTOR};
use crate::model::{Model, zeroes};
use crate::sched;
use crate::steps::{NewBitmap, Opening, Scenario};
use zebu_testkit::Rng;

/// The name of the image.
pub const IMAGE: &str = "image";

/// The name of a base.
pub fn base_name(number: usize) -> String {
    format!("base{number}")
}

impl<'a> Run<'a> {
    pub(super) fn new(scenario: &'a Scenario, disk: Arc<Disk>) -> Verdict<Self> {
        let origin = &scenario.origin;
        let queue = sched::queue(4);
        let mut run = Run {
            scenario,
            rng: Rng::new(0),
            clock: 1,
            image: disk.add_named(IMAGE),
            data: None,
            bases: Vec::new(),
            backing: (origin.backing < origin.bases.len()).then_some(origin.backing),
            cluster: match origin.other {
                Some(other) => (other.block / SECTOR) as usize,
                None => 1 << (origin.create.cluster_bits - 9),
            },
            version: origin.create.version,
            model: Model::default(),
            others: Vec::new(),
            former: Vec::new(),
            session: None,
            damaged: false,
            lost_snapshots: false,
            interrupted: false,
            refused: false,
            untidy: false,
            flags: false,
            restarted: false,
            closed: false,
            exchange_dropped: false,
            overlay: None,
            change_dropped: false,
            marked: None,
            disk,
        };
        for number in 0..origin.bases.len() {
            let file = run.disk.add_named(base_name(number));
            run.bases.push(Base {
                file,
                format: Format::RAW,
                below: None,
                model: Model::default(),
            });
        }
        for number in (0..origin.bases.len()).rev() {
            run.make_base(&queue, number)?;
        }
        let mut create = origin.create.clone();
        create.backing = run.backing.map(|number| run.backing_name(number));
        run.data = create
            .data_file
            .is_some()
            .then(|| run.disk.add_named("data"));
        let open = |file| run.disk.open(file, CacheMode::WriteBack, 1);
        let data = run.data.map(open);
        let data = data.as_ref().map(|file| &**file as _);
        match origin.other {
            Some(other) => other.make(&queue, open(run.image), create.size),
            None => queue
                .block_on(create_qcow2(
                    &queue,
                    &*open(run.image),
                    data,
                    &create,
                    |_| {},
                ))
                .map_err(context("create"))?,
        }
        run.disk.sync_names();
        let mut cells = zeroes((create.size / SECTOR) as usize);
        if let Some(base) = run.backing {
            for (cell, below) in cells.iter_mut().zip(&run.bases[base].model.cells) {
                *cell = below.clone();
            }
        }
        run.model.cells = cells;
        if !origin.bitmaps.is_empty() {
            let options = OpenOptions::default().write(true);
            let device = run.open(&queue, &Run::plain(), options);
            let device = device.map_err(context("open"))?;
            add_bitmaps(&queue, device, &origin.bitmaps, &mut run.model)?;
        }
        run.judge()?;
        run.disk.set_slow(true);
        Ok(run)
    }

    pub(super) fn backing_name(&self, number: usize) -> NewBacking {
        NewBacking::new(base_name(number)).format(Some(self.bases[number].format.name().into()))
    }

    pub(super) fn make_base(&mut self, queue: &Queue, number: usize) -> Verdict {
        let origin = &self.scenario.origin.bases[number];
        let mut rng = Rng::new(origin.seed);
        let sectors = (origin.bytes / SECTOR) as usize;
        let mut tags = vec![ZERO; sectors];
        for piece in tags.chunks_mut(1 << rng.below(6)) {
            if rng.one_in(origin.sparse) {
                piece.fill(content::base_tag(number));
            }
        }
        let Some(cluster_bits) = origin.qcow2 else {
            let mut bytes = content::bytes_of(tags.iter().copied(), 0);
            let part = origin.bytes % SECTOR;
            if part >= LEAST_PART {
                let tag = content::part_tag(number, part);
                bytes.extend(content::bytes_of([tag], sectors as u64));
                bytes.truncate(origin.bytes as usize);
                tags.push(tag);
            }
            self.disk.set_bytes(self.bases[number].file, bytes);
            self.bases[number].model.cells = tags.into_iter().map(Cell::new).collect();
            return Ok(());
        };
        let below = (origin.above && number + 1 < self.bases.len()).then_some(number + 1);
        let create = CreateQcow2::default()
            .size(sectors as u64 * SECTOR)
            .cluster_bits(cluster_bits)
            .backing(below.map(|below| self.backing_name(below)));
        let base = &mut self.bases[number];
        base.format = Format::QCOW2;
        base.below = below;
        let file = self.disk.open(base.file, CacheMode::WriteBack, 1);
        queue
            .block_on(create_qcow2(queue, &*file, None, &create, |_| {}))
            .map_err(context("create a base"))?;
        let device = self
            .open_base(queue, number, true)
            .map_err(context("open a base"))?;
        let mut at = 0;
        for piece in tags.chunk_by(|a, b| a == b) {
            if piece[0] != ZERO {
                let bytes = content::bytes_of(piece.iter().copied(), at as u64);
                let write = device.write_blocking(queue, at as u64 * SECTOR, &bytes);
                write.map_err(context("write to a base"))?;
            }
            at += piece.len();
        }
        let under = |sector: usize| {
            let cell = below.and_then(|below| self.bases[below].model.cells.get(sector));
            cell.cloned().unwrap_or_else(|| Cell::new(ZERO))
        };
        let cells = tags.iter().enumerate().map(|(sector, tag)| match *tag {
            ZERO => under(sector),
            tag => Cell::new(tag),
        });
        let cells: Vec<_> = cells.collect();
        let model = &mut self.bases[number].model;
        model.cells = cells;
        add_bitmaps(queue, device, &origin.bitmaps, model)
    }

    pub(super) fn open_base(
        &self,
        queue: &Queue,
        number: usize,
        write: bool,
    ) -> zebu::Result<Device> {
        let options = OpenOptions::default()
            .format(Some(self.bases[number].format))
            .write(write)
            .discard(Some(true));
        self.open_name(queue, &base_name(number), &options)
    }

    pub(super) fn open_name(
        &self,
        queue: &Queue,
        name: &str,
        options: &OpenOptions,
    ) -> zebu::Result<Device> {
        let source = Source::Name(name.into());
        self.unlocked(|| Device::open(queue, &source, options))
    }

    /// Tries again as long as another program has a file locked.
    pub(super) fn unlocked<T>(&self, open: impl Fn() -> zebu::Result<T>) -> zebu::Result<T> {
        loop {
            let are_two = self.disk.turns.are_two();
            match open() {
                Err(e) if are_two && e.kind() == ErrorKind::Locked => _ = self.disk.pause(),
                opened => return opened,
            }
        }
    }

    pub(super) fn open(
        &self,
        queue: &Queue,
        opening: &Opening,
        options: OpenOptions,
    ) -> zebu::Result<Device> {
        self.disk.set_align(opening.align);
        let options = options.cache(opening.mode);
        if opening.preallocate {
            let file = format!(r#"{{"driver":"file","filename":"{IMAGE}"}}"#);
            let filter = r#""driver":"preallocate","prealloc-align":4096,"prealloc-size":20000"#;
            let format = self.format().name();
            let node = format!(r#""driver":"{format}","file":{{{filter},"file":{file}}}"#);
            return self.open_name(queue, &format!("json:{{{node}}}"), &options);
        }
        self.open_name(queue, IMAGE, &options.format(Some(self.format())))
    }

    /// The format of the image.
    fn format(&self) -> Format {
        let other = self.scenario.origin.other;
        other.map_or(Format::QCOW2, |other| other.format())
    }

    /// The options for opening the image where any will do.
    pub(super) fn plain() -> Opening {
        Opening {
            queues: 1,
            discard: true,
            detect_zeroes: DetectZeroes::Off,
            cache: None,
            mode: CacheMode::WriteBack,
            align: 1,
            parts: 4,
            store_bitmaps: false,
            forget: true,
            copy_on_read: false,
            preallocate: false,
        }
    }
}

/// Adds bitmaps to an image, and closes it.
fn add_bitmaps(
    queue: &Queue,
    mut device: Device,
    bitmaps: &[NewBitmap],
    model: &mut Model,
) -> Verdict {
    for (nth, new) in bitmaps.iter().enumerate() {
        let name = format!("bitmap{nth}");
        let add = device.bitmap_add(queue, &name, Some(new.granularity), new.enabled);
        queue.block_on(add).map_err(context("add a bitmap"))?;
        model.bitmaps.push(Bitmap::new(name, *new, &model.cells));
    }
    let closed = queue.block_on(device.close(queue));
    closed.map_err(context("close a new image"))
}
