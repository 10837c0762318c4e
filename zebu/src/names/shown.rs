//! The names under which QEMU shows an image and its file: a plain name if that describes it, else
//! `json:{…}`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::null;
use super::quote::json_string;
#[cfg(feature = "http")]
use crate::block::HttpSpec;
#[cfg(feature = "ssh")]
use crate::block::SshSpec;
use crate::block::{
    BackingSpec, BlkdebugSpec, FileDriver, FileSpec, Format, ImageSpec, NullSpec, VhdSize,
};

impl FileSpec {
    /// The name that QEMU shows, if a plain name describes it.
    fn plain_name(&self) -> Option<OsString> {
        match &self.driver {
            FileDriver::Null(null) => null.plain_name(),
            FileDriver::Blkdebug(debug) => debug.plain_name(),
            FileDriver::Image(image) => image.plain_name(),
            #[cfg(feature = "http")]
            FileDriver::Http(http) => http.plain_name(),
            // QEMU has no plain name for it.
            #[cfg(feature = "rbd")]
            FileDriver::Rbd(_) => None,
            // The name would be that of another file.
            #[cfg(feature = "ssh")]
            FileDriver::Ssh(ssh)
                if !ssh.path.starts_with('/') || ssh.path.contains(['%', '?', '#']) =>
            {
                None
            }
            _ => Some(self.name().to_owned()),
        }
    }

    /// The name as QEMU shows it.
    pub fn display_name(&self) -> OsString {
        self.plain_name()
            .unwrap_or_else(|| format!("json:{}", self.json()).into())
    }

    fn json(&self) -> String {
        let driver = match &self.driver {
            #[cfg(feature = "nbd")]
            FileDriver::Nbd(nbd) => return format!("{{{}}}", nbd.json),
            #[cfg(feature = "object-store")]
            FileDriver::Store(store) => {
                let members = [
                    ("driver", store.kind.name()),
                    ("url", &store.url.to_string_lossy()),
                ];
                let members = members.map(|(k, v)| (k.into(), json_string(v.as_bytes())));
                return object(members.into());
            }
            #[cfg(feature = "http")]
            FileDriver::Http(http) => return object(http.shown.clone()),
            #[cfg(feature = "rbd")]
            FileDriver::Rbd(rbd) => return object(rbd.shown.clone()),
            #[cfg(feature = "ssh")]
            FileDriver::Ssh(ssh) => return ssh.json(),
            FileDriver::Null(null) => return object(null.shown.clone()),
            FileDriver::Blkdebug(debug) => return object(debug.members()),
            FileDriver::Image(image) => return image.json(None),
            FileDriver::Any if is_device(&self.path) => "host_device",
            driver => driver.name(),
        };
        format!(
            "{{\"driver\": \"{driver}\", \"filename\": {}}}",
            json_string(self.name().as_bytes())
        )
    }
}

#[cfg(feature = "http")]
impl HttpSpec {
    /// The name that QEMU shows, if a plain name describes it.
    fn plain_name(&self) -> Option<OsString> {
        let others = [
            &self.user,
            &self.password,
            &self.token,
            &self.proxy_user,
            &self.proxy_password,
        ];
        let is_plain = self.verify
            && self.cookie.is_none()
            && self.authorities.is_none()
            && others.iter().all(|other| other.is_none());
        is_plain.then(|| self.name().into())
    }
}

#[cfg(feature = "ssh")]
impl SshSpec {
    fn json(&self) -> String {
        let [host, port] = match self.is_old {
            true => ["host", "port"],
            false => ["server.host", "server.port"],
        };
        let members = [
            (host, Some(self.host.clone())),
            (port, self.port.map(|port| port.to_string())),
            ("host_key_check", self.host_key.name()),
            ("driver", Some("ssh".into())),
            ("path", Some(self.path.clone())),
            ("user", self.user.clone()),
            (
                "timeout",
                self.timeout.map(|time| time.as_secs().to_string()),
            ),
        ];
        let given = members.into_iter();
        let given = given.filter_map(|(k, v)| Some((k.into(), json_string(v?.as_bytes()))));
        object(given.collect())
    }
}

impl NullSpec {
    /// The name that QEMU shows, if a plain name describes it.
    fn plain_name(&self) -> Option<OsString> {
        (self.shown.len() == 1).then(|| null::name(self.driver).into())
    }
}

impl BlkdebugSpec {
    /// The name that QEMU shows, if a plain name describes it.
    fn plain_name(&self) -> Option<OsString> {
        let is_name = |key: &str| key == "config" || key == "x-image";
        if self.shown.iter().any(|(key, _)| !is_name(key)) {
            return None;
        }
        let mut name = OsString::from("blkdebug:");
        name.push(self.config.as_deref().unwrap_or(Path::new("")));
        name.push(":");
        name.push(self.image.plain_name()?);
        Some(name)
    }

    /// The members of its JSON.
    fn members(&self) -> Vec<(String, String)> {
        let shown = self.shown.iter().filter(|(key, _)| key != "x-image");
        let mut members: Vec<_> = shown.cloned().collect();
        members.push(("driver".into(), "\"blkdebug\"".into()));
        members.push(("image".into(), self.image.json()));
        members
    }
}

/// A JSON object of these members, in the order in which QEMU has them as far as
/// that is known.
fn object(mut members: Vec<(String, String)>) -> String {
    const ORDER: &[&str] = &[
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
        "image",
        "conf",
        "snapshot",
        "port",
        "host",
        "server.host",
        "server.port",
        "host_key_check",
        "driver",
        "proxy-password-secret",
        "username",
        "cookie",
        "sslverify",
        "config",
        "size",
        "file",
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

/// Devices named without a driver show as such in JSON.
fn is_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path)
        .is_ok_and(|m| m.file_type().is_block_device() || m.file_type().is_char_device())
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
    fn plain_name(&self) -> Option<OsString> {
        let raw = &self.options.raw;
        let is_window = raw.offset_json.is_some() || raw.size_json.is_some();
        match (&self.file.driver, self.format) {
            _ if self.bare => self.file.plain_name(),
            _ if self.options.vpc.size != VhdSize::ByCreator => None,
            // The format over another one is never guessed.
            (FileDriver::Image(_), _) => None,
            (_, Some(format)) if format != Format::RAW => self.file.plain_name(),
            _ if is_window => None,
            _ => self.file.plain_name(),
        }
    }

    /// As JSON, the keys in QEMU's order.
    fn json(&self, backing: Option<&str>) -> String {
        if self.bare {
            return self.file.json();
        }
        let raw = &self.options.raw;
        let vhd_size = match self.options.vpc.size {
            VhdSize::Chs => Some("\"chs\""),
            VhdSize::CurrentSize => Some("\"current_size\""),
            _ => None,
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
