//! Changes of the backing chain of the image at rest.

use crate::common::Rng;
use crate::filters::named_with_filters;
use crate::make::either;
use crate::program::{Answer, By, Shell};
use crate::world::{SECTOR, World, done, words};
use zebu_testkit::WRITTEN;

/// The option with which snapshots may change with the backing file.
const CHANGE: &str = "--change-snapshots";

type Result<T> = std::result::Result<T, String>;

impl World {
    /// A random backing file, or none, and the options of `rebase` for it.
    pub fn other_base(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<Option<usize>> {
        if self.bases.len() < 5 && rng.one_in(3) {
            self.new_base(shell, rng, self.size())?;
        }
        let count = self.bases.len() as u64;
        Ok((count > 0 && !rng.one_in(3)).then(|| rng.below(count) as usize))
    }

    /// A base, or none, as an option of `rebase`.
    pub fn base_option(&self, shell: &Shell, rng: &mut Rng, base: Option<usize>) -> [String; 4] {
        let (name, format) = match base {
            None => (String::new(), "qcow2"),
            Some(base) => {
                let base = &self.bases[base];
                let path = shell.absolute(&base.name);
                let filtered = (rng.one_in(4))
                    .then(|| named_with_filters(rng, (&path, base.format)))
                    .flatten();
                (filtered.unwrap_or_else(|| base.name.clone()), base.format)
            }
        };
        ["-b".into(), name, "-F".into(), format.into()]
    }

    /// `rebase -u`: unallocated sectors show the new backing file.
    pub fn change_base(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let base = self.other_base(shell, rng)?;
        self.change_base_to(shell, rng, base)
    }

    pub fn change_base_to(
        &mut self,
        shell: &mut Shell,
        rng: &mut Rng,
        base: Option<usize>,
    ) -> Result<()> {
        if self.is_data_raw() {
            return Ok(());
        }
        let own = self.mapped(shell, rng)?;
        if let Some(lost) = (0..own.len()).find(|s| self.disk.own[*s] && !own[*s]) {
            return Err(format!(
                "sector {lost:#x} was written and is not in the image"
            ));
        }
        let by = either(rng);
        let (cwd, name) = self.place(shell, rng);
        let mut all = words(&["rebase", "-q", "-u", "-f", "qcow2"]);
        all.extend(self.base_option(shell, rng, base));
        all.push(name);
        done(shell.img(by, cwd, &all)?).map_err(|e| format!("{by:?} rebase -u: {e}"))?;
        let below = self.below(base, self.size());
        let before = self.disk.bytes.clone();
        for (sector, own) in own.iter().enumerate() {
            if !own {
                let range = sector * SECTOR..(sector + 1) * SECTOR;
                self.disk.bytes[range.clone()].copy_from_slice(&below[range]);
            }
        }
        self.base = base;
        self.replaced(&before);
        self.adopt_snapshots(shell, rng)
    }

    /// A safe `rebase`: the content of the active disk stays.
    pub fn rebase(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        if self.is_data_raw() {
            return Ok(());
        }
        let base = self.other_base(shell, rng)?;
        let by = match self.kind.version == 2 && self.base.is_none() {
            // QEMU writes zeroes then, which deallocate clusters in version 2.
            true => By::Zebu,
            false => either(rng),
        };
        let (cwd, name) = self.place(shell, rng);
        let mut all = words(&["rebase", "-q", "-f", "qcow2"]);
        let adopts = by == By::Qemu || rng.one_in(3);
        all.extend((adopts && by == By::Zebu).then(|| CHANGE.into()));
        // QEMU fails with smaller clusters in the backing file, and with subclusters.
        let can_compress = by == By::Zebu && self.kind.data_file.is_none();
        all.extend((can_compress && rng.one_in(3)).then(|| "-c".into()));
        all.extend(self.base_option(shell, rng, base));
        all.push(name);
        let answer = shell.img(by, cwd, &all)?;
        if !adopts && self.is_refused_for_snapshots(&answer)? {
            return Ok(());
        }
        done(answer).map_err(|e| format!("{by:?} rebase: {e}"))?;
        self.base = base;
        self.clean_end &= by == By::Zebu;
        self.touched.fill(true);
        match adopts {
            true => self.adopt_snapshots(shell, rng),
            false => Ok(()),
        }
    }

    pub fn commit(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let Some(base) = self.base else {
            return Ok(());
        };
        // Other images over the base would change.
        if self.bases.iter().any(|b| b.backing == Some(base)) {
            return Ok(());
        }
        let is_fixed = WRITTEN
            .iter()
            .any(|written| written.name == self.bases[base].format && !written.is_resized);
        if is_fixed && self.bases[base].bytes.len() < self.size() {
            return Ok(());
        }
        let by = either(rng);
        let (cwd, name) = self.place(shell, rng);
        let keeps = rng.one_in(3);
        let mut args = words(&["commit", "-q", "-f", "qcow2"]);
        let adopts = by == By::Qemu || rng.one_in(3);
        args.extend((adopts && by == By::Zebu).then(|| CHANGE.into()));
        args.extend(keeps.then(|| "-d".into()));
        args.push(name);
        let answer = shell.img(by, cwd, &args)?;
        if !adopts && self.is_refused_for_snapshots(&answer)? {
            return Ok(());
        }
        done(answer).map_err(|e| format!("{by:?} commit: {e}"))?;
        let bytes = &mut self.bases[base].bytes;
        if bytes.len() < self.disk.bytes.len() {
            bytes.resize(self.disk.bytes.len(), 0);
        }
        bytes[..self.disk.bytes.len()].copy_from_slice(&self.disk.bytes);
        if !keeps {
            self.disk.disown();
        }
        self.verify_bases(shell)?;
        match adopts {
            true => self.adopt_snapshots(shell, rng),
            false => Ok(()),
        }
    }

    /// Whether zebu refuses another backing file because of the snapshots. Nothing changes then.
    pub fn is_refused_for_snapshots(&self, answer: &Answer) -> Result<bool> {
        let refused = answer.status == 1 && answer.text().contains("shows data of the backing");
        match refused && !self.has_showing_snapshots() {
            true => Err(format!("the snapshots have it all: {}", answer.text())),
            false => Ok(refused),
        }
    }
}
