//! P6: images served over vhost-user, against qemu-storage-daemon.

use super::Experiment;
use super::requests::probe;
use super::servers::{self, Row};
use crate::bench::Bench;
use crate::error::{Error, Result};
use crate::inputs::filled;
use crate::measure::alternate::Rules;
use crate::measure::child::command;
use crate::measure::meter::Meter;
use crate::measure::served::served;
use crate::measure::{Cell, Contender, Series, alternate};
use crate::report::Section;
use crate::units::{self, KIB, MIB};
use std::ffi::OsString;
use std::path::PathBuf;

/// The experiment `vhost`.
pub struct Vhost;

/// How many times as fast as qemu-storage-daemon it is to be.
const TARGET: f64 = 1.2;

/// What a cell measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Task {
    what: &'static str,
    block: u64,
    depth: u64,
}

impl Task {
    fn label(self) -> String {
        let what = match self.what {
            "randread" => "random reads",
            "randwrite" => "random writes",
            "read" => "sequential reads",
            _ => "sequential writes",
        };
        format!(
            "{} {what}, {} in flight",
            units::size(self.block),
            self.depth
        )
    }

    fn writes(self) -> bool {
        self.what.ends_with("write")
    }
}

const fn task(what: &'static str, block: u64, depth: u64) -> Task {
    Task { what, block, depth }
}

const TASKS: [Task; 6] = [
    task("randread", 4 * KIB, 1),
    task("randread", 4 * KIB, 32),
    task("read", MIB, 8),
    task("randwrite", 4 * KIB, 1),
    task("randwrite", 4 * KIB, 32),
    task("write", MIB, 8),
];

/// QEMU's ways: the engine, and whether it has a thread of its own.
const WAYS: [(&str, bool); 3] = [("native", true), ("io_uring", true), ("io_uring", false)];

struct Ground<'a> {
    bench: &'a Bench,
    image: PathBuf,
    daemon: PathBuf,
    load: PathBuf,
    socket: PathBuf,
}

impl Experiment for Vhost {
    fn name(&self) -> &'static str {
        "vhost"
    }

    fn about(&self) -> &'static str {
        "an image served over vhost-user-blk, against qemu-storage-daemon (P6)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let ground = ground(bench)?;
        section.method(format!(
            "A virtual machine's side of vhost-user-blk without the machine, `zebu-vhost-load`: one \
             virtqueue of 128 descriptors, event index, indirect descriptors. It waits for the event \
             of the server and has the same processors. A full qcow2 image of {}, past the page \
             cache. Each run starts a server, waits for its socket, runs the client, and ends the \
             server; the client's own clock counts. zebu has its default engine, QEMU the best of \
             native AIO and io_uring in an iothread (which polls, as is its default) and io_uring \
             in the main loop (with `--quick` what a probe finds best). CPU is that of the server \
             alone.",
            units::size(bench.filled_size())
        ));
        let writes = bench.writes(&ground.image);
        if !writes {
            section.note("writes are left out: --writes never is given");
        }
        let tasks = TASKS.into_iter().filter(|t| writes || !t.writes());
        let rows = tasks.map(|task| Row {
            label: task.label(),
            target: TARGET,
            measured: measure(&ground, task),
        });
        servers::table(section, "vhost-user-blk", "qemu-storage-daemon", rows);
        Ok(())
    }
}

fn ground(bench: &Bench) -> Result<Ground<'_>> {
    let daemon = bench.peers.qemu.img.with_file_name("qemu-storage-daemon");
    if !daemon.is_file() {
        return Err(Error::new(
            "there is no qemu-storage-daemon beside qemu-img",
        ));
    }
    let own =
        std::env::current_exe().map_err(|e| Error::new(format!("no path of its own: {e}")))?;
    let load = own.with_file_name("zebu-vhost-load");
    if !load.is_file() {
        return Err(Error::new("there is no zebu-vhost-load beside zebu-bench"));
    }
    Ok(Ground {
        bench,
        image: filled::qcow2(bench, bench.filled_size())?,
        daemon,
        load,
        // Paths of sockets are short.
        socket: std::env::temp_dir().join(format!("zebu-bench-{}.sock", std::process::id())),
    })
}

/// How many requests a run has, and what came out.
fn measure(ground: &Ground<'_>, task: Task) -> Option<(u64, Vec<Series>)> {
    let bench = ground.bench;
    let quick = bench.options.quick;
    let make = |count| contenders(ground, task, count);
    let first = match task.block {
        MIB => 128,
        _ => 1000 * task.depth.min(16),
    };
    let seconds = if quick { 0.3 } else { 2.0 };
    let probed = probe(bench, first, task.depth, u64::MAX / 2, seconds, &make)?;
    let mut contenders = make(probed.count);
    if quick {
        let best = (1..WAYS.len()).fold(0, |best, way| probed.quicker(best, way));
        let mut way = 0;
        contenders.retain(|_| {
            way += 1;
            way - 1 == best || way > WAYS.len()
        });
    }
    let rules = bench.rules();
    let runs = match bench.options.runs {
        None if quick => 3,
        _ => rules.runs,
    };
    let cell = Cell {
        contenders,
        inputs: vec![],
        judge: None,
    };
    let all = alternate(&Rules { runs, ..rules }, &cell);
    let _ = std::fs::remove_file(&ground.socket);
    Some((probed.count, all))
}

/// qemu-storage-daemon in each of its [`WAYS`], then zebu.
fn contenders(ground: &Ground<'_>, task: Task, count: u64) -> Vec<Contender> {
    let mut client = command([ground.load.as_os_str(), ground.socket.as_os_str()]);
    client.extend(
        [
            task.what.into(),
            task.block.to_string(),
            task.depth.to_string(),
            count.to_string(),
        ]
        .map(|word: String| word.into()),
    );
    let one = |name: &str, flags: String, server: Vec<OsString>| {
        let line = served(&server, &ground.socket, &client);
        Contender::new(name, &flags, line, Meter::Served)
    };
    let image = ground.image.display();
    let socket = ground.socket.display();
    let mut all: Vec<Contender> = WAYS
        .iter()
        .map(|(engine, thread)| {
            let with = if *thread { ",iothread=t" } else { "" };
            let mut server = command([ground.daemon.as_os_str()]);
            server.extend(
                [
                    "--object".into(),
                    "iothread,id=t".into(),
                    "--blockdev".into(),
                    format!(
                        "driver=file,node-name=f,cache.direct=on,aio={engine},filename={image}"
                    ),
                    "--blockdev".into(),
                    "driver=qcow2,node-name=q,file=f,cache.direct=on".into(),
                    "--export".into(),
                    format!(
                        "type=vhost-user-blk,id=e,node-name=q,writable=on,addr.type=unix,\
                         addr.path={socket}{with}"
                    ),
                ]
                .map(|word: String| word.into()),
            );
            one("QEMU", format!("aio={engine}{with}"), server)
        })
        .collect();
    let mut server = command([ground.bench.zebu.as_os_str()]);
    server.extend(
        [
            "vhost-user-blk",
            "-f",
            "qcow2",
            "--cache=none",
            "--socket-path",
        ]
        .map(OsString::from),
    );
    server.push(ground.socket.clone().into());
    server.push(ground.image.clone().into());
    all.push(one("zebu", String::new(), server));
    all
}
