//! Snapshots are taken, applied and deleted.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::Rng;
use crate::make::either;
use crate::program::{By, Shell};
use crate::world::{SECTOR, Snap, World, done, odd_name, words};

type Result<T> = std::result::Result<T, String>;

impl World {
    pub fn snapshot(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let by = match self.bitmaps.is_empty() {
            true => either(rng),
            // QEMU applies no snapshot to an image with bitmaps.
            false => By::Zebu,
        };
        let takes = self.snaps.is_empty() || (self.snaps.len() < 4 && rng.one_in(2));
        let has_state = takes && self.kind.data_file.is_none() && shell.limit.is_none();
        if has_state && rng.one_in(3) {
            self.write_vm_state(shell, rng)?;
        }
        let (cwd, name) = self.place(shell, rng);
        let mut run = |args: &[&str]| {
            let mut all = words(&["snapshot", "-q"]);
            all.extend(words(args));
            all.push(name.clone());
            shell.img(by, cwd, &all)
        };
        if takes {
            self.count += 1;
            // A comma would end the name in `snapshot.name=`.
            let tag = odd_name(rng, &format!("s{}", self.count), "").replace(',', "-");
            let answer = run(&["-c", &tag])?;
            if self.kind.data_file.is_some() && answer.status == 1 {
                return Ok(());
            }
            if answer.status == 1 && self.has_narrow_refcounts(shell)? {
                // QEMU leaks the clusters whose refcounts it has raised.
                self.killed |= by == By::Qemu;
                return Ok(());
            }
            done(answer).map_err(|e| format!("{by:?} snapshot -c: {e}"))?;
            self.snaps.push(Snap {
                name: tag,
                disk: self.disk.clone(),
            });
            self.touched.fill(true);
            if self.kind.version == 2 && rng.one_in(2) {
                shell.note("# the extra data of the snapshots are removed".into());
                make_snapshots_old(&self.path(shell))?;
                // Version 3 needs the extra data.
                if rng.one_in(2) {
                    return self.amend(shell, rng);
                }
            }
            return Ok(());
        }
        let nth = rng.below(self.snaps.len() as u64) as usize;
        let tag = self.snaps[nth].name.clone();
        if rng.one_in(2) {
            done(run(&["-d", &tag])?).map_err(|e| format!("{by:?} snapshot -d: {e}"))?;
            self.snaps.remove(nth);
            return Ok(());
        }
        done(run(&["-a", &tag])?).map_err(|e| format!("{by:?} snapshot -a: {e}"))?;
        self.disk = self.snaps[nth].disk.clone();
        self.vm_state = by == By::Qemu;
        self.resize_bitmaps(by);
        self.clean_end = false;
        self.touched = vec![true; self.clusters()];
        Ok(())
    }

    /// Writes VM state, which the next snapshot has.
    pub fn write_vm_state(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let (cwd, name) = self.place(shell, rng);
        let args = words(&["-f", "qcow2", &name]);
        let length = SECTOR as u64 * (1 + rng.below(200));
        let write = format!("write -b -P 238 0 {length}");
        done(shell.io(By::Zebu, cwd, &args, &[write])?).map_err(|e| format!("write -b: {e}"))?;
        self.vm_state = true;
        Ok(())
    }

    /// Whether refcounts are too narrow for a few snapshots.
    pub fn has_narrow_refcounts(&self, shell: &Shell) -> Result<bool> {
        let bytes = fs::read(self.path(shell)).map_err(|e| e.to_string())?;
        Ok(bytes[7] == 3 && bytes[99] < 3)
    }
}

/// Removes the extra data from the entries of the snapshot table, as QEMU before 1.1 wrote them.
pub fn make_snapshots_old(image: &Path) -> Result<()> {
    let mut options = fs::OpenOptions::new();
    let file = options.read(true).write(true).open(image);
    let file = file.map_err(|e| e.to_string())?;
    let read = |at: u64, length: usize| -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        let result = file.read_exact_at(&mut bytes, at);
        result.map(|()| bytes).map_err(|e| e.to_string())
    };
    let number = |bytes: &[u8]| bytes.iter().fold(0, |n, b| n << 8 | u64::from(*b));
    let header = read(0, 72)?;
    let start = number(&header[64..72]);
    let (mut at, mut table) = (start, Vec::new());
    for _ in 0..number(&header[60..64]) {
        let mut fixed = read(at, 40)?;
        let extra = number(&fixed[36..40]);
        let names = number(&fixed[12..14]) + number(&fixed[14..16]);
        fixed[36..40].fill(0);
        table.extend(fixed);
        table.extend(read(at + 40 + extra, names as usize)?);
        table.resize(table.len().next_multiple_of(8), 0);
        at = (at + 40 + extra + names).next_multiple_of(8);
    }
    table.resize((at - start) as usize, 0);
    file.write_all_at(&table, start).map_err(|e| e.to_string())
}
