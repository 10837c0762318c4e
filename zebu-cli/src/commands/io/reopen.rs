//! The command that opens the image again with other options.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use zebu::block::Format;
use zebu::names::{parse_switch, split_list};
use zebu::storage::CacheMode;

use super::command::{Failure, Handler, Outcome};
use super::getopt::Getopt;
use super::image::OpenImage;
use super::opening::Opening;
use super::session::{Command, Session};
use crate::output::Shown;

/// reopen.
pub const COMMANDS: &[Command] = &[Command {
    name: "reopen",
    alias: "",
    args: Some("[(-r|-w)] [-c cache] [-o options]"),
    summary: "reopens an image with new options",
    help: "
 Closes the image and opens it again, with its options changed:
 'reopen -o lazy-refcounts=on'. If that fails, it is open as it was before.

 -r  for reading only
 -w  for writing too
 -c  the cache mode
 -o  options of the image, as --image-opts has them
",
    min: 0,
    max: None,
    needs_file: true,
    run: Handler::Names(reopen),
}];

/// What any image can change.
const KEYS: &[&str] = &[
    "auto-read-only",
    "cache.direct",
    "cache.no-flush",
    "detect-zeroes",
    "discard",
    "read-only",
];

/// What the options of the command say.
#[derive(Default)]
struct Flags {
    read_only: Option<bool>,
    cache: Option<CacheMode>,
    options: Vec<(String, OsString)>,
}

impl Flags {
    fn parse(args: &[&OsStr]) -> Result<Flags, Failure> {
        let mut flags = Flags::default();
        let mut options = Getopt::new(args, "rwc:o:", &[]);
        for option in options.by_ref() {
            match option.map_err(Failure::Option)? {
                ('c', Some(value)) => match value.to_string_lossy().parse() {
                    Ok(cache) => flags.cache = Some(cache),
                    Err(_) => {
                        let text = format!("Invalid cache option: {}", value.shown());
                        return Err(Failure::Named(text));
                    }
                },
                ('o', Some(text)) => flags.options.extend(options_of(text)),
                (letter, _) => {
                    if flags.read_only.replace(letter == 'r').is_some() {
                        let text = "Only one -r/-w option may be given";
                        return Err(Failure::Named(text.into()));
                    }
                }
            }
        }
        match options.into_rest().is_empty() {
            true => Ok(flags),
            false => Err(Failure::Usage),
        }
    }

    fn has(&self, key: &str) -> bool {
        self.options.iter().any(|(k, _)| k == key)
    }

    /// Refuses options that were given in two ways.
    fn check(&self) -> Result<(), String> {
        if self.read_only.is_some() && self.has("read-only") {
            return Err("Cannot set both -r/-w and 'read-only'".into());
        }
        let cache = self.has("cache.direct") || self.has("cache.no-flush");
        match self.cache.is_some() && cache {
            true => Err("Cannot set both -c and the cache options".into()),
            false => Ok(()),
        }
    }

    /// The options by which the image is opened from now on.
    fn apply(self, image: &OpenImage) -> Result<Opening, String> {
        let mut opening = image.opening.clone();
        if let Some(read_only) = self.read_only {
            opening.read_only = read_only;
        }
        if let Some(cache) = self.cache {
            opening.cache = Some(cache);
            opening.changes.retain(|(k, _)| !k.starts_with("cache."));
        }
        let format = image.device.top().format();
        for (key, value) in self.options {
            if is_unchanged(image, &key, &value)? {
                continue;
            }
            change(&mut opening, format, key, value)?;
        }
        if !opening.changes.is_empty() && image.overlay.is_none() {
            opening.format = Some(format.name().into());
        }
        Ok(opening)
    }
}

/// The options of a list, in its order.
fn options_of(text: &OsStr) -> Vec<(String, OsString)> {
    let option = |word: OsString| {
        let mut parts = word.as_bytes().splitn(2, |b| *b == b'=');
        let key = String::from_utf8_lossy(parts.next().unwrap_or_default());
        match parts.next() {
            Some(value) => (key.into_owned(), OsStr::from_bytes(value).to_owned()),
            None => match key.strip_prefix("no") {
                Some(key) => (key.to_owned(), "off".into()),
                None => (key.into_owned(), "on".into()),
            },
        }
    };
    split_list(text).into_iter().map(option).collect()
}

/// Whether the image was opened with this value of an option. Then any option is accepted.
fn is_unchanged(image: &OpenImage, key: &str, value: &OsStr) -> Result<bool, String> {
    if ["file", "backing"].contains(&key) {
        return Err(format!(
            "Cannot find device='' nor node-name='{}'",
            value.shown()
        ));
    }
    let spec = &image.device.top().spec;
    Ok(match key {
        "driver" => spec.format_name() == value,
        "file.driver" if !spec.bare => spec.file.driver.name() == value,
        "file.filename" if !spec.bare => spec.file.display_name() == value,
        _ => image.opening.source().option(key).as_deref() == Some(value),
    })
}

/// Sets one option.
fn change(
    opening: &mut Opening,
    format: Format,
    key: String,
    value: OsString,
) -> Result<(), String> {
    let base = match key.strip_prefix("overlap-check.") {
        Some(_) => "overlap-check",
        None => &key,
    };
    // The file has the options that any image has.
    if let Some(of_file) = key.strip_prefix("file.")
        && !KEYS.contains(&of_file)
    {
        return Err(format!("Cannot change the option '{of_file}'"));
    }
    // `encrypt` has options, and is none.
    let is_of_format = format.open_options().contains(&base) && base != "encrypt";
    if !key.starts_with("file.") && !KEYS.contains(&base) && !is_of_format {
        return Err(format!("Cannot change the option '{key}'"));
    }
    match (key.as_str(), parse_switch(&value.to_string_lossy())) {
        ("read-only", Some(true)) if opening.read_only => {}
        ("read-only", Some(true)) => {
            let name = opening.name.as_deref().unwrap_or_default();
            let name = name.shown();
            return Err(format!(
                "Read-only block node '{name}' cannot support read-write users"
            ));
        }
        ("read-only", Some(false)) => opening.read_only = false,
        _ => {
            opening.changes.retain(|(k, _)| *k != key);
            opening.changes.push((key, value));
        }
    }
    Ok(())
}

fn reopen(session: &mut Session, args: &[&OsStr]) -> Outcome {
    let flags = Flags::parse(args)?;
    flags.check().map_err(Failure::Named)?;
    let image = session.image()?;
    let opening = flags.apply(image).map_err(Failure::Named)?;
    exchange(session, &opening).map_err(Failure::Named)
}

/// Closes the image and opens it by `opening`. If that fails, opens it as before.
fn exchange(session: &mut Session, opening: &Opening) -> Result<(), String> {
    let Some(image) = session.image.take() else {
        return Ok(());
    };
    let (before, overlay) = (image.opening.clone(), image.overlay.clone());
    let closed = image.close().map_err(|e| format!("close failed: {e}"));
    let opened =
        closed.and_then(|()| OpenImage::open_over(&session.context, opening, overlay.clone()));
    let (image, result) = match opened {
        Ok(image) => (image, Ok(())),
        Err(error) => (
            OpenImage::open_over(&session.context, &before, overlay)
                .map_err(|again| format!("{error}; not open any more: {again}"))?,
            Err(error),
        ),
    };
    session.image = Some(image);
    result
}

#[cfg(test)]
mod tests {
    //! Guards against options that are parsed differently from `open`, and against reopening
    //! another image.
    use super::*;

    #[test]
    fn lists_of_options() {
        let option = |key: &str, value: &str| (key.to_owned(), OsString::from(value));
        let options_of = |text| options_of(OsStr::new(text));
        assert_eq!(
            options_of("a=1,b=x,,y,nolazy,z"),
            [
                option("a", "1"),
                option("b", "x,y"),
                option("lazy", "off"),
                option("z", "on")
            ]
        );
        assert_eq!(options_of(""), []);
    }

    #[test]
    fn what_the_image_is_cannot_be_changed() {
        let mut opening = Opening::default();
        let mut set = |format, key: &str, value: &str| {
            change(&mut opening, format, key.to_owned(), value.into())
        };
        assert_eq!(set(Format::QCOW2, "lazy-refcounts", "on"), Ok(()));
        assert_eq!(set(Format::QCOW2, "overlap-check.active-l2", "off"), Ok(()));
        for (format, key, value) in [
            (Format::RAW, "lazy-refcounts", "on"),
            (Format::QCOW2, "offset", "512"),
            (Format::QCOW2, "driver", "raw"),
            (Format::QCOW2, "backing", "x"),
            (Format::QCOW2, "file.filename", "x"),
        ] {
            let key_shown = key.trim_start_matches("file.");
            let error = format!("Cannot change the option '{key_shown}'");
            assert_eq!(set(format, key, value), Err(error));
        }
    }
}
