//! What others see of the process: its arguments, and the file of a crash.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The place of the start and of the end of the arguments in `/proc/self/stat`, behind the name of the program.
const ARGUMENTS: usize = 45;

/// From now on no file is written if the process crashes, and no program gets its memory: a limit of 1 also ends
/// dumps to a pipe, which the kernel makes with a limit of 0 (core(5)).
pub fn keep_out_of_core_dumps() {
    let limit = getrlimit(Resource::Core);
    let limit = Rlimit {
        current: Some(limit.maximum.map_or(1, |most| most.min(1))),
        ..limit
    };
    // Lowering it is always allowed.
    let _ = setrlimit(Resource::Core, limit);
}

/// Overwrites the secrets in the arguments of the process (`--object secret,data=`), which all users see. To be
/// called first: afterwards these arguments cannot be read again. Where the system does not allow it, they stay.
pub fn hide_secrets() {
    let _ = hide();
}

fn hide() -> Option<()> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(ARGUMENTS);
    let mut next = || fields.next()?.parse::<u64>().ok();
    let (start, end) = (next()?, next()?);
    let memory = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/proc/self/mem")
        .ok()?;
    let mut bytes = vec![0; end.checked_sub(start)? as usize];
    memory.read_exact_at(&mut bytes, start).ok()?;
    for range in secrets(&bytes) {
        let hidden = vec![b'x'; range.len()];
        memory
            .write_all_at(&hidden, start + range.start as u64)
            .ok()?;
    }
    Some(())
}

/// Where secrets are in arguments that end with NUL bytes.
fn secrets(arguments: &[u8]) -> Vec<std::ops::Range<usize>> {
    let find = |bytes: &[u8], word: &[u8]| {
        let mut windows = bytes.windows(word.len());
        windows.position(|found| found == word)
    };
    let (mut found, mut start) = (Vec::new(), 0);
    for argument in arguments.split(|byte| *byte == 0) {
        // Of `secret,...,data=VALUE` and JSON. Another text with these words may as well be hidden.
        if find(argument, b"secret").is_some()
            && let Some(at) = find(argument, b"data")
            && matches!(argument.get(at + 4), Some(b'=' | b'"' | b'\''))
        {
            found.push(start + at + 5..start + argument.len());
        }
        start += argument.len() + 1;
    }
    found
}

#[cfg(test)]
mod tests {
    //! Guards against secrets that every user sees.
    use super::*;

    #[test]
    fn secrets_are_found_and_nothing_else() {
        let arguments = b"zebu\0--object\0secret,id=s,data=abc\0data=x\0secret,id=t,file=data\0";
        let found = secrets(arguments);
        assert_eq!(found.len(), 1);
        assert_eq!(&arguments[found[0].clone()], b"abc");
        let json = br#"{"qom-type":"secret","data":"abc"}"#;
        assert_eq!(&json[secrets(json)[0].clone()], br#":"abc"}"#);
    }
}
