//! `--metrics`: counters of a server for Prometheus, over HTTP.
//!
//! A thread of its own answers. It reads counters that requests change anyhow, and takes no lock
//! that a request waits for.

mod http;
mod text;

use std::ffi::{OsStr, OsString};
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use zebu_nbd::Listener;

use super::{Exported, failed};
use crate::arguments::metrics_address::MetricsAddress;
use crate::output::Shown;
use crate::program::Failure;

/// Where metrics are asked for.
#[derive(Debug, Args)]
pub struct MetricsArguments {
    /// Serve metrics for Prometheus over HTTP at this address: HOST:PORT or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<OsString>,
}

/// The thread that answers, until this is dropped.
pub struct Metrics {
    stopper: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl MetricsArguments {
    /// Starts to answer, if that is wanted: for `exports` of a server that is called `server`.
    ///
    /// # Errors
    ///
    /// The address is not one, or cannot be listened at.
    pub fn start<E: Exported>(
        &self,
        server: &'static str,
        exports: &[Arc<E>],
    ) -> Result<Option<Metrics>, Failure> {
        let Some(text) = &self.metrics else {
            return Ok(None);
        };
        let listeners = listen(text)?;
        let exports: Vec<Arc<dyn Exported>> =
            exports.iter().map(|export| export.clone() as _).collect();
        let started = SystemTime::now().duration_since(UNIX_EPOCH);
        let source = text::Source {
            server,
            started: started.unwrap_or_default(),
            exports,
        };
        let set_up = || -> std::io::Result<_> {
            let (stop, stopper) = UnixStream::pair()?;
            let thread = std::thread::Builder::new()
                .name("metrics".into())
                .spawn(move || http::serve(&listeners, &stop, || source.text()))?;
            let thread = Some(thread);
            Ok(Some(Metrics { stopper, thread }))
        };
        set_up().map_err(|e| failed("metrics", &e))
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        let _ = self.stopper.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A panic was printed when it happened.
            let _ = thread.join();
        }
    }
}

fn listen(text: &OsStr) -> Result<Vec<Listener>, Failure> {
    let address = MetricsAddress::parse(text.as_bytes());
    let listening = match &address {
        Some(MetricsAddress::Unix(path)) => {
            // A server that runs in the background is elsewhere when it removes it.
            let path = std::path::absolute(Path::new(path));
            path.and_then(|path| Listener::unix(&path))
                .map(|listener| vec![listener])
        }
        Some(MetricsAddress::Tcp(host, port)) => Listener::tcp(host, *port),
        None => {
            let text = text.shown();
            let text = format!("Invalid metrics address '{text}': HOST:PORT or unix:PATH expected");
            return Err(Failure::new(text));
        }
    };
    let listeners = listening.map_err(|e| {
        let (text, why) = (text.shown(), zebu::strerror(&e));
        Failure::new(format!("Failed to serve metrics at {text}: {why}"))
    })?;
    for listener in &listeners {
        tracing::info!("metrics at {listener}");
    }
    Ok(listeners)
}
