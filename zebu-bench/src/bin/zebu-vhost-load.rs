//! A virtual machine's share of a disk's work, for measurements: asks a
//! vhost-user-blk server for requests of one kind, keeping so many in flight,
//! and prints how many seconds they took.
//!
//! usage: zebu-vhost-load SOCKET randread|randwrite|read|write BYTES DEPTH COUNT

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use zebu_vhost::front_end::{Machine, Ring, Setup};

const READ: u32 = 0;
const WRITE: u32 = 1;
const SECTOR: u64 = 512;
/// A server that answers nothing for so long has failed.
const PATIENCE: Duration = Duration::from_secs(30);

struct Load {
    kind: u32,
    random: bool,
    bytes: u64,
    depth: u16,
    count: u64,
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
        return Err("usage: SOCKET randread|randwrite|read|write BYTES DEPTH COUNT".into());
    };
    let number = |text: &String| {
        text.parse::<u64>()
            .map_err(|_| format!("not a number: {text}"))
    };
    let load = Load {
        kind: if kind.ends_with("write") { WRITE } else { READ },
        random: kind.starts_with("rand"),
        bytes: number(bytes)?,
        depth: number(depth)?.clamp(1, 128) as u16,
        count: number(count)?,
    };
    drive(Path::new(socket), &load).map_err(|e| e.to_string())
}

fn drive(socket: &Path, load: &Load) -> std::io::Result<f64> {
    let setup = Setup {
        slots: load.depth,
        bytes: load.bytes,
        ..Setup::default()
    };
    let mut machine = Machine::new(setup)?;
    let mut connection = machine.connect(socket)?;
    let sectors = connection.config(0, 8)?;
    let sectors = u64::from_le_bytes(sectors.try_into().expect("8 bytes"));
    let blocks = (sectors * SECTOR / load.bytes).max(1);
    let mut ring = machine.ring(0)?;
    connection.start(&ring)?;
    let mut place = Places {
        random: load.random,
        blocks,
        state: 0x9e37_79b9_7f4a_7c15,
    };
    let start = Instant::now();
    let mut begun = 0;
    let mut ended = 0;
    for slot in 0..load.depth.min(load.count.min(u64::from(load.depth)) as u16) {
        begin(&mut ring, load, slot, place.next());
        begun += 1;
    }
    ring.kick(begun as u16)?;
    while ended < load.count {
        if !ring.wait(PATIENCE)? {
            return Err(std::io::Error::other("no answer"));
        }
        let mut new = 0;
        while let Some((slot, status)) = ring.slot_answer() {
            if status != 0 {
                return Err(std::io::Error::other(format!("status {status}")));
            }
            ended += 1;
            if begun < load.count {
                begin(&mut ring, load, slot, place.next());
                begun += 1;
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

fn begin(ring: &mut Ring, load: &Load, slot: u16, block: u64) {
    let sector = block * (load.bytes / SECTOR);
    ring.request(
        slot,
        load.kind,
        sector,
        (load.bytes, load.kind == READ),
        &[load.bytes],
    );
}

/// Which block comes next.
struct Places {
    random: bool,
    blocks: u64,
    state: u64,
}

impl Places {
    fn next(&mut self) -> u64 {
        if !self.random {
            self.state = self.state.wrapping_add(1);
            return self.state % self.blocks;
        }
        // xorshift.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state % self.blocks
    }
}
