//! Steps in which zebu may make no file longer than a limit (`ulimit -f`): what does not fit
//! fails alone, and what succeeded is there.

use std::collections::BTreeMap;
use std::{fs, iter};

use crate::common::rng::Rng;
use crate::program::{By, Shell};
use crate::world::{SECTOR, World, words};

type Result<T> = std::result::Result<T, String>;

impl World {
    /// One of these steps.
    pub fn limited(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        // The repair of an image that was killed may need space, and so do bitmaps at a close.
        if self.killed || !self.bitmaps.is_empty() {
            return Ok(());
        }
        shell.limit = Some(self.limit(shell, rng)?);
        let result = match rng.below(8) {
            0 => {
                let more = SECTOR * (1 + rng.below(4 * self.kind.cluster as u64 / 512) as usize);
                self.resize_to(shell, rng, self.size() + more)
            }
            1 => self.snapshot(shell, rng),
            2 => self.rebase(shell, rng),
            3 => self.amend(shell, rng),
            4 => self.remake(shell, rng),
            _ => self.limited_session(shell, rng),
        };
        shell.limit = None;
        self.no_copy(shell)?;
        match result {
            // A change that fails has not happened.
            Err(why) if why.contains("status 1: ") && why.contains("File too large") => Ok(()),
            result => result,
        }
    }

    /// A copy that could not be finished must not look whole.
    fn no_copy(&self, shell: &mut Shell) -> Result<()> {
        let copy = shell.root.join("img/copy.qcow2");
        if copy.exists() {
            let check = shell.img(By::Zebu, "img", &words(&["check", "copy.qcow2"]))?;
            if check.status == 0 {
                return Err(format!("half a copy: {}", check.text()));
            }
            fs::remove_file(copy).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// In KiB: a little more than the image's files have.
    fn limit(&self, shell: &Shell, rng: &mut Rng) -> Result<u64> {
        let mut longest = 0;
        for path in iter::once(self.path(shell)).chain(self.data_path(shell)) {
            let length = fs::metadata(path).map_err(|e| e.to_string())?.len();
            longest = length.max(longest);
        }
        let more = match rng.one_in(2) {
            true => 8,
            false => 4 * self.kind.cluster as u64 / 1024 + 8,
        };
        Ok(longest.div_ceil(1024) + rng.below(more))
    }

    /// Writes of which some do not fit. The range of one that fails reads as before or after
    /// it, sector by sector.
    fn limited_session(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let mut right = self.disk.clone();
        let (mut commands, mut writes) = (Vec::new(), Vec::new());
        for _ in 0..2 + rng.below(10) {
            let (command, range) = match rng.one_in(4) {
                true => self.zero(rng),
                false => self.write(rng),
            };
            let sectors = range.start / SECTOR..range.end / SECTOR;
            let (byte, own) = (self.disk.bytes[range.start], self.disk.own[sectors.start]);
            writes.push((sectors, byte, own));
            commands.push(command);
            if rng.one_in(4) {
                commands.push("flush".into());
            }
        }
        commands.push("flush".into());
        let (cwd, name) = self.place(shell, rng);
        let mut args = self.opening(shell, rng);
        args.extend(words(&["-d", "unmap", "-f", "qcow2", &name]));
        let answer = shell.io(By::Zebu, cwd, &args, &commands)?;
        let said = |line: &str| match line {
            "write failed: File too large" => Some(false),
            line => line.starts_with("wrote ").then_some(true),
        };
        let done: Vec<bool> = answer.out.lines().filter_map(said).collect();
        let failures = answer.out.matches("failed").count();
        let failed = done.iter().filter(|done| !**done).count();
        let status = i32::from(failed > 0);
        if done.len() != writes.len() || failures != failed || answer.status != status {
            return Err(format!("a limited session: {}", answer.text()));
        }

        let mut possible: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        for ((sectors, byte, own), done) in writes.into_iter().zip(done) {
            if done {
                let at = sectors.start * SECTOR;
                right.put(at, sectors.len() * SECTOR, byte, own);
                possible.retain(|sector, _| !sectors.contains(sector));
                continue;
            }
            for sector in sectors {
                possible.entry(sector).or_default().push(byte);
                right.own[sector] = false;
            }
        }
        let found = self.content(shell, rng, By::Qemu, &[])?;
        for (sector, bytes) in possible {
            let range = sector * SECTOR..(sector + 1) * SECTOR;
            let found = found.get(range.clone()).unwrap_or_default();
            if bytes.iter().any(|byte| *found == [*byte; SECTOR]) {
                right.bytes[range].copy_from_slice(found);
            }
        }
        self.disk = right;
        Ok(())
    }
}
