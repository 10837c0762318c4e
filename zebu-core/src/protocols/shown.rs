//! The names under which QEMU shows an image and its file: a plain name if that describes it, else
//! `json:{…}`.

use std::ffi::{OsStr, OsString};

use super::{BackingSpec, FileDriver, FileSpec, ImageSpec, VhdSize};
use crate::drivers::Format;
use crate::spelling::quote::json_string;

impl FileSpec {
    /// The name that QEMU shows, if a plain name describes it.
    pub(super) fn plain_name(&self) -> Option<OsString> {
        self.protocol().plain_name(self)
    }

    /// The name as QEMU shows it.
    pub fn display_name(&self) -> OsString {
        self.plain_name()
            .unwrap_or_else(|| format!("json:{}", self.json()).into())
    }

    pub(super) fn json(&self) -> String {
        self.protocol().json(self)
    }
}

/// A JSON object of these members, in the order in which QEMU has them as far as
/// that is known.
pub fn object(mut members: Vec<(String, String)>) -> String {
    const ORDER: &[&str] = &[
        "encrypt.key-secret",
        "force_size_calc",
        "data-file",
        "backing",
        "read-zeroes",
        "offset",
        "opt-write-zero",
        "max-write-zero",
        "image",
        "max-transfer",
        "password-secret",
        "url",
        "cookie-secret",
        "proxy-username",
        "pool",
        "conf",
        "snapshot",
        "port",
        "host",
        "server.host",
        "server.port",
        "host_key_check",
        "throttle-group",
        "driver",
        "proxy-password-secret",
        "username",
        "cookie",
        "sslverify",
        "config",
        "size",
        "file",
        "key-secret",
        "opt-discard",
        "max-discard",
        "align",
    ];
    let place = |key: &str| ORDER.iter().position(|k| *k == key).unwrap_or(ORDER.len());
    members.sort_by_key(|(key, _)| place(key));
    let members: Vec<_> = members
        .iter()
        .map(|(key, value)| format!("{}: {value}", json_string(key.as_bytes())))
        .collect();
    format!("{{{}}}", members.join(", "))
}

impl ImageSpec {
    /// The name in `qemu-img info`, which opens no backing file: the path if that describes the
    /// image, else the options as JSON.
    pub fn display_name(&self) -> OsString {
        self.plain_name()
            .unwrap_or_else(|| format!("json:{}", self.json(None)).into())
    }

    /// The name in messages about an image that was opened with its backing file. It is JSON also
    /// if the backing file is another one than in the header (`header_backing`, None: the header
    /// names none).
    pub fn display_name_with_backing(&self, header_backing: Option<&OsStr>) -> OsString {
        let header = header_backing.unwrap_or_default();
        let instead = match &self.backing {
            BackingSpec::Default | BackingSpec::Options(_) => return self.display_name(),
            BackingSpec::None if header.is_empty() => return self.display_name(),
            BackingSpec::None => "null".to_string(),
            BackingSpec::Image(image) if image.display_name() == header => {
                return self.display_name();
            }
            BackingSpec::Image(image) => image.json(None),
        };
        format!("json:{}", self.json(Some(&instead))).into()
    }

    /// The name that QEMU shows, if a plain name describes it.
    pub(super) fn plain_name(&self) -> Option<OsString> {
        let raw = &self.options.raw;
        let is_window = raw.offset_json.is_some() || raw.size_json.is_some();
        match (&self.file.driver, self.format) {
            _ if self.bare => self.file.plain_name(),
            _ if self.options.vpc.size != VhdSize::ByCreator => None,
            _ if self.options.encryption != Default::default() => None,
            // The format over another one is never guessed.
            (FileDriver::Image(_), _) => None,
            (_, Some(format)) if format != Format::RAW => self.file.plain_name(),
            _ if is_window => None,
            _ => self.file.plain_name(),
        }
    }

    /// As JSON, the keys in QEMU's order.
    pub(super) fn json(&self, backing: Option<&str>) -> String {
        if self.bare {
            return self.file.json();
        }
        let raw = &self.options.raw;
        let vhd_size = match self.options.vpc.size {
            VhdSize::Chs => Some("\"chs\""),
            VhdSize::CurrentSize => Some("\"current_size\""),
            _ => None,
        };
        let key_secret = self.options.encryption.key_secret.as_ref();
        let key_secret = key_secret.map(|id| json_string(id.as_bytes()));
        let key_name = match self.format == Some(Format::QCOW2) {
            true => "encrypt.key-secret",
            false => "key-secret",
        };
        let mut members = vec![
            ("driver", format!("\"{}\"", self.format_name())),
            ("file", self.file.json()),
        ];
        if let Some(data_file) = &self.data_file {
            members.push(("data-file", data_file.json()));
        }
        let given = [
            ("backing", backing),
            ("offset", raw.offset_json.as_deref()),
            ("size", raw.size_json.as_deref()),
            ("force_size_calc", vhd_size),
            (key_name, key_secret.as_deref()),
        ];
        members.extend(
            given
                .into_iter()
                .filter_map(|(key, value)| Some((key, value?.to_string()))),
        );
        let owned = members.into_iter().map(|(key, value)| (key.into(), value));
        object(owned.collect())
    }
}
