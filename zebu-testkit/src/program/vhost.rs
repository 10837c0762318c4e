//! The vhost-user-blk server under test, and a front end with one virtqueue.

use std::path::{Path, PathBuf};

use vm_memory::{Bytes, GuestAddress};
use zebu_vhost::front_end::{Connection, Machine, Ring, Setup};

use super::guest::Guest;
use super::server::{Server, wait_until};
use super::{Lab, TIME_LIMIT};

// Types of requests.
pub const READ: u32 = 0;
pub const WRITE: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

// Statuses.
pub const OK: u8 = 0;
pub const ERROR: u8 = 1;
pub const UNSUPPORTED: u8 = 2;

/// Numbers of features.
pub const FEATURE_RO: u32 = 5;
pub const FEATURE_FLUSH: u32 = 9;
pub const FEATURE_WCE: u32 = 11;
pub const FEATURE_INDIRECT: u32 = 28;
pub const FEATURE_EVENT_INDEX: u32 = 29;

/// The socket of the server that [`serve`] starts.
pub fn socket(lab: &Lab) -> PathBuf {
    lab.path("v.sock")
}

/// Starts `zebu vhost-user-blk -v --socket-path v.sock` with these arguments, and waits until it
/// listens.
#[track_caller]
pub fn serve(lab: &Lab, args: &[&str]) -> Server {
    let mut all = vec!["vhost-user-blk", "-v", "--socket-path", "v.sock"];
    all.extend(args);
    let mut server = Server::spawn(lab, &all);
    server.socket = socket(lab);
    wait_until("the server listens", || server.log().contains("listening"));
    server
}

/// Starts a guest whose first disk is served at `v.sock`.
pub fn start(lab: &Lab, name: &str, root: Option<&str>, job: &str) -> Guest {
    let socket = format!("socket,id=c,reconnect=1,path={}", socket(lab).display());
    let args = [
        "-object",
        "memory-backend-memfd,id=memory,size=512M,share=on",
        "-numa",
        "node,memdev=memory",
        "-chardev",
        &socket,
        "-device",
        "vhost-user-blk-pci,chardev=c,num-queues=2",
    ];
    Guest::start(lab, name, root, job, &args)
}

/// A front end with one virtqueue and one request at a time.
pub struct Disk {
    pub machine: Machine,
    pub connection: Connection,
    pub ring: Ring,
}

impl Disk {
    #[track_caller]
    pub fn new(lab: &Lab, setup: Setup) -> Disk {
        Disk::at(&socket(lab), setup)
    }

    /// The disk of the server that listens at `socket`.
    #[track_caller]
    pub fn at(socket: &Path, setup: Setup) -> Disk {
        let mut machine = Machine::new(setup).unwrap();
        let mut connection = machine.connect(socket).unwrap();
        let ring = machine.ring(0).unwrap();
        connection.start(&ring).unwrap();
        Disk {
            machine,
            connection,
            ring,
        }
    }

    /// Waits for the completion of the request whose first descriptor is `head`. Returns the number of
    /// bytes written.
    #[track_caller]
    pub fn written(&mut self, head: u16) -> u32 {
        assert!(self.ring.wait(TIME_LIMIT).unwrap(), "timeout of a request");
        let (answered, written) = self.ring.answer().unwrap();
        assert_eq!(answered, head);
        written
    }

    #[track_caller]
    fn ask(&mut self, kind: u32, sector: u64, (length, to_memory): (usize, bool)) -> (u8, u32) {
        let all = (length as u64, to_memory);
        self.ring.request(0, kind, sector, all, &[]);
        self.ring.kick(1).unwrap();
        let head = self.ring.head(0);
        let written = self.written(head);
        (self.status(), written)
    }

    /// The status of the last request.
    pub fn status(&self) -> u8 {
        let at = GuestAddress(self.ring.status(0));
        self.machine.memory().read_obj(at).unwrap()
    }

    /// Makes a request with these data. Returns the status.
    #[track_caller]
    pub fn give(&mut self, kind: u32, sector: u64, bytes: &[u8]) -> u8 {
        let at = GuestAddress(self.ring.data(0));
        self.machine.memory().write_slice(bytes, at).unwrap();
        let (status, written) = self.ask(kind, sector, (bytes.len(), false));
        assert_eq!(written, 1);
        status
    }

    /// Makes a request that returns `length` bytes.
    #[track_caller]
    pub fn take(&mut self, kind: u32, sector: u64, length: usize) -> Result<Vec<u8>, u8> {
        let at = GuestAddress(self.ring.data(0));
        let mut bytes = vec![0xa5; length];
        self.machine.memory().write_slice(&bytes, at).unwrap();
        match self.ask(kind, sector, (length, true)) {
            (OK, written) => {
                assert!(written as usize <= length + 1);
                self.machine.memory().read_slice(&mut bytes, at).unwrap();
                Ok(bytes)
            }
            (status, _) => Err(status),
        }
    }
}

/// A range of a discard or a write of zeroes.
pub fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}
