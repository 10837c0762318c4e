//! The files of an image that is opened: opening and locking them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::pin::Pin;
use std::sync::Arc;

use super::{OpenOptions, Opening, Policy, Role, own_stamp};
use crate::block::stacked::Stacked;
use crate::block::{
    CommonOptions, FileSpec, Format, Identity, ImageSpec, Length, Locking, NATIVE_NEEDS_DIRECT,
    OpenedFile, REPLACED,
};
use crate::drivers::{BoxFuture, OtherFiles};
use crate::storage::{CacheMode, EngineKind, LockRequest, OpenFile, Storage};
use crate::{Error, Result, printable};

impl Opening<'_> {
    /// The data file that the caller has opened, which is the top image's.
    fn given_data(&self, role: Role) -> Option<&Arc<dyn Storage>> {
        self.data.as_ref().filter(|_| role == Role::Top)
    }

    /// The external data file of an image, if it has one that the caller has not opened.
    fn data_file(
        &self,
        spec: &ImageSpec,
        named: Option<Option<&[u8]>>,
        role: Role,
    ) -> Result<Option<FileSpec>> {
        let is_given = self.given_data(role).is_some();
        let Some(name) = named else {
            return match spec.data_file.is_none() && !is_given {
                true => Ok(None),
                false => Err(Error::Refused(
                    "'data-file' can only be set for images with an external data file".into(),
                )),
            };
        };
        if let Some(data_file) = &spec.data_file {
            return Ok(Some(data_file.clone()));
        }
        if is_given {
            return Ok(None);
        }
        let Some(name) = name else {
            return Err(Error::Refused(
                "'data-file' is required for this image".into(),
            ));
        };
        let name = OsStr::from_bytes(name);
        if self.options.policy != Policy::Follow && !self.only_tables() {
            return Err(Error::Refused(format!(
                "The image names a data file ('{}'), which it may not open",
                printable(name.as_bytes())
            )));
        }
        match FileSpec::of_data(name) {
            // A name that is only shown may be any.
            Err(_) if self.options.policy != Policy::Follow => Ok(None),
            resolved => resolved.map(Some),
        }
    }

    pub(super) fn check_loop(&mut self, file: &OpenedFile, spec: &FileSpec) -> Result<()> {
        let Some(identity) = &file.identity else {
            return Ok(());
        };
        if self.seen.contains(identity) {
            return Err(Error::Refused(format!(
                "Backing file '{}' creates an infinite loop.",
                printable(spec.name().as_bytes())
            )));
        }
        self.seen.push(identity.clone());
        Ok(())
    }

    /// Opens one file of an image. The `inherited` options of the image hold where the file has
    /// none of its own.
    pub(super) fn file<'a>(
        &'a self,
        inherited: &'a CommonOptions,
        spec: &'a FileSpec,
        role: Role,
    ) -> Pin<Box<dyn Future<Output = Result<OpenedFile>> + 'a>> {
        let own = &spec.options.common;
        let (direct, no_flush) = (
            own.direct.or(inherited.direct),
            own.no_flush.or(inherited.no_flush),
        );
        let common = CommonOptions {
            direct,
            no_flush,
            ..own.clone()
        };
        let cache = cache_mode(self.options.cache, direct, no_flush);
        Box::pin(async move {
            if let Some(image) = spec.protocol().image() {
                return self.stacked(image, cache, role).await;
            }
            if let Some((_, below)) = spec.below() {
                let below = self.file(&common, below, role).await?;
                let (objects, write) = (&self.options.objects, self.writes(role));
                return spec.protocol().over(below, objects, write);
            }
            if spec.options.aio == Some(EngineKind::Native) && !cache.is_direct() {
                return Err(Error::Refused(NATIVE_NEEDS_DIRECT.into()));
            }
            let how = OpenFile {
                write: self.writes(role),
                create: false,
                cache,
            };
            let opened = spec.open_async(how, &self.options.objects).await?;
            match self.options.block_cache.as_deref() {
                Some(cache) if !how.write => opened.cached(cache),
                _ => Ok(opened),
            }
        })
    }

    /// Opens an image, with its backing chain, whose disk is the file of another image.
    async fn stacked(&self, image: &ImageSpec, cache: CacheMode, role: Role) -> Result<OpenedFile> {
        let options = &OpenOptions {
            format: None,
            write: self.writes(role),
            cache,
            no_backing: false,
            inspect: false,
            check: false,
            l2_cache_size: None,
            l2_cache_entry_size: None,
            // As in QEMU: an image below another one carries out discards unless its options forbid
            // it.
            discard: Some(image.options.common.discard.unwrap_or(true)),
            detect_zeroes: None,
            snapshot: None,
            copy_on_read: false,
            formats_before: Vec::new(),
            ..self.options.clone()
        };
        let mut opening = Opening::new(self.queue, options);
        opening.seen = self.seen.clone();
        opening.chain(image.clone()).await.map_err(|e| match e {
            // A repair of the image above would not repair this one.
            e if e.is_dirty() => Error::Refused(format!(
                "'{}': {e}",
                printable(image.file.name().as_bytes())
            )),
            e => e,
        })?;
        let identity = opening.seen.get(self.seen.len()).cloned();
        let device = Arc::new(opening.into_device());
        let storage = Arc::new(Stacked::new(device.clone()));
        self.nested.borrow_mut().push(device);
        let identity = identity.map(|identity| Identity::Inside(Box::new(identity)));
        Ok(OpenedFile {
            identity,
            ..OpenedFile::new(storage)
        })
    }
}

/// The other files of an image that is being opened.
pub(super) struct Others<'a, 'o> {
    pub opening: &'a Opening<'o>,
    pub spec: &'a mut ImageSpec,
    /// The use of the image.
    pub role: Role,
}

impl OtherFiles for Others<'_, '_> {
    fn data_file<'a>(
        &'a mut self,
        named: Option<Option<&'a [u8]>>,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Storage>>>> {
        Box::pin(async move {
            let opening = self.opening;
            let Some(data_file) = opening.data_file(self.spec, named, self.role)? else {
                return Ok(opening.given_data(self.role).cloned());
            };
            let data = match opening.only_tables() {
                true => None,
                false => {
                    let common = &self.spec.options.common;
                    let role = match opening.writes(self.role) {
                        true => Role::Data,
                        false => Role::Other { has_tables: false },
                    };
                    let file = opening.file(common, &data_file, role).await?;
                    opening.lock(&file, self.spec, &data_file, role, Format::RAW)?;
                    if role == Role::Data && !file.is_at_its_path() {
                        return Err(Error::Refused(REPLACED.into()));
                    }
                    Some(file.storage())
                }
            };
            self.spec.data_file = Some(data_file);
            Ok(data)
        })
    }

    fn extent<'a>(
        &'a mut self,
        name: &'a [u8],
        has_tables: bool,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Storage>>>> {
        Box::pin(async move {
            let (opening, name) = (self.opening, OsStr::from_bytes(name));
            let follows = opening.options.policy == Policy::Follow;
            if !follows && !opening.only_tables() {
                return Err(Error::Refused(format!(
                    "The image names an extent ('{}'), which it may not open",
                    printable(name.as_bytes())
                )));
            }
            let file = match self.spec.file.beside(name) {
                // A name that is only shown may be any.
                Err(_) if !follows => FileSpec::new(name),
                found => found?,
            };
            let storage = match follows {
                false => None,
                true => {
                    let common = &self.spec.options.common;
                    let role = Role::Other { has_tables };
                    let opened = opening.file(common, &file, role).await?;
                    opening.lock(&opened, self.spec, &file, role, Format::RAW)?;
                    Some(opened.storage())
                }
            };
            self.spec.extents.push(file);
            Ok(storage)
        })
    }
}

impl Opening<'_> {
    /// Locks one file of an image, as QEMU would, and notes how it is.
    pub(super) fn lock(
        &self,
        file: &OpenedFile,
        image: &ImageSpec,
        spec: &FileSpec,
        role: Role,
        format: Format,
    ) -> Result<()> {
        self.lock_only(file, image, spec, role, format)?;
        let storage = file.storage();
        if !self.writes(role)
            && let Some(stamp) = own_stamp(&*storage)
        {
            self.stamps.borrow_mut().push((storage, stamp));
        }
        Ok(())
    }

    fn lock_only(
        &self,
        file: &OpenedFile,
        image: &ImageSpec,
        spec: &FileSpec,
        role: Role,
        format: Format,
    ) -> Result<()> {
        let write = self.writes(role);
        let shared = self.is_shared(image);
        let request = match role {
            _ if spec.bottom().options.locking == Locking::Off => return Ok(()),
            _ if shared => LockRequest::FORCE_SHARE,
            Role::Data if write => LockRequest::DATA_WRITE,
            Role::Data | Role::Other { has_tables: false } => LockRequest::DATA_READ,
            Role::Other { has_tables: true } => LockRequest::QCOW2_READ,
            _ if write => format.driver().locks[1],
            Role::Top | Role::Backing if self.options.exclude_writers => LockRequest::QCOW2_READ,
            _ => format.driver().locks[0],
        };
        file.lock(match self.options.length {
            _ if role != Role::Top || shared => request,
            Length::Shared => request,
            Length::Fixed => request.fixed_length(),
            Length::Changing => {
                // As QEMU, whose message it has. Then shared with nobody: the old length is read under this
                // lock, so that of two relative changes at once none is lost.
                file.lock(request.changing_length())?;
                request.changing_length().fixed_length()
            }
        })
    }

    pub(super) fn is_shared(&self, image: &ImageSpec) -> bool {
        self.options.force_share || image.options.common.force_share == Some(true)
    }

    pub(super) fn writes(&self, role: Role) -> bool {
        self.options.write && matches!(role, Role::Top | Role::Data)
    }
}

/// `base`, changed by `cache.direct` and `cache.no-flush` where these are given.
fn cache_mode(base: CacheMode, direct: Option<bool>, no_flush: Option<bool>) -> CacheMode {
    if direct.is_none() && no_flush.is_none() {
        return base;
    }
    let direct = direct.unwrap_or(base.is_direct());
    let no_flush = no_flush.unwrap_or(base.ignores_flushes());
    match (direct, base.is_write_through()) {
        (false, _) if no_flush => CacheMode::Unsafe,
        (true, true) => CacheMode::DirectSync,
        (true, false) => CacheMode::None,
        (false, true) => CacheMode::WriteThrough,
        (false, false) => CacheMode::WriteBack,
    }
}
