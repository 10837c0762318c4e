//! What `info --untrusted` says more: what the image would have made whoever
//! trusts it open.

use std::fmt::Write;

use serde_json::{Map, Value, json};
use zebu::block::{Device, FileSpec, LayerImage, Source};

use super::report::text;

/// What is said of an image that nobody vouches for.
pub struct Untrusted {
    /// Whether the format was found by the content, which its writer chose.
    format_guessed: bool,
    would_open: Vec<Named>,
}

/// A file that the header names.
struct Named {
    /// As what: `backing-file` or `data-file`.
    role: &'static str,
    /// The name, as the header has it.
    name: String,
    /// The format that the header says it has; None: guessed from its content.
    format: Option<String>,
    /// The path that zebu would open, or the URI of an NBD server's export;
    /// None of a name that it refuses.
    path: Option<String>,
}

impl Untrusted {
    /// Looks at what the top image names.
    pub fn of(device: &Device, format_guessed: bool) -> Self {
        let mut would_open = Vec::new();
        let layer = device.top();
        if let LayerImage::Qcow2(image) = &layer.image {
            let (header, file) = (image.header(), layer.spec.file.name());
            if let Some(name) = header.backing_file().map(text) {
                let format = header.extensions.backing_format().map(text);
                let spec = Source::Name(name.clone()).resolve(Some(&file), None);
                would_open.push(Named {
                    role: "backing-file",
                    format: format.filter(|f| !f.is_empty()),
                    path: spec.ok().map(|s| s.file.name().into_owned()),
                    name,
                });
            }
            let data_file = header.extensions.data_file().map(text);
            if let Some(name) = data_file.filter(|_| header.has_data_file()) {
                let spec = FileSpec::resolve(&name, Some(&file));
                would_open.push(Named {
                    role: "data-file",
                    format: Some("raw".into()),
                    path: spec.ok().map(|s| s.name().into_owned()),
                    name,
                });
            }
        }
        Untrusted {
            format_guessed,
            would_open,
        }
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        let would_open: Vec<Value> = self.would_open.iter().map(Named::to_json).collect();
        json!({"format-guessed": self.format_guessed, "would-open": would_open})
    }

    /// For people.
    pub fn to_text(&self, out: &mut String) {
        // Writing to a String cannot fail.
        let guessed = if self.format_guessed { "yes" } else { "no" };
        let _ = writeln!(out, "untrusted:\n    format guessed: {guessed}");
        if self.would_open.is_empty() {
            out.push_str("    would open: nothing else\n");
        }
        for named in &self.would_open {
            let path = named.path.as_deref().unwrap_or("a name that is refused");
            let format = named.format.as_deref().unwrap_or("guessed");
            let _ = writeln!(
                out,
                "    would open: {} '{}' (format: {format}; path: {path})",
                named.role, named.name
            );
        }
    }
}

impl Named {
    fn to_json(&self) -> Value {
        let mut map = Map::new();
        map.insert("as".into(), json!(self.role));
        map.insert("name".into(), json!(self.name));
        if let Some(format) = &self.format {
            map.insert("format".into(), json!(format));
        }
        if let Some(path) = &self.path {
            map.insert("path".into(), json!(path));
        }
        Value::Object(map)
    }
}
