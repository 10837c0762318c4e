//! Wrong copied flags that an interrupted change of snapshots may leave. The simulator includes
//! this file by its path.

use zebu::jobs::CheckMessage;

/// Counts the copied flags that are wrong without danger (docs/reliability.md): one that is missing
/// where the refcount is 1, so that a write copies needlessly; and one that is set where there is
/// one reference and the refcount is too high, so that the cluster is leaked.
pub fn allowed_flags(messages: &[CheckMessage], cluster_size: u64) -> u64 {
    const COPIED: u64 = 1 << 63;
    const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
    let has_one_reference = |entry: u64| {
        messages.iter().any(|message| match message {
            CheckMessage::Leaked {
                cluster,
                references,
                ..
            } => *references == 1 && *cluster == (entry & OFFSET) / cluster_size,
            _ => false,
        })
    };
    let is_allowed = |message: &&CheckMessage| match **message {
        CheckMessage::CopiedL2 {
            entry, refcount, ..
        }
        | CheckMessage::CopiedData { entry, refcount } => match entry & COPIED {
            0 => refcount == 1,
            _ => refcount > 1 && has_one_reference(entry),
        },
        _ => false,
    };
    messages.iter().filter(is_allowed).count() as u64
}
