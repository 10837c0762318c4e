//! Images in Ceph clusters: `rbd`.

mod image;
mod names;

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::protocols::shown::object;
use crate::protocols::{
    Driver, FileDriver, FileSpec, Identity, Objects, Opened, OpenedFile, Protocol,
};
use crate::rbd::image::{Rbd, RbdOptions};
use crate::storage::OpenFile;
use crate::{Error, Result};

pub(crate) static DRIVER: Driver = Driver {
    names: &["rbd"],
    is_remote: true,
    parse: |given| {
        let rbd = RbdSpec::take(&mut given.options, given.name)?;
        let path = rbd.name().to_owned();
        Ok(FileSpec::of(path, FileDriver::other(rbd)))
    },
    check_in_image: names::check_name_in_image,
    ..Driver::DEFAULT
};

/// An image in a Ceph cluster (`rbd`).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RbdSpec {
    /// `pool`
    pub pool: String,
    /// `namespace`: that of the pool; empty: the default one.
    pub namespace: String,
    /// `image`
    pub image: String,
    /// `snapshot`, which is only read.
    pub snapshot: Option<String>,
    /// `conf`: the file of the cluster's configuration; None: Ceph's default ones, if they exist.
    pub conf: Option<PathBuf>,
    /// `user`, without `client.`; None: `admin`.
    pub user: Option<String>,
    /// `key-secret`: the id of a secret with the user's key, in base64.
    pub key: Option<String>,
    /// Options of the cluster's configuration: those of a name, `server` and
    /// `auth-client-required`.
    pub set: Vec<(String, String)>,
    /// The name, for messages.
    name: PathBuf,
    /// What QEMU shows of it, as members of a JSON object.
    shown: Vec<(String, String)>,
}

impl RbdSpec {
    /// Its name, for messages.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Whether both are one image, as far as their names tell.
    pub fn is_same(&self, other: &RbdSpec) -> bool {
        (&self.pool, &self.namespace, &self.image) == (&other.pool, &other.namespace, &other.image)
    }

    fn options(&self, how: OpenFile, objects: &Objects) -> Result<RbdOptions> {
        if how.write && self.snapshot.is_some() {
            return Err(Error::Refused(
                "A snapshot cannot be opened for writing: name the image without '@SNAPSHOT'"
                    .into(),
            ));
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

impl Protocol for RbdSpec {
    fn name(&self) -> &'static str {
        "rbd"
    }

    /// QEMU has none.
    fn plain_name(&self, _file: &FileSpec) -> Option<OsString> {
        None
    }

    fn json(&self, _file: &FileSpec) -> String {
        object(self.shown.clone())
    }

    fn name_there<'a>(&'a self, _file: &'a FileSpec) -> &'a OsStr {
        OsStr::new(&self.image)
    }

    fn is_same(&self, other: &FileDriver) -> bool {
        other
            .get::<RbdSpec>()
            .is_some_and(|other| self.is_same(other))
    }

    fn connects(&self) -> bool {
        true
    }

    fn open(&self, _file: &FileSpec, how: OpenFile, objects: &Objects) -> Result<OpenedFile> {
        let rbd = Arc::new(Rbd::open(self.options(how, objects)?)?);
        let (place, snapshot) = ((&self.pool, &self.namespace), &self.snapshot);
        let name = format!("{:?}", ("rbd", place, &self.image, snapshot));
        Ok(OpenedFile {
            own: rbd.clone(),
            identity: Some(Identity::Elsewhere(name)),
            version: Some((rbd.cache_identity().clone(), None)),
            ..OpenedFile::new(rbd)
        })
    }
}

impl Opened for Rbd {
    /// An image that is there is not opened to be created.
    fn existed(&self) -> Option<bool> {
        Some(false)
    }

    fn remove(&self) -> io::Result<()> {
        self.remove()
    }
}
