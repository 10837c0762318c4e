//! Connecting to a cluster; opening, creating and removing an image.

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::ptr::{null, null_mut};
use std::sync::{RwLock, RwLockReadGuard};

use super::library::{Ceph, Handle, ceph};
use super::{RbdOptions, refused};
use crate::storage::version::Words;
use crate::storage::{CacheIdentity, StorageExtent};
use crate::{Error, Result};

/// `RBD_FEATURE_STRIPINGV2`: bytes that follow each other are in several objects.
const STRIPING: u64 = 1 << 1;
/// `RBD_FEATURE_FAST_DIFF`: differences come from the map of objects.
const FAST_DIFF: u64 = 1 << 4;
/// `RBD_FLAG_OBJECT_MAP_INVALID` and `RBD_FLAG_FAST_DIFF_INVALID`
const INVALID: u64 = 3;

/// An open image and its connection.
#[derive(Debug)]
pub(super) struct Image {
    /// None: it is closed. Calls hold the lock for reading. It comes first, since it must be closed
    /// before the connection ends.
    open: RwLock<Option<Open>>,
    pool: Pool,
    name: CString,
    /// Bytes of an object.
    object_size: u64,
    cache_identity: CacheIdentity,
}

/// The handle of an image that is open.
#[derive(Debug)]
pub(super) struct Open {
    pub ceph: &'static Ceph,
    pub image: Handle,
}

// SAFETY: the library may be called by any thread.
unsafe impl Send for Open {}
// SAFETY: as above.
unsafe impl Sync for Open {}

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: it is open, and no call that has begun uses it any more.
        unsafe { (self.ceph.rbd.rbd_close)(self.image) };
    }
}

/// A connection to a cluster, with one of its pools.
#[derive(Debug)]
struct Pool {
    ceph: &'static Ceph,
    cluster: Handle,
    /// Null until it is open.
    pool: Handle,
}

// SAFETY: the library may be called by any thread.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Drop for Pool {
    fn drop(&mut self) {
        let rados = &self.ceph.rados;
        // SAFETY: both are valid, and the image is closed.
        unsafe {
            if !self.pool.is_null() {
                (rados.rados_ioctx_destroy)(self.pool);
            }
            (rados.rados_shutdown)(self.cluster);
        }
    }
}

fn c_string(text: &[u8]) -> Result<CString> {
    CString::new(text)
        .map_err(|_| Error::Refused("The name has a NUL byte, which Ceph cannot record".into()))
}

/// The pointer of a string that may be missing.
fn pointer(text: &Option<CString>) -> *const c_char {
    text.as_ref().map_or(null(), |text| text.as_ptr())
}

/// Ceph's default configuration files but that in the current directory, which may be anyone's: a
/// configuration can name files to write and code to load. The last one, which is empty, is there.
const DEFAULT_CONF: &CStr = c"/etc/ceph/ceph.conf,$home/.ceph/ceph.conf,/dev/null";

/// `Err` with the number of the error, if a call has failed.
fn check(result: c_int) -> std::result::Result<(), i32> {
    match result < 0 {
        true => Err(-result),
        false => Ok(()),
    }
}

impl Pool {
    fn connect(options: &RbdOptions) -> Result<Pool> {
        let ceph = ceph()?;
        let rados = &ceph.rados;
        let text =
            |text: &Option<String>| text.as_ref().map(|t| c_string(t.as_bytes())).transpose();
        let user = text(&options.user)?;
        let mut cluster = null_mut();
        // SAFETY: the pointers are valid during the call; so below.
        check(unsafe { (rados.rados_create)(&mut cluster, pointer(&user)) })
            .map_err(|e| refused("error initializing", e))?;
        let mut pool = Pool {
            ceph,
            cluster,
            pool: null_mut(),
        };
        let conf = match &options.conf {
            Some(conf) => Some(c_string(conf.as_os_str().as_bytes())?),
            // The library takes what the variable says.
            None if env::var_os("CEPH_CONF").is_some() => None,
            None => Some(DEFAULT_CONF.into()),
        };
        // SAFETY: as above.
        let read = check(unsafe { (rados.rados_conf_read_file)(cluster, pointer(&conf)) });
        if let (Err(errno), Some(conf)) = (read, &options.conf) {
            let what = format!("error reading conf file {}", conf.display());
            return Err(refused(&what, errno));
        }
        let key = options.key.as_ref().map(|key| ("key", key.reveal()));
        let set = options.set.iter().map(|(k, v)| (k.as_str(), v.as_str()));
        for (option, value) in set.chain(key) {
            let (c_option, value) = (c_string(option.as_bytes())?, c_string(value.as_bytes())?);
            // SAFETY: as above.
            check(unsafe { (rados.rados_conf_set)(cluster, c_option.as_ptr(), value.as_ptr()) })
                .map_err(|e| refused(&format!("invalid conf option {option}"), e))?;
        }
        // SAFETY: as above.
        check(unsafe { (rados.rados_connect)(cluster) })
            .map_err(|e| refused("error connecting", e))?;
        let name = c_string(options.pool.as_bytes())?;
        // SAFETY: as above.
        check(unsafe { (rados.rados_ioctx_create)(cluster, name.as_ptr(), &mut pool.pool) })
            .map_err(|e| refused(&format!("error opening pool {}", options.pool), e))?;
        let namespace = c_string(options.namespace.as_bytes())?;
        // SAFETY: as above.
        unsafe { (rados.rados_ioctx_set_namespace)(pool.pool, namespace.as_ptr()) };
        Ok(pool)
    }
}

impl Image {
    /// Connects, creates the image if that is wanted, and opens it.
    pub fn open(options: &RbdOptions) -> Result<Image> {
        let pool = Pool::connect(options)?;
        let (ceph, rbd) = (pool.ceph, &pool.ceph.rbd);
        let name = c_string(options.image.as_bytes())?;
        if options.create {
            // The cluster's default size of objects.
            let mut order = 0;
            // SAFETY: the pointers are valid during the call; so below.
            check(unsafe { (rbd.rbd_create)(pool.pool, name.as_ptr(), 0, &mut order) })
                .map_err(|e| refused("error rbd create", e))?;
        }
        let snapshot = options.snapshot.as_ref();
        let snapshot = snapshot.map(|s| c_string(s.as_bytes())).transpose()?;
        let open = match options.write {
            true => rbd.rbd_open,
            false => rbd.rbd_open_read_only,
        };
        let mut image = null_mut();
        // SAFETY: as above.
        check(unsafe { open(pool.pool, name.as_ptr(), &mut image, pointer(&snapshot)) })
            .map_err(|e| refused(&format!("error reading header from {}", options.image), e))?;
        let open = Open { ceph, image };
        // `rbd_image_info_t` has 160 bytes, of which the second word is the size of objects.
        let mut info = [0u64; 32];
        let size = size_of_val(&info);
        // SAFETY: as above; the structure has room there.
        check(unsafe { (rbd.rbd_stat)(image, info.as_mut_ptr().cast(), size) })
            .map_err(|e| refused("error getting image info", e))?;
        let cache_identity = match &snapshot {
            Some(snapshot) => cache_identity(&pool, &open, options, snapshot),
            None => Err("only snapshots stay as they are"),
        };
        Ok(Image {
            pool,
            name,
            open: RwLock::new(Some(open)),
            object_size: info[1].max(1),
            cache_identity,
        })
    }

    /// Which bytes it has.
    #[cfg_attr(not(feature = "cache"), allow(dead_code))]
    pub fn cache_identity(&self) -> &CacheIdentity {
        &self.cache_identity
    }

    /// The open image, for calls.
    pub fn get(&self) -> RwLockReadGuard<'_, Option<Open>> {
        self.open.read().unwrap_or_else(|e| e.into_inner())
    }

    fn call<T>(
        &self,
        call: impl FnOnce(&Open) -> std::result::Result<T, i32>,
    ) -> std::result::Result<T, i32> {
        self.get().as_ref().map_or(Err(libc::EBADF), call)
    }

    /// The size in bytes, as the library knows it at this moment.
    pub fn size(&self) -> std::result::Result<u64, i32> {
        self.call(|open| {
            let mut size = 0;
            // SAFETY: the image is open; so below.
            check(unsafe { (open.ceph.rbd.rbd_get_size)(open.image, &mut size) })?;
            Ok(size)
        })
    }

    /// Changes the size. Blocks.
    pub fn resize(&self, size: u64) -> std::result::Result<(), i32> {
        self.call(|open| {
            // SAFETY: as in `size`.
            check(unsafe { (open.ceph.rbd.rbd_resize)(open.image, size) })
        })
    }

    /// Makes it so long, if it is shorter. Blocks.
    pub fn grow(&self, size: u64) -> std::result::Result<(), i32> {
        match self.size()? < size {
            true => self.resize(size),
            false => Ok(()),
        }
    }

    /// Closes and removes it. Blocks.
    pub fn remove(&self) -> std::result::Result<(), i32> {
        let open = self.open.write().unwrap_or_else(|e| e.into_inner()).take();
        drop(open);
        // SAFETY: the pool is open, and the name valid during the call.
        check(unsafe { (self.pool.ceph.rbd.rbd_remove)(self.pool.pool, self.name.as_ptr()) })
    }

    /// What is at `offset`, which is inside the image, by the map of objects; None: there is none
    /// that can be relied on. May block.
    pub fn extent(&self, offset: u64) -> std::result::Result<Option<StorageExtent>, i32> {
        self.call(|open| {
            let rbd = &open.ceph.rbd;
            let (mut features, mut flags, mut size, mut of_parent) = (0, 0, 0, 0);
            // SAFETY: as in `size`.
            unsafe {
                check((rbd.rbd_get_features)(open.image, &mut features))?;
                check((rbd.rbd_get_flags)(open.image, &mut flags))?;
                check((rbd.rbd_get_size)(open.image, &mut size))?;
                check((rbd.rbd_get_overlap)(open.image, &mut of_parent))?;
            }
            if features & FAST_DIFF == 0 || flags & INVALID != 0 || offset >= size {
                return Ok(None);
            }
            // The extents of striped images may be in any order.
            if features & STRIPING != 0 || of_parent > 0 && !open.ceph.maps_clones() {
                return Ok(None);
            }
            // Older libraries want whole objects.
            let start = offset - offset % self.object_size;
            let mut found = Found {
                start: offset,
                end: offset,
                is_data: None,
            };
            let found_pointer: *mut c_void = (&raw mut found).cast();
            // SAFETY: the image is open, and `found` lives during the call.
            let result = unsafe {
                (rbd.rbd_diff_iterate2)(
                    open.image,
                    null(),
                    start,
                    size - start,
                    // With the images that it was cloned from.
                    1,
                    1,
                    each,
                    found_pointer,
                )
            };
            if result < 0 && result != STOP {
                return Err(-result);
            }
            Ok(Some(found.extent(result == STOP, size)))
        })
    }
}

/// Which bytes a snapshot has. The numbers of pools, images and snapshots are given once.
fn cache_identity(
    pool: &Pool,
    open: &Open,
    options: &RbdOptions,
    snapshot: &CString,
) -> CacheIdentity {
    let (rados, rbd) = (&pool.ceph.rados, &pool.ceph.rbd);
    let unknown = |_| "the cluster does not tell its number and that of the snapshot";
    let (mut cluster, mut image, mut number) = ([0u8; 64], [0u8; 256], 0);
    // SAFETY: the pointers are valid during the calls, and the buffers as long as they say.
    let pool_number = unsafe {
        check((rados.rados_cluster_fsid)(
            pool.cluster,
            cluster.as_mut_ptr().cast(),
            cluster.len(),
        ))
        .map_err(unknown)?;
        check((rbd.rbd_get_id)(
            open.image,
            image.as_mut_ptr().cast(),
            image.len(),
        ))
        .map_err(unknown)?;
        check((rbd.rbd_snap_get_id)(
            open.image,
            snapshot.as_ptr(),
            &mut number,
        ))
        .map_err(unknown)?;
        (rados.rados_ioctx_get_id)(pool.pool)
    };
    let text = |bytes: &[u8]| -> String {
        let end = bytes.iter().position(|byte| *byte == 0);
        String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]).into_owned()
    };
    Ok(Words(vec![
        "rbd".into(),
        text(&cluster),
        pool_number.to_string(),
        options.namespace.clone(),
        text(&image),
        number.to_string(),
    ]))
}

/// The first extent of a difference from an offset on.
struct Found {
    start: u64,
    /// Where it ends, as far as is known.
    end: u64,
    /// None: nothing was reported yet.
    is_data: Option<bool>,
}

impl Found {
    /// What it is in an image of this size, after a difference that ended there or was stopped.
    fn extent(&self, was_stopped: bool, size: u64) -> StorageExtent {
        let end = self.end.min(size);
        match self.is_data {
            Some(true) => StorageExtent::data(end - self.start),
            _ if was_stopped => StorageExtent::hole(end - self.start),
            // Nothing but holes up to the end.
            _ => StorageExtent::hole(size - self.start),
        }
    }
}

/// What ends a difference: no error that the library has.
const STOP: c_int = -9000;

/// Takes the extents that have data (or, after a discard, have none) in order, until the first one
/// ends.
extern "C" fn each(offset: u64, length: usize, exists: c_int, found: *mut c_void) -> c_int {
    // SAFETY: `Image::extent` has passed it.
    let found = unsafe { &mut *found.cast::<Found>() };
    let has_data = exists != 0;
    let end = offset + length as u64;
    if end <= found.start {
        // The first object begins before.
        return 0;
    }
    let offset = offset.max(found.start);
    if found.is_data.is_none() {
        // What is not reported is a hole.
        found.is_data = Some(has_data && offset == found.start);
    }
    match found.is_data {
        Some(true) if !has_data || offset != found.end => STOP,
        Some(true) => {
            found.end = end;
            0
        }
        _ if has_data => {
            found.end = offset;
            STOP
        }
        _ => {
            found.end = end;
            0
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against data that are taken for a hole.
    use super::*;

    /// What is at `offset` of an image of 100 bytes with these extents.
    fn found(offset: u64, extents: &[(u64, usize, bool)]) -> (bool, u64) {
        let mut found = Found {
            start: offset,
            end: offset,
            is_data: None,
        };
        let mut report = |extent: &(u64, usize, bool)| {
            let pointer = (&raw mut found).cast();
            each(extent.0, extent.1, extent.2.into(), pointer) == STOP
        };
        let was_stopped = extents.iter().any(&mut report);
        let extent = found.extent(was_stopped, 100);
        assert_eq!(extent.zero, !extent.allocated);
        (extent.allocated, extent.length)
    }

    #[test]
    fn extents_are_data_and_holes() {
        let (data, hole) = (true, false);
        assert_eq!(found(0, &[]), (hole, 100));
        assert_eq!(found(0, &[(0, 10, true), (10, 10, true)]), (data, 20));
        assert_eq!(found(0, &[(0, 10, true), (20, 10, true)]), (data, 10));
        assert_eq!(found(0, &[(30, 10, true)]), (hole, 30));
        // Discarded.
        assert_eq!(found(0, &[(0, 10, false), (30, 10, true)]), (hole, 30));
        assert_eq!(found(0, &[(0, 10, true), (10, 10, false)]), (data, 10));
        assert_eq!(found(0, &[(0, 10, false)]), (hole, 100));
        // An object that begins before, and parts of it.
        assert_eq!(found(5, &[(0, 10, true), (20, 10, true)]), (data, 5));
        assert_eq!(found(5, &[(1, 2, true), (6, 2, true)]), (hole, 1));
        assert_eq!(found(6, &[(1, 2, true), (5, 2, true)]), (data, 1));
        assert_eq!(found(5, &[(1, 4, true)]), (hole, 95));
        // The last object ends behind the image.
        assert_eq!(found(95, &[(90, 20, true)]), (data, 5));
    }
}
