//! Images served over vhost-user-blk, against qemu-storage-daemon.

use super::Experiment;
use super::served::{self, BLOCK, Task};
use crate::bench::Bench;
use crate::error::{Error, Result};
use crate::measure::Program;
use crate::measure::child::command;
use crate::measure::meter::Meter;
use crate::measure::served::served as with_server;
use crate::results::{self, Group, Ratio, Unit};
use std::ffi::OsString;
use std::path::Path;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "vhost",
    title: "Served over vhost-user-blk",
    run,
};

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    to.about = "A client that does what a virtual machine's driver does, without the machine: \
                one virtqueue, 4 KiB at random. QEMU is qemu-storage-daemon, with an iothread \
                or without."
        .into();
    let daemon = bench.peers.qemu.img.with_file_name("qemu-storage-daemon");
    let load = bench.own_program("zebu-vhost-load")?;
    for program in [&daemon, &load] {
        if !program.is_file() {
            return Err(Error::new(format!("there is no {}", program.display())));
        }
    }
    let socket = served::socket();
    let make = |task: &Task, count| programs(bench, [&daemon, &load, &socket], task, count);
    let title = "vhost-user-blk, 4 KiB at random";
    let mut group = Group::new(title, Unit::Requests, Ratio::Speed);
    let outcome = served::rows(bench, to, &mut group, &|_| None, &make);
    let _ = std::fs::remove_file(&socket);
    to.groups.push(group);
    outcome
}

/// QEMU's engine, and whether an iothread serves; one polls for 32 µs at most.
const DIRECT: [(&str, bool); 3] = [("native", true), ("io_uring", true), ("io_uring", false)];
/// In the page cache, where native AIO cannot be.
const CACHED: [(&str, bool); 3] = [("threads", true), ("io_uring", true), ("io_uring", false)];

/// qemu-storage-daemon in each way, then zebu as it comes.
fn programs(
    bench: &Bench,
    [daemon, load, socket]: [&Path; 3],
    task: &Task,
    count: u64,
) -> Vec<Program> {
    let mut client = command([load, socket]);
    let kind = if task.write { "randwrite" } else { "randread" };
    let (block, depth, count) = (BLOCK.to_string(), task.depth.to_string(), count.to_string());
    client.extend([kind, &block, &depth, &count].map(OsString::from));
    let one = |name: &str, flags: &str, server: Vec<OsString>| {
        let line = with_server(&server, socket, &client);
        Program::new(name, flags, line, Meter::Client)
    };
    let (cache, direct, ways) = match task.cached {
        true => ("writeback", "off", &CACHED),
        false => ("none", "on", &DIRECT),
    };
    let (file, listen) = (task.image.display(), socket.display());
    let mut all: Vec<Program> = (ways.iter())
        .map(|(engine, thread)| {
            let with = if *thread { ",iothread=t" } else { "" };
            let options = [
                "--object".into(),
                "iothread,id=t".into(),
                "--blockdev".into(),
                format!(
                    "driver=file,node-name=f,cache.direct={direct},aio={engine},filename={file}"
                ),
                "--blockdev".into(),
                format!("driver=qcow2,node-name=q,file=f,cache.direct={direct}"),
                "--export".into(),
                format!(
                    "type=vhost-user-blk,id=e,node-name=q,writable=on,addr.type=unix,\
                     addr.path={listen}{with}"
                ),
            ];
            let mut server = command([daemon]);
            server.extend(options.map(OsString::from));
            one("QEMU", &format!("aio={engine}{with}"), server)
        })
        .collect();
    let mut server = command([bench.zebu.as_os_str(), "vhost-user-blk".as_ref()]);
    server.extend(command(["-f", "qcow2", "--cache", cache, "--socket-path"]));
    server.push(socket.into());
    server.push(task.image.clone().into());
    all.push(one("zebu", "", server));
    all
}
