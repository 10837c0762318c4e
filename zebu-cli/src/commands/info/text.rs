//! The report for people.

use std::fmt::Write;

use serde_json::Value;
use zebu::format::Snapshot;

use super::report::{FileReport, Report, text};
use crate::{localtime, size};

/// All reports, an empty line between them.
pub fn reports(reports: &[Report]) -> String {
    let texts: Vec<String> = reports.iter().map(report).collect();
    texts.join("\n")
}

fn report(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail, here and below.
    let _ = write!(
        out,
        "image: {}\nfile format: {}\nvirtual size: {}\ndisk size: {}\n",
        report.name,
        report.format,
        exact(report.virtual_size),
        disk_size(report.disk_size)
    );
    if let Some(qcow2) = &report.qcow2 {
        if qcow2.is_encrypted {
            out.push_str("encrypted: yes\n");
        }
        let _ = writeln!(out, "cluster_size: {}", qcow2.cluster_size);
        if qcow2.is_dirty {
            out.push_str("cleanly shut down: no\n");
        }
    }
    if let Some(backing) = &report.backing {
        let _ = write!(out, "backing file: {}", backing.name);
        if backing.name != backing.full_name {
            let _ = write!(out, " (actual path: {})", backing.full_name);
        }
        out.push('\n');
        if let Some(format) = &backing.format {
            let _ = writeln!(out, "backing file format: {format}");
        }
    }
    if let Some(qcow2) = &report.qcow2 {
        snapshots(&mut out, &qcow2.snapshots);
        out.push_str("Format specific information:\n");
        dump(&mut out, &qcow2.specific, 1);
    }
    if let Some(untrusted) = &report.untrusted {
        untrusted.to_text(&mut out);
    }
    if let Some(file) = &report.file {
        child(&mut out, file, "", "");
    }
    out
}

/// The file of an image, and those below.
fn child(out: &mut String, file: &FileReport, above: &str, indent: &str) {
    let path = format!("{above}/{}", file.role);
    // What has a file below is told of as an image.
    let [name, kind, length] = match &file.below {
        None => ["filename", "protocol type", "file length"],
        Some(_) => ["image", "file format", "virtual size"],
    };
    let _ = write!(
        out,
        "{indent}Child node '{path}':\n{indent}    {name}: {}\n{indent}    {kind}: {}\n\
         {indent}    {length}: {}\n{indent}    disk size: {}\n",
        file.name,
        file.protocol,
        exact(file.length),
        disk_size(file.disk_size)
    );
    if let Some(below) = &file.below {
        child(out, below, &path, &format!("{indent}    "));
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
pub fn dump(out: &mut String, value: &Value, level: usize) {
    let indent = "    ".repeat(level);
    let mut line = |key: String, value: &Value| match value {
        Value::Array(_) | Value::Object(_) => {
            let _ = writeln!(out, "{indent}{key}:");
            dump(out, value, level + 1);
        }
        Value::String(text) => {
            let _ = writeln!(out, "{indent}{key}: {text}");
        }
        other => {
            let _ = writeln!(out, "{indent}{key}: {other}");
        }
    };
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                line(key.replace('-', " "), value);
            }
        }
        Value::Array(list) => {
            for (index, value) in list.iter().enumerate() {
                line(format!("[{index}]"), value);
            }
        }
        _ => {}
    }
}

/// The list of snapshots with its heads; nothing if there is none.
pub fn snapshots(out: &mut String, list: &[Snapshot]) {
    if list.is_empty() {
        return;
    }
    out.push_str("Snapshot list:\n");
    let mut row = |cells: [&str; 6]| {
        let [id, tag, size, date, clock, icount] = cells;
        let _ = writeln!(
            out,
            "{id:<7} {tag:<16} {size:>8} {date:>19} {clock:>15} {icount:>10}"
        );
    };
    row(["ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"]);
    for snapshot in list {
        row([
            &text(snapshot.id_text()),
            &text(snapshot.name_text()),
            &size::human(snapshot.vm_state_size()),
            &localtime::format(i64::from(snapshot.date_sec)),
            &clock(snapshot.vm_clock_nsec),
            &snapshot
                .icount()
                .map_or_else(String::new, |n| n.to_string()),
        ]);
    }
}

/// A time that a guest ran: hours, minutes, seconds and milliseconds.
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
    use serde_json::json;

    #[test]
    fn values_as_lines() {
        let mut out = String::new();
        let value = json!({"compat": "1.1", "bitmaps": [{"flags": ["auto"], "name": "b"}], "corrupt": false});
        dump(&mut out, &value, 1);
        assert_eq!(
            out,
            "    compat: 1.1\n    bitmaps:\n        [0]:\n            flags:\n                \
             [0]: auto\n            name: b\n    corrupt: false\n"
        );
    }

    #[test]
    fn the_guest_clock() {
        assert_eq!(clock(0), "0000:00:00.000");
        assert_eq!(clock(3_723_045_000_000), "0001:02:03.045");
    }
}
