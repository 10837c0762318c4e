//! The steps: which there are, and those that change the image at rest.

use std::fs;
use std::os::unix::ffi::OsStrExt;

use crate::common::{Rng, bytes};
use crate::make::either;
use crate::program::{By, Shell};
use crate::world::{Disk, SECTOR, World, done, words};

type Result<T> = std::result::Result<T, String>;

impl World {
    /// One random step.
    pub fn step(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        if self.killed && rng.one_in(2) {
            return self.repair(shell, rng);
        }
        match rng.below(43) {
            0..=7 => self.session(shell, rng, false),
            8 => self.session(shell, rng, true),
            9..=11 => self.resize(shell, rng),
            12..=14 => self.snapshot(shell, rng),
            15 | 16 => self.change_base(shell, rng),
            17 => self.rebase(shell, rng),
            18 => self.commit(shell, rng),
            19 | 20 => self.amend(shell, rng),
            21 => self.change_length(shell, rng),
            22 => self.remake(shell, rng),
            23 | 24 => self.refused(shell, rng),
            25 | 26 => self.end_of_file(shell, rng),
            27..=30 => (0..1 + rng.below(3)).try_for_each(|_| self.end_of_disk(shell, rng)),
            31 | 32 => self.limited(shell, rng),
            33..=36 => (0..1 + rng.below(2)).try_for_each(|_| self.change_bitmap(shell, rng)),
            37 | 38 => self.onto_what_is_read(shell, rng),
            39..=41 => self.exchange(shell, rng),
            _ => self.repair(shell, rng),
        }
    }

    /// A step that snapshots must outlive: another size, another backing file, the disk taken back.
    pub fn around_snapshots(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        match rng.below(16) {
            0..=5 => self.snapshot(shell, rng),
            6..=8 => self.resize(shell, rng),
            9 | 10 => self.rebase(shell, rng),
            11 | 12 => self.commit(shell, rng),
            13 => self.remake(shell, rng),
            _ => self.session(shell, rng, false),
        }
    }

    /// Makes the disk larger or smaller.
    fn resize(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let cluster = self.kind.cluster;
        let old = self.size();
        let most = (300 * cluster).clamp(3 * cluster, 6 << 20);
        let new = match rng.below(4) {
            0 => old + SECTOR * (1 + rng.below(2 * cluster as u64 / 512) as usize),
            1 => old - SECTOR * rng.below((old / SECTOR) as u64) as usize,
            2 => (1 + rng.below((most / cluster) as u64) as usize) * cluster,
            _ => (1 + rng.below((most / SECTOR) as u64) as usize) * SECTOR,
        };
        if new > 2 * most {
            return Ok(());
        }
        self.resize_to(shell, rng, new)?;
        // What was cut off must not come back.
        match new < old && self.size() == new && rng.one_in(2) {
            true => self.resize_to(shell, rng, old),
            false => Ok(()),
        }
    }

    pub fn resize_to(&mut self, shell: &mut Shell, rng: &mut Rng, new: usize) -> Result<()> {
        let by = match self.has_lost_bitmaps() || self.vm_state {
            // QEMU refuses, or shows VM state in the larger disk.
            true => By::Zebu,
            false => either(rng),
        };
        let (old, cluster) = (self.size(), self.kind.cluster);
        let (cwd, name) = self.place(shell, rng);
        // A write that fails there may have happened in part.
        let in_session = rng.one_in(4) && shell.limit.is_none();
        let commands_of_qemu = in_session && by == By::Qemu;
        let mut preallocated = false;
        let answer = if in_session {
            // In one session: QEMU may show old data where the disk grows.
            let mut args = words(&["-f", "qcow2"]);
            args.extend(self.opening(shell, rng));
            args.push(name);
            let commands = vec![self.write(rng).0, format!("truncate {new}")];
            shell.io(by, cwd, &args, &commands)?
        } else {
            let mut args = words(&["resize", "-q", "-f", "qcow2"]);
            if new < old {
                args.push("--shrink".into());
            } else if new > old && rng.one_in(3) {
                let mode = rng.pick(&["metadata", "falloc", "full"]);
                args.push(format!("--preallocation={mode}"));
                preallocated = true;
            }
            args.extend([name, new.to_string()]);
            shell.img(by, cwd, &args)?
        };
        let refused = self.kind.version == 2 && !self.snaps.is_empty();
        match answer.status {
            0 => {}
            _ if refused => return Ok(()),
            // QEMU would have to hide a longer base, and version 2 has no zero clusters.
            _ if by == By::Qemu && self.kind.version == 2 && self.base.is_some() => {
                self.mapped_past_end = true;
                return self.adopt(shell, rng);
            }
            // QEMU refuses this if clusters at the end of the file are free.
            _ if by == By::Qemu && answer.err.contains("preallocation for shrinking files") => {
                return self.adopt(shell, rng);
            }
            _ => return Err(format!("{by:?} resize: {}", answer.text())),
        }
        self.touched.fill(true);
        self.disk.resize(new);
        self.vm_state = false;
        self.resize_bitmaps(by);
        self.touched.resize(new.div_ceil(cluster), true);
        self.clean_end &= !commands_of_qemu;
        if preallocated && by == By::Qemu {
            // Preallocated clusters show the data of freed ones.
            return self.adopt_from(old, new, shell, rng);
        }
        self.resized(shell, rng, by, old)
    }

    /// Updates the model after a change of the size from `old`.
    fn resized(&mut self, shell: &mut Shell, rng: &mut Rng, by: By, old: usize) -> Result<()> {
        let new = self.size();
        if by == By::Qemu && new > old && !self.clean_end {
            // QEMU shows the data past the old end of the disk.
            let end = match self.mapped_past_end {
                true => new,
                false => old.next_multiple_of(self.kind.cluster).min(new),
            };
            self.adopt_from(old, end, shell, rng)?;
        }
        self.clean_end = by == By::Zebu;
        // QEMU may have grown the disk over a part of them only.
        self.mapped_past_end &= by == By::Qemu;
        Ok(())
    }

    /// Takes the content of a range from QEMU, where it shows old data.
    fn adopt_from(
        &mut self,
        from: usize,
        end: usize,
        shell: &mut Shell,
        rng: &mut Rng,
    ) -> Result<()> {
        let bytes = self.content(shell, rng, By::Qemu, &[])?;
        let before = self.disk.bytes.clone();
        if bytes.len() == self.size() {
            self.disk.bytes[from..end].copy_from_slice(&bytes[from..end]);
        }
        self.replaced(&before);
        self.clean_end = false;
        Ok(())
    }

    /// `amend`. If zebu refuses the options, nothing may change.
    pub fn amend(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let mut options = Vec::new();
        let mut version = self.kind.version;
        let has_old_snapshots = version == 2 && !self.snaps.is_empty();
        if has_old_snapshots || rng.one_in(2) {
            version = 2 + rng.below(2) as u32;
            options.push(format!("compat={}", ["0.10", "1.1"][version as usize - 2]));
        }
        if rng.one_in(3) {
            options.push(format!("lazy_refcounts={}", rng.pick(&["on", "off"])));
        }
        if rng.one_in(3) {
            options.push(format!("refcount_bits={}", 1 << rng.below(7)));
        }
        let old = self.size();
        let mut size = old;
        if options.is_empty() || rng.one_in(3) {
            size = old + SECTOR * rng.below(300) as usize;
            options.push(format!("size={size}"));
        }
        let width = options.iter().any(|o| o.starts_with("refcount_bits"));
        // QEMU leaks the clusters of bitmaps, and resizes no image with an inconsistent one.
        let has_bitmaps = !self.bitmaps.is_empty() && version == 2 || self.has_lost_bitmaps();
        // It shows VM state in a larger disk.
        let shows = self.vm_state && size != old;
        let by = match width && self.kind.cluster > 65536 || has_bitmaps || shows {
            // QEMU may not end here.
            true => By::Zebu,
            false => either(rng),
        };
        let before = self.header(shell)?;
        let (cwd, name) = self.place(shell, rng);
        let args = words(&[
            "amend",
            "-q",
            "-f",
            "qcow2",
            "-o",
            &options.join(","),
            &name,
        ]);
        let answer = shell.img(by, cwd, &args)?;
        if answer.status != 0 {
            // What was changed before the failure stays so. A change that is refused changes nothing.
            let changed = self.header(shell)? != before;
            if by == By::Zebu && changed && shell.limit.is_none() {
                return Err(format!("amend failed in the middle: {}", answer.text()));
            }
            if by == By::Qemu || changed {
                self.adopt(shell, rng)?;
            }
            return Ok(());
        }
        self.kind.version = version;
        self.vm_state &= size == old;
        self.disk.resize(size);
        self.resize_bitmaps(by);
        self.touched = vec![true; self.clusters()];
        if version == 2 && self.base.is_none() {
            // Zero clusters become unallocated.
            self.disk.disown();
            self.snaps.iter_mut().for_each(|snap| snap.disk.disown());
        }
        match size == old {
            true => Ok(()),
            false => self.resized(shell, rng, by, old),
        }
    }

    /// The fields of the header that `amend` changes.
    fn header(&self, shell: &Shell) -> Result<(Vec<u8>, Vec<u8>)> {
        let bytes = fs::read(self.path(shell)).map_err(|e| e.to_string())?;
        let field = |from: usize, to: usize| bytes.get(from..to).unwrap_or_default().to_vec();
        // Version, size, compatible features (of version 3), refcount order.
        let mut fixed = field(4, 8);
        fixed.extend(field(24, 32));
        let more = match bytes[7] {
            3 => [field(80, 88), field(96, 100)].concat(),
            _ => Vec::new(),
        };
        Ok((fixed, more))
    }

    /// Takes version and size from the header after `amend` has failed.
    fn adopt(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let (fixed, _) = self.header(shell)?;
        self.kind.version = u32::from(fixed[3]);
        let size = u64::from_be_bytes(fixed[4..12].try_into().expect("8 bytes"));
        let bytes = self.content(shell, rng, By::Qemu, &[])?;
        let kept = self.size().min(bytes.len());
        crate::world::compare(&bytes[..kept], &self.disk.bytes[..kept])?;
        self.disk.resize(size as usize);
        let before = std::mem::replace(&mut self.disk.bytes, bytes);
        self.replaced(&before);
        self.clean_end = false;
        self.touched = vec![true; self.clusters()];
        Ok(())
    }

    /// Replaces the image by a copy, without snapshots and backing file.
    pub fn remake(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        if self.kind.data_file.is_some() {
            return Ok(());
        }
        let by = either(rng);
        let (cwd, name) = self.place(shell, rng);
        let copy = shell.root.join("img/copy.qcow2");
        let cluster = [512usize, 4096, 65536, self.kind.cluster][rng.below(4) as usize];
        let mut args = words(&["convert", "-f", "qcow2", "-O", "qcow2"]);
        args.extend(words(&["-o", &format!("cluster_size={cluster}")]));
        args.extend(rng.one_in(3).then(|| "-c".into()));
        if rng.one_in(3) {
            args.extend(words(&["-S", "0"]));
        }
        let keeps = !rng.one_in(3) && self.kind.version == 3 && !self.has_lost_bitmaps();
        let mut end = [name, bytes::text(copy.as_os_str().as_bytes())].to_vec();
        // Taken back to a snapshot in this way, it has the size of that, and no bitmaps.
        let snap = match self.snaps.is_empty() || !rng.one_in(3) {
            true => None,
            false => Some(rng.below(self.snaps.len() as u64) as usize),
        };
        let (by, keeps) = match snap {
            None => (by, keeps),
            Some(nth) => {
                let of = format!("snapshot.name={}", self.snaps[nth].name);
                end.splice(0..0, words(&["-l", &of]));
                let both = [words(&["convert", "-O", "qcow2", "--bitmaps"]), end.clone()].concat();
                if done(shell.img(By::Zebu, cwd, &both)?).is_ok() {
                    return Err("a snapshot got the bitmaps of the disk".into());
                }
                (By::Zebu, false)
            }
        };
        args.extend(keeps.then(|| "--bitmaps".into()));
        args.extend(end);
        done(shell.img(by, cwd, &args)?).map_err(|e| format!("{by:?} convert: {e}"))?;
        if let Some(nth) = snap {
            self.disk = self.snaps[nth].disk.clone();
        }
        self.vm_state = false;
        if !keeps {
            self.bitmaps.clear();
        }
        shell.note(format!(
            "mv img/copy.qcow2 img/{}",
            self.name.escape_debug()
        ));
        fs::rename(copy, self.path(shell)).map_err(|e| e.to_string())?;
        self.kind.cluster = cluster;
        self.kind.version = 3;
        self.kind.extended = false;
        self.base = None;
        self.clean_end = by == By::Zebu;
        self.mapped_past_end = false;
        self.snaps.clear();
        self.killed = false;
        self.disk = Disk::new(std::mem::take(&mut self.disk.bytes));
        self.touched = vec![true; self.clusters()];
        Ok(())
    }

    pub fn repair(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let by = match self.bitmaps.is_empty() || self.snaps.is_empty() {
            true => either(rng),
            // QEMU drops the snapshots of an image with bitmaps.
            false => By::Zebu,
        };
        let (cwd, name) = self.place(shell, rng);
        let args = words(&["check", "-q", "-f", "qcow2", "-r", "all", &name]);
        done(shell.img(by, cwd, &args)?).map_err(|e| format!("{by:?} check -r: {e}"))?;
        self.killed = false;
        Ok(())
    }
}
