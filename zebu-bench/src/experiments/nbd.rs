//! P6: images served over NBD, against qemu-nbd.

use super::Experiment;
use super::served::{self, BLOCK, Task};
use crate::bench::Bench;
use crate::error::{Error, Result};
use crate::measure::Program;
use crate::measure::child::{self, command};
use crate::measure::meter::Meter;
use crate::measure::served::served as with_server;
use crate::results::{self, Group, Ratio, Scale, Unit};
use std::ffi::OsString;
use std::path::Path;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "nbd",
    title: "Served over NBD",
    run,
};

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    to.about = "fio's nbd engine on a unix socket, 4 KiB at random, one connection; a full \
                qcow2 image, past the page cache or in it. QEMU is qemu-nbd."
        .into();
    let fio = bench.peers.fio.as_ref().map(|fio| fio.program.clone());
    let fio = fio.ok_or_else(|| Error::new("it needs fio"))?;
    let engines = command([fio.as_os_str(), "--enghelp".as_ref()]);
    if !child::run(&engines, &bench.scratch())?
        .stdout
        .contains("nbd")
    {
        return Err(Error::new("this fio has no nbd engine"));
    }
    let qemu_nbd = bench.peers.qemu.img.with_file_name("qemu-nbd");
    if !qemu_nbd.is_file() {
        return Err(Error::new("there is no qemu-nbd beside qemu-img"));
    }
    let socket = served::socket();
    let make = |task: &Task, count| programs(bench, [&fio, &qemu_nbd, &socket], task, count);
    let title = "NBD, 4 KiB at random";
    let mut group = Group::new(title, Unit::Requests, Ratio::Speed).drawn(Scale::Relative);
    let floor = |depth| Some(if depth == 1 { 1.2 } else { 1.5 });
    let outcome = served::rows(bench, to, &mut group, &floor, &make);
    let _ = std::fs::remove_file(&socket);
    to.groups.push(group);
    outcome
}

/// qemu-nbd with each of its engines, then zebu as it comes.
fn programs(
    bench: &Bench,
    [fio, qemu_nbd, socket]: [&Path; 3],
    task: &Task,
    count: u64,
) -> Vec<Program> {
    let client = client(fio, socket, task, count);
    let cache = if task.cached { "writeback" } else { "none" };
    let one = |name: &str, program: &[OsString], flags: &str| {
        let mut server = program.to_vec();
        let common = format!("-t -e 8 -f qcow2 --cache={cache} {flags} -k");
        server.extend(common.split_whitespace().map(Into::into));
        server.push(socket.into());
        server.push(task.image.clone().into());
        let line = with_server(&server, socket, &client);
        Program::new(name, flags, line, Meter::Client)
    };
    let qemu = command([qemu_nbd]);
    let zebu = command([bench.zebu.as_os_str(), "nbd".as_ref()]);
    let aio = if task.cached {
        "--aio=threads"
    } else {
        "--aio=native"
    };
    vec![
        one("QEMU", &qemu, aio),
        one("QEMU", &qemu, "--aio=io_uring"),
        one("zebu", &zebu, ""),
    ]
}

fn client(fio: &Path, socket: &Path, task: &Task, count: u64) -> Vec<OsString> {
    let mut line = command([fio]);
    line.extend(
        [
            "--name=nbd".into(),
            "--ioengine=nbd".into(),
            format!("--uri=nbd+unix:///?socket={}", socket.display()),
            format!("--rw={}", if task.write { "randwrite" } else { "randread" }),
            format!("--bs={BLOCK}"),
            format!("--iodepth={}", task.depth),
            format!("--size={}", task.size),
            format!("--io_size={}", count * BLOCK),
            "--norandommap".into(),
            "--thread".into(),
            "--output-format=json".into(),
        ]
        .map(OsString::from),
    );
    line
}
