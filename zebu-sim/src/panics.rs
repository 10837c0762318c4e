//! Panics of simulations, which are failures.

use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether this thread simulates.
    static SIMULATES: Cell<bool> = const { Cell::new(false) };
    /// The first panic of its simulation: place and message.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps panics of simulations for the report instead of printing them.
fn keep_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !SIMULATES.get() || zebu_testkit::trace() {
                return print(info);
            }
            let place = info.location().map(ToString::to_string);
            let text = info.payload_as_str().unwrap_or("?");
            let text = format!("{text} ({})", place.unwrap_or_default());
            PANIC.with_borrow_mut(|panic| _ = panic.get_or_insert(text));
        }));
    });
}

/// Does it; the error describes a panic, which is not printed.
pub fn quietly<T>(what: impl FnOnce() -> T) -> Result<T, String> {
    keep_panics();
    PANIC.set(None);
    SIMULATES.set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(what));
    SIMULATES.set(false);
    result.map_err(|_| {
        let text = PANIC.take().unwrap_or_default();
        match text.starts_with("hang: ") {
            true => text,
            false => format!("panic: {text}"),
        }
    })
}
