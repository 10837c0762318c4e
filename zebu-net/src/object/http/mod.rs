//! Web servers: ranges by HTTP/1.1, each in a request of its own.

mod answer;
mod options;

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, COOKIE, HeaderValue, IF_RANGE, LOCATION, RANGE,
};
use reqwest::{Certificate, ClientBuilder, NoProxy, Proxy, Response, StatusCode, Url, redirect};

use super::blocks::BLOCK;
use super::failure::{NO_AUTHORITIES, Trouble};
use super::provide_cryptography;
use super::source::{Body, InMemory, Opened, Source, Task};
use crate::storage::host::{LOCALHOST, localhost};
use crate::storage::version::Words;
use answer::{ContentRange, Identity};
pub(crate) use options::{Access, HttpOptions, Login};

/// Redirects that one request follows.
const REDIRECTS: usize = 10;

/// Opens an object: asks for its first block.
pub(super) async fn open(options: &HttpOptions, timeout: Duration) -> Result<Opened, Trouble> {
    let mut server = Server::new(options, timeout)?;
    let asked = server.ask(Some(0..BLOCK), None).await;
    let response = asked.map_err(|trouble| match trouble {
        // The name may be wrong.
        Failure::NotConnected(what) => Trouble::permanent(what),
        Failure::Other(trouble) => trouble,
    })?;
    let headers = response.headers();
    answer::check_encoding(headers)?;
    let range = ContentRange::of(headers);
    let (length, has_ranges) = match (response.status(), range) {
        (
            StatusCode::PARTIAL_CONTENT,
            Some(ContentRange {
                range: Some((0, _)),
                length: Some(length),
            }),
        ) => (length, true),
        (
            StatusCode::RANGE_NOT_SATISFIABLE,
            Some(ContentRange {
                length: Some(0), ..
            }),
        ) => (0, true),
        (StatusCode::PARTIAL_CONTENT, _) => {
            return Err(Trouble::permanent(
                "the server does not say which range it sends, and the length of the object",
            ));
        }
        (StatusCode::OK, _) => match answer::body_length(headers) {
            Some(length) => (length, false),
            None => {
                return Err(Trouble::permanent(
                    "the server does not say the length of the object: download it, or pass it \
                     through a pipe to 'zebu convert -'",
                ));
            }
        },
        _ => return Err(answer::trouble(&response)),
    };
    let mut identity = Identity::of(headers, Some(length));
    server.place = Some(place(response.url()));
    let mut response = response;
    if has_ranges && length > BLOCK && !identity.tells_version() {
        // A proxy may leave it out of some answers. Nothing was read yet, so that of the next one counts.
        response = server.range(0..BLOCK).await?;
        let total = ContentRange::of(response.headers()).and_then(|range| range.length);
        identity.check(&Identity::of(response.headers(), total), false)?;
        identity = Identity::of(response.headers(), Some(length));
    }
    let version = identity.version(response.headers());
    let cache_identity = version.map(|version| Words([options.words(), version].concat()));
    let modified = identity.modified();
    server.identity = Some(Mutex::new(identity));
    let first: Box<dyn Body> = match length {
        0 => Box::new(InMemory(None)),
        _ => Box::new(Answer(response)),
    };
    Ok(Opened {
        source: Box::new(server),
        length,
        has_ranges,
        cache_identity,
        modified,
        first,
    })
}

/// A server that is asked for one object.
#[derive(Debug)]
struct Server {
    client: reqwest::Client,
    /// Whether this machine has no certificates of authorities, which https needs.
    lacks_authorities: bool,
    url: Url,
    /// Where the last redirect led.
    moved: Mutex<Option<Url>>,
    login: Option<Login>,
    token: Option<HeaderValue>,
    cookie: Option<HeaderValue>,
    /// Of the object; None while it is being opened.
    identity: Option<Mutex<Identity>>,
    /// The place of the first answer.
    place: Option<String>,
    /// Whether requests are sent with a condition.
    conditional: AtomicBool,
}

/// Why there is no answer.
enum Failure {
    NotConnected(String),
    Other(Trouble),
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Self {
        Failure::Other(trouble)
    }
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotConnected(what) => Trouble::transient(what),
            Failure::Other(trouble) => trouble,
        }
    }
}

impl Server {
    fn new(options: &HttpOptions, timeout: Duration) -> Result<Server, Trouble> {
        let cookie = options.access.cookie.as_ref();
        let token = options.access.token.as_ref();
        let token = token.map(|token| hidden(&format!("Bearer {}", token.reveal())));
        let (client, lacks_authorities) = client(options, timeout)?;
        Ok(Server {
            client,
            lacks_authorities,
            url: options.url.clone(),
            moved: Mutex::default(),
            login: options.access.login.clone(),
            token: token.transpose()?,
            cookie: cookie.map(|cookie| hidden(cookie.reveal())).transpose()?,
            identity: None,
            place: None,
            conditional: AtomicBool::new(true),
        })
    }

    /// The answer to a request for a range or for everything, after redirects.
    async fn ask(
        &self,
        range: Option<Range<u64>>,
        condition: Option<&str>,
    ) -> Result<Response, Failure> {
        let moved = crate::lock(&self.moved).clone();
        let was_moved = moved.is_some();
        let mut url = moved.unwrap_or_else(|| self.url.clone());
        for _ in 0..=REDIRECTS {
            let response = self.ask_at(&url, range.as_ref(), condition).await?;
            let status = response.status();
            if let Some(next) = redirected(&response, &url)? {
                url = next;
                continue;
            }
            let is_gone = [
                StatusCode::UNAUTHORIZED,
                StatusCode::FORBIDDEN,
                StatusCode::NOT_FOUND,
                StatusCode::GONE,
            ];
            if was_moved && is_gone.contains(&status) {
                // A redirect may hold for a time only.
                *crate::lock(&self.moved) = None;
                return Err(Trouble::RetryNow(format!("the server answers {status}")).into());
            }
            if url != self.url {
                *crate::lock(&self.moved) = Some(url);
            }
            return Ok(response);
        }
        let what = format!("more than {REDIRECTS} redirects");
        Err(Trouble::permanent(what).into())
    }

    /// The answer of one server.
    async fn ask_at(
        &self,
        url: &Url,
        range: Option<&Range<u64>>,
        condition: Option<&str>,
    ) -> Result<Response, Failure> {
        if self.lacks_authorities && url.scheme() == "https" {
            let what = format!("{NO_AUTHORITIES}; the option 'cacert' names a file with some");
            return Err(Trouble::permanent(what).into());
        }
        let mut request = self.client.get(url.clone());
        request = request.header(ACCEPT_ENCODING, "identity");
        if let Some(range) = range {
            request = request.header(RANGE, format!("bytes={}-{}", range.start, range.end - 1));
        }
        if let Some(condition) = condition {
            request = request.header(IF_RANGE, condition);
        }
        if url.origin() == self.url.origin() {
            for (name, value) in [(AUTHORIZATION, &self.token), (COOKIE, &self.cookie)] {
                if let Some(value) = value {
                    request = request.header(name, value);
                }
            }
            if let (None, Some(login)) = (&self.token, &self.login) {
                let password = login.password.as_ref().map(|password| password.reveal());
                request = request.basic_auth(&login.user, password);
            }
        }
        request
            .send()
            .await
            .map_err(|error| match error.is_connect() {
                true => Failure::NotConnected(cause(&error)),
                false => Trouble::transient(cause(&error)).into(),
            })
    }

    /// Whether an answer is of the object that was opened; see [`Identity::check_and_adopt`].
    fn check_identity(
        &self,
        response: &Response,
        length: Option<u64>,
        has_met_condition: bool,
    ) -> Result<(), Trouble> {
        let Some(identity) = &self.identity else {
            return Ok(());
        };
        let mut identity = crate::lock(identity);
        let other = Identity::of(response.headers(), length);
        identity.check_and_adopt(&other, has_met_condition)?;
        match &self.place {
            Some(first) if !identity.tells_version() && *first != place(response.url()) => {
                Err(Trouble::Changed(
                    "The object may have changed since it was opened: the server redirects to another \
                     place, and tells no version (an ETag or a date)"
                        .into(),
                ))
            }
            _ => Ok(()),
        }
    }

    async fn range(&self, range: Range<u64>) -> Result<Response, Trouble> {
        let conditional = self.conditional.load(Ordering::Relaxed);
        let condition = self.identity.as_ref().and_then(|identity| {
            let identity = crate::lock(identity);
            identity.condition().map(str::to_owned)
        });
        let condition = condition.as_deref().filter(|_| conditional);
        let response = self.ask(Some(range.clone()), condition).await?;
        let headers = response.headers();
        match (response.status(), ContentRange::of(headers)) {
            (StatusCode::PARTIAL_CONTENT, Some(found)) => {
                self.check_identity(&response, found.length, condition.is_some())?;
                answer::check_encoding(headers)?;
                match found.range {
                    Some((first, last)) if first == range.start && last < range.end => Ok(response),
                    _ => Err(Trouble::permanent(
                        "the server sends another range than asked for",
                    )),
                }
            }
            (StatusCode::PARTIAL_CONTENT, None) => Err(Trouble::permanent(
                "the server does not say which range it sends",
            )),
            (StatusCode::OK, _) => {
                self.check_identity(&response, answer::body_length(headers), false)?;
                // Some servers do not understand the condition.
                match condition.is_some() {
                    true => {
                        self.conditional.store(false, Ordering::Relaxed);
                        Err(Trouble::RetryNow("the server sends everything".into()))
                    }
                    false => Err(Trouble::permanent(
                        "the server does not send ranges any more",
                    )),
                }
            }
            (StatusCode::RANGE_NOT_SATISFIABLE, _) => Err(Trouble::Changed(
                "The object has changed since it was opened (it is shorter)".into(),
            )),
            _ => Err(answer::trouble(&response)),
        }
    }

    async fn all(&self) -> Result<Response, Trouble> {
        let response = self.ask(None, None).await?;
        let headers = response.headers();
        match response.status() {
            StatusCode::OK => {
                self.check_identity(&response, answer::body_length(headers), false)?;
                answer::check_encoding(headers)?;
                Ok(response)
            }
            _ => Err(answer::trouble(&response)),
        }
    }
}

impl Source for Server {
    fn get(&self, range: Range<u64>) -> Task<'_, Box<dyn Body>> {
        Box::pin(async move {
            let response = self.range(range).await?;
            Ok(Box::new(Answer(response)) as Box<dyn Body>)
        })
    }

    fn get_all(&self) -> Task<'_, Box<dyn Body>> {
        Box::pin(async move {
            let response = self.all().await?;
            Ok(Box::new(Answer(response)) as Box<dyn Body>)
        })
    }
}

/// An answer with the bytes that were asked for.
struct Answer(Response);

impl Body for Answer {
    fn chunk(&mut self) -> Task<'_, Option<Bytes>> {
        Box::pin(async move {
            let chunk = self.0.chunk().await;
            chunk.map_err(|error| Trouble::transient(cause(&error)))
        })
    }
}

/// What tells the place of an object from others: a URL without what is signed for a time.
fn place(url: &Url) -> String {
    format!("{}{}", url.origin().ascii_serialization(), url.path())
}

/// Where a redirect leads, if the answer is one.
fn redirected(response: &Response, from: &Url) -> Result<Option<Url>, Trouble> {
    let status = response.status();
    let is_redirect = matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308);
    let Some(place) = answer::text(response.headers(), LOCATION).filter(|_| is_redirect) else {
        return Ok(None);
    };
    let refused = |why: &str| Trouble::permanent(format!("the server redirects {why}"));
    let mut url = from.join(place).map_err(|_| refused("to no URL"))?;
    match (from.scheme(), url.scheme()) {
        (_, "https") | ("http", "http") => {}
        ("https", "http") => return Err(refused("from https to http")),
        _ => return Err(refused("to another protocol")),
    }
    url.set_fragment(None);
    // A user that a server names is not sent to another one.
    let cleared = url.set_username("").and_then(|()| url.set_password(None));
    cleared.map_err(|()| refused("to no host"))?;
    Ok(Some(url))
}

/// The client of a server, and whether there are no certificates of authorities.
fn client(options: &HttpOptions, timeout: Duration) -> Result<(reqwest::Client, bool), Trouble> {
    let failed = |e: reqwest::Error| Trouble::permanent(cause(&e));
    let client = builder(options, timeout)?.build().map_err(failed);
    if client.is_ok() || options.authorities.is_some() {
        return Ok((client?, false));
    }
    let plain = builder(options, timeout)?.tls_certs_only([]).build();
    Ok((plain.map_err(failed)?, true))
}

fn builder(options: &HttpOptions, timeout: Duration) -> Result<ClientBuilder, Trouble> {
    provide_cryptography();
    let mut builder = reqwest::Client::builder()
        .user_agent(concat!("zebu/", env!("CARGO_PKG_VERSION")))
        .redirect(redirect::Policy::none())
        .referer(false)
        .connect_timeout(timeout)
        // Requests of HTTP/2 share the window of one connection.
        .http1_only()
        // A container may have no /etc/hosts.
        .resolve_to_addrs(LOCALHOST, &localhost(0))
        .tls_danger_accept_invalid_certs(!options.verify);
    if let Some(path) = &options.authorities {
        let unusable = |why: String| Trouble::permanent(format!("{}: {why}", path.display()));
        let pem = crate::storage::file::read_regular(path)
            .map_err(|e| unusable(crate::strerror(&e).to_string()))?;
        let certificates = Certificate::from_pem_bundle(&pem).map_err(|e| unusable(cause(&e)))?;
        if certificates.is_empty() {
            return Err(unusable("no certificate in it".into()));
        }
        builder = builder.tls_certs_only(certificates);
    }
    if let Some(login) = &options.proxy {
        for proxy in proxies(login)? {
            builder = builder.proxy(proxy);
        }
    }
    Ok(builder)
}

/// The proxies of the environment, with a user. (Those without are found by the library.)
fn proxies(login: &Login) -> Result<Vec<Proxy>, Trouble> {
    type Make = fn(String) -> reqwest::Result<Proxy>;
    // As in curl, `HTTP_PROXY` does not count: in a CGI program it is a header of the request.
    let kinds: [(&[&str], Make); 3] = [
        (&["http_proxy"], Proxy::http),
        (&["https_proxy", "HTTPS_PROXY"], Proxy::https),
        (&["all_proxy", "ALL_PROXY"], Proxy::all),
    ];
    let mut proxies = Vec::new();
    for (names, make) in kinds {
        let found = names.iter().find_map(|name| std::env::var(name).ok());
        if let Some(url) = found.filter(|url| !url.is_empty()) {
            let proxy = make(url).map_err(|e| Trouble::permanent(cause(&e)))?;
            let password = login.password.as_ref().map_or("", |p| p.reveal());
            proxies.push(
                proxy
                    .basic_auth(&login.user, password)
                    .no_proxy(NoProxy::from_env()),
            );
        }
    }
    Ok(proxies)
}

/// A header that is not printed.
fn hidden(text: &str) -> Result<HeaderValue, Trouble> {
    let mut value = HeaderValue::from_str(text)
        .map_err(|_| Trouble::permanent("a secret has characters that no header may have"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// The innermost error, without a URL and its secrets.
fn cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut inner = error;
    while let Some(next) = inner.source() {
        inner = next;
    }
    match inner.downcast_ref::<std::io::Error>() {
        Some(error) => crate::strerror(error).to_string(),
        None => match inner.downcast_ref::<reqwest::Error>() {
            // Its text has the URL.
            Some(error) if error.is_timeout() => "the time to connect is over".into(),
            Some(_) => "the request failed".into(),
            None => inner.to_string(),
        },
    }
}
