//! Intended differences from qemu-img.

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
            "zebu has more options",
        ),
        (
            ours.contains("shows data of the backing file, which would change") && status(1, 0),
            "what internal snapshots show does not change",
        ),
        (
            ours.contains("is ambiguous"),
            "options of QEMU 11.1 make an abbreviation ambiguous",
        ),
        (
            theirs.contains("is ambiguous") && ours.contains("unrecognized option"),
            "abbreviations of aliases are not accepted",
        ),
        (
            theirs.contains("requires ") && ours.contains("specify image file name"),
            "operands are checked before combinations of options",
        ),
        (
            theirs.contains("force-share=on can only be used with read-only") && status(1, 1),
            "the file name is checked before the access mode",
        ),
        (
            command == "convert" && args.contains(&"-"),
            "`-` is standard input, or standard output",
        ),
        (
            both("is ambiguous"),
            "the possible options are in another order",
        ),
        (
            theirs.contains("deprecated"),
            "deprecated options are refused, or accepted without a warning",
        ),
        (
            failed_alike && found.lost_nothing && (command == "create" || command == "convert"),
            "a failed command leaves the existing file unchanged",
        ),
        (
            ours.ends_with("granularity only supported with --add"),
            "a granularity of 0 is one that is given",
        ),
        (
            args.contains(&"--") && ours.contains("requires an argument"),
            "no option has the value `--`",
        ),
        (
            args.contains(&"-o=") && status(1, 1),
            "the value of a short option may follow an equals sign",
        ),
        (
            status(1, 1) && command == "rebase" && ours.contains("format must be specified"),
            "rebase checks for the format before it opens files",
        ),
        (
            ours.contains("creates an infinite loop"),
            "no image becomes its own backing file",
        ),
        (
            ours.contains("The input is read from this file"),
            "a target that is also read is refused before locks are taken",
        ),
        (
            theirs.starts_with("qcow2: Image is corrupt: ") && (status(1, 1) || status(0, 0)),
            "the message itself says what is damaged",
        ),
        (
            (ours.contains("Backing format cannot be used without backing file")
                || ours.contains("not supported for file format")
                || ours.contains("Invalid cache option")
                || ours.contains("Compression not supported for this file format"))
                && status(1, 1),
            "options are checked before files",
        ),
        (
            failed_alike && found.lost_nothing && (command == "amend" || command == "rebase"),
            "the progress of a failed command does not end with 100 %",
        ),
        (
            ours.contains("is out of range for parameter 'size'") && status(1, 1),
            "sizes of 8 EiB and more are refused by the parser",
        ),
        (
            command == "amend"
                && status(1, 1)
                && (ours.contains("Refcount width must be")
                    || ours.contains("Unknown compatibility level")),
            "values are checked before the image changes",
        ),
        (
            command == "amend" && status(1, 1) && ours.ends_with("Cannot amend the backing file"),
            "a change of the backing file is refused before other options are checked",
        ),
        (
            command == "rebase" && args.contains(&"old.q") && status(0, 0),
            "zeroes of version 2 stay when a backing file is added",
        ),
        (
            status(1, 0) && both("Cannot use --target-is-zero when"),
            "convert: what is refused is an error",
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
            found.status[0] == found.status[1]
                && ours == theirs
                && found.lost_nothing
                && args.iter().any(|arg| arg.contains("bits.q")),
            "bitmaps that did not change are not stored again",
        ),
        (
            status(1, 1)
                && (ours.ends_with("does not support bitmaps")
                    || ours.ends_with("Source lacks bitmap support")),
            "convert checks for bitmaps before it opens the target",
        ),
        (
            command == "measure"
                && (status(1, 0) || theirs.contains("Invalid compatibility level")),
            "measure refuses what create refuses",
        ),
        (
            theirs.starts_with("qcow2: Marking image as corrupt: ")
                && status(1, 1)
                && found.lost_nothing,
            "damaged tables are found before anything changes",
        ),
        (
            command == "commit" && status(0, 0) && found.lost_nothing,
            "an image without data is not emptied again",
        ),
    ];
    cases.iter().find(|(is, _)| *is).map(|(_, why)| *why)
}
