//! Which bytes a storage on another machine has.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use super::Storage;

/// Identifies an object on another machine and its version: the same words always mean the same
/// bytes. Or why there is no such identity.
pub type CacheIdentity = Result<Words, &'static str>;

/// Words that may have secrets in them, so that they are not printed.
#[derive(Clone)]
pub struct Words(pub Vec<String>);

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Words")
    }
}

/// Tells whether what was read of a storage are the bytes of its version.
pub trait Check: fmt::Debug + Send + Sync {
    /// An error: the object has changed, or it is not known.
    fn check(&self) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send + '_>>;
}

/// A cache on this machine of blocks of storages on other machines.
pub trait RemoteCache: fmt::Debug + Send + Sync {
    /// `below` with the cache over it, to be read. Storages with an equal `version` have the same bytes, for
    /// ever. What is read of `below` counts only if the check afterwards succeeds.
    ///
    /// # Errors
    /// Those of [`Storage::len`].
    #[doc(hidden)]
    fn over_checked(
        &self,
        below: Arc<dyn Storage>,
        version: &[&str],
        check: Option<Arc<dyn Check>>,
    ) -> io::Result<Arc<dyn Storage>>;

    /// Says that the object of this name is not cached.
    #[doc(hidden)]
    fn leave_out(&self, name: &str, why: &str);
}
