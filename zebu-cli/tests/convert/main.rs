//! Images of any format that are made and converted, and what stops that: signals, full disks, other programs,
//! names that mean the same file.

mod convert;
mod corpus;
mod dd;
mod empty_disk;
mod full_disk;
mod guessed_format;
mod killed;
mod lock;
mod old_content;
mod reflink;
mod short_memory;
mod source_changes;
mod stopped;
mod written_names;

use zebu_testkit::program as common;
