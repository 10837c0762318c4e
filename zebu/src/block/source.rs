//! What names an image: a file name, a `json:{…}` name, options.

/// Which image to open, as the user or another image named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A name: a path, `file:PATH`, or `json:{…}`.
    Name(String),
    /// The text of `--image-opts`: `driver=qcow2,file.filename=PATH`.
    Options(String),
}
