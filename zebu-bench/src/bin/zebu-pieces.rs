//! What a disk takes for requests of 1 MiB whose memory is in pieces, without zebu and QEMU: `preadv(2)`
//! or `pwritev(2)` past the page cache, in the order of the file, one at a time. The memory is one huge page,
//! and the pieces are in it from the last to the first, so that the kernel joins none. The suite runs this
//! for the experiment `fragmented`.
//!
//! `zebu-pieces FILE BYTES PIECES [-w]`. Writing destroys what is in the file.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;
use std::time::Instant;
use zebu::storage::Buffer;

const REQUEST: usize = 1 << 20;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let wanted = match words.as_slice() {
        [file, bytes, pieces] => (file, bytes.parse(), pieces.parse(), false),
        [file, bytes, pieces, w] if w == "-w" => (file, bytes.parse(), pieces.parse(), true),
        _ => return usage(),
    };
    let (file, Ok(bytes), Ok(pieces @ 1..=256), write) = wanted else {
        return usage();
    };
    match run(file, bytes, pieces, write) {
        Ok(seconds) => {
            println!("Run completed in {seconds:.6} seconds.");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("zebu-pieces: {file}: {e}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: zebu-pieces FILE BYTES PIECES(1 to 256) [-w]");
    ExitCode::FAILURE
}

fn run(file: &str, bytes: u64, pieces: usize, write: bool) -> io::Result<f64> {
    let file = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(libc::O_DIRECT)
        .open(file)?;
    let mut memory = Buffer::new(REQUEST);
    memory.fill(0xff);
    let segments: Vec<libc::iovec> = memory
        .chunks_mut((REQUEST / pieces).next_multiple_of(4096))
        .rev()
        .map(|piece| libc::iovec {
            iov_base: piece.as_mut_ptr().cast(),
            iov_len: piece.len(),
        })
        .collect();
    let start = Instant::now();
    for at in (0..bytes / REQUEST as u64).map(|n| n * REQUEST as u64) {
        one(&file, at, &segments, write)?;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn one(file: &File, at: u64, segments: &[libc::iovec], write: bool) -> io::Result<()> {
    let (fd, at) = (file.as_raw_fd(), at as libc::off_t);
    let count = segments.len() as libc::c_int;
    // SAFETY: the segments are pieces of `memory`, which outlives the call and is used by nobody else.
    let moved = unsafe {
        match write {
            true => libc::pwritev(fd, segments.as_ptr(), count, at),
            false => libc::preadv(fd, segments.as_ptr(), count, at),
        }
    };
    match moved {
        n if n == REQUEST as isize => Ok(()),
        n if n < 0 => Err(io::Error::last_os_error()),
        n => Err(io::Error::other(format!("{n} bytes instead of 1 MiB"))),
    }
}
