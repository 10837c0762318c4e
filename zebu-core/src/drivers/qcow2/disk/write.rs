//! Writes: what is mapped to a cluster of its own is written in place, in parts like a read. The
//! rest is filled: host clusters are allocated, the old content around the write is read, both are
//! written, and then the clusters are mapped. `change.rs` orders such requests.

use super::Disk;
use crate::Result;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::map::target::Target;
use crate::drivers::qcow2::writer::change::{Change, NextWrite};
use crate::storage::{self, Iov, Queue};

impl Disk<'_> {
    /// Writes what is mapped already, and fills the rest.
    pub(crate) async fn write(&self, offset: u64, iov: &Iov) -> Result<()> {
        let (image, queue) = (self.image, self.queue);
        let range = offset..offset + iov.len() as u64;
        let announced = image.announce(queue, range).await?;
        let _stay = image.enter();
        let total = iov.len() as u64;
        let mut parts: Vec<(u64, usize, usize)> = Vec::new();
        let mut changes: Vec<(u64, usize, usize)> = Vec::new();
        let mut at = 0;
        while at < iov.len() {
            let guest = offset + at as u64;
            let length = match image.target(queue, guest, total - at as u64).await? {
                Target::InPlace { host, length } => {
                    image.prepare_data_write(queue, host, length).await?;
                    parts.push((host.0, at, length as usize));
                    length
                }
                Target::Change { length } => {
                    // Neighbours become one change, since its range is held as a whole.
                    match changes.last_mut() {
                        Some((_, start, before)) if *start + *before == at => {
                            *before += length as usize;
                        }
                        _ => changes.push((guest, at, length as usize)),
                    }
                    length
                }
            };
            at += length as usize;
        }
        let in_place = write_parts(queue, image, parts, iov);
        if changes.is_empty() {
            return in_place.await;
        }
        let change = async {
            for (guest, at, length) in changes {
                let change = announced.change(queue, guest, length as u64).await?;
                self.change(change, guest, iov.slice(at, length)).await?;
            }
            Ok(())
        };
        let (in_place, change) = storage::join(in_place, change).await;
        in_place.and(change)
    }

    /// Writes a range of which a part has no cluster of its own yet.
    async fn change(&self, change: Change<'_>, guest: u64, iov: Iov) -> Result<()> {
        let (image, queue) = (self.image, self.queue);
        let mut at = 0;
        while at < iov.len() {
            let (from, left) = (guest + at as u64, iov.len() - at);
            let done = match change.next_write(queue, from, left as u64).await? {
                NextWrite::InPlace { host, length } => {
                    image.prepare_data_write(queue, host, length).await?;
                    let part = iov.slice(at, length as usize);
                    storage::event(&**image.file(), storage::Event::WriteAio);
                    storage::write(&**image.data(), queue, host.0, &part).await?;
                    length
                }
                NextWrite::Fill(filling) => {
                    let part = iov.slice(at, filling.fill.length as usize);
                    filling.begin()?;
                    self.fill(&filling, &part).await?;
                    filling.map()?
                }
            };
            at += done as usize;
        }
        Ok(())
    }
}

/// Writes parts of `iov` (host offset, place, length) where they belong, by
/// host offset, neighbours together, several at once.
async fn write_parts(
    queue: &Queue,
    image: &Image,
    mut parts: Vec<(u64, usize, usize)>,
    iov: &Iov,
) -> Result<()> {
    parts.sort_unstable();
    let parts_at_once = queue.options().parts;
    let mut flight = storage::Writings::new(&**image.data(), queue, parts_at_once);
    let mut rest = &parts[..];
    while let Some(&(host, _, first)) = rest.first() {
        let mut end = host + first as u64;
        let count = 1 + rest[1..]
            .iter()
            .take_while(|(next, _, length)| {
                let follows = *next == end;
                end = next + *length as u64;
                follows
            })
            .count();
        let (run, left) = rest.split_at(count);
        rest = left;
        storage::event(&**image.file(), storage::Event::WriteAio);
        let part = iov.gather(run.iter().map(|(_, at, length)| (*at, *length)));
        flight.write(host, part).await.map_err(|(_, e)| e)?;
    }
    flight.finish().await.map_err(|(_, e)| e)?;
    Ok(())
}
