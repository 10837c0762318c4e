//! fio on the raw file: the limit that the device and the engine set.

use super::on_path;
use crate::measure::Contender;
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
    /// Number of requests. The job starts again at the front when it reaches the end.
    pub count: u64,
    /// The file.
    pub file: &'a Path,
    /// Bytes of the file that are used.
    pub size: u64,
}

/// Looks for fio on PATH.
pub fn find() -> Option<Fio> {
    let program = on_path("fio")?;
    let version = said(&program.to_string_lossy(), &["--version"]);
    Some(Fio { program, version })
}

impl Fio {
    /// The job as a contender named `fio`.
    pub fn contender(&self, job: &Job<'_>) -> Contender {
        let mut line = command([self.program.as_os_str()]);
        line.extend(arguments(job).into_iter().map(Into::into));
        line.push(format!("--filename={}", job.file.display()).into());
        Contender {
            name: "fio".into(),
            flags: String::new(),
            command: line,
            meter: Meter::Fio,
            output: None,
        }
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
    match job.engine {
        "native" => args.push("--ioengine=libaio".into()),
        "io_uring" => args.push("--ioengine=io_uring".into()),
        // A pool of threads that each do one blocking request, as QEMU's: fio's offload mode.
        _ => args.extend(["--ioengine=psync".into(), "--io_submit_mode=offload".into()]),
    }
    let how = match (job.random, job.write) {
        (true, false) => "randread",
        (true, true) => "randwrite",
        (false, false) => "read",
        (false, true) => "write",
    };
    args.push(format!("--rw={how}"));
    args.push(format!("--bs={}", job.block));
    args.push(format!("--iodepth={}", job.depth));
    args.push(format!("--size={}", job.size));
    args.push(format!("--io_size={}", job.count * job.block));
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
            size: 1 << 20,
        };
        let args = arguments(&job);
        for want in [
            "--ioengine=libaio",
            "--rw=randread",
            "--iodepth=32",
            "--io_size=4096000",
        ] {
            assert!(args.iter().any(|a| a == want), "{want} in {args:?}");
        }
        let pool = arguments(&Job {
            engine: "threads",
            ..job
        });
        assert!(pool.iter().any(|a| a == "--io_submit_mode=offload"));
    }
}
