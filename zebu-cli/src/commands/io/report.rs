//! What a request reports: its statistics, and a dump of its bytes.

use std::fmt::{self, Write};
use std::time::Duration;

use super::number::human_size;

/// What one request did.
#[derive(Clone, Copy, Debug)]
pub struct Statistics {
    /// `"read"`, `"wrote"`, ...
    pub verb: &'static str,
    /// Where it started, in bytes.
    pub offset: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// How long it took.
    pub time: Duration,
    /// One line of numbers (`-C`) instead of two for people.
    pub machine: bool,
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The clock may be too coarse for the request.
        let seconds = self.time.as_secs_f64().max(1e-9);
        let (rate, requests) = (self.bytes as f64 / seconds, 1.0 / seconds);
        let bytes = self.bytes;
        if self.machine {
            let time = long_time(self.time);
            return writeln!(f, "{bytes},1,{time},{rate:.3},{requests:.3}");
        }
        writeln!(
            f,
            "{} {bytes}/{bytes} bytes at offset {}",
            self.verb, self.offset
        )?;
        let time = match self.time.as_secs() {
            0 => format!("00.{:02} sec", hundredths(self.time)),
            _ => long_time(self.time),
        };
        let (size, rate) = (human_size(bytes as f64), human_size(rate));
        writeln!(
            f,
            "{size}, 1 ops; {time} ({rate}/sec and {requests:.4} ops/sec)"
        )
    }
}

fn hundredths(time: Duration) -> u32 {
    time.subsec_millis() / 10
}

/// `H:MM:SS.hh`.
fn long_time(time: Duration) -> String {
    let seconds = time.as_secs();
    format!(
        "{}:{:02}:{:02}.{:02}",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        hundredths(time)
    )
}

/// The message about a pattern that was not found.
pub fn pattern_failure(offset: u64, length: usize) -> String {
    format!("Pattern verification failed at offset {offset}, {length} bytes")
}

/// Whether all bytes are `pattern`.
pub fn is_filled_with(bytes: &[u8], pattern: u8) -> bool {
    bytes.iter().fold(0, |acc, b| acc | (b ^ pattern)) == 0
}

/// Bytes in hexadecimal and as text, 16 a line; letters and digits are shown,
/// everything else is a dot.
pub struct Dump<'a> {
    /// Where the bytes start on the disk.
    pub offset: u64,
    /// The bytes.
    pub bytes: &'a [u8],
}

impl fmt::Display for Dump<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, line) in self.bytes.chunks(16).enumerate() {
            write!(f, "{:08x}:  ", self.offset + 16 * i as u64)?;
            for byte in line {
                write!(f, "{byte:02x} ")?;
            }
            f.write_char(' ')?;
            for byte in line {
                let shown = byte.is_ascii_alphanumeric();
                f.write_char(if shown { char::from(*byte) } else { '.' })?;
            }
            f.write_char('\n')?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Guards against lines in another form than those of qemu-io 10.
    use super::*;

    fn statistics(bytes: u64, millis: u64, machine: bool) -> String {
        let time = Duration::from_millis(millis);
        let verb = "read";
        let offset = 512;
        Statistics {
            verb,
            offset,
            bytes,
            time,
            machine,
        }
        .to_string()
    }

    #[test]
    fn statistics_for_people() {
        assert_eq!(
            statistics(65536, 259, false),
            "read 65536/65536 bytes at offset 512\n\
             64 KiB, 1 ops; 00.25 sec (247.104 KiB/sec and 3.8610 ops/sec)\n"
        );
        assert_eq!(
            statistics(1000, 61060, false),
            "read 1000/1000 bytes at offset 512\n\
             1000 bytes, 1 ops; 0:01:01.06 (16.377334 bytes/sec and 0.0164 ops/sec)\n"
        );
    }

    #[test]
    fn statistics_for_machines() {
        assert_eq!(
            statistics(1000, 1500, true),
            "1000,1,0:00:01.50,666.667,0.667\n"
        );
        assert_eq!(
            statistics(0, 3_605_000, true),
            "0,1,1:00:05.00,0.000,0.000\n"
        );
    }

    #[test]
    fn dump() {
        let bytes: Vec<u8> = (0x5a..0x6c).collect();
        let dump = Dump {
            offset: 0xfff0,
            bytes: &bytes,
        };
        assert_eq!(
            dump.to_string(),
            "0000fff0:  5a 5b 5c 5d 5e 5f 60 61 62 63 64 65 66 67 68 69  Z......abcdefghi\n\
             00010000:  6a 6b  jk\n"
        );
        let far = Dump {
            offset: 5 << 30,
            bytes: &[0],
        };
        assert_eq!(far.to_string(), "140000000:  00  .\n");
    }

    #[test]
    fn patterns() {
        assert!(is_filled_with(&[], 7));
        assert!(is_filled_with(&[7; 100], 7));
        assert!(!is_filled_with(&[7, 7, 8], 7));
    }
}
