//! The options of `driver=blkdebug`, its names (`blkdebug:CONFIG:IMAGE`) and its
//! configuration files.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::BlkdebugSpec;
use crate::protocols::Given;
use crate::protocols::parse::{Naming, child};
use crate::spelling::path::after_protocol;
use crate::spelling::{OptionSet, OptionValue};
use crate::storage::file::read_regular;
use crate::storage::{Action, BlkdebugLimits, Event, Injection, IoKinds, Rule};

/// The sections of rules.
const INJECT: &str = "inject-error";
const SET_STATE: &str = "set-state";

impl BlkdebugSpec {
    /// From the options of the driver, or from its name as well.
    pub(super) fn take(given: &mut Given<'_>) -> Result<BlkdebugSpec, String> {
        let options = &mut given.options;
        if let Some(name) = given.name {
            let image = match after_protocol(name, "blkdebug") {
                // The name is that of the image.
                None => name,
                Some(rest) => {
                    let rest = rest.as_bytes();
                    let Some(colon) = rest.iter().position(|b| *b == b':') else {
                        return Err("blkdebug requires both config file and image path".into());
                    };
                    let config = OsStr::from_bytes(&rest[..colon]);
                    if !config.is_empty() {
                        options.set("config".into(), OptionValue::Text(config.into()));
                    }
                    OsStr::from_bytes(&rest[colon + 1..])
                }
            };
            options.set("x-image".into(), OptionValue::Text(image.into()));
        }
        let shown = options
            .iter()
            .filter(|(key, _)| is_shown(key))
            .map(|(key, value)| (key.to_string(), value.json()))
            .collect();
        let mut rules = take_rules(options, INJECT)?;
        rules.extend(take_rules(options, SET_STATE)?);
        let config = options.take_value("config").map(PathBuf::from);
        let mut limit = |key| Ok::<u64, String>(options.take_size(key)?.unwrap_or(0));
        let limits = BlkdebugLimits {
            align: limit("align")?,
            max_transfer: limit("max-transfer")?,
            opt_write_zero: limit("opt-write-zero")?,
            max_write_zero: limit("max-write-zero")?,
            opt_discard: limit("opt-discard")?,
            max_discard: limit("max-discard")?,
        };
        for list in ["take-child-perms", "unshare-child-perms"] {
            if !options.take_under(list).is_empty() {
                return Err(format!("{list} is not supported by zebu"));
            }
        }
        let image = options.take_value("x-image");
        let naming = Naming::from(image.as_deref());
        Ok(BlkdebugSpec {
            image: Box::new(child(options, "image", naming, given.depth + 1)?),
            limits,
            config,
            rules,
            shown,
        })
    }
}

/// The rules in a configuration file.
pub(super) fn read_config(config: &Path) -> Result<Vec<Rule>, String> {
    let text = read_regular(config).map_err(|e| {
        let why = crate::strerror(&e);
        format!("Could not read blkdebug config file: {why}")
    })?;
    parse(&String::from_utf8_lossy(&text))
}

/// Whether QEMU shows the option in a name.
fn is_shown(key: &str) -> bool {
    const LIMITS: [&str; 6] = [
        "align",
        "max-transfer",
        "opt-write-zero",
        "max-write-zero",
        "opt-discard",
        "max-discard",
    ];
    let section = key.split('.').next().unwrap_or_default();
    let is_rule = key != section && [INJECT, SET_STATE].contains(&section);
    is_rule || LIMITS.contains(&key) || key == "config" || key == "x-image"
}

/// The rules of a section: `SECTION.0.event=…`, `SECTION.1.…`, or one alone as
/// `SECTION.event=…`.
fn take_rules(options: &mut OptionSet, section: &str) -> Result<Vec<Rule>, String> {
    let mut under = options.take_under(section);
    let mut rules = Vec::new();
    if keys(section).iter().any(|key| under.get(key).is_some()) {
        rules.push(take_rule(&mut under, section)?);
    } else {
        for index in 0.. {
            let mut one = under.take_under(&index.to_string());
            if one.is_empty() {
                break;
            }
            rules.push(take_rule(&mut one, section)?);
            if let Some(key) = one.first_key() {
                return Err(format!(
                    "[{section}] section doesn't support the option '{key}'"
                ));
            }
        }
    }
    match under.first_key() {
        None => Ok(rules),
        Some(key) => Err(format!("Unused option '{key}' for [{section}]")),
    }
}

/// The keys of a rule, by section.
fn keys(section: &str) -> &'static [&'static str] {
    match section {
        INJECT => &[
            "event",
            "state",
            "iotype",
            "errno",
            "sector",
            "once",
            "immediately",
        ],
        _ => &["event", "state", "new_state"],
    }
}

fn take_rule(options: &mut OptionSet, section: &str) -> Result<Rule, String> {
    let invalid = |value: &str| format!("invalid parameter value: {value}");
    let number = |options: &mut OptionSet, key: &str| {
        let number = options.take_signed(key)?;
        // As QEMU, which keeps as many bits.
        Ok::<_, String>(number.map(|number| number as i32))
    };
    let (state, errno) = (number(options, "state")?, number(options, "errno")?);
    let new_state = number(options, "new_state")?;
    let sector = options
        .take_signed("sector")?
        .filter(|sector| *sector != -1);
    let (once, immediately) = (
        options.take_bool("once")?,
        options.take_bool("immediately")?,
    );
    let Some(event) = options.take_text("event") else {
        return Err("Missing event name for rule".into());
    };
    let event: Event = event.parse().map_err(|()| invalid(&event))?;
    let action = match section {
        INJECT => {
            let iotype = options.take_text("iotype");
            let kinds = IoKinds::named(iotype.as_deref());
            Action::Inject(Injection {
                errno: errno.unwrap_or(libc::EIO),
                // A sector below zero is none that a request can have.
                offset: sector
                    .map(|s| u64::try_from(s).map_or(u64::MAX, |s| s.saturating_mul(512))),
                kinds: kinds.ok_or_else(|| invalid(&iotype.unwrap_or_default()))?,
                once: once.unwrap_or(false),
                immediately: immediately.unwrap_or(false),
            })
        }
        _ => Action::SetState(new_state.unwrap_or(0)),
    };
    Ok(Rule {
        event,
        state: state.unwrap_or(0),
        action,
    })
}

/// Reads a configuration file: sections in brackets, with or without a name in
/// quotes, of lines `KEY = "VALUE"`.
fn parse(text: &str) -> Result<Vec<Rule>, String> {
    let mut sections: Vec<(&str, Option<&str>, OptionSet)> = Vec::new();
    for line in text.lines() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(rest) = line.strip_prefix('[') {
            let (section, id) = section_of(rest);
            if ![INJECT, SET_STATE].contains(&section) {
                return Err(format!("There is no option group '{section}'"));
            }
            let same = |(s, i, _): &(&str, Option<&str>, OptionSet)| *s == section && *i == id;
            if let Some(id) = id
                && sections.iter().any(same)
            {
                return Err(format!("Duplicate ID '{id}' for {section}"));
            }
            sections.push((section, id, OptionSet::default()));
            continue;
        }
        // As in QEMU, a key ends at a blank, and a malformed value is an empty one.
        let line = line.trim_start();
        let (key, rest) = line
            .split_once(|c: char| c.is_ascii_whitespace())
            .unwrap_or((line, ""));
        if key.is_empty() {
            return Err("parse error".into());
        }
        let Some((section, _, options)) = sections.last_mut() else {
            return Err("no group defined".into());
        };
        if !keys(section).contains(&key) {
            return Err(format!("Invalid parameter '{key}'"));
        }
        let value = rest
            .trim_start()
            .strip_prefix('=')
            .and_then(|rest| rest.trim_start().strip_prefix('"'))
            .map_or("", |rest| rest.split('"').next().unwrap_or_default());
        options.set(key.into(), OptionValue::Text(value.into()));
    }
    sections.sort_by_key(|(section, ..)| *section == SET_STATE);
    sections
        .into_iter()
        .map(|(section, _, mut options)| take_rule(&mut options, section))
        .collect()
}

/// The section that `NAME]` or `NAME "ID"]` begins.
fn section_of(rest: &str) -> (&str, Option<&str>) {
    let inside = rest.split(']').next().unwrap_or_default();
    match inside.split_once(" \"") {
        Some((name, id)) => (name, Some(id.split('"').next().unwrap_or_default())),
        None => (inside, None),
    }
}

#[cfg(test)]
mod tests {
    //! Guards against configuration files that are parsed differently from QEMU.
    use super::*;

    #[test]
    fn configuration_files() {
        let text = "# two rules\n[set-state]\nevent = \"read_aio\"\nstate = \"1\"\n\
                    new_state = \"2\"\n\n[inject-error \"a\"]\n  event   =   \"write_aio\"\n\
                    errno = \"28\"\niotype = \"write\"\nonce = \"on\"\nsector = \"3\"\n";
        let rules = parse(text).unwrap();
        let injection = Injection {
            errno: 28,
            offset: Some(1536),
            kinds: IoKinds::named(Some("write")).unwrap(),
            once: true,
            immediately: false,
        };
        let rule = |event, state, action| Rule {
            event,
            state,
            action,
        };
        assert_eq!(
            rules,
            [
                rule(Event::WriteAio, 0, Action::Inject(injection)),
                rule(Event::ReadAio, 1, Action::SetState(2)),
            ]
        );
        for (text, error) in [
            ("event = \"read_aio\"\n", "no group defined"),
            ("  [inject-error]\n", "no group defined"),
            ("[x]\n", "There is no option group 'x'"),
            ("[inject-error]\n   \n", "parse error"),
            ("[inject-error]\n", "Missing event name for rule"),
            (
                "[inject-error]\nevent=\"a\"\n",
                "Invalid parameter 'event=\"a\"'",
            ),
            ("[inject-error]\nevent = a\n", "invalid parameter value: "),
            (
                "[inject-error \"x\"]\n[inject-error \"x\"]\n",
                "Duplicate ID 'x' for inject-error",
            ),
        ] {
            assert_eq!(parse(text), Err(error.to_string()), "{text:?}");
        }
    }
}
