//! Taking a snapshot.

use std::time::{SystemTime, UNIX_EPOCH};

use super::super::Image;
use super::super::allocation::frees::Freed;
use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::structures::{MAX_SNAPSHOTS, Snapshot};
use crate::storage::Queue;
use crate::{Error, Result};

/// Bytes of a name at most: QEMU could not name a snapshot with a longer one.
const MAX_NAME: usize = 255;

impl Image {
    /// Takes a snapshot of the active disk. Durable on return; after an error
    /// there is none.
    pub(crate) async fn snapshot_create(&mut self, queue: &Queue, name: &[u8]) -> Result<()> {
        self.begin_snapshots(queue).await?;
        let new = self.new_snapshot(name)?;
        self.check_l1(&self.l1, 0)?;
        self.raise(queue, &self.l1).await?;
        let mut l1 = None;
        let result = match self.prepare_snapshot(queue, new, &mut l1).await {
            Ok((table, all)) => self.switch_snapshots(queue, table, all).await,
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            // What cannot be undone costs space.
            let _ = self.undo_create(queue, l1).await;
            return Err(error);
        }
        let finished = self.finish_writing(queue).await;
        self.log_not_freed(finished);
        Ok(())
    }

    /// The entry of a new snapshot, without its L1 table.
    fn new_snapshot(&self, name: &[u8]) -> Result<Snapshot> {
        if name.len() > MAX_NAME {
            let text = format!("A snapshot's name has at most {MAX_NAME} bytes");
            return Err(Error::Refused(text));
        }
        // Programs in C would take its beginning for the name.
        if name.contains(&0) {
            return Err(Error::Refused(
                "The name of the snapshot has a NUL byte, which an image cannot record".into(),
            ));
        }
        if self.snapshots.len() >= MAX_SNAPSHOTS as usize {
            return Err(Error::os(libc::EFBIG));
        }
        let highest = self.snapshots.iter().map(|s| number(&s.id)).max();
        let Some(id) = highest.unwrap_or(0).checked_add(1) else {
            return Err(Error::os(libc::EFBIG));
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default();
        let mut snapshot = Snapshot {
            id: id.to_string().into_bytes(),
            name: name.to_vec(),
            // (The field ends in the year 2106.)
            date_sec: now.as_secs() as u32,
            date_nsec: now.subsec_nanos(),
            ..Snapshot::default()
        };
        snapshot.set_extra(0, self.size(), Some(0));
        Ok(snapshot)
    }

    /// Everything but the header, on the disk and durable: the new snapshot
    /// table, and what it has. `l1` is where its L1 table is, as soon as there
    /// is one.
    async fn prepare_snapshot(
        &mut self,
        queue: &Queue,
        mut new: Snapshot,
        l1: &mut Option<Freed>,
    ) -> Result<(Freed, Vec<Snapshot>)> {
        // Refcounts first: what is written next depends on them.
        self.commit(queue, true).await?;
        let bytes = self.l1.encode_shared();
        let place = self.write_new(queue, bytes).await?;
        *l1 = Some(place);
        new.l1_offset = place.first * self.geometry.cluster_size();
        new.l1_size = self.header.l1_size;
        if !is_broken(Rule::FlagsBeforeSnapshot) {
            self.clear_copied(queue, &self.l1).await?;
            self.clear_copied_l1()?;
        }
        self.commit(queue, true).await?;
        let mut all = self.snapshots.clone();
        all.push(new);
        let table = self.write_snapshots(queue, &mut all).await?;
        Ok((table, all))
    }

    /// Takes back what was done for a snapshot that is not to be.
    async fn undo_create(&mut self, queue: &Queue, l1: Option<Freed>) -> Result<()> {
        self.writer()?.check()?;
        self.lower(queue, &self.l1, u64::MAX).await?;
        if let Some(place) = l1 {
            self.writer()?.free_at_commit(place);
        }
        self.commit(queue, true).await?;
        self.set_copied(queue).await?;
        self.finish_writing(queue).await
    }
}

/// The number that an id starts with; 0 if none does.
fn number(id: &[u8]) -> u64 {
    let digits = id.iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |number: u64, digit| {
        number
            .saturating_mul(10)
            .saturating_add(u64::from(digit - b'0'))
    })
}
