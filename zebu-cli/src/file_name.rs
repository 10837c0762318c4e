//! What the name of a file that is written means.

/// The path that a file name means.
pub fn path_of(name: &str) -> Result<&str, String> {
    if let Some(path) = name.strip_prefix("file:") {
        return Ok(path);
    }
    match protocol(name) {
        Some(protocol) => Err(format!("Unknown protocol '{protocol}'")),
        None => Ok(name),
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
