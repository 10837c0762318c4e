//! What is done with whole images: convert, compare, check, measure.

mod bitmaps;
mod check;
mod compare;
mod convert;
mod lanes;
mod measure;
mod zero;

pub use bitmaps::bitmaps;
pub use check::{CheckMessage, CheckReport, check};
pub use compare::{CompareError, CompareOptions, Comparison, compare};
pub use convert::{ConvertError, ConvertEvent, ConvertOptions, convert};
pub use measure::{Measure, MeasureTarget, Qcow2Target, measure, measure_size};
