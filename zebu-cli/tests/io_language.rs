//! Guards against a line of qemu-io's language, whatever it is, that ends the
//! program or takes its memory: options, numbers and sizes of any form, put
//! together at random. `ZEBU_HOSTILE_RUNS` says how many scripts.

#[path = "common/io_language.rs"]
mod io_language;

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
fn any_line_is_carried_out_or_refused() {
    let queue = Queue::new(
        QueueOptions::default()
            .engine(EngineKind::Threads)
            .inflate_inline(true),
    )
    .expect("a queue");
    let runs = std::env::var("ZEBU_HOSTILE_RUNS").map_or(500, |n| n.parse().expect("a number"));
    let mut state = 1u64;
    let mut below = |n: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as usize % n
    };
    for _ in 0..runs {
        let mut text = String::new();
        for _ in 0..1 + below(8) {
            text += COMMANDS[below(COMMANDS.len())];
            for _ in 0..below(5) {
                text += " ";
                text += WORDS[below(WORDS.len())];
            }
            text += "\n";
        }
        // Captured, and shown if this panics.
        println!("{text}");
        io_language::exercise(&queue, &text);
    }
    println!("\ncases: {runs} scripts");
}
