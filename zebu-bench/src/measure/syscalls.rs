//! System calls a request: what strace counts in a long run less what it counts in a short one,
//! so that starting the program and opening the image are not in it.

use super::child;
use crate::error::{Context, Error, Result};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

/// Calls by name.
type Calls = BTreeMap<String, u64>;

/// Calls a request: all of them, and those that make up most, by number.
#[derive(Debug, Clone, PartialEq)]
pub struct PerRequest {
    /// All calls.
    pub all: f64,
    /// The most frequent ones, the most frequent first: names with numbers.
    pub most: Vec<(String, f64)>,
}

impl PerRequest {
    /// The most frequent calls as text: `io_uring_enter 0.50, futex 0.02`.
    pub fn named(&self) -> String {
        let named: Vec<String> = self
            .most
            .iter()
            .map(|(name, n)| format!("{name} {n:.2}"))
            .collect();
        named.join(", ")
    }
}

/// Counts the calls of two runs, of so many requests each, and takes the difference. `setup` is
/// run before each.
pub fn per_request(
    strace: &Path,
    setup: &[Vec<OsString>],
    runs: [(&[OsString], u64); 2],
    scratch: &Path,
) -> Result<PerRequest> {
    let counted = |command: &[OsString]| {
        for line in setup {
            child::run(line, scratch)?;
        }
        count(strace, command, scratch)
    };
    let [(short, few), (long, many)] = runs;
    if many <= few {
        return Err(Error::new(
            "the second run has no more requests than the first",
        ));
    }
    Ok(difference(&counted(short)?, &counted(long)?, many - few))
}

fn count(strace: &Path, command: &[OsString], scratch: &Path) -> Result<Calls> {
    let table = scratch.join("strace");
    let mut line = child::command([strace.as_os_str()]);
    line.extend(["-f", "-c", "-qq", "-o"].map(OsString::from));
    line.push(table.clone().into());
    line.extend(command.iter().cloned());
    child::run(&line, scratch)?;
    let text = std::fs::read_to_string(&table).context(|| table.display().to_string())?;
    let calls = parse(&text);
    if calls.is_empty() {
        return Err(Error::new("strace counted nothing"));
    }
    Ok(calls)
}

/// The rows of `strace -c`: a share of the time first, the number of calls fourth, the name last.
fn parse(text: &str) -> Calls {
    text.lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let name = fields.last().filter(|name| **name != "total")?;
            fields.first()?.parse::<f64>().ok()?;
            Some(((*name).to_owned(), fields.get(3)?.parse().ok()?))
        })
        .collect()
}

fn difference(short: &Calls, long: &Calls, requests: u64) -> PerRequest {
    let mut each: Vec<(String, f64)> = long
        .iter()
        .map(|(name, n)| {
            let more = n.saturating_sub(short.get(name).copied().unwrap_or(0));
            (name.clone(), more as f64 / requests as f64)
        })
        .collect();
    each.sort_by(|a, b| b.1.total_cmp(&a.1));
    let all = each.iter().map(|(_, n)| n).sum();
    each.truncate(4);
    each.retain(|(_, n)| *n >= 0.01);
    PerRequest { all, most: each }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: &str = "\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 60.00    0.000600           6       100           io_uring_enter
 40.00    0.000400           4        10         2 openat
------ ----------- ----------- --------- --------- ----------------
100.00    0.001000           5       110         2 total
";

    #[test]
    fn the_table_of_strace_is_read() {
        let calls = parse(SHORT);
        assert_eq!(calls.len(), 2);
        assert_eq!(calls["io_uring_enter"], 100);
        assert_eq!(calls["openat"], 10);
    }

    #[test]
    fn what_both_runs_have_is_not_counted() {
        let short = parse(SHORT);
        let mut long = short.clone();
        long.insert("io_uring_enter".into(), 600);
        long.insert("futex".into(), 250);
        let per = difference(&short, &long, 1000);
        assert!((per.all - 0.75).abs() < 1e-9);
        assert_eq!(per.named(), "io_uring_enter 0.50, futex 0.25");
    }
}
