//! A file or an export that was opened.

use std::os::unix::ffi::OsStrExt;
#[cfg(feature = "http")]
use std::path::Path;
use std::sync::Arc;

use super::objects::Objects;
#[cfg(feature = "rbd")]
use super::spec::RbdSpec;
#[cfg(feature = "ssh")]
use super::spec::SshSpec;
#[cfg(feature = "object-store")]
use super::spec::StoreSpec;
use super::spec::{FileDriver, FileSpec};
#[cfg(feature = "http")]
use super::spec::{HttpCookie, HttpSpec, RemoteOptions};
#[cfg(feature = "nbd")]
use super::spec::{NbdSpec, NbdTls};
use crate::storage::named::NamedFile;
#[cfg(feature = "nbd")]
use crate::storage::nbd::{Nbd, NbdOptions, NbdServer};
#[cfg(feature = "http")]
use crate::storage::object::{Access, HttpOptions, Login, Object, ObjectOptions, Place};
#[cfg(feature = "object-store")]
use crate::storage::object::{StoreOptions, Upload};
#[cfg(feature = "rbd")]
use crate::storage::rbd::{Rbd, RbdOptions};
#[cfg(feature = "http")]
use crate::storage::secret::without_queries;
#[cfg(feature = "ssh")]
use crate::storage::ssh::{Ssh, SshOptions, SshServer};
#[cfg(feature = "cache")]
use crate::storage::{BlockCache, CacheIdentity, Check};
use crate::storage::{CacheMode, LockRequest, Null, OpenFile, Storage, open_file};
use crate::{Error, Result, printable};

/// How often a file is opened again that was removed or replaced before it was locked.
pub(crate) const ATTEMPTS: usize = 16;
/// The error after so many attempts.
pub(crate) const REPLACED: &str =
    "Other programs replace the file again and again: try it once more";

/// What `open` opens in the first of `caches` (at least one) that works. The
/// error is that of the last.
pub fn in_first<T, E>(
    caches: &[CacheMode],
    open: impl Fn(CacheMode) -> Result<T, E>,
) -> Result<T, E> {
    let (last, others) = caches.split_last().expect("a cache mode");
    let opened = others.iter().find_map(|cache| open(*cache).ok());
    opened.map_or_else(|| open(*last), Ok)
}

/// A file that was opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenedFile {
    #[doc(hidden)]
    /// A local file.
    Local(Arc<dyn Storage>),
    #[doc(hidden)]
    /// An export of an NBD server.
    #[cfg(feature = "nbd")]
    Nbd(Arc<Nbd>),
    #[doc(hidden)]
    /// An object on another machine, which is only read.
    #[cfg(feature = "http")]
    Object(Arc<Object>),
    #[doc(hidden)]
    /// An image in a Ceph cluster.
    #[cfg(feature = "rbd")]
    Rbd(Arc<Rbd>),
    #[doc(hidden)]
    /// A file on an SSH server.
    #[cfg(feature = "ssh")]
    Ssh(Arc<Ssh>),
    #[doc(hidden)]
    /// A file that stores nothing.
    Null(Arc<Null>),
    #[doc(hidden)]
    /// A part of another file, or a filter over it.
    Over(Arc<dyn Storage>, Box<OpenedFile>),
    #[doc(hidden)]
    /// The disk of an image, which was locked when it was opened.
    Image(OpenedImage),
}

/// The disk of an image that is the file of another image.
#[derive(Debug)]
pub struct OpenedImage {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) identity: Option<Identity>,
}

/// The identity of a file, by which a loop is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Device and inode.
    Local(u64, u64),
    /// Server and export.
    #[cfg(feature = "nbd")]
    Nbd(NbdServer, String),
    /// The URL of an object.
    #[cfg(feature = "http")]
    Object(String),
    /// Pool, namespace, image and snapshot.
    #[cfg(feature = "rbd")]
    Rbd(String, String, String, Option<String>),
    /// Host, port and path.
    #[cfg(feature = "ssh")]
    Ssh(String, Option<u16>, String),
    /// A part of a file: offset and size.
    Part(Box<Identity>, Option<u64>, Option<u64>),
    /// The disk of the image in a file.
    Inside(Box<Identity>),
}

impl FileSpec {
    /// Opens a file, or connects to a server. Blocks. Missing exports are not created.
    ///
    /// # Errors
    ///
    /// If it cannot be opened. [`Error::Refused`] for drivers over another file.
    #[cfg_attr(not(any(feature = "nbd", feature = "http")), allow(unused_variables))]
    pub fn open(&self, how: OpenFile, objects: &Objects) -> Result<OpenedFile> {
        match &self.driver {
            #[cfg(feature = "nbd")]
            FileDriver::Nbd(nbd) => {
                let options = nbd.options(how.write, how.cache, objects)?;
                Nbd::open(options).map(Arc::new).map(OpenedFile::Nbd)
            }
            #[cfg(feature = "http")]
            FileDriver::Http(_) => self.open_object(how, objects),
            #[cfg(feature = "object-store")]
            FileDriver::Store(_) => self.open_object(how, objects),
            #[cfg(feature = "rbd")]
            FileDriver::Rbd(rbd) => {
                let rbd = Rbd::open(rbd.options(how, objects)?)?;
                Ok(OpenedFile::Rbd(Arc::new(rbd)))
            }
            #[cfg(feature = "ssh")]
            FileDriver::Ssh(ssh) => {
                let ssh = Ssh::open(ssh.options(how))?;
                Ok(OpenedFile::Ssh(Arc::new(ssh)))
            }
            FileDriver::Null(null) => {
                let null = Null::new(&self.path, null.size, null.latency, null.read_zeroes);
                Ok(OpenedFile::Null(Arc::new(null)))
            }
            FileDriver::Blkdebug(_) | FileDriver::Image(_) => Err(Error::Refused(format!(
                "Driver '{}' does not support creating new images",
                self.driver.name()
            ))),
            FileDriver::Any | FileDriver::File | FileDriver::HostDevice | FileDriver::HostCdrom => {
                let needs_device =
                    matches!(self.driver, FileDriver::HostDevice | FileDriver::HostCdrom);
                // No device is made where there is none.
                let how = how.create(how.create && !needs_device);
                let file = open_file(&self.path, how).map_err(|e| could_not_open(e, self))?;
                if needs_device && !file.is_device() {
                    return Err(Error::Refused(format!(
                        "'{}' driver requires '{}' to be either a character or block device",
                        self.driver.name(),
                        printable(self.name().as_bytes())
                    )));
                }
                Ok(OpenedFile::Local(file))
            }
        }
    }
}

impl FileSpec {
    /// Opens a file that is there for writing, in the first of `caches` that works, and locks it. Its
    /// name leads to it then.
    #[doc(hidden)]
    pub fn open_locked(
        &self,
        caches: &[CacheMode],
        request: LockRequest,
        objects: &Objects,
    ) -> Result<OpenedFile> {
        for _ in 0..ATTEMPTS {
            let file = in_first(caches, |cache| {
                let how = OpenFile::default().write(true).cache(cache);
                self.open(how, objects)
            })?;
            file.lock(request)?;
            if file.is_at_its_path() {
                return Ok(file);
            }
        }
        Err(Error::Refused(REPLACED.into()))
    }

    /// As [`FileSpec::open`], without blocking the thread while a server is connected to.
    pub(super) async fn open_async(&self, how: OpenFile, objects: &Objects) -> Result<OpenedFile> {
        #[cfg(feature = "nbd")]
        if let FileDriver::Nbd(nbd) = &self.driver {
            let options = nbd.options(how.write, how.cache, objects)?;
            let nbd = Nbd::open_async(options).await?;
            return Ok(OpenedFile::Nbd(Arc::new(nbd)));
        }
        #[cfg(feature = "http")]
        if let Some((place, options)) = self.object(how, objects)? {
            let object = Object::open(place, options).await?;
            return Ok(OpenedFile::Object(Arc::new(object)));
        }
        #[cfg(feature = "rbd")]
        if let FileDriver::Rbd(rbd) = &self.driver {
            let rbd = Rbd::open_async(rbd.options(how, objects)?).await?;
            return Ok(OpenedFile::Rbd(Arc::new(rbd)));
        }
        #[cfg(feature = "ssh")]
        if let FileDriver::Ssh(ssh) = &self.driver {
            let ssh = Ssh::open_async(ssh.options(how)).await?;
            return Ok(OpenedFile::Ssh(Arc::new(ssh)));
        }
        self.open(how, objects)
    }
}

/// Objects on other machines.
#[cfg(feature = "http")]
impl RemoteOptions {
    /// What they are for the object of this name, which messages show.
    fn object(&self, name: &Path) -> ObjectOptions {
        ObjectOptions {
            name: without_queries(&name.to_string_lossy()).into(),
            readahead: self.readahead,
            timeout: self.timeout,
            connections: self.connections,
        }
    }
}

#[cfg(feature = "http")]
impl FileSpec {
    /// Where the object is and how it is read, if it is one.
    fn object(&self, how: OpenFile, objects: &Objects) -> Result<Option<(Place, ObjectOptions)>> {
        let (place, reading) = match &self.driver {
            FileDriver::Http(http) => (http.place(objects)?, &http.reading),
            #[cfg(feature = "object-store")]
            FileDriver::Store(store) => (store.place(), &store.reading),
            _ => return Ok(None),
        };
        if how.write {
            let driver = match self.driver {
                // As QEMU calls it.
                FileDriver::Http(_) => "curl",
                _ => self.driver.name(),
            };
            let why = format!("{driver} driver does not support writes");
            return Err(Error::Refused(why));
        }
        Ok(Some((place, reading.object(&self.path))))
    }

    fn open_object(&self, how: OpenFile, objects: &Objects) -> Result<OpenedFile> {
        let Some((place, options)) = self.object(how, objects)? else {
            return Err(Error::Refused("it is no object".into()));
        };
        let object = Object::open_blocking(place, options)?;
        Ok(OpenedFile::Object(Arc::new(object)))
    }
}

impl OpenedFile {
    /// The storage of its bytes.
    pub fn storage(&self) -> Arc<dyn Storage> {
        match self {
            OpenedFile::Local(file) => file.clone(),
            #[cfg(feature = "nbd")]
            OpenedFile::Nbd(nbd) => nbd.clone(),
            #[cfg(feature = "http")]
            OpenedFile::Object(object) => object.clone(),
            #[cfg(feature = "rbd")]
            OpenedFile::Rbd(rbd) => rbd.clone(),
            #[cfg(feature = "ssh")]
            OpenedFile::Ssh(ssh) => ssh.clone(),
            OpenedFile::Null(null) => null.clone(),
            OpenedFile::Over(storage, _) => storage.clone(),
            OpenedFile::Image(image) => image.storage.clone(),
        }
    }

    /// The same file with a cache over it, if it is on another machine and was opened to be read.
    /// If nothing tells whether its bytes change, it is left as it is, and the cache says so.
    ///
    /// # Errors
    /// Those of [`Storage::len`](crate::Storage::len).
    #[cfg(feature = "cache")]
    pub fn cached(self, cache: &BlockCache) -> Result<OpenedFile> {
        #[allow(unused_mut)]
        let mut check: Option<Arc<dyn Check>> = None;
        let identity: CacheIdentity = match &self {
            #[cfg(feature = "http")]
            OpenedFile::Object(object) => object.cache_identity().clone(),
            #[cfg(feature = "rbd")]
            OpenedFile::Rbd(rbd) => rbd.cache_identity().clone(),
            #[cfg(feature = "ssh")]
            OpenedFile::Ssh(ssh) => {
                check = Some(ssh.clone());
                ssh.cache_identity()
            }
            _ => return Ok(self),
        };
        let storage = self.storage();
        match identity {
            Ok(words) => {
                let words: Vec<&str> = words.0.iter().map(String::as_str).collect();
                let cached = cache.over_checked(storage, &words, check)?;
                Ok(OpenedFile::Over(cached, Box::new(self)))
            }
            Err(why) => {
                cache.leave_out(&storage.path().display().to_string(), why);
                Ok(self)
            }
        }
    }

    /// The file or the device of this machine that it is.
    pub(crate) fn named_file(&self) -> Option<&dyn NamedFile> {
        match self {
            OpenedFile::Local(file) => file.named_file(),
            _ => None,
        }
    }

    /// Whether the file was there before it was opened to be created, if that made it.
    pub fn existed(&self) -> Option<bool> {
        match self {
            // What is there is not opened.
            #[cfg(feature = "rbd")]
            OpenedFile::Rbd(_) => Some(false),
            #[cfg(feature = "ssh")]
            OpenedFile::Ssh(ssh) => Some(!ssh.was_created()),
            _ => None,
        }
    }

    /// Whether its name still leads to it, as far as that can be told: between the opening and the
    /// locking of a local file, another program may have removed or replaced it.
    pub(crate) fn is_at_its_path(&self) -> bool {
        match self {
            OpenedFile::Local(file) => file.named_file().is_none_or(NamedFile::is_at_its_path),
            OpenedFile::Over(_, below) => below.is_at_its_path(),
            _ => true,
        }
    }

    /// Removes the file, if it is one that can be created, and its name still leads to it. Blocks.
    ///
    /// # Errors
    /// Those of the file system, or of the server.
    pub fn remove(&self) -> std::io::Result<()> {
        match self {
            OpenedFile::Local(file) => file.named_file().map_or(Ok(()), NamedFile::remove),
            #[cfg(feature = "rbd")]
            OpenedFile::Rbd(rbd) => rbd.remove(),
            #[cfg(feature = "ssh")]
            OpenedFile::Ssh(ssh) => ssh.remove(),
            OpenedFile::Over(_, below) => below.remove(),
            _ => Ok(()),
        }
    }

    /// Takes the locks that QEMU and zebu share. An export is locked by its server; files on SSH
    /// servers cannot be locked.
    ///
    /// # Errors
    ///
    /// If another process holds a lock that excludes this one.
    pub fn lock(&self, request: LockRequest) -> Result<()> {
        match self {
            OpenedFile::Local(file) => match file.named_file() {
                Some(file) => file.lock(request),
                None => Ok(()),
            },
            OpenedFile::Over(_, below) => below.lock(request),
            #[cfg(feature = "nbd")]
            OpenedFile::Nbd(_) => Ok(()),
            #[cfg(feature = "http")]
            OpenedFile::Object(_) => Ok(()),
            // A writer has the exclusive lock of Ceph, if the image has that feature.
            #[cfg(feature = "rbd")]
            OpenedFile::Rbd(_) => Ok(()),
            #[cfg(feature = "ssh")]
            OpenedFile::Ssh(_) => Ok(()),
            OpenedFile::Null(_) | OpenedFile::Image(_) => Ok(()),
        }
    }

    /// The identity, equal for two names of one file. None: no other name can lead to it.
    pub(super) fn identity(&self, spec: &FileSpec) -> Result<Option<Identity>> {
        Ok(match (self, &spec.driver) {
            (OpenedFile::Local(file), _) => match file.named_file() {
                Some(file) => {
                    let (device, inode) = file.identity()?;
                    Some(Identity::Local(device, inode))
                }
                None => None,
            },
            #[cfg(feature = "nbd")]
            (OpenedFile::Nbd(_), FileDriver::Nbd(nbd)) => {
                Some(Identity::Nbd(nbd.server.clone(), nbd.export.clone()))
            }
            #[cfg(feature = "http")]
            (OpenedFile::Object(_), _) => Some(Identity::Object(spec.path.display().to_string())),
            #[cfg(feature = "rbd")]
            (OpenedFile::Rbd(_), FileDriver::Rbd(rbd)) => Some(Identity::Rbd(
                rbd.pool.clone(),
                rbd.namespace.clone(),
                rbd.image.clone(),
                rbd.snapshot.clone(),
            )),
            #[cfg(feature = "ssh")]
            (OpenedFile::Ssh(_), FileDriver::Ssh(ssh)) => {
                Some(Identity::Ssh(ssh.host.clone(), ssh.port, ssh.path.clone()))
            }
            (OpenedFile::Over(_, below), FileDriver::Blkdebug(debug)) => {
                below.identity(&debug.image)?
            }
            (OpenedFile::Over(_, below), FileDriver::Image(image)) => {
                let raw = &image.options.raw;
                let part = |i| Identity::Part(Box::new(i), raw.offset, raw.size);
                let whole = raw.offset.unwrap_or(0) == 0 && raw.size.is_none();
                let below = below.identity(&image.file)?;
                match whole {
                    true => below,
                    false => below.map(part),
                }
            }
            (OpenedFile::Image(image), _) => image
                .identity
                .clone()
                .map(|identity| Identity::Inside(Box::new(identity))),
            #[cfg(feature = "nbd")]
            (OpenedFile::Nbd(_), _) => None,
            #[cfg(feature = "rbd")]
            (OpenedFile::Rbd(_), _) => None,
            #[cfg(feature = "ssh")]
            (OpenedFile::Ssh(_), _) => None,
            // With a cache.
            (OpenedFile::Over(_, below), _) => below.identity(spec)?,
            (OpenedFile::Null(_), _) => None,
        })
    }
}

#[cfg(feature = "object-store")]
impl StoreSpec {
    fn place(&self) -> Place {
        Place::Store(self.store_options())
    }

    fn store_options(&self) -> StoreOptions {
        StoreOptions {
            kind: self.kind,
            bucket: self.bucket.clone(),
            key: self.key.clone(),
        }
    }

    /// Begins to write the object. Once `stop` returns true, what waits for the store ends with
    /// `ECANCELED`. Blocks.
    ///
    /// # Errors
    /// [`Error::Refused`] if the store does not allow it.
    pub fn upload(&self, stop: impl Fn() -> bool + Send + Sync + 'static) -> Result<Upload> {
        let options = self.reading.object(self.name());
        Upload::begin(&self.store_options(), &options, Arc::new(stop))
    }
}

#[cfg(feature = "http")]
impl HttpSpec {
    /// Where it is, with the secrets that are needed.
    fn place(&self, objects: &Objects) -> Result<Place> {
        let wrong = |e: &dyn std::fmt::Display| Error::Refused(format!("'{}': {e}", self.url));
        let secret = |id: &Option<String>| id.as_ref().map(|id| objects.secret(id)).transpose();
        let mut url = reqwest::Url::parse(&self.url).map_err(|e| wrong(&e))?;
        let in_url = Some(url.username()).filter(|user| !user.is_empty());
        let user = self.user.clone().or(in_url.map(Into::into));
        url.set_fragment(None);
        url.set_username("").map_err(|()| wrong(&"no host"))?;
        let login = |user: &Option<String>, password: &Option<String>| -> Result<_> {
            let password = secret(password)?;
            Ok(user.clone().map(|user| Login { user, password }))
        };
        Ok(Place::Http(Box::new(HttpOptions {
            url,
            access: Access {
                login: login(&user, &self.password)?,
                token: secret(&self.token)?,
                cookie: match &self.cookie {
                    None => None,
                    Some(HttpCookie::Text(text)) => Some(text.clone()),
                    Some(HttpCookie::Secret(id)) => Some(objects.secret(id)?),
                },
            },
            proxy: login(&self.proxy_user, &self.proxy_password)?,
            verify: self.verify,
            authorities: self.authorities.clone(),
        })))
    }
}

#[cfg(feature = "nbd")]
impl NbdSpec {
    /// The options of the connection.
    fn options(
        &self,
        write: bool,
        cache: crate::storage::CacheMode,
        objects: &Objects,
    ) -> Result<NbdOptions> {
        let credentials = match &self.tls {
            NbdTls::Off => None,
            NbdTls::Named(credentials) => Some(credentials),
            NbdTls::Object(id) => Some(
                objects
                    .tls
                    .get(id)
                    .ok_or_else(|| Error::Refused(format!("No TLS credentials with id '{id}'")))?,
            ),
        };
        let tls = credentials.map(|c| crate::tls::ClientTls::load(c, self.certificate_name()));
        let tls = tls.transpose().map_err(|e| Error::Refused(e.to_string()))?;
        let default = NbdOptions::new(self.server.clone(), self.export.clone());
        Ok(NbdOptions {
            name: self.name().into(),
            context: self.context.clone(),
            tls,
            write,
            cache,
            reconnect_delay: self.reconnect_delay,
            open_timeout: self.open_timeout,
            request_timeout: self.request_timeout.unwrap_or(default.request_timeout),
            connections: self.connections.unwrap_or(default.connections),
            ..default
        })
    }
}

#[cfg(feature = "rbd")]
impl RbdSpec {
    fn options(&self, how: OpenFile, objects: &Objects) -> Result<RbdOptions> {
        if how.write && self.snapshot.is_some() {
            return Err(Error::Refused("a snapshot is only read".into()));
        }
        let key = self.key.as_ref().map(|id| objects.secret(id));
        Ok(RbdOptions {
            pool: self.pool.clone(),
            namespace: self.namespace.clone(),
            image: self.image.clone(),
            snapshot: self.snapshot.clone(),
            conf: self.conf.clone(),
            user: self.user.clone(),
            key: key.transpose()?,
            set: self.set.clone(),
            name: self.name().into(),
            write: how.write,
            create: how.create,
            cache: how.cache,
        })
    }
}

#[cfg(feature = "ssh")]
impl SshSpec {
    fn options(&self, how: OpenFile) -> SshOptions {
        SshOptions {
            server: SshServer {
                host: self.host.clone(),
                port: self.port,
                user: self.user.clone(),
            },
            path: self.path.clone(),
            host_key: self.host_key.clone(),
            name: self.name(),
            write: how.write,
            create: how.create,
            cache: how.cache,
            timeout: self.timeout,
        }
    }
}

/// The error of the operating system, with the name of the file.
fn could_not_open(error: std::io::Error, spec: &FileSpec) -> Error {
    match error.raw_os_error() {
        Some(_) => Error::Open {
            file: spec.name().into(),
            source: Box::new(Error::Io(error)),
        },
        None => Error::Io(error),
    }
}
