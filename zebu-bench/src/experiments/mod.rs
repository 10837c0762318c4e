//! The experiments: one file each. A new one is a file with a struct that has [`Experiment`],
//! and a line in [`ALL`].

mod best;
mod cache;
mod compare;
mod conversion;
mod convert;
mod engines;
mod fragmented;
mod guest;
mod memory;
mod metadata;
mod nbd;
mod requests;
mod servers;
mod subclusters;
mod to_qcow2;
mod vhost;
mod workers;

use crate::bench::Bench;
use crate::error::{Error, Result};
use crate::report::Section;

/// One experiment.
pub trait Experiment: Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// What it shows, in a line.
    fn about(&self) -> &'static str;

    /// Whether it is among all that `--quick` runs.
    fn is_quick(&self) -> bool {
        true
    }

    /// Runs it. Whatever was found before an error is kept in `section`.
    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()>;
}

/// All experiments, in the order of the report.
pub const ALL: &[&dyn Experiment] = &[
    &convert::Convert,
    &to_qcow2::ToQcow2,
    &workers::Workers,
    &compare::Compare,
    &fragmented::Fragmented,
    &engines::Engines,
    &subclusters::Subclusters,
    &cache::Cache,
    &guest::Guest,
    &metadata::Metadata,
    &memory::Memory,
    &nbd::Nbd,
    &vhost::Vhost,
];

/// The experiments of these names; all if there is none, or with `quick` all that are.
pub fn named(names: &[String], quick: bool) -> Result<Vec<&'static dyn Experiment>> {
    if names.is_empty() {
        let all = ALL.iter().copied();
        return Ok(all.filter(|e| !quick || e.is_quick()).collect());
    }
    names
        .iter()
        .map(|n| {
            ALL.iter().copied().find(|e| e.name() == n).ok_or_else(|| {
                let known: Vec<_> = ALL.iter().map(|e| e.name()).collect();
                Error::new(format!(
                    "no experiment '{n}'; there are {}",
                    known.join(", ")
                ))
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experiments_are_found_by_name() {
        assert_eq!(named(&[], false).unwrap().len(), ALL.len());
        assert!(named(&[], true).unwrap().len() < ALL.len());
        assert_eq!(named(&["guest".into()], true).unwrap()[0].name(), "guest");
        let error = named(&["nothing".into()], false).err().unwrap();
        assert!(error.0.contains("convert"));
    }

    #[test]
    fn names_are_unique() {
        for (i, e) in ALL.iter().enumerate() {
            assert!(ALL[..i].iter().all(|other| other.name() != e.name()));
        }
    }
}
