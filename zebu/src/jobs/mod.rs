//! What is done with whole images: convert, compare, check, measure.

mod convert;
mod zero;

pub use convert::{ConvertError, ConvertEvent, ConvertOptions, convert};
