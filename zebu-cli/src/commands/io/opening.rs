//! What to open, and how.

use std::ffi::{OsStr, OsString};
use std::rc::Rc;

use zebu::block::{NATIVE_NEEDS_DIRECT, Source};
use zebu::storage::{CacheMode, EngineKind, Queue, QueueOptions};

use super::image::OpenImage;
use super::overlay::Overlay;
use crate::file_name::as_value;
use crate::{open, untrusted};

/// What to open, and how.
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
    /// Discards are ignored (`-d ignore`), unless the image's own options say
    /// otherwise.
    pub ignore_discards: bool,
    /// The cache mode (`-t`, `-n`).
    pub cache: CacheMode,
    /// The engine (`-i`, `-k`); None: the best there is.
    pub engine: Option<EngineKind>,
}

impl Opening {
    /// Takes one of the options that the program and `open` have in common;
    /// others give None. The error is a line to follow the program's name.
    pub fn set(&mut self, letter: char, value: Option<&OsStr>) -> Option<Result<(), String>> {
        let value = value.unwrap_or_default().to_string_lossy();
        match letter {
            'r' => self.read_only = true,
            's' => self.snapshot = true,
            'C' => self.copy_on_read = true,
            'U' => self.force_share = true,
            'n' => self.cache = CacheMode::None,
            'k' => self.engine = Some(EngineKind::Native),
            't' => match value.parse() {
                Ok(cache) => self.cache = cache,
                Err(()) => return Some(Err(format!("Invalid cache option: {value}"))),
            },
            'i' => match value.parse() {
                Ok(engine) => self.engine = Some(engine),
                Err(e) => return Some(Err(e)),
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

    /// The line that says why it cannot be opened.
    pub fn can_not(&self, why: impl std::fmt::Display) -> String {
        match &self.name {
            Some(name) => format!("can't open device {}: {why}", name.display()),
            None => format!("can't open: {why}"),
        }
    }

    /// The image that is named.
    pub fn source(&self) -> Source {
        match (&self.options, &self.name) {
            (None, name) => Source::Name(name.clone().unwrap_or_default()),
            (Some(options), None) => Source::Options(options.clone()),
            (Some(options), Some(name)) => Source::NameWithOptions(name.clone(), options.clone()),
        }
    }

    /// Opens it. With `-s`, makes the overlay that takes the writes. `program`
    /// is named in messages.
    pub fn open(&self, program: &str) -> Result<OpenImage, String> {
        let overlay = match self.snapshot && !self.read_only {
            true => Some(Rc::new(Overlay::new(self)?)),
            false => None,
        };
        self.open_over(overlay, program)
    }

    /// Opens it, or the overlay if there is one.
    pub fn open_over(
        &self,
        overlay: Option<Rc<Overlay>>,
        program: &str,
    ) -> Result<OpenImage, String> {
        if self.force_share && !self.read_only {
            return Err("force-share=on can only be used with read-only images".into());
        }
        if self.copy_on_read && self.read_only {
            return Err("Can't use copy-on-read on read-only device".into());
        }
        let engine = self.engine.unwrap_or_else(EngineKind::best);
        if engine == EngineKind::Native && !self.cache.is_direct() {
            return Err(NATIVE_NEEDS_DIRECT.into());
        }
        let (source, format) = match &overlay {
            Some(overlay) => (overlay.source(), None),
            None => (self.source(), self.format.as_ref()),
        };
        let format = match format {
            Some(name) => Some(name.parse().map_err(|e: zebu::Error| e.to_string())?),
            None => None,
        };
        if let Some(name) = &self.name {
            let name = Source::Name(name.clone());
            let allowed = untrusted::policy().check_source(&name);
            allowed.map_err(|e| e.to_string())?;
        }
        let source = changed(source, &self.changes);
        let spec = source.resolve(None, format).map_err(|e| e.to_string())?;
        let discard = match spec.options.common.discard {
            Some(_) => None,
            None => Some(!self.ignore_discards),
        };
        let queue = Queue::new(QueueOptions::default().engine(engine));
        let queue = queue.map_err(|e| e.to_string())?;
        let how = untrusted::defaults()
            .format(format)
            .write(!self.read_only)
            .cache(self.cache)
            .force_share(self.force_share)
            .discard(discard);
        let device =
            open::repaired(&queue, &source, &how, program).map_err(|error| error.to_string())?;
        Ok(OpenImage::new(queue, device, self.clone(), overlay))
    }
}

/// `source` with options added to it.
fn changed(source: Source, changes: &[(String, OsString)]) -> Source {
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
    //! Guards against a reopened image that is another one, or has lost the
    //! options that it was opened with.
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
