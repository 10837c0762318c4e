//! The library opens the image, and exchanges its chain while requests are in flight: an overlay is put on top and
//! taken away, an image is put between it and its backing file, or the backing chain is cut off.

use std::fs;
use std::ops::Range;
use std::path::Path;

use zebu::block::{Device, Format, OpenOptions, SharedDevice};
use zebu::names::Source;
use zebu::storage::{Handle, Queue};

use crate::common::Rng;
use crate::program::{By, Shell};
use crate::world::{Base, World, done, words};

type Result<T> = std::result::Result<T, String>;

fn said(what: &str) -> impl FnOnce(zebu::Error) -> String {
    move |e| format!("{what}: {e}")
}

/// The device, and requests in flight.
struct Session {
    queue: Queue,
    device: SharedDevice,
    flight: Vec<Handle<zebu::Result<()>>>,
    /// Ranges that were written.
    written: Vec<Range<usize>>,
}

impl Session {
    /// Waits for all requests.
    fn wait(&mut self) -> Result<()> {
        let mut result = Ok(());
        for handle in self.flight.drain(..) {
            let written = self.queue.block_on(handle).map_err(said("write"));
            result = result.and(written);
        }
        result
    }
}

fn open(queue: &Queue, path: &Path, alone: bool, write: bool) -> Result<Device> {
    let options = OpenOptions::default()
        .format(Some(Format::QCOW2))
        .write(write)
        .no_backing(alone)
        .discard(Some(true));
    let source = Source::Name(path.as_os_str().into());
    Device::open(queue, &source, &options).map_err(said("open"))
}

impl World {
    /// One of the exchanges, or some.
    pub fn exchange(&mut self, shell: &mut Shell, rng: &mut Rng) -> Result<()> {
        // A relative name of a data file is looked up in the current folder. VM state is the top image's.
        if self.fixed_cwd.is_some() || self.vm_state {
            return Ok(());
        }
        // The library does not repair the image of a program that was killed, as programs do.
        if self.killed {
            self.repair(shell, rng)?;
        }
        let path = self.path(shell);
        shell.note("# the library opens the image, writes, and exchanges its chain".into());
        let queue = Queue::new(Default::default()).map_err(|e| e.to_string())?;
        let device = SharedDevice::new(open(&queue, &path, false, true)?);
        let mut session = Session {
            queue,
            device,
            flight: Vec::new(),
            written: Vec::new(),
        };
        for _ in 0..1 + rng.below(3) {
            self.write_some(&mut session, rng);
            match rng.below(4) {
                0 if self.base.is_some() && self.snaps.is_empty() => {
                    self.cut_off(shell, &mut session)?;
                }
                1 if self.base.is_some() => self.put_between(shell, rng, &mut session)?,
                _ => self.over(shell, rng, &mut session)?,
            }
        }
        session.wait()?;
        let closed = session.device.close(&session.queue);
        session.queue.block_on(closed).map_err(said("close"))
    }

    /// Begins writes that do not overlap.
    fn write_some(&mut self, session: &mut Session, rng: &mut Rng) {
        for _ in 0..1 + rng.below(6) {
            let (command, range) = match rng.below(4) {
                0 => self.zero_apart(rng, &session.written),
                _ => self.write_apart(rng, &session.written),
            };
            let Some(byte) = command else { continue };
            session.written.push(range.clone());
            let (device, queue) = (session.device.clone(), session.queue.clone());
            session.flight.push(session.queue.spawn(async move {
                let device = device.enter().await?;
                let (at, length) = (range.start as u64, range.len());
                match byte {
                    0 => {
                        let zeroing = zebu::block::Zeroing::Unmap;
                        device
                            .write_zeroes(&queue, at, length as u64, zeroing)
                            .await
                    }
                    _ => {
                        let bytes = vec![byte; length];
                        device.write_buffer(&queue, at, bytes, length).await.1
                    }
                }
            }));
        }
    }

    fn write_apart(
        &mut self,
        rng: &mut Rng,
        others: &[Range<usize>],
    ) -> (Option<u8>, Range<usize>) {
        let (at, length) = self.range(rng);
        let range = at..at + length;
        if others
            .iter()
            .any(|other| other.start < range.end && range.start < other.end)
        {
            return (None, range);
        }
        let byte = 1 + rng.below(255) as u8;
        self.disk.put(at, length, byte, true);
        self.touch(at, length);
        (Some(byte), range)
    }

    fn zero_apart(&mut self, rng: &mut Rng, others: &[Range<usize>]) -> (Option<u8>, Range<usize>) {
        let (byte, range) = self.write_apart(rng, others);
        if byte.is_some() {
            self.disk
                .put(range.start, range.len(), 0, self.owns_zeroes());
        }
        (byte.map(|_| 0), range)
    }

    /// A new image over another one, in the folder of the image.
    fn overlay(
        &mut self,
        shell: &mut Shell,
        rng: &mut Rng,
        below: (&str, &str),
        size: usize,
    ) -> Result<String> {
        self.count += 1;
        let name = format!("x{}.qcow2", self.count);
        let cluster = [512, 4096, 65536, self.kind.cluster][rng.below(4) as usize];
        let options = format!("cluster_size={cluster}");
        let mut args = words(&["create", "-q", "-f", "qcow2", "-o", &options]);
        let size = size.to_string();
        args.extend(words(&["-u", "-b", below.0, "-F", below.1, &name, &size]));
        done(shell.img(By::Zebu, "img", &args)?)?;
        Ok(name)
    }

    /// An overlay is on top for a while.
    fn over(&mut self, shell: &mut Shell, rng: &mut Rng, session: &mut Session) -> Result<()> {
        let own = self.name.clone();
        let name = self.overlay(shell, rng, (&own, "qcow2"), self.size())?;
        let path = shell.root.join("img").join(&name);
        let overlay = open(&session.queue, &path, true, true)?;
        let queue = session.queue.clone();
        shell.note(format!("# {name} is put on top"));
        let change = session
            .device
            .change(async |device| device.put_on_top(&queue, overlay).await);
        queue.block_on(change).map_err(said("put on top"))?;
        self.write_some(session, rng);
        shell.note(format!("# {name} is committed and taken away"));
        let change = session.device.change(async |device| {
            device.commit_top(&queue).await?;
            device.take_off_top(&queue).await?.close(&queue).await
        });
        queue.block_on(change).map_err(said("take away"))?;
        fs::remove_file(path).map_err(|e| e.to_string())
    }

    /// An empty image is put between the image and its backing file, and stays there.
    fn put_between(
        &mut self,
        shell: &mut Shell,
        rng: &mut Rng,
        session: &mut Session,
    ) -> Result<()> {
        let Some(base) = self.base.filter(|_| self.bases.len() < 8) else {
            return Ok(());
        };
        let (below, format) = (self.bases[base].name.clone(), self.bases[base].format);
        let content = self.bases[base].bytes.clone();
        let name = self.overlay(shell, rng, (&below, format), content.len())?;
        let path = shell.root.join("img").join(&name);
        let between = open(&session.queue, &path, false, false)?;
        let queue = session.queue.clone();
        shell.note(format!("# {name} is put between"));
        let change = session.device.change(async |device| {
            let named = Some(name.as_ref());
            let replaced = device.replace_below(&queue, Some(between), named, Some("qcow2"));
            replaced.await
        });
        drop(queue.block_on(change).map_err(said("put between"))?);
        self.base = Some(self.bases.len());
        self.bases.push(Base {
            name,
            format: "qcow2",
            bytes: content,
            backing: Some(base),
        });
        Ok(())
    }

    /// All is copied to the image, which needs no backing file then.
    fn cut_off(&mut self, shell: &mut Shell, session: &mut Session) -> Result<()> {
        let queue = session.queue.clone();
        shell.note("# the backing chain is cut off".into());
        let change = session.device.change(async |device| {
            let mut at = 0;
            while at < device.size() {
                let rest = (device.size() - at).min(1 << 20);
                let status = device.status(&queue, at, rest).await?;
                let length = status.length as usize;
                if status.depth > 0 && status.present {
                    let read = device.read_buffer(&queue, at, queue.buffer(length), length);
                    let (buffer, read) = read.await;
                    read?;
                    device.write_buffer(&queue, at, buffer, length).await.1?;
                }
                at += status.length;
            }
            device.replace_below(&queue, None, None, None).await
        });
        drop(queue.block_on(change).map_err(said("cut off"))?);
        self.base = None;
        self.touched.fill(true);
        // Zeroes need not be in the image.
        self.disk.disown();
        Ok(())
    }
}
