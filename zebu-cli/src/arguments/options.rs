//! Options that several commands share.

use std::ffi::{OsStr, OsString};

use zebu::storage::CacheMode;

use crate::arguments::{objects, size};
use crate::program::{Context, Failure};

/// How an image is named.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct NameOptions {
    /// Format of the image (default: detected)
    #[arg(short = 'f', long = "format", value_name = "FMT")]
    pub format: Option<String>,
    /// Interpret the name as options (driver=qcow2,file.filename=PATH)
    #[arg(long)]
    pub image_opts: bool,
    /// TLS credentials of NBD clients (tls-creds=ID): tls-creds-x509,id=ID,dir=DIR,endpoint=client
    /// or tls-creds-psk,id=ID,dir=DIR,endpoint=client,username=NAME
    #[arg(long, value_name = "OBJDEF")]
    pub object: Vec<OsString>,
}

/// How the image that a command reads is named and opened.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct SourceOptions {
    #[command(flatten)]
    pub name: NameOptions,
    /// Open the image although another process may write to it
    #[arg(short = 'U', long)]
    pub force_share: bool,
}

impl From<NameOptions> for SourceOptions {
    fn from(name: NameOptions) -> Self {
        SourceOptions {
            name,
            force_share: false,
        }
    }
}

impl SourceOptions {
    /// Refuses invalid combinations, and defines the objects.
    pub fn validate(&self, context: &Context) -> Result<(), Failure> {
        if self.name.image_opts && self.name.format.is_some() {
            return Err(Failure::new(
                "--image-opts and --format are mutually exclusive",
            ));
        }
        self.name
            .object
            .iter()
            .try_for_each(|text| objects::add(context, text))
    }
}

/// What a job tells while it is at work.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct Reporting {
    /// Show progress
    #[arg(short, long)]
    pub progress: bool,
    /// Print errors only
    #[arg(short, long)]
    pub quiet: bool,
}

impl Reporting {
    /// Whether progress is shown.
    pub fn has_progress(self) -> bool {
        self.progress && !self.quiet
    }
}

/// How a report is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    /// Text.
    Human,
    /// JSON.
    Json,
}

impl OutputFormat {
    /// The value of `--output`.
    pub fn parse(value: Option<&str>) -> Result<Self, Failure> {
        match value {
            None | Some("human") => Ok(Self::Human),
            Some("json") => Ok(Self::Json),
            Some(other) => Err(Failure::new(format!(
                "--output expects 'human' or 'json', not '{other}'"
            ))
            .with_hint()),
        }
    }
}

/// The value of `-T`: the cache mode of what is read.
pub fn source_cache(value: Option<&str>) -> Result<CacheMode, Failure> {
    cache(value, "source cache")
}

/// The value of `-t`: the cache mode of what is written.
pub fn target_cache(value: Option<&str>) -> Result<CacheMode, Failure> {
    cache(value, "cache")
}

fn cache(value: Option<&str>, what: &str) -> Result<CacheMode, Failure> {
    let Some(value) = value else {
        return Ok(CacheMode::WriteBack);
    };
    value
        .parse()
        .map_err(|_| Failure::new(format!("Invalid {what} option: {value}")))
}

/// The value of `-r`: bytes a second.
pub fn rate(value: Option<&str>) -> Result<Option<u64>, Failure> {
    let Some(text) = value else { return Ok(None) };
    size::parse_option("rate limit", text).map(Some)
}

/// The only file name of a command that takes one.
pub fn one_name(names: &[OsString]) -> Result<&OsStr, Failure> {
    match names {
        [name] => Ok(name),
        _ => Err(Failure::new("Expecting one image file name").with_hint()),
    }
}
