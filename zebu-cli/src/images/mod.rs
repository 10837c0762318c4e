//! Images as commands name them: sources and targets.
//!
//! `open` is for those that there are and `new_image` for those that are made. `same_file` and `named` see to it
//! that a target is not what is read, and keeps its name; `streams` are pipes instead of files, `appliance` OVA.
//! `survey` looks at what is in an image.

pub mod appliance;
pub mod named;
pub mod new_image;
pub mod open;
pub mod same_file;
pub mod streams;
pub mod survey;
