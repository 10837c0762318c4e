//! The metrics of a server at one time, read from Prometheus's text format.

use std::collections::BTreeMap;

/// All that is shown, at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// When the server started, in seconds since 1970.
    pub started: Option<f64>,
    pub version: Option<String>,
    /// By name.
    pub exports: BTreeMap<String, Export>,
}

/// An export at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Export {
    pub clients: f64,
    pub size: Option<f64>,
    pub allocated: Option<f64>,
    pub cache_hits: f64,
    pub cache_misses: f64,
    /// By name.
    pub operations: BTreeMap<String, Operation>,
}

/// The requests of one kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Operation {
    pub requests: f64,
    pub errors: f64,
    pub bytes: f64,
    pub in_flight: f64,
    /// The sum of the latencies in seconds.
    pub time: f64,
    /// How many took so many seconds at most.
    pub at_most: Vec<(f64, f64)>,
}

impl Sample {
    /// Reads the metrics that there are. What is malformed, not finite or negative is left out.
    pub fn parse(text: &str) -> Self {
        let mut sample = Sample::default();
        for line in text.lines() {
            if let Some((name, labels, value)) = series(line) {
                sample.add(name, &labels, value);
            }
        }
        sample
    }

    fn add(&mut self, name: &str, labels: &BTreeMap<String, String>, value: f64) {
        match name {
            "process_start_time_seconds" => self.started = Some(value),
            "zebu_build_info" => self.version = labels.get("version").cloned(),
            _ => {
                let (Some(name), Some(label)) = (name.strip_prefix("zebu_"), labels.get("export"))
                else {
                    return;
                };
                let export = self.exports.entry(label.clone()).or_default();
                match labels.get("operation") {
                    None => export.add(name, value),
                    Some(operation) => {
                        let operation = export.operations.entry(operation.clone()).or_default();
                        operation.add(name, labels, value);
                    }
                }
            }
        }
    }
}

impl Export {
    fn add(&mut self, name: &str, value: f64) {
        match name {
            "clients" => self.clients = value,
            "image_size_bytes" => self.size = Some(value),
            "image_allocated_bytes" => self.allocated = Some(value),
            "l2_cache_hits_total" => self.cache_hits = value,
            "l2_cache_misses_total" => self.cache_misses = value,
            _ => {}
        }
    }
}

impl Operation {
    fn add(&mut self, name: &str, labels: &BTreeMap<String, String>, value: f64) {
        match name {
            "requests_total" => self.requests = value,
            "request_errors_total" => self.errors = value,
            "request_bytes_total" => self.bytes = value,
            "requests_in_flight" => self.in_flight = value,
            "request_duration_seconds_sum" => self.time = value,
            "request_duration_seconds_bucket" => {
                let limit = labels.get("le").and_then(|text| text.parse().ok());
                // The one without a limit is all requests.
                if let Some(limit) = limit.filter(|limit: &f64| limit.is_finite()) {
                    self.at_most.push((limit, value));
                }
            }
            _ => {}
        }
    }
}

/// Name, labels and value of a line that has them.
fn series(line: &str) -> Option<(&str, BTreeMap<String, String>, f64)> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (BTreeMap::new(), rest),
    };
    let value: f64 = rest.split_whitespace().next()?.parse().ok()?;
    (value.is_finite() && value >= 0.0).then_some((name, labels, value))
}

/// The labels up to the closing brace, and what follows it.
fn labels(mut rest: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut all = BTreeMap::new();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((all, rest));
        }
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = after.char_indices();
        loop {
            match chars.next()? {
                (at, '"') => {
                    rest = &after[at + 1..];
                    break;
                }
                (_, '\\') => match chars.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, other) => value.push(other),
            }
        }
        all.insert(name.into(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_read() {
        let text = "# HELP a b\nprocess_start_time_seconds 12.5\n\
                    zebu_clients{export=\"a\\\\\\\"\\n}\"} 3\n\
                    zebu_requests_total{export=\"\",operation=\"read\"} 7 1700000000\n\
                    zebu_request_duration_seconds_bucket{export=\"\",operation=\"read\",le=\"0.5\",} 6\n";
        let sample = Sample::parse(text);
        assert_eq!(sample.started, Some(12.5));
        assert_eq!(sample.exports["a\\\"\n}"].clients, 3.0);
        let read = &sample.exports[""].operations["read"];
        assert_eq!((read.requests, &read.at_most[..]), (7.0, &[(0.5, 6.0)][..]));
    }

    #[test]
    fn nonsense_is_left_out() {
        for value in ["NaN", "-1", "+Inf", "-Inf", "x", "", "1e999"] {
            let text = format!("zebu_clients{{export=\"a\"}} {value}");
            assert_eq!(Sample::parse(&text), Sample::default(), "{value}");
        }
        for line in [
            "zebu_clients{export=\"a 1",
            "zebu_clients{export} 1",
            "{",
            "}",
            "a{b=\"\\",
        ] {
            assert_eq!(Sample::parse(line), Sample::default(), "{line}");
        }
    }
}
