//! What is done with whole images: convert, compare, check and repair, create,
//! commit, rebase, copy, amend, measure.

mod amend;
mod bitmaps;
mod check;
mod commit;
mod compare;
mod convert;
mod copy;
mod create;
mod incomplete;
mod join_set;
mod measure;
mod open;
mod progress;
mod rate_limiter;
mod rebase;
mod sequencer;
mod transfer;
mod workers;
mod zero;

pub use amend::{AmendOptions, amend, amend_with_progress};
pub use bitmaps::bitmaps;
pub use check::{
    CheckMessage, CheckReport, RepairMode, Use, check, repair, repair_file, repair_image,
};
pub use commit::{CommitError, CommitOptions, commit};
pub use compare::{CompareError, CompareOptions, Comparison, compare};
pub use convert::{CompressOptions, ConvertError, ConvertEvent, ConvertOptions, Target, convert};
pub use copy::{CopyOptions, copy};
pub use create::{CreateQcow2, NewBacking, NewDataFile, Preallocation, create_qcow2, create_raw};
pub use incomplete::mark_incomplete;
pub use measure::{Measure, MeasureTarget, Qcow2Target, measure, measure_size};
pub use open::{open, open_spec};
pub use rebase::{RebaseError, RebaseOptions, check_no_loop, rebase, rebase_unsafe};
pub use transfer::TransferError;
pub use workers::IntoControlFlow;
