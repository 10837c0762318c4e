//! `bitmap`: add, remove, clear, enable, disable and merge persistent dirty bitmaps.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::{Arg, ArgAction, ArgMatches, CommandFactory, Parser};
use zebu::Error;
use zebu::block::Device;
use zebu::storage::{CacheMode, Queue};

use super::command::{Command, ValueOf, Values};
use crate::arguments::{NameOptions, SourceOptions, size};
use crate::images::open;
use crate::output::Shown;
use crate::program::{Context, Failure, Outcome, signals};

pub const COMMAND: Command = Command {
    name: "bitmap",
    operands: "<FILENAME> <BITMAP>",
    summary: "Modify persistent dirty bitmaps of an image",
    options: Arguments::command,
    run,
    examples: "
        # Record what changes from now on
        zebu bitmap --add disk.qcow2 since-monday
        # Clear it
        zebu bitmap --clear disk.qcow2 since-monday
        # Remove it
        zebu bitmap --remove disk.qcow2 since-monday",
    values: &[
        (ValueOf::Option("merge"), Values::Bitmaps),
        (ValueOf::Operand(1), Values::Bitmaps),
    ],
    ..Command::PLAIN
};

/// Modify persistent dirty bitmaps of an image
#[derive(Parser)]
pub struct Arguments {
    #[command(flatten)]
    actions: Actions,
    #[command(flatten)]
    image: NameOptions,
    /// Bytes of the disk to a bit of the bitmap that is added (default: by the cluster size)
    #[arg(short, long, value_name = "SIZE", help_heading = "Actions")]
    granularity: Option<String>,
    /// The image that has the bitmap to merge (default: FILENAME)
    #[arg(
        short = 'b',
        long,
        value_name = "SRC_FILENAME",
        help_heading = "Actions"
    )]
    source_file: Option<OsString>,
    /// Format of that image
    #[arg(short = 'F', long, value_name = "SRC_FMT", help_heading = "Actions")]
    source_format: Option<String>,
    /// The image, and the name of the bitmap
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

/// What is done to the bitmap.
#[derive(Clone, Debug)]
enum Action {
    Add,
    Remove,
    RemoveAll,
    Clear,
    Enable,
    Disable,
    Merge(OsString),
}

impl Action {
    fn name(&self) -> &'static str {
        match self {
            Action::Add => "add",
            Action::Remove => "remove",
            Action::RemoveAll => "remove-all",
            Action::Clear => "clear",
            Action::Enable => "enable",
            Action::Disable => "disable",
            Action::Merge(_) => "merge",
        }
    }
}

/// The actions without a value, and what they do.
const SWITCHES: [(Action, &str); 6] = [
    (Action::Add, "Add the bitmap, enabled"),
    (Action::Remove, "Remove the bitmap"),
    (
        Action::RemoveAll,
        "Remove all bitmaps; needs no name of one",
    ),
    (Action::Clear, "Clear the bitmap: nothing is dirty"),
    (Action::Enable, "Record changes of the disk from now on"),
    (Action::Disable, "Record no changes from now on"),
];

/// The actions, in the order of the command line.
#[derive(Clone, Debug, Default)]
struct Actions(Vec<Action>);

impl clap::Args for Actions {
    fn augment_args(command: clap::Command) -> clap::Command {
        let switch = |(action, help): &(Action, &'static str)| {
            Arg::new(action.name())
                .long(action.name())
                .action(ArgAction::Append)
                .num_args(0)
                .default_missing_value("")
                .help(*help)
                .help_heading("Actions")
        };
        let merge = Arg::new("merge")
            .long("merge")
            .value_name("SOURCE")
            .action(ArgAction::Append)
            .value_parser(clap::value_parser!(OsString))
            .help("Make dirty what is dirty in the bitmap SOURCE")
            .help_heading("Actions");
        command.args(SWITCHES.iter().map(switch)).arg(merge)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for Actions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut actions = Vec::new();
        for (action, _) in &SWITCHES {
            let at = matches.indices_of(action.name()).into_iter().flatten();
            actions.extend(at.map(|at| (at, action.clone())));
        }
        let at = matches.indices_of("merge").into_iter().flatten();
        let sources = matches.get_many::<OsString>("merge").into_iter().flatten();
        actions.extend(at.zip(sources.cloned().map(Action::Merge)));
        actions.sort_by_key(|(at, _)| *at);
        Ok(Actions(
            actions.into_iter().map(|(_, action)| action).collect(),
        ))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Arguments {
    /// Refuses invalid combinations.
    fn check(&self) -> Result<(), Failure> {
        let has = |is: fn(&Action) -> bool| self.actions.0.iter().any(is);
        let why = if self.actions.0.is_empty() {
            "Need at least one of --add, --remove, --remove-all, --clear, --enable, --disable, or \
             --merge"
        } else if self.granularity.is_some() && !has(|action| matches!(action, Action::Add)) {
            "granularity only supported with --add"
        } else if self.source_format.is_some() && self.source_file.is_none() {
            "-F only supported with -b"
        } else if self.source_file.is_some() && !has(|action| matches!(action, Action::Merge(_))) {
            "Merge bitmap source file only supported with --merge"
        } else {
            return Ok(());
        };
        Err(Failure::new(why))
    }
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let granularity = match arguments.granularity.as_deref() {
        Some(text) => size::parse_option("granularity", text)?,
        None => 0,
    };
    arguments.check()?;
    let is_of_all = |action: &Action| matches!(action, Action::RemoveAll);
    let nothing = OsString::new();
    let (name, bitmap) = match &arguments.names[..] {
        [name] if arguments.actions.0.iter().all(is_of_all) => (name, &nothing),
        [name, bitmap] if !arguments.actions.0.iter().all(is_of_all) => (name, bitmap),
        _ if arguments.actions.0.iter().all(is_of_all) => {
            return Err(Failure::new("Expecting filename"));
        }
        _ => return Err(Failure::new("Expecting filename and bitmap name")),
    };
    let options = SourceOptions::from(arguments.image.clone());
    let queue = open::queue()?;
    let how = open::options(context, name, &options, CacheMode::WriteBack)?;
    let how = how.write(true).no_backing(true);
    let mut device = open::device_with(context, &queue, name, &options, &how)?;
    let source = match &arguments.source_file {
        Some(name) => Some(open_source(
            context,
            &queue,
            name,
            arguments.source_format.clone(),
        )?),
        None => None,
    };
    context.end_on_stop(signals::WHOLE);
    let mut job = Job {
        queue: &queue,
        device: &mut device,
        source: source.as_ref(),
        name: bitmap,
        granularity: Some(granularity).filter(|bytes| *bytes != 0),
    };
    let done = arguments.actions.0.iter().try_for_each(|action| {
        job.run(action).map_err(|error| {
            let what = match action {
                Action::RemoveAll => String::new(),
                _ => format!(" on bitmap {}", bitmap.shown()),
            };
            let (action, why) = (action.name(), with_hint(&error));
            Failure::new(format!("Operation {action}{what} failed: {why}"))
        })
    });
    // What was done before an error is kept.
    let closed = queue.block_on(device.close(&queue));
    done?;
    closed.map_err(|error| Failure::new(error.to_string()))?;
    Ok(0)
}

fn open_source(
    context: &Context,
    queue: &Queue,
    name: &OsStr,
    format: Option<String>,
) -> Result<Device, Failure> {
    let options = SourceOptions::from(NameOptions {
        format,
        ..NameOptions::default()
    });
    let how = open::options(context, name, &options, CacheMode::WriteBack)?.no_backing(true);
    open::device_with(context, queue, name, &options, &how)
}

/// An error, with QEMU's hint if a bitmap is inconsistent.
fn with_hint(error: &Error) -> String {
    let text = error.to_string();
    match text.ends_with("is inconsistent and cannot be used") {
        true => text + "\nTry block-dirty-bitmap-remove to delete this bitmap from disk",
        false => text,
    }
}

/// Actions on a bitmap.
struct Job<'a> {
    queue: &'a Queue,
    device: &'a mut Device,
    /// The image with the bitmaps that are merged, if it is another one.
    source: Option<&'a Device>,
    name: &'a OsStr,
    granularity: Option<u64>,
}

impl Job<'_> {
    fn run(&mut self, action: &Action) -> zebu::Result<()> {
        let (queue, name) = (self.queue, self.name.as_bytes());
        queue.block_on(async {
            match action {
                Action::Add => {
                    let granularity = self.granularity;
                    self.device.bitmap_add(queue, name, granularity, true).await
                }
                Action::Remove => self.device.bitmap_remove(queue, name).await,
                Action::RemoveAll => {
                    let bitmaps = self.device.bitmaps(queue).await?;
                    for bitmap in &bitmaps {
                        self.device.bitmap_remove(queue, &bitmap.name).await?;
                    }
                    Ok(())
                }
                Action::Clear => self.device.bitmap_clear(queue, name).await,
                Action::Enable => self.device.bitmap_enable(queue, name, true).await,
                Action::Disable => self.device.bitmap_enable(queue, name, false).await,
                Action::Merge(from) => self.merge(from.as_bytes()).await,
            }
        })
    }

    /// Merges a bitmap, of a disk of the same size as in QEMU.
    async fn merge(&mut self, from: &[u8]) -> zebu::Result<()> {
        let (queue, name) = (self.queue, self.name.as_bytes());
        let size = self.device.bitmap(queue, name).await?.size();
        let source = self.source.unwrap_or(&*self.device);
        let bits = source.bitmap(queue, from).await?;
        if size != bits.size() {
            return Err(Error::Refused(format!(
                "Bitmaps are of different sizes (destination size is {size}, source size is {}) \
                 and can't be merged",
                bits.size()
            )));
        }
        self.device.bitmap_merge(queue, name, &bits).await
    }
}
