//! What is done with whole images: convert, compare, check and repair, create, measure.

mod bitmaps;
mod check;
mod compare;
mod convert;
mod create;
mod lanes;
mod measure;
mod together;
mod turns;
mod zero;

pub use bitmaps::bitmaps;
pub use check::{CheckMessage, CheckReport, RepairMode, check, repair, repair_file};
pub use compare::{CompareError, CompareOptions, Comparison, compare};
pub use convert::{CompressOptions, ConvertError, ConvertEvent, ConvertOptions, Target, convert};
pub use create::{CreateQcow2, NewBacking, NewDataFile, Preallocation, create_qcow2, create_raw};
pub use measure::{Measure, MeasureTarget, Qcow2Target, measure, measure_size};
