//! The command line.

use clap::{Args, Parser, Subcommand};
use std::path::{Path, PathBuf};

/// The benchmark suite of zebu: every figure is taken side by side with a peer.
#[derive(Debug, Parser)]
#[command(name = "zebu-bench", version)]
pub struct Options {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure, and save the figures
    Run(Run),
    /// Make the page and its charts from saved figures
    Report(Report),
    /// List the experiments
    List,
}

/// Options of a measurement.
#[derive(Debug, Args)]
pub struct Run {
    /// Experiments to run; all if none is named
    #[arg(value_name = "EXPERIMENT")]
    pub experiments: Vec<String>,

    /// Size of the images; the file-system image is filled to 70 %
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = size)]
    pub size: u64,

    /// Runs of each figure
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = runs)]
    pub runs: usize,

    /// How long a run lasts that may have any number of requests, roughly
    #[arg(long, value_name = "SECONDS", default_value_t = 0.6, value_parser = seconds)]
    pub seconds: f64,

    /// Where images, outputs and peers are kept; the disk under test
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    pub dir: PathBuf,

    /// Where the figures are saved [default: DIR/results.json]
    #[arg(long, value_name = "FILE")]
    pub results: Option<PathBuf>,

    /// Real files to make the file-system image of
    #[arg(long, value_name = "TREE", default_value = "/usr/lib")]
    pub tree: PathBuf,

    /// The zebu under test [default: the one beside this program]
    #[arg(long, env = "ZEBU", value_name = "PROGRAM")]
    pub zebu: Option<PathBuf>,

    /// The qemu-img to measure against [default: the one on PATH]
    #[arg(long, env = "QEMU_IMG", value_name = "PROGRAM")]
    pub qemu_img: Option<PathBuf>,

    /// Fetch and build no peers; use what is there
    #[arg(long)]
    pub offline: bool,
}

impl Run {
    /// Where the figures are saved.
    pub fn results(&self, dir: &Path) -> PathBuf {
        let usual = || dir.join("results.json");
        self.results.clone().unwrap_or_else(usual)
    }
}

/// Options of the report.
#[derive(Debug, Args)]
pub struct Report {
    /// The saved figures
    #[arg(long, value_name = "FILE", default_value = "target/bench/results.json")]
    pub results: PathBuf,

    /// The page to write; its charts go to charts/ beside it
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/bench/benchmarks.md"
    )]
    pub page: PathBuf,

    /// A page whose part between the marks `<!-- benchmarks -->` and `<!-- /benchmarks -->` becomes
    /// the summary
    #[arg(long, value_name = "FILE")]
    pub readme: Option<PathBuf>,
}

fn size(text: &str) -> Result<u64, String> {
    zebu::names::parse_size(text).map_err(|_| "a size is a number with k, M, G or T".into())
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.01..=60.0).contains(&seconds) => Ok(seconds),
        _ => Err("seconds are a number from 0.01 to 60".into()),
    }
}

fn runs(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(runs) if (1..=100).contains(&runs) => Ok(runs),
        _ => Err("runs are a number from 1 to 100".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_valid() {
        Options::command().debug_assert();
        let Command::Run(run) =
            Options::parse_from(["zebu-bench", "run", "--size", "1G", "convert"]).command
        else {
            panic!("not a run");
        };
        assert_eq!(run.size, 1 << 30);
        assert_eq!(run.experiments, ["convert"]);
        for wrong in [["--size", "big"], ["--seconds", "0"], ["--runs", "0"]] {
            assert!(Options::try_parse_from(["zebu-bench", "run", wrong[0], wrong[1]]).is_err());
        }
    }
}
