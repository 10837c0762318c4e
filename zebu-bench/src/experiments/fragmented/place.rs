//! One place on the disk for several images, so that where they lie is the same for all.

use crate::bench::Bench;
use crate::error::Result;
use crate::measure::child::{self, command};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A file whose blocks stay where they are while images of one length take turns in it. It is
/// removed in the end.
pub struct Place {
    file: PathBuf,
    scratch: PathBuf,
}

impl Place {
    /// An empty place: the first image that takes it decides where it is.
    pub fn new(bench: &Bench) -> Place {
        let file = bench.output("t.qcow2");
        let _ = std::fs::remove_file(&file);
        let scratch = bench.scratch();
        Place { file, scratch }
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Overwrites the place with an image, past the page cache, and waits until it is there.
    pub fn take(&self, image: &Path) -> Result<()> {
        let name = |key: &str, path: &Path| {
            let mut word = OsString::from(key);
            word.push(path);
            word
        };
        let mut dd = command(["dd", "bs=1M", "iflag=direct", "oflag=direct"]);
        dd.extend(["conv=notrunc,fsync", "status=none"].map(OsString::from));
        dd.extend([name("if=", image), name("of=", &self.file)]);
        child::run(&dd, &self.scratch).map(|_| ())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}
