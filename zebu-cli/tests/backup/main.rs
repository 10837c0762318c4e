//! Sets of backups.

mod backup;
mod backup_bad_input;
mod backup_bitmaps;
mod backup_damage;
mod backup_failed;
mod backup_killed;
mod backup_power_cut;
mod backup_source;

use zebu_testkit::program as common;
