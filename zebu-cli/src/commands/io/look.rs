//! The commands that report metadata.

use zebu::block::Device;
use zebu::storage::Queue;

use super::command::{Failure, Handler, Outcome};
use super::number::human_size;
use super::session::{Command, Session};
use super::words::size;
use crate::commands::info::specific_text;
use crate::program::Context;

/// alloc, map, length, info.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "alloc",
        alias: "a",
        args: Some("offset [count]"),
        summary: "checks if offset is allocated in the file",
        help: "",
        min: 1,
        max: Some(2),
        needs_file: true,
        run: Handler::Words(alloc),
    },
    Command {
        name: "map",
        alias: "",
        args: Some(""),
        summary: "prints the allocated areas of a file",
        help: "",
        min: 0,
        max: Some(0),
        needs_file: true,
        run: Handler::Words(map),
    },
    Command {
        name: "length",
        alias: "l",
        args: None,
        summary: "gets the length of the current file",
        help: "",
        min: 0,
        max: Some(0),
        needs_file: true,
        run: Handler::Words(length),
    },
    Command {
        name: "info",
        alias: "i",
        args: None,
        summary: "prints information about the current file",
        help: "",
        min: 0,
        max: Some(0),
        needs_file: true,
        run: Handler::Words(info),
    },
];

/// A range that is allocated in the top image, or is not, all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    offset: u64,
    length: u64,
    allocated: bool,
}

/// Calls `f` with the ranges of `offset..end`, as long as they can be.
async fn runs(
    device: &Device,
    queue: &Queue,
    offset: u64,
    end: u64,
    mut f: impl FnMut(Run),
) -> zebu::Result<()> {
    let mut current: Option<Run> = None;
    let mut at = offset;
    while at < end {
        let status = device.status(queue, at, end - at).await?;
        let allocated = status.present && status.depth == 0;
        let length = status.length.clamp(1, end - at);
        match &mut current {
            Some(run) if run.allocated == allocated => run.length += length,
            _ => {
                let next = Run {
                    offset: at,
                    length,
                    allocated,
                };
                if let Some(run) = current.replace(next) {
                    f(run);
                }
            }
        }
        at += length;
    }
    if let Some(run) = current {
        f(run);
    }
    Ok(())
}

fn alloc(session: &mut Session, args: &[&str]) -> Outcome {
    let offset = size(args[0])?;
    let wanted = args.get(1).map_or(Ok(512), |text| size(text))?;
    let out = session.out.clone();
    let image = session.image()?;
    let end = offset.saturating_add(wanted).min(image.device.size());
    let count = end.saturating_sub(offset);
    let mut sum = 0;
    let counting = runs(&image.device, &image.queue, offset, end, |run| {
        if run.allocated {
            sum += run.length;
        }
    });
    image
        .queue
        .block_on(counting)
        .map_err(|e| Failure::Out(format!("is_allocated failed: {e}")))?;
    let at = human_size(offset as f64);
    out.print(format_args!(
        "{sum}/{count} bytes allocated at offset {at}\n"
    ));
    Ok(())
}

fn map(session: &mut Session, _args: &[&str]) -> Outcome {
    let out = session.out.clone();
    let image = session.image()?;
    let end = image.device.size();
    let printing = runs(&image.device, &image.queue, 0, end, |run| {
        let (length, offset) = (run.length, run.offset);
        let what = match run.allocated {
            true => "    allocated",
            false => "not allocated",
        };
        out.print(format_args!(
            "{} ({length:#x}) bytes {what} at offset {} ({offset:#x})\n",
            human_size(length as f64),
            human_size(offset as f64),
        ));
    });
    image
        .queue
        .block_on(printing)
        .map_err(|e| Failure::Out(format!("Failed to get allocation status: {e}")))
}

fn length(session: &mut Session, _args: &[&str]) -> Outcome {
    let size = session.image()?.device.size();
    let text = human_size(size as f64);
    session.out.print(format_args!("{text}\n"));
    Ok(())
}

fn info(session: &mut Session, _args: &[&str]) -> Outcome {
    let (out, context) = (session.out.clone(), session.context.clone());
    let image = session.image()?;
    let text = describe(&context, &image.queue, &image.device)
        .map_err(|e| Failure::Out(format!("Could not get image info: {e}")))?;
    out.print_bytes(&text);
    Ok(())
}

/// The output of `info`.
fn describe(context: &Context, queue: &Queue, device: &Device) -> zebu::Result<Vec<u8>> {
    let layer = device.top();
    let cluster_size = layer.cluster_size().unwrap_or(0);
    let vm_state = layer.vm_state_offset().unwrap_or(0);
    let specific = match device.is_filtered() {
        false => specific_text(context, queue, device)?,
        true => Vec::new(),
    };
    let mut text = format!(
        "format name: {}\ncluster size: {}\nvm state offset: {}\n",
        match device.is_filtered() {
            false => layer.format().name(),
            true => device.spec().format_name(),
        },
        human_size(cluster_size as f64),
        human_size(vm_state as f64),
    )
    .into_bytes();
    text.extend(specific);
    Ok(text)
}
