//! Random scripts of qemu-io commands with valid and invalid options, numbers and sizes. None may
//! panic or take unbounded memory.

use crate::common::io_language::exercise;
use crate::common::{Rng, cases};
use zebu::storage::{EngineKind, Queue, QueueOptions};

const COMMANDS: &[&str] = &[
    "read",
    "write",
    "readv",
    "writev",
    "aio_read",
    "aio_write",
    "aio_flush",
    "flush",
    "discard",
    "alloc",
    "map",
    "truncate",
    "length",
    "info",
    "help",
    "close",
    "zone_report",
    "resume",
    "remove_break",
    "r",
    "w",
    "?",
];
const WORDS: &[&str] = &[
    "-P",
    "-q",
    "-v",
    "-C",
    "-z",
    "-u",
    "-c",
    "-f",
    "-b",
    "-i",
    "-l",
    "-p",
    "-n",
    "-",
    "--",
    "0",
    "1",
    "512",
    "4k",
    "64k",
    "1M",
    "0x200",
    "-1",
    "1e3",
    "9223372036854775807",
    "2147483648",
    "18446744073709551615",
    "99999999999999999999",
    "1.5k",
    "0xff",
    "k",
    "read",
    "\u{e9}",
    "1T",
];

#[test]
fn random_scripts_do_not_panic() {
    let queue = Queue::new(
        QueueOptions::default()
            .engine(EngineKind::Threads)
            .inflate_inline(true),
    )
    .expect("a queue");
    for seed in cases(500, "scripts of qemu-io") {
        let mut rng = Rng::new(seed);
        let mut text = String::new();
        for _ in 0..1 + rng.below(8) {
            text += rng.pick(COMMANDS);
            for _ in 0..rng.below(5) {
                text += " ";
                text += rng.pick(WORDS);
            }
            text += "\n";
        }
        // Captured, and shown if this panics.
        println!("{text}");
        exercise(&queue, &text, zebu_cli::run_io_language);
    }
}
