//! Bitmaps: either program changes them, and both keep them. After each step what was written since
//! must be dirty in them.

use std::process::Command;
use std::sync::LazyLock;

use zebu::block::{Device, DirtyBits, Format, OpenOptions};
use zebu::storage::{OpenFile, Queue, open_file};

use crate::common::server::{have, wait_until};
use crate::common::{Rng, bytes, peer};
use crate::dirty::Bitmap;
use crate::make::either;
use crate::program::{By, Shell};
use crate::world::{World, done, words};

type Result<T> = std::result::Result<T, String>;

/// A bitmap of the image.
pub struct Tracked {
    pub bitmap: Bitmap,
    /// It is inconsistent: it can only be removed, and QEMU does not resize the image.
    pub lost: bool,
}

fn said(what: &str) -> impl FnOnce(zebu::Error) -> String {
    move |e| format!("{what}: {e}")
}

impl World {
    /// Adds or changes a bitmap.
    pub fn change_bitmap(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        if self.kind.version != 3 {
            return Ok(());
        }
        let content = self.disk.bytes.clone();
        let lost = self.bitmaps.iter().position(|tracked| tracked.lost);
        if let Some(nth) = lost
            && !rng.one_in(4)
        {
            let lost = self.bitmaps.remove(nth);
            return self.run_bitmap(shell, rng, &["--remove"], &lost.bitmap.name);
        }
        if self.bitmaps.is_empty() || self.bitmaps.len() < 3 && rng.one_in(2) {
            self.count += 1;
            let granularity = 512 << rng.below(12);
            let enabled = !rng.one_in(4);
            let new = Bitmap::new(format!("b{}", self.count), granularity, enabled, &content);
            let granularity = granularity.to_string();
            let mut args = vec!["--add", "-g", &granularity];
            args.extend((!enabled).then_some("--disable"));
            self.run_bitmap(shell, rng, &args, &new.name)?;
            self.bitmaps.push(Tracked {
                bitmap: new,
                lost: false,
            });
            return Ok(());
        }
        let nth = rng.below(self.bitmaps.len() as u64) as usize;
        let other = rng.below(self.bitmaps.len() as u64) as usize;
        if self.bitmaps[nth].lost || self.bitmaps[other].lost {
            return Ok(());
        }
        let name = self.bitmaps[nth].bitmap.name.clone();
        match rng.below(6) {
            0 => {
                self.bitmaps.remove(nth);
                self.run_bitmap(shell, rng, &["--remove"], &name)
            }
            1 | 2 => {
                self.bitmaps[nth].bitmap.clear(&content);
                self.run_bitmap(shell, rng, &["--clear"], &name)
            }
            3 => {
                let other = self.bitmaps[other].bitmap.name.clone();
                let bits = self.read_bitmap(shell, &other)?;
                self.bitmaps[nth].bitmap.merge(&bits);
                self.run_bitmap(shell, rng, &["--merge", &other], &name)
            }
            kind => {
                let enabled = kind == 4;
                self.bitmaps[nth].bitmap.enable(enabled, &content);
                let action = if enabled { "--enable" } else { "--disable" };
                self.run_bitmap(shell, rng, &[action], &name)
            }
        }
    }

    fn run_bitmap(
        &self,
        shell: &mut Shell,
        rng: &mut Rng,
        args: &[&str],
        name: &str,
    ) -> Result<()> {
        let by = either(rng);
        let (cwd, file) = self.place(shell, rng);
        let mut all = words(&["bitmap", "-f", "qcow2"]);
        all.extend(words(args));
        all.extend([file, name.into()]);
        let answer = shell.img(by, cwd, &all)?;
        done(answer).map_err(|e| format!("{by:?} bitmap {args:?}: {e}"))?;
        Ok(())
    }

    /// The content has changed from `before` without a write.
    pub fn replaced(&mut self, before: &[u8]) {
        for tracked in &mut self.bitmaps {
            tracked.bitmap.resize_with(self.disk.bytes.len(), false);
            let both = before.len().min(self.disk.bytes.len());
            let mut before = before[..both].to_vec();
            before.resize(self.disk.bytes.len(), 0);
            tracked.bitmap.replace(&before, &self.disk.bytes);
        }
    }

    /// A program has given the disk another size.
    pub fn resize_bitmaps(&mut self, by: By) {
        for tracked in &mut self.bitmaps {
            // QEMU does not count what the disk gains as written.
            let dirty = by == By::Zebu && tracked.bitmap.enabled;
            tracked.bitmap.resize_with(self.disk.bytes.len(), dirty);
        }
    }

    /// Whether a bitmap is inconsistent.
    pub fn has_lost_bitmaps(&self) -> bool {
        self.bitmaps.iter().any(|tracked| tracked.lost)
    }

    /// Opens the image without its other files.
    fn inspected(&self, shell: &Shell, queue: &Queue) -> Result<Device> {
        let file = open_file(self.path(shell), OpenFile::default()).map_err(|e| e.to_string())?;
        let options = OpenOptions::default()
            .inspect(true)
            .format(Some(Format::QCOW2));
        Device::from_storage(queue, file, &options).map_err(said("open"))
    }

    fn read_bitmap(&self, shell: &Shell, name: &str) -> Result<DirtyBits> {
        let queue = Queue::new(Default::default()).expect("a queue");
        let device = self.inspected(shell, &queue)?;
        let bits = queue.block_on(device.bitmap(&queue, name));
        bits.map_err(said("read a bitmap"))
    }

    /// Fails unless the bitmaps are right. After a kill, some may be inconsistent.
    pub fn verify_bitmaps(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        let queue = Queue::new(Default::default()).expect("a queue");
        let device = self.inspected(shell, &queue)?;
        let list = queue.block_on(device.bitmaps(&queue));
        let list = list.map_err(said("list the bitmaps"))?;
        drop(device);
        let names = self.bitmaps.iter().map(|t| t.bitmap.name.as_bytes());
        if !list.iter().map(|info| &info.name[..]).eq(names) {
            return Err(format!("the bitmaps are {list:?}"));
        }
        for (nth, info) in list.iter().enumerate() {
            if info.inconsistent && self.killed {
                self.bitmaps[nth].lost = true;
            }
            let tracked = &self.bitmaps[nth];
            if tracked.lost != info.inconsistent || tracked.bitmap.enabled != info.enabled {
                return Err(format!("bitmap {info:?}"));
            }
            if tracked.lost {
                continue;
            }
            let (name, content) = (&tracked.bitmap.name, &self.disk.bytes);
            let bits = self.read_bitmap(shell, name)?;
            let right = tracked.bitmap.compare(&bits, content);
            right.map_err(|e| format!("bitmap {name}: {e}"))?;
            if rng.one_in(4) && have_nbdinfo() {
                let theirs = self.read_by_qemu(shell, rng, info.granularity, name)?;
                if !theirs.ranges().eq(bits.ranges()) {
                    return Err(format!(
                        "QEMU reads bitmap {name} as {theirs:?}, not {bits:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Reads a bitmap through QEMU's server.
    fn read_by_qemu(
        &self,
        shell: &Shell,
        rng: &mut Rng,
        granularity: u64,
        name: &str,
    ) -> Result<DirtyBits> {
        let (cwd, file) = self.place(shell, rng);
        // Of a name that needs no escapes in a URI.
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let socket = folder.path().join("bitmap.sock");
        let mut server = Command::new(peer().nbd())
            .args(["-r", "-t", "-f", "qcow2", "-B", name, "-k"])
            .arg(&socket)
            .arg(bytes::os(&file))
            .current_dir(shell.root.join(cwd))
            .spawn()
            .map_err(|e| format!("qemu-nbd: {e}"))?;
        let map = format!("--map=qemu:dirty-bitmap:{name}");
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let mut answer = None;
        wait_until("a map", || {
            let output = Command::new("nbdinfo")
                .args(["--json", &map])
                .arg(&uri)
                .output();
            let ended = server.try_wait().is_ok_and(|status| status.is_some());
            answer = output.ok().filter(|output| output.status.success());
            answer.is_some() || ended
        });
        let _ = server.kill();
        let _ = server.wait();
        let answer = answer.ok_or("qemu-nbd does not serve the bitmap")?;
        let map: serde_json::Value =
            serde_json::from_slice(&answer.stdout).map_err(|e| e.to_string())?;
        let mut bits = DirtyBits::new(self.size() as u64, granularity);
        for extent in map.as_array().into_iter().flatten() {
            let number = |key: &str| extent[key].as_u64().unwrap_or(0);
            if number("type") & 1 != 0 {
                bits.set(number("offset")..number("offset") + number("length"));
            }
        }
        Ok(bits)
    }
}

fn have_nbdinfo() -> bool {
    static HAVE: LazyLock<bool> = LazyLock::new(|| have("nbdinfo"));
    *HAVE
}
