//! What the suite ran on.

use std::path::Path;
use std::process::Command;

/// Facts of the machine: (what, value).
pub fn facts(dir: &Path) -> Vec<(String, String)> {
    let mut facts: Vec<(String, String)> = Vec::new();
    let mut add = |what: &str, value: String| {
        if !value.is_empty() {
            facts.push((what.into(), value));
        }
    };
    add("date", said("date", &["-u", "+%Y-%m-%d %H:%M UTC"]));
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let threads = std::thread::available_parallelism().map_or(0, usize::from);
    let model = field(&cpuinfo, "model name").unwrap_or_else(|| said("uname", &["-m"]));
    add("CPU", format!("{model}, {threads} threads"));
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = field(&meminfo, "MemTotal");
    add("memory", memory.map(|m| gib(&m)).unwrap_or_default());
    add("kernel", said("uname", &["-sr"]));
    add("file system of the images", file_system(dir));
    facts
}

/// The first line of what a program says, or nothing.
pub fn said(program: &str, args: &[&str]) -> String {
    Command::new(program)
        .args(args)
        .output()
        .ok()
        .filter(|o| o.status.success())
        .and_then(|o| {
            String::from_utf8_lossy(&o.stdout)
                .lines()
                .next()
                .map(str::to_owned)
        })
        .unwrap_or_default()
}

/// Free memory that can be had without swapping, bytes.
pub fn available_memory() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    field(&meminfo, "MemAvailable")
        .and_then(|m| kib(&m))
        .map_or(0, |k| k * 1024)
}

/// Free space on the file system of `dir`, bytes.
pub fn free_space(dir: &Path) -> u64 {
    said("stat", &["-f", "-c", "%a %S", &dir.to_string_lossy()])
        .split_whitespace()
        .map(str::parse::<u64>)
        .try_fold(1, |product, n| n.map(|n| product * n))
        .unwrap_or(0)
}

fn file_system(dir: &Path) -> String {
    said("stat", &["-f", "-c", "%T", &dir.to_string_lossy()])
}

/// The value of the first `name : value` line.
fn field(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

fn kib(text: &str) -> Option<u64> {
    text.strip_suffix(" kB")?.trim().parse().ok()
}

fn gib(text: &str) -> String {
    kib(text).map_or_else(
        || text.into(),
        |k| format!("{:.1} GiB", k as f64 / (1 << 20) as f64),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_files() {
        let text = "processor\t: 0\nmodel name\t: A CPU @ 3 GHz\nMemTotal:  16777216 kB\n";
        assert_eq!(field(text, "model name").unwrap(), "A CPU @ 3 GHz");
        assert_eq!(gib(&field(text, "MemTotal").unwrap()), "16.0 GiB");
        assert_eq!(field(text, "absent"), None);
    }
}
