//! The rates between two samples, as lines of text.

use super::sample::{Export, Operation, Sample};
use crate::arguments::size;
use crate::output::colours::Style;
use crate::output::printable;

/// Columns of a name.
const NAME: usize = 12;
/// Columns of the name of an operation.
const OPERATION: usize = 12;

/// A line, and how it is shown.
pub type Line = (String, Option<Style>);

/// What is shown of a server.
pub struct View<'a> {
    /// Where the metrics are from.
    pub address: &'a str,
    /// Seconds since 1970.
    pub now: f64,
    pub before: &'a Sample,
    pub after: &'a Sample,
    /// Seconds between these.
    pub seconds: f64,
}

impl View<'_> {
    /// All lines.
    pub fn lines(&self) -> Vec<Line> {
        let mut lines = vec![(self.title(), Some(Style::Bold)), (String::new(), None)];
        lines.push((header(), Some(Style::Reverse)));
        let nothing = Export::default();
        // Another server counts from 0.
        let is_same = self.before.started == self.after.started;
        for (name, after) in &self.after.exports {
            let before = self.before.exports.get(name);
            let before = before.filter(|_| is_same).unwrap_or(&nothing);
            self.export(name, before, after, &mut lines);
        }
        lines
    }

    fn title(&self) -> String {
        let clients: f64 = self.after.exports.values().map(|e| e.clients).sum();
        let up = self
            .after
            .started
            .map_or(0.0, |at| (self.now - at).max(0.0)) as u64;
        let (days, hours, minutes, seconds) = (up / 86400, up / 3600 % 24, up / 60 % 60, up % 60);
        let days = match days {
            0 => String::new(),
            days => format!("{days} d "),
        };
        let version = self.after.version.as_deref().unwrap_or("");
        format!(
            "zebu {:.16}  {}  up {days}{hours}:{minutes:02}:{seconds:02}  clients: {}",
            printable(version.as_bytes()),
            printable(self.address.as_bytes()),
            count(clients)
        )
    }

    fn export(&self, name: &str, before: &Export, after: &Export, lines: &mut Vec<Line>) {
        let nothing = Operation::default();
        let mut label = printable(name.as_bytes());
        if label.is_empty() {
            label = "(default)".into();
        }
        if label.chars().count() > NAME {
            // On a line of its own, whole.
            lines.push((std::mem::take(&mut label), None));
        }
        for (name, now) in &after.operations {
            if now.requests == 0.0 && now.in_flight == 0.0 {
                continue;
            }
            let then = before.operations.get(name).unwrap_or(&nothing);
            let rates = Rates::of(then, now, self.seconds);
            let name = cut(name, OPERATION);
            let style = (rates.errors > 0.0).then_some(Style::Red);
            lines.push((rates.row(&label, &name, now.in_flight), style));
            label.clear();
        }
        lines.push((of_image(&label, after), Some(Style::Faint)));
    }
}

/// A server's text in a column.
fn cut(text: &str, columns: usize) -> String {
    printable(text.as_bytes()).chars().take(columns).collect()
}

/// At most 80 columns.
fn row(cells: [&str; 9]) -> String {
    let [
        export,
        operation,
        requests,
        bytes,
        in_flight,
        errors,
        mean,
        median,
        slow,
    ] = cells;
    format!(
        "{export:<NAME$} {operation:<OPERATION$} {requests:>7} {bytes:>9} {in_flight:>6} \
         {errors:>6} {mean:>7} {median:>7} {slow:>7}"
    )
}

fn header() -> String {
    row([
        "EXPORT",
        "OPERATION",
        "REQ/S",
        "BYTES/S",
        "FLIGHT",
        "ERR/S",
        "MEAN",
        "50%",
        "99%",
    ])
}

/// What is known of the image of an export.
fn of_image(label: &str, export: &Export) -> String {
    let bytes = |bytes: f64| size::human(bytes as u64);
    let mut parts = Vec::new();
    if let Some(size) = export.size {
        parts.push(format!("disk {}", bytes(size)));
    }
    if let Some(allocated) = export.allocated {
        parts.push(format!("file {}", bytes(allocated)));
    }
    parts.push(format!("clients {}", count(export.clients)));
    let looked_up = export.cache_hits + export.cache_misses;
    if looked_up > 0.0 {
        let share = export.cache_hits / looked_up * 100.0;
        parts.push(format!("L2 cache {share:.1} % hits"));
    }
    format!("{label:<NAME$} {}", parts.join(", "))
}

/// What one kind of requests did between two samples, in a second.
struct Rates {
    requests: f64,
    bytes: f64,
    errors: f64,
    mean: Option<f64>,
    median: Option<f64>,
    slow: Option<f64>,
}

impl Rates {
    fn of(before: &Operation, after: &Operation, seconds: f64) -> Self {
        let ended = (after.requests - before.requests).max(0.0);
        let rate = |before: f64, after: f64| (after - before).max(0.0) / seconds.max(0.001);
        let time = (after.time - before.time).max(0.0);
        Rates {
            requests: rate(before.requests, after.requests),
            bytes: rate(before.bytes, after.bytes),
            errors: rate(before.errors, after.errors),
            mean: (ended > 0.0).then(|| time / ended),
            median: percentile(before, after, ended, 0.5),
            slow: percentile(before, after, ended, 0.99),
        }
    }

    fn row(&self, export: &str, operation: &str, in_flight: f64) -> String {
        row([
            export,
            operation,
            &count(self.requests),
            &rate_of_bytes(self.bytes),
            &count(in_flight),
            &count(self.errors),
            &latency(self.mean),
            &latency(self.median),
            &latency(self.slow),
        ])
    }
}

/// The latency that `share` of the requests between two samples did not exceed; within a bucket it
/// is interpolated. Infinite behind the last one.
fn percentile(before: &Operation, after: &Operation, ended: f64, share: f64) -> Option<f64> {
    if ended <= 0.0 || after.at_most.is_empty() {
        return None;
    }
    let wanted = ended * share;
    let (mut lower, mut counted) = (0.0, 0.0);
    for (nth, (limit, now)) in after.at_most.iter().enumerate() {
        let then = before.at_most.get(nth).map_or(0.0, |(_, count)| *count);
        let count = (now - then).max(counted);
        if count >= wanted {
            let part = (wanted - counted) / (count - counted).max(f64::MIN_POSITIVE);
            return Some(lower + (limit - lower) * part.clamp(0.0, 1.0));
        }
        (lower, counted) = (*limit, count);
    }
    Some(f64::INFINITY)
}

/// A number of at most six characters.
fn count(value: f64) -> String {
    let units = ["", "k", "M", "G", "T", "P", "E"];
    let mut value = value;
    for unit in units {
        if value < 999.5 {
            let decimals = match () {
                () if unit.is_empty() && (value.fract() == 0.0 || value >= 99.95) => 0,
                () if value >= 99.95 => 0,
                () => 1,
            };
            return format!("{value:.decimals$}{unit}");
        }
        value /= 1000.0;
    }
    "huge".into()
}

fn rate_of_bytes(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        value if value < 1e18 => size::human(value as u64),
        _ => "huge".into(),
    }
}

fn latency(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".into(),
        Some(s) if s < 999.5e-6 => format!("{:.0} us", s * 1e6),
        Some(s) if s < 0.09995 => format!("{:.1} ms", s * 1e3),
        Some(s) if s < 0.9995 => format!("{:.0} ms", s * 1e3),
        Some(s) if s < 99.95 => format!("{s:.1} s"),
        Some(s) if s < 9999.5 => format!("{s:.0} s"),
        Some(_) => "long".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (1.5, "1.5"),
            (100.4, "100"),
            (999.6, "1.0k"),
            (12_345.0, "12.3k"),
            (123_456_789.0, "123M"),
            (1e300, "huge"),
            (f64::INFINITY, "huge"),
        ] {
            assert_eq!(count(value), text);
        }
        assert_eq!(latency(Some(12e-6)), "12 us");
        assert_eq!(latency(Some(0.0015)), "1.5 ms");
        assert_eq!(latency(Some(f64::INFINITY)), "long");
    }

    #[test]
    fn percentiles_are_of_the_time_between() {
        let counts = |a, b| Operation {
            at_most: vec![(0.001, a), (0.002, b)],
            ..Operation::default()
        };
        let (before, after) = (counts(100.0, 100.0), counts(100.0, 110.0));
        assert_eq!(percentile(&before, &after, 10.0, 0.5), Some(0.0015));
        assert_eq!(percentile(&before, &after, 20.0, 0.99), Some(f64::INFINITY));
        assert_eq!(percentile(&before, &after, 0.0, 0.5), None);
    }
}
