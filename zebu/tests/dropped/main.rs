//! Guards against harm by a request whose future is dropped, forgotten or no longer polled at some
//! await point: another request hangs, the device fails, acknowledged data are lost, or the image
//! becomes inconsistent.
//!
//! A case is a request, the number of polls after which it is given up, and how. Other requests run
//! beside it, on the same queue and on another. Then all of them must end, every sector must have a
//! content that a request may have left, writes, a flush and the close must succeed, and a check
//! must find nothing. The number of polls grows until the request ends by itself.
//!
//! `case` runs one; `task` polls the futures; `model` has the expected contents; `origin` makes
//! images and requests; `places` are the storages; `change` and `flush` are further tests.
//!
//! | variable               | meaning                                    |
//! |------------------------|--------------------------------------------|
//! | `ZEBU_DROPPED_SECONDS` | random images for so long                  |
//! | `ZEBU_DROPPED_SEED`    | the first seed                             |
//!
//! Futures are polled in turns and only when they were woken, without a clock, so that a lost
//! wake-up is found. A failure shows the seed that reproduces it.

mod case;
mod change;
#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code)]
#[path = "../crash/disk.rs"]
mod disk;
mod flush;
mod model;
mod origin;
mod places;
mod task;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use common::{Rng, Sayer, Watchdog, cases, engines, progress};
use disk::Disk;
use zebu::block::{Device, Format, OpenOptions, Preallocation, Storages, Zeroing};
use zebu::jobs::{self, CreateQcow2, create_qcow2};
use zebu::names::Source;
use zebu::qcow2::Compression;
use zebu::storage::nbd::{Nbd, NbdOptions, NbdServer};
use zebu::storage::{
    Buffer, CacheMode, EngineKind, Iov, Memory, OpKind, OpenFile, Queue, QueueOptions, Started,
    Storage, open_file, set_len,
};

use case::*;
use model::*;
use origin::*;
use places::*;
use task::*;

/// All cases of a request; how many.
fn all_of(place: &dyn Place, origin: &Origin, seed: u64, victim: &What, step: usize) -> u64 {
    let mut count = 0;
    // With direct I/O one that is not polled may hold a block, of which others have
    // another part.
    let has_own_blocks =
        origin.cluster * SECTOR >= place.block() && !matches!(victim, What::Compressed(..));
    for how in HOWS {
        let is_held = matches!(how, How::Keep | How::Forget);
        if is_held && place.block() > 1 && !has_own_blocks {
            continue;
        }
        let mut left = seed as usize % step;
        loop {
            let _sayer = Sayer(format!(
                "seed {seed}: {how:?} of {victim:?} after {left} polls; {}",
                origin.note
            ));
            count += 1;
            if !case(place, origin, seed, victim, left, how) {
                break;
            }
            left += step;
        }
    }
    count
}

/// Requests of one image, each given up everywhere; how many cases.
fn image(place: &dyn Place, seed: u64, requests: usize, step: usize) -> u64 {
    let origin = {
        let _sayer = Sayer(format!("origin of seed {seed}"));
        Origin::new(seed)
    };
    let mut rng = Rng::new(seed);
    let mut count = all_of(place, &origin, seed, &What::Flush, step);
    for _ in 0..requests {
        let victim = origin.request(&mut rng, &[], None);
        count += all_of(place, &origin, seed, &victim, step);
    }
    count
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect(name))
}

/// Images from a first seed on: so many, or for as long as was asked for.
fn images(place: &dyn Place, most: u64, requests: usize, step: usize) -> u64 {
    let first = number("ZEBU_DROPPED_SEED").unwrap_or(1);
    let time = number("ZEBU_DROPPED_SECONDS").map(Duration::from_secs);
    let begun = Instant::now();
    let mut count = 0;
    for seed in first.. {
        let goes_on = match time {
            Some(time) => begun.elapsed() < time,
            None => seed < first + most,
        };
        if !goes_on {
            break;
        }
        count += image(place, seed, requests, step);
    }
    count
}

#[test]
fn given_up_at_every_await_point() {
    let _watchdog = Watchdog::new("requests that are given up");
    cases(images(&Delayed, 24, 4, 1), "requests given up");
}

#[test]
fn given_up_on_real_files() {
    let mut count = 0;
    for engine in engines() {
        for cache in [
            CacheMode::None,
            CacheMode::WriteBack,
            CacheMode::WriteThrough,
        ] {
            let name = format!("{engine}, {}", cache.name());
            let _watchdog = Watchdog::new(&name);
            let _sayer = Sayer(name);
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let place = Files {
                folder,
                engine,
                cache,
            };
            count += images(&place, 1, 1, 3);
        }
    }
    cases(count, "requests given up on real files");
}

fn with_files() -> Files {
    Files {
        folder: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
        engine: EngineKind::Threads,
        cache: CacheMode::WriteBack,
    }
}

#[test]
fn given_up_in_an_image_in_another_image() {
    let _watchdog = Watchdog::new("requests that are given up in an image in another one");
    let place = Nested(with_files(), Cell::new(0));
    cases(
        images(&place, 2, 1, 3),
        "requests given up in an image in another one",
    );
}

#[test]
fn given_up_on_an_nbd_server() {
    let _watchdog = Watchdog::new("requests that are given up on an NBD server");
    let place = Exports(with_files(), RefCell::default());
    cases(
        images(&place, 2, 1, 3),
        "requests given up on an NBD server",
    );
}
