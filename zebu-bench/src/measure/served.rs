//! A client that is measured while a server runs for it: one command that starts the server, runs
//! the client, and ends the server.

use super::child::command;
use std::ffi::OsString;
use std::path::Path;

/// What the script says before the client's output.
pub const SERVER_CPU: &str = "server CPU seconds: ";

/// The command: `server` makes a socket at `socket`, which `client` uses. Its output is a line with
/// the CPU seconds of the server while the client ran, then the client's. It fails as the client
/// does.
pub fn served(server: &[OsString], socket: &Path, client: &[OsString]) -> Vec<OsString> {
    let socket = quoted(socket.as_os_str().to_owned());
    let script = format!(
        "rm -f {socket}; {server} & server=$!\n\
         n=0\n\
         until [ -S {socket} ]; do\n\
             n=$((n + 1)); [ $n -lt 500 ] && kill -0 $server || exit 1; sleep 0.02\n\
         done\n\
         ticks() {{ read -r line </proc/$server/stat; set -- ${{line##*)}}; echo $((${{12}} + ${{13}})); }}\n\
         before=$(ticks)\n\
         out=$({client}); status=$?\n\
         used=$(($(ticks) - before)); hertz=$(getconf CLK_TCK)\n\
         kill $server; wait $server\n\
         echo \"{SERVER_CPU}$((used / hertz)).$(printf %03d $((used % hertz * 1000 / hertz)))\"\n\
         printf %s\\\\n \"$out\"; exit $status\n",
        server = line(server),
        client = line(client),
    );
    command(["sh", "-c", &script])
}

/// The CPU seconds that the script has said.
pub fn server_cpu(stdout: &str) -> Option<f64> {
    stdout
        .strip_prefix(SERVER_CPU)?
        .lines()
        .next()?
        .parse()
        .ok()
}

fn line(words: &[OsString]) -> String {
    let all: Vec<String> = words.iter().cloned().map(quoted).collect();
    all.join(" ")
}

fn quoted(word: OsString) -> String {
    format!("'{}'", word.to_string_lossy().replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::super::child;
    use super::*;

    #[test]
    fn the_client_runs_while_the_server_does() {
        let dir = std::env::temp_dir().join(format!("zebu-bench-served-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let socket = dir.join("it's");
        let server = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.bind(sys.argv[1])\nwhile True: pass";
        let server = command([
            "python3".into(),
            "-c".into(),
            server.into(),
            socket.clone().into_os_string(),
        ]);
        let run = |client: &str| {
            child::run(
                &served(&server, &socket, &command(["sh", "-c", client])),
                &dir,
            )
        };
        if child::run(&command(["python3", "--version"]), &dir).is_ok() {
            let said = run("sleep 0.5; echo '{\"a b\"}'").unwrap().stdout;
            assert!(said.ends_with("\n{\"a b\"}\n"), "{said}");
            assert!(server_cpu(&said).is_some_and(|s| s > 0.0), "{said}");
            assert!(run("exit 3").is_err());
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
