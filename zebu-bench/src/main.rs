//! The benchmark suite of zebu: each figure is a ratio, taken side by side with a peer.
//!
//! [`experiments`] says what is measured, [`inputs`] makes the images, [`peers`] finds the
//! programs to measure against, [`measure`] runs them in turn, [`report`] writes it down.

mod bench;
mod error;
mod experiments;
mod inputs;
mod measure;
mod options;
mod peers;
mod report;
mod units;

use bench::Bench;
use clap::Parser;
use error::{Context, Error, Result};
use options::Options;
use peers::Peers;
use report::{Report, Section, machine};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("zebu-bench: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<()> {
    if options.list {
        for e in experiments::ALL {
            println!("{:12} {}", e.name(), e.about());
        }
        return Ok(());
    }
    let chosen = experiments::named(&options.experiments, options.quick)?;
    std::fs::create_dir_all(&options.dir).context(|| options.dir.display().to_string())?;
    let dir = options
        .dir
        .canonicalize()
        .context(|| options.dir.display().to_string())?;
    let zebu = zebu(&options)?;
    let path = options
        .report
        .clone()
        .unwrap_or_else(|| dir.join("report.md"));

    let mut report = Report::default();
    let peers = Peers::find(&options, &dir.join("peers"), &mut report.notes)?;
    let bench = Bench {
        options,
        dir,
        zebu,
        peers,
    };
    report.facts = facts(&bench);
    for (what, value) in &report.facts {
        println!("{what}: {value}");
    }
    let begun = Instant::now();
    for experiment in chosen {
        let (started, made) = (Instant::now(), inputs::time_making());
        let mut section = Section::new(
            experiment.name(),
            &title(experiment.name(), experiment.about()),
        );
        if let Err(e) = experiment.run(&bench, &mut section) {
            section.note(format!("broken off: {e}"));
        }
        let making = (inputs::time_making() - made).as_secs_f64();
        section.note(format!(
            "took {:.0} s, {making:.0} s of it to make images",
            started.elapsed().as_secs_f64()
        ));
        report.sections.push(section);
        report.took(begun.elapsed());
        // After each experiment, so that an interrupted run leaves what it has.
        report.write(&path)?;
    }
    println!("\nreport: {}", path.display());
    Ok(())
}

/// The zebu that is named, else the one beside this program.
fn zebu(options: &Options) -> Result<PathBuf> {
    let beside = || {
        let own = std::env::current_exe().context(|| "own path".into())?;
        Ok(own.with_file_name("zebu"))
    };
    let zebu = options.zebu.clone().map_or_else(beside, Ok)?;
    zebu.canonicalize().map_err(|_| {
        Error::new(format!(
            "no zebu at {}: build it (make bench does), or name one with --zebu",
            zebu.display()
        ))
    })
}

fn facts(bench: &Bench) -> Vec<(String, String)> {
    let mut facts = machine::facts(&bench.dir);
    let mut add = |what: &str, value: String| facts.push((what.into(), value));
    add(
        "zebu",
        machine::said(&bench.zebu.to_string_lossy(), &["--version"]),
    );
    add("QEMU", bench.peers.qemu.version.clone());
    if let Some(fio) = &bench.peers.fio {
        add("fio", fio.version.clone());
    }
    if let Some(go) = &bench.peers.go {
        add("go-qcow2reader", go.version.clone());
    }
    if let Some(it) = &bench.peers.qcow2_rs {
        add("qcow2-rs", it.version.clone());
    }
    let rules = bench.rules();
    add("runs of each cell", rules.runs.to_string());
    add("size of images", units::size(bench.size()));
    if let Some(seconds) = bench.options.seconds {
        add("seconds of a run, where free", seconds.to_string());
    }
    let cache = if bench.options.cold {
        "dropped before each run"
    } else {
        "read before each run"
    };
    add("inputs in the page cache", cache.into());
    facts
}

fn title(name: &str, about: &str) -> String {
    format!("{name}: {about}")
}
