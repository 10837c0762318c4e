//! A client that is measured while a server runs for it: one command that starts the server, runs
//! the client, and ends the server.

use super::child::command;
use std::ffi::OsString;
use std::path::Path;

/// The command: `server` makes a socket at `socket`, which `client` uses. Its output and its status
/// are the client's.
pub fn served(server: &[OsString], socket: &Path, client: &[OsString]) -> Vec<OsString> {
    let socket = quoted(socket.as_os_str().to_owned());
    let script = format!(
        "rm -f {socket}; {server} & server=$!\n\
         n=0\n\
         until [ -S {socket} ]; do\n\
             n=$((n + 1)); [ $n -lt 500 ] && kill -0 $server || exit 1; sleep 0.02\n\
         done\n\
         out=$({client}); status=$?\n\
         kill $server; wait $server\n\
         printf %s\\\\n \"$out\"; exit $status\n",
        server = line(server),
        client = line(client),
    );
    command(["sh", "-c", &script])
}

fn line(words: &[OsString]) -> String {
    let all: Vec<String> = words.iter().cloned().map(quoted).collect();
    all.join(" ")
}

fn quoted(word: OsString) -> String {
    format!("'{}'", word.to_string_lossy().replace('\'', "'\\''"))
}
