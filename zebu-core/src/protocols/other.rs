//! A description of a file by a protocol that is registered.

use std::any::Any;
use std::fmt::{self, Debug};

use super::{FileDriver, Protocol};

/// A [`Protocol`] that can be copied, compared and looked at: what is registered implements only that.
pub trait AnyProtocol: Protocol + Any + Debug + Send + Sync {
    /// A copy.
    fn copied(&self) -> Box<dyn AnyProtocol>;

    /// Whether both are of one type, and equal.
    fn equals(&self, other: &dyn Any) -> bool;
}

impl<T: Protocol + Any + Clone + PartialEq + Debug + Send + Sync> AnyProtocol for T {
    fn copied(&self) -> Box<dyn AnyProtocol> {
        Box::new(self.clone())
    }

    fn equals(&self, other: &dyn Any) -> bool {
        other.downcast_ref() == Some(self)
    }
}

/// A description of a file by a protocol besides those of this machine.
pub struct OtherDriver(Box<dyn AnyProtocol>);

impl OtherDriver {
    pub(super) fn protocol(&self) -> &dyn Protocol {
        &*self.0
    }
}

impl Clone for OtherDriver {
    fn clone(&self) -> Self {
        OtherDriver(self.0.copied())
    }
}

impl PartialEq for OtherDriver {
    fn eq(&self, other: &Self) -> bool {
        self.0.equals(&*other.0)
    }
}

impl Eq for OtherDriver {}

impl Debug for OtherDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FileDriver {
    /// What a registered protocol describes.
    #[doc(hidden)]
    pub fn other(spec: impl AnyProtocol) -> FileDriver {
        FileDriver::Other(OtherDriver(Box::new(spec)))
    }

    /// The description, if it is of this type: `get::<NbdSpec>()`.
    pub fn get<T: 'static>(&self) -> Option<&T> {
        match self {
            FileDriver::Other(OtherDriver(spec)) => {
                let spec: &dyn Any = &**spec;
                spec.downcast_ref()
            }
            _ => None,
        }
    }

    /// The same, to be changed.
    pub fn get_mut<T: 'static>(&mut self) -> Option<&mut T> {
        match self {
            FileDriver::Other(OtherDriver(spec)) => {
                let spec: &mut dyn Any = &mut **spec;
                spec.downcast_mut()
            }
            _ => None,
        }
    }
}
