//! Object stores: Amazon S3 and what speaks its protocol, Google Cloud Storage, Azure Blob
//! Storage.
//!
//! Credentials, regions and endpoints come from the environment, as the library finds them
//! (docs/remote.md).

use std::error::Error as _;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{DnsFuture, DnsResolver};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    ClientOptions, GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore, RetryConfig,
};

use super::blocks::BLOCK;
use super::failure::{NO_AUTHORITIES, Pause, Trouble};
use super::source::{Body, InMemory, Opened, Source, Task};
use crate::storage::CacheIdentity;
use crate::storage::host::addresses;
use crate::storage::version::Words;

/// Which protocol an object store speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreKind {
    /// Amazon S3 (`s3`).
    S3,
    /// Google Cloud Storage (`gs`).
    Google,
    /// Azure Blob Storage (`az`).
    Azure,
}

impl StoreKind {
    /// The name of the driver, and the scheme of URLs.
    pub fn name(self) -> &'static str {
        match self {
            StoreKind::S3 => "s3",
            StoreKind::Google => "gs",
            StoreKind::Azure => "az",
        }
    }
}

/// An object in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreOptions {
    pub kind: StoreKind,
    /// The bucket or container.
    pub bucket: String,
    /// The name in it.
    pub key: String,
}

/// What a store can do.
pub(super) trait Store: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> Store for T {}

/// Opens an object: asks for its first block.
pub(super) async fn open(options: &StoreOptions, timeout: Duration) -> Result<Opened, Trouble> {
    let (store, place) = connect(options, timeout)?;
    let path = path(&options.key)?;
    let mut source = StoredObject {
        store,
        path,
        meta: None,
    };
    let (meta, first): (_, Box<dyn Body>) = match source.ask(Some(0..BLOCK)).await {
        Ok(found) => (found.meta.clone(), Box::new(Chunks::of(found))),
        Err(trouble) => {
            // An empty object has no first block.
            let options = GetOptions {
                head: true,
                ..GetOptions::default()
            };
            let meta = match source.store.get_opts(&source.path, options).await {
                Ok(found) if found.meta.size == 0 => found.meta,
                _ => return Err(trouble),
            };
            (meta, Box::new(InMemory(None)))
        }
    };
    let length = meta.size;
    let cache_identity = cache_identity(options, place, &meta);
    let modified = meta.last_modified.timestamp().try_into().ok();
    source.meta = Some(meta);
    Ok(Opened {
        source: Box::new(source),
        length,
        has_ranges: true,
        cache_identity,
        modified,
        first,
    })
}

/// The path of this key, which the library would change otherwise: it drops slashes at both ends.
pub(super) fn path(key: &str) -> Result<Path, Trouble> {
    match Path::parse(key) {
        Ok(path) if path.as_ref() == key => Ok(path),
        _ => Err(Trouble::permanent(
            "a key must not begin or end with a slash, nor have an empty part, '.' or '..' between \
             slashes, nor control characters",
        )),
    }
}

/// Which bytes an object of the store `place` has.
fn cache_identity(options: &StoreOptions, place: String, meta: &ObjectMeta) -> CacheIdentity {
    let etag = meta.e_tag.as_ref().filter(|etag| !etag.starts_with("W/"));
    let etag = etag.ok_or("the store tells no strong ETag")?;
    Ok(Words(vec![
        options.kind.name().into(),
        place,
        options.bucket.clone(),
        options.key.clone(),
        etag.clone(),
        meta.last_modified.to_rfc3339(),
        meta.size.to_string(),
    ]))
}

/// The store that an object is in, and what tells it from others of its kind. Asks it nothing.
pub(super) fn connect(
    options: &StoreOptions,
    timeout: Duration,
) -> Result<(Arc<dyn Store>, String), Trouble> {
    super::provide_cryptography();
    let client = ClientOptions::new()
        .with_timeout_disabled()
        .with_connect_timeout(timeout)
        .with_dns_resolver(Arc::new(Resolver));
    // Attempts are counted in one place.
    let retry = RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    };
    let bucket = &options.bucket;
    Ok(match options.kind {
        StoreKind::S3 => {
            let builder = AmazonS3Builder::from_env();
            let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
            let mut endpoint = endpoint
                .iter()
                .filter_map(|key| builder.get_config_value(key));
            let place = endpoint.next().unwrap_or_default();
            let builder = builder.with_bucket_name(bucket).with_retry(retry);
            let store = made(client, &place, |client| {
                let made = builder.clone().with_client_options(client).build()?;
                Ok(Arc::new(made))
            });
            (store?, place)
        }
        StoreKind::Google => {
            let builder = GoogleCloudStorageBuilder::from_env();
            let base = "google_base_url".parse().ok();
            let base = base.and_then(|key| builder.get_config_value(&key));
            let place = base.unwrap_or_default();
            let builder = builder.with_bucket_name(bucket).with_retry(retry);
            let store = made(client, &place, |client| {
                let made = builder.clone().with_client_options(client).build()?;
                Ok(Arc::new(made))
            });
            (store?, place)
        }
        StoreKind::Azure => {
            let builder = MicrosoftAzureBuilder::from_env();
            let endpoint = "azure_storage_endpoint".parse().ok();
            let value = |key| builder.get_config_value(&key).unwrap_or_default();
            let endpoint = endpoint.map(value).unwrap_or_default();
            let account = value(AzureConfigKey::AccountName);
            let emulator = value(AzureConfigKey::UseEmulator);
            let builder = builder.with_container_name(bucket).with_retry(retry);
            let store = made(client, &endpoint, |client| {
                let made = builder.clone().with_client_options(client).build()?;
                Ok(Arc::new(made))
            });
            let place = [endpoint, account, emulator].join(" ");
            (store?, place)
        }
    })
}

/// Makes a store. One with an endpoint of http needs no certificates of authorities.
fn made(
    client: ClientOptions,
    endpoint: &str,
    make: impl Fn(ClientOptions) -> object_store::Result<Arc<dyn Store>>,
) -> Result<Arc<dyn Store>, Trouble> {
    let is_plain = endpoint.starts_with("http://");
    let client = client.with_allow_http(is_plain);
    make(client.clone()).or_else(|error| {
        let without = make(client.with_no_system_certificates(true));
        match (without, is_plain) {
            (Ok(store), true) => Ok(store),
            (Ok(_), false) => Err(Trouble::permanent(NO_AUTHORITIES)),
            // It is not for want of certificates.
            (Err(_), _) => Err(Trouble::permanent(text(&error))),
        }
    })
}

/// Finds the addresses of hosts.
#[derive(Debug)]
struct Resolver;

impl DnsResolver for Resolver {
    fn resolve(&self, host: &str) -> DnsFuture {
        let host = host.to_owned();
        Box::pin(async move {
            let found = tokio::task::spawn_blocking(move || addresses(&host, 0)).await??;
            Ok(found.into_iter().map(|address| address.ip()).collect())
        })
    }
}

/// An object in a store.
#[derive(Debug)]
struct StoredObject {
    store: Arc<dyn Store>,
    path: Path,
    /// None while it is being opened.
    meta: Option<ObjectMeta>,
}

impl StoredObject {
    async fn ask(&self, range: Option<Range<u64>>) -> Result<GetResult, Trouble> {
        let etag = self.meta.as_ref().and_then(|meta| meta.e_tag.clone());
        let options = GetOptions {
            range: range.map(GetRange::Bounded),
            if_match: etag.clone().filter(|etag| !etag.starts_with("W/")),
            ..GetOptions::default()
        };
        let found = self.store.get_opts(&self.path, options).await;
        let found = found.map_err(trouble)?;
        if let Some(meta) = &self.meta
            && (found.meta.size, &found.meta.e_tag, found.meta.last_modified)
                != (meta.size, &meta.e_tag, meta.last_modified)
        {
            return Err(changed());
        }
        Ok(found)
    }
}

impl Source for StoredObject {
    fn get(&self, range: Range<u64>) -> Task<'_, Box<dyn Body>> {
        Box::pin(async move {
            let found = self.ask(Some(range.clone())).await?;
            match found.range.start == range.start && found.range.end <= range.end {
                true => Ok(Box::new(Chunks::of(found)) as Box<dyn Body>),
                false => Err(Trouble::permanent(
                    "the store sends another range than asked for",
                )),
            }
        })
    }

    fn get_all(&self) -> Task<'_, Box<dyn Body>> {
        Box::pin(async move {
            let found = self.ask(None).await?;
            Ok(Box::new(Chunks::of(found)) as Box<dyn Body>)
        })
    }
}

/// Bytes that arrive from a store.
struct Chunks(Pin<Box<dyn Stream<Item = object_store::Result<Bytes>> + Send>>);

impl Chunks {
    fn of(found: GetResult) -> Chunks {
        Chunks(Box::pin(found.into_stream()))
    }
}

impl Body for Chunks {
    fn chunk(&mut self) -> Task<'_, Option<Bytes>> {
        Box::pin(async move {
            let next =
                |context: &mut Context<'_>| -> Poll<_> { self.0.as_mut().poll_next(context) };
            let next = std::future::poll_fn(next).await;
            next.transpose().map_err(trouble)
        })
    }
}

fn changed() -> Trouble {
    Trouble::Changed("The object has changed since it was opened".into())
}

/// The trouble that an error means.
pub(super) fn trouble(error: object_store::Error) -> Trouble {
    use object_store::Error;
    let what = text(&error);
    let permanent = |errno| Trouble::Permanent {
        what: what.clone(),
        errno,
    };
    match error {
        Error::Precondition { .. } | Error::NotModified { .. } => changed(),
        Error::NotFound { .. } => permanent(libc::ENOENT),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => permanent(libc::EACCES),
        Error::Generic { .. } => match status(&what) {
            Some(429 | 503) => Trouble::Transient {
                what,
                pause: Some(Pause { length: None }),
            },
            Some(408 | 500..) | None => Trouble::transient(what),
            Some(404 | 410) => permanent(libc::ENOENT),
            Some(_) => permanent(libc::EIO),
        },
        _ => permanent(libc::EIO),
    }
}

/// The status of an answer, which the library has only in the text of its errors.
fn status(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// An error and its causes that say more.
fn text(error: &object_store::Error) -> String {
    let mut text = error.to_string();
    let mut inner = error.source();
    while let Some(cause) = inner {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        inner = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    //! Guards against another object than the one that was named.
    use super::*;

    #[test]
    fn keys_are_taken_literally_or_refused() {
        let mut keys = vec![String::new()];
        for _ in 0..5 {
            let longer = keys
                .iter()
                .flat_map(|key| ["/", ".", "a", "%2F"].map(|c| format!("{key}{c}")));
            keys = longer.chain(keys.iter().cloned()).collect();
        }
        for key in keys.iter().filter(|key| !key.is_empty()) {
            let is_plain = key.split('/').all(|part| !["", ".", ".."].contains(&part));
            match path(key) {
                Ok(path) => assert!(is_plain && path.as_ref() == key, "{key}"),
                Err(_) => assert!(!is_plain, "{key}"),
            }
        }
    }
}
