//! What is done with whole images: convert, compare, check, measure.
