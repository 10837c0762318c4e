//! Names and options of images in Ceph: `rbd:POOL/[NAMESPACE/]IMAGE[@SNAPSHOT][:OPTION=VALUE…]` and
//! the options of `driver=rbd`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::RbdSpec;
use crate::spelling::path::protocol;
use crate::spelling::quote::json_string;
use crate::spelling::{OptionSet, OptionValue, json};

impl RbdSpec {
    /// From the options of the driver, with a name if there is one.
    pub(super) fn take(options: &mut OptionSet, name: Option<&OsStr>) -> Result<RbdSpec, String> {
        let mut spec = match name {
            Some(name) => named(name)?,
            None => of_options(options)?,
        };
        let shown = options.shown(&["user", "conf", "key-secret"]);
        spec.shown.extend(shown);
        spec.user = options.take_text("user").or(spec.user);
        spec.conf = options.take_value("conf").map(Into::into).or(spec.conf);
        spec.key = options.take_text("key-secret");
        let methods = list(options, "auth-client-required");
        if !methods.is_empty() {
            spec.set
                .push(("auth_client_required".into(), methods.join(";")));
        }
        let servers = servers(options)?;
        if !servers.is_empty() {
            spec.set.push(("mon_host".into(), servers.join(",")));
        }
        if spec.pool.is_empty() {
            return Err("Pool name is required".into());
        }
        Ok(spec)
    }
}

/// Refuses a name that an image has, if it names another cluster than one that this machine is
/// configured for: the configuration of a cluster, and its monitors, can name files to write and code
/// to load.
pub(super) fn check_name_in_image(name: &OsStr) -> Result<(), String> {
    let refused = |what: &str| {
        let why = "an image may name no configuration of a cluster but those in /etc/ceph";
        Err(format!("'{what}': {why}"))
    };
    // Ceph takes a list of files, too.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let is_configured = |conf: &OsStr| {
        let name = conf.to_str().and_then(|c| c.strip_prefix("/etc/ceph/"));
        name.is_some_and(|name| name.chars().all(is_plain))
    };
    match protocol(name).as_deref() {
        Some("rbd") => {
            let spec = named(name)?;
            match (spec.set.first(), &spec.conf) {
                (Some((option, _)), _) => refused(option),
                (None, Some(conf)) if !is_configured(conf.as_os_str()) => refused("conf"),
                _ => Ok(()),
            }
        }
        Some("json") => {
            let options = json::parse(&name.as_bytes()["json:".len()..])?;
            for (key, value) in options.iter() {
                let OptionValue::Text(text) = value else {
                    continue;
                };
                // Names may be within names.
                check_name_in_image(text)?;
                let Some(parent) = key.strip_suffix("driver").filter(|_| text == "rbd") else {
                    continue;
                };
                match options.get(&format!("{parent}conf")) {
                    None => {}
                    Some(OptionValue::Text(conf)) if is_configured(conf) => {}
                    Some(_) => return refused("conf"),
                }
                if options.has_under(&format!("{parent}server")) {
                    return refused("server");
                }
            }
            Ok(())
        }
        Some("blkdebug") => {
            let mut parts = name.as_bytes().splitn(3, |b| *b == b':').skip(2);
            parts.next().map_or(Ok(()), |image| {
                check_name_in_image(OsStr::from_bytes(image))
            })
        }
        _ => Ok(()),
    }
}

/// The options that name an image.
fn of_options(options: &mut OptionSet) -> Result<RbdSpec, String> {
    let mut spec = empty();
    for (key, field) in [
        ("pool", &mut spec.pool),
        ("namespace", &mut spec.namespace),
        ("image", &mut spec.image),
    ] {
        match options.take_text(key) {
            Some(value) => {
                spec.shown.push((key.into(), json_string(value.as_bytes())));
                *field = value;
            }
            None if key == "namespace" => {}
            None => return Err(format!("Parameter '{key}' is missing")),
        }
    }
    if let Some(snapshot) = options.take_text("snapshot") {
        spec.shown
            .push(("snapshot".into(), json_string(snapshot.as_bytes())));
        spec.snapshot = Some(snapshot).filter(|snapshot| !snapshot.is_empty());
    }
    let namespace = match spec.namespace.as_str() {
        "" => String::new(),
        namespace => format!("{namespace}/"),
    };
    let snapshot = spec.snapshot.as_ref().map(|s| format!("@{s}"));
    let snapshot = snapshot.unwrap_or_default();
    spec.name = format!("rbd:{}/{namespace}{}{snapshot}", spec.pool, spec.image).into();
    Ok(spec)
}

fn empty() -> RbdSpec {
    RbdSpec {
        pool: String::new(),
        namespace: String::new(),
        image: String::new(),
        snapshot: None,
        conf: None,
        user: None,
        key: None,
        set: Vec::new(),
        name: Default::default(),
        shown: vec![("driver".into(), "\"rbd\"".into())],
    }
}

/// Reads a name. A backslash makes the character behind it a plain one.
fn named(name: &OsStr) -> Result<RbdSpec, String> {
    let name = name.to_str().ok_or("The name is not UTF-8")?;
    let mut spec = empty();
    spec.name = name.into();
    let rest = name.strip_prefix("rbd:").unwrap_or_default();
    let (pool, rest) = cut(rest, '/').ok_or("Pool name is required")?;
    let (image, mut options) = item(rest, ':');
    let (image, snapshot) = item(image, '@');
    let (namespace, image) = cut(image, '/').unwrap_or(("", image));
    (spec.pool, spec.namespace, spec.image) = (plain(pool), plain(namespace), plain(image));
    let mut show = |key: &str, value: &str| {
        spec.shown.push((key.into(), json_string(value.as_bytes())));
    };
    show("pool", &spec.pool);
    show("namespace", &spec.namespace);
    show("image", &spec.image);
    if let Some(snapshot) = snapshot.map(plain) {
        show("snapshot", &snapshot);
        spec.snapshot = Some(snapshot).filter(|snapshot| !snapshot.is_empty());
    }
    while let Some(rest) = options {
        let (option, after) = item(rest, ':');
        options = after;
        let Some((key, value)) = cut(option, '=') else {
            return Err(format!("conf option {} has no value", plain(option)));
        };
        let (key, value) = (plain(key), plain(value));
        match key.as_str() {
            "id" => {
                show("user", &value);
                spec.user = Some(value);
            }
            "conf" => {
                show("conf", &value);
                spec.conf = Some(value.into());
            }
            // It would be visible in the list of processes, a header, or a message.
            "key" => return Err("a name has no key: use 'key-secret', or a keyring".into()),
            _ => spec.set.push((key, value)),
        }
    }
    Ok(spec)
}

/// The two parts of a text around the first `separator` that no backslash precedes.
fn cut(text: &str, separator: char) -> Option<(&str, &str)> {
    let mut escaped = false;
    let is_it = |c: char| {
        let is_plain = escaped;
        escaped = c == '\\' && !escaped;
        !is_plain && c == separator
    };
    let place = text.find(is_it)?;
    Some((&text[..place], &text[place + separator.len_utf8()..]))
}

/// As [`cut`]: the whole text, if there is no separator.
fn item(text: &str, separator: char) -> (&str, Option<&str>) {
    match cut(text, separator) {
        Some((before, after)) => (before, Some(after)),
        None => (text, None),
    }
}

/// Without the backslashes.
fn plain(text: &str) -> String {
    let mut escaped = false;
    let keep = |c: &char| {
        escaped = *c == '\\' && !escaped;
        !escaped
    };
    text.chars().filter(keep).collect()
}

/// `KEY.0`, `KEY.1`, …
fn list(options: &mut OptionSet, key: &str) -> Vec<String> {
    let mut under = options.take_under(key);
    (0..)
        .map_while(|nth| under.take_text(&nth.to_string()))
        .collect()
}

/// `server.0.host`, `server.0.port`, …
fn servers(options: &mut OptionSet) -> Result<Vec<String>, String> {
    let mut servers = Vec::new();
    for nth in 0.. {
        let host = options.take_text(&format!("server.{nth}.host"));
        let port = options.take_text(&format!("server.{nth}.port"));
        match (host, port) {
            (Some(host), Some(port)) if host.contains(':') => {
                servers.push(format!("[{host}]:{port}"))
            }
            (Some(host), Some(port)) => servers.push(format!("{host}:{port}")),
            (None, None) => break,
            (None, _) => return Err(format!("Parameter 'server.{nth}.host' is missing")),
            (_, None) => return Err(format!("Parameter 'server.{nth}.port' is missing")),
        }
    }
    Ok(servers)
}

#[cfg(test)]
mod tests {
    //! Guards against names that are those of another image than with QEMU.
    use super::*;

    fn take(name: &str) -> Result<RbdSpec, String> {
        RbdSpec::take(&mut OptionSet::default(), Some(OsStr::new(name)))
    }

    #[test]
    fn names_are_taken_apart() {
        for (name, parts) in [
            ("rbd:p/i", ("p", "", "i", None)),
            ("rbd:p/n/i", ("p", "n", "i", None)),
            ("rbd:p/n/i/j@s", ("p", "n", "i/j", Some("s"))),
            ("rbd:p/i@", ("p", "", "i", None)),
            (r"rbd:p\/q/i\@x\:y@s\\", ("p/q", "", "i@x:y", Some(r"s\"))),
        ] {
            let spec = take(name).unwrap();
            let found = (
                &*spec.pool,
                &*spec.namespace,
                &*spec.image,
                spec.snapshot.as_deref(),
            );
            assert_eq!(found, parts, "{name}");
        }
        let spec = take(r"rbd:p/i@s:id=u:conf=/a\:b:x=y\=z:w=").unwrap();
        assert_eq!(spec.user.as_deref(), Some("u"));
        assert_eq!(spec.conf.as_deref(), Some("/a:b".as_ref()));
        let set = [("x", "y=z"), ("w", "")].map(|(k, v)| (k.into(), v.into()));
        assert_eq!(spec.set, set);
        for name in [
            "rbd:",
            "rbd:p",
            "rbd:p/i:",
            "rbd:p/i:x",
            "rbd:p/i:key=secret",
            "rbd:/i",
        ] {
            assert!(take(name).is_err(), "{name}");
        }
    }

    #[test]
    fn images_name_no_cluster_of_their_own() {
        for name in [
            "disk.raw",
            "rbd:p/i",
            "rbd:p/i@s:id=u:conf=/etc/ceph/other.conf",
            "nbd://h/rbd:p",
            r#"json:{"driver":"rbd","pool":"p","image":"i","user":"u"}"#,
            r#"json:{"file":{"driver":"rbd","pool":"p","image":"i","conf":"/etc/ceph/c"}}"#,
        ] {
            check_name_in_image(OsStr::new(name)).expect(name);
        }
        for name in [
            "rbd:p/i:conf=/tmp/c",
            "rbd:p/i:conf=/etc/ceph/../x",
            "rbd:p/i:conf=/etc/ceph/none,/x",
            "rbd:p/i:conf=/etc/ceph/none /x",
            r#"json:{"driver":"rbd","pool":"p","image":"i","conf":1}"#,
            "rbd:p/i:conf=ceph.conf",
            "rbd:p/i:mon_host=h",
            "rbd:p/i:log_file=/x",
            r#"json:{"driver":"rbd","pool":"p","image":"i","conf":"/tmp/c"}"#,
            r#"json:{"file":{"driver":"rbd","pool":"p","image":"i","server":[{"host":"h"}]}}"#,
            r#"json:{"driver":"raw","file":{"driver":"rbd","conf":"c"}}"#,
            r#"json:{"driver":"qcow2","file.filename":"x","backing":{"file.driver":"rbd","file.conf":"c"}}"#,
            r#"json:{"file.filename":"rbd:p/i:log_file=x"}"#,
            r#"json:{"driver":"blkdebug","x-image":"rbd:p/i:log_file=x"}"#,
            "blkdebug::rbd:p/i:log_file=x",
            r#"json:{"file.filename":"json:{'driver':'rbd','conf':'c'}"}"#,
        ] {
            assert!(check_name_in_image(OsStr::new(name)).is_err(), "{name}");
        }
    }

    #[test]
    fn options_are_those_of_a_cluster() {
        let mut options = OptionSet::parse(OsStr::new(
            "pool=p,image=i,snapshot=s,auth-client-required.0=cephx,auth-client-required.1=none,\
             server.0.host=a,server.0.port=1,server.1.host=::1,server.1.port=2",
        ));
        let spec = RbdSpec::take(&mut options, None).unwrap();
        assert!(options.is_empty());
        let set = [
            ("auth_client_required", "cephx;none"),
            ("mon_host", "a:1,[::1]:2"),
        ];
        assert_eq!(spec.set, set.map(|(k, v)| (k.into(), v.into())));
        assert_eq!(spec.name().to_str(), Some("rbd:p/i@s"));
    }
}
