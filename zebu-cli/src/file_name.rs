//! What the name of a file that is written means.

use zebu::block::FileSpec;

/// The file, or the export of a server, that a name means. What does not exist
/// yet is described by no options, so `json:` is refused.
pub fn file_of(name: &str) -> Result<FileSpec, String> {
    if let Some(path) = name.strip_prefix("file:") {
        return Ok(FileSpec::new(path));
    }
    match protocol(name) {
        Some(protocol) if protocol.starts_with("nbd") => {
            FileSpec::resolve(name, None).map_err(|e| e.to_string())
        }
        Some(protocol) => Err(format!("Unknown protocol '{protocol}'")),
        None => Ok(FileSpec::new(name)),
    }
}

/// What a name starts with, up to a colon, if that is before any slash.
fn protocol(name: &str) -> Option<&str> {
    let end = name.find([':', '/'])?;
    name[end..].starts_with(':').then(|| &name[..end])
}

/// A name that an image at `image` stores, as it is from here.
pub fn beside(name: &str, image: &str) -> String {
    let folder = image.strip_prefix("file:").unwrap_or(image).rfind('/');
    match folder {
        Some(slash) if !name.starts_with('/') && protocol(name).is_none() => {
            let image = image.strip_prefix("file:").unwrap_or(image);
            format!("{}{name}", &image[..=slash])
        }
        _ => name.to_string(),
    }
}
