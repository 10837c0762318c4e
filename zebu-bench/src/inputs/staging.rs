//! A part of a real tree, as large as fits into an image.

use crate::error::{Context, Result};
use std::fs;
use std::path::Path;

/// Builds in `stage` a copy of the first files of `tree`, in the order of their names, until
/// `budget` bytes are reached: hard links where they can be had, else copies. Returns the bytes.
pub fn stage(tree: &Path, stage: &Path, budget: u64) -> Result<u64> {
    let mut used = 0;
    walk(tree, stage, budget, &mut used)?;
    Ok(used)
}

fn walk(from: &Path, to: &Path, budget: u64, used: &mut u64) -> Result<()> {
    fs::create_dir_all(to).context(|| to.display().to_string())?;
    let Ok(entries) = fs::read_dir(from) else {
        return Ok(()); // a directory that may not be read
    };
    let mut names: Vec<_> = entries
        .filter_map(|e| e.ok().map(|e| e.file_name()))
        .collect();
    names.sort();
    for name in names {
        if *used >= budget {
            break;
        }
        let (source, target) = (from.join(&name), to.join(&name));
        let Ok(meta) = source.symlink_metadata() else {
            continue;
        };
        let kind = meta.file_type();
        if kind.is_dir() {
            *used += 4096;
            walk(&source, &target, budget, used)?;
        } else if kind.is_symlink() {
            if let Ok(link) = fs::read_link(&source) {
                let _ = std::os::unix::fs::symlink(link, &target);
            }
        } else if kind.is_file() {
            let size = meta.len().next_multiple_of(4096);
            // A file that is too large for what is left is passed over, smaller ones may fit.
            if *used + size > budget {
                continue;
            }
            if fs::hard_link(&source, &target).is_ok() || fs::copy(&source, &target).is_ok() {
                *used += size;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_stops_at_the_budget_and_keeps_links() {
        let dir = std::env::temp_dir().join(format!("zebu-bench-stage-{}", std::process::id()));
        let (tree, to) = (dir.join("tree"), dir.join("stage"));
        fs::create_dir_all(tree.join("sub")).unwrap();
        fs::write(tree.join("a"), [1; 5000]).unwrap();
        fs::write(tree.join("b"), [1; 900_000]).unwrap();
        fs::write(tree.join("sub/c"), [1; 10]).unwrap();
        std::os::unix::fs::symlink("a", tree.join("link")).unwrap();
        let used = stage(&tree, &to, 100_000).unwrap();
        assert_eq!(used, 8192 + 4096 + 4096);
        assert!(to.join("a").is_file() && !to.join("b").exists() && to.join("sub/c").is_file());
        assert_eq!(fs::read_link(to.join("link")).unwrap(), Path::new("a"));
        fs::remove_dir_all(dir).unwrap();
    }
}
