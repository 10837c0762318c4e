//! P6: images served over NBD, against qemu-nbd.

use super::Experiment;
use super::requests::probe;
use super::servers::{self, Row, Served, place};
use crate::bench::Bench;
use crate::error::{Error, Result};
use crate::measure::child::{self, command};
use crate::measure::meter::Meter;
use crate::measure::served::served;
use crate::measure::{Cell, Contender, Series};
use crate::report::Section;
use crate::units::{self, KIB, MIB};
use std::ffi::OsString;
use std::path::PathBuf;

/// The experiment `nbd`.
pub struct Nbd;

/// What a cell measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Task {
    block: u64,
    random: bool,
    write: bool,
    depth: u64,
    connections: u64,
    cached: bool,
}

impl Task {
    fn label(self) -> String {
        format!(
            "{}: {} {} {}, {} in flight on {} connection{}",
            place(self.cached),
            units::size(self.block),
            if self.random { "random" } else { "sequential" },
            if self.write { "writes" } else { "reads" },
            self.depth,
            self.connections,
            if self.connections == 1 { "" } else { "s" }
        )
    }

    /// How many times as fast as qemu-nbd it is to be.
    fn target(self) -> f64 {
        if self.random && self.depth > 1 {
            1.5
        } else {
            1.2
        }
    }
}

/// Everything that is measured; with `--quick` not several connections with one request each, and
/// in the page cache only 4 KiB on one connection.
fn tasks(quick: bool) -> Vec<Task> {
    let mut all = Vec::new();
    for (cached, write) in [(false, false), (false, true), (true, false), (true, true)] {
        let small = [(1, 1), (1, 4), (32, 1), (32, 4)];
        let small = small.map(|(depth, connections)| (4 * KIB, depth, connections));
        for (block, depth, connections) in small.into_iter().chain([(MIB, 8, 1)]) {
            let is_left_out =
                (depth, connections) == (1, 4) || cached && (connections > 1 || block == MIB);
            if quick && is_left_out {
                continue;
            }
            all.push(Task {
                block,
                random: block < MIB,
                write,
                depth,
                connections,
                cached,
            });
        }
    }
    all
}

struct Ground<'a> {
    bench: &'a Bench,
    served: [Served; 2],
    fio: PathBuf,
    qemu_nbd: PathBuf,
    socket: PathBuf,
}

impl Ground<'_> {
    fn served(&self, task: Task) -> &Served {
        &self.served[usize::from(task.cached)]
    }
}

impl Experiment for Nbd {
    fn name(&self) -> &'static str {
        "nbd"
    }

    fn about(&self) -> &'static str {
        "an image served over NBD, fio's nbd engine, against qemu-nbd (P6)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let ground = ground(bench)?;
        section.method(format!(
            "fio's nbd engine (libnbd) on a unix socket; `-e 8`, a full qcow2 image. Rows of the \
             device have one of {}, `--cache=none`; rows of the page cache one of {} that lies there, \
             in the default cache mode: they tell what the server itself costs. Each run starts a server, waits for its socket, runs fio, and ends the server; fio's own \
             clock counts. Each connection is a thread of fio with so many requests in flight. zebu \
             has its default engine, QEMU the better of `--aio=native` (in the page cache \
             `--aio=threads`) and `--aio=io_uring` (with `--quick` the one that a probe finds better). CPU is that of the server alone: fio has \
             the same processors, and where it is busy all the time the rate is its limit, not the \
             server's.",
            units::size(ground.served[0].size),
            units::size(ground.served[1].size)
        ));
        let writes = bench.writes(&ground.served[0].image);
        if !writes {
            section.note("writes are left out: --writes never is given");
        }
        let tasks = tasks(bench.options.quick)
            .into_iter()
            .filter(|t| writes || !t.write);
        let rows = tasks.map(|task| Row {
            label: task.label(),
            target: task.target(),
            measured: measure(&ground, task),
        });
        servers::table(section, "NBD", "qemu-nbd", rows);
        Ok(())
    }
}

fn ground(bench: &Bench) -> Result<Ground<'_>> {
    let fio = bench.peers.fio.as_ref().map(|fio| fio.program.clone());
    let fio = fio.ok_or_else(|| Error::new("it needs fio"))?;
    let engines = child::run(
        &command([fio.as_os_str(), "--enghelp".as_ref()]),
        &bench.scratch(),
    )?;
    if !engines.stdout.contains("nbd") {
        return Err(Error::new("this fio has no nbd engine"));
    }
    let qemu_nbd = bench.peers.qemu.img.with_file_name("qemu-nbd");
    if !qemu_nbd.is_file() {
        return Err(Error::new("there is no qemu-nbd beside qemu-img"));
    }
    Ok(Ground {
        bench,
        served: Served::both(bench)?,
        fio,
        qemu_nbd,
        // Paths of sockets are short.
        socket: std::env::temp_dir().join(format!("zebu-bench-{}.sock", std::process::id())),
    })
}

/// How many requests a run has, and what came out.
fn measure(ground: &Ground<'_>, task: Task) -> Option<(u64, Vec<Series>)> {
    let bench = ground.bench;
    let quick = bench.options.quick;
    let make = |count| contenders(ground, task, count);
    let step = task.depth * task.connections;
    let (first, seconds) = servers::duration(bench, task.cached, task.block, task.depth);
    let probed = probe(bench, first, step, u64::MAX / 2, seconds, &make)?;
    let mut contenders = make(probed.count);
    if quick {
        let slower = 1 - probed.quicker(0, 1);
        contenders.remove(slower);
    }
    let cell = Cell {
        contenders,
        inputs: ground.served(task).inputs(),
        judge: None,
    };
    let all = servers::alternate(bench, task.depth, &cell);
    let _ = std::fs::remove_file(&ground.socket);
    Some((probed.count, all))
}

/// qemu-nbd with each of its engines, then zebu.
fn contenders(ground: &Ground<'_>, task: Task, count: u64) -> Vec<Contender> {
    let client = fio(ground, task, count);
    let served_image = ground.served(task);
    let cache = if task.cached { "writeback" } else { "none" };
    let one = |name: &str, program: &[OsString], flags: &str| {
        let mut server = program.to_vec();
        let common = format!("-t -e 8 -f qcow2 --cache={cache} -k");
        server.extend(common.split(' ').map(Into::into));
        server.push(ground.socket.clone().into());
        server.extend(flags.split_whitespace().map(Into::into));
        server.push(served_image.image.clone().into());
        let line = served(&server, &ground.socket, &client);
        Contender::new(name, flags, line, Meter::Served)
    };
    let qemu = command([ground.qemu_nbd.as_os_str()]);
    let zebu = command([ground.bench.zebu.as_os_str(), "nbd".as_ref()]);
    let aio = match task.cached {
        true => "--aio=threads",
        false => "--aio=native",
    };
    vec![
        one("QEMU", &qemu, aio),
        one("QEMU", &qemu, "--aio=io_uring"),
        one("zebu", &zebu, ""),
    ]
}

fn fio(ground: &Ground<'_>, task: Task, count: u64) -> Vec<OsString> {
    let how = match (task.random, task.write) {
        (true, false) => "randread",
        (true, true) => "randwrite",
        (false, false) => "read",
        (false, true) => "write",
    };
    let mut line = command([ground.fio.as_os_str()]);
    let uri = format!("nbd+unix:///?socket={}", ground.socket.display());
    line.extend(
        [
            "--name=nbd".into(),
            "--ioengine=nbd".into(),
            format!("--uri={uri}"),
            format!("--rw={how}"),
            format!("--bs={}", task.block),
            format!("--iodepth={}", task.depth),
            format!("--numjobs={}", task.connections),
            format!("--size={}", ground.served(task).size),
            format!("--io_size={}", count / task.connections * task.block),
            "--group_reporting".into(),
            "--norandommap".into(),
            "--thread".into(),
            "--output-format=json".into(),
        ]
        .map(OsString::from),
    );
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_request_has_its_target() {
        let all = tasks(false);
        assert_eq!(all.len(), 20);
        for task in all {
            let wanted = match (task.random, task.depth) {
                (true, 32) => 1.5,
                _ => 1.2,
            };
            assert_eq!(task.target(), wanted, "{}", task.label());
        }
    }
}
