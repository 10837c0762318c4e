//! What one map step costs inside the library: where a hit finds its L2 slice in the cache, and
//! where a miss has to load it. The suite runs this for the experiment `cache`.
//!
//! `zebu-map-cost IMAGE` prints a line for each case: its name, a tab, nanoseconds.

use std::process::ExitCode;
use std::time::Instant;
use zebu::block::{Device, Format, LayerImage, OpenOptions, Source};
use zebu::image::Image;
use zebu::storage::{CacheMode, Queue, QueueOptions};

/// What a request maps.
const BLOCK: u64 = 4096;
const HITS: u64 = 2_000_000;
const MISSES: u64 = 4_000;
/// Cases are measured so often, in turn; the median counts.
const ROUNDS: usize = 5;

/// One case: how the image is opened and which offsets are looked up.
struct Case {
    name: &'static str,
    cache: CacheMode,
    /// Bytes of L2 tables that are kept.
    l2_cache: u64,
    look_ups: u64,
    places: Places,
}

enum Places {
    /// Scattered over the whole disk.
    All,
    /// Scattered over what one slice maps.
    OneSlice,
}

const CASES: [Case; 4] = [
    Case {
        name: "hit, one slice",
        cache: CacheMode::WriteBack,
        l2_cache: u64::MAX,
        look_ups: HITS,
        places: Places::OneSlice,
    },
    Case {
        name: "hit, slices of the whole disk",
        cache: CacheMode::WriteBack,
        l2_cache: u64::MAX,
        look_ups: HITS,
        places: Places::All,
    },
    Case {
        name: "miss, table in the page cache",
        cache: CacheMode::WriteBack,
        l2_cache: 0,
        look_ups: MISSES,
        places: Places::All,
    },
    Case {
        name: "miss, table on the device",
        cache: CacheMode::None,
        l2_cache: 0,
        look_ups: MISSES,
        places: Places::All,
    },
];

fn main() -> ExitCode {
    let [name] = &std::env::args().skip(1).collect::<Vec<_>>()[..] else {
        eprintln!("usage: zebu-map-cost IMAGE");
        return ExitCode::from(2);
    };
    for case in &CASES {
        let mut all = Vec::new();
        for _ in 0..ROUNDS {
            match run(name, case) {
                Ok(nanoseconds) => all.push(nanoseconds),
                Err(e) => {
                    eprintln!("zebu-map-cost: {name}: {e}");
                    return ExitCode::FAILURE;
                }
            }
        }
        all.sort_by(f64::total_cmp);
        println!("{}\t{:.1}", case.name, all[ROUNDS / 2]);
    }
    ExitCode::SUCCESS
}

/// Nanoseconds of one look-up.
fn run(name: &str, case: &Case) -> zebu::Result<f64> {
    let queue = Queue::new(QueueOptions::default())?;
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        cache: case.cache,
        l2_cache_size: Some(case.l2_cache),
        ..OpenOptions::default()
    };
    let device = Device::open(&queue, &Source::Name(name.into()), &options)?;
    let LayerImage::Qcow2(image) = &device.top().image else {
        return Err(zebu::Error::Refused("It is not a qcow2 image".into()));
    };
    let range = match case.places {
        Places::All => image.size(),
        // With the smallest slice of 512 bytes and clusters of 4 KiB.
        Places::OneSlice => image.size().min(64 * BLOCK),
    };
    // So that hits find everything there; misses have room for one slice.
    if case.l2_cache > 0 {
        look_up(&queue, image, range, range.div_ceil(BLOCK))?;
    }
    let start = Instant::now();
    look_up(&queue, image, range, case.look_ups)?;
    Ok(start.elapsed().as_nanos() as f64 / case.look_ups as f64)
}

/// Looks up so many scattered blocks of the first `range` bytes.
fn look_up(queue: &Queue, image: &Image, range: u64, count: u64) -> zebu::Result<()> {
    // The golden section, odd in blocks: every block has its turn before one comes again, if
    // their number is a power of two.
    let blocks = range / BLOCK;
    let step = ((blocks as f64 * 0.381_966) as u64 | 1) * BLOCK;
    queue.block_on(async {
        let mut offset = 0;
        for _ in 0..count {
            std::hint::black_box(image.extent(queue, offset, BLOCK).await?);
            offset += step;
            if offset >= range {
                offset -= range;
            }
        }
        Ok(())
    })
}
