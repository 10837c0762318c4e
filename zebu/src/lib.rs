//! zebu: a qcow2 engine.
//!
//! An image becomes a block device ([`Device`]) that many threads drive with many requests in
//! flight. A [`Queue`] belongs to one thread: it executes the futures of requests, and does their
//! I/O by io_uring, Linux AIO or threads.
//!
//! ```
//! use zebu::{Buffer, CacheMode, Device, OpenOptions, Queue, QueueOptions, Source};
//! # use zebu::jobs::{CreateQcow2, create_qcow2};
//! # use zebu::storage::{OpenFile, open_file};
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("disk.qcow2");
//! # {
//! #     let queue = Queue::new(QueueOptions::default())?;
//! #     let file = open_file(&path, OpenFile::default().write(true).create(true))?;
//! #     let options = CreateQcow2::default().size(1 << 20);
//! #     queue.block_on(create_qcow2(&queue, &*file, None, &options, |_| {}))?;
//! # }
//!
//! let queue = Queue::new(QueueOptions::default())?;
//! let options = OpenOptions::default()
//!     .write(true)
//!     .cache(CacheMode::WriteBack);
//! let device = Device::open(&queue, &Source::Name(path.into()), &options)?;
//! queue.block_on(async {
//!     let mut buffer = Buffer::new(4096);
//!     buffer.fill(7);
//!     // A buffer goes with the request and comes back with its result.
//!     let (buffer, result) = device.write_buffer(&queue, 65536, buffer, 4096).await;
//!     result?;
//!     device.flush(&queue).await?; // durable from here on
//!     let (buffer, result) = device.read_buffer(&queue, 65536, buffer, 4096).await;
//!     result?;
//!     assert!(buffer.iter().all(|byte| *byte == 7));
//!     device.close(&queue).await
//! })?;
//! # Ok::<(), zebu::Error>(())
//! ```
//!
//! - In an event loop of your own, drive the queue by [`Queue::turn`] and its descriptor.
//! - On an async runtime, use a [`Remote`]: its futures are `Send`.
//! - Images of untrusted origin are opened under [`Policy::Untrusted`].
//! - [`Error::kind`] is for decisions about a failure.
//!
//! `docs/embedding.md` leads through the programs in `zebu/examples`, one for each way.
//! `docs/design.md` describes the modules of the library.
//!
//! # Features
//!
//! `nbd`: images on NBD servers. `tls`: TLS for these. `bzip2`: DMG images and streams that are
//! compressed by it. `xz`: streams that are compressed by it. `crypt`: encrypted images (LUKS).
//! These are on by default.
//! `psk`: TLS with pre-shared keys, by a C library. `http`: images on web servers. `object-store`: images
//! in object stores.
//! `rbd`: images in Ceph. `ssh`: files on SSH servers. `cache`: a cache of blocks of all these on a
//! local disk.
//! Without default features there is no TLS, and no C code but the codecs.
//!
//! # File size limits
//!
//! A process whose files may not be longer than a limit (`RLIMIT_FSIZE`,
//! `ulimit -f`) should ignore `SIGXFSZ`, as the program `zebu` does: a write past
//! the limit is then the error `EFBIG` of the request that it belongs to.
//! Otherwise the kernel ends the process.
#![deny(unsafe_code)]

#[doc(hidden)]
pub mod internal;
mod registered;

#[doc(inline)]
pub use zebu_core::{
    BitmapInfo, Buffer, CacheMode, Device, DirtyBits, EngineKind, Error, ErrorKind, Extents,
    Format, Handle, InUse, Iov, Layer, Length, LimitExceeded, Limits, Memory, OpenOptions, Policy,
    Preallocation, Queue, QueueOptions, Remote, RemoteRequest, Result, SharedDevice, Source,
    Status, Storage, Storages, Zeroing, strerror,
};
#[doc(inline)]
pub use zebu_core::{jobs, names, qcow2};

/// The device: an image of any format with its backing chain, its data and its extents.
pub mod block {
    #[doc(inline)]
    pub use zebu_core::block::*;
    #[cfg(feature = "crypt")]
    #[doc(inline)]
    pub use zebu_crypt::block::*;
    #[doc(inline)]
    pub use zebu_formats::block::*;
    #[doc(inline)]
    #[allow(unused_imports, reason = "without features there is none")]
    pub use zebu_net::block::*;
}

/// Bytes at offsets: files, memory, what is on other machines; queues and engines.
///
/// A [`Storage`] holds bytes. A [`Queue`] drives the operations of a thread, any number in flight.
pub mod storage {
    #[doc(inline)]
    pub use zebu_core::storage::*;
    #[doc(inline)]
    #[allow(unused_imports, reason = "without features there is none")]
    pub use zebu_net::storage_of_zebu::*;
}

/// TLS: authentication by certificates or by pre-shared keys.
pub mod tls {
    #[doc(inline)]
    pub use zebu_net::tls::*;
}

/// The README's example is compiled as a test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// So is that of the guide.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide.md")]
struct Guide;
