//! The options of `vhost-user-blk`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::Parser;
use zebu::names::{parse_switch, split_list};
use zebu_vhost::MAX_QUEUES;

use crate::arguments::size;
use crate::commands::serve::{ImageArguments, MetricsArguments};
use crate::output::Shown;
use crate::program::Failure;

/// Serves images to virtual machines.
#[derive(Debug, Parser)]
#[command(about = "Serves images to virtual machines over vhost-user, as qemu-storage-daemon does")]
pub struct Arguments {
    /// Path of the unix socket to listen on
    #[arg(long, value_name = "PATH", visible_alias = "socket")]
    pub socket_path: Option<OsString>,
    /// Number of virtqueues, each with a thread (default 1)
    #[arg(long, value_name = "N")]
    pub num_queues: Option<String>,
    /// Logical block size in bytes, 512 (default) to 32768
    #[arg(long, value_name = "BYTES")]
    pub logical_block_size: Option<String>,
    /// Name of the export and serial number of the disk (default zebu)
    #[arg(short = 'x', long, value_name = "NAME")]
    pub export_name: Option<String>,
    /// Print connections and the reason of their end
    #[arg(short = 'v', long)]
    pub verbose: bool,
    /// Run in the background, and return when the server is ready
    #[arg(long)]
    pub fork: bool,
    /// File to write the process id to
    #[arg(long, value_name = "PATH")]
    pub pid_file: Option<OsString>,
    /// What an image is named with: secret,... or throttle-group,...
    #[arg(long, value_name = "OBJDEF")]
    pub object: Vec<OsString>,
    #[command(flatten)]
    pub image: ImageArguments,
    /// Additional export, opened with the same options
    #[arg(
        long,
        value_name = "NAME=IMAGE,socket=PATH[,writable=on|off][,num-queues=N][,logical-block-size=N]"
    )]
    pub export: Vec<OsString>,
    /// Print statistics at the end and on SIGUSR1
    #[arg(long)]
    pub stats: bool,
    #[command(flatten)]
    pub metrics: MetricsArguments,
    /// Print the capabilities of the program as JSON, and exit
    #[arg(long)]
    pub print_capabilities: bool,
    /// The image
    #[arg(long, value_name = "FILE")]
    pub blk_file: Option<OsString>,
    /// The image
    #[arg(value_name = "FILE")]
    pub files: Vec<OsString>,
}

/// One image, and how it is served.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub name: String,
    pub image: OsString,
    pub socket: OsString,
    pub writable: bool,
    pub queues: u16,
    pub block_size: u32,
}

impl Arguments {
    /// All exports of the command line.
    pub fn wanted(&self) -> Result<Vec<Wanted>, Failure> {
        let files: Vec<&OsString> = self.blk_file.iter().chain(&self.files).collect();
        let mut all = Vec::new();
        match files.as_slice() {
            [] if !self.export.is_empty() => {}
            [file] => all.push(self.main(file)?),
            _ => return Err(Failure::new("Invalid number of arguments").with_hint()),
        }
        for text in &self.export {
            all.push(self.further(text)?);
        }
        Ok(all)
    }

    fn main(&self, image: &OsStr) -> Result<Wanted, Failure> {
        let socket = self.socket_path.clone();
        Ok(Wanted {
            name: self.export_name.clone().unwrap_or_else(|| "zebu".into()),
            image: image.into(),
            socket: socket.ok_or_else(|| Failure::new("--socket-path is missing").with_hint())?,
            writable: true,
            queues: self.queues()?,
            block_size: self.block_size()?,
        })
    }

    fn queues(&self) -> Result<u16, Failure> {
        self.num_queues.as_deref().map_or(Ok(1), queues)
    }

    fn block_size(&self) -> Result<u32, Failure> {
        self.logical_block_size
            .as_deref()
            .map_or(Ok(512), block_size)
    }

    /// An `--export`: as `-device` and the like, a comma in a value is doubled.
    fn further(&self, text: &OsStr) -> Result<Wanted, Failure> {
        let fail = |why: &str| Failure::new(format!("--export {}: {why}", text.shown()));
        let mut parts = split_list(text).into_iter();
        let first = parts.next().unwrap_or_default();
        let mut first = first.as_bytes().splitn(2, |b| *b == b'=');
        let (Some(Ok(name)), Some(image)) = (first.next().map(str::from_utf8), first.next()) else {
            return Err(fail("NAME=IMAGE is expected first"));
        };
        let mut wanted = Wanted {
            name: name.into(),
            image: OsStr::from_bytes(image).into(),
            socket: OsString::new(),
            writable: true,
            queues: self.queues()?,
            block_size: self.block_size()?,
        };
        for part in parts {
            if let Some(path) = part.as_bytes().strip_prefix(b"socket=") {
                wanted.socket = OsStr::from_bytes(path).into();
                continue;
            }
            let part = part.to_string_lossy();
            let (key, value) = part.split_once('=').unwrap_or((&part, "on"));
            match key {
                "writable" => {
                    wanted.writable = parse_switch(value)
                        .ok_or_else(|| fail("writable expects 'on' or 'off'"))?;
                }
                "num-queues" => wanted.queues = queues(value)?,
                "logical-block-size" => wanted.block_size = block_size(value)?,
                _ => return Err(fail(&format!("there is no option '{key}'"))),
            }
        }
        match wanted.socket.is_empty() {
            true => Err(fail("socket=PATH is missing")),
            false => Ok(wanted),
        }
    }
}

fn queues(text: &str) -> Result<u16, Failure> {
    match size::number(text) {
        Ok(number) if (1..=MAX_QUEUES).contains(&number) => Ok(number),
        _ => Err(Failure::new(format!(
            "Invalid number of queues '{text}': 1 to {MAX_QUEUES} are possible"
        ))),
    }
}

fn block_size(text: &str) -> Result<u32, Failure> {
    match size::parse(text) {
        Ok(size @ 512..=32768) if size.is_power_of_two() => Ok(size as u32),
        _ => Err(Failure::new(format!(
            "Invalid logical block size '{text}': powers of two from 512 to 32768 are possible"
        ))),
    }
}
