//! `--picture`: a picture of a disk, from which one sees why its image is large or slow.

mod canvas;
mod colours;
mod draw;
mod png;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use zebu::block::{Device, FileSpec};
use zebu::storage::Queue;

use crate::images::same_file;
use crate::images::survey::{self, Survey};
use crate::output::Shown;
use crate::program::{Context, Failure};
use canvas::Canvas;
use draw::Picture;

/// How a picture is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Svg,
    Png,
}

impl Kind {
    /// As the name of the file says.
    ///
    /// # Errors
    ///
    /// It says neither.
    pub fn of(path: &OsStr) -> Result<Self, Failure> {
        let extension = Path::new(path).extension();
        match extension.map(OsStr::to_ascii_lowercase) {
            Some(text) if text == "svg" => Ok(Kind::Svg),
            Some(text) if text == "png" => Ok(Kind::Png),
            _ => Err(Failure::new(
                "--picture expects a name that ends in .svg or .png",
            )),
        }
    }
}

/// Draws `range` of the disk into the file `path`.
pub fn draw(
    context: &Context,
    queue: &Queue,
    device: &Device,
    range: Range<u64>,
    kind: Kind,
    path: &OsStr,
) -> Result<(), Failure> {
    let path = Path::new(path);
    let sources = std::slice::from_ref(device);
    if let Some(why) = same_file::refused_new(context, sources, &FileSpec::new(path)) {
        return Err(Failure::new(format!("{why}: '{}'", path.shown())));
    }
    let failed = |e| Failure::new(format!("Failed to read image metadata: {e}"));
    let survey = Survey::of(queue, device, range, draw::MOST_CELLS).map_err(failed)?;
    // An image that cannot be checked can be drawn.
    let check = survey::check(queue, device).ok().flatten();
    let picture = Picture::new(device, &survey, check);
    let (width, height) = picture.size();
    let mut canvas: Box<dyn Canvas> = match kind {
        Kind::Svg => Box::new(canvas::Svg::new(width, height)),
        Kind::Png => Box::new(png::Png::new(width, height)),
    };
    picture.draw(&mut *canvas);
    replace(path, &canvas.finish()).map_err(|e| {
        let (path, why) = (path.shown(), zebu::strerror(&e));
        Failure::new(format!("Could not write '{path}': {why}"))
    })
}

/// Writes a file. One that was there is whole until it is replaced; a device or a pipe is written.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (path, old) = match fs::metadata(path) {
        Ok(old) if old.is_file() => (fs::canonicalize(path)?, Some(old)),
        Err(e) if e.kind() == io::ErrorKind::NotFound && !path.is_symlink() => {
            (path.to_owned(), None)
        }
        _ => return fs::write(path, bytes),
    };
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    // tempfile's own errors name its file, of which the user knows nothing.
    let mut failed = None;
    let new = tempfile::Builder::new().make_in(folder.unwrap_or(Path::new(".")), |path| {
        let new = File::options().write(true).create_new(true).open(path);
        new.inspect_err(|e| failed = e.raw_os_error())
    });
    let mut new = new.map_err(|e| failed.map_or(e, io::Error::from_raw_os_error))?;
    if let Some(old) = old {
        new.as_file().set_permissions(old.permissions())?;
    }
    new.as_file_mut().write_all(bytes)?;
    new.as_file().sync_all()?;
    new.persist(path)?;
    Ok(())
}
