//! The options of `nbd`.

use std::ffi::OsString;

use clap::Parser;

use crate::arguments::size;
use crate::commands::serve::{ImageArguments, MetricsArguments, refuse_stats};
use crate::program::Failure;

/// Serves images over NBD.
#[derive(Debug, Parser)]
#[command(about = "Serves images over NBD, as qemu-nbd does")]
pub struct Arguments {
    /// TCP port to listen on (default 10809)
    #[arg(short = 'p', long, value_name = "PORT")]
    pub port: Option<String>,
    /// Address to listen on (default 0.0.0.0)
    #[arg(short = 'b', long, value_name = "ADDRESS")]
    pub bind: Option<String>,
    /// Path of a unix socket to listen on
    #[arg(short = 'k', long, value_name = "PATH")]
    pub socket: Option<OsString>,
    /// Maximum number of clients at a time; 0: 1024
    #[arg(short = 'e', long, value_name = "NUM")]
    pub shared: Option<String>,
    /// Keep running after the last client has disconnected
    #[arg(short = 't', long)]
    pub persistent: bool,
    /// Print connections and the reason of their end
    #[arg(short = 'v', long)]
    pub verbose: bool,
    /// Name of the export (default: empty)
    #[arg(short = 'x', long, value_name = "NAME")]
    pub export_name: Option<String>,
    /// Description of the export
    #[arg(short = 'D', long, value_name = "TEXT")]
    pub description: Option<String>,
    /// Time limit of the handshake in seconds (default 10); 0: none
    #[arg(long, value_name = "N")]
    pub handshake_limit: Option<String>,
    /// Offset of the export in the disk
    #[arg(short = 'o', long, value_name = "OFFSET")]
    pub offset: Option<String>,
    /// Offer the metadata context qemu:allocation-depth
    #[arg(short = 'A', long)]
    pub allocation_depth: bool,
    /// Offer a persistent bitmap as metadata context qemu:dirty-bitmap:NAME; may be repeated
    #[arg(short = 'B', long, value_name = "NAME")]
    pub bitmap: Vec<OsString>,
    /// List the exports of a server
    #[arg(short = 'L', long)]
    pub list: bool,
    /// TLS credentials: tls-creds-x509,id=ID,endpoint=server,dir=PATH or tls-creds-psk,...; or what an
    /// image is named with: secret,... or throttle-group,...
    #[arg(long, value_name = "OBJDEF")]
    pub object: Vec<OsString>,
    /// Require TLS, with the credentials of this --object
    #[arg(long, value_name = "ID")]
    pub tls_creds: Option<String>,
    /// Require TLS, with the certificates in this directory (not in qemu-nbd)
    #[arg(long, value_name = "DIR")]
    pub tls_certificates: Option<OsString>,
    /// Require TLS, with the pre-shared keys in this file (not in qemu-nbd)
    #[arg(long, value_name = "FILE")]
    pub tls_psk: Option<OsString>,
    /// Authorization object: not supported
    #[arg(long, value_name = "ID", hide = true)]
    pub tls_authz: Option<String>,
    /// Host name for -L over TLS: not supported
    #[arg(long, value_name = "HOSTNAME", hide = true)]
    pub tls_hostname: Option<String>,
    /// Trace events: accepted, there are none
    #[arg(short = 'T', long, value_name = "EVENTS")]
    pub trace: Vec<OsString>,
    /// Run in the background, and return when the server is ready
    #[arg(long)]
    pub fork: bool,
    /// File to write the process id to
    #[arg(long, value_name = "PATH")]
    pub pid_file: Option<OsString>,
    /// SELinux label of the socket that is listened at
    #[arg(long, value_name = "LABEL")]
    pub selinux_label: Option<OsString>,
    /// Kernel device: not supported
    #[arg(short = 'c', long, value_name = "DEV", hide = true)]
    pub connect: Option<String>,
    /// Kernel device: not supported
    #[arg(short = 'd', long, hide = true)]
    pub disconnect: bool,
    #[command(flatten)]
    pub image: ImageArguments,
    /// Additional export, opened with the same options (not in qemu-nbd)
    #[arg(long, value_name = "NAME=IMAGE")]
    pub export: Vec<OsString>,
    /// Print statistics at the end and on SIGUSR1 (not in qemu-nbd)
    #[arg(long)]
    pub stats: bool,
    #[command(flatten)]
    pub metrics: MetricsArguments,
    /// The image
    #[arg(value_name = "FILE")]
    pub files: Vec<OsString>,
}

impl Arguments {
    /// Refuses options that are not supported.
    pub fn refuse(&self) -> Result<(), Failure> {
        let driver = "needs the kernel's nbd driver; use nbd-client(8) with this server's socket";
        let refused = [
            (self.connect.is_some(), "--connect", driver),
            (self.disconnect, "--disconnect", driver),
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
        ];
        let refused = refused.iter().find(|refused| refused.0);
        if let Some((_, option, why)) = refused {
            return Err(Failure::new(format!("{option}: {why}")));
        }
        refuse_stats(self.fork, self.stats)
    }

    /// The TCP port; `None` if the option was not given.
    pub fn port(&self) -> Result<Option<u16>, Failure> {
        let number = |text: &String| match size::number(text) {
            Ok(port) if port > 0 => Ok(port),
            _ => Err(Failure::new(format!("Invalid port '{text}'"))),
        };
        self.port.as_ref().map(number).transpose()
    }

    /// The maximum number of clients. 0 stands for the highest.
    pub fn clients(&self) -> Result<usize, Failure> {
        let Some(text) = &self.shared else {
            return Ok(1);
        };
        size::number(text)
            .map_err(|_| Failure::new(format!("Invalid shared device number '{text}'")))
    }

    /// The time limit of the handshake. 0 stands for none.
    pub fn handshake_limit(&self) -> Result<u64, Failure> {
        let Some(text) = &self.handshake_limit else {
            return Ok(10);
        };
        size::number(text).map_err(|_| Failure::new(format!("Invalid handshake limit '{text}'")))
    }
}
