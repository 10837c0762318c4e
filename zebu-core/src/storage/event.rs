//! The steps of an image that [`Blkdebug`](super::Blkdebug) has rules for, with QEMU's names.

use std::str::FromStr;

macro_rules! events {
    ($($event:ident $name:literal,)*) => {
        /// A step of an image. docs/blkdebug.md lists those that zebu reports; the others are
        /// accepted and never occur.
        #[allow(missing_docs, reason = "the names are QEMU's")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Event { $($event,)* }

        impl Event {
            /// All of them.
            pub const ALL: &[Event] = &[$(Event::$event,)*];

            /// QEMU's name.
            pub fn name(self) -> &'static str {
                match self { $(Event::$event => $name,)* }
            }
        }
    };
}

events! {
    None "none",
    L1Update "l1_update",
    L1GrowAllocTable "l1_grow_alloc_table",
    L1GrowWriteTable "l1_grow_write_table",
    L1GrowActivateTable "l1_grow_activate_table",
    L1ShrinkWriteTable "l1_shrink_write_table",
    L1ShrinkFreeL2Clusters "l1_shrink_free_l2_clusters",
    L2Load "l2_load",
    L2Update "l2_update",
    L2UpdateCompressed "l2_update_compressed",
    L2AllocCowRead "l2_alloc_cow_read",
    L2AllocWrite "l2_alloc_write",
    ReadAio "read_aio",
    ReadBackingAio "read_backing_aio",
    ReadCompressed "read_compressed",
    WriteAio "write_aio",
    WriteCompressed "write_compressed",
    VmstateLoad "vmstate_load",
    VmstateSave "vmstate_save",
    CowRead "cow_read",
    CowWrite "cow_write",
    CorWrite "cor_write",
    ReftableLoad "reftable_load",
    ReftableGrow "reftable_grow",
    ReftableUpdate "reftable_update",
    RefblockLoad "refblock_load",
    RefblockUpdate "refblock_update",
    RefblockUpdatePart "refblock_update_part",
    RefblockAlloc "refblock_alloc",
    RefblockAllocHookup "refblock_alloc_hookup",
    RefblockAllocWrite "refblock_alloc_write",
    RefblockAllocWriteBlocks "refblock_alloc_write_blocks",
    RefblockAllocWriteTable "refblock_alloc_write_table",
    RefblockAllocSwitchTable "refblock_alloc_switch_table",
    ClusterAlloc "cluster_alloc",
    ClusterAllocBytes "cluster_alloc_bytes",
    ClusterAllocSpace "cluster_alloc_space",
    ClusterFree "cluster_free",
    EmptyImagePrepare "empty_image_prepare",
    FlushToOs "flush_to_os",
    FlushToDisk "flush_to_disk",
    PwritevRmwHead "pwritev_rmw_head",
    PwritevRmwAfterHead "pwritev_rmw_after_head",
    PwritevRmwTail "pwritev_rmw_tail",
    PwritevRmwAfterTail "pwritev_rmw_after_tail",
    Pwritev "pwritev",
    PwritevZero "pwritev_zero",
    PwritevDone "pwritev_done",
}

impl FromStr for Event {
    type Err = ();
    fn from_str(name: &str) -> Result<Self, ()> {
        let found = Self::ALL.iter().find(|event| event.name() == name);
        found.copied().ok_or(())
    }
}
