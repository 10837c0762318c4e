//! Rules of the order on the disk, broken on purpose: so a test can show that
//! it notices (`zebu/tests/crash/breaks.rs`). Only in builds with debug assertions; in all
//! others [`is_broken`] is the constant false.

/// A rule that can be broken. What each says is the rule, not the break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Rule {
    /// Refcounts are written before the mappings that need them.
    RefcountsBeforeMappings = 1,
    /// Refcounts and data are durable before mappings are written.
    DurableBeforeMappings,
    /// An external data file is durable before mappings are written.
    DataFileBeforeMappings,
    /// Mappings are copied before the flush that makes their data durable.
    CopyBeforeFlush,
    /// Data are written before they are mapped.
    DataBeforeEntry,
    /// What was dropped is listed before the tables are copied.
    DroppedBeforeCopy,
    /// A dropped reference is durably gone before its cluster is free.
    GoneBeforeFree,
    /// Mappings are durable when a flush returns.
    FlushIsDurable,
    /// A new L2 table is written before an L1 entry points to it.
    TableIsWhole,
    /// A new refcount block is durable before the table points to it.
    BlockBeforeTable,
    /// A larger refcount table is durable before the header names it.
    RefcountTableBeforeHeader,
    /// A larger L1 table is durable before the header names it.
    L1BeforeHeader,
    /// A snapshot table is durable before the header names it.
    SnapshotsBeforeHeader,
    /// Copied flags are cleared before a snapshot can lead to a cluster.
    FlagsBeforeSnapshot,
    /// A snapshot is durably gone before its refcounts are lowered.
    SnapshotGoneBeforeFree,
    /// A new image's tables are durable before its header is written.
    TablesBeforeNewHeader,
    /// What a rebase wrote is durable before the header names the new backing
    /// file.
    DataBeforeBacking,
    /// A commit's base is durable before the top is emptied.
    BaseBeforeEmpty,
    /// Refcounts of another width are durable before the header names them.
    WidthBeforeHeader,
    /// A repair's steps are durable one before the other.
    RepairBarriers,
    /// A flush that failed is not tried again.
    FailedFlushIsFinal,
    /// A long backing file name is durable before the header's first sector
    /// says where it is.
    NameBeforeHeader,
    /// A smaller size is durable before clusters behind it are dropped.
    SizeBeforeTail,
    /// A bitmap is durably marked as in use before anything changes.
    InUseBeforeChange,
    /// The bits of a bitmap are durable before it is marked as consistent.
    BitsBeforeFlag,
    /// Changes announce themselves anew before a store looks at the bits.
    AnnouncedAnew,
    /// VDI: blocks are durable before the map leads to them.
    BlocksBeforeMap,
    /// VDI: the header's count is durable before the map has a block that it must count.
    CountBeforeMap,
    /// VHDX: blocks, and what the entry before changes, are durable before an entry of the log is valid.
    BlocksBeforeLog,
    /// VHDX: an entry of the log is durable when a flush returns.
    LogIsDurable,
    /// VHDX: an entry of the log stays whole until the next one is valid.
    EntryStaysWhole,
    /// VHDX: what an entry of the log changes is written where it belongs before the next one is valid.
    TablesBeforeNextEntry,
    /// VHDX: what a log has is durable where it belongs before the header says that the log is empty.
    RecoveredBeforeEmptyLog,
    /// VHDX: the header says durably that the content is another one before it changes.
    IdentityBeforeContent,
}

#[cfg(debug_assertions)]
mod hook {
    use super::Rule;
    use std::sync::atomic::{AtomicU8, Ordering};

    static BROKEN: AtomicU8 = AtomicU8::new(0);

    impl Rule {
        /// All of them.
        pub const ALL: [Rule; 34] = [
            Rule::RefcountsBeforeMappings,
            Rule::DurableBeforeMappings,
            Rule::DataFileBeforeMappings,
            Rule::CopyBeforeFlush,
            Rule::DataBeforeEntry,
            Rule::DroppedBeforeCopy,
            Rule::GoneBeforeFree,
            Rule::FlushIsDurable,
            Rule::TableIsWhole,
            Rule::BlockBeforeTable,
            Rule::RefcountTableBeforeHeader,
            Rule::L1BeforeHeader,
            Rule::SnapshotsBeforeHeader,
            Rule::FlagsBeforeSnapshot,
            Rule::SnapshotGoneBeforeFree,
            Rule::TablesBeforeNewHeader,
            Rule::DataBeforeBacking,
            Rule::BaseBeforeEmpty,
            Rule::WidthBeforeHeader,
            Rule::RepairBarriers,
            Rule::FailedFlushIsFinal,
            Rule::NameBeforeHeader,
            Rule::SizeBeforeTail,
            Rule::InUseBeforeChange,
            Rule::BitsBeforeFlag,
            Rule::AnnouncedAnew,
            Rule::BlocksBeforeMap,
            Rule::CountBeforeMap,
            Rule::BlocksBeforeLog,
            Rule::LogIsDurable,
            Rule::EntryStaysWhole,
            Rule::TablesBeforeNextEntry,
            Rule::RecoveredBeforeEmptyLog,
            Rule::IdentityBeforeContent,
        ];
    }

    /// Breaks this rule from now on in the whole process, and no other.
    pub fn break_rule(rule: Option<Rule>) {
        BROKEN.store(rule.map_or(0, |rule| rule as u8), Ordering::SeqCst);
    }

    /// Whether a rule is broken at present.
    pub fn is_any_broken() -> bool {
        BROKEN.load(Ordering::SeqCst) != 0
    }

    /// Whether the rule is broken: only in tests.
    pub fn is_broken(rule: Rule) -> bool {
        BROKEN.load(Ordering::SeqCst) == rule as u8
    }
}

#[cfg(not(debug_assertions))]
mod hook {
    /// No rule is broken in a release.
    pub const fn is_any_broken() -> bool {
        false
    }

    #[inline(always)]
    pub const fn is_broken(_: super::Rule) -> bool {
        false
    }
}

#[cfg(debug_assertions)]
pub use hook::break_rule;
pub use hook::is_any_broken;
pub use hook::is_broken;
