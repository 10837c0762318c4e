//! What is done with whole images: convert, compare, check and repair, create,
//! commit, rebase, copy, amend, measure.
//!
//! One file or folder a job, and what they share, to be read first: `workers`, `chunks` and `sequencer`
//! (all cores, in parts, in order), `transfer` and `target` (what is copied where), `new_image` (files of
//! new images). `stream` and `export` read and write images in order.
//!
//! # Progress and cancellation
//!
//! A job calls `on_progress` on the caller's thread with its [`Progress`]. The callback returns
//! `()`, or a [`ControlFlow`](std::ops::ControlFlow): if it breaks before all is done, the job
//! ends with the error `ECANCELED`.
//!
//! Jobs that use all cores block: [`convert`], [`convert_stream`], [`convert_to_stream`],
//! [`measure_stream`], [`compare`], [`commit`], [`rebase`], [`copy`]; so
//! does [`amend`]. The others are futures of a queue: [`check`], [`repair`], [`create_qcow2`],
//! [`create_raw`], [`create_image`], [`measure`]. Dropping such a future cancels the job, too.
//!
//! What a cancelled job leaves:
//!
//! | job | image |
//! |---|---|
//! | check, measure, compare | unchanged |
//! | repair | no worse than before; another repair goes on |
//! | create of raw | an image of its size, not all of it allocated |
//! | create of other formats | no image |
//! | convert, copy | a target with unspecified content; a new image of a format but raw is no image |
//! | commit | the base may have some of the content; the top has lost nothing |
//! | rebase | the old backing file and the same content |
//! | amend | consistent, with some of the changes |

mod amend;
pub(crate) mod check;
mod chunks;
mod commit;
mod compare;
mod convert;
mod copy;
mod create;
mod export;
mod join_set;
mod measure;
pub(crate) mod new_image;
mod open;
mod out_stream;
mod rate_limiter;
mod rebase;
mod sequencer;
mod snapshots;
mod stream;
mod target;
mod transfer;
mod unchanged;
mod workers;
mod zero;

pub use crate::codec::StreamCompression;
pub use amend::{AmendOptions, amend};
pub use commit::{CommitError, CommitOptions, commit};
pub use compare::{CompareError, CompareOptions, Comparison, compare, differences};
pub use convert::{CompressOptions, ConvertError, ConvertEvent, ConvertOptions, convert};
pub use copy::{CopyOptions, copy};
pub use create::{
    CreateQcow2, NewBacking, NewDataFile, NewEncryption, begin_image, create_image, create_qcow2,
    create_raw,
};
pub use export::{ExportFormat, convert_to_stream, measure_stream};
pub use measure::{Measure, MeasureTarget, Qcow2Target, measure, measure_size};
pub use open::{open, open_spec};
pub use rebase::{RebaseError, RebaseOptions, check_no_loop, rebase, rebase_unsafe};
pub use stream::{ImageStream, StreamOptions, convert_stream, unpacked};
pub use target::Target;
pub use transfer::TransferError;
pub use unchanged::Unchanged;
pub use workers::MAX_WORKERS;

pub use crate::block::Preallocation;
pub use crate::drivers::qcow2::check::{CheckMessage, Use, check, repair, repair_image};
pub use crate::drivers::stream::{Spill, StreamSink};
pub use crate::drivers::{CheckReport, RepairMode};
pub use crate::drivers::{CreateValue, CreateValues, Filling, ImagePlan, NewImage, PlanRequest};
pub use crate::progress::{IntoControlFlow, Progress};
