//! The options of `nbd`.

use std::ffi::OsString;

use clap::Parser;

use crate::commands::serve::ImageArguments;
use crate::failure::Failure;

/// Serves images over NBD.
#[derive(Debug, Parser)]
#[command(about = "Serves images over NBD, as qemu-nbd does")]
pub struct Arguments {
    /// TCP port to listen at, 10809 by default
    #[arg(short = 'p', long, value_name = "PORT")]
    pub port: Option<String>,
    /// Address to listen at, 0.0.0.0 by default
    #[arg(short = 'b', long, value_name = "ADDRESS")]
    pub bind: Option<String>,
    /// Path of a unix socket to listen at
    #[arg(short = 'k', long, value_name = "PATH")]
    pub socket: Option<OsString>,
    /// Clients at a time; 0: up to 1024
    #[arg(short = 'e', long, value_name = "NUM")]
    pub shared: Option<String>,
    /// Go on when the last client has gone
    #[arg(short = 't', long)]
    pub persistent: bool,
    /// Say who connects and why connections end
    #[arg(short = 'v', long)]
    pub verbose: bool,
    /// Name of the export, empty by default
    #[arg(short = 'x', long, value_name = "NAME")]
    pub export_name: Option<String>,
    /// Description of the export
    #[arg(short = 'D', long, value_name = "TEXT")]
    pub description: Option<String>,
    /// Seconds that a client may take to choose an export, 10 by default; 0:
    /// as long as it likes
    #[arg(long, value_name = "N")]
    pub handshake_limit: Option<String>,
    /// Serve the disk from this offset on
    #[arg(short = 'o', long, value_name = "OFFSET")]
    pub offset: Option<String>,
    /// Offer the metadata context qemu:allocation-depth
    #[arg(short = 'A', long)]
    pub allocation_depth: bool,
    /// Offer a persistent bitmap: refused
    #[arg(short = 'B', long, value_name = "NAME")]
    pub bitmap: Vec<String>,
    /// List the exports of a server
    #[arg(short = 'L', long)]
    pub list: bool,
    /// Certificates or pre-shared keys:
    /// tls-creds-x509,id=ID,endpoint=server,dir=PATH or tls-creds-psk,...
    #[arg(long, value_name = "OBJDEF")]
    pub object: Vec<OsString>,
    /// Serve TLS alone, with the certificates or keys of this --object
    #[arg(long, value_name = "ID")]
    pub tls_creds: Option<String>,
    /// Serve TLS alone, with the certificates in this directory (not in
    /// qemu-nbd)
    #[arg(long, value_name = "DIR")]
    pub tls_certificates: Option<OsString>,
    /// Serve TLS alone, with the pre-shared keys in this file (not in
    /// qemu-nbd)
    #[arg(long, value_name = "FILE")]
    pub tls_psk: Option<OsString>,
    /// Refused: clients are known by their certificates or keys
    #[arg(long, value_name = "ID")]
    pub tls_authz: Option<String>,
    /// Refused: for lists over TLS
    #[arg(long, value_name = "HOSTNAME")]
    pub tls_hostname: Option<String>,
    /// Refused: QEMU's trace points are not here
    #[arg(short = 'T', long, value_name = "EVENTS")]
    pub trace: Option<String>,
    /// Return when the server is ready, and leave it running
    #[arg(long)]
    pub fork: bool,
    /// File to write the process's number to
    #[arg(long, value_name = "PATH")]
    pub pid_file: Option<OsString>,
    /// Refused
    #[arg(long, value_name = "LABEL")]
    pub selinux_label: Option<String>,
    /// Refused: needs the kernel's driver
    #[arg(short = 'c', long, value_name = "DEV")]
    pub connect: Option<String>,
    /// Refused: needs the kernel's driver
    #[arg(short = 'd', long)]
    pub disconnect: bool,
    #[command(flatten)]
    pub image: ImageArguments,
    /// One more export, opened with the same options (not in qemu-nbd)
    #[arg(long, value_name = "NAME=IMAGE")]
    pub export: Vec<OsString>,
    /// Say at the end, and on SIGUSR1, what was done (not in qemu-nbd)
    #[arg(long)]
    pub stats: bool,
    /// The image
    #[arg(value_name = "FILE")]
    pub files: Vec<OsString>,
}

impl Arguments {
    /// Says so of what is not there.
    pub fn refuse(&self) -> Result<(), Failure> {
        let driver = "needs the kernel's nbd driver; use nbd-client(8) with this server's socket";
        let refused = [
            (self.connect.is_some(), "--connect", driver),
            (self.disconnect, "--disconnect", driver),
            (
                !self.bitmap.is_empty(),
                "--bitmap",
                "bitmaps are not part of this version",
            ),
            (
                self.tls_authz.is_some(),
                "--tls-authz",
                "who has a certificate of the authority, or a key, is served",
            ),
            (
                self.tls_hostname.is_some(),
                "--tls-hostname",
                "lists over TLS are not part of this version",
            ),
            (
                self.trace.is_some(),
                "--trace",
                "trace points are not part of this version; -v says who connects",
            ),
            (
                self.selinux_label.is_some(),
                "--selinux-label",
                "socket labels are not part of this version",
            ),
        ];
        match refused.iter().find(|refused| refused.0) {
            Some((_, option, why)) => Err(Failure::new(format!("{option}: {why}"))),
            None => Ok(()),
        }
    }

    /// The port, if one is given.
    pub fn port(&self) -> Result<Option<u16>, Failure> {
        let number = |text: &String| match text.parse() {
            Ok(port) if port > 0 => Ok(port),
            _ => Err(Failure::new(format!("Invalid port '{text}'"))),
        };
        self.port.as_ref().map(number).transpose()
    }

    /// Clients at a time; 0: no limit was wanted.
    pub fn clients(&self) -> Result<usize, Failure> {
        let Some(text) = &self.shared else {
            return Ok(1);
        };
        text.parse()
            .map_err(|_| Failure::new(format!("Invalid shared device number '{text}'")))
    }

    /// Seconds; 0: no limit.
    pub fn handshake_limit(&self) -> Result<u64, Failure> {
        let Some(text) = &self.handshake_limit else {
            return Ok(10);
        };
        text.parse()
            .map_err(|_| Failure::new(format!("Invalid handshake limit '{text}'")))
    }
}
