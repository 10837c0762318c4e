//! The experiments: one file each. A new one is a file with an [`Experiment`], and a
//! line in [`ALL`].

mod cache;
mod compare;
mod convert;
mod embedded;
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
pub struct Experiment {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its heading on the page.
    pub title: &'static str,
    /// Runs it. Whatever was found before an error is kept.
    pub run: fn(&Bench, &mut Measured) -> Result<()>,
}

/// All experiments, in the order of the page.
pub const ALL: &[Experiment] = &[
    convert::EXPERIMENT,
    to_qcow2::EXPERIMENT,
    formats::EXPERIMENT,
    compare::EXPERIMENT,
    fragmented::EXPERIMENT,
    engines::EXPERIMENT,
    subclusters::EXPERIMENT,
    cache::EXPERIMENT,
    nbd::EXPERIMENT,
    vhost::EXPERIMENT,
    embedded::EXPERIMENT,
    metadata::EXPERIMENT,
];

/// The experiments of these names; all if there is none.
pub fn named(names: &[String]) -> Result<Vec<&'static Experiment>> {
    if names.is_empty() {
        return Ok(ALL.iter().collect());
    }
    let find = |name: &String| {
        ALL.iter().find(|e| e.name == name).ok_or_else(|| {
            let known: Vec<_> = ALL.iter().map(|e| e.name).collect();
            Error::new(format!(
                "no experiment '{name}'; there are {}",
                known.join(", ")
            ))
        })
    };
    names.iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experiments_are_found_by_name_and_names_are_unique() {
        assert_eq!(named(&[]).unwrap().len(), ALL.len());
        assert_eq!(named(&["nbd".into()]).unwrap()[0].name, "nbd");
        assert!(named(&["x".into()]).err().unwrap().0.contains("convert"));
        for (i, e) in ALL.iter().enumerate() {
            assert!(ALL[..i].iter().all(|other| other.name != e.name));
        }
    }
}
