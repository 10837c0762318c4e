//! `--human`: a summary of an image.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;

use zebu::Result;
use zebu::block::{Device, Layer};
use zebu::qcow2::Snapshot;
use zebu::storage::Queue;

use crate::arguments::size::{self, percent};
use crate::images::survey::{LAYERS, Survey};
use crate::output::colours::Style;
use crate::output::{localtime, printable};

/// Cells that are looked at: bounds the work.
const CELLS: u64 = 1024;
/// Characters of the bar that shows how full the disk is.
const BAR: u64 = 30;
/// Snapshots and bitmaps that are listed at most.
const MOST_LISTED: usize = 10;
/// Of a file, more than this part that is free is worth a warning.
const MUCH_FREE: f64 = 0.25;
/// Pieces of data shorter than this, in bytes, are read slowly where the disk has to seek.
const SHORT: u64 = 256 << 10;
/// Images of a chain, more than these are worth a warning.
const LONG_CHAIN: usize = 8;

/// A summary that is written.
struct Summary<'a> {
    device: &'a Device,
    survey: Survey,
    has_colours: bool,
    out: String,
}

/// The summary of a device, with its chain.
///
/// # Errors
///
/// The metadata cannot be read.
pub fn of(queue: &Queue, device: &Device, has_colours: bool) -> Result<String> {
    let mut summary = Summary {
        device,
        survey: Survey::of(queue, device, 0..device.size(), CELLS)?,
        has_colours,
        out: String::new(),
    };
    summary.title();
    summary.content();
    summary.file();
    summary.snapshots(device.top().snapshots().unwrap_or_default());
    let bitmaps = queue.block_on(device.bitmaps(queue));
    summary.bitmaps(&bitmaps);
    summary.chain();
    summary.warnings(&bitmaps);
    Ok(summary.out)
}

// Writing to a String cannot fail, here and below.

impl Summary<'_> {
    /// A line with a heading, which may be empty.
    fn line(&mut self, heading: &str, text: &str) {
        let heading = format!("{heading:<11}");
        let heading = Style::Cyan.on(self.has_colours, &heading);
        let _ = writeln!(self.out, "  {heading}{text}");
    }

    fn title(&mut self) {
        let top = self.device.top();
        let mut parts = vec![format!(
            "{} disk of {}",
            top.spec.format_name(),
            size::human(self.device.size())
        )];
        if let Some(cluster) = top.cluster_size() {
            parts.push(format!("clusters of {}", size::human(cluster)));
        }
        if let Some(image) = top.as_qcow2() {
            parts.push(format!("version {}", image.version()));
            parts.push(image.header().compression.name().into());
        }
        let name = Style::Bold.on(self.has_colours, &name(top));
        let _ = writeln!(self.out, "{name}: {}\n", parts.join(", "));
    }

    fn content(&mut self) {
        let (total, size) = (self.survey.total, self.device.size());
        let stored = total.stored();
        let filled = (u128::from(stored) * u128::from(BAR)).div_ceil(u128::from(size.max(1)));
        let bar: String = (0..BAR)
            .map(|n| if u128::from(n) < filled { '#' } else { '.' })
            .collect();
        let text = format!(
            "{bar} {} of {} ({})",
            size::human(stored),
            size::human(size),
            percent(stored, size)
        );
        self.line("stored", &text);
        let (compressed, to) = (total.all_compressed(), self.survey.compressed_to);
        if compressed > 0 {
            let mut text = format!("{} of it", size::human(compressed));
            if to > 0 {
                let _ = write!(
                    text,
                    ", in {} ({})",
                    size::human(to),
                    percent(to, compressed)
                );
            }
            self.line("compressed", &text);
        }
        if let Some(average) = stored.checked_div(self.survey.extents) {
            let average = size::human(average);
            let text = format!("{}, {average} on average", self.survey.extents);
            self.line("pieces", &text);
        }
    }

    fn file(&mut self) {
        let file = self.device.top().file();
        let (Ok(length), takes) = (file.len(), file.allocated()) else {
            return;
        };
        let mut text = format!("{} long", size::human(length));
        if let Ok(takes) = takes {
            let _ = write!(text, ", takes {}", size::human(takes));
        }
        if let Some(clusters) = self.survey.clusters {
            let _ = write!(text, ", {} free in it", size::human(clusters.free));
        }
        self.line("file", &text);
    }

    fn snapshots(&mut self, all: &[Snapshot]) {
        if all.is_empty() {
            return;
        }
        let shared = size::human(self.survey.total.shared);
        let text = format!("{}, holding {shared} of the disk's data, too", all.len());
        self.line("snapshots", &text);
        for snapshot in all.iter().take(MOST_LISTED) {
            let name = printable(snapshot.name_text());
            let date = localtime::format(snapshot.date_sec.into());
            let mut text = format!("{date}  {}", name);
            if let Some(other) = snapshot
                .disk_size()
                .filter(|own| *own != self.device.size())
            {
                let _ = write!(text, " (of {})", size::human(other));
            }
            if snapshot.vm_state_size() > 0 {
                let state = size::human(snapshot.vm_state_size());
                let _ = write!(text, " (with {state} of a machine's state)");
            }
            self.line("", &text);
        }
        self.more(all.len());
    }

    fn bitmaps(&mut self, bitmaps: &Result<Vec<zebu::BitmapInfo>>) {
        let Ok(all) = bitmaps else {
            return;
        };
        for (nth, bitmap) in all.iter().take(MOST_LISTED).enumerate() {
            let state = match (bitmap.inconsistent, bitmap.enabled) {
                (true, _) => "inconsistent",
                (false, true) => "enabled",
                (false, false) => "disabled",
            };
            let name = printable(&bitmap.name);
            let heading = if nth == 0 { "bitmaps" } else { "" };
            self.line(heading, &format!("{name} ({state})"));
        }
        self.more(all.len());
    }

    /// Says how many of a list are not shown.
    fn more(&mut self, all: usize) {
        if all > MOST_LISTED {
            self.line("", &format!("and {} more", all - MOST_LISTED));
        }
    }

    /// The chain as a tree, and what the disk has from each image.
    fn chain(&mut self) {
        let layers = self.device.layers();
        if layers.len() < 2 {
            return;
        }
        for (depth, layer) in layers.iter().enumerate() {
            let branch = match depth {
                0 => String::new(),
                depth => format!("{}`- ", "   ".repeat(depth - 1)),
            };
            let mut text = format!("{branch}{} ({}", name(layer), layer.spec.format_name());
            if depth + 1 < LAYERS || layers.len() <= LAYERS {
                let total = &self.survey.total;
                let here = total.data[depth] + total.compressed[depth];
                let _ = write!(text, ", {} of the disk", size::human(here));
            }
            text.push(')');
            self.line(if depth == 0 { "chain" } else { "" }, &text);
        }
    }

    fn warnings(&mut self, bitmaps: &Result<Vec<zebu::BitmapInfo>>) {
        let mut all: Vec<String> = Vec::new();
        let top = self.device.top();
        if let Some(image) = top.as_qcow2()
            && image.header().is_corrupt()
        {
            all.push("it is marked as corrupt: run zebu check -r all".into());
        }
        if top.is_dirty() == Some(true) {
            all.push("its last writer did not close it: run zebu check -r all".into());
        }
        match bitmaps {
            Err(e) => all.push(format!(
                "its bitmaps cannot be listed: {}",
                printable(e.to_string().as_bytes())
            )),
            Ok(bitmaps) if bitmaps.iter().any(|bitmap| bitmap.inconsistent) => {
                all.push(
                    "a bitmap is inconsistent: zebu bitmap --remove, then a full backup".into(),
                );
            }
            Ok(_) => {}
        }
        for layer in self.device.layers() {
            let format = layer.backing().and_then(|backing| backing.format);
            if layer.as_qcow2().is_some()
                && layer.backing().is_some()
                && format.is_none_or(|format| format.is_empty())
            {
                let name = name(layer);
                all.push(format!(
                    "{name} does not say which format its backing file has"
                ));
            }
        }
        if self.device.layers().len() > LONG_CHAIN {
            all.push("the chain is long: zebu commit or rebase shortens it".into());
        }
        if let Some(clusters) = self.survey.clusters {
            let whole = (clusters.free + clusters.used) as f64;
            if clusters.free as f64 > whole * MUCH_FREE && clusters.free > 1 << 20 {
                all.push("much of the file is free: zebu convert makes a smaller one".into());
            }
        }
        let plain = self.survey.total.stored() - self.survey.total.all_compressed();
        let pieces = self.survey.extents;
        if pieces > 1000 && plain / pieces < SHORT && self.survey.backward > pieces / 4 {
            all.push(
                "the data are in many pieces in disorder: zebu convert puts them in order".into(),
            );
        }
        for warning in all {
            let text = Style::Yellow.on(self.has_colours, &warning);
            self.line("warning", &text);
        }
        if self.survey.is_sampled {
            self.line(
                "note",
                "the numbers are estimates: the disk is in very many pieces",
            );
        }
    }
}

/// The name of an image, as it was given.
fn name(layer: &Layer) -> String {
    printable(layer.spec.display_name().as_bytes())
}
