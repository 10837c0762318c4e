//! `measure`: how large a file a new image would need, or how long it is as a stream.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use clap::{CommandFactory, Parser};
use zebu::block::{Format, Preallocation};
use zebu::jobs::{
    self, ConvertError, ConvertOptions, ExportFormat, Measure, MeasureTarget, Qcow2Target,
};
use zebu::storage::CacheMode;

use super::command::Command;
use crate::arguments::create_options::{CreateOptions, check_list};
use crate::arguments::{OutputFormat, SourceOptions, objects, size};
use crate::images::new_image::{export_format, parse_format, plan};
use crate::images::open;
use crate::output;
use crate::output::json::{self, Map};
use crate::program::{Context, Failure, Outcome};

pub const COMMAND: Command = Command {
    name: "measure",
    operands: "(--size <SIZE> | <FILENAME>)",
    summary: "Calculate file size required for a new image",
    options: Arguments::command,
    run,
    examples: "
        # A copy of a disk
        zebu measure -O qcow2 disk.raw
        # A new image
        zebu measure -O qcow2 --size 20G",
    ..Command::PLAIN
};

/// Calculate file size required for a new image
#[derive(Parser)]
#[command(
    mut_arg("format", |a| a.long("source-format").alias("format")),
    mut_arg("image_opts", |a| a.long("source-image-opts").alias("image-opts"))
)]
pub struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    /// Format of the new image
    #[arg(short = 'O', long = "target-format", value_name = "FMT")]
    target_format: Option<String>,
    /// Options of the new image
    #[arg(
        short = 'o',
        long = "target-format-options",
        alias = "options",
        value_name = "OPTIONS"
    )]
    target_options: Vec<OsString>,
    /// Size of the disk, without an image to copy
    #[arg(short, long, value_name = "SIZE")]
    size: Option<String>,
    /// Say how long a stream `convert` would write, exactly
    #[arg(long)]
    stream: bool,
    /// Shortest run of zeroes in bytes that the stream leaves out, as for `convert`; 0: all is stored
    #[arg(short = 'S', long = "sparse-size", value_name = "SIZE")]
    sparse: Option<String>,
    /// Internal snapshot to measure
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<OsString>,
    /// Output format: human or json
    #[arg(long, value_name = "FORMAT")]
    output: Option<String>,
    /// The image to copy
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

/// Formats that are not made here, and that qemu-img cannot measure.
const WITHOUT_MEASURE: [&str; 5] = ["qcow", "qed", "parallels", "file", "host_device"];

/// The options of qcow2 that a size depends on. The values of others are not looked at, as in QEMU.
const MEASURED: [&str; 4] = [
    "cluster_size",
    "refcount_bits",
    "preallocation",
    "extended_l2",
];

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let format = OutputFormat::parse(arguments.output.as_deref())?;
    for list in &arguments.target_options {
        check_list(list)?;
    }
    let size = match arguments.size.as_deref() {
        Some(text) => Some(size::parse_option("image size", text)?),
        None => None,
    };
    let source = &arguments.source;
    let of_image =
        source.name.image_opts || source.name.format.is_some() || arguments.snapshot.is_some();
    if arguments.names.is_empty() && of_image {
        return Err(Failure::new(
            "--image-opts, -f, and -l require a filename argument.",
        ));
    }
    let name = match (&arguments.names[..], size) {
        ([], Some(_)) => None,
        ([name], None) => Some(name),
        ([_], Some(_)) => {
            return Err(Failure::new(
                "--size N cannot be used together with a filename.",
            ));
        }
        ([_, _, ..], _) => {
            return Err(Failure::new("At most one filename argument is allowed."));
        }
        _ => {
            return Err(Failure::new(
                "Either --size N or one filename must be specified.",
            ));
        }
    };
    if arguments.sparse.is_some() && !arguments.stream {
        return Err(Failure::new("-S requires --stream"));
    }
    if arguments.stream && name.is_none() {
        return Err(Failure::new("--stream requires a filename argument"));
    }
    let (measured, stream) = match (name, size) {
        (Some(name), _) => measure_image(context, &arguments, name)?,
        (None, size) => {
            arguments.source.validate(context)?;
            let target = measured_as(&target(context, &arguments)?)?;
            let measured = jobs::measure_size(size.unwrap_or(0), &target);
            (measured.map_err(|e| Failure::new(e.to_string()))?, None)
        }
    };
    output::report(&match format {
        OutputFormat::Human => to_text(&measured, stream),
        OutputFormat::Json => to_json(&measured, stream),
    })
}

/// The sizes for a copy of an image, and the length of the stream if it is asked for.
fn measure_image(
    context: &Context,
    arguments: &Arguments,
    name: &OsStr,
) -> Result<(Measure, Option<u64>), Failure> {
    let queue = open::queue()?;
    let mut options = open::options(context, name, &arguments.source, CacheMode::WriteBack)?;
    options.l2_cache_size = Some(open::ONCE_THROUGH);
    options.snapshot = arguments
        .snapshot
        .as_deref()
        .map(OsStr::as_bytes)
        .map(Into::into);
    let device = open::device_with(context, &queue, name, &arguments.source, &options)?;
    let (format, create) = target(context, arguments)?;
    let of_image = measured_as(&(format, create.clone()))?;
    let measured = queue
        .block_on(jobs::measure(&queue, &device, &of_image, |_| {}))
        .map_err(|e| Failure::new(e.to_string()))?;
    if !arguments.stream {
        return Ok((measured, None));
    }
    let target = export_format(format, &create, arguments.sparse.is_some());
    let target = target.map_err(|e| Failure::new(e.to_string()))?;
    let sparse = super::convert::sparse_size(arguments.sparse.as_deref())?;
    let options = ConvertOptions::default().sparse(sparse);
    let length = jobs::measure_stream(vec![device], &target, &options, |_| {});
    let length = length.map_err(|error| match error {
        // Nothing is written here.
        ConvertError::Write { source, .. } => Failure::new(source.to_string()),
        error => Failure::new(error.to_string()),
    })?;
    Ok((measured, Some(length)))
}

/// The image that is to be made.
fn target(context: &Context, arguments: &Arguments) -> Result<(Format, CreateOptions), Failure> {
    let name = arguments.target_format.as_deref().unwrap_or("raw");
    let unsupported = || {
        Failure::new(format!(
            "Block driver '{name}' does not support size measurement"
        ))
    };
    if WITHOUT_MEASURE.contains(&name) {
        return Err(unsupported());
    }
    let format = parse_format(name).map_err(Failure::new)?;
    let options = CreateOptions::parse(format, &arguments.target_options).map_err(|why| {
        context.say(&why);
        Failure::new(format!("Invalid options for file format '{name}'"))
    })?;
    let options = options.with_secrets(objects::all(context).secrets);
    match ["raw", "qcow2", "luks"].contains(&format.name()) {
        true => Ok((format, options)),
        false => Err(unsupported()),
    }
}

/// What is measured: of options of which one alone has a meaning, QEMU measures what there would be if it
/// could be made.
fn measured_as((format, options): &(Format, CreateOptions)) -> Result<MeasureTarget, Failure> {
    let fail = |e: zebu::Error| Failure::new(e.to_string());
    if format.name() == "luks" {
        let plan = plan(*format, Path::new(""), 0, options, None).map_err(fail)?;
        let overhead = plan.overhead().unwrap_or_default();
        return Ok(MeasureTarget::Whole { overhead });
    }
    if *format != Format::QCOW2 {
        export_format(*format, options, false).map_err(fail)?;
        return Ok(MeasureTarget::Raw);
    }
    let encryption = match options.get("encrypt.format") {
        Some("luks") => match export_format(*format, options, false).map_err(fail)? {
            ExportFormat::Qcow2 { image, .. } => Qcow2Target::from(&*image).encryption,
            _ => 0,
        },
        _ => 0,
    };
    match options.get("compat") {
        None | Some("0.10" | "1.1") => {}
        Some(other) => {
            return Err(Failure::new(format!(
                "Invalid compatibility level: '{other}'"
            )));
        }
    }
    let with = |names: &[&str]| {
        let mut kept = CreateOptions::default();
        for name in names {
            if let Some(value) = options.value(name) {
                kept.set(name, value);
            }
        }
        let plan = export_format(*format, &kept, false);
        // The option that was given, as QEMU calls it here.
        plan.map_err(|e| Failure::new(e.to_string().replace("use version=v3", "use compat=1.1")))
    };
    if let Some(mode) = options.get("preallocation")
        && Preallocation::from_name(mode).is_none()
    {
        return Err(Failure::new(format!("invalid parameter value: {mode}")));
    }
    // Extended L2 entries need another version, which QEMU does not ask here.
    let plain = with(&["cluster_size", "refcount_bits", "compat"])?;
    let (ExportFormat::Qcow2 { image: plain, .. }, ExportFormat::Qcow2 { image, .. }) =
        (plain, with(&MEASURED)?)
    else {
        return Ok(MeasureTarget::Raw);
    };
    let target = Qcow2Target::from(&*image)
        .version(Qcow2Target::from(&*plain).version)
        .encryption(encryption);
    let backing = options.value("backing_file").is_some();
    Ok(MeasureTarget::Qcow2(target.backing(backing)))
}

fn to_text(measured: &Measure, stream: Option<u64>) -> String {
    let mut text = format!(
        "required size: {}\nfully allocated size: {}\n",
        measured.required, measured.fully_allocated
    );
    if let Some(bitmaps) = measured.bitmaps {
        text += &format!("bitmaps size: {bitmaps}\n");
    }
    if let Some(stream) = stream {
        text += &format!("stream size: {stream}\n");
    }
    text
}

fn to_json(measured: &Measure, stream: Option<u64>) -> String {
    let mut map = Map::new();
    if let Some(bitmaps) = measured.bitmaps {
        map.add("bitmaps", bitmaps);
    }
    map.add("required", measured.required);
    map.add("fully-allocated", measured.fully_allocated);
    if let Some(stream) = stream {
        map.add("stream", stream);
    }
    json::pretty(&map.into())
}
