//! The metrics in Prometheus's text format, version 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>).

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use zebu::internal::Totals;

use crate::commands::serve::Exported;

/// What the metrics are of.
pub struct Source {
    pub server: &'static str,
    /// When the server started, since 1970.
    pub started: Duration,
    pub exports: Vec<Arc<dyn Exported>>,
}

/// An export, and its counters at one time.
struct Counted<'a> {
    export: &'a dyn Exported,
    /// Its name as the value of a label.
    label: String,
    totals: Vec<Totals>,
}

impl Source {
    /// All metrics.
    pub fn text(&self) -> String {
        let exports = self.exports.iter().map(|export| &**export);
        let all = exports.map(|export| Counted {
            export,
            label: escaped(export.name()),
            totals: export.statistics().totals().collect(),
        });
        let all: Vec<Counted> = all.collect();
        let mut out = String::new();
        self.process(&mut out);
        clients(&mut out, &all);
        requests(&mut out, &all);
        latencies(&mut out, &all);
        images(&mut out, &all);
        out
    }

    fn process(&self, out: &mut String) {
        begin(
            out,
            "zebu_build_info",
            "gauge",
            "The version of the server.",
        );
        let (version, server) = (env!("CARGO_PKG_VERSION"), self.server);
        add(
            out,
            "zebu_build_info",
            &format!("version=\"{version}\",server=\"{server}\""),
            1,
        );
        let name = "process_start_time_seconds";
        begin(
            out,
            name,
            "gauge",
            "When the server started, in seconds since 1970.",
        );
        let _ = writeln!(out, "{name} {:.3}", self.started.as_secs_f64());
    }
}

fn clients(out: &mut String, all: &[Counted]) {
    let (connections, clients) = ("zebu_connections_total", "zebu_clients");
    begin(
        out,
        connections,
        "counter",
        "Connections of clients that chose the export.",
    );
    for one in all {
        let (total, _) = one.export.statistics().connections_and_clients();
        add(out, connections, &one.labels(), total);
    }
    begin(out, clients, "gauge", "Clients that are connected.");
    for one in all {
        let (_, now) = one.export.statistics().connections_and_clients();
        add(out, clients, &one.labels(), now);
    }
}

/// Name, type and description of a metric of each kind of requests, and its value.
type OfRequests = (&'static str, &'static str, &'static str, fn(&Totals) -> u64);

const OF_REQUESTS: [OfRequests; 4] = [
    (
        "zebu_requests_total",
        "counter",
        "Requests that have ended.",
        |totals| totals.requests,
    ),
    (
        "zebu_request_errors_total",
        "counter",
        "Requests that have failed.",
        |totals| totals.failed,
    ),
    (
        "zebu_request_bytes_total",
        "counter",
        "Bytes of requests that have ended.",
        |totals| totals.bytes,
    ),
    (
        "zebu_requests_in_flight",
        "gauge",
        "Requests that are being executed.",
        |totals| totals.in_flight,
    ),
];

fn requests(out: &mut String, all: &[Counted]) {
    for (name, kind, help, value) in OF_REQUESTS {
        begin(out, name, kind, help);
        for one in all {
            for totals in &one.totals {
                add(out, name, &one.labels_of(totals), value(totals));
            }
        }
    }
}

fn latencies(out: &mut String, all: &[Counted]) {
    let name = "zebu_request_duration_seconds";
    begin(out, name, "histogram", "How long requests took.");
    for one in all {
        for totals in &one.totals {
            let labels = one.labels_of(totals);
            for (power, below) in (Totals::FIRST..).zip(&totals.below) {
                // Latencies are whole nanoseconds: less than 2^n is 2^n - 1 at most.
                let most = ((1u64 << power) - 1) as f64 / 1e9;
                let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{most}\"}} {below}");
            }
            let count = totals.requests;
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
            let _ = writeln!(out, "{name}_sum{{{labels}}} {}", totals.time.as_secs_f64());
            let _ = writeln!(out, "{name}_count{{{labels}}} {count}");
        }
    }
}

fn images(out: &mut String, all: &[Counted]) {
    let mut family = |name, kind, help, value: &dyn Fn(&Counted) -> Option<u64>| {
        begin(out, name, kind, help);
        for one in all {
            if let Some(value) = value(one) {
                add(out, name, &one.labels(), value);
            }
        }
    };
    family(
        "zebu_image_size_bytes",
        "gauge",
        "Size of the disk that is exported.",
        &|one| Some(one.export.size()),
    );
    family(
        "zebu_image_allocated_bytes",
        "gauge",
        "Space that the image's file takes, without its backing files.",
        &|one| one.export.device().top().file().allocated().ok(),
    );
    let cache = |one: &Counted| {
        let image = one.export.device().top().as_qcow2();
        image.map(|image| image.cache_hits_and_loads())
    };
    family(
        "zebu_l2_cache_hits_total",
        "counter",
        "L2 look-ups that hit the cache (approximate).",
        &|one| cache(one).map(|(hits, _)| hits),
    );
    family(
        "zebu_l2_cache_misses_total",
        "counter",
        "Parts of mapping tables that were read from the file.",
        &|one| cache(one).map(|(_, misses)| misses),
    );
}

impl Counted<'_> {
    fn labels(&self) -> String {
        format!("export=\"{}\"", self.label)
    }

    fn labels_of(&self, totals: &Totals) -> String {
        format!("export=\"{}\",operation=\"{}\"", self.label, totals.name)
    }
}

/// The value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

// Writing to a String cannot fail, here and above.

fn begin(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn add(out: &mut String, name: &str, labels: &str, value: u64) {
    let _ = writeln!(out, "{name}{{{labels}}} {value}");
}

#[cfg(test)]
mod tests {
    #[test]
    fn labels_are_escaped() {
        assert_eq!(super::escaped("a\\b\"c\nd"), "a\\\\b\\\"c\\nd");
    }
}
