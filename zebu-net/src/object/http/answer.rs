//! What the head of an answer says.

use std::time::Duration;

use reqwest::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, DATE, ETAG, HeaderMap, HeaderName,
    LAST_MODIFIED, RETRY_AFTER,
};
use reqwest::{Response, StatusCode};

use super::super::failure::{Pause, Trouble};

/// What shows that an object is still the same (RFC 9110, section 8.8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// A strong one.
    etag: Option<String>,
    /// An ETag, strong or weak, without the mark of weak ones. Objects that have the same weak one may
    /// differ; those that have others do.
    tag: Option<String>,
    modified: Option<String>,
    /// In bytes, if the answer says it.
    length: Option<u64>,
}

impl Identity {
    /// The identity in an answer for an object of this length.
    pub fn of(headers: &HeaderMap, length: Option<u64>) -> Identity {
        let found = text(headers, ETAG);
        let etag = found.filter(|etag| !etag.starts_with("W/"));
        let tag = found.map(|etag| etag.strip_prefix("W/").unwrap_or(etag));
        Identity {
            etag: etag.map(Into::into),
            tag: tag.map(Into::into),
            modified: text(headers, LAST_MODIFIED).map(Into::into),
            length,
        }
    }

    /// The condition of requests for ranges (`If-Range`).
    pub fn condition(&self) -> Option<&str> {
        self.etag.as_deref().or(self.modified.as_deref())
    }

    /// What tells that the bytes are the same for ever: the ETag, the date of change or both. The
    /// object could change again within the second of that, so it must be over for long enough by
    /// the server's own clock (RFC 9110, section 8.8.2.2). That holds for ETags too: common servers
    /// make them of the date and the length. Or why nothing tells it.
    pub fn version(&self, headers: &HeaderMap) -> Result<Vec<String>, &'static str> {
        const OLD: i64 = 60;
        let date = text(headers, DATE).and_then(seconds);
        let changed = self.modified.as_deref().and_then(seconds);
        let is_old = date
            .zip(changed)
            .map(|(date, changed)| date - changed >= OLD);
        match (is_old, self.length) {
            (Some(false), _) => {
                Err("the server tells that it was changed within the minute before its answer")
            }
            (_, Some(length)) if is_old.is_some() || self.etag.is_some() => Ok(vec![
                self.etag.clone().unwrap_or_default(),
                self.modified.clone().unwrap_or_default(),
                length.to_string(),
            ]),
            _ => Err("the server tells neither a strong ETag nor when it was changed"),
        }
    }

    /// When it was changed, in seconds since 1970.
    pub fn modified(&self) -> Option<u32> {
        let seconds = self.modified.as_deref().and_then(seconds)?;
        seconds.try_into().ok()
    }

    /// Whether it tells more than the length.
    pub fn tells_version(&self) -> bool {
        self.tag.is_some() || self.modified.is_some()
    }

    /// [`Identity::check`]; then what this identity lacks is taken from the other one. If it told nothing,
    /// what was read before may be of any version.
    pub fn check_and_adopt(
        &mut self,
        other: &Identity,
        has_met_condition: bool,
    ) -> Result<(), Trouble> {
        self.check(other, has_met_condition)?;
        if !self.tells_version() && other.tells_version() {
            return Err(Trouble::Changed(
                "The object may have changed since it was opened: the server tells its version only \
                 now (an ETag or a date), not with what was read before; try again, or download it"
                    .into(),
            ));
        }
        // With an ETag no date is needed: servers of the same object may have several.
        if self.etag.is_none() {
            self.etag.clone_from(&other.etag);
        }
        if self.tag.is_none() {
            self.tag.clone_from(&other.tag);
        }
        Ok(())
    }

    /// Whether an answer is of the same object. It must have what this one has, but for the length,
    /// for a weak ETag if there is a date, and for the date if the ETag is the same, or if it is a range that was asked for with the
    /// condition (`has_met_condition`): such an answer need not have it.
    pub fn check(&self, other: &Identity, has_met_condition: bool) -> Result<(), Trouble> {
        fn differs(own: &Option<String>, other: &Option<String>, may_lack: bool) -> bool {
            match (own, other) {
                (Some(own), Some(other)) => own != other,
                (Some(_), None) => !may_lack,
                (None, _) => false,
            }
        }
        let may_lack_date = has_met_condition || self.etag.is_some();
        // The strong one or the date must be there then.
        let may_lack_tag = self.etag.is_some() || self.modified.is_some();
        let what = if self.length.is_some() && other.length.is_some() && self.length != other.length
        {
            "its length is another one"
        } else if differs(&self.etag, &other.etag, false)
            || differs(&self.tag, &other.tag, may_lack_tag)
        {
            "its ETag is another one"
        } else if differs(&self.modified, &other.modified, may_lack_date) {
            "it was modified"
        } else {
            return Ok(());
        };
        let what = format!("The object has changed since it was opened ({what})");
        Err(Trouble::Changed(what))
    }
}

/// The seconds since 1970 of a date as servers write it: `Sun, 06 Nov 1994 08:49:37 GMT`.
fn seconds(date: &str) -> Option<i64> {
    const MONTHS: &str = "JanFebMarAprMayJunJulAugSepOctNovDec";
    let date = date.split_once(", ")?.1.strip_suffix(" GMT")?;
    let mut words = date.split([' ', ':']);
    let day: i64 = words.next()?.parse().ok()?;
    let month = words.next().filter(|month| month.len() == 3)?;
    let month = MONTHS.find(month).filter(|at| at % 3 == 0)? as i64 / 3;
    let mut number = || words.next()?.parse::<u16>().ok().map(i64::from);
    let (year, hour, minute, second) = (number()?, number()?, number()?, number()?);
    // Years begin in March here, so the day that some years have more is the last one.
    let (year, month) = (year - i64::from(month < 2), (month + 10) % 12);
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day;
    // Those from the first of March of the year 0 to the end of 1969.
    Some((days - 719_469) * 86_400 + hour * 3600 + minute * 60 + second)
}

/// A header as text.
pub(super) fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

/// The range of the bytes in an answer, and the length of the object.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ContentRange {
    /// First and last byte; None: there are none.
    pub range: Option<(u64, u64)>,
    pub length: Option<u64>,
}

impl ContentRange {
    pub fn of(headers: &HeaderMap) -> Option<ContentRange> {
        Self::parse(text(headers, CONTENT_RANGE)?)
    }

    /// `bytes 0-9/100`, `bytes 0-9/*`, `bytes */100`
    fn parse(value: &str) -> Option<ContentRange> {
        let value = value.strip_prefix("bytes")?.trim_start();
        let (range, length) = value.split_once('/')?;
        let number = |text: &str| text.trim().parse::<u64>();
        let range = match range.trim() {
            "*" => None,
            range => {
                let (first, last) = range.split_once('-')?;
                Some((number(first).ok()?, number(last).ok()?))
            }
        };
        let length = match length.trim() {
            "*" => None,
            length => Some(number(length).ok()?),
        };
        let is_inside =
            |(first, last): (u64, u64)| first <= last && last < length.unwrap_or(u64::MAX);
        range
            .is_none_or(is_inside)
            .then_some(ContentRange { range, length })
    }
}

/// The length of the body.
pub(super) fn body_length(headers: &HeaderMap) -> Option<u64> {
    text(headers, CONTENT_LENGTH)?.parse().ok()
}

/// Refuses a body that is not the bytes of the object.
pub(super) fn check_encoding(headers: &HeaderMap) -> Result<(), Trouble> {
    match text(headers, CONTENT_ENCODING) {
        None | Some("identity" | "") => Ok(()),
        Some(encoding) => Err(Trouble::permanent(format!(
            "the server sends it encoded ({encoding}), which was not asked for"
        ))),
    }
}

/// The trouble that a status without the object's bytes means.
pub(super) fn trouble(response: &Response) -> Trouble {
    let status = response.status();
    let what = format!("the server answers {status}");
    let errno = match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => libc::ENOENT,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => libc::EACCES,
        _ => libc::EIO,
    };
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Trouble::Transient {
            what,
            pause: Some(Pause {
                length: retry_after(response.headers()),
            }),
        },
        StatusCode::REQUEST_TIMEOUT
        | StatusCode::TOO_EARLY
        | StatusCode::INTERNAL_SERVER_ERROR
        | StatusCode::BAD_GATEWAY
        | StatusCode::GATEWAY_TIMEOUT => Trouble::transient(what),
        _ => Trouble::Permanent { what, errno },
    }
}

/// The pause that a server asks for. One until a date is not understood: clocks differ.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = text(headers, RETRY_AFTER)?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    //! Guards against bytes of another object, or of another place of it.
    use super::*;

    #[test]
    fn ranges_are_parsed_or_refused() {
        let of = |range, length| Some(ContentRange { range, length });
        for (text, expected) in [
            ("bytes 0-9/100", of(Some((0, 9)), Some(100))),
            ("bytes 5-5/*", of(Some((5, 5)), None)),
            ("bytes */0", of(None, Some(0))),
            ("bytes 9-8/100", None),
            ("bytes 0-100/100", None),
            ("bytes 0-9", None),
            ("bytes -9/100", None),
            ("lines 0-9/100", None),
            ("bytes 0-9/x", None),
            ("bytes 0-18446744073709551616/*", None),
        ] {
            assert_eq!(ContentRange::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn dates_are_read() {
        for (date, expected) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", Some(0)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(784_111_777)),
            ("Tue, 29 Feb 2000 23:59:59 GMT", Some(951_868_799)),
            ("Wed, 01 Mar 2000 00:00:00 GMT", Some(951_868_800)),
            ("Thu, 31 Dec 2099 23:59:59 GMT", Some(4_102_444_799)),
            ("Sunday, 06-Nov-94 08:49:37 GMT", None),
            ("Sun Nov  6 08:49:37 1994", None),
            ("Sun, 06 Nov 1994 08:49 GMT", None),
            ("Sun, 06 ovD 1994 08:49:37 GMT", None),
            ("", None),
        ] {
            assert_eq!(seconds(date), expected, "{date}");
        }
    }

    #[test]
    fn only_what_is_strong_is_a_version() {
        let version = |lines: &[(HeaderName, &str)]| {
            let lines = lines.iter().cloned();
            let headers: HeaderMap = lines.map(|(k, v)| (k, v.parse().unwrap())).collect();
            Identity::of(&headers, Some(5)).version(&headers)
        };
        let (then, later) = (
            "Sun, 06 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:50:37 GMT",
        );
        let soon = "Sun, 06 Nov 1994 08:50:36 GMT";
        let etag = version(&[(ETAG, "\"a\""), (LAST_MODIFIED, then)]);
        assert_eq!(etag.unwrap(), ["\"a\"", then, "5"]);
        let etag = version(&[(ETAG, "\"a\""), (DATE, then)]);
        assert_eq!(etag.unwrap(), ["\"a\"", "", "5"]);
        let modified = version(&[(ETAG, "W/\"a\""), (LAST_MODIFIED, then), (DATE, later)]);
        assert_eq!(modified.unwrap(), ["", then, "5"]);
        for lines in [
            &[(ETAG, "W/\"a\"")][..],
            &[(LAST_MODIFIED, then)],
            &[(LAST_MODIFIED, then), (DATE, soon)],
            &[(ETAG, "\"a\""), (LAST_MODIFIED, then), (DATE, soon)],
            &[(LAST_MODIFIED, later), (DATE, then)],
            &[],
        ] {
            assert!(version(lines).is_err(), "{lines:?}");
        }
    }

    #[test]
    fn another_object_is_noticed() {
        let of = |etag: Option<&str>, modified: Option<&str>, length| {
            let mut headers = HeaderMap::new();
            for (name, value) in [(ETAG, etag), (LAST_MODIFIED, modified)] {
                if let Some(value) = value {
                    headers.insert(name, value.parse().unwrap());
                }
            }
            Identity::of(&headers, length)
        };
        let opened = of(Some("\"a\""), Some("then"), Some(5));
        for (other, same) in [
            (of(Some("\"a\""), Some("then"), Some(5)), true),
            // Answers to requests with `If-Range` need no date.
            (of(Some("\"a\""), None, None), true),
            (of(None, Some("then"), Some(5)), false),
            (of(Some("\"b\""), Some("then"), Some(5)), false),
            (of(Some("\"a\""), Some("now"), Some(5)), false),
            (of(Some("\"a\""), Some("then"), Some(6)), false),
        ] {
            assert_eq!(opened.check(&other, false).is_ok(), same, "{other:?}");
        }
        let by_date = of(None, Some("then"), Some(5));
        for (other, has_met_condition, same) in [
            (of(None, Some("then"), None), false, true),
            (of(None, None, Some(5)), true, true),
            (of(None, None, Some(5)), false, false),
            (of(None, Some("now"), None), true, false),
        ] {
            let found = by_date.check(&other, has_met_condition);
            assert_eq!(found.is_ok(), same, "{other:?}");
        }
        assert_eq!(opened.condition(), Some("\"a\""));
        assert_eq!(of(None, Some("then"), None).condition(), Some("then"));
        let weak = of(Some("W/\"a\""), None, None);
        assert_eq!(weak.condition(), None);
        assert!(weak.check(&of(Some("\"a\""), None, None), false).is_ok());
        assert!(weak.check(&of(Some("W/\"b\""), None, None), false).is_err());
        assert!(weak.check(&of(None, None, None), false).is_err());
        let dated = of(Some("W/\"a\""), Some("then"), None);
        assert!(dated.check(&of(None, Some("then"), None), false).is_ok());
    }

    #[test]
    fn what_is_told_later_counts_from_then_on() {
        let of = |lines: &[(HeaderName, &str)]| {
            let lines = lines.iter().cloned();
            let headers: HeaderMap = lines.map(|(k, v)| (k, v.parse().unwrap())).collect();
            Identity::of(&headers, Some(5))
        };
        // The date covers what was read before the ETag came.
        let mut known = of(&[(LAST_MODIFIED, "then")]);
        let both = of(&[(LAST_MODIFIED, "then"), (ETAG, "\"a\"")]);
        assert!(known.check_and_adopt(&both, false).is_ok());
        let other = of(&[(LAST_MODIFIED, "then"), (ETAG, "\"b\"")]);
        assert!(known.check_and_adopt(&other, false).is_err());
        assert_eq!(known.condition(), Some("\"a\""));
        // Nothing covers it.
        for told in [
            &[(ETAG, "\"a\"")][..],
            &[(LAST_MODIFIED, "then")],
            &[(ETAG, "W/\"a\"")],
        ] {
            let mut known = of(&[]);
            assert!(known.check_and_adopt(&of(&[]), false).is_ok());
            assert!(known.check_and_adopt(&of(told), false).is_err(), "{told:?}");
        }
    }
}
