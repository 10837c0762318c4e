//! One place on the disk for several images, so that where they lie is the same for all.

use crate::bench::Bench;
use crate::error::{Context, Result};
use crate::inputs::fragmented::FILL;
use crate::measure::child::{self, command};
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes that are told apart: a cluster of these images.
const BLOCK: usize = 64 << 10;

/// A file whose blocks stay where they are while images of one length take turns in it. It is
/// removed in the end.
///
/// The data of all of them are [`FILL`], and stay so: so only their tables need to be exchanged,
/// which takes milliseconds, and runs that are compared follow one another at once.
pub struct Place {
    file: PathBuf,
    scratch: PathBuf,
    /// Those that have been here, and what each has besides data.
    known: Vec<(PathBuf, Tables)>,
    /// Whether one of them is here, and all else is data.
    clean: bool,
}

/// Blocks that are not data, by their offsets.
#[derive(Debug, PartialEq, Eq)]
struct Tables(Vec<(u64, Vec<u8>)>);

impl Tables {
    fn of(mut image: impl Read) -> std::io::Result<Tables> {
        let mut tables = Vec::new();
        for at in (0..).step_by(BLOCK) {
            let mut block = Vec::with_capacity(BLOCK);
            (&mut image).take(BLOCK as u64).read_to_end(&mut block)?;
            if block.is_empty() {
                break;
            }
            if block.iter().any(|byte| *byte != FILL) {
                tables.push((at, block));
            }
        }
        Ok(Tables(tables))
    }
}

impl Place {
    /// An empty place: the first image that takes it decides where it is.
    pub fn new(bench: &Bench) -> Place {
        let file = bench.output("t.qcow2");
        let _ = std::fs::remove_file(&file);
        Place {
            file,
            scratch: bench.scratch(),
            known: Vec::new(),
            clean: false,
        }
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Says that what is here was overwritten with other things than [`FILL`].
    pub fn spoil(&mut self) {
        self.clean = false;
    }

    /// Puts an image here, and waits until it is on the disk.
    pub fn take(&mut self, image: &Path) -> Result<()> {
        let name = || image.display().to_string();
        if !self.known.iter().any(|(known, _)| known == image) {
            let tables = File::open(image).and_then(Tables::of).context(name)?;
            self.known.push((image.into(), tables));
        }
        if !self.clean {
            self.copy(image)?;
            self.clean = true;
            return Ok(());
        }
        self.exchange(image).context(name)
    }

    /// Overwrites everything, past the page cache.
    fn copy(&self, image: &Path) -> Result<()> {
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

    /// Makes data of the tables that others had, and writes those of this image.
    fn exchange(&self, image: &Path) -> std::io::Result<()> {
        let file = OpenOptions::new().write(true).open(&self.file)?;
        if file.metadata()?.len() != image.metadata()?.len() {
            return Err(std::io::Error::other("it is not as long as the others"));
        }
        let (own, others): (Vec<_>, Vec<_>) =
            self.known.iter().partition(|(path, _)| path == image);
        for (at, block) in others.iter().flat_map(|(_, tables)| &tables.0) {
            file.write_all_at(&vec![FILL; block.len()], *at)?;
        }
        for (at, block) in own.iter().flat_map(|(_, tables)| &tables.0) {
            file.write_all_at(block, *at)?;
        }
        file.sync_data()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against measuring an image that is a mixture of two.
    use super::*;

    #[test]
    fn images_take_turns_without_a_trace() {
        let dir = std::env::temp_dir().join(format!("zebu-bench-place-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let image = |name: &str, tables: &[usize]| {
            let mut bytes = vec![FILL; 8 * BLOCK + 512];
            for at in tables {
                bytes[*at] = *at as u8;
            }
            let path = dir.join(name);
            std::fs::write(&path, &bytes).unwrap();
            (path, bytes)
        };
        let images = [
            image("a", &[0, 3 * BLOCK + 7]),
            image("b", &[0, 8 * BLOCK + 1]),
            image("c", &[5 * BLOCK]),
        ];
        let known = (images.iter())
            .map(|(path, bytes)| (path.clone(), Tables::of(bytes.as_slice()).unwrap()))
            .collect();
        let place = Place {
            file: dir.join("place"),
            scratch: dir.clone(),
            known,
            clean: true,
        };
        std::fs::write(&place.file, &images[0].1).unwrap();
        for (path, bytes) in [1, 2, 0, 2, 1, 1].map(|i| &images[i]) {
            place.exchange(path).unwrap();
            assert!(std::fs::read(&place.file).unwrap() == *bytes, "{path:?}");
        }
        drop(place);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
