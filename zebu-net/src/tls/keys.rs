//! Files of pre-shared keys: lines `USER:KEY`, the key in hexadecimal digits,
//! the format of GnuTLS's psktool, QEMU, libnbd and nbdkit.

use std::ffi::{CStr, c_int};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::{KeyFile, MAX_USERS, MIN_KEY, TlsError};
use crate::printable;

/// Bytes of a user's name and of a key at most. psktool writes keys of up to
/// 512 bytes, and GnuTLS takes names of up to 128.
const MAX_NAME: usize = 128;
const MAX_KEY: usize = 512;
/// Bytes of a file at most.
const MAX_FILE: u64 = 4 << 20;

/// A user's key. It has no `Debug`, so that no key gets into a log.
#[derive(Clone)]
pub(super) struct Key {
    pub(super) user: Vec<u8>,
    pub(super) secret: Vec<u8>,
}

fn unusable(path: &Path, why: impl ToString) -> TlsError {
    TlsError::File {
        path: path.into(),
        why: why.to_string(),
    }
}

/// Finds the key of a client.
pub(super) fn key_of(own: &KeyFile) -> Result<Key, TlsError> {
    let user = match &own.user {
        Some(user) => user.clone(),
        None => login_name().ok_or_else(|| {
            TlsError::Unusable(
                "whose key it is was not said, and this login has no name".to_string(),
            )
        })?,
    };
    let mut all = read(&own.file)?.into_iter();
    let key = all.find(|key| key.user == user.as_bytes());
    let key = key.ok_or_else(|| {
        let user = printable(user.as_bytes());
        unusable(&own.file, format!("no key of user '{user}'"))
    })?;
    long_enough(&own.file, &key)?;
    Ok(key)
}

/// All keys of a server.
pub(super) fn load(path: &Path) -> Result<Vec<Key>, TlsError> {
    let keys = read(path)?;
    if keys.is_empty() {
        return Err(unusable(path, "no key in it"));
    }
    if keys.len() > MAX_USERS {
        let why = format!("keys of more than {MAX_USERS} users");
        return Err(unusable(path, why));
    }
    keys.iter().try_for_each(|key| long_enough(path, key))?;
    Ok(keys)
}

fn long_enough(path: &Path, key: &Key) -> Result<(), TlsError> {
    let length = key.secret.len();
    if length >= MIN_KEY {
        return Ok(());
    }
    let user = printable(&key.user);
    let why = format!("the key of user '{user}' has {length} bytes, at least {MIN_KEY} are needed");
    Err(unusable(path, why))
}

fn read(path: &Path) -> Result<Vec<Key>, TlsError> {
    let mut text = Vec::new();
    let file = File::open(path).map_err(|e| unusable(path, crate::strerror(&e)))?;
    file.take(MAX_FILE + 1)
        .read_to_end(&mut text)
        .map_err(|e| unusable(path, crate::strerror(&e)))?;
    if text.len() as u64 > MAX_FILE {
        return Err(unusable(path, format!("more than {MAX_FILE} bytes")));
    }
    parse(&text).map_err(|why| unusable(path, why))
}

/// Reads a file. Empty lines are ignored; any other line that is no key is an error, which has the
/// number of the line and not its text.
fn parse(text: &[u8]) -> Result<Vec<Key>, String> {
    let mut keys = Vec::new();
    let mut users = std::collections::HashSet::new();
    for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            continue;
        }
        let fail = |why: &str| format!("line {}: {why}", number + 1);
        let key = key(line).map_err(fail)?;
        if !users.insert(key.user.clone()) {
            return Err(fail(&format!("a second key of '{}'", printable(&key.user))));
        }
        keys.push(key);
    }
    Ok(keys)
}

fn key(line: &[u8]) -> Result<Key, &'static str> {
    let colon = line.iter().position(|byte| *byte == b':');
    let (name, key) = line.split_at(colon.ok_or("not USER:KEY")?);
    // psktool's form of a name with colons.
    let user = match name.strip_prefix(b"#") {
        Some(digits) => hexadecimal(digits).ok_or("the name after # is not hexadecimal")?,
        None => name.to_vec(),
    };
    if user.is_empty() {
        return Err("the name is empty");
    }
    if user.len() > MAX_NAME {
        return Err("the name is too long");
    }
    let digits = &key[1..];
    if digits.is_empty() {
        return Err("the key is empty");
    }
    if !digits.len().is_multiple_of(2) {
        return Err("the key has an odd number of digits");
    }
    let secret = hexadecimal(digits).ok_or("the key is not hexadecimal")?;
    if secret.len() > MAX_KEY {
        return Err("the key is too long");
    }
    if secret.iter().all(|byte| *byte == 0) {
        return Err("the key is all zeroes");
    }
    Ok(Key { user, secret })
}

fn hexadecimal(digits: &[u8]) -> Option<Vec<u8>> {
    let value = |digit: u8| char::from(digit).to_digit(16);
    let byte = |pair: &[u8]| match pair {
        [high, low] => Some((value(*high)? << 4 | value(*low)?) as u8),
        _ => None,
    };
    digits.chunks(2).map(byte).collect()
}

#[allow(unsafe_code)]
unsafe extern "C" {
    /// Of POSIX; the libc crate does not have it.
    fn getlogin_r(name: *mut libc::c_char, length: libc::size_t) -> c_int;
}

/// The user of this login, as in libnbd: of getlogin(3), else `$LOGNAME`.
#[allow(unsafe_code)]
fn login_name() -> Option<String> {
    let mut name: [libc::c_char; 257] = [0; 257];
    // SAFETY: the last byte stays zero, which ends the string.
    let found = unsafe {
        match getlogin_r(name.as_mut_ptr(), name.len() - 1) {
            0 => Some(CStr::from_ptr(name.as_ptr())),
            _ => None,
        }
    };
    let found = found.and_then(|name| name.to_str().ok()).map(String::from);
    let found = found.or_else(|| std::env::var("LOGNAME").ok());
    found.filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    //! Guards against a key that a peer reads differently in the same file, and a line that is
    //! ignored.
    use super::*;

    #[test]
    fn files_of_psktool_are_read() {
        let text = b"alice:00ff\n#613a62:0A0b\r\n\nbob b:112233";
        let keys = parse(text).unwrap_or_else(|e| panic!("{e}"));
        let read: Vec<_> = keys.iter().map(|k| (&*k.user, &*k.secret)).collect();
        let alice: (&[u8], &[u8]) = (b"alice", &[0, 0xff]);
        let colon: (&[u8], &[u8]) = (b"a:b", &[10, 11]);
        assert_eq!(read, [alice, colon, (b"bob b", &[0x11, 0x22, 0x33])]);
        assert!(parse(b"").is_ok_and(|keys| keys.is_empty()));
    }

    #[test]
    fn invalid_lines_are_errors() {
        for (text, why) in [
            ("alice", "line 1: not USER:KEY"),
            ("a:00ff\nb", "line 2: not USER:KEY"),
            (" ", "line 1: not USER:KEY"),
            (":00ff", "line 1: the name is empty"),
            ("#:00ff", "line 1: the name is empty"),
            ("#6:00ff", "line 1: the name after # is not hexadecimal"),
            ("# a: b", "line 1: the name after # is not hexadecimal"),
            ("a:", "line 1: the key is empty"),
            ("a:0", "line 1: the key has an odd number of digits"),
            ("a:0g", "line 1: the key is not hexadecimal"),
            ("a:+1", "line 1: the key is not hexadecimal"),
            ("a:0000", "line 1: the key is all zeroes"),
            ("a:00ff\na:00fe", "line 2: a second key of 'a'"),
            (
                &format!("{}:ff", "a".repeat(129)),
                "line 1: the name is too long",
            ),
            (
                &format!("a:{}", "ff".repeat(513)),
                "line 1: the key is too long",
            ),
        ] {
            assert_eq!(parse(text.as_bytes()).err().as_deref(), Some(why), "{text}");
        }
    }

    #[test]
    fn a_client_loads_its_key_and_a_server_all_keys() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.psk");
        let long = "0123456789abcdef".repeat(2);
        std::fs::write(&file, format!("a:{long}\nb:0123\n")).unwrap();
        let of = |user: &str| key_of(&KeyFile::new(&file).user(Some(user.into())));
        let why = |result: Result<Key, TlsError>| result.err().map(|e| e.to_string());
        assert_eq!(why(of("a")), None);
        assert!(why(of("b")).unwrap().contains("has 2 bytes, at least 16"));
        assert!(why(of("c")).unwrap().contains("no key of user 'c'"));
        let server = |text: &str| {
            std::fs::write(&file, text).unwrap();
            load(&file)
                .map(|keys| keys.len())
                .map_err(|e| e.to_string())
        };
        assert!(
            server(&format!("a:{long}\nb:0123\n"))
                .unwrap_err()
                .contains("user 'b'")
        );
        assert!(server("\n").unwrap_err().contains("no key in it"));
        assert_eq!(server(&format!("a:{long}\nb:{long}\n")), Ok(2));
        let many: String = (0..=MAX_USERS).map(|n| format!("u{n}:{long}\n")).collect();
        let most = format!("more than {MAX_USERS}");
        assert!(server(&many).unwrap_err().contains(&most));
    }
}
