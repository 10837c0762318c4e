//! fio on the raw file: the limit that the device and the engine set.

use super::on_path;
use crate::measure::Program;
use crate::measure::child::command;
use crate::measure::meter::Meter;
use crate::report::machine::said;
use std::path::{Path, PathBuf};

/// fio.
#[derive(Debug, Clone)]
pub struct Fio {
    /// The program.
    pub program: PathBuf,
    /// What it says of its version.
    pub version: String,
}

/// One job: the same requests as a `bench` has.
#[derive(Debug, Clone)]
pub struct Job<'a> {
    /// The engine by QEMU's name: threads, native, io_uring.
    pub engine: &'a str,
    /// Random offsets, or one after the other.
    pub random: bool,
    /// Writes, or reads.
    pub write: bool,
    /// Bytes of a request.
    pub block: u64,
    /// Requests in flight.
    pub depth: u32,
    /// Number of requests, a multiple of `depth`. The job starts again at the front when it reaches the end.
    pub count: u64,
    /// The file.
    pub file: &'a Path,
    /// Where the bytes that are used begin, and how many they are.
    pub start: u64,
    /// See `start`.
    pub size: u64,
}

/// Looks for fio on PATH.
pub fn find() -> Option<Fio> {
    let program = on_path("fio")?;
    let version = said(&program.to_string_lossy(), &["--version"]);
    Some(Fio { program, version })
}

impl Fio {
    /// The job as a program named `fio`.
    pub fn run(&self, job: &Job<'_>) -> Program {
        let mut line = command([self.program.as_os_str()]);
        line.extend(arguments(job).into_iter().map(Into::into));
        line.push(format!("--filename={}", job.file.display()).into());
        Program::new("fio", "", line, Meter::Fio)
    }
}

fn arguments(job: &Job<'_>) -> Vec<String> {
    let mut args: Vec<String> = [
        "--name=limit",
        "--thread",
        "--direct=1",
        "--norandommap",
        "--output-format=json",
    ]
    .map(String::from)
    .to_vec();
    let how = match (job.random, job.write) {
        (true, false) => "randread",
        (true, true) => "randwrite",
        (false, false) => "read",
        (false, true) => "write",
    };
    // Threads: as many blocking requests as threads. fio's offload mode, a pool with a queue as
    // QEMU's, would be nearer, but in fio 3.33 it loses a wake-up now and then and hangs.
    let jobs = match job.engine {
        "native" | "io_uring" => 1,
        _ => u64::from(job.depth),
    };
    match job.engine {
        "native" => args.push("--ioengine=libaio".into()),
        "io_uring" => args.push("--ioengine=io_uring".into()),
        _ => args.push("--ioengine=psync".into()),
    }
    if jobs > 1 {
        args.push(format!("--numjobs={jobs}"));
        args.push("--group_reporting".into());
    } else {
        args.push(format!("--iodepth={}", job.depth));
    }
    if jobs > 1 && !job.random {
        // Each thread takes every n-th block, so that together they go through the file in order.
        args.push(format!("--rw={how}:{}", (jobs - 1) * job.block));
        args.push(format!("--offset_increment={}", job.block));
        // No thread may pass the end of the file, or fio makes it longer.
        let size = job.size - (jobs - 1) * job.block;
        args.push(format!("--size={size}"));
    } else {
        args.push(format!("--rw={how}"));
        args.push(format!("--size={}", job.size));
    }
    args.push(format!("--offset={}", job.start));
    args.push(format!("--bs={}", job.block));
    args.push(format!("--io_size={}", job.count / jobs * job.block));
    if job.write {
        // What is written must not end in a sync that bench does not do.
        args.extend([
            "--end_fsync=0".into(),
            "--fallocate=none".into(),
            "--overwrite=1".into(),
        ]);
    }
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_the_same_requests() {
        let job = Job {
            engine: "native",
            random: true,
            write: false,
            block: 4096,
            depth: 32,
            count: 1000,
            file: Path::new("x"),
            start: 65536,
            size: 1 << 20,
        };
        let has = |args: &[String], wanted: &str| args.iter().any(|a| a == wanted);
        let args = arguments(&job);
        for wanted in [
            "--ioengine=libaio",
            "--rw=randread",
            "--iodepth=32",
            "--io_size=4096000",
        ] {
            assert!(has(&args, wanted), "{wanted} in {args:?}");
        }
        let engine = "threads";
        let in_order = arguments(&Job {
            engine,
            random: false,
            ..job.clone()
        });
        assert!(has(&in_order, "--rw=read:126976") && has(&in_order, "--size=921600"));
        let pool = arguments(&Job { engine, ..job });
        assert!(has(&pool, "--numjobs=32") && has(&pool, "--io_size=126976"));
    }
}
