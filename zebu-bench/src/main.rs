//! The benchmark suite of zebu: every figure is taken side by side with a peer.
//!
//! `zebu-bench run` measures and writes the figures of all runs into one file, `zebu-bench report`
//! makes the page and its charts from that file. [`experiments`] says what is measured, [`inputs`]
//! makes the images, [`peers`] finds the other programs, [`measure`] runs them in turn.

#![deny(unsafe_code)]

mod bench;
mod error;
mod experiments;
mod inputs;
mod measure;
mod options;
mod peers;
mod report;
mod results;
mod units;

use bench::Bench;
use clap::Parser;
use error::{Context, Error, Result};
use options::{Command, Options, Run};
use peers::Peers;
use report::machine;
use results::{Experiment as Measured, Results};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let outcome = match Options::parse().command {
        Command::Run(options) => run(options),
        Command::Report(options) => report::write(&options),
        Command::List => {
            for e in experiments::ALL {
                println!("{:12} {}", e.name, e.title);
            }
            Ok(())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("zebu-bench: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the experiments and saves the results after each, so that an interrupted run leaves what
/// it has.
fn run(options: Run) -> Result<()> {
    let chosen = experiments::named(&options.experiments)?;
    let name = || options.dir.display().to_string();
    std::fs::create_dir_all(&options.dir).context(name)?;
    let dir = options.dir.canonicalize().context(name)?;
    let path = options.results(&dir);
    let mut results = Results::default();
    let peers = Peers::find(&options, &dir.join("peers"), &mut results.notes)?;
    let bench = Bench {
        zebu: zebu(&options)?,
        options,
        dir,
        peers,
    };
    results.machine = facts(&bench);
    let started = Instant::now();
    for experiment in chosen {
        println!("\n{}: {}", experiment.name, experiment.title);
        let mut measured = Measured::new(experiment.name, experiment.title);
        if let Err(e) = (experiment.run)(&bench, &mut measured) {
            measured.note(format!("stopped: {e}"));
        }
        results.experiments.push(measured);
        results.seconds = started.elapsed().as_secs_f64();
        results.save(&path)?;
    }
    println!("\n{:.0} s; results: {}", results.seconds, path.display());
    Ok(())
}

/// The zebu that is named, else the one beside this program.
fn zebu(options: &Run) -> Result<PathBuf> {
    let zebu = match &options.zebu {
        Some(named) => named.clone(),
        None => std::env::current_exe()
            .context(|| "own path".into())?
            .with_file_name("zebu"),
    };
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
    let version = machine::said(&bench.zebu.to_string_lossy(), &["--version"]);
    add("zebu", version);
    add("QEMU", bench.peers.qemu.version.clone());
    let peers = &bench.peers;
    let others = [
        ("fio", peers.fio.as_ref().map(|it| &it.version)),
        ("go-qcow2reader", peers.go.as_ref().map(|it| &it.version)),
        ("imago", peers.imago.as_ref().map(|it| &it.version)),
        ("qcow2-rs", peers.qcow2_rs.as_ref().map(|it| &it.version)),
    ];
    for (name, version) in others {
        if let Some(version) = version {
            add(name, version.clone());
        }
    }
    add("size of the images", units::size(bench.options.size));
    add("runs of each figure", bench.options.runs.to_string());
    facts
}
