//! Names and options of exports of NBD servers: URIs, QEMU's older
//! `nbd:HOST:PORT` and `nbd:unix:PATH`, and the options of `driver=nbd`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use super::{NbdSpec, NbdTls};
use crate::nbd::client::{NbdServer, uri as uri_of};
use crate::nbd::protocol::{DEFAULT_PORT, MAX_STRING};
use crate::spelling::path::after_protocol;
use crate::spelling::quote::json_string;
use crate::spelling::{OptionSet, OptionValue};
use crate::tls::{KeyFile, TlsCredentials, TlsFiles, Verify};
use crate::uri::{INVALID, Query, decoded, host_and_port, without_brackets};

impl NbdSpec {
    fn new(server: NbdServer, export: String) -> Result<NbdSpec, String> {
        if export.len() > MAX_STRING {
            return Err("export name too long to send to server".into());
        }
        let given = Some(&*export).filter(|export| !export.is_empty());
        Ok(NbdSpec {
            name: uri_of(&server, given).into(),
            json: members(&server, given),
            server,
            export,
            context: None,
            tls: NbdTls::Off,
            tls_hostname: None,
            reconnect_delay: Duration::ZERO,
            open_timeout: Duration::ZERO,
            request_timeout: None,
            connections: None,
        })
    }

    /// Reads a name that begins with one of the protocols.
    pub(super) fn named(name: &OsStr) -> Result<NbdSpec, String> {
        match after_protocol(name, "nbd").filter(|rest| !rest.as_bytes().starts_with(b"//")) {
            Some(rest) => old_name(rest),
            None => uri(name.to_str().ok_or(INVALID)?),
        }
    }

    /// From the options of `driver=nbd`, with a name if there is one.
    pub(super) fn take(options: &mut OptionSet, name: Option<&OsStr>) -> Result<NbdSpec, String> {
        if let Some(name) = name {
            let mut spec = NbdSpec::named(OsStr::new(name))?;
            spec.take_rest(options)?;
            return Ok(spec);
        }
        let old_port = options.get("port").map(OptionValue::json);
        let path = options.take_value("path");
        let mut text = |key: &str| options.take_text(key);
        let (host, port) = (text("host"), text("port"));
        let old = path.is_some() || host.is_some() || port.is_some();
        let kind = text("server.type");
        if old && kind.is_some() {
            return Err("'server' and path/host/port cannot be used at the same time".into());
        }
        let server = match (path, host, kind.as_deref()) {
            (Some(_), Some(_), _) => {
                return Err("path and host may not be used at the same time".into());
            }
            (Some(_), None, _) if port.is_some() => {
                return Err("port may not be used without host".into());
            }
            (Some(path), None, _) => NbdServer::Unix(path.into()),
            (None, Some(host), _) => NbdServer::Tcp {
                host,
                port: port.unwrap_or_else(|| DEFAULT_PORT.to_string()),
            },
            (None, None, None) => return Err("NBD server address missing".into()),
            (None, None, Some(kind)) => server(options, kind)?,
        };
        let export = options.take_text("export");
        let mut spec = NbdSpec::new(server, export.clone().unwrap_or_default())?;
        spec.name = uri_of(&spec.server, export.as_deref()).into();
        spec.json = match (&spec.server, old) {
            (NbdServer::Unix(path), true) => format!(
                "\"driver\": \"nbd\"{}, \"path\": {}",
                export_member(export.as_deref()),
                json_string(path.as_os_str().as_bytes())
            ),
            (NbdServer::Tcp { host, .. }, true) => format!(
                "{}\"host\": {}, \"driver\": \"nbd\"{}",
                old_port.map_or_else(String::new, |port| format!("\"port\": {port}, ")),
                json_string(host.as_bytes()),
                export_member(export.as_deref())
            ),
            (server, false) => members(server, export.as_deref()),
        };
        spec.take_rest(options)?;
        Ok(spec)
    }

    fn take_rest(&mut self, options: &mut OptionSet) -> Result<(), String> {
        if let Some(id) = options.take_text("tls-creds") {
            self.tls = NbdTls::Object(id);
        }
        let hostname = options.take_text("tls-hostname");
        self.tls_hostname = hostname.or(self.tls_hostname.take());
        if self.tls_hostname.is_some() && self.tls == NbdTls::Off {
            return Err("tls-hostname may not be used without tls-creds".into());
        }
        self.context = options.take_text("x-dirty-bitmap");
        if self.context.as_ref().is_some_and(|c| c.len() > MAX_STRING) {
            return Err("x-dirty-bitmap query too long to send to server".into());
        }
        let mut seconds = |key: &str| -> Result<Option<Duration>, String> {
            let number = options.take_number(key)?;
            match number.map(u32::try_from) {
                None => Ok(None),
                Some(Ok(number)) => Ok(Some(Duration::from_secs(number.into()))),
                Some(Err(_)) => Err(format!("Parameter '{key}' is too large")),
            }
        };
        self.reconnect_delay = seconds("reconnect-delay")?.unwrap_or_default();
        self.open_timeout = seconds("open-timeout")?.unwrap_or_default();
        self.request_timeout = seconds("request-timeout")?;
        self.connections = options.take_connections()?;
        Ok(())
    }
}

/// `, "export": NAME`, if there is one.
fn export_member(export: Option<&str>) -> String {
    export.map_or_else(String::new, |e| {
        format!(", \"export\": {}", json_string(e.as_bytes()))
    })
}

/// The members that name an export, in the order that QEMU has them.
fn members(server: &NbdServer, export: Option<&str>) -> String {
    let export = export_member(export);
    match server {
        NbdServer::Unix(path) => format!(
            "\"server.path\": {}, \"driver\": \"nbd\"{export}, \"server.type\": \"unix\"",
            json_string(path.as_os_str().as_bytes())
        ),
        NbdServer::Tcp { host, port } => format!(
            "\"server.host\": {}, \"server.port\": {}, \"driver\": \"nbd\"{export}, \
             \"server.type\": \"inet\"",
            json_string(host.as_bytes()),
            json_string(port.as_bytes())
        ),
    }
}

/// `server.*`
fn server(options: &mut OptionSet, kind: &str) -> Result<NbdServer, String> {
    let missing = |key: &str| format!("Parameter '{key}' is missing");
    let mut needed = |key: &str| {
        let value = options.take_text(&format!("server.{key}"));
        value.ok_or_else(|| missing(key))
    };
    match kind {
        "unix" => {
            let path = options.take_value("server.path");
            Ok(NbdServer::Unix(path.ok_or_else(|| missing("path"))?.into()))
        }
        "inet" => Ok(NbdServer::Tcp {
            host: needed("host")?,
            port: needed("port")?,
        }),
        "vsock" | "fd" => Err(format!("server.type={kind} is not supported by zebu")),
        other => Err(format!("Parameter 'type' does not accept value '{other}'")),
    }
}

/// What follows `nbd:` in QEMU's older names: `HOST:PORT` or `unix:PATH`, and
/// perhaps `:exportname=NAME`.
fn old_name(rest: &OsStr) -> Result<NbdSpec, String> {
    const EXPORT: &[u8] = b":exportname=";
    let missing = || "NBD server address missing".to_string();
    let rest = rest.as_bytes();
    let place = rest.windows(EXPORT.len()).position(|w| w == EXPORT);
    let (address, export) = match place {
        Some(place) => (&rest[..place], &rest[place + EXPORT.len()..]),
        None => (rest, &b""[..]),
    };
    if address.is_empty() || (place.is_some() && export.is_empty()) {
        return Err(missing());
    }
    let export = str::from_utf8(export).map_err(|_| "export name is not UTF-8")?;
    if let Some(path) = address.strip_prefix(b"unix:") {
        return NbdSpec::new(
            NbdServer::Unix(OsStr::from_bytes(path).into()),
            export.into(),
        );
    }
    let address = String::from_utf8_lossy(address);
    let server = match address.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() => NbdServer::Tcp {
            host: without_brackets(host).into(),
            port: port.into(),
        },
        _ => return Err(format!("error parsing address '{address}'")),
    };
    NbdSpec::new(server, export.into())
}

/// A URI of the NBD project's specification.
fn uri(name: &str) -> Result<NbdSpec, String> {
    let (scheme, rest) = name.split_once(':').ok_or(INVALID)?;
    let rest = rest.strip_prefix("//").ok_or(INVALID)?;
    let rest = rest.split_once('#').map_or(rest, |(rest, _)| rest);
    let (rest, query) = match rest.split_once('?') {
        Some((rest, query)) => (rest, query),
        None => (rest, ""),
    };
    let (authority, path) = match rest.find('/') {
        Some(slash) => (&rest[..slash], &rest[slash + 1..]),
        None => (rest, ""),
    };
    let export = decoded(path)?;
    // The last one: a name may have one too.
    let (user, address) = match authority.rsplit_once('@') {
        Some((user, address)) => (Some(decoded(user)?), address),
        None => (None, authority),
    };
    let mut query = Query::parse(query)?;
    let (tls, transport) = match scheme.strip_prefix("nbds") {
        Some(transport) => (true, transport),
        None => (false, &scheme["nbd".len()..]),
    };
    let server = match transport {
        "+unix" if address.is_empty() => {
            let socket = query.take("socket").filter(|socket| !socket.is_empty());
            NbdServer::Unix(socket.ok_or(INVALID)?.into())
        }
        "+unix" => return Err(INVALID.into()),
        _ => tcp(address)?,
    };
    let mut spec = NbdSpec::new(server, export)?;
    if tls {
        let verify = match query.take("tls-verify-peer").as_deref() {
            None | Some("1" | "true" | "on" | "yes") => Verify::Name,
            Some("0" | "false" | "off" | "no") => Verify::Nothing,
            Some(_) => return Err(INVALID.into()),
        };
        // With a key it means nothing, there as in QEMU and libnbd.
        spec.tls_hostname = query.take("tls-hostname");
        let directory = query.take("tls-certificates").map(PathBuf::from);
        spec.tls = NbdTls::Named(match query.take("tls-psk-file") {
            Some(file) if file.is_empty() => return Err(INVALID.into()),
            Some(_) if directory.is_some() => {
                let why = "tls-psk-file and tls-certificates cannot be used at the same time";
                return Err(why.into());
            }
            Some(file) => {
                TlsCredentials::Key(KeyFile::new(file).user(user.filter(|user| !user.is_empty())))
            }
            None => TlsCredentials::Certificates(
                TlsFiles::default().directory(directory).verify(verify),
            ),
        });
    }
    match query.0.first() {
        None => Ok(spec),
        Some(_) => Err(INVALID.into()),
    }
}

/// `HOST[:PORT]`
fn tcp(address: &str) -> Result<NbdServer, String> {
    let (host, port) = host_and_port(address)?;
    Ok(NbdServer::Tcp {
        host: match host.is_empty() {
            true => "localhost".into(),
            false => host,
        },
        port: match port {
            "" => DEFAULT_PORT.to_string(),
            port => port.into(),
        },
    })
}

#[cfg(test)]
mod tests {
    //! Guards against a name that refers to another server or export than with QEMU and libnbd.
    use super::*;

    fn tcp(host: &str, port: &str) -> NbdServer {
        NbdServer::Tcp {
            host: host.into(),
            port: port.into(),
        }
    }

    #[test]
    fn names_are_resolved_to_servers() {
        let unix = |path: &str| NbdServer::Unix(path.into());
        for (name, server, export) in [
            ("nbd://h", tcp("h", "10809"), ""),
            ("nbd://h/", tcp("h", "10809"), ""),
            ("nbd://h:1/a/b", tcp("h", "1"), "a/b"),
            ("nbd://h:1//a", tcp("h", "1"), "/a"),
            ("nbd+tcp://u@h:/a%20b", tcp("h", "10809"), "a b"),
            ("nbd://[::1]:7/x", tcp("::1", "7"), "x"),
            ("nbd://[::1]", tcp("::1", "10809"), ""),
            ("nbd+unix:///?socket=/a/b", unix("/a/b"), ""),
            ("nbd+unix://?socket=s%3f", unix("s?"), ""),
            ("nbd+unix:///e%2Ff?socket=/a", unix("/a"), "e/f"),
            ("nbd+unix://u@/e?socket=/a", unix("/a"), "e"),
            ("nbd:h:1", tcp("h", "1"), ""),
            ("nbd:[::1]:2:exportname=a:b", tcp("::1", "2"), "a:b"),
            ("nbd:unix:/a:b", unix("/a:b"), ""),
            ("nbd:unix:/a:exportname=x", unix("/a"), "x"),
        ] {
            let spec = NbdSpec::named(OsStr::new(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!((spec.server, &*spec.export), (server, export), "{name}");
            assert_eq!(spec.tls, NbdTls::Off);
        }
        for name in [
            "nbd:",
            "nbd:h",
            "nbd:h:",
            "nbd:h:1:exportname=",
            "nbd+unix:///x",
            "nbd+unix://h/x?socket=/a",
            "nbd://h/x?socket=/a",
            "nbd://h:99999",
            "nbd://h:x",
            "nbd://h/%",
            "nbd://h/%0g",
            "nbd://h/%00",
            "nbd+unix:///?socket=/a&b=c",
            "nbd://h?tls-verify-peer=0",
            "nbds://h?tls-verify-peer=maybe",
            "nbd+unix:/x?socket=/a",
            "nbd://h?tls-psk-file=/k",
            "nbds://h?tls-psk-file=",
            "nbds://h?tls-psk-file=/k&tls-certificates=/c",
            "nbds+unix://u@h/?socket=/a&tls-psk-file=/k",
        ] {
            assert!(NbdSpec::named(OsStr::new(name)).is_err(), "{name}");
        }
    }

    #[test]
    fn tls_is_in_the_name() {
        let name = "nbds+unix:///?socket=/a&tls-certificates=/c&tls-hostname=h&tls-verify-peer=0";
        let spec = NbdSpec::named(OsStr::new(name)).unwrap();
        assert_eq!(spec.certificate_name(), Some("h"));
        let files = TlsFiles::default()
            .directory(Some("/c".into()))
            .verify(Verify::Nothing);
        let certificates = |files| NbdTls::Named(TlsCredentials::Certificates(files));
        assert_eq!(spec.tls, certificates(files));
        let spec = NbdSpec::named(OsStr::new("nbds://h:1/x")).unwrap();
        assert_eq!(spec.certificate_name(), Some("h"));
        assert_eq!(spec.tls, certificates(TlsFiles::default()));
        for (name, user) in [
            ("nbds://u@h:1/x?tls-psk-file=/k", Some("u")),
            (
                "nbds://a%40b@h/?tls-psk-file=/k&tls-hostname=h",
                Some("a@b"),
            ),
            ("nbds+unix://u@/x?socket=/a&tls-psk-file=/k", Some("u")),
            ("nbds+unix:///x?socket=/a&tls-psk-file=/k", None),
            ("nbds://@h/?tls-psk-file=/k", None),
        ] {
            let spec = NbdSpec::named(OsStr::new(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
            let key = KeyFile::new("/k").user(user.map(String::from));
            assert_eq!(spec.tls, NbdTls::Named(TlsCredentials::Key(key)), "{name}");
        }
    }
}
