//! Verifying a set.

use std::ops::ControlFlow;

use serde::Serialize;
use sha2::{Digest, Sha256};
use zebu::storage::{Buffer, Queue};

use crate::error::{Error, Result, refuse, shown};
use crate::files;
use crate::manifest::{Entry, part};
use crate::progress::{OnProgress, Step};
use crate::set::Set;

/// Bytes that are read at a time.
const PIECE: u64 = 1 << 20;

/// What is wrong with a set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// The point; 0 for a file of no point.
    pub number: u64,
    /// The disk; empty for a file of no point.
    pub disk: String,
    /// What is wrong, in one line.
    pub text: String,
}

impl Set {
    /// Compares the files of all points, and the names of their backing files, with the manifest;
    /// with `content` also the content of the disks, where the manifest has a hash of it. Returns
    /// what is wrong.
    ///
    /// # Errors
    ///
    /// [`Error::Cancelled`], [`Error::File`] if the directory cannot be read, and [`Error::Refused`] if
    /// something is not as in the manifest and another program has changed the set meanwhile.
    pub fn verify(
        &self,
        queue: &Queue,
        content: bool,
        on_progress: OnProgress<'_>,
    ) -> Result<Vec<Finding>> {
        let findings = self.findings(queue, content, on_progress)?;
        if !findings.is_empty() && self.is_changing()? {
            return refuse(format!(
                "{}: a backup was made or points were merged there meanwhile: verify it again",
                shown(self.directory())
            ));
        }
        Ok(findings)
    }

    fn findings(
        &self,
        queue: &Queue,
        content: bool,
        on_progress: OnProgress<'_>,
    ) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        for point in &self.manifest().points {
            for (disk, entry) in &point.disks {
                let checked =
                    self.verify_entry(queue, disk, point.number, entry, content, on_progress);
                match checked {
                    Ok(()) => {}
                    Err(Error::Cancelled) => return Err(Error::Cancelled),
                    Err(error) => findings.push(Finding {
                        number: point.number,
                        disk: disk.clone(),
                        text: error.to_string(),
                    }),
                }
            }
        }
        let removing = &self.manifest().removing;
        let parts: Vec<_> = removing.iter().map(|file| part(file)).collect();
        let mut known = self.manifest().files();
        known.extend(removing.iter().chain(&parts).map(|file| &**file));
        for file in self
            .own_files()?
            .iter()
            .filter(|file| !known.contains(&***file))
        {
            findings.push(Finding {
                number: 0,
                disk: String::new(),
                text: format!("{}: is not in the manifest", shown(&self.path(file))),
            });
        }
        Ok(findings)
    }

    fn verify_entry(
        &self,
        queue: &Queue,
        disk: &str,
        number: u64,
        entry: &Entry,
        content: bool,
        on_progress: OnProgress<'_>,
    ) -> Result<()> {
        // The hash of a merged file is not known before the merge is finished.
        let is_merged = match self.merge_into(entry) {
            Some(merge) => !self.has_base(merge)?,
            None => false,
        };
        if !is_merged {
            self.verify_hash(entry, on_progress)?;
        }
        self.verify_file(queue, disk, number)?;
        match &entry.content_sha256 {
            Some(sha256) if content => {
                // Only files of the set are opened.
                self.verify_chain(queue, disk, number)?;
                match self.hash_content(queue, &entry.file, on_progress)? == *sha256 {
                    true => Ok(()),
                    false => refuse(format!(
                        "{}: the SHA-256 of the disk's content differs from the manifest",
                        shown(&self.path(&entry.file))
                    )),
                }
            }
            _ => Ok(()),
        }
    }

    /// The SHA-256 of the content of a disk, from a file with its chain.
    pub(crate) fn hash_content(
        &self,
        queue: &Queue,
        file: &str,
        on_progress: OnProgress<'_>,
    ) -> Result<String> {
        let device = self.open_image(queue, file)?;
        let size = device.size();
        let mut hasher = Sha256::new();
        let mut buffer = Buffer::new(PIECE as usize);
        let mut at = 0;
        while at < size {
            let length = PIECE.min(size - at) as usize;
            let read = queue.block_on(device.read_buffer(queue, at, buffer, length));
            buffer = read.0;
            read.1.map_err(Error::image(file))?;
            hasher.update(&buffer[..length]);
            at += length as u64;
            if let ControlFlow::Break(()) = on_progress(Step::Verify, file, at, size) {
                return Err(Error::Cancelled);
            }
        }
        Ok(files::hex(&hasher.finalize()))
    }
}
