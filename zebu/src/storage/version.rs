//! Which bytes a storage on another machine has.

use std::fmt;
use std::io;
use std::pin::Pin;

/// Identifies an object on another machine and its version: the same words always mean the same
/// bytes. Or why there is no such identity.
pub(crate) type CacheIdentity = Result<Words, &'static str>;

/// Words that may have secrets in them, so that they are not printed.
#[derive(Clone)]
#[cfg_attr(not(feature = "cache"), allow(dead_code))]
pub(crate) struct Words(pub Vec<String>);

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Words")
    }
}

/// Tells whether what was read of a storage are the bytes of its version.
#[cfg_attr(not(feature = "cache"), allow(dead_code))]
pub(crate) trait Check: fmt::Debug + Send + Sync {
    /// An error: the object has changed, or it is not known.
    fn check(&self) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send + '_>>;
}
