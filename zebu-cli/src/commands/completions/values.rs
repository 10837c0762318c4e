//! The values that an option or an operand may have.

use std::ffi::OsString;
use std::path::Path;

use clap::Arg;
use zebu::block::{CreateOption, Device, Format, OptionKind};
use zebu::names::Source;
use zebu::storage::{Queue, QueueOptions};

use super::{Answer, Words};
use crate::arguments::untrusted;
use crate::commands;
use crate::commands::command::{ValueOf, Values};
use crate::output::printable;
use crate::program::Context;

/// The words of options that are one of a few, by their ids.
const WORDS: &[(&str, &[&str])] = &[
    ("aio", &["threads", "native", "io_uring"]),
    ("cache", CACHE),
    ("compress", &["zlib", "zstd"]),
    ("base_cache", CACHE),
    ("detect_zeroes", &["off", "on", "unmap"]),
    ("discard", &["ignore", "unmap"]),
    ("output", &["human", "json"]),
    ("preallocation", &["off", "metadata", "falloc", "full"]),
    ("repair", &["leaks", "all"]),
    ("source_cache", CACHE),
    ("target_cache", CACHE),
];

const CACHE: &[&str] = &["none", "writeback", "writethrough", "directsync", "unsafe"];

/// The words that options of formats (`-o`) take, where they are one of a few.
const OF_FORMATS: &[(&str, &str, &[&str])] = &[
    ("qcow2", "compat", &["0.10", "1.1"]),
    ("qcow2", "compression_type", &["zlib", "zstd"]),
    ("vdi", "preallocation", &["off", "metadata"]),
    ("vhdx", "subformat", &["dynamic", "fixed"]),
    (
        "vmdk",
        "adapter_type",
        &["ide", "buslogic", "lsilogic", "legacyESX"],
    ),
    (
        "vmdk",
        "subformat",
        &[
            "monolithicSparse",
            "monolithicFlat",
            "twoGbMaxExtentSparse",
            "twoGbMaxExtentFlat",
            "streamOptimized",
        ],
    ),
    ("vpc", "subformat", &["dynamic", "fixed"]),
];

/// What the values that are files or folders are called.
const FILES: [&str; 8] = [
    "BACKING_FILENAME",
    "BASE_IMG",
    "DIR",
    "FILE",
    "FILENAME",
    "FILE|URL",
    "PATH",
    "SRC_FILENAME",
];

/// The values of an option; `before` is what of the word comes before them.
pub fn of(command: &str, arg: &Arg, line: &Words, before: &str, typed: &str) -> Answer {
    let possible = arg.get_possible_values();
    if !possible.is_empty() {
        let names = possible.iter().map(|value| (value.get_name(), ""));
        return Answer::words(before, typed, names);
    }
    let is_it = |place: &ValueOf| matches!(place, ValueOf::Option(id) if arg.get_id() == id);
    let own = own(command, is_it);
    answer(own.unwrap_or_else(|| by_name(arg)), line, before, typed)
}

/// The values of the operand of this number.
pub fn of_operand(command: &str, number: usize, line: &Words, typed: &str) -> Answer {
    let fits = |place: &ValueOf| [ValueOf::Operand(number), ValueOf::Operands].contains(place);
    let own = own(command, fits);
    answer(own.unwrap_or(Values::Files), line, "", typed)
}

/// What the command says itself of the first of its places that is meant.
fn own(command: &str, is_meant: impl Fn(&ValueOf) -> bool) -> Option<Values> {
    let mut own = commands::find(command)?.values.iter();
    own.find(|(place, _)| is_meant(place)).map(|own| own.1)
}

/// What an option of this id may be, or one whose value is called like that.
fn by_name(arg: &Arg) -> Values {
    let id = arg.get_id().as_str();
    let value = arg
        .get_value_names()
        .and_then(|names| names.first())
        .map_or("", |name| name.as_str());
    if let Some((_, words)) = WORDS.iter().find(|entry| entry.0 == id) {
        return Values::Words(words);
    }
    match (id, value) {
        (_, "OPTIONS") => Values::NewOptions,
        ("target_format" | "output_format", _) => Values::NewFormats,
        (_, "FMT" | "FORMAT" | "SRC_FMT" | "BACKING_FMT") => Values::Formats,
        (_, "SNAPSHOT") => Values::Snapshots,
        (_, value) if FILES.contains(&value) => Values::Files,
        _ => Values::Nothing,
    }
}

fn answer(values: Values, line: &Words, before: &str, typed: &str) -> Answer {
    match values {
        Values::Nothing => Answer::default(),
        Values::Files => Answer::files(before),
        Values::Words(words) => Answer::words(before, typed, words.iter().map(|word| (*word, ""))),
        Values::Assignments { files, others } => match typed.split_once('=') {
            Some((name, _)) if files.contains(&name) => Answer::files(&format!("{name}=")),
            _ => {
                let names = files.iter().chain(others);
                Answer::words(before, typed, names.map(|name| (format!("{name}="), "")))
            }
        },
        Values::Formats => formats(|_| true, before, typed),
        Values::NewFormats => formats(Format::is_creatable, before, typed),
        Values::NewOptions => {
            let named = ["target_format", "output_format", "format"]
                .iter()
                .find_map(|id| line.value(id));
            let format = named.unwrap_or("raw").parse().unwrap_or(Format::RAW);
            options_of(format.name(), format.create_options(), before, typed)
        }
        Values::OptionsOf(format, options) => options_of(format, &options(), before, typed),
        Values::Snapshots => Answer::words(before, typed, snapshots(line)),
        Values::Bitmaps => Answer::words(before, typed, bitmaps(line)),
    }
}

fn formats(keep: impl Fn(Format) -> bool, before: &str, typed: &str) -> Answer {
    let names = Format::all()
        .filter(|format| keep(*format))
        .map(|format| (format.name(), ""));
    Answer::words(before, typed, names)
}

/// Options after `-o`: the names, or the values of the one that is typed last.
fn options_of(format: &str, options: &[CreateOption], before: &str, typed: &str) -> Answer {
    let start = typed.rfind(',').map_or(0, |comma| comma + 1);
    let before = format!("{before}{}", &typed[..start]);
    let typed = &typed[start..];
    let Some((name, value)) = typed.split_once('=') else {
        let names = options
            .iter()
            .map(|option| (format!("{}=", option.name), option.help));
        return Answer::words(&before, typed, names);
    };
    let Some(option) = options.iter().find(|option| option.name == name) else {
        return Answer::default();
    };
    let before = format!("{before}{name}=");
    let known = OF_FORMATS
        .iter()
        .find(|entry| (entry.0, entry.1) == (format, name));
    let words: &[&str] = match (option.kind, known) {
        (_, Some((_, _, words))) => words,
        (OptionKind::Switch, _) => &["on", "off"],
        _ if name == "preallocation" => &["off", "metadata", "falloc", "full"],
        _ if name == "backing_fmt" => return formats(|_| true, &before, value),
        _ if matches!(name, "backing_file" | "data_file") => return Answer::files(&before),
        _ => &[],
    };
    Answer::words(&before, value, words.iter().map(|word| (*word, "")))
}

/// The file that a shell would find by this name.
fn file(name: &str) -> OsString {
    match (name.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => Path::new(&home).join(rest).into(),
        _ => name.into(),
    }
}

/// A name that shells can show and take on a line.
fn shown(name: &[u8]) -> Option<String> {
    let shown = printable(name);
    (!name.is_empty() && shown.as_bytes() == name).then_some(shown)
}

/// The image of the line, opened as an untrusted one, without what it names and without locks.
fn image(line: &Words) -> Option<(Queue, Device)> {
    let name = file(line.operands.first()?);
    let format = line.value("format").and_then(|format| format.parse().ok());
    let context = Context::new(None);
    untrusted::set(&context, "").ok()?;
    let options = untrusted::defaults(&context)
        .format(format)
        .inspect(true)
        .force_share(true);
    let queue = Queue::new(QueueOptions::default()).ok()?;
    let device = Device::open(&queue, &Source::Name(name), &options).ok()?;
    Some((queue, device))
}

fn snapshots(line: &Words) -> Vec<(String, String)> {
    let Some((_, device)) = image(line) else {
        return Vec::new();
    };
    let snapshots = device.top().snapshots().unwrap_or_default();
    let names = snapshots.iter().filter_map(|s| shown(s.name_text()));
    names.map(|name| (name, "snapshot".into())).collect()
}

fn bitmaps(line: &Words) -> Vec<(String, String)> {
    let Some((queue, device)) = image(line) else {
        return Vec::new();
    };
    let bitmaps = queue.block_on(device.bitmaps(&queue)).unwrap_or_default();
    let names = bitmaps.iter().filter_map(|bitmap| shown(&bitmap.name));
    names.map(|name| (name, "bitmap".into())).collect()
}
