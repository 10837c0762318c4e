//! An image, its format and what it is backed by.

use std::ffi::OsStr;

use super::drivers::unknown_driver;
use super::options::{Options, Scalar};
use super::{
    CommonOptions, FileDriver, FileSpec, Format, ImageOptions, MAX_DEPTH, Naming, Qcow2Options,
    RawOptions, no_such_node, refuse_rest, refused,
};
use crate::Result;

/// An image to open, fully described.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpec {
    /// The format; None: it is to be found out from the content, and then
    /// told by [`ImageSpec::set_format`], without which the options of the
    /// format are neither there nor checked.
    pub format: Option<Format>,
    /// It was named by its file driver alone (`driver=file`): a raw image
    /// whose format `info` shows as [`FileDriver::name`].
    pub bare: bool,
    /// Where its bytes are.
    pub file: FileSpec,
    /// What it is backed by.
    pub backing: BackingSpec,
    /// The external data file; None: the one that the header names. Filled in
    /// from there, [`ImageSpec::display_name`] can show it.
    pub data_file: Option<FileSpec>,
    /// How to treat it.
    pub options: ImageOptions,
    /// Options of the format, while it is not known.
    pending: Options,
    /// How many images this one backs, by its options.
    depth: usize,
    /// The format was found out from the content.
    guessed: bool,
}

/// What an image is backed by.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BackingSpec {
    /// What its header says.
    #[default]
    Default,
    /// Nothing, whatever its header says.
    None,
    /// This image, whatever its header says.
    Image(Box<ImageSpec>),
    /// What its header says, with these options.
    Options(BackingOptions),
}

/// Options of a backing file that the image's header names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingOptions {
    options: Options,
    depth: usize,
}

impl BackingOptions {
    /// Describes the image that a header names so (None: it names none), with these
    /// options, which win over `format`. `relative_to` is as for
    /// [`Source::resolve`].
    pub(in crate::block) fn resolve(
        &self,
        name: Option<&OsStr>,
        relative_to: Option<&OsStr>,
        format: Option<Format>,
    ) -> Result<ImageSpec> {
        let naming = Naming { name, relative_to };
        ImageSpec::parse(self.options.clone(), format, naming, self.depth).map_err(refused)
    }
}

impl ImageSpec {
    /// The image in this file, with default options.
    pub fn new(format: Option<Format>, file: FileSpec) -> ImageSpec {
        ImageSpec {
            format,
            bare: false,
            file,
            backing: BackingSpec::Default,
            data_file: None,
            options: ImageOptions::default(),
            pending: Options::default(),
            depth: 0,
            guessed: false,
        }
    }

    /// Whether [`ImageSpec::set_format`] has told the format.
    pub(in crate::block) fn is_guessed(&self) -> bool {
        self.guessed
    }

    /// Tells the format that the content turned out to have. Options that
    /// this format does not have are refused here.
    pub fn set_format(&mut self, format: Format) -> Result<()> {
        self.format = Some(format);
        self.guessed = true;
        let pending = std::mem::take(&mut self.pending);
        self.take_format_options(pending, format).map_err(refused)
    }

    pub(super) fn parse(
        mut options: Options,
        format: Option<Format>,
        naming: Naming<'_>,
        depth: usize,
    ) -> Result<ImageSpec, String> {
        if depth > MAX_DEPTH {
            return Err(format!(
                "More than {MAX_DEPTH} images are nested in the options"
            ));
        }
        if let Some(format) = format
            && options.get("driver").is_none()
        {
            options.set("driver".into(), Scalar::Text(format.name().into()));
        }
        let naming = naming.merge(&mut options)?;
        let mut format = None;
        // QEMU takes a string only for a driver's name; anything else is
        // refused below, as an option that no format has.
        if let Some(Scalar::Text(driver)) = options.get("driver").cloned() {
            let driver = driver.to_string_lossy();
            format = driver.parse().ok();
            match &*driver {
                _ if format.is_some() => {}
                protocol if FileDriver::is_protocol(protocol) => {
                    let file = FileSpec::parse(options, naming, depth)?;
                    let mut spec = ImageSpec::new(Some(Format::RAW), file);
                    spec.bare = true;
                    spec.depth = depth;
                    spec.options.common = spec.file.options.common.clone();
                    return Ok(spec);
                }
                other => return Err(unknown_driver(other)),
            }
            options.take("driver");
        }
        if format.is_none()
            && naming.name.is_none()
            && options.get("file").is_none()
            && !options.has_under("file")
        {
            return Err("Must specify either driver or file".into());
        }
        let file = FileSpec::child(&mut options, "file", naming, depth + 1)?;
        let mut spec = ImageSpec::new(format, file);
        spec.depth = depth;
        spec.options.common = CommonOptions::take(&mut options)?;
        match format {
            Some(format) => spec.take_format_options(options, format)?,
            None => spec.pending = options,
        }
        Ok(spec)
    }

    fn take_format_options(&mut self, mut options: Options, format: Format) -> Result<(), String> {
        match format.name() {
            "raw" => self.options.raw = RawOptions::take(&mut options)?,
            "qcow2" => {
                let backing = options.take_under("backing");
                self.backing = match options.get("backing") {
                    Some(Scalar::Null) => BackingSpec::None,
                    Some(Scalar::Text(name)) if name.is_empty() => BackingSpec::None,
                    Some(Scalar::Text(name)) => {
                        return Err(no_such_node(name));
                    }
                    _ => BackingSpec::Default,
                };
                if self.backing == BackingSpec::None {
                    options.take("backing");
                }
                if !backing.is_empty() {
                    if self.backing == BackingSpec::None {
                        return Err("Option 'backing' cannot be null and have options".into());
                    }
                    let depth = self.depth + 1;
                    self.backing = match backing.get("file.filename") {
                        // The header's name is for those that name no file.
                        None => BackingSpec::Options(BackingOptions {
                            options: backing,
                            depth,
                        }),
                        Some(_) => ImageSpec::parse(backing, None, Naming::default(), depth)
                            .map(|image| BackingSpec::Image(Box::new(image)))
                            .map_err(|e| format!("Could not open backing file: {e}"))?,
                    };
                }
                let data_file = options.take_under("data-file");
                match options.get("data-file") {
                    Some(Scalar::Text(name)) => {
                        return Err(no_such_node(name));
                    }
                    Some(Scalar::Null) => {
                        options.take("data-file");
                    }
                    _ => {}
                }
                if !data_file.is_empty() {
                    self.data_file = Some(FileSpec::parse(
                        data_file,
                        Naming::default(),
                        self.depth + 1,
                    )?);
                }
                if !options.take_under("encrypt").is_empty() {
                    return Err("Encrypted images are not supported by zebu".into());
                }
                self.options.qcow2 = Qcow2Options::take(&mut options)?;
            }
            _ => {}
        }
        let prefix = format!(
            "Block format '{}' does not support the option",
            format.name()
        );
        refuse_rest(&options, &prefix)
    }
}
