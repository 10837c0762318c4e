//! P6: images served over vhost-user, against qemu-storage-daemon.

use super::Experiment;
use super::requests::probe;
use super::servers::{self, Row, Served, place};
use crate::bench::Bench;
use crate::error::{Error, Result};
use crate::measure::child::command;
use crate::measure::meter::Meter;
use crate::measure::served::served;
use crate::measure::{Cell, Contender, Series};
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
    cached: bool,
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
            "{}: {} {what}, {} in flight",
            place(self.cached),
            units::size(self.block),
            self.depth
        )
    }

    fn writes(self) -> bool {
        self.what.ends_with("write")
    }
}

const fn task(what: &'static str, block: u64, depth: u64) -> Task {
    Task {
        what,
        block,
        depth,
        cached: false,
    }
}

const fn cached(what: &'static str, block: u64, depth: u64) -> Task {
    Task {
        cached: true,
        ..task(what, block, depth)
    }
}

const TASKS: [Task; 12] = [
    task("randread", 4 * KIB, 1),
    task("randread", 4 * KIB, 32),
    task("read", MIB, 8),
    task("randwrite", 4 * KIB, 1),
    task("randwrite", 4 * KIB, 32),
    task("write", MIB, 8),
    cached("randread", 4 * KIB, 1),
    cached("randread", 4 * KIB, 32),
    cached("read", MIB, 8),
    cached("randwrite", 4 * KIB, 1),
    cached("randwrite", 4 * KIB, 32),
    cached("write", MIB, 8),
];

/// One of QEMU's ways: the engine, and the options of its I/O thread, if it has one.
type Way = (&'static str, Option<&'static str>);

/// An I/O thread that polls for longer than its 32 µs.
const POLLS_LONG: Option<&str> = Some(",poll-max-ns=100000");

/// Past the page cache.
const WAYS: [Way; 4] = [
    ("native", Some("")),
    ("io_uring", Some("")),
    ("io_uring", None),
    ("native", POLLS_LONG),
];

/// In the page cache, where native AIO cannot be.
const CACHED_WAYS: [Way; 4] = [
    ("threads", Some("")),
    ("io_uring", Some("")),
    ("io_uring", None),
    ("io_uring", POLLS_LONG),
];

fn ways(task: Task) -> &'static [Way] {
    match task.cached {
        true => &CACHED_WAYS,
        false => &WAYS,
    }
}

struct Ground<'a> {
    bench: &'a Bench,
    served: [Served; 2],
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
             of the server and has the same processors. A full qcow2 image: rows of the device have \
             one of {}, past the page cache; rows of the page cache one of {} that lies there, in \
             the default cache mode: they tell what the server itself costs. Each run starts a server, waits for its socket, runs the client, and ends the \
             server; the client's own clock counts. zebu has its default engine, QEMU the best of \
             native AIO and io_uring in an iothread (which polls, as is its default, for 32 µs at \
             most, or for 100 µs), io_uring in the main loop, and in the page cache threads instead of native AIO (with `--quick` what a probe \
             finds best). CPU is that of the server alone.",
            units::size(ground.served[0].size),
            units::size(ground.served[1].size)
        ));
        let writes = bench.writes(&ground.served[0].image);
        if !writes {
            section.note("writes are left out: --writes never is given");
        }
        let quick = bench.options.quick;
        let tasks = TASKS
            .into_iter()
            .filter(|t| writes || !t.writes())
            .filter(|t| !(quick && t.cached && t.block == MIB));
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
        served: Served::both(bench)?,
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
    let (first, seconds) = servers::duration(bench, task.cached, task.block, task.depth);
    let probed = probe(bench, first, task.depth, u64::MAX / 2, seconds, &make)?;
    let mut contenders = make(probed.count);
    if quick {
        let ways = ways(task).len();
        let best = (1..ways).fold(0, |best, way| probed.quicker(best, way));
        let mut way = 0;
        contenders.retain(|_| {
            way += 1;
            way - 1 == best || way > ways
        });
    }
    let cell = Cell {
        contenders,
        inputs: ground.served[usize::from(task.cached)].inputs(),
        judge: None,
    };
    let all = servers::alternate(bench, task.depth, &cell);
    let _ = std::fs::remove_file(&ground.socket);
    Some((probed.count, all))
}

/// qemu-storage-daemon in each of its [`ways`], then zebu.
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
    let image = &ground.served[usize::from(task.cached)].image;
    let (cache, direct) = match task.cached {
        true => ("writeback", "off"),
        false => ("none", "on"),
    };
    let file = image.display();
    let socket = ground.socket.display();
    let mut all: Vec<Contender> = ways(task)
        .iter()
        .map(|(engine, thread)| {
            let options = thread.unwrap_or_default();
            let with = thread.map_or("", |_| ",iothread=t");
            let mut server = command([ground.daemon.as_os_str()]);
            server.extend(
                [
                    "--object".into(),
                    format!("iothread,id=t{options}"),
                    "--blockdev".into(),
                    format!(
                        "driver=file,node-name=f,cache.direct={direct},aio={engine},filename={file}"
                    ),
                    "--blockdev".into(),
                    format!("driver=qcow2,node-name=q,file=f,cache.direct={direct}"),
                    "--export".into(),
                    format!(
                        "type=vhost-user-blk,id=e,node-name=q,writable=on,addr.type=unix,\
                         addr.path={socket}{with}"
                    ),
                ]
                .map(|word: String| word.into()),
            );
            one("QEMU", format!("aio={engine}{with}{options}"), server)
        })
        .collect();
    let mut server = command([ground.bench.zebu.as_os_str()]);
    server.extend(
        [
            "vhost-user-blk",
            "-f",
            "qcow2",
            "--cache",
            cache,
            "--socket-path",
        ]
        .map(OsString::from),
    );
    server.push(ground.socket.clone().into());
    server.push(image.into());
    all.push(one("zebu", String::new(), server));
    all
}
