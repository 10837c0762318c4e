//! Guards against harm by a request whose future is dropped, forgotten or no longer polled at some
//! await point: another request hangs, the device fails, acknowledged data are lost, or the image
//! becomes inconsistent.
//!
//! A case is a request, the number of polls after which it is abandoned, and how. Other requests run
//! on the same queue and on another one. All of them must end. Then every sector must have a content
//! that a request may have left, writes, a flush and the close must succeed, and a check must find
//! nothing. The number of polls grows until the request ends before it is abandoned.
//!
//! `case` runs one; `task` polls the futures; `model` has the expected contents; `origin` makes
//! images and requests; `places` are the storages; `change`, `closed`, `flush`, `suspended` and `driven` are
//! further tests.
//!
//! Futures are polled in turns and only when they were woken, without a clock, so that a lost
//! wake-up is found. A failure shows the seed that reproduces it.

mod case;
mod change;
mod closed;
mod driven;
mod flush;
mod model;
mod origin;
mod places;
mod suspended;
mod task;

use zebu_testkit::library::{self as common, disk, driven as driven_queue};

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use common::{Cases, PrintOnPanic, Rng, Watchdog, cases, engines, progress};
use disk::Disk;
use zebu::block::{Device, Format, OpenOptions, Preallocation, Storages, Zeroing};
use zebu::jobs::{self, CreateQcow2, create_qcow2};
use zebu::names::Source;
use zebu::qcow2::Compression;
use zebu::storage::nbd::{Nbd, NbdOptions, NbdServer};
use zebu::storage::{
    Buffer, CacheMode, EngineKind, Iov, Memory, OpKind, OpenFile, Queue, QueueOptions, Started,
    Storage, open_file,
};
use zebu_testkit::Written;

use case::*;
use driven_queue::Woken;
use model::*;
use origin::*;
use places::*;
use task::*;

/// Runs all cases of a request. Returns their number.
fn all_of(place: &dyn Place, origin: &Origin, seed: u64, victim: &What, step: usize) -> u64 {
    let mut count = 0;
    // With direct I/O, a request that is not polled may hold a block that other requests need.
    let has_own_blocks = origin.cluster * SECTOR >= place.block()
        && origin.other.is_none()
        && !matches!(victim, What::Compressed(..));
    for how in HOWS {
        let is_held = matches!(how, How::Keep | How::Forget);
        if is_held && place.block() > 1 && !has_own_blocks {
            continue;
        }
        let mut left = seed as usize % step;
        loop {
            let _note = PrintOnPanic(format!(
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

/// Runs all cases of some requests of one image. Returns their number.
fn image(place: &dyn Place, seed: u64, requests: usize, step: usize) -> u64 {
    let origin = {
        let _note = PrintOnPanic(format!("origin of seed {seed}"));
        Origin::new(seed)
    };
    image_of(place, &origin, seed, requests, step)
}

/// The same of this image.
fn image_of(place: &dyn Place, origin: &Origin, seed: u64, requests: usize, step: usize) -> u64 {
    let mut rng = Rng::new(seed);
    let mut count = all_of(place, origin, seed, &What::Flush, step);
    for _ in 0..requests {
        let victim = origin.request(&mut rng, &[], None);
        count += all_of(place, origin, seed, &victim, step);
    }
    count
}

/// Runs the cases of images.
fn images(place: &dyn Place, mut seeds: Cases, requests: usize, step: usize) {
    while let Some(seed) = seeds.next() {
        seeds.add(image(place, seed, requests, step));
    }
}

#[test]
fn abandoned_at_every_await_point() {
    let _watchdog = Watchdog::new("requests that are abandoned");
    images(&Delayed, cases(14, "requests abandoned"), 4, 1);
}

#[test]
fn abandoned_in_images_of_other_formats() {
    let _watchdog = Watchdog::new("requests that are abandoned in images of other formats");
    let mut seeds = cases(2, "requests abandoned in images of other formats");
    while let Some(seed) = seeds.next() {
        for other in Written::others() {
            let origin = Origin::of(seed, Some(other));
            seeds.add(image_of(&Delayed, &origin, seed, 3, 1));
        }
    }
}

#[test]
fn abandoned_on_real_files() {
    let modes = [
        CacheMode::None,
        CacheMode::WriteBack,
        CacheMode::WriteThrough,
    ];
    let engines = engines();
    let all = engines.len() * modes.len();
    for engine in engines {
        for cache in modes {
            let name = format!("{engine}, {}", cache.name());
            let _watchdog = Watchdog::new(&name);
            let _note = PrintOnPanic(name.clone());
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let place = Files {
                folder,
                engine,
                cache,
            };
            let seeds = cases(1, format!("requests abandoned on real files, {name}"));
            images(&place, seeds.share(1, all), 1, 6);
        }
    }
}

fn with_files() -> Files {
    Files {
        folder: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
        engine: EngineKind::Threads,
        cache: CacheMode::WriteBack,
    }
}

#[test]
fn abandoned_in_an_image_in_another_image() {
    let _watchdog = Watchdog::new("requests that are abandoned in an image in another one");
    let place = Nested(with_files(), Cell::new(0));
    let seeds = cases(2, "requests abandoned in an image in another one");
    images(&place, seeds, 1, 3);
}

/// Requests wait for those that make the file longer.
#[test]
fn abandoned_over_filters() {
    let filters = [
        "file.driver=preallocate,file.prealloc-align=4096,file.prealloc-size=20000",
        #[cfg(debug_assertions)]
        XOR,
    ];
    for filter in filters {
        let _watchdog = Watchdog::new("requests that are abandoned over a filter");
        let _note = PrintOnPanic(filter.into());
        let seeds = cases(1, format!("requests abandoned over {filter}"));
        images(&Filtered(with_files(), filter), seeds, 1, 3);
    }
}

#[test]
fn abandoned_on_an_nbd_server() {
    let _watchdog = Watchdog::new("requests that are abandoned on an NBD server");
    let place = Exports(with_files(), RefCell::default());
    images(
        &place,
        cases(2, "requests abandoned on an NBD server"),
        1,
        3,
    );
}
