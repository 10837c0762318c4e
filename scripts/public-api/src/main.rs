//! Prints the public API of the library that rustdoc has described as JSON: that of `zebu`, and that of the crates
//! whose items it re-exports, under its name.

use std::collections::BTreeSet;

/// The crates whose items `zebu` re-exports.
const BELOW: [&str; 3] = ["zebu_core::", "zebu_formats::", "zebu_net::"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut lines = BTreeSet::new();
    for json in std::env::args_os().skip(1) {
        let api = public_api::Builder::from_rustdoc_json(json)
            .omit_blanket_impls(true)
            .omit_auto_trait_impls(true)
            .omit_auto_derived_impls(true)
            .build()?;
        for line in api.to_string().lines() {
            let line = line.replace("zebu_net::storage_of_zebu::", "zebu::storage::");
            let is_reexport = line.starts_with("pub use ");
            let line = BELOW
                .iter()
                .fold(line.to_string(), |line, name| line.replace(name, "zebu::"));
            if !is_reexport && !line.starts_with("pub mod zebu_") {
                lines.insert(line);
            }
        }
    }
    if lines.is_empty() {
        return Err("usage: zebu-public-api JSON...".into());
    }
    lines.iter().for_each(|line| println!("{line}"));
    Ok(())
}
