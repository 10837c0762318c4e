//! The addition of `info --untrusted`: the files that the image refers to.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use zebu::block::{Device, FileSpec};
use zebu::internal::{printable, printable_bytes};
use zebu::names::Source;

use crate::output::json::{Map, Value};

/// The report on an untrusted image.
pub struct Untrusted {
    /// Whether the format was found by the content, which its writer chose.
    format_guessed: bool,
    would_open: Vec<Named>,
}

/// A file that the header names.
struct Named {
    /// As what: `backing-file`, `data-file` or `extent`.
    role: &'static str,
    /// The name, as the header has it.
    name: OsString,
    /// The format in the header. `None`: detected by its content.
    format: Option<String>,
    /// The path that zebu would open, or the URI of an export. `None`: the name is refused.
    path: Option<OsString>,
}

impl Untrusted {
    /// Looks at what the top image names.
    pub fn of(device: &Device, format_guessed: bool) -> Self {
        let mut would_open = Vec::new();
        let layer = device.top();
        let file = layer.spec.file.name();
        if let Some(backing) = layer.backing() {
            let name = OsStr::from_bytes(backing.name);
            let format = backing.format.map(String::from_utf8_lossy);
            let spec = Source::Name(name.into()).resolve(Some(file), None);
            would_open.push(Named {
                role: "backing-file",
                format: format.map(|f| f.into_owned()).filter(|f| !f.is_empty()),
                path: spec.ok().map(|s| s.file.name().to_owned()),
                name: name.into(),
            });
        }
        if let Some(name) = layer.data_file().filter(|name| !name.is_empty()) {
            let name = OsStr::from_bytes(name);
            let spec = FileSpec::resolve(name, Some(file));
            would_open.push(Named {
                role: "data-file",
                format: Some("raw".into()),
                path: spec.ok().map(|s| s.name().to_owned()),
                name: name.into(),
            });
        }
        would_open.extend(layer.spec.extents.iter().map(|extent| Named {
            role: "extent",
            format: Some("raw".into()),
            path: Some(extent.name().to_owned()),
            name: extent.name().to_owned(),
        }));
        Untrusted {
            format_guessed,
            would_open,
        }
    }

    /// JSON.
    pub fn to_json(&self) -> Value {
        let would_open: Vec<Value> = self.would_open.iter().map(Named::to_json).collect();
        Map::new()
            .with("format-guessed", self.format_guessed)
            .with("would-open", would_open)
            .into()
    }

    /// Text.
    pub fn to_text(&self, out: &mut Vec<u8>) {
        // Writing to memory cannot fail.
        let guessed = if self.format_guessed { "yes" } else { "no" };
        let _ = writeln!(out, "untrusted:\n    format guessed: {guessed}");
        if self.would_open.is_empty() {
            out.extend(b"    would open: nothing else\n");
        }
        for named in &self.would_open {
            let path = named.path.as_deref();
            let path = path.unwrap_or(OsStr::new("a name that is refused"));
            let format = named.format.as_deref().unwrap_or("guessed");
            let _ = write!(out, "    would open: {} '", named.role);
            out.extend(printable_bytes(named.name.as_bytes()));
            let _ = write!(out, "' (format: {}; path: ", printable(format.as_bytes()));
            out.extend(printable_bytes(path.as_bytes()));
            out.extend(b")\n");
        }
    }
}

impl Named {
    fn to_json(&self) -> Value {
        let mut map = Map::new().with("as", self.role).with("name", &self.name);
        if let Some(format) = &self.format {
            map.add("format", format.as_str());
        }
        if let Some(path) = &self.path {
            map.add("path", path);
        }
        map.into()
    }
}
