//! Sessions: a program opens the image, reads and writes, and closes it or aborts.

use std::ops::Range;

use crate::common::Rng;
use crate::filters::{Filters, Options};
use crate::make::either;
use crate::program::{By, Shell};
use crate::world::{SECTOR, World, words};

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

impl World {
    /// A program opens the image, writes to it, and closes it or aborts.
    pub fn session(&mut self, shell: &mut Shell, rng: &mut Rng, killed: bool) -> Result<()> {
        let mut by = either(rng);
        let count = 1 + rng.below(10);
        let mut script = Script {
            concurrent: rng.one_in(2),
            ..Script::default()
        };
        let mut compressed = 0;
        // Clusters that may be allocated are refused then.
        let compresses = self.kind.data_file.is_none() && rng.one_in(8);
        if compresses && !self.size().is_multiple_of(self.kind.cluster) {
            // QEMU opens no such image below `compress`.
            by = By::Zebu;
        }
        for _ in 0..count {
            if compresses {
                if let Some((command, range)) = self.compressed_part(rng) {
                    script.add(command, &range);
                }
                continue;
            }
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
        match compresses || rng.one_in(if self.snaps.is_empty() { 3 } else { 2 }) {
            true => {
                let filters = match compresses {
                    true => Filters::compressing(rng),
                    false => Filters::random(rng),
                };
                let options = self.image_options(by, rng);
                args.extend(filters.object());
                args.extend(filters.arguments(rng, &name, &options));
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
    pub fn end_of_file(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
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
    pub fn end_of_disk(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
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
    pub fn is_uniform(&self, range: &Range<usize>) -> bool {
        let bytes = self.disk.bytes.get(range.clone()).unwrap_or_default();
        !bytes.is_empty() && bytes.iter().all(|b| *b == bytes[0])
    }

    /// Options of the image, some of which change how data are written.
    fn image_options(&self, by: By, rng: &mut Rng) -> Options {
        let mut options: Vec<String> = Vec::new();
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
            let start = format!("{key}=");
            let fits = !options.iter().any(|other| other.starts_with(&start))
                && (key != "discard-no-unref" || keeps)
                && (key != "pass-discard-request" || passes);
            if fits && rng.one_in(one_in) {
                options.extend(option.split(',').map(String::from));
            }
        }
        if self.kind.version == 3 && rng.one_in(4) {
            options.push(format!("lazy-refcounts={}", rng.pick(&["on", "off"])));
        }
        let pairs = options.iter().filter_map(|option| option.split_once('='));
        pairs
            .map(|(key, value)| (key.into(), value.into()))
            .collect()
    }

    /// A random range: any sectors, whole clusters, or at the end of the disk.
    pub fn range(&self, rng: &mut Rng) -> (usize, usize) {
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

    pub fn touch(&mut self, at: usize, length: usize) {
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
    pub fn owns_zeroes(&self) -> bool {
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

    pub fn discard(&mut self, rng: &mut Rng) -> (String, Range<usize>) {
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
    pub fn compressed(&mut self, rng: &mut Rng) -> Option<String> {
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

    /// A write to a whole cluster, or to a part of one, that was never written.
    fn compressed_part(&mut self, rng: &mut Rng) -> Option<(String, Range<usize>)> {
        let cluster = self.kind.cluster;
        let nth = rng.below(self.clusters() as u64) as usize;
        if self.touched[nth] {
            return None;
        }
        let cluster = cluster.min(self.size() - nth * cluster);
        let sectors = (cluster / SECTOR) as u64;
        let (mut skip, mut length) = (0, cluster);
        if rng.one_in(2) {
            skip = SECTOR * rng.below(sectors) as usize;
            length = SECTOR * (1 + rng.below(sectors) as usize);
        }
        let at = nth * self.kind.cluster + skip;
        let length = length.min(cluster - skip);
        let byte = 1 + rng.below(255) as u8;
        self.disk.put(at, length, byte, true);
        self.touch(at, length);
        Some((format!("write -P {byte} {at} {length}"), at..at + length))
    }
}
