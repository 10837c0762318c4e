//! Structs of options that may gain fields without breaking callers.

/// Declares a struct of options. Outside the crate it is made by `default` or `new` and then
/// changed; each field has a setter of its name, with its documentation.
#[doc(hidden)]
#[macro_export]
macro_rules! options {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$doc:meta])* pub $field:ident: $type:ty,)+
    }) => {
        $(#[$meta])*
        #[non_exhaustive]
        pub struct $name {
            $($(#[$doc])* pub $field: $type,)+
        }

        impl $name {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )+
        }
    };
}
