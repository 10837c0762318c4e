//! The steps: sessions of reads and writes, and other changes of the image.

use std::fs;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::{Rng, bytes};
use crate::make::either;
use crate::program::{Answer, By, Shell};
use crate::world::{Disk, SECTOR, Snap, World, as_value, done, odd_name, words};
use zebu_testkit::WRITTEN;

/// The option with which snapshots may change with the backing file.
const CHANGE: &str = "--change-snapshots";

type Result<T> = std::result::Result<T, String>;

/// The commands of a session.
#[derive(Default)]
struct Script {
    commands: Vec<String>,
    /// Whether writes that do not overlap are in flight together.
    concurrent: bool,
    /// Ranges of writes in flight.
    in_flight: Vec<Range<usize>>,
}

impl Script {
    /// Adds a command that changes a range.
    fn add(&mut self, command: String, range: &Range<usize>) {
        if !self.concurrent || !command.starts_with("write") {
            return self.alone(command);
        }
        let apart = |other: &Range<usize>| other.end <= range.start || range.end <= other.start;
        if !self.in_flight.iter().all(apart) {
            self.wait();
        }
        self.in_flight.push(range.clone());
        self.commands.push(format!("aio_{command}"));
    }

    /// Adds a command that runs when no write is in flight.
    fn alone(&mut self, command: String) {
        self.wait();
        self.commands.push(command);
    }

    /// Waits for writes in flight.
    fn wait(&mut self) {
        if !self.in_flight.is_empty() {
            self.in_flight.clear();
            self.commands.push("aio_flush".into());
        }
    }
}

/// Filters over an image, and over its file.
struct Filters {
    throttle: bool,
    copy_on_read: bool,
    preallocate: bool,
    throttle_file: bool,
}

impl Filters {
    fn random(rng: &mut Rng) -> Filters {
        Filters {
            throttle: rng.one_in(4),
            copy_on_read: rng.one_in(4),
            preallocate: rng.one_in(4),
            throttle_file: rng.one_in(6),
        }
    }

    /// The option by which the group of `throttle` is defined.
    fn object(&self) -> Vec<String> {
        match self.throttle || self.throttle_file {
            true => words(&["--object", "throttle-group,id=g,x-iops-total=5000"]),
            false => Vec::new(),
        }
    }

    /// The options of an image with these filters.
    fn over(&self, image: &str) -> String {
        const THROTTLE: &str = "driver=throttle,throttle-group=g";
        let mut options: Vec<String> = image.split("file.driver=file").map(String::from).collect();
        let mut prefix = String::from("file.");
        let mut below = String::new();
        for (is_there, filter) in [
            (self.preallocate, "driver=preallocate,prealloc-size=200000"),
            (self.throttle_file, THROTTLE),
        ] {
            if is_there {
                for option in filter.split(',') {
                    below += &format!("{prefix}{option},");
                }
                prefix += "file.";
            }
        }
        if let [_, rest] = &mut options[..] {
            *rest = format!(
                "{below}{prefix}driver=file{}",
                rest.replacen("file.", &prefix, 1)
            );
        }
        let mut image = options.concat();
        for (is_there, filter) in [
            (self.copy_on_read, "driver=copy-on-read"),
            (self.throttle, THROTTLE),
        ] {
            if is_there {
                image = format!("{filter},file.{}", under(&image));
            }
        }
        image
    }
}

/// Options, each a level lower, but for the prefix of the first. A comma within a value is doubled.
fn under(options: &str) -> String {
    let marked = options.replace(",,", "\u{1}").replace(',', ",file.");
    marked.replace('\u{1}', ",,")
}

impl World {
    /// One random step.
    pub fn step(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        if self.killed && rng.one_in(2) {
            return self.repair(shell, rng);
        }
        match rng.below(40) {
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

    /// A program opens the image, writes to it, and closes it or aborts.
    fn session(&mut self, shell: &mut Shell, rng: &mut Rng, killed: bool) -> Result<()> {
        let by = either(rng);
        let count = 1 + rng.below(10);
        let mut script = Script {
            concurrent: rng.one_in(2),
            ..Script::default()
        };
        let mut compressed = 0;
        for _ in 0..count {
            let (command, range) = match rng.below(12) {
                0..=5 => self.write(rng),
                6..=8 => self.zero(rng),
                9 => self.discard(rng),
                10 => ("flush".into(), 0..0),
                // At the end: QEMU 10 may append compressed data to a host cluster that it has
                // freed and allocated again.
                _ => {
                    compressed += 1;
                    continue;
                }
            };
            script.add(command, &range);
            if rng.one_in(4) && self.is_uniform(&range) {
                let byte = self.disk.bytes[range.start];
                script.alone(format!("read -P {byte} {} {}", range.start, range.len()));
            }
        }
        for _ in 0..compressed {
            if let Some(command) = self.compressed(rng) {
                script.alone(command);
            }
        }
        script.alone("flush".into());
        if killed {
            script.alone("abort".into());
        }
        let (cwd, name) = self.place(shell, rng);
        let mut args = self.opening(shell, rng);
        args.extend(words(&["-d", "unmap"]));
        // Some of them change what a discard leaves to snapshots.
        match rng.one_in(if self.snaps.is_empty() { 3 } else { 2 }) {
            true => {
                let filters = Filters::random(rng);
                let options = self.image_options(by, rng, &name);
                args.extend(filters.object());
                args.extend(["--image-opts".into(), filters.over(&options)]);
            }
            false => args.extend(words(&["-f", "qcow2", &name])),
        }
        let answer = shell.io(by, cwd, &args, &script.commands)?;
        let right = match killed {
            true => answer.status >= 128,
            false => answer.status == 0 && !answer.out.contains("failed"),
        };
        if !right {
            return Err(format!("{by:?} session: {}", answer.text()));
        }
        self.clean_end &= by == By::Zebu;
        // Opening repairs a dirty image, but need not repair leaks.
        self.killed |= killed;
        Ok(())
    }

    /// The length of the file changes, and zebu writes a few sectors near the end, mostly with direct
    /// I/O.
    fn end_of_file(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let cluster = self.kind.cluster;
        let place = |rng: &mut Rng, world: &World| {
            let used: Vec<usize> = (0..world.clusters())
                .filter(|n| world.touched[*n])
                .collect();
            let nth = match used.len() as u64 {
                0 => 0,
                // The last clusters are at the end of the file.
                count => used[count as usize - 1 - rng.below(count.min(3)) as usize],
            };
            let sectors = (world.size().min((nth + 1) * cluster) - nth * cluster) / SECTOR;
            nth * cluster + SECTOR * rng.below(sectors as u64) as usize
        };
        for by in [either(rng), By::Zebu] {
            let mut commands = Vec::new();
            for _ in 0..1 + rng.below(2) {
                let at = place(rng, self);
                let length = (SECTOR * (1 + rng.below(8) as usize)).min(self.size() - at);
                let byte = 1 + rng.below(255) as u8;
                self.disk.put(at, length, byte, true);
                self.touch(at, length);
                commands.push(format!("write -P {byte} {at} {length}"));
            }
            let (cwd, name) = self.place(shell, rng);
            let mut args = words(&["-f", "qcow2"]);
            match rng.one_in(3) {
                true => args.extend(self.opening(shell, rng)),
                false => args.extend(words(&["-t", "none"])),
            }
            args.push(name);
            let answer = shell.io(by, cwd, &args, &commands)?;
            if answer.status != 0 || answer.out.contains("failed") {
                return Err(format!("{by:?} session: {}", answer.text()));
            }
            self.clean_end &= by == By::Zebu;
            if commands.len() == 1 {
                self.change_length(shell, rng)?;
            }
        }
        Ok(())
    }

    /// Writes a few sectors at the end of the disk, perhaps changes the backing file, and makes the disk
    /// larger.
    fn end_of_disk(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        if rng.one_in(2) {
            let size = self.size();
            if self.bases.len() < 6 {
                self.new_base(shell, rng, size + self.kind.cluster)?;
            }
            if let Some(longer) = self.bases.iter().rposition(|b| b.bytes.len() > size) {
                self.change_base_to(shell, rng, Some(longer))?;
            }
        }
        let length = SECTOR * (1 + rng.below(4) as usize);
        let length = length.min(self.size());
        let gap = SECTOR * rng.below(8) as usize;
        let at = (self.size() - length).saturating_sub(gap);
        let byte = 1 + rng.below(255) as u8;
        self.disk.put(at, length, byte, true);
        self.touch(at, length);
        let by = match rng.one_in(3) {
            true => By::Qemu,
            false => By::Zebu,
        };
        let (cwd, name) = self.place(shell, rng);
        let mut args = words(&["-f", "qcow2"]);
        args.extend(self.opening(shell, rng));
        args.push(name);
        let answer = shell.io(by, cwd, &args, &[format!("write -P {byte} {at} {length}")])?;
        if answer.status != 0 || answer.out.contains("failed") {
            return Err(format!("{by:?} session: {}", answer.text()));
        }
        self.clean_end &= by == By::Zebu;
        match rng.below(3) {
            0 => self.rebase(shell, rng)?,
            1 => self.change_base(shell, rng)?,
            _ => {}
        }
        let more = SECTOR * (1 + rng.below(2 * self.kind.cluster as u64 / 512) as usize);
        self.resize_to(shell, rng, self.size() + more)
    }

    /// Whether a range has one value.
    fn is_uniform(&self, range: &Range<usize>) -> bool {
        let bytes = self.disk.bytes.get(range.clone()).unwrap_or_default();
        !bytes.is_empty() && bytes.iter().all(|b| *b == bytes[0])
    }

    /// The image as options, with some that change how data are written.
    fn image_options(&self, by: By, rng: &mut Rng, name: &str) -> String {
        let mut options = format!(
            "driver=qcow2,file.driver=file,file.filename={}",
            as_value(name)
        );
        for (one_in, option) in [
            (2, "l2-cache-entry-size=512,l2-cache-size=4096"),
            (3, "refcount-cache-size=4096"),
            (4, "overlap-check=all"),
            (4, "overlap-check=none"),
            (4, "detect-zeroes=on"),
            (4, "detect-zeroes=unmap"),
            (4, "pass-discard-other=on"),
            (4, "pass-discard-request=off"),
            (
                if self.snaps.is_empty() { 3 } else { 1 },
                "discard-no-unref=on",
            ),
        ] {
            let key = option.split(['=']).next().unwrap_or_default();
            // QEMU destroys data that snapshots share.
            let keeps = self.kind.version == 3 && (by == By::Zebu || self.snaps.is_empty());
            // Without this QEMU leaves the content of a raw data file.
            let passes = by == By::Zebu || !self.is_data_raw();
            let fits = !options.contains(&format!(",{key}="))
                && (key != "discard-no-unref" || keeps)
                && (key != "pass-discard-request" || passes);
            if fits && rng.one_in(one_in) {
                options.push(',');
                options.push_str(option);
            }
        }
        if self.kind.version == 3 && rng.one_in(4) {
            options.push_str(&format!(",lazy-refcounts={}", rng.pick(&["on", "off"])));
        }
        options
    }

    /// A random range: any sectors, whole clusters, or at the end of the disk.
    fn range(&self, rng: &mut Rng) -> (usize, usize) {
        let cluster = self.kind.cluster;
        let sectors = self.size() / SECTOR;
        let (mut at, mut length) = (
            rng.below(sectors as u64) as usize * SECTOR,
            SECTOR * (1 + rng.below((2 * cluster / SECTOR) as u64) as usize),
        );
        match rng.below(4) {
            0 => {
                at = at / cluster * cluster;
                length = cluster * (1 + rng.below(3) as usize);
            }
            1 => length = SECTOR * (1 + rng.below(8) as usize),
            // The end of the disk.
            2 if rng.one_in(3) => {
                at = self.size() - length.min(self.size());
            }
            _ => {}
        }
        (at, length.min(self.size() - at))
    }

    fn touch(&mut self, at: usize, length: usize) {
        let cluster = self.kind.cluster;
        self.touched[at / cluster..(at + length).div_ceil(cluster)].fill(true);
    }

    /// A write, and its range.
    pub fn write(&mut self, rng: &mut Rng) -> (String, Range<usize>) {
        let (at, length) = self.range(rng);
        let byte = match rng.one_in(12) {
            true => 0,
            false => 1 + rng.below(255) as u8,
        };
        // Zeroes may be detected.
        let own = byte != 0 || self.owns_zeroes();
        self.disk.put(at, length, byte, own);
        self.touch(at, length);
        (format!("write -P {byte} {at} {length}"), at..at + length)
    }

    /// Whether the image itself must have zeroes that were written. Version 2 without a backing file
    /// may deallocate clusters instead. With a raw data file nothing hides a backing file.
    fn owns_zeroes(&self) -> bool {
        (self.kind.version == 3 || self.base.is_some()) && !self.is_data_raw()
    }

    pub fn zero(&mut self, rng: &mut Rng) -> (String, Range<usize>) {
        let (at, length) = self.range(rng);
        let unmap = if rng.one_in(2) { " -u" } else { "" };
        let own = self.owns_zeroes();
        self.disk.put(at, length, 0, own);
        self.touch(at, length);
        (format!("write -z{unmap} {at} {length}"), at..at + length)
    }

    fn discard(&mut self, rng: &mut Rng) -> (String, Range<usize>) {
        let (at, length) = self.range(rng);
        let cluster = self.kind.cluster;
        let end = match at + length == self.size() {
            true => at + length,
            false => (at + length) / cluster * cluster,
        };
        let start = at.next_multiple_of(cluster);
        let does_nothing = self.kind.version == 2 && self.base.is_some();
        if start < end && !does_nothing {
            self.disk.put(start, end - start, 0, false);
        }
        self.touch(at, length);
        (format!("discard {at} {length}"), start..end.max(start))
    }

    /// A compressed write to a cluster that was never written.
    fn compressed(&mut self, rng: &mut Rng) -> Option<String> {
        let cluster = self.kind.cluster;
        let nth = rng.below(self.clusters() as u64) as usize;
        if self.kind.data_file.is_some() || self.touched[nth] {
            return None;
        }
        let at = nth * cluster;
        let length = cluster.min(self.size() - at);
        let byte = 1 + rng.below(255) as u8;
        self.disk.put(at, length, byte, true);
        self.touch(at, length);
        Some(format!("write -c -P {byte} {at} {length}"))
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
    fn write_vm_state(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let (cwd, name) = self.place(shell, rng);
        let args = words(&["-f", "qcow2", &name]);
        let length = SECTOR as u64 * (1 + rng.below(200));
        let write = format!("write -b -P 238 0 {length}");
        done(shell.io(By::Zebu, cwd, &args, &[write])?).map_err(|e| format!("write -b: {e}"))?;
        self.vm_state = true;
        Ok(())
    }

    /// Whether refcounts are too narrow for a few snapshots.
    fn has_narrow_refcounts(&self, shell: &Shell) -> Result<bool> {
        let bytes = fs::read(self.path(shell)).map_err(|e| e.to_string())?;
        Ok(bytes[7] == 3 && bytes[99] < 3)
    }

    /// A random backing file, or none, and the options of `rebase` for it.
    fn other_base(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<Option<usize>> {
        if self.bases.len() < 5 && rng.one_in(3) {
            self.new_base(shell, rng, self.size())?;
        }
        let count = self.bases.len() as u64;
        Ok((count > 0 && !rng.one_in(3)).then(|| rng.below(count) as usize))
    }

    /// A base, or none, as an option of `rebase`.
    fn base_option(&self, base: Option<usize>) -> [String; 4] {
        let (name, format) = match base {
            None => ("", "qcow2"),
            Some(base) => (self.bases[base].name.as_str(), self.bases[base].format),
        };
        ["-b".into(), name.into(), "-F".into(), format.into()]
    }

    /// `rebase -u`: unallocated sectors show the new backing file.
    fn change_base(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let base = self.other_base(shell, rng)?;
        self.change_base_to(shell, rng, base)
    }

    fn change_base_to(
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
        all.extend(self.base_option(base));
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
        all.extend(self.base_option(base));
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

    fn commit(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
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
    fn is_refused_for_snapshots(&self, answer: &Answer) -> Result<bool> {
        let refused = answer.status == 1 && answer.text().contains("shows data of the backing");
        match refused && !self.has_showing_snapshots() {
            true => Err(format!("the snapshots have it all: {}", answer.text())),
            false => Ok(refused),
        }
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

    fn repair(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
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
