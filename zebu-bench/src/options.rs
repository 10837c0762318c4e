//! The command line.

use crate::units::parse_size;
use clap::{Parser, ValueEnum};
use std::path::PathBuf;

/// The benchmark suite of zebu: every figure is a ratio, taken side by side with a peer.
#[derive(Debug, Parser)]
#[command(name = "zebu-bench", version)]
pub struct Options {
    /// Experiments to run; all if none is named
    #[arg(value_name = "EXPERIMENT")]
    pub experiments: Vec<String>,

    /// Smaller images, shorter runs, fewer rows: all in less than ten minutes
    #[arg(long)]
    pub quick: bool,

    /// Size of the images [default: 2G, 256M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = |s: &str| parse_size(s))]
    pub size: Option<u64>,

    /// Counted runs of each cell [default: 5]
    #[arg(long, value_name = "N")]
    pub runs: Option<usize>,

    /// Judge the results of the first counted run of a cell, instead of one before that
    #[arg(long)]
    pub no_trial: bool,

    /// How long a run of engines, subclusters, cache, nbd and vhost lasts, roughly [default: 1 to 2,
    /// 0.1 to 0.7 with --quick]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub seconds: Option<f64>,

    /// Where images, outputs and peers are kept; the disk under test
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    pub dir: PathBuf,

    /// Where the tmpfs cells keep their images
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub tmpfs: PathBuf,

    /// The report to write; charts go to charts/ beside it [default: DIR/report.md]
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,

    /// Real files to make the file-system image of
    #[arg(long, value_name = "TREE", default_value = "/usr/lib")]
    pub tree: PathBuf,

    /// Drop inputs from the page cache before each run, instead of reading them into it
    #[arg(long)]
    pub cold: bool,

    /// Whether to measure bench -w
    #[arg(long, value_enum, default_value = "auto")]
    pub writes: Writes,

    /// The zebu under test [default: the one beside this program]
    #[arg(long, env = "ZEBU", value_name = "PROGRAM")]
    pub zebu: Option<PathBuf>,

    /// The qemu-img to measure against [default: the newest, fetched from Debian's backports]
    #[arg(long, env = "QEMU_IMG", value_name = "PROGRAM")]
    pub qemu_img: Option<PathBuf>,

    /// Fetch and build no peers; use what is there
    #[arg(long)]
    pub offline: bool,

    /// List the experiments
    #[arg(long)]
    pub list: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.05..=60.0).contains(&seconds) => Ok(seconds),
        _ => Err("seconds are a number from 0.05 to 60".into()),
    }
}

/// Whether write cells are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Writes {
    /// If zebu has bench -w
    Auto,
    /// Yes
    Always,
    /// No
    Never,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Options::command().debug_assert();
    }

    #[test]
    fn sizes_and_experiments_are_read() {
        let o = Options::parse_from([
            "zebu-bench",
            "--quick",
            "--size",
            "1G",
            "convert",
            "compare",
        ]);
        assert_eq!(o.size, Some(1 << 30));
        assert_eq!(o.experiments, ["convert", "compare"]);
        assert!(o.quick && !o.cold);
        assert!(Options::try_parse_from(["zebu-bench", "--size", "big"]).is_err());
        assert!(Options::try_parse_from(["zebu-bench", "--seconds", "0"]).is_err());
    }
}
