//! Where zebu differs from qemu-img on purpose, in what the lists of `grammar.rs` reach.

use super::Found;

/// Why a difference is intended, if it is.
pub fn why(args: &[&str], found: &Found) -> Option<&'static str> {
    let [ours, theirs] = &found.messages;
    let command = args[0];
    let both = |text: &str| ours.contains(text) && theirs.contains(text);
    let status = |ours, theirs| found.status == [ours, theirs];
    let failed_alike = status(1, 1) && ours == theirs;
    let cases = [
        (
            command == "compare" && status(2, 1) && ours == theirs,
            "compare: 1 always means that the images differ",
        ),
        (
            theirs.contains("unrecognized option") || theirs.contains("invalid option --"),
            "more options are taken, by more names",
        ),
        (
            both("is ambiguous"),
            "the possibilities are in another order",
        ),
        (
            theirs.contains("deprecated"),
            "what is deprecated is refused, or taken without a word",
        ),
        (
            failed_alike && found.lost_nothing && (command == "create" || command == "convert"),
            "what cannot be made leaves the file as it was",
        ),
        (
            failed_alike && command == "rebase" && ours.contains("format must be specified"),
            "rebase looks whether a format is given before it reads",
        ),
        (
            ours.contains("creates an infinite loop"),
            "no image becomes its own backing file",
        ),
        (
            ours.contains("The input is read from this file"),
            "an image that is read from the target is refused as such, not for its lock",
        ),
        (
            theirs.starts_with("qcow2: Image is corrupt: ") && status(1, 1),
            "what is wrong with the image is said in the message itself",
        ),
        (
            ours.contains("Backing format cannot be used without backing file") && status(1, 1),
            "options are looked at before files",
        ),
        (
            command == "amend" && status(1, 1) && ours.ends_with("Cannot amend the backing file"),
            "another backing file is refused before other options are looked at",
        ),
        (
            command == "rebase" && args.contains(&"old.q") && status(0, 0),
            "an image of version 2 keeps its zeroes",
        ),
        (
            command == "amend" && ours.ends_with("Bitmaps prevent downgrade of image"),
            "bitmaps are not dropped by a downgrade",
        ),
        (
            command == "snapshot" && theirs.ends_with("Device has active dirty bitmaps"),
            "a snapshot is applied, and makes everything dirty",
        ),
        (
            command == "resize" && theirs.ends_with("is inconsistent and cannot be used"),
            "a bitmap that is inconsistent prevents no resize",
        ),
        (
            command == "measure" && status(1, 0),
            "measure refuses what create refuses",
        ),
        (
            command == "snapshot"
                && theirs.starts_with("qcow2: Marking image as corrupt: ")
                && status(1, 1)
                && found.lost_nothing,
            "a snapshot of damaged tables is refused before anything changes",
        ),
        (
            command == "commit" && status(0, 0) && found.lost_nothing,
            "an image that has nothing is not emptied again",
        ),
    ];
    cases.iter().find(|(is, _)| *is).map(|(_, why)| *why)
}
