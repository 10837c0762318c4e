//! The contents that one sector may have.
//!
//! Every change of a sector is a version: when it began and ended, and whether it succeeded. A
//! successful change replaces those that had ended before it began. One that failed or was dropped
//! may or may not have taken effect, and replaces nothing. A crash may bring back what was replaced
//! since the last flush.

use crate::content::{Tag, UNKNOWN};

/// A sector of a damaged image that could not be read.
pub const UNREADABLE: Tag = UNKNOWN - 1;

/// A reading of the model's clock. Each begin and each end has its own.
pub type Time = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    tag: Tag,
    began: Time,
    /// `Time::MAX` while it is in flight.
    ended: Time,
    /// It succeeded.
    done: bool,
    /// It was replaced: only a crash brings it back.
    gone: bool,
}

/// The contents that a sector may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    versions: Vec<Version>,
    /// It may have any content because of damage.
    pub wild: bool,
    /// It was written, so that its content is in the image itself and not in the base.
    pub explicit: bool,
    /// The file was truncated before it.
    pub cut: bool,
}

impl Cell {
    /// A sector with this content, which is durable.
    pub fn new(tag: Tag) -> Self {
        Cell {
            versions: vec![Version {
                tag,
                began: 0,
                ended: 0,
                done: true,
                gone: false,
            }],
            wild: false,
            explicit: false,
            cut: false,
        }
    }

    /// What a read may return.
    pub fn now(&self) -> impl Iterator<Item = Tag> + '_ {
        self.versions.iter().filter(|v| !v.gone).map(|v| v.tag)
    }

    /// What it may have, also after a crash.
    pub fn all(&self) -> impl Iterator<Item = Tag> + '_ {
        self.versions.iter().map(|v| v.tag)
    }

    /// Whether a read may return this.
    pub fn may_be(&self, tag: Tag) -> bool {
        self.wild || self.now().any(|now| now == tag)
    }

    /// Adds a content that it may have.
    pub fn add(&mut self, tag: Tag, at: Time) {
        if !self.now().any(|now| now == tag) {
            self.versions.push(Version {
                tag,
                began: at,
                ended: at,
                done: false,
                gone: false,
            });
        }
    }

    /// It may have what another one has.
    pub fn add_all(&mut self, other: &Cell, at: Time) {
        other.now().for_each(|tag| self.add(tag, at));
        self.wild |= other.wild;
    }

    /// It was read while no change was in flight: it has this content and no other.
    pub(crate) fn pin(&mut self, tag: Tag) {
        let is_changing = self.versions.iter().any(|v| v.ended == Time::MAX);
        if self.wild || is_changing || tag == UNREADABLE {
            return;
        }
        for version in &mut self.versions {
            version.gone |= version.tag != tag;
        }
    }

    /// The same, and the content is durable.
    pub(crate) fn fix(&mut self, tag: Tag) {
        if !self.wild && tag != UNREADABLE {
            self.versions = Cell::new(tag).versions;
        }
    }

    /// A change begins.
    pub(crate) fn begin(&mut self, tag: Tag, now: Time) {
        self.versions.push(Version {
            tag,
            began: now,
            ended: Time::MAX,
            done: false,
            gone: false,
        });
    }

    /// A change that began at `began` has ended.
    pub(crate) fn end(&mut self, tag: Tag, began: Time, ended: Time, done: bool) {
        let of = |v: &&mut Version| v.tag == tag && v.began == began;
        if let Some(version) = self.versions.iter_mut().find(of) {
            version.ended = ended;
            version.done = done;
        }
        if done {
            for version in &mut self.versions {
                version.gone |= version.ended < began;
            }
        }
    }

    /// Changes that had ended before `until` are durable.
    pub(crate) fn flush(&mut self, until: Time) {
        if self.versions.len() < 2 {
            return;
        }
        let durable = |v: &&Version| v.done && v.ended < until;
        let latest = self.versions.iter().filter(durable).map(|v| v.began).max();
        if let Some(latest) = latest {
            self.versions.retain(|v| v.ended >= latest);
        }
    }

    /// Drops replaced versions: no crash brings them back.
    pub fn drop_replaced(&mut self) {
        self.versions.retain(|v| !v.gone);
    }

    /// Changes that were in flight or not durable may or may not have taken effect.
    pub(crate) fn crash(&mut self) {
        // The sector may again be that of the base.
        self.explicit &= self.versions.len() == 1;
        for version in &mut self.versions {
            version.gone = false;
            version.done = false;
            version.ended = version.ended.min(Time::MAX - 1);
        }
    }
}
