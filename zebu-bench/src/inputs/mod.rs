//! The images that are measured, made once and kept between runs.

pub mod big;
pub mod filled;
pub mod fragmented;
pub mod fs_image;
pub mod random;
pub mod staging;

use crate::error::{Context, Result};
use std::path::{Path, PathBuf};

/// The file at `path`; if it is not there yet, `make` makes it under another name, so that what
/// was broken off is not taken for whole.
pub fn kept(path: PathBuf, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    if path.is_file() {
        return Ok(path);
    }
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).context(|| dir.display().to_string())?;
    }
    println!("making {}", path.display());
    let mut part = path.clone().into_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    let _ = std::fs::remove_file(&part);
    make(&part)?;
    std::fs::rename(&part, &path).context(|| path.display().to_string())?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_kept_file_is_made_once_and_only_whole() {
        let dir = std::env::temp_dir().join(format!("zebu-bench-kept-{}", std::process::id()));
        let file = dir.join("f");
        let failed = kept(file.clone(), |p| {
            std::fs::write(p, "half").unwrap();
            Err(Error::new("broken off"))
        });
        assert!(failed.is_err() && !file.exists());
        let make = |p: &Path| std::fs::write(p, "whole").context(String::new);
        assert_eq!(kept(file.clone(), make), Ok(file.clone()));
        kept(file, |_| panic!("made twice")).unwrap();
        std::fs::remove_dir_all(dir).unwrap();
    }
}
