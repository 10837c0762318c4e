//! Whether two files hold the same bytes.

use crate::error::{Context, Error, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Fails with the place of the first difference.
pub fn same(a: &Path, b: &Path) -> Result<()> {
    let open = |p: &Path| File::open(p).context(|| p.display().to_string());
    let (mut x, mut y) = (open(a)?, open(b)?);
    let length = |f: &File| f.metadata().map(|m| m.len()).context(|| "metadata".into());
    let (lx, ly) = (length(&x)?, length(&y)?);
    if lx != ly {
        return Err(Error::new(format!(
            "its output has {lx} bytes where {ly} are right"
        )));
    }
    let (mut p, mut q) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let mut at = 0;
    loop {
        let n = x.read(&mut p).context(|| a.display().to_string())?;
        if n == 0 {
            return Ok(());
        }
        y.read_exact(&mut q[..n])
            .context(|| b.display().to_string())?;
        if let Some(i) = (0..n).find(|&i| p[i] != q[i]).filter(|_| p[..n] != q[..n]) {
            return Err(Error::new(format!(
                "its output differs at byte {}",
                at + i as u64
            )));
        }
        at += n as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_shorter_and_different() {
        let dir = std::env::temp_dir().join(format!("zebu-bench-same-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let (a, b) = (file("a", "hello"), file("b", "hello"));
        assert_eq!(same(&a, &b), Ok(()));
        assert!(
            same(&file("c", "hell"), &a)
                .unwrap_err()
                .0
                .contains("4 bytes")
        );
        assert!(
            same(&file("d", "heLlo"), &a)
                .unwrap_err()
                .0
                .contains("byte 2")
        );
        std::fs::remove_dir_all(dir).unwrap();
    }
}
