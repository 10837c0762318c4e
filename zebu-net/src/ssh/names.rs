//! Names and options of files on SSH servers: `ssh://[USER@]HOST[:PORT]/PATH` and the options of
//! `driver=ssh`.

use std::ffi::OsStr;
use std::time::Duration;

use super::{HashKind, HostKeyCheck, SshSpec};
use crate::spelling::OptionSet;
use crate::uri::{Query, decoded, host_and_port};

impl SshSpec {
    /// From the options of the driver, with a name if there is one.
    pub(super) fn take(options: &mut OptionSet, name: Option<&OsStr>) -> Result<SshSpec, String> {
        let mut spec = match name {
            Some(name) => named(name)?,
            None => SshSpec::from_options(options)?,
        };
        if let Some(check) = host_key(options)? {
            spec.host_key = check;
        }
        let timeout = options.take_number("timeout")?;
        spec.timeout = timeout
            .filter(|seconds| *seconds > 0)
            .map(Duration::from_secs);
        spec.check()?;
        Ok(spec)
    }

    fn from_options(options: &mut OptionSet) -> Result<SshSpec, String> {
        let missing = |key: &str| format!("Parameter '{key}' is missing");
        let old = (options.take_text("host"), options.take_text("port"));
        let new = (
            options.take_text("server.host"),
            options.take_text("server.port"),
        );
        let ((host, port), is_old) = match (&old, &new) {
            ((None, None), _) => (new, false),
            (_, (None, None)) => (old, true),
            _ => return Err("'server' and host/port cannot be used at the same time".into()),
        };
        let host = host.ok_or_else(|| {
            missing(if port.is_some() {
                "server.host"
            } else {
                "server"
            })
        })?;
        let path = options.take_text("path").ok_or_else(|| missing("path"))?;
        let user = options.take_text("user");
        let port = port.map(|port| {
            let number = port.parse::<u16>();
            number.map_err(|_| format!("address resolution failed: '{port}' is no port"))
        });
        Ok(SshSpec {
            host,
            port: port.transpose()?,
            user,
            path,
            host_key: HostKeyCheck::Configured,
            timeout: None,
            is_old,
        })
    }

    fn check(&self) -> Result<(), String> {
        check_host(&self.host)?;
        self.user.as_deref().map_or(Ok(()), check_user)?;
        if self.path.is_empty() {
            return Err("missing remote path in URI".into());
        }
        match self.path.contains('\0') {
            true => Err("The file name has a zero byte in it".into()),
            false => Ok(()),
        }
    }
}

/// Reads a name.
fn named(name: &OsStr) -> Result<SshSpec, String> {
    let name = name.to_str().ok_or("The name is not UTF-8")?;
    let rest = name.strip_prefix("ssh:").unwrap_or_default();
    let rest = rest.strip_prefix("//").unwrap_or_default();
    let rest = rest.split_once('#').map_or(rest, |(rest, _)| rest);
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (user, address) = match authority.rsplit_once('@') {
        Some((user, address)) => (Some(user), address),
        None => (None, authority),
    };
    if user.is_some_and(|user| user.contains(':')) {
        // It would be visible in the list of processes, a header, or a message.
        return Err("a URL has no password: use a key and the agent".into());
    }
    let (host, port) = host_and_port(address)?;
    if host.is_empty() {
        return Err("missing hostname in URI".into());
    }
    let mut query = Query::parse(query)?;
    let check = query.take("host_key_check");
    if let Some((key, _)) = query.0.first() {
        return Err(format!("Unsupported parameter '{key}' in URI"));
    }
    let user = user.filter(|user| !user.is_empty());
    let user = user.map(decoded).transpose()?;
    Ok(SshSpec {
        host,
        port: port.parse().ok(),
        user,
        path: decoded(path)?,
        host_key: check.map_or(Ok(HostKeyCheck::Configured), |check| old_check(&check))?,
        timeout: None,
        is_old: false,
    })
}

/// What is given to the program `ssh`, and to commands that its configuration names, cannot be
/// taken there for anything but a host.
fn check_host(host: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-:%".contains(c);
    match host.starts_with('-') || host.is_empty() || !host.chars().all(is_plain) {
        true => Err(format!("'{host}' is not a name or an address of a server")),
        false => Ok(()),
    }
}

/// As [`check_host`], by the rules of OpenSSH for users.
fn check_user(user: &str) -> Result<(), String> {
    let is_special =
        |c: char| c.is_control() || c.is_whitespace() || "'`\"$\\;&<>|(){}".contains(c);
    match user.starts_with('-') || user.is_empty() || user.chars().any(is_special) {
        true => Err(format!("'{user}' is not a name of a user")),
        false => Ok(()),
    }
}

/// `host-key-check.*`, or the older `host_key_check`.
fn host_key(options: &mut OptionSet) -> Result<Option<HostKeyCheck>, String> {
    let missing = |key: &str| format!("Parameter 'host-key-check.{key}' is missing");
    let mut take = |key: &str| options.take_text(&format!("host-key-check.{key}"));
    let wrong =
        |key: &str, value: &str| format!("Parameter '{key}' does not accept value '{value}'");
    let new = match take("mode").as_deref() {
        None => None,
        Some("none") => Some(HostKeyCheck::Nothing),
        Some("known_hosts") => Some(HostKeyCheck::KnownHosts),
        Some("hash") => {
            let kind = take("type").ok_or_else(|| missing("type"))?;
            let hash = take("hash").ok_or_else(|| missing("hash"))?;
            let kind = HashKind::from_name(&kind).ok_or_else(|| wrong("type", &kind))?;
            Some(hash_check(kind, &hash)?)
        }
        Some(other) => return Err(wrong("mode", other)),
    };
    let old = options.take_text("host_key_check");
    match (new, old) {
        (Some(_), Some(_)) => {
            Err("host-key-check and host_key_check cannot be used at the same time".into())
        }
        (None, Some(old)) => old_check(&old).map(Some),
        (new, None) => Ok(new),
    }
}

/// `yes`, `no`, `KIND:DIGITS`
fn old_check(text: &str) -> Result<HostKeyCheck, String> {
    let hash = text.split_once(':');
    let hash = hash.and_then(|(kind, hash)| Some((HashKind::from_name(kind)?, hash)));
    match (text, hash) {
        ("yes", _) => Ok(HostKeyCheck::KnownHosts),
        ("no", _) => Ok(HostKeyCheck::Nothing),
        (_, Some((kind, hash))) => hash_check(kind, hash),
        _ => Err(format!("unknown host_key_check setting ({text})")),
    }
}

/// Digits may be in upper case, and colons between them.
fn hash_check(kind: HashKind, hash: &str) -> Result<HostKeyCheck, String> {
    let digits: String = hash.chars().filter(|c| *c != ':').collect();
    let digits = digits.to_ascii_lowercase();
    let is_hash = digits.len() == kind.digits() && digits.bytes().all(|b| b.is_ascii_hexdigit());
    match is_hash {
        true => Ok(HostKeyCheck::Hash(kind, digits)),
        false => Err(format!(
            "'{hash}' is no {} hash of a key: it has {} hexadecimal digits",
            kind.name(),
            kind.digits()
        )),
    }
}

#[cfg(test)]
mod tests {
    //! Guards against names that reach another host, or the program `ssh` as an option.
    use super::*;

    fn take(name: &str) -> Result<SshSpec, String> {
        SshSpec::take(&mut OptionSet::default(), Some(OsStr::new(name)))
    }

    fn of_options(text: &str) -> Result<SshSpec, String> {
        let mut options = OptionSet::parse(OsStr::new(text));
        let spec = SshSpec::take(&mut options, None)?;
        assert!(options.is_empty(), "{text}");
        Ok(spec)
    }

    #[test]
    fn names_and_options_are_the_same() {
        let hash = "AB".repeat(20);
        for (name, options) in [
            ("ssh://h/a/b", "host=h,path=/a/b"),
            (
                "ssh://u@h:22/a%20b",
                "server.host=h,server.port=22,user=u,path=/a b",
            ),
            ("ssh://a%40b@[::1]:7/x", "host=::1,port=7,user=a@b,path=/x"),
            (
                "ssh://h/x?host_key_check=no",
                "host=h,path=/x,host-key-check.mode=none",
            ),
            (
                "ssh://h/x?host_key_check=yes",
                "host=h,path=/x,host_key_check=yes",
            ),
            (
                &format!("ssh://h/x?host_key_check=sha1:{hash}"),
                &format!(
                    "host=h,path=/x,host-key-check.mode=hash,host-key-check.type=sha1,\
                     host-key-check.hash={hash}"
                ),
            ),
        ] {
            let (one, other) = (take(name).unwrap(), of_options(options).unwrap());
            assert!(one.is_same(&other), "{name}");
            assert_eq!(one.name(), other.name());
            assert_eq!(
                (one.user, one.host_key),
                (other.user, other.host_key),
                "{name}"
            );
        }
        for (text, timeout) in [("5", Some(Duration::from_secs(5))), ("0", None)] {
            let spec = of_options(&format!("host=h,path=/x,timeout={text}")).unwrap();
            assert_eq!(spec.timeout, timeout);
        }
        let spec = take("ssh://u@h:22/a").unwrap();
        assert_eq!(spec.name().to_str(), Some("ssh://u@h:22/a"));
    }

    #[test]
    fn what_is_none_is_refused() {
        for name in [
            "ssh:",
            "ssh:h",
            "ssh://",
            "ssh:///x",
            "ssh://h",
            "ssh://h:x/y",
            "ssh://u:p@h/x",
            "ssh://-oProxyCommand=x/y",
            "ssh://u@-oProxyCommand%3Dx/y",
            "ssh://-l@h/x",
            "ssh://h%20x/y",
            "ssh://h$(x)/y",
            "ssh://h`x`/y",
            "ssh://h;x/y",
            "ssh://a%20b@h/x",
            "ssh://$(a)@h/x",
            "ssh://h/x%00",
            "ssh://h/x?a=b",
            "ssh://h/x?host_key_check=maybe",
            "ssh://h/x?host_key_check=md5:00",
            "ssh://h/x?host_key_check=sha1:zz",
        ] {
            assert!(take(name).is_err(), "{name}");
        }
        for options in [
            "path=/x",
            "host=h",
            "host=h,server.host=h,path=/x",
            "host=-x,path=/x",
            "host=h,user=-x,path=/x",
            "host=h,path=",
            "host=h,path=/x,host-key-check.mode=hash",
            "host=h,path=/x,host-key-check.mode=all",
            "host=h,path=/x,host-key-check.mode=none,host_key_check=no",
            "host=h,path=/x,timeout=-1",
        ] {
            assert!(of_options(options).is_err(), "{options}");
        }
    }
}
