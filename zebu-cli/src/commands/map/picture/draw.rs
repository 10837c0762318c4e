//! The parts of the picture: what is said, the disk as cells, the legend, the file.

use std::os::unix::ffi::OsStrExt;

use zebu::block::{Device, Layer};

use super::canvas::{CHARACTER, Canvas, Colour, LINE};
use super::colours;
use crate::arguments::size::{self, percent};
use crate::images::survey::{Bytes, COLUMNS, Check, FileMap, LAYERS, ROWS, Survey};
use crate::output::printable;

/// Cells of the disk at most.
pub const MOST_CELLS: u64 = 3840;

/// Pixels left of everything, and right of it.
const MARGIN: u32 = 24;
/// Where the cells and the file begin: offsets are left of them.
const LEFT: u32 = MARGIN + 10 * CHARACTER;
/// Pixels of a row of cells, and of the file.
const WIDTH: u32 = 960;
/// Sizes of a cell in pixels; the largest with which the disk is not too high.
const CELL_SIZES: [u32; 3] = [40, 20, 10];
/// Pixels of the cells from top to bottom at most.
const MOST_HEIGHT: u32 = 400;
/// Pixels between parts.
const GAP: u32 = 20;
/// Pixels of a point of the file's map.
const POINT: u32 = 2;
/// Pixels of the strip that shows which parts of the file are in use.
const STRIP: u32 = 24;
/// Characters of a name that are shown.
const NAME: usize = 40;

/// A picture of a disk.
pub struct Picture<'a> {
    device: &'a Device,
    survey: &'a Survey,
    check: Option<Check>,
    /// What is said above the disk, and whether it is a warning.
    facts: Vec<(String, bool)>,
    legend: Vec<Entry>,
}

/// A line of the legend.
struct Entry {
    /// What it looks like; None: the mark of snapshots.
    colour: Option<Colour>,
    text: String,
    bytes: u64,
}

impl<'a> Picture<'a> {
    pub fn new(device: &'a Device, survey: &'a Survey, check: Option<Check>) -> Self {
        let mut picture = Picture {
            device,
            survey,
            check,
            facts: Vec::new(),
            legend: Vec::new(),
        };
        picture.facts = picture.facts();
        picture.legend = picture.legend();
        picture
    }

    /// Width and height in pixels.
    pub fn size(&self) -> (u32, u32) {
        let mut height = MARGIN + self.facts.len() as u32 * LINE + GAP;
        height += LINE + self.rows() * self.cell() + GAP;
        height += self.legend.len() as u32 * LINE + GAP;
        if self.survey.file.is_some() {
            height += LINE + ROWS as u32 * POINT + STRIP + 2 * LINE + GAP;
        }
        (LEFT + WIDTH + MARGIN, height)
    }

    /// Draws all.
    pub fn draw(&self, canvas: &mut dyn Canvas) {
        let (width, height) = self.size();
        canvas.rectangle(0, 0, width, height, [255; 3]);
        let mut y = MARGIN;
        for (nth, (text, is_warning)) in self.facts.iter().enumerate() {
            let colour = match (is_warning, nth) {
                (true, _) => colours::WARNING,
                (_, 0) => colours::TEXT,
                _ => colours::FAINT,
            };
            canvas.text(MARGIN, y, text, colour);
            y += LINE;
        }
        y = self.draw_cells(canvas, y + GAP);
        y = self.draw_legend(canvas, y + GAP);
        if let Some(file) = &self.survey.file {
            self.draw_file(canvas, file, y + GAP);
        }
    }

    fn facts(&self) -> Vec<(String, bool)> {
        let (survey, total) = (self.survey, &self.survey.total);
        let top = self.device.top();
        let length = survey.range.end - survey.range.start;
        let mut facts = vec![
            (
                format!(
                    "{}: {}, {}{}",
                    name(top),
                    top.spec.format_name(),
                    size::human(self.device.size()),
                    match self.is_part() {
                        true => format!(", the picture shows {} of it", size::human(length)),
                        false => String::new(),
                    }
                ),
                false,
            ),
            (
                format!(
                    "Stored: {} ({}), recorded as zero: {}, not allocated: {}",
                    size::human(total.stored()),
                    percent(total.stored(), length),
                    size::human(total.zero),
                    size::human(total.unallocated)
                ),
                false,
            ),
        ];
        let mut say = |text: String| facts.push((text, false));
        let compressed = total.all_compressed();
        if compressed > 0 && survey.compressed_to > 0 {
            say(format!(
                "Compressed: {} in {}, {}",
                size::human(compressed),
                size::human(survey.compressed_to),
                percent(survey.compressed_to, compressed)
            ));
        }
        if survey.extents > 0 {
            say(format!(
                "Data in {}, {} on average; stored before the one that precedes: {}",
                size::counted(survey.extents, "piece"),
                size::human(total.stored() / survey.extents),
                survey.backward
            ));
        }
        if let Ok(length) = top.file().len() {
            let takes = top.file().allocated();
            let takes = takes.map_or_else(|_| "unknown".into(), size::human);
            let mut text = format!("File: {} long, takes {takes}", size::human(length));
            if let Some(clusters) = survey.clusters {
                text += &format!(", free in it: {}", size::human(clusters.free));
            }
            if let Some(check) = &self.check {
                text += &format!(", leaked: {}", size::human(check.leaked));
            }
            say(text);
        }
        if let Some(snapshots) = top.snapshots().filter(|all| !all.is_empty()) {
            say(format!(
                "Snapshots: {}, holding {} of the disk's data, too",
                snapshots.len(),
                size::human(total.shared)
            ));
        }
        if survey.is_sampled {
            say(
                "The disk is in so many pieces that a part of each cell stands for all of it"
                    .into(),
            );
        }
        let corruptions = self.check.as_ref().map_or(0, |check| check.corruptions);
        if corruptions > 0 {
            let errors = size::counted(corruptions, "error");
            let text = format!("The image has {errors}: see zebu check");
            facts.push((text, true));
        }
        facts
    }

    /// Whether only a part of the disk is drawn.
    fn is_part(&self) -> bool {
        self.survey.range != (0..self.device.size())
    }

    /// Pixels of a cell.
    fn cell(&self) -> u32 {
        let count = self.survey.cells.len() as u32;
        let fits = |size: &u32| count.div_ceil(WIDTH / size) * size <= MOST_HEIGHT;
        CELL_SIZES.into_iter().find(fits).unwrap_or(CELL_SIZES[2])
    }

    fn rows(&self) -> u32 {
        (self.survey.cells.len() as u32).div_ceil(WIDTH / self.cell())
    }

    fn draw_cells(&self, canvas: &mut dyn Canvas, mut y: u32) -> u32 {
        let size = self.cell();
        let text = format!(
            "The disk: a cell is {}, filled as far as it is stored, in the colour of most of that",
            size::human(self.survey.cell_size)
        );
        canvas.text(LEFT, y, &text, colours::TEXT);
        y += LINE;
        let columns = (WIDTH / size) as usize;
        let labelled = (LINE.div_ceil(size) as usize).next_multiple_of(2);
        for (row, cells) in self.survey.cells.chunks(columns).enumerate() {
            if row % labelled == 0 {
                let at = (row * columns) as u64 * self.survey.cell_size;
                let label = format!("{:>9}", size::human(self.survey.range.start + at));
                canvas.text(MARGIN, y, &label, colours::FAINT);
            }
            draw_row(canvas, cells, size, y);
            y += size;
        }
        y
    }

    fn legend(&self) -> Vec<Entry> {
        let total = &self.survey.total;
        let mut entries = Vec::new();
        let mut add = |colour, text, bytes| {
            if bytes > 0 {
                entries.push(Entry {
                    colour,
                    text,
                    bytes,
                });
            }
        };
        for layer in 0..LAYERS {
            let image = match self.device.layers().get(layer) {
                Some(_) if layer == LAYERS - 1 && self.device.layers().len() > LAYERS => {
                    "deeper backing files".into()
                }
                Some(image) => name(image),
                None => continue,
            };
            let data = Some(colours::data(layer));
            add(data, format!("data in {image}"), total.data[layer]);
            let compressed = Some(colours::compressed(layer));
            let bytes = total.compressed[layer];
            add(compressed, format!("compressed in {image}"), bytes);
        }
        add(Some(colours::ZERO), "recorded as zero".into(), total.zero);
        let nothing = "not allocated, reads as zero".into();
        add(Some(colours::EMPTY), nothing, total.unallocated);
        add(None, "held by a snapshot, too".into(), total.shared);
        entries
    }

    fn draw_legend(&self, canvas: &mut dyn Canvas, mut y: u32) -> u32 {
        let length = self.survey.range.end - self.survey.range.start;
        for entry in &self.legend {
            canvas.rectangle(LEFT, y + 1, 14, 14, colours::FAINT);
            let inside = entry.colour.unwrap_or([255; 3]);
            canvas.rectangle(LEFT + 1, y + 2, 12, 12, inside);
            if entry.colour.is_none() {
                canvas.rectangle(LEFT + 1, y + 11, 12, 3, colours::SHARED);
            }
            let text = format!(
                "{:<55} {:>9}  {:>6}",
                entry.text,
                size::human(entry.bytes),
                percent(entry.bytes, length)
            );
            canvas.text(LEFT + 22, y, &text, colours::TEXT);
            y += LINE;
        }
        y
    }

    fn draw_file(&self, canvas: &mut dyn Canvas, file: &FileMap, mut y: u32) {
        let text = "The file: where which part of the disk is (disk from top to bottom, file from left \
                    to right)";
        canvas.text(LEFT, y, text, colours::TEXT);
        y += LINE;
        let height = ROWS as u32 * POINT;
        canvas.rectangle(LEFT, y, WIDTH, height, colours::EMPTY);
        let range = &self.survey.range;
        for (row, at) in [(0, range.start), (height - LINE, range.end)] {
            let label = format!("{:>9}", size::human(at));
            canvas.text(MARGIN, y + row, &label, colours::FAINT);
        }
        for row in 0..ROWS {
            let points = |column: usize| file.has_point(column, row).then_some(());
            for (columns, ()) in runs(COLUMNS, points) {
                let (x, width) = columns_at(&columns);
                canvas.rectangle(x, y + row as u32 * POINT, width, POINT, colours::data(0));
            }
        }
        y += height + 4;
        draw_strip(canvas, file, y);
        y += STRIP + 2;
        canvas.text(LEFT, y, "0", colours::FAINT);
        let end = size::human(file.length);
        let x = LEFT + WIDTH - end.len() as u32 * CHARACTER;
        canvas.text(x, y, &end, colours::FAINT);
        let mut x = LEFT + 4 * CHARACTER;
        let other = match file.used.is_empty() {
            true => None,
            false if self.is_part() => Some((
                colours::OTHER,
                "the rest of the disk, snapshots, metadata, leaks",
            )),
            false => Some((colours::OTHER, "snapshots, metadata, leaks")),
        };
        let rest = match file.used.is_empty() {
            true => "other",
            false => "free",
        };
        let parts = [
            Some((
                colours::data(0),
                match self.is_part() {
                    true => "data of this part of the disk",
                    false => "data of the disk",
                },
            )),
            other,
            Some((colours::EMPTY, rest)),
        ];
        for (colour, text) in parts.into_iter().flatten() {
            canvas.rectangle(x, y + 1, 14, 14, colours::FAINT);
            canvas.rectangle(x + 1, y + 2, 12, 12, colour);
            canvas.text(x + 22, y, text, colours::TEXT);
            x += 22 + (text.len() as u32 + 3) * CHARACTER;
        }
    }
}

/// Draws a row of cells. Neighbours that look alike are one shape.
fn draw_row(canvas: &mut dyn Canvas, cells: &[Bytes], size: u32, y: u32) {
    let at = |cells: &std::ops::Range<usize>| {
        let width = (cells.end - cells.start) as u32 * size;
        (LEFT + cells.start as u32 * size, width)
    };
    for (run, (colour, height)) in runs(cells.len(), |nth| Some(look(&cells[nth], size - 1))) {
        let (x, width) = at(&run);
        canvas.rectangle(x, y, width, size - 1 - height, colours::EMPTY);
        if height > 0 {
            canvas.rectangle(x, y + size - 1 - height, width, height, colour);
        }
    }
    // The mark leaves at least half of what is filled, so that its colour is seen.
    let mark = |nth: usize| {
        let cell: &Bytes = &cells[nth];
        let (_, filled) = look(cell, size - 1);
        let is_shared = cell.shared > 0 && cell.shared * 2 >= cell.stored();
        is_shared.then(|| (size / 5).min(filled / 2).max(1))
    };
    for (run, height) in runs(cells.len(), mark) {
        let (x, width) = at(&run);
        canvas.rectangle(x, y + size - 1 - height, width, height, colours::SHARED);
    }
}

/// The colour of a cell, and how much of `height` pixels it fills.
fn look(cell: &Bytes, height: u32) -> (Colour, u32) {
    let layers = 0..LAYERS;
    let data = layers.clone().map(|n| (cell.data[n], colours::data(n)));
    let compressed = layers.map(|n| (cell.compressed[n], colours::compressed(n)));
    let most = data.chain(compressed).max_by_key(|(bytes, _)| *bytes);
    let (most, colour) = match most {
        Some((bytes, colour)) if bytes > 0 => (cell.stored(), colour),
        _ => (cell.zero, colours::ZERO),
    };
    let filled = share(most, cell.all(), height);
    // Nothing that is stored is invisible, also under the mark of snapshots.
    let least = if most > 0 { height.div_ceil(3) } else { 0 };
    (colour, filled.max(least))
}

/// Draws which parts of the file are in use: each column filled from the bottom.
fn draw_strip(canvas: &mut dyn Canvas, file: &FileMap, y: u32) {
    canvas.rectangle(LEFT, y, WIDTH, STRIP, colours::EMPTY);
    let size = file.column_size();
    let heights = |column: usize| {
        let start = column as u64 * size;
        let length = file.length.saturating_sub(start).min(size);
        let active = file.active[column].min(length);
        let used = file
            .used
            .get(column)
            .map_or(active, |used| *used)
            .max(active);
        (length > 0).then(|| (share(active, length, STRIP), share(used, length, STRIP)))
    };
    for (run, (active, used)) in runs(COLUMNS, heights) {
        let (x, width) = columns_at(&run);
        for (height, colour) in [(used, colours::OTHER), (active, colours::data(0))] {
            if height > 0 {
                canvas.rectangle(
                    x,
                    y + STRIP - height.min(STRIP),
                    width,
                    height.min(STRIP),
                    colour,
                );
            }
        }
    }
}

fn columns_at(columns: &std::ops::Range<usize>) -> (u32, u32) {
    let size = WIDTH / COLUMNS as u32;
    let width = (columns.end - columns.start) as u32 * size;
    (LEFT + columns.start as u32 * size, width)
}

/// Runs of equal values, without those that are None.
fn runs<T: PartialEq>(
    count: usize,
    value: impl Fn(usize) -> Option<T>,
) -> Vec<(std::ops::Range<usize>, T)> {
    let mut runs: Vec<(std::ops::Range<usize>, T)> = Vec::new();
    for nth in 0..count {
        let Some(new) = value(nth) else {
            continue;
        };
        match runs.last_mut() {
            Some((run, last)) if run.end == nth && *last == new => run.end += 1,
            _ => runs.push((nth..nth + 1, new)),
        }
    }
    runs
}

/// Pixels out of `height` for a part of a whole.
fn share(part: u64, whole: u64, height: u32) -> u32 {
    let whole = u128::from(whole.max(1));
    ((u128::from(part) * u128::from(height) + whole / 2) / whole) as u32
}

/// The name of an image, without its directory.
fn name(layer: &Layer) -> String {
    let name = layer.spec.display_name();
    let last = name.as_bytes().rsplit(|b| *b == b'/').next();
    let shown = printable(last.unwrap_or_default());
    match shown.chars().count() > NAME {
        true => shown.chars().take(NAME - 3).chain("...".chars()).collect(),
        false => shown,
    }
}
