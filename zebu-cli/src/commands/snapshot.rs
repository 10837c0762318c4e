//! `snapshot`: list, take, apply and delete internal snapshots.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::{ArgAction, CommandFactory, Parser};
use zebu::Error;
use zebu::block::Device;
use zebu::qcow2::Snapshot;
use zebu::qcow2::SnapshotName;
use zebu::storage::{CacheMode, Queue};

use super::command::{Command, ValueOf, Values};
use super::info;
use crate::arguments::{SourceOptions, one_name};
use crate::images::open;
use crate::output::{self, Shown};
use crate::program::{Context, Failure, Outcome, signals};

pub const COMMAND: Command = Command {
    name: "snapshot",
    operands: "<FILENAME>",
    summary: "List or manipulate snapshots within image",
    options: Arguments::command,
    run,
    examples: "
        # Take one
        zebu snapshot -c today disk.qcow2
        # List them
        zebu snapshot -l disk.qcow2
        # Go back
        zebu snapshot -a today disk.qcow2
        # Delete it
        zebu snapshot -d today disk.qcow2",
    values: &[(ValueOf::Option("create"), Values::Nothing)],
    ..Command::PLAIN
};

/// List or manipulate snapshots within image
#[derive(Parser)]
pub struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    /// Quiet mode, without effect
    #[arg(short, long)]
    quiet: bool,
    /// List the snapshots (default)
    #[arg(short, long, action = ArgAction::Count)]
    list: u8,
    /// Create a snapshot of this name
    #[arg(short, long, value_name = "SNAPSHOT", action = ArgAction::Append)]
    create: Vec<OsString>,
    /// Apply the snapshot of this id or name
    #[arg(short, long, value_name = "SNAPSHOT", action = ArgAction::Append)]
    apply: Vec<OsString>,
    /// Delete the snapshot of this name
    #[arg(short, long, value_name = "SNAPSHOT", action = ArgAction::Append)]
    delete: Vec<OsString>,
    /// The image
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

/// The longest name of a new snapshot in bytes, as in QEMU.
const MAX_NAME: usize = 255;

/// What is to be done.
enum Action<'a> {
    List,
    Create(&'a OsStr),
    Apply(&'a OsStr),
    Delete(&'a OsStr),
}

impl Arguments {
    fn action(&self) -> Result<Action<'_>, Failure> {
        let listed = (0..self.list).map(|_| Action::List);
        let mut all = listed
            .chain(self.create.iter().map(|name| Action::Create(name)))
            .chain(self.apply.iter().map(|name| Action::Apply(name)))
            .chain(self.delete.iter().map(|name| Action::Delete(name)));
        let action = all.next().unwrap_or(Action::List);
        match all.next() {
            None => Ok(action),
            Some(_) => Err(Failure::new("Cannot mix '-l', '-a', '-c', '-d'").with_hint()),
        }
    }
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let action = arguments.action()?;
    let name = one_name(&arguments.names)?;
    let writes = !matches!(action, Action::List);
    let options = open::options(context, name, &arguments.source, CacheMode::WriteBack)?
        .write(writes)
        // As qemu-img: the space of what is freed goes back to the file system.
        .discard(Some(true));
    let queue = open::queue()?;
    let mut device = open::device_with(context, &queue, name, &arguments.source, &options)?;
    if writes {
        context.end_on_stop(signals::WHOLE);
    }
    let (done, failed) = match action {
        Action::List => return output::report(&info::snapshot_list(context, snapshots(&device))),
        Action::Create(tag) => (
            create(&queue, &mut device, tag),
            format!("create snapshot '{}'", tag.shown()),
        ),
        Action::Apply(tag) => (
            apply(&queue, &mut device, tag),
            format!("apply snapshot '{}'", tag.shown()),
        ),
        Action::Delete(tag) => (
            delete(&queue, &mut device, tag),
            format!("delete snapshot '{}'", tag.shown()),
        ),
    };
    let closed = queue.block_on(device.close(&queue));
    done.map_err(|why| Failure::new(format!("Could not {failed}: {why}")))?;
    closed.map_err(|e| Failure::new(format!("Could not {failed}: {e}")))?;
    Ok(0)
}

/// The failure of a command that would change a snapshot, or cannot tell.
pub fn would_change(error: &Error) -> Failure {
    Failure::new(format!(
        "{error}; copy it to an image of its own if it is needed ('convert -l'), and delete it \
         ('snapshot -d'), or use --change-snapshots"
    ))
}

fn snapshots(device: &Device) -> &[Snapshot] {
    device.top().snapshots().unwrap_or_default()
}

fn has_none(device: &Device) -> bool {
    device.top().snapshots().is_none()
}

/// What is wrong, if something is, here and below.
fn create(queue: &Queue, device: &mut Device, tag: &OsStr) -> Result<(), String> {
    let tag = tag.as_bytes();
    let kept = &tag[..tag.len().min(MAX_NAME)];
    let result = queue.block_on(device.snapshot_create(queue, kept));
    result.map_err(|error| match error {
        // QEMU has no words of its own for these.
        Error::RefcountOverflow { .. } => {
            let number = std::io::Error::from_raw_os_error(error.errno());
            zebu::strerror(&number).to_string()
        }
        other => other.to_string(),
    })
}

fn apply(queue: &Queue, device: &mut Device, tag: &OsStr) -> Result<(), String> {
    if has_none(device) {
        return Err("Block driver does not support snapshots".into());
    }
    let wanted = SnapshotName::IdOrName(tag.as_bytes().to_vec());
    let result = queue.block_on(device.snapshot_apply(queue, &wanted));
    result.map_err(|error| format!("Failed to load snapshot: {error}"))
}

fn delete(queue: &Queue, device: &mut Device, tag: &OsStr) -> Result<(), String> {
    // Unlike `apply`, QEMU looks for the name only.
    if !snapshots(device)
        .iter()
        .any(|s| s.name_text() == tag.as_bytes())
    {
        return Err("snapshot not found".into());
    }
    let wanted = SnapshotName::Exact {
        id: None,
        name: Some(tag.as_bytes().to_vec()),
    };
    let result = queue.block_on(device.snapshot_delete(queue, &wanted));
    result.map_err(|error| error.to_string())
}
