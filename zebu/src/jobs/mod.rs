//! What is done with whole images: convert, compare, check, measure.

mod compare;
mod convert;
mod lanes;
mod zero;

pub use compare::{CompareError, CompareOptions, Comparison, compare};
pub use convert::{ConvertError, ConvertEvent, ConvertOptions, convert};
