//! The image to open, and the options of opening.

use std::ffi::{OsStr, OsString};

use zebu::names::{Source, without_queries};
use zebu::storage::{CacheMode, EngineKind};

use crate::arguments::file_name::as_value;
use crate::images::open;
use crate::output::printable;

/// The image to open, and the options of opening.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// The file name.
    pub name: Option<OsString>,
    /// Options (`-o`, or all of an `--image-opts`).
    pub options: Option<OsString>,
    /// Options that `reopen` gave since, which win over those.
    pub changes: Vec<(String, OsString)>,
    /// The format (`-f`).
    pub format: Option<String>,
    /// For reading only (`-r`).
    pub read_only: bool,
    /// Writes go nowhere (`-s`).
    pub snapshot: bool,
    /// What is read from a backing file is kept (`-C`).
    pub copy_on_read: bool,
    /// Although others write to it (`-U`).
    pub force_share: bool,
    /// Ignore discards (`-d ignore`), unless the options of the image enable them.
    pub ignore_discards: bool,
    /// The cache mode (`-t`, `-n`), if one is given.
    pub cache: Option<CacheMode>,
    /// The engine (`-i`, `-k`); None: the best there is.
    pub engine: Option<EngineKind>,
}

impl Opening {
    /// Sets one of the options that the program and `open` share; `None` for others. The error is a
    /// message.
    pub fn set(&mut self, letter: char, value: Option<&OsStr>) -> Option<Result<(), String>> {
        let value = value.unwrap_or_default().to_string_lossy();
        match letter {
            'r' => self.read_only = true,
            's' => self.snapshot = true,
            'C' => self.copy_on_read = true,
            'U' => self.force_share = true,
            'n' => self.cache = Some(CacheMode::None),
            'k' => self.engine = Some(EngineKind::Native),
            't' => match value.parse() {
                Ok(cache) => self.cache = Some(cache),
                Err(_) => return Some(Err(format!("Invalid cache option: {value}"))),
            },
            'i' => match value.parse() {
                Ok(engine) => self.engine = Some(engine),
                Err(e) => return Some(Err(e.to_string())),
            },
            'd' => match &*value {
                "unmap" | "on" => self.ignore_discards = false,
                "ignore" | "off" => self.ignore_discards = true,
                _ => return Some(Err(format!("Invalid discard option: {value}"))),
            },
            _ => return None,
        }
        Some(Ok(()))
    }

    /// The cache mode. By default each write is durable when it has ended, as in qemu-io.
    pub fn cache_mode(&self) -> CacheMode {
        self.cache.unwrap_or(CacheMode::WriteThrough)
    }

    /// The message that it cannot be opened.
    pub fn cannot(&self, why: impl std::fmt::Display) -> String {
        match &self.name {
            Some(name) => {
                let name = printable(without_queries(&name.to_string_lossy()).as_bytes());
                format!("can't open device {name}: {why}")
            }
            None => format!("can't open: {why}"),
        }
    }

    /// The image that is named.
    pub fn source(&self) -> Source {
        match (&self.options, &self.name) {
            (None, name) => {
                let name = name.clone().unwrap_or_default();
                open::named(&name, false, self.format.as_deref())
            }
            (Some(options), None) => Source::Options(options.clone()),
            (Some(options), Some(name)) => Source::NameWithOptions(name.clone(), options.clone()),
        }
    }
}

/// `source` with options added to it.
pub fn changed(source: Source, changes: &[(String, OsString)]) -> Source {
    if changes.is_empty() {
        return source;
    }
    let option = |(key, value): &(String, OsString)| {
        let mut option = OsString::from(format!("{key}="));
        option.push(as_value(value));
        option
    };
    let more: Vec<OsString> = changes.iter().map(option).collect();
    let more = more.join(OsStr::new(","));
    let with = |text: OsString| [text, more.clone()].join(OsStr::new(","));
    match source {
        Source::Options(text) => Source::Options(with(text)),
        Source::NameWithOptions(name, text) => Source::NameWithOptions(name, with(text)),
        Source::Name(name) => Source::NameWithOptions(name, more),
    }
}

#[cfg(test)]
mod tests {
    //! Guards against reopening another image, or losing the options that it was opened with.
    use super::*;

    #[test]
    fn options_are_added_to_any_name() {
        let changes = [("lazy-refcounts".to_owned(), "on".into())];
        for (source, result) in [
            (
                Source::Name("a,b".into()),
                Source::NameWithOptions("a,b".into(), "lazy-refcounts=on".into()),
            ),
            (
                Source::Options("driver=qcow2,file.filename=x".into()),
                Source::Options("driver=qcow2,file.filename=x,lazy-refcounts=on".into()),
            ),
            (
                Source::NameWithOptions("x".into(), "driver=qcow2".into()),
                Source::NameWithOptions("x".into(), "driver=qcow2,lazy-refcounts=on".into()),
            ),
        ] {
            assert_eq!(changed(source.clone(), &changes), result, "{source:?}");
            assert_eq!(changed(source.clone(), &[]), source);
        }
    }
}
