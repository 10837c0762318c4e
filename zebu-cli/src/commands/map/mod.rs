//! `map`: where the data of a disk is.

mod picture;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use clap::{CommandFactory, Parser};
use zebu::block::{Device, FileDriver, FileSpec, Layer, Status, StorageId};
use zebu::storage::{CacheMode, Queue};

use super::command::Command;
use crate::arguments::{OutputFormat, SourceOptions, one_name, size};
use crate::images::open;
use crate::output::{self, printed};
use crate::program::{Context, Failure, Outcome};

pub const COMMAND: Command = Command {
    name: "map",
    operands: "<FILENAME>",
    summary: "Dump image metadata",
    options: Arguments::command,
    run,
    examples: "
        # Where data are stored
        zebu map disk.qcow2
        # Everything, for programs
        zebu map --output=json disk.qcow2
        # A picture of the disk and of its file
        zebu map --picture disk.svg disk.qcow2",
    ..Command::PLAIN
};

/// Dump image metadata
#[derive(Parser)]
pub struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    /// Output format: human or json
    #[arg(long, value_name = "FORMAT")]
    output: Option<String>,
    /// First byte of the range
    #[arg(short, long, value_name = "OFFSET")]
    start_offset: Option<String>,
    /// Length of the range in bytes
    #[arg(short = 'l', long, value_name = "LENGTH")]
    max_length: Option<String>,
    /// Draw the disk instead, into a file that ends in .svg or .png
    #[arg(long, value_name = "FILE")]
    picture: Option<OsString>,
    /// The image
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

/// A row of the map: ranges of the device that are alike and that lie in a
/// row where they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    start: u64,
    status: Status,
}

impl Row {
    /// The row of an empty range.
    fn nothing(start: u64) -> Self {
        let status = Status::unallocated(0);
        Row { start, status }
    }
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let format = OutputFormat::parse(arguments.output.as_deref())?;
    let number = |what, text: &Option<String>| {
        text.as_deref()
            .map(|text| size::parse_option(what, text))
            .transpose()
    };
    let start = number("start offset", &arguments.start_offset)?.unwrap_or(0);
    let length = number("max length", &arguments.max_length)?;
    let name = one_name(&arguments.names)?;
    let picture = match &arguments.picture {
        Some(_) if arguments.output.is_some() => {
            let text = "--picture and --output are mutually exclusive";
            return Err(Failure::new(text));
        }
        Some(path) => Some((path, picture::Kind::of(path)?)),
        None => None,
    };

    let queue = open::queue()?;
    let device = open::device(
        context,
        &queue,
        name,
        &arguments.source,
        CacheMode::WriteBack,
    )?;
    let end = length
        .and_then(|length| start.checked_add(length))
        .map_or(device.size(), |end| end.min(device.size()));
    if let Some((path, kind)) = picture {
        let range = start.min(end)..end;
        return picture::draw(context, &queue, &device, range, kind, path).map(|()| 0);
    }

    let mut out = std::io::BufWriter::new(output::stdout()?);
    let result = match format {
        OutputFormat::Human => human(context, &queue, &device, start..end, &mut out),
        OutputFormat::Json => json(&queue, &device, start..end, &mut out),
    };
    out.flush()?;
    result.map(|()| 0)
}

fn human(
    context: &Context,
    queue: &Queue,
    device: &Device,
    range: std::ops::Range<u64>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    writeln!(
        out,
        "{:<16}{:<16}{:<16}File",
        "Offset", "Length", "Mapped to"
    )?;
    for_each_row(queue, device, range, |row| {
        if !row.status.data || row.status.zero {
            return Ok(());
        }
        let Some(host) = row.status.host else {
            return Err(Failure::new(
                "File contains external, encrypted or compressed clusters.",
            ));
        };
        let layer = &device.layers()[row.status.depth];
        let file = file_name(layer, row.status.storage);
        let line: String = [row.start, row.status.length, host]
            .iter()
            .map(|number| format!("{:<16}", c_hex(*number)))
            .collect();
        out.write_all(line.as_bytes())?;
        out.write_all(&printed::name(context, file.as_bytes()))?;
        Ok(writeln!(out)?)
    })
}

/// The name of the file that has the data. Below a format that is the node that it writes to, also if
/// that is a filter.
fn file_name(layer: &Layer, storage: StorageId) -> OsString {
    let spec = match storage == StorageId::FILE {
        true => Some(&layer.spec.file),
        false => layer.spec.data_file.as_ref(),
    };
    let filtered = |file: &&FileSpec| matches!(file.driver, FileDriver::Filter(_));
    match spec.filter(filtered) {
        Some(file) if layer.as_raw().is_none() => file.display_name(),
        _ => layer.storage(storage).path().as_os_str().to_owned(),
    }
}

/// A number as C's `%#x` has it.
fn c_hex(number: u64) -> String {
    match number {
        0 => "0".into(),
        other => format!("{other:#x}"),
    }
}

fn json(
    queue: &Queue,
    device: &Device,
    range: std::ops::Range<u64>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let range_start = range.start;
    write!(out, "[")?;
    let mut first = true;
    for_each_row(queue, device, range, |row| {
        if !std::mem::take(&mut first) {
            out.write_all(b",\n")?;
        }
        Ok(out.write_all(json_row(&row).as_bytes())?)
    })?;
    if first {
        // QEMU has a row for nothing.
        out.write_all(json_row(&Row::nothing(range_start)).as_bytes())?;
    }
    writeln!(out, "]")?;
    Ok(())
}

fn json_row(row: &Row) -> String {
    let status = &row.status;
    let mut text = format!(
        "{{ \"start\": {}, \"length\": {}, \"depth\": {}, \"present\": {}, \"zero\": {}, \
         \"data\": {}, \"compressed\": {}",
        row.start,
        status.length,
        status.depth,
        // As in QEMU; of an export, a range may be neither.
        status.data || status.zero && status.present,
        status.zero,
        status.data,
        status.compressed
    );
    if let Some(host) = status.host {
        // Writing to a String cannot fail.
        let _ = write!(text, ", \"offset\": {host}");
    }
    text.push('}');
    text
}

/// Calls `each` for the rows of the range, each as long as it can be.
fn for_each_row(
    queue: &Queue,
    device: &Device,
    range: std::ops::Range<u64>,
    mut each: impl FnMut(Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut row: Option<Row> = None;
    let mut offset = range.start;
    while offset < range.end {
        let status = queue
            .block_on(device.status(queue, offset, range.end - offset))
            .map_err(|e| Failure::new(format!("Failed to read image metadata: {e}")))?;
        let next = Row {
            start: offset,
            status,
        };
        offset += status.length.clamp(1, range.end - offset);
        match &mut row {
            Some(row) if row.status.continues_with(&next.status) => {
                row.status.length += status.length
            }
            _ => {
                if let Some(done) = row.replace(next) {
                    each(done)?;
                }
            }
        }
    }
    row.map_or(Ok(()), each)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(start: u64, length: u64, host: Option<u64>) -> Row {
        let mut status = Status::unallocated(length);
        (status.data, status.present) = (true, true);
        (status.compressed, status.host) = (host.is_none(), host);
        Row { start, status }
    }

    #[test]
    fn a_row_of_json() {
        assert_eq!(
            json_row(&data(0, 65536, Some(327_680))),
            "{ \"start\": 0, \"length\": 65536, \"depth\": 0, \"present\": true, \"zero\": false, \
             \"data\": true, \"compressed\": false, \"offset\": 327680}"
        );
    }
}
