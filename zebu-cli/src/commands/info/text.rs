//! The report for people.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use zebu::qcow2::Snapshot;

use super::limits::Limits;
use super::report::{FileReport, Report};
use crate::arguments::size;
use crate::output::colours::Style;
use crate::output::json::Value;
use crate::output::{localtime, printed};
use crate::program::Context;

/// All reports, separated by empty lines. Bytes of names that are not UTF-8 stay.
pub fn reports(context: &Context, reports: &[Report]) -> Vec<u8> {
    let texts: Vec<Vec<u8>> = reports.iter().map(|one| report(context, one, "")).collect();
    texts.join(&b'\n')
}

/// The same with colours: keys are cyan, headings bold, and what is wrong is red.
pub fn coloured(text: &[u8]) -> Vec<u8> {
    const WRONG: [&[u8]; 3] = [b"corrupt: true", b"cleanly shut down: no", b"[0]: in-use"];
    let mut out = Vec::new();
    for line in text.split_inclusive(|b| *b == b'\n') {
        let (line, end) = match line.strip_suffix(b"\n") {
            Some(line) => (line, &b"\n"[..]),
            None => (line, &b""[..]),
        };
        let key = line
            .windows(2)
            .position(|two| two == b": ")
            .map(|at| at + 1);
        let (style, styled) = match key {
            _ if WRONG.contains(&line.trim_ascii_start()) => (Style::Red, line.len()),
            Some(key) => (Style::Cyan, key),
            None if line.ends_with(b":") || line.starts_with(b"ID ") => (Style::Bold, line.len()),
            None => (Style::Cyan, 0),
        };
        let (styled, plain) = line.split_at(styled);
        if !styled.is_empty() {
            out.extend(style.begin().as_bytes());
            out.extend(styled);
            out.extend(Style::END.as_bytes());
        }
        out.extend(plain);
        out.extend(end);
    }
    out
}

/// A report; `above` is the path of the node.
fn report(context: &Context, report: &Report, above: &str) -> Vec<u8> {
    let mut out = Vec::new();
    name(context, &mut out, "image: ", &report.name);
    // Writing to memory cannot fail, here and below.
    let _ = write!(
        out,
        "\nfile format: {}\nvirtual size: {}\ndisk size: {}\n",
        report.format,
        exact(report.virtual_size),
        disk_size(report.disk_size)
    );
    if report.is_encrypted {
        out.extend(b"encrypted: yes\n");
    }
    if let Some(cluster_size) = report.cluster_size {
        let _ = writeln!(out, "cluster_size: {cluster_size}");
    }
    if report.is_dirty == Some(true) {
        out.extend(b"cleanly shut down: no\n");
    }
    if let Some(backing) = &report.backing {
        name(context, &mut out, "backing file: ", &backing.name);
        if backing.name != backing.full_name {
            name(context, &mut out, " (actual path: ", &backing.full_name);
            out.push(b')');
        }
        out.push(b'\n');
        if let Some(format) = &backing.format {
            let _ = writeln!(
                out,
                "backing file format: {}",
                printed::text(context, format)
            );
        }
    }
    limits(context, &mut out, report.limits.as_ref(), 0);
    if let Some(qcow2) = &report.qcow2 {
        snapshots(context, &mut out, &qcow2.snapshots);
    }
    specific(context, &mut out, report.specific.as_ref());
    if let Some(untrusted) = &report.untrusted {
        untrusted.to_text(&mut out);
    }
    for file in &report.files {
        child(context, &mut out, file, above, "");
    }
    out
}

/// The part that is specific to the format, if there is one.
pub fn specific(context: &Context, out: &mut Vec<u8>, value: Option<&Value>) {
    if let Some(value) = value {
        out.extend(b"Format specific information:\n");
        dump(context, out, value, 1);
    }
}

fn name(context: &Context, out: &mut Vec<u8>, before: &str, name: &OsStr) {
    out.extend(before.as_bytes());
    out.extend(&*printed::name(context, name.as_bytes()));
}

/// The file of an image, and the files below it.
fn child(context: &Context, out: &mut Vec<u8>, file: &FileReport, above: &str, indent: &str) {
    let path = format!("{above}/{}", file.role);
    if let Some(image) = &file.image {
        let _ = writeln!(out, "{indent}Child node '{path}':");
        for line in report(context, image, &path).split_inclusive(|byte| *byte == b'\n') {
            out.extend(indent.as_bytes());
            out.extend(b"    ");
            out.extend(line);
        }
        return;
    }
    // A node with a file below is printed as an image.
    let [label, kind, length] = match &file.below {
        None => ["filename", "protocol type", "file length"],
        Some(_) => ["image", "file format", "virtual size"],
    };
    let before = format!("{indent}Child node '{path}':\n{indent}    {label}: ");
    name(context, out, &before, &file.name);
    let _ = write!(
        out,
        "\n{indent}    {kind}: {}\n{indent}    {length}: {}\n{indent}    disk size: {}\n",
        file.protocol,
        exact(file.length),
        disk_size(file.disk_size)
    );
    limits(context, out, file.limits.as_ref(), indent.len() / 4 + 1);
    if let Some(below) = &file.below {
        child(context, out, below, &path, &format!("{indent}    "));
    }
}

fn limits(context: &Context, out: &mut Vec<u8>, limits: Option<&Limits>, level: usize) {
    if let Some(limits) = limits {
        let indent = "    ".repeat(level);
        let _ = writeln!(out, "{indent}Block limits:");
        dump(context, out, &limits.to_json(), level + 1);
    }
}

fn disk_size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unavailable".into(), size::human)
}

/// `10 MiB (10485760 bytes)`.
fn exact(bytes: u64) -> String {
    format!("{} ({bytes} bytes)", size::human(bytes))
}

/// Values as lines `key: value`, four spaces a level, and dashes in keys as
/// spaces.
fn dump(context: &Context, out: &mut Vec<u8>, value: &Value, level: usize) {
    let indent = "    ".repeat(level);
    let mut line = |key: String, value: &Value| {
        let _ = write!(out, "{indent}{key}:");
        match value {
            Value::List(_) | Value::Object(_) => {
                out.push(b'\n');
                dump(context, out, value, level + 1);
            }
            Value::Text(text) => {
                out.push(b' ');
                out.extend(&*printed::name(context, text));
                out.push(b'\n');
            }
            Value::Bool(value) => {
                let _ = writeln!(out, " {value}");
            }
            Value::Number(number) => {
                let _ = writeln!(out, " {number}");
            }
        }
    };
    match value {
        Value::Object(map) => {
            for (key, value) in &map.0 {
                line(key.replace('-', " "), value);
            }
        }
        Value::List(list) => {
            for (index, value) in list.iter().enumerate() {
                line(format!("[{index}]"), value);
            }
        }
        _ => {}
    }
}

/// The list of snapshots with its headings; empty without snapshots.
pub fn snapshots(context: &Context, out: &mut Vec<u8>, list: &[Snapshot]) {
    if list.is_empty() {
        return;
    }
    out.extend(b"Snapshot list:\n");
    let mut row = |id: &[u8], tag: &[u8], cells: [&str; 4]| {
        padded(context, out, id, 7);
        padded(context, out, tag, 16);
        let [size, date, clock, icount] = cells;
        let _ = writeln!(out, "{size:>8} {date:>19} {clock:>15} {icount:>10}");
    };
    row(b"ID", b"TAG", ["VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"]);
    for snapshot in list {
        row(
            snapshot.id_text(),
            snapshot.name_text(),
            [
                &size::human(snapshot.vm_state_size()),
                &localtime::format(i64::from(snapshot.date_sec)),
                &clock(snapshot.vm_clock_nsec),
                &snapshot
                    .icount()
                    .map_or_else(String::new, |n| n.to_string()),
            ],
        );
    }
}

/// A text of any bytes, padded to `width`, and a blank.
fn padded(context: &Context, out: &mut Vec<u8>, text: &[u8], width: usize) {
    let text = printed::name(context, text);
    out.extend(&*text);
    out.extend(std::iter::repeat_n(
        b' ',
        width.saturating_sub(text.len()) + 1,
    ));
}

/// The running time of a guest: hours, minutes, seconds and milliseconds.
fn clock(nanoseconds: u64) -> String {
    let seconds = nanoseconds / 1_000_000_000;
    format!(
        "{:04}:{:02}:{:02}.{:03}",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        nanoseconds / 1_000_000 % 1000
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::json::Map;

    #[test]
    fn values_as_lines() {
        let mut out = Vec::new();
        let bitmap = Map::new().with("flags", vec!["auto"]).with("name", "b");
        let value = Map::new()
            .with("compat", "1.1")
            .with("bitmaps", vec![bitmap])
            .with("corrupt", false)
            .into();
        dump(&Context::new(None), &mut out, &value, 1);
        assert_eq!(
            String::from_utf8_lossy(&out),
            "    compat: 1.1\n    bitmaps:\n        [0]:\n            flags:\n                \
             [0]: auto\n            name: b\n    corrupt: false\n"
        );
    }

    #[test]
    fn colours_change_no_text() {
        let text = b"image: a: b\n\nSnapshot list:\nID  TAG\n1   x\n    corrupt: true";
        let shown = String::from_utf8(coloured(text)).unwrap();
        assert_eq!(
            shown,
            "\x1b[36mimage:\x1b[0m a: b\n\n\x1b[1mSnapshot list:\x1b[0m\n\
             \x1b[1mID  TAG\x1b[0m\n1   x\n\x1b[31m    corrupt: true\x1b[0m"
        );
    }

    #[test]
    fn the_guest_clock() {
        assert_eq!(clock(0), "0000:00:00.000");
        assert_eq!(clock(3_723_045_000_000), "0001:02:03.045");
    }
}
