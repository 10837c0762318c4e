//! The functions of librados and librbd that are used (`rados/librados.h`, `rbd/librbd.h`), looked up
//! when the libraries are loaded.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::{Error, Result};

pub(super) type Handle = *mut c_void;
/// The end of an asynchronous call.
pub(super) type Ended = extern "C" fn(Handle, *mut c_void);
/// An extent of a difference: offset, length, whether there is data. A negative answer ends it.
pub(super) type EachExtent = extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

macro_rules! functions {
    ($(#[$meta:meta])* $struct:ident of $file:literal: $($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?,)*) => {
        $(#[$meta])*
        pub(super) struct $struct {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            /// Its functions are valid as long as it is loaded.
            _library: Library,
        }

        impl $struct {
            fn load() -> std::result::Result<$struct, libloading::Error> {
                // SAFETY: the constructors of Ceph's libraries have no conditions, and the
                // functions are declared as in its headers.
                unsafe {
                    let library = Library::new($file)?;
                    Ok($struct {
                        $($name: *library.get(stringify!($name))?,)*
                        _library: library,
                    })
                }
            }
        }
    };
}

functions! {
    /// Clusters and pools.
    Rados of "librados.so.2":
    rados_create: fn(*mut Handle, *const c_char) -> c_int,
    rados_conf_read_file: fn(Handle, *const c_char) -> c_int,
    rados_conf_set: fn(Handle, *const c_char, *const c_char) -> c_int,
    rados_connect: fn(Handle) -> c_int,
    rados_shutdown: fn(Handle),
    rados_cluster_fsid: fn(Handle, *mut c_char, usize) -> c_int,
    rados_ioctx_create: fn(Handle, *const c_char, *mut Handle) -> c_int,
    rados_ioctx_set_namespace: fn(Handle, *const c_char),
    rados_ioctx_get_id: fn(Handle) -> i64,
    rados_ioctx_destroy: fn(Handle),
}

functions! {
    /// Images.
    RbdFunctions of "librbd.so.1":
    rbd_version: fn(*mut c_int, *mut c_int, *mut c_int),
    rbd_create: fn(Handle, *const c_char, u64, *mut c_int) -> c_int,
    rbd_remove: fn(Handle, *const c_char) -> c_int,
    rbd_open: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int,
    rbd_open_read_only: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int,
    rbd_close: fn(Handle) -> c_int,
    rbd_resize: fn(Handle, u64) -> c_int,
    rbd_get_size: fn(Handle, *mut u64) -> c_int,
    rbd_get_id: fn(Handle, *mut c_char, usize) -> c_int,
    rbd_snap_get_id: fn(Handle, *const c_char, *mut u64) -> c_int,
    rbd_get_features: fn(Handle, *mut u64) -> c_int,
    rbd_get_flags: fn(Handle, *mut u64) -> c_int,
    rbd_get_overlap: fn(Handle, *mut u64) -> c_int,
    rbd_stat: fn(Handle, *mut c_void, usize) -> c_int,
    rbd_diff_iterate2: fn(Handle, *const c_char, u64, u64, u8, u8, EachExtent, *mut c_void) -> c_int,
    rbd_aio_read: fn(Handle, u64, usize, *mut c_char, Handle) -> c_int,
    rbd_aio_write: fn(Handle, u64, usize, *const c_char, Handle) -> c_int,
    rbd_aio_discard: fn(Handle, u64, u64, Handle) -> c_int,
    // Since Ceph 15.
    rbd_aio_write_zeroes: fn(Handle, u64, usize, Handle, c_int, c_int) -> c_int,
    rbd_aio_flush: fn(Handle, Handle) -> c_int,
    rbd_aio_create_completion: fn(*mut c_void, Ended, *mut Handle) -> c_int,
    rbd_aio_get_return_value: fn(Handle) -> isize,
    rbd_aio_release: fn(Handle),
}

/// Both libraries.
pub(super) struct Ceph {
    pub rados: Rados,
    pub rbd: RbdFunctions,
}

impl std::fmt::Debug for Ceph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ceph")
    }
}

impl Ceph {
    /// Whether differences by the map of objects are right for clones: since librbd 1.17, which is
    /// of Ceph 17 (<https://tracker.ceph.com/issues/53784>).
    pub fn maps_clones(&self) -> bool {
        let (mut major, mut minor, mut extra) = (0, 0, 0);
        // SAFETY: the pointers are valid during the call.
        unsafe { (self.rbd.rbd_version)(&mut major, &mut minor, &mut extra) };
        (major, minor) >= (1, 17)
    }
}

/// Loads the libraries, once.
///
/// # Errors
/// [`Error::Refused`] if they are not there, or too old.
pub(super) fn ceph() -> Result<&'static Ceph> {
    static CEPH: OnceLock<std::result::Result<Ceph, String>> = OnceLock::new();
    let load = || {
        let rados = Rados::load()?;
        let rbd = RbdFunctions::load()?;
        Ok(Ceph { rados, rbd })
    };
    let wrong = |e: libloading::Error| {
        format!("Ceph's library librbd (Debian: librbd1), version 15 or later, is needed: {e}")
    };
    let loaded = CEPH.get_or_init(|| load().map_err(wrong));
    loaded.as_ref().map_err(|e| Error::Refused(e.clone()))
}
