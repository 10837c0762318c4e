//! Guards against a layer that uses one above it (docs/design.md, "Layers").
//!
//! The test reads the paths in the code: `crate::NAME` in a file of `zebu-core/src/MODULE`. A name that the root
//! exports is of the module that has it.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A part of a driver that is a layer of its own, far below it: pure values.
const STRUCTURES: &str = "drivers/qcow2/structures";

/// From the bottom up. A module may use itself and those before it.
const LAYERS: [&[&str]; 11] = [
    &[
        "broken",
        "lock",
        "luks",
        "offset",
        "options",
        "printable",
        "spelling",
        "statistics",
    ],
    &["error", "progress"],
    &["structures"],
    &["codec", "tls"],
    &["storage"],
    &["drivers"],
    &["filters"],
    &["protocols"],
    &["block", "qcow2"],
    &["names"],
    &["jobs"],
];

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|names| names.contains(&module))
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files(&path, found),
            false => found.push(path),
        }
    }
}

/// The names after `crate::` in `code`, as in `crate::a::b` and `crate::{a::b, c}`.
fn named(code: &str) -> Vec<&str> {
    let word = |text: &str| text.find(|c: char| !c.is_alphanumeric() && c != '_');
    let mut names = Vec::new();
    for path in code.split("crate::").skip(1) {
        let Some(list) = path.strip_prefix('{') else {
            names.push(&path[..word(path).unwrap_or(path.len())]);
            continue;
        };
        let (mut depth, mut first) = (0, true);
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => first = true,
                _ if first && depth == 0 && !c.is_whitespace() => {
                    names.push(&list[at..at + word(&list[at..]).unwrap_or(0)]);
                    first = false;
                }
                _ => {}
            }
        }
    }
    names
}

/// The names that the root exports, and the modules that have them.
fn exports(root: &str) -> HashMap<&str, &str> {
    let mut exports = HashMap::new();
    for line in root.split("pub use ").skip(1) {
        let (path, _) = line.split_once(';').unwrap();
        let (module, names) = path.split_once("::").unwrap();
        let names = names.trim_matches(['{', '}']).split(',');
        exports.extend(names.map(|name| (name.trim(), module)));
    }
    exports
}

#[test]
fn no_layer_uses_one_above_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../zebu-core/src");
    let mut paths = Vec::new();
    files(&root, &mut paths);
    let lib = fs::read_to_string(root.join("lib.rs")).unwrap();
    let exports = exports(&lib);
    assert_eq!(exports["Device"], "block");
    let mut arrows = 0;
    let mut wrong = Vec::new();
    for path in paths {
        let inside = path.strip_prefix(&root).unwrap();
        let module = match inside.starts_with(STRUCTURES) {
            true => "structures",
            false => inside.iter().next().unwrap().to_str().unwrap(),
        };
        let module = module.trim_end_matches(".rs");
        if ["lib", "internal", "parts", "registered"].contains(&module)
            || inside.ends_with("tests.rs")
        {
            continue;
        }
        let own = layer(module).unwrap_or_else(|| panic!("{module}: in no layer"));
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let lines = code
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        let code: String = lines.flat_map(|line| [line, "\n"]).collect();
        let code = code.replace(&STRUCTURES.replace('/', "::"), "structures");
        for name in named(&code) {
            let name = exports.get(name).copied().unwrap_or(name);
            if name != module
                && let Some(other) = layer(name)
            {
                arrows += 1;
                if other > own || (other == own && ["block", "qcow2"].contains(&name)) {
                    wrong.push(format!("{} uses {name}", inside.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(
        arrows > 100,
        "the paths are written in another way: {arrows}"
    );
}
