//! What is done with whole images: convert, compare, check and repair, create,
//! commit, rebase, copy, amend, measure.

mod amend;
mod bitmaps;
mod check;
mod commit;
mod compare;
mod convert;
mod copy;
mod course;
mod create;
mod incomplete;
mod lanes;
mod measure;
mod open;
mod pace;
mod rebase;
mod together;
mod transfer;
mod turns;
mod zero;

pub use amend::{AmendOptions, amend, amend_telling};
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
pub use lanes::GoOn;
pub use measure::{Measure, MeasureTarget, Qcow2Target, measure, measure_size};
pub use open::{open, open_spec};
pub use rebase::{RebaseError, RebaseOptions, check_no_loop, rebase, rebase_unsafe};
pub use transfer::TransferError;
