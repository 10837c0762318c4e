//! The values that an option or an operand may have.

use std::ffi::OsString;
use std::path::Path;

use clap::Arg;
use zebu::block::{CreateOption, Device, Format, OptionKind};
use zebu::names::Source;
use zebu::storage::{Queue, QueueOptions};

use super::{Answer, SCRIPTS, Words};
use crate::commands::amendable;
use crate::printed::printable;
use crate::untrusted;

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
    let id = arg.get_id().as_str();
    let value = arg
        .get_value_names()
        .and_then(|names| names.first())
        .map_or("", |name| name.as_str());
    let possible = arg.get_possible_values();
    if !possible.is_empty() {
        let names = possible.iter().map(|value| (value.get_name(), ""));
        return Answer::words(before, typed, names);
    }
    if let Some((_, words)) = WORDS.iter().find(|entry| entry.0 == id) {
        return Answer::words(before, typed, words.iter().map(|word| (*word, "")));
    }
    match (command, id, value) {
        ("amend", "options", _) => options_of("qcow2", &amendable(), before, typed),
        ("import", "target_format", _) => {
            Answer::words(before, typed, [("raw", ""), ("qcow2", "")])
        }
        (_, _, "OPTIONS") => {
            let named = ["target_format", "output_format", "format"]
                .iter()
                .find_map(|id| line.value(id));
            let format = named.unwrap_or("raw").parse().unwrap_or(Format::RAW);
            options_of(format.name(), format.create_options(), before, typed)
        }
        ("create", "format", _) | (_, "target_format" | "output_format", _) => {
            formats(Format::is_creatable, before, typed)
        }
        (_, _, "FMT" | "FORMAT" | "SRC_FMT" | "BACKING_FMT") => formats(|_| true, before, typed),
        ("snapshot", "create", _) => Answer::default(),
        (_, _, "SNAPSHOT") => Answer::words(before, typed, snapshots(line)),
        ("nbd", "bitmap", _) | ("bitmap", "merge", _) => {
            Answer::words(before, typed, bitmaps(line))
        }
        (_, _, value) if FILES.contains(&value) => Answer::files(before),
        _ => Answer::default(),
    }
}

/// The values of the operand of this number.
pub fn of_operand(command: &str, number: usize, line: &Words, typed: &str) -> Answer {
    const OPERANDS: [&str; 5] = ["if=", "of=", "bs=", "count=", "skip="];
    match (command, number) {
        ("dd", _) => match typed.split_once('=') {
            Some((name @ ("if" | "of"), _)) => Answer::files(&format!("{name}=")),
            _ => Answer::words("", typed, OPERANDS.map(|name| (name, ""))),
        },
        ("completions", 0) => Answer::words("", typed, SCRIPTS.map(|script| (script.0, ""))),
        ("completions", _) | ("manual", 1..) => Answer::default(),
        ("bitmap", 1) => Answer::words("", typed, bitmaps(line)),
        ("create" | "resize", 1) => Answer::default(),
        _ => Answer::files(""),
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
    untrusted::set("").ok()?;
    let options = untrusted::defaults()
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
    let snapshots = device
        .top()
        .as_qcow2()
        .map_or(&[][..], |image| image.snapshots());
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
