//! The program: its language, options and messages. Images, formats, servers and so on have tests of their own
//! beside this one.

mod bad_input;
mod bare_root;
mod bench;
mod blkdebug;
mod completions;
mod documentation;
mod filter_options;
mod filtered_chains;
mod filters;
mod hostile_names;
mod io;
mod io_language;
mod io_write;
mod look;
mod names;
mod nested_drivers;
mod one_line;
mod scripts;
mod untrusted;

use zebu_testkit::program as common;
