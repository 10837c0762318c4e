//! What the driver of a virtual machine's disk does, for measurements: asks a vhost-user-blk server
//! for requests of one kind, keeping so many in flight, and prints how many seconds they took.
//!
//! usage: zebu-vhost-load SOCKET randread|randwrite BYTES DEPTH COUNT

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use zebu_vhost::front_end::{Machine, Ring, Setup};

const READ: u32 = 0;
const WRITE: u32 = 1;
const SECTOR: u64 = 512;
/// A server that answers nothing for so long has failed.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The requests, and where the next one is.
struct Load {
    kind: u32,
    bytes: u64,
    depth: u16,
    count: u64,
    blocks: u64,
    random: u64,
}

fn main() -> ExitCode {
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(seconds) => {
            println!("Run completed in {seconds:.6} seconds.");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("zebu-vhost-load: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<f64, String> {
    let [socket, kind, bytes, depth, count] = arguments else {
        return Err("usage: SOCKET randread|randwrite BYTES DEPTH COUNT".into());
    };
    let number = |text: &String| {
        text.parse::<u64>()
            .map_err(|_| format!("not a number: {text}"))
    };
    let load = Load {
        kind: if kind == "randwrite" { WRITE } else { READ },
        bytes: number(bytes)?,
        depth: number(depth)?.clamp(1, 128) as u16,
        count: number(count)?,
        blocks: 1,
        random: 0x9e37_79b9_7f4a_7c15,
    };
    drive(Path::new(socket), load).map_err(|e| e.to_string())
}

fn drive(socket: &Path, mut load: Load) -> std::io::Result<f64> {
    let setup = Setup {
        slots: load.depth,
        bytes: load.bytes,
        ..Setup::default()
    };
    let mut machine = Machine::new(setup)?;
    let mut connection = machine.connect(socket)?;
    let sectors = connection.config(0, 8)?;
    let sectors = u64::from_le_bytes(sectors.try_into().expect("8 bytes"));
    load.blocks = (sectors * SECTOR / load.bytes).max(1);
    let mut ring = machine.ring(0)?;
    connection.start(&ring)?;
    let start = Instant::now();
    let (mut submitted, mut completed) = (u64::from(load.depth).min(load.count), 0);
    (0..submitted as u16).for_each(|slot| load.submit(&mut ring, slot));
    ring.kick(submitted as u16)?;
    while completed < load.count {
        if !ring.wait(TIMEOUT)? {
            return Err(std::io::Error::other("no answer"));
        }
        let mut new = 0;
        while let Some((slot, status)) = ring.slot_answer() {
            if status != 0 {
                return Err(std::io::Error::other(format!("status {status}")));
            }
            completed += 1;
            if submitted < load.count {
                load.submit(&mut ring, slot);
                submitted += 1;
                new += 1;
            }
        }
        if new > 0 {
            ring.kick(new)?;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    connection.stop(&ring)?;
    Ok(seconds)
}

impl Load {
    fn submit(&mut self, ring: &mut Ring, slot: u16) {
        // xorshift.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let sector = self.random % self.blocks * (self.bytes / SECTOR);
        let segment = (self.bytes, self.kind == READ);
        ring.request(slot, self.kind, sector, segment, &[self.bytes]);
    }
}
