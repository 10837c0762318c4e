//! Other NBD servers: qemu-nbd, qemu-storage-daemon, nbdkit, and one whose replies a test makes.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::server::wait_until;
use super::{Lab, TIME_LIMIT, peer};

/// `x.raw`, 24 MiB with data and holes, the same as `x.qcow2`, and an empty
/// `e.raw` of the same size.
pub fn images() -> Lab {
    let lab = Lab::new();
    lab.make("img create -q -f raw x.raw 24M; img create -q -f raw e.raw 24M");
    let writes = "write -P 1 0 64k\nwrite -P 2 1M 5000k\nwrite -P 3 9M 4k\n\
                  write -P 4 12345k 3333\nwrite -P 5 20M 4M\n";
    lab.qemu_io_script(&["-f", "raw", "x.raw"], writes)
        .ok("x.raw");
    lab.make("img convert -f raw -O qcow2 x.raw x.qcow2");
    lab
}

/// A server, killed when dropped.
pub struct Other {
    program: PathBuf,
    args: Vec<String>,
    child: Child,
    pub socket: PathBuf,
    folder: PathBuf,
}

impl Other {
    /// qemu-nbd at `NAME.sock` in the lab, until it is ended.
    pub fn qemu_nbd(lab: &Lab, name: &str, args: &[&str]) -> Other {
        let socket = lab.path(&format!("{name}.sock"));
        let mut all = vec!["-t", "-k", socket.to_str().unwrap()];
        all.extend(args);
        Other::start(lab, &peer().nbd(), &socket, &all)
    }

    /// qemu-storage-daemon at `NAME.sock` in the lab, which opens a qcow2 image for writing and
    /// exports it with these of its bitmaps.
    pub fn storage_daemon(lab: &Lab, name: &str, image: &str, bitmaps: &[&str]) -> Other {
        let socket = lab.path(&format!("{name}.sock"));
        let file = format!("driver=file,node-name=file,filename={image},discard=unmap");
        let server = format!("addr.type=unix,addr.path={}", socket.display());
        let mut export = "type=nbd,id=export,node-name=disk,name=,writable=on".to_string();
        for (nth, bitmap) in bitmaps.iter().enumerate() {
            export += &format!(",bitmaps.{nth}={bitmap}");
        }
        let args = [
            "--blockdev",
            &file,
            "--blockdev",
            "driver=qcow2,node-name=disk,file=file,discard=unmap",
            "--nbd-server",
            &server,
            "--export",
            &export,
        ];
        Other::start(lab, &peer().storage_daemon(), &socket, &args)
    }

    /// nbdkit at `NAME.sock` in the lab.
    pub fn nbdkit(lab: &Lab, name: &str, args: &[&str]) -> Other {
        let socket = lab.path(&format!("{name}.sock"));
        let mut all = vec!["-f", "-U", socket.to_str().unwrap()];
        all.extend(args);
        Other::start(lab, Path::new("nbdkit"), &socket, &all)
    }

    fn start(lab: &Lab, program: &Path, socket: &Path, args: &[&str]) -> Other {
        let args: Vec<String> = args.iter().map(|arg| arg.to_string()).collect();
        let folder = lab.path("");
        // A socket of an earlier server.
        let _ = fs::remove_file(socket);
        let mut other = Other {
            child: spawn(program, &args, &folder, socket),
            program: program.into(),
            args,
            socket: socket.into(),
            folder,
        };
        other.wait_until_it_listens();
        other
    }

    fn wait_until_it_listens(&mut self) {
        let (child, socket) = (&mut self.child, &self.socket);
        wait_until("the server listens", || {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", log(socket));
            UnixStream::connect(socket).is_ok()
        });
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let _ = fs::remove_file(&self.socket);
    }

    /// Ends it, so that it closes its images.
    pub fn stop(&mut self) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(status.expect("kill").success());
        let ended = self.child.wait().unwrap();
        assert!(ended.success(), "{ended:?}: {}", log(&self.socket));
        let _ = fs::remove_file(&self.socket);
    }

    /// Starts it again.
    pub fn restart(&mut self) {
        self.child = spawn(&self.program, &self.args, &self.folder, &self.socket);
        self.wait_until_it_listens();
    }

    /// A URI for an export.
    pub fn uri(&self, export: &str) -> String {
        uri(&self.socket, export)
    }
}

/// A URI for an export at a socket.
pub fn uri(socket: &Path, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", socket.display())
}

fn log(socket: &Path) -> String {
    fs::read_to_string(socket.with_extension("log")).unwrap_or_default()
}

fn spawn(program: &Path, args: &[String], folder: &Path, socket: &Path) -> Child {
    let log = fs::File::create(socket.with_extension("log")).unwrap();
    Command::new(program)
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap_or_else(|e| panic!("cannot run {}: {e}", program.display()))
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("{}: {}", self.program.display(), log(&self.socket));
        }
    }
}

/// A server that calls a function for each connection, on a thread of its own, with the number of
/// earlier connections.
pub struct Hostile {
    pub socket: PathBuf,
    pub connections: Arc<AtomicUsize>,
}

impl Hostile {
    pub fn new(
        lab: &Lab,
        name: &str,
        serve: impl Fn(UnixStream, usize) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Hostile {
        let socket = lab.path(&format!("{name}.sock"));
        let listener = UnixListener::bind(&socket).unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let (counted, serve) = (connections.clone(), Arc::new(serve));
        // It ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let serve = serve.clone();
                let number = counted.fetch_add(1, Ordering::SeqCst);
                stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
                stream.set_write_timeout(Some(TIME_LIMIT)).unwrap();
                // An error, such as a disconnect, ends only this connection.
                thread::spawn(move || serve(stream, number));
            }
        });
        Hostile {
            socket,
            connections,
        }
    }

    pub fn uri(&self) -> String {
        uri(&self.socket, "")
    }
}

/// Receives N bytes.
pub fn take<const N: usize>(stream: &mut UnixStream) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Sends the greeting, and receives the client flags.
pub fn greet(stream: &mut UnixStream) -> std::io::Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    take::<4>(stream).map(drop)
}

/// Receives an option: its number and payload.
pub fn option(stream: &mut UnixStream) -> std::io::Result<(u32, Vec<u8>)> {
    let header = take::<16>(stream)?;
    let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    let mut payload = vec![0; number(12) as usize];
    stream.read_exact(&mut payload)?;
    Ok((number(8), payload))
}

/// Replies to an option.
pub fn answer(
    stream: &mut UnixStream,
    option: u32,
    kind: u32,
    payload: &[u8],
) -> std::io::Result<()> {
    let mut bytes = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    stream.write_all(&bytes)
}

/// A complete handshake with structured replies and `base:allocation` as context 7, for an export of
/// `size` bytes with these flags.
pub fn handshake(stream: &mut UnixStream, size: u64, flags: u16) -> std::io::Result<()> {
    greet(stream)?;
    loop {
        let (number, _) = option(stream)?;
        match number {
            8 => answer(stream, 8, 1, &[])?,
            10 => {
                answer(stream, 10, 4, b"\0\0\0\x07base:allocation")?;
                answer(stream, 10, 1, &[])?;
            }
            7 => {
                let mut info = vec![0, 0];
                info.extend(size.to_be_bytes());
                info.extend(flags.to_be_bytes());
                answer(stream, 7, 3, &info)?;
                return answer(stream, 7, 1, &[]);
            }
            other => answer(stream, other, (1 << 31) + 1, &[])?,
        }
    }
}

/// Receives the header of a request: command, cookie, offset, length.
pub fn request(stream: &mut UnixStream) -> std::io::Result<(u16, [u8; 8], u64, u32)> {
    let bytes = take::<28>(stream)?;
    Ok((
        u16::from_be_bytes([bytes[6], bytes[7]]),
        bytes[8..16].try_into().unwrap(),
        u64::from_be_bytes(bytes[16..24].try_into().unwrap()),
        u32::from_be_bytes(bytes[24..28].try_into().unwrap()),
    ))
}

/// The header of a chunk.
pub fn chunk(done: bool, kind: u16, cookie: [u8; 8], length: u32) -> Vec<u8> {
    let mut bytes = 0x668e_33efu32.to_be_bytes().to_vec();
    bytes.extend(u16::from(done).to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie);
    bytes.extend(length.to_be_bytes());
    bytes
}
