//! The experiments: one file each. A new one is a file with a struct that has [`Experiment`],
//! and a line in [`ALL`].

mod cache;
mod compare;
mod convert;
mod engines;
mod formats;
mod fragmented;
mod metadata;
mod nbd;
mod served;
mod subclusters;
mod to_qcow2;
mod vhost;

use crate::bench::Bench;
use crate::error::{Error, Result};
use crate::results::Experiment as Measured;

/// A ratio to this one still counts as "not slower": two runs of one program differ by as much on
/// a quiet machine.
const NOT_SLOWER: f64 = 0.97;

/// One experiment.
pub trait Experiment: Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// Its heading on the page.
    fn title(&self) -> &'static str;

    /// Runs it. Whatever was found before an error is kept in `to`.
    fn run(&self, bench: &Bench, to: &mut Measured) -> Result<()>;
}

/// All experiments, in the order of the page.
pub const ALL: &[&dyn Experiment] = &[
    &convert::Convert,
    &to_qcow2::ToQcow2,
    &formats::Formats,
    &compare::Compare,
    &fragmented::Fragmented,
    &engines::Engines,
    &subclusters::Subclusters,
    &cache::Cache,
    &nbd::Nbd,
    &vhost::Vhost,
    &metadata::Metadata,
];

/// The experiments of these names; all if there is none.
pub fn named(names: &[String]) -> Result<Vec<&'static dyn Experiment>> {
    if names.is_empty() {
        return Ok(ALL.to_vec());
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
    fn experiments_are_found_by_name_and_names_are_unique() {
        assert_eq!(named(&[]).unwrap().len(), ALL.len());
        assert_eq!(named(&["nbd".into()]).unwrap()[0].name(), "nbd");
        assert!(named(&["x".into()]).err().unwrap().0.contains("convert"));
        for (i, e) in ALL.iter().enumerate() {
            assert!(ALL[..i].iter().all(|other| other.name() != e.name()));
        }
    }
}
